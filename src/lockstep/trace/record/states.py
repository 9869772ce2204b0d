"""Record a process's random generators, passes and updates.

updates = Updates(journal, names, passes)
updates.before(optimizer); updates.after(optimizer)         # the second ends the step

`state_digests` digests the random generators. `PassRecorder` records batches, forwards and
backwards. `Updates` records the gradients that the optimizer receives, its groups, and the weights, buffers and
optimizer state afterwards.
"""

import _random
import contextlib
import ctypes
import functools
import hashlib
import operator
import random
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.trace.record.journal import Journal, quiet
from lockstep.trace.record.names import WHOLE, Entry, Names, is_wrapper, piece
from lockstep.trace.record.samples import Batch, digest_batch, lengths, outcomes, outputs, trained_output
from lockstep.trace.record.sums import sum_pieces

__all__ = [
    "PassRecorder",
    "Updates",
]


# name -> (last bytes of the generator, their digest)
_digest_cache: dict[str, tuple[Any, str]] = {}


def state_digests(own: Iterable[tuple[str, torch.Generator]] = ()) -> dict[str, str]:
    """Digest the generator states of torch, CUDA, python, numpy and the model (`own`).

    A CUDA generator's state is in host memory, so nothing waits.
    """
    digests = {"torch": _digest_state("torch", torch.get_rng_state()), "python": _digest_python()}
    # torch does not annotate is_initialized.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        digests["cuda"] = _digest_state("cuda", torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        digests["numpy"] = _digest_numpy(numpy.random)
    for name, generator in own:
        digests[name] = _digest_state("", generator.get_state())
    return digests


def _digest_state(name: str, state: torch.Tensor) -> str:
    raw = ctypes.string_at(state.data_ptr(), state.numel())
    before = _digest_cache.get(name)
    if before is not None and before[0] == raw:
        return before[1]
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    _digest_cache[name] = raw, digest
    return digest


def _digest_python() -> str:
    """Digest python's global generator, whose state is in its C object and in `gauss_next`."""
    # The module's functions are methods of a generator that it does not export.
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    current = (_memory(generator), generator.gauss_next)
    before = _digest_cache.get("python")
    if _READABLE and before is not None and before[0] == current:
        return before[1]
    version, keys, gauss = random.getstate()
    # hash(None) depends on an address before Python 3.12.
    number = hash((version, keys, gauss is None, gauss or 0.0))
    digest = f"{number & 0xFFFFFFFFFFFFFFFF:016x}"
    _digest_cache["python"] = current, digest
    return digest


def _memory(generator: Any) -> bytes:
    head = object.__basicsize__
    # The state follows the object's header.
    return ctypes.string_at(id(generator) + head, _random.Random.__basicsize__ - head)


def _memory_readable() -> bool:
    """Whether a draw changes a generator's visible memory, as in CPython."""
    generator = random.Random(1)
    before = _memory(generator)
    generator.random()
    return before != _memory(generator)


_READABLE = _memory_readable()


def _digest_numpy(module: Any) -> str:
    """Digest numpy's global generator.

    A cached Gaussian value is outside the memory that is compared.
    """
    raw = None
    if hasattr(module, "get_bit_generator"):
        bits = module.get_bit_generator()
        if type(bits).__name__ == "MT19937":
            # 624 words of state, and the index of the next one.
            raw = ctypes.string_at(bits.ctypes.state_address, 625 * 4)
            before = _digest_cache.get("numpy")
            if before is not None and before[0] == raw:
                return before[1]
    _, keys, index, *gauss = module.get_state()
    digest = hashlib.blake2b(keys.tobytes() + repr((index, *gauss)).encode(), digest_size=8).hexdigest()
    _digest_cache["numpy"] = (None if gauss[0] else raw), digest
    return digest


# Events recorded of a step, at most.
_MOST_EVENTS = 2000
# First steps, in which every module's output is recorded without being asked for.
_MODULE_STEPS = 2


class PassRecorder:
    """Recorder of the batches, forwards and backwards before an update.

    Attributes:
        root: the module that the script called, while it runs.
        in_backward: a backward runs, which may call modules again.
        begun: there was a forward or backward.
        initial: names of the tensors with recorded initial values.
    """

    def __init__(self, journal: Journal, names: Names) -> None:
        self.journal = journal
        self._names = names
        self.root: nn.Module | None = None
        self.in_backward = self.begun = False
        self.initial: set[str] = set()
        # Root -> versions of the parameters recorded as initial
        self._first: dict[int, Any] = {}
        # FSDP 1 gathers whole tensors within its forwards.
        self._unsharded = False
        self._forward: dict[str, Any] = {}
        self._module_names: dict[int, str] = {}

    @quiet
    def record_batch(self, loader: int, epoch: int, indices: Any, set_epoch: Any, data: Any) -> None:
        """Record a batch from a loader."""
        if not self.journal.within():
            return
        record: dict[str, Any] = {"at": self.journal.tick(), "l": loader, "e": epoch}
        if set_epoch is not None:
            record["se"] = set_epoch
        if isinstance(indices, list):
            # A dataset may have keys that are no integers; they are not recorded.
            with contextlib.suppress(TypeError):
                record["i"] = [operator.index(index) for index in indices]
        self._put_batch(record, Batch(data))
        self.journal.record["loads"].append(record)

    def _put_batch(self, record: dict[str, Any], batch: Batch) -> None:
        record["n"] = batch.size
        if batch.names:
            record["cn"] = batch.names
        if batch.width:
            record["p"] = batch.width
        digests = digest_batch(batch)
        for name, tensor, form in (
            ("s", digests.samples, "bytes"),
            ("leaf", digests.leaves, "bytes"),
            ("c", digests.counts, "numbers"),
        ):
            if tensor is not None:
                self.journal.reading.put(record, name, tensor, form)

    @quiet
    def entering(self, module: nn.Module, grad: bool) -> None:
        """Record that the script calls a module with parameters.

        Args:
            grad: whether gradients are enabled.
        """
        if self.in_backward or is_wrapper(module):
            self._unsharded |= type(module).__name__ == "FullyShardedDataParallel"
            return
        self.root = module
        self.begun = True
        if self.journal.within():
            training = module.training and grad
            number = self._names.number_root(module)
            self._forward = {"at": self.journal.tick(), "m": number, "train": int(training)}
            if module.training and not grad:
                self._forward["mode"] = 1
            if training:
                self._put_initial(number)
                self._forward["rng"] = [state_digests(self._names.generators(module, self.journal.thorough))]
            every = self.journal.options.modules or self.journal.step < _MODULE_STEPS
            if every:
                self._module_names = {id(submodule): name for name, submodule in module.named_modules()}
            else:
                self._module_names = {}

    def _put_initial(self, number: int) -> None:
        """Record a root's initial values, at its last forward before the first backward.

        A change of the weights between that and the update, such as a perturbation that is not undone, then shows.
        """
        versions = self._first.get(number, ())
        if versions is None or self._unsharded:
            return
        values = []
        for _, p in self._names.parameters(number):
            # Inference tensors have no version. `_version` is private in torch: it counts changes in place.
            if not p.is_inference():
                values.append((id(p), p._version))
        if versions == values:
            return
        self._first[number] = values
        suffix = f"#{number}" if number else ""
        parameters = self._names.entries(self._names.parameters(number))
        buffers = self._names.entries(self._names.buffers(True, number))
        self.journal.sums({f"initial{suffix}": parameters, f"initial buffers{suffix}": buffers})
        for name, _, _ in (*parameters, *buffers):
            self.initial.add(name)

    def inside(self, module: nn.Module, output: Any) -> None:
        """Record the end of a submodule's forward."""
        if self._module_names and self._forward:
            self._record_module(module, output)

    @quiet
    def _record_module(self, module: nn.Module, output: Any) -> None:
        record = self._forward
        if len(record.get("mn", ())) >= _MOST_EVENTS:
            return
        values = output if isinstance(output, tuple | list) else (output,)
        tensor = None
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point():
                tensor = value
                break
        if tensor is not None:
            local, at = piece(tensor)
            if tensor.dtype in (torch.bfloat16, torch.float16):
                record["ac"] = str(tensor.dtype).removeprefix("torch.")
            record.setdefault("mn", []).append(self._module_names.get(id(module), "?"))
            record.setdefault("mv", []).append(None)
            self.journal.reading.put(record["mv"], -1 + len(record["mv"]), sum_pieces([(local, at)]))

    @quiet
    def end_forward(self, args: Any, kwargs: Any, output: Any) -> None:
        """Record the end of the root's forward."""
        module = self.root
        self.root = None
        record = self._forward
        self._forward = {}
        if module is None or not record:
            return
        batch = Batch((*args, kwargs) if kwargs else args)
        self._put_batch(record, batch)
        rows = outputs(output, batch.size)
        if rows:
            record["w"] = sum(row.shape[1] for row in rows)
            self.journal.reading.put(record, "out", outcomes(rows))
        if record["train"]:
            generators = self._names.generators(module, self.journal.thorough)
            record["rng"].append(state_digests(generators))
            trained = trained_output(output, batch.size)
            if trained is not None:
                self._follow(record, trained)
        self.journal.record["fwd"].append(record)

    def _follow(self, record: dict[str, Any], output: Tensor) -> None:
        """Record the gradient that reaches an output, or its source in another dtype.

        Accelerate and the Trainer convert a model's outputs; a loss inside the model uses the unconverted ones.
        """
        at_output = False

        def reached_output(gradient: Tensor | None) -> None:
            nonlocal at_output
            # DDP may call the hook with None.
            if gradient is not None:
                at_output = True
                self.record_gradient(record, gradient)

        def reached_source(index: int, gradients: Any) -> None:
            if not at_output and gradients[index] is not None:
                self.record_gradient(record, gradients[index])

        # torch does not annotate register_hook.
        output.register_hook(reached_output)  # type: ignore[no-untyped-call]
        node = output.grad_fn
        index = output.output_nr
        # The node of a conversion to another dtype.
        while node is not None and node.name() == "ToCopyBackward0":
            node, index = node.next_functions[0]
        if node is not None and node is not output.grad_fn:
            node.register_prehook(functools.partial(reached_source, index))

    @quiet
    def record_gradient(self, record: dict[str, Any], gradient: Tensor) -> None:
        """Record the norm of each sample's gradient at a forward's output."""
        record["backwards"] = record.get("backwards", 0) + 1
        self.journal.reading.put(record, "og", lengths(gradient))

    @quiet
    def backward(self, roots: Any) -> None:
        """Record the start of a backward."""
        self.root = None
        self.begun = True
        self._first = dict.fromkeys(self._first)
        if self.journal.within():
            tensors = roots if isinstance(roots, tuple | list) else [roots]
            total = None
            for t in tensors:
                if isinstance(t, Tensor) and t.numel() == 1:
                    total = t
                    break
            record = {"at": self.journal.tick(), "v": None}
            if total is not None:
                self.journal.reading.put(record, "v", total, "numbers")
            self.journal.record["loss"].append(record)

    @quiet
    def event(self, kind: str, *values: Any) -> None:
        """Record another event with a name and numbers; tensors are read when the step ends."""
        events = self.journal.record["ev"]
        if self.journal.within() and len(events) < _MOST_EVENTS:
            event = [self.journal.tick(), kind, *values]
            for index, value in enumerate(event):
                if isinstance(value, Tensor):
                    self.journal.reading.put(event, index, value, "numbers")
            events.append(event)


# Elements up to which weights before the update and optimizer state are digested in every step.
_MOST_ELEMENTS = 4 << 20
_NUMBERS = (bool, int, float)
_LISTS = (tuple, list)


@dataclass
class _OptimizerParameters:
    """Parameters of an optimizer.

    Attributes:
        key: cache key: root count and parameter ids.
        entries: their entries, in the order of `parameters`.
        others: parameters of the model that the optimizer does not have.
        plain: no parameter is a shard, so no gradient or state is.
    """

    key: list[int]
    entries: list[Entry]
    parameters: list[Tensor]
    others: list[tuple[str, nn.Parameter]]
    plain: bool


class Updates:
    """Recorder of the updates; each ends a step.

    Attributes:
        in_engine: DeepSpeed's engine steps; the steps of its own optimizers are part of that.
    """

    def __init__(self, journal: Journal, names: Names, passes: PassRecorder) -> None:
        self.journal = journal
        self._names = names
        self._passes = passes
        self.in_engine = False
        self._optimizers: list[weakref.ref[Any]] = []
        self._cache: weakref.WeakKeyDictionary[Any, _OptimizerParameters] = weakref.WeakKeyDictionary()
        # The current update trains nothing.
        self._skipped = False

    @quiet
    def before(self, optimizer: Any) -> None:
        """Record gradients, groups and weights before an optimizer's step."""
        journal = self.journal
        self._passes.root = None
        # torch.distributed.checkpoint takes a step at learning rate 0, to create the state that it loads into.
        started = self._passes.begun
        self._skipped = not started and all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if self._skipped or not journal.within():
            return
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        number = next(n for n, ref in enumerate(self._optimizers) if ref() is optimizer)
        journal.record.update(opt=number, kind=type(optimizer).__name__, at=journal.tick())
        trained = self._look_up(optimizer)
        kinds: dict[str, list[Entry]] = {}
        if journal.fresh:
            kinds |= self._initial(trained.entries)
            kinds["initial state"] = self._state(optimizer, trained)
        if self._whole(trained):
            kinds["begin"] = trained.entries
        kinds["grad"] = gradients = []
        for (name, _, at), parameter in zip(trained.entries, trained.parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                local, position = (gradient, WHOLE) if trained.plain else piece(gradient)
                gradients.append((name, local, at if position == WHOLE and local.numel() else position))
        journal.sums(kinds)
        journal.names("frozen", self._frozen(trained))
        journal.record["groups"] = [self._numbers(group) for group in optimizer.param_groups]

    def _initial(self, trained: list[Entry]) -> dict[str, list[Entry]]:
        """Return the initial values of tensors that no forward recorded."""
        names = set(self._passes.initial)
        kinds: dict[str, list[Entry]] = {"initial#rest": [], "initial buffers#rest": []}
        for section, entries in (
            ("initial#rest", [*self._names.entries(self._names.parameters()), *trained]),
            ("initial buffers#rest", self._names.entries(self._names.buffers(True))),
        ):
            for entry in entries:
                if entry[0] not in names:
                    names.add(entry[0])
                    kinds[section].append(entry)
        return kinds

    def _frozen(self, trained: _OptimizerParameters) -> list[Entry]:
        """Return the parameters that require no gradient."""
        pairs = zip(trained.entries, trained.parameters, strict=True)
        frozen = []
        for entry, parameter in pairs:
            if not parameter.requires_grad:
                frozen.append(entry)
        outside = []
        for name, parameter in trained.others:
            if not parameter.requires_grad:
                outside.append((name, parameter))
        return [*frozen, *self._names.entries(outside)]

    def _look_up(self, optimizer: Any) -> _OptimizerParameters:
        """Look up an optimizer's parameters; unless they are shards, cache them until they change.

        Thorough steps repeat the lookup.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        key = [self._names.count, *map(id, parameters)]
        cache = self._cache.get(optimizer)
        if cache is not None and cache.key == key and not self.journal.thorough:
            return cache
        entries = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self._names.of(parameter) or f"group{number}.{index}"
                entries.append(self._names.entry(name, parameter))
        plain = all(local is parameter for (_, local, _), parameter in zip(entries, parameters, strict=True))
        ids = set(map(id, parameters))
        outside = [(name, parameter) for name, parameter in self._names.parameters() if id(parameter) not in ids]
        result = _OptimizerParameters(key, entries, parameters, outside, plain)
        self._cache.pop(optimizer, None)
        # A cache would keep gathered shards in memory.
        if plain:
            self._cache[optimizer] = result
        return result

    def _whole(self, trained: _OptimizerParameters) -> bool:
        return self.journal.thorough or sum(local.numel() for _, local, _ in trained.entries) <= _MOST_ELEMENTS

    def _state(self, optimizer: Any, trained: _OptimizerParameters) -> list[Entry]:
        entries = []
        for (name, local, at), parameter in zip(trained.entries, trained.parameters, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    shard, position = (value, WHOLE) if trained.plain else piece(value)
                    same = shard.numel() == local.numel() and shard.numel() > 1
                    entries.append((f"{name}/{key}", shard, at if same else position))
        return entries

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = {"n": len(group["params"])}
        for key, value in group.items():
            if isinstance(value, _NUMBERS) or value is None:
                numbers[key] = value
            elif isinstance(value, Tensor) and value.numel() == 1:
                self.journal.reading.put(numbers, key, value, "numbers")
            elif isinstance(value, _LISTS) and all(isinstance(item, _NUMBERS) for item in value):
                numbers[key] = list(value)
        return numbers

    @quiet
    def after(self, optimizer: Any) -> None:
        """Record weights, buffers and state after an optimizer's update, and end the step."""
        journal = self.journal
        if self._skipped:
            self._skipped = False
            journal.forget()
            return
        if journal.within() and "opt" in journal.record:
            trained = self._look_up(optimizer)
            kinds = {
                "weights": trained.entries,
                "buffers": self._names.entries(self._names.buffers(journal.thorough)),
            }
            if self._whole(trained):
                kinds["state"] = self._state(optimizer, trained)
            journal.sums(kinds)
        journal.end_step()

    @quiet
    def before_engine(self, engine: Any) -> None:
        """Record the weights before a step of DeepSpeed's engine, which reports only the gradient norm."""
        journal = self.journal
        self._passes.root = None
        if not journal.within():
            return
        self._names.number_root(engine.module)
        journal.record.update(opt=0, kind="DeepSpeedEngine", at=journal.tick())
        weights = self._names.entries(self._names.parameters())
        journal.sums({**(self._initial(weights) if journal.fresh else {}), "begin": weights})
        frozen = []
        for name, parameter in self._names.parameters():
            if not parameter.requires_grad:
                frozen.append((name, parameter))
        journal.names("frozen", self._names.entries(frozen))
        groups = [self._numbers(group) for group in engine.optimizer.param_groups]
        journal.record.update(grad=[], groups=groups)

    @quiet
    def after_engine(self, engine: Any) -> None:
        """Record norm, weights and buffers after the engine's update, and end the step."""
        journal = self.journal
        if journal.within() and "opt" in journal.record:
            norm = engine.get_global_grad_norm()
            # Waits for the device, as the engine itself does.
            journal.record["norm"] = float(norm) if norm is not None else None
            buffers = self._names.buffers(journal.thorough)
            weights = self._names.entries(self._names.parameters())
            journal.sums({"weights": weights, "buffers": self._names.entries(buffers)})
        journal.end_step()
