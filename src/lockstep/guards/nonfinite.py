"""Read steps' numbers late, and find the source of a non-finite loss or gradient.

    found = origin(...)     # "micro-batch 3 (samples 17, 4) on rank 1: the first output that is not finite is ..."

The engine has already skipped the step, on the device. `origin` runs the micro-batches again, without gradients and
without the compiler, whose graphs hooks would break, to find the first module whose output is not finite; the model's
buffers are restored. Skipped steps are recorded in a file, so that a rollback skips them again.
"""

import contextlib
import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.engines.buffers import restore_tensors
from lockstep.errors import LockstepError
from lockstep.files import refusal_error, retry_io, write_whole
from lockstep.records import StepRecord, fill_numbers, flatten_numbers
from lockstep.transforms.batchnorm import normalised_alone
from lockstep.transforms.precision import eager

__all__ = [
    "DeferredReader",
    "ReadStep",
    "Rollback",
    "Skips",
    "floats",
    "origin",
    "read_skips",
]


# --- deferred reading


class ReadStep(NamedTuple):
    """A step whose numbers are on the host.

    Attributes:
        norm: of the gradient.
        losses: of this rank's micro-batches.
        numbers: the task's own, by name: (sum, count) of each micro-batch.
        gradients: norms by block, if the step measured them.
        is_spike: the norm is far above that of the steps before.
    """

    record: StepRecord
    micro: list[Any]
    norm: float
    losses: list[float]
    numbers: Mapping[str, Sequence[tuple[float, float]]] = {}
    gradients: Mapping[str, float] = {}
    is_spike: bool = False


class _Copy(NamedTuple):
    """Numbers on their way to the host.

    Attributes:
        host: numbers that were on the host already, None for each of the others.
    """

    record: StepRecord
    micro: list[Any]
    values: Tensor
    host: list[float | None]
    event: Any


class DeferredReader:
    """Reader of norms and losses: immediate on a CPU, one step late on a device.

    On a device a step costs a launch, a copy into pinned memory and an event, and its host is at most a step ahead.
    Guards and records read a step's numbers only through this.

    Attributes:
        lag: steps of delay; None: 1 on a CUDA device, otherwise 0. Callers must work with any value.
    """

    lag: ClassVar[int | None] = None

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lag = int(self._cuda) if self.lag is None else self.lag
        self._in_flight: deque[_Copy] = deque()
        # Completed events, for reuse.
        self._free: list[Any] = []

    @property
    def late(self) -> bool:
        """Whether a step is read after it."""
        return self._lag > 0

    def add(self, record: StepRecord, micro: list[Any]) -> list[ReadStep]:
        """Add a step, and return those that can be read now.

        Their number depends only on the number of steps.
        """
        all_values = _values(record)
        if not self._lag and not self._cuda:
            return [_read(record, micro, [float(value) for value in all_values])]
        host, tensors = _split_by_device(all_values, "cuda" if self._cuda else "cpu")
        if tensors:
            values = torch.stack([tensor.reshape(()) for tensor in tensors])
        else:
            values = torch.empty(0)
        event = None
        if self._cuda:
            # A non-blocking copy from a device goes into pinned memory.
            values = values.to("cpu", non_blocking=True)
            # torch gives the constructor no types.
            event = self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._in_flight.append(_Copy(record, micro, values, host, event))
        if len(self._in_flight) > self._lag:
            return [self._receive()]
        return []

    def rest(self) -> Iterator[ReadStep]:
        """Yield all steps that were not returned yet."""
        while self._in_flight:
            yield self._receive()

    def _receive(self) -> ReadStep:
        record, micro, values, host, event = self._in_flight.popleft()
        if event:
            # Waits for the device, one step behind. It is busy with the next step, so nothing is lost.
            event.synchronize()
            self._free.append(event)
        # The values are on the host by now.
        return _read(record, micro, _merge_values(host, values.tolist()))


def floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values on the host. Waits for the device, once."""
    device_type = ""
    for v in values:
        if isinstance(v, Tensor) and v.device.type != "cpu":
            device_type = v.device.type
            break
    host, tensors = _split_by_device(values, device_type)
    # Waits for the device, once for all values.
    return _merge_values(host, torch.stack([t.reshape(()) for t in tensors]).tolist() if tensors else [])


def _values(record: StepRecord) -> list[Tensor | float]:
    """Return everything to read of a step, in the order of `_read`."""
    norm: list[Tensor | float] = [] if record.norm is None else [record.norm]
    values = [*norm, *record.losses]
    if record.gradients or record.numbers:
        values += [*record.gradients.values(), *flatten_numbers(record.numbers)]
    return values


def _read(record: StepRecord, micro: list[Any], values: list[float]) -> ReadStep:
    norm = math.nan if record.norm is None else values[0]
    start = record.norm is not None
    losses = values[start : start + len(record.losses)]
    if not record.gradients and not record.numbers:
        return ReadStep(record, micro, norm, losses, {}, {})
    remaining = iter(values[start + len(losses) :])
    gradients = {name: next(remaining) for name in record.gradients}
    return ReadStep(record, micro, norm, losses, fill_numbers(record.numbers, remaining), gradients)


def _split_by_device(values: Sequence[Tensor | float], device: str) -> tuple[list[float | None], list[Tensor]]:
    """Split values into those on the host, None for others, and those on a device."""
    on_device = []
    for value in values:
        on_device.append(isinstance(value, Tensor) and value.device.type == device)
    host = []
    for value, away in zip(values, on_device, strict=True):
        host.append(None if away else float(value))
    return host, [value for value, away in zip(values, on_device, strict=True) if away and isinstance(value, Tensor)]


def _merge_values(host: list[float | None], read: list[float]) -> list[float]:
    device_values = iter(read)
    values = []
    for value in host:
        values.append(next(device_values) if value is None else value)
    return values


# --- skipped steps


class Rollback(LockstepError):
    """Request to resume from the newest checkpoint, and to skip the named step."""


class Skips:
    """The skipped steps of a run.

    Rank 0 reads and writes the file, and shares its content.

    Args:
        path: of the file; its content is used if it was written for the same plan.
        limit: maximum number of skipped steps.
        world: its ranks make one together, and call `add` together.
        plan: gives the steps' numbers their meaning: under another plan they are other steps.
        steps: as `read_skips` returned them on rank 0; None: read and share them here.

    Attributes:
        steps: 0-based, in the order in which they were found.
    """

    def __init__(
        self, path: Path, limit: int, world: World, plan: dict[str, Any], steps: list[int] | None = None
    ) -> None:
        self._path = path
        self._limit = limit
        self._world = world
        self._plan = _digest_of(plan)
        if steps is None:
            # All ranks, at the start: every rank must skip the same steps.
            steps = world.gather(read_skips(path, plan) if world.is_main else [])[0]  # collective
        self.steps = steps

    def add(self, step: int, why: str) -> None:
        """Skip `step` from now on. Collective.

        Raises:
            LockstepError: the limit is reached, or the file cannot be written.
        """
        if step in self.steps:
            return
        if len(self.steps) >= self._limit:
            raise LockstepError(
                f"{why}; {self._limit} steps were skipped before (--guards.limit): lower --lr or clean the data"
            )
        self.steps.append(step)
        error = self._write() if self._world.is_main else None
        # All ranks: an error of rank 0's disk must end all of them.
        self._world.check(error)  # collective

    def _write(self) -> LockstepError | None:
        try:
            # Atomic, since a damaged file would let a rollback run the step again.
            write_whole(
                self._path, json.dumps({"skipped": [step + 1 for step in self.steps], "plan": self._plan}) + "\n"
            )
        except OSError as error:
            return refusal_error(error)
        return None


def read_skips(path: Path, plan: dict[str, Any]) -> list[int]:
    """Return the skipped steps, 0-based, that the file names for this plan."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        data = json.loads(retry_io(lambda: path.read_text(encoding="utf-8")))
        if data["plan"] == _digest_of(plan):
            # Files of earlier versions have 0-based steps under "steps".
            if "skipped" not in data:
                return [int(step) for step in data["steps"]]
            return [int(step) - 1 for step in data["skipped"]]
    return []


def _digest_of(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


# --- origin of a value that is not finite


def origin(
    step: ReadStep,
    plain: nn.Module,
    loss_of: Callable[[Any], Tensor],
    seed: Callable[[int, int], None],
    samples: Callable[[int, int], list[int]],
    world: World,
    *,
    whole: bool = False,
) -> str:
    """Describe the first micro-batch with a value that is not finite. Collective.

    Args:
        plain: the model inside the engine's wrapper; its modules are watched.
        loss_of: the loss of a micro-batch through the engine's model, or something that is finite if its outputs are.
        seed: as in the loop, so that dropout is the same.
        samples: (step, micro-batch) -> its sample indices.
        whole: the loss covers the whole step, so that no micro-batch has its own.
    """
    own_finding: list[Any] | None = None
    losses = iter(step.losses)
    # Normalise alone: in statistics over all ranks one non-finite micro-batch would spoil those of the others.
    with restore_tensors(plain.buffers()), normalised_alone():
        # Every rank runs all of its micro-batches, since their forwards may have collectives.
        for batch in step.micro:
            seed(step.record.step, batch.index)
            module, finite = _first_nonfinite(plain, loss_of, batch)
            before = whole or not batch.weight or math.isfinite(next(losses))
            if own_finding is None and batch.weight and (module or not finite or not before):
                own_finding = [batch.index, module, finite, samples(step.record.step, batch.index)]
    # The forwards had no backward, after which fsdp would reshard by itself.
    at_rest(plain)
    # All ranks, once a step is found to be non-finite.
    findings = [[*each, rank] for rank, each in enumerate(world.gather(own_finding)) if each]  # collective
    if not findings and whole:
        return "the outputs of all micro-batches are finite: the loss over the whole step, or a backward, is not"
    if not findings:
        return "the losses are finite: the backward is not"
    # Losses may share statistics, so a loss that is non-finite even when it is recomputed comes first.
    index, module, finite, chosen, rank = min(findings, key=lambda each: (not each[1] and each[2], each))
    sample_list = ", ".join(str(sample) for sample in chosen[:16]) + (", ..." if len(chosen) > 16 else "")
    cause = f"every module's output is finite, {'what `outputs` returned' if whole else 'its loss'} is not"
    if module:
        cause = f"the first output that is not finite is of module '{module}'"
    elif finite:
        cause = "its loss was not finite, but is when recomputed: suspect the hardware"
    return f"micro-batch {index} (samples {sample_list}) on {rank_label(rank)}: {cause}"


def _first_nonfinite(plain: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any) -> tuple[str, bool]:
    """Return the first module whose output is not finite, and whether the loss is finite."""
    modules: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not modules and not _is_finite(output):
                modules.append(name)

        return look

    handles = [module.register_forward_hook(hook(name or type(module).__name__)) for name, module in _modules(plain)]
    try:
        with torch.no_grad(), eager():
            # Waits for the device. The run stops or skips a step anyway.
            loss = float(loss_of(batch))
    finally:
        for handle in handles:
            handle.remove()
    return (modules[0] if modules else ""), math.isfinite(loss)


def _modules(plain: nn.Module) -> list[tuple[str, nn.Module]]:
    modules = []
    for name, module in plain.named_modules():
        if not name.endswith("_checkpoint_wrapped_module"):
            modules.append((name, module))
    return modules


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_is_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_finite(item) for item in value)
    return True
