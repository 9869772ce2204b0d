"""Restore what a trial changes, and find what a loss leaves behind.

with preserve_state(model, task, device):
    task.loss(model, batch)             # leaves no marks
    marks = marks_of(model, task, lambda: task.loss(model, batch))      # {"task.queue": digest}
    names = differing_marks(world.gather(marks))
"""

import contextlib
import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loader import generators_kept
from lockstep.engines.base import at_rest
from lockstep.errors import ConfigError
from lockstep.object_state import ObjectState
from lockstep.task import Task, has_own, inner_task, user_task
from lockstep.tensors import host_bytes

__all__ = [
    "describe_marks",
    "describe_unsaved",
    "differing_marks",
    "marks_of",
    "preserve_state",
    "refusal_of_marks",
    "unsaved_marks",
]

# Attributes of a task that a trial finds out. They stay after it.
_FINDINGS = ("reduction", "_reduction_before", "_takes_gradients", "evaluates_loss")


@contextlib.contextmanager
def preserve_state(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """Restore modes, generators, the model's state and the user's objects at the end.

    Args:
        training: leave the modes as they are; False: run in eval mode, and without compiled code, so that large
            tensors are copied only where they are written.
    """
    _start(inner_task(task))
    state = _record(model, task, late=not training)
    # An engine's wrapper is not among the user's objects, so its modes are recorded here.
    modes = [(module, module.training) for module in model.modules()]
    if device.type == "cuda":
        cuda_generator = torch.cuda.get_rng_state(device)
    else:
        cuda_generator = None
    if not training:
        model.eval()
    try:
        with generators_kept(), state.watching():
            yield
    finally:
        at_rest(model)
        findings = {}
        for name in _FINDINGS:
            if name in vars(task):
                findings[name] = vars(task)[name]
        state.restore()
        for module, mode in modes:
            module.training = mode
        vars(task).update(findings)
        if cuda_generator is not None:
            torch.cuda.set_rng_state(cuda_generator, device)


def _record(model: nn.Module, task: Task, without: Collection[type[Any]] = (), *, late: bool) -> ObjectState:
    """Record the state of the model and of the user's own objects.

    The values of parameters, of `fixed_models` and of their optimizers' states are watched, not copied.

    Args:
        model: the engine's or the plain one.
        without: classes whose objects are left alone.
        late: large tensors are copied when they are written, see `ObjectState`.
    """
    roots, skip = _roots(inner_task(task))
    roots["model"] = model
    if task.framework:
        roots["task.state_dict()"] = task.state_dict()
    else:
        # The names that checkpoints use.
        for name, tensor in task.state_dict().items():
            roots[f"task.{name}"] = tensor
    fixed: list[Tensor] = [parameter for fixed in task.fixed_models.values() for parameter in fixed.parameters()]
    return ObjectState(roots, [*model.parameters(), *fixed], [*skip, *without], late=late)


def _roots(task: Task) -> tuple[dict[str, Any], list[Any]]:
    """Return the user's own objects by name, and the run's objects among them."""
    if not task.framework:
        return {"task": user_task(task)}, []
    trainer: Any = getattr(task, "trainer", None)
    # Loggers have files and connections, and the run logs nothing in a trial.
    if task.framework == "Lightning":
        run = [task, task.hooks, trainer._results, *trainer.loggers, *trainer.optimizers]
        return {"module": vars(task)["module"], "trainer": trainer}, run
    return {"trainer": trainer}, [task, trainer.optimizer, trainer.lr_scheduler]


def _start(task: Task) -> None:
    """Start a Lightning training before a trial.

    Its first hooks may make what the run needs, which is no mark of the trial.
    """
    if task.framework == "Lightning":
        life: Any = task.hooks
        life.start()


# --- what a loss leaves behind

# Attributes that a message names.
_MAX_NAMED = 4
# Levels of nested containers that are compared.
_MAX_DEPTH = 8


def marks_of(
    model: nn.Module,
    task: Task,
    call: Callable[[], Any],
    moved: Callable[[], AbstractContextManager[Any]] | None = None,
) -> dict[str, str]:
    """Find what a loss leaves behind for its next call: name -> digest.

    `call` is called twice. What only the first one changes is a table that it built; what the second one leaves as it
    is, such as the outputs of the last batch, is not remembered either. Statistics of BatchNorm, metrics, weights and
    what the adapters merge are left out, and so is `sample_state`.

    Args:
        model: the plain model, with the user's names.
        call: computes the loss of a batch; seeded by the caller, the same in each call, in the modes of training.
        moved: returns a context in which the weights have other values; for a teacher that is a copy of the model and
            follows it, which does not move before the model does. It takes one more call. None: without.
    """
    if moved is not None:
        call()
        at_rest(model)
        with moved():
            return marks_of(model, task, call)
    # Private, but the only common base of torch's BatchNorm classes.
    without: list[type[Any]] = [nn.modules.batchnorm._NormBase, *_metric_classes()]
    lists = _lists_of(inner_task(task))
    first_call = _record(model, task, without, late=True)
    with first_call.watching():
        call()
    at_rest(model)
    before = first_call.find_changes()
    second_call = _record(model, task, without, late=True)
    with second_call.watching():
        call()
    at_rest(model)
    # Lists that grow with each call are merged over the ranks.
    grown = {id(entries) for entries, length in lists if len(entries) > length}
    left_out = grown | {id(parameter) for parameter in model.parameters()} | _state_by_sample(model, task)
    marks = {}
    for name, value in second_call.find_changes().items():
        if any(_is_within(name, other) for other in before) and id(value) not in left_out and not _is_run(name):
            marks[name] = _digest_of(value)
    return marks


def _state_by_sample(model: nn.Module, task: Task) -> set[int]:
    """Return the ids of the tensors that `sample_state` declares.

    Their rows are merged over the ranks.
    """
    tensors = dict(model.named_buffers()) | dict(task.state_dict())
    ids = set()
    for name in task.sample_state:
        if name in tensors:
            ids.add(id(tensors[name]))
    return ids


def _metric_classes() -> list[type[Any]]:
    """Return the classes of torchmetrics, if it is loaded.

    The states of its metrics are merged over the ranks.
    """
    library = sys.modules.get("torchmetrics")
    classes = []
    for name in ("Metric", "MetricCollection"):
        if metric_class := getattr(library, name, None):
            classes.append(metric_class)
    return classes


def _lists_of(task: Task) -> list[tuple[list[Any], int]]:
    """Return the lists of a LightningModule with their lengths.

    What is appended to them is merged over the ranks.
    """
    if task.framework != "Lightning":
        return []
    values = vars(vars(task)["module"]).values()
    inner = [entry for value in values if isinstance(value, dict) for entry in value.values()]
    lists = []
    for entry in (*values, *inner):
        if type(entry) is list:
            lists.append((entry, len(entry)))
    return lists


def _is_within(name: str, other: str) -> bool:
    """Whether a path is another one, or leads through it."""
    return name == other or name.startswith((f"{other}.", f"{other}["))


def _is_run(name: str) -> bool:
    """Whether the run itself sets an attribute of this name.

    These are modes, and what Lightning's Trainer shows.
    """
    attribute = name.rpartition(".")[2]
    return attribute in ("training", "_current_fx_name", "_metric_attributes") or name.endswith("_metrics")


def differing_marks(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names whose digests differ between the ranks, sorted.

    Args:
        ranks: `marks_of` of each rank.
    """
    names = sorted({name for digests in ranks for name in digests})
    differing = []
    for name in names:
        if len({digests.get(name) for digests in ranks}) > 1:
            differing.append(name)
    return differing


def _digest_of(value: Any) -> str:
    """Return a digest of a value. Waits for the device."""
    digest = hashlib.sha256()
    # An object that cannot be read counts by its class alone.
    with contextlib.suppress(Exception):
        _add_to(digest, value, 0)
    return str(digest.hexdigest())


def _add_to(digest: Any, value: Any, depth: int) -> None:
    """Add the contents of numbers, tensors, arrays, generators, modules and containers of them."""
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, Tensor):
        # Waits for the device, in a trial only.
        host = value.detach().cpu()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(host_bytes(host))
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, torch.Generator):
        _add_to(digest, value.get_state(), depth)
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        digest.update(repr(value).encode())
    elif depth < _MAX_DEPTH:
        for item in _parts_of(value):
            _add_to(digest, item, depth + 1)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return list(value.state_dict().values())
    if isinstance(value, dict):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, random.Random):
        return [repr(value.getstate())]
    if isinstance(value, np.random.Generator):
        return [repr(value.bit_generator.state)]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return list(value)
    return []


_REMEDY = (
    "compute what belongs to a whole step in `step_loss`, move it in the hook `after_update`, name state with rows by "
    "sample in `sample_state`, and write a warm-up with `task.step`"
)


def describe_marks(names: Collection[str], micro_batches: int, world_size: int) -> str:
    """Describe what a loss leaves behind, for a run whose steps are cut."""
    if world_size > 1:
        where = ", on each rank with samples of its own"
    else:
        where = ""
    return f"`loss` changes {_enumerate(names)} and runs {micro_batches} times a step{where}: {_REMEDY}"


def unsaved_marks(names: Collection[str], model: nn.Module, task: Task) -> list[str]:
    """Return the names of what a loss leaves behind and no checkpoint has, sorted.

    What a task with a `state_dict` of its own has is its author's to store, under any names.

    Args:
        names: as `marks_of` finds them.
        model: the plain model.
    """
    saved = {f"model.{name}" for name in model.state_dict()}
    stores_itself = has_own(task, "state_dict")
    return sorted(name for name in {*names} - saved if not (stores_itself and name.startswith("task.")))


def describe_unsaved(names: Collection[str], task: Task, kept: Collection[Any], *, resumes: bool) -> str:
    """Describe what a loss leaves behind and no checkpoint has; "" for nothing.

    Args:
        names: as `unsaved_marks` returns them.
        kept: the caller's own objects, which checkpoints have.
        resumes: the run continues from a checkpoint.
    """
    roots, _ = _roots(inner_task(task))
    lost = []
    for name in names:
        if not _is_of(name, roots, {id(owner) for owner in kept}):
            lost.append(name)
    if not lost:
        return ""
    if resumes:
        fate = "starts again with its first value"
    else:
        fate = "is lost at a resume"
    return (
        f"`loss` changes {_enumerate(lost)}, which no checkpoint has, so it {fate}: return it from `state_dict()`, "
        "make it a buffer of the model, or give it to `run.keep`"
    )


def _is_of(name: str, roots: Mapping[str, Any], owners: set[int]) -> bool:
    """Whether the path of an attribute leads through one of these objects."""
    root, *path = name.split(".")
    here = roots.get(root)
    for attribute in path:
        here = getattr(here, attribute, None)
        if id(here) in owners and here is not None:
            return True
    return False


def refusal_of_marks(names: Collection[str], *, exact: bool) -> ConfigError:
    """Return the error for what a loss leaves behind.

    Args:
        names: of what it changes; without `exact` only of what differs between the ranks.
        exact: the run is exact.
    """
    if exact:
        return ConfigError(
            f"--exact does not work with {_enumerate(names)}, which `loss` changes: its values depend on which rank "
            f"computes what; {_REMEDY}; or drop --exact"
        )
    return ConfigError(
        f"`loss` changes {_enumerate(names)}, which then differs between the ranks, as each has samples of its own: "
        f"{_REMEDY}; or train on one device"
    )


def _enumerate(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_NAMED]
    more = len(names) - _MAX_NAMED
    rest = [f"{more} more"] if more > 0 else []
    return " and ".join(filter(None, [", ".join((*shown, *rest)[:-1]), (*shown, *rest)[-1]]))
