"""Simulate a world of any size by a fake process group and fake tensors.

    with fake_world(512, engine="fsdp") as world, recorder:
        ...                  # the engines' own code runs: rank 0 of 512, nothing is computed, sent or allocated

Collectives leave their input unchanged. When an engine reads a number (is the norm below the limit?) it gets "yes"; a
model that does is refused by the recorder. Private parts of torch are used in this file alone.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.config.engine_options import ENGINES, PLAIN
from lockstep.distributed.world import World
from lockstep.engines.ddp import GradientUsage, ReplicatedEngine
from lockstep.engines.registry import engine_class

__all__ = [
    "REFUSED",
    "FakeWorld",
    "Unwatched",
    "as_fake",
    "exchanging",
    "fake_device",
    "fake_world",
    "finite",
    "local",
    "without_modes",
]


# Errors of a model that needs values.
REFUSED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_GIVEN = "_lockstep_given"  # an attribute of tensors that a batch brings
_ATTENTION: Any = F.scaled_dot_product_attention


class FakeWorld(World):
    """Rank 0 of a world whose other ranks have the same values."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass

    def check(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def check_same(self, what: str, values: dict[str, Any]) -> None:
        pass


@contextlib.contextmanager
def fake_world(size: int, *, engine: str = PLAIN, fused: bool = True) -> Iterator[FakeWorld]:
    """Context manager: rank 0 of `size` ranks on a CPU, where every tensor is fake.

    Args:
        engine: the engine to build in it; unless it is a single process there are process groups, so no other default
            group may exist.
        fused: attention with dropout is one kernel, as on every GPU; a CPU materialises the attention weights for it.
    """
    with contextlib.ExitStack() as stack:
        world = FakeWorld(0, 0, size, torch.device("cpu"))
        if not ENGINES[engine].one_process:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
            stack.callback(_left)
            _announced(stack, size)
            world.control = dist.group.WORLD
            _patched(stack)
            _busiest(stack, sys.modules[engine_class(engine).__module__])
        # A profiler's marks are operations, but no kernel, and asked for at every turn.
        _set(stack, record_function, "__enter__", lambda mark: mark)
        _set(stack, record_function, "__exit__", lambda *error: None)
        _set(stack, nn.Module, "_apply", _Apply())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _unmasked(stack)
        if fused:
            _set(stack, F, "scaled_dot_product_attention", _undropped)
        yield world


def _left() -> None:
    gc.collect()  # DDP's reducer, before its group
    dist.destroy_process_group()
    for name in ("deepspeed.comm.comm", "deepspeed.utils.groups"):  # they keep their first groups
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module else ():
            if isinstance(value, dist.ProcessGroup) or key == "cdb":
                setattr(module, key, None)


def _announced(stack: contextlib.ExitStack, size: int) -> None:
    """Set the launcher's environment variables, which DeepSpeed reads, until `stack` closes."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})

    def back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(back)


def _patched(stack: contextlib.ExitStack) -> None:
    """Patch code that reads numbers or loops over all ranks while an engine is made.

    `stack` undoes it.
    """
    parallel: Any = sys.modules[DistributedDataParallel.__module__]
    _set(stack, parallel, "_verify_param_shape_across_processes", lambda *args, **named: None)
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    apply: Any = importlib.import_module("lockstep.engines.fsdp.apply")

    mesh = apply.init_device_mesh

    def made(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return mesh(*args, **named)

    _set(stack, apply, "init_device_mesh", made)
    _set(stack, _fsdp_param, "_chunk_with_empty", _Chunks)
    # The ranks' total follows from this rank's count: the others do the same.
    _set(stack, GradientUsage, "_over_ranks", lambda usage, backwards: [(int(n < backwards), n) for n in usage._counts])
    wrap = ReplicatedEngine._wrap

    def wrapped(engine: Any, find_unused: bool) -> None:
        wrap(engine, find_unused)
        exchanging(engine._ddp)

    _set(stack, ReplicatedEngine, "_wrap", wrapped)


def _busiest(stack: contextlib.ExitStack, engine: Any) -> None:
    """Let ZeRO update the part of the rank with most parameters, until `stack` closes."""
    zero = getattr(engine, "ZeroRedundancyOptimizer", None)
    if zero is None:
        return
    divided = zero._init_local_optimizer

    def busiest(optimizer: Any) -> None:
        sizes = [
            sum(p.numel() for group in groups for p in group["params"]) for groups in optimizer._partition_parameters()
        ]
        optimizer.rank = optimizer.global_rank = sizes.index(max(sizes))
        divided(optimizer)

    _set(stack, zero, "_init_local_optimizer", busiest)


def _unmasked(stack: contextlib.ExitStack) -> None:
    """Patch `transformers`, until `stack` closes, to see that its own positions are not packed.

    It would not inspect a fake tensor, and make a mask, for which keys and values are repeated for each head; a real
    run has neither. A model's own positions are one row; those of a batch mark the starts of documents, and need masks.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if found is not None:

        def asked(position_ids: Tensor) -> Tensor | None:
            packed: Tensor | None = found(position_ids)
            own = (position_ids.shape[0] == 1 or not position_ids.stride(0)) and not getattr(
                position_ids, _GIVEN, False
            )
            return None if own else packed

        _set(stack, masks, "find_packed_sequence_indices", asked)


def _set(stack: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    before = getattr(module, name, None)
    if before is None:  # of another torch: it does without
        return
    setattr(module, name, value)
    stack.callback(setattr, module, name, before)


class _Apply:
    """`nn.Module._apply` for fake tensors with other references: it replaces the parameters."""

    def __init__(self) -> None:
        self._new: Any = WeakTensorKeyDictionary()

    def __get__(self, module: nn.Module, kind: Any) -> Callable[..., nn.Module]:
        return lambda change, recurse=True: self._applied(module, change, recurse)

    def _applied(self, module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        for child in module.children() if recurse else ():
            self._applied(child, change, recurse)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                made = self._new.get(parameter)  # a tied one has been changed already
                made = change(parameter) if made is None else made
            if made is not parameter:
                made = made if isinstance(made, nn.Parameter) else nn.Parameter(made, parameter.requires_grad)
                self._new[parameter] = module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module


class _Chunks:
    """The pieces of `torch.chunk`, each made on access: FSDP2 takes one of 512."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._each = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, place: int) -> Tensor:
        begin = min(place * self._each, self._tensor.size(self._dim))
        length = min(self._each, self._tensor.size(self._dim) - begin)
        if place and not length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, length)


def _undropped(*args: Any, **kwargs: Any) -> Tensor:
    """Attention without dropout: a CPU has no fused kernel with it, and every GPU does."""
    kwargs.pop("dropout_p", None)
    found: Tensor = _ATTENTION(*((*args[:4], 0.0, *args[5:]) if len(args) > 4 else args), **kwargs)
    return found


def exchanging(model: nn.Module) -> None:
    """Make DDP's exchange complete at once, leaving its buckets unchanged."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with contextlib.suppress(RuntimeError):  # the engine has one of its own, for compression
        model.register_comm_hook(None, hook)


def finite(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """Patch DeepSpeed, until `stack` closes, to find no overflow in gradients.

    It reads a number for it, and a fake one, 1, would mean "yes".
    """
    split: Any = getattr(model, "optimizer", None)
    if hasattr(split, "has_overflow"):
        _set(stack, split, "has_overflow", lambda *args, **named: False)
        _set(stack, sys.modules[type(split).__module__], "is_invalid_grad_norm", lambda norm: False)


class Unwatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that the compiler does not guard at each operation: a trace compiles nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_device(tensor: Any) -> torch.device | None:
    """Return the nominal device of a fake tensor; None for any other."""
    return tensor.fake_device if type(tensor) is FakeTensor else None


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local part, or the tensor itself, without an operation as in `to_local`."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def as_fake(batch: Any) -> Any:
    """Replace the tensors of a nested batch by fake ones; call it within the world."""

    def made(tensor: Tensor) -> Tensor:
        other = torch.empty_like(tensor)
        setattr(other, _GIVEN, True)
        return other

    return tree_map_only(Tensor, made, batch)


def without_modes() -> "contextlib.AbstractContextManager[None]":
    """Context manager in which tensors are real again, for a task's data."""
    made: Callable[[], contextlib.AbstractContextManager[None]] = _disable_current_modes
    return made()
