"""Call a module's hooks where Lightning calls them, and record what it logs in training.

    life = Life(module, trainer, logged)            # a task's `hooks`
    with life.training_step(batch, samples, turn) as outputs: ...   # around one `training_step`

A batch of Lightning is a turn here: a step has `accumulate_grad_batches` turns on any number of ranks, so hooks that
run once a batch run equally often. Logged values are summed over items, micro-batches and ranks. `settings_of` turns
Lightning's callbacks into Config fields.
"""

import contextlib
import dataclasses
import inspect
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch

from lockstep.adapters.lightning.callbacks import Served, is_served
from lockstep.adapters.lightning.logging import Logged, Totals, number, together
from lockstep.adapters.lightning.package import calls, is_user_defined, own_methods
from lockstep.adapters.lightning.refusals import WAYS
from lockstep.adapters.lightning.state import Leavings, apart, is_metric, merged_results, pack, unpack
from lockstep.adapters.lightning.trainer import Standing
from lockstep.adapters.rates import Rates
from lockstep.adapters.turns import turn_ranges
from lockstep.config.schema import Config
from lockstep.data.loader import generators_kept
from lockstep.errors import ConfigError
from lockstep.hooks import Due, Hooks, RunContext

__all__ = [
    "Life",
    "NextForward",
    "default_dtype",
    "own_dtype",
    "settings_of",
]


# Callbacks that display, log or measure: the run does this itself.
DONE = (
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar", "DeviceStatsMonitor"),
    *("ThroughputMonitor", "LearningRateMonitor", "OnExceptionCheckpoint"),
)


def settings_of(callbacks: list[Any], trainer: Any, config: Config) -> Config:
    """Convert Lightning's own callbacks to settings, and add them to the config.

    Raises:
        ConfigError: an unsupported callback (the message names its class), or two that monitor different values.
    """
    changes: dict[str, Any] = {}
    for callback in callbacks:
        name = type(callback).__name__
        # Without evaluations `Life` itself calls an EarlyStopping.
        if is_served(callback) or (name == "EarlyStopping" and not config.eval_freq):
            continue
        if name == "EarlyStopping":
            if "patience" in changes:
                raise ConfigError("from_lightning: two EarlyStopping callbacks, but a run has one: leave one out")
            changes |= _early_stopping(callback)
        elif name == "ModelCheckpoint":
            _merge_checkpoints(changes, _checkpoints(callback, config))
        elif name == "EMAWeightAveraging":
            changes["optim"] = dataclasses.replace(config.optim, ema=_decay(callback))
        elif name not in DONE:
            way = WAYS.get(name, "leave it out, and do its work in a Callback of your own")
            raise ConfigError(f"from_lightning: the callback {name} is not supported: {way}")
    if trainer is not None and not trainer.checkpoint_callbacks:
        changes["ckpt_freq"] = 0
    # Without evaluations `Life` compares the monitored values of steps.
    if not config.eval_freq:
        changes.pop("best_metric", None)
    # No ModelCheckpoint monitors a value, so the best checkpoint follows EarlyStopping.
    if "patience" in changes and "best_metric" not in changes:
        changes["best_metric"] = changes.pop("patience_metric")
    return dataclasses.replace(config, **changes)


def _merge_checkpoints(changes: dict[str, Any], more: dict[str, Any]) -> None:
    before = changes.get("best_metric")
    if before and more.get("best_metric") not in (None, before):
        names = " and ".join(metric.partition(":")[0] for metric in (before, more["best_metric"]))
        raise ConfigError(
            f"from_lightning: two ModelCheckpoints monitor {names}, but a run has one best metric: let them "
            "monitor the same"
        )
    changes |= more


def _early_stopping(each: Any) -> dict[str, Any]:
    for name in ("stopping_threshold", "divergence_threshold"):
        if getattr(each, name) is not None:
            raise ConfigError(
                f"from_lightning: EarlyStopping({name}={getattr(each, name)}) is not supported: call run.stop() in the "
                "loop of lockstep.Run"
            )
    return {
        # A patience of 0 stops at the first evaluation that is no better, as 1 does.
        "patience": max(1, int(each.patience)),
        "patience_metric": f"{each.monitor}:{each.mode}",
        "min_delta": abs(float(each.min_delta)),
    }


def _checkpoints(each: Any, config: Config) -> dict[str, Any]:
    # Lightning keeps these arguments only in private attributes.
    if each._train_time_interval is not None:
        raise ConfigError(
            "from_lightning: ModelCheckpoint(train_time_interval=...) is not supported: set every_n_train_steps"
        )
    top_k = each.save_top_k
    fields: dict[str, Any] = {
        "checkpoint": dataclasses.replace(config.checkpoint, keep=top_k if top_k > 0 else _NO_LIMIT)
    }
    if top_k == 0:
        fields = {"ckpt_freq": 0}
    elif each._every_n_train_steps:
        fields["ckpt_freq"] = int(each._every_n_train_steps)
    elif each._every_n_epochs and each._every_n_epochs > 1:
        fields["ckpt_freq"] = f"{each._every_n_epochs}epochs"
    if each.monitor is not None:
        fields["best_metric"] = f"{each.monitor}:{each.mode}"
    return fields


# Checkpoints to keep if Lightning keeps all.
_NO_LIMIT = 10**6


def _decay(each: Any) -> float:
    """Return the decay of EMAWeightAveraging."""
    if each.update_every_n_steps != 1 or each.update_starting_at_step or each.update_starting_at_epoch:
        raise ConfigError(
            "from_lightning: EMAWeightAveraging with update_every_n_steps or a later start is not supported: every "
            "step moves the average"
        )
    # The decay is stored only in the closure of the averaging function.
    function = inspect.unwrap(each._kwargs.get("multi_avg_fn") or each._kwargs.get("avg_fn"))
    names = function.__code__.co_freevars
    decay = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)).get("decay")
    if not isinstance(decay, float):
        raise ConfigError("from_lightning: the decay of EMAWeightAveraging is not known: set the config's optim.ema")
    return decay


_LOG = logging.getLogger("lockstep")
# Hooks between two epochs, which may change the data of the second.
_BETWEEN_EPOCHS = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_end")


class NextForward(NamedTuple):
    """The next forward: its micro-batch, and the Lightning batches that begin or end."""

    step: int
    micro: int
    begins: range
    ends: range
    first: bool
    counts: bool
    batch_idx: int


@final
class Life(Hooks):
    """Caller of a module's hooks over the life of a run.

    Args:
        evaluates: there is a validation; else callbacks that monitor a value of the training do so at the end of each
            epoch.

    Attributes:
        module: the module that is trained.
        rates: the schedule of its optimizer, once that is made.
    """

    def __init__(self, module: Any, trainer: Standing, logged: Logged, *, evaluates: bool = True) -> None:
        self.module = module
        self.trainer = trainer
        self.logged = logged
        self.rates: Rates | None = None
        self._turn: NextForward | None = None
        # (output, batch, indices) of the Lightning batches that end with the step's update.
        self._pending_ends: list[tuple[Any, Any, range]] = []
        self._in_epoch = 1
        self._samples = 1
        self._size = 1
        self._steps = Totals()
        self._epochs = Totals()
        self._metrics: dict[str, Any] = {}
        self._step_names: dict[str, str] = {}
        self._leavings = Leavings()
        # The current epoch; -1 between epochs.
        self._epoch = -1
        # Names that training_step logged in trials before the run.
        self._trial_names: set[str] = set()
        self._tries = False
        self._starts = False
        self._is_started = True
        self._log_freq = 1
        stoppers = [] if evaluates else trainer.early_stopping_callbacks
        self.served = Served(trainer.callbacks, stoppers)
        monitored = set()
        for callback in (*stoppers, *trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks):
            monitored.add(callback.monitor)
        # Names of monitored values, of training and evaluation.
        self._monitored = monitored - {None}
        if evaluates:
            self._compared = None
        else:
            self._compared = next((callback for callback in trainer.checkpoint_callbacks if callback.monitor), None)
        self._written_hooks = own_methods(module)
        self._evaluates = evaluates
        # Monitored training values at the step of the evaluation that is due.
        self._due_values: dict[str, float] | None = None
        # A single process has nothing to gather.
        self._is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1

    def set_length(self, samples: int, size: int) -> None:
        """Set the number of samples of an epoch and of a step."""
        self._samples = samples
        self._size = size
        self._written_hooks = own_methods(self.module)
        self._turn = None
        self._epoch = -1
        self._tries = True
        self._is_started = False
        for stopper in self.served.stoppers:
            stopper.setup(self.trainer, self.module, "fit")
        self._pending_ends.clear()

    def attach(self) -> None:
        """Take the module that is trained from now on."""
        self.served.attach(self.module)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the module as Lightning does, setting its name for `self.log`."""
        module = self.module
        before = module._current_fx_name
        module._current_fx_name = name
        try:
            return getattr(module, name)(*args)
        finally:
            module._current_fx_name = before

    def hook(self, name: str, *args: Any) -> None:
        """Call a hook that the user wrote, without effect on the random state.

        Trials before the run leave out callbacks, whose state could not be restored.
        """
        if name in self.served and (self._starts or not self._tries):
            with generators_kept():
                self.served.call(name, self.trainer, self.module, *args)
        if name in self._written_hooks:
            with generators_kept():
                answer = self.call(name, *calls(getattr(self.module, name), *args))
            if name == "on_train_batch_start" and answer == -1:
                raise ConfigError(
                    "from_lightning: on_train_batch_start returned -1 to skip the rest of the epoch, which is not "
                    "supported: set limit_train_batches"
                )

    def tries(self) -> bool:
        """Whether the current computation is a trial before the run, and not part of it."""
        return self._tries

    def start(self) -> None:
        """Start the training, unless it is started: call `on_fit_start` and `on_train_start`.

        It starts with the first step that is tried, in an epoch; else when the checkpoint is loaded.
        """
        if self._is_started:
            return
        self._is_started = self._starts = True
        try:
            self.hook("on_fit_start")
            self.hook("on_train_start")
            if self._tries:
                self._begin_epoch(0)
        finally:
            self._starts = False

    @property
    def changes_epochs(self) -> bool:
        """Whether a user's hook between two epochs may change the data of the second."""
        return any(name in self._written_hooks or name in self.served for name in _BETWEEN_EPOCHS)

    def start_epoch(self, dataset: Any, epoch: int) -> None:
        """Begin an epoch before its first sample is loaded; see `Task.start_epoch`."""
        if epoch != self._epoch:
            self._end_epoch(None)
            self._begin_epoch(epoch)

    # Hooks of a step.

    def before_batch(self, step: int, index: int, slot: int, slots: int, *, counts: bool) -> None:
        trainer = self.trainer
        self._tries = False
        trainer.global_step = step
        self.start()
        epoch = step * self._size // self._samples
        if slot == 0:
            self.start_epoch(None, epoch)
        turns = trainer.accumulate_grad_batches
        # Lightning batches of this epoch before this step.
        before = (step - -(-epoch * self._samples // self._size)) * turns
        begin_range, end_range = turn_ranges(slot, slots, turns)
        begins = range(before + begin_range.start, before + begin_range.stop)
        ends = range(before + end_range.start, before + end_range.stop)
        self._turn = NextForward(step, index, begins, ends, slot == 0, counts, before + index % turns)

    def take_turn(self) -> NextForward | None:
        """Return and clear the next forward's turn; None outside a step of the run."""
        turn = self._turn
        self._turn = None
        return turn

    @contextlib.contextmanager
    def training_step(self, batch: Any, samples: int, turn: NextForward | None) -> Iterator[list[Any]]:
        """Wrap one `training_step`; the caller appends its output to the yielded list.

        Outside a step of the run, its changes to the module are undone.
        """
        self.logged.samples = samples
        self.logged.take()
        outputs: list[Any] = []
        if turn is None:
            with Leavings.undone(self.module), apart("training_step"):
                yield outputs
            for entry in self.logged.take():
                suffixed = [entry.epoch_name] * entry.on_epoch + [entry.step_name] * entry.on_step
                self._trial_names |= {*suffixed, entry.plain_name}
            return
        self.trainer.is_last_batch = turn.batch_idx + 1 >= self.trainer.num_training_batches
        for batch_idx in turn.begins:
            self.hook("on_train_batch_start", batch, batch_idx)
        key = (turn.step, turn.micro)
        around: AbstractContextManager[None] = nullcontext()
        if not turn.counts:
            around = Leavings.undone(self.module)
        elif self._is_distributed and self.module.automatic_optimization:
            # With manual optimization micro-batches run in turns, so items cannot be assigned to one.
            around = self._leavings.note(self.module, key)
        with around:
            yield outputs
        output = outputs[0] if outputs else None
        if turn.ends and ("on_train_batch_end" in self._written_hooks or "on_train_batch_end" in self.served):
            self._pending_ends.append((_detach(output), batch, turn.ends))
        if not self.module.automatic_optimization:
            self._collect(turn.counts)
            return
        if turn.first:
            self.hook("on_before_zero_grad", self._optimizer())
            self.hook("optimizer_zero_grad", self.trainer.current_epoch, turn.batch_idx, self._optimizer())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.hook("on_before_backward", loss)
        self._collect(turn.counts, (turn.step + 1) % self._log_freq == 0)

    def after_backward(self) -> None:
        self.hook("on_after_backward")

    def before_update(self, optimizer: Any) -> None:
        """Call `on_before_optimizer_step`; the gradients are already summed and clipped."""
        self.hook("on_before_optimizer_step", optimizer)

    def after_update(self) -> None:
        self.trainer.global_step += 1
        if self.rates is not None:
            # Lightning steps schedulers before it calls `on_train_batch_end`.
            self.rates.drive_to(self.trainer.global_step)
        for output, batch, ends in self._pending_ends:
            for batch_idx in ends:
                self.hook("on_train_batch_end", output, batch, batch_idx)
        self._pending_ends.clear()
        self._collect(True)

    # Hooks of a run.

    def before_run(self, context: RunContext, done: int) -> None:
        self.trainer.global_step = done
        self._tries = False
        self._log_freq = context.log_freq
        self.trainer.strategy.gather = context.gather
        state = context.state
        self._load(state)
        if "datamodule" in state and is_user_defined(self.trainer.datamodule, "load_state_dict"):
            self.trainer.datamodule.load_state_dict(unpack(state["datamodule"]))
        for logger in self.trainer.loggers if self.trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(self.module.hparams_initial)
        if not done:
            # Collective over all ranks: all of them stop if one cannot save.
            self._try_saving(context)
        # Drops the values that trials before the run logged.
        self.trainer.callback_metrics.clear()
        self.start()

    def _load(self, state: dict[str, Any]) -> None:
        """Load what module and callbacks stored in the checkpoint, in Lightning's order."""
        loads = "on_load_checkpoint" in self.served or is_user_defined(self.module, "on_load_checkpoint")
        if "module" in state and loads:
            modules = {}
            for key, name in state.get("own_modules", {}).items():
                modules[key] = self.module.get_submodule(name)
            checkpoint = self._checkpoint() | modules | unpack(state["module"])
            checkpoint["callbacks"] = unpack(state["callbacks"]) if "callbacks" in state else {}
            with generators_kept():
                if is_user_defined(self.module, "on_load_checkpoint"):
                    self.call("on_load_checkpoint", checkpoint)
                self.served.call("on_load_checkpoint", self.trainer, self.module, checkpoint)
        self.served.load(state.get("callbacks"))
        if "training_values" in state:
            self._due_values = unpack(state["training_values"])
        else:
            self._due_values = None

    def after_step(self, context: RunContext, done: int) -> bool:
        if done % context.log_freq == 0:
            # Collective over all ranks, every log_freq steps. Waits for the device.
            values = together(context.gather(self._steps.plain()))
            self._record(context, self._publish(values, steps=True), done)
        elif self._monitored and (self._ends_epoch(done) or self._compares(done)):
            # Collective over all ranks, in steps with values that a callback monitors. Waits for the device.
            self._publish(together(context.gather(self._steps.plain())), steps=True)
        self._steps.clear()
        saves = False
        if self._ends_epoch(done):
            self._record(context, self._end_epoch(context), done)
            self._monitor()
        if (judge := self._compared) and self._compares(done) and judge.monitor in self.trainer.callback_metrics:
            value = float(self.trainer.callback_metrics[judge.monitor])
            saves = context.compare(judge.monitor, value, higher=judge.mode == "max")
        self._note_best(context)
        if self.trainer.should_stop:
            context.stop()
        return saves

    def _ends_epoch(self, done: int) -> bool:
        return done * self._size // self._samples > (done - 1) * self._size // self._samples

    def _compares(self, done: int) -> bool:
        """Whether a ModelCheckpoint looks at its monitor after this step, as in Lightning."""
        judge = self._compared
        if judge is None:
            return False
        if judge._every_n_train_steps:
            return bool(done % judge._every_n_train_steps == 0)
        return self._ends_epoch(done) and (done * self._size // self._samples) % max(1, judge._every_n_epochs) == 0

    def _monitor(self) -> None:
        """Let callbacks check what the training logged in an epoch, as in Lightning.

        They run after the hooks at the end of the epoch.

        Raises:
            ConfigError: nothing of the monitor's name was logged.
        """
        metrics = self.trainer.callback_metrics
        judges = filter(None, [self._compared])
        for callback in (*(callback for callback in self.served.stoppers if callback.strict), *judges):
            if callback.monitor not in metrics:
                names = ", ".join(sorted({*metrics, *self._trial_names})) or "nothing"
                raise ConfigError(
                    f"from_lightning: {type(callback).__name__} monitors '{callback.monitor}', which nothing logs; "
                    f"there is {names}"
                )
        for callback in self.served.stoppers:
            # Collective over all ranks: EarlyStopping agrees on stopping.
            callback.on_train_epoch_end(self.trainer, self.module)

    def _note_best(self, context: RunContext) -> None:
        """Give ModelCheckpoints the path and the score of the run's best, once it is saved."""
        best = context.best if self.trainer.checkpoint_callbacks else None
        if best is None:
            return
        for callback in self.trainer.checkpoint_callbacks:
            callback.best_model_path = best.path
            callback.best_model_score = torch.tensor(best.value)

    def training_values(self) -> dict[str, float]:
        """Return the training values that callbacks monitor. Collective.

        They are means over the epoch so far, else the values of this step.

        An evaluation that a resume makes up for gets the values at its step, which the checkpoint has.
        """
        if not self._monitored or self._due_values is not None:
            return self._due_values or {}
        if self._tries:
            values: dict[str, Any] = dict.fromkeys(self._trial_names, math.nan)
        else:
            gather = self.trainer.strategy.gather
            metrics = self._metrics
            # Collective over all ranks, once an evaluation. Waits for the device.
            values = together(gather(self._steps.plain())) | together(gather(self._epochs.plain()))
            for name, result in merged_results(self.module, metrics, gather).items():
                values[name] = number(result)
        plain = {}
        for name, value in values.items():
            plain[name.removesuffix("_step").removesuffix("_epoch")] = value
        monitored = {}
        for name, value in (plain | values).items():
            if name in self._monitored:
                monitored[name] = value
        return monitored

    def before_evaluation(self, context: RunContext, step: Any, record: Mapping[str, float] | None, due: Due) -> Due:
        self._due_values = None
        if due.evaluate and self._evaluates and self._monitored:
            # Collective over all ranks, which all evaluate after the same steps.
            self._due_values = self.training_values()
        return due

    def after_evaluation(self, context: RunContext, done: int, metrics: Mapping[str, float]) -> bool:
        self._log_metrics(metrics, done)
        self._watch(context, done, metrics)
        return False

    def before_save(self, state: dict[str, Any], done: int) -> None:
        states: dict[str, Any] = {}
        state.pop("training_values", None)
        if self._due_values:
            state["training_values"] = pack(self._due_values, "what training_step logs")
        if "state_dict" in self.served:
            states = self.served.state()
            state["callbacks"] = pack(states, "a callback's state_dict")
        if is_user_defined(self.module, "on_save_checkpoint") or "on_save_checkpoint" in self.served:
            checkpoint = self._checkpoint() | {"callbacks": states}
            keys = set(checkpoint)
            self.hook("on_save_checkpoint", checkpoint)
            more = {}
            for key, value in checkpoint.items():
                if key not in keys:
                    more[key] = value
            # A submodule's tensors are saved anyway: only its name is kept.
            names = {}
            for name, module in self.module.named_modules():
                if name:
                    names[id(module)] = name
            own_modules = {}
            for key, value in more.items():
                if id(value) in names:
                    own_modules[key] = names[id(value)]
            if own_modules:
                state["own_modules"] = own_modules
            state["module"] = pack({k: v for k, v in more.items() if k not in own_modules}, "on_save_checkpoint")
        datamodule = self.trainer.datamodule
        if is_user_defined(datamodule, "state_dict"):
            state["datamodule"] = pack(datamodule.state_dict(), "the datamodule's state_dict")

    def _try_saving(self, context: RunContext) -> None:
        """Try to save the hooks' state before step 1. Collective.

        A hook that fails otherwise may need state that only the training brings; it fails at the first save.

        Raises:
            ConfigError: a value that a checkpoint cannot hold.
        """
        owners = (self.module, "on_save_checkpoint"), (self.trainer.datamodule, "state_dict")
        if not any(is_user_defined(owner, name) for owner, name in owners) and "state_dict" not in self.served:
            return
        problem = ""
        self.trainer.sanity_checking = True
        try:
            with Leavings.undone(self.module):
                self.before_save({}, 0)
        except ConfigError as error:
            problem = str(error)
        except Exception:
            _LOG.debug("what is saved could not be tried", exc_info=True)
        finally:
            self.trainer.sanity_checking = False
        # Collective over all ranks: each raises the error of any of them.
        problem = next(filter(None, context.gather(problem)), "")
        if problem:
            raise ConfigError(problem)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the entries of a Lightning checkpoint that a module's hooks may read."""
        trainer = self.trainer
        module = self.module
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": dict(module.state_dict()),
            "hyper_parameters": dict(module.hparams),
            "hparams_name": getattr(module, "_hparams_name", None),
        }

    def after_run(self, context: RunContext, done: int) -> None:
        # Collective over all ranks: a callback of any rank may have stopped the run.
        stops = self.served and any(context.gather(self.trainer.should_stop))
        self._record(context, self._end_epoch(context if stops else None), done)
        self._note_best(context)
        # Lightning counts the epochs that are complete.
        self.trainer.current_epoch = done * self._size // self._samples
        for name in ("on_train_end", "on_fit_end"):
            self.hook(name)
        self.teardown("fit")
        for logger in self.trainer.loggers:
            logger.finalize("success")

    def after_failure(self, error: BaseException) -> None:
        self.served.call("on_exception", self.trainer, self.module, error)

    def teardown(self, stage: str) -> None:
        """Call `teardown` of datamodule, callbacks and module, in Lightning's order."""
        if is_user_defined(self.trainer.datamodule, "teardown"):
            self.trainer.datamodule.teardown(stage)
        self.served.call("teardown", self.trainer, self.module, stage=stage)
        if is_user_defined(self.module, "teardown"):
            self.call("teardown", stage)

    # Helpers of the hooks above.

    def _record(self, context: RunContext, values: dict[str, float], done: int) -> None:
        context.log(values)
        self._log_metrics(values, done)

    def _log_metrics(self, values: Mapping[str, float], done: int) -> None:
        """Log to the Trainer's own loggers, on rank 0 only."""
        shown = {}
        for name, value in values.items():
            if name not in self.logged.hidden:
                shown[name] = value
        if shown and self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics({**shown, "epoch": self.trainer.current_epoch}, done)
                logger.save()

    def _optimizer(self) -> Any:
        optimizers = self.trainer.optimizers
        if optimizers:
            return optimizers[0]
        return None

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = self.trainer.current_epoch = epoch
        self._epochs.clear()
        self._leavings.clear()
        self.hook("on_train_epoch_start")
        self._collect(True)

    def _end_epoch(self, context: RunContext | None) -> dict[str, float]:
        """End the current epoch: call its hook, and return what was logged over it.

        With a `context` the values are reduced over all ranks; without one nothing is logged.
        """
        if self._epoch < 0:
            return {}
        if context is None:
            self._epoch = -1
            return {}
        # Collective over all ranks, once an epoch: hooks see the items of all ranks.
        with self._leavings.gather(self.module, context.gather):
            values: dict[str, float] = {}
            # Callbacks may monitor values that were logged before their hook.
            if self.served:
                # Collective over all ranks, once an epoch.
                values = self._epoch_values(context, values)
                self._publish(values, steps=False)
            self.hook("on_train_epoch_end")
            self._collect(True)
            # Collective over all ranks, once an epoch.
            values |= self._epoch_values(context, values)
            for metric in self._metrics.values():
                metric.reset()
        self._metrics.clear()
        self._epoch = -1
        result = self._publish(values, steps=False)
        self._watch(context, self.trainer.global_step, result)
        return result

    def _epoch_values(self, context: RunContext, known: Mapping[str, float]) -> dict[str, float]:
        """Reduce the values logged over the epoch since the last call. Collective.

        Metrics in `known` are left out.
        """
        # Collective over all ranks, once or twice an epoch. Waits for the device.
        values = together(context.gather(self._epochs.plain()))
        self._epochs.clear()
        return values | {name: number(metric.compute()) for name, metric in self._metrics.items() if name not in known}

    def _collect(self, counts: bool, log_step: bool = True) -> None:
        """Add what was logged since the last call to the totals.

        Step values are added only if the step is recorded, or a callback monitors them.
        """
        for entry in self.logged.take():
            if not counts:
                continue
            # callback_metrics has the value of this rank's last micro-batch, as in Lightning.
            if self.served and entry.on_step:
                if is_metric(entry.value):
                    value = getattr(entry.value, "_forward_cache", None)
                else:
                    value = entry.value
                self.trainer.callback_metrics |= dict.fromkeys((entry.step_name, entry.plain_name), value)
            if is_metric(entry.value):
                if entry.on_epoch:
                    self._metrics[entry.epoch_name] = entry.value
                if entry.on_step and getattr(entry.value, "_forward_cache", None) is not None:
                    self._steps.add(entry.step_name, entry.value._forward_cache, entry.weight, "mean")
                continue
            if entry.on_step and (log_step or {entry.plain_name, entry.step_name} & self._monitored):
                self._steps.add(entry.step_name, entry.value, entry.weight, entry.reduce)
            if entry.on_epoch:
                self._epochs.add(entry.epoch_name, entry.value, entry.weight, entry.reduce)

    def _publish(self, values: dict[str, float], *, steps: bool) -> dict[str, float]:
        """Copy the values to the module's trainer too."""
        self.publish(values)
        suffix = "_step" if steps else "_epoch"
        plain = {}
        for name, value in values.items():
            if name.endswith(suffix):
                plain[name.removesuffix(suffix)] = value
        for name, value in plain.items():
            self.trainer.callback_metrics[name] = torch.tensor(value)
        return values

    def publish(self, values: Mapping[str, float]) -> None:
        """Copy the values to the metrics of the module's trainer that they were logged for."""
        trainer = self.trainer
        logged = self.logged
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        trainer.callback_metrics |= tensors
        for name, value in tensors.items():
            if name not in logged.hidden:
                trainer.logged_metrics[name] = value
        for name, value in tensors.items():
            if name in logged.shown:
                trainer.progress_bar_metrics[name] = value

    def _watch(self, context: RunContext, done: int, values: Mapping[str, float]) -> None:
        """Step the plateau schedulers due at the end of an epoch, and record their values."""
        rates = self.rates
        if rates is None or not rates.watched:
            return
        # Plateaus step only after the step in which an epoch ends.
        position = done * self._size / self._samples
        near = round(position)
        if not near or abs(position - near) * self._samples >= self._size:
            return
        plain = {name.removesuffix("_epoch"): value for name, value in values.items()} | dict(values)
        for name in dict.fromkeys(rates.due(near, plain)):
            rates.watch(done, name, plain[name])
            context.state.setdefault("watched", []).append([done, name, plain[name]])


@contextlib.contextmanager
def own_dtype(module: torch.nn.Module) -> Iterator[None]:
    """Make the dtype of the module's parameters the default, in a context, as Lightning does."""
    with default_dtype(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _detach(output: Any) -> Any:
    """Return the output for `on_train_batch_end`: a dict with a detached loss."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        values = {}
        for key, value in output.items():
            values[key] = value.detach() if isinstance(value, torch.Tensor) else value
        return values
    return output
