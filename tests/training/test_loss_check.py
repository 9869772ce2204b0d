"""What a run makes of the evidence: the reduction that it sets, checks or refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weighed import Written, halved, trial_of

from lockstep.data.batches import MicroBatch
from lockstep.errors import ConfigError
from lockstep.task import set_detected
from lockstep.training.trial.evidence import halve, sketch, weigh
from lockstep.training.trial.loss_check import check_loss
from lockstep.training.trial.weight_moves import move_weights


def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5))


def batch(seed, samples=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def task_of(kind, declared="auto"):
    losses = {
        "mean": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        "sum": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
        "neither": lambda m, b: m(b[0]).std(0).mean(),
        "unknown": lambda m, b: F.cross_entropy(m(b[0])[torch.randperm(len(b[0]))], b[1]),
        "not finite": lambda m, b: F.cross_entropy(m(b[0]), b[1]) * torch.inf,
    }
    task = Written(network(), losses[kind])
    task.reduction = declared
    return task


def checked(task, micro_batches=2, recorded="", **config):
    """Check a task's loss; return its reduction and the lines that were said."""
    lines, training = [], SimpleNamespace(step_plan=SimpleNamespace(micro_batches=micro_batches, micro_size=8))
    trial = trial_of(task, **config)
    trial.say = lines.append
    check_loss(trial, training, [halved(task, batch(seed), 8) for seed in (3, 4, 5)], recorded)
    return task.reduction, lines


@pytest.mark.parametrize("kind", ["mean", "sum", "neither", "unknown", "not finite"])
def test_a_step_of_one_micro_batch_needs_no_trial(kind):
    assert checked(task_of(kind), micro_batches=1) == ("whole", [])
    assert checked(task_of(kind, "mean"), micro_batches=1) == ("mean", [])


def test_a_run_that_may_cut_its_step_later_is_tried():
    assert checked(task_of("mean"), 1, on_oom="smaller")[0] == "mean"
    with pytest.raises(ConfigError, match="neither"):
        checked(task_of("neither"), 1, on_oom="smaller")


@pytest.mark.parametrize(("kind", "reduction"), [("mean", "mean"), ("sum", "total")])
def test_what_is_shown_is_set_and_said(kind, reduction):
    found, (line,) = checked(task_of(kind))
    assert found == reduction
    assert f"the loss is a {kind} over its items" in line


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("neither", ["`count`", "`step_loss`", "`penalty`", "'micro-batch'", "one device"]),
        ("unknown", ["randperm", "declare reduction = 'sum' or 'mean'"]),
        ("not finite", ["not finite"]),
    ],
)
def test_what_is_not_shown_is_refused_with_the_ways_out(kind, words):
    with pytest.raises(ConfigError) as caught:
        checked(task_of(kind))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "kind"), [("sum", "mean"), ("mean", "sum"), ("sum", "neither"), ("mean", "neither")]
)
def test_a_declaration_at_odds_with_the_evidence_is_refused(declared, kind):
    with pytest.raises(ConfigError, match=kind):
        checked(task_of(kind, declared))


@pytest.mark.parametrize("declared", ["sum", "mean"])
def test_a_declaration_that_nothing_contradicts_passes(declared):
    for kind in (declared, "unknown", "not finite"):
        assert checked(task_of(kind, declared)) == (declared, [])


def test_a_micro_batch_loss_is_not_checked():
    found, (line,) = checked(task_of("neither", "micro-batch"))
    assert found == "micro-batch"
    assert "not checked" in line


@pytest.mark.parametrize(
    ("recorded", "now"), [("mean", "sum"), ("total", "mean"), ("sum", "mean"), ("mean", "neither")]
)
def test_a_resume_with_another_loss_names_both(recorded, now):
    with pytest.raises(ConfigError) as caught:
        checked(task_of(now), recorded=recorded)
    if now != "neither":
        assert {"mean": "a mean", "total": "a sum", "sum": "a sum"}[recorded] in str(caught.value)
        assert f"is a {now} now" in str(caught.value)


def test_a_resume_with_the_same_loss_goes_on():
    for kind, recorded in (("mean", "mean"), ("sum", "total"), ("unknown", "mean")):
        task = task_of(kind)
        assert checked(task, recorded=recorded)[0] == recorded
        restored = task_of(kind)
        set_detected(restored, recorded, gradients=False)
        assert checked(restored, recorded=recorded)[0] == recorded


def test_a_resume_that_is_cut_for_the_first_time_is_proved():
    for recorded in ("whole", "micro-batch", ""):
        task = task_of("mean")
        if recorded == "whole":
            set_detected(task, "whole", gradients=False)
        assert checked(task, recorded=recorded)[0] == "mean"


def test_a_count_that_does_not_add_up_is_refused():
    task = task_of("mean", "mean")
    task.counting = lambda b: len(b[0]) ** 2
    with pytest.raises(ConfigError, match="`count` finds 64 items in 8 samples and 16 and 16"):
        checked(task)


def test_a_single_micro_batch_can_be_weighed_by_itself():
    for kind in ("mean", "sum", "neither"):
        task = task_of(kind)
        assert weigh(trial_of(task), [halve(MicroBatch(batch(3, 7), 0, 7, 1.0), task)]).kind == kind
    odd = MicroBatch({"x": torch.ones(()), "y": torch.ones(8)}, 0, 8, 1.0)
    assert "cannot be cut" in weigh(trial_of(task), [halve(odd, task)]).evidence


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        own = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in own:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_a_tensor_is_made(dtype):
    tensors = [torch.randn(1 << 23).to(dtype).view(1 << 11, -1), torch.zeros(1 << 22, dtype=dtype)]
    with Largest() as largest:
        with move_weights(tensors, 0):
            pass
        sketch(tensors[0], tensors[0])
    assert largest.bytes <= (1 << 22) * 4
