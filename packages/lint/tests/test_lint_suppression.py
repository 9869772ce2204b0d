"""Comments, pyproject.toml and flags silence findings, and comments that silence nothing are reported."""

import pytest

from lockstep_lint.config import ConfigProblem, configure
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_text

LOAD = "import torch\nstate = torch.load('x.pt'){}\nprint('cuda')\n"


def rules(text, config=None):
    return [finding.rule for finding in check_text(text, config)]


@pytest.mark.parametrize("comment", ["  # noqa", "  # noqa: LS015", "  # noqa: E501, LS015", "  #NOQA:LS015 LS016"])
def test_a_comment_silences_its_line(comment):
    assert "LS015" not in rules(LOAD.format(comment))


def test_another_rule_or_tool_does_not():
    assert "LS015" in rules(LOAD.format("  # noqa: F401"))
    assert rules(LOAD.format("  # noqa: LS001")) == ["LS015", "LS900"]


def test_a_comment_on_any_line_of_the_statement():
    assert rules("import torch\nx = torch.load(\n    'cuda.pt',\n)  # noqa: LS015\n") == []


@pytest.mark.parametrize("comment", ["# lockstep: noqa", "# lockstep: noqa: LS015"])
def test_a_comment_silences_the_file(comment):
    assert rules(f"{comment}\n" + LOAD.format("")) == []


def test_idle_comments_are_reported():
    findings = check_text("import torch\nx = 1  # noqa: LS015\n# lockstep: noqa: LS001\n")
    assert [(f.rule, f.line) for f in findings] == [("LS900", 2), ("LS900", 3)]
    assert "LS015" in findings[0].message


def test_comments_for_rules_that_do_not_run_are_not_idle():
    assert rules("import torch\nx = 1  # noqa: LS008\n") == []
    assert rules("x = 'not a comment  # noqa: LS015'\nimport torch\n") == []


def test_the_flags_replace_the_table():
    table = {"select": ["LS001", "LS015"], "ignore": ["LS001"]}
    assert configure(table, None, None).codes == {"LS015"}
    assert configure(table, "LS004", None).codes == {"LS004"}
    assert configure(table, None, "LS015").codes == {"LS001"}
    assert len(configure({}, "all", None).codes) == len(RULES)
    assert "LS008" not in configure({}, None, None).codes


def test_opinions_need_to_be_asked_for():
    script = "import torch\nfrom torch.utils.data import DataLoader\nl = DataLoader([1])\nprint('cuda')\n"
    assert rules(script) == []
    assert rules(script, configure({}, "ALL", None)) == ["LS022"]
    assert rules(script, configure({}, "LS022", None)) == ["LS022"]


def test_per_file(tmp_path):
    config = configure({"per-file": {"tests/**": ["LS015"]}}, None, None, str(tmp_path), hints=True)
    assert "LS015" not in config.codes_for(str(tmp_path / "tests" / "a.py"))
    assert "LS015" in config.codes_for(str(tmp_path / "src" / "a.py"))


@pytest.mark.parametrize(
    ("table", "select", "words"),
    [
        ({"selct": []}, None, "no key 'selct'"),
        ({"select": 3}, None, "must be a list"),
        ({"select": ["LS999"]}, None, "no rule 'LS999'"),
        ({"per-file": ["LS001"]}, None, "per-file must be a table"),
        ({}, "LS1", "--select: there is no rule 'LS1'"),
    ],
)
def test_wrong_settings(table, select, words):
    with pytest.raises(ConfigProblem, match=words) as raised:
        configure(table, select, None)
    assert "\n" not in str(raised.value)
