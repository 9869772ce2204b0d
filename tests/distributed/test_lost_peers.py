"""Which errors are a lost peer: by where they were raised and by the links, whatever their text."""

import functools
import itertools
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed import membership
from lockstep.distributed.membership import is_lost_peer, translate_errors
from lockstep.distributed.world import World
from lockstep.engines.memory import explain_out_of_memory
from lockstep.errors import LockstepError

WORDS = ("connection", "Connection closed by peer", "socket", "Socket Timeout", "timed out", "NCCL", "gloo", "reset")
WORDS = (*WORDS, "Broken pipe", "peer")
FORMS = ("{}", "{}: expected 8 channels", "no {} here", "Skip{}", "[pair.cc:553] {} [127.0.0.1]:40", "{}\nmore")
FORMS = (*FORMS, "ncclSystemError: {}", "rank 0 lost the other ranks: {}", "{} (28)", "DistBackendError: {}")
TEXTS = [form.format(word) for form, word in itertools.product(FORMS, WORDS)]


class Backward(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


class Layer(nn.Module):
    """Raises in the forward."""

    def forward(self, error):
        raise error


def in_body(error):
    raise error


def in_forward(error):
    nn.Sequential(Layer())(error)


def in_backward(error):
    Backward.apply(torch.ones(2, requires_grad=True), error).sum().backward()


def in_hook(error):
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: in_body(error))
    x.sum().backward()


@pytest.mark.parametrize("raising", [in_body, in_forward, in_backward, in_hook])
@pytest.mark.parametrize("kind", [RuntimeError, OSError, dist.DistBackendError, ConnectionResetError, ValueError])
def test_error_of_the_program_is_its_own_whatever_its_text(monkeypatch, raising, kind):
    monkeypatch.setattr(membership, "_has_closed_link", lambda: True)
    assert len(set(TEXTS)) == 100
    for text in TEXTS:
        error = kind(text)
        with pytest.raises(kind) as caught, translate_errors():
            raising(error)
        assert caught.value is error


def native_in_backward():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    total = y.sum()
    y.add_(1)
    total.backward()


def wrong_argument():
    dist.all_gather([torch.ones(2)], torch.ones(2, dtype=torch.int32))


COLLECTIVES = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "functional": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum().item(),
    "control": None,
}


def judged(world):
    """What each rank makes of errors, before and after rank 1 leaves its groups."""
    held = [DistributedDataParallel(nn.Linear(2, 2))]
    held[0](torch.ones(1, 2)).sum().backward()
    found = {}
    for raising in (native_in_backward, wrong_argument):
        found[raising.__name__] = kind_of(raising)
    late = world.new_group()
    late._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.3))
    if world.rank != 1:
        found["late"] = kind_of(lambda: dist.all_reduce(torch.ones(2), group=late))
    world.barrier()
    dist.destroy_process_group(late)
    if world.rank != 1:
        found["reducer"] = kind_of(lambda: held[0](torch.ones(1, 2)).sum().backward())
        calls = COLLECTIVES | {"control": functools.partial(dist.barrier, group=world.control)}
        found |= {name: kind_of(call) for name, call in calls.items()}
    held.clear()  # before its group is left
    world.control = None
    dist.destroy_process_group()
    return found


def kind_of(call):
    try:
        with translate_errors():
            call()
    except Exception as error:
        return type(error).__name__


def test_torchs_collective_with_a_lost_peer_raises_a_typed_error():
    first, left, third = run(judged, 3)
    own = {"native_in_backward": "RuntimeError", "wrong_argument": left["wrong_argument"]}
    assert left == own
    assert left["wrong_argument"] in ("RuntimeError", "ValueError")
    lost = dict.fromkeys(("late", "reducer", *COLLECTIVES), "PeerError")
    assert first == third == own | lost


def test_only_torchs_own_allocator_is_out_of_host_memory():
    text = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"
    with pytest.raises(RuntimeError, match="alloc_cpu"), explain_out_of_memory(None, World()):
        raise RuntimeError(text)
    with pytest.raises(LockstepError, match="ran out of memory"), explain_out_of_memory(None, World()):
        torch.empty(1 << 50)


@pytest.mark.parametrize(("code", "ends"), [(0, 1), (None, 1), (5, 5), (3, 1), (75, 1), ("no device", 1)])
def test_a_call_of_exit_is_an_error_with_its_place(code, ends):
    with pytest.raises(LockstepError) as caught, translate_errors():
        raise SystemExit(code)
    assert caught.value.exit_code == ends
    assert "test_lost_peers.py" in str(caught.value)


def test_a_generator_exit_is_an_error_unless_it_closes_the_loop():
    with pytest.raises(LockstepError) as caught, translate_errors():
        raise GeneratorExit
    assert "test_lost_peers.py" in str(caught.value)

    def steps():
        with translate_errors():
            yield

    ours = {"__name__": "lockstep.steps", "translate_errors": translate_errors}
    loop = types.FunctionType(steps.__code__, ours, closure=steps.__closure__)()
    next(loop)
    loop.close()  # raises nothing


def test_where_no_group_is_no_peer_can_be_lost():
    with pytest.raises(RuntimeError) as caught:
        native_in_backward()
    assert not is_lost_peer(caught.value)
