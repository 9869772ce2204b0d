"""Each rule's bad example is found by this rule alone, each good one by none."""

import pytest
from rule_examples import examples

from lockstep_lint.config import Config, default_codes
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_text


def cases(kind):
    return [pytest.param(code, text, id=f"{code}-{i}") for code in RULES for i, text in enumerate(examples(code, kind))]


def codes(code, text):
    config = Config(default_codes() | {code}, frozenset({code}))
    return {finding.rule for finding in check_text(text, config)}


@pytest.mark.parametrize(("code", "text"), cases("bad"))
def test_bad(code, text):
    assert codes(code, text) == {code}


@pytest.mark.parametrize(("code", "text"), cases("good"))
def test_good(code, text):
    assert codes(code, text) == set()


@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
def test_a_rule_explains_itself(rule):
    page = rule.page
    assert page.text.startswith(f"# {rule.code} {page.name}\n\n")
    assert f"**Severity** {rule.severity.value}" in page.text
    assert f"**confidence** {rule.confidence.value}." in page.text
    assert len(page.examples) == 2
    assert page.remedy
    assert page.what.endswith(".")
    assert page.why
    assert rule.fix in ("safe", "unsafe", "none")


def test_opinions_are_off_by_default():
    assert [code for code in RULES if code not in default_codes()] == ["LS008", "LS020"]
