"""A plugin of pytest for the runs of `make mutants`: what tells most in the least time comes first; time has an end.

A run is asked for by the JSON file $MUTANTS_ASKED: the `module` that holds a mistake, `near`, those that import it,
`limit`, the seconds after which no test begins any more, `memory`, what earlier runs took and found, and `answer`, the
file for what this one saw: {"imports": bool, "failed": test or None, "seconds": {test: seconds}, "in_time": bool}.
"""

import importlib
import json
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

UNKNOWN = 2.0  # seconds that a test is taken to last until it has run once
LEAST = 0.05

_asked: dict[str, Any] = {}
_seen: dict[str, Any] = {"imports": True, "failed": None, "seconds": defaultdict(float), "in_time": True}
_began = time.monotonic()


def names(path: Path, module: str) -> bool:
    """Whether a file of tests imports a module by its name."""
    package, _, name = module.rpartition(".")
    return bool(re.search(rf"{re.escape(package)}(\.| import .*\b){name}\b", path.read_text(encoding="utf-8")))


def pytest_sessionstart() -> None:
    """A module that does not import is seen before any test."""
    _asked.update(json.loads(Path(os.environ["MUTANTS_ASKED"]).read_text(encoding="utf-8")))
    try:
        importlib.import_module(_asked["module"])
    except Exception:
        _seen["imports"] = False
        pytest_sessionfinish()  # which pytest leaves out here
        pytest.exit("does not import", returncode=1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By seconds, divided by what speaks for a test: it names the module, or one that imports it; it found mistakes in
    it before."""
    seconds, found = _asked["memory"]["seconds"], _asked["memory"]["found"].get(_asked["module"], {})
    paths = {item.path for item in items}
    files = {
        path: 4 * names(path, _asked["module"]) or 2 * any(names(path, m) for m in _asked["near"]) for path in paths
    }

    def cost(item: pytest.Item) -> float:
        telling = 1 + files[item.path] + 4 * found.get(item.nodeid, 0)
        return float(max(seconds.get(item.nodeid, UNKNOWN), LEAST) / telling)

    items.sort(key=cost)


def pytest_runtest_logstart() -> None:
    if time.monotonic() - _began > _asked["limit"]:
        _seen["in_time"] = False
        pytest.exit("out of time", returncode=0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seen["seconds"][report.nodeid] += report.duration
    _failure(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _failure(report)


def _failure(report: Any) -> None:
    if report.failed and not _seen["failed"]:
        _seen["failed"] = report.nodeid


def pytest_sessionfinish() -> None:
    Path(_asked["answer"]).write_text(json.dumps(_seen), encoding="utf-8")
