"""Quotes within the f-strings of Python 3.12, read by any Python."""

import ast
import json

import pytest

from lockstep_lint.analysis.source import parsed, requoted
from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

NEWER = [
    'x = f"a {c["k"]} b"',
    "x = f'{c['a']} {c['b']}'",
    'x = f"{x:>{c["n"]}} {{no}} {x!r}"',
    'x = f"{", ".join(c)}" + "{c["',
    'x = f"{c["k"]}"  # f"{c["k"',
    'x = (f"{c["k"]} "\n     f"{c["l"]}")',
]


@pytest.mark.parametrize("text", NEWER)
def test_nothing_moves_and_it_parses(text):
    found = requoted(text)
    assert len(found) == len(text)
    assert found.split("\n")[0].split("f")[0] == text.split("\n")[0].split("f")[0]
    ast.parse(found)
    assert isinstance(parsed(text), ast.Module)


@pytest.mark.parametrize(
    "text", ['x = "a {c["', "x = f'{c[\"k\"]}'", 'x = rf"{c}"', '"""f"{c["k"]}" """', 'y = \'f"{c["k"]}"\'', ""]
)
def test_what_older_pythons_know_stays(text):
    assert requoted(text) == text


@pytest.mark.parametrize("text", ['x = f"{c["', 'x = f"{c["k"]}', 'x = f"{(1}"'])
def test_what_no_python_parses_is_told(text):
    with pytest.raises(SyntaxError):
        parsed(text)


STEP = """
import torch

def train(model, loader, optimizer, config):
    model.cuda()
    for x in loader:
        loss = model(x.cuda()).mean()
        loss.backward()
        optimizer.step()
        print(f"{config["name"]}: {loss.item()}")
"""


def test_a_script_of_a_newer_python_is_checked(tmp_path):
    assert [finding.line for finding in check_text(STEP, configure({}, "LS036", ""))] == [10]
    cell = {"cell_type": "code", "source": STEP}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    found = check_paths([str(tmp_path / "train.ipynb")], configure({}, "LS036", ""))
    assert [(finding.cell, finding.line) for finding in found] == [(1, 10)]


OLD = """import torch
loader = torch.utils.data.DataLoader(data, pin_memory=True, num_workers=2)
for x, y in loader:
    x = x.cuda({first})
    y = y.cuda(non_blocking=True)
    loss = model(x, y).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("first", "lines"), [("", [4]), ("async=True", []), ("device, async = True", [])])
def test_the_argument_of_python_before_3_7(first, lines):
    found = check_text(OLD.format(first=first), configure({}, "LS022", ""))
    assert [finding.line for finding in found] == lines


@pytest.mark.parametrize("text", ["async = 1\nx = (", "f(async=)", "async def f(:\n    pass"])
def test_async_that_no_python_parses(text):
    with pytest.raises(SyntaxError):
        parsed(text)
