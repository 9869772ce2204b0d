"""What is done to a model before its engine: the same numbers, the same names."""

import copy
import dataclasses
from functools import partialmethod

import pytest
import torch
from refusals import names
from torch import nn
from torch.nn import functional as F
from toys import Network

from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.transforms import Transforms, attention, checkpoint_blocks, compile_blocks, describe, prepare
from lockstep.transforms.precision import check_policy

CPU = torch.device("cpu")
compiling = pytest.mark.filterwarnings("ignore")  # the compiler's own
POLICIES = ["full", "every:2", "every:1", "selective"]
SHAPE = GPTConfig(layers=3, heads=2, width=16, vocab_size=60, context=8, dropout=0.1)


def gpt(dtype=torch.float64, dropout=0.1):
    torch.manual_seed(0)
    return GPT(dataclasses.replace(SHAPE, dropout=dropout)).to(dtype)


def backward(model):
    """(loss, gradients) of one micro-batch whose dropout is seeded."""
    ids = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    drawn = torch.rand(1)  # whatever is drawn later is the same too
    loss.backward()
    return loss.detach(), drawn, [p.grad for p in model.parameters()], torch.rand(1)


def same(found, wanted):
    return all(
        torch.equal(a, b)
        for a, b in zip([*found[:2], *found[2], found[3]], [*wanted[:2], *wanted[2], wanted[3]], strict=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_activation_checkpointing_changes_no_bit(policy):
    plain, model = gpt(), gpt()
    names = list(model.state_dict())
    checkpoint_blocks(model, policy, list(model.blocks))
    assert same(backward(model), backward(plain))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def kept(model):
    """Bytes that the graph keeps for the backward, each piece of memory once."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.zeros(2, 8, dtype=torch.int64)).sum()
    del loss
    return sum(found.values())


def test_it_saves_memory_and_selective_stands_between():
    sizes = {}
    for policy in ("none", "full", "every:2"):
        model = gpt()
        sizes[policy] = kept(checkpoint_blocks(model, policy, list(model.blocks)))
    assert sizes["full"] < sizes["every:2"] < sizes["none"]


class Counting(nn.Module):
    """Counts the products of a forward and a backward, as the dispatcher sees them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def products(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        count = [0, 0]
        products = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                count[0] += function in products
                count[1] += function is torch.ops.aten.gelu.default
                return function(*args, **(kwargs or {}))

        with Mode():
            self.model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        return count


def test_selective_computes_no_product_again():
    counted = {}
    for policy in ("none", "full", "selective"):
        model = gpt()
        counted[policy] = Counting(checkpoint_blocks(model, policy, list(model.blocks))).products()
    assert counted["selective"][0] == counted["none"][0] < counted["full"][0]
    assert counted["selective"][1] == counted["full"][1] == 2 * counted["none"][1]


def test_every_takes_each_nth_block():
    model = gpt()
    before = [block.forward for block in model.blocks]
    checkpoint_blocks(model, "every:2", list(model.blocks))
    assert [a == b.forward for a, b in zip(before, model.blocks, strict=True)] == [True, False, True]


@pytest.mark.parametrize("policy", ["every", "every:0", "every:x", "all", "every:²"])
def test_a_policy_that_is_none(policy):
    with pytest.raises(ConfigError, match="--activation-checkpointing is .* choose one of none, full, selective"):
        check_policy(policy)


def test_blocks_that_are_not_known():
    with pytest.raises(ConfigError, match="the model has 0 known blocks.*blocks\\(model\\)"):
        checkpoint_blocks(nn.Linear(2, 2), "full", [])
    assert checkpoint_blocks(nn.Linear(2, 2), "none", [])


# attention


def test_the_chosen_kernel_computes_and_results_agree():
    results = {}
    for choice in ("auto", "flash", "math"):
        model = attention(gpt(torch.float32).eval(), choice)
        results[choice] = model(torch.arange(8)[None])
        torch.testing.assert_close(results[choice], results["auto"], rtol=1e-5, atol=1e-5)
    assert torch.equal(results["flash"], results["auto"])
    assert not torch.equal(results["math"], results["auto"])


def test_a_recomputation_takes_the_same_kernel():
    plain, model = attention(gpt(), "math"), gpt()
    blocks = list(model.blocks)
    checkpoint_blocks(attention(model, "math", blocks), "full", blocks)
    assert same(backward(model), backward(plain))


def test_the_line_names_what_runs_and_why_not_another():
    line = describe(gpt(dropout=0.0), "auto", torch.float32, CPU)
    assert line == (
        "attention: flash (2 heads of 8, float32, causal, no mask); not cudnn: it has no CPU kernel; "
        "not efficient: it has no CPU kernel; not math: another is faster"
    )
    line = describe(gpt(), "auto", torch.float32, CPU)
    assert line.startswith("attention: math (")
    assert "not flash: its CPU kernel has no dropout" in line
    assert "not flash: --attention math" in describe(gpt(dropout=0.0), "math", torch.float32, CPU)
    line = describe(gpt(dropout=0.0), "auto", torch.float32, CPU, masked=True)
    assert "(2 heads of 8, float32, causal, a mask); not cudnn: " in line
    assert describe(nn.Linear(2, 2), "auto", torch.float32, CPU) is None
    assert "4 heads of 4" in describe(nn.TransformerEncoderLayer(16, 4), "auto", torch.float32, CPU)


@pytest.mark.parametrize(
    ("choice", "dropout", "why"),
    [("cudnn", 0.0, "no CPU kernel"), ("efficient", 0.0, "no CPU kernel"), ("flash", 0.1, "no dropout")],
)
def test_a_kernel_that_cannot_run_is_refused(choice, dropout, why):
    with pytest.raises(ConfigError, match=rf"--attention {choice} cannot run here: .*{why}; use auto, or .*math"):
        describe(gpt(dropout=dropout), choice, torch.float32, CPU)


# compile


def tolerable(found, wanted):
    for a, b in zip(found[2], wanted[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def unseeded():
    """Without dropout, whose draws differ between eager and compiled code."""
    return gpt(dropout=0.0)


@compiling
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_equal_eager(policy, backend, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    plain, model = unseeded(), unseeded()
    blocks, names = list(model.blocks), list(model.state_dict())
    checkpoint_blocks(model, policy, blocks)
    assert compile_blocks(model, blocks) is model
    tolerable(backward(model), backward(plain))
    assert list(model.state_dict()) == names


@compiling
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_a_whole_compiled_model_equals_eager(policy):
    torch._dynamo.reset()
    plain, model = unseeded(), unseeded()
    checkpoint_blocks(model, policy, list(model.blocks))
    tolerable(backward(compile_blocks(model)), backward(plain))


@compiling
@pytest.mark.slow
def test_selective_and_an_attention_kernel_under_compiled_blocks():
    torch._dynamo.reset()
    plain, model = attention(unseeded(), "math"), unseeded()
    blocks = list(model.blocks)
    compile_blocks(checkpoint_blocks(attention(model, "math", blocks), "selective", blocks), blocks)
    tolerable(backward(model), backward(plain))


# all together


def ready(model, **given):
    settings = {"precision": "float32", "compile_model": False, "device": CPU, **given}
    return prepare(model, **settings)


def test_prepare_applies_the_order_and_says_what_it_chose():
    said = []
    model = GPT(SHAPE)
    chosen = Transforms(activation_checkpointing="full", attention="math")
    blocks = list(model.blocks)
    made = ready(model, precision="bf16", chosen=chosen, blocks=blocks, say=said.append)
    assert made is model
    assert said == [describe(model, "math", torch.bfloat16, CPU, masked=None)]
    assert made(torch.zeros(1, 8, dtype=torch.int64)).dtype is torch.bfloat16
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert {p.dtype for p in ready(GPT(SHAPE), precision="bf16-true").parameters()} == {torch.bfloat16}


class Kinds(nn.Module):
    """A tensor of each kind that a precision may or may not cast."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.base = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.packed = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
        self.fourier = nn.Parameter(torch.ones(2, dtype=torch.complex64) * 1j)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("rotary", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("frequencies", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("position", torch.arange(2), persistent=False)


@pytest.mark.parametrize(
    ("precision", "real", "imaginary", "table"),
    [
        ("float32", "float32", "complex64", "float32"),
        ("bf16", "float32", "complex64", "float32"),
        ("fp16", "float32", "complex64", "float32"),
        ("bf16-true", "bfloat16", "complex64", "float32"),
        ("float64", "float64", "complex128", "float64"),
    ],
)
def test_what_a_precision_casts(precision, real, imaginary, table):
    said = []
    made = ready(Kinds(), precision=precision, say=said.append)
    found = {name: str(t.dtype).removeprefix("torch.") for name, t in (*made.named_parameters(), *made.named_buffers())}
    assert found == {
        "trained": real,
        "frozen": real,
        "base": "bfloat16",
        "wide": "float64",
        "packed": "uint8",
        "fourier": imaginary,
        "mean": real,
        "rotary": imaginary,
        "frequencies": table,
        "position": "int64",
    }
    assert torch.equal(made.rotary, torch.polar(torch.ones(2), torch.arange(2.0)).to(made.rotary.dtype))
    assert torch.equal(made.fourier, torch.full((2,), 1j, dtype=made.fourier.dtype))
    assert all(p.requires_grad is (name in ("trained", "fourier")) for name, p in made.named_parameters())
    wanted = {"float32": [2], "float64": [1], "bf16-true": [1, 1]}.get(precision, [])  # tensors that each line counts
    assert [int(line.split()[0]) for line in said] == wanted
    if precision == "float32":
        assert names(said[0], "2 frozen parameters", "float32", "base", "bfloat16", "1 more")


def test_a_cast_model_keeps_its_ties_and_its_place():
    with torch.device("meta"):
        model = Network(dtype=torch.float32)
    model.register_parameter("base", nn.Parameter(torch.ones(1, dtype=torch.float16, device="meta"), False))
    made = ready(model, move=False, precision="float64")
    assert made.head.weight is made.embedding.weight
    assert made.head.weight.dtype is torch.float64
    assert (made.base.dtype, made.base.is_meta) == (torch.float16, True)


def test_a_model_on_the_meta_device_stays_there():
    with torch.device("meta"):
        model = Network()
    assert all(p.is_meta for p in ready(model, move=False).parameters())


def compiled_modules(model):
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


@compiling
@pytest.mark.parametrize(
    ("scope", "named", "wanted"),
    [
        ("auto", True, ["blocks.0", "blocks.1"]),
        ("auto", False, [""]),
        ("blocks", False, ["blocks.0", "blocks.1"]),
        ("whole", True, [""]),
    ],
)
def test_what_is_compiled(scope, named, wanted):
    model = Network()
    chosen = Transforms(compile_scope=scope)
    ready(model, compile_model=True, chosen=chosen, blocks=list(model.blocks), from_task=named)
    assert compiled_modules(model) == wanted


def test_blocks_to_compile_that_are_not_known():
    with pytest.raises(ConfigError, match="--compile-scope blocks: "):
        ready(Network(), compile_model=True, chosen=Transforms(compile_scope="blocks"))


def test_copies_of_a_prepared_model_can_be_made():
    assert copy.deepcopy(ready(Network()))
