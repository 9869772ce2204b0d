"""What the launcher and `spawn` fork from has not touched CUDA, and has one thread.

A process in which CUDA has begun, or has only been asked how many devices there are, is no place to fork from: torch
refuses CUDA in its children. A build for CUDA shows it without a driver, by the calls into its library; a build for
CPUs has no such calls, so there the functions are watched that would make them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from shell import environment

from lockstep.distributed import spawn
from lockstep.launch import workers

TESTS = str(Path(__file__).parents[1])
WATCH = """
import importlib, json, os, sys, traceback
sys.path.insert(0, {tests!r})
import torch

calls = []

def watch(owner, name):
    made = getattr(owner, name)

    def watched(*args, **named):
        calls.append("".join(traceback.format_stack(limit=8)))
        return made(*args, **named)

    setattr(owner, name, watched)

native = [name for name in ("_cuda_getDeviceCount", "_cuda_init") if hasattr(torch._C, name)]
for name in native:
    watch(torch._C, name)
if not native:
    for name in ("is_available", "device_count", "_lazy_init", "init"):
        watch(torch.cuda, name)
{program}
print(json.dumps([calls, len(os.listdir("/proc/self/task")), torch.cuda._initialized]))
"""
LOADED = "importlib.import_module('lockstep.commands.train').import_training()\n"


def imports(*modules):
    return "".join(f"importlib.import_module({module!r})\n" for module in modules)


def watched(program):
    """The stacks of calls that begin CUDA, the threads, and whether torch has begun it, after `program`."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH.format(tests=TESTS, program=program)],
        env=environment(OPENBLAS_NUM_THREADS="1"),  # as Preloaded starts its process
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(
    "program",
    [LOADED + imports(*workers._LATER), imports(*spawn._PRELOADED), imports(*spawn._PRELOADED, *ranks._PRELOADED)],
    ids=["launch", "spawn", "tests"],
)
def test_nothing_that_is_forked_from_has_begun_cuda_or_a_thread(program):
    calls, threads, begun = watched(program)
    assert calls == []
    assert threads == 1
    assert not begun


def test_a_question_for_devices_is_seen():
    """Else the test above would prove nothing."""
    calls, _, _ = watched("torch.cuda.is_available()")
    assert calls
