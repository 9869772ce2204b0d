"""lockstep.from_lightning on one device: Lightning's own losses, rates, numbers and order of hooks."""

import contextlib
import copy
import dataclasses
import importlib
import json

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, default_collate

import lockstep
from lockstep.config.sections import Guards, Optim
from lockstep.errors import ConfigError, LockstepError

pytest.importorskip("lightning")

from lightning_modules import autoencoder, classifier, gan, loaders, rows, seeded, their_losses, trainer, uneven
from refusals import refuses

L = importlib.import_module("lightning.pytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


def trained(folder, module, data, made=None, **changes):
    """The losses of the run that a module becomes, and the run."""
    config, task = lockstep.from_lightning(module, data, made)
    with lockstep.Run(dataclasses.replace(config, save_dir=str(folder), report=False, **changes), task) as run:
        return [step.loss for step in run], run


def records(run):
    lines = (run.result.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_guides_autoencoder_trains_as_under_lightning(tmp_path, package):
    pytest.importorskip(package.partition(".")[0])
    kind = importlib.import_module(package)
    theirs, made = their_losses(kind, seeded(autoencoder(kind)), loaders())
    module = seeded(autoencoder(kind))
    ours, run = trained(tmp_path, module, loaders(), trainer(kind))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert run.model is module
    for one, other in zip(module.parameters(), made.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_uneven_batch_sampler_trains_as_under_lightning(tmp_path):
    kind = classifier(L)
    theirs, _ = their_losses(L, seeded(kind), uneven(), max_epochs=3)
    ours, run = trained(tmp_path, seeded(kind), uneven(), trainer(L, max_epochs=3))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert len(ours) == run.result.global_step == 24


def one_cycle(module, optimizer):
    steps = module.trainer.estimated_stepping_batches
    return [optimizer], [{"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, steps), "interval": "step"}]


def plateau(module, optimizer):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def by_group(module, optimizer):
    rates = lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)])
    return ([optimizer], [{"scheduler": rates, "interval": "step", "frequency": 3}])


def two_of_them(module, optimizer):
    slowly = {"scheduler": lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), "interval": "step"}
    return [optimizer], [slowly, lr_scheduler.StepLR(optimizer, 1, 0.5)]


def in_a_list_of_dicts(module, optimizer):
    return [{"optimizer": optimizer, "lr_scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5)}]


@pytest.mark.parametrize(
    "configure",
    [one_cycle, plateau, by_group, two_of_them, in_a_list_of_dicts, lambda module, optimizer: [optimizer]],
    ids=lambda configure: configure.__name__,
)
def test_every_form_of_configure_optimizers_has_lightnings_rates(tmp_path, configure):
    kind = classifier(L, configure=configure)
    module = seeded(kind)
    theirs, _ = their_losses(L, module, loaders(), max_epochs=3)
    rates, module = module.rates, seeded(kind)
    ours, _ = trained(tmp_path, module, loaders(), trainer(L, max_epochs=3))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(module.rates, rates, rtol=1e-12)


def test_numbers_are_reduced_over_items_as_under_lightning(tmp_path):
    """The last batch of the held-out set is short, so a mean of means would be another number."""
    module = seeded(classifier(L))
    _, made = their_losses(L, module, loaders())
    theirs = {name: float(value) for name, value in made.callback_metrics.items()}
    _, run = trained(tmp_path, seeded(classifier(L)), loaders(), trainer(L, log_every_n_steps=4))
    found = run.result.evaluation.metrics
    for name in ("val_loss", "largest", "rows", "all", "accuracy", "seen"):
        assert found[name] == pytest.approx(
            theirs[name], abs=0.02 if name in ("val_loss", "largest", "accuracy") else 0
        )
    assert found["seen"] == found["all"] == 20
    last = {name: value for record in records(run) for name, value in record.items()}
    assert last["train_loss_epoch"] == pytest.approx(theirs["train_loss_epoch"], abs=1e-5)
    assert last["mean_loss"] == pytest.approx(theirs["mean_loss"], abs=1e-5)
    assert last["train_loss_step"] == pytest.approx(theirs["train_loss_step"], abs=1e-5)


HOOKS = (
    *("prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_model_eval"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end", "on_validation_model_train", "on_train_epoch_end"),
    *("on_train_end", "on_fit_end", "teardown", "on_before_batch_transfer", "on_after_batch_transfer"),
)


def recording():
    """A module that notes which of its methods are called, in order, while `quiet` is not set."""
    seen = []

    class Recording(autoencoder(L)):
        def training_step(self, batch, batch_idx):
            seen.append(f"training_step {batch_idx}")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(f"validation_step {batch_idx}")
            self.log("val_loss", super().training_step(batch, batch_idx).detach())

    def note(name, original):
        def hook(self, *given, **named):
            seen.append(name)
            modes = {"on_validation_model_eval": False, "on_validation_model_train": True}
            if name in modes:
                self.train(modes[name])
            return original(self, *given, **named)

        return hook

    for name in HOOKS:
        setattr(Recording, name, note(name, getattr(Recording, name)))
    return seen, Recording


def test_hooks_are_called_in_lightnings_own_order(tmp_path):
    theirs, kind = recording()
    their_losses(L, seeded(kind), loaders(24, 16))
    ours, kind = recording()
    trained(tmp_path, seeded(kind), loaders(24, 16), trainer(L))
    tried = ours.index("on_train_epoch_start") + 1  # each method is tried once before step 1, which Lightning does not
    begun = ours.index("on_train_batch_start")
    began = max(place for place in range(begun) if not ours[place].endswith("transfer"))
    assert {"training_step 0", "validation_step 0"} <= set(ours[tried:begun])
    assert ours[:tried] + ours[began + 1 :] == theirs


def test_a_line_at_the_start_says_that_a_batch_is_a_micro_batch(tmp_path):
    _, run = trained(tmp_path, seeded(autoencoder(L)), loaders(16), trainer(L))
    log = (run.result.folder / "logs" / "rank-00000.log").read_text()
    assert [line for line in log.splitlines() if "8 samples" in line and "micro-batch" in line and "Lightning" in line]


def test_batches_of_each_evaluation_set_are_numbered_from_0(tmp_path):
    def numbering():
        seen = []

        class Numbering(autoencoder(L)):
            def validation_step(self, batch, batch_idx, dataloader_idx):
                if not self.trainer.sanity_checking:
                    seen.append((dataloader_idx, batch_idx))
                self.log("val_loss", super().training_step(batch, batch_idx).detach())

        return seen, seeded(Numbering)

    train, held_out = loaders(16)
    data = train, [held_out, DataLoader(rows(10, 2), 5)]
    theirs, module = numbering()
    their_losses(L, module, data)
    ours, module = numbering()
    trained(tmp_path, module, data, trainer(L))
    assert ours == theirs
    assert ours[:5] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_accumulated_batch_has_its_hooks_once(tmp_path):
    theirs, kind = recording()
    their_losses(L, seeded(kind), loaders(32, 16), accumulate_grad_batches=2)
    ours, kind = recording()
    trained(tmp_path, seeded(kind), loaders(32, 16), trainer(L, accumulate_grad_batches=2))
    for name in ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step"):
        assert ours.count(name) == theirs.count(name), name


def test_a_gan_trains_as_under_lightning(tmp_path):
    theirs, made = their_losses(L, seeded(gan(L)), loaders()[:1])
    module = seeded(gan(L))
    ours, _ = trained(tmp_path, module, loaders()[0], trainer(L))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert module.steps == 16
    for one, other in zip(module.parameters(), made.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_micro_batches_of_a_gan_meet_at_each_step(tmp_path):
    """Two micro-batches of 8 are one batch of 16 where nothing depends on the batch, as BatchNorm does."""

    class Plain(gan(L)):
        def __init__(self):
            super().__init__()
            self.generator[1] = torch.nn.Identity()

    whole, _ = trained(tmp_path / "one", seeded(Plain), DataLoader(rows(), 16), trainer(L))
    halves, run = trained(
        tmp_path / "two", seeded(Plain), DataLoader(rows(), 16), trainer(L), micro_batch_size=8, log_freq=1
    )
    np.testing.assert_allclose(halves[:2], whole[:2], rtol=0, atol=1e-5)
    assert run.model.steps == 8  # counted once a step, whatever the micro-batches
    assert any("made" in record for record in records(run))


def test_micro_batches_that_step_unalike_are_told_apart(tmp_path):
    class Unalike(gan(L)):
        def __init__(self):
            super().__init__()
            self.generator[1] = torch.nn.Identity()

        def training_step(self, batch, batch_idx):
            place = int(batch[0][0, 0] > 0)
            self.optimizers()[place].zero_grad()
            self.manual_backward(self.judge(self.generator(batch[0][:, :4])).mean())
            self.optimizers()[place].step()

    with refuses(LockstepError, "['optimizer', 0]", "['optimizer', 1]"):
        trained(tmp_path, seeded(Unalike), DataLoader(rows(), 16), trainer(L), micro_batch_size=4)


def test_resume_restores_schedulers_plateaus_and_saved_state(tmp_path):
    class Saving(classifier(L, configure=plateau)):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"seen": torch.arange(3), "name": "x"}

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint["mine"]

    made = trainer(L, max_epochs=4)
    whole, _ = trained(tmp_path / "whole", seeded(Saving), loaders(), made)
    begun, _ = trained(tmp_path / "parts", seeded(Saving), loaders(), made, stop_at=16)
    rest, run = trained(tmp_path / "parts", seeded(Saving), loaders(), made)
    assert begun + rest == whole
    assert run.model.loaded["name"] == "x"
    assert run.model.loaded["seen"].tolist() == [0, 1, 2]
    assert len({tuple(rates) for rates in run.model.rates}) > 1  # it fell within the second part


def test_a_gan_resumes_bit_for_bit(tmp_path):
    made = trainer(L)
    whole, _ = trained(tmp_path / "whole", seeded(gan(L, draws=True)), loaders()[0], made)
    begun, _ = trained(tmp_path / "parts", seeded(gan(L, draws=True)), loaders()[0], made, stop_at=5)
    rest, _ = trained(tmp_path / "parts", seeded(gan(L, draws=True)), loaders()[0], made)
    assert begun + rest == whole


def test_metric_states_merge_and_training_metrics_stay_apart(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(autoencoder(L)):
        def __init__(self):
            super().__init__()
            accuracy = lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3)  # noqa: E731
            self.learned, self.held_out = accuracy(), accuracy()
            self.several = torchmetrics.MetricCollection({"a": accuracy(), "b": accuracy()}, prefix="val_")

        def training_step(self, batch, batch_idx):
            self.learned(self.encoder(batch[0]).softmax(-1), batch[1])
            self.log("learned", self.learned, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            out = self.encoder(batch[0]).softmax(-1)
            self.held_out(out, batch[1])
            self.several.update(out, batch[1])
            self.log("held_out", self.held_out)

        def on_validation_epoch_end(self):
            self.log_dict(self.several.compute())
            self.several.reset()

    module = seeded(Measured)
    _, made = their_losses(L, module, loaders())
    theirs = {name: float(value) for name, value in made.callback_metrics.items()}
    _, run = trained(tmp_path, seeded(Measured), loaders(), trainer(L))
    found = run.result.evaluation.metrics
    assert found["held_out"] == found["val_a"] == found["val_b"] == pytest.approx(theirs["held_out"])
    assert {"learned": theirs["learned"]}.items() <= {
        k: pytest.approx(v) for r in records(run) for k, v in r.items()
    }.items()


def test_test_and_predict_steps(tmp_path):
    class Used(autoencoder(L)):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", torch.nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0]))

        def predict_step(self, batch, batch_idx):
            return self.encoder(batch[0])

        def test_dataloader(self):
            return DataLoader(rows(20, 3), 8)

        predict_dataloader = test_dataloader

    module = seeded(Used)
    _, task = lockstep.from_lightning(module, loaders())
    x = rows(20, 3).tensors[0]
    wanted = torch.nn.functional.mse_loss(module.decoder(module.encoder(x)), x).detach()
    assert task.test() == {"test_loss": pytest.approx(float(wanted), rel=1e-5)}
    torch.testing.assert_close(torch.cat(task.predict()), module.encoder(x))
    assert module.training


def test_what_is_in_no_run_is_refused_by_its_name(tmp_path):
    class Asking(autoencoder(L)):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.trainer.predict_loop

    with pytest.raises(ConfigError, match=r"trainer\.predict_loop"):
        trained(tmp_path, seeded(Asking), loaders())


def test_a_module_reads_its_trainer(tmp_path):
    seen = []

    class Reading(autoencoder(L)):
        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            seen.append((self.global_step, self.current_epoch, trainer.max_epochs, trainer.estimated_stepping_batches))
            assert (trainer.world_size, trainer.is_global_zero, trainer.num_training_batches) == (1, True, 8)
            assert self.logger is None
            assert trainer.training
            return super().training_step(batch, batch_idx)

    trained(tmp_path, seeded(Reading), loaders(), trainer(L))
    assert seen[1:] == [(step, step // 8, 2, 16) for step in range(16)]  # the first is the trial


def test_a_trainers_logger_gets_what_is_logged(tmp_path):
    loggers = importlib.import_module("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path / "csv")
    trained(tmp_path, seeded(autoencoder(L)), loaders(), trainer(L, logger=logger, log_every_n_steps=2))
    assert "train_loss" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()


def test_lazy_parameters_are_made_first(tmp_path):
    class Lazy(autoencoder(L)):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.LazyLinear(3)

    losses, _ = trained(tmp_path, seeded(Lazy), loaders(), trainer(L))
    assert len(losses) == 16


@contextlib.contextmanager
def refused(words):
    with pytest.raises(ConfigError) as caught:
        yield
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_validation_sets_have_their_names_and_index(tmp_path):
    class Several(autoencoder(L)):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("place", float(dataloader_idx))

        def val_dataloader(self):
            return [DataLoader(rows(8, 1), 4), DataLoader(rows(12, 2), 4)]

        def train_dataloader(self):
            return DataLoader(rows(), 8)

    config, task = lockstep.from_lightning(seeded(Several))
    with lockstep.Run(dataclasses.replace(config, save_dir=str(tmp_path), report=False, max_steps=2), task) as run:
        for _ in run:
            pass
    found = run.result.evaluation.metrics
    assert (found["place/dataloader_idx_0"], found["place/dataloader_idx_1"]) == (0.0, 1.0)
    assert found["dataloader_idx_1/items"] == 12


def test_what_cannot_lie_in_a_checkpoint_is_told_by_its_hook(tmp_path):
    class Saving(autoencoder(L)):
        held = torch.float64

        def on_save_checkpoint(self, checkpoint):
            checkpoint["held"] = self.held

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint["held"]

    trained(tmp_path / "dtype", seeded(Saving), loaders()[0], trainer(L), stop_at=2)
    _, run = trained(tmp_path / "dtype", seeded(Saving), loaders()[0], trainer(L), stop_at=4)
    assert run.model.loaded is torch.float64


def test_resume_uses_the_module_in_the_checkpoint(tmp_path):
    class Saving(autoencoder(L)):
        def on_save_checkpoint(self, checkpoint):
            checkpoint |= {"held": self.encoder, "best": 0.5}

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["held"] is self.encoder
            self.loaded = checkpoint["best"]

    trained(tmp_path, seeded(Saving), loaders()[0], trainer(L), stop_at=2)
    _, run = trained(tmp_path, seeded(Saving), loaders()[0], trainer(L), stop_at=4)
    assert run.model.loaded == 0.5


def test_what_a_checkpoint_cannot_hold_is_refused_before_step_1(tmp_path):
    taken = []

    class Saving(autoencoder(L)):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["held"] = copy.deepcopy(self.encoder)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            taken.append(batch_idx)

    with pytest.raises(ConfigError, match="on_save_checkpoint puts a Sequential into the checkpoint"):
        trained(tmp_path / "module", seeded(Saving), loaders()[0], trainer(L))

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return loaders()[0]

        def state_dict(self):
            return {"held": object()}

    with pytest.raises(ConfigError, match="the datamodule's state_dict puts a object into the checkpoint"):
        trained(tmp_path / "data", seeded(autoencoder(L)), Data(), trainer(L))
    assert not taken


def test_saved_state_is_tried_once_and_leaves_nothing_behind(tmp_path):
    seen = []

    class Saving(autoencoder(L)):
        def __init__(self):
            super().__init__()
            self.saves, self.each = 0, []

        def on_save_checkpoint(self, checkpoint):
            seen.append((checkpoint["global_step"], self.trainer.sanity_checking))
            self.saves += 1
            self.each.append(checkpoint["global_step"])
            checkpoint["best"] = self.best  # which the training brings

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.best = float(outputs["loss"])

    for stop_at in (4, 6):
        _, run = trained(tmp_path, seeded(Saving), loaders()[0], trainer(L), stop_at=stop_at, ckpt_freq=2)
        first = 2 if stop_at == 4 else 6
        assert run.model.each == list(range(first, stop_at + 1, 2))
        assert run.model.saves == len(run.model.each)
    assert seen == [(0, True), (2, False), (4, False), (6, False)]


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"optim": Optim(clip=1.0)}, "optim.clip"),
        ({"optim": Optim(clip=0.0, ema=0.9)}, "optim.ema"),
        ({"guards": Guards(nonfinite="skip")}, "guards.nonfinite skip"),
        ({"guards": Guards(spike="skip")}, "guards.spike skip"),
        ({"precision": "fp16"}, "precision fp16"),
    ],
    ids=["clip", "ema", "nonfinite", "spike", "fp16"],
)
def test_manual_optimization_refuses_single_update_options(tmp_path, changes, setting):
    with refuses(LockstepError, setting):
        trained(tmp_path, seeded(gan(L)), loaders()[0], trainer(L), **changes)
    assert not list(tmp_path.rglob("checkpoints/step-*"))


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_gan_with_a_bad_sample_stops_or_goes_back(tmp_path, policy):
    """What is not finite is in the weights by the time it is known: they are not kept."""
    bad = TensorDataset(*(tensor.clone() for tensor in rows().tensors))
    bad.tensors[0][37, 1] = torch.nan
    settings = {"guards": Guards(nonfinite=policy), "ckpt_freq": 2, "log_freq": 1}
    if policy == "stop":
        with pytest.raises(lockstep.errors.LockstepError, match="step 5"):
            trained(tmp_path, seeded(gan(L)), DataLoader(bad, 8), trainer(L, max_epochs=1), **settings)
        return
    losses, run = trained(tmp_path, seeded(gan(L)), DataLoader(bad, 8), trainer(L, max_epochs=1), **settings)
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())
    assert np.isfinite(losses[-3:]).all()


def test_collation_that_drops_samples_counts_the_rest(tmp_path):
    def one_less(samples):
        return default_collate(samples[:-1] if len(samples) > 1 else samples)

    data = DataLoader(rows(32, 1), 8, collate_fn=one_less)
    _, task = lockstep.from_lightning(seeded(autoencoder(L)), data)
    assert task.items_per_sample is None
    with lockstep.Run(
        lockstep.Config(save_dir=str(tmp_path), batch_size=8, micro_batch_size=4, max_steps=2), task
    ) as run:
        assert [step.items for step in run] == [6, 6]
    assert lockstep.from_lightning(seeded(autoencoder(L)), DataLoader(rows(32, 1), 8))[1].items_per_sample == 1
