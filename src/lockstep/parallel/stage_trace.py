"""Find what a model computes before, in and after its repeated blocks, by a forward on fake tensors.

    use = trace_blocks(model, blocks, loss, batch, "--parallel.pipeline 2")
    use.before, use.after       # names of the parameters used there

Every tensor of the forward is followed to the parameters and block outputs that it was computed from, so also what
carries no gradient is found. Nothing is computed, and the model is not changed.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Private to torch: fake tensors have no public name. These are the same since torch 2.11.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from lockstep.errors import ConfigError

__all__ = ["BlockUse", "trace_blocks"]


# What a tensor was computed from: the name of a parameter, or the number of the block whose output it is.
Source = str | int
_NOTHING: frozenset[Source] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Parameters that a forward uses before, in and after its blocks.

    Attributes:
        blocks: their number.
        carrier: position or keyword of the hidden states among a block's arguments.
        block_of: parameter -> the block that has it.
        before: parameters from which the first block's input is computed.
        after: parameters from which the loss is computed, besides the last block's output.
        joined: blocks that the backward computes again together with the block before.
    """

    blocks: int
    carrier: int | str
    block_of: Mapping[str, int]
    before: frozenset[Source]
    after: frozenset[Source]
    joined: frozenset[int]


def trace_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], loss: Callable[[Any, Any], Tensor], batch: Any, flag: str
) -> BlockUse:
    """Run the loss on fake tensors, and return which parameters it uses before and after the blocks.

    Args:
        model, blocks, loss, batch: as in `stages.cut_stage`.
        flag: the option, for messages.

    Raises:
        ConfigError: the blocks are not a chain in which one tensor goes from each to the next.
    """
    names = {module: name for name, module in model.named_modules()}
    labels = []
    for block in blocks:
        if block not in names:
            raise ConfigError(f"{flag}: the task's blocks(model) returns a module that is not in the model")
        labels.append(names[block])
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    sources = _Sources()
    memo: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        memo[id(tensor)] = fakes.from_tensor(tensor)
        if isinstance(tensor, nn.Parameter):
            # The model's own too, which a function in the model may refer to.
            for each in (tensor, memo[id(tensor)]):
                sources.add(each, frozenset([name]))
    # A copy of the modules and not of their tensors: a forward may write to its model.
    shadow = copy.deepcopy(model, memo)
    chain = _Chain(labels, _owners(model, blocks, labels, flag))
    # A forward that was wrapped, as for autocast, calls the model's own blocks in the shadow too.
    handles = []
    for held in ([shadow.get_submodule(label) for label in labels], blocks):
        handles += chain.watch(held, sources, flag)
    fake_batch = tree_map_only(Tensor, fakes.from_tensor, batch)
    try:
        # Fake draws leave the generators alone, but a task may draw numbers of its own.
        with torch.random.fork_rng(devices=[]), fakes, sources:
            total = loss(shadow, fake_batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ConfigError(
            f"{flag}: the loss decides by the values of tensors ({error}), so what its stages compute is not known; "
            "compute it without reading values, or leave the flag out"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return chain.conclude(sources.of(total), flag)


def _owners(model: nn.Module, blocks: Sequence[nn.Module], labels: Sequence[str], flag: str) -> dict[str, int]:
    """Return the block of each parameter in one; refuse those that two blocks share."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[str, int] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            name = names[parameter]
            if name in owners:
                raise ConfigError(
                    f"{flag}: {labels[owners[name]]} and {labels[number]} share {name}, so they cannot be on two "
                    "stages; leave the flag out"
                )
            owners[name] = number
    return owners


class _Chain:
    """The blocks of a shadow model, and what their calls showed."""

    def __init__(self, labels: Sequence[str], owners: dict[str, int]) -> None:
        self._labels = labels
        self._owners = owners
        self._outputs: list[Tensor] = []
        self._before = _NOTHING
        self._input = _NOTHING
        self._carrier: int | str = 0
        self._recomputed: list[Any] = []
        self._draws: Any = None

    def watch(self, blocks: Sequence[nn.Module], sources: "_Sources", flag: str) -> list[RemovableHandle]:
        """Look at each block's input and output, until the handles are removed."""
        handles = []
        for number, block in enumerate(blocks):

            def enter(module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                self._enter(module, number, args, kwargs, sources, flag)

            def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, number: int = number) -> Tensor:
                return self._leave(number, output, sources, flag)

            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave, with_kwargs=True))
        return handles

    def _enter(self, module: nn.Module, number: int, args: Any, kwargs: Any, sources: "_Sources", flag: str) -> None:
        where = f"{flag}: {self._labels[number]}"
        if number != len(self._outputs):
            if number < len(self._outputs):
                what = "is called twice in a micro-batch's loss; call the model once"
            else:
                what = f"is called before {self._labels[len(self._outputs)]}; return the blocks in the order of calls"
            raise ConfigError(f"{where} {what}")
        arguments = {**dict(enumerate(args)), **kwargs}
        if number:
            carriers = [key for key, value in arguments.items() if value is self._outputs[-1]]
            if not carriers or (number > 1 and carriers[0] != self._carrier):
                raise ConfigError(
                    f"{where} does not get the output of {self._labels[number - 1]} unchanged as its input; compute "
                    "between blocks inside one of them, or leave the flag out"
                )
            self._carrier = carriers[0]
            del arguments[self._carrier]
            # The first block's other arguments are the same stage's, whatever they are.
            self._check_others(sources.of(arguments), where)
        else:
            self._before = sources.of(arguments)
        self._recomputed.append(_recomputation())
        # A module with a call of its own, as those of transformers, recomputes inside, where the others pass on.
        if not torch.is_grad_enabled() and type(module).__call__ is nn.Module.__call__ and _trains(module):
            raise ConfigError(
                f"{where} is called without gradients, as by torch.utils.checkpoint with use_reentrant=True; pass "
                "use_reentrant=False, or use --activation-checkpointing"
            )
        self._draws = _other_generators()
        # Taken here: a block may write to its input.
        self._input = sources.of((args, kwargs))

    def _check_others(self, found: frozenset[Source], where: str) -> None:
        """Refuse arguments that a later stage could not compute by itself."""
        for source in sorted(found, key=str):
            what = f"the output of {self._labels[source]}" if isinstance(source, int) else source
            raise ConfigError(
                f"{where} has another argument that is computed from {what}; only its first tensor goes from stage to "
                "stage, so leave the flag out"
            )

    def _leave(self, number: int, output: Any, sources: "_Sources", flag: str) -> Tensor:
        where = f"{flag}: {self._labels[number]}"
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.ndim:
            raise ConfigError(
                f"{where} returns {_describe(output)}; a block of a pipeline returns one floating-point tensor "
                "[batch, ...]"
            )
        if _other_generators() != self._draws:
            # The previous stage sends states of torch's generators alone.
            raise ConfigError(
                f"{where} draws numbers from Python's `random` or NumPy, which each stage would repeat; draw them by "
                "torch, or leave the flag out"
            )
        for source in sorted(sources.of(output) - self._input, key=str):
            if isinstance(source, int) or self._owners.get(source) != number:
                raise ConfigError(f"{where} uses {source}, which is not its own; leave the flag out")
        # New memory, whose only source is this block.
        fresh = output.detach().clone().requires_grad_(output.requires_grad)
        sources.replace(fresh, frozenset([number]))
        self._outputs.append(fresh)
        return fresh

    def conclude(self, found: frozenset[Source], flag: str) -> BlockUse:
        """Return what the loss uses, given what it was computed from."""
        last = len(self._labels) - 1
        if len(self._outputs) <= last:
            raise ConfigError(
                f"{flag}: the loss does not call {self._labels[len(self._outputs)]}; return the blocks that it calls"
            )
        for source in sorted((self._before | found) - {last}, key=str):
            if isinstance(source, int):
                raise ConfigError(
                    f"{flag}: the loss uses the output of {self._labels[source]}, which the last stage does not have; "
                    "use that of the last block alone"
                )
            if source in self._owners:
                raise ConfigError(
                    f"{flag}: {source} of a block is used outside of it too, which may be on another stage; leave the "
                    "flag out"
                )
        # Of two blocks or more, the second has shown where hidden states are.
        joined = set()
        for number in range(1, last + 1):
            region = self._recomputed[number]
            if region is not None and region is self._recomputed[number - 1]:
                joined.add(number)
        return BlockUse(last + 1, self._carrier, self._owners, self._before, found - {last}, frozenset(joined))


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _other_generators() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators."""
    state: Any = np.random.get_state(legacy=True)
    _, keys, *others = state
    return random.getstate(), keys.tobytes(), *others


def _recomputation() -> Any:
    """Return an object that is the same throughout one call of torch.utils.checkpoint; None outside of any."""
    # Private: torch has no public way to tell. By name, as other hooks keep tensors and compute nothing again.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook"):
        return hooks[0]
    return None


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {output.dtype} with {output.ndim} dimensions"
    return f"a {type(output).__name__}"


# torch gives the class no types.
class _Sources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow the sources of every tensor, by its memory: views and writes in place share them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # `_cdata` is private: the identity of a storage, also of a fake one. The storage is kept, so that no other
        # gets the same number.
        self._sources: dict[int, tuple[Any, frozenset[Source]]] = {}

    def of(self, values: Any) -> frozenset[Source]:
        """Return the sources of all tensors in a tree of values."""
        found = _NOTHING
        for tensor in _tensors(values):
            found |= self._sources.get(tensor.untyped_storage()._cdata, (None, _NOTHING))[1]
        return found

    def add(self, tensor: Tensor, found: frozenset[Source]) -> None:
        self.replace(tensor, found | self.of(tensor))

    def replace(self, tensor: Tensor, found: frozenset[Source]) -> None:
        storage = tensor.untyped_storage()
        self._sources[storage._cdata] = (storage, found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        # These take shape and dtype of a tensor alone.
        if name.startswith("new_") or name.endswith("_like"):
            return result
        found = self.of((args, kwargs))
        if found:
            written = []
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written.append(value)
            for tensor in _tensors((result, written)):
                self.add(tensor, found)
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
