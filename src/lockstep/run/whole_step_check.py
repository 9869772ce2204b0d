"""A loss over the whole step (`outputs` and `step_loss`), tried before step 1 on a few samples and their halves.

check_whole_step(trial, training, first)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.world import on_all_ranks
from lockstep.errors import ConfigError
from lockstep.loop import described
from lockstep.passes import unpacked
from lockstep.run.trial import Trial, call
from lockstep.task import Task, has_own
from lockstep.whole_step import checked_outputs

__all__ = ["check_whole_step"]

_FORM = "it must return a tensor of shape [samples, ...], or a tuple, list or dict of such"


def check_whole_step(trial: Trial, training: Batches, first: MicroBatch) -> None:
    """Try `outputs` and `step_loss` on this rank's first micro-batch and on a few samples in halves. Collective.

    Raises:
        ConfigError: they return what they must not; or `step_loss` uses a parameter of the model.
        DataError: one of them fails.
    """
    own = on_all_ranks(trial.world, lambda: _outputs(trial, first))  # collective
    cut = trial.cut(training, 0) if trial.task.divisible else None  # collective
    if cut is None:
        on_all_ranks(trial.world, lambda: _check_loss(trial, own, [own]))  # collective
        return
    parts = (cut.whole, *cut.halves)
    whole, *halves = on_all_ranks(trial.world, lambda: [_outputs(trial, part) for part in parts])  # collective
    on_all_ranks(trial.world, lambda: _check_halves(whole, halves))  # collective
    on_all_ranks(trial.world, lambda: _check_loss(trial, whole, halves))  # collective


def _outputs(trial: Trial, batch: MicroBatch) -> Any:
    """The outputs of a batch, as inputs of the loss."""
    task, model = trial.task, trial.model
    trial.seed()
    with trial.with_graph():
        found = call("outputs", lambda data: task.outputs(model, data), batch.data, model, task)
    if not isinstance(found, Tensor | tuple | list | dict):
        raise ConfigError(f"the task's `outputs` returned {described(found)}: {_FORM}")
    checked_outputs(found)
    tensors, tree = pytree.tree_flatten(found)
    samples = _samples(task, batch)
    if samples is not None and len(tensors[0]) != samples:
        raise ConfigError(
            f"the task's `outputs` returned {described(tensors[0])} for a batch of {samples} samples: {_FORM}"
        )
    if not any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            "the task's `outputs` returned no tensor with a graph, so nothing is learnt: compute it by the model, "
            "without detach() and no_grad()"
        )
    return pytree.tree_unflatten([_leaf(tensor) for tensor in tensors], tree)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    if leaf.dtype in (torch.float16, torch.bfloat16):
        leaf = leaf.float()
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _samples(task: Task, batch: MicroBatch) -> int | None:
    """The samples of a batch, by its first tensor; None where it has none."""
    try:
        return int(Task.count(task, batch.held))
    except ConfigError:
        return None


def _check_halves(whole: Any, halves: list[Any]) -> None:
    tensors, tree = pytree.tree_flatten(whole)
    for half in halves:
        others, other = pytree.tree_flatten(half)
        forms = [[(t.shape[1:], t.dtype) for t in each] for each in (tensors, others)]
        if other != tree or forms[0] != forms[1]:
            odd = next((pair for pair in zip(tensors, others, strict=False) if _row(pair[0]) != _row(pair[1])), None)
            apart = f"{described(odd[0])} and {described(odd[1])}" if odd else "containers of different forms"
            raise ConfigError(
                f"the task's `outputs` returned {apart} for some samples and for half of them: only the number of "
                "samples may differ; pad them to one size"
            )
    rows = [len(pytree.tree_leaves(each)[0]) for each in (whole, *halves)]
    if rows[0] != rows[1] + rows[2]:
        raise ConfigError(
            f"the task's `outputs` returned {rows[0]} rows for some samples, and {rows[1]} and {rows[2]} for their two "
            "halves: each needs one row a sample"
        )


def _row(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.dtype


def _check_loss(trial: Trial, whole: Any, halves: list[Any]) -> None:
    """Compute the loss of these outputs, and look for parameters that it uses."""
    task = trial.task
    if has_own(task, "step_loss_rows"):
        method, first = "step_loss_rows", 0
        for half in halves:
            begin = first
            _check_graph(trial, method, lambda half=half, begin=begin: task.step_loss_rows(half, whole, begin))
            first += len(pytree.tree_leaves(half)[0])
        return
    _check_graph(trial, "step_loss", lambda: task.step_loss(whole))


def _check_graph(trial: Trial, method: str, action: Any) -> None:
    trial.seed()
    with torch.enable_grad():
        loss, _ = unpacked(call(method, lambda _: action(), None), method)
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.plain.named_parameters()}
    names |= {parameter: name for name, parameter in trial.model.named_parameters() if parameter not in names}
    for leaf in _leaves(loss):
        if leaf in names or isinstance(leaf, nn.Parameter):
            name = names.get(leaf, "a parameter")
            raise ConfigError(
                f"the task's `{method}` uses {name} of the model, whose gradient would be counted on every rank: "
                f"return it from `outputs`, as {name.rpartition('.')[2]}.repeat(samples)"
            )


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that a graph ends in."""
    found, seen, coming = list[Tensor](), set[Any](), [loss.grad_fn]
    while coming:
        node = coming.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        coming += [following for following, _ in node.next_functions]
    return found
