"""What one process writes of its training: a record for each optimizer step.

recorder = Recorder(Options.read())
recorder.loaded(...); recorder.left(args, kwargs, output); ...              # what happens between two steps
recorder.before_update(optimizer); recorder.after_update(optimizer)         # ends the record, reads it, writes it

hooks.py calls these. Whatever goes wrong in here is said once and ends the recording, never the script.
"""

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from lockstep.trace.held import Reading
from lockstep.trace.names import WHOLE, Names, generators, is_wrapper, piece
from lockstep.trace.samples import digested, outcomes
from lockstep.trace.states import state_digests
from lockstep.trace.sums import Place, summed
from lockstep.trace.writing import Writer, header, place

__all__ = ["Options", "Recorder"]

_SMALL = 4 << 20  # elements up to which the optimizer's state is digested in every step
_SELDOM = 10  # steps between two digests of a larger one
_FIRST = 3  # steps of a process in which everything is digested
_EVENTS = 2000  # of a step that are kept

P = ParamSpec("P")
Entry = tuple[str, Tensor, Place]  # name, local tensor, its place in the whole


@dataclass(frozen=True)
class Options:
    """What is recorded: folder, first step and the one behind the last, bytes of all processes, all modules' output."""

    folder: Path
    first: int = 0
    last: int = 1 << 60
    most: int = 1 << 30
    modules: bool = False

    @classmethod
    def read(cls) -> "Options":
        """As `lockstep trace` left it in the environment."""
        first, _, last = os.environ.get("LOCKSTEP_TRACE_STEPS", "").partition(":")
        most = int(float(os.environ.get("LOCKSTEP_TRACE_MAX_MB", "1024")) * 2**20)
        every = os.environ.get("LOCKSTEP_TRACE_MODULES", "") == "1"
        return cls(Path(os.environ["LOCKSTEP_TRACE"]), int(first or 0), int(last or 1 << 60), most, every)


def quiet(method: Callable[P, None]) -> Callable[P, None]:
    """A method of Recorder that does nothing where nothing is recorded, and whose errors are not the script's."""

    @functools.wraps(method)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        recorder: Any = args[0]
        if not recorder.on or recorder.busy:
            return
        recorder.busy = True
        try:
            with torch.no_grad():
                method(*args, **kwargs)
        except Exception as error:
            recorder.fail(error)
        finally:
            recorder.busy = False

    return tried


class Recorder:
    """The recording of this process.

    Attributes:
        on: whether anything is recorded.
        busy: within the recorder itself, whose own operations are not the script's.
        root: the module that the script called, while it runs.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.on, self.busy = True, False
        self.root: nn.Module | None = None
        self.in_backward = self.in_engine = False
        self._names = Names()
        self._reading = Reading()
        self._record: dict[str, Any] = _fresh()
        self._writer: Writer | None = None
        self._tables: dict[tuple[Any, ...], int] = {}
        self._optimizers: list[weakref.ref[Any]] = []
        self._step = 0
        self._begun = self._aside = False  # whether a forward or a backward was seen; an update that is none
        self._entered: dict[str, Any] = {}
        self._module_names: dict[int, str] = {}

    # What happens between two steps.

    @quiet
    def loaded(self, loader: int, epoch: int, indices: Any, set_epoch: Any, data: Any) -> None:
        """A batch came from a loader."""
        if not self._within():
            return
        batch = digested(data)
        record: dict[str, Any] = {"at": self._tick(), "l": loader, "e": epoch, "n": batch.size}
        if set_epoch is not None:
            record["se"] = set_epoch
        if isinstance(indices, list) and all(hasattr(index, "__index__") for index in indices):
            record["i"] = [int(index) for index in indices]
        self._put_batch(record, batch)
        self._record["loads"].append(record)

    def _put_batch(self, record: dict[str, Any], batch: Any) -> None:
        if batch.samples is not None:
            record["s"] = self._reading.hold(batch.samples)
        if batch.leaves:
            leaves = [leaf.reshape(1) for leaf in batch.leaves]
            record["leaf"] = self._reading.hold(torch.cat([leaf.to(leaves[0].device) for leaf in leaves]))
        if batch.counts:
            record["c"] = self._reading.hold(torch.cat(batch.counts), "numbers")
            record["cn"] = batch.names

    @quiet
    def entering(self, module: nn.Module, grad: bool) -> None:
        """A module is called that no other module calls; `grad`: whether gradients are wanted."""
        if self.in_backward or is_wrapper(module) or next(module.parameters(), None) is None:
            return
        self.root, self._begun = module, True
        if self._within():
            training = module.training and grad
            number = self._names.called(module)
            self._entered = {"at": self._tick(), "m": number, "train": int(training)}
            if training:
                self._entered["rng"] = [state_digests(generators(module))]
            if self._has_modules():
                self._module_names = {id(part): name for name, part in module.named_modules()}

    def _has_modules(self) -> bool:
        return self.options.modules or self._step < 2

    @quiet
    def inside(self, module: nn.Module, output: Any) -> None:
        """A part of the root has ended."""
        if not self._entered or not self._has_modules() or len(self._entered.get("mn", ())) >= _EVENTS:
            return
        values = output if isinstance(output, tuple | list) else (output,)
        found = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if found is not None:
            local, at = piece(found)
            if found.dtype in (torch.bfloat16, torch.float16):
                self._entered["ac"] = str(found.dtype).removeprefix("torch.")
            self._entered.setdefault("mn", []).append(self._module_names.get(id(module), "?"))
            self._entered.setdefault("mv", []).append(self._reading.hold(summed([(local, at)])))

    @quiet
    def left(self, args: Any, kwargs: Any, output: Any) -> None:
        """The root has ended."""
        module, self.root = self.root, None
        record, self._entered = self._entered, {}
        if module is None or not record:
            return
        batch = digested((*args, kwargs) if kwargs else args)
        record["n"] = batch.size
        self._put_batch(record, batch)
        found = outcomes(output, batch.size)
        if found is not None:
            record["out"], record["w"] = self._reading.hold(found[0]), found[1]
        if record["train"]:
            record["rng"].append(state_digests(generators(module)))
        self._record["fwd"].append(record)

    @quiet
    def backward(self, roots: Any) -> None:
        """A backward begins."""
        self.root, self._begun = None, True
        if self._within():
            found = roots if isinstance(roots, tuple | list) else [roots]
            total = next((t for t in found if isinstance(t, Tensor) and t.numel() == 1), None)
            value = None if total is None else self._reading.hold(total.double(), "numbers")
            self._record["loss"].append({"at": self._tick(), "v": value})

    @quiet
    def event(self, kind: str, *values: Any) -> None:
        """Something else that has a name and numbers; a tensor's value is read with the step."""
        if self._within() and len(self._record["ev"]) < _EVENTS:
            kept = [self._reading.hold(v.double(), "numbers") if isinstance(v, Tensor) else v for v in values]
            self._record["ev"].append([self._tick(), kind, *kept])

    # The step.

    @quiet
    def before_update(self, optimizer: Any) -> None:
        """The optimizer has its gradients."""
        self.root = None
        # torch.distributed.checkpoint makes the state that it loads into by a step at rate 0, which trains nothing.
        self._aside = not self._begun and all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if self._aside or not self._within():
            return
        if not any(known() is optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        record = self._record
        record["opt"] = next(n for n, known in enumerate(self._optimizers) if known() is optimizer)
        record["kind"] = type(optimizer).__name__
        record["at"] = self._tick()
        trained = self._trained(optimizer)
        if self._writer is None:
            weights = self._pieces(self._names.parameters()) or [entry for entry, _ in trained]
            record["initial"] = self._sums("weights", weights)
            record["initial buffers"] = self._sums("buffers", self._pieces(self._names.buffers()))
            record["initial state"] = self._sums("state", self._state(optimizer, trained))
        elif self._small(trained) or self._step % _SELDOM == 0:
            record["begin"] = self._sums("weights", [entry for entry, _ in trained])
        gradients = []
        for (name, _, at), parameter in trained:
            if parameter.grad is not None:
                local, place = piece(parameter.grad)
                gradients.append((name, local, at if place == WHOLE and local.numel() else place))
        record["grad"] = self._sums("grad", gradients)
        record["groups"] = [self._numbers(group) for group in optimizer.param_groups]

    def _trained(self, optimizer: Any) -> list[tuple[Entry, Tensor]]:
        found = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self._names.of(parameter, f"group{number}.{index}")
                found.append((self._piece(name, parameter), parameter))
        return found

    def _piece(self, name: str, tensor: Tensor) -> Entry:
        local, place = piece(tensor)
        flat = self._names.start(tensor)
        return name, local, place if flat is None else Place(flat)

    def _pieces(self, named: Any) -> list[Entry]:
        return [self._piece(name, tensor) for name, tensor in named if not tensor.is_meta]

    def _small(self, trained: list[tuple[Entry, Tensor]]) -> bool:
        return self._step < _FIRST or sum(local.numel() for (_, local, _), _ in trained) <= _SMALL

    def _state(self, optimizer: Any, trained: list[tuple[Entry, Tensor]]) -> list[Entry]:
        found = []
        for (name, local, at), parameter in trained:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    mine, place = piece(value)
                    same = mine.numel() == local.numel() and mine.numel() > 1
                    found.append((f"{name}/{key}", mine, at if same else place))
        return found

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {"n": len(group["params"])}
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                kept[key] = self._reading.hold(value.double(), "numbers")
            elif isinstance(value, bool | int | float) or value is None:
                kept[key] = value
            elif isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
                kept[key] = list(value)
        return kept

    @quiet
    def after_update(self, optimizer: Any) -> None:
        """The optimizer has updated its weights: the record is read and written."""
        if self._aside:
            self._record, self._aside = _fresh(), False
            return
        if self._within() and "opt" in self._record:
            trained = self._trained(optimizer)
            self._record["weights"] = self._sums("weights", [entry for entry, _ in trained])
            self._record["buffers"] = self._sums("buffers", self._pieces(self._names.buffers()))
            if self._small(trained) or self._step % _SELDOM == 0:
                self._record["state"] = self._sums("state", self._state(optimizer, trained))
        self.ended()

    @quiet
    def before_engine(self, engine: Any) -> None:
        """DeepSpeed's engine is about to step: of the gradients it says the norm alone, afterwards."""
        self.root = None
        if not self._within():
            return
        self._names.called(engine.module)
        record = self._record
        record["opt"], record["kind"], record["at"] = 0, "DeepSpeedEngine", self._tick()
        weights = self._sums("weights", self._pieces(self._names.parameters()))
        if self._writer is None or self._step == self.options.first:
            record["initial"] = weights
            record["initial buffers"] = self._sums("buffers", self._pieces(self._names.buffers()))
        else:
            record["begin"] = weights
        record["grad"], record["groups"] = [], [self._numbers(group) for group in engine.optimizer.param_groups]

    @quiet
    def after_engine(self, engine: Any) -> None:
        """It has stepped."""
        if self._within() and "opt" in self._record:
            norm = engine.get_global_grad_norm()
            self._record["norm"] = float(norm) if norm is not None else None  # waits for the device, as the engine does
            self._record["weights"] = self._sums("weights", self._pieces(self._names.parameters()))
            self._record["buffers"] = self._sums("buffers", self._pieces(self._names.buffers()))
        self.ended()

    def ended(self) -> None:
        """Writes the step's record, and begins the next."""
        if self._within():
            self._write({"t": "step", "k": self._step, **self._record})
        self._step += 1
        self._record = _fresh()

    def close(self) -> None:
        """The process ends: what came after the last step is written."""
        if self.on and (self._writer is not None or self._record["fwd"]):
            self._within_end()

    @quiet
    def _within_end(self) -> None:
        self._write({"t": "end", "k": self._step, **self._record})

    def fail(self, error: Exception) -> None:
        """Ends the recording, in one line."""
        self.on = False
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed its stderr
            print(f"lockstep trace: recording ended at step {self._step}: {said}", file=sys.stderr, flush=True)
        if os.environ.get("LOCKSTEP_TRACE_DEBUG"):
            raise error
        self._record, self._reading = _fresh(), Reading()  # what was held is let go
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a disk may be full
                self._writer.put({"t": "failed", "k": self._step, "error": said})

    # What is written.

    def _within(self) -> bool:
        return self.options.first <= self._step < self.options.last

    def _tick(self) -> int:
        self._record["ticks"] += 1
        return int(self._record["ticks"])

    def _sums(self, kind: str, entries: list[Entry]) -> list[Any]:
        """[number of the table, sums]: the names go into a table that is written once."""
        if not entries:
            return []
        key = (kind, *((name, at, local.numel(), local.dtype) for name, local, at in entries))
        number = self._tables.get(key)
        if number is None:
            number = self._tables[key] = len(self._tables)
            self._write_table(number, kind, entries)
        found = []
        for device in dict.fromkeys(local.device for _, local, _ in entries):
            here = [index for index, (_, local, _) in enumerate(entries) if local.device == device]
            sums = summed([(entries[index][1], entries[index][2]) for index in here])
            found.append(sums if len(here) == len(entries) else (here, sums))
        if len(found) == 1 and isinstance(found[0], Tensor):
            return [number, self._reading.hold(found[0])]
        whole = torch.zeros(len(entries), found[0][1].shape[1], dtype=torch.int64)
        for here, sums in found:
            whole[torch.tensor(here)] = sums.cpu()  # waits for the device: tensors lie on several
        return [number, self._reading.hold(whole)]

    def _write_table(self, number: int, kind: str, entries: list[Entry]) -> None:
        self._put(
            {
                "t": "table",
                "id": number,
                "kind": kind,
                "names": [name for name, _, _ in entries],
                "starts": [place.start for _, _, place in entries],
                "sizes": [local.numel() for _, local, _ in entries],
                "types": [str(local.dtype).removeprefix("torch.") for _, local, _ in entries],
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        record["rank"] = place()[0]
        self._put(self._reading.line(record))

    def _put(self, line: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = Writer(
                self.options.folder, self.options.most // max(1, place()[1]), header() | {"first": self._step}
            )
        if not self._writer.put(line):
            self.on = False


def _fresh() -> dict[str, Any]:
    return {"ticks": 0, "loads": [], "fwd": [], "loss": [], "ev": []}
