"""The layers of --fused-kernels: the plain GPT's numbers and names, under whatever a run does to a model."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import counting
import pytest
import torch
from ranks import run
from small_runs import config, mark
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError, ResumeError
from lockstep.models import fused
from lockstep.models.gpt import GPT, GPTConfig, further_logits, generate
from lockstep.training import build_engine as run_model
from lockstep.transforms import autocast, checkpointed, compiled

sys.path.append(str(Path(__file__).parents[1] / "transforms"))
from test_graphs import language

SHAPE = GPTConfig(layers=2, heads=2, width=16, vocab_size=60, context=16)
IDS = torch.randint(60, (3, 12), generator=torch.Generator().manual_seed(1))
KINDS = {"plain": None, "backward": False, "all": True}
compiling = pytest.mark.filterwarnings("ignore")  # the compiler's own


def build(kind, dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT(SHAPE).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter.normal_(0, 0.2)
    if KINDS[kind] is not None:
        model.fuse(epilogue=KINDS[kind])
    return model


def gradients(model, **named):
    loss = model(IDS, labels=IDS, **named)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def alike(found, wanted, close=1e-12):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["backward", "all"])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradients_are_the_plain_models(kind, masked):
    more = {"documents": IDS.new_tensor([[0] * 5 + [1] * 7] * 3)} if masked else {}
    found, wanted = gradients(build(kind), **more), gradients(build("plain"), **more)
    alike(found, wanted)


def test_parameters_keep_their_names_order_and_identity():
    plain, model = build("plain"), build("plain")
    before = dict(model.named_parameters())
    model.fuse(epilogue=True)
    assert list(model.state_dict()) == list(plain.state_dict())
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    model.load_state_dict(plain.state_dict())


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name.replace("::", "."))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "products"), [("backward", 0), ("all", SHAPE.layers)])
def test_each_gradient_is_passed_over_once(kind, products):
    """Two of a block's four biases are summed where their gradient is written, and nothing else stacks gradients."""
    counts = {}
    for name in ("plain", kind):
        model = build(name)
        loss = model(IDS, labels=IDS)
        with Operations() as seen:
            loss.backward()
        counts[name] = seen.names.count("aten.sum")
        own = [each.split(".")[1] for each in seen.names if each.startswith("lockstep.")]
    assert counts["plain"] - counts[kind] == 2 * SHAPE.layers
    assert sorted(own) == ["gelu_gradient"] * SHAPE.layers + ["stacked_gradient"] * SHAPE.layers
    assert not {"aten.stack", "aten.unbind_backward", "aten.gelu_backward"} & set(seen.names)
    with Operations() as seen:
        model(IDS)
    assert seen.names.count("lockstep.linear_gelu") == products


@pytest.mark.parametrize("kind", ["backward", "all"])
def test_autocast_rounds_no_more_than_for_the_plain_model(kind):
    wanted = gradients(build("plain"))
    off = {}
    for name in ("plain", kind):
        found = gradients(autocast(build(name, torch.float32), torch.bfloat16, "cpu"))
        off[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        assert {each.dtype for each in found} == {torch.float32}
    assert 1e-4 < off[kind] < 1.5 * off["plain"]


@compiling
@pytest.mark.parametrize("cast", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["backward", "all"])
def test_one_graph_has_the_eager_numbers(kind, policy, cast):
    def ready():
        model = build(kind, torch.float32 if cast else torch.float64)
        checkpointed(model, policy, list(model.blocks))
        return autocast(model, torch.bfloat16, "cpu") if cast else model

    with counting.counted() as seen:
        found = gradients(compiled(ready()))
        assert (seen.captured, seen.breaks) == (1, 0)
    assert "lockstep.stacked_gradient" in str([node.target for node in seen.backwards[0].graph.nodes])
    alike(found, gradients(ready()), 2e-2 if cast else 1e-12)


@compiling
def test_the_compiler_takes_it():
    model = build("all", torch.float32)
    model.compile(fullgraph=True)
    alike(gradients(model), gradients(build("all", torch.float32)), 1e-4)


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_activation_checkpointing_changes_no_bit(policy):
    model = build("all")
    checkpointed(model, policy, list(model.blocks))
    for one, other in zip(gradients(model), gradients(build("all")), strict=True):
        assert torch.equal(one, other)


def test_what_is_frozen_gets_no_gradient():
    model, plain = build("all"), build("plain")
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("attention.inputs.weight" not in name and "expand.bias" not in name)
        each(IDS, labels=IDS).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_texts_are_the_plain_models():
    texts = [
        generate(build(kind), IDS[:, :4], 8, config=SHAPE, temperature=0.0, further=further)
        for kind in KINDS
        for further in (None, further_logits(SHAPE.layers))
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_operators_are_what_the_compiler_is_told_of_them(dtype):
    wide, narrow = torch.randn(5, 24, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    weight, bias = torch.randn(24, 8, dtype=dtype), torch.randn(24, dtype=dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.stacked_gradient, tuple(wide.chunk(3, 1)), test_utils=tests)
    torch.library.opcheck(fused.gelu_gradient, (wide, wide.flip(0)), test_utils=tests)
    torch.library.opcheck(fused.linear_gelu, (narrow, weight, bias), test_utils=tests)


# runs


def trained(world, folder, name, changes=None):
    """The fingerprint of what a run comes to, and its evaluation."""
    given = {"experiment_name": name, "fused_kernels": "all", "max_steps": 4, "eval_freq": 0} | (changes or {})
    run_ = lockstep.Run(config(folder, **given), language(), world)
    for _ in run_:
        pass
    return mark(folder, name)[0], run_.result.evaluation.loss


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero"])
def test_every_engine_trains_it_alike(tmp_path, engine):
    _, wanted = trained(None, tmp_path, "plain", {"fused_kernels": "none"})
    _, alone = trained(None, tmp_path, "alone")
    found = run(trained, 2, tmp_path, engine, {"engine": engine})
    assert alone == pytest.approx(wanted, rel=1e-12)
    assert [loss for _, loss in found] == [pytest.approx(wanted, rel=1e-12)] * 2


def test_exact_has_the_same_bits_at_each_world_size(tmp_path):
    given = {"exact": True, "precision": "float32"}
    wanted = trained(None, tmp_path, "alone", given)
    assert run(trained, 2, tmp_path, "two", {"engine": "ddp"} | given) == [wanted] * 2


def test_a_resume_holds_it_and_inference_does_without(tmp_path):
    trained(None, tmp_path, "r")
    with pytest.raises(ResumeError, match=r"--fused-kernels all \(now backward\)"):
        trained(None, tmp_path, "r", {"fused_kernels": "backward", "max_steps": 6})
    from lockstep.training.inference import InferenceRequest as Wanted
    from lockstep.training.inference import read_config

    assert read_config(tmp_path / "r", Wanted(str(tmp_path / "r"))).fused_kernels == "none"


@pytest.mark.parametrize(
    ("changes", "task"),
    [({}, Ragged()), ({"lora": {"rank": 2}}, None)],
    ids=["another model", "adapters"],
)
def test_it_is_refused_elsewhere(tmp_path, changes, task):
    with pytest.raises(ConfigError, match="--fused-kernels all .*(Network|--lora.rank)"):
        lockstep.train(config(tmp_path, fused_kernels="all", **changes), task or language())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_device_without_triton_is_refused(monkeypatch, kind):
    monkeypatch.setattr(run_model, "find_spec", lambda name: None)
    asked, model = lockstep.Config(fused_kernels="all"), build("plain")
    with pytest.raises(ConfigError, match=f"--fused-kernels all: {kind}"):
        run_model._fuse_layers(asked, model, torch.device(kind), sizes_only=False)
    unfused = dataclasses.replace(asked, fused_kernels="none")
    run_model._fuse_layers(unfused, model, torch.device(kind), sizes_only=False)
    assert type(model.blocks[0].expand) is torch.nn.Linear
    run_model._fuse_layers(asked, model, torch.device(kind), sizes_only=True)
    assert type(model.blocks[0].expand) is fused.GeluLinear


# the kernels, interpreted on a CPU

INTERPRETED = """
import torch
from torch.nn import functional as F
from lockstep.models import fused, fused_triton

torch.manual_seed(0)
units = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}

def close(found, wanted, dtype, scale=1.0):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2 * units[dtype], atol=scale * units[dtype])

for dtype in units:
    for rows in (1, 70, 300):                        # less than a tile, than a chunk, and more
        wide = torch.randn(rows, 3 * 130, dtype=dtype)
        parts = wide.chunk(3, 1)                                       # rows apart
        parts = (parts[0], parts[1].contiguous(), parts[2].t().contiguous().t())
        found, sums = fused_triton.stacked_gradient(*parts)
        assert torch.equal(found, torch.cat(parts, 1))
        assert sums.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        close(sums, wide.double().sum(0), torch.float64 if dtype is torch.float64 else torch.float32, 20)
        hidden = 3 * torch.randn(rows, 130, dtype=dtype)
        found, sums = fused_triton.gelu_gradient(parts[0], hidden)
        inner = hidden.double().requires_grad_()
        wanted, = torch.autograd.grad(F.gelu(inner, approximate="tanh"), inner, parts[0].double())
        close(found, wanted, dtype, 4)
        close(sums, found.double().sum(0), torch.float64 if dtype is torch.float64 else torch.float32, 20)

# (the interpreter has no product in bfloat16)
for dtype in (torch.float32, torch.float16):
    for rows, inputs, outputs in ((1, 64, 128), (200, 72, 300), (1100, 16, 40)):
        x = torch.randn(rows, 2 * inputs, dtype=dtype)[:, :inputs]
        weight, bias = torch.randn(outputs, inputs, dtype=dtype) / 8, torch.randn(outputs, dtype=dtype)
        for blocks in (None, *fused_triton.CONFIGS):
            hidden, activated = fused_triton.linear_gelu(x, weight, bias, blocks)
            close(hidden, F.linear(x.double(), weight.double(), bias.double()), dtype, 8)
            close(activated, F.gelu(hidden.double(), approximate="tanh"), dtype, 2)
print("all alike")
"""


def test_the_triton_kernels_are_the_operators():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "all alike\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["backward", "all"])
def test_a_device_has_the_plain_models_numbers(kind, dtype):
    found, wanted = [], []
    for name, into in ((kind, found), ("plain", wanted)):
        model = build(name, dtype).cuda()
        ids = IDS.cuda()
        model(ids, labels=ids).backward()
        into.extend(p.grad.double() for p in model.parameters())
    unit = 3e-2 if dtype is torch.bfloat16 else 1e-4
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)) < unit
