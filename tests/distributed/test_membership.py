"""A run that outlives the loss of a rank, while none is lost: as many collectives, and the same bits."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run
from small_runs import config, mark
from torch._C._distributed_c10d import TCPStore
from toys import Ragged

import lockstep
from lockstep.distributed import exchange
from lockstep.distributed.membership import Member
from lockstep.training.recovery import regroup as recovery

CALLS = ("all_reduce", "all_gather", "broadcast", "all_to_all_single", "barrier", "reduce", "gather", "new_group")


def _counted(world, folder, port, exact):
    """Collectives of a whole run, and its mark: with nobody who replaces ranks, and with somebody."""
    world.leave()
    exchange.RAGGED_SECONDS = exchange.STEADY_SECONDS = 0.0  # in every step, however long it takes
    counts, before = [], {name: getattr(dist, name) for name in CALLS}
    for name in ("plain", "member"):
        counts.append(dict.fromkeys(CALLS, 0))

        def counting(call, found=counts[-1]):
            def counted(*args, **kwargs):
                found[call] += 1
                return before[call](*args, **kwargs)

            return counted

        for call in CALLS:
            setattr(dist, call, counting(call))
        if name == "member":
            os.environ["LOCKSTEP_MEETING"] = f"127.0.0.1:{port}"
        recovery._STARTED.clear()
        task = Ragged(dtype=torch.float64)
        settings = config(folder, experiment_name=name, eval_freq=4, exact=exact, device="cpu", engine="ddp")
        session = lockstep.Run(settings, task)
        session()
        assert (session._status.ranks.member is not None) == (name == "member")
    return counts, mark(Path(folder), "plain") == mark(Path(folder), "member")


def test_healthy_path_has_the_same_collectives_and_bits(tmp_path):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for exact in (True, False):
        for counts, same in run(_counted, 2, str(tmp_path / str(exact)), store.port, exact):
            assert counts[0] == counts[1]
            assert same
    for rank in "01":
        assert store.get(f"lockstep/members//ready/{rank}").decode() == "the run is at its end"


def test_a_wish_is_seen_by_those_of_its_generation_alone():
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    meeting = {"LOCKSTEP_MEETING": f"127.0.0.1:{store.port}", "RANK": "1"}
    member = Member.of_this_process(meeting)
    other = member.connection()
    assert not member.has_candidate(other)
    store.set("lockstep/members//wish/0", "1")
    assert store.get("lockstep/members//wish/0")  # after what was set before
    assert member.has_candidate(other)
    member.generation = 1
    assert not member.has_candidate(other)
    member.report_ready("", "mine")
    assert (member.experiment(), store.get("lockstep/members//ready/1")) == ("mine", b"yes")
