"""Write low-precision copies of the weights once a step, so that forwards need no casts.

    copies = WeightCopies.of(model, torch.bfloat16, narrow=False, say=print)    # changes the model in place
    copies.write()                                  # before a step's first forward
    with copies.used():                             # around the forward and the backward of each micro-batch
        loss(model, batch).backward()
    copies.hand_over()                              # before the update: gradients are the float32 weights' own

As in llm.c and Megatron-LM. The parameters stay float32 under their own names: the optimizer, checkpoints, averages,
evaluations and exports do not know of the copies. Outside `use()` the model multiplies by the parameters, which
autocast casts to the same numbers, so a stale copy does no harm there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.files import bytes_text

__all__ = [
    "WeightCopies",
    "copies_of",
    "weight_of",
]


class _WeightCopy(NamedTuple):
    name: str
    master: Tensor
    copy: Tensor


class WeightCopies:
    """The copies of a model's weights, and their gradients.

    Args:
        pairs: the name of each copied parameter, the parameter and its copy.
        dtype: of the copies.
        narrow: add a step's gradients in `dtype`, and hand them over once; else each backward adds its gradient to the
            parameter's float32 `.grad` at once.
    """

    def __init__(self, pairs: Sequence[_WeightCopy], dtype: torch.dtype, narrow: bool) -> None:
        self.narrow = narrow
        self._pairs = pairs
        self._dtype = dtype
        self._on = False
        # The parameters' versions at the last `write`; [] between steps.
        self._versions: list[int] = []
        for _, master, copy in pairs:
            if not narrow:
                # torch gives the method no types.
                copy.register_post_accumulate_grad_hook(partial(_add, master))  # type: ignore[no-untyped-call]
            copy.requires_grad_(master.requires_grad)

    @classmethod
    def of(
        cls, model: nn.Module, dtype: torch.dtype, *, narrow: bool, say: Callable[[str], None] = lambda line: None
    ) -> "WeightCopies":
        """Attach copies of the weights and biases that the model's linear layers multiply by.

        These are torch's own nn.Linear, and modules listed in `multiplies_by`: submodules whose weight their parent
        multiplies by without calling them, such as a token table that is the head too.

        Raises:
            ConfigError: there are none, or a hook on a weight's gradient would no longer see it.
        """
        layers = (m for m in model.modules() if _is_plain_linear(m))
        modules: dict[nn.Module, tuple[str, ...]] = dict.fromkeys(layers, ("weight", "bias"))
        for module in model.modules():
            for name in getattr(module, "multiplies_by", ()):
                modules[getattr(module, name)] = ("weight",)
        names: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters():
            names[parameter] = name
        # Tied weights have one copy.
        copied = dict[Tensor, Tensor]()
        for module, attributes in modules.items():
            for master in (module._parameters.get(attribute) for attribute in attributes):
                if master is not None and master.dtype is torch.float32 and master not in copied:
                    # An nn.Parameter outside any module, so that a compiler treats its shape as fixed.
                    copied[master] = nn.Parameter(master.detach().to(dtype))
        if not copied:
            raise ConfigError(
                "--weight-copies step: the model has no nn.Linear with float32 weights to copy; drop the flag"
            )
        copies = cls([_WeightCopy(names[master], master, copy) for master, copy in copied.items()], dtype, narrow)
        copies._check_hooks()
        for module, attributes in modules.items():
            _attach(module, attributes, copies, copied)
        size = sum(copy.numel() for copy in copied.values())
        count = sum(p.numel() for p in names)
        say(
            f"--weight-copies step: {len(copied)} of {len(names)} parameters have a copy, {size / count:.0%} of their "
            f"numbers ({bytes_text(copies.nbytes)})"
        )
        return copies

    @property
    def nbytes(self) -> int:
        """Bytes of the copies, without gradients."""
        return sum(copy.nbytes for copy in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, _, copy in self._pairs]

    @torch.no_grad()
    def write(self) -> None:
        """Copy the parameters' values into the copies. Raises ConfigError for hooks on gradients, as `of`."""
        self._check_hooks()
        for _, master, copy in self._pairs:
            # The parameter was frozen or unfrozen during the run.
            if copy.requires_grad != master.requires_grad:
                copy.requires_grad_(master.requires_grad)
        # Private to torch: copies all weights in one kernel.
        torch._foreach_copy_(self.tensors, [master for _, master, _ in self._pairs])
        self._versions = [master._version for _, master, _ in self._pairs]

    def find_written(self) -> str:
        """Return the name of a parameter written since this step's `write`; "" if none.

        Detected by torch's version counter.
        """
        pairs = zip(self._pairs, self._versions, strict=False)
        for pair, version in pairs:
            if pair.master._version != version:
                return pair.name
        return ""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Multiply by the copies within the context, under autocast to their dtype."""
        before = self._on
        self._on = True
        try:
            yield
        finally:
            self._on = before

    def serve(self, input: Tensor) -> bool:
        """Whether a product with `input` uses the copies now."""
        device_type = input.device.type
        return (
            self._on and torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is self._dtype
        )

    @torch.no_grad()
    def hand_over(self) -> None:
        """Add the copies' gradients to the parameters', at the end of a step's micro-batches."""
        self._versions = []
        for _, master, copy in self._pairs:
            if copy.grad is not None:
                _add(master, copy)

    def _check_hooks(self) -> None:
        for name, master, _ in self._pairs:
            tensor: Any = master
            # Private to torch, which has no public way to ask for hooks on gradients.
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"--weight-copies step: {name} has a hook on its gradient, which would never run; remove the hook "
                    "or the flag"
                )


def _add(master: Tensor, copy: Tensor) -> None:
    """Move the copy's gradient to the parameter's."""
    gradient = copy.grad
    copy.grad = None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


class CopiedLinear(nn.Linear):
    """torch's nn.Linear, which multiplies by its copies while they are in use."""

    copies: WeightCopies
    weight_copy: Tensor
    bias_copy: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self.copies.serve(input):
            return F.linear(input, self.weight_copy, self.bias_copy)
        return F.linear(input, self.weight, self.bias)


def weight_of(module: Any, input: Tensor) -> Tensor:
    """Return the weight for a product with `input`.

    The module's own, or its copy while that is in use.
    """
    copies = getattr(module, "copies", None)
    weight: Tensor = module.weight if copies is None or not copies.serve(input) else module.weight_copy
    return weight


def copies_of(model: nn.Module) -> WeightCopies | None:
    """Return the copies of a model's weights; None if it has none."""
    candidates = (vars(module).get("copies") for module in model.modules())
    for copies in candidates:
        if isinstance(copies, WeightCopies):
            return copies
    return None


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the layer is torch's nn.Linear with its own forward and a float32 weight parameter."""
    plain = type(module) is nn.Linear and "forward" not in vars(module)
    weight = module._parameters.get("weight")
    return plain and weight is not None and weight.dtype is torch.float32


def _attach(module: nn.Module, attributes: Sequence[str], copies: WeightCopies, copied: dict[Tensor, Tensor]) -> None:
    """Set copies on a module as plain attributes, which are neither parameters nor state."""
    attrs = vars(module)
    for attribute in attributes:
        master = module._parameters.get(attribute)
        attrs[f"{attribute}_copy"] = None if master is None else copied.get(master)
    # The layer's weight is not float32.
    if attrs["weight_copy"] is None:
        return
    attrs["copies"] = copies
    if type(module) is nn.Linear:
        # Change the class and not the instance's forward, which other techniques wrap.
        module.__class__ = CopiedLinear
