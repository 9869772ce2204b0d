"""DistributedDataParallel: every rank holds the whole model; gradients are exchanged once a step.

`DDP` is the engine. `ReplicatedEngine` is its part that zero shares: the DDP wrapper, or the fixed tree of exact mode.
`GradientUsage` finds parameters that a micro-batch leaves unused.
"""

import dataclasses
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, BareEngine, Evaluate, ScaledBackward, StepResult
from lockstep.engines.closure import Alone, takes_closure
from lockstep.engines.exact import Tree
from lockstep.engines.mesh_norms import MeshNorm, StageNorm
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec, list_trained, norms_of
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import as_bytes, is_dtensor, local_of

__all__ = [
    "COMPRESSION_DTYPES",
    "DDP",
    "GradientUsage",
    "ReplicatedEngine",
    "average",
    "shorten",
]


# Values of --engine.compression -> dtype of the exchange.
COMPRESSION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# torch exports GradBucket at run time only, so mypy does not find the name.
def average(
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average the bucket over the group's ranks in `dtype`.

    Divides before the sum, so that the sum has the magnitude of one gradient.
    """
    buffer: Tensor = bucket.buffer()
    # A cast of a complex tensor would drop its imaginary parts.
    view = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    # The group's ranks, once per bucket, during the backward: errors are translated where that is called.
    sent = (view / dist.get_world_size(group)).to(dtype)
    work: Any = dist.all_reduce(sent, group=group, async_op=True)  # collective

    def copy_back(future: "torch.futures.Future[Any]") -> Tensor:
        view.copy_(future.value()[0])
        return buffer

    future: torch.futures.Future[Tensor] = work.get_future().then(copy_back)
    return future


class GradientUsage:
    """Count, for each parameter, the backwards that gave it a gradient. Call `next_backward` before each.

    Args:
        parameters: the trained parameters by name, in the same order on every rank. Each gets its hook before the next
            requested, so a generator may gather one at a time.
        world: the ranks.

    Attributes:
        names: the parameters' names, in that order.
        parameters: the tensors.
        is_alike: whether the ranks' marks of the last `find_unused` agree.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], world: World) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self._world = world
        self.is_alike = True
        self._uses = GradientCounts()
        self._handles: list[Any] = []
        # The hooks would also count if the engine is rebuilt before the counts are read.
        self._end = weakref.finalize(self, _remove_hooks, self._handles)
        for index, (name, tensor) in enumerate(parameters):
            parameter: Any = tensor
            self._handles.append(parameter.register_post_accumulate_grad_hook(Hook(self._uses, index)))
            self._uses.counts.append(0)
            self._uses.latest.append(0)
            self.names.append(name)
            self.parameters.append(tensor)

    def begin(self) -> None:
        """Forget the backwards so far."""
        self._uses.counts[:] = [0] * len(self.names)
        self._uses.is_reentrant = self._uses.is_repeated = False
        self.next_backward()

    @property
    def is_reentrant(self) -> bool:
        """Whether a backward on this rank ran others inside it, as reentrant checkpoints do."""
        return self._uses.is_reentrant

    def next_backward(self) -> None:
        """Count what follows as another backward."""
        self._uses.backward += 1
        self._uses.graphs.clear()

    def list_used(self) -> list[bool]:
        """Return, for each parameter, whether a backward on this rank used it."""
        return [count > 0 for count in self._uses.counts]

    def find_missed(self, backwards: int) -> list[str]:
        """Return the parameters that some rank did not use in all of its `backwards`. Collective."""
        names = []
        for name, count in zip(self.names, self._reduce_counts(backwards), strict=True):
            if count[0]:
                names.append(name)
        return names

    def find_unused(self, mark: int = 0) -> list[bool]:
        """Return, for each parameter, whether no rank used it, and reset the counts. Collective.

        Args:
            mark: below 2**20; `is_alike` is whether all ranks gave the same one.
        """
        unused = [not count[1] for count in self._reduce_counts(0, mark)]
        self.begin()
        return unused

    def check_reentrant(self) -> tuple[bool, bool]:
        """Return whether a backward ran others inside it or used a parameter twice. Collective.

        Two flags, the same on every rank.
        """
        flags = [self._uses.is_reentrant, self._uses.is_repeated]
        # All ranks, once: after the first step.
        by_rank = self._world.gather(flags)  # collective
        return any(flags_of_rank[0] for flags_of_rank in by_rank), any(flags_of_rank[1] for flags_of_rank in by_rank)

    def _reduce_counts(self, backwards: int, mark: int = 0) -> list[tuple[int, int]]:
        """Return each parameter's (ranks that used it in fewer than `backwards` backwards, total uses)."""
        rows = [[int(count < backwards), count] for count in self._uses.counts]
        table = torch.tensor([*rows, [mark, mark * mark]], dtype=torch.int64)
        if self._world.size > 1:
            # All ranks, on the host: the counts are no device tensors, and no kernel has to wait.
            collectives.all_reduce(table, group=self._world.control)  # collective
        # Does not wait for the device: the table is on the host.
        *counts, (total, squares) = table.tolist()
        # By Cauchy-Schwarz the sums are in this relation only if all ranks have the same mark.
        self.is_alike = self._world.size * squares == total * total
        return [(misses, uses) for misses, uses in counts]

    def close(self) -> None:
        """Remove the hooks."""
        self._end()


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class GradientCounts:
    """Counts of gradients by the parameter's index, which the hooks of `GradientUsage` keep.

    Attributes:
        counts: backwards that gave it a gradient.
        latest: the last of these.
        backward: the current one.
        graphs: torch's ids of the current backward and of those inside it, which reentrant checkpoints run.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.latest: list[int] = []
        self.backward = 1
        self.graphs: set[int] = set()
        self.is_reentrant = self.is_repeated = False


class Hook:
    """Count one parameter's gradients.

    A class, not a closure, so that a model with the hook can be copied.
    """

    def __init__(self, uses: GradientCounts, index: int) -> None:
        self._uses = uses
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        uses = self._uses
        index = self._index
        # Private to torch, which has no other identity of a backward; its reentrant checkpoints use it too.
        uses.graphs.add(torch._C._current_graph_task_id())
        uses.is_reentrant = uses.is_reentrant or len(uses.graphs) > 1
        if uses.latest[index] == uses.backward:
            uses.is_repeated = True
            return
        uses.latest[index] = uses.backward
        uses.counts[index] += 1


def shorten(names: list[str], most: int = 4) -> str:
    """Join names as `a, b, c, d and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# DDP's option for its own exchange of buffers. torch 2.13 renamed it, and the old name warns there.
_DEFAULT_OPTIONS = EngineOptions()
_DDP_PARAMETERS = signature(DistributedDataParallel).parameters
# Private to torch: the names of parameters and buffers that DDP's constructor does not broadcast.
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_BUFFER_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"


class ReplicatedEngine:
    """A model that every rank holds whole, with its exchange of gradients.

    Args:
        name: the engine's, for messages.
        module: on `world.device`.
        parameters: those whose gradients are exchanged.
        world: joined through a launcher. With context ranks (`World.part("cp")`) it has those of all replicas.
        request: with DDP's options.

    Attributes:
        model: call this for the forward.
        is_cut: this rank has a part of some parameters, see `parallel.tensor.cut`.

    Raises:
        ConfigError: no launcher started this process, or an option that cannot be exact with `--exact`.
    """

    def __init__(
        self, name: str, module: nn.Module, parameters: list[Tensor], world: World, request: EngineRequest
    ) -> None:
        check_launched(name, world)
        self._name = name
        self._module = module
        self._world = world
        self._request = request
        self._parameters = parameters
        self._roots = ScaledBackward()
        self._tree: Tree | None = None
        self._ddp: DistributedDataParallel | None = None
        self._usage: GradientUsage | None = None
        # In the order in which DDP counts them.
        self._ddp_parameters: list[tuple[str, nn.Parameter]] = []
        self._last = True
        self._backwards = 0
        self._by_hand = False  # gradients are summed after the backward, not by DDP
        # The first backward of a static graph must be exchanged. Exchanging after every micro-batch is safe, since
        # averaging a mean leaves it unchanged.
        self._sync_always = request.options.static_graph
        self.is_cut = any(map(is_dtensor, parameters))
        if request.exact:
            self._build_tree()
        elif self.is_cut or request.pipeline:
            # DDP knows no DTensors, and expects a backward right after each forward.
            self._by_hand = True
            same_start(module, world)
        else:
            # All ranks start with rank 0's buffers. DDP's constructor broadcasts the parameters.
            send_from_rank_0(module.buffers(), world)
            self._wrap(request.options.find_unused_parameters == "true")
            if not request.options.static_graph:
                self._usage = GradientUsage(self._trained_parameters(), world)
        self.model: nn.Module = self._ddp or module

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        self._last = last
        if self._ddp and (self._sync_always or (last and self._usage is None and not self._by_hand)):
            return _BackwardExchange(self._ddp)
        return NOTHING

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradient of `scale * loss`; DDP exchanges in the step's last micro-batch."""
        if self._tree or self._usage or self._by_hand:
            if self._usage:
                self._usage.next_backward()
            # DDP exchanges nothing here; `finish` does it.
            self._roots.run(loss, scale)
            self._backwards += 1
            if self._tree:
                self._tree.push()
            return
        # Scaling the root by the world size undoes DDP's division at no cost.
        self._roots.run(loss, scale if self._request.loss_scaling else scale * self._world.size)
        if self._last:
            self._complete_reduction()

    def backward_alone(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradient of `scale * loss` on this rank only. Call within `alone`."""
        pipeline = self._request.pipeline
        with pipeline.backward() if pipeline else NOTHING:
            self._roots.run(loss, scale)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Bypass DDP: forward and backward use the plain module and leave no counts. Collective."""
        ddp = self._ddp
        module = self._module
        if ddp is not None:
            # mypy rejects assigning to a method. The instance's attribute hides DDP's forward for the context.
            ddp.forward = lambda *args, **kwargs: module(*args, **kwargs)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if ddp is not None:
                del ddp.forward
            if self._usage:
                self._usage.begin()
        # The static graph has recorded the rehearsal's backward as its first one, so it must be rebuilt.
        if ddp is not None and self._request.options.static_graph:
            self._wrap(self._request.options.find_unused_parameters == "true")
            self._sync_always = True

    @contextmanager
    def apart(self) -> Iterator[Callable[[Tensor, float], None]]:
        """Yield a backward on this rank alone, which leaves no counts.

        It computes the gradient of the plain module's loss.
        """
        try:
            yield self.backward_alone
        finally:
            if self._usage:
                self._usage.begin()

    def finish(self) -> None:
        """Exchange, before the update, the gradients that DDP did not."""
        if self._tree:
            self._tree.finish()
            if self._world.replicas:
                # After the tree, so that the number of replicas changes no bit: each rank has the sum of its positions.
                sum_by_hand(self._parameters, self._world.part("cp"), "", ordered=True)  # collective
        elif self._usage:
            self._finish_first_step(self._usage)
        elif self._by_hand:
            self._sum_by_hand()
        elif self._request.loss_scaling:
            # With loss scaling the root must not grow with the ranks, or float16 would overflow sooner. Multiply
            # afterwards instead.
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], self._world.size)
        self._sync_always = False

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        pairs = []
        for name, p in self._module.named_parameters():
            if p.requires_grad:
                pairs.append((name, p))
        return pairs

    def _build_tree(self) -> None:
        if self._request.options.compression in COMPRESSION_DTYPES:
            raise ConfigError(
                "--exact does not work with --engine.compression, whose rounding depends on the world size; drop one"
            )
        same_start(self._module, self._world)
        self._tree = Tree(self._parameters, self._request.exact, self._world.data_parallel, self._request.sharing)

    def _wrap(self, find_unused: bool) -> None:
        """Build the DDP object, or rebuild it in place: the loop holds a reference."""
        options = self._request.options
        device = self._world.device
        buffer_option: dict[str, Any] = {_BUFFER_OPTION: False}
        former = self._ddp or self._request.wrapper
        # Keep the object: the loop holds a reference. Running its constructor again rebuilds the reducer.
        ddp = former if isinstance(former, DistributedDataParallel) else None
        ddp = ddp or DistributedDataParallel.__new__(DistributedDataParallel)
        # Any bucket size, even the default, disables DDP's smaller first bucket, whose exchange overlaps the backward.
        if options.bucket_cap_mb == _DEFAULT_OPTIONS.bucket_cap_mb:
            bucket = None
        else:
            bucket = options.bucket_cap_mb
        with _ignored_buffers(self._module):
            DistributedDataParallel.__init__(
                ddp,
                self._module,
                process_group=self._world.group,
                device_ids=[device] if device.type == "cuda" else None,
                find_unused_parameters=find_unused,
                static_graph=options.static_graph,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                bucket_cap_mb=bucket,
                **buffer_option,  # engines/buffers.py sends those that a forward writes, once a step
            )
        if options.compression in COMPRESSION_DTYPES:
            # DDP's own state of a hook is one object, which this hook does not need.
            dtype = COMPRESSION_DTYPES[options.compression]
            ddp.register_comm_hook(None, lambda state, bucket: average(dtype, self._world.group, bucket))
        if find_unused:
            _silence_unused_warning(ddp)
        # A forward outside of steps, such as an evaluation's, is followed by no backward.
        ddp.require_backward_grad_sync = False
        self._ddp_parameters = self._trained_parameters()
        self._ddp = ddp

    def _finish_first_step(self, usage: GradientUsage) -> None:
        names = usage.find_missed(self._backwards)  # collective
        is_reentrant, is_repeated = usage.check_reentrant()  # collective
        mode = self._request.options.find_unused_parameters
        usage.close()
        # The first step exchanges by hand: no reducer can know yet which parameters stay unused.
        self._usage = None
        if names and mode == "false":
            raise self._missed_error(names)
        self._sum_by_hand()  # collective
        # DDP counts a gradient as complete when it first arrives, and its search does not see what a reentrant
        # checkpoint hides.
        self._by_hand = is_repeated or (is_reentrant and (bool(names) or mode == "true"))
        if self._by_hand:
            self._request.say(
                f"--engine {self._name}: reentrant checkpoints with shared or unused parameters, so gradients are "
                "summed after each step's last backward, not during it; checkpoint(use_reentrant=False) is faster"
            )
        elif names and mode == "auto":
            self._request.say(
                f"--engine {self._name}: {len(names)} parameters are not used by every micro-batch "
                f"({shorten(names)}); turned on --engine.find-unused-parameters, which searches each graph"
            )
            self._wrap(True)  # gradients are kept

    def _sum_by_hand(self) -> None:
        sum_by_hand([p for _, p in self._trained_parameters()], self._world, self._request.options.compression)

    def _missed_error(self, names: list[str]) -> LockstepError:
        return LockstepError(
            f"{self._world.label}, --engine {self._name}: not every micro-batch's loss uses "
            f"{shorten(names)}, so gradients were not exchanged; drop --engine.find-unused-parameters false and "
            "--engine.static-graph"
        )

    def _complete_reduction(self) -> None:
        """Exchange the parameters that the last backward missed, for which the other ranks wait.

        Adding -0.0 changes no number, and a sum is -0.0 only where every rank added it: nobody used that parameter, so
        it gets no gradient, as in one process. This costs nothing where all are used.

        Raises:
            LockstepError: a backward missed parameters, and the options rule that out.
        """
        missed = self._missed_parameters()
        if not missed:
            return
        options = self._request.options
        if options.find_unused_parameters != "auto" or options.static_graph:
            raise self._missed_error([name for name, _ in missed])
        parameters = [parameter for _, parameter in missed]
        unset = []
        for parameter in parameters:
            if parameter.grad is None:
                unset.append(parameter)
        # x + -0.0 is x for every x, so the other ranks' sums keep their bits.
        with torch.no_grad():
            zeros = [-torch.zeros_like(parameter) for parameter in parameters]
        # All ranks wait for these parameters in DDP's reducer; its hooks count these gradients too.
        torch.autograd.backward(parameters, zeros)  # collective
        for parameter in unset:
            gradient = parameter.grad
            if gradient is not None and torch.equal(as_bytes(gradient), as_bytes(-torch.zeros_like(gradient))):
                # Waits for the device, only in a step with missed parameters.
                parameter.grad = None

    def _missed_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients DDP still waits for on this rank."""
        ddp: Any = self._ddp
        try:
            # Private to DDP, which asks only in the next forward: too late for this step's update.
            ddp._check_reducer_finalized()
        except RuntimeError as error:
            # The indices are nowhere but in the text of the reducer's error. The other ranks wait, so they cannot be
            # asked.
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if match is None:
                raise
            return [self._ddp_parameters[int(index)] for index in match[1].split()]
        return []


class _BackwardExchange:
    """A context in which DDP exchanges the gradients of the backward.

    The reverse of its `no_sync`.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def __enter__(self) -> None:
        self._ddp.require_backward_grad_sync = True

    def __exit__(self, *error: object) -> None:
        self._ddp.require_backward_grad_sync = False


def _silence_unused_warning(ddp: Any) -> None:
    """Suppress torch's warning about a needless search for unused parameters.

    C++ prints it on each rank, at the first forward that uses all parameters, even if another forward does not. C++
    warnings become Python warnings only inside a torch function that calls back, such as `apply_`; only there can they
    be filtered.
    """
    # Private to DDP: the function that prints the warning, replaced on this instance alone.
    after_forward = type(ddp)._post_forward

    def post_forward(output: Any) -> Any:
        outputs = []

        def call(value: float) -> float:
            outputs.append(after_forward(ddp, output))
            return value

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            torch.zeros((), device="cpu").apply_(call)
        return outputs[0]

    ddp._post_forward = post_forward


def check_launched(name: str, world: World) -> None:
    """Raise ConfigError if no launcher started this process."""
    if world.control is None:
        raise ConfigError(
            f"--engine {name} needs a launcher: torchrun --standalone --nproc-per-node 2 -m lockstep train"
        )


@contextmanager
def _ignored_buffers(module: nn.Module) -> Iterator[None]:
    """Let DDP's constructor broadcast no buffers.

    Its broadcast does not support uint16 and sparse tensors, for example.
    """
    had = _IGNORED in vars(module)
    former = getattr(module, _IGNORED, ())
    setattr(module, _IGNORED, [*former, *(name for name, _ in module.named_buffers(remove_duplicate=False))])
    try:
        yield
    finally:
        if had:
            setattr(module, _IGNORED, former)
        else:
            delattr(module, _IGNORED)


def same_start(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's parameters and buffers, as DDP's constructor does. None may be expanded."""
    send_from_rank_0(model.parameters(), world)
    send_from_rank_0(model.buffers(), world)


def send_from_rank_0(tensors: Iterable[Tensor], world: World) -> None:
    """Broadcast rank 0's values of `tensors`, in place, except sparse ones. None may be expanded."""
    with torch.no_grad():
        for tensor in (local_of(candidate) for candidate in tensors if candidate.layout is torch.strided):
            # All ranks call this with the same tensors in the same order.
            collectives.broadcast(tensor, group_src=0, group=world.group)  # collective


# The size of DDP's own buckets: one exchange of 25 MiB costs little more than its bytes.
_BUCKET_BYTES = 25 * 2**20


def sum_by_hand(parameters: Sequence[Tensor], world: World, compression: str, *, ordered: bool = False) -> None:
    """Sum `.grad` over the ranks; None if no rank has one. Collective.

    Args:
        parameters: the same on every rank.
        world: the ranks.
        compression: "bf16" or "fp16": the dtype of the exchange; else the gradients' own.
        ordered: add in the order of the ranks; an all-reduce may choose another order on another node.
    """
    if world.size == 1:
        return
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    # All ranks agree on the parameters in use, on the host, since a gradient may exist on some of them only.
    collectives.all_reduce(flags, group=world.control)  # collective
    gradients = []
    # Does not wait for the device: the flags are on the host.
    for parameter, flag in zip(parameters, flags.tolist(), strict=True):
        if flag:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_of(parameter.grad))
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        # A cast of a complex tensor would drop its imaginary parts.
        numbers = torch.view_as_real(flat) if flat.is_complex() else flat
        # Divide before a sum in half precision, so that the sum has the magnitude of one gradient.
        if compression in COMPRESSION_DTYPES:
            sent = (numbers / world.size).to(COMPRESSION_DTYPES[compression])
        else:
            sent = numbers
        # All ranks, once per bucket.
        if ordered:
            _add_in_order(sent, world)  # collective
        else:
            collectives.all_reduce(sent, group=world.group)  # collective
        if sent is not numbers:
            numbers.copy_(sent).mul_(world.size)
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        # Private to torch: copies all pieces in one kernel.
        torch._foreach_copy_(bucket, [piece.view(g.shape) for piece, g in zip(pieces, bucket, strict=True)])


def _add_in_order(numbers: Tensor, world: World) -> None:
    """Add the ranks' numbers in the order of the ranks, in place. Collective."""
    parts = [torch.empty_like(numbers) for _ in range(world.size)]
    collectives.all_gather(parts, numbers, group=world.group)  # collective
    first, *others = parts
    numbers.copy_(first)
    for other in others:
        numbers.add_(other)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list of gradients into runs of one dtype and limited size."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        size += gradient.nbytes
        if bucket and (gradient.dtype is not bucket[0].dtype or size > _BUCKET_BYTES):
            yield bucket
            bucket = []
            size = gradient.nbytes
        bucket.append(gradient)
    if bucket:
        yield bucket


@final
class DDP(BareEngine):
    """The engine `ddp`. Raises ConfigError without a launcher."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        self._module = model
        instance = optimizer(model)
        parameters = list_trained(model, instance)
        self._replicas = ReplicatedEngine("ddp", model, parameters, world, request)
        spec = UpdateSpec(
            parameters,
            is_fixed=True,
            exchange=self._finish,
            has_peers=world.size > 1,
            dense_flag="--engine ddp",
        )
        if self._replicas.is_cut:
            norm = MeshNorm(exact=bool(request.exact))
            spec = dataclasses.replace(spec, norm=norm, norms=norm.each, local=local_of)
        self._pipeline = request.pipeline
        if self._pipeline:
            if takes_closure(instance):
                raise ConfigError(
                    f"--parallel.pipeline {self._pipeline.stages.size} does not work with an optimizer that evaluates "
                    f"the loss several times ({type(instance).__name__}); use another one"
                )
            norms = spec.norms or norms_of
            stage_norm = StageNorm(self._pipeline.stage, model, self._pipeline.stages, norms)
            spec = dataclasses.replace(spec, norm=stage_norm)
        self._update = OptimizerStep(model, instance, request, spec)
        # torch's optimizers do not mix DTensors with plain tensors in one call.
        self._update.is_mixed = self._replicas.is_cut
        self.model = self._replicas.model

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._replicas.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._replicas.backward(loss, self._update.scale * weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._finish()
        return self._update(factor, limit, momentum, evaluate)

    def _finish(self) -> None:
        """Sum the gradients over the ranks. Collective."""
        self._replicas.finish()
        if self._pipeline:
            self._pipeline.add_tied(self._module)  # collective over both ends

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        with self._replicas.alone():
            self._update.rehearse(Alone(loss, self._backward_alone))

    def _backward_alone(self, loss: Tensor) -> None:
        self._replicas.backward_alone(loss, self._update.scale)

    def apart(self) -> AbstractContextManager[Callable[[Tensor, float], None]]:
        return self._replicas.apart()

    def state_dict(self) -> dict[str, Tensor]:
        return self._update.state_dict(self._module)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._update.load_state_dict(self._module, state)
