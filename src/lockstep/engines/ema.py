"""An exponential moving average (EMA) of the weights, for any engine: `--optim.ema`.

    engine = EMAEngine(engine, model, 0.999)
    with use_average(engine):              # does nothing for an engine without an average
        ...                             # the model has the averaged weights

After update number t (from 0) the average moves by 1 - d towards the weights, d = min(decay, (1 + t) / (10 + t)). It
starts at the initial weights; the small d of the first steps lets it forget them (as TensorFlow's
ExponentialMovingAverage with `num_updates`). A skipped step does not move the average. Where only the device knows
whether a step was skipped, the device decides: nothing here waits for it.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.read import AVERAGE
from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, Masters, StepResult
from lockstep.engines.memory import Footprint, add_counter, count_bytes
from lockstep.engines.modes import evaluation_weights
from lockstep.engines.wrappers import Remade
from lockstep.errors import CheckpointError
from lockstep.tensors import copy_into, local_of

__all__ = [
    "EMAEngine",
    "use_average",
    "without_average",
]


_COUNT = "averaging/updates"


@final
class EMAEngine(ForwardingEngine):
    """An engine whose applied steps also update an average of the trained parameters.

    The average is float32, or float64 where a parameter is, and placed like the parameters: whole or sharded.
    `state_dict()` has it as `average/NAME`, with `averaging/updates`, the number of updates (0-dim float64).

    Args:
        engine: with its parameters in place.
        model: the plain module; parameters without requires_grad get no average, except those in `rested`.
        decay: from 0 to below 1.
        masters: averaged instead of the parameters, if the engine has them; each rank averages its parts.
        rested: names of parameters that were trained earlier and keep their averages.
        optimizer: of the engine; if it has weights for evaluation, these are averaged.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        decay: float,
        masters: Masters | None = None,
        rested: Collection[str] = (),
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(engine)
        self._optimizer = optimizer
        self._decay = decay
        self._masters = masters
        names = set(rested)
        pairs = model.named_parameters()
        self._parameters: dict[str, Tensor] = {n: p for n, p in pairs if p.requires_grad or n in names}
        if masters:
            # Master weights are flat and have no names; their numbers serve.
            self._parameters = {str(number): shard for number, shard in enumerate(masters.parts())}
        self._averages = {name: _widen(parameter) for name, parameter in self._parameters.items()}
        if masters:
            add_counter(self.model, lambda: Footprint(0, 0, count_bytes(self._averages.values())))
        device = next((local_of(p).device for p in self._parameters.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.float64, device=device)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self.inner.step(factor, limit, momentum, evaluate)
        if result.applied is not False:
            with evaluation_weights(self._optimizer):
                self._learn(result.norm < limit if result.applied is None else torch.ones((), dtype=torch.bool))
        return result

    @torch.no_grad()
    def _learn(self, applied: Tensor) -> None:
        """Move the average towards the weights if `applied` (0-dim) is true, else not at all."""
        # Does not wait for the device, which alone may know whether the update was applied.
        applied = applied.to(self._updates.device, non_blocking=True)
        # Start with a short memory: the first averages would otherwise stay close to the random initial weights.
        decay = torch.clamp((1 + self._updates) / (10 + self._updates), max=self._decay)
        share = torch.where(applied, 1 - decay, torch.zeros_like(decay))
        self._updates += applied
        for parameter, average in self._pairs():
            average.lerp_(parameter.to(average.dtype), share.to(average.dtype))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, average) of this rank, viewed as real numbers."""
        for name, average in self._averages.items():
            yield _real(local_of(self._parameters[name])), _real(local_of(average))

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Give the model the averaged weights; restore its own afterwards, bit for bit. Collective.

        Take no step within the context. After an error, which other ranks may not share, an engine with masters
        restores only the masters: its saved state is right, but the run cannot continue.
        """
        with self._swap():
            if self._masters:
                # All ranks: the masters are split over them.
                self._masters.show()  # collective
            yield
        if self._masters:
            # All ranks, as above. An error skips this: other ranks may not share it.
            self._masters.show()  # collective

    @contextmanager
    def _swap(self) -> Iterator[None]:
        """Swap weights and averages, one tensor at a time; only narrower weights need a copy."""
        originals: list[Tensor | None] = []
        try:
            with torch.no_grad():
                for parameter, average in self._pairs():
                    originals.append(_swap_values(parameter, average))
            yield
        finally:
            with torch.no_grad():
                for (parameter, average), original in zip(self._pairs(), originals, strict=False):
                    if original is None:
                        _swap_values(parameter, average)
                    else:
                        parameter.copy_(original)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict() | self._average_state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state; one without an average restarts the average at the weights."""
        engine_state = without_average(state)
        self.inner.load_state_dict(engine_state)
        entries = {}
        for name, tensor in state.items():
            if name not in engine_state:
                entries[name] = tensor
        present_average = self._average_state()
        if entries and entries.keys() != present_average.keys():
            names = sorted(entries.keys() ^ present_average.keys())
            raise CheckpointError(
                f"the average does not match the model: {', '.join(names[:3])} on one side only; use the model that "
                "wrote it"
            )
        with torch.no_grad():
            if entries:
                self._load_average(entries, present_average)
            else:
                self._updates.zero_()
                for parameter, average in self._pairs():
                    average.copy_(parameter)

    def _load_average(self, entries: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        if self._masters:
            with self._swap():
                # All ranks load their parts. `take` writes into the masters, so the averages are swapped in first.
                self._masters.take(
                    {n.removeprefix(AVERAGE): t for n, t in entries.items() if n != _COUNT}
                )  # collective
            own = {_COUNT: self._updates}
        for name, tensor in own.items():
            if tensor is not entries[name]:
                copy_into(tensor, entries[name])

    def _average_state(self) -> dict[str, Tensor]:
        averages: Mapping[str, Tensor] = self._averages
        if self._masters:
            with self._swap():
                # All ranks: each name's parts are on several of them.
                averages = self._masters.copy_weights()  # collective
        return {AVERAGE + name: average for name, average in averages.items()} | {_COUNT: self._updates}


def use_average(engine: Engine, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
    """Give the engine's model the averaged weights within the context, if it has an average.

    Args:
        optimizer: of the engine: without an average the model gets its weights for evaluation, if it has any.
    """
    inner = engine.inner if isinstance(engine, Remade) else engine
    if isinstance(inner, EMAEngine):
        return inner.use_average()
    return evaluation_weights(optimizer)


def without_average(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state without the entries of an average."""
    tensors = {}
    for name, tensor in state.items():
        if not name.startswith(AVERAGE) and name != _COUNT:
            tensors[name] = tensor
    return tensors


def _widen(parameter: Tensor) -> Tensor:
    """Copy a parameter to the average's dtype, sharded like the parameter."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def _swap_values(parameter: Tensor, average: Tensor) -> Tensor | None:
    """Swap values of a parameter and its average; if dtypes differ, return the parameter's instead."""
    original = parameter.clone()
    parameter.copy_(average)
    if average.dtype != parameter.dtype:
        return original
    average.copy_(original)
    return None
