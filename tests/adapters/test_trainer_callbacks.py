"""A user's own TrainerCallbacks, beside the Hugging Face Trainer on one device."""

import dataclasses
import importlib
import os

import pytest
import torch
from ranks import run as on_ranks
from refusals import refuses

import lockstep
from lockstep.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hf_trainers import causal  # noqa: E402

EVENTS = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_") and name != "on_init_end"]
MEASURED = ("runtime", "per_second", "total_flos")  # of the Trainer's logs, that a run has elsewhere


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(trainer, **changes):
    config, task = lockstep.from_trainer(trainer)
    return lockstep.train(dataclasses.replace(config, report=False, **changes), task)


def noting(seen):
    """A callback that notes each event, with what it sees of state, control and numbers."""

    def note(name):
        def event(self, args, state, control, model, optimizer, processing_class, **more):
            numbers = {**more.get("logs", {}), **more.get("metrics", {})}
            numbers = {key: each for key, each in numbers.items() if not any(word in key for word in MEASURED)}
            flags = control.should_log, control.should_evaluate, control.should_save, control.should_training_stop
            plan = state.max_steps, state.num_train_epochs, state.train_batch_size, state.eval_steps
            if "train_loss" in numbers:
                numbers["train_loss"] = 0.0  # here the mean of what was logged, there of all steps
            seen.append((name, state.global_step, len(state.log_history), flags, plan, {"at": state.epoch, **numbers}))

        return event

    return type("Noting", (transformers.TrainerCallback,), {name: note(name) for name in EVENTS})()


@pytest.mark.parametrize(
    "more",
    [
        {
            "num_train_epochs": 2,
            "max_steps": -1,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "logging_steps": 5,
        },
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
        | {"save_steps": 2, "logging_steps": 2, "metric_for_best_model": "loss"},
    ],
    ids=["epochs", "steps"],
)
def test_events_come_in_the_trainers_order_with_its_state(tmp_path, more):
    theirs, ours = [], []
    theirs_trainer = causal(tmp_path / "theirs", callbacks=[noting(theirs)], **more)
    theirs_trainer.train()
    trainer = causal(tmp_path / "ours", callbacks=[noting(ours)], **more)
    trained(trainer)
    assert [each[:5] for each in ours] == [each[:5] for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one[5] == pytest.approx(other[5], abs=2e-2), one[0]  # evaluations are over labels here
    assert trainer.state.best_global_step == theirs_trainer.state.best_global_step


class Asking(transformers.TrainerCallback):
    """Asks for a log, an evaluation and a save after step 2, and for the end after step 3."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **more):
        control.should_evaluate = control.should_save = state.global_step == 2
        control.should_log |= state.global_step == 2
        control.should_training_stop = state.global_step == 3

    def on_log(self, args, state, control, logs, **more):
        self.seen.append((state.global_step, "log", logs.get("loss")))

    def on_evaluate(self, args, state, control, metrics, **more):
        self.seen.append((state.global_step, "evaluate", metrics["eval_loss"]))

    def on_save(self, args, state, control, **more):
        self.seen.append((state.global_step, "save", None))


def test_what_control_asks_for_is_done(tmp_path):
    more = {"max_steps": 8, "logging_steps": 100, "logging_first_step": True, "eval_strategy": "steps", "eval_steps": 3}
    theirs, ours = Asking(), Asking()
    causal(tmp_path / "theirs", callbacks=[theirs], **more).train()
    result = trained(causal(tmp_path / "ours", callbacks=[ours], **more))
    assert result.global_step == 3
    assert [each[:2] for each in ours.seen] == [each[:2] for each in theirs.seen]
    assert (2, "save", None) in ours.seen
    assert ours.seen[0][2] == pytest.approx(theirs.seen[0][2], abs=1e-5)  # of step 1
    assert {each.name for each in (result.folder / "checkpoints").iterdir()} >= {"step-00000002", "step-00000003"}
    lines = (result.folder / "metrics.jsonl").read_text()
    assert lines.count('"evaluation/loss"') == 1  # the one of step 3, which is due, is not asked for


class Patient(transformers.EarlyStoppingCallback):
    """A subclass of the user's, which decides by the Trainer's state."""

    def check_metric_value(self, args, state, control, metric_value):
        super().check_metric_value(args, state, control, metric_value)
        self.early_stopping_patience_counter += 1


def test_a_callback_of_the_users_ends_the_run_by_the_best_metric(tmp_path):
    more = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    theirs = causal(tmp_path / "theirs", callbacks=[Patient(3, 100.0)], **more)
    theirs.train()
    result = trained(causal(tmp_path / "ours", callbacks=[Patient(3, 100.0)], **more))
    assert result.global_step == theirs.state.global_step < 8


class Counting(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self):
        self.steps, self.history = 0, 0

    def on_step_end(self, args, state, control, **more):
        self.steps, self.history = self.steps + 1, len(state.log_history)

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_state_and_history_go_on_after_a_resume(tmp_path):
    trained(causal(tmp_path / "a", callbacks=[Counting()], max_steps=6), stop_at=3)
    again = Counting()
    trained(causal(tmp_path / "a", callbacks=[again], max_steps=6))
    assert (again.steps, again.history) == (6, 5)  # the last step is logged after its event


class Failing(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        raise KeyError("mine")


class Reading(transformers.TrainerCallback):
    def on_log(self, args, state, control, lr_scheduler=None, **more):
        lr_scheduler.get_last_lr()


class Ending(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        control.should_epoch_stop = True


def test_what_a_callback_cannot_do_is_refused_by_name(tmp_path):
    with refuses(ConfigError, "callback Ending", "should_epoch_stop"):
        trained(causal(tmp_path / "a", callbacks=[Ending()]))
    assert not list((tmp_path / "a").iterdir())  # the Trainer itself has made it
    with refuses(ConfigError, "lr_scheduler.get_last_lr"):
        trained(causal(tmp_path / "b", callbacks=[Reading()]))
    with pytest.raises(KeyError, match="mine"):
        trained(causal(tmp_path / "c", callbacks=[Failing()]))


def asking(world, folder):
    world.leave()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    library, trainers = importlib.import_module("transformers"), importlib.import_module("hf_trainers")
    seen = []

    class Here(library.TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            seen.append((state.global_step, state.is_world_process_zero))
            if state.global_step == 2 and state.is_world_process_zero:  # one rank's wish is enough
                control.should_save = control.should_training_stop = True

        def on_save(self, args, state, control, **more):
            seen.append("save")

    trainer = trainers.causal(folder, callbacks=[Here()])
    config, task = lockstep.from_trainer(trainer, devices=2)
    return lockstep.train(dataclasses.replace(config, report=False), task).global_step, seen


def test_events_come_on_each_rank_and_one_may_ask(tmp_path):
    for rank, (steps, seen) in enumerate(on_ranks(asking, 2, tmp_path / "run", timeout=120.0)):
        assert steps == 2
        assert seen == [(1, rank == 0), (2, rank == 0), "save"]
