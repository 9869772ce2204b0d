"""What tests that start commands share."""

import contextlib
import io
import os
import random
import re
import socket
import time

from lockstep import cli

# A task for a script or a command: a line fitted to 64 rows.
LINE_TASK = """
import torch
import lockstep

class Line(lockstep.Task):
    items_per_sample = 1
    reduction = "sum"

    def model(self):
        return torch.nn.Linear(4, 1)

    def dataset(self, split):
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))

    def loss(self, model, batch):
        rows, wanted = batch
        return ((model(rows) - wanted) ** 2).sum()
"""

# The third task of `srun -N2 -n3`, as Slurm 22.05 sets its variables.
SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def environment(**more):
    """That of a process which no launcher started."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_ERROR_FILE": "", **more}


def free_port():
    """One that nobody listens at, below those that the system gives to connections, which might take it meanwhile."""
    drawn = random.SystemRandom()
    while True:
        port = drawn.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def await_listener(port, process):
    """Wait until a process on loopback listens at `port`, or ends.

    On loopback torch's rendezvous takes any node for the one that serves it; so node 0 must be there first.
    """
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.05)


def inspected(folder):
    """The fingerprint that `lockstep checkpoint inspect` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.dispatch(["checkpoint", "inspect", str(folder)]) == 0
    return re.search(r"^fingerprint (sha256:[0-9a-f]{64})$", said.getvalue(), re.MULTILINE)[1]
