"""What happens between two updates: batches that are loaded, forwards, backwards, and events that have a name.

passes = Passes(journal, names)
passes.loaded(...); passes.entering(model, True); passes.left(args, kwargs, output); passes.backward(loss)
"""

import contextlib
import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.trace.journal import Journal, quiet
from lockstep.trace.names import Names, is_wrapper, piece
from lockstep.trace.pooled import put_digests
from lockstep.trace.samples import Batch, digested, lengths, outcomes, outputs, trained_output
from lockstep.trace.states import seed_digests, state_digests
from lockstep.trace.sums import summed

__all__ = ["Passes"]

_EVENTS = 2000  # of a step that are kept
_MODULES = 2  # steps in which every module's output is kept anyway


class Passes:
    """Fills the record with what comes before an update.

    Attributes:
        root: the module that the script called, while it runs.
        in_backward: within a backward, in which modules may be called again.
        begun: whether a forward or a backward was seen at all.
        initial: names of the tensors whose values before the first step are in the records.
    """

    def __init__(self, journal: Journal, names: Names) -> None:
        self.journal, self._names = journal, names
        self.root: nn.Module | None = None
        self.in_backward = self.begun = False
        self.initial: set[str] = set()
        self._first: dict[int, Any] = {}  # root -> which values of its parameters were taken for the initial ones
        self._unsharded = False  # FSDP 1 shows whole tensors within its forwards
        self._entered: dict[str, Any] = {}
        self._module_names: dict[int, str] = {}

    @quiet
    def loaded(self, loader: int, epoch: int, indices: Any, set_epoch: Any, data: Any) -> None:
        """A batch came from a loader."""
        if not self.journal.within():
            return
        record: dict[str, Any] = {"at": self.journal.tick(), "l": loader, "e": epoch}
        if set_epoch is not None:
            record["se"] = set_epoch
        if isinstance(indices, list):
            with contextlib.suppress(TypeError):  # keys of another kind
                record["i"] = [operator.index(index) for index in indices]
        self._put_batch(record, Batch(data))
        self.journal.record["loads"].append(record)

    def _put_batch(self, record: dict[str, Any], batch: Batch) -> None:
        record["n"] = batch.size
        if batch.names:
            record["cn"] = batch.names
        if not self.journal.pool.batch(record, batch):
            put_digests(self.journal.reading.put, record, digested([batch]))

    @quiet
    def entering(self, module: nn.Module, grad: bool) -> None:
        """A module with parameters is called that no other module calls; `grad`: whether gradients are wanted."""
        if self.in_backward or is_wrapper(module):
            self._unsharded |= type(module).__name__ == "FullyShardedDataParallel"
            return
        self.root, self.begun = module, True
        if self.journal.within():
            training = module.training and grad
            number = self._names.called(module)
            self._entered = {"at": self.journal.tick(), "m": number, "train": int(training)}
            if training:
                self._put_initial(number)
                self._entered["rng"] = [state_digests(self._names.generators(module, self.journal.thorough))]
            every = self.journal.options.modules or self.journal.step < _MODULES
            self._module_names = {id(part): name for name, part in module.named_modules()} if every else {}

    def _put_initial(self, number: int) -> None:
        """Puts what a root begins with into the record: as it is at its last forward before the first backward.

        What changes weights between that and the update (a perturbation that is not taken back) is then seen as such.
        """
        known = self._first.get(number, ())
        if known is None or self._unsharded:
            return
        values = [(id(p), p._version) for _, p in self._names.parameters(number) if not p.is_inference()]
        if known == values:
            return
        self._first[number] = values
        part = f"#{number}" if number else ""
        parameters = self._names.entries(self._names.parameters(number))
        buffers = self._names.entries(self._names.buffers(True, number))
        self.journal.sums({f"initial{part}": parameters, f"initial buffers{part}": buffers})
        self.initial.update(name for name, _, _ in (*parameters, *buffers))

    def inside(self, module: nn.Module, output: Any) -> None:
        """A part of the root has ended."""
        if self._module_names and self._entered:
            self._inside(module, output)

    @quiet
    def _inside(self, module: nn.Module, output: Any) -> None:
        record = self._entered
        if len(record.get("mn", ())) >= _EVENTS:
            return
        values = output if isinstance(output, tuple | list) else (output,)
        found = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if found is not None:
            local, at = piece(found)
            if found.dtype in (torch.bfloat16, torch.float16):
                record["ac"] = str(found.dtype).removeprefix("torch.")
            record.setdefault("mn", []).append(self._module_names.get(id(module), "?"))
            record.setdefault("mv", []).append(None)
            self.journal.reading.put(record["mv"], -1 + len(record["mv"]), summed([(local, at)]))

    @quiet
    def left(self, args: Any, kwargs: Any, output: Any) -> None:
        """The root has ended."""
        module, self.root = self.root, None
        record, self._entered = self._entered, {}
        if module is None or not record:
            return
        batch = Batch((*args, kwargs) if kwargs else args)
        self._put_batch(record, batch)
        rows = outputs(output, batch.size)
        if rows:
            record["w"] = sum(row.shape[1] for row in rows)
            if not self.journal.pool.output(record, rows):
                self.journal.reading.put(record, "out", outcomes(rows))
        if record["train"]:
            own = self._names.generators(module, self.journal.thorough)
            record["rng"].append(state_digests(own))
            if record["rng"][0] != record["rng"][1]:
                record["seeds"] = seed_digests(own)
            trained = trained_output(output, batch.size)
            if trained is not None:
                self._follow(record, trained)
        self.journal.record["fwd"].append(record)

    def _follow(self, record: dict[str, Any], output: Tensor) -> None:
        """Wait for the backward at an output, or at what it is a copy of in another dtype.

        Accelerate and the Trainer convert a model's outputs, and a loss inside the model is made of what they convert.
        """
        at_output = False

        def reached_output(gradient: Tensor | None) -> None:
            nonlocal at_output
            if gradient is not None:  # DDP hands on that there is none
                at_output = True
                self.reached(record, gradient)

        def reached_source(index: int, gradients: Any) -> None:
            if not at_output and gradients[index] is not None:
                self.reached(record, gradients[index])

        output.register_hook(reached_output)  # type: ignore[no-untyped-call]
        node, index = output.grad_fn, output.output_nr
        while node is not None and node.name() == "ToCopyBackward0":
            node, index = node.next_functions[0]
        if node is not None and node is not output.grad_fn:
            node.register_prehook(functools.partial(reached_source, index))

    @quiet
    def reached(self, record: dict[str, Any], gradient: Tensor) -> None:
        """A backward has come to the output of a forward: how far each sample's part of it moves the loss."""
        record["backwards"] = record.get("backwards", 0) + 1
        self.journal.reading.put(record, "og", lengths(gradient))

    @quiet
    def backward(self, roots: Any) -> None:
        """A backward begins."""
        self.root, self.begun = None, True
        self._first = dict.fromkeys(self._first)
        if self.journal.within():
            found = roots if isinstance(roots, tuple | list) else [roots]
            total = next((t for t in found if isinstance(t, Tensor) and t.numel() == 1), None)
            record = {"at": self.journal.tick(), "v": None}
            if total is not None:
                self.journal.reading.put(record, "v", total, "numbers")
            self.journal.record["loss"].append(record)

    @quiet
    def event(self, kind: str, *values: Any) -> None:
        """Something else that has a name and numbers; a tensor's value is read with the step."""
        events = self.journal.record["ev"]
        if self.journal.within() and len(events) < _EVENTS:
            event = [self.journal.tick(), kind, *values]
            for index, value in enumerate(event):
                if isinstance(value, Tensor):
                    self.journal.reading.put(event, index, value, "numbers")
            events.append(event)
