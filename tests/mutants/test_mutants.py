"""The runner of `make mutants`, on a toy: it draws alike, finds what a test sees, and shows what none does."""

import ast
import textwrap
from pathlib import Path

import pytest
from mutants import run as runner
from mutants.kinds import mutants

CORE = """
    LEAST = 3

    def clipped(value, most=10):
        if value < LEAST or value > most:
            return 0
        return value - LEAST
"""
TABLE = [("core", "core.py", "test_*.py")]


def tree(folder, test, core=CORE):
    """A package and its tests."""
    (folder / "src" / "toy").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src" / "toy" / "core.py").write_text(textwrap.dedent(core))
    (folder / "tests" / "test_core.py").write_text(textwrap.dedent(test))
    return folder


def changed(source):
    """kind -> the lines that mistakes of this kind make of a source of one line."""
    found = {}
    for mutant in mutants(source):
        found.setdefault(mutant.kind, []).append(mutant.put_into(source))
    return found


@pytest.mark.parametrize(
    ("source", "kind", "wanted"),
    [
        ("x = a < b", "comparison", ["x = (a <= b)"]),
        ("x = a < b", "inverted condition", ["x = (a >= b)"]),
        ("x = a - b", "sign", ["x = (a + b)"]),
        ("x = a - b", "swapped pair", ["x = (b - a)"]),
        ("x = a * b * c", "missing factor", ["x = a * c", "x = (a * b)", "x = b * c", "x = c"]),
        ("x = a and b", "and for or", ["x = (a or b)"]),
        ("x = a and b", "missing condition", ["x = a", "x = b"]),
        ("x = 2", "off by one", ["x = 1", "x = 3"]),
        ("def f(x=True): return g(x)", "wrong default", ["def f(x=False): return g(x)"]),
        ("os.fsync(file)", "dropped call", ["pass"]),
        ("x = loss.detach()", "dropped call", ["x = loss"]),
        ("def f(self): self.count = 0", "forgotten reset", ["def f(self): pass"]),
        ("total += loss", "forgotten sum", ["total = loss"]),
        ("key = derive(seed, 'order', rank)", "missing rank term", ["key = derive(seed, 'order')"]),
        ("x = a if b else c", "inverted condition", ["x = a if (not b) else c"]),
        ("x = sorted(a)", "other function", ["x = list(a)"]),
        ("dist.all_reduce(x, group=control)", "missing argument", ["dist.all_reduce(x)"]),
        ("é = 'ü'; x = a <= b", "comparison", ["é = 'ü'; x = (a < b)"]),
    ],
)
def test_each_kind_of_mistake(source, kind, wanted):
    assert sorted(changed(source)[kind]) == sorted(wanted)


@pytest.mark.parametrize(
    "source",
    [
        '"""A text of 3 lines."""',
        "__all__ = ['a']",
        "raise ValueError(f'{a + b} is more than {2 * c}')",
        "_LOG.warning('%d steps', a + b)",
        "assert a < b",
        "from a import b",
        "os.kill(pid, 9)",
        "shutil.rmtree(folder / name)",
        "x: list[int]",
        "names = ', '.join(sorted({name for name in found if name > 1}))",
        "def described(a) -> str: return f'{a}' + str(3 * a)",
    ],
)
def test_what_cannot_matter_or_could_do_harm_is_left_alone(source):
    assert mutants(source) == []


def test_every_mistake_in_the_core_is_a_program():
    core = Path(runner.ROOT) / "src" / "lockstep"
    for name in ("exchange.py", "spike.py"):
        source = next(core.rglob(name)).read_text(encoding="utf-8")
        for mutant in mutants(source)[::2]:
            ast.parse(mutant.put_into(source))


def test_every_area_has_modules_and_tests():
    """A pattern that finds nothing names a file that was moved."""
    for _, modules, tests in runner.TABLE:
        assert [each for each in modules.split() if not any((runner.ROOT / "src").rglob(each))] == []
        assert [each for each in tests.split() if not any((runner.ROOT / "tests").rglob(each))] == []


def test_equal_mutants_are_named_by_mistake_line_or_module():
    name = "x = 1 -> x = 2"
    for known in ({name}, {"x = 1"}, {"b.py"}):
        assert runner.is_known(name, "b.py", known)
    assert not runner.is_known(name, "b.py", {"x = 1 -> x = 0", "x = 2", "a.py"})


def test_each_line_of_equal_txt_is_in_the_sources():
    """A line that was changed has lost its reason; where it stands is no matter."""
    sources = list((Path(runner.ROOT) / "src").rglob("*.py"))
    rows = {row.strip() for path in sources for row in path.read_text(encoding="utf-8").splitlines()}
    names = {name.partition(" -> ")[0] for name in runner.equal(Path(runner.__file__).with_name("equal.txt"))}
    assert names - rows - {path.name for path in sources} == set()


def test_a_seed_draws_alike_and_another_differs():
    found = runner.sites(runner.ROOT, [row for row in runner.TABLE if row[0] in ("loop", "batchnorm")])

    def first(seed, count):
        return [site for site, _ in zip(runner.drawn(found, seed), range(count), strict=False)]

    assert first(1, 8) == first(1, 12)[:8]  # a larger count only adds
    assert first(1, 8) != first(2, 8)
    assert [site.area for site in first(1, 4)] == ["loop", "batchnorm"] * 2


SHARP = """
    from toy.core import clipped

    def test_at_the_edges():
        assert [clipped(value) for value in (2, 3, 4, 9, 10, 11)] == [0, 0, 1, 6, 7, 0]
"""
BLUNT = """
    from toy.core import clipped

    def test_it_runs():
        clipped(5)
"""


@pytest.mark.slow  # of the tool alone: it runs pytest on a tree of its own
def test_a_sharp_test_finds_and_a_blunt_one_is_told(tmp_path, capsys):
    sharp = tree(tmp_path / "sharp", SHARP)
    before = (sharp / "src" / "toy" / "core.py").read_text()
    assert runner.main(["--count", "2", "--seed", "5"], sharp, TABLE) == 0
    said = capsys.readouterr().out
    assert "seed 5, " in said
    assert "found     src/toy/core.py:" in said
    assert "tests/test_core.py::test_at_the_edges" in said
    assert said.rpartition("all")[2].split()[:3] == ["2", "2", "100%"]
    assert (sharp / "src" / "toy" / "core.py").read_text() == before
    assert runner.main(["--count", "1", "--seed", "5"], tree(tmp_path / "blunt", BLUNT), TABLE) == 1
    said = capsys.readouterr().out
    assert "survived  src/toy/core.py:" in said
    assert "    -" in said
    assert "    +" in said
    assert said.rpartition("all")[2].split()[:3] == ["1", "0", "0%"]


HANGING = """
    def counted(n):
        while n > 0:
            n -= 1
        return n
"""
COUNTS = """
    from toy.core import counted

    def test_it_ends():
        assert counted(5) == 0
"""


@pytest.mark.slow  # of the tool alone: it runs pytest on a tree of its own
def test_what_hangs_is_found_and_what_fails_anyway_tells_nothing(tmp_path):
    hangs = tree(tmp_path / "hangs", COUNTS, HANGING)
    found = runner.sites(hangs, TABLE)["core"]
    endless = next(site for site in found if site.mutant.kind == "forgotten update")
    copy = runner.Copy(hangs, tmp_path / "copy", hang=2.0)
    assert copy.tried(endless) == ("found", "tests/test_core.py::test_it_ends")
    assert runner.Copy(hangs, tmp_path / "late", limit=-1.0).tried(endless) == (
        "survived",
        "its time was up before every test had run",
    )  # nothing began in time
    (hangs / "tests" / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    broken = runner.Copy(hangs, tmp_path / "other", hang=2.0)
    found = runner.sites(broken.root, TABLE)["core"]
    endless = next(site for site in found if site.mutant.kind == "forgotten update")
    assert broken.tried(endless) == ("found", "tests/test_core.py::test_it_ends")


def test_what_does_not_import_is_not_counted(tmp_path):
    core = "SIZES = (1, 2)\nassert len(SIZES) == 2\nCOUNT = SIZES[1]\n"
    made = tree(tmp_path / "toy", "def test_nothing(): pass\n", core)
    found = runner.sites(made, TABLE)["core"]
    beyond = next(site for site in found if site.mutant.line == 3 and site.mutant.text == "2")
    assert runner.Copy(made, tmp_path / "copy").tried(beyond).verdict == "uncounted"


@pytest.mark.slow  # of the tool alone: it runs pytest on a tree of its own
def test_what_names_the_module_and_what_is_quick_comes_first(tmp_path):
    """The three of them find each mistake; the order is that of the time they take, not of their names."""
    bodies = dict.fromkeys(("test_b", "test_c"), "from toy import core as other\n")
    bodies["test_a"] = "from toy import other\n"
    made = tree(tmp_path / "toy", "", "COUNT = 2\n")
    (made / "src" / "toy" / "other.py").write_text("from toy.core import COUNT\n")
    for name, head in bodies.items():
        (made / "tests" / f"{name}.py").write_text(head + "def test_it():\n    assert other.COUNT == 2\n")
    site = runner.sites(made, TABLE)["core"][0]
    assert runner.Copy(made, tmp_path / "1").tried(site) == ("found", "tests/test_b.py::test_it")  # it names the module
    memory = runner.Memory(made)
    memory.keep({"tests/test_c.py::test_it": 0.0})
    memory.known["seconds"]["tests/test_b.py::test_it"] = 30.0
    memory.keep({})
    assert runner.Copy(made, tmp_path / "2").tried(site) == ("found", "tests/test_c.py::test_it")  # it is quick
    for name in ("test_b", "test_c"):
        (made / "tests" / f"{name}.py").write_text("def test_it():\n    pass\n")
    assert runner.Copy(made, tmp_path / "3").tried(site) == (
        "found",
        "tests/test_a.py::test_it",
    )  # the others come then
