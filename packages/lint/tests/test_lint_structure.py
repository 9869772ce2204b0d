"""The linter imports only Python's modules and its own; no file is too long."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import lockstep_lint

ROOT = Path(lockstep_lint.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NEEDED_TO_FIX = {"libcst", "libcst.metadata"}


def imported(path):
    """Return the modules that a file imports, by statement or by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (word.value for word in node.args if isinstance(word, ast.Constant))


def test_nothing_else_is_imported():
    for path in FILES:
        allowed = NEEDED_TO_FIX if path.name == "fixes.py" else set()
        others = {name for name in imported(path) if name.partition(".")[0] != "lockstep_lint"} - allowed
        assert {name.partition(".")[0] for name in others} <= sys.stdlib_module_names, path


def test_no_file_is_too_long_to_read():
    assert {path.name for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > 900} == set()


def test_public_names_exist():
    for info in pkgutil.walk_packages([str(ROOT)], "lockstep_lint."):
        module = importlib.import_module(info.name)
        assert all(hasattr(module, name) for name in getattr(module, "__all__", [])), info.name
