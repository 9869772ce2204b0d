"""DistributedDataParallel: every rank holds the whole model; gradients are exchanged once a step.

`DDP` is the engine. `ReplicatedEngine` is its part that zero shares: the DDP wrapper, or the fixed tree of exact mode.
`GradientUsage` finds parameters that a micro-batch leaves unused.
"""

import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, Evaluate, MakeOptimizer, ScaledBackward, Settings, StepResult
from lockstep.engines.closure import Alone
from lockstep.engines.exact import Tree
from lockstep.engines.model_init import unexpanded
from lockstep.engines.optimizer_step import OptimizerStep, trained
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import as_bytes

__all__ = [
    "DDP",
    "HALVES",
    "GradientUsage",
    "ReplicatedEngine",
    "averaged",
    "listed",
]


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def averaged(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average the bucket over the ranks in `dtype`.

    Divides before the sum, so that the sum has the magnitude of one gradient.
    """
    buffer: Tensor = bucket.buffer()
    view = torch.view_as_real(buffer) if buffer.is_complex() else buffer  # a cast would drop the imaginary parts
    # Called from the backward, whose errors are translated where it is called.
    work: Any = dist.all_reduce((view / dist.get_world_size()).to(dtype), async_op=True)  # collective

    def copy_back(future: "torch.futures.Future[Any]") -> Tensor:
        view.copy_(future.value()[0])
        return buffer

    future: torch.futures.Future[Tensor] = work.get_future().then(copy_back)
    return future


class GradientUsage:
    """Count, for each parameter, the backwards that gave it a gradient.

    Args:
        named: the trained parameters, in the same order on every rank. Each gets its hook before the next is
            requested, so a generator may gather one at a time.
        world: the ranks.

    Attributes:
        names: the parameters' names, in that order.
        parameters: the tensors.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], world: World) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self._world = world
        self._counts: list[int] = []
        self._handles: list[Any] = []
        # Also if the engine is rebuilt before the counts were read.
        self._end = weakref.finalize(self, _remove_hooks, self._handles)
        for index, (name, tensor) in enumerate(parameters):
            parameter: Any = tensor
            self._handles.append(parameter.register_post_accumulate_grad_hook(Hook(self._counts, index)))
            self._counts.append(0)
            self.names.append(name)
            self.parameters.append(tensor)

    def begin(self) -> None:
        """Reset the counts to zero."""
        self._counts[:] = [0] * len(self._counts)

    def used(self) -> list[bool]:
        """Return, for each parameter, whether a backward on this rank used it."""
        return [count > 0 for count in self._counts]

    def missed(self, backwards: int) -> list[str]:
        """Return the parameters that some rank did not use in each of its `backwards`. Collective."""
        return [name for name, count in zip(self.names, self._reduce_counts(backwards), strict=True) if count[0]]

    def unused(self) -> list[bool]:
        """Return, for each parameter, whether no rank used it, and reset the counts. Collective."""
        unused = [not count[1] for count in self._reduce_counts(0)]
        self.begin()
        return unused

    def _reduce_counts(self, backwards: int) -> list[tuple[int, int]]:
        """Return each parameter's (ranks that used it in fewer than `backwards` backwards, total uses)."""
        table = torch.tensor([[int(count < backwards), count] for count in self._counts], dtype=torch.int64)
        if self._world.size > 1:
            collectives.all_reduce(table, group=self._world.control)  # collective
        return [(misses, uses) for misses, uses in table.reshape(-1, 2).tolist()]

    def close(self) -> None:
        """Remove the hooks."""
        self._end()


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class Hook:
    """Count one parameter's gradients. A class, not a closure, so that models with the hook can be copied."""

    def __init__(self, counts: list[int], index: int) -> None:
        self._counts, self._index = counts, index

    def __call__(self, parameter: Tensor) -> None:
        self._counts[self._index] += 1


def listed(names: list[str], most: int = 4) -> str:
    """Join names as `a, b, c, d and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# DDP's option for its own exchange of buffers: renamed in torch 2.13, where the old name warns.
# Passing any bucket size, even the default, disables DDP's smaller first bucket, whose exchange overlaps the backward.
_DEFAULT_OPTIONS = EngineOptions()
_DDP_PARAMETERS = signature(DistributedDataParallel).parameters
_BUFFER_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"


class ReplicatedEngine:
    """A model that every rank holds whole, with its exchange of gradients.

    Args:
        name: the engine's, for messages.
        module: on `world.device`.
        parameters: those whose gradients are exchanged.
        world: joined through a launcher.
        settings: with DDP's options.

    Attributes:
        model: call this for the forward.

    Raises:
        ConfigError: no launcher started this process, or an option that cannot be exact with `--exact`.
    """

    def __init__(
        self, name: str, module: nn.Module, parameters: list[Tensor], world: World, settings: Settings
    ) -> None:
        check_launched(name, world)
        unexpanded(module)
        self._name, self._module, self._world, self._settings = name, module, world, settings
        self._parameters, self._roots = parameters, ScaledBackward()
        self._tree: Tree | None = None
        self._ddp: DistributedDataParallel | None = None
        self._usage: GradientUsage | None = None
        self._ddp_parameters: list[tuple[str, nn.Parameter]] = []  # those that DDP exchanges, as it counts them
        self._last, self._backwards = True, 0
        # The first backward of a static graph must be exchanged. Exchanging after every micro-batch is safe, since
        # averaging a mean leaves it unchanged.
        self._sync_always = settings.options.static_graph
        if settings.exact:
            self._build_tree()
        else:
            if _BUFFER_OPTION == "broadcast_buffers":  # before 2.13 DDP sends no buffers at first if forwards send none
                send_from_rank_0(module.buffers())
            self._wrap(settings.options.find_unused_parameters == "true")
            if settings.options.find_unused_parameters == "auto" and not settings.options.static_graph:
                self._usage = GradientUsage(self._trained_parameters(), world)
        self.model: nn.Module = self._ddp or module

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        self._last = last
        if self._ddp is None or self._sync_always or (last and self._usage is None):
            return NOTHING
        return self._ddp.no_sync()

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradient of `scale * loss`; DDP exchanges in the step's last micro-batch."""
        if self._tree or self._usage:
            self._roots.run(loss, scale)
            self._backwards += 1
            if self._tree:
                self._tree.push()
            return
        # Starting from the world size undoes DDP's division at no cost.
        self._roots.run(loss, scale if self._settings.loss_scaling else scale * self._world.size)
        if self._last:
            self._complete_reduction()

    def backward_alone(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradient of `scale * loss` on this rank only. Call within `alone`."""
        self._roots.run(loss, scale)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Bypass DDP: forward and backward use the plain module and leave no counts. Collective."""
        ddp, module = self._ddp, self._module
        if ddp is not None:
            ddp.forward = lambda *args, **kwargs: module(*args, **kwargs)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if ddp is not None:
                del ddp.forward
            if self._usage:
                self._usage.begin()
        if ddp is not None and self._settings.options.static_graph:  # it has counted the backward as its first
            self._wrap(self._settings.options.find_unused_parameters == "true")
            self._sync_always = True

    @contextmanager
    def apart(self) -> Iterator[Callable[[Tensor, float], None]]:
        """Yield a backward of the plain module's loss on this rank alone, which leaves no counts."""
        try:
            yield self.backward_alone
        finally:
            if self._usage:
                self._usage.begin()

    def finish(self) -> None:
        """Exchange, before the update, the gradients that DDP did not."""
        if self._tree:
            self._tree.finish()
        elif self._usage:
            self._finish_first_step(self._usage)
        elif self._settings.loss_scaling:
            # A backward that starts from the world size overflows float16 sooner, the more ranks there are.
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], self._world.size)
        self._sync_always = False

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]

    def _build_tree(self) -> None:
        if self._settings.options.compression in HALVES:
            raise ConfigError(
                "--exact does not work with --engine.compression, whose rounding depends on the world size; drop one"
            )
        same_start(self._module)
        self._tree = Tree(self._parameters, self._settings.exact, self._world, self._settings.sharing)

    def _wrap(self, find_unused: bool) -> None:
        """Build the DDP object, or rebuild it in place: the loop holds a reference."""
        options, device = self._settings.options, self._world.device
        buffer_option: dict[str, Any] = {_BUFFER_OPTION: False}
        former = self._ddp or self._settings.wrapper
        ddp = former if isinstance(former, DistributedDataParallel) else None
        ddp = ddp or DistributedDataParallel.__new__(DistributedDataParallel)
        DistributedDataParallel.__init__(
            ddp,
            self._module,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=find_unused,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=None if options.bucket_cap_mb == _DEFAULT_OPTIONS.bucket_cap_mb else options.bucket_cap_mb,
            **buffer_option,  # engines/buffers.py sends those that a forward writes, once a step
        )
        if options.compression in HALVES:
            ddp.register_comm_hook(HALVES[options.compression], averaged)
        if find_unused:
            _silence_unused_warning(ddp)
        self._ddp, self._ddp_parameters = ddp, self._trained_parameters()

    def _finish_first_step(self, usage: GradientUsage) -> None:
        names = usage.missed(self._backwards)
        usage.close()
        self._usage = None
        sum_by_hand([p for _, p in self._trained_parameters()], self._world)
        if names:
            self._settings.say(
                f"--engine {self._name}: {len(names)} parameters are not used by every micro-batch "
                f"({listed(names)}); turned on --engine.find-unused-parameters, which searches each graph"
            )
            self._wrap(True)  # gradients are kept

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
        options = self._settings.options
        if options.find_unused_parameters != "auto" or options.static_graph:
            raise LockstepError(
                f"{rank_label(self._world.rank)}, --engine {self._name}: the loss of this micro-batch does not use "
                f"{listed([name for name, _ in missed])}, though the first step did, so gradients were not exchanged; "
                "drop --engine.find-unused-parameters false and --engine.static-graph"
            )
        parameters = [parameter for _, parameter in missed]
        unset = [parameter for parameter in parameters if parameter.grad is None]
        with torch.no_grad():
            zeros = [-torch.zeros_like(parameter) for parameter in parameters]
        torch.autograd.backward(parameters, zeros)  # collective: DDP's hooks count these gradients too
        for parameter in unset:
            gradient = parameter.grad
            if gradient is not None and torch.equal(as_bytes(gradient), as_bytes(-torch.zeros_like(gradient))):
                parameter.grad = None  # waits for the device, in such a step only

    def _missed_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients DDP still waits for on this rank."""
        ddp: Any = self._ddp
        try:
            ddp._check_reducer_finalized()  # private: DDP itself asks only in the next forward
        except RuntimeError as error:
            # The reducer gives the indices in its text alone; the other ranks wait, so there is no second source.
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if match is None:
                raise
            return [self._ddp_parameters[int(index)] for index in match[1].split()]
        return []


def _silence_unused_warning(ddp: Any) -> None:
    """Suppress torch's warning about a needless search for unused parameters.

    C++ prints it on each rank, at the first forward that uses all parameters, even if another forward does not. C++
    warnings become Python warnings only inside a torch function that calls back, such as `apply_`; only there can they
    be filtered.
    """
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


def same_start(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, as DDP's constructor does. None may be expanded."""
    send_from_rank_0(model.parameters())
    send_from_rank_0(model.buffers())


def send_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Broadcast rank 0's values of `tensors`, in place. None may be expanded."""
    with torch.no_grad():
        for tensor in tensors:
            collectives.broadcast(tensor, src=0)  # collective


def sum_by_hand(parameters: list[nn.Parameter], world: World) -> None:
    """Sum `.grad` over the ranks, parameter by parameter; None if no rank has one. Collective."""
    if world.size == 1:
        return
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    collectives.all_reduce(flags, group=world.control)  # collective
    for parameter, flag in zip(parameters, flags.tolist(), strict=True):
        if flag:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            collectives.all_reduce(parameter.grad)  # collective


@final
class DDP:
    """The engine `ddp`. Raises ConfigError without a launcher."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, settings: Settings) -> None:
        self._module = model
        instance = optimizer(model)
        parameters = trained(model, instance)
        self._replicas = ReplicatedEngine("ddp", model, parameters, world, settings)
        self._update = OptimizerStep(
            model,
            instance,
            settings,
            cleared=parameters,
            fixed=True,
            exchange=self._replicas.finish,
            shared=world.size > 1,
            dense="--engine ddp",
        )
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
        self._replicas.finish()
        return self._update(factor, limit, momentum, evaluate)

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
