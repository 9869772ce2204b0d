"""The updates: gradients as the optimizer gets them, its groups, weights, buffers and its state afterwards.

updates = Updates(journal, names, passes)
updates.before(optimizer); updates.after(optimizer)         # ends the step
"""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.trace.journal import Journal, quiet
from lockstep.trace.names import WHOLE, Entry, Names, piece
from lockstep.trace.passes import Passes

__all__ = ["Updates"]

_SMALL = 4 << 20  # elements up to which weights before the update and the optimizer's state are digested in every step
_NUMBERS, _SEQUENCES = (bool, int, float), (tuple, list)


@dataclass
class _Trained:
    """An optimizer's parameters.

    Attributes:
        key: of what they were found from.
        entries: and the parameters themselves, in the same order.
        others: parameters of the model that are none of it.
        plain: each parameter is a tensor of its own, and so are its gradient and its state: no shard.
    """

    key: list[int]
    entries: list[Entry]
    parameters: list[Tensor]
    others: list[tuple[str, nn.Parameter]]
    plain: bool


class Updates:
    """Fills the record with an update, and ends it.

    Attributes:
        in_engine: within the step of DeepSpeed's engine, whose own optimizers' steps are a part of it.
    """

    def __init__(self, journal: Journal, names: Names, passes: Passes) -> None:
        self.journal, self._names, self._passes = journal, names, passes
        self.in_engine = False
        self._optimizers: list[weakref.ref[Any]] = []
        self._known: weakref.WeakKeyDictionary[Any, _Trained] = weakref.WeakKeyDictionary()
        self._aside = False  # an update that trains nothing

    @quiet
    def before(self, optimizer: Any) -> None:
        """The optimizer has its gradients."""
        journal = self.journal
        self._passes.root = None
        # torch.distributed.checkpoint makes the state that it loads into by a step at rate 0, which trains nothing.
        begun = self._passes.begun
        self._aside = not begun and all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if self._aside or not journal.within():
            return
        if not any(known() is optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        number = next(n for n, known in enumerate(self._optimizers) if known() is optimizer)
        journal.record.update(opt=number, kind=type(optimizer).__name__, at=journal.tick())
        trained = self._trained(optimizer)
        kinds: dict[str, list[Entry]] = {}
        if journal.fresh:
            kinds |= self._initial(trained.entries)
            kinds["initial state"] = self._state(optimizer, trained)
        if self._whole(trained):
            if journal.as_left(trained.entries):
                journal.record["begin"] = "weights"
            else:
                kinds["begin"] = trained.entries
        kinds["grad"] = gradients = []
        for (name, _, at), parameter in zip(trained.entries, trained.parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                local, place = (gradient, WHOLE) if trained.plain else piece(gradient)
                gradients.append((name, local, at if place == WHOLE and local.numel() else place))
        journal.sums(kinds)
        journal.names("frozen", self._frozen(trained))
        journal.record["groups"] = [self._numbers(group) for group in optimizer.param_groups]

    def _initial(self, trained: list[Entry]) -> dict[str, list[Entry]]:
        """What the first step begins with of tensors that no forward showed."""
        known = set(self._passes.initial)
        rest: dict[str, list[Entry]] = {"initial#rest": [], "initial buffers#rest": []}
        for kind, entries in (
            ("initial#rest", [*self._names.entries(self._names.parameters()), *trained]),
            ("initial buffers#rest", self._names.entries(self._names.buffers(True))),
        ):
            for entry in entries:
                if entry[0] not in known:
                    known.add(entry[0])
                    rest[kind].append(entry)
        return rest

    def _frozen(self, trained: _Trained) -> list[Entry]:
        """Parameters that want no gradient."""
        own = zip(trained.entries, trained.parameters, strict=True)
        found = [entry for entry, parameter in own if not parameter.requires_grad]
        others = [(name, parameter) for name, parameter in trained.others if not parameter.requires_grad]
        return [*found, *self._names.entries(others)]

    def _trained(self, optimizer: Any) -> _Trained:
        """What it trains; looked for anew where it is another or is in shards, and in thorough steps."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        key = [self._names.count, *map(id, parameters)]
        known = self._known.get(optimizer)
        if known is not None and known.key == key and not self.journal.thorough:
            return known
        entries = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self._names.of(parameter) or f"group{number}.{index}"
                entries.append(self._names.entry(name, parameter))
        plain = all(local is parameter for (_, local, _), parameter in zip(entries, parameters, strict=True))
        own = set(map(id, parameters))
        others = [(name, parameter) for name, parameter in self._names.parameters() if id(parameter) not in own]
        found = _Trained(key, entries, parameters, others, plain)
        self._known.pop(optimizer, None)
        if plain:  # shards would be held in memory by it
            self._known[optimizer] = found
        return found

    def _whole(self, trained: _Trained) -> bool:
        return self.journal.thorough or sum(local.numel() for _, local, _ in trained.entries) <= _SMALL

    def _state(self, optimizer: Any, trained: _Trained) -> list[Entry]:
        found = []
        for (name, local, at), parameter in zip(trained.entries, trained.parameters, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    mine, place = (value, WHOLE) if trained.plain else piece(value)
                    same = mine.numel() == local.numel() and mine.numel() > 1
                    found.append((f"{name}/{key}", mine, at if same else place))
        return found

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {"n": len(group["params"])}
        for key, value in group.items():
            if isinstance(value, _NUMBERS) or value is None:
                kept[key] = value
            elif isinstance(value, Tensor) and value.numel() == 1:
                self.journal.reading.put(kept, key, value, "numbers")
            elif isinstance(value, _SEQUENCES) and all(isinstance(each, _NUMBERS) for each in value):
                kept[key] = list(value)
        return kept

    @quiet
    def after(self, optimizer: Any) -> None:
        """The optimizer has updated its weights: the record is read and written."""
        journal = self.journal
        if self._aside:
            self._aside = False
            journal.forget()
            return
        if journal.within() and "opt" in journal.record:
            trained = self._trained(optimizer)
            kinds = {
                "weights": trained.entries,
                "buffers": self._names.entries(self._names.buffers(journal.thorough)),
            }
            if self._whole(trained):
                kinds["state"] = self._state(optimizer, trained)
            journal.sums(kinds)
        journal.ended()

    @quiet
    def before_engine(self, engine: Any) -> None:
        """DeepSpeed's engine is about to step: of the gradients it says the norm alone, afterwards."""
        journal = self.journal
        self._passes.root = None
        if not journal.within():
            return
        self._names.called(engine.module)
        journal.record.update(opt=0, kind="DeepSpeedEngine", at=journal.tick())
        weights = self._names.entries(self._names.parameters())
        journal.sums({**(self._initial(weights) if journal.fresh else {}), "begin": weights})
        frozen = [(name, parameter) for name, parameter in self._names.parameters() if not parameter.requires_grad]
        journal.names("frozen", self._names.entries(frozen))
        groups = [self._numbers(group) for group in engine.optimizer.param_groups]
        journal.record.update(grad=[], groups=groups)

    @quiet
    def after_engine(self, engine: Any) -> None:
        """It has stepped."""
        journal = self.journal
        if journal.within() and "opt" in journal.record:
            norm = engine.get_global_grad_norm()
            journal.record["norm"] = float(norm) if norm is not None else None  # waits for the device, as the engine
            buffers = self._names.buffers(journal.thorough)
            weights = self._names.entries(self._names.parameters())
            journal.sums({"weights": weights, "buffers": self._names.entries(buffers)})
        journal.ended()
