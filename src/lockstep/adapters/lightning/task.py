"""Serve a task's methods from a LightningModule's own methods.

`lockstep.from_lightning` makes the task. The module does not import Lightning.
"""

import contextlib
import copy
import hashlib
import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.adapters.lightning.data import LoaderParts, Loaders, Placed, Sampled, run_predict, run_test
from lockstep.adapters.lightning.hooks import Life, NextForward, own_dtype
from lockstep.adapters.lightning.logging import Logged, LoggedValue, number, together
from lockstep.adapters.lightning.optimizers import Configured, read
from lockstep.adapters.lightning.package import calls, is_user_defined
from lockstep.adapters.lightning.state import (
    is_metric,
    list_at,
    lists_of,
    metrics_of,
    put_back,
    put_together,
    set_aside,
    taken_apart,
    was_updated,
)
from lockstep.adapters.lightning.trainer import Standing
from lockstep.adapters.rates import EpochPosition, Rates, step_one
from lockstep.adapters.turns import plan_of
from lockstep.config.schema import Config
from lockstep.counts import samples_in
from lockstep.data.loader import generators_kept
from lockstep.errors import ConfigError
from lockstep.task import Order, Task
from lockstep.tasks.metric_states import merge
from lockstep.tasks.regression import RowsMetric

__all__ = [
    "LightningTask",
]


_LOG = logging.getLogger("lockstep")


@final
class Epoch(RowsMetric):
    """Results of the evaluation of one set.

    Args:
        module: its lists and metrics are saved and restored.
        logged: receives the logged values.
        ends: called at the end of the set with its numbers; adds what hooks log at the end of the epoch.
        tries: whether this is a trial before the run, which must leave no changes.

    Attributes:
        loss: the last micro-batch's value that serves as its loss; None if no such value was logged.
    """

    def __init__(
        self, module: nn.Module, logged: Logged, ends: Callable[[dict[str, float]], None], tries: Callable[[], bool]
    ) -> None:
        self._module = module
        self._logged = logged
        self._ends = ends
        self._tries = tries
        super().__init__()
        self.loss: Any = None

    @contextlib.contextmanager
    def batch(self, samples: int, place: int | None) -> Iterator[None]:
        """Store what one micro-batch logs and accumulates as a row, in a context.

        Args:
            place: index of the set, which the names get; None: there is one set.
        """
        metrics = metrics_of(self._module)
        lists = lists_of(self._module)
        lengths = {name: len(items) for name, items in lists.items()}
        aside = {name: set_aside(metric) for name, metric in metrics.items()}
        self._logged.samples = samples
        self._logged.place = place
        self._logged.take()
        try:
            yield
        finally:
            self._logged.place = None
        entries = self._logged.take()
        self.loss = _loss_of(entries)
        row: list[Any] = []
        # The tensors move into `row`, and the form keeps their positions.
        logged = []
        for entry in entries:
            if entry.on_epoch:
                logged.append(_plain_entry(entry))
        appended = {}
        for name, items in lists_of(self._module).items():
            if len(items) > lengths.get(name, 0):
                appended[name] = taken_apart(items[lengths.get(name, 0) :], row, name)
        updated = {}
        for name, metric in metrics.items():
            if was_updated(metric):
                updated[name] = taken_apart(dict(metric.metric_state), row, name)
        form = {"logged": logged, "appended": appended, "metrics": updated}
        for name, items in lists_of(self._module).items():
            del items[lengths.get(name, 0) :]
        for name, metric in metrics.items():
            put_back(metric, aside[name])
        self._rows.append([_text(form), *row])

    def compute(self) -> dict[str, float]:
        """Return the epoch's numbers; after the last set, those of its end too."""
        # The form is text in a host tensor, so reading it does not wait for a device.
        forms = [(json.loads(bytes(row[0].tolist())), row[1:]) for row in self._rows]
        entries = [entry for form, _ in forms for entry in form["logged"]]
        parts = [
            {name: [reduction, value * weight if reduction == "mean" else value, weight]}
            for name, reduction, value, weight, metric, _ in entries
            if not metric
        ]
        numbers = together(parts)
        logged_metrics = {name: metric for name, _, _, _, metric, _ in entries if metric}
        metrics = metrics_of(self._module)
        lists = lists_of(self._module)
        metric_names = {name for form, _ in forms for name in form["metrics"]}
        aside = {name: set_aside(metrics[name]) for name in metric_names}
        lengths = {name: len(contents) for name, contents in lists.items()}
        try:
            for name in metric_names:
                merge(
                    metrics[name],
                    [put_together(form["metrics"][name], row) for form, row in forms if name in form["metrics"]],
                )
            for form, row in forms:
                for name, items in form["appended"].items():
                    list_at(self._module, name).extend(put_together(items, row))
            numbers |= {name: number(metrics[attribute].compute()) for name, attribute in logged_metrics.items()}
            numbers = {name: numbers[name] for name in dict.fromkeys([*(entry[0] for entry in entries), *numbers])}
            numbers |= {plain: numbers[name] for name, *_, plain in entries}
            self._ends(numbers)
        finally:
            for name in metric_names:
                put_back(metrics[name], aside[name])
            for name, contents in lists_of(self._module).items() if self._tries() else ():
                del contents[lengths.get(name, 0) :]
        return {name: value for name, value in numbers.items() if name not in ("loss", "items")}


def _plain_entry(entry: LoggedValue) -> list[Any]:
    """Convert a logged value to plain values. Waits for the device.

    Returns:
        [name, reduction, value, weight, metric attribute, plain name].
    """
    if is_metric(entry.value):
        return [entry.epoch_name, "metric", 0.0, 0.0, entry.metric, entry.plain_name]
    return [entry.epoch_name, entry.reduce, number(entry.value), entry.weight, "", entry.plain_name]


def _loss_of(entries: list[LoggedValue]) -> Any:
    """Return the first logged value named like a loss, for a step without one."""
    plain = []
    for entry in entries:
        if not is_metric(entry.value):
            plain.append(entry)
    for entry in plain:
        if "loss" in entry.name.lower():
            return entry.value
    return None


def _text(form: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)


class LightningTask(Task):
    """A LightningModule as a task; batch losses are averaged by samples.

    Made by `from_lightning`.
    """

    framework = "Lightning"
    # As in Lightning, the module's hooks switch between train and eval mode.
    switches_modes = False
    # As in Lightning, autocast covers `training_step` without its hooks.
    autocast_scope = "forward"
    reduction: Literal["auto", "sum", "mean", "micro-batch"] = "micro-batch"
    item_name = "samples"
    items_per_sample: int | None = 1
    divisible = False

    def __init__(self, module: Any, loaders: Loaders, trainer: Standing, devices: int) -> None:
        self.module = module
        self.loaders = loaders
        self.trainer = trainer
        self.devices = devices
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._first: Any = module
        self._initial = _copy_to_host(module)
        self._sets: dict[str, LoaderParts] = loaders.validation
        if any(parts.collate is not default_collate for parts in (loaders.train, *self._sets.values())):
            # A custom collation may leave samples out, so they are counted.
            self.items_per_sample = None
        self._step_name = "validation_step"
        self._hook = "validation"
        self._config: Config | None = None
        self._in_evaluation = False
        # Batches evaluated so far, by index of the set.
        self._batches: Counter[int] = Counter()
        self._epochs: list[Epoch] = []
        self._logged = Logged()
        trainer._results = self._logged
        self._set_life()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the objects that a run has made: the other process makes its own."""
        state = self.__dict__ | {"_epochs": [], "_config": None, "_in_evaluation": False}
        for name in ("module", "trainer", "_first", "_entry", "hooks", "life", "start_epoch"):
            state.pop(name, None)
        # As bytes: multiprocessing would share the tensors' memory, and the other process trains them.
        return state | {"_initial": pickle.dumps(self._initial), "_trainer_settings": self.trainer.settings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        initial = state.pop("_initial")
        settings = state.pop("_trainer_settings")
        self.__dict__.update(state)
        self.module = self._first = pickle.loads(initial)
        self._initial = pickle.loads(initial)
        self.trainer = Standing(self.module, self.loaders.datamodule)
        self.trainer.take(settings)
        self.trainer._results = self._logged
        self.module.trainer = self.trainer
        self._set_life()

    def _set_life(self) -> None:
        self.hooks = self.life = Life(self.module, self.trainer, self._logged, evaluates=bool(self._sets))
        # Set only if needed: it keeps data from being loaded ahead over the end of an epoch.
        if self.life.changes_epochs:
            self.start_epoch = self.life.start_epoch  # type: ignore[method-assign]

    # Called by the run.

    def model(self) -> nn.Module:
        """Return the module itself; on later calls, a copy of its initial state."""
        if self._first is None:
            module = copy.deepcopy(self._initial)
        else:
            module = self._first
        self._first = None
        self.module = self.life.module = self.trainer.lightning_module = self.trainer.model = module
        module.trainer = self.trainer
        self.life.attach()
        if is_user_defined(module, "configure_model"):
            self.life.call("configure_model")
        self._enter(module)
        # Turns off the metrics' own synchronisation: lockstep merges their states.
        metrics_of(module)
        self._epochs = []
        model: nn.Module = module.train()
        return model

    def dataset(self, split: str) -> Any:
        if split == "train":
            return self.loaders.train.dataset
        sets = {}
        for index, (name, parts) in enumerate(self._sets.items()):
            sets[name] = _Set(parts.dataset, len(parts.dataset), index)
        if sets:
            return sets.get("", sets)
        return None

    def collate(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], _EvaluationSample):
            return _collate(0, samples, self.loaders.train.collate)
        set_index = samples[0].place
        parts = list(self._sets.values())[set_index]
        return _collate(set_index, [sample.data for sample in samples], parts.collate)

    def count(self, batch: Any) -> int:
        """Count the samples of a batch that its collation kept."""
        return int(batch.samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the result of `training_step`, or its "loss": a 0-dim mean over the batch's samples."""
        with own_dtype(self.module):
            output = self._run_training_step(model, batch, self.life.take_turn())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"from_lightning: training_step returned {'None' if output is None else type(output).__name__}, not a "
                "loss: return a tensor, or a dict with 'loss'; to skip a batch, return its loss times 0"
            )
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss of a micro-batch, and the epoch with all that the step logged."""
        trainer = self.trainer
        set_index = batch.place
        self._begin_evaluation()
        epoch = self._epochs[set_index]
        data = self.transfer(batch.data, set_index)
        with epoch.batch(batch.samples, set_index if len(self._sets) > 1 else None), own_dtype(self.module):
            number = self._batches[set_index]
            self._batches[set_index] += 1
            args = (data, number, set_index) if len(self._sets) > 1 else (data, number)
            self.life.hook(f"on_{self._hook}_batch_start", *args)
            output = self._call_method(model, self._step_name, *args)
            self.life.hook(f"on_{self._hook}_batch_end", output, *args)
        trainer.stage = "train"
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            loss = epoch.loss
        if not isinstance(loss, Tensor):
            self.evaluates_loss = self.evaluates_loss and loss is not None
            loss = torch.tensor(float("nan") if loss is None else float(loss))
        return loss.detach().float() if not loss.is_floating_point() else loss.detach(), {"": epoch}

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        self._config = config
        self._set_length(config)
        with generators_kept():
            configuration = read(self.life.call("configure_optimizers"), automatic=self.own_steps is None)
        self._warn_of_devices()
        for optimizer in configuration.optimizers:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
            # The fused kernel rounds differently by an element's position in memory.
            for group in optimizer.param_groups if config.exact else ():
                group["fused"] = False if group.get("fused") else group.get("fused")
        return self._build_optimizer(configuration)

    def _warn_of_devices(self) -> None:
        """Warn once if the set-up read the number of processes and `devices` is above 1."""
        asked = self.trainer.asked_size
        self.trainer.asked_size = ""
        if asked and self.devices > 1 and self.trainer.is_global_zero:
            _LOG.warning(
                "from_lightning: the set-up read trainer.%s, which is 1 on any number of processes, and a step has the "
                "loader's batch %d times (devices): give devices=1 if the module divides its batch by it",
                *(asked, self.devices),
            )

    def _build_optimizer(self, configuration: Configured) -> Optimizer:
        """Return the optimizer that the engine steps."""
        optimizer = configuration.optimizers[0]
        self.life.rates = Rates(optimizer, configuration.schedulers, self.place, self._step_scheduler)
        self.trainer.optimizers = [optimizer]
        self.trainer.lr_scheduler_configs = configuration.schedulers
        self.trainer.strategy._lightning_optimizers = [optimizer]
        optimizer.register_step_pre_hook(self._before_update)
        return optimizer

    # The base class has an attribute of this name, which is None.
    @property
    def live_rates(self) -> Rates | None:  # type: ignore[override]
        """The module's schedulers, which the hooks step."""
        return self.life.rates

    def metric_name(self, set_name: str, name: str) -> str:
        """Return Lightning's name of a logged value.

        The numbers of a set itself are `SET/loss` and `SET/items`.
        """
        if name in ("loss", "items"):
            return super().metric_name(set_name, name)
        return name

    def order(self, samples: int, seed: int) -> Order | None:
        return self.loaders.train.order(seed)

    # The module's own methods.

    def _run_training_step(self, model: nn.Module, batch: Any, turn: NextForward | None) -> Any:
        """Run `training_step` on a micro-batch with its hooks, and return its output."""
        self.life.start()
        self.trainer.stage = "train"
        data = self.transfer(batch.data, 0)
        with self.life.training_step(data, batch.samples, turn) as outputs:
            output = self._call_method(model, "training_step", data, turn.batch_idx if turn else 0)
            outputs.append(output)
        return output

    def test(self) -> dict[str, float]:
        """Run `test_step` over the test loaders with the current weights, in this process only."""
        return run_test(self)

    def predict(self) -> list[Any]:
        """Run `predict_step` over the predict loaders, and return its results, in this process only."""
        return run_predict(self)

    def testing(self, sets: dict[str, LoaderParts]) -> Self:
        """Return this task with `test_step` on `sets` in place of its evaluation."""
        # The module has not trained, so `model` has not installed the dispatcher.
        if self._first is not None:
            self._enter(self.module)
        # Not copy.copy, which would go through __getstate__ as for another process.
        task = object.__new__(type(self))
        task.__dict__.update(self.__dict__)
        task._sets = sets
        task._step_name = "test_step"
        task._hook = "test"
        task._epochs = []
        task._in_evaluation = False
        task.items_per_sample = None
        task._batches = Counter()
        return task

    def epochs(self) -> list[tuple[str, int, Epoch]]:
        """Begin an evaluation, and return (name, index, results) of each set."""
        self._begin_evaluation()
        return [(name, index, self._epochs[index]) for index, name in enumerate(self._sets)]

    def place(self, step: int) -> EpochPosition:
        """Return the position of a step among the epochs."""
        config = self._config
        assert config is not None, "an optimizer is made before rates are asked for"
        size = config.batch_size
        samples = self._samples
        epoch = step * size // samples
        after = (step + 1) * size // samples
        first_step = -(-epoch * samples // size)
        return EpochPosition(epoch, (step - first_step + 1) * self.trainer.accumulate_grad_batches, after > epoch)

    def _enter(self, module: Any) -> None:
        """Install the dispatcher that routes a call of the module to another of its methods."""
        if not isinstance(module.__dict__.get("forward"), ForwardDispatch):
            module.forward = ForwardDispatch(module, module.__dict__.get("forward"))
        self._entry: ForwardDispatch = module.__dict__["forward"]

    def _call_method(self, model: nn.Module, name: str, *args: Any) -> Any:
        """Call a method of the module through the engine's model, so that forward hooks run."""
        method = getattr(self.module, name)
        self._entry.calls(lambda *inputs: self.life.call(name, *calls(method, *inputs)))
        return model(*args)

    def transfer(self, batch: Any, place: int) -> Any:
        """Return the batch after the transfer hooks of datamodule or module."""
        module = self.module
        device = self.trainer.device
        for owner in (self.loaders.datamodule, module):
            if is_user_defined(owner, "on_before_batch_transfer"):
                batch = owner.on_before_batch_transfer(batch, place)
                break
        for owner in (self.loaders.datamodule, module):
            if is_user_defined(owner, "transfer_batch_to_device"):
                batch = owner.transfer_batch_to_device(batch, device, place)
                break
        for owner in (self.loaders.datamodule, module):
            if is_user_defined(owner, "on_after_batch_transfer"):
                batch = owner.on_after_batch_transfer(batch, place)
                break
        return batch

    def _begin_evaluation(self) -> None:
        self.life.start()
        self.trainer.stage = "test" if self._hook == "test" else "validate"
        self.trainer.sanity_checking = self.life.tries()
        if not self._epochs:
            last_index = len(self._sets) - 1
            self._epochs = [
                Epoch(
                    *(self.module, self._logged, self._end_evaluation if index == last_index else self.life.publish),
                    self.life.tries,
                )
                for index in range(last_index + 1)
            ]
        if not self._in_evaluation:
            self._in_evaluation = True
            self._batches.clear()
            for name in ("model_eval", "start", "epoch_start"):
                self.life.hook(f"on_{self._hook}_{name}")

    def _end_evaluation(self, numbers: dict[str, float]) -> None:
        """End the epoch of an evaluation, and add what its hooks log to `numbers`."""
        self._in_evaluation = False
        module = self.module
        trainer = self.trainer
        modes = [(submodule, submodule.training) for submodule in module.modules()]
        module.eval()
        trainer.stage = "test" if self._hook == "test" else "validate"
        self._logged.take()
        self.life.publish(numbers)
        try:
            with torch.no_grad():
                for name in ("epoch_end", "end", "model_train"):
                    self.life.hook(f"on_{self._hook}_{name}")
            if self._hook == "validation":
                numbers.update({k: v for k, v in self.life.training_values().items() if k not in numbers})
            for entry in self._logged.take():
                if hasattr(entry.value, "compute"):
                    value = entry.value.compute()
                else:
                    value = entry.value
                numbers[entry.name] = float(value)
                self.life.publish({entry.name: numbers[entry.name]})
        finally:
            trainer.stage = "train"
            trainer.sanity_checking = False
            for submodule, mode in modes:
                submodule.training = mode

    def _set_length(self, config: Config) -> None:
        """Set the length of the run on the module's trainer before the optimizer is made."""
        plan = plan_of(config, self.loaders.train.positions)
        self._samples = plan.samples
        self.life.set_length(plan.samples, config.batch_size)
        trainer = self.trainer
        trainer.max_epochs = plan.max_epochs
        trainer.max_steps = plan.max_steps
        trainer.estimated_stepping_batches = plan.steps
        trainer.num_training_batches = plan.in_epoch * trainer.accumulate_grad_batches
        parameter = next(self.module.parameters(), None)
        if parameter is None:
            trainer.device = torch.device("cpu")
        else:
            trainer.device = parameter.device

    def _step_scheduler(self, scheduler: Any, value: Any) -> None:
        # A LambdaLR may read the number of processes, which is 1 in a set-up.
        with self.trainer.setting_up():
            if is_user_defined(self.module, "lr_scheduler_step"):
                self.life.call("lr_scheduler_step", scheduler, value)
            else:
                step_one(scheduler, value)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.life.before_update(optimizer)


@final
class ForwardDispatch:
    """The module's `forward`, which can route the next call to another method.

    Args:
        own: the module's previous instance attribute `forward`, if any.
    """

    def __init__(self, module: nn.Module, own: Any = None) -> None:
        self._module = module
        self._own = own
        self._next = None

    def calls(self, method: Any) -> None:
        """Route the next call to `method`."""
        self._next = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._next
        self._next = None
        if method is not None:
            return method(*args, **kwargs)
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


class _EvaluationSample(NamedTuple):
    """A sample of an evaluation set, with the index of the set."""

    place: int
    data: Any


class _Set(Sampled):
    """An evaluation set with samples that carry its index."""

    def __init__(self, inner: Any, size: int, place: int) -> None:
        super().__init__(inner, size)
        self.place = place
        self.__dict__.pop("__getitems__", None)
        self.known_rows = None

    def __getitem__(self, index: int) -> Any:
        return _EvaluationSample(self.place, self.inner[index])


def _collate(place: int, samples: list[Any], collate: Callable[[list[Any]], Any]) -> Placed:
    """Collate a batch, and count the samples that the collation kept; all if unknown."""
    data = collate(samples)
    count = samples_in(data, samples)
    return Placed(place, len(samples) if count is None else count, data)


def _copy_to_host(module: Any) -> Any:
    """Copy a module to host memory.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        # In host memory, once a run: a run that is rolled back to its start needs the initial state.
        return copy.deepcopy(module).cpu()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"from_lightning: the module cannot be copied ({line}), and a run may need its initial state: keep "
            "what cannot be copied out of its attributes"
        ) from error
