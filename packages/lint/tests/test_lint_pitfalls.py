"""Every pitfall that a script can show is reported, and its correction is silent."""

import pytest
from pitfall_cases import SCRIPTS, cases, script

from lockstep_lint.config import configure
from lockstep_lint.finding import Severity
from lockstep_lint.runner import check_paths

ALL = configure({}, "ALL", None)
CASES = [case for base in SCRIPTS for case in cases(base)]


def parameter(case):
    """Return a named case. A pitfall that is not reported yet must fail, and only that."""
    missed = [pytest.mark.xfail(strict=True, reason=case.missed)] if case.missed else []
    return pytest.param(case, id=f"{case.base}: {case.name}", marks=missed)


def found(folder):
    """Return (file, line, finding) of every finding in a folder."""
    paths = sorted(str(path) for path in folder.glob("*.py"))
    return [(finding.path.rpartition("/")[2], finding.line, finding) for finding in check_paths(paths, ALL)]


@pytest.mark.parametrize("base", SCRIPTS)
def test_the_script_without_a_mistake_is_silent(base, tmp_path):
    (tmp_path / f"{base}.py").write_text(script(base), encoding="utf-8")
    assert found(tmp_path) == []


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_the_pitfall_is_told_where_it_stands(case, tmp_path):
    wanted = case.write(tmp_path)
    told = set()
    for path, line, finding in found(tmp_path):
        kinds = {finding.rule, "any", *(["error"] if finding.severity is Severity.ERROR else [])}
        meant = kinds & {code for place, at, code in wanted if (place, at) == (path, line)}
        told.add((path, line, next(iter(meant), finding.rule)))
    assert told == wanted


def test_every_case_has_a_name_of_its_own():
    assert len({(case.base, case.name) for case in CASES}) == len(CASES)
