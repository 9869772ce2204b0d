"""What an operation gives on tensors without values, without asking FakeTensorMode, which is several times as slow.

    found = result(func, args, kwargs)      # UNKNOWN: FakeTensorMode has to say it

That mode looks for the ways in which an operation may be described, and hashes all of its arguments to remember what it
found. Most of a trace is the same few hundred calls again and again, and asks for shapes alone:

- Views and a few more are described by C++, for tensors of any device (`_PLAIN`).
- What makes new tensors is remembered by the shapes it was given, and so is what changes its first argument in place.
- What gives nothing back (an optimizer's fused update) has nothing to say.
- A DTensor's states are its local part's, split as it is (`_LIKE`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["UNKNOWN", "result"]

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
_ATTRIBUTES = "_lockstep_attributes"  # of a mode: device -> what its tensors have beside their form
_PART = "_local_tensor"  # of a DTensor, whose module's import is a second of torch that not every plan needs
_META = torch.device("meta")
# Tags of operations whose result is not told by the shapes that they were given, or is not a new tensor.
_UNTOLD = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view),
    torch.Tag.maybe_aliasing_or_mutating,
}
_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# What writes into tensors that it was given, and does nothing else, where it gives nothing back.
_SILENT = ("aten::_foreach_", "aten::_fused_", "fsdp::")


class _Form(NamedTuple):
    """A new tensor: its shape, strides, type and place."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Kind(NamedTuple):
    """Of an operation: it gives nothing; it gives its first argument, which it changed; it gives new tensors."""

    nothing: bool = False
    first: bool = False
    new: bool = False


_kinds: dict[Any, _Kind] = {}
# Of every call that was seen: the forms of what it gives, one of them or several; of one in place: no form.
_seen: dict[tuple[Any, ...], _Form | tuple[_Form, ...] | None] = {}


def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation gives; UNKNOWN where it is not of tensors of a fake world alone, or not told by their shapes.

    To be called where FakeTensorMode is the next to answer.
    """
    if func in _LIKE and hasattr(args[0], _PART):
        return _split_alike(func, args[0], kwargs)
    if func in _PLAIN:
        return _plainly(func, args, kwargs)
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _kind_of(func)
    if not any(kind):
        return UNKNOWN
    given = args if not kwargs else (*args, *kwargs, *kwargs.values())
    if kind.nothing:
        return None if _all_fake(given) else UNKNOWN
    key = [func]
    mode = _known(key, given)
    if mode is UNKNOWN:
        return UNKNOWN
    mode = mode or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if not isinstance(mode, FakeTensorMode):
        return UNKNOWN
    known = (*key, torch.get_default_dtype())
    if known in _seen:
        form = _seen[known]
        if form is None:
            return args[0]
        with torch._C._DisableTorchDispatch():
            return _made(mode, form) if isinstance(form, _Form) else tuple([_made(mode, each) for each in form])
    found = func(*args, **kwargs)
    if kind.first:
        if found is args[0]:
            _seen[known] = None
    else:
        form = _form_of(found) if isinstance(found, Tensor) else _forms_of(found)
        if form is not None:
            _seen[known] = form
    return found


def _plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the kernel for tensors of no device, as FakeTensorMode has it in the end."""
    first = args[0]
    if kwargs or type(first) is not FakeTensor or first.constant is not None:
        return UNKNOWN
    mode = first.fake_mode
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        mode.in_kernel_invocation = True
        try:
            found = func(*args)
        finally:
            mode.in_kernel_invocation = False
        return _fake(mode, found, first.fake_device)


def _split_alike(func: Any, given: Any, kwargs: dict[str, Any]) -> Any:
    """What has the form of a DTensor, from its part: without asking anew how the others are split."""
    if any(value and value is not torch.preserve_format for value in kwargs.values()):
        return UNKNOWN
    part = result(func, (given._local_tensor,), kwargs)
    return UNKNOWN if part is UNKNOWN else type(given)(part, given._spec, requires_grad=False)


def _all_fake(nested: Any) -> bool:
    """Whether no tensor among what an operation was given has values, those of DTensors neither."""
    for each in nested:
        kind = type(each)
        if kind is list or kind is tuple:
            if not _all_fake(each):
                return False
        elif kind is not FakeTensor and kind not in _NUMBERS and type(getattr(each, _PART, None)) is not FakeTensor:
            return False
    return True


def _kind_of(func: Any) -> _Kind:
    schema, name = func._schema, func.name()
    if not schema.returns:
        return _Kind(nothing=name.startswith(_SILENT) and schema.is_mutable)
    if not name.startswith("aten::") or "lift" in name or _UNTOLD & set(func.tags):
        return _Kind()
    given = [each.alias_info for each in schema.returns]
    if schema.is_mutable:
        first = schema.arguments[0].alias_info
        return _Kind(first=bool(first and first.is_write and len(given) == 1 and given[0]))
    return _Kind(new=not any(given))


def _known(key: list[Any], nested: Any) -> Any:
    """Adds to the key what decides about the result; the mode of the tensors, None without any, UNKNOWN where a tensor
    is not of a fake world, or has a value that is known."""
    mode = None
    for each in nested:
        kind = type(each)
        if kind is FakeTensor:
            if each.constant is not None or each.layout is not torch.strided or each.dtype.is_complex:
                return UNKNOWN
            key += (each.shape, each.stride(), each.dtype, each.fake_device)
            mode = each.fake_mode
        elif kind in _NUMBERS:
            key += (kind, each)
        elif kind is list or kind is tuple:
            key.append(len(each))
            found = _known(key, each)
            if found is UNKNOWN:
                return UNKNOWN
            mode = found or mode
        else:
            return UNKNOWN
    return mode


def _form_of(found: Any) -> _Form | None:
    """None: the tensor is more than its form says."""
    if type(found) is not FakeTensor or found.constant is not None or found.layout is not torch.strided:
        return None
    form = _Form(tuple(found.shape), found.stride(), found.dtype, found.fake_device)
    plain = torch.empty_strided(*form[:2], dtype=form.dtype, device=_META)
    same = found.untyped_storage().nbytes() == plain.untyped_storage().nbytes() and not found.storage_offset()
    return form if same else None


def _forms_of(found: Any) -> tuple[_Form, ...] | None:
    if type(found) is not tuple:
        return None
    forms = [_form_of(each) for each in found]
    whole = tuple([each for each in forms if each is not None])
    apart = len({each.untyped_storage()._cdata for each in found if isinstance(each, Tensor)}) == len(forms)
    return whole if apart and len(whole) == len(forms) else None


def _made(mode: FakeTensorMode, form: _Form) -> FakeTensor:
    return _fake(mode, torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META), form.device)


def _fake(mode: FakeTensorMode, plain: Tensor, device: torch.device) -> FakeTensor:
    """FakeTensor(mode, plain, device), whose attributes are those of any other one of the mode on the device: setting
    them one by one, a dozen, takes longer than most operations."""
    known: dict[torch.device, dict[str, Any]] = vars(mode).setdefault(_ATTRIBUTES, {})
    if device not in known:
        known[device] = dict(vars(FakeTensor(mode, torch.empty(0, device=_META), device)))
    found: FakeTensor = Tensor._make_subclass(
        FakeTensor, plain, plain.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
    else:
        torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(known[device])
    return found
