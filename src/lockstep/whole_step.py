"""Compute a loss over all samples of a step, exactly on any number of ranks.

    whole = WholeStep(step_loss=task.step_loss, world=world, micro_batches=8)
    losses = whole([(0, 1.0, outputs), (1, 1.0, outputs)])     # of this rank's micro-batches, detached; collective
    engine.backward(whole.surrogate(0, task.outputs(model, batch)), 1.0)

This serves `Task.outputs` and `Task.step_loss`. Pass 1 runs the forwards and gathers their outputs in the order of the
micro-batches. Every rank computes the loss of all outputs, and its gradient with respect to them. Pass 2 repeats the
forwards with the same seeds, and runs the backward of sum(outputs * gradient), whose gradient is the step's
("GradCache", Gao et al., arXiv 2101.06983). A rank with one micro-batch keeps the graph of pass 1. The outputs of all
samples take memory twice.

Pass 1 makes a graph too, and drops it: kernels that depend on whether a gradient is needed could otherwise compute
other bits on a rank that keeps its graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.data.batches import MicroBatch
from lockstep.distributed import collectives
from lockstep.distributed.balance import ShareSchedule, equal_shares
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.exact import Subtotals, Subtrees, TreeSpan, piece_of_sum
from lockstep.errors import ConfigError, LockstepError
from lockstep.passes import NO_AUDIT, SURROGATE, Passes, StepControl, describe_value, split_loss
from lockstep.records import Number, number_of
from lockstep.task import HALVES, Task, has_own
from lockstep.tensors import as_bytes, from_bytes
from lockstep.transforms.batchnorm import empty_slot

__all__ = [
    "WHOLE_LOSS",
    "WholeStepPasses",
    "check_outputs",
    "make_whole_step",
    "zero_of",
]

WHOLE_LOSS = -1  # micro-batch index of the loss itself, for its seed


class _OutputForm(NamedTuple):
    """The tree of the outputs, and each tensor's row shape and dtype."""

    tree: Any
    rows: tuple[tuple[torch.Size, torch.dtype], ...]


class WholeStep:
    """The loss over a step's samples, and its gradient with respect to their outputs.

    Args:
        step_loss: outputs of all samples -> the loss.
        rows: instead of it, (own, whole, first) -> the part of one micro-batch; see `Task.step_loss_rows`.
        world: the ranks.
        micro_batches: M.
        sharing: which micro-batches each rank computes; None: the same number each.

    Attributes:
        samples: of the last step, over all ranks.
        numbers: the task's own numbers of the last step: micro-batch (or WHOLE_LOSS), numbers by name, and whether
            this rank counts them.
    """

    def __init__(
        self,
        *,
        step_loss: Callable[[Any], Any] | None = None,
        rows: Callable[[Any, Any, int], Any] | None = None,
        world: World,
        micro_batches: int,
        sharing: ShareSchedule | None = None,
    ) -> None:
        self._step_loss = step_loss
        self._rows = rows
        self._world = world
        self._micro_batches = micro_batches
        self._sharing = sharing
        self.samples = 0
        self.numbers: list[tuple[int, dict[str, Number], bool]] = []
        self._form: _OutputForm | None = None
        self._gradients: dict[int, list[Tensor | None]] = {}

    def __call__(self, batches: Sequence[tuple[int, float, Any]], *, gradient: bool = True) -> list[Tensor]:
        """Compute the loss of the step. Collective.

        Args:
            batches: (index, weight, outputs) of each of this rank's micro-batches, in order; an empty slot, of weight
                0, only has the form.
            gradient: also compute the gradient with respect to the outputs, for `surrogate`.

        Returns:
            0-dim tensors whose sum over all ranks is the step's loss.

        Raises:
            LockstepError: the outputs differ in form between the micro-batches.
            PeerError: a rank was lost.
        """
        leaves = []
        for index, weight, outputs in batches:
            leaves.append((index, weight, self._leaves(index, outputs)))
        counted = [(index, tensors) for index, weight, tensors in leaves if weight]
        # A rank without samples contributes columns of no rows, so that it can take part in the gather.
        columns = []
        for k in range(self._width):
            columns.append(torch.cat([tensors[k] for _, tensors in counted] or [leaves[0][2][k][:0]]))
        whole, first = self._gather(columns)
        self.samples = len(whole[0])
        self.numbers = []
        with torch.set_grad_enabled(gradient):
            inputs = [_leaf(column, gradient) for column in whole]
            if self._step_loss:
                losses, row_gradients = self._at_once(inputs, counted, first)
            else:
                losses, row_gradients = self._in_parts(inputs, counted, first)
        self._gradients = dict(zip((index for index, _ in counted), row_gradients, strict=True))
        return losses

    def surrogate(self, index: int, outputs: Any) -> Tensor:
        """Make a 0-dim loss with the step's gradient, from a micro-batch's outputs.

        Args:
            outputs: with their graph.

        Raises:
            ConfigError: the outputs have no graph.
        """
        tensors = self._leaves(index, outputs)
        gradients = self._gradients.get(index)
        # An empty slot has no gradient. Its backward runs with ones, and the engine multiplies it by weight 0.
        if gradients is None:
            gradients = []
            for tensor in tensors:
                if tensor.requires_grad:
                    gradients.append(torch.ones_like(tensor))
                else:
                    gradients.append(None)
        pairs = []
        for t, g in zip(tensors, gradients, strict=True):
            if g is not None and t.requires_grad:
                pairs.append((t, g))
        if not pairs:
            raise ConfigError(
                "the task's `step_loss` does not depend on the model; compute it from the outputs, without "
                "detach() and no_grad()"
            )
        return torch.stack([(t.to(g.dtype) * g).sum() for t, g in pairs]).sum()

    @property
    def _width(self) -> int:
        if self._form:
            return len(self._form.rows)
        return 0

    def _leaves(self, index: int, outputs: Any) -> list[Tensor]:
        """List the outputs' tensors, and check that their form is that of the first outputs."""
        tensors, tree = pytree.tree_flatten(check_outputs(outputs))
        form = _OutputForm(tree, tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors))
        self._form = self._form or form
        if form != self._form:
            own = _describe_form(form)
            other = _describe_form(self._form)
            raise LockstepError(
                f"{self._world.label}: the task's `outputs` of micro-batch {index} are {own}, but those of "
                f"another are {other}: only the number of samples may differ; pad them to one size"
            )
        return tensors

    def _gather(self, columns: list[Tensor]) -> tuple[list[Tensor], int]:
        """Gather the rows of all ranks in the micro-batches' order. Collective.

        Returns:
            The columns, and the index of this rank's first row.
        """
        if self._world.size == 1:
            return [column.detach() for column in columns], 0
        size = len(columns[0])
        rank = self._world.rank
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world.size)]
        # Send bytes: one collective for all dtypes, including those that the backend does not support.
        widths = [shape.numel() * dtype.itemsize for shape, dtype in self._first_form().rows]
        # All ranks exchange their numbers of rows on the host first, since an all-gather needs equal sizes.
        collectives.all_gather(counts, torch.tensor([size]), group=self._world.control)  # collective
        sizes = [int(count) for count in counts]
        send = torch.zeros(max(sizes), sum(widths), dtype=torch.uint8, device=columns[0].device)
        if size:
            byte_columns = []
            for column, width in zip(columns, widths, strict=True):
                byte_columns.append(as_bytes(column).view(size, width))
            send[:size] = torch.cat(byte_columns, dim=1)
        received = [torch.empty_like(send) for _ in sizes]
        # All ranks gather the padded rows; the loss needs the outputs of all samples.
        collectives.all_gather(received, send, group=self._world.group)  # collective
        packed = torch.cat([rows_of_rank[:count] for rows_of_rank, count in zip(received, sizes, strict=True)])
        blocks = packed.split_with_sizes(widths, dim=1)
        whole = []
        for block, (shape, dtype) in zip(blocks, self._first_form().rows, strict=True):
            whole.append(from_bytes(block, dtype, (len(packed), *shape)))
        return whole, sum(sizes[:rank])

    def _at_once(
        self, inputs: list[Tensor], own: list[tuple[int, list[Tensor]]], first: int
    ) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Compute the loss on every rank; the rank that has the first sample reports it."""
        # Every rank computes the same loss, so no second exchange is needed. Only one rank may count it.
        assert self._step_loss is not None
        loss, numbers = split_loss(self._step_loss(self._tree(inputs)), "step_loss")
        gradients = _gradients(loss, inputs)
        losses = [loss.detach()] if own and first == 0 else []
        self._keep_numbers(WHOLE_LOSS, numbers, self.samples, counts=bool(losses))
        return losses, [
            _rows_of(gradients, begin, len(t[0])) for (_, t), begin in zip(own, _first_rows(own, first), strict=True)
        ]

    def _in_parts(
        self, inputs: list[Tensor], own: list[tuple[int, list[Tensor]]], first: int
    ) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Compute the parts of this rank's micro-batches; sum gradients in the tree. Collective."""
        assert self._rows is not None
        gradient = torch.is_grad_enabled()
        losses = list[Tensor]()
        row_gradients = list[list[Tensor | None]]()
        sums = list[Tensor]()
        for (index, tensors), begin in zip(own, _first_rows(own, first), strict=True):
            rows = []
            for column in inputs:
                rows.append(_leaf(column.detach()[begin : begin + len(tensors[0])], gradient))
            loss, numbers = split_loss(self._rows(self._tree(rows), self._tree(inputs), begin), "step_loss_rows")
            self._keep_numbers(index, numbers, len(tensors[0]), counts=True)
            gradients = _gradients(loss, [*rows, *inputs])
            losses.append(loss.detach())
            row_gradients.append(gradients[: len(rows)])
            if gradient:
                sums.append(_flatten(gradients[len(rows) :], inputs))
        if not gradient:
            return losses, row_gradients
        # Every part depends on all rows, so each rank has a gradient for every other rank's rows.
        total = self._sum(sums, inputs)
        shared = _unflatten(total, inputs)
        both = []
        for (_, tensors), begin, direct in zip(own, _first_rows(own, first), row_gradients, strict=True):
            others = _rows_of(shared, begin, len(tensors[0]))
            both.append([b if a is None else a if b is None else a + b for a, b in zip(direct, others, strict=True)])
        return losses, both

    def _keep_numbers(self, index: int, numbers: Mapping[str, Any], samples: int, *, counts: bool) -> None:
        """Store the numbers of the loss, or of a part of it, weighted by samples."""
        numbers_by_name = {}
        for name, value in numbers.items():
            numbers_by_name[name] = number_of(value, samples, self.samples)
        self.numbers.append((index, numbers_by_name, counts))

    def _sum(self, vectors: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """Sum over all micro-batches in the fixed tree, bitwise identical at any world size. Collective."""
        if self._sharing:
            shares = self._sharing.now
        else:
            shares = equal_shares(self._micro_batches, self._world.size)
        subtrees = Subtrees(self._micro_batches, self._world, shares)
        ranks = self._world.size
        length = sum(tensor.numel() for tensor in inputs if tensor.requires_grad)
        # Pad to a multiple of the ranks, so that each rank sums a piece of equal length.
        padded = length + -length % ranks
        like = next((vector for vector in vectors), None)
        like = _flatten([None] * len(inputs), inputs) if like is None else like
        sums: Subtotals[Tensor] = Subtotals(self._micro_batches, Tensor.add_)
        for micro_batch in range(subtrees.mine.start, subtrees.mine.stop):
            vector = like.new_zeros(padded)
            if vectors:
                vector[:length] = vectors.pop(0)
            sums.push(TreeSpan(micro_batch, micro_batch + 1), vector)
        if ranks == 1:
            (total,) = sums.take()
            return total[:length]
        # One all-to-all per round of the tree, on all ranks.
        group = self._world.group
        piece = piece_of_sum(sums.take(), lambda pieces: like.new_empty(pieces, padded // ranks), subtrees, group)
        total = like.new_empty(padded)
        # Every rank needs the whole sum, because its own rows are somewhere in it.
        collectives.all_gather(list(total.view(ranks, -1).unbind()), piece, group=group)  # collective
        return total[:length]

    def _tree(self, tensors: list[Tensor]) -> Any:
        return pytree.tree_unflatten(tensors, self._first_form().tree)

    def _first_form(self) -> _OutputForm:
        assert self._form is not None
        return self._form


class WholeStepPasses(Passes):
    """Passes over a step whose loss covers all of its samples."""

    def __init__(self, engine: Engine, task: Task, control: StepControl) -> None:
        super().__init__(engine, task, control)
        self._whole = make_whole_step(task, control.world.data_parallel, control.micro_batches, control.sharing)

    def _pass(self, step: int, micro: list[MicroBatch], items: float, *, counts: bool) -> list[Tensor]:
        if len(micro) == 1:
            losses = self._single_pass(step, micro[0], counts)
            self._collect_numbers(step, counts)
        else:
            batches = [(batch.index, batch.weight, self._forward(step, batch)) for batch in micro]
            losses = self._losses(step, batches)
            self._collect_numbers(step, counts)

            def surrogate(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, None]:
                return self._whole.surrogate(batch.index, self._task.outputs(model, batch.data)), None

            self._backwards(step, micro, surrogate, SURROGATE, counts=counts)
        # A record divides the loss by the items; this loss is not a sum over items.
        return [loss.double() * items for loss in losses]

    def _collect_numbers(self, step: int, counts: bool) -> None:
        for index, numbers, counted in self._whole.numbers if counts else ():
            self._numbers.add(step, index, numbers, counts=counted)

    def _forward(self, step: int, batch: MicroBatch) -> Any:
        """Compute the outputs of a micro-batch without changing buffers; pass 2 changes them."""
        control = self._control
        engine = self._engine
        control.seed(step, batch.index)
        with engine.accumulate(False, False), empty_slot(not batch.weight), control.kernels(step, batch.index):
            outputs = pytree.tree_map_only(Tensor, Tensor.detach, self._task.outputs(engine.model, batch.data))
        control.clock.lap("forward")
        return outputs

    def _single_pass(self, step: int, batch: MicroBatch, counts: bool) -> list[Tensor]:
        """Run the pass of a rank with one micro-batch, keeping its graph."""
        control = self._control
        engine = self._engine
        if self._hooks:
            self._hooks.before_batch(step, batch.index, 0, 1, counts=bool(batch.weight) and control.world.counts)
        control.seed(step, batch.index)
        audit = control.audit if counts else NO_AUDIT
        with engine.accumulate(True, counts), empty_slot(not batch.weight), audit.watch(step, batch) as observe:
            with control.kernels(step, batch.index):
                outputs = self._task.outputs(engine.model, batch.data)
            control.clock.lap("forward")
            losses = self._losses(step, [(batch.index, batch.weight, outputs)])
            engine.backward(observe(self._whole.surrogate(batch.index, outputs)), batch.weight)
            control.clock.lap("backward")
        return losses

    def _losses(self, step: int, batches: Sequence[tuple[int, float, Any]]) -> list[Tensor]:
        # Seed as for a micro-batch of its own, so that every rank draws the same numbers in the loss.
        self._control.seed(step, WHOLE_LOSS)
        return self._whole(batches)


def make_whole_step(task: Task, world: World, micro_batches: int, sharing: ShareSchedule | None = None) -> WholeStep:
    """Make the WholeStep of a task, with `step_loss` or `step_loss_rows`."""
    rows = task.step_loss_rows if has_own(task, "step_loss_rows") else None
    step_loss = None if rows else task.step_loss
    return WholeStep(step_loss=step_loss, rows=rows, world=world, micro_batches=micro_batches, sharing=sharing)


def check_outputs(outputs: Any) -> Any:
    """Check that a task's `outputs` returned tensors with the same number of rows.

    Raises:
        ConfigError: they are not.
    """
    tensors = pytree.tree_leaves(outputs)
    odd = [value for value in tensors if not isinstance(value, Tensor) or not value.ndim]
    if odd or not tensors:
        problem = describe_value(odd[0]) if odd else "no tensor"
        raise ConfigError(
            f"the task's `outputs` returned {problem}: it must return a tensor of shape [samples, ...], or a tuple "
            "or dict of them; a number that `step_loss` needs is an output too, as scale.repeat(samples)"
        )
    rows = sorted({len(tensor) for tensor in tensors})
    if len(rows) > 1:
        raise ConfigError(
            f"the task's `outputs` returned tensors of {rows[0]} and of {rows[-1]} rows: each needs one row per sample"
        )
    return outputs


def zero_of(outputs: Any) -> Tensor:
    """Compute 0 from a task's outputs, 0-dim; NaN if one of them is not finite."""
    return torch.stack([(tensor.detach() * 0).sum().double() for tensor in pytree.tree_leaves(outputs)]).sum()


def _leaf(column: Tensor, gradient: bool) -> Tensor:
    """Make an input of the loss from an output; half precision becomes float32.

    Otherwise its gradient would be rounded.
    """
    column = column.detach()
    if not (column.is_floating_point() or column.is_complex()):
        return column
    return (column.float() if column.dtype in HALVES else column).requires_grad_(gradient)


def _gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ())
    return [next(gradients) if tensor.requires_grad else None for tensor in inputs]


def _first_rows(own: list[tuple[int, list[Tensor]]], first: int) -> list[int]:
    """Return the first row of each micro-batch."""
    rows = []
    for _, tensors in own:
        rows.append(first)
        first += len(tensors[0])
    return rows


def _rows_of(columns: list[Tensor | None], begin: int, count: int) -> list[Tensor | None]:
    return [None if column is None else column[begin : begin + count] for column in columns]


def _flatten(gradients: Sequence[Tensor | None], inputs: list[Tensor]) -> Tensor:
    """Concatenate the gradients of inputs that need one into a vector; missing ones are zeros."""
    pairs = [(g, t) for g, t in zip(gradients, inputs, strict=True) if t.requires_grad]
    return torch.cat([(torch.zeros_like(t) if g is None else g).detach().reshape(-1) for g, t in pairs])


def _unflatten(vector: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    sizes = [tensor.numel() for tensor in inputs if tensor.requires_grad]
    parts = iter(vector.split_with_sizes(sizes))
    return [next(parts).view_as(tensor) if tensor.requires_grad else None for tensor in inputs]


def _describe_form(form: _OutputForm) -> str:
    rows = ", ".join(f"{str(dtype).removeprefix('torch.')} {['samples', *shape]}" for shape, dtype in form.rows)
    return rows.replace("'", "")
