"""Record the state of objects and of all that hangs on them, and restore it.

    state = ObjectState({"task": task, "model": model}, untouched=model.parameters())
    task.loss(model, batch)
    state.changes()             # ["task.calls", "model.encoder.h"]
    state.restore()             # everything is as it was

Attributes, containers, tensors, arrays and random generators are followed, and cycles are fine. Data sets and loaders
are followed without a copy of their data. Classes, modules, files, threads, process groups and Python's iterators are
left alone, and so is what a function refers to, but for its own variables. Objects are compared by identity: no method
of a user's object is called.
"""

import contextlib
import functools
import pickle
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

# Private to torch: the only way to see every write of an operator before it happens.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lockstep.tensors import as_bytes

__all__ = ["ObjectState", "same_bits"]

_MAX_FOLLOWED = 10_000  # most elements of a container that are followed; of a longer one only the container is kept
_MAX_LOOKED_AT = 50_000  # most elements that are followed, of all containers together
_MAX_OF_DATA = 100  # most elements of a data set's container that is kept
_MAX_DATA_NUMBERS = 65_536  # most numbers of a data set's tensor or array that is copied
_MAX_EARLY_NUMBERS = 1 << 20  # most numbers of a tensor that `late` copies at once
_MAX_ARRAY_NUMBERS = 1 << 24  # larger arrays are not copied
_MAX_DEPTH = 6  # levels of nested containers whose values are compared

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_ATOMS: frozenset[type] = frozenset(
    (
        *(*_NUMBERS, type, range, slice, type(...), types.BuiltinFunctionType, types.ModuleType, types.GeneratorType),
        *(torch.dtype, torch.device, torch.layout, torch.Size),
    )
)
# Modules of classes that have no state of a training, or a state that only their own methods may change.
_LEFT_ALONE = (
    *("_thread", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "queue", "socket", "ssl"),
    *("logging", "_io", "io", "tempfile", "pathlib", "weakref", "enum", "re", "ctypes", "inspect", "importlib", "ast"),
    *("torch.distributed", "torch._C", "torch._dynamo", "torch._inductor", "torch.fx", "torch.autograd"),
    *(
        "torch.cuda.streams",
        "torch.cuda.graphs",
        "torch.nn.parallel",
        "torch.storage",
        "deepspeed.runtime",
        "deepspeed.ops",
    ),
)
_PACKAGE = __name__.partition(".")[0]
# Parts of this package whose objects belong to a user's training. A task may not change the others.
_OWN_PARTS = ("task", "tasks", "models", "adapters", "text", "optim", "hooks")
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_MISSING: Any = object()


@final
class _ObjectPath:
    """The way from a root to an object."""

    __slots__ = ("link", "parent")

    def __init__(self, parent: "_ObjectPath | None", link: str) -> None:
        self.parent = parent
        self.link = link

    def path(self) -> str:
        """Return the path as a user writes it: `task.callbacks[0]`."""
        return (self.parent.path() if self.parent else "") + self.link

    def attribute(self) -> str:
        """Return the path without the indices at its end: that of the container."""
        ancestor = self
        while ancestor.parent is not None and ancestor.link.startswith("["):
            ancestor = ancestor.parent
        return ancestor.path()


class _Record(Protocol):
    """What is kept of one object."""

    def changes(self, state: "ObjectState") -> Iterable[tuple[str, Any]]:
        """Return (path, present value) of what has changed."""

    def restore(self) -> None:
        """Restore the object; not what hangs on it."""


@final
class ObjectState:
    """The state of objects when this was made.

    Args:
        roots: name -> object; the names begin the paths of `changes`.
        untouched: tensors whose values the caller restores itself: they are watched, not copied, and so is the state
            of their optimizers.
        skip: objects and classes that are left alone.
        late: large tensors are copied when an operation of torch first writes them, in the context of `watching`; other
            writes to them, as through NumPy, are not seen. So a frozen teacher or a data set takes no memory.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        untouched: Iterable[Tensor] = (),
        skip: Iterable[Any] = (),
        *,
        late: bool = False,
    ) -> None:
        skipped = list(skip)
        self._skipped = {id(entry) for entry in skipped}
        self._skipped_types = tuple(entry for entry in skipped if isinstance(entry, type))
        self._untouched = {id(tensor) for tensor in untouched}
        self._looked_at = 0
        # Keep every object alive: otherwise another one could get its id.
        self._alive: list[Any] = [skipped]
        self._data: set[int] = set()  # ids of tensors that belong to a data set
        self._records: list[_Record] = []
        self._by_id: dict[int, _Record] = {}
        self._tensors: list[_TensorValues] = []
        self._queue: deque[tuple[Any, _ObjectPath, bool]] = deque()
        self._follow_all(roots)
        self._late: list[_TensorValues] = []
        for entry in self._tensors:
            size = entry.tensor.numel()
            if id(entry.tensor) in self._untouched or (id(entry.tensor) in self._data and size > _MAX_DATA_NUMBERS):
                continue
            with contextlib.suppress(Exception):
                entry.keep()
                if not late or size <= _MAX_EARLY_NUMBERS or entry.tensor.layout is not torch.strided:
                    entry.copy()
                else:
                    self._late.append(entry)

    @property
    def copied(self) -> int:
        """Number of tensors whose values were copied."""
        return sum(record.values is not None for record in self._tensors)

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which large tensors are copied before they are written; see `late`."""
        if self._late:
            return _CopiesAtWrites(self._late)
        return contextlib.nullcontext()

    def changes(self) -> list[str]:
        """Return the paths of what has changed; tensors come last. Waits for the device."""
        return list(self.find_changes())

    def find_changes(self) -> dict[str, Any]:
        """Return what has changed: path -> present value, or None. Waits for the device."""
        changes: dict[str, Any] = {}
        for record in self._records:
            with contextlib.suppress(Exception):
                for path, value in record.changes(self):
                    changes.setdefault(path, value)
        for record_of_tensor in _changed_tensors(self._tensors):
            changes.setdefault(record_of_tensor.place.attribute(), self._holder(record_of_tensor))
        return changes

    def restore(self) -> None:
        """Restore everything. May be called again. Waits for the device."""
        for record in self._records:
            with contextlib.suppress(Exception):
                record.restore()
        for record_of_tensor in _changed_tensors(self._tensors):
            with contextlib.suppress(Exception):
                record_of_tensor.restore()
        for record_of_tensor in self._tensors:
            with contextlib.suppress(Exception):
                record_of_tensor.restore_gradient()

    def is_same(self, before: Any, now: Any, depth: int = 0) -> bool:
        """Whether an object that takes another's place has the value that the other had."""
        if before is now:
            return True
        if type(before) is not type(now):
            return False
        if type(before) in _NUMBERS:
            # NaN is not equal to itself.
            return bool(before == now) or (before != before and now != now)
        record = self._by_id.get(id(before))
        if isinstance(record, _TensorValues):
            kept = record.kept
            return kept is not None and same_bits(kept, now)
        if isinstance(record, _Array):
            return record.has_values(now)
        if isinstance(before, types.MethodType):
            return before.__self__ is now.__self__ and before.__func__ is now.__func__
        if depth < _MAX_DEPTH and (isinstance(record, _Elements | _Items) or isinstance(before, tuple)):
            if isinstance(record, _Elements | _Items):
                saved = record.saved
            else:
                saved = before
            present = _pairs(now) if isinstance(record, _Items) else list(now)
            return len(saved) == len(present) <= _MAX_FOLLOWED and all(
                self.is_same(old, new, depth + 1) for old, new in zip(saved, present, strict=True)
            )
        return False

    # The walk.

    def _follow_all(self, roots: Mapping[str, Any]) -> None:
        for name, root in roots.items():
            if type(root) not in _ATOMS:
                self._queue.append((root, _ObjectPath(None, name), False))
        starts = {id(root) for root in roots.values()}
        while self._queue:
            owner, position, of_data = self._queue.popleft()
            # Skip an object of the user whose own methods fail.
            with contextlib.suppress(Exception):
                self._follow(owner, position, of_data, is_root=id(owner) in starts)

    def _push(self, value: Any, parent: _ObjectPath, link: str, of_data: bool) -> None:
        if type(value) not in _ATOMS:
            self._queue.append((value, _ObjectPath(parent, link), of_data))

    def _keep(self, owner: Any, record: _Record) -> None:
        self._records.append(record)
        if self._by_id.get(id(owner), _NOTHING) is _NOTHING:
            self._by_id[id(owner)] = record

    def _follow(self, owner: Any, place: _ObjectPath, of_data: bool, is_root: bool) -> None:
        type_: Any = type(owner)
        if of_data and issubclass(type_, Tensor):
            self._data.add(id(owner))
        if id(owner) in self._by_id or id(owner) in self._skipped or issubclass(type_, (type, *self._skipped_types)):
            return
        self._alive.append(owner)
        self._by_id[id(owner)] = _NOTHING
        if issubclass(type_, Tensor):
            self._follow_tensor(owner, place, of_data)
        elif issubclass(type_, np.ndarray):
            if owner.size <= (_MAX_DATA_NUMBERS if of_data else _MAX_ARRAY_NUMBERS) and _has_own_numbers(owner):
                self._keep(owner, _Array(owner, place))
        elif issubclass(type_, _GENERATOR_TYPES):
            self._keep(owner, _Generator(owner, place))
        elif issubclass(type_, types.MethodType):
            self._push(owner.__self__, place, ".__self__", of_data)
        elif issubclass(type_, types.FunctionType):
            self._keep(owner, _Cells(owner, place))
        elif issubclass(type_, nn.Module):
            self._follow_module(owner, place, of_data)
        elif is_root or not _is_left_alone(type_):
            self._follow_plain(owner, place, of_data, is_root)

    def _follow_plain(self, owner: Any, place: _ObjectPath, of_data: bool, is_root: bool) -> None:
        type_ = type(owner)
        if issubclass(type_, Optimizer) and any(id(parameter) in self._untouched for parameter in owner.state):
            # The state of a watched parameter's optimizer is watched, too.
            self._untouched.update(map(id, _tensors_in(owner.state)))
        if issubclass(type_, functools.partial):
            for name in ("func", "args", "keywords"):
                self._push(getattr(owner, name), place, f".{name}", of_data)
        elif issubclass(type_, dict | list | deque | set | tuple | frozenset):
            self._follow_container(owner, place, of_data)
        else:
            looks_like_data = hasattr(type_, "__getitem__") and hasattr(type_, "__len__") and not is_root
            of_data = of_data or looks_like_data or issubclass(type_, Dataset | DataLoader)
        # The iterator of a DataLoader has processes, so leave its attributes alone.
        if type_.__name__.endswith("DataLoaderIter"):
            return
        self._follow_attributes(owner, place, of_data, _NO_NAMES)

    def _follow_container(self, owner: Any, place: _ObjectPath, of_data: bool) -> None:
        type_ = type(owner)
        size = len(owner)
        if of_data and size > _MAX_OF_DATA:
            return
        record: _Record | None = None
        if issubclass(type_, dict):
            record = _Items(owner, place)
        elif not issubclass(type_, tuple | frozenset):
            record = _Elements(owner, place)
        if record is not None:
            self._keep(owner, record)
        if size > _MAX_FOLLOWED or self._looked_at + size > _MAX_LOOKED_AT:
            return
        self._looked_at += size
        if issubclass(type_, dict):
            for key, value in _items(owner):
                self._push(key, place, "[...]", of_data)
                self._push(value, place, f"[{key!r}]" if type(key) in _NUMBERS else "[...]", of_data)
            return
        for index, value in enumerate(type_.__iter__(owner)):
            self._push(value, place, f"[{index}]", of_data)

    def _follow_attributes(self, owner: Any, place: _ObjectPath, of_data: bool, without: frozenset[str]) -> None:
        record = _Attributes(owner, place, without)
        if record.saved is None and not record.slots:
            return
        self._keep(owner, record)
        for name, value in record.values():
            self._push(value, place, f".{name}", of_data)

    def _follow_module(self, module: nn.Module, place: _ObjectPath, of_data: bool) -> None:
        """Follow a module; of a wrapper of torch, such as DistributedDataParallel, only what it wraps."""
        type_: Any = type(module)
        is_wrapper = _is_wrapper(type_)
        if not is_wrapper:
            self._follow_attributes(module, place, of_data, _UNSAVED)
            for hooks in _HOOKS:
                for hook in list((vars(module).get(hooks) or {}).values()):
                    if str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", _PACKAGE):
                        self._push(hook, place, f".{hooks}", of_data)
        for name in ("_modules",) if is_wrapper else _MEMBERS:
            members = vars(module)[name]
            self._alive.append(members)
            self._keep(members, _Items(members, place, members=True))
            for key, value in list(members.items()):
                self._push(value, place, f".{key}", of_data)

    def _follow_tensor(self, tensor: Tensor, place: _ObjectPath, of_data: bool) -> None:
        if type(tensor) not in _PLAIN_TENSORS and id(tensor) in self._untouched:
            return
        if type(tensor) in _PLAIN_TENSORS:
            record = _TensorValues(tensor, place)
            self._by_id[id(tensor)] = record
            self._tensors.append(record)
            if tensor.is_leaf and tensor.grad is not None and id(tensor) not in self._untouched:
                self._push(tensor.grad, place, ".grad", of_data)
        elif hasattr(tensor, "__tensor_flatten__"):
            # Such as a DTensor, whose shards are tensors.
            for name in tensor.__tensor_flatten__()[0]:
                self._push(getattr(tensor, name), place, "", of_data)
        else:
            self._push(tensor.as_subclass(Tensor), place, "", of_data)

    def _holder(self, record: "_TensorValues") -> Any:
        """Return the tensor, or the outermost container that has it."""
        position = record.place
        path = record.place.attribute()
        if position.path() == path:
            return record.tensor
        for record_of_container in self._records:
            if isinstance(record_of_container, _Items | _Elements) and record_of_container.place.path() == path:
                return record_of_container.owner
        return record.tensor


# --- attributes and containers

_NO_NAMES: frozenset[str] = frozenset()
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_called")))

_MEMBERS = ("_parameters", "_buffers", "_modules")
_UNSAVED = _HOOKS.union(_MEMBERS)


@final
class _Nothing:
    """Nothing is kept of an object."""

    def changes(self, state: ObjectState) -> Iterable[tuple[str, Any]]:
        return ()

    def restore(self) -> None:
        pass


_NOTHING = _Nothing()


@final
class _Attributes:
    """The attributes of an object, in `__dict__` and `__slots__`.

    Args:
        owner: the object.
        place: its place.
        without: names of attributes that are left alone.
    """

    __slots__ = ("place", "present", "saved", "slots")

    def __init__(self, owner: Any, place: _ObjectPath, without: frozenset[str]) -> None:
        self.place = place
        self.present = _dict_of(owner)
        self.saved: dict[str, Any] | None = None
        if self.present is not None:
            self.saved = {name: value for name, value in self.present.items() if name not in without}
        type_: Any = type(owner)
        self.slots = [(owner, name, slot, _read_slot(owner, slot)) for name, slot in _slots_of(type_)]

    def values(self) -> Iterator[tuple[str, Any]]:
        yield from (self.saved or {}).items()
        yield from ((name, value) for _, name, _, value in self.slots if value is not _MISSING)

    def _find_added(self, present: dict[str, Any], saved: dict[str, Any]) -> list[str]:
        return [name for name in present if name not in saved and name not in _UNSAVED]

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        present = self.present or {}
        saved = self.saved or {}
        for name, value in saved.items():
            value_now = present.get(name, _MISSING)
            if value_now is not value and not state.is_same(value, value_now):
                yield self._path(name), _present(value_now)
        for name in self._find_added(present, saved):
            yield self._path(name), present[name]
        for owner, name, slot, value in self.slots:
            value_now = _read_slot(owner, slot)
            if value_now is not value and not state.is_same(value, value_now):
                yield self._path(name), _present(value_now)

    def restore(self) -> None:
        if self.present is not None and self.saved is not None:
            for name in self._find_added(self.present, self.saved):
                del self.present[name]
            for name, value in self.saved.items():
                if self.present.get(name, _MISSING) is not value:
                    self.present[name] = value
        for owner, _, slot, value in self.slots:
            if _read_slot(owner, slot) is value:
                continue
            if value is _MISSING:
                slot.__delete__(owner)
            else:
                slot.__set__(owner, value)

    def _path(self, name: str) -> str:
        return f"{self.place.path()}.{name}"


def _present(value: Any) -> Any:
    if value is _MISSING:
        return None
    return value


def _dict_of(owner: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:
        return None
    if type(attributes) is dict:
        return attributes
    return None


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: type) -> list[tuple[str, Any]]:
    """Return the names and descriptors of a class's `__slots__`."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    members = [member_item for base in bases for member_item in vars(base).items()]
    return [(name, member) for name, member in members if type(member) is types.MemberDescriptorType]


def _read_slot(owner: Any, slot: Any) -> Any:
    try:
        return slot.__get__(owner, type(owner))
    except AttributeError:
        return _MISSING


def _items(owner: Any) -> list[tuple[Any, Any]]:
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    return list(base.items(owner))


def _pairs(owner: Any) -> list[Any]:
    """Return keys and values of a dict, in turns."""
    pairs: list[Any] = []
    for pair in _items(owner):
        pairs.extend(pair)
    return pairs


@final
class _Items:
    """The keys and values of a dict.

    Args:
        owner: the dict.
        place: its place.
        members: of a module: each value is named by its key.
    """

    __slots__ = ("members", "owner", "place", "saved")

    def __init__(self, owner: Any, place: _ObjectPath, *, members: bool = False) -> None:
        self.owner = owner
        self.place = place
        self.members = members
        self.saved = _pairs(owner)

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        present = _pairs(self.owner)
        if _are_identical(present, self.saved):
            return
        if not self.members:
            same = len(present) == len(self.saved) and all(map(state.is_same, self.saved, present))
            if not same:
                yield self.place.attribute(), self.owner
            return
        before = dict(zip(self.saved[::2], self.saved[1::2], strict=True))
        for key in dict.fromkeys((*before, *self.owner)):
            value_now = self.owner.get(key, _MISSING)
            if not state.is_same(before.get(key, _MISSING), value_now):
                yield f"{self.place.path()}.{key}", _present(value_now)

    def restore(self) -> None:
        present = _pairs(self.owner)
        if _are_identical(present, self.saved):
            return
        base: Any = OrderedDict if isinstance(self.owner, OrderedDict) else dict
        if not _are_identical(present[::2], self.saved[::2]):
            base.clear(self.owner)
        for key, value in zip(self.saved[::2], self.saved[1::2], strict=True):
            base.__setitem__(self.owner, key, value)


@final
class _Elements:
    """The elements of a list, deque or set."""

    __slots__ = ("owner", "place", "saved")

    def __init__(self, owner: Any, place: _ObjectPath) -> None:
        self.owner = owner
        self.place = place
        self.saved = self._present()

    def _base(self) -> Any:
        return next(base for base in (list, deque, set) if isinstance(self.owner, base))

    def _present(self) -> list[Any]:
        return list(self._base().__iter__(self.owner))

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        present = self._present()
        if _are_identical(present, self.saved):
            return
        if len(present) != len(self.saved) or not all(map(state.is_same, self.saved, present)):
            yield self.place.attribute(), self.owner

    def restore(self) -> None:
        if _are_identical(self._present(), self.saved):
            return
        base = self._base()
        base.clear(self.owner)
        (base.update if base is set else base.extend)(self.owner, self.saved)


def _are_identical(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


@final
class _Cells:
    """The variables of a closure; only which object each refers to."""

    __slots__ = ("place", "saved")

    def __init__(self, owner: types.FunctionType, place: _ObjectPath) -> None:
        self.place = place
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        self.saved = [(name, cell, _read_cell(cell)) for name, cell in cells]

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        for name, cell, value in self.saved:
            value_now = _read_cell(cell)
            if not state.is_same(value, value_now):
                yield f"{self.place.path()}, its variable {name}", _present(value_now)

    def restore(self) -> None:
        for _, cell, value in self.saved:
            if _read_cell(cell) is not value and value is not _MISSING:
                cell.cell_contents = value


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The cell is empty.
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _is_left_alone(kind: type) -> bool:
    package, _, rest = str(kind.__module__).partition(".")
    if package == _PACKAGE and rest.partition(".")[0] not in _OWN_PARTS:
        return True
    return any(_comes_from(base, _LEFT_ALONE) for base in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def _is_wrapper(kind: type) -> bool:
    """Whether a module's class is torch's wrapper; FSDP's classes have the user's as base."""
    user_bases = []
    for base in kind.__mro__:
        if base is not object and base.__module__ != nn.Module.__module__:
            user_bases.append(base)
    return bool(user_bases) and all(_comes_from(base, (*_LEFT_ALONE, "abc", "typing")) for base in user_bases)


def _comes_from(kind: type, modules: tuple[str, ...]) -> bool:
    name = str(kind.__module__)
    return any(name == module or name.startswith(f"{module}.") for module in modules)


# --- arrays and generators


def _has_own_numbers(array: Any) -> bool:
    """Whether an array has neither the memory of a file nor Python objects."""
    return not isinstance(array, np.memmap) and not isinstance(array.base, np.memmap) and not array.dtype.hasobject


@final
class _Array:
    """The values of an array."""

    __slots__ = ("owner", "place", "values")

    def __init__(self, owner: Any, place: _ObjectPath) -> None:
        self.owner = owner
        self.place = place
        self.values = np.array(owner)

    def has_values(self, array: Any) -> bool:
        if (array.shape, array.dtype) != (self.values.shape, self.values.dtype):
            return False
        return bool(array.tobytes() == self.values.tobytes())

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        if not self.has_values(self.owner):
            yield self.place.attribute(), self.owner

    def restore(self) -> None:
        if self.has_values(self.owner):
            return
        if self.owner.shape != self.values.shape:
            self.owner.resize(self.values.shape, refcheck=False)
        self.owner[...] = self.values


def _write_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _write_bits(generator: Any, state: Any) -> None:
    generator.state = state


# Class -> the functions that read and write its state.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (lambda each: each.get_state().numpy(), lambda each, state: each.set_state(torch.tensor(state))),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda each: each.bit_generator.state, _write_numpy),
    np.random.RandomState: (lambda each: each.get_state(), lambda each, state: each.set_state(state)),
    np.random.BitGenerator: (lambda each: each.state, _write_bits),
}
_GENERATOR_TYPES = tuple(_GENERATORS)


@final
class _Generator:
    """The state of a random generator."""

    __slots__ = ("owner", "place", "read", "state", "write")

    def __init__(self, owner: Any, place: _ObjectPath) -> None:
        self.owner = owner
        self.place = place
        self.read, self.write = next(
            how for generator_type, how in _GENERATORS.items() if isinstance(owner, generator_type)
        )
        # Pickled, because a dict of NumPy's may contain arrays.
        self.state = pickle.dumps(self.read(owner))

    def _is_same(self) -> bool:
        return pickle.dumps(self.read(self.owner)) == self.state

    def changes(self, state: ObjectState) -> Iterator[tuple[str, Any]]:
        if not self._is_same():
            yield self.place.attribute(), self.owner

    def restore(self) -> None:
        if not self._is_same():
            self.write(self.owner, pickle.loads(self.state))


# --- tensors


@final
class _TensorValues:
    """The values and the form of a tensor.

    Attributes:
        tensor: the tensor.
        values: a copy, contiguous; None: the tensor is only watched, or not written yet.
    """

    __slots__ = ("_alias", "_bytes", "_gradient", "_requires_grad", "_version", "place", "tensor", "values")

    def __init__(self, tensor: Tensor, place: _ObjectPath) -> None:
        self.tensor = tensor
        self.place = place
        self.values: Tensor | None = None
        self._alias: Tensor | None = None
        self._bytes = 0
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._version = _version(tensor)

    @property
    def kept(self) -> Tensor | None:
        """The values as they were; None: not known."""
        if self.values is None:
            return self._alias
        return self.values

    @property
    def memory(self) -> int:
        """The address of the tensor's memory when it was kept."""
        if self._alias is not None:
            return _address(self._alias)
        return 0

    def keep(self) -> None:
        """Keep the memory and the form."""
        # The alias has the tensor's memory and its present form, whatever happens to the tensor.
        self._alias = None if self.tensor.is_meta else self.tensor.detach()
        if self._alias is not None and _is_dense(self._alias):
            self._bytes = self._alias.untyped_storage().nbytes()

    def copy(self) -> None:
        """Copy the values."""
        if self._alias is None:
            return
        if _is_dense(self._alias):
            self.values = self._alias.clone(memory_format=torch.contiguous_format)
        else:
            self.values = self._alias.clone()

    def changes(self, state: ObjectState) -> Iterable[tuple[str, Any]]:
        # `_changed_tensors` compares all tensors together.
        return ()

    def has_form(self) -> bool:
        """Whether shape, layout and memory are as they were."""
        tensor_now = self.tensor
        before = self._alias
        if before is None or not _is_dense(tensor_now):
            return True
        return (
            (tensor_now.shape, tensor_now.dtype, tensor_now.device) == (before.shape, before.dtype, before.device)
            and tensor_now.stride() == before.stride()
            and tensor_now.data_ptr() == before.data_ptr()
            and before.untyped_storage().nbytes() >= self._bytes
        )

    def difference(self) -> bool | Tensor:
        """Return whether the values have changed, on a device as a 0-dim bool tensor."""
        if self.tensor.is_meta:
            return False
        if self._alias is None or not _is_dense(self.tensor):
            return _version(self.tensor) != self._version
        if not self.has_form():
            return True
        if self.values is None:
            return False
        bytes_now = as_bytes(self.tensor)
        before = as_bytes(self.values)
        if bytes_now.device.type == "cpu":
            return not torch.equal(bytes_now, before)
        return (bytes_now != before).any()

    def restore(self) -> None:
        if self._alias is None:
            return
        with torch.no_grad():
            if self.values is not None and not _is_dense(self._alias):
                self.tensor.data = self.values.clone()
                self._version = _version(self.tensor)
                return
            if not self.has_form():
                storage = self._alias.untyped_storage()
                if storage.nbytes() < self._bytes:
                    storage.resize_(self._bytes)
                self.tensor.data = self._alias
            if self.values is None:
                return
            inference = torch.inference_mode() if self._alias.is_inference() else contextlib.nullcontext()
            with inference:
                self._alias.copy_(self.values)

    def restore_gradient(self) -> None:
        """Restore the gradient and `requires_grad`; the latter alone if the tensor is watched."""
        if not self.tensor.is_leaf:
            return
        if self.tensor.requires_grad != self._requires_grad:
            self.tensor.requires_grad_(self._requires_grad)
        if self._alias is not None and self.tensor.grad is not self._gradient:
            self.tensor.grad = self._gradient


# torch gives this class and its constructor no types.
class _CopiesAtWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that copies the values of tensors before an operation writes to their memory."""

    def __init__(self, records: list[_TensorValues]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: dict[int, list[_TensorValues]] = {}
        for record in records:
            self._records.setdefault(record.memory, []).append(record)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        # Private to torch: the schema alone shows which arguments an operation writes.
        schema = func._schema
        if self._records and schema.is_mutable:
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._copy(args[index] if index < len(args) else given.get(argument.name))
        return func(*args, **given)

    def _copy(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if isinstance(tensor, Tensor):
                if hasattr(tensor, "__tensor_flatten__"):
                    self._copy([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
                    continue
                for record in self._records.pop(_address(tensor), []):
                    record.copy()


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has strides; a nested one has none, whatever its layout is called."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's whole memory; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:
        # Such as a tensor without storage.
        return 0


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(dict(tree)) if isinstance(leaf, Tensor)]


def _changed_tensors(records: list[_TensorValues]) -> list[_TensorValues]:
    """Return the tensors whose values have changed. Waits for each device once."""
    changed: list[_TensorValues] = []
    unknown: dict[torch.device, list[tuple[_TensorValues, Tensor]]] = {}
    for record in records:
        difference: bool | Tensor = False
        with contextlib.suppress(Exception), torch.no_grad():
            difference = record.difference()
        if isinstance(difference, Tensor):
            unknown.setdefault(difference.device, []).append((record, difference))
        elif difference:
            changed.append(record)
    for pairs in unknown.values():
        # Waits for the device, once for all of its tensors.
        flags = torch.stack([flag for _, flag in pairs]).tolist()
        changed += [record for (record, _), flag in zip(pairs, flags, strict=True) if flag]
    return changed


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and bits. Waits for the device."""
    if not _is_dense(left) or not _is_dense(right) or left.is_meta:
        return False
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    return torch.equal(as_bytes(left), as_bytes(right))


def _version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; of one without a count 0."""
    if tensor.is_inference():
        return 0
    return tensor._version
