"""Which attention kernel "auto" takes by device, cuDNN and mode; and the dtype of the residual stream."""

import importlib

import pytest
import torch
from counting import counted
from refusals import refuses
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.config.sections import Data
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.run_state import RunState
from lockstep.training.start.build_engine import build_model
from lockstep.transforms import Transforms, attention, autocast, compile_blocks, prepare
from lockstep.transforms.attention import AS_TORCH, AttentionFacts, KernelOrder, describe, facts_of, order_of

CPU = torch.device("cpu")
MODULE = importlib.import_module("lockstep.transforms.attention")  # which the function of that name hides
SHAPE = GPTConfig(layers=4, heads=2, width=32, vocab_size=64, context=16)
PLAIN = ("flash", "efficient", "math")


@pytest.mark.parametrize(
    ("facts", "masked", "names"),
    [
        (AttentionFacts((0, 0), 0, False), False, ()),  # a CPU
        (AttentionFacts((8, 0), 91900, False), False, ()),
        (AttentionFacts((9, 0), 91900, False), False, ("cudnn", *PLAIN)),
        (AttentionFacts((9, 0), 91501, False), False, ("cudnn", *PLAIN)),
        (AttentionFacts((9, 0), 91500, False), False, ()),  # which torch does not take first either
        (AttentionFacts((9, 0), 0, False), False, ()),
        (AttentionFacts((9, 0), 91900, False), True, PLAIN),
        (AttentionFacts((9, 0), 92600, False), True, ("cudnn", *PLAIN)),
        (AttentionFacts((10, 0), 91900, False), False, ()),
        (AttentionFacts((9, 0), 91900, False), None, PLAIN),  # there may be a mask
        (AttentionFacts((9, 0), 91500, False), None, PLAIN),
        (AttentionFacts((9, 0), 92600, False), None, ()),
        (AttentionFacts((9, 0), 92600, True), None, PLAIN),
        (AttentionFacts((10, 0), 91900, False), None, ()),
        (AttentionFacts((0, 0), 0, False), None, ()),
        (AttentionFacts((9, 0), 92600, True), False, PLAIN),
        (AttentionFacts((8, 0), 92600, True), True, PLAIN),
    ],
)
def test_what_auto_comes_to(facts, masked, names):
    order = order_of(facts, masked=masked)
    assert order.names == names
    assert not (facts.deterministic and "cudnn" in names)
    assert order == AS_TORCH or order.names or order.without


def test_a_torch_without_an_order_of_kernels_keeps_its_own(monkeypatch):
    monkeypatch.setattr(MODULE, "_HAS_PRIORITY", False)
    assert order_of(AttentionFacts((9, 0), 91900, False), masked=False).names == ()


def test_the_order_is_torchs_own_within_the_forward_alone(monkeypatch):
    seen = []
    model = GPT(SHAPE)
    head = model._head
    monkeypatch.setattr(model, "_head", lambda x: seen.append(torch._C._get_sdp_priority_order()) or head(x))
    before = torch._C._get_sdp_priority_order()
    attention(model, "auto", order=order_of(AttentionFacts((9, 0), 91900, False), masked=False))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert seen[0][:4] == [3, 1, 2, 0]  # torch.nn.attention.SDPBackend: cuDNN, flash, efficient, math
    assert torch._C._get_sdp_priority_order() == before


def test_the_line_says_why_not_and_which_cudnn(monkeypatch):
    monkeypatch.setattr(MODULE, "facts_of", lambda device: AttentionFacts((9, 0), 91002, False))
    line = describe(
        GPT(SHAPE), "auto", torch.bfloat16, CPU, order_of(AttentionFacts((9, 0), 91002, False), masked=False)
    )
    assert line.startswith("attention: flash (2 heads of 16, bfloat16, causal, no mask); ")
    assert line.endswith("; cuDNN 9.10.2")
    monkeypatch.setattr(MODULE, "_refusal", lambda *_: "")
    for facts, masked, why in (
        (AttentionFacts((9, 0), 91002, False), False, "not cudnn: torch tries it first only above 9.15.0"),
        (AttentionFacts((9, 0), 91900, True), False, "not cudnn: deterministic algorithms refuse it"),
        (AttentionFacts((9, 0), 91900, False), True, "not cudnn: with a mask it gives NaN before 9.26"),
        (
            AttentionFacts((9, 0), 91900, False),
            None,
            "not cudnn: with a mask it gives NaN before 9.26, and this task",
        ),
    ):
        assert why in describe(GPT(SHAPE), "auto", torch.bfloat16, CPU, order_of(facts, masked=masked), masked=masked)


@pytest.mark.parametrize(
    ("facts", "masked", "refused"),
    [
        (AttentionFacts((9, 0), 91900, False), True, True),
        (AttentionFacts((9, 0), 91900, False), None, False),  # who asks for it knows that there is no mask
        (AttentionFacts((9, 0), 91500, False), False, False),
    ],
)
def test_cudnn_is_allowed_where_not_known_to_be_wrong(monkeypatch, facts, masked, refused):
    monkeypatch.setattr(MODULE, "_refusal", lambda *_: "")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: 3)  # which has no kernel to choose on a CPU
    order = order_of(facts, masked=masked)
    if refused:
        with pytest.raises(ConfigError, match="--attention cudnn"):
            describe(GPT(SHAPE), "cudnn", torch.bfloat16, CPU, order, masked=masked)
    else:
        assert describe(GPT(SHAPE), "cudnn", torch.bfloat16, CPU, order, masked=masked)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("scope", "graphs"), [("blocks", 2), ("whole", 1)])
def test_an_order_of_kernels_costs_no_graph(scope, graphs):
    seen, results = {}, {}
    for name, order in (
        ("torch", AS_TORCH),
        ("hopper", KernelOrder(("cudnn", *PLAIN))),
        ("left out", KernelOrder(PLAIN)),
    ):
        with counted() as seen[name]:
            torch.manual_seed(0)
            model = GPT(SHAPE)
            attention(model, "auto", model.blocks, order)
            autocast(model, torch.bfloat16, "cpu")
            compile_blocks(model, list(model.blocks) if scope == "blocks" else ())
            ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
            for _ in range(2):
                loss = model(ids, labels=ids)
                loss.backward()
            results[name] = [loss.item(), *(parameter.grad for parameter in model.parameters())]
    for found in seen.values():
        assert (found.captured, len(found.forwards), len(found.backwards), found.breaks) == (graphs, graphs, graphs, 0)
    torch.testing.assert_close(results["hopper"], results["torch"], rtol=0, atol=0)


def orders_of(model):
    """The kernels that each of the blocks computes attention with; None: as torch has it."""
    return [closure_of(block).get("names") for block in model.blocks]


def closure_of(block):
    forward = block.forward
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    return dict(zip(names, (cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()), strict=True))


class Own(Ragged):
    """A user's task, whose model has attention. What it gets for a mask lockstep cannot know."""

    says = None

    def __init__(self):
        super().__init__()
        self.attention_mask = self.says

    def model(self):
        return GPT(SHAPE)


class Unmasked(Own):
    says = False


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize(
    ("task", "names"), [(Own, PLAIN), (Unmasked, ("cudnn", *PLAIN)), ("language", ("cudnn", *PLAIN))]
)
def test_cudnn_is_first_only_where_a_task_says_it_has_no_mask(monkeypatch, tmp_path, task, names, packing):
    from test_graphs import language

    transforms, said = importlib.import_module("lockstep.transforms"), []
    monkeypatch.setattr(transforms, "facts_of", lambda device: AttentionFacts((9, 0), 91900, False))
    monkeypatch.setattr(MODULE, "_refusal", lambda *_: "")
    made = language() if task == "language" else task()
    settings = config(tmp_path, data=Data(packing=packing), precision="float32")
    model = build_model(settings, made, World(), RunState(), said.append)
    assert orders_of(model) == [names] * len(model.blocks)
    assert [("with a mask" in line) for line in said if line.startswith("attention: ")] == [names == PLAIN]


def test_a_cpu_has_no_facts_of_a_gpu():
    assert facts_of(CPU)[:2] == ((0, 0), 0)


def test_cudnn_is_refused_where_kernels_must_be_deterministic(tmp_path):
    given = {"precision": "float32", "compile_model": False, "device": CPU}
    with pytest.raises(ConfigError, match="--attention cudnn .*--exact or --guards.audit"):
        prepare(GPT(SHAPE), chosen=Transforms(attention="cudnn", exact=True), **given)
    with pytest.raises(ConfigError, match="attention cudnn .*exact"):
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


def test_bfloat16_residual_stream_is_float32s_within_rounding():
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
    ("precision", "task", "model"),
    [("float32", None, "GPT"), ("bf16", Ragged(dtype=torch.float32), "Network")],
)
def test_it_is_refused_elsewhere(tmp_path, precision, task, model):
    from test_graphs import language

    with refuses(ConfigError, "--residual-dtype", "--precision", model, precision):
        lockstep.train(config(tmp_path, residual_dtype="bf16", precision=precision), task or language())
    assert not (tmp_path / "r").exists()


def test_a_run_trains_with_it_and_keeps_it(tmp_path):
    from test_graphs import language

    from lockstep.errors import ResumeError

    losses = {}
    for kind in ("float32", "bf16"):
        given = {"precision": "bf16", "residual_dtype": kind, "max_steps": 30, "lr": 0.01, "experiment_name": kind}
        losses[kind] = lockstep.train(config(tmp_path, **given), language()).evaluation.loss
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
    with pytest.raises(ResumeError, match=r"--residual-dtype bf16 \(now float32\)"):
        lockstep.train(config(tmp_path, **given | {"residual_dtype": "float32", "max_steps": 40}), language())
