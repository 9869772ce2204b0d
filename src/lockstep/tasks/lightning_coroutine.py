"""Threads that run by turns, and schedulers whose step is one of all of them: for `lightning_manual`.

thread = Coroutine()
over = thread.begin(work)           # runs it up to its first `Coroutine.pause()`
over = thread.go_on()
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["Coroutine", "ManualScheduler"]

_NUMBERS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # of a plateau


class Coroutine:
    """A thread that runs while its caller waits, and the other way round."""

    current: ClassVar["Coroutine | None"] = None

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], Any] | None = None
        self._found: Any = None
        self._error: BaseException | None = None
        self._over = True
        threading.Thread(target=self._serve, daemon=True, name="lockstep-micro-batch").start()

    def begin(self, work: Callable[[], Any]) -> bool:
        """Runs `work` up to its first pause; whether it is over. Raises what it raises."""
        self._work, self._over, self._error = work, False, None
        return self.go_on()

    def go_on(self) -> bool:
        """Runs it up to its next pause; whether it is over."""
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
        """Called in the thread of the one that runs: its caller goes on."""
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
    """Stands for a scheduler of the module: a step of it is one of all micro-batches."""

    def __init__(self, scheduler: Any, ask: Callable[[tuple[str, int], Any], None], place: int) -> None:
        self._scheduler, self._ask, self._place = scheduler, ask, place
        self.optimizer = scheduler.optimizer
        # How often it was stepped; of a plateau its numbers and the rates it has come to.
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
        """Brings the scheduler, which is new, to where its state says."""
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
