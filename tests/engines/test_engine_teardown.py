"""A process that used an engine ends by itself, with 0: no abort, no hang. The common helper hides that: it kills."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

SCRIPT = """
import sys, warnings, torch
from lockstep import World, engine
world = World.join(device="cpu", timeout=120)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
made = engine(sys.argv[1], model, lambda held: torch.optim.AdamW(held.parameters()), world, clip=1.0)
for _ in range(3):
    for last in (False, True):
        with made.accumulate(last):
            made.backward(made.model(torch.randn(4, 8)).square().sum())
    made.step(1.0)
del made, model
world.leave()
"""


def ends(name):
    """The exit codes of two processes that use the engine and leave."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT, name]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.DEVNULL)
        for rank in "01"
    ]
    try:
        return [process.wait(200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del store  # after the ranks: it is their meeting point


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_twenty_runs_end_cleanly(name):
    assert [ends(name) for _ in range(20)] == [[0, 0]] * 20
