"""Which attention kernel "auto" takes by device, cuDNN and mode; and the dtype of the residual stream."""

import importlib

import pytest
import torch
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.transforms import Chosen, attention, autocast, prepare
from lockstep.transforms.attention import AS_TORCH, Facts, described, facts_of, order_of

CPU = torch.device("cpu")
MODULE = importlib.import_module("lockstep.transforms.attention")  # which the function of that name hides
SHAPE = GPTConfig(layers=4, heads=2, width=32, vocab_size=64, context=16)
PLAIN = ("flash", "efficient", "math")


@pytest.mark.parametrize(
    ("facts", "masked", "names"),
    [
        (Facts((0, 0), 0, False), False, ()),  # a CPU
        (Facts((8, 0), 91900, False), False, ()),
        (Facts((9, 0), 91900, False), False, ("cudnn", *PLAIN)),
        (Facts((9, 0), 91501, False), False, ("cudnn", *PLAIN)),
        (Facts((9, 0), 91500, False), False, ()),  # which torch does not take first either
        (Facts((9, 0), 0, False), False, ()),
        (Facts((9, 0), 91900, False), True, PLAIN),
        (Facts((9, 0), 92600, False), True, ("cudnn", *PLAIN)),
        (Facts((10, 0), 91900, False), False, ()),
        (Facts((9, 0), 92600, True), False, PLAIN),
        (Facts((8, 0), 92600, True), True, PLAIN),
    ],
)
def test_what_auto_comes_to(facts, masked, names):
    order = order_of(facts, masked=masked)
    assert order.names == names
    assert not (facts.deterministic and "cudnn" in names)
    assert order == AS_TORCH or order.names or order.without


def test_a_torch_without_an_order_of_kernels_keeps_its_own(monkeypatch):
    monkeypatch.setattr(MODULE, "_TAKES_ORDER", False)
    assert order_of(Facts((9, 0), 91900, False), masked=False).names == ()


def test_the_order_is_torchs_own_within_the_forward_alone(monkeypatch):
    seen = []
    model = GPT(SHAPE)
    head = model._head
    monkeypatch.setattr(model, "_head", lambda x: seen.append(torch._C._get_sdp_priority_order()) or head(x))
    before = torch._C._get_sdp_priority_order()
    attention(model, "auto", order=order_of(Facts((9, 0), 91900, False), masked=False))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert seen[0][:4] == [3, 1, 2, 0]  # torch.nn.attention.SDPBackend: cuDNN, flash, efficient, math
    assert torch._C._get_sdp_priority_order() == before


def test_the_line_says_why_not_and_which_cudnn(monkeypatch):
    monkeypatch.setattr(MODULE, "facts_of", lambda device: Facts((9, 0), 91002, False))
    line = described(GPT(SHAPE), "auto", torch.bfloat16, CPU, order_of(Facts((9, 0), 91002, False), masked=False))
    assert line.startswith("attention: flash (2 heads of 16, bfloat16, causal, no mask); ")
    assert line.endswith("; cuDNN 9.10.2")
    monkeypatch.setattr(MODULE, "_refusal", lambda *_: "")
    for facts, masked, why in (
        (Facts((9, 0), 91002, False), False, "not cudnn: torch takes it first only above 9.15.0"),
        (Facts((9, 0), 91900, True), False, "not cudnn: deterministic algorithms refuse it"),
        (Facts((9, 0), 91900, False), True, "not cudnn: beside a mask it gives NaN before 9.26"),
    ):
        assert why in described(GPT(SHAPE), "auto", torch.bfloat16, CPU, order_of(facts, masked=masked), masked=masked)


def test_a_cpu_has_no_facts_of_a_gpu():
    assert facts_of(CPU)[:2] == ((0, 0), 0)


def test_cudnn_is_refused_where_kernels_must_be_deterministic(tmp_path):
    given = {"precision": "float32", "compile_model": False, "device": CPU}
    with pytest.raises(
        ConfigError, match="--attention cudnn cannot hold with --exact or --guards.audit: torch refuses"
    ):
        prepare(GPT(SHAPE), chosen=Chosen(attention="cudnn", exact=True), **given)
    with pytest.raises(ConfigError, match="attention cudnn cannot hold with"):
        lockstep.train(config(tmp_path, attention="cudnn", exact=True), Ragged())


# the residual stream


def outputs(residual, dtype=torch.float32, cast=True):
    torch.manual_seed(0)
    model = GPT(SHAPE).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # so large that roundings show
            parameter.mul_(4)
    model.residual = residual
    model = autocast(model, torch.bfloat16, "cpu") if cast else model
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    seen = []
    handles = [block.register_forward_hook(lambda _, __, out: seen.append(out.dtype)) for block in model.blocks]
    loss = model(ids, labels=ids)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss.detach().double(), [p.grad.double() for p in model.parameters()], set(seen)


def test_a_residual_stream_in_bfloat16_is_float32s_within_its_rounding():
    wanted, gradients, _ = outputs(None, torch.float64, cast=False)
    wide, narrow = outputs(None), outputs(torch.bfloat16)
    assert (wide[2], narrow[2]) == ({torch.float32}, {torch.bfloat16})

    def off(found):
        shares = [(a - b).norm() / b.norm() for a, b in zip(found[1], gradients, strict=True)]
        return float((found[0] - wanted).abs() / wanted), float(max(shares))

    unit = 2.0**-8  # of bfloat16: each of the 2 * layers additions to the stream rounds once
    assert off(narrow)[0] < SHAPE.layers * 2 * unit
    assert off(wide)[0] < off(narrow)[0] + unit
    assert off(narrow)[1] < 4 * off(wide)[1] + 8 * SHAPE.layers * unit


@pytest.mark.parametrize(
    ("given", "task", "line"),
    [
        ({"precision": "float32"}, None, "this is GPT with float32; leave it out"),
        ({"precision": "bf16"}, Ragged(dtype=torch.float32), "this is Network with bf16; leave it out"),
    ],
)
def test_it_is_refused_elsewhere(tmp_path, given, task, line):
    from test_graphs import language

    with pytest.raises(
        ConfigError, match=f"residual.dtype bf16 is of the built-in GPT with .*precision bf16, and {line}"
    ):
        lockstep.train(config(tmp_path, residual_dtype="bf16", **given), task or language())
    assert not (tmp_path / "r").exists()


def test_a_run_trains_with_it_and_keeps_it(tmp_path):
    from test_graphs import language

    from lockstep.errors import ResumeError

    losses = {}
    for kind in ("float32", "bf16"):
        given = {"precision": "bf16", "residual_dtype": kind, "max_steps": 30, "lr": 0.01, "experiment_name": kind}
        losses[kind] = lockstep.train(config(tmp_path, **given), language()).evaluation.loss
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
    with pytest.raises(ResumeError, match="residual_dtype"):
        lockstep.train(config(tmp_path, **given | {"residual_dtype": "float32", "max_steps": 40}), language())
