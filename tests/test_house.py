"""The house: imports go down the floors, public names are sorted and exist, the command starts without torch."""

import ast
import collections
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep
from lockstep import cli
from lockstep.config.engine_options import ENGINES
from lockstep.distributed.failures import note_interrupt
from lockstep.errors import LockstepError, UsageError

ROOT = Path(lockstep.__file__).parent

TABLE = ROOT.parents[1] / "docs" / "architecture.md"


def floors():
    """The table of docs/architecture.md: each top-level module or package -> (floor, place on it from the left).

    What stands apart has the floor -1. A module in a package that has a place of its own is "package/module".
    """
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (?:F(\d)|apart) \| ([^|]+) \|", line)
        if row:
            names = re.findall(r"`([a-z_/]+?)/?`", row[2])
            assert not found.keys() & names, line
            found |= {name: (int(row[1] or -1), place) for place, name in enumerate(names)}
    return found


FLOORS = floors()


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def home(parts):
    """What the floors call the module of these parts of a path or a dotted name."""
    within = "/".join(parts[:2])
    return within if within in FLOORS else parts[0]


NAMES = {
    ".".join(("lockstep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in modules()
}


def imported(path):
    """(line, its name on the floors, deferred?) of each import of the package's own modules, those by a string too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    top = {*tree.body, *(node for body in for_types for node in body)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            own = node.module == "lockstep"
            names = [f"lockstep.{alias.name}" for alias in node.names] if own else [node.module]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            yield node.lineno, home(node.value.split(".")[1:]), False
        for name in names:
            if name.split(".")[0] == "lockstep" and "." in name:
                yield node.lineno, home(name.split(".")[1:]), node not in top


def _defaults(method):
    """What a method's arguments are where they are left out."""
    given = method.args.args[-len(method.args.defaults) :] if method.args.defaults else []
    return {each.arg: ast.unparse(value) for each, value in zip(given, method.args.defaults, strict=True)}


def test_engines_and_wrappers_share_their_default_arguments():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
            for name in ("backward", "step"):
                if name in methods and len(methods[name].args.args) == (3 if name == "backward" else 5):
                    found[path.name, kind.name, name] = _defaults(methods[name])
    wanted = {name: found["base.py", "Engine", name] for name in ("backward", "step")}
    assert wanted["backward"] == {"weight": "1.0"}
    differing = {place: each for place, each in found.items() if each != wanted[place[2]]}
    assert not {place for place in differing if place[1] != "ReplicatedEngine"}  # whose callers name each argument
    assert len(found) > 20


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = home(path.relative_to(ROOT).with_suffix("").parts)
    for line, name, deferred in imported(path):
        assert not deferred, f"{path}:{line}: an import inside a function hides where it leads"
        if -1 in (FLOORS[own][0], FLOORS[name][0]):
            within = own.split("/")[0] == name.split("/")[0]  # what stands apart may use a room of its own
            assert within, f"{path}:{line}: one of {own} and {name} stands apart"
        else:
            assert FLOORS[name] <= FLOORS[own], f"{path}:{line}: {name} is not below {own}, nor left of it"


def test_every_module_has_its_floor():
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in modules()]
    found = {parts[0] for parts in paths} | {home(parts) for parts in paths}
    assert found == FLOORS.keys()


def test_engines_are_named_in_their_own_room_alone():
    """But for an export's formats, hints of an engine's name, a user's files, and the packages of traced scripts."""
    elsewhere = (
        *(
            "trace/",
            "checkpoint/export.py",
            "commands/use.py",
            "config/hints.py",
            "config/engine_options.py",
        ),
        "templates/",
    )
    for path in modules():
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith(("engines/", *elsewhere)):
            words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not words & ENGINES.keys(), where


def test_a_collective_is_issued_where_its_failure_is_translated():
    """But for the hook that DDP's backward calls, for own measurements, and for traced and compared programs."""
    single = r"i?send\w*|i?recv\w*|batch_\w+|P2POp"
    issued = re.compile(
        rf"(?<![\w.])dist\.(all_\w+|broadcast|barrier|reduce\w*|new_group|{single})\(|\.full_tensor\(\)"
    )
    own = {f"distributed/{name}.py" for name in ("collectives", "world", "exchange")} | {"engines/ddp.py"}
    for path in modules():
        where = path.relative_to(ROOT).as_posix()
        if where not in own and not where.startswith(("trace/", "verify/", "diagnose/")):
            assert not issued.search(path.read_text(encoding="utf-8")), where


def test_a_collective_names_its_group():
    """Of an engine: its world's; with replicas of several ranks the default group has too many ranks."""
    collective = re.compile(r"all_\w+|broadcast|barrier|reduce\w*|gather\w*|scatter\w*|i?send|i?recv|exchange|P2POp")
    for path in modules():
        if path.relative_to(ROOT).parts[0] in ("trace", "diagnose"):
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            owner = ast.unparse(call.func).rpartition(".")
            if owner[0] in ("dist", "collectives") and collective.fullmatch(owner[2]):
                assert "group" in {each.arg for each in call.keywords}, f"{path}:{call.lineno}"


ENTRIES = {"__main__", "trace/attach/sitecustomize"}  # that Python starts, and nothing imports


def test_no_file_is_a_crumb_or_too_long_to_read():
    """None has more than 900 lines; none with fewer than 60 is imported by one file alone, which could have it."""
    importers = collections.Counter()
    for path in modules():
        tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        importers.update(found & NAMES)
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {path.name: count for path, count in lines.items() if count > 900} == {}
    crumbs = [
        where
        for path, count in lines.items()
        if (where := path.relative_to(ROOT).with_suffix("").as_posix()) not in ENTRIES
        and count < 60
        and path.name != "__init__.py"
        and not where.startswith("templates/")
        and importers["lockstep." + where.replace("/", ".")] <= 1
    ]
    assert crumbs == []


def test_the_source_stays_as_airy_as_it_is():
    """Rates of pyproject.toml, which only get better: a line does one thing, and comments say why."""
    counts = collections.Counter()
    for path in sorted(ROOT.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        counts["lines"] += len(lines)
        counts["comment_lines"] += sum(line.lstrip().startswith("#") for line in lines)
        for node in ast.walk(ast.parse("\n".join(lines))):
            counts["statements"] += isinstance(node, ast.stmt)
            counts["conditional_expressions"] += isinstance(node, ast.IfExp)
            counts["comprehensions"] += isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
            is_pair = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            counts["tuple_assignments"] += is_pair and len(node.value.elts) > 1
    limits = tomllib.loads(TABLE.parents[1].joinpath("pyproject.toml").read_text())["tool"]["lockstep"]["density"]
    least = limits.pop("comment_lines")
    assert round(100 * counts["comment_lines"] / counts["lines"], 1) >= least
    rates = {name: round(100 * counts[name] / counts["statements"], 1) for name in limits}
    assert all(rates[name] <= limit for name, limit in limits.items()), rates


def test_names_of_tests_are_short():
    """At most 60 characters: a name says what is checked, the docstring and the assertions the rest."""
    tests = ROOT.parents[1] / "tests"
    for path in [*tests.rglob("test_*.py"), *(tests.parent / "packages" / "lint" / "tests").rglob("test_*.py")]:
        names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not [name for name in names if len(name) > 60], path


def test_public_names_are_sorted_and_exist():
    for info in pkgutil.walk_packages([str(ROOT)], "lockstep."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] != "lockstep", error  # an extra that is not installed
            continue
        names = getattr(module, "__all__", [])
        assert list(names) == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)) or list(
            names
        ) == sorted(names), info.name
        assert all(hasattr(module, name) for name in names), info.name


def test_the_packages_own_names():
    assert lockstep.__all__ == sorted(lockstep.__all__)
    assert all(getattr(lockstep, name) for name in lockstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing


USERS_FILE = """import torch
from torch import Tensor, nn

import lockstep


class Mine(lockstep.Task):
    items_per_sample = 1

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> torch.utils.data.TensorDataset | None:
        return torch.utils.data.TensorDataset(torch.ones(8, 2)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        out: Tensor = model(batch[0])
        return out.sum()

    def optimizer(self, model: nn.Module, config: lockstep.Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config.optim.eps)

    def schedule(self, step: int, steps: int) -> float:
        return 1 - step / steps


config = lockstep.Config.from_args([], max_steps=3, optim=lockstep.Optim(clip=0.5))
with lockstep.Run(config, Mine()) as run:
    for step in run:
        reveal_type(step.global_step)
        reveal_type(step.loss)
        run.log({"half": step.loss / 2})
        if step.evaluation and step.evaluation.loss < 1:
            run.stop()
reveal_type(run.result.status)
reveal_type(lockstep.train(config, Mine()))
reveal_type(lockstep.load("outputs/default", Mine()))
reveal_type(lockstep.World.join().rank)
reveal_type(lockstep.engine)
lockstep.Config(max_steps="3")
"""


def test_a_type_checker_sees_the_real_types(tmp_path):
    """Each public name is what it is at run time, in a user's file that passes a strict check but for its last line."""
    (tmp_path / "mine.py").write_text(USERS_FILE)
    # The cache of `make check`, and its settings, which are strict: with others all of torch is read again.
    settings, cache = ROOT.parents[1] / "pyproject.toml", ROOT.parents[1] / ".mypy_cache"
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(cache), "mine.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    for revealed, line in (
        ('"int"', "step.global_step"),
        ('"float"', "step.loss"),
        ('"str"', "run.result.status"),
        ('"lockstep.training.run.Result"', "lockstep.train(config, Mine())"),
        ('"torch.nn.modules.module.Module"', 'lockstep.load("outputs/default", Mine())'),
        ('"int"', "lockstep.World.join().rank"),
    ):
        number = next(n for n, text in enumerate(USERS_FILE.splitlines(), 1) if f"reveal_type({line})" in text)
        assert f"mine.py:{number}: note: Revealed type is {revealed}" in done.stdout, done.stdout + done.stderr
    assert '-> lockstep.engines.base.Engine"' in done.stdout
    assert '"max_steps" to "Config"' in done.stdout
    assert done.stdout.count("error:") == 1, done.stdout
    for home, names in lockstep._MODULES.items():
        assert f"    from {home} import {', '.join(names)}\n" in Path(lockstep.__file__).read_text()


def loads_nothing_big(code, *more):
    check = f"{code}\nimport sys; sys.exit(bool({ {'torch', 'numpy', *more} } & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import lockstep",
        "import lockstep.cli as c; c.dispatch(['--help'])",
        "import lockstep.cli as c; c.dispatch(['lint', '--help'])",
    ],
)
def test_nothing_but_training_loads_torch(code):
    # The records of installed packages, which the linter is found by, take a third of the time of `lockstep --help`.
    loads_nothing_big(code, *(["importlib.metadata"] if "lint" not in code else []))


ANSWERED_WITHOUT_TORCH = [
    ["train", "--tipo"],
    ["launch", "--tipo", "--", "train"],
    ["launch", "--", "train", "--tipo"],
    ["launch", "--nproc-per-node", "2", "--dry-run", "--", "train"],
    ["checkpoint", "list", "run", "--tipo"],
    ["checkpoint", "prune", "run", "--keep", "0"],
    ["export", "run", "out", "--tipo"],
    ["runs", "--tipo"],
    ["runs", "nowhere"],
    ["goodput", "--tipo"],
    ["report", "--tipo"],
    ["report", "nowhere"],
    ["report", "a", "b"],
    ["goodput", "nowhere"],
    ["evaluate", "run", "--tipo"],
    ["generate", "run", "--tipo"],
    ["generate", "run", "--temperature", "-1"],
    ["launch", "--nproc-per-node", "2", "--dry-run", "--", "evaluate", "run"],
    ["init", "--tipo"],
    ["completion", "--tipo"],
    ["verify", "--tipo"],
    ["trace", "--tipo"],
    ["compare", "nowhere", "nowhere"],
    ["verify", "--world-sizes", "one"],
    *([name, "--help"] for name in cli.COMMANDS if name != "lint"),
]


def test_a_wrong_flag_is_answered_before_torch_is_loaded():
    loads_nothing_big(
        "import sys\n"
        "from lockstep import cli, errors\n"
        f"for argv in {ANSWERED_WITHOUT_TORCH}:\n"
        "    try: cli.dispatch(argv)\n"
        "    except (errors.ConfigError, SystemExit) as error: print(error)\n"
        "    assert not {'torch', 'numpy'} & set(sys.modules), argv"
    )


def test_the_command_knows_its_commands(capsys):
    assert cli.dispatch(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, function, _) in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert callable(getattr(importlib.import_module(module), function))
    assert cli.dispatch(["--version"]) == 0
    assert cli.dispatch([]) == 2
    with pytest.raises(UsageError, match="unknown command 'trian': did you mean 'train'"):
        cli.dispatch(["trian"])


def test_the_linter_is_found_by_its_entry_point(monkeypatch, capsys):
    assert cli.dispatch(["lint", "--explain", "LS018"]) == 0
    assert capsys.readouterr().out.startswith("# LS018 ")
    monkeypatch.setattr("lockstep.commands.setup.entry_points", lambda **wanted: ())
    with pytest.raises(UsageError, match="lockstep-lint: install packages/lint"):
        cli.dispatch(["lint", "train.py"])


def test_nothing_loads_the_linter():
    code = "import lockstep.cli as c, sys; c.dispatch(['--help']); sys.exit('lockstep_lint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    loading = [path for path in modules() if "lockstep_lint." in path.read_text(encoding="utf-8")]
    assert not loading


def test_errors_become_one_line_and_a_code(capsys, monkeypatch):
    class Odd(LockstepError):
        exit_code = 3

    def fail(argv):
        raise {"odd": Odd("one line"), "ctrl-c": KeyboardInterrupt(), "exit": SystemExit(75)}[argv[0]]

    # A command of an earlier test may have said what it saved.
    note_interrupt(None)
    monkeypatch.setitem(cli.COMMANDS, "fail", (__name__, "fail", ""))
    monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
    for how, code, line in (("odd", 3, "lockstep: error: one line\n"), ("ctrl-c", 130, "lockstep: interrupted\n")):
        with pytest.raises(SystemExit) as caught:
            cli.main(["fail", how])
        assert (caught.value.code, capsys.readouterr().err) == (code, line)
    with pytest.raises(SystemExit) as caught:
        cli.main(["fail", "exit"])
    assert caught.value.code == 1  # 75 is lockstep's alone
    assert "sys.exit(75)" in capsys.readouterr().err


def test_the_command_line_as_a_person_types_it():
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", "--lrr", "1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "lockstep: error: unknown flag --lrr: did you mean --lr?\n")


def test_a_closed_pipe_is_no_traceback():
    code = "import sys; from lockstep import cli; sys.stdout.close = lambda: None; cli.main(['--help'])"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert b"Traceback" not in done.communicate()[1]


def test_no_path_of_a_machine_is_in_the_source():
    home = os.path.expanduser("~")
    for path in modules():
        text = path.read_text(encoding="utf-8")
        assert home == "/" or home not in text, path
