"""About how long a step takes: each part at a share of the device's peak that well-made trainings reach.

    seconds = step_time(estimate, device, world_size, exchanged)

A roofline (Williams et al., "Roofline", CACM 52(4), 2009): products by their operations or their bytes, whichever takes
longer; all else by its bytes. The exchange by latency and bandwidth, a ring's 2 (n - 1) / n of the bytes for a sum of
all, half of that for a gather; what the last backward hides of it is left out. It ranks configurations; it is no
measurement.
"""

import dataclasses

from lockstep.diagnose.plan.devices import Device
from lockstep.diagnose.plan.estimate import Estimate

__all__ = ["Times", "step_time"]

_PRODUCTS = 0.55  # of the peak, in large products of a training; PaLM's MFU is 0.46, with all else (arXiv 2204.02311)
_MEMORY = 0.75  # of the bandwidth, in a kernel that only moves
_FUSED = 0.5  # bytes that kernels move which a compiler has joined, against eager ones
_LINK = 0.7
_NODE = 8  # devices
_LATENCY = 20e-6  # seconds a collective and doubling of the ranks
_CALL = 5e-6  # seconds a kernel takes to be handed out by eager code


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: forwards and backwards; update: of the optimizer; exposed: exchanges that nothing hides.
    """

    compute: float
    update: float
    exposed: float

    @property
    def step(self) -> float:
        return self.compute + self.update + self.exposed


def step_time(found: Estimate, device: Device, size: int, split: tuple[float, float]) -> Times:
    """Of a step of this estimate.

    Args:
        split: bytes that a rank gathers for each micro-batch, and bytes that all sum once a step.
    """
    config = found.config
    half = config.precision not in ("float32", "float64")
    peak = device.half if half else device.single * (0.5 if config.precision == "float64" else 1.0)
    compute = found.work["compute"]
    products = compute.flops / (peak * _PRODUCTS)
    moving = compute.moved * (1.0 if device.host else _FUSED) / (device.bandwidth * _MEMORY)
    handed = 0.0 if device.host else compute.calls * _CALL * _FUSED
    one = max(products + 0.3 * moving, moving, handed)
    update = found.work["update"].moved / (device.bandwidth * _MEMORY)
    gathered, summed = split
    exposed = 0.0
    if size > 1:
        rate = _LINK * (device.link if size <= _NODE else device.network)
        wait = _LATENCY * (size - 1).bit_length()
        ring = (size - 1) / size
        per_micro = max(0.0, gathered * ring / rate - 0.8 * one) + (wait if gathered else 0.0)
        last = 2 * summed * ring / rate
        exposed = found.slots * per_micro + max(0.05 * last, last - 0.6 * one) + wait
    return Times(found.slots * one, update, exposed)
