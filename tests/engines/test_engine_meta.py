"""What fsdp holds of a model while it is made, and models that `--engine.meta-init` cannot make."""

import gc
import re
import warnings

import pytest
import torch
from ranks import run
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.config.engine_options import EngineOptions
from lockstep.engines.fsdp import apply as sharding
from lockstep.engines.registry import engine, model_init
from lockstep.errors import LockstepError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Untold(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale = torch.ones(2)


def _untold(world):
    options = EngineOptions(meta_init=True)
    with model_init("fsdp", world, options).where:
        model = Untold()
    with pytest.raises(LockstepError) as caught:
        engine("fsdp", model, sgd, world, options=options)
    return str(caught.value), caught.value.exit_code


def test_plain_tensor_left_empty_by_meta_init_is_named():
    for line, code in run(_untold, 2):
        assert re.search("--engine.meta-init.* scale", line)
        assert code == 2


class Deep(torch.nn.Module):
    """Six blocks of one size and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def _held():
    """Bytes of all plain float tensors of this process, each piece of memory once: the mesh's ranks are integers."""
    found = {}
    for thing in gc.get_objects():
        plain = issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor)
        if plain and not thing.is_meta and thing.is_floating_point():
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(found.values())


def _made(world):
    """The most bytes that this rank holds whenever a unit was sharded, or gathered, while the engine is made."""
    options = EngineOptions(meta_init=True)
    with model_init("fsdp", world, options).where:
        model = Deep()
    before, seen = _held(), []

    def watched(function):
        def call(*given, **named):
            result = function(*given, **named)
            seen.append(_held() - before)
            return result

        return call

    sharding.fully_shard = watched(sharding.fully_shard)
    FSDPModule.unshard = watched(FSDPModule.unshard)
    warnings.filterwarnings("ignore")  # of deprecated things that the collector knows
    engine("fsdp", model, sgd, world, blocks=list(model.blocks), options=options)
    return len(seen), max(seen)


def test_a_model_is_never_whole_while_it_is_made_block_by_block():
    unit, whole = 4 * (32 * 32 + 32), sum(p.nbytes for p in Deep().parameters())
    for count, most in run(_made, 4)[1:]:  # rank 0 has drawn it
        assert count == 14
        assert most <= whole / 4 + 2 * unit


def _gathered(world, meta_init):
    """The most bytes of whole parameters on this rank at one time after sharding; the names that are watched, and those
    that one backward missed, and two would have."""
    options = EngineOptions(meta_init=meta_init)
    with model_init("fsdp", world, options).where:
        model = Deep()
    most, unshard = [0], FSDPModule.unshard

    def watched(self, async_op=False):
        handle = unshard(self, async_op)
        most[0] = max(most[0], sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))
        return handle

    FSDPModule.unshard = watched
    made = engine("fsdp", model, sgd, world, blocks=list(model.blocks), options=options)
    FSDPModule.unshard = unshard
    assert all(isinstance(p, DTensor) for p in model.parameters())
    made.backward(made.model(torch.ones(2, 32)).square().sum())
    return most[0], made.inner._usage.names, made.inner._usage.find_missed(1), made.inner._usage.find_missed(2)


@pytest.mark.parametrize("meta_init", [False, True])
def test_while_hooks_are_set_one_block_is_whole_at_a_time(meta_init):
    unit = 4 * (32 * 32 + 32)
    for most, names, missed, more in run(_gathered, 4, meta_init):
        assert 0 < most <= 2 * unit
        assert sorted(names) == sorted(name for name, _ in Deep().named_parameters())
        assert (missed, more) == ([], names)  # each is counted once
