"""What torch reads once is set before it: by `launch` for its ranks, and by `train`; what is set already stays."""

import os
import shlex
import subprocess
import sys

import pytest
from shell import environment

from lockstep.distributed.launcher import allocator_variables, compile_threads, torch_variables
from lockstep.launch.command import command

NAMES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "TORCHINDUCTOR_COMPILE_THREADS",
)
GROWING = "expandable_segments:True"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def launched(capsys, *flags):
    """The variables that `lockstep launch` sets for its ranks, as its dry run prints them."""
    assert command([*flags, "--dry-run", "--", "train"]) == 0
    words = [word.partition("=") for word in shlex.split(capsys.readouterr().out)]
    return {name: value for name, _, value in words if name in NAMES}


def test_ranks_are_launched_with_them(capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr("lockstep.distributed.cpus.cpu_quota", lambda root: 0.0)
    assert launched(capsys, "--nproc-per-node", "4") == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_ALLOC_CONF": GROWING,
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
    }


def test_what_the_user_has_set_stays(capsys, monkeypatch):
    given = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_ALLOC_CONF": "", "TORCHINDUCTOR_COMPILE_THREADS": "7"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert "PYTORCH_ALLOC_CONF" not in torch_variables(4, os.environ)
    assert {**torch_variables(4, os.environ), **launched(capsys)}.items() >= {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "TORCHINDUCTOR_COMPILE_THREADS": "7",
    }.items()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_allocator_configured_under_any_name_is_left_alone(name):
    assert allocator_variables({name: "max_split_size_mb:512"}) == {}


def test_where_torch_would_warn_of_it_nothing_is_set(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert allocator_variables({}) == {}


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(64, 8, 8), (2, 8, 1), (64, 1, 32), (12, 5, 2)])
def test_ranks_share_the_cores_for_compilation(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("lockstep.distributed.cpus.cpu_quota", lambda root: 0.0)
    assert compile_threads(ranks) == threads


READ = """
import os, torch
with open(os.environ["SAID"], "w") as said:
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: os.environ.get("PYTORCH_ALLOC_CONF", ""))
    print(read(), file=said)
"""


def settings(tmp_path, begin, **variables):
    """What torch has read by the time that the task of `lockstep train` is loaded. There is no class T in its file."""
    (tmp_path / "mine.py").write_text(READ)
    arguments = ["train", "--task", f"{tmp_path / 'mine.py'}:T", "--save-dir", str(tmp_path), "--device", "cpu"]
    program = f"{begin}\nfrom lockstep import cli\nimport sys\nsys.argv[1:] = {arguments!r}\ncli.main()\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**environment(), "SAID": str(tmp_path / "said"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return (tmp_path / "said").read_text().strip()


@pytest.mark.parametrize(
    ("begin", "variables", "read"),
    [
        ("", {}, GROWING),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ("import torch", {}, ""),  # its caller may have begun CUDA
    ],
    ids=["unset", "set", "torch is loaded"],
)
def test_train_sets_the_allocator_before_torch_is_loaded(tmp_path, begin, variables, read):
    assert settings(tmp_path, begin, **variables) == read
