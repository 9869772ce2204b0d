"""Which device a rank takes where it sees all of them or its own alone, and that no two ranks of a host share one."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run

from lockstep.distributed import devices
from lockstep.distributed import world as worlds
from lockstep.distributed.devices import check_unshared, identity, local_device
from lockstep.distributed.world import World
from lockstep.errors import ConfigError


def show(monkeypatch, count, uuid="GPU-0", bus=1, nccl=(2, 30, 1)):
    """A process to which the driver shows `count` devices."""
    found = SimpleNamespace(name="H100", uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)


@pytest.mark.parametrize(
    ("count", "local_rank", "local_size", "index"),
    [(8, 3, 8, 3), (8, 3, 1, 3), (1, 0, 1, 0), (1, 3, 8, 0), (1, 3, 1, 0), (2, 1, 2, 1)],
)
def test_device_index_is_the_local_rank_or_0_without_another(monkeypatch, count, local_rank, local_size, index):
    show(monkeypatch, count)
    assert local_device("auto", local_rank, local_size) == torch.device("cuda", index)
    assert local_device("cpu", local_rank, local_size) == torch.device("cpu")


@pytest.mark.parametrize(("local_rank", "local_size"), [(0, 4), (3, 4), (2, 1)])
def test_fewer_devices_than_ranks_are_refused_on_every_rank(monkeypatch, local_rank, local_size):
    show(monkeypatch, 2)
    with pytest.raises(ConfigError, match="at most 2"):
        local_device("auto", local_rank, local_size)


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch):
    show(monkeypatch, 0)
    assert local_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda"):
        local_device("cuda", 0)


def test_one_uuid_on_one_host_is_refused_with_both_ranks():
    check_unshared([["a", "GPU-0", "H100"], ["a", "GPU-1", "H100"], ["b", "GPU-0", "H100"], None, None])
    with pytest.raises(ConfigError, match=r"(?s)ranks 1 and 3 .*GPU-1.*CUDA_VISIBLE_DEVICES"):
        check_unshared([["a", "0", "H100"], ["a", "1", "H100, GPU-1"], ["b", "1", "H100"], ["a", "1", "H100, GPU-1"]])


def test_devices_are_told_apart_as_the_present_nccl_does(monkeypatch):
    """MIG instances of one GPU have UUIDs of their own and one place on the bus, which older NCCL compares."""
    pairs = {}
    for version in ((2, 28, 9), (2, 30, 1)):
        for uuid in ("MIG-0", "MIG-1"):
            show(monkeypatch, 1, uuid, nccl=version)
            pairs.setdefault(version, []).append(identity(torch.device("cuda", 0)))
    check_unshared(pairs[2, 30, 1])
    with pytest.raises(ConfigError, match="MIG"):
        check_unshared(pairs[2, 28, 9])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert identity(torch.device("cuda", 0)) is None


def test_processes_share_a_host_unless_name_or_boot_differs(monkeypatch, tmp_path):
    show(monkeypatch, 1)
    hosts = []
    for name, boot in (("a", "1"), ("a", "1"), ("a", "2"), ("b", "1")):
        (tmp_path / "boot_id").write_text(f"{boot}\n")
        monkeypatch.setattr(devices, "_BOOT", tmp_path / "boot_id")
        monkeypatch.setattr(devices.platform, "node", lambda name=name: name)
        hosts.append(identity(torch.device("cuda", 0))[0])
    assert hosts[0] == hosts[1]
    assert len(set(hosts)) == 3
    monkeypatch.setenv("NCCL_HOSTID", "mine")  # which NCCL heeds too
    assert identity(torch.device("cuda", 0))[0] == "mine"


def _joined(world, uuids, nccl, guest=False):
    """What `World.join` gives a process that is shown the device `uuids[rank]` alone; the group is gloo's."""
    world.leave()
    rank, found = world.rank, []
    with pytest.MonkeyPatch.context() as patch:
        show(patch, 1, uuids[rank])
        made, config = dist.init_process_group, dist.get_backend_config
        patch.setattr(
            dist, "init_process_group", lambda backend, **given: found.append(backend) or made("gloo", **given)
        )
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl" if nccl else config(group))
        if guest:
            store = dist.PrefixStore("guest", worlds.meeting_store(rank, world.size, timedelta(seconds=30)))
            made("gloo", store=store, rank=rank, world_size=world.size)
        try:
            joined = World.join(timeout=30.0)
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append((str(joined.device), joined.gather(rank)))
            joined.leave()
        left = not dist.is_initialized()
        if guest:
            dist.destroy_process_group()
    again = World.join("cpu", 30.0)  # the process is as it was
    found += [left, again.gather(rank)]
    again.leave()
    return found


def test_each_rank_takes_the_one_device_that_it_is_shown():
    assert run(_joined, 2, ["GPU-0", "GPU-1"], True) == [["cpu:gloo,cuda:nccl", ("cuda:0", [0, 1]), True, [0, 1]]] * 2


def test_shared_device_is_refused_on_both_and_groups_are_left():
    one, other = run(_joined, 2, ["GPU-7", "GPU-7"], True)
    assert one == other
    _, line, left, again = one
    assert "\n" not in line
    assert all(word in line for word in ("ranks 0 and 1", "GPU-7", "CUDA_VISIBLE_DEVICES"))
    assert (left, again) == (True, [0, 1])


def test_ranks_that_exchange_by_gloo_alone_may_share_a_device():
    """A default group of the caller's; and it is left to them."""
    assert run(_joined, 2, ["GPU-7", "GPU-7"], False, True) == [[("cuda:0", [0, 1]), False, [0, 1]]] * 2


def test_nccl_guest_is_refused_on_a_shared_device():
    for line, left, again in run(_joined, 2, ["GPU-7", "GPU-7"], True, True):
        assert "ranks 0 and 1" in line
        assert (left, again) == (False, [0, 1])


class Backend:
    def __init__(self, name):
        self._name, self.seconds = name, 0.0

    def name(self):
        return self._name

    def _set_default_timeout(self, timeout):
        self.seconds = timeout.total_seconds()


def test_nccls_watchdog_waits_longer_and_gloo_does_not():
    """It aborts the process; before that the line that names the missing rank is to be out."""
    backends = {"cpu": Backend("gloo"), "cuda": Backend("nccl")}
    group = SimpleNamespace(_get_backend=lambda device: backends[device.type])
    worlds._let_wait(group, 600.0)
    assert backends["cpu"].seconds == 600.0
    assert backends["cuda"].seconds >= 630.0
    backends["cuda"] = Backend("gloo")
    worlds._let_wait(group, 600.0)
    assert backends["cuda"].seconds == 600.0


def _timeouts(world):
    """Of the default group's and of the control group's gloo, in the first world and in one after a loss."""

    def seconds(group):
        return [group._get_backend(torch.device(kind)).options._timeout.total_seconds() for kind in ("cpu", "cuda")]

    waits = []
    let_wait = worlds._let_wait
    worlds._let_wait = lambda group, seconds: waits.append(seconds) or let_wait(group, seconds)
    found = [seconds(dist.group.WORLD), seconds(world.control)]
    world.drop_groups([])
    after = world.regroup(world.rank, world.size, 1)
    found += [seconds(dist.group.WORLD), seconds(after.control)]
    after.leave()
    return found, waits


def test_after_a_loss_too_both_have_the_time_that_was_asked_for():
    for found, waits in run(_timeouts, 2, timeout=40.0):
        assert found == [[40.0, 40.0]] * 4
        assert waits == [40.0, 40.0]  # the default group, which alone may be NCCL's, and the control group


def _first_waits(world):
    world.leave()
    waits = []
    let_wait = worlds._let_wait
    worlds._let_wait = lambda group, seconds: waits.append(seconds) or let_wait(group, seconds)
    World.join("cpu", 30.0).leave()
    return waits


def test_the_first_default_group_has_its_times_set_too():
    assert run(_first_waits, 2) == [[30.0], [30.0]]


def test_replacing_process_takes_the_one_device_too(monkeypatch):
    show(monkeypatch, 1)
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setitem(os.environ, name, value)
    assert World.alone("auto", 30.0).device == torch.device("cuda", 0)
