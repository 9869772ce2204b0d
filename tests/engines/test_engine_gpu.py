"""Every engine on a GPU, in a world of one: it trains what `single` trains there. make test-gpu."""

import importlib.util

import pytest
import torch
from ranks import run
from support import close, each
from toys import Ragged

from lockstep.engines.blocks import repeated_layers
from lockstep.optim.groups import Rules
from lockstep.optim.optimizers import muon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # other versions of torch and its CUDA libraries have warnings of their own
]

SIZE = {"size": 8, "micro": 2}
VARIANTS = [
    ("ddp", {}),
    ("ddp", {"static_graph": True}),
    ("ddp", {"compression": "bf16", "precision": "bf16"}),
    ("zero", {}),
    ("fsdp", {}),
    ("fsdp", {"sharding": "grad-op", "prefetch": 1}),
    ("fsdp", {"accumulate": "shard", "meta_init": True}),
    ("fsdp", {"cpu_offload": True}),
]
if importlib.util.find_spec("deepspeed"):
    VARIANTS += [("deepspeed", {"zero_stage": stage}) for stage in (0, 1, 2, 3)]
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}


@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_each_engine_is_single_on_a_gpu(precision):
    task = Ragged(dropout=0.1, dtype=torch.float32)
    kind = {**SIZE, "precision": precision}
    cases = [(task, name, {**kind, **given}) for name, given in [("single", {}), *VARIANTS]]
    cases = [case for case in cases if case[2]["precision"] == precision]
    [(wanted, *found)] = run(each, 1, cases, timeout=300, device="cuda")
    for (_, name, given), result in zip(cases[1:], found, strict=True):
        assert not isinstance(result, str), (name, given, result)
        close(result, wanted, TOLERANCE[precision])


def muon_for(held):
    return muon(held, lr=0.01, muon_lr=0.02, rules=Rules(blocks=repeated_layers(held)))


def test_muon_and_the_average_are_those_of_single_on_a_gpu():
    """The average's steps are decided on the device with a fused AdamW, on the host with Muon."""
    task = Ragged(dropout=0.1, dtype=torch.float32)
    for given, tolerance in (({"make": muon_for, "ema": 0.9}, 2e-2), ({"ema": 0.9}, 1e-5)):
        kinds = [("single", {}), ("ddp", {}), ("zero", {}), ("fsdp", {}), ("fsdp", {"cpu_offload": True})]
        [(wanted, *found)] = run(
            each, 1, [(task, name, {**SIZE, **given, **own}) for name, own in kinds], timeout=300, device="cuda"
        )
        for (name, _), result in zip(kinds[1:], found, strict=True):
            assert not isinstance(result, str), (name, result)
            close(result, wanted, tolerance)


def test_exact_has_the_bits_of_single_on_a_gpu():
    task = Ragged(dropout=0.1, dtype=torch.float32)
    names = [("single", {}), ("ddp", {}), ("zero", {}), ("fsdp", {})]
    cases = [(task, name, {**SIZE, **given, "exact": True}) for name, given in names]
    [(wanted, *found)] = run(each, 1, cases, timeout=300, device="cuda")
    assert found == [wanted] * len(found)
