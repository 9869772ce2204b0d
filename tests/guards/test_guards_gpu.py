"""On a GPU: nothing waits, nothing that is not finite is applied, and what is saved is what was."""

import math

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.engines.registry import engine
from lockstep.guards import desync
from lockstep.guards.nonfinite import DeferredReader
from lockstep.records import StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch warns of its own sync debug mode when that is first set
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made(fused=True):
    model = nn.Linear(3, 2).cuda()
    world = World(device=torch.device("cuda", 0))
    return engine("single", model, lambda held: torch.optim.AdamW(held.parameters(), fused=fused), world, clip=1.0)


@pytest.mark.parametrize("fused", [True, False])
def test_not_finite_gradient_moves_nothing_on_the_device(fused):
    it = made(fused)
    data = torch.ones(1, 3, device="cuda")
    it.backward(it.model(data).sum())
    it.step(1.0)
    before = {name: tensor.clone() for name, tensor in it.state_dict().items()}
    it.backward(it.model(data).sum() * math.nan)
    result = it.step(1.0)
    assert not torch.isfinite(result.norm)
    assert all(torch.equal(before[name], tensor) for name, tensor in it.state_dict().items())
    it.backward(it.model(data).sum())
    it.step(1.0)
    assert not torch.equal(before["model/weight"], it.state_dict()["model/weight"])


def test_a_step_waits_for_nothing():
    it, data = made(), torch.ones(1, 3, device="cuda")
    reader = DeferredReader(torch.device("cuda"))
    for number in range(3):
        if number == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            it.backward(it.model(data).sum())
            it.step(1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        record = StepRecord(number, 1, [torch.ones((), device="cuda")], torch.ones((), device="cuda"), 1.0)
        assert [step.record.step for step in reader.add(record, [])] == ([number - 1] if number else [])
    assert [step.norm for step in reader.rest()] == [1.0]


def test_what_is_saved_is_what_was(tmp_path):
    tensor = torch.ones(1 << 22, device="cuda")
    saver = checkpoint.Saver(World(device=torch.device("cuda", 0)))
    saver.begin(
        {"model/a": tensor},
        lambda share, world: checkpoint.write_share(tmp_path, 1, share, {}, world, engine="t") and None,
    )
    tensor.mul_(2)
    saver.settle()
    found = {"model/a": torch.empty(1 << 22)}
    checkpoint.load(checkpoint.path_of(tmp_path, 1), found, None)
    assert torch.equal(found["model/a"], torch.ones(1 << 22))


def test_the_devices_fingerprint_sees_a_bit_and_a_place():
    one = torch.randn(1000, device="cuda")
    other = one.clone()
    assert desync.fingerprints({"a": one}) == desync.fingerprints({"a": other})
    other.view(torch.int32)[500] ^= 1
    assert desync.fingerprints({"a": one}) != desync.fingerprints({"a": other})
    assert desync.fingerprints({"a": one.flip(0)}) != desync.fingerprints({"a": one})


def audited(world, folder):
    """What is trained where every micro-batch is computed twice, and where none is."""
    found = []
    for share in (1.0, 0.0):
        given = config(folder, experiment_name=str(share), precision="bf16", exact=True, guards={"audit": share})
        result = lockstep.train(given, Ragged(dropout=0.1, dtype=torch.float32), world)
        found.append(checkpoint.fingerprint(checkpoint.newest(result.folder, say=print)))
    return found


def test_a_micro_batch_that_is_computed_again_has_the_same_bits(tmp_path):
    one, other = run(audited, 1, tmp_path, device="cuda")[0]
    assert one == other
