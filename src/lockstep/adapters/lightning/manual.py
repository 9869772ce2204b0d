"""Run manual optimization (`automatic_optimization = False`) alike on any number of ranks.

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

__all__ = [
    "Coroutine",
    "ManualScheduler",
    "ManualSteps",
]


_NUMBERS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # of a plateau


class Coroutine:
    """A thread that alternates with its caller: one waits while the other runs."""

    current: ClassVar["Coroutine | None"] = None

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], Any] | None = None
        self._found: Any = None
        self._error: BaseException | None = None
        self._over = True
        threading.Thread(target=self._serve, daemon=True, name="lockstep-micro-batch").start()

    def begin(self, work: Callable[[], Any]) -> bool:
        """Run `work` up to its first pause. Raises what it raises.

        Returns:
            Whether it has finished.
        """
        self._work, self._over, self._error = work, False, None
        return self.go_on()

    def go_on(self) -> bool:
        """Run up to the next pause, and return whether the work has finished."""
        Coroutine.current = self
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._over

    def result(self) -> Any:
        found, self._found = self._found, None
        return found

    @staticmethod
    def pause() -> None:
        """Hand control back to the caller; called in the running thread."""
        running = Coroutine.current
        assert running is not None
        running._back.release()
        running._go.acquire()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            try:
                assert self._work is not None
                self._found = self._work()
            except BaseException as error:  # handed to the caller's thread
                self._error = error
            self._work, self._over = None, True
            self._back.release()


@final
class ManualScheduler:
    """A proxy for a scheduler of the module: its step waits for all micro-batches."""

    def __init__(self, scheduler: Any, ask: Callable[[tuple[str, int], Any], None], place: int) -> None:
        self._scheduler, self._ask, self._place = scheduler, ask, place
        self.optimizer = scheduler.optimizer
        # The number of its steps; for a plateau, its counters and its current rates.
        groups = len(self.optimizer.param_groups)
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.state = torch.zeros(len(_NUMBERS) + groups if self._plateau else 1, dtype=torch.float64, device="cpu")
        self._note()

    def step(self, *given: Any) -> None:
        self._ask(("scheduler", self._place), given)

    def really(self, given: tuple[Any, ...]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's step is taken by the engine
            self._scheduler.step(*given)
        self.state[0] += not self._plateau
        self._note()

    def restored(self) -> None:
        """Advance the new scheduler to its loaded state."""
        if not self._plateau:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(int(self.state[0])):
                    self._scheduler.step()
            return
        values = self.state.tolist()
        for name, value in zip(_NUMBERS, values, strict=False):
            setattr(self._scheduler, name, value if name == "best" else int(value))
        for group, rate in zip(self.optimizer.param_groups, values[len(_NUMBERS) :], strict=True):
            group["lr"] = rate

    def _note(self) -> None:
        if self._plateau:
            numbers = [float(getattr(self._scheduler, name)) for name in _NUMBERS]
            self.state.copy_(torch.tensor([*numbers, *self.get_last_lr()], dtype=torch.float64))

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_epoch(self) -> int:
        return int(self._scheduler.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._scheduler.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


_APART = ("_parameters", "_buffers", "_modules", "_trainer", "training", "forward")


@dataclass
class _Micro:
    """A micro-batch of the step, with its own state of the module.

    Attributes:
        work: its `training_step`, which returns the loss, or None.
        told: the placeholder that the loop received for its loss, filled here.
        backwards: the losses that were passed to `manual_backward`.
    """

    work: Callable[[], Any]
    samples: int
    told: Tensor
    states: tuple[Any, ...]
    kept: Any = None
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    required: list[bool] = field(default_factory=list)
    backwards: list[Tensor] = field(default_factory=list)
    clips: dict[int, Clip] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    asked: Any = None


@final
class ManualSteps:
    """Steps of a module with manual optimization; see `lockstep.hooks.OwnSteps`."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._noted: list[_Micro] = []
        self._carried: list[dict[Tensor, Tensor]] = []
        self._present: _Micro | None = None
        self._alone = False
        self._engine: Any = None
        self._weights: list[float] = []
        self._threads: list[Coroutine] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[ManualScheduler] = []
        self._dtype = torch.float32

    def configured(self, found: Configured) -> Several:
        """Wrap the module's optimizers as one, and route their steps through this object."""
        trainer, self._optimizers = self._life.trainer, found.optimizers
        self._noted, self._carried = [], []
        for scheduler in found.schedulers:
            if scheduler.scheduler.optimizer not in found.optimizers:
                raise ConfigError("from_lightning: a scheduler's optimizer is not among those of configure_optimizers")
        made = Several(found.optimizers)
        for place, optimizer in enumerate(found.optimizers):
            optimizer.step = self._stepper(place)  # type: ignore[method-assign]
        self._schedulers = [ManualScheduler(each.scheduler, self.ask, at) for at, each in enumerate(found.schedulers)]
        for each, standing in zip(found.schedulers, self._schedulers, strict=True):
            each.scheduler = standing
        kind = class_beside(self._life.module, "core.optimizer", "LightningOptimizer")
        trainer.optimizers, trainer.lr_scheduler_configs = found.optimizers, found.schedulers
        strategy = trainer.strategy
        strategy.manual = self
        strategy._lightning_optimizers = [kind._to_lightning_optimizer(each, strategy) for each in found.optimizers]
        self._standing = strategy  # Lightning's optimizers hold it by a weak reference only
        return made

    # Called by the loop.

    def state(self) -> dict[str, Tensor]:
        """Return the positions of the schedulers for a checkpoint."""
        return {f"schedulers/{place}": each.state for place, each in enumerate(self._schedulers)}

    def restored(self) -> None:
        """Advance the schedulers to the positions that were loaded into `state`."""
        for each in self._schedulers:
            each.restored()

    def note(self, work: Callable[[], Any], samples: int, device: torch.device) -> Tensor:
        """Record a micro-batch to run in the engine's step.

        Returns:
            A 0-dim placeholder; the step fills it with the loss, summed over the samples.
        """
        told = torch.zeros((), device=device, requires_grad=True)
        self._noted.append(_Micro(work, samples, told, _drawing(device)))
        return told

    def tried(self, work: Callable[[], Any]) -> Tensor:
        """Return the mean loss of a micro-batch without taking a step."""
        self._present = _Micro(work, 1, torch.zeros(()), ())
        try:
            with torch.enable_grad(), own_dtype(self._life.module):
                return self._loss(self._present, work()).detach()
        finally:
            self._present = None

    def forget(self) -> None:
        self._noted.clear()

    def run(self, weights: list[float], engine: Any) -> None:
        micro, self._noted = self._noted, []
        self._engine, self._alone = engine, len(micro) == 1
        self._weights = [weight * each.samples for weight, each in zip(weights, micro, strict=True)]
        self._done = micro
        module = self._life.module
        before = self._attributes(module)
        for place, each in enumerate(micro):
            each.attributes = dict(before)
            each.required = [parameter.requires_grad for parameter in module.parameters()]
            each.gradients = self._carried[place] if place < len(self._carried) else {}
        self._dtype = torch.get_default_dtype()
        with own_dtype(module):
            if self._alone:
                self._enter(micro[0])
                self._finish(micro[0], micro[0].work())
                self._leave(micro[0])
            else:
                self._together(micro)
        self._carried = [each.gradients for each in micro]
        _give(module, micro[0].attributes)
        for parameter, required in zip(module.parameters(), micro[0].required, strict=True):
            parameter.requires_grad = required
        for parameter in module.parameters():
            parameter.grad = None

    def buffers(self) -> list[Any]:
        done, self._done = self._done, []
        return [each.kept for each in done]

    # Called by the module within a micro-batch.

    def backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        """Serve `manual_backward`."""
        micro = self._at("manual_backward")
        micro.backwards.append(loss.detach())
        self._life.hook("on_before_backward", loss)
        if self._engine is not None and micro.states:
            with self._engine.recomputing():
                loss.backward(*given, **named)  # type: ignore[no-untyped-call]
        self._life.hook("on_after_backward")

    def clip(self, optimizer: Any, clip: Clip) -> None:
        """Serve `clip_gradients`: the summed gradient is clipped when the optimizer steps."""
        self._at("clip_gradients").clips[self._place(optimizer)] = clip

    def ask(self, what: tuple[str, int], value: Any = None) -> None:
        """Pause the current micro-batch at a step, and return once all have taken it."""
        micro = self._at("a step")
        if not micro.states:  # a trial
            return
        micro.asked = [*what, value]
        if self._alone:
            self._leave(micro)
            self._meet([micro])
            self._enter(micro)
        else:
            Coroutine.pause()

    def _stepper(self, place: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
            found = closure() if closure is not None else None
            self._life.hook("on_before_optimizer_step", self._optimizers[place])
            self.ask(("optimizer", place))
            return found

        return step

    # Helpers.

    def _together(self, micro: list[_Micro]) -> None:
        """Run the micro-batches in turn, each up to its next pause, until all have finished."""
        threads, self._threads = self._threads, []  # after an error they wait for ever, and new ones are made
        while len(threads) < len(micro):
            threads.append(Coroutine())
        going = list(range(len(micro)))
        begun = False
        while going:
            ended = []
            for place in going:
                each, thread = micro[place], threads[place]
                self._enter(each)
                each.asked = None
                over = thread.go_on() if begun else thread.begin(each.work)
                if over:
                    self._finish(each, thread.result())
                    ended.append(place)
                self._leave(each)
            begun = True
            if ended and len(ended) < len(going):
                raise LockstepError(
                    "the micro-batches of a step do not step alike: one training_step has ended where another asks for "
                    f"{next(micro[place].asked for place in going if place not in ended)}; step by what all know"
                )
            going = [place for place in going if place not in ended]
            if going:
                self._meet([micro[place] for place in going])
        self._threads = threads

    def _meet(self, micro: list[_Micro]) -> None:
        """Take the step that all micro-batches have reached."""
        self._engine.agree([each.asked[:2] for each in micro])  # collective
        kind, place, value = micro[0].asked
        if kind == "scheduler":
            self._schedulers[place].really(value)
            return
        clips = [each.clips.pop(place, None) for each in micro]
        with default_dtype(self._dtype):  # in which an optimizer makes its states
            gradients, kept = [each.gradients for each in micro], [each.kept for each in micro]
            self._engine.update(place, gradients, self._weights, kept, clips[0])  # collective

    def _enter(self, micro: _Micro) -> None:
        """Swap in the state of a micro-batch."""
        module = self._life.module
        self._present = micro
        self._life.logged.swapped(micro.entries, micro.samples)
        _give(module, micro.attributes)
        for parameter, required in zip(module.parameters(), micro.required, strict=True):
            parameter.requires_grad = required
            parameter.grad = micro.gradients.get(parameter)
        self._engine.restore(micro.kept)
        torch.clear_autocast_cache()  # what it holds is of weights before a step, or of another micro-batch's graph
        _draw_on(micro.states)

    def _leave(self, micro: _Micro) -> None:
        module = self._life.module
        self._present = None
        micro.entries = self._life.logged.swapped([], 1)
        micro.states = _drawing(micro.told.device)
        micro.attributes = self._attributes(module)
        micro.required = [parameter.requires_grad for parameter in module.parameters()]
        micro.gradients = {p: p.grad for p in module.parameters() if p.grad is not None}
        micro.kept = self._engine.kept()
        for parameter in module.parameters():
            parameter.grad = None

    def _finish(self, micro: _Micro, found: Any) -> None:
        with torch.no_grad():
            micro.told.copy_(self._loss(micro, found) * micro.samples)

    def _loss(self, micro: _Micro, found: Any) -> Tensor:
        """The returned loss, or the sum of the losses passed to `manual_backward`."""
        loss = found.get("loss") if isinstance(found, dict) else found
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.detach().reshape(())
        return (
            torch.stack([each.reshape(()).float() for each in micro.backwards]).sum()
            if micro.backwards
            else (torch.zeros_like(micro.told))
        )

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in _APART}

    def _at(self, what: str) -> _Micro:
        if self._present is None:
            raise ConfigError(f"from_lightning: {what} outside of training_step is not served: do it there")
        return self._present

    def _place(self, optimizer: Any) -> int:
        plain = getattr(optimizer, "optimizer", optimizer)
        return next(place for place, each in enumerate(self._optimizers) if each is plain)


def _give(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in attributes and name not in _APART]:
        del own[name]
    own.update(attributes)


def _drawing(device: torch.device) -> tuple[Any, ...]:
    """The states of the default random generators."""
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), drawn, device


def _draw_on(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3], states[4])
