"""Losses over all samples of a step: those of one graph in plain PyTorch, and the same bits on any number of ranks."""

import importlib.util
import warnings

import pytest
import torch
import whole_tasks as tasks
from ranks import run
from small_runs import config

import lockstep
from lockstep import checkpoint
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.task import as_task

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


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3, 7])
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


def own_loop(world, task):
    """(losses, parameters as bytes) of a loop of one's own."""
    made = getattr(tasks, task)(samples=2 * tasks.BATCH + 9)
    model = made.model()
    engine = lockstep.engine(
        "auto", model, lambda held: torch.optim.SGD(held.parameters(), RATE), world, exact_micro_batches=7
    )
    loader = lockstep.loader(made.dataset("train"), world, batch_size=tasks.BATCH, micro_batch_size=4, shuffle=False)
    form = {"step_loss_rows": made.step_loss_rows} if task == "ContrastiveRows" else {"step_loss": made.step_loss}
    losses = []
    for step in loader:
        losses.append(float(lockstep.step_backward(step, engine, made.outputs, **form)))
        engine.step()
    return losses, [p.detach().numpy().tobytes().hex() for p in model.parameters()]


@pytest.mark.parametrize("task", ["Contrastive", "ContrastiveRows"])
def test_a_loop_of_ones_own_has_the_same_step(task):
    losses, parameters = own_loop(lockstep.World(), task)
    teacher = tasks.Contrastive(samples=2 * tasks.BATCH + 9)
    assert losses[:2] == pytest.approx(tasks.oracle(teacher, 2, RATE)[0], rel=1e-12)
    assert len(losses) == 3
    for found, bits in run(own_loop, 2, task):
        assert found == pytest.approx(losses, rel=1e-15)
        assert bits == parameters


def test_a_loop_of_ones_own_names_what_is_missing():
    with pytest.raises(UsageError, match="step_loss_rows"):
        lockstep.step_backward(None, None, None)


def hopped(world, folder, task):
    """Part of a run; the rest is trained by a resume on another number of ranks."""
    made = getattr(tasks, task)(dropout=0.1)
    result = lockstep.train(settings(folder, "hop", engine="ddp", stop_at=2 if world.size == 2 else 0), made, world)
    return checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))


def test_resume_on_other_ranks_and_shares_is_the_same_run(tmp_path):
    [[wanted, *_]] = trained(
        lockstep.World(), tmp_path, [("ContrastiveRows", {"dropout": 0.1}, "one", {"engine": "single"})]
    )
    run(hopped, 2, tmp_path, "ContrastiveRows")
    assert run(hopped, 3, tmp_path, "ContrastiveRows") == [wanted] * 3
    unequal = ("ContrastiveRows", {"dropout": 0.1}, "shares", {"engine": "ddp", "shares": "1,6"})
    assert [found[0][0] for found in run(trained, 2, tmp_path, [unequal])] == [wanted] * 2


class Planted(tasks.Contrastive):
    """One sample of step 1 is NaN, in that step's second micro-batch."""

    def dataset(self, split):
        data = super().dataset(split)
        if split == "train":
            data.x[tasks.BATCH + 5] = float("nan")
        return data


@pytest.mark.parametrize("ranks", [1, 2])
def test_not_finite_step_is_skipped_and_its_micro_batch_named(ranks, tmp_path):
    given = tmp_path, "planted", {"guards": {"nonfinite": "skip"}, "log_freq": 1, "exact": False}
    losses, parameters = skipped(lockstep.World(), *given) if ranks == 1 else run(skipped, ranks, *given)[0]
    wanted, teacher = tasks.oracle(tasks.Contrastive(), 3, RATE, left_out=1)
    assert [losses[0], losses[2]] == pytest.approx([wanted[0], wanted[2]], rel=1e-12)
    for name, value in teacher.items():
        assert torch.tensor(parameters[name], dtype=value.dtype).sub(value).abs().max() < 1e-11
    said = next((tmp_path / "planted" / "logs").glob("*0*")).read_text()
    assert "micro-batch 1 (samples 32, 33, 34, 35)" in said


def skipped(world, folder, name, changes):
    with lockstep.Run(settings(folder, name, **changes), Planted(), world) as made:
        losses = [step.loss for step in made]
    return losses, {name: p.tolist() for name, p in made.model.named_parameters()}  # no tensor survives its rank


def made(**methods):
    return type("Made", (lockstep.Task,), {"model": lambda self: None, "dataset": lambda self, split: None} | methods)()


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["outputs"], "step_loss"),
        (["step_loss"], "outputs"),
        (["step_loss_rows"], "outputs"),
        (["outputs", "step_loss", "step_loss_rows"], "step_loss_rows"),
        (["outputs", "step_loss", "loss"], "loss"),
        (["outputs", "step_loss", "evaluate"], "metrics"),
        ([], "loss"),
    ],
)
def test_a_task_has_one_form_of_a_loss(names, named):
    with pytest.raises(ConfigError, match=f"`{named}`"):
        as_task(made(**{name: lambda self, *given: None for name in names}))


def test_what_cannot_go_with_it_is_refused(tmp_path):
    nothing = type("Nothing", (tasks.Contrastive,), {"outputs": lambda self, model, batch: (model(*batch)[0], None)})
    with pytest.raises(ConfigError, match="None"):
        lockstep.train(settings(tmp_path, "refused"), nothing())
    for changes, flag in (({"guards": {"audit": 0.5}}, "guards.audit"), ({"eval_micro_batch_size": 3}, "eval")):
        with pytest.raises(ConfigError, match=flag):
            lockstep.train(settings(tmp_path, "refused", **changes), tasks.Contrastive())


class Bad(tasks.Contrastive):
    """A sample of the second step is NaN, or the loss of that step."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def dataset(self, split):
        found = super().dataset(split)
        if self.where == "sample" and split == "train":
            found.x[tasks.BATCH + 9] = torch.nan
        return found

    def outputs(self, model, batch):
        a, b, scale = super().outputs(model, batch)
        return a, b, scale, batch[0]

    def step_loss(self, outputs):
        second = tasks.Pairs(3 * tasks.BATCH).x[tasks.BATCH : 2 * tasks.BATCH]
        is_bad = self.where == "loss" and torch.equal(outputs[3], second)
        return super().step_loss(outputs[:3]) * (torch.nan if is_bad else 1)

    def metrics(self, model, batch):
        return {}


@pytest.mark.parametrize(("where", "named"), [("sample", "micro-batch 2 "), ("loss", "whole step")])
def test_what_is_not_finite_is_named_and_left_out(where, named, tmp_path):
    with pytest.raises(LockstepError, match=named):
        lockstep.train(settings(tmp_path, "stops"), Bad(where))
    with lockstep.Run(settings(tmp_path, "skips", guards={"nonfinite": "skip"}), Bad(where)) as made:
        assert [step.applied for step in made] == [True, False, True]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_and_its_outputs_come_as_float32(precision, tmp_path):
    seen = set()

    class Watched(tasks.Contrastive):
        def step_loss(self, outputs):
            seen.update(part.dtype for part in outputs if torch.is_grad_enabled())
            return super().step_loss(outputs)

    task = Watched(dtype=torch.float32)
    with lockstep.Run(settings(tmp_path, "half", precision=precision, exact=False, max_steps=6), task) as made:
        losses = [step.loss for step in made if step.applied is not False]
    wanted, _ = tasks.oracle(tasks.Contrastive(dtype=torch.float32), 6, RATE)
    assert seen == {torch.float32}
    assert losses[:3] == pytest.approx(wanted[:3], rel=0.02)


class Vectors(tasks.ContrastiveRows):
    """DeepSpeed takes no 0-dim parameter."""

    def model(self):
        model = super().model()
        model.scale = torch.nn.Parameter(model.scale.detach()[None])
        return model


def deepspeed(world, folder):
    warnings.simplefilter("ignore")  # the package's own
    found = []
    for stage in (0, 2, 3):
        task = Vectors(dtype=torch.float32)
        changes = {"engine": "deepspeed", "exact": False, "precision": "float32"}
        changes["engine_options"] = {"zero_stage": stage}
        with lockstep.Run(settings(folder, f"stage-{stage}", **changes), task, world) as made:
            found.append([step.loss for step in made])
    return found


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
def test_deepspeed_computes_it_within_rounding(tmp_path):
    wanted, _ = tasks.oracle(tasks.Contrastive(dtype=torch.float32), 3, RATE)
    for found in run(deepspeed, 2, tmp_path):
        assert found == [pytest.approx(wanted, rel=1e-5)] * 3
