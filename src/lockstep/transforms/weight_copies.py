"""Weights in autocast's dtype beside the float32 ones, written once a step, so that no forward has to cast them.

    copies = WeightCopies.of(model, torch.bfloat16, narrow=False, say=print)    # changes the model in place
    copies.write()                                  # before a step's first forward
    with copies.used():                             # around the forward and the backward of each micro-batch
        loss(model, batch).backward()
    copies.hand_over()                              # before the update: gradients are the float32 weights' own

llm.c and Megatron-LM train so. The parameters stay float32 under their own names: the optimizer, checkpoints, averages,
evaluations and exports do not know of the copies. What is computed outside `used()` multiplies by the parameters, cast
by autocast to the same numbers, so that a copy that was not written anew can do no harm there.
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

__all__ = ["CopiedLinear", "WeightCopies", "copies_of", "operands_of", "weight_of"]


class _WeightCopy(NamedTuple):
    name: str
    master: Tensor
    copy: Tensor


class WeightCopies:
    """The copies of a model's weights, and their gradients.

    Args:
        pairs: of each copied parameter its name, itself and its copy.
        dtype: of the copies.
        narrow: a step's gradients are added up in `dtype`, and handed over once; else each is added to the parameter's
            float32 `.grad` as soon as a backward has it.
    """

    def __init__(self, pairs: Sequence[_WeightCopy], dtype: torch.dtype, narrow: bool) -> None:
        self.narrow, self._pairs, self._dtype = narrow, pairs, dtype
        self._on = False
        self._versions: list[int] = []  # of the parameters when they were last written; [] between steps
        for _, master, copy in pairs:
            if not narrow:
                copy.register_post_accumulate_grad_hook(partial(_add, master))  # type: ignore[no-untyped-call]
            copy.requires_grad_(master.requires_grad)

    @classmethod
    def of(
        cls, model: nn.Module, dtype: torch.dtype, *, narrow: bool, say: Callable[[str], None] = lambda line: None
    ) -> "WeightCopies":
        """Gives the model copies of the weights and biases that its linear layers multiply by.

        These are torch's own nn.Linear, layers that set `takes_copies` since they ask `operands_of`, and what a module
        names in `multiplies_by`: submodules by whose weight it multiplies without calling them, such as a token table
        that is the head too.

        Raises:
            ConfigError: there are none, or a hook on a weight's gradient would no longer see it.
        """
        layers = (m for m in model.modules() if _is_plain_linear(m) or getattr(m, "takes_copies", False))
        modules: dict[nn.Module, tuple[str, ...]] = dict.fromkeys(layers, ("weight", "bias"))
        for module in model.modules():
            modules |= {getattr(module, name): ("weight",) for name in getattr(module, "multiplies_by", ())}
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        copied = dict[Tensor, Tensor]()  # tied weights have one copy
        for module, attributes in modules.items():
            for master in (module._parameters.get(attribute) for attribute in attributes):
                if master is not None and master.dtype is torch.float32 and master not in copied:
                    # A parameter of no module, so that a compiler takes its shape as fixed.
                    copied[master] = nn.Parameter(master.detach().to(dtype))
        if not copied:
            raise ConfigError(
                "--weight-copies step: the model has no nn.Linear with float32 weights, which alone are copied; leave "
                "it out"
            )
        copies = cls([_WeightCopy(names[master], master, copy) for master, copy in copied.items()], dtype, narrow)
        copies._check_hooks()
        for module, attributes in modules.items():
            _attach(module, attributes, copies, copied)
        size, whole = sum(copy.numel() for copy in copied.values()), sum(p.numel() for p in names)
        say(
            f"--weight-copies step: {len(copied)} of {len(names)} parameters have a copy, {size / whole:.0%} of their "
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
        """Gives the copies the parameters' values. Raises ConfigError as `of` does for hooks on gradients."""
        self._check_hooks()
        for _, master, copy in self._pairs:
            if copy.requires_grad != master.requires_grad:  # frozen or thawed on the way
                copy.requires_grad_(master.requires_grad)
        torch._foreach_copy_(self.tensors, [master for _, master, _ in self._pairs])
        self._versions = [master._version for _, master, _ in self._pairs]

    def moved(self) -> str:
        """The name of a parameter that was written since `write` in this step, as torch counts it; "": none."""
        pairs = zip(self._pairs, self._versions, strict=False)
        return next((pair.name for pair, version in pairs if pair.master._version != version), "")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it the model multiplies by the copies, where it computes under autocast to their dtype."""
        before, self._on = self._on, True
        try:
            yield
        finally:
            self._on = before

    def serve(self, input: Tensor) -> bool:
        """Whether a product with `input` is to take the copies now."""
        kind = input.device.type
        return self._on and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self._dtype

    @torch.no_grad()
    def hand_over(self) -> None:
        """Adds the gradients that the copies have to those of the parameters; a step's micro-batches are over."""
        self._versions = []
        for _, master, copy in self._pairs:
            if copy.grad is not None:
                _add(master, copy)

    def _check_hooks(self) -> None:
        for name, master, _ in self._pairs:
            held: Any = master
            if held._backward_hooks or held._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"--weight-copies step: {name} has a hook on its gradient, which would see none; leave either out"
                )


def _add(master: Tensor, copy: Tensor) -> None:
    """Moves the copy's gradient to the parameter's."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


class CopiedLinear(nn.Linear):
    """torch's nn.Linear, which multiplies by its copies while these are in use."""

    copies: WeightCopies
    weight_copy: Tensor
    bias_copy: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self.copies.serve(input):
            return F.linear(input, self.weight_copy, self.bias_copy)
        return F.linear(input, self.weight, self.bias)


def weight_of(module: Any, input: Tensor) -> Tensor:
    """What `input` is to be multiplied by: the module's weight, or its copy while that is in use."""
    copies = getattr(module, "copies", None)
    found: Tensor = module.weight if copies is None or not copies.serve(input) else module.weight_copy
    return found


def operands_of(module: Any, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias that `input` is to meet: the module's, or their copies while those are in use."""
    copies = getattr(module, "copies", None)
    if copies is None or not copies.serve(input):
        return module.weight, module.bias
    return module.weight_copy, module.bias_copy


def copies_of(model: nn.Module) -> WeightCopies | None:
    """The copies that a model's layers have; None: they have none."""
    found = (vars(module).get("copies") for module in model.modules())
    return next((copies for copies in found if isinstance(copies, WeightCopies)), None)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether its forward is torch's, of parameters: not one that is derived, replaced, or whose weight is computed."""
    plain = type(module) is nn.Linear and "forward" not in vars(module)
    weight = module._parameters.get("weight")
    return plain and weight is not None and weight.dtype is torch.float32


def _attach(module: nn.Module, attributes: Sequence[str], copies: WeightCopies, copied: dict[Tensor, Tensor]) -> None:
    """Puts copies into a module as plain attributes, which are neither its parameters nor its state."""
    held = vars(module)
    for attribute in attributes:
        master = module._parameters.get(attribute)
        held[f"{attribute}_copy"] = None if master is None else copied.get(master)
    if held["weight_copy"] is None:  # its weight is not float32
        return
    held["copies"] = copies
    if type(module) is nn.Linear:
        module.__class__ = CopiedLinear
