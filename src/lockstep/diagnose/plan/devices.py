"""Look up a device's memory and speed by name, from the vendors' data sheets.

    device = device_of("h100-80")
    device = device_of("h100-80", memory="70GB")        # less of it is free
    device = device_of("cpu")                           # the host that this runs on

Memory is the driver's usable memory in GiB, as `torch.cuda.get_device_properties` reports it. Peaks are dense (without
sparsity). A link's bandwidth is for one direction: half of the data sheets' total.
"""

import dataclasses
import difflib
import os
import re

from lockstep.errors import ConfigError

__all__ = [
    "DEVICES",
    "DeviceSpec",
    "device_of",
]

_GIB = 1 << 30
# Bytes of CUDA, its libraries and NCCL before the first tensor: 0.5 to 1 GiB.
_CONTEXT = 1.0 * _GIB
# The caching allocator's reserve beyond the tensors; an estimate, since no GPU has been measured.
_FRAGMENTS = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device of a world of equal devices.

    Attributes:
        name: as requested.
        memory: bytes in all.
        own: bytes in use before the first tensor.
        fragments: additional share of the tensors' bytes that the allocator uses.
        half, single: operations a second of products in bf16 (fp16 without bf16), and in float32.
        bandwidth: bytes a second of its memory.
        link, network: bytes a second from device to device within a node of 8, and between nodes.
        bf16: it multiplies bfloat16, so a run's defaults are those of a recent device.
        host: it is a CPU, whose memory also has the batches.
        source: of the figures.
    """

    name: str
    memory: float
    own: float
    fragments: float
    half: float
    single: float
    bandwidth: float
    link: float
    network: float
    bf16: bool
    host: bool
    source: str

    @property
    def room(self) -> float:
        """Bytes for tensors and fragments."""
        return self.memory - self.own


def _gpu(
    name: str,
    memory: float,
    peaks: tuple[float, float],
    bandwidths: tuple[float, float, float],
    source: str,
    bf16: bool = True,
) -> DeviceSpec:
    """Describe a GPU.

    Args:
        memory: in GiB.
        peaks: TFLOP/s in half and in single precision.
        bandwidths: GB/s of memory, link and network.
    """
    half, single = (1e12 * peak for peak in peaks)
    memory_rate, link, network = (1e9 * rate for rate in bandwidths)
    room = memory * _GIB
    return DeviceSpec(name, room, _CONTEXT, _FRAGMENTS, half, single, memory_rate, link, network, bf16, False, source)


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
DEVICES = {
    device.name: device
    for device in (
        _gpu("h100-80", 79.1, (989, 67), (3350, 450, 50), f"{_NVIDIA}/h100/"),
        _gpu("h200-141", 139.8, (989, 67), (4800, 450, 50), f"{_NVIDIA}/h200/"),
        _gpu("b200-192", 178.0, (2250, 75), (7700, 900, 50), f"{_NVIDIA}/dgx-b200/"),
        _gpu("a100-80", 79.2, (312, 19.5), (2039, 300, 25), f"{_NVIDIA}/a100/"),
        _gpu("a100-40", 39.4, (312, 19.5), (1555, 300, 25), _AMPERE),
        _gpu("l40s-48", 44.4, (362, 91.6), (864, 32, 12.5), f"{_NVIDIA}/l40s/"),
        _gpu("l4-24", 22.0, (121, 30.3), (300, 32, 12.5), f"{_NVIDIA}/l4/"),
        _gpu(
            *("rtx4090-24", 23.5, (165, 82.6), (1008, 32, 3)),
            source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        _gpu("v100-32", 31.7, (125, 15.7), (900, 150, 12.5), f"{_NVIDIA}/v100/", bf16=False),
        _gpu("t4-16", 14.6, (65, 8.1), (320, 16, 3), f"{_NVIDIA}/tesla-t4/", bf16=False),
        _gpu(
            *("mi300x-192", 191.5, (1307, 163), (5300, 448, 50)),
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            # On torch's ROCm build the defaults of a new CUDA device are off.
            bf16=False,
        ),
    )
}

# float32 operations a second of a core with AVX2 in torch's products; an estimate.
_CORE = 2e10
# Bytes a second of a host's memory; an estimate.
_HOST_RATE = 2e10


def device_of(name: str, memory: str = "") -> DeviceSpec:
    """Return the device of that name.

    Args:
        memory: its memory, such as "70GB" or "64GiB"; "": all.

    Raises:
        ConfigError: no such device, or no such amount.
    """
    plain = name.lower()
    if plain == "cpu":
        spec = _host()
    elif plain in DEVICES:
        spec = DEVICES[plain]
    else:
        near = difflib.get_close_matches(plain, DEVICES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? Choose from" if near else "choose from"
        raise ConfigError(
            f"--device '{name}' is unknown: {hint} cpu, {', '.join(DEVICES)}; for another device give the nearest and "
            "its --memory"
        )
    if not memory:
        return spec
    room = bytes_of(memory)
    if room <= spec.own:
        raise ConfigError(f"--memory {memory}: CUDA and its libraries take {spec.own / _GIB:g} GiB of it; give more")
    return dataclasses.replace(spec, memory=room, name=f"{plain} of {memory}")


def bytes_of(text: str) -> float:
    """Parse "80GB" (10^9 bytes each) or "80GiB" (2^30), also of MB, MiB, TB and TiB.

    Raises:
        ConfigError: any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT])(i?)B", text.strip())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"--memory '{text}' is not an amount of memory: write 80GB or 79.1GiB")
    power = "KMGT".index(match[2].upper()) + 1
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** power


def _host() -> DeviceSpec:
    """Describe this machine, as one device.

    Resources that its ranks share are not divided.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = os.cpu_count() or 1
    peak = _CORE * cores
    return DeviceSpec("cpu", float(pages), 0.0, 0.0, peak, peak, _HOST_RATE, 1e9, 1e9, False, True, "this machine")
