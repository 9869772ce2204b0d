"""Serve a user's Lightning callbacks: which are called, in what order, with which state.

    callbacks = callbacks_of(module, trainer)       # Lightning's own and the user's, in Lightning's order
    served = Served(callbacks)                      # of those the user's, which hooks call
    served.call("on_train_start", trainer, module)

Lightning's own callbacks become settings (`hooks.settings_of`), but for `LambdaCallback`.
"""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, final

from lockstep.adapters.lightning.package import PACKAGES, is_user_defined, kind_of, own_methods
from lockstep.adapters.lightning.refusals import CALLBACK_HOOKS
from lockstep.adapters.lightning.state import pack, unpack
from lockstep.errors import ConfigError

__all__ = [
    "Served",
    "callbacks_of",
    "is_builtin",
    "is_served",
]


def is_builtin(callback: Any) -> bool:
    """Whether the package wrote the callback's class."""
    return f"{type(callback).__module__}.".startswith(PACKAGES)


def is_served(callback: Any) -> bool:
    """Whether the callback's hooks are called."""
    return not is_builtin(callback) or type(callback).__name__ == "LambdaCallback"


def callbacks_of(module: Any, trainer: Any) -> list[Any]:
    """Return the callbacks of the Trainer and of `configure_callbacks`, as Lightning merges them.

    Raises:
        ConfigError: one of the user's overrides a hook that is not served, or derives from one of Lightning's.
    """
    callbacks = list(trainer.callbacks) if trainer is not None else []
    if is_user_defined(module, "configure_callbacks"):
        more = module.configure_callbacks() or []
        more = list(more) if isinstance(more, list | tuple) else [more]
        # A callback of `configure_callbacks` replaces the Trainer's of its class, or of a base class.
        replaced = tuple({type(callback) for callback in callbacks if type(callback).__name__ != "Callback"})
        replaced = tuple(
            callback_class
            for callback_class in replaced
            if any(issubclass(type(callback), callback_class) for callback in more)
        )
        callbacks = [callback for callback in callbacks if type(callback) not in replaced] + more
    checks = trainer is None or bool(trainer.num_sanity_val_steps)
    for callback in filter(is_served, callbacks):
        _check(callback, sanity_checks=checks)
    return callbacks


def _check(callback: Any, *, sanity_checks: bool) -> None:
    name = type(callback).__name__
    if kind_of(callback, "Callback") is None:
        raise ConfigError(f"from_lightning: the callback {name} is no lightning Callback: derive it from Callback")
    base = next(ancestor for ancestor in type(callback).__mro__ if f"{ancestor.__module__}.".startswith(PACKAGES))
    if base.__name__ not in ("Callback", "LambdaCallback"):
        raise ConfigError(
            f"from_lightning: the callback {name} derives from {base.__name__}, whose work the run does itself: derive "
            "it from Callback, or give the Trainer Lightning's own"
        )
    for hook, out in CALLBACK_HOOKS.items() if sanity_checks else ():
        if is_user_defined(callback, hook):
            raise ConfigError(f"from_lightning: the callback {name} overrides `{hook}`, which is not supported: {out}")


@final
class Served:
    """The user's callbacks, in order.

    Args:
        callbacks: of the Trainer; those that become settings are left out.
        stoppers: Lightning's EarlyStoppings that monitor the training; `Life` calls them, and their state is kept too.
    """

    def __init__(self, callbacks: list[Any], stoppers: Sequence[Any] = ()) -> None:
        self.stoppers = stoppers
        self._callbacks = [callback for callback in callbacks if is_served(callback)]
        self._by_hook: dict[str, list[Any]] = {}
        for callback in self._callbacks:
            for name in own_methods(callback):
                self._by_hook.setdefault(name, []).append(callback)
        for name in ("state_dict", "load_state_dict") if stoppers else ():
            self._by_hook.setdefault(name, []).extend(stoppers)
        self._first: list[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __contains__(self, hook: object) -> bool:
        return hook in self._by_hook

    def attach(self, module: Any) -> None:
        """Give the callbacks `log` and `log_dict` of the module, as Lightning does."""
        for callback in self._callbacks:
            callback.log = module.log
            callback.log_dict = module.log_dict

    def call(self, hook: str, trainer: Any, module: Any, *args: Any, **named: Any) -> None:
        """Call a hook of all callbacks that have it, as Lightning does."""
        callbacks = self._by_hook.get(hook)
        if not callbacks:
            return
        # Private in Lightning: `log` reads from it which hook is running.
        before = module._current_fx_name
        module._current_fx_name = hook
        try:
            for callback in callbacks:
                getattr(callback, hook)(trainer, module, *args, **named)
        finally:
            module._current_fx_name = before

    def state(self) -> dict[str, Any]:
        """Return the `state_dict` of each that has one, by its `state_key`."""
        states = {}
        for callback in self._by_hook.get("state_dict", ()):
            states[callback.state_key] = callback.state_dict()
        non_empty = {}
        for key, state in states.items():
            if state:
                non_empty[key] = state
        return non_empty

    def load(self, content: list[Any] | None) -> None:
        """Load the states of a checkpoint; None: the states at the run's start.

        None is passed at the start, and when a run is rolled back to it.
        """
        if content is None:
            if self._first is None:
                # A state that cannot be packed is reported when a save is tried.
                with contextlib.suppress(ConfigError):
                    self._first = pack(self.state(), "a callback's state_dict")
                return
            content = self._first
        states = unpack(content)
        for callback in self._by_hook.get("load_state_dict", ()):
            if callback.state_key in states:
                callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
