"""The rules, one a file; `LS0NN` is pitfall NN of the project's list."""

import importlib
import pkgutil

from lockstep_lint.rules.base import Rule

__all__ = ["MERGED", "RULES"]

# Rules that are part of another one by now; their codes stand for it.
MERGED = {"LS039": "LS029"}


def _collect() -> dict[str, Rule]:
    """Return every `RULE` of this package's modules, by code."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name.startswith("ls"))
    rules: list[Rule] = [importlib.import_module(f"{__name__}.{name}").RULE for name in names]
    return {rule.code: rule for rule in rules}


RULES: dict[str, Rule] = _collect()
