"""Contexts in which a trial computes gradients and leaves no trace.

    with training_modes(model, modes), exact_arithmetic(model), own_gradients(parameters):
        loss.backward()

A `GeneratorWatch` reports which generators a loss has used besides those that a trial seeds.
"""

import contextlib
import gc
import pickle
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.task import Task

__all__ = [
    "GeneratorWatch",
    "exact_arithmetic",
    "foreign_gradients",
    "host_states",
    "leaves",
    "own_gradients",
    "training_modes",
]


@contextmanager
def training_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Set the modes of training, but BatchNorm's to evaluation.

    Args:
        modes: of the model's modules in training; others keep theirs.
    """
    before = [(module, module.training) for module in model.modules()]
    for module, mode in before:
        is_training = modes.get(module, mode)
        module.training = is_training and not isinstance(module, _BatchNorm)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def exact_arithmetic(model: nn.Module) -> Iterator[None]:
    """Compute float32 in full, and with kernels whose random numbers a dispatch mode sees."""
    precision = torch.get_float32_matmul_precision()
    # cuDNN draws the dropout between layers of an RNN itself.
    has_dropout = any(isinstance(module, nn.RNNBase) and module.dropout for module in model.modules())
    cudnn: Any = contextlib.nullcontext()
    if torch.cuda.is_available():
        flags = torch.backends.cudnn
        cudnn = flags.flags(flags.enabled and not has_dropout, False, deterministic=True, allow_tf32=False)
    torch.set_float32_matmul_precision("highest")
    try:
        with cudnn, sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def own_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Clear `.grad`, and put it back at the end."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def foreign_gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore `.grad` of leaves of the loss's graph that the model does not own."""
    model_parameters = set(parameters)
    before = []
    for leaf in leaves(loss):
        if leaf not in model_parameters:
            before.append((leaf, leaf.grad))
    for leaf, _ in before:
        # A backward would add to it in place.
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors of a loss's graph."""
    tensors = list[Tensor]()
    visited = set[Any]()
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            tensors.append(node.variable)
        for following, _ in node.next_functions:
            queue.append(following)
    return tensors


# Most objects to look at, the nearest first.
_VISITED = 20_000


def _generators(root: Any) -> list[Any]:
    """Return the generators of numpy and Python that an object can reach.

    Attributes are searched, globals of methods, and so on.
    """
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    generators = list[Any]()
    visited = {id(root)}
    level = [root]
    # Compare types: `isinstance` reads `__class__`, and an object of torch warns about that.
    while level and len(visited) < _VISITED:
        objects = []
        for item in level:
            if not issubclass(type(item), types.ModuleType):
                objects.append(item)
        level = []
        for item in gc.get_referents(*objects):
            if id(item) not in visited and len(visited) < _VISITED:
                visited.add(id(item))
                level.append(item)
                if issubclass(type(item), kinds) and not isinstance(item, random.SystemRandom):
                    generators.append(item)
    return generators


class GeneratorWatch:
    """Context that sees which generators outside of the draws' keys a loss has used.

    Args:
        task: whose generators are watched.
        device: whose default generator is.

    Attributes:
        moved: descriptions of them, at the end.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.moved = list[str]()

    def __enter__(self) -> None:
        self._own = _generators(self._task)
        self._before = self._states()

    def __exit__(self, *_: object) -> None:
        pairs = zip(self._before, self._states(), strict=True)
        self.moved = [name for (name, before), (_, after) in pairs if before != after]

    def _states(self) -> list[tuple[str, bytes]]:
        states = []
        for generator in self._own:
            states.append((f"a {type(generator).__module__}.{type(generator).__name__}", _state_of(generator)))
        # A kernel may draw where no dispatch mode sees it.
        if self._device.type == "cuda":
            # The generator's state is in host memory already.
            states.append(("the device's generator", torch.cuda.get_rng_state(self._device).tolist()))
        return [(name, pickle.dumps(state)) for name, state in states]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def host_states() -> bytes:
    """Return the states of numpy's and Python's default generators."""
    return pickle.dumps((np.random.get_state(legacy=False), random.getstate()))
