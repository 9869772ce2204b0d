"""Losses over all samples of a step: those of one graph in plain PyTorch, and the same bits on any number of ranks."""

import pytest
import torch
import whole_tasks as tasks
from ranks import run
from small_runs import config

import lockstep
from lockstep import checkpoint

RATE = 0.5
PLAIN = {"name": "sgd", "schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0, "momentum": 0.0}


def settings(folder, name, **changes):
    sizes = {"batch_size": tasks.BATCH, "micro_batch_size": 4, "max_steps": 3, "experiment_name": name}
    return config(folder, **sizes | {"precision": "float64", "optim": PLAIN, "lr": RATE, "exact": True} | changes)


def trained(world, folder, cases):
    """(fingerprint, losses, evaluation) of each case, of (task, its arguments, name, changes)."""
    found = []
    for task, given, name, changes in cases:
        with lockstep.Run(settings(folder, name, **changes), getattr(tasks, task)(**given), world) as made:
            losses = [step.loss for step in made]
        held_out = made.result.evaluation
        evaluated = [held_out.loss, held_out.items, held_out.metrics]
        found.append([checkpoint.fingerprint(checkpoint.newest(made.result.folder, say=print)), losses, evaluated])
    return found


@pytest.mark.parametrize("task", ["Contrastive", "ContrastiveRows", "Dice"])
@pytest.mark.parametrize("micro", [4, 28])
def test_one_process_is_one_graph_over_the_step(task, micro, tmp_path):
    made = getattr(tasks, task)()
    with lockstep.Run(settings(tmp_path, "one", micro_batch_size=micro), made) as started:
        losses = [step.loss for step in started]
        found = {name: p.detach() for name, p in started.model.named_parameters()}
        evaluated = started.result.evaluation
    teacher = tasks.Contrastive() if task == "ContrastiveRows" else made
    wanted, parameters = tasks.oracle(teacher, 3, RATE)
    assert losses == pytest.approx(wanted, rel=1e-12)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)
    model, held_out = started.model.eval(), made.dataset("evaluation")
    whole, rest = ([held_out[i] for i in part] for part in (range(tasks.BATCH), range(tasks.BATCH, len(held_out))))
    with torch.no_grad():
        parts = [
            (len(part), teacher.step_loss(teacher.outputs(model, teacher.collate(part)))) for part in (whole, rest)
        ]
    assert evaluated.loss == pytest.approx(sum(n * float(loss) for n, loss in parts) / len(held_out), rel=1e-12)
    assert evaluated.items == len(held_out)


CASES = [("Contrastive", {"dropout": 0.2, "norm": True}), ("ContrastiveRows", {"dropout": 0.2}), ("Dice", {})]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_same_bits_on_any_number_of_ranks(ranks, tmp_path):
    """7 micro-batches, and a short last step: on 7 ranks each has one, and keeps its graph."""
    one = [(*case, f"one-{case[0]}", {"engine": "single", "max_steps": 0, "num_epochs": 1}) for case in CASES]
    short = {"samples": 2 * tasks.BATCH + 9}
    one = [(task, given | short, name, changes) for task, given, name, changes in one]
    wanted = trained(lockstep.World(), tmp_path, one)
    engines = ("ddp", "zero", "fsdp") if ranks < 7 else ("ddp",)
    cases = [
        (task, given, f"{engine}-{task}", changes | {"engine": engine})
        for engine in engines
        for task, given, _, changes in one
    ]
    for found in run(trained, ranks, tmp_path, cases):
        assert found == wanted * len(engines)
