"""An exponential moving average of the weights, beside any engine: `--optim.ema`.

    engine = Averaged(engine, model, 0.999)
    with averaged(engine):              # itself, where it is no Averaged
        ...                             # the model has the averaged weights

After update number t (from 0) the average moves by 1 - d of the way to the weights, d = min(decay, (1 + t) / (10 + t)):
it begins at the first weights, and the small d of the first steps lets it forget them (as TensorFlow's
ExponentialMovingAverage with `num_updates`). A step that is not applied moves nothing. Where the device alone knows
whether it was, the device decides: nothing here waits for it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, final

import torch
from torch import Tensor, nn

from lockstep.checkpoint.read import AVERAGE
from lockstep.engines.base import NOTHING, Engine, Evaluate, StepResult
from lockstep.engines.buffers import Buffered
from lockstep.engines.memory import Footprint, add_counter, count_bytes
from lockstep.engines.wrappers import Remade
from lockstep.errors import CheckpointError
from lockstep.tensors import local_of

__all__ = [
    "EMAEngine",
    "Masters",
    "averaged",
    "without_average",
]


_COUNT = "averaging/updates"


class Masters(Protocol):
    """The weights that an engine's optimizer updates, where they are not the model's own parameters."""

    def parts(self) -> list[Tensor]:
        """Those of this rank, which the optimizer updates in place."""

    def named(self) -> dict[str, Tensor]:
        """Copies by the parameters' names, as in `state_dict()`, of what is trained. All ranks take part."""

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `named` gave, or plain tensors that every rank has whole. All ranks take part."""

    def show(self) -> None:
        """Gives the model's parameters these values. All ranks take part."""


@final
class EMAEngine:
    """Any engine, whose applied steps move an average of the trained parameters too.

    The average is float32, or float64 where a parameter is, and lies where the parameters lie: whole, or by shards. In
    `state_dict()` it is `average/NAME`, with `averaging/updates`, the number of updates (0-dim float64).

    Args:
        engine: its parameters are in place.
        model: the plain module; parameters that require no gradient now have no average, but for `rested`.
        decay: from 0 to below 1.
        masters: averaged in the parameters' place, where the engine has them; a rank keeps the average of its parts.
        rested: names of parameters that were trained before, whose averages go on.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        decay: float,
        masters: Masters | None = None,
        rested: Collection[str] = (),
    ) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._decay, self._masters = engine, decay, masters
        once = set(rested)
        named = model.named_parameters()
        self._parameters: dict[str, Tensor] = {n: p for n, p in named if p.requires_grad or n in once}
        if masters:
            self._parameters = {str(place): part for place, part in enumerate(masters.parts())}
        self._averages = {name: _wide(parameter) for name, parameter in self._parameters.items()}
        if masters:
            add_counter(self.model, lambda: Footprint(0, 0, count_bytes(self._averages.values())))
        where = next((local_of(p).device for p in self._parameters.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.float64, device=where)

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._engine.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._engine.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self._engine.step(factor, limit, momentum, evaluate)
        if result.applied is not False:
            self._learn(result.norm < limit if result.applied is None else torch.ones((), dtype=torch.bool))
        return result

    def undo_step(self) -> None:
        """As `Buffered.undo_step`."""
        if isinstance(self._engine, Buffered):
            self._engine.undo_step()

    def kinds(self) -> dict[str, str]:
        """As `Buffered.kinds`."""
        return self._engine.kinds() if isinstance(self._engine, Buffered) else {}

    @torch.no_grad()
    def _learn(self, applied: Tensor) -> None:
        """Moves the average towards the weights, where `applied` (0-dim) is true; else by nothing."""
        applied = applied.to(self._updates.device, non_blocking=True)
        decay = torch.clamp((1 + self._updates) / (10 + self._updates), max=self._decay)
        share = torch.where(applied, 1 - decay, torch.zeros_like(decay))
        self._updates += applied
        for parameter, average in self._pairs():
            average.lerp_(parameter.to(average.dtype), share.to(average.dtype))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, average) of this rank, as real numbers."""
        for name, average in self._averages.items():
            yield _real(local_of(self._parameters[name])), _real(local_of(average))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the averaged weights, and no step is made; then it has its own again, bit for bit.

        All ranks take part. After an error, which other ranks may not have, an engine with masters has its own in
        these alone: what it saves is right, and the run is at its end.
        """
        with self._swapped():
            if self._masters:
                self._masters.show()  # collective
            yield
        if self._masters:
            self._masters.show()  # collective

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """The two change places, a tensor at a time; only of weights in a smaller dtype a copy is kept."""
        kept: list[Tensor | None] = []
        try:
            with torch.no_grad():
                for parameter, average in self._pairs():
                    kept.append(_exchanged(parameter, average))
            yield
        finally:
            with torch.no_grad():
                for (parameter, average), own in zip(self._pairs(), kept, strict=False):
                    if own is None:
                        _exchanged(parameter, average)
                    else:
                        parameter.copy_(own)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict() | self._own()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes a state over. From one without an average it begins anew, at the weights."""
        rest = without_average(state)
        self._engine.load_state_dict(rest)
        given, own = {name: tensor for name, tensor in state.items() if name not in rest}, self._own()
        if given and given.keys() != own.keys():
            names = sorted(given.keys() ^ own.keys())
            raise CheckpointError(f"the average does not fit the model: {', '.join(names[:3])} on one side only")
        with torch.no_grad():
            if given:
                self._take(given, own)
            else:
                self._updates.zero_()
                for parameter, average in self._pairs():
                    average.copy_(parameter)

    def _take(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        if self._masters:
            with self._swapped():
                self._masters.take({n.removeprefix(AVERAGE): t for n, t in given.items() if n != _COUNT})  # collective
            own = {_COUNT: self._updates}
        for name, tensor in own.items():
            if tensor is not given[name]:
                tensor.copy_(given[name])

    def _own(self) -> dict[str, Tensor]:
        found: Mapping[str, Tensor] = self._averages
        if self._masters:
            with self._swapped():
                found = self._masters.named()  # collective
        return {AVERAGE + name: average for name, average in found.items()} | {_COUNT: self._updates}


def averaged(engine: Engine) -> AbstractContextManager[None]:
    """Within, the engine's model has the averaged weights, where it has an average."""
    inner = engine.engine if isinstance(engine, Remade) else engine
    return inner.averaged() if isinstance(inner, EMAEngine) else NOTHING


def without_average(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state as of an engine that has no average."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(AVERAGE) and name != _COUNT}


def _wide(parameter: Tensor) -> Tensor:
    """A copy in the average's dtype, split as the parameter is."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _exchanged(parameter: Tensor, average: Tensor) -> Tensor | None:
    """Gives the parameter the average's values, and the average the parameter's; returns these where it cannot."""
    own = parameter.clone()
    parameter.copy_(average)
    if average.dtype != parameter.dtype:
        return own
    average.copy_(own)
    return None
