"""Two ranks, one of which is odd: the line names it, on rank 0."""

import os
import platform
import socket
import time
from types import SimpleNamespace

import torch
from doctor_places import LAUNCHED, on_rank, place, silent, wrong
from ranks import run

from lockstep.config.schema import Config
from lockstep.diagnose.doctor import differences, examine, group, machine, network
from lockstep.diagnose.doctor import network as speed
from lockstep.diagnose.doctor.finding import Check, CheckContext, CheckResult

SPEED = ("speed",)


def lines_of(function, *args, timeout=60.0):
    """What rank 0 said, as one text, and the checks that failed there."""
    lines, failed = run(function, 2, *args, timeout=timeout)[0]
    return "\n".join(lines), failed


def healthy(world, config, names):
    return on_rank(world, config, names)


def test_nothing_is_wrong_with_two_ranks(tmp_path):
    names = ("names", "versions", "same settings", "shared folder", "tcp", "group", "sum", "bandwidth")
    told, failed = lines_of(healthy, {"save_dir": str(tmp_path)}, names)
    assert failed == []
    assert "warn" not in told
    assert "gloo: 3 on all ranks" in told
    assert "2 ranks on node-0, node-1" in told
    assert list(tmp_path.iterdir()) == []


def odd(world, fault, folder):
    """Rank 1 has `fault`."""
    config, names = {"save_dir": folder}, ()
    if world.rank == 1:
        config, names = PLANTS[fault](config)
    names = CHECKED[fault]
    return on_rank(world, config, names)


def another_torch(config):
    torch.__version__ = "2.11.0"
    return config, ()


def another_python(config):
    platform.python_version = lambda: "3.12.1"
    return config, ()


def another_code(config):
    differences._digest = lambda paths: "0" * 16
    return config, ()


def another_config(config):
    return config | {"lr": 0.5}, ()


def another_setting(config):
    os.environ["NCCL_ALGO"] = "Ring"
    return config, ()


def another_clock(config):
    real = time.time
    network.time.time = lambda: real() + 30.0
    return config, ()


def another_sum(config):
    group.own = lambda rank: [7.0, 4.0, 2.0]
    return config, ()


def nobody_listens(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = server.getsockname()
    network._listen = lambda address: SimpleNamespace(getsockname=lambda: name)
    network._close = lambda server: None
    return config, ()


def another_folder(config):
    os.mkdir(config["save_dir"] + "/elsewhere")
    return {"save_dir": config["save_dir"] + "/elsewhere"}, ()


PLANTS = {
    "torch": another_torch,
    "python": another_python,
    "code": another_code,
    "configuration": another_config,
    "setting": another_setting,
    "clock": another_clock,
    "sum": another_sum,
    "port": nobody_listens,
    "folder": another_folder,
}
CHECKED = {
    "torch": ("versions",),
    "python": ("versions",),
    "code": ("versions",),
    "configuration": ("versions",),
    "setting": ("same settings",),
    "clock": ("tcp",),
    "sum": ("sum",),
    "port": ("tcp",),
    "folder": ("shared folder",),
}


def test_another_torch(tmp_path):
    told, failed = lines_of(odd, "torch", str(tmp_path))
    assert failed == ["versions"]
    assert "FAIL  versions        rank 1 on node-1 has torch 2.11.0, the others 2.13" in told
    assert "install the same torch on all nodes" in told


def test_another_python(tmp_path):
    told, failed = lines_of(odd, "python", str(tmp_path))
    assert failed == ["versions"]
    assert "rank 1 on node-1 has python 3.12.1, the others 3.1" in told


def test_other_code(tmp_path):
    told, _ = lines_of(odd, "code", str(tmp_path))
    assert "rank 1 on node-1: lockstep's code differs from the other ranks'; install the same commit everywhere" in told


def test_another_configuration(tmp_path):
    told, _ = lines_of(odd, "configuration", str(tmp_path))
    assert "rank 1 on node-1: configuration differs from the other ranks'; start all ranks with the same flags" in told


def test_a_variable_on_one_rank_alone(tmp_path):
    told, failed = lines_of(odd, "setting", str(tmp_path))
    assert failed == []
    assert "warn  same settings   NCCL_ALGO is 'Ring' on rank 1 on node-1, but not set on the others; set it" in told


def test_another_clock(tmp_path):
    told, _ = lines_of(odd, "clock", str(tmp_path))
    assert "warn  clocks          the clock of rank 1 on node-1 is 30.0 s ahead of that of rank 0; " in told


def test_a_wrong_sum(tmp_path):
    told, failed = lines_of(odd, "sum", str(tmp_path))
    assert failed == ["sum"]
    assert "gloo: the sum over all ranks is 8 on rank 0 on node-0, expected 3" in told
    assert "received 7 from rank 1 on node-1, expected 2" in told


def test_a_port_that_is_blocked(tmp_path):
    told, failed = lines_of(odd, "port", str(tmp_path))
    assert failed == ["tcp"]
    assert "rank 0 on node-0 cannot reach rank 1 on node-1 at 127.0.0.1:" in told
    assert "connection refused: nothing listens there; open all TCP ports" in told


def test_a_folder_that_is_not_shared(tmp_path):
    told, failed = lines_of(odd, "folder", str(tmp_path))
    assert failed == ["shared folder"]
    assert "rank 1 on node-1 does not see rank 0's file" in told


def own_folders(world, folder):
    place = os.path.join(folder, str(world.rank))
    os.mkdir(place)
    os.chdir(place)
    return on_rank(world, {"save_dir": f"file://{folder}/store", "checkpoint": {"local_dir": "."}}, ("shared folder",))


def test_nodes_without_a_shared_folder_that_upload_to_a_url(tmp_path):
    told, failed = lines_of(own_folders, str(tmp_path))
    assert not failed
    assert "rank 1 on node-1 has a local folder of its own" in told


def slow_at(world, names):
    """Both wait for a device that is not there, rank 1 for longer: what else runs on this machine cannot hide that."""
    seconds = 0.05 if world.rank else 0.001
    speed.multiplying = lambda device: lambda: time.sleep(seconds)
    return on_rank(world, {}, names)


def test_a_slow_device():
    told, failed = lines_of(slow_at, SPEED)
    assert failed == []
    assert "warn  speed           rank 1 on node-1 is slow at multiplying: " in told
    assert "--shares auto" in told


def stuck(world):
    def sums(here):
        if world.rank == 1:
            time.sleep(60)
        return CheckResult()

    checks = (Check("sum", sums, 1.0, together=True, stuck="look at the network"),)
    checks += tuple(check for check in examine.CHECKS if check.name == "bandwidth")
    here = CheckContext(Config(), False, world.rank, world.rank, 2, 2, host=f"node-{world.rank}", environ=os.environ)
    here.world, here.given = world, True
    lines = []
    examine.examine(here, lines.append, checks)
    return [str(line) for line in lines], []


def test_check_that_hangs_on_one_rank_is_its_line_only():
    told, _ = lines_of(stuck)
    assert "FAIL  sum             rank 1 on node-1: timed out after 1 s" in told
    assert "look at the network" in told
    assert "skip  bandwidth       a check above failed" in told


def silent_one(world):
    if world.rank == 1:
        time.sleep(4.0)
        return [], []
    return on_rank(world, {}, ("settings", "sum"), patience=1.0)


def test_a_rank_that_does_not_come():
    told, failed = lines_of(silent_one)
    assert failed == ["meeting"]
    assert "FAIL  meeting         rank 1 of 2 did not connect within 1 s; connected hosts: node-0; " in told
    assert "skip  sum             not all ranks are connected" in told


def test_who_is_slower():
    assert speed.slower({0: [1.0, 1.1, 1.0], 1: [1.0, 1.0, 1.2]}) == []
    assert speed.slower({0: [1.0, 1.1, 1.0], 1: [1.3, 1.4, 1.3]}) == [1]
    assert speed.slower({0: [1.0, 1.1, 1.6, 1.7, 1.8], 1: [1.5, 1.5, 1.5, 1.6]}) == []  # within the other's own spread
    assert speed.slower({0: [1.0] * 3, 1: [1.05] * 3, 2: [1.0] * 3, 3: [2.0] * 3}) == [3]
    assert speed.slower({0: [1.0] * 3}) == []


def test_bandwidth_beside_the_link():
    nodes = place(LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}, hosts=["a", "b"])
    facts = [{"gloo": {"4096": 1e-4, str(1 << 24): 1.4}, "link": 1.25e9, "interface": "eth0"} for _ in range(2)]
    wrong(group.judge_bandwidth(facts, nodes), "bandwidth", "11.4 MiB/s at 16 MiB; the link of rank 0 on a", "ethtool")
    for each in facts:
        each["gloo"][str(1 << 24)] = 0.03
    silent(group.judge_bandwidth(facts, nodes))
    assert machine.judge_shared_folder([{"sees": True, "folder": "/x"}] * 2, nodes)[0].level == "ok"
