"""Copies of the weights in bfloat16, written once a step: the same training as casting them in each forward."""

import copy
from itertools import pairwise

import counting
import pytest
import torch
from small_runs import config, mark
from test_graphs import language, trained
from torch import nn
from torch.nn import functional as F
from toys import Ragged

import lockstep
from lockstep.config.fields import FieldError
from lockstep.engines.memory import footprint
from lockstep.errors import ConfigError, ResumeError
from lockstep.hooks import Hooks
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.training.start.resume import compare_plans
from lockstep.transforms import autocast, checkpoint_blocks
from lockstep.transforms.weight_copies import CopiedLinear, WeightCopies, copies_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch._dynamo", "ignore:.*:UserWarning:torch._inductor")

BF16 = torch.bfloat16
STEP = {"precision": "bf16", "weight_copies": "step"}
BOTH = pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16"])


def given(narrow):
    return STEP | ({"grad_dtype": "bf16"} if narrow else {})


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))


def rows(count):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 4, generator=generator)


def by_engine(model, narrow, micro_batches, steps, change=lambda model, step: None):
    """The losses, and the weights in the model, after `steps` steps of an engine around it."""
    WeightCopies.of(model, BF16, narrow=narrow)
    made = lockstep.engine(
        "single",
        autocast(model, BF16, "cpu"),
        lambda held: torch.optim.AdamW(held.parameters(), lr=0.01),
        lockstep.World(),
        clip=0.5,
    )
    inputs, wanted = rows(8 * micro_batches)
    losses = []
    for step in range(steps):
        for x, y in zip(inputs.chunk(micro_batches), wanted.chunk(micro_batches), strict=True):
            with made.accumulate(False):
                loss = F.mse_loss(made.model(x).float(), y)
                made.backward(loss, 1 / micro_batches)
            losses.append(loss.item())
        made.step(1.0)
        change(model, step)
    return losses


def by_hand(model, narrow, micro_batches, steps):
    """The same in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, _, norm, last = model
    inputs, wanted = rows(8 * micro_batches)
    losses = []
    for _ in range(steps):
        masters = [first.weight, first.bias, last.weight]
        halves = [p.detach().to(BF16).requires_grad_() for p in masters]
        for x, y in zip(inputs.chunk(micro_batches), wanted.chunk(micro_batches), strict=True):
            hidden = F.gelu(F.linear(x.to(BF16), *halves[:2]))
            hidden = F.layer_norm(hidden, (16,), norm.weight, norm.bias)
            loss = F.mse_loss(F.linear(hidden, halves[2]).float(), y)
            loss.backward(torch.tensor(1 / micro_batches))
            losses.append(loss.item())
            for master, half in zip(masters, halves, strict=True):
                if not narrow:
                    master.grad = half.grad.float() if master.grad is None else master.grad + half.grad.float()
                    half.grad = None
        for master, half in zip(masters, halves, strict=True):
            master.grad = half.grad.float() if narrow else master.grad
        gradients = [p.grad for p in model.parameters()]
        norm_ = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(0.5 / (norm_ + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@BOTH
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_it_is_what_one_would_write_by_hand_bit_for_bit(narrow, micro_batches):
    found, wanted = network(), network()
    assert by_engine(found, narrow, micro_batches, 6) == by_hand(wanted, narrow, micro_batches, 6)
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype is torch.float32


def test_gradient_dtypes_differ_when_something_is_added():
    wide, narrow = network(), network()
    by_engine(wide, False, 4, 2)
    by_engine(narrow, True, 4, 2)
    assert not torch.equal(wide[0].weight, narrow[0].weight)


# a run: the same training as without


@BOTH
def test_a_step_of_one_micro_batch_has_the_bits_of_a_run_without(tmp_path, narrow):
    same = {"micro_batch_size": 8, "num_epochs": 2, "optim": {"ema": 0.9}}
    wanted, loss = trained(tmp_path, language(), "forward", precision="bf16", **same)
    found, own = trained(tmp_path, language(), "step", **given(narrow), **same)
    assert own == loss  # of averaged weights
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_float32_gradients_are_bitwise_but_for_a_tied_table(tmp_path):
    """Whose two gradients are then added one by one; in exact mode they meet in each micro-batch, as without."""
    for exact in (False, True):
        wanted, _ = trained(tmp_path, language(), f"forward{exact}", precision="bf16", exact=exact)
        found, _ = trained(tmp_path, language(), f"step{exact}", **STEP, exact=exact)
        for name in wanted:
            if exact:
                assert torch.equal(found[name], wanted[name])
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-7)


@BOTH
def test_twenty_steps_are_those_of_a_run_without_within_rounding(tmp_path, narrow):
    ends, curves = [], []
    same = {"max_steps": 20, "lr": 0.2, "optim": {"name": "sgd"}}  # AdamW's first steps are as long for noise
    for name, changes in (("forward", {"precision": "bf16"}), ("step", given(narrow))):
        with lockstep.Run(config(tmp_path, experiment_name=name, **same, **changes), language()) as run:
            first = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
            curves.append([step.loss for step in run])
            ends.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    unit = 2.0**-8  # of bfloat16
    assert curves[1] == pytest.approx(curves[0], rel=unit)
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert (ends[1] - ends[0]).norm() < 2 * unit * (ends[0] - first).norm()


@BOTH
def test_copies_are_rewritten_before_use_and_used_nowhere_else(tmp_path, narrow):
    """Evaluations, averages, texts that are written and the body see none: here there is nothing but NaN in them."""
    same = {"optim": {"ema": 0.9}, "eval_freq": 1}
    wanted, loss = trained(tmp_path, language(), "kept", **given(narrow), **same)
    run = lockstep.Run(
        config(tmp_path, max_steps=0, num_epochs=1, experiment_name="nan", **given(narrow), **same), language()
    )
    for step in run:
        assert step.evaluation.loss < 10
        for tensor in copies_of(run.model).tensors:
            tensor.detach().fill_(torch.nan)
        assert run.model(torch.ones(1, 4, dtype=torch.int64)).isfinite().all()
    assert run.result.evaluation.loss == loss
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in run.model.state_dict().items())


@BOTH
def test_a_weight_that_the_body_changes_counts_in_the_next_step(tmp_path, narrow):
    ends = []
    for name, changes in (("forward", {"precision": "bf16"}), ("step", given(narrow))):
        run = lockstep.Run(config(tmp_path, experiment_name=name, micro_batch_size=8, **changes), language())
        for _ in run:
            run.model.blocks[0].expand.weight.data.clamp_(-0.02, 0.02)  # of which torch keeps no count
        ends.append(run.model.state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@BOTH
def test_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, narrow):
    lockstep.train(config(tmp_path, experiment_name="whole", **given(narrow)), language())
    lockstep.train(config(tmp_path, stop_at=5, **given(narrow)), language())
    lockstep.train(config(tmp_path, **given(narrow)), language())
    assert mark(tmp_path) == mark(tmp_path, "whole")
    with pytest.raises(ResumeError, match="weight.copies"):
        lockstep.train(config(tmp_path, precision="bf16", max_steps=20), language())


def test_a_run_from_before_these_options_goes_on():
    now = {"seed": 0, "weight_copies": "forward", "grad_dtype": "float32"}
    assert compare_plans({"seed": 0}, now) == []
    assert len(compare_plans({"seed": 0}, now | {"grad_dtype": "bf16"})) == 1


def test_a_loaded_run_has_no_copies(tmp_path):
    lockstep.train(config(tmp_path, save_dir=str(tmp_path), **STEP), language())
    found = lockstep.load(tmp_path / "r", task=language())
    assert copies_of(found.model if hasattr(found, "model") else found) is None


# compiled


@pytest.mark.parametrize(  # each pair of values once: a case compiles twice
    ("scope", "graphs", "policy", "narrow"),
    [
        ("whole", 1, "none", False),
        ("blocks", 2, "none", True),
        ("whole", 1, "full", True),
        ("blocks", 2, "full", False),
        ("whole", 1, "selective", False),
        ("blocks", 2, "selective", True),
    ],
)
def test_compiled_it_makes_the_graphs_of_a_run_without(tmp_path, scope, graphs, policy, narrow):
    same = {"activation_checkpointing": policy, "compile_scope": scope, "optim": {"ema": 0.9}, "eval_freq": 2}
    same |= {"attention": "math"} if policy == "selective" else {}
    wanted, loss = trained(tmp_path, language(), "eager", **given(narrow), **same)
    with counting.counted() as seen:
        found, own = trained(tmp_path, language(), "compiled", compile=True, **given(narrow), **same)
    assert (seen.captured, seen.breaks) == (graphs, 0)
    assert len(seen.forwards) == len(seen.backwards) == graphs
    assert own == pytest.approx(loss, rel=2e-2)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=3e-2, atol=3e-2)


def test_a_compiled_forward_casts_no_weight(tmp_path):
    def casts(changes):
        with counting.counted() as seen:
            trained(tmp_path, language(), str(len(changes)), compile=True, compile_scope="whole", **changes)
        nodes = [node for graph in seen.forwards for node in graph.graph.nodes if "_to_copy" in str(node.target)]
        return [tuple(node.meta["val"].shape) for node in nodes].count((64, 16))

    assert casts({"precision": "bf16"}) == 4  # the wider weight of each block, and the head's
    assert casts(STEP) == 0


# what has copies


def test_linear_and_named_layers_have_copies_and_tied_ones_one():
    class Derived(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "one": nn.Linear(4, 4),
            "tied": nn.Linear(4, 4, bias=False),
            "derived": Derived(4, 4),
            "float64": nn.Linear(4, 4).double(),
            "parametrized": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "gpt": GPT(GPTConfig(layers=1, heads=1, width=8, vocab_size=60, context=4)),
        }
    )
    model["tied"].weight = model["one"].weight
    names = set(model.state_dict())
    lines = []
    copies = WeightCopies.of(model, BF16, narrow=False, say=lines.append)
    assert {type(model[name]) is CopiedLinear for name in ("one", "tied")} == {True}
    assert not any(isinstance(model[name], CopiedLinear) for name in ("derived", "float64", "parametrized"))
    assert model["one"].weight_copy is model["tied"].weight_copy
    inside = [p for name, p in model["gpt"].named_parameters() if "norm" not in name and "positions" not in name]
    assert len(copies.tensors) == 2 + len(inside)
    assert copies.nbytes == 2 * (16 + 4 + sum(p.numel() for p in inside))
    assert (set(model.state_dict()), len(lines)) == (names, 1)
    assert not set(copies.tensors) & set(model.parameters())
    other = copy.deepcopy(model)
    assert copies_of(other) is not copies
    assert other["one"].weight_copy is not model["one"].weight_copy


def test_copies_serve_under_autocast_alone():
    model = nn.Sequential(nn.Linear(4, 4))
    copies = WeightCopies.of(model, BF16, narrow=False)
    copies.tensors[0].detach().fill_(torch.nan)
    x = torch.ones(2, 4)
    with copies.use():
        assert model(x).isfinite().all()
        with torch.autocast("cpu", torch.float16):
            assert model(x).isfinite().all()
        with torch.autocast("cpu", BF16):
            assert model(x).isnan().any()
    with torch.autocast("cpu", BF16):
        assert model(x).isfinite().all()


@BOTH
def test_layer_frozen_midway_stays_and_continues_when_thawed(narrow):
    seen = []

    def change(model, step):
        seen.append(model[0].weight.detach().clone())
        model[0].requires_grad_(step != 1)

    by_engine(network(), narrow, 2, 5, change)
    assert [torch.equal(one, other) for one, other in pairwise(seen)] == [False, True, False, False]


def made_of(model, narrow=False):
    WeightCopies.of(model, BF16, narrow=narrow)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return lockstep.engine("single", autocast(model, BF16, "cpu"), optimizer, lockstep.World())


@BOTH
def test_a_forward_without_a_backward_begins_no_step(narrow):
    """As a trial before step 1, after which a checkpoint is loaded."""
    found, wanted = network(), network()
    (one, other), (x, y) = (made_of(model, narrow) for model in (found, wanted)), rows(8)
    with one.accumulate(False):
        one.model(x)
    for model, made in ((found, one), (wanted, other)):
        model[0].weight.data.mul_(3)
        with made.accumulate(True):
            made.backward(F.mse_loss(made.model(x).float(), y))
        made.step()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))


@BOTH
def test_weight_changed_between_micro_batches_counts_at_once(narrow):
    model, x = network(), rows(8)[0]
    made, seen = made_of(model, narrow), []
    for _ in range(2):
        with made.accumulate(False):
            found = made.model(x).float()
            seen.append(found.detach())
            made.backward(found.sum())
        with torch.no_grad():
            model[3].weight.mul_(2)  # a power of two, which bfloat16 keeps
    assert torch.equal(seen[1], 2 * seen[0])


@BOTH
def test_backward_outside_accumulate_may_recompute_blocks(narrow):
    found, wanted, (x, y) = network(), network(), rows(8)
    checkpoint_blocks(found, "full", [found])
    for model in (found, wanted):
        made = made_of(model, narrow)
        with made.accumulate(True):
            loss = F.mse_loss(made.model(x).float(), y)
        made.backward(loss)
        made.step()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))


def test_the_weights_own_uses_keep_their_gradients_in_float32():
    """A penalty on the parameters in the loss is computed from them, not from their copies."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    copies = WeightCopies.of(model, BF16, narrow=False)
    copies.write()
    weight, x = model[0].weight, torch.ones(2, 4)
    with copies.use(), torch.autocast("cpu", BF16):
        (model(x).float().sum() + weight.square().sum()).backward()
    copies.hand_over()
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0) + 2 * weight.detach())


@BOTH
def test_the_footprint_has_the_copies(narrow):
    model = network()
    before = sum(p.nbytes for p in model.parameters())
    by_engine(model, narrow, 2, 1)
    made = lockstep.engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), lockstep.World())
    assert footprint(made).parameters == before + copies_of(model).nbytes


# refusals


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"engine": "ddp"}, "--engine ddp"),
        ({"engine": "zero"}, "--engine zero"),
        ({"engine": "fsdp"}, "--engine fsdp"),
        ({"engine": "deepspeed"}, "--engine deepspeed"),
        ({"engine": "data-parallel"}, "--engine data-parallel"),
        ({"precision": "float32"}, "--precision bf16"),
        ({"guards": {"audit": 0.5}}, "--guards.audit"),
        ({"exact": True, "grad_dtype": "bf16"}, "--exact"),
    ],
)
def test_it_is_refused_by_name_elsewhere(tmp_path, changes, flag):
    with pytest.raises(ConfigError) as refused:
        lockstep.train(config(tmp_path, **STEP | changes), language())
    name = flag.split()[0].lstrip("-").replace("-", "_")
    assert name in str(refused.value).replace("-", "_")
    assert not (tmp_path / "r").exists()


def test_a_dtype_of_gradients_alone_is_refused():
    with pytest.raises(FieldError, match="grad_dtype"):
        lockstep.Config(grad_dtype="bf16", precision="bf16")


def test_task_reading_gradients_midway_has_them_in_float32(tmp_path):
    class Looking(Hooks):
        def __init__(self, task):
            self.task, self.seen = task, []

        def after_backward(self):
            self.seen.append(self.task.held.blocks[0].expand.weight.grad.norm().item())

    def looking():
        task = language()
        make = task.model
        task.model = lambda: setattr(task, "held", make()) or task.held
        task.hooks = Looking(task)
        return task

    with pytest.raises(ConfigError, match="hooks"):
        lockstep.train(config(tmp_path, **given(True)), looking())
    assert not (tmp_path / "r").exists()
    task = looking()
    lockstep.train(config(tmp_path, **STEP, max_steps=1), task)
    assert len(task.hooks.seen) == 4
    assert all(norm > 0 for norm in task.hooks.seen)


class Own(Ragged):
    """A task with a model of the test's."""

    def __init__(self, change):
        super().__init__(dtype=torch.float32)
        self.change = change

    def model(self):
        made = super().model()
        return self.change(made) or made


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_weights_gradient_is_refused(tmp_path, late):
    def hooked(model):
        model.blocks[0][1].weight.register_hook(lambda gradient: gradient * 0)

    def whole():
        run = lockstep.Run(config(tmp_path, **STEP), Own(lambda model: None if late else hooked(model)))
        for _ in run:
            hooked(run.model)

    with pytest.raises(ConfigError, match="blocks.0.1.weight"):
        whole()


def test_forward_that_writes_a_weight_it_uses_is_refused(tmp_path):
    def writing(model):
        @torch.no_grad()
        def shrink(layer, inputs):
            if layer.training:
                layer.weight.mul_(0.5)

        model.blocks[1][1].register_forward_pre_hook(shrink)

    with pytest.raises(ConfigError, match="blocks.1.1.weight"):
        lockstep.train(config(tmp_path, **STEP), Own(writing))


def test_a_model_with_nothing_to_copy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nn.Linear"):
        WeightCopies.of(nn.Sequential(nn.Conv1d(2, 2, 1)), BF16, narrow=False)
