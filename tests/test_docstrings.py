"""The calls that docstrings show fit the functions that they call."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Self

import lockstep

ROOT = Path(lockstep.__file__).parent


def modules():
    for info in pkgutil.walk_packages([str(ROOT)], "lockstep."):
        if info.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] != "lockstep", error  # an extra that is not installed


def documented(module):
    """(where, docstring) of the module, and of its own functions, classes and methods."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module.__name__}: {getattr(node, 'name', 'the module')}", text


def code(text):
    """The statements that a docstring shows, paragraph by paragraph; what stands behind a wide gap is prose."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [re.split(r"(?<=\S) {3,}(?=[^\s#])", line, maxsplit=1)[0] for line in paragraph.splitlines()]
        whole = textwrap.dedent("\n".join(lines))
        try:
            yield ast.parse(whole).body
            continue
        except SyntaxError:
            pass
        found = []
        for line in lines:
            for tried in (line.strip(), f"{line.strip()}\n    pass"):
                try:
                    found += ast.parse(tried).body
                    break
                except SyntaxError:
                    pass
        yield found


class Reader:
    """What the names in a docstring stand for, as far as its own lines say."""

    def __init__(self, module):
        self.module, self.kinds = module, {}

    def resolved(self, node):
        """(the function or class that an expression names, whether it is a method of an object); None: not known."""
        if isinstance(node, ast.Name):
            if node.id == "lockstep":
                return lockstep, False
            found = vars(self.module).get(node.id)
            return (found, False) if getattr(found, "__module__", "").startswith("lockstep") else None
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self.kinds:
                found = getattr(self.kinds[node.value.id], node.attr, None)
                return (found, not isinstance(found, type)) if callable(found) else None
            owner = self.resolved(node.value)
            if owner is not None and (inspect.ismodule(owner[0]) or inspect.isclass(owner[0])):
                found = getattr(owner[0], node.attr, None)
                return (found, False) if callable(found) or inspect.ismodule(found) else None
        return None

    def kind(self, node):
        """The class of an expression's value, where a call in it tells."""
        if isinstance(node, ast.Call) and (found := self.resolved(node.func)):
            if inspect.isclass(found[0]):
                return found[0]
            made = inspect.signature(found[0]).return_annotation if callable(found[0]) else None
            if made is Self and inspect.isclass(getattr(found[0], "__self__", None)):
                return found[0].__self__
            return made if inspect.isclass(made) and made.__module__.startswith("lockstep") else None
        return None

    def read(self, statements):
        """(call, why it does not fit or None) of each call to something of lockstep's."""
        for node in [node for statement in statements for node in ast.walk(statement)]:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._learn(node.targets[0], node.value)
            if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                self._learn(node.optional_vars, node.context_expr)
            if isinstance(node, ast.Call) and (found := self.resolved(node.func)):
                yield ast.unparse(node), misfit(node, *found)

    def _learn(self, name, value):
        kind = self.kind(value)
        if kind is not None:
            self.kinds[name.id] = kind


def misfit(call, function, of_an_object):
    if not callable(function):
        return "is not callable"
    try:
        signature = inspect.signature(function)
    except ValueError:  # built in
        return None
    given = [argument for argument in call.args if not is_open(argument)]
    named = {word.arg: word.value for word in call.keywords if word.arg}
    is_part = len(given) < len(call.args) or len(named) < len(call.keywords)
    bind = signature.bind_partial if is_part else signature.bind
    bound_already = [None] if of_an_object and takes_self(function) else []
    try:
        bind(*bound_already, *given, **named)
    except TypeError as error:
        return str(error)
    return None


def is_open(argument):
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and argument.value is ...)


def takes_self(function):
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self"


def test_the_calls_in_docstrings_fit():
    wrong, count = [], 0
    for module in modules():
        for where, text in documented(module):
            reader = Reader(module)
            for statements in code(text):
                for call, why in reader.read(statements):
                    count += 1
                    wrong += [f"{where}: {call}: {why}"] * (why is not None)
    assert not wrong, "\n".join(wrong)
    assert count > 80  # else the reading has gone blind


def test_a_call_that_does_not_fit_is_found():
    module = importlib.import_module("lockstep.distributed.world")
    text = "A thing.\n\n    world = World.join(wait=3)      or so\n    world.gather()\n    meeting_store(0)\n"
    text += "    two words"
    reader = Reader(module)
    found = [each for statements in code(text) for each in reader.read(statements)]
    assert [(call.partition("(")[0], why is not None) for call, why in found] == [
        ("World.join", True),
        ("world.gather", True),
        ("meeting_store", True),
    ]
