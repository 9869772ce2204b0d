"""Call a user's TrainerCallbacks where the Trainer calls them.

    callbacks = callbacks_of(trainer)           # the user's own; refuses, by name, what a run cannot do
    events = Events(trainer, callbacks, samples)    # a task's `hooks`

`trainer.state` and `trainer.control` are the Trainer's own objects. What a callback asks for with `control.should_*`
is done after the step.
"""

import dis
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, NoReturn, final

from torch.optim import Optimizer

from lockstep.adapters.hf_trainer.arguments import value
from lockstep.adapters.turns import TrainerLength, plan_of, turn_ranges
from lockstep.config.schema import Config
from lockstep.data.loader import generators_kept
from lockstep.errors import ConfigError
from lockstep.hooks import Due, Hooks, RunContext

__all__ = [
    "PACKAGES",
    "Events",
    "callbacks_of",
]

PACKAGES = ("transformers.", "trl.")
# Fields of TrainerControl by which a callback asks for something.
_REQUESTS = ("should_log", "should_evaluate", "should_save", "should_training_stop")
_EPOCH_STOP = "sets control.should_epoch_stop, which is not supported: set should_training_stop, or max_steps"


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the Trainer's callbacks whose classes the user wrote.

    Raises:
        ConfigError: one ends epochs early, which no run can do.
    """
    user_callbacks = []
    for callback in trainer.callback_handler.callbacks:
        if not type(callback).__module__.startswith(PACKAGES):
            user_callbacks.append(callback)
    for callback in user_callbacks:
        if "should_epoch_stop" in _find_assigned(callback):
            raise ConfigError(f"from_trainer: the callback {type(callback).__name__} {_EPOCH_STOP}")
    return user_callbacks


def _find_assigned(callback: Any) -> set[str]:
    """Return the attributes that a callback's methods assign, of any object."""
    kinds = []
    for base in type(callback).__mro__:
        if base is not object:
            kinds.append(base)
    codes = []
    for base in kinds:
        for attribute in vars(base).values():
            if hasattr(attribute, "__code__"):
                codes.append(attribute.__code__)
    # Read from the bytecode: a callback cannot be called just to see what it sets.
    return {
        instruction.argval
        for code in codes
        for block in _walk_code(code)
        for instruction in dis.get_instructions(block)
        if instruction.opname == "STORE_ATTR"
    }


def _list_defined(callback: Any) -> set[str]:
    """Return the names of what classes below TrainerCallback define."""
    kinds = itertools.takewhile(lambda kind: kind.__name__ != "TrainerCallback", type(callback).__mro__)
    return {name for kind in kinds for name in vars(kind)} | set(vars(callback))


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_code(constant)


@final
class Events(Hooks):
    """Caller of the Trainer's events over the life of a run.

    Args:
        samples: of an epoch.
        evaluations: of a scheduler that follows them; called too.
    """

    reads_steps = True

    def __init__(self, trainer: Any, callbacks: list[Any], samples: int, evaluations: Hooks | None = None) -> None:
        self._trainer = trainer
        self._callbacks = callbacks
        self._samples = samples
        self._evaluations = evaluations or Hooks()
        self._by_event: dict[str, list[Any]] = {}
        for callback in callbacks:
            for name in _list_defined(callback):
                self._by_event.setdefault(name, []).append(callback)
        self._requests = any(set(_REQUESTS) & _find_assigned(callback) for callback in callbacks)
        self._length: TrainerLength | None = None
        self._size = 1
        self._epoch = -1
        self._ends = range(0)
        self._start = 0.0
        self._tries = True
        self._begun = False
        self._logged = 0
        self._losses: list[float] = []

    def set_length(self, config: Config, optimizer: Optimizer) -> None:
        """Set the length of the run, once its optimizer is made."""
        trainer = self._trainer
        self._size = config.batch_size
        self._length = plan_of(config, self._samples)
        self._tries = True
        self._epoch = -1
        state = trainer.state
        state.max_steps = self._length.steps
        state.num_train_epochs = math.ceil(self._length.steps * self._size / self._length.samples)
        state.train_batch_size = trainer.args.train_batch_size
        state.compute_steps(trainer.args, state.max_steps)
        optimizer.register_step_pre_hook(lambda *_: self._during_training("on_pre_optimizer_step"))
        optimizer.register_step_post_hook(lambda *_: self._during_training("on_optimizer_step"))

    @property
    def changes_epochs(self) -> bool:
        """Whether a callback acts between two epochs, so it may change the data."""
        return any(name in self._by_event for name in ("on_epoch_begin", "on_epoch_end"))

    def start_epoch(self, dataset: Any, epoch: int) -> None:
        """Begin an epoch before its first sample is loaded; see `Task.start_epoch`."""
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._trainer.control.should_epoch_stop = False
            self._event("on_epoch_begin")

    def after_prediction(self) -> None:
        """Call `on_prediction_step` after a micro-batch of an evaluation that is due."""
        if self._reports_evaluations:
            self._during_training("on_prediction_step")

    # Hooks of a step.

    def before_batch(self, step: int, index: int, slot: int, slots: int, *, counts: bool) -> None:
        self._tries = False
        control = self._trainer.control
        if slot == 0:
            self.start_epoch(None, self._epochs(step))
            control.should_log = control.should_evaluate = control.should_save = False
            self._event("on_step_begin")
        self._ends = turn_ranges(slot, slots, self._trainer.args.gradient_accumulation_steps)[1]

    def after_backward(self) -> None:
        for turn in self._ends:
            if turn + 1 < self._trainer.args.gradient_accumulation_steps:
                self._event("on_substep_end")

    def before_evaluation(self, context: RunContext, step: Any, record: Mapping[str, float] | None, due: Due) -> Due:
        trainer = self._trainer
        global_step = step.global_step
        state = trainer.state
        control = trainer.control
        args = trainer.args
        state.epoch = self._position(global_step)
        state.global_step = global_step
        every = {}
        for name in ("logging", "eval", "save"):
            every[name] = value(getattr(args, f"{name}_strategy"))
        is_first = global_step == 1 and args.logging_first_step
        control.should_log = is_first or (record is not None and every["logging"] == "steps")
        control.should_evaluate = due.evaluate and every["eval"] == "steps"
        control.should_save = due.save and every["save"] == "steps"
        control.should_training_stop |= global_step >= state.max_steps
        self._event("on_step_end")
        # Collective over all ranks: a callback of any rank may ask for something.
        self._agree(context)
        self._log_step(context, step, record)
        # What a callback asks for at the end of an epoch follows its last step.
        if (self._requests or "epoch" in every.values()) and self._epochs(global_step) > self._epoch:
            control.should_log |= every["logging"] == "epoch"
            control.should_evaluate |= due.evaluate and every["eval"] == "epoch"
            control.should_save |= due.save and every["save"] == "epoch"
            self._end_epoch()
            # Collective over all ranks: a callback of any rank may ask for something.
            self._agree(context)
            self._log_step(context, step, record)
        control = trainer.control
        return Due(
            control.should_evaluate or (due.evaluate and every["eval"] == "no"),
            control.should_save or (due.save and every["save"] in ("no", "best")),
        )

    def after_evaluation(self, context: RunContext, done: int, metrics: Mapping[str, float]) -> bool:
        self._evaluations.after_evaluation(context, done, metrics)
        if not self._reports_evaluations:
            return False
        if isinstance(self._trainer.eval_dataset, dict):
            sets = self._trainer.eval_dataset
        else:
            sets = {}
        for name in sets or [""]:
            prefix = f"{name}/" if name else ""
            numbers = {}
            for key, number in metrics.items():
                if key.startswith(prefix):
                    numbers[key.removeprefix(prefix)] = number
            before = f"eval_{name}_" if name else "eval_"
            logs = {}
            for key, number in numbers.items():
                if key != "items":
                    logs[f"{before}{key}"] = number
            self._log(logs)
            self._trainer.control.should_evaluate = False
            self._event("on_evaluate", metrics=logs)
            self._note_best(logs, done)
        # Collective over all ranks: a callback of any rank may ask for something.
        self._agree(context)
        return bool(self._trainer.control.should_save)

    def after_save(self, done: int) -> None:
        control = self._trainer.control
        if control.should_save:
            control.should_save = False
            self._event("on_save")

    def after_step(self, context: RunContext, done: int) -> None:
        if self._trainer.control.should_training_stop and done < self._trainer.state.max_steps:
            context.stop()

    # Hooks of a run.

    def before_run(self, context: RunContext, done: int) -> None:
        trainer = self._trainer
        self._tries = False
        self._start = time.perf_counter()
        stored = context.state.get("trainer", {})
        trainer.state.log_history = list(stored.get("log_history", []))
        for name in ("best_metric", "best_global_step"):
            setattr(trainer.state, name, stored.get(name))
        for callback in self._callbacks:
            for name, attribute in stored.get("callbacks", {}).get(type(callback).__name__, {}).items():
                setattr(callback, name, attribute)
        trainer.state.epoch = self._position(done)
        trainer.state.global_step = done
        self._logged = done
        # Called once, even if the run is rolled back to a checkpoint.
        if not self._begun:
            self._begun = True
            trainer.control.should_training_stop = False
            self._event("on_train_begin")

    def before_save(self, state: dict[str, Any], done: int) -> None:
        trainer_state = self._trainer.state
        stateful = {}
        for callback in self._callbacks:
            if _is_stateful(callback):
                stateful[type(callback).__name__] = callback.state()["attributes"]
        state["trainer"] = {
            "log_history": trainer_state.log_history,
            "best_metric": trainer_state.best_metric,
            "best_global_step": trainer_state.best_global_step,
            "callbacks": stateful,
        }

    def after_run(self, context: RunContext, done: int) -> None:
        self._end_epoch()
        if self._losses:
            loss = math.fsum(self._losses) / len(self._losses)
        else:
            loss = math.nan
        self._log({"train_runtime": time.perf_counter() - self._start, "train_loss": loss})
        self._event("on_train_end")

    # Helpers of the hooks above.

    @property
    def _reports_evaluations(self) -> bool:
        """Whether the Trainer would make this evaluation too: lockstep makes one at the end anyway."""
        return bool(self._trainer.control.should_evaluate) or value(self._trainer.args.eval_strategy) != "no"

    def _epochs(self, done: int) -> int:
        assert self._length is not None, "an optimizer is made before the first step"
        return done * self._size // self._length.samples

    def _position(self, done: int) -> float:
        assert self._length is not None, "an optimizer is made before the first step"
        return done * self._size / self._length.samples

    def _end_epoch(self) -> None:
        if self._epoch >= 0:
            self._epoch = -1
            self._event("on_epoch_end")

    def _during_training(self, event: str) -> None:
        if not self._tries:
            self._event(event)

    def _event(self, name: str, **more: Any) -> None:
        """Call an event of the callbacks that have it, without effect on the random state."""
        trainer = self._trainer
        callbacks = self._by_event.get(name)
        if not callbacks:
            return
        more |= {"processing_class": trainer.processing_class, "optimizer": trainer.optimizer}
        for entry in ("lr_scheduler", "train_dataloader", "eval_dataloader"):
            more[entry] = _Absent(entry)
        with generators_kept():
            for entry in callbacks:
                new_control = getattr(entry, name)(
                    trainer.args, trainer.state, trainer.control, model=trainer.model, **more
                )
                trainer.control = new_control or trainer.control
                if trainer.control.should_epoch_stop:
                    raise ConfigError(f"from_trainer: the callback {type(entry).__name__} {_EPOCH_STOP}")

    def _agree(self, context: RunContext) -> None:
        """Do on every rank what a callback asks for on one. Collective.

        Nothing is exchanged if no callback can ask for anything.
        """
        if not self._requests:
            return
        control = self._trainer.control
        # Collective over all ranks, once or twice a step.
        rows = context.gather([bool(getattr(control, name)) for name in _REQUESTS])
        for name, asked in zip(_REQUESTS, map(any, zip(*rows, strict=True)), strict=True):
            setattr(control, name, asked)

    def _log_step(self, context: RunContext, step: Any, record: Mapping[str, float] | None) -> None:
        """Log the step's numbers if that is asked for.

        Outside the logging schedule the loss is the step's own.
        """
        control = self._trainer.control
        global_step = step.global_step
        if not control.should_log or global_step <= self._logged:
            return
        self._logged = global_step
        if record is None:
            # Collective over all ranks, which agreed on logging: the numbers are reduced on demand.
            logs = {"loss": step.loss, "grad_norm": step.norm}
            context.log({"loss": logs["loss"]})
            # Collective over all ranks, as above.
            numbers = step.numbers
        else:
            logs = {"loss": record["running_loss"], "grad_norm": record["grad_norm"]}
            numbers = {}
            for name, number in record.items():
                if name.startswith("train/"):
                    numbers[name.removeprefix("train/")] = number
        self._losses.append(logs["loss"])
        self._log({**logs, "learning_rate": step.lr, **numbers})

    def _log(self, logs: dict[str, float]) -> None:
        """Add to the history what is logged, and call `on_log`."""
        state = self._trainer.state
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self._trainer.control.should_log = False
        self._event("on_log", logs=logs)

    def _note_best(self, metrics: Mapping[str, float], done: int) -> None:
        """Note the best metric in the Trainer's state, as the Trainer does after an evaluation."""
        args = self._trainer.args
        state = self._trainer.state
        name = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        if name not in metrics:
            return
        best = state.best_metric
        current = metrics[name]
        if best is None or (current > best if args.greater_is_better else current < best):
            state.best_metric = current
            state.best_global_step = done
            if value(args.save_strategy) == "best":
                self._trainer.control.should_save = True


def _is_stateful(callback: Any) -> bool:
    return any(base.__name__ == "ExportableState" for base in type(callback).__mro__)


@final
class _Absent:
    """An argument of an event that a run does not have."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"from_trainer: a callback uses {self._name}{what}, which a run does not have: leave it out; the rate is "
            "state.log_history[-1]['learning_rate']"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __len__(self) -> int:
        self._refuse(".__len__")

    def __iter__(self) -> Iterator[Any]:
        self._refuse(".__iter__")

    def __bool__(self) -> bool:
        return True
