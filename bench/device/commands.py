"""The commands as a user types them, on this device: python bench/device/commands.py [--toy]

A small language model on a text file: train, evaluate, generate, launch, profile, plan, doctor. A figure is a command's
exit code, with its last line.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import figure, read_arguments

# Each chain runs by itself, a command after the other.
CHAINS = (
    ("doctor", "plan --device {device} {task}", "profile {task} --experiment-name p"),
    (
        "train {task} --experiment-name a --stop-at 30",
        "train {task} --experiment-name a",
        "evaluate {folder}/a",
        "generate {folder}/a --max-new-tokens 20",
    ),
    ("launch --nproc-per-node 1 -- train {task} --experiment-name b --engine ddp",),
)
TASK = (
    "--dataset-name {folder}/text.txt --data.cache {folder}/cache --save-dir {folder} --batch-size 16 --seq-len 64 "
    "--data.vocab-size 300 --max-steps 60 --ckpt-freq 20 --eval-freq 30"
)


def chain(arguments, folder, commands):
    """Runs some commands, and prints what each came to."""
    device = "cpu" if arguments.toy else "h100-80"
    for command in commands:
        task = TASK.format(folder=folder)
        given = shlex.split(command.format(device=device, task=task, folder=folder))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *given], capture_output=True, text=True, env=os.environ
        )
        lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [""]
        if done.returncode:
            print(f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", flush=True)
        name = f"lockstep {command.split('{')[0].strip()}"
        more = {"seconds": time.monotonic() - began, "last": lines[-1][:160]}
        figure(f"{name}: exit code", done.returncode, "", aim=0, better="less", **more)


def main():
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(len(CHAINS)) as pool:
        text = "".join(f"def function_{i}(x):\n    return x + {i * i}\n" for i in range(2000))
        Path(folder, "text.txt").write_text(text, encoding="utf-8")
        for each in [pool.submit(chain, arguments, folder, commands) for commands in CHAINS]:
            each.result()


if __name__ == "__main__":
    main()
