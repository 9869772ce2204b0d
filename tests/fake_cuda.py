"""A CUDA device that is not there: what would wait for it, and in which order things would happen, shown on a CPU.

    with FakeCuda() as cuda:                        # torch.cuda's streams, events and copies log what they are asked
        model = model.to("cuda:0")                  # lies where it lay, and says that it is on the device
        float(model(x.to("cuda:0")).sum())
    cuda.waits                                      # [Wait("_local_scalar_dense", "test_x.py", "test_it", "float(..")]
    cuda.log                                        # ["copy to the device", "event 0 on stream 0", ...]

A tensor is on the device where it was put there, or computed from one that is. Its storage says so, which views share.
What waits: reading a number (item, float, bool, tolist, numpy), operations whose result's shape the host must know, and
copies between the two that are not asked to be asynchronous, or come from memory that is not pinned. Waiting for an
event is told apart (`cuda.log`), since it depends on the event.

`FakeCuda(roots)` without lies: the tensors stay on the CPU by their own word, and only what would wait is counted, of
all that is computed from `roots`. `FakeCuda("everything")` counts whatever is read: for engines whose sums come out of
torch's own threads, of which nobody knows from what they were computed.
"""

import contextlib
import linecache
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import lockstep

PACKAGE, TESTS = Path(lockstep.__file__).parent, Path(__file__).parent
DEVICE = torch.device("cuda", 0)
READS = {"tolist", "numpy", "__array__"}
SHAPES = {  # the host must know how large the result is, or what it is
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}


# Nothing of the device's: marks for a profiler, and other names for what is there.
NO_LAUNCH = {"_record_function_enter_new", "_record_function_exit", "detach", "view", "alias"}


class Wait(NamedTuple):
    """What would wait for the device, and the line of lockstep, or of the test, that asked for it."""

    what: str
    file: str
    function: str
    line: str


def asked_by():
    """(file, function, line) of the innermost frame of lockstep or the tests; of anything, where there is none."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for found in frames:
        path = Path(found.f_code.co_filename)
        root = next((root for root in (PACKAGE, TESTS) if path.is_relative_to(root)), None)
        if root and path != Path(__file__):
            line = linecache.getline(str(path), found.f_lineno).strip()
            return path.relative_to(root).as_posix(), found.f_code.co_name, line
    return frames[0].f_code.co_filename, frames[0].f_code.co_name, ""


class Event:
    """Comes to pass when `FakeCuda.reached` says so: at once, or when it is waited for. One a millisecond."""

    def __init__(self, cuda, enable_timing=False, blocking=False):
        self.cuda, self.number, self.at = cuda, len(cuda.events), 0.0
        cuda.events.append(self)

    def record(self, stream=None):
        self.cuda.clock += 1.0
        self.at = self.cuda.clock
        self.cuda.log.append(f"event {self.number} on stream {(stream or self.cuda.current).number}")

    def query(self):
        return self.cuda.fast or self.at <= self.cuda.reached

    def synchronize(self):
        if not self.query():
            self.cuda.log.append(f"wait for event {self.number}")
        self.cuda.reached = max(self.cuda.reached, self.at)

    def elapsed_time(self, other):
        assert other.query(), "the time of an event that has not come to pass"
        return other.at - self.at


class Stream:
    def __init__(self, cuda, device=None):
        self.cuda, self.number = cuda, cuda.streams
        cuda.streams += 1

    def wait_stream(self, other):
        self.cuda.log.append(f"stream {self.number} waits for stream {other.number}")

    def wait_event(self, event):
        self.cuda.log.append(f"stream {self.number} waits for event {event.number}")


class FakeCuda:
    """See above.

    Attributes:
        waits: a `Wait` each.
        log: what copies, streams and events were asked, in order.
        fast: the device has done everything at once; else up to the event of the time `reached`.
        operations: what was dispatched, by name, while `counting`.
        free: bytes that the device says it has left.
        locked: address -> (bytes, thread) of the host's memory that the driver was told to lock.
        to_host: (stream, bytes) of each `copy_` from the device into the host's memory.
    """

    def __init__(self, roots=None, fast=True):
        self.everything = roots == "everything"
        self.lies, self.fast = roots is None, fast
        roots = [] if self.everything else roots
        self.waits, self.log, self.events, self.streams = [], [], [], 0
        self.operations, self.counting = [], False
        self.free, self.locked, self.to_host = 1 << 39, {}, []
        self.on, self.pinned = {}, {}  # storages, held so that no other one gets their place
        self.clock = self.reached = 0.0
        self.current = Stream(self)
        self._stack = contextlib.ExitStack()
        for root in roots or ():
            self.mark(root)

    def storage(self, tensor):
        """Its storage; None for what has none."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensor = getattr(tensor, "_local_tensor", tensor)
            return tensor.untyped_storage() if tensor.layout is torch.strided else None

    def mark(self, tensor, where=None):
        if isinstance(tensor, torch.Tensor) and (storage := self.storage(tensor)) is not None:
            (self.on if where is None else where)[storage._cdata] = storage

    def holds(self, value, where=None):
        """Whether a tensor lies on the device (or in `where`)."""
        if not isinstance(value, torch.Tensor) or (storage := self.storage(value)) is None:
            return False
        if self.everything and where is None:
            return True
        return storage._cdata in (self.on if where is None else where)

    def lock(self, start, size, flags):
        self.locked[start] = size, threading.current_thread().name
        return 0

    def is_pinned(self, tensor):
        start = tensor.data_ptr()
        return self.holds(tensor, self.pinned) or any(s <= start < s + size for s, (size, _) in self.locked.items())

    def waited(self, what):
        self.waits.append(Wait(what, *asked_by()))

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __enter__(self):
        stubs = {
            "Event": lambda enable_timing=False, blocking=False: Event(self, enable_timing, blocking),
            "Stream": lambda device=None: Stream(self, device),
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "synchronize": lambda device=None: self.waited("synchronize"),
            "max_memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "mem_get_info": lambda device=None: (self.free, 1 << 40),
            "get_device_properties": lambda device=None: SimpleNamespace(
                name="none", total_memory=1 << 40, major=9, minor=0
            ),
            "get_rng_state": lambda device=None: torch.empty(0),
            "set_rng_state": lambda state, device=None: None,
            "set_device": lambda device: None,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self.lock, cudaHostUnregister=self.locked.pop),
            "default_generators": (torch.Generator(),),
        }
        for name, stub in stubs.items() if self.lies else ():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        if self.lies:  # no mode sees it
            used = lambda tensor, stream: self.log.append(f"memory is used by stream {stream.number}")  # noqa: E731
            self._stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", used))
        self._stack.enter_context(_Dispatched(self))
        self._stack.enter_context(_Called(self))
        return self

    def __exit__(self, *error):
        self._stack.close()


class _Dispatched(TorchDispatchMode):
    """What is computed from what lies on the device lies there too."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        there = any(self.cuda.holds(each) for each in tree_iter((args, kwargs)))
        if self.cuda.counting and name not in NO_LAUNCH:
            self.cuda.operations.append(name)
        if there and (name in SHAPES or (name in ("index", "index_put", "index_put_") and _by_mask(args[1]))):
            self.cuda.waited(name)
        found = func(*args, **kwargs)
        if there and not (self.cuda.lies and name == "copy_"):  # which leaves its target where it is
            for each in tree_iter(found):
                self.cuda.mark(each)
        return found


class _Called(TorchFunctionMode):
    """Copies between host and device, and, where they lie, what tensors say of themselves."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, cuda, name = dict(kwargs or {}), self.cuda, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in READS and cuda.holds(first):
            cuda.waited(name)
        if not cuda.lies:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._said(func, args, kwargs)
        if name == "pin_memory":
            return self._pinned(first)
        if name == "is_pinned":
            return cuda.holds(first, cuda.pinned)
        if name in ("to", "cuda", "cpu") and isinstance(first, torch.Tensor):
            return self._moved(name, func, args, kwargs)
        if name == "copy_":
            self._copied(first, args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if kwargs.pop("pin_memory", False):
            found = func(*args, **kwargs)
            cuda.mark(found, cuda.pinned)
            return found
        elsewhere = kwargs.get("device")
        if elsewhere is not None and torch.device(elsewhere).type == "cuda":
            kwargs["device"] = torch.device("cpu")
            if name == "tensor":
                cuda.waited("a tensor made of numbers")
            found = func(*args, **kwargs)
            cuda.mark(found)
            return found
        return func(*args, **kwargs)

    def _said(self, func, args, kwargs):
        kind = getattr(func, "__self__", None)
        if self.cuda.holds(args[0]):
            if kind is torch.Tensor.device:
                return DEVICE
            if kind in (torch.Tensor.is_cuda, torch.Tensor.is_cpu):
                return kind is torch.Tensor.is_cuda
        return func(*args, **kwargs)

    def _pinned(self, tensor):
        assert not self.cuda.holds(tensor), "only the host's memory is pinned"
        found = tensor.clone()
        self.cuda.mark(found, self.cuda.pinned)
        self.cuda.log.append("pinned")
        return found

    def _moved(self, name, func, args, kwargs):
        cuda, tensor, rest = self.cuda, args[0], list(args[1:])
        asks = kwargs.get("non_blocking", next((each for each in rest if isinstance(each, bool)), False))
        target = "cuda" if name == "cuda" else "cpu" if name == "cpu" else None
        for place, each in enumerate(rest):
            if isinstance(each, torch.device | str):
                target, rest[place] = torch.device(each).type, torch.device("cpu")
            elif isinstance(each, torch.Tensor):
                target = "cuda" if cuda.holds(each) else "cpu"
        if kwargs.get("device") is not None:
            target, kwargs["device"] = torch.device(kwargs["device"]).type, torch.device("cpu")
        if target is None:  # another dtype
            return func(*args, **kwargs)
        counting, cuda.counting = cuda.counting, False  # what is done here is no operation
        try:
            return self._placed(name, func, tensor, rest, kwargs, target, asks)
        finally:
            cuda.counting = counting

    def _placed(self, name, func, tensor, rest, kwargs, target, asks):
        cuda, there = self.cuda, self.cuda.holds(tensor)
        found = tensor if name != "to" else func(tensor, *rest, **kwargs)
        if target is None or (target == "cuda") == there:
            return found
        found = found.detach().clone() if found is tensor and not tensor.requires_grad else found.clone()
        if target == "cuda":
            pinned = cuda.holds(tensor, cuda.pinned)
            cuda.on[cuda.storage(found)._cdata] = cuda.storage(found)
            cuda.log.append(f"copy to the device on stream {cuda.current.number}")
            if not (asks and pinned) and not isinstance(tensor, torch.nn.Parameter):
                cuda.waited("a copy from memory that is not pinned" if not pinned else "a copy to the device")
        else:
            cuda.on.pop(cuda.storage(found)._cdata, None)
            cuda.log.append("copy to the host")
            if asks:  # torch copies into pinned memory then
                cuda.mark(found, cuda.pinned)
            else:
                cuda.waited("a copy to the host")
        return found

    def _copied(self, target, source, asks):
        cuda = self.cuda
        if not isinstance(source, torch.Tensor) or cuda.holds(target) == cuda.holds(source):
            return
        host = source if cuda.holds(target) else target
        if host is target:
            cuda.to_host.append((cuda.current.number, source.nbytes))
        if not (asks and cuda.is_pinned(host)):
            cuda.waited("copy_")


def _by_mask(indices):
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)
