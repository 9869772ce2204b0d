"""Whatever a file holds, it is checked or reported, quickly and in bounded memory."""

import gc
import subprocess
import sys
import time
import weakref
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_examples import all_examples

from lockstep_lint.analysis import project
from lockstep_lint.analysis.index import index
from lockstep_lint.analysis.source import MAX_BYTES
from lockstep_lint.config import configure
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_paths, check_text

ALL = configure({}, "ALL", None)
TIMES = 10  # what 3,250 lines of ordinary loops take, on this machine and now: seconds would measure the machine
WORDS = (
    "torch dist model loader optimizer scaler loss rank epoch x y 0 1 = == += . , : ( ) [ ] { } % @ for if in with def "
    "class return import from as not and or lambda * ** DDP DataLoader backward step zero_grad"
)
TOKENS = [*WORDS.split(), "\n    ", "\n"]
EXAMPLES = all_examples("bad", "good")


def taken(text):
    start = time.process_time()
    check_text(text, ALL)
    return time.process_time() - start


@cache
def allowed():
    return TIMES * min(taken("import torch\n" + LOOP * 650) for _ in range(3))


def timed(text):
    assert taken(text) < allowed()


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.text())
def test_any_text(text):
    timed("import torch\n" + text)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(TOKENS), max_size=60))
def test_words_in_any_order(words):
    timed("import torch\n" + " ".join(words))


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(EXAMPLES), st.sampled_from(EXAMPLES), st.integers(0, 40), st.integers(0, 40))
def test_lines_of_scripts_mixed(one, other, cut, length):
    lines = one.splitlines()
    lines[cut : cut + length] = other.splitlines()[cut : cut + length]
    timed("\n".join(lines))


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=400))
def test_any_bytes(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "x.py"
    path.write_bytes(data)
    check_paths([str(path)], ALL)


LOOP = (
    "for x, y in loader:\n    optimizer.zero_grad()\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n"
)
GRAPH = "".join(f"def f{i}():\n    f{(i + 1) % 500}()\n    f{(i * 7) % 500}()\n" for i in range(500))
NEST = "".join("    " * i + f"for x{i} in loader:\n" for i in range(19)) + "    " * 19 + "x.backward()"
HOSTILE = {
    "parentheses": "x = " + "(" * 5000 + ")" * 5000,
    "operators": "x = " + "+".join(["torch.load('cuda')"] * 3000),
    "unary": "x = " + "not " * 3000 + "x",
    "attributes": "x = torch" + ".a" * 20000,
    "calls": "x = torch" + ".a()" * 900,
    "elif": "if a:\n    pass\n" + "".join(f"elif rank == {i}:\n    print({i})\n" for i in range(1500)),
    "nested blocks": NEST,
    "assignments": "".join(f"model = model.to({i})\n" for i in range(5000)) + "model.step()",
    "names for names": "".join(f"a{i + 1} = a{i}\n" for i in range(3000)) + "a3000.step()\n",
    "functions that call each other": GRAPH + "for x in loader:\n    f0()\n    loss.backward()\n",
    "a function that calls itself": "def f(model):\n    model = f(model)\n    return f(f(model))\nf(f).backward()\n",
    "classes that derive from each other": "class A(B): pass\nclass B(A): pass\nA().forward(1)\nB().x()\n",
    "many loops": LOOP * 400,
    "one long function": "def f():\n" + "".join(f"    {line}\n" for line in (LOOP * 300).splitlines()),
    "early returns": "def f(rank):\n" + "    if rank != 0:\n        return\n    dist.barrier()\n" * 800,
    "a long line": "x = [" + "torch.load('cuda'), " * 5000 + "]",
    "star imports": "from torch import *\nfrom nowhere import *\nfrom . import *\nfrom .... import x\nDataLoader(1)\n",
    "comments": "# noqa: LS015\n" * 5000,
    "unicode": "π = torch.load('ü cuda')  # noqa: LS001\n",
    "null": "\0",
    "thousands of loops": LOOP * 2500,
    "thousands of guards": "if rank == 0:\n    print(rank)\n    dist.barrier()\n" * 5000,
    "counts of counts": (
        "def f(model, loader, optimizer):\n    model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "    for i, y in enumerate(loader):\n        model(y).sum().backward()\n        optimizer.step()\n"
        + "".join(f"        v{n} = v{n + 1} + v{n + 1}\n" for n in range(25))
        + "        v25 = i\n        if v0 > 3:\n            break\n"
    ),
    "tuples that many functions give": (
        "dist.init_process_group('nccl')\n"
        + "".join(
            f"def f{n}():\n" + "".join(f"    if x == {i}:\n        return f{n + 1}()\n" for i in range(70))
            for n in range(3)
        )
        + "def f3():\n    return True, 1\nmain, device = f0()\n"
        + "if main:\n    print(1)\n" * 900
    ),
    "thousands of assignments": "x[1]=a+b*c-d;" * 20000,
}


@pytest.mark.parametrize("text", list(HOSTILE.values()), ids=list(HOSTILE))
def test_hostile_files(text):
    timed("import torch\nimport torch.distributed as dist\n" + text)


@pytest.mark.parametrize("name", ["counts of counts", "tuples that many functions give"])
def test_names_that_branch_are_followed_to_their_end(name):
    found = check_text("import torch\nimport torch.distributed as dist\n" + HOSTILE[name], ALL)
    assert [finding.message for finding in found if finding.rule == "LS000"] == []


def test_memory_is_bounded(tmp_path):
    (tmp_path / "x.py").write_text("import torch\n" + "x[1]=a+b*c-d;" * 23000)
    script = (
        "import re, sys\n"
        "from lockstep_lint.command import command\n"
        "command([sys.argv[1], '--select', 'ALL'])\n"
        # Not getrusage: its peak is inherited from the process that started this one.
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 500_000  # KB


def test_a_part_is_let_go_without_the_garbage_collector(monkeypatch):
    """Release a checked batch at once, though the garbage collector is off meanwhile."""
    made, seen = weakref.WeakSet(), []

    def noted(source):
        module = index(source)
        made.add(module)
        seen.append(source.path)
        return module

    monkeypatch.setattr(project, "index", noted)
    collects = gc.isenabled()
    gc.disable()
    try:
        pages = [RULES[code].page.examples[0] for code in ("LS005", "LS037")]
        for text in (HOSTILE["functions that call each other"], *pages):
            check_text("import torch\n" + text, ALL)
            assert not made
        assert len(seen) == 3
    finally:
        if collects:
            gc.enable()


def test_a_huge_file_is_reported_unread(tmp_path):
    path = tmp_path / "huge.py"
    path.write_text("x = 1\n" * (MAX_BYTES // 6 + 10))
    (finding,) = check_paths([str(path)], ALL)
    assert finding.rule == "LS000"
    assert "bytes is more than" in finding.message


def test_binary_and_unreadable_files(tmp_path):
    (tmp_path / "binary.py").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "coding.py").write_bytes(b"# -*- coding: nonsense -*-\n")
    (tmp_path / "folder.py").mkdir()
    paths = [str(tmp_path / name) for name in ("binary.py", "coding.py", "folder.py", "missing.py")]
    assert [finding.rule for finding in check_paths(paths, ALL)] == ["LS000"] * 4


def test_old_syntax_is_reported_with_its_line():
    (finding,) = check_text("import torch\nprint 'hello'\n")
    assert (finding.rule, finding.line) == ("LS000", 2)


def test_a_name_whose_own_value_decides_whether_it_is_bound():
    text = """
import torch
import torch.distributed as dist

class Run:
    def train(self, model, loader, optimizer):
        dist.init_process_group("nccl")
        model.cuda()
        if self.opt.local_rank == 0:
            losses = None
        for x in loader:
            loss = model(x.cuda())
            loss.backward()
            optimizer.step()
            if self.opt.local_rank == 0:
                if losses is None:
                    losses = {"loss": float(loss)}
                else:
                    losses["loss"] += float(loss)
"""
    assert [found.line for found in check_text(text, configure({}, "LS036", ""))] == [19]  # the first turn is one


def test_a_call_of_get_without_arguments():
    assert (
        check_text(
            "import torch\nfrom data import batch, loader\npin_memory = loader.get()\nbatch = batch.cuda()\n", ALL
        )
        == []
    )
