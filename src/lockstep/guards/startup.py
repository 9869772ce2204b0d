"""Check that all ranks start equal: programs, data order, weights.

    check_programs(world, task, order)          # LockstepError: the differing key and the rank
    check_weights(world, {"model": model})      # DifferenceError: the tensor and the rank

Configuration and plan are compared elsewhere.
"""

import functools
import hashlib
import inspect
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import DifferenceError
from lockstep.guards import desync
from lockstep.task import Task, user_task

__all__ = [
    "check_programs",
    "check_weights",
    "program",
]


def check_programs(world: World, task: Task, order: list[int]) -> None:
    """Compare versions, code and the order of the first samples. Collective.

    Args:
        order: indices of the first samples.

    Raises:
        LockstepError: they differ; key, values and rank are named.
    """
    own_program = program(task) | {"data order": hashlib.sha256(repr(order).encode()).hexdigest()[:16]}
    # All ranks, once before step 1.
    world.check_same("program", own_program)  # collective


def program(task: Task) -> dict[str, str]:
    """Return versions, and digests of lockstep's code and of the task's."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "lockstep": lockstep.__version__,
        "lockstep's code": _CODE,
        "task's code": _task_code(task),
    }


def check_weights(world: World, models: Mapping[str, nn.Module]) -> None:
    """Compare the ranks' initial weights. Collective.

    Args:
        models: the trained model, and those that its loss reads, by name.

    Raises:
        DifferenceError: they differ; tensor and rank are named.
    """
    if world.size == 1:
        return
    weights = {}
    for model_name, model in models.items():
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                weights[f"{model_name}/{name}"] = value
    replicas = desync.Replicas(weights, world)

    def compare(ranks: list[Any]) -> None:
        # With tensors on the meta device only rank 0 has drawn weights; they are broadcast later.
        if any(has_meta for has_meta, _ in ranks):
            return
        try:
            replicas.compare([digests for _, digests in ranks], 0)  # collective if they differ
        except DifferenceError as error:
            difference = str(error).partition("; ")[0].removeprefix("after step 0 ")
            raise DifferenceError(
                f"before step 1: the initial weights differ: {difference}; seed the model alike"
            ) from error

    # All ranks, once before step 1; the next gather carries the digests.
    world.defer([any(tensor.is_meta for tensor in weights.values()), replicas.digests], compare)  # collective


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# Read once, at the import: ranks that are forked from one process have it from there.
_CODE = _digest(Path(lockstep.__file__).parent)


def _task_code(task: Task) -> str:
    # Any, because mypy does not accept a class as hashable.
    task_class: Any = type(user_task(task))
    return _class_code(task_class)


# Once for each class: Python parses the complete file to find it.
@functools.cache
def _class_code(task_class: type) -> str:
    """Return a digest of a class's source; "" if it has none."""
    try:
        text = inspect.getsource(task_class)
    except (OSError, TypeError):
        # The class was made in an interactive session.
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
