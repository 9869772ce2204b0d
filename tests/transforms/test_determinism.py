"""The switches of the process: set by what was asked for, in a process of their own."""

import os
import sys

import pytest
import torch
from ranks import run
from torch import nn

from lockstep.distributed.world import World
from lockstep.engines.make import engine
from lockstep.errors import ConfigError
from lockstep.transforms import Chosen, prepare
from lockstep.transforms.determinism import pin

CPU = torch.device("cpu")


def test_convolutions_are_searched_for_on_a_device(monkeypatch):
    for device, wanted in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        pin(exact=False, matmul="highest", device=torch.device(device))
        assert torch.backends.cudnn.benchmark is wanted


def pinned(world, exact, matmul, loaded):
    if loaded:
        __import__("torch._inductor.config")
    torch.set_num_threads(2)
    if exact:
        torch.backends.cudnn.benchmark = True
    pin(exact=exact, matmul=matmul, device=world.device)
    inductor = sys.modules.get("torch._inductor.config")
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "compiler": (os.environ.get("TORCHINDUCTOR_DETERMINISTIC"), bool(inductor and inductor.deterministic)),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
def test_convolutions_take_the_precision_of_matrix_products(matmul):
    for exact in (False, True):
        found = run(pinned, 1, exact, matmul, False)[0]
        assert (found["products"], found["convolutions"]) == (matmul, matmul != "highest")


def test_exact_pins_what_moves_bits_and_nothing_else_does():
    found = run(pinned, 1, True, "highest", True)[0]
    assert (found["deterministic"], found["filled"], found["benchmark"]) == (True, False, False)
    assert (found["fast path"], found["compiler"], found["threads"]) == (False, ("1", True), 1)
    found = run(pinned, 1, False, "highest", False)[0]
    assert (found["deterministic"], found["filled"], found["benchmark"]) == (False, True, False)
    assert (found["fast path"], found["compiler"], found["threads"]) == (True, (None, False), 2)


class Encoder(nn.Module):
    """Attention layers of torch's own, which in evaluation may take another way through its kernels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def evaluated(world, name):
    """The bits of an evaluation's forward."""
    pin(exact=True, matmul="highest", device=world.device)
    torch.manual_seed(0)
    model = Encoder()
    made = engine(name, model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), world, exact_micro_batches=2)
    made.model.eval()
    with torch.no_grad():
        return made.model(torch.randn(4, 6, 16)).flatten().tolist()


def test_an_evaluation_of_attention_has_the_same_bits_under_fsdp():
    ddp, fsdp = (run(evaluated, 2, name)[0] for name in ("ddp", "fsdp"))
    assert ddp == fsdp


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["", "_POINTWISE", "_GEMM"])
def test_exact_refuses_a_compiler_that_chooses_by_speed(name, monkeypatch):
    monkeypatch.setenv(f"TORCHINDUCTOR_MAX_AUTOTUNE{name}", "1")
    wanted = {"precision": "float32", "compile_model": True, "device": CPU}
    with pytest.raises(
        ConfigError, match=f"--exact with --compile cannot hold with TORCHINDUCTOR_MAX_AUTOTUNE{name}=1"
    ):
        prepare(nn.Linear(2, 2), chosen=Chosen(exact=True), **wanted)
    assert prepare(nn.Linear(2, 2), chosen=Chosen(), **wanted)
    assert prepare(nn.Linear(2, 2), chosen=Chosen(exact=True), **wanted | {"compile_model": False})


def test_a_device_without_a_number_is_the_present_one(monkeypatch):
    assert World(device=torch.device("cuda")).device.index == (
        0 if not torch.cuda.is_available() else torch.cuda.current_device()
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert World(device=torch.device("cuda")).device == torch.device("cuda", 3)
    assert World(device=torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert World().device == torch.device("cpu")
