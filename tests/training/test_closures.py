"""Optimizers that evaluate several times a step, and penalties: plain PyTorch's numbers, the same bits on any ranks."""

import closure_tasks as tasks
import pytest
import torch
from ranks import run
from small_runs import config

import lockstep
from lockstep import checkpoint

PLAIN = {"name": "sgd", "schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0, "momentum": 0.0}


def settings(folder, name, **changes):
    optim = PLAIN | changes.pop("optim", {})
    sizes = {"batch_size": tasks.BATCH, "micro_batch_size": 2, "max_steps": 4, "experiment_name": name}
    return config(folder, **sizes | {"precision": "float64", "optim": optim, "exact": True} | changes)


def trained(world, folder, cases):
    """(fingerprint, losses) of each case, of (task, its arguments, name, changes)."""
    found = []
    for task, given, name, changes in cases:
        with lockstep.Run(settings(folder, name, **changes), getattr(tasks, task)(**given), world) as made:
            losses = [step.loss for step in made]
        found.append([checkpoint.fingerprint(checkpoint.newest(made.result.folder, say=print)), losses])
    return found


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", [name for name in tasks.OPTIMIZERS if name != "lbfgs"])  # `wolfe` is that, and steady
def test_one_process_is_plain_torch(name, exact, clip, tmp_path):
    task = (tasks.Penalised if clip else tasks.Classes)(name)
    with lockstep.Run(settings(tmp_path, "one", exact=exact, optim={"clip": clip}), task) as started:
        losses = [step.loss for step in started]
        found = {name: p.detach() for name, p in started.model.named_parameters()}
    wanted, parameters, _ = tasks.oracle(task, 4, clip)
    assert losses == pytest.approx(wanted, rel=1e-11)
    for key, value in parameters.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


CASES = [
    ("Classes", {"optimizer": "sam", "dropout": 0.2, "norm": True}, {}),
    ("Penalised", {"optimizer": "sam-quiet", "norm": True}, {"optim": {"clip": 0.3, "schedule": "cosine"}}),
    ("Classes", {"optimizer": "wolfe", "dropout": 0.2}, {}),
    ("Penalised", {"optimizer": "lbfgs"}, {}),
    ("Classes", {"optimizer": "sam-twice", "samples": 40}, {"max_steps": 0, "num_epochs": 1}),  # a short last step
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_same_bits_on_any_number_of_ranks(ranks, tmp_path):
    one = [(task, given, f"one-{n}", changes | {"engine": "single"}) for n, (task, given, changes) in enumerate(CASES)]
    cases = [(task, given, f"ddp-{n}", changes | {"engine": "ddp"}) for n, (task, given, changes) in enumerate(CASES)]
    wanted = trained(lockstep.World(), tmp_path, one)
    for found in run(trained, ranks, tmp_path, cases):
        assert [bits for bits, _ in found] == [bits for bits, _ in wanted]
        for (_, losses), (_, others) in zip(found, wanted, strict=True):
            assert losses == pytest.approx(others, rel=1e-14)


@pytest.mark.parametrize("name", ["sam", "wolfe"])
def test_a_resume_has_the_same_bits(name, tmp_path):
    case = ("Classes", {"optimizer": name, "dropout": 0.2})
    ((wanted, _),) = trained(lockstep.World(), tmp_path, [(*case, "whole", {})])
    with lockstep.Run(settings(tmp_path, "parts"), tasks.Classes(name, dropout=0.2)) as started:
        for step in started:
            if step.global_step == 2:
                break
    ((found, _),) = trained(lockstep.World(), tmp_path, [(*case, "parts", {})])
    assert found == wanted


def test_a_closure_that_is_called_once_costs_no_pass(tmp_path):
    forwards = []

    class Counting(tasks.Classes):
        def loss(self, model, batch):
            forwards.append(model.training)
            return super().loss(model, batch)

        def optimizer(self, model, config):
            self.made = super().optimizer(model, config)
            return self.made

    task = Counting("polite")
    with lockstep.Run(settings(tmp_path, "one"), task) as started:
        forwards.clear()  # those of the trial
        losses = [step.loss for step in started]
    assert sum(forwards) == 4 * 6
    assert [float(loss) for loss in task.made.seen] == pytest.approx(losses, rel=1e-12)


def test_running_statistics_count_once(tmp_path):
    """A repeated pass leaves no trace in buffers."""
    counts = []
    for name in ("sam", "polite"):
        with lockstep.Run(settings(tmp_path, name, max_steps=1), tasks.Classes(name, norm=True)) as started:
            for _ in started:
                pass
            counts.append({key: value.clone() for key, value in started.model.named_buffers()})
    for key, value in counts[0].items():
        assert torch.equal(value, counts[1][key]), key
