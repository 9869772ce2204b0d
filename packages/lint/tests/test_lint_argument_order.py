"""A file's findings depend on its project, never on the arguments or their order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_examples import all_examples

from lockstep_lint import runner
from lockstep_lint.analysis import imports
from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

ALL = configure({}, "ALL", None)
NAMES = ("train", "comm", "nets", "tools", "main", "deep")
# Bodies whose findings hang on what other files say: who calls, who ends the group, who converts, who guards.
BODIES = (
    "def setup():\n    dist.init_process_group('nccl')\n",
    "def finish():\n    dist.destroy_process_group()\n",
    "def mean(value):\n    dist.all_reduce(value)\n    return value\n",
    "class Net(nn.Module):\n    def __init__(self):\n        self.norm = nn.BatchNorm2d(3)\n",
    "def wrap(model, rank):\n    return nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank])\n",
    "def report(score):\n    print('score', score)\n",
    "def convert(model):\n    return nn.SyncBatchNorm.convert_sync_batchnorm(model)\n",
    "def load(path):\n    return torch.load(path).cuda()\n",
)
CALLS = (
    "{0}.setup()",
    "{0}.finish()",
    "if dist.get_rank() == 0:\n    {0}.mean(1)",
    "{0}.wrap({1}.Net(), 0)",
    "if dist.get_rank() == 0:\n    {0}.report(1)",
    "{0}.report(2)",
    "{0}.convert({1}.Net())",
)
FILE = st.tuples(
    st.lists(st.sampled_from(BODIES), max_size=3, unique=True),
    st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=4),
    st.booleans(),
)


TRAINS = """
def fit(model, loader, optimizer):
    for x in loader:
        loss = model(x.cuda())
        loss.backward()
        optimizer.step()
        print(loss)
"""


def write(folder, files):
    for name, (bodies, calls, torch) in files.items():
        used = sorted({other for _, *others in calls for other in others if other != name})
        lines = [f"import {other}" for other in used]
        lines += ["import torch\nimport torch.distributed as dist\nfrom torch import nn"] if torch or bodies else []
        lines += bodies + [call.format(*others) for call, *others in calls if name not in others]
        path = folder / ("lib" if name == "deep" else "") / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\nif __name__ == '__main__':\n    pass\n")
    return sorted(str(path) for path in folder.rglob("*.py"))


def shown(findings, path):
    return [(f.line, f.column, f.rule, f.message) for f in findings if f.path == path]


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(files=st.dictionaries(st.sampled_from(NAMES), FILE, min_size=2), data=st.data())
def test_any_list_in_any_order(files, data, tmp_path_factory):
    paths = write(tmp_path_factory.mktemp("project"), files)
    together = check_paths(paths, ALL)
    for path in paths:
        assert shown(check_paths([path], ALL), path) == shown(together, path)
    some = data.draw(st.lists(st.sampled_from(paths), min_size=1, unique=True))
    for path in some:
        assert shown(check_paths(some, ALL), path) == shown(together, path)


CLONES = ("clone", "tests", *NAMES)
INNER = ("", "models", "models/parts", "tests")
IMPORTED = ("from {1} import *", "import {0}.{1}", "from {0} import {1}", "from {0}.{1} import wrap, setup, report")


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(
            FILE,
            st.sampled_from(INNER),
            st.lists(
                st.tuples(st.sampled_from(IMPORTED), st.sampled_from((*CLONES, "models")), st.sampled_from(NAMES)),
                max_size=3,
            ),
        ),
        min_size=2,
    ),
    clones=st.lists(st.sampled_from(CLONES), min_size=2, max_size=2, unique=True),
    marked=st.booleans(),
    tested=st.booleans(),
    data=st.data(),
)
def test_the_folder_of_a_clone_and_how_it_is_named_say_nothing(
    files, clones, marked, tested, data, tmp_path_factory, monkeypatch
):
    found = []
    for name in clones:
        root = tmp_path_factory.mktemp("clones") / name
        (root / (".git" if marked else "inner")).mkdir(parents=True)
        texts = {}
        for file in write(root, {key: value for key, (value, _, _) in files.items()}):
            texts[os.path.basename(file)] = Path(file).read_text()
            os.remove(file)
        for key, (_, place, imported) in files.items():
            lines = [line.format(*words) for line, *words in imported]
            lines += ["def test_it():", "    pass"] if tested else []
            (root / place).mkdir(parents=True, exist_ok=True)
            (root / place / f"{key}.py").write_text("\n".join(lines) + "\n" + texts[f"{key}.py"] + TRAINS)
        paths = sorted(str(path) for path in root.rglob("*.py"))
        monkeypatch.chdir(data.draw(st.sampled_from([root, root.parent, Path("/")])))
        given = [os.path.relpath(path) for path in paths] if data.draw(st.booleans()) else paths
        shuffled = data.draw(st.permutations(given))
        findings = check_paths(shuffled, ALL)
        found.append(sorted((os.path.relpath(f.path, root), f.line, f.column, f.rule, f.message) for f in findings))
    assert found[0] == found[1]


def test_the_hash_seed_says_nothing(tmp_path):
    examples = all_examples("bad", "good")
    for i in range(40):
        (tmp_path / f"script{i:02d}.py").write_text("\n".join(["import common", *examples[i::40]]))
    (tmp_path / "common.py").write_text("import torch\n" + "\n".join(examples[::50]))
    command = [sys.executable, "-m", "lockstep_lint", "--select", "ALL", "--format", "json", "."]
    outputs = {
        subprocess.run(
            command, cwd=tmp_path, capture_output=True, check=False, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1", "12345")
    }
    (output,) = outputs
    assert len(json.loads(output)) > 100


@pytest.mark.parametrize("workers", [1, 2])
def test_importers_in_another_part_are_seen(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(runner, "PART", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: workers)
    (tmp_path / "comm.py").write_text(
        "import torch.distributed as dist\n\ndef start():\n    dist.init_process_group()\n"
    )
    for i in range(9):
        (tmp_path / f"run{i}.py").write_text("import comm\n\ncomm.start()\n\nif __name__ == '__main__':\n    pass\n")
    paths = sorted(str(path) for path in tmp_path.iterdir())
    assert [f.rule for f in check_paths(paths, ALL)] == ["LS019"]
    (tmp_path / "run8.py").write_text("import comm\nimport torch.distributed as dist\n\ndist.destroy_process_group()\n")
    assert check_paths(paths, ALL) == []
    assert check_paths(paths[:1], ALL) == []


PLACES = ("", "a", "a/b", "a/b/c", "a/b/c/d/e/f/g", "vendor/kit", "vendor/kit/inner")
MARKS = (".git/", "vendor/kit/.git/", "a/setup.py", "a/b/c/requirements.txt", "vendor/kit/pyproject.toml")


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    places=st.dictionaries(st.sampled_from(("train", "comm", "tools", "main")), st.sampled_from(PLACES), min_size=3),
    marks=st.sets(st.sampled_from(MARKS)),
    data=st.data(),
)
def test_projects_within_projects_and_deep_folders(places, marks, data, tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for mark in marks:
        (root / mark).parent.mkdir(parents=True, exist_ok=True)
        (root / mark).mkdir(exist_ok=True) if mark.endswith("/") else (root / mark).write_text("")
    for name, place in places.items():
        others = [other for other in places if other != name and data.draw(st.booleans())]
        lines = ["import sys", "import torch.distributed as dist", f"sys.path.append('../{place}')"]
        for other in others:
            inner = data.draw(st.sampled_from(("", places[other].replace("/", "."), places[other].split("/")[-1])))
            lines.append(f"from {inner}.{other} import start" if inner else f"from {other} import start")
        lines.append("def start():\n    dist.init_process_group('nccl')\n    print('started')\n")
        lines += data.draw(st.sampled_from((["start()"], ["dist.destroy_process_group()"], [])))
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / f"{name}.py").write_text("\n".join(lines) + "\n")
    paths = sorted(str(path) for path in root.rglob("*.py") if path.name != "setup.py")
    together = check_paths(paths, ALL)
    for path in paths:
        assert shown(check_paths([path], ALL), path) == shown(together, path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_project_that_lies_deep_is_one_project(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(runner, "PART", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: workers)
    (tmp_path / ".git").mkdir()
    deep = tmp_path.joinpath(*"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "comm.py").write_text("import torch.distributed as d\n\ndef go():\n    d.init_process_group()\n")
    (deep / "run.py").write_text("import comm\n\nif __name__ == '__main__':\n    comm.go()\n")
    (tmp_path / "end.py").write_text("import torch.distributed as d\nfrom a.b.c.d.e.f.g.h import comm, run\n")
    paths = [str(tmp_path / "end.py"), str(deep / "comm.py"), str(deep / "run.py")]
    assert [f.rule for f in check_paths(paths, ALL)] == ["LS019"]
    (tmp_path / "end.py").write_text((tmp_path / "end.py").read_text() + "d.destroy_process_group()\n")
    assert check_paths(paths, ALL) == check_paths(paths[1:2], ALL) == check_paths(paths[:2], ALL) == []


def test_an_importer_outside_the_list_and_without_torch_is_seen(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "src" / "lib").mkdir(parents=True)
    (tmp_path / "src" / "lib" / "comm.py").write_text(
        "import torch.distributed as d\n\ndef go():\n    d.init_process_group()\n"
    )
    path = str(tmp_path / "src" / "lib" / "comm.py")
    assert check_paths([path], ALL) == []  # no program starts it
    (tmp_path / "run.py").write_text(
        "from lib.comm import (\n    go,  # starts\n)\n\nif __name__ == '__main__':\n    go()\n"
    )
    assert [f.rule for f in check_paths([path], ALL)] == ["LS019"]


def test_outside_a_project_only_the_folder_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "_places", lambda: (tmp_path,))
    deep = tmp_path / "one" / "two"
    deep.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "one", deep):
        (folder / "x.py").write_text("import torch\n")
    assert imports.scan(imports.root_of(str(tmp_path))) == [str(tmp_path / "x.py")]
    assert imports.root_of(str(deep)) == str(tmp_path / "one")
    assert len(imports.scan(str(tmp_path / "one"))) == 2


def test_an_answer_that_a_search_cut_short_is_not_kept(tmp_path):
    turns = "def a(x):\n    x = b(x)\n    return x\n\ndef b(x):\n    x = a(x)\n    return x\n\n"
    first = f"import torch\n\n{turns}b(1).step()\n"
    (tmp_path / "one.py").write_text(first + "a(2).run()\n")
    (tmp_path / "two.py").write_text("import torch\nimport one\n\none.a(torch.load('cuda')).go()\n")
    paths = [str(tmp_path / "one.py"), str(tmp_path / "two.py")]
    assert check_paths(paths, ALL) == check_paths(paths[::-1], ALL)


def test_names_that_two_files_give_each_other_end(tmp_path):
    (tmp_path / "a.py").write_text("from b import X\nY = X\nmodel = Y()\nY().cuda()\n")
    paths = [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
    (tmp_path / "b.py").write_text("from a import Y\nX = Y\nX().cuda()\n")
    assert [f.message for f in check_paths(paths, ALL) if f.rule == "LS000"] == []
