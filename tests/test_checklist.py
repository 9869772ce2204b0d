"""docs/checklist.md names files and tests: they exist."""

import re
from pathlib import Path

import lockstep

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "checklist.md").read_text(encoding="utf-8")
ROOT = Path(lockstep.__file__).parent


def rows():
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "| point":
            yield cells


def test_every_point_has_an_answer():
    assert len(list(rows())) > 40
    assert all(point.strip("| ") and answer for point, answer, _, _ in rows())


def test_the_places_exist():
    for point, _, where, _ in rows():
        names = re.findall(r"`([^`]+)`", where)
        text = ""
        for name in names:
            if name.endswith((".py", "/")):
                path = ROOT / name
                assert path.exists(), f"{point}: {name}"
                text = path.read_text(encoding="utf-8") if path.is_file() else ""
            else:
                assert f" {name.split('.')[-1]}(" in text or f"class {name}" in text, f"{point}: {name}"


def test_the_tests_exist():
    for point, _, _, tests in rows():
        file = ""
        for name in re.findall(r"`([^`]+)`", tests):
            path, _, test = name.partition("::")
            file = path or file
            assert (TESTS / file).is_file(), f"{point}: {file}"
            assert not test or f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{point}: {name}"
