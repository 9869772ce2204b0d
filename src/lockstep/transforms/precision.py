"""Apply a precision, activation checkpointing and compilation to a model.

`parameters_in`, `autocast` and `task_in_precision` set the dtypes of parameters, products and losses.
`checkpoint_blocks` recomputes blocks in the backward. `compile_blocks`, `undo_compile` and `eager` control torch's
compiler.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lockstep.errors import ConfigError
from lockstep.task import HALVES, Task, in_context

__all__ = [
    "AUTOCAST",
    "PARAMETERS",
    "autocast",
    "check_policy",
    "checkpoint_blocks",
    "compile_blocks",
    "eager",
    "is_compiled",
    "is_double",
    "is_fast",
    "parameters_in",
    "task_in_precision",
    "undo_compile",
    "without_autocast",
]


# Ampere: the first with bfloat16 matrix units.
_MIN_CAPABILITY = (8, 0)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for any other device."""
    # ROCm reports numbers with another meaning.
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def is_fast(device: torch.device) -> bool:
    """Whether a device suits bf16 and compilation."""
    capability = compute_capability(device)
    return capability is not None and capability >= _MIN_CAPABILITY


_ATEN = torch.ops.aten
# Outputs that `selective` keeps: matrix products, which cost the most to recompute for the memory of their results.
_SAVED_OPERATORS = [
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
    )
]


def check_policy(policy: str) -> int:
    """Return N, to recompute each N-th block; 0 for "none".

    Raises ConfigError for an unknown policy.
    """
    plain = {"none": 0, "full": 1, "selective": 1}
    if policy in plain:
        return plain[policy]
    policy_name, _, number = policy.partition(":")
    if policy_name != "every" or not number.isascii() or not number.isdigit() or not int(number):
        raise ConfigError(
            f"--activation-checkpointing is '{policy}': choose one of none, full, selective, or every:N as in every:2"
        )
    return int(number)


def checkpoint_blocks(model: nn.Module, policy: str, blocks: Sequence[nn.Module]) -> nn.Module:
    """Recompute the model's `blocks` in the backward. In place; names stay the same.

    Args:
        model: to be changed.
        policy: "none"; "full": each block; "every:N": the N-th, 2N-th, ...; "selective": each, but the outputs of
            matrix products and attention are kept.
        blocks: the repeated blocks, in order.

    Raises:
        ConfigError: no such policy, or no blocks to apply it to.
    """
    interval = check_policy(policy)
    if not interval:
        return model
    if len(blocks) < interval:
        raise ConfigError(
            f"--activation-checkpointing {policy}: the model has {len(blocks)} known blocks, so nothing would be "
            "recomputed; return its repeated blocks from the task's blocks(model), or drop the flag"
        )
    wrap = _recompute_selectively if policy == "selective" else _recompute
    for block in blocks[interval - 1 :: interval]:
        block.forward = wrap(block.forward)
    return model


def _recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*inputs: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return recompute


def _recompute_selectively(forward: Callable[..., Any]) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _SAVED_OPERATORS)

    def recompute(*inputs: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, context_fn=contexts, **kwargs)

    return recompute


@contextmanager
def eager() -> Iterator[None]:
    """Disable compilation and compiled code within the context.

    Does nothing if torch's compiler is not loaded. A torch without `set_stance` still compiles.
    """
    stance: Any = getattr(torch.compiler, "set_stance", None)
    # Private to torch: if the module is not loaded, nothing was compiled, and loading it takes seconds.
    if stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with stance("force_eager"):
        yield


# Extra arguments of torch.compile. A test that counts graphs sets its backend here.
HOW: dict[str, Any] = {}

# --precision -> dtype of the parameters; dtype of autocast
PARAMETERS = {
    "float32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "bf16-true": torch.bfloat16,
    "float64": torch.float64,
}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Dtypes of tensors that are created without a dtype: they follow the precision.
_DEFAULTS = (torch.float32, torch.complex64)
_DOUBLE = (torch.float64, torch.complex128)


def is_double(model: nn.Module) -> bool:
    """Whether all parameters that are not integers are in double precision."""
    dtypes = set()
    for p in model.parameters():
        if p.is_floating_point() or p.is_complex():
            dtypes.add(p.dtype)
    return bool(dtypes) and dtypes <= {*_DOUBLE}


def parameters_in(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_dtype: Sequence[Tensor] = (),
    mixes: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """Convert the model's floating-point parameters and buffers to `dtype`, in place.

    Three kinds of tensors are special:

    - complex ones stay complex: complex128 with float64, complex64 with every other dtype;
    - a frozen parameter in a dtype other than torch's defaults got it on purpose, and keeps it;
    - with bfloat16 a non-persistent floating-point buffer keeps its dtype: it is a table, such as rotary frequencies,
      which bfloat16 would round to other positions.

    Args:
        model: to be converted.
        dtype: the parameters' new dtype.
        keep_dtype: tensors of the model that keep their dtype in any case, without a report.
        mixes: autocast will reconcile the dtypes, so there is nothing to report.
        say: reports a line to the user if the model mixes dtypes that torch may refuse to multiply.
    """
    exempt = set(keep_dtype)
    frozen = {}
    for name, p in model.named_parameters():
        if (
            p not in exempt
            and not p.requires_grad
            and p.dtype not in _DEFAULTS
            and (p.is_floating_point() or p.is_complex())
        ):
            frozen[name] = p
    if dtype is torch.bfloat16:
        tables = {name: b for name, b in _tables(model).items() if b not in exempt}
    else:
        tables = {}
    unchanged = {*frozen.values(), *tables.values(), *exempt}
    if dtype is not torch.float64:
        named = [*model.named_parameters(), *model.named_buffers()]
        double = []
        for name, value in named:
            if value.dtype in _DOUBLE and value not in unchanged:
                double.append(name)
        _report_narrowed(double, dtype, say)
    wide = torch.complex128 if dtype is torch.float64 else torch.complex64

    def cast(tensor: Tensor) -> Tensor:
        if tensor in unchanged:
            return tensor
        if tensor.is_complex():
            return tensor.to(wide)
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    # Private to torch: what nn.Module.to calls. It has no types.
    model._apply(cast)  # type: ignore[no-untyped-call]
    if not mixes:
        _report_dtypes("frozen parameters", {name: p for name, p in frozen.items() if p.dtype is not dtype}, dtype, say)
        _report_dtypes(
            "non-persistent buffers", {name: b for name, b in tables.items() if b.dtype is not dtype}, dtype, say
        )
    return model


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """Return the non-persistent floating-point buffers."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        # Private to torch, which has no public list of non-persistent buffers.
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point()
    }


def _report_narrowed(names: list[str], dtype: torch.dtype, say: Callable[[str], None]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"{names[0]}{more} of the model are float64 and become {_name(dtype)}: --precision float64 keeps them")


def _report_dtypes(kind: str, tensors: dict[str, Tensor], dtype: torch.dtype, say: Callable[[str], None]) -> None:
    if tensors:
        name, tensor = next(iter(tensors.items()))
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        say(
            f"{len(tensors)} {kind} keep a dtype other than {_name(dtype)}: {name} ({_name(tensor.dtype)}){more}; if "
            "torch refuses to multiply the two, cast in the forward, or use --precision bf16"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autocast(model: nn.Module, dtype: torch.dtype, device_type: str, *, float32_outputs: bool = False) -> nn.Module:
    """Run `forward` under autocast: matrix products in `dtype`, sums in float32. Parameters are unchanged.

    Args:
        model: to be changed.
        dtype: of the products.
        device_type: of the model.
        float32_outputs: convert outputs in half precision to float32, as Accelerate does.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(*inputs: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype, enabled=_Switch.on):
            outputs = plain(*inputs, **kwargs)
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A context around the whole loss keeps the casts of weights. Those made here may have no graph in older
            # versions of torch, so a later forward with a graph, as after a teacher's, would lose its gradients.
            torch.clear_autocast_cache()
        if float32_outputs:
            return _in_float32(outputs)
        return outputs

    model.forward = forward
    return model


def _in_float32(value: Any) -> Any:
    """Convert tensors in half precision to float32, in tuples, lists and mappings too."""
    if isinstance(value, Tensor):
        if value.dtype in HALVES:
            return value.float()
        return value
    if isinstance(value, Mapping):
        mapping_type: Any = type(value)
        return mapping_type({key: _in_float32(item) for key, item in value.items()})
    if isinstance(value, tuple | list):
        converted = [_in_float32(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*converted)
        return type(value)(converted)
    return value


class _Switch:
    """Whether autocast is on, in all threads of this process."""

    on = True


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the parameters' dtype within the context: models and tasks."""
    before = _Switch.on
    _Switch.on = False
    try:
        yield
    finally:
        _Switch.on = before


def task_in_precision(task: Task, precision: str, device_type: str, say: Callable[[str], None]) -> Task:
    """Return the task as a plain loop computes it under `torch.autocast`; the object is unchanged.

    `loss`, `outputs`, `step_loss`, `step_loss_rows`, `penalty`, `evaluate` and `metrics` run inside one autocast with
    the forwards that they call; losses come as float32. Of an adapted task (`Task.autocast_scope`) the forward alone
    runs in it, as in its own library: "forward", and with "float32 outputs" these leave it as float32.

    Args:
        task: the run's.
        precision: a value of --precision.
        device_type: of the model.
        say: called once with a line, if a loss comes in half precision although weights and sums are float32.
    """
    dtype = AUTOCAST.get(precision)
    wraps = dtype is not None and task.autocast_scope == "loss"

    def context() -> AbstractContextManager[Any]:
        if wraps:
            return torch.autocast(device_type, dtype, enabled=_Switch.on)
        return nullcontext()

    def report(half: torch.dtype) -> None:
        # With "bf16-true" everything is in half precision, as the user asked.
        if precision != "bf16-true":
            say(
                f"the task's loss came in {_name(half)}, which rounds it to 2 or 3 digits: compute it in float32, from "
                "the model's output.float()"
            )

    return in_context(task, context, report)


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> nn.Module:
    """Compile each of the `blocks`, or the whole model if there are none.

    In place; names stay plain.

    Blocks of one class share their compiled code, so a deep model starts as fast as a shallow one. The part after
    them, up to the loss, is compiled on its own if the model has it as a function, its attribute `ending` (see
    `models.gpt`).
    """
    for module in blocks or [model]:
        if "forward" not in vars(module) and type(module).forward.__module__.startswith("torch."):
            module.forward = _wrap_in_frame(module.forward)
        module.compile(**HOW)
    for module in _with_ending(model) if blocks else ():
        module.ending = torch.compile(module.ending, **HOW)
    return model


def _wrap_in_frame(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward of torch's, since the compiler starts at functions outside torch.

    Without the wrapper an nn.Sequential would stay eager.
    """

    def call_forward(*inputs: Any, **kwargs: Any) -> Any:
        return forward(*inputs, **kwargs)

    return call_forward


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled.

    Then hooks of its modules are traced.
    """
    # Private to torch, unchanged since 2.11: `compile` leaves no public trace.
    return any(module._compiled_call_impl is not None for module in model.modules())


def undo_compile(model: nn.Module) -> nn.Module:
    """Undo `compile_blocks`."""
    for module in model.modules():
        module._compiled_call_impl = None
    for module in _with_ending(model):
        module.ending = inspect.unwrap(module.ending)
    return model


def _with_ending(model: nn.Module) -> list[Any]:
    modules = []
    for module in model.modules():
        if "ending" in vars(module):
            modules.append(module)
    return modules
