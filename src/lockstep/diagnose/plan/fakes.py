"""Simulate a world of any size by a fake process group and fake tensors.

    with fake_world(512, engine="fsdp") as world, recorder:
        ...                  # the engines' own code runs: rank 0 of 512, nothing is computed, sent or allocated

Collectives leave their input unchanged. When an engine reads a number (is the norm below the limit?) it gets "yes"; a
model that does is refused by the recorder. `result` caches the results' shapes, which is faster than FakeTensorMode.
Private parts of torch are used in this file alone.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# The whole file uses private names of torch: fake tensors, dispatch keys and FSDP's internals have no public form. All
# are the same since torch 2.11, and `_set` skips those that another version lacks.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.config.engine_options import ENGINES, PLAIN
from lockstep.distributed.replicas import form_replicas
from lockstep.distributed.world import World
from lockstep.engines.ddp import GradientUsage, ReplicatedEngine
from lockstep.engines.registry import engine_class
from lockstep.parallel import context, stages
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stages import StageInput

__all__ = [
    "REFUSED",
    "UNKNOWN",
    "Unwatched",
    "arriving",
    "as_fake",
    "exchanging",
    "fake_device",
    "fake_world",
    "finite",
    "local",
    "result",
    "without_modes",
]


UNKNOWN: Any = object()

_ATEN: Any = torch.ops.aten
_PLAIN = frozenset(
    {
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.detach.default, _ATEN.t.default, _ATEN.slice.Tensor),
        *(_ATEN.transpose.int, _ATEN.as_strided.default, _ATEN.unsqueeze.default, _ATEN.expand.default),
        *(_ATEN.select.int, _ATEN.permute.default),
    }
)
_LIKE = frozenset({_ATEN.zeros_like.default, _ATEN.detach.default})
# An attribute of a mode: device -> attributes of its tensors beyond their form.
_ATTRIBUTES = "_lockstep_attributes"
# An attribute of a DTensor. Importing DTensor's module takes a second, which not every plan needs.
_PART = "_local_tensor"
_META = torch.device("meta")
# Tags of operations whose result does not follow from the arguments' shapes, or is not a new tensor.
_DATA_DEPENDENT = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view),
    torch.Tag.maybe_aliasing_or_mutating,
}
_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# Operations without a result that only write to their arguments.
_NO_RESULT = ("aten::_foreach_", "aten::_fused_", "fsdp::")


class _ResultForm(NamedTuple):
    """Shape, strides, dtype and device of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Kind(NamedTuple):
    """An operation's result: none, its first argument changed in place, or new tensors."""

    nothing: bool = False
    first: bool = False
    new: bool = False


_kinds: dict[Any, _Kind] = {}
# For every known call: the form or forms of its result; None for one in place.
_form_cache: dict[tuple[Any, ...], _ResultForm | tuple[_ResultForm, ...] | None] = {}


# One function on the path of every traced operation: splitting it would slow a plan.
def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: C901
    """Return an operation's result by its shapes alone.

    UNKNOWN if it has other than fake tensors, or depends on values. Call it where FakeTensorMode is the next mode.
    """
    if func in _LIKE and hasattr(args[0], _PART):
        return _like_dtensor(func, args[0], kwargs)
    if func in _PLAIN:
        return _call_meta_kernel(func, args, kwargs)
    operation = _kinds.get(func)
    if operation is None:
        operation = _kinds[func] = _kind_of(func)
    if not any(operation):
        return UNKNOWN
    values = args if not kwargs else (*args, *kwargs, *kwargs.values())
    if operation.nothing:
        if _all_fake(values):
            return None
        return UNKNOWN
    key = [func]
    mode = _extend_key(key, values)
    if mode is UNKNOWN:
        return UNKNOWN
    # Without a tensor among the arguments the mode on the stack creates the result.
    mode = mode or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if not isinstance(mode, FakeTensorMode):
        return UNKNOWN
    cache_key = (*key, torch.get_default_dtype())
    if cache_key in _form_cache:
        form = _form_cache[cache_key]
        if form is None:
            return args[0]
        # The mode must not see its own new tensors.
        with torch._C._DisableTorchDispatch():
            if isinstance(form, _ResultForm):
                return _new_tensor(mode, form)
            # A list comprehension is faster than a generator here, and this runs for every operation.
            return tuple([_new_tensor(mode, output_form) for output_form in form])
    output = func(*args, **kwargs)
    if operation.first:
        if output is args[0]:
            _form_cache[cache_key] = None
    else:
        if isinstance(output, Tensor):
            form = _form_of(output)
        else:
            form = _forms_of(output)
        if form is not None:
            _form_cache[cache_key] = form
    return output


def _call_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the meta kernel directly, as FakeTensorMode does in the end."""
    tensor = args[0]
    if kwargs or type(tensor) is not FakeTensor or tensor.constant is not None:
        return UNKNOWN
    mode = tensor.fake_mode
    # The flags and guards of FakeTensorMode.dispatch: the meta kernel runs on the fake tensor itself.
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        mode.in_kernel_invocation = True
        try:
            output = func(*args)
        finally:
            mode.in_kernel_invocation = False
        return _fake(mode, output, tensor.fake_device)


def _like_dtensor(func: Any, tensor: Any, kwargs: dict[str, Any]) -> Any:
    """Return a tensor like a DTensor, from its local part, without computing the sharding again."""
    if any(value and value is not torch.preserve_format for value in kwargs.values()):
        return UNKNOWN
    local_result = result(func, (tensor._local_tensor,), kwargs)
    if local_result is UNKNOWN:
        return UNKNOWN
    return type(tensor)(local_result, tensor._spec, requires_grad=False)


def _all_fake(nested: Any) -> bool:
    """Whether all tensors among the arguments are fake, DTensors' parts included."""
    for value in nested:
        value_type = type(value)
        if value_type is list or value_type is tuple:
            if not _all_fake(value):
                return False
        elif (
            value_type is not FakeTensor
            and value_type not in _NUMBERS
            and type(getattr(value, _PART, None)) is not FakeTensor
        ):
            return False
    return True


def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    name = func.name()
    if not schema.returns:
        return _Kind(nothing=name.startswith(_NO_RESULT) and schema.is_mutable)
    if not name.startswith("aten::") or "lift" in name or _DATA_DEPENDENT & set(func.tags):
        return _Kind()
    aliases = [returned.alias_info for returned in schema.returns]
    if schema.is_mutable:
        first_alias = schema.arguments[0].alias_info
        return _Kind(first=bool(first_alias and first_alias.is_write and len(aliases) == 1 and aliases[0]))
    return _Kind(new=not any(aliases))


def _extend_key(key: list[Any], nested: Any) -> Any:
    """Add everything that determines the result to the key.

    Returns:
        The mode of the tensors, None without any, UNKNOWN if a tensor is not fake or has a known value.
    """
    mode = None
    for value in nested:
        value_type = type(value)
        if value_type is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return UNKNOWN
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
            mode = value.fake_mode
        elif value_type in _NUMBERS:
            key += (value_type, value)
        elif value_type is list or value_type is tuple:
            key.append(len(value))
            inner = _extend_key(key, value)
            if inner is UNKNOWN:
                return UNKNOWN
            mode = inner or mode
        else:
            return UNKNOWN
    return mode


def _form_of(tensor: Any) -> _ResultForm | None:
    """Return the form of a tensor; None if that does not describe it completely."""
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    form = _ResultForm(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)
    plain = torch.empty_strided(*form[:2], dtype=form.dtype, device=_META)
    same = tensor.untyped_storage().nbytes() == plain.untyped_storage().nbytes() and not tensor.storage_offset()
    if same:
        return form
    return None


def _forms_of(tensors: Any) -> tuple[_ResultForm, ...] | None:
    if type(tensors) is not tuple:
        return None
    forms = [_form_of(item) for item in tensors]
    complete = tuple([item for item in forms if item is not None])
    distinct = len({item.untyped_storage()._cdata for item in tensors if isinstance(item, Tensor)}) == len(forms)
    if distinct and len(complete) == len(forms):
        return complete
    return None


def _new_tensor(mode: FakeTensorMode, form: _ResultForm) -> FakeTensor:
    return _fake(mode, torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META), form.device)


def _fake(mode: FakeTensorMode, plain: Tensor, device: torch.device) -> FakeTensor:
    """Build FakeTensor(mode, plain, device) with attributes copied from another one.

    Setting a dozen attributes one by one takes longer than most operations.
    """
    attributes: dict[torch.device, dict[str, Any]] = vars(mode).setdefault(_ATTRIBUTES, {})
    if device not in attributes:
        attributes[device] = dict(vars(FakeTensor(mode, torch.empty(0, device=_META), device)))
    tensor: FakeTensor = Tensor._make_subclass(
        FakeTensor, plain, plain.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    vars(tensor).update(attributes[device])
    return tensor


# Errors of a model that needs values.
REFUSED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# An attribute of tensors that a batch brings.
_OF_BATCH = "_lockstep_given"
_ATTENTION: Any = F.scaled_dot_product_attention


class FakeWorld(World):
    """A rank of a world whose other ranks have the same values."""

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

    @property
    def replica_groups(self) -> frozenset[str]:
        """The names of the process groups within the replica."""
        if self.replicas is None:
            return frozenset()
        return frozenset(part.group.group_name for part in self.replicas.parts.values() if part.group)

    def new_group(self, ranks: list[int] | None = None, backend: str | None = "gloo") -> dist.ProcessGroup:
        # Other ranks would have to come to a group of gloo's.
        group: dist.ProcessGroup = dist.new_group(ranks, backend="fake")
        return group


# No degree: each rank has a whole model.
_WHOLE: Mapping[str, int] = MappingProxyType({})


@contextlib.contextmanager
def fake_world(
    size: int, *, engine: str = PLAIN, fused: bool = True, degrees: Mapping[str, int] = _WHOLE, stage: int = 0
) -> Iterator[FakeWorld]:
    """Simulate a rank of `size` ranks on a CPU, where every tensor is fake.

    Args:
        engine: the engine to build in it; unless it is a single process there are process groups, as with degrees, so
            no other default group may exist.
        fused: attention with dropout is one kernel, as on every GPU; a CPU materialises the attention weights for it.
        degrees: of `form_replicas`, by name; the world has the replicas.
        stage: of a pipeline; the rank is its first one in the first replica. Without a pipeline it is rank 0.
    """
    # Stages follow each other in a replica.
    rank = stage * degrees.get("context", 1) * degrees.get("tensor", 1)
    with contextlib.ExitStack() as stack:
        world = FakeWorld(rank, rank, size, torch.device("cpu"))
        if degrees or not ENGINES[engine].one_process:
            # The fake process group is in torch's testing package, the same since torch 2.11.
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            stack.callback(_destroy_groups)
            _set_launcher_variables(stack, rank, size)
            world.control = dist.group.WORLD
            # While tensors are real: a mesh is one of ranks.
            form_replicas(world, **degrees)  # collective
            _patch_torch(stack)
            _patch_zero(stack, sys.modules[engine_class(engine).__module__])
        # A profiler's marks are operations without a kernel, and frequent.
        _set(stack, record_function, "__enter__", lambda mark: mark)
        _set(stack, record_function, "__exit__", lambda *error: None)
        _set(stack, nn.Module, "_apply", _Apply())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _patch_masks(stack)
        if fused:
            _set(stack, F, "scaled_dot_product_attention", _attention_without_dropout)
            # On a GPU the mask of divided sequences takes no memory.
            _set(stack, context, "_last_rows", lambda size, end, device: None)
        yield world


def _destroy_groups() -> None:
    # DDP's reducer must be gone before its group.
    gc.collect()
    dist.destroy_process_group()
    # DeepSpeed's modules keep their first groups, and would use them in the next world.
    for name in ("deepspeed.comm.comm", "deepspeed.utils.groups"):
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module else ():
            if isinstance(value, dist.ProcessGroup) or key == "cdb":
                setattr(module, key, None)


def _set_launcher_variables(stack: contextlib.ExitStack, rank: int, size: int) -> None:
    """Set the launcher's environment variables, which DeepSpeed reads, until `stack` closes."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    before = {name: os.environ.get(name) for name in names}
    for name, value in names.items():
        os.environ[name] = str(value)

    def back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(back)


def _patch_torch(stack: contextlib.ExitStack) -> None:
    """Patch code that reads numbers or loops over all ranks while an engine is made.

    `stack` undoes it.
    """
    parallel: Any = sys.modules[DistributedDataParallel.__module__]
    # DDP compares parameter shapes of all ranks, which reads numbers.
    _set(stack, parallel, "_verify_param_shape_across_processes", lambda *args, **named: None)
    # FSDP2 chunks each parameter for all ranks. Only this rank's chunk is used.
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    apply: Any = importlib.import_module("lockstep.engines.fsdp.apply")
    # A mesh is made from real tensors of ranks. FSDP joins the dimensions of one for each divided parameter.
    # A pipeline is cut by what a forward on fake tensors of its own shows, which is no part of a step.
    for owner, name in ((apply, "init_device_mesh"), (DeviceMesh, "__init__"), (stages, "trace_blocks")):
        _set(stack, owner, name, _without_modes(getattr(owner, name)))
    # No draw depends on the generators, whose states have no values either.
    _set(stack, stages, "_set_generators", lambda states, device: None)
    _set(stack, _fsdp_param, "_chunk_with_empty", _Chunks)
    # The ranks' total follows from this rank's count: the others do the same.
    _set(
        stack,
        GradientUsage,
        "_reduce_counts",
        lambda usage, backwards, mark=0: [(int(n < backwards), n) for n in usage._uses.counts],
    )
    _set(
        stack,
        GradientUsage,
        "check_reentrant",
        lambda usage: (usage._uses.is_reentrant, usage._uses.is_repeated),
    )
    wrap = ReplicatedEngine._wrap

    def wrap_with_hook(engine: Any, find_unused: bool) -> None:
        # After wrapping: the hook needs the reducer.
        wrap(engine, find_unused)
        exchanging(engine._ddp)

    _set(stack, ReplicatedEngine, "_wrap", wrap_with_hook)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _patch_zero(stack: contextlib.ExitStack, engine: Any) -> None:
    """Let ZeRO update the part of the rank with most parameters, until `stack` closes."""
    zero = getattr(engine, "ZeroRedundancyOptimizer", None)
    if zero is None:
        return
    divided = zero._init_local_optimizer

    # Plan for the rank with most parameters, since its peak is the largest.
    def busiest(optimizer: Any) -> None:
        sizes = []
        for groups in optimizer._partition_parameters():
            sizes.append(sum(p.numel() for group in groups for p in group["params"]))
        optimizer.rank = optimizer.global_rank = sizes.index(max(sizes))
        divided(optimizer)

    _set(stack, zero, "_init_local_optimizer", busiest)


def _patch_masks(stack: contextlib.ExitStack) -> None:
    """Patch `transformers`, until `stack` closes, to see that its own positions are not packed.

    It would not inspect a fake tensor, and make a mask, for which keys and values are repeated for each head; a real
    run has neither. A model's own positions are one row; those of a batch mark the starts of documents, and need masks.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is not None:

        def find_packed(position_ids: Tensor) -> Tensor | None:
            packed: Tensor | None = original(position_ids)
            is_row = (position_ids.shape[0] == 1 or not position_ids.stride(0)) and not getattr(
                position_ids, _OF_BATCH, False
            )
            if is_row:
                return None
            return packed

        _set(stack, masks, "find_packed_sequence_indices", find_packed)


def _set(stack: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    before = getattr(module, name, None)
    # Another version of torch lacks the name, and does without the patch.
    if before is None:
        return
    setattr(module, name, value)
    stack.callback(setattr, module, name, before)


class _Apply:
    """`nn.Module._apply` for fake tensors with other references: it replaces the parameters."""

    def __init__(self) -> None:
        self._new: Any = WeakTensorKeyDictionary()

    def __get__(self, module: nn.Module, kind: Any) -> Callable[..., nn.Module]:
        return lambda change, recurse=True: self._apply_to(module, change, recurse)

    def _apply_to(self, module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        for child in module.children() if recurse else ():
            self._apply_to(child, change, recurse)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                # A tied parameter has been changed already.
                replacement = self._new.get(parameter)
                replacement = change(parameter) if replacement is None else replacement
            if replacement is not parameter:
                if not isinstance(replacement, nn.Parameter):
                    replacement = nn.Parameter(replacement, parameter.requires_grad)
                self._new[parameter] = module._parameters[name] = replacement
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module


class _Chunks:
    """The pieces of `torch.chunk`, each made on access: FSDP2 takes one of 512."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._each = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, place: int) -> Tensor:
        begin = min(place * self._each, self._tensor.size(self._dim))
        length = min(self._each, self._tensor.size(self._dim) - begin)
        if place and not length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, length)


def _attention_without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """Compute attention without dropout, since only GPUs have a fused kernel with it."""
    kwargs.pop("dropout_p", None)
    output: Tensor = _ATTENTION(*((*args[:4], 0.0, *args[5:]) if len(args) > 4 else args), **kwargs)
    return output


def exchanging(model: nn.Module) -> None:
    """Make DDP's exchange complete at once, leaving its buckets unchanged."""
    if not isinstance(model, DistributedDataParallel):
        return

    # torch's stub lacks GradBucket.
    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # The engine may have set a hook of its own, for compression; a second one is refused.
    with contextlib.suppress(RuntimeError):
        model.register_comm_hook(None, hook)


def arriving(pipeline: Pipeline, shape: torch.Size, dtype: torch.dtype) -> None:
    """Let hidden states of this form arrive whenever a stage receives some, since no header has values."""

    def prepare_arrival() -> StageInput:
        return StageInput(torch.empty(shape, dtype=dtype), stages.generator_states(pipeline.stages.device))

    vars(pipeline)["_prepare_arrival"] = prepare_arrival


def finite(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """Patch DeepSpeed, until `stack` closes, to find no overflow in gradients.

    It reads a number for it, and a fake one, 1, would mean "yes".
    """
    split: Any = getattr(model, "optimizer", None)
    if hasattr(split, "has_overflow"):
        _set(stack, split, "has_overflow", lambda *args, **named: False)
        _set(stack, sys.modules[type(split).__module__], "is_invalid_grad_norm", lambda norm: False)


# torch's class has no annotations.
class Unwatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that the compiler does not guard at each operation: a trace compiles nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_device(tensor: Any) -> torch.device | None:
    """Return the nominal device of a fake tensor; None for any other."""
    if type(tensor) is FakeTensor:
        return tensor.fake_device
    return None


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local part, or the tensor itself, without an operation as in `to_local`."""
    local_tensor: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


def as_fake(batch: Any) -> Any:
    """Replace the tensors of a nested batch by fake ones; call it within the world."""

    def convert(tensor: Tensor) -> Tensor:
        fake = torch.empty_like(tensor)
        setattr(fake, _OF_BATCH, True)
        return fake

    return tree_map_only(Tensor, convert, batch)


def without_modes() -> "contextlib.AbstractContextManager[None]":
    """Context manager in which tensors are real again, for a task's data."""
    disable: Callable[[], contextlib.AbstractContextManager[None]] = _disable_current_modes
    return disable()
