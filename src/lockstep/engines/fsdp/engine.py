"""FSDP2 (`fully_shard`): parameters, gradients and optimizer states sharded block by block.

`FSDP` is the engine. `ExactReduceScatter` and `ExactNorm` give it the bits of a single process in exact mode.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.rows import assign_owners, gather_rows
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, BareEngine, Evaluate, ScaledBackward, StepResult, at_rest
from lockstep.engines.closure import Alone
from lockstep.engines.ddp import GradientUsage, check_launched, same_start, shorten
from lockstep.engines.exact import Subtotals, Subtrees, Tree, TreeSpan, check_slots, piece_of_sum
from lockstep.engines.fsdp.apply import (
    CAN_RESET,
    FILLS_UNUSED,
    WATCH,
    UsageCheck,
    again,
    check,
    discard_iteration,
    leave_groups,
    replica_size,
    shard,
)
from lockstep.engines.fsdp.whole import WholeParameters, find_whole
from lockstep.engines.mesh_norms import MeshNorm
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec, combine_norms, list_trained, norms_of
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import is_dtensor, local_of
from lockstep.transforms.precision import is_compiled

__all__ = [
    "FSDP",
]


def _sharded_norm(gradients: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients, 0-dim on `device`, from the shards of `group`."""
    shards = []
    for gradient in gradients:
        if is_dtensor(gradient):
            shards.append(local_of(gradient))
    squares = combine_norms(norms_of(shards)).to(device).square()
    # All ranks of the sharding group; each has a part of every gradient.
    collectives.all_reduce(squares, group=group)  # collective
    # Every rank has the whole ones, so they are added once, after the exchange.
    whole = []
    for gradient in gradients:
        if not is_dtensor(gradient):
            whole.append(gradient)
    return (squares + combine_norms(norms_of(whole)).square().to(squares) if whole else squares).sqrt()


def _sharded_norms(gradients: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Return each gradient's 2-norm, 0-dim on `device`, from the shards of `group`."""
    if not gradients:
        return []
    norms = norms_of([local_of(gradient) for gradient in gradients])
    squares = torch.stack(norms).to(device).square()
    # As above, for each gradient.
    collectives.all_reduce(squares, group=group)  # collective
    summed = squares.sqrt().unbind()
    results = []
    for gradient, norm, total in zip(gradients, norms, summed, strict=True):
        results.append(total if is_dtensor(gradient) else norm.to(total))
    return results


class ExactNorm:
    """The norm of a single process, bit for bit.

    One rank takes the norm of each whole gradient, with the same kernel. One all-to-all brings each parameter's shards
    to the rank that owns it for this purpose; one all-reduce, which adds each norm to zeros, gives all ranks the
    result.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        return combine_norms(self.each(gradients))

    def each(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the norm of each gradient. Collective."""
        shards: list[Tensor] = []
        for gradient in gradients:
            if is_dtensor(gradient):
                shards.append(gradient)
        shard_norms = iter(self._of_shards(shards) if shards else ())
        return [
            # Every rank has the gradient of a whole parameter.
            next(shard_norms) if is_dtensor(gradient) else norms_of([gradient])[0]
            for gradient in gradients
        ]

    def _of_shards(self, gradients: list[Tensor]) -> list[Tensor]:
        owners = assign_owners([gradient.numel() for gradient in gradients], self._world.size)
        wholes = self._gather_owned(gradients, owners)
        norms = iter(norms_of(wholes))
        local = []
        for owner in owners:
            local.append(next(norms) if owner == self._world.rank else None)
        if any(g.dtype is torch.float64 for g in gradients):
            dtype = torch.float64
        else:
            dtype = torch.float32
        table = torch.zeros(len(gradients), dtype=dtype, device=self._world.device)
        for index, norm in enumerate(local):
            if norm is not None:
                table[index] = norm
        # All ranks. Each norm is added to zeros, so it is not rounded.
        collectives.all_reduce(table, group=self._world.group)  # collective
        return list(table.unbind())

    def _gather_owned(self, gradients: list[Tensor], owners: list[int]) -> list[Tensor]:
        """Return the whole gradients that this rank owns, in order. Collective."""
        wide = max((g.dtype for g in gradients), key=lambda dtype: dtype.itemsize)
        local_shards = [local_of(gradient).to(wide) for gradient in gradients]
        # All ranks: an all-to-all gathers each gradient on its owner.
        shapes = [_shape_in_replica(gradient) for gradient in gradients]
        wholes = gather_rows(local_shards, shapes, owners, self._world.group)  # collective
        sources = (gradient for gradient, owner in zip(gradients, owners, strict=True) if owner == self._world.rank)
        whole_gradients = []
        for tensor, gradient in zip(wholes, sources, strict=True):
            whole_gradients.append(tensor.to(gradient.dtype))
        return whole_gradients


def _shape_in_replica(gradient: Any) -> list[int]:
    """Return the shape of the part of a gradient that the shards of this data-parallel group form."""
    shape = list(gradient.shape)
    # The mesh's first dimension is that of the shards; over the others layers are cut, which they divide.
    for ranks, placement in list(zip(gradient.device_mesh.shape, gradient.placements, strict=True))[1:]:
        if not placement.is_replicate():
            shape[placement.dim] //= ranks
    return shape


class ExactReduceScatter:
    """FSDP2's reduce-scatter of one unit, in the fixed tree.

    Keeps each micro-batch's flat gradients, and communicates in the step's last call. Implements the interface of
    `FSDPModule.set_custom_reduce_scatter` without its base class, which is not public.

    Attributes:
        slots: calls in each step.
        last: whether the next call is the step's last.
    """

    def __init__(self, parts: Subtrees) -> None:
        self._subtrees = parts
        self.slots = parts.slots
        self._sums: Subtotals[Tensor] = Subtotals(parts.micro_batches, Tensor.add_)
        self._count = 0
        self.last = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Take over `input_tensor` [ranks * n]; the last call fills `output_tensor` [n] with the sum."""
        # The allocator must know that the tensor outlives the call on this stream.
        if input_tensor.is_cuda:
            input_tensor.record_stream(torch.cuda.current_stream())
        micro_batch = self._subtrees.mine.start + self._count
        self._count += 1
        # Beyond the run the slot is empty.
        if micro_batch < self._subtrees.mine.stop:
            self._sums.push(TreeSpan(micro_batch, micro_batch + 1), input_tensor)
        if not self.last:
            output_tensor.zero_()
            return
        self._count = 0

        def room(pieces: int) -> Tensor:
            return input_tensor.new_empty(pieces, len(output_tensor))

        # One collective per round of the tree, on all ranks of the group.
        output_tensor.copy_(piece_of_sum(self._sums.take(), room, self._subtrees, group))


_NAME = "--engine fsdp"


@final
class FSDP(BareEngine):
    """The engine `fsdp`.

    In exact mode each block's reduce-scatter follows the fixed tree, and the norm is that of a single process. A world
    of one has nothing to shard, so it uses the plain model there.

    Raises:
        ConfigError: no launcher; a sharding that the world cannot form; CPU offload without a GPU; an option that
            cannot be exact, with `--exact`; parameters that cannot be sharded (see `lockstep.engines.fsdp.apply`).
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        check_launched("fsdp", world)
        check(request, world)
        self.model = model
        self._world = world
        self._request = request
        self._roots = ScaledBackward()
        self._tree: Tree | None = None
        self._comms: list[ExactReduceScatter] = []
        self._usage: GradientUsage | None = None
        self._check: UsageCheck | None = None
        self._synced = True
        self._backwards = 0
        self._in_backward = False
        # Numbers of the units that the current backward ran again, for activation checkpoints.
        self._recomputed: list[int] = []
        self._order = 0  # a hash of the units that this step's forwards ran
        self._whole = WholeParameters([], 0, world)
        # One rank in exact mode: nothing to shard, and the tree gives the bits of any number of ranks.
        if request.exact and world.size == 1:
            self._build_unsharded(optimizer)
            return
        if request.wrapper is None:
            mesh = shard(model, world, request)
        else:
            mesh = again(model)
        self._units = [cast(Any, module) for module in model.modules() if isinstance(module, FSDPModule)]
        instance = optimizer(model)
        self._parameters = list_trained(model, instance)
        whole = []
        for parameter in find_whole(model):
            if parameter.requires_grad:
                whole.append(parameter)
        self._whole = WholeParameters(whole, request.exact, world)
        norm, norms = self._norms(mesh)
        spec = UpdateSpec(
            self._parameters,
            is_fixed=True,
            norm=norm,
            norms=norms,
            local=local_of,
            single_pass_flag=_NAME,
            dense_flag=_NAME,
        )
        self._update = OptimizerStep(model, instance, request, spec)
        # In a replica some shards are on a mesh of two dimensions.
        self._update.is_mixed = bool(whole) or world.mesh is not None
        _check_optimizer_parameters(model, self._update)
        self._set_sum_reduction()
        self._watch_usage()
        self._watch_order()
        if watching := vars(model).pop(WATCH, None):  # from a former engine
            watching.remove()
        vars(model)[WATCH] = model.register_forward_hook(self._watch_output)

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if not self._backwards:
            self._order = 0  # forwards outside of steps are not compared
        for comm in self._comms:
            comm.last = last
        if last is not self._synced and not self._comms and self._tree is None:
            self._synced = last
            self._set_sync(last)
        return NOTHING

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if self._check and (self._synced or self._request.options.accumulate == "shard"):
            # All ranks: their backwards must exchange the same parameters.
            self._check(loss)  # collective
        self._run(loss, weight)
        self._backwards += 1
        self._whole.push()
        if self._tree:
            self._tree.push()
        elif self._comms and not self._comms[0].last:
            # The gradients so far are zeros: the sums are in the trees until the last micro-batch.
            for parameter in self._parameters:
                parameter.grad = None

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        backwards = self._backwards
        self._backwards = 0
        if self._tree:
            self._tree.finish()
        elif self._comms:
            check_slots(backwards, self._comms[0].slots, self._world)
        # All ranks: FSDP exchanges only the gradients of shards.
        self._whole.finish()  # collective
        if self._usage:
            self._drop_unused(self._usage, backwards)
        return self._update(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        if self._comms:  # a single backward has no place in the tree
            self._update.rehearse(None)
            return
        self.accumulate(True)
        self._update.rehearse(Alone(loss, self._backward_alone))
        if self._usage:
            self._usage.begin()
        if self._check:
            self._check.begin()

    def _backward_alone(self, loss: Tensor) -> None:
        if self._check:
            self._check(loss)  # collective
        with self._whole.at_once():  # collective
            self._run(loss, 1.0)

    @contextmanager
    def apart(self) -> Iterator[Callable[[Tensor, float], None]]:
        """Yield a backward outside of steps, whose gradients are summed over the ranks. Collective."""

        def backward(loss: Tensor, weight: float) -> None:
            if self._check:
                self._check(loss)  # collective
            with self._whole.at_once():  # collective
                self._run(loss, weight)

        try:
            yield backward
        finally:
            if self._usage:
                self._usage.begin()
            if self._check:
                self._check.begin()

    @staticmethod
    def check_optimizer(optimizer: Optimizer, *, exact: bool) -> None:
        if exact and any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigError(
                f"--exact with --engine fsdp: the fused {type(optimizer).__name__} rounds by an element's place in its "
                "shard; use fused=False"
            )

    @staticmethod
    def explain_no_backward(*, exact: bool) -> str:
        if exact:
            return f"{_NAME} with --exact has no backward outside of its tree"
        return ""

    @staticmethod
    def replica_size(options: EngineOptions, world: World) -> int:
        return replica_size(options, world)

    @staticmethod
    def has_replicas(options: EngineOptions) -> bool:
        return options.sharding in ("hybrid", "none")

    @staticmethod
    def explain_no_undo(optimizer: Optimizer | None) -> str:
        if not CAN_RESET:
            return f"{_NAME} cannot leave a step in the middle before torch 2.13; ddp can"
        if optimizer is not None and not type(optimizer).__module__.startswith("torch.optim."):
            return (
                f"with {_NAME}, {type(optimizer).__name__} may exchange between ranks in the middle of its update; "
                "torch's AdamW does not, nor does ddp"
            )
        return ""

    @staticmethod
    def leave_groups(model: nn.Module) -> list[dist.ProcessGroup]:
        return leave_groups(model)

    @staticmethod
    def count_exchanged(options: EngineOptions, parameters: float, trained: float) -> tuple[float, float]:
        # A reduce-scatter moves half of the bytes of a sum.
        if options.sharding in ("full", "hybrid"):
            # Gathered for the forward and for the backward.
            return 2 * parameters, trained / 2
        return parameters, trained / 2

    @staticmethod
    def least_held(options: EngineOptions, size: int, totals: tuple[float, float, float]) -> float:
        if options.sharding == "none":
            return sum(totals)
        return sum(totals) / (options.shard_size or size)

    def _run(self, loss: Tensor, weight: float) -> None:
        if self._usage:
            self._usage.next_backward()
        self._recomputed.clear()
        self._in_backward = True
        try:
            # All ranks: each unit gathers its parameters and reduces its gradients. torch gives `backward` no types.
            loss.backward(self._roots(loss, self._update.scale * weight))  # type: ignore[no-untyped-call]  # collective
        except BaseException:
            # The check of the loss continues after failures of its own, so FSDP must be ready for another backward.
            if self._tree is None:
                discard_iteration(self._units)
            raise
        finally:
            self._in_backward = False
        # FSDP ends a backward with the first of those inside it, and loses gradients of a block that runs again.
        if self._usage and self._usage.is_reentrant and len(set(self._recomputed)) < len(self._recomputed):
            raise ConfigError(
                f"{_NAME} loses gradients of a block that reentrant checkpoints run twice: call checkpoint() with "
                "use_reentrant=False, or use --engine ddp or zero"
            )

    def _watch_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Refuse gradients taken before the backward: FSDP would reshard parameters that it needs."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    # torch gives `register_hook` no types.
                    tensor.register_hook(self._check_in_backward)  # type: ignore[no-untyped-call]

    def _check_in_backward(self, gradient: Tensor) -> None:
        if not self._in_backward:
            raise ConfigError(
                f"{_NAME} does not work with a loss that takes gradients itself (torch.autograd.grad through the "
                "model, as gradient penalties do): use --engine ddp or zero"
            )

    def state_dict(self) -> dict[str, Tensor]:
        return self._update.state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._update.load_state_dict(self.model, state)

    def _build_unsharded(self, optimizer: MakeOptimizer) -> None:
        self.model.to(self._world.device)
        same_start(self.model, self._world)
        instance = optimizer(self.model)
        parameters = list_trained(self.model, instance)
        spec = UpdateSpec(parameters, is_fixed=True, single_pass_flag=_NAME, dense_flag=_NAME)
        if self._world.mesh is not None:
            # Other ranks of the replica have parts of the same layers.
            norm = MeshNorm(exact=True)
            spec = dataclasses.replace(spec, norm=norm, norms=norm.each, local=local_of)
        self._update = OptimizerStep(self.model, instance, self._request, spec)
        self._update.is_mixed = self._world.mesh is not None
        self._tree = Tree(parameters, self._request.exact, self._world)

    def _norms(self, mesh: Any) -> tuple[Any, Any]:
        """Return the functions for the norm of all gradients, and of each."""
        exact = ExactNorm(self._world)
        if self._world.mesh is not None:
            # Layers may be cut over other ranks too.
            nested = MeshNorm(exact=True, norms=exact.each) if self._request.exact else MeshNorm()
            return nested, nested.each
        if self._request.exact:
            return exact, exact.each
        # The last dimension of the mesh is that of the shards.
        group = mesh.get_group(mesh.ndim - 1)
        options = {"group": group, "device": self._world.device}
        return partial(_sharded_norm, **options), partial(_sharded_norms, **options)

    def _set_sync(self, last: bool) -> None:
        """Set whether the next backward exchanges; only on a change, since it visits all modules."""
        root = cast(Any, self.model)
        root.set_is_last_backward(last)
        if self._request.options.accumulate == "nosync":
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)

    def _set_sum_reduction(self) -> None:
        """Sum gradients instead of averaging; in exact mode in the tree's order."""
        exact = self._request.exact
        subtrees = Subtrees(exact, self._world) if exact else None
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            # gloo does not support the reduction that FSDP would choose for a factor alone.
            unit.set_force_sum_reduction_for_comms(True)
            if subtrees:
                self._comms.append(ExactReduceScatter(subtrees))
                unit.set_custom_reduce_scatter(self._comms[-1])

    def _watch_usage(self) -> None:
        """Keep collectives aligned when a rank skips parameters; the first step reports these.

        On a torch that cannot align them, each exchange is checked instead.
        """
        options = self._request.options
        mode = options.find_unused_parameters
        if mode == "true" and not FILLS_UNUSED:
            raise ConfigError(
                f"--engine.find-unused-parameters true with --engine fsdp needs torch 2.13, found "
                f"{torch.__version__}; use --engine ddp"
            )
        if mode == "false":
            return
        self._usage = GradientUsage(self._trained_parameters(), self._world)
        self._is_reported = mode == "true"
        if FILLS_UNUSED:
            cast(Any, self.model).set_reduce_scatter_unused_params(True)
        elif self._world.size > 1:
            checks_every_backward = bool(self._request.exact) or options.accumulate == "shard"
            self._check = UsageCheck(self._usage, self._world, checks_every_backward)

    def _watch_order(self) -> None:
        """Hash the order in which the units run, except in a compiled model."""
        this = weakref.ref(self)
        for unit in self._units:
            if hook := vars(unit).pop(_ORDER, None):  # from a former engine
                hook.remove()
        # The hooks would be traced, and run in some calls only.
        if is_compiled(self.model):
            return
        for number, unit in enumerate(self._units, 1):
            vars(unit)[_ORDER] = unit.register_forward_pre_hook(partial(_note_unit, this, number))

    def add_unit(self, number: int) -> None:
        """Note that a unit runs."""
        if self._in_backward:
            self._recomputed.append(number)
        # 31 is the usual multiplier of polynomial hashes.
        self._order = (self._order * 31 + number) % _ORDERS

    def _trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gathered parameter) of trained shards, gathering one unit at a time."""
        at_rest(self.model)
        # Not by their type: in a replica a gathered parameter is a DTensor too.
        resting = set(self.model.parameters())
        for unit in self._units:
            # All ranks gather the unit, one unit at a time, so that at most one is whole.
            unit.unshard()  # collective
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad and parameter not in resting:
                    yield name, parameter
            unit.reshard()

    def _drop_unused(self, usage: GradientUsage, backwards: int) -> None:
        """Clear the gradient of a parameter that no rank used, as in one process.

        Checked in every step, since a later step may take another branch, and zeros would silently train differently.
        """
        names = [] if self._is_reported else usage.find_missed(backwards)
        self._is_reported = True
        if names:
            self._request.say(
                f"--engine fsdp: {len(names)} parameters are not used by every micro-batch ({shorten(names)}); "
                "one that no rank uses is left alone in that step"
            )
        # No gradient was filled in where each exchange is checked.
        if self._check:
            self._check.begin()
            return
        # All ranks, once a step, on the host.
        unused = usage.find_unused(self._order)  # collective
        if not usage.is_alike:
            raise LockstepError(
                f"{_NAME}: the ranks' forwards of this step ran different blocks, whose parameters ranks gather "
                "together: run the same blocks for every batch, or use --engine ddp or zero"
            )
        if any(unused):
            parameters = dict(self.model.named_parameters())
            for name, missed in zip(usage.names, unused, strict=True):
                if missed:
                    parameters[name].grad = None


# An attribute of a unit: the engine's hook.
_ORDER = "_lockstep_order"
# Number of hashes: the sum of squares over the ranks must fit into 64 bits.
_ORDERS = 2**20


def _note_unit(engine: "weakref.ref[FSDP]", number: int, module: nn.Module, args: Any) -> None:
    present = engine()
    if present is not None:
        present.add_unit(number)


def _check_optimizer_parameters(model: nn.Module, update: OptimizerStep) -> None:
    """Raise ConfigError if the optimizer was built before sharding and holds other parameters."""
    members = set(model.parameters())
    if any(parameter not in members for parameter in update.parameters):
        raise ConfigError(
            "--engine fsdp replaces the parameters by shards: give `optimizer` as a function of the model, "
            "lambda model: AdamW(model.parameters()), not an optimizer built before"
        )
