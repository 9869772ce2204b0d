"""Describe the end of a run: the ranks that it lost, and what to do next.

next_command(built)    # lockstep evaluate outputs/classes --task classes.py:Classes
"""

import inspect
import os
import shlex
from collections.abc import Sequence
from typing import Any

from lockstep.config.task_options import LANGUAGE, kind_of
from lockstep.task import user_task
from lockstep.training.state.parts import RunParts

__all__ = ["describe_lost_ranks", "file_and_class", "next_command"]

# Failures that one line describes.
_NAMED = 3


def next_command(built: RunParts) -> str:
    """Return a command that uses the finished run, ready to be copied.

    A language model generates text. Another task is evaluated, if it has an evaluation set and the command can make
    the task. Otherwise the weights are exported, which needs no task.
    """
    run = str(built.setup.folder.path)
    if not built.setup.own_task and kind_of(built.config.task) == LANGUAGE:
        return shlex.join(["lockstep", "generate", run, "--prompt", "The"])
    is_object = built.setup.own_task and not built.config.task
    name = file_and_class(user_task(built.task)) if is_object else ""
    if built.evaluation and (name or not is_object):
        return shlex.join(["lockstep", "evaluate", run, *(["--task", name] if name else [])])
    return shlex.join(["lockstep", "export", run, f"{built.config.experiment_name}.safetensors"])


def file_and_class(task: Any) -> str:
    """Return FILE.py:CLASS of a task object; "" if a command cannot make the task from that."""
    kind = type(task)
    if "." in kind.__qualname__:
        return ""
    try:
        path = inspect.getsourcefile(kind)
        parameters = inspect.signature(kind).parameters.values()
    # The class comes from a notebook or from C, or has no signature.
    except (TypeError, OSError, ValueError):
        return ""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    is_plain = all(each.default is not each.empty or each.kind in variadic for each in parameters)
    if path is None or not path.endswith(".py") or not os.path.isfile(path) or not is_plain:
        return ""
    shorter = os.path.relpath(path)
    return f"{path if shorter.startswith(os.pardir) else shorter}:{kind.__qualname__}"


def describe_lost_ranks(losses: Sequence[str], size: int, initial_size: int) -> str:
    """Describe the ranks that a run lost; "" for none.

    Args:
        losses: a line for each.
        size: number of ranks now.
        initial_size: number of ranks before the first loss.
    """
    if not losses:
        return ""
    if len(losses) == 1:
        ranks = "1 rank was"
    else:
        ranks = f"{len(losses)} ranks were"
    if len(losses) > _NAMED:
        more = f" (the first {_NAMED} of {len(losses)} losses)"
    else:
        more = ""
    causes = "; then ".join(losses[:_NAMED]) + more
    if size >= initial_size:
        return f"after {ranks} lost and replaced: {causes}"
    return f"on {size} of {initial_size} ranks: {causes}"
