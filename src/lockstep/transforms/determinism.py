"""Set the process settings that change results, before a run builds its model.

pin(exact=True, matmul="highest", device=world.device)      # then a plain run, which restores the caller's settings
pin(exact=False, matmul="high", device=world.device)
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lockstep.errors import ConfigError

__all__ = ["check_graphs", "check_precision", "keep_fastpath_off", "list_autotuning", "pin", "pin_compiler"]

_AUTOTUNE = tuple(f"TORCHINDUCTOR_MAX_AUTOTUNE{which}" for which in ("", "_POINTWISE", "_GEMM"))
# Most shapes of one compiled function, before its recompilation fails.
_SHAPE_LIMIT = 64
# A private module of torch, where torch.compile has its settings; it is never loaded here.
_DYNAMO = "torch._dynamo.config"


class _ProcessSetting(NamedTuple):
    """A setting of the whole process.

    Attributes:
        name: key in the tables below.
        read: returns its current value.
        write: sets it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class _Override(NamedTuple):
    """Values of a setting: the caller's, and the one that lockstep set."""

    before: Any  # the caller's value
    ours: Any


def _variable(name: str) -> _ProcessSetting:
    """Return the setting of an environment variable; None: not set."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return _ProcessSetting(name, lambda: os.environ.get(name), write)


def _setting(module: str, name: str, unloaded: Callable[[], Any] = lambda: None) -> _ProcessSetting:
    """Return the setting of a module's name, without loading the module.

    Until the module is loaded, the value is the result of `unloaded`.
    """

    def read() -> Any:
        if module in sys.modules:
            return getattr(sys.modules[module], name)
        return unloaded()

    def write(value: Any) -> None:
        if module in sys.modules:
            setattr(sys.modules[module], name, value)

    return _ProcessSetting(f"{module}.{name}", read, write)


def _default(module: str, name: str, unloaded: Callable[[], Any] = lambda: None) -> _ProcessSetting:
    """Return the same setting for all other threads.

    Torch keeps a value for the thread that sets it, and a default for others. Autograd has a thread for each device,
    where a compiled model's backward is compiled.
    """

    def entry() -> Any:
        # Private to torch: the entries of a config module, with a default for all threads.
        return getattr(sys.modules.get(module), "_config", {}).get(name)

    def read() -> Any:
        if entry():
            return entry().default
        return unloaded()

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
# For an inductor that is loaded later, and for child processes.
_COMPILER = _variable("TORCHINDUCTOR_DETERMINISTIC")
_INDUCTOR, _INDUCTOR_ELSEWHERE = (
    kind("torch._inductor.config", "deterministic", lambda: os.environ.get(_COMPILER.name) == "1")
    for kind in (_setting, _default)
)
_THREADS = _ProcessSetting("threads", torch.get_num_threads, torch.set_num_threads)
_DYNAMOS = tuple(
    (_setting(_DYNAMO, name), _default(_DYNAMO, name))
    for name in ("automatic_dynamic_shapes", "optimize_ddp", "recompile_limit", "fail_on_recompile_limit_hit")
)

# By setting name: the settings that lockstep has changed from the caller's value.
_overrides: dict[str, _Override] = {}


def _table(device: torch.device) -> tuple[tuple[_ProcessSetting, Any, Any], ...]:
    """List (setting, value of an exact run, value of a plain run).

    None: the caller's value.

    They are written in this order: `torch.use_deterministic_algorithms` changes inductor's setting too.
    """
    # CPU kernels split sums by the number of threads.
    threads = 1 if device.type == "cpu" else None
    # A plain run searches the fastest convolution for each shape.
    searched = True if device.type == "cuda" else None
    return (
        (_DETERMINISTIC, (True, False), None),
        # The option fills new allocations with NaN, which costs time and changes nothing.
        (_FILL, False, None),
        # In evaluation a whole attention layer would use a special kernel, but not with hooks or sharded weights.
        (_FASTPATH, False, None),
        (_BENCHMARK, False, searched),
        # The compiler must not choose kernels by speed.
        (_COMPILER, "1", None),
        (_INDUCTOR, True, None),
        (_INDUCTOR_ELSEWHERE, True, None),
        (_THREADS, threads, None),
    )


def pin(*, exact: bool, matmul: str, device: torch.device) -> None:
    """Set the process's settings for a run, and restore those of the run before.

    Every run sets the precision `matmul` of float32 products, including convolutions. Exact also means: one thread on
    a CPU, deterministic kernels, no choice of kernels by speed, and one code path through an attention layer with or
    without hooks. A plain run restores every other setting to the caller's value, including the caller's later
    changes.

    Raises:
        ConfigError: exact, but cuBLAS was started without a workspace that makes it deterministic. Nothing is changed.
    """
    torch.set_float32_matmul_precision(matmul)
    # Convolutions have a setting of their own, which is on by default.
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
    _write_settings({switch: pinned if exact else plain for switch, pinned, plain in _table(device)})
    if not exact:
        _unpin_compiler()
    elif device.type == "cuda":
        _check_cublas(device)


def pin_compiler() -> None:
    """Make a compiled model's kernels depend only on a micro-batch's shapes, not on earlier ones.

    Disables dynamic shapes, and turns a fallback to eager after too many shapes into an error. Holds until the next
    plain run.
    """
    config: Any = importlib.import_module(_DYNAMO)
    # The second splits a graph at DDP's buckets, which only DDP has.
    values = [False, False, max(config.recompile_limit, _SHAPE_LIMIT), True]
    _change_compiler({setting: value for both, value in zip(_DYNAMOS, values, strict=True) for setting in both})


def _unpin_compiler() -> None:
    switches = [setting for both in _DYNAMOS for setting in both]
    if any(switch.name in _overrides for switch in switches):
        _change_compiler(dict.fromkeys(switches))


def _change_compiler(values: Mapping[_ProcessSetting, Any]) -> None:
    before = [switch.read() for switch in values]
    _write_settings(values)
    if before != [switch.read() for switch in values]:
        # Earlier compilations count towards the limit, and may have dynamic shapes, so compile again.
        importlib.import_module("torch._dynamo").reset()


def _write_settings(values: Mapping[_ProcessSetting, Any]) -> None:
    """Write each value; None restores the caller's, unless the caller has changed it since."""
    # Read all values before the first write, since one setting may change another.
    current = [(switch, value, switch.read()) for switch, value in values.items()]
    for switch, value, current_value in current:
        override = _overrides.pop(switch.name, None)
        if override is not None and override.ours != current_value:
            override = None
        if value is not None:
            _overrides[switch.name] = _Override(current_value if override is None else override.before, value)
            switch.write(value)
        elif override is not None:
            switch.write(override.before)


def _check_cublas(device: torch.device) -> None:
    """Raise ConfigError if cuBLAS can no longer be deterministic in this process.

    Tries a product. ATen reads CUBLAS_WORKSPACE_CONFIG once, at the first product of a process, so setting it now may
    be too late.
    """
    ones = torch.ones(2, 2, device=device)
    try:
        torch.mm(ones, ones)
        return
    except RuntimeError as error:
        refused = error
    _write_settings({switch: None for switch, *_ in _table(device)})
    # Repeat the product without the setting, to tell a refusal from a broken device.
    saved = [(switch, switch.read()) for switch in (_DETERMINISTIC, _INDUCTOR)]
    _DETERMINISTIC.write((False, False))
    try:
        # Raises if the device itself is at fault.
        torch.mm(ones, ones)
    finally:
        for switch, value in saved:
            switch.write(value)
    raise ConfigError(
        "--exact and --guards.audit: cuBLAS started without CUBLAS_WORKSPACE_CONFIG=:4096:8 in this process (now it is "
        f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'not set')}); set it before Python starts"
    ) from refused


def keep_fastpath_off() -> None:
    """Disable the fast path of attention layers for good: no later `pin` enables it again."""
    _overrides.pop(_FASTPATH.name, None)
    _FASTPATH.write(False)


def list_autotuning() -> list[str]:
    """Return the set variables that make the compiler choose kernels by speed.

    The choice differs from run to run.
    """
    names = []
    for name in _AUTOTUNE:
        if os.environ.get(name) == "1":
            names.append(name)
    return names


def check_graphs() -> None:
    """Raise ConfigError if the compiler is set to record CUDA graphs.

    They write each gradient into the same memory (pytorch#169545), so accumulation would add only the last
    micro-batch, several times.
    """
    if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        raise ConfigError(
            "--compile cannot run with TORCHINDUCTOR_CUDAGRAPHS=1, which overwrites the gradients that a step "
            "accumulates; unset it"
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError if the device cannot multiply in the precision's dtype. Tries a product."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}.get(precision)
    if dtype is None:
        return
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        torch.mm(ones, ones)
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"--precision {precision}: {device} does not support it ({line}); use --precision float32"
        ) from error
