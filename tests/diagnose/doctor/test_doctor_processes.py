"""Real processes with wrong variables, taken ports and missing peers."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time

import pytest
import warm
from shell import environment, free_port

from lockstep import cli
from lockstep.errors import ConfigError

HOST = platform.node()


def started(rank, port, *flags, size=2, **more):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"} | more
    return subprocess.Popen(
        [warm.python(), "-m", "lockstep", "doctor", *flags],
        env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process):
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_a_rank_that_was_not_started():
    code, out, error = ended(started(0, free_port(), "--wait", "1"))
    assert code == 3
    assert f"FAIL  meeting         rank 1 of 2 did not connect within 1 s; connected hosts: {HOST}; " in out
    assert error == "lockstep: error: doctor: FAIL in meeting; see the remedy on each FAIL line\n"


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out, _ = ended(started(0, port, "--wait", "1"))
    assert code == 3
    taken = f"MASTER_PORT {port} on 127.0.0.1 is in use by another process"
    assert re.search(rf"FAIL  meeting +.*{taken} \(\S+, process {os.getpid()}\); choose another", out), out


def test_a_master_that_is_not_there():
    port = free_port()
    code, out, error = ended(started(1, port, "--wait", "1"))
    assert (code, out) == (3, "")
    where = f"rank 1 on {HOST} cannot reach rank 0 at 127.0.0.1:{port}: connection refused"
    assert where in error
    assert "check MASTER_ADDR and MASTER_PORT" in error


def test_a_rank_that_came_twice_and_one_too_many():
    port = free_port()
    others = [started(rank, port, "--wait", "8", size=size) for rank, size in ((1, 3), (1, 3), (3, 4))]
    time.sleep(0.5)  # these look for rank 0 by then, or while it waits for rank 2
    code, out, _ = ended(started(0, port, "--wait", "6", size=3))
    others = list(map(ended, others))
    assert code == 3
    assert re.search(r"FAIL  meeting +rank 1 connected twice: process \d+ on \S+ and process \d+ on", out), out
    assert f"rank 3 on {HOST} connected too: WORLD_SIZE is 4 there, 3 here; " in out
    said = [error for _, _, error in others]
    assert sum("has RANK 1, and so does another process" in error for error in said) == 1


def test_a_wrong_rank_does_not_take_anothers_place():
    port = free_port()
    code, out, _ = ended(started(2, port, "--wait", "1"))
    assert code == 3
    assert re.search(
        rf"FAIL  variables +process \d+ on {HOST}: RANK is 2, but WORLD_SIZE is 2: ranks are 0 to 1; ", out
    )


@pytest.mark.parametrize("how", ["launch", "torchrun"])
def test_two_ranks_that_are_well(how, tmp_path):
    doctor = ["doctor", "--json", "--save-dir", str(tmp_path)]
    command = [sys.executable, "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", *doctor]
    if how == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lockstep"]
        command = [warm.python(), "-m", *torchrun, *doctor]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    levels = {each["check"]: each["level"] for each in found["findings"]}
    del levels["cores"]  # it warns of the load of whatever else this machine does
    assert set(levels.values()) <= {"ok", "skip"}, found["findings"]
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert found["ranks"][1]["host"] == HOST
    assert found["seconds"] < 60
    assert "sum" in {each["check"] for each in found["findings"]}


def test_a_fault_ends_the_launcher_with_3():
    command = [warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", "doctor"]
    broken = environment(GLOO_SOCKET_IFNAME="eth77")
    done = subprocess.run(command, env=broken, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    line = "FAIL  settings        all ranks: GLOO_SOCKET_IFNAME is 'eth77': no such interface; "
    assert line in done.stdout
    assert "FAIL in settings" in done.stderr


def test_what_the_flags_refuse():
    with pytest.raises(ConfigError, match="--wait is 90: it must be from 1 to 50 seconds"):
        cli.dispatch(["doctor", "--wait", "90"])
    with pytest.raises(ConfigError, match="unknown flag --jsn"):
        cli.dispatch(["doctor", "--jsn"])
    assert cli.dispatch(["doctor", "--help"]) == 0
