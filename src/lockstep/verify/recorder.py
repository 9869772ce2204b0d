"""Record the real loop from outside, by wrapping the batches, the seeder and the engine.

recorder = StepRecorder(engine, model, reference, device, before=None)
control = StepControl(rate, recorder.seeding(seed), clock)
for record in steps(recorder.engine, task, recorder.watch(step_loader), exchange, control):
    recorder.close(record)                # recorder.steps[-1] is this rank's step, as plain values

Torch's optimizer hooks, set by `recorder.hook()`, record the gradients and the rates.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.data.batches import MicroBatch, StepLoader
from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, StepResult
from lockstep.guards.desync import leaves
from lockstep.records import StepRecord
from lockstep.tensors import local_of
from lockstep.verify.operations import DtypeTracker, OutputLog, coarsest, digest
from lockstep.verify.reference import Named, ReferenceComparer, ReferenceWriter

__all__ = ["TENSORS", "StepRecorder"]

# Tensors of the state.
_KINDS = ("weights", "buffers", "optimizer")
# Tensors of a step.
TENSORS = ("initial", "gradient", *_KINDS)


class StepRecorder:
    """Recorder of one rank's steps.

    Args:
        engine: the engine to record.
        model: the engine's plain module.
        reference: writes or compares the tensors of each step, and returns their part of the record.
        device: its generators are recorded.
        before: digests of the state after the last step, from the recorder before a resume.
        tracks_dtypes: record the dtypes of the first forward.
        one_update: a step is one update with one gradient; else its updates are compared by their result.
        tracks_outputs: record what each module returns in the first micro-batch.

    Attributes:
        engine: for the loop.
        steps: a record for each step, in order.
        dtypes: those of the first forward.
        ended: digests of the state after the last step.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        reference: ReferenceWriter | ReferenceComparer,
        device: torch.device,
        before: dict[str, Any] | None = None,
        *,
        tracks_dtypes: bool = False,
        one_update: bool = True,
        tracks_outputs: bool = False,
    ) -> None:
        self.engine: Engine = _Probe(engine, self)
        self.steps: list[dict[str, Any]] = []
        self.dtypes = DtypeTracker()
        self.ended = before
        self._tracks_dtypes = tracks_dtypes
        self._one_update = one_update
        self._outputs = OutputLog(model) if tracks_outputs else None
        self._model = model
        self._reference = reference
        self._device = device
        self._buffers = {name for name, _ in model.named_buffers()}
        self._slot = -1
        self._backwards = 0
        self._checked = 0
        self._optimizer: Any = None
        self._first: Any = None
        self._groups: list[Any] = []
        self._armed = False

    def watch(self, step_loader: StepLoader) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Wrap the batches, and record the content of each step's micro-batches."""
        for step, micro in step_loader:
            slots = []
            for b in micro:
                slots.append({"micro": b.index, "weight": b.weight, "items": b.items, "data": dict(_digests(b.data))})
            self._slot = -1
            self._backwards = 0
            self.steps.append({"step": step, "slots": slots, "changed": [], "updates": 0, "rates": []})
            yield step, micro

    def seeding(self, seed_generators: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Wrap the seeder, and record the generators' states."""

        def seed_and_record(step: int, index: int) -> None:
            seed_generators(step, index)
            # A loss over the whole step belongs to no micro-batch, and an optimizer may evaluate again in its update.
            if index < 0 or self.updates:
                return
            # Each pass over the step begins with the first micro-batch.
            self._slot = (self._slot + 1) % len(self.steps[-1]["slots"])
            self._present["seeded"] = _generators(self._device)

        return seed_and_record

    def close(self, record: StepRecord) -> None:
        """Add the loop's record of the step. Waits for the device."""
        step = self.steps[-1]
        losses = iter(record.losses)
        step |= {"items": record.items, "factor": record.factor}
        for slot in step["slots"]:
            # A loss over the whole step is reported once. The host waits for the device here, once a step.
            slot["loss"] = float(next(losses, 0.0)) if slot["weight"] else None

    @contextlib.contextmanager
    def hook(self) -> Iterator[None]:
        """Context manager in which this process's optimizers are recorded."""
        handle = register_optimizer_step_pre_hook(self._before_update)
        try:
            yield
        finally:
            handle.remove()

    @property
    def _present(self) -> dict[str, Any]:
        slot: dict[str, Any] = self.steps[-1]["slots"][self._slot]
        return slot

    @property
    def updates(self) -> bool:
        """Whether the step's update is running; an optimizer may evaluate the loss in it."""
        return self._armed

    def begin(self) -> list[AbstractContextManager[Any]]:
        """Check at a step's first micro-batch whether the state changed since the last step.

        Returns:
            The contexts that record the micro-batch.
        """
        # Several passes may begin at the first micro-batch: check once a step.
        if self._slot or self._checked == len(self.steps):
            return []
        self._checked = len(self.steps)
        step = self.steps[-1]
        state = self._state()
        if self.ended is None:
            step["initial"] = self._reference.record("initial", step["step"], state["weights"] + state["buffers"])
        else:
            step["changed"] = [
                [state_type, name]
                for state_type in _KINDS
                for name, tensor in state[state_type]
                if self.ended[state_type].get(name) != digest(local_of(tensor))
            ]
        trackers: list[AbstractContextManager[Any]] = []
        if len(self.steps) > 1:
            return trackers
        if self._outputs and self.ended is None:
            step["outputs"] = self._outputs.outputs
            trackers.append(self._outputs)
        if self._tracks_dtypes:
            trackers.append(self.dtypes)
        return trackers

    def record_loss(self, loss: Tensor, weight: float) -> None:
        """Record the loss passed to `backward`, its weight, and the generators after the forward."""
        slots = self.steps[-1]["slots"]
        # In a pipeline other forwards come before it.
        slot = slots[self._backwards % len(slots)]
        self._backwards += 1
        slot["drawn"] = _generators(self._device)
        # The host waits for the device here, once for each micro-batch.
        slot["scaled"] = float(loss)
        slot["share"] = weight
        self.steps[-1]["loss_dtype"] = str(loss.dtype).removeprefix("torch.")

    def update(self, step: Callable[[], StepResult]) -> StepResult:
        """Run the engine's step, and record its result and the state."""
        self._armed = True
        self._optimizer = None
        try:
            result = step()
        finally:
            self._armed = False
        present = self.steps[-1]
        state = self._state()
        # The host waits for the device here, once a step.
        present["norm"] = float(result.norm)
        present["applied"] = result.applied
        for state_type in _KINDS:
            present[state_type] = self._reference.record(state_type, present["step"], state[state_type])
        present["fingerprint"] = self._reference.fingerprint(dict(state["weights"]) | dict(state["persistent"]))
        self.ended = {}
        for state_type in _KINDS:
            self.ended[state_type] = {name: digest(local_of(t)) for name, t in state[state_type]}
        # An engine may shard a parameter's state while the model has the full tensor, or has it only at times. So
        # digest what the model has now, to find changes between two updates.
        local = [(name, local_of(p)) for name, p in self._model.named_parameters()]
        self.ended["held"] = {name: digest(tensor) for name, tensor in local if tensor.numel()}
        return result

    def _state(self) -> dict[str, Named]:
        state: dict[str, Named] = {state_type: [] for state_type in (*_KINDS, "persistent")}
        # Collective for engines that gather their state, so every rank calls it.
        for name, tensor in self.engine.state_dict().items():
            owner, _, key = name.partition("/")
            if owner != "model":
                state["optimizer"].append((name, tensor))
            else:
                state["persistent" if key in self._buffers else "weights"].append((key, tensor))
        state["buffers"] = list(self._model.named_buffers())
        return state

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """Record the rates and, once a step, the gradients before an optimizer's update.

        Of nested optimizers the outermost has all parameters. Others update one group, or a part of one, per call: an
        update has ended when the first parameter is updated again.
        """
        if not self._armed or self._optimizer not in (None, optimizer):
            return
        step = self.steps[-1]
        begins = self._optimizer is None
        first_parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if begins:
            self._optimizer = optimizer
            self._first = first_parameter
            self._groups = []
        step["updates"] += first_parameter is self._first
        fresh = []
        for group in optimizer.param_groups:
            if not any(group is known for known in self._groups):
                fresh.append(group)
        self._groups += fresh
        step["rates"] += [float(group["lr"]) for group in fresh]
        if fresh and "betas" in fresh[0]:
            step["beta2"] = float(fresh[0]["betas"][1])
        if begins:
            self._before_first(step)

    def _before_first(self, step: dict[str, Any]) -> None:
        trainable = []
        for name, p in self._model.named_parameters():
            if p.requires_grad:
                trainable.append((name, p))
        gradients = []
        for n, p in trainable:
            if p.grad is not None and self._one_update:
                gradients.append((n, p.grad))
        # Some engines store the gradients elsewhere. Then the norm and the updated weights are compared.
        if gradients:
            step["gradient"] = self._reference.record("gradient", step["step"], gradients)
            step["gradient_dtype"] = coarsest(gradient.dtype for _, gradient in gradients)
        if self.ended:
            digests = self.ended["held"]
            local = [(name, local_of(p)) for name, p in trainable]
            for n, shard in local:
                if n in digests and shard.numel() and digests[n] != digest(shard):
                    step["changed"].append(["weights", n])


class _Probe(ForwardingEngine):
    """Engine for the loop that reports its calls to the recorder."""

    def __init__(self, inner: Engine, recorder: StepRecorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        context = self.inner.accumulate(last, counts)
        trackers = [] if self._recorder.updates else self._recorder.begin()
        if not trackers:
            return context
        both = contextlib.ExitStack()
        both.enter_context(context)
        for tracker in trackers:
            both.enter_context(tracker)
        # An ExitStack is a context manager, though not one of the annotated type.
        return both  # type: ignore[return-value]

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if not self._recorder.updates:
            self._recorder.record_loss(loss.detach() * weight, weight)
        self.inner.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        return self._recorder.update(lambda: self.inner.step(factor, limit, momentum, evaluate))


def _digests(data: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of every leaf of a nested batch."""
    return ((path, digest(leaf)) for path, leaf in leaves(data))


def _generators(device: torch.device) -> str:
    """Digest the states of all generators that a model may draw from."""
    # The whole state, since its position in the sequence shows which numbers were drawn.
    python = random.getstate()[1]
    numpy: Any = np.random.get_state()
    parts = [
        torch.default_generator.get_state().numpy().tobytes(),
        np.array(python, dtype=np.uint32).tobytes(),
        *(np.asarray(field).tobytes() for field in numpy[1:]),
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest(b"".join(parts))
