"""Notebooks: findings name cell and line, magics are skipped, broken cells are reported."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_lint.analysis.source import cells_of, place, plain
from lockstep_lint.command import command
from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

ALL = configure({}, "ALL", None)
CELLS = [
    ("markdown", "# torch\nimport nothing"),
    ("code", "%matplotlib inline\n!pip install torch\nimport torch\nfiles = !ls\ntorch?"),
    ("code", "%%bash\nfor x in *; do echo $x; done"),
    ("code", "%%time\nx = 1\nstate = torch.load('cuda.pt')"),
    ("code", "def f(:\n"),
    (
        "code",
        "for x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n    %time pass\nawait x",
    ),
    ("code", "torch.load('cuda.pt')  # noqa: LS015"),
]


def book(cells=CELLS, listed=True):
    form = (lambda text: text.splitlines(keepends=True)) if listed else str
    found = [
        {"cell_type": kind, "metadata": {}, "source": form(text), "outputs": [{"data": "x"}]} for kind, text in cells
    ]
    return json.dumps({"cells": found, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}).encode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_bytes(book())
    return tmp_path


@pytest.mark.parametrize("listed", [True, False])
def test_cell_and_line(folder, listed):
    (folder / "train.ipynb").write_bytes(book(listed=listed))
    findings = check_paths(["train.ipynb"], configure({}, None, None, hints=True))
    assert [(f.cell, f.line, f.rule) for f in findings] == [(4, 3, "LS015"), (5, 1, "LS000"), (6, 4, "LS021")]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("    import torch\n    s = torch.load('cuda.pt')", [("LS015", 2)]),
        ("\n\t\n    import torch\n    if True:\n        s = torch.load('cuda.pt')\n\ny = 1", [("LS015", 5)]),
        ("  %time x = 1\n  import torch\n  s = torch.load('cuda.pt')", [("LS015", 3)]),
        ("    import torch\n  s = torch.load('cuda.pt')", [("LS000", 2)]),
    ],
)
def test_an_indented_cell_is_read_as_ipython_reads_it(folder, source, found):
    (folder / "train.ipynb").write_bytes(book([("code", source)]))
    assert [(f.rule, f.line) for f in check_paths(["train.ipynb"], configure({}, None, None, hints=True))] == found


def test_formats(folder, capsys):
    assert command([".", "--hints"]) == 1
    out = capsys.readouterr().out
    assert "train.ipynb:cell 4:3:9: LS015 hint: " in out
    assert "    | state = torch.load('cuda.pt')\n    |         ^" in out
    command([".", "--hints", "--format", "json"])
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["path"], first["cell"], first["line"]) == ("train.ipynb", 4, 3)
    command([".", "--hints", "--format", "github"])
    assert "::warning file=train.ipynb,title=LS015::cell 4, line 3: loads" in capsys.readouterr().out


def test_a_notebook_is_never_written(folder, capsys):
    before = book([("code", "import torch\ns = torch.cuda.amp.GradScaler()\n")])
    (folder / "train.ipynb").write_bytes(before)
    assert command(["--hints", "--fix", "."]) == 0
    assert command(["--hints", "--unsafe-fixes", "."]) == 0
    assert (folder / "train.ipynb").read_bytes() == before
    capsys.readouterr()


def test_what_a_notebook_imports_is_followed(folder):
    (folder / "steps.py").write_text("import torch\n\ndef clear(optimizer):\n    optimizer.zero_grad()\n")
    cells = [("code", "import torch\nimport steps"), ("code", CELLS[5][1])]
    (folder / "train.ipynb").write_bytes(book(cells))
    assert check_paths(["train.ipynb"], configure({}, None, None, hints=True)) == []


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b'{"cells": 3}', b"\xff", b"[" * 100_000])
def test_what_is_no_notebook_is_told(tmp_path, data):
    path = tmp_path / "x.ipynb"
    path.write_bytes(data)
    assert [(f.rule, f.message) for f in check_paths([str(path)], ALL)] == [
        ("LS000", "not checked: is not a notebook: exclude it")
    ]


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(["code", "markdown"]), st.text(max_size=60)), max_size=6))
def test_any_cells(cells):
    found = cells_of(book(cells))
    numbers = [number for number, (kind, _) in enumerate(cells, 1) if kind == "code"]
    assert [cell.number for cell in found.cells] == numbers
    assert all(place(found.cells, cell.start) == (cell.number, 1) for cell in found.cells)


def test_plain_code_stays_as_it_is():
    text = "x = a % b\ny = (1\n  % 2)\nz = '''\n%time\n!ls\n'''\nassert x != y"
    assert plain(text) == text
    assert plain("if x:\n    !ls \\\n  -l\ny = %who\nx?") == "if x:\n    pass\npass\ny = None\npass"
