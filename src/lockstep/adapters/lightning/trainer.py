"""Provide `self.trainer` of a module in a run: a plain object with common attributes.

    trainer = Standing(module, settings)
    module.trainer = trainer

An unknown attribute raises an error that names it. The run does the work of a Trainer (fit, save_checkpoint,
strategies, loops).

While data, model and rates are set up, the attributes about processes are those of one device, so that any number of
processes trains the same. Elsewhere they are real, for the names of files and for prints.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import torch

from lockstep.adapters.lightning.logging import Logged
from lockstep.errors import ConfigError
from lockstep.hooks import Clip

__all__ = [
    "Standing",
]


# Methods that derive data, model or rates: ranks and sizes are one device's.
_SET_UP = frozenset(("configure_callbacks", "configure_model", "configure_optimizers", "lr_scheduler_step"))
# Methods of a step, which may derive a rate or a weight of the loss: sizes are one device's.
_OF_STEP = _SET_UP | {
    *("training_step", "validation_step", "test_step", "predict_step", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
}


class NotServed(ConfigError, AttributeError):
    """A module used an attribute of its Trainer that a run does not provide."""


@final
class Standing:
    """Substitute for the Trainer of a module.

    Attributes:
        global_step: optimizer steps so far.
        current_epoch: 0-based.
        max_epochs, max_steps, estimated_stepping_batches: length of the run; -1 for the one that does not end it.
        accumulate_grad_batches: batches of a step on one device.
        num_training_batches: batches of an epoch, as one device would see them.
        callback_metrics, logged_metrics, progress_bar_metrics: name -> number, the last logged values.
        optimizers, lr_scheduler_configs: of the module.
        asked_size: the attribute by which a set-up asked for the number of processes; "": it did not.
    """

    def __init__(self, module: Any, datamodule: Any = None) -> None:
        self.lightning_module = self.model = module
        self.datamodule = datamodule
        self.global_step = self.current_epoch = 0
        self.max_epochs: int | None = None
        self.max_steps = -1
        self.min_epochs = None
        self.min_steps = None
        self.estimated_stepping_batches: int | float = 0
        self.accumulate_grad_batches = 1
        self.gradient_clip_val = None
        self.gradient_clip_algorithm = None
        self.num_training_batches = 0
        self.num_val_batches: list[int] = []
        self.num_sanity_val_batches: list[int] = []
        self.num_test_batches: list[int] = []
        self.num_predict_batches: list[int] = []
        self.limit_train_batches = self.limit_val_batches = self.limit_test_batches = 1.0
        self.limit_predict_batches = self.overfit_batches = 1.0
        self.check_val_every_n_epoch = 1
        self.val_check_interval = 1.0
        self.log_every_n_steps = 50
        self.fast_dev_run: bool | int = False
        self.enable_autolog_hparams = True
        self.barebones = self.should_stop = self.interrupted = False
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callbacks: list[Any] = []
        self.checkpoint_callback = self.early_stopping_callback = self.progress_bar_callback = None
        self.checkpoint_callbacks: list[Any] = []
        self.early_stopping_callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.predict_dataloaders: Any = None
        self.default_root_dir = os.getcwd()
        self.ckpt_path: str | None = None
        self.precision: str = "32-true"
        self._is_setting_up = False
        self.asked_size = ""
        self.stage = "train"
        self.sanity_checking = False
        self.is_last_batch = False
        self.device = torch.device("cpu")
        self.state = _TrainerState(self)
        self.strategy = _Strategy(self)
        self.fit_loop = _FitLoop(self)
        self.precision_plugin = self.strategy
        # Private in Lightning: `LightningModule.log` reads these.
        self._results: Logged | None = Logged()
        self._logger_connector = _Connector()
        self._accelerator_connector = _Accelerator()

    @property
    def logger(self) -> Any:
        if self.loggers:
            return self.loggers[0]
        return None

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Mark a context in which data, model or rates are set up."""
        before = self._is_setting_up
        self._is_setting_up = True
        try:
            yield
        finally:
            self._is_setting_up = before

    def _size(self, name: str, variable: str) -> int:
        is_set_up = self._is_in(_SET_UP)
        if is_set_up:
            self.asked_size = name
        if is_set_up or self._is_in(_OF_STEP):
            return 1
        return int(os.environ.get(variable, "1"))

    def _rank(self, variable: str) -> int:
        if self._is_in(_SET_UP):
            return 0
        return int(os.environ.get(variable, "0"))

    def _is_in(self, methods: frozenset[str]) -> bool:
        return self._is_setting_up or getattr(self.lightning_module, "_current_fx_name", None) in methods

    @property
    def world_size(self) -> int:
        return self._size("world_size", "WORLD_SIZE")

    @property
    def num_devices(self) -> int:
        return self._size("num_devices", "LOCAL_WORLD_SIZE")

    @property
    def num_nodes(self) -> int:
        return self._size("num_nodes", "GROUP_WORLD_SIZE")

    @property
    def global_rank(self) -> int:
        return self._rank("RANK")

    @property
    def local_rank(self) -> int:
        return self._rank("LOCAL_RANK")

    @property
    def node_rank(self) -> int:
        return self._rank("GROUP_RANK")

    @property
    def is_global_zero(self) -> bool:
        """Whether this process prints and writes files: real everywhere."""
        return os.environ.get("RANK", "0") == "0"

    @property
    def log_dir(self) -> str:
        return self.default_root_dir

    @property
    def device_ids(self) -> list[int]:
        return [self.device.index or 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        # One replica: the run itself splits the samples among its ranks.
        return {"num_replicas": 1, "rank": 0}

    @property
    def training(self) -> bool:
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        return self.stage == "validate"

    @property
    def testing(self) -> bool:
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        return self.stage in ("validate", "test")

    def take_callbacks(self, callbacks: list[Any]) -> None:
        """Set the callbacks, and those of a kind, as the Trainer's properties give them."""

        def of_kind(name: str) -> list[Any]:
            matches = []
            for callback in callbacks:
                if any(base.__name__ == name for base in type(callback).__mro__):
                    matches.append(callback)
            return matches

        self.callbacks = callbacks
        self.checkpoint_callbacks = of_kind("Checkpoint")
        self.early_stopping_callbacks = of_kind("EarlyStopping")
        self.checkpoint_callback = next(iter(self.checkpoint_callbacks), None)
        self.early_stopping_callback = next(iter(self.early_stopping_callbacks), None)

    def settings(self) -> dict[str, Any]:
        """Return the plain values that another process needs to make the same object."""
        values = {}
        for name, value in vars(self).items():
            if isinstance(value, bool | int | float | str):
                values[name] = value
        return values

    def take(self, settings: dict[str, Any]) -> None:
        """Set the values that `settings` returned."""
        vars(self).update(settings)

    def print(self, *values: Any, **more: Any) -> None:
        if self.is_global_zero:
            print(*values, **more)

    def __getattr__(self, name: str) -> NoReturn:
        # copy and pickle look up special methods, and expect an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotServed(
            f"from_lightning: module or callback reads trainer.{name}, which a run lacks: leave it out, or do it "
            "in the loop of lockstep.Run"
        )


@final
class _TrainerState:
    """`trainer.state`: the stage of the Trainer."""

    def __init__(self, trainer: Standing) -> None:
        self._trainer = trainer

    @property
    def stage(self) -> str:
        if self._trainer.sanity_checking:
            return "sanity_check"
        return self._trainer.stage

    @property
    def fn(self) -> str:
        return {"train": "fit", "validate": "fit"}.get(self._trainer.stage, self._trainer.stage)


@final
class _Strategy:
    """`trainer.strategy`, with what a module's own methods need."""

    def __init__(self, trainer: Standing) -> None:
        self._trainer = trainer
        self._lightning_optimizers: list[Any] = []
        self.manual: Any = None
        # Replaced by the run's gather when the run begins.
        self.gather: Callable[[Any], list[Any]] = lambda value: [value]
        self.precision_plugin = self

    @property
    def root_device(self) -> torch.device:
        return self._trainer.device

    @property
    def is_global_zero(self) -> bool:
        return self._trainer.is_global_zero

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    @property
    def global_rank(self) -> int:
        return self._trainer.global_rank

    @property
    def lightning_module(self) -> Any:
        return self._trainer.lightning_module

    def optimizer_step(self, optimizer: Any, closure: Any = None, *_: Any, **__: Any) -> Any:
        """Step one of Lightning's optimizers in manual optimization."""
        return optimizer.step(closure)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Serve `manual_backward`, which passes None for the optimizer as the first of `args`."""
        self.manual.backward(loss, *args[1:], **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Serve `clip_gradients` of a module in manual optimization."""
        if clip_val and clip_val > 0:
            self.manual.clip(
                optimizer,
                Clip(float(clip_val), str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))),
            )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so. Collective."""
        # Collective over all ranks.
        decisions = self.gather(bool(decision))
        return bool(min(decisions) if all else max(decisions))

    def reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return the value unchanged; the run reduces logged values itself."""
        return value

    def barrier(self, name: str | None = None) -> None:
        """Do nothing; ranks synchronise in each step anyway."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "all_gather":
            raise NotServed(
                "from_lightning: the module calls self.all_gather, whose result depends on the number of ranks: "
                "compute within the micro-batch, log a sum, or write the loss over all samples of a step as "
                "`outputs` and `step_loss` of a lockstep.Task"
            )
        raise NotServed(
            f"from_lightning: the module uses self.trainer.strategy.{name}, which a run does not have: leave it out"
        )


@final
class _FitLoop:
    """`trainer.fit_loop`, by which modules find out whether there is a validation."""

    def __init__(self, trainer: Standing) -> None:
        self._trainer = trainer
        self.epoch_loop = self.val_loop = self._data_source = self

    @property
    def max_epochs(self) -> int | None:
        return self._trainer.max_epochs

    def is_defined(self) -> bool:
        return self._trainer.val_dataloaders is not None


@final
class _Connector:
    """Lightning's logger connector, with what `LightningModule.log` uses."""

    def __init__(self) -> None:
        self._current_fx: str | None = None

    def should_reset_tensors(self, fx: str) -> bool:
        return False


@final
class _Accelerator:
    """Setting that keeps `LightningModule.log` from exchanging values; the run does it."""

    is_distributed = False
