"""A user's own callbacks of Lightning, and each argument of `self.log`, beside Lightning's Trainer on one device."""

import dataclasses
import importlib
import inspect
import json
import os
import signal

import pytest
import torch
from ranks import run as on_ranks
from refusals import refuses
from torch.utils.data import DataLoader

import lockstep
from lockstep.adapters.lightning.callbacks import Served
from lockstep.adapters.lightning.refusals import CALLBACK_HOOKS, LOGGING
from lockstep.errors import ConfigError

pytest.importorskip("lightning")

from lightning_modules import autoencoder, loaders, rows, seeded, trainer

torchmetrics = importlib.import_module("torchmetrics")  # lightning needs it
L = importlib.import_module("lightning.pytorch")
pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]

HOOKS = sorted(
    name
    for name in vars(L.Callback)
    if (name.startswith("on_") or name in ("setup", "teardown")) and "checkpoint" not in name
)


def trained(folder, module, data, callbacks, stop_at=0, **more):
    made = trainer(L, callbacks=callbacks, **more)
    config, task = lockstep.from_lightning(module, data, made)
    config = dataclasses.replace(config, save_dir=str(folder), report=False, stop_at=stop_at)
    return lockstep.train(config, task), task


def validated(seen=None):
    """The guide's autoencoder with a validation, and with every hook of a callback noted in `seen`."""

    class Validated(autoencoder(L)):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", super().training_step(batch, batch_idx).detach(), on_step=True, on_epoch=True)

    def note(name):
        def hook(self, *given, **named):
            seen.append(f"module {name}")

        return hook

    for name in HOOKS if seen is not None else ():
        if hasattr(L.LightningModule, name) and "predict" not in name and name != "setup":
            setattr(Validated, name, note(name))
    return Validated


def noting(seen, **more):
    """A callback that notes each hook, with the step and the epoch that it sees."""

    def note(name):
        def hook(self, trainer, module, *given, **named):
            assert module is trainer.lightning_module
            seen.append((name, trainer.global_step, trainer.current_epoch, len(given), sorted(named)))

        return hook

    hooks = {name: note(name) for name in HOOKS if name not in CALLBACK_HOOKS}
    return type("Noting", (L.Callback,), {**hooks, **more})()


def test_callbacks_run_in_lightnings_order_before_module_hooks(tmp_path):
    theirs, ours = [], []
    trainer(L, callbacks=[noting(theirs)]).fit(seeded(validated(theirs)), *loaders(24, 16))
    trained(tmp_path, seeded(validated(ours)), loaders(24, 16), [noting(ours)])
    callbacks = [[each for each in seen if isinstance(each, tuple)] for seen in (theirs, ours)]
    assert callbacks[1] == callbacks[0]
    unused = {name for name in HOOKS if "test" in name or "predict" in name} | {"on_exception", *CALLBACK_HOOKS}
    assert {each[0] for each in callbacks[0]} == set(HOOKS) - unused
    # The module's methods are tried once before step 1, without the callbacks.
    begun = [next(at for at, each in enumerate(seen) if each[0] == "on_train_batch_start") for seen in (theirs, ours)]
    assert ours[begun[1] :] == theirs[begun[0] :]


class Watching(L.Callback):
    """Notes what a callback reads and logs, as users write it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((float(trainer.callback_metrics["train_loss"]), float(outputs["loss"]), trainer.is_last_batch))

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
            self.seen.append(sorted(trainer.progress_bar_metrics))

    def on_train_epoch_end(self, trainer, module):
        self.log("counted", 2.0, prog_bar=True)


def test_callbacks_see_the_metrics_that_lightnings_show(tmp_path):
    theirs, ours = Watching(), Watching()
    trainer(L, callbacks=[theirs]).fit(seeded(validated()), *loaders(24, 16))
    result, _ = trained(tmp_path, seeded(validated()), loaders(24, 16), [ours])
    assert len(ours.seen) == len(theirs.seen)
    for one, other in zip(ours.seen, theirs.seen, strict=True):
        if isinstance(one, dict):
            assert {"val_loss", "val_loss_epoch"} <= one.keys()
            one, other = ({name: each[name] for name in ("val_loss", "val_loss_epoch")} for each in (one, other))
        assert one == (pytest.approx(other, abs=1e-6) if not isinstance(one, list) else other)
    assert '"counted": 2.0' in (result.folder / "metrics.jsonl").read_text()
    assert result.evaluation.metrics["val_loss"] == result.evaluation.metrics["val_loss_epoch"]


class Counting(L.Callback):
    def __init__(self, stop_after=None):
        self.steps, self.stop_after, self.ended = 0, stop_after, []

    def on_train_batch_end(self, trainer, *given):
        self.steps += 1
        trainer.should_stop = self.steps == self.stop_after

    def on_train_epoch_end(self, *given):
        self.ended.append("epoch")

    def on_train_end(self, *given):
        self.ended.append("end")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["mine"] = torch.arange(self.steps)

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.loaded = checkpoint["mine"].tolist(), checkpoint["callbacks"]


def test_a_callbacks_state_goes_on_after_a_resume(tmp_path):
    trained(tmp_path, seeded(validated()), loaders(32, 16), [Counting()], stop_at=3)
    again = Counting()
    trained(tmp_path, seeded(validated()), loaders(32, 16), [again])
    assert again.steps == 8
    assert again.loaded == ([0, 1, 2], {"Counting": {"steps": 3}})


def test_should_stop_ends_the_run_after_its_step(tmp_path):
    callback = Counting(stop_after=3)
    result, _ = trained(tmp_path, seeded(validated()), loaders(32, 16), [callback])
    assert (result.global_step, callback.ended) == (3, ["epoch", "end"])


def test_a_callback_that_fails_ends_the_run_and_all_are_told(tmp_path):
    told = []

    class Failing(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("mine")

        def on_exception(self, trainer, module, exception):
            told.append((trainer.global_step, type(exception)))

    with pytest.raises(KeyError, match="mine"):
        trained(tmp_path / "a", seeded(validated()), loaders(32, 16), [Failing()])
    assert told == [(3, KeyError)]

    class Reading(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.save_checkpoint("x.ckpt")

    with refuses(ConfigError, "trainer.save_checkpoint"):
        trained(tmp_path / "b", seeded(validated()), loaders(32, 16), [Reading()])


def test_what_callbacks_cannot_do_is_refused_before_writing(tmp_path):
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    nothing = {hook: lambda self, *given: None for hook in CALLBACK_HOOKS}
    for hook, function in nothing.items():
        own = type("Own", (L.Callback,), {hook: function})()
        with refuses(ConfigError, "callback Own", f"`{hook}`", "num_sanity_val_steps=0"):
            trained(tmp_path, seeded(validated()), loaders(), [own], num_sanity_val_steps=2)
    with refuses(ConfigError, "callback Mine", "EarlyStopping"):
        trained(tmp_path, seeded(validated()), loaders(), [type("Mine", (callbacks.EarlyStopping,), {})("val_loss")])
    assert not list(tmp_path.iterdir())


def test_functions_of_a_lambda_callback_are_hooks(tmp_path):
    seen = []
    callback = L.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.current_epoch))
    trained(tmp_path, seeded(validated()), loaders(16, 8), [callback])
    assert seen == [0, 1]


def test_monitors_are_the_users_names_with_several_loaders(tmp_path):
    class Several(autoencoder(L)):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            loss = super().training_step(batch, batch_idx).detach()
            self.log("val_loss", loss)
            self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)

        def on_validation_epoch_end(self):
            self.log("whole", float(self.trainer.callback_metrics["own_0"]) + 1)

    data = loaders(16)[0], [DataLoader(rows(8, 1), 4), DataLoader(rows(12, 2), 4)]
    theirs = trainer(L)
    theirs.fit(seeded(Several), *data)
    wanted = {name: float(value) for name, value in theirs.callback_metrics.items() if name != "train_loss"}
    for monitor in ("val_loss/dataloader_idx_1", "own_1", "whole"):
        chosen = [
            L.callbacks.ModelCheckpoint(monitor=monitor, dirpath=tmp_path / "unused"),
            L.callbacks.EarlyStopping(monitor, patience=1),
        ]
        result, _ = trained(tmp_path / monitor, seeded(Several), data, chosen, enable_checkpointing=True)
        found = result.evaluation.metrics
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
        assert result.best.metric == monitor
        assert result.best.value == pytest.approx(wanted[monitor], abs=0.1)


USES = {
    # argument -> what is logged with it, and a check of (callback metrics, progress bar, logged, records)
    "name": ({}, lambda seen: "x" in seen["callback"]),
    "value": ({}, lambda seen: seen["callback"]["x"] == pytest.approx(1.5)),
    "dictionary": ({}, lambda seen: seen["callback"]["y"] == pytest.approx(1.5)),
    "prog_bar": ({"prog_bar": True}, lambda seen: {"x", "y"} <= seen["bar"]),
    "logger": ({"logger": False}, lambda seen: not {"x", "y"} & seen["logged"]),
    "on_step": ({"on_step": True, "on_epoch": False}, lambda seen: {"x", "y"} <= seen["recorded"]),
    "on_epoch": ({"on_epoch": True, "on_step": True}, lambda seen: {"x_epoch", "y_step"} <= seen["recorded"]),
    "reduce_fx": ({"reduce_fx": "sum"}, lambda seen: seen["callback"]["x"] == 3.0),
    "batch_size": ({"batch_size": "by value"}, lambda seen: seen["callback"]["y"] == pytest.approx(5 / 3)),
    "metric_attribute": ({"metric_attribute": "anything"}, lambda seen: "x" in seen["callback"]),
    "add_dataloader_idx": ({"add_dataloader_idx": False}, lambda seen: "x" in seen["callback"]),
    "enable_graph": ({"enable_graph": True}, lambda seen: "x" in seen["callback"]),
    "sync_dist": ({"sync_dist": True}, lambda seen: "x" in seen["callback"]),
    "rank_zero_only": ({"rank_zero_only": True}, lambda seen: "x" in seen["callback"]),
    "sync_dist_group": ({"sync_dist_group": "a group"}, None),
}


@pytest.mark.parametrize("argument", sorted(USES))
def test_each_argument_of_log_has_its_use(tmp_path, argument):
    given, holds = USES[argument]
    seen = {}

    class Logging(autoencoder(L)):
        def training_step(self, batch, batch_idx):
            more = {"on_step": False, "on_epoch": True} | given
            value = float(batch_idx + 1)
            more |= {"batch_size": int(value)} if "batch_size" in given else {}
            self.log("x", value, **more)
            more.pop("metric_attribute", None)
            self.log_dict({"y": value}, **more)
            return super().training_step(batch, batch_idx)

    class Looking(L.Callback):
        def on_train_end(self, trainer, module):
            seen.update(callback={k: float(v) for k, v in trainer.callback_metrics.items()})
            seen.update(bar=set(trainer.progress_bar_metrics), logged=set(trainer.logged_metrics))

    more = {"max_epochs": 1, "log_every_n_steps": 1}
    if holds is None:
        with refuses(ConfigError, f"{argument}=...", LOGGING[argument].what):
            trained(tmp_path, seeded(Logging), loaders(16)[0], [Looking()], **more)
        return
    result, _ = trained(tmp_path, seeded(Logging), loaders(16)[0], [Looking()], **more)
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    seen["recorded"] = {name for line in lines if line.startswith("{") for name in json.loads(line)}
    assert holds(seen), seen


def test_every_argument_of_log_and_log_dict_is_in_the_table():
    known = {*inspect.signature(L.LightningModule.log).parameters}
    known |= {*inspect.signature(L.LightningModule.log_dict).parameters}
    assert known - {"self"} == LOGGING.keys() == USES.keys()


def counted(world, folder):
    world.leave()
    os.environ["OMP_NUM_THREADS"] = "1"
    modules, package = importlib.import_module("lightning_modules"), importlib.import_module("lightning.pytorch")
    seen = []

    class Here(package.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((batch_idx, trainer.is_global_zero, trainer.global_rank))
            here = len(seen) == 6 and trainer.is_global_zero
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(here, all=False)

    kind = type("Own", (modules.autoencoder(package),), {"configure_callbacks": lambda self: [Here()]})
    config, task = lockstep.from_lightning(modules.seeded(kind), modules.loaders(64)[0], devices=2)
    config = dataclasses.replace(config, save_dir=str(folder), report=False, num_epochs=2)
    result = lockstep.train(config, task)
    return result.global_step, seen


def test_callbacks_are_called_on_each_rank_for_each_batch(tmp_path):
    found = on_ranks(counted, 2, tmp_path, timeout=120.0)
    for rank, (steps, seen) in enumerate(found):
        assert steps == 6
        assert seen == [(step % 4, rank == 0, rank) for step in range(steps)]


def test_run_that_rolls_back_to_its_start_restores_its_states():
    callback = Counting()
    served = Served([callback])
    served.load(None)
    callback.steps = 5
    served.load(None)
    assert callback.steps == 0


@pytest.mark.parametrize(
    ("monitor", "both", "validates"),
    [
        *[("train_loss", both, validates) for both in (False, True) for validates in (False, True)],
        ("train_loss_step", True, True),
    ],
)
def test_values_of_the_training_are_monitored_as_in_lightning(tmp_path, monitor, both, validates):
    class Monitored(autoencoder(L)):
        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
            self.log("train_loss", loss, **({"on_step": True, "on_epoch": True} if both else {}))
            return loss

    class Validated(Monitored):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[0]))

        def forward(self, x):
            return self.decoder(self.encoder(x))

    kind, data = (Validated, loaders()) if validates else (Monitored, loaders()[:1])
    made = []
    for folder in ("theirs", "ours"):
        saving = L.callbacks.ModelCheckpoint(tmp_path / folder, monitor=monitor, save_top_k=1)
        callbacks = [L.callbacks.EarlyStopping(monitor, mode="max", patience=2), saving]
        made.append(trainer(L, max_epochs=6, enable_checkpointing=True, callbacks=callbacks))
    theirs, ours = made
    theirs.fit(seeded(kind), *data)
    assert theirs.current_epoch < 6  # it was stopped
    config, task = lockstep.from_lightning(seeded(kind), data if validates else data[0], ours)
    result = lockstep.train(dataclasses.replace(config, save_dir=str(tmp_path / "run"), report=False), task)
    assert (result.status, result.global_step) == ("stopped", theirs.global_step)
    assert task.trainer.checkpoint_callback is ours.checkpoint_callback
    assert float(ours.checkpoint_callback.best_model_score) == pytest.approx(
        float(theirs.checkpoint_callback.best_model_score), rel=1e-5
    )
    step = int(theirs.checkpoint_callback.best_model_path.split("step=")[1].split("-")[0].removesuffix(".ckpt"))
    assert ours.checkpoint_callback.best_model_path == result.best.path
    assert result.best.step == step


def fitted(folder, kind, data, callbacks, stops_before=0, **more):
    """Train by a run; a request to stop comes before the step `stops_before`, which is the last one then."""
    ours = trainer(L, max_epochs=3, enable_checkpointing=True, callbacks=callbacks, **more)
    config, task = lockstep.from_lightning(seeded(kind), data, ours)
    with lockstep.Run(dataclasses.replace(config, save_dir=str(folder), report=False), task) as run:
        for step in run:
            if step.global_step == stops_before - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    return run.result, ours


class Judged(autoencoder(L)):
    """Logs the training's error as a metric with a state, and a metric alone in validation: it has no loss there."""

    def __init__(self):
        super().__init__()
        self.error, self.held = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        output = self.decoder(self.encoder(batch[0]))
        self.error.update(output.detach(), batch[0])
        self.log("error", self.error, on_step=False, on_epoch=True)
        loss = torch.nn.functional.mse_loss(output, batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.held.update(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("held", self.held)


def evaluations(result):
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "evaluation/items" in record]


def test_training_metric_is_monitored_by_a_late_evaluation(tmp_path, capsys):
    saving = [L.callbacks.ModelCheckpoint(tmp_path / "t", monitor="error")]
    theirs = trainer(L, max_epochs=3, enable_checkpointing=True, callbacks=saving)
    theirs.fit(seeded(Judged), *loaders())
    whole, _ = fitted(tmp_path / "a", Judged, loaders(), [L.callbacks.ModelCheckpoint(tmp_path, monitor="error")])
    assert whole.best.value == pytest.approx(float(theirs.checkpoint_callback.best_model_score), rel=1e-5)
    assert "evaluation loss" not in capsys.readouterr().out
    assert {record["evaluation/loss"] for record in evaluations(whole)} == {None}  # there is no loss

    for stops_before in (16, 0):
        callbacks = [L.callbacks.ModelCheckpoint(tmp_path, monitor="error")]
        result, _ = fitted(tmp_path / "b", Judged, loaders(), callbacks, stops_before)
        assert result.global_step == (stops_before or 24)
    assert evaluations(result) == evaluations(whole)


def test_a_monitor_is_looked_at_every_few_steps_as_in_lightning(tmp_path):
    data = loaders()[0]
    found = []
    for folder in ("theirs", "ours"):
        saving = L.callbacks.ModelCheckpoint(tmp_path / folder, monitor="train_loss", every_n_train_steps=3)
        found.append([saving, L.callbacks.EarlyStopping("nothing", strict=False)])
    theirs = trainer(L, max_epochs=3, enable_checkpointing=True, callbacks=found[0])
    theirs.fit(seeded(Judged), data)
    result, ours = fitted(tmp_path / "run", Judged, data, found[1])
    wanted = theirs.checkpoint_callback
    assert f"step={result.best.step}" in wanted.best_model_path
    assert float(ours.checkpoint_callback.best_model_score) == pytest.approx(float(wanted.best_model_score), rel=1e-5)
