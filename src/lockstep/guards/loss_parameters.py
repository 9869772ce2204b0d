"""Find tensors that a loss trains although the model does not have them.

    check = LossParameters(engine.model, task)
    with check.forward():
        loss = task.loss(engine.model, batch)
    check.look(loss, batch)     # before the backward
    ...
    del loss
    check.refuse()              # after the backward

Such tensors (learned loss weights, the centres of ArcFace) would get a gradient and no update.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lockstep.errors import ConfigError
from lockstep.task import Task, user_task
from lockstep.tensors import is_dtensor

__all__ = ["LossParameters"]

_MAX_SHOWN = 3


@final
class LossParameters:
    """A search for leaves of a loss's graph that do not belong to the model.

    Args:
        model: the engine's.
        task: the run's.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._model = model
        self._task = task
        self._outputs: set[Any] = set()
        self._leaves: list[weakref.ref[Tensor]] = []
        # Private to torch: `compile` leaves no public trace.
        self._is_compiled = model._compiled_call_impl is not None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note where the graph of the model's outputs begins.

        A model that is compiled as a whole would compile the hook too, so nothing is noted there.
        """
        if self._is_compiled:
            yield
            return

        def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            tensors = []
            for output_leaf in pytree.tree_leaves(outputs):
                if isinstance(output_leaf, Tensor):
                    tensors.append(output_leaf)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    self._outputs.add(tensor.grad_fn)

        hook = self._model.register_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def look(self, loss: Tensor, batch: Any) -> None:
        """Collect a loss's leaves that are neither the model's nor the batch's."""
        known = {id(parameter) for parameter in self._model.parameters()}
        known |= {id(p) for model in self._task.fixed_models.values() for p in model.parameters()}
        for input_leaf in pytree.tree_leaves(batch):
            known.add(id(input_leaf))
        leaves = []
        for leaf in self._search(loss):
            if id(leaf) not in known:
                leaves.append(leaf)
        # Weak references: a leaf that belongs to the loss alone is gone after the backward.
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        self._outputs = set()

    def refuse(self) -> None:
        """Raise ConfigError for leaves that outlive the loss, since nothing would train them.

        A leaf that the loss made for itself, such as the factor of a gradient penalty, is gone with its graph. One that
        an optimizer in the task's attributes has (a critic's) is trained by the task itself.
        """
        leaves = []
        for ref in self._leaves:
            if (leaf := ref()) is not None:
                leaves.append(leaf)
        self._leaves = []
        if not leaves:
            return
        names = dict(_own_tensors(user_task(self._task)))
        trained = _find_optimized(user_task(self._task))
        leaves = [leaf for leaf in leaves if id(leaf) not in trained]
        # Leaves that are no mistake: gathered parameters of a sharded model, and copies of weights that compiled code
        # reads.
        if self._is_compiled or any(map(is_dtensor, self._model.parameters())):
            leaves = [leaf for leaf in leaves if id(leaf) in names]
        uses_by_name = [names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}") for leaf in leaves]
        if not uses_by_name:
            return
        if len(uses_by_name) > _MAX_SHOWN:
            more = f" and {len(uses_by_name) - _MAX_SHOWN} more"
        else:
            more = ""
        uses = ", ".join(uses_by_name[:_MAX_SHOWN]) + more
        raise ConfigError(
            f"the task's `loss` uses {uses}, which require gradients and are not in the model, so nothing would train "
            "them: return them from model(), as a part of the module, or freeze them with requires_grad_(False)"
        )

    def _search(self, loss: Tensor) -> Iterator[Tensor]:
        visited = set(self._outputs)
        queue = [loss.grad_fn]
        while queue:
            node: Any = queue.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            for following, _ in node.next_functions:
                queue.append(following)


def _find_optimized(owner: Any) -> set[int]:
    """Return the ids of what the optimizers in the attributes of a task train."""
    values = vars(owner).values() if hasattr(owner, "__dict__") else ()
    optimizers = []
    for value in values:
        if isinstance(value, Optimizer):
            optimizers.append(value)
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _own_tensors(owner: Any) -> Iterator[tuple[int, str]]:
    """Yield the ids and names of a task's own tensors.

    They are in its attributes, and in the modules and containers there.
    """
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if isinstance(value, nn.Module):
            for path, parameter in value.named_parameters():
                yield id(parameter), f"task.{name}.{path}"
            continue
        if isinstance(value, list | tuple):
            entries = []
            for index, member in enumerate(value):
                entries.append((f"task.{name}[{index}]", member))
        elif isinstance(value, dict):
            entries = [(f"task.{name}[{key!r}]", member) for key, member in value.items()]
        else:
            entries = [(f"task.{name}", value)]
        yield from ((id(member), path) for path, member in entries if isinstance(member, Tensor))
