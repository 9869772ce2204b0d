"""Step torch's fused Adam and AdamW with little besides their kernel.

if not fused_step(optimizer): optimizer.step()

Around the kernel torch enters a profiler's record, chains hooks, sorts tensors by device, and checks its arguments, for
each group: more than the update of a small model takes. The kernel gets the same tensors and numbers here, so the bits
are the same.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["fused_step"]

_KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW)
_UNUSUAL = ("amsgrad", "capturable", "differentiable")
_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
_IS_SPARSE = attrgetter("is_sparse")
_KIND = attrgetter("dtype", "device")
_STATES = ("exp_avg", "exp_avg_sq", "step")
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def fused_step(optimizer: Any) -> bool:
    """Take the step of a fused Adam or AdamW; return whether it did.

    If it returns False, it has changed nothing, and torch must take the step.

    torch must take a first step, which makes the states; a step that anything observes (a hook, a scheduler, a
    profiler); and a step with anything but one dense gradient per parameter, on one device and of one dtype a group.
    """
    if type(optimizer) not in _KINDS or _is_observed(optimizer):
        return False
    state = optimizer.state
    lists_by_group = list[tuple[dict[str, Any], _Lists]]()
    steps = list[Tensor]()
    for group in optimizer.param_groups:
        lists = _lists_of(group, state)
        if lists is None or (steps and lists[4] and lists[4][0].device != steps[0].device):
            return False
        # A group without gradients has nothing to step.
        if lists[0]:
            lists_by_group.append((group, lists))
            steps += lists[4]
    if not steps:
        return True
    scale = getattr(optimizer, "grad_scale", None)
    skip = getattr(optimizer, "found_inf", None)
    with torch.no_grad():
        # torch would turn a number into a tensor again for each count, which takes four times as long.
        if steps[0].is_cpu:
            # Private to torch, as are the kernels below: what its own fused step calls.
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        for group, (parameters, gradients, means, squares, counts) in lists_by_group:
            beta1, beta2 = group["betas"]
            # Private to torch. Both kernels take the same lists.
            kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                parameters,
                gradients,
                means,
                squares,
                [],
                counts,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=scale,
                found_inf=skip,
            )
        if skip is not None:
            # A skipped step must not count. torch's own fused step subtracts `found_inf` in the same way.
            torch._foreach_sub_(steps, [skip] * len(steps))
    return True


def _is_observed(optimizer: Any) -> bool:
    # All of these are private to torch: signs that somebody observes the step, as a scheduler does by replacing it.
    return bool(
        "step" in vars(optimizer)
        or not getattr(type(optimizer).step, "hooked", False)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def _lists_of(group: dict[str, Any], state: Any) -> _Lists | None:
    """Return a group's parameters, gradients, means, mean squares and step counts.

    None: it is an unusual group.
    """
    if not group["fused"] or any(map(group.get, _UNUSUAL)) or Tensor in map(type, (group["lr"], *group["betas"])):
        return None
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    states = [*map(state.get, parameters)]
    if not all(states) or any(map(_IS_SPARSE, gradients)) or len({*map(_KIND, parameters)}) > 1:
        return None
    means, squares, counts = ([values[name] for values in states] for name in _STATES)
    return parameters, gradients, means, squares, counts
