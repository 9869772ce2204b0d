"""Which device this is, at which clocks, and what it can do: python bench/device/machine.py [--toy]"""

import json
import shutil
import subprocess

import torch
from common import figure, product_rate, read_arguments, timed, versions

ASKED = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,memory.total"


def main():
    arguments = read_arguments()
    device = arguments.device
    print(json.dumps({"versions": versions(device)}))
    smi = shutil.which("nvidia-smi")
    if smi and device.type == "cuda":
        said = subprocess.run([smi, f"--query-gpu={ASKED}", "--format=csv,noheader"], capture_output=True, text=True)
        found = [part.strip() for part in said.stdout.splitlines()[0].split(",")]
        print(json.dumps({"nvidia_smi": dict(zip(ASKED.split(","), found, strict=False))}))
    size = 8192 if device.type == "cuda" else 128
    figure(f"bf16 product of {size} x {size}", product_rate(device) / 1e12, "TFLOP/s")
    big = torch.empty(1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    figure("copy on the device", 2 * big.numel() / (timed(lambda: other.copy_(big), device) * 1e-3) / 1e12, "TB/s")
    cudnn = torch.backends.cudnn.version() or 0
    figure("cuDNN above 9.15.0, from which torch prefers its attention on Hopper", int(cudnn > 91500), "0 or 1")


if __name__ == "__main__":
    main()
