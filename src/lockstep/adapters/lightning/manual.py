"""Run manual optimization (`automatic_optimization = False`) the same on any number of ranks.

The `training_step` of each micro-batch of a step runs in its own thread, one at a time. At the step of an optimizer
or scheduler it pauses until all the others have reached the same point. Then the gradients of all micro-batches are
summed, the optimizer steps once, and all continue. The state of the module that belongs to one micro-batch
(gradients, random numbers, plain attributes, toggled parameters, buffers) is swapped out while another one runs.
"""

import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.adapters.lightning.hooks import Life, default_dtype, own_dtype
from lockstep.adapters.lightning.optimizers import Configured
from lockstep.adapters.lightning.package import class_beside
from lockstep.errors import ConfigError, LockstepError
from lockstep.hooks import Clip
from lockstep.optim.optimizers import Several
from lockstep.transforms.batchnorm import empty_slot

__all__ = [
    "ManualSteps",
]


# Numbers of a plateau scheduler's state.
_NUMBERS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Coroutine:
    """A thread that alternates with its caller: one waits while the other runs."""

    current: ClassVar["Coroutine | None"] = None

    def __init__(self) -> None:
        # Only one of the two threads runs at a time.
        self._resume = threading.Semaphore(0)
        self._yield = threading.Semaphore(0)
        self._work: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_finished = True
        threading.Thread(target=self._loop, daemon=True, name="lockstep-micro-batch").start()

    def begin(self, work: Callable[[], Any]) -> bool:
        """Run `work` up to its first pause. Raises what it raises.

        Returns:
            Whether it has finished.
        """
        self._work = work
        self._is_finished = False
        self._error = None
        return self.go_on()

    def go_on(self) -> bool:
        """Run up to the next pause, and return whether the work has finished."""
        Coroutine.current = self
        self._resume.release()
        self._yield.acquire()
        if self._error is not None:
            error = self._error
            self._error = None
            raise error
        return self._is_finished

    def result(self) -> Any:
        result = self._result
        self._result = None
        return result

    @staticmethod
    def pause() -> None:
        """Hand control back to the caller; called in the running thread."""
        running = Coroutine.current
        assert running is not None
        running._yield.release()
        running._resume.acquire()

    def _loop(self) -> None:
        while True:
            self._resume.acquire()
            try:
                assert self._work is not None
                self._result = self._work()
            except BaseException as error:
                # Raised again in the caller's thread.
                self._error = error
            self._work = None
            self._is_finished = True
            self._yield.release()


@final
class ManualScheduler:
    """A proxy for a scheduler of the module: its step waits for all micro-batches."""

    def __init__(self, scheduler: Any, ask: Callable[[tuple[str, int], Any], None], place: int) -> None:
        self._scheduler = scheduler
        self._ask = ask
        self._place = place
        self.optimizer = scheduler.optimizer
        # The number of its steps; for a plateau, its counters and its current rates.
        groups = len(self.optimizer.param_groups)
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.state = torch.zeros(len(_NUMBERS) + groups if self._plateau else 1, dtype=torch.float64, device="cpu")
        self._record_state()

    def step(self, *args: Any) -> None:
        self._ask(("scheduler", self._place), args)

    def really(self, args: tuple[Any, ...]) -> None:
        with warnings.catch_warnings():
            # torch would warn that the scheduler steps before the optimizer, whose step the engine takes.
            warnings.simplefilter("ignore")
            self._scheduler.step(*args)
        self.state[0] += not self._plateau
        self._record_state()

    def restore(self) -> None:
        """Advance the new scheduler to its loaded state."""
        if not self._plateau:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(int(self.state[0])):
                    self._scheduler.step()
            return
        # The state is in host memory.
        values = self.state.tolist()
        for name, value in zip(_NUMBERS, values, strict=False):
            setattr(self._scheduler, name, value if name == "best" else int(value))
        for group, rate in zip(self.optimizer.param_groups, values[len(_NUMBERS) :], strict=True):
            group["lr"] = rate

    def _record_state(self) -> None:
        if self._plateau:
            numbers = [float(getattr(self._scheduler, name)) for name in _NUMBERS]
            self.state.copy_(torch.tensor([*numbers, *self.get_last_lr()], dtype=torch.float64))

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_epoch(self) -> int:
        return int(self._scheduler.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


# Attributes of the module that all micro-batches of a step share.
_SHARED = ("_parameters", "_buffers", "_modules", "_trainer", "training", "forward")


@dataclass
class _ManualBatch:
    """A micro-batch of the step, with its own state of the module.

    Attributes:
        work: its `training_step`, which returns the loss, or None.
        placeholder: the tensor that the loop received for its loss, filled here.
        backwards: the losses that were passed to `manual_backward`.
    """

    work: Callable[[], Any]
    samples: int
    placeholder: Tensor
    states: tuple[Any, ...]
    buffer_state: Any = None
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    required: list[bool] = field(default_factory=list)
    backwards: list[Tensor] = field(default_factory=list)
    clips: dict[int, Clip] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    point: Any = None


@final
class ManualSteps:
    """Steps of a module with manual optimization; see `lockstep.hooks.OwnSteps`."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._pending: list[_ManualBatch] = []
        self._carry: list[dict[Tensor, Tensor]] = []
        self._current: _ManualBatch | None = None
        self._is_single = False
        self._engine: Any = None
        self._weights: list[float] = []
        self._threads: list[Coroutine] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[ManualScheduler] = []
        self._dtype = torch.float32

    def configure(self, configuration: Configured) -> Several:
        """Wrap the module's optimizers as one, and route their steps through this object."""
        trainer = self._life.trainer
        self._optimizers = configuration.optimizers
        self._pending = []
        self._carry = []
        for scheduler in configuration.schedulers:
            if scheduler.scheduler.optimizer not in configuration.optimizers:
                raise ConfigError("from_lightning: a scheduler's optimizer is not among those of configure_optimizers")
        several = Several(configuration.optimizers)
        for index, optimizer in enumerate(configuration.optimizers):
            # A step waits for the other micro-batches; the engine then steps the optimizer.
            optimizer.step = self._stepper(index)  # type: ignore[method-assign]
        self._schedulers = [
            ManualScheduler(entry.scheduler, self.ask, at) for at, entry in enumerate(configuration.schedulers)
        ]
        for entry, proxy in zip(configuration.schedulers, self._schedulers, strict=True):
            entry.scheduler = proxy
        optimizer_class = class_beside(self._life.module, "core.optimizer", "LightningOptimizer")
        trainer.optimizers = configuration.optimizers
        trainer.lr_scheduler_configs = configuration.schedulers
        strategy = trainer.strategy
        strategy.manual = self
        # Private in Lightning: `self.optimizers()` of a module returns them.
        strategy._lightning_optimizers = [
            optimizer_class._to_lightning_optimizer(entry, strategy) for entry in configuration.optimizers
        ]
        # Lightning's optimizers have only a weak reference to the strategy.
        self._strategy = strategy
        return several

    # Called by the loop.

    def state(self) -> dict[str, Tensor]:
        """Return the positions of the schedulers for a checkpoint."""
        states = {}
        for index, scheduler in enumerate(self._schedulers):
            states[f"schedulers/{index}"] = scheduler.state
        return states

    def restore(self) -> None:
        """Advance the schedulers to the positions that were loaded into `state`."""
        for scheduler in self._schedulers:
            scheduler.restore()

    def note(self, work: Callable[[], Any], samples: int, device: torch.device) -> Tensor:
        """Record a micro-batch to run in the engine's step.

        Returns:
            A 0-dim placeholder; the step fills it with the loss, summed over the samples.
        """
        loss = torch.zeros((), device=device, requires_grad=True)
        self._pending.append(_ManualBatch(work, samples, loss, _rng_states(device)))
        return loss

    def try_loss(self, work: Callable[[], Any]) -> Tensor:
        """Return the mean loss of a micro-batch without taking a step."""
        self._current = _ManualBatch(work, 1, torch.zeros(()), ())
        try:
            with torch.enable_grad(), own_dtype(self._life.module):
                return self._loss(self._current, work()).detach()
        finally:
            self._current = None

    def forget(self) -> None:
        self._pending.clear()

    def run(self, weights: list[float], engine: Any) -> None:
        micro = self._pending
        self._pending = []
        self._engine = engine
        self._is_single = len(micro) == 1
        self._weights = [weight * micro_batch.samples for weight, micro_batch in zip(weights, micro, strict=True)]
        self._last_step = micro
        module = self._life.module
        before = self._attributes(module)
        for index, micro_batch in enumerate(micro):
            micro_batch.attributes = dict(before)
            micro_batch.required = [parameter.requires_grad for parameter in module.parameters()]
            micro_batch.gradients = self._carry[index] if index < len(self._carry) else {}
        self._dtype = torch.get_default_dtype()
        with own_dtype(module):
            if self._is_single:
                self._enter(micro[0])
                with empty_slot(not weights[0]):
                    self._finish(micro[0], micro[0].work())
                self._leave(micro[0])
            else:
                self._run_in_turn(micro)
        self._carry = [micro_batch.gradients for micro_batch in micro]
        _set_attributes(module, micro[0].attributes)
        for parameter, required in zip(module.parameters(), micro[0].required, strict=True):
            parameter.requires_grad = required
        for parameter in module.parameters():
            parameter.grad = None

    def buffers(self) -> list[Any]:
        micro = self._last_step
        self._last_step = []
        return [micro_batch.buffer_state for micro_batch in micro]

    # Called by the module within a micro-batch.

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Serve `manual_backward`."""
        micro = self._micro_batch("manual_backward")
        micro.backwards.append(loss.detach())
        self._life.hook("on_before_backward", loss)
        if self._engine is not None and micro.states:
            with self._engine.recomputing():
                # torch does not annotate Tensor.backward.
                loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._life.hook("on_after_backward")

    def clip(self, optimizer: Any, clip: Clip) -> None:
        """Serve `clip_gradients`: the summed gradient is clipped when the optimizer steps."""
        self._micro_batch("clip_gradients").clips[self._place(optimizer)] = clip

    def ask(self, point: tuple[str, int], value: Any = None) -> None:
        """Pause the current micro-batch at a step, and return once all have taken it."""
        micro = self._micro_batch("a step")
        # A micro-batch without random states is a trial, which takes no step.
        if not micro.states:
            return
        micro.point = [*point, value]
        if self._is_single:
            self._leave(micro)
            self._take_step([micro])
            self._enter(micro)
        else:
            Coroutine.pause()

    def _stepper(self, place: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
            loss = closure() if closure is not None else None
            self._life.hook("on_before_optimizer_step", self._optimizers[place])
            self.ask(("optimizer", place))
            return loss

        return step

    # Helpers.

    def _run_in_turn(self, micro: list[_ManualBatch]) -> None:
        """Run the micro-batches in turn, each up to its next pause, until all have finished."""
        # After an error the threads are never resumed, and the next step makes new ones.
        threads = self._threads
        self._threads = []
        while len(threads) < len(micro):
            threads.append(Coroutine())
        active = list(range(len(micro)))
        is_started = False
        while active:
            finished = []
            for index in active:
                micro_batch = micro[index]
                thread = threads[index]
                self._enter(micro_batch)
                micro_batch.point = None
                with empty_slot(not self._weights[index]):
                    over = thread.go_on() if is_started else thread.begin(micro_batch.work)
                if over:
                    self._finish(micro_batch, thread.result())
                    finished.append(index)
                self._leave(micro_batch)
            is_started = True
            if finished and len(finished) < len(active):
                raise LockstepError(
                    "the micro-batches of a step must step together: one training_step ended and another is at "
                    f"{next(micro[index].point for index in active if index not in finished)}; decide by shared values"
                )
            active = [index for index in active if index not in finished]
            if active:
                self._take_step([micro[index] for index in active])
        self._threads = threads

    def _take_step(self, micro: list[_ManualBatch]) -> None:
        """Take the step that all micro-batches have reached."""
        # Collective over all ranks: their micro-batches must have reached the same step.
        self._engine.agree([micro_batch.point[:2] for micro_batch in micro])
        step_kind, index, value = micro[0].point
        if step_kind == "scheduler":
            self._schedulers[index].really(value)
            return
        clips = [micro_batch.clips.pop(index, None) for micro_batch in micro]
        # Optimizers create their states in the default dtype.
        with default_dtype(self._dtype):
            gradients = [micro_batch.gradients for micro_batch in micro]
            buffers = [micro_batch.buffer_state for micro_batch in micro]
            # Collective over all ranks: gradients are summed, and the optimizer steps once.
            self._engine.update(index, gradients, self._weights, buffers, clips[0])

    def _enter(self, micro: _ManualBatch) -> None:
        """Swap in the state of a micro-batch."""
        module = self._life.module
        self._current = micro
        self._life.logged.swap(micro.entries, micro.samples)
        _set_attributes(module, micro.attributes)
        for parameter, required in zip(module.parameters(), micro.required, strict=True):
            parameter.requires_grad = required
            parameter.grad = micro.gradients.get(parameter)
        self._engine.restore(micro.buffer_state)
        # The cache has casts of weights from before a step, or of another micro-batch's graph.
        torch.clear_autocast_cache()
        _set_rng_states(micro.states)

    def _leave(self, micro: _ManualBatch) -> None:
        module = self._life.module
        self._current = None
        micro.entries = self._life.logged.swap([], 1)
        micro.states = _rng_states(micro.placeholder.device)
        micro.attributes = self._attributes(module)
        micro.required = [parameter.requires_grad for parameter in module.parameters()]
        micro.gradients = {p: p.grad for p in module.parameters() if p.grad is not None}
        micro.buffer_state = self._engine.collect_writes()
        for parameter in module.parameters():
            parameter.grad = None

    def _finish(self, micro: _ManualBatch, output: Any) -> None:
        with torch.no_grad():
            micro.placeholder.copy_(self._loss(micro, output) * micro.samples)

    def _loss(self, micro: _ManualBatch, output: Any) -> Tensor:
        """Return the returned loss, or the sum of the losses passed to `manual_backward`."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.detach().reshape(())
        if micro.backwards:
            return torch.stack([backward_loss.reshape(()).float() for backward_loss in micro.backwards]).sum()
        return torch.zeros_like(micro.placeholder)

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        values = {}
        for name, value in vars(module).items():
            if name not in _SHARED:
                values[name] = value
        return values

    def _micro_batch(self, call: str) -> _ManualBatch:
        if self._current is None:
            raise ConfigError(f"from_lightning: {call} outside of training_step is not supported: do it there")
        return self._current

    def _place(self, optimizer: Any) -> int:
        plain = getattr(optimizer, "optimizer", optimizer)
        return next(index for index, candidate in enumerate(self._optimizers) if candidate is plain)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in current if name not in attributes and name not in _SHARED]:
        del current[name]
    current.update(attributes)


def _rng_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the default random generators."""
    if device.type == "cuda":
        cuda_state = torch.cuda.get_rng_state(device)
    else:
        cuda_state = None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda_state, device


def _set_rng_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3], states[4])
