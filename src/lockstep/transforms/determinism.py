"""The switches of the process that change results: set at the start of each run, before its model is made.

pin(exact=True, matmul="highest", device=world.device)      # then a plain run: what the caller had comes back
pin(exact=False, matmul="high", device=world.device)
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lockstep.errors import ConfigError

__all__ = ["autotuned", "check_graphs", "check_precision", "keep_fastpath_off", "pin", "pin_compiler"]

_AUTOTUNE = tuple(f"TORCHINDUCTOR_MAX_AUTOTUNE{which}" for which in ("", "_POINTWISE", "_GEMM"))
_SHAPES = 64  # of one compiled function
_DYNAMO = "torch._dynamo.config"


class _ProcessSetting(NamedTuple):
    """Setting of the whole process.

    Attributes:
        name: key in the tables below.
        read: its present value.
        write: sets it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class _Turned(NamedTuple):
    """Values of a switch: the caller's, and the one that lockstep set."""

    before: Any  # the caller's value
    ours: Any


def _variable(name: str) -> _ProcessSetting:
    """A variable of the environment; None: not set."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return _ProcessSetting(name, lambda: os.environ.get(name), write)


def _setting(module: str, name: str, unloaded: Callable[[], Any] = lambda: None) -> _ProcessSetting:
    """A name of a module that is never loaded for this; until it is, the value is what `unloaded` returns."""

    def read() -> Any:
        return getattr(sys.modules[module], name) if module in sys.modules else unloaded()

    def write(value: Any) -> None:
        if module in sys.modules:
            setattr(sys.modules[module], name, value)

    return _ProcessSetting(f"{module}.{name}", read, write)


def _default(module: str, name: str, unloaded: Callable[[], Any] = lambda: None) -> _ProcessSetting:
    """The same setting for all other threads: torch keeps a value for the thread that sets it, and here its default.

    Autograd has a thread for each device, in which a compiled model's backward is compiled.
    """

    def entry() -> Any:
        return getattr(sys.modules.get(module), "_config", {}).get(name)

    def read() -> Any:
        return entry().default if entry() else unloaded()

    def write(value: Any) -> None:
        if entry():
            entry().default = value

    return _ProcessSetting(f"{module}.{name}, elsewhere", read, write)


_DETERMINISTIC = _ProcessSetting(
    "deterministic algorithms, warn only",
    lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
)
_FILL = _setting("torch.utils.deterministic", "fill_uninitialized_memory")
_FASTPATH = _ProcessSetting(
    "fast path", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
)
_BENCHMARK = _setting("torch.backends.cudnn", "benchmark")
_COMPILER = _variable("TORCHINDUCTOR_DETERMINISTIC")  # for an inductor that is loaded later, and child processes
_INDUCTOR, _INDUCTOR_ELSEWHERE = (
    kind("torch._inductor.config", "deterministic", lambda: os.environ.get(_COMPILER.name) == "1")
    for kind in (_setting, _default)
)
_THREADS = _ProcessSetting("threads", torch.get_num_threads, torch.set_num_threads)
_DYNAMOS = tuple(
    (_setting(_DYNAMO, name), _default(_DYNAMO, name))
    for name in ("automatic_dynamic_shapes", "optimize_ddp", "recompile_limit", "fail_on_recompile_limit_hit")
)

_turned: dict[str, _Turned] = {}  # by a switch's name: those that differ from the caller's by lockstep's hand


def _table(device: torch.device) -> tuple[tuple[_ProcessSetting, Any, Any], ...]:
    """List (switch, value of an exact run, value of a plain run); None: the caller's value.

    They are written in this order: `torch.use_deterministic_algorithms` changes inductor's setting too.
    """
    threads = 1 if device.type == "cpu" else None  # sums are split by the number of threads
    searched = True if device.type == "cuda" else None  # the fastest convolution for each shape is searched for
    return (
        (_DETERMINISTIC, (True, False), None),
        (_FILL, False, None),  # which writes NaN into all that is allocated
        # In evaluation a whole attention layer takes a kernel of its own, and one with hooks or split weights another.
        (_FASTPATH, False, None),
        (_BENCHMARK, False, searched),
        (_COMPILER, "1", None),  # the compiler must not choose kernels by speed either
        (_INDUCTOR, True, None),
        (_INDUCTOR_ELSEWHERE, True, None),
        (_THREADS, threads, None),
    )


def pin(*, exact: bool, matmul: str, device: torch.device) -> None:
    """Set the process's switches for a run, and take back what the run before it turned.

    Products of float32, convolutions too, get the precision `matmul` in each run. Exact further means: one thread on a
    CPU, deterministic kernels, no choice of kernels by speed, and one way through an attention layer, with hooks on it
    or without. A plain run has every other switch as the caller had it, what they changed since included.

    Raises:
        ConfigError: exact, and cuBLAS was begun without a workspace that makes it deterministic. No switch is turned.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"  # convolutions have a switch of their own, which is on
    _turn({switch: pinned if exact else plain for switch, pinned, plain in _table(device)})
    if not exact:
        _unpin_compiler()
    elif device.type == "cuda":
        _check_cublas(device)


def pin_compiler() -> None:
    """Have a compiled model's kernels follow from a micro-batch's shapes alone, not from those seen before.

    So there are no dynamic shapes, and no function falls back to eager for having seen too many: that is an error. It
    holds until the next plain run.
    """
    config: Any = importlib.import_module(_DYNAMO)
    wanted = (
        False,
        False,  # it cuts a graph where DDP has its buckets, and elsewhere not
        max(config.recompile_limit, _SHAPES),
        True,
    )
    _change_compiler({each: value for both, value in zip(_DYNAMOS, wanted, strict=True) for each in both})


def _unpin_compiler() -> None:
    switches = [each for both in _DYNAMOS for each in both]
    if any(switch.name in _turned for switch in switches):
        _change_compiler(dict.fromkeys(switches))


def _change_compiler(wanted: Mapping[_ProcessSetting, Any]) -> None:
    before = [switch.read() for switch in wanted]
    _turn(wanted)
    if before != [switch.read() for switch in wanted]:
        # What was compiled so far counts toward the recompile limit, and may have dynamic shapes: it is compiled again.
        importlib.import_module("torch._dynamo").reset()


def _turn(wanted: Mapping[_ProcessSetting, Any]) -> None:
    """Write each value; None: what the caller had, unless they have changed it since."""
    found = [(switch, value, switch.read()) for switch, value in wanted.items()]  # one switch may change another
    for switch, value, now in found:
        turned = _turned.pop(switch.name, None)
        if turned is not None and turned.ours != now:
            turned = None
        if value is not None:
            _turned[switch.name] = _Turned(now if turned is None else turned.before, value)
            switch.write(value)
        elif turned is not None:
            switch.write(turned.before)


def _check_cublas(device: torch.device) -> None:
    """Raise ConfigError where cuBLAS cannot be deterministic any more in this process: a product is tried.

    ATen reads CUBLAS_WORKSPACE_CONFIG once, at the first product of a process, so that setting it now may be too late.
    """
    ones = torch.ones(2, 2, device=device)
    try:
        torch.mm(ones, ones)
        return
    except RuntimeError as error:
        refused = error
    _turn({switch: None for switch, *_ in _table(device)})
    kept = [(switch, switch.read()) for switch in (_DETERMINISTIC, _INDUCTOR)]
    _DETERMINISTIC.write((False, False))
    try:
        torch.mm(ones, ones)  # raises where the device itself is at fault
    finally:
        for switch, value in kept:
            switch.write(value)
    raise ConfigError(
        "--exact and --guards.audit: cuBLAS started without CUBLAS_WORKSPACE_CONFIG=:4096:8 in this process (now it is "
        f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'not set')}); set it before Python starts"
    ) from refused


def keep_fastpath_off() -> None:
    """Turn the fast path of attention layers off for good: no later `pin` turns it on again."""
    _turned.pop(_FASTPATH.name, None)
    _FASTPATH.write(False)


def autotuned() -> list[str]:
    """The variables that tell the compiler to choose kernels by speed, which differs from run to run."""
    return [name for name in _AUTOTUNE if os.environ.get(name) == "1"]


def check_graphs() -> None:
    """Raises ConfigError where the compiler was told to record CUDA graphs: these write each gradient into one place
    (pytorch#169545), so that accumulating micro-batches would add the last one alone, several times."""
    if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        raise ConfigError(
            "--compile cannot hold with TORCHINDUCTOR_CUDAGRAPHS=1, which overwrites the gradients that a step "
            "accumulates; unset it"
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Raises ConfigError where the device cannot multiply matrices in the precision's dtype: it is tried."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}.get(precision)
    if dtype is None:
        return
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        torch.mm(ones, ones)
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"--precision {precision}: {device} cannot do it ({line}); use --precision float32"
        ) from error
