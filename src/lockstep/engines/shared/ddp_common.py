"""A model that every rank holds whole, and the one exchange of its gradients: what ddp and zero share.

The exchange is DistributedDataParallel's; in exact mode its reducer, whose order depends on its buckets and on the
backend, is left out and the fixed tree does it. The first step is exchanged by hand, so that it can find out which
parameters a backward may leave without a gradient; only then is DDP told.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, Settings
from lockstep.engines.options import EngineOptions
from lockstep.engines.shared.compress import HALVES, averaged
from lockstep.engines.shared.exact import Tree
from lockstep.engines.shared.model_init import unexpanded
from lockstep.engines.shared.scaled_backward import ScaledBackward
from lockstep.engines.shared.unused import Usage, listed
from lockstep.errors import ConfigError, LockstepError

__all__ = ["ReplicatedEngine"]

# What DDP calls its own exchange of buffers: renamed in torch 2.13, where the old name warns.
# A size given, be it the default one, loses DDP's smaller first buffer, which is on its way while the backward goes on.
_DEFAULT = EngineOptions()
_KNOWN = signature(DistributedDataParallel).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


class ReplicatedEngine:
    """The model as every rank holds it.

    Args:
        name: of the engine, for messages.
        module: on `world.device`.
        parameters: those whose gradients are exchanged.
        world: joined by a launcher.
        settings: its options are DDP's.

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
        self._usage: Usage | None = None
        self._wrapped: list[tuple[str, nn.Parameter]] = []  # those that DDP exchanges, as it counts them
        self._last, self._backwards = True, 0
        # The first backward of a static graph must be exchanged. DDP's mean leaves what is a mean already as it is, so
        # that it may exchange after every micro-batch.
        self._always = settings.options.static_graph
        if settings.exact:
            self._be_exact()
        else:
            if _BUFFERS == "broadcast_buffers":  # before 2.13 DDP sends no buffers at first where forwards send none
                send_from_rank_0(module.buffers())
            self._wrap(settings.options.find_unused_parameters == "true")
            if settings.options.find_unused_parameters == "auto" and not settings.options.static_graph:
                self._usage = Usage(self._trained(), world)
        self.model: nn.Module = self._ddp or module

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        self._last = last
        if self._ddp is None or self._always or (last and self._usage is None):
            return NOTHING
        return self._ddp.no_sync()

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Adds the gradient of `scale * loss`; after the step's last micro-batch DDP exchanges."""
        if self._tree or self._usage:
            loss.backward(self._roots(loss, scale))  # type: ignore[no-untyped-call]
            self._backwards += 1
            if self._tree:
                self._tree.push()
            return
        # Starting from the world size undoes DDP's division at no cost.
        loss.backward(self._roots(loss, scale if self._settings.loss_scaling else scale * self._world.size))  # type: ignore[no-untyped-call]
        if self._last:
            self._check_exchanged()

    def backward_alone(self, loss: Tensor, scale: float | Tensor) -> None:
        """Add the gradient of `scale * loss` to this rank's; within `alone`."""
        loss.backward(self._roots(loss, scale))  # type: ignore[no-untyped-call]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it forward and backward are the plain module's, and leave no trace in what is counted. Collective."""
        ddp, module = self._ddp, self._module
        if ddp is not None:
            ddp.forward = lambda *given, **named: module(*given, **named)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if ddp is not None:
                del ddp.forward
            if self._usage:
                self._usage.begin()
        if ddp is not None and self._settings.options.static_graph:  # it has counted the backward as its first
            self._wrap(self._settings.options.find_unused_parameters == "true")
            self._always = True

    def finish(self) -> None:
        """Before the update: exchanges what DDP did not."""
        if self._tree:
            self._tree.finish()
        elif self._usage:
            self._end_of_first_step(self._usage)
        elif self._settings.loss_scaling:
            # A backward that starts from the world size overflows float16 sooner, the more ranks there are.
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], self._world.size)
        self._always = False

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]

    def _be_exact(self) -> None:
        if self._settings.options.compression in HALVES:
            raise ConfigError("--exact cannot hold with --engine.compression: rounding depends on who adds; drop one")
        same_start(self._module)
        self._tree = Tree(self._parameters, self._settings.exact, self._world, self._settings.sharing)

    def _wrap(self, find_unused: bool) -> None:
        """Makes the DDP object, or makes it anew in place, since the loop has hold of it."""
        options, device = self._settings.options, self._world.device
        off: dict[str, Any] = {_BUFFERS: False}
        before = self._ddp or self._settings.wrapper
        ddp = before if isinstance(before, DistributedDataParallel) else None
        ddp = ddp or DistributedDataParallel.__new__(DistributedDataParallel)
        DistributedDataParallel.__init__(
            ddp,
            self._module,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=find_unused,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=None if options.bucket_cap_mb == _DEFAULT.bucket_cap_mb else options.bucket_cap_mb,
            **off,  # engines/buffers.py sends those that a forward writes, once a step
        )
        if options.compression in HALVES:
            ddp.register_comm_hook(HALVES[options.compression], averaged)
        if find_unused:
            _silence_advice(ddp)
        self._ddp, self._wrapped = ddp, self._trained()

    def _end_of_first_step(self, usage: Usage) -> None:
        names = usage.missed(self._backwards)
        usage.close()
        self._usage = None
        sum_by_hand([p for _, p in self._trained()], self._world)
        if names:
            self._settings.say(
                f"--engine {self._name}: {len(names)} parameters are not used by every micro-batch "
                f"({listed(names)}); turned on --engine.find-unused-parameters, which searches each graph"
            )
            self._wrap(True)  # the gradients stay

    def _check_exchanged(self) -> None:
        """Raises where parameters were left out of the last backward: their buckets, then, were not exchanged."""
        ddp: Any = self._ddp
        try:
            ddp._check_reducer_finalized()
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            trained = self._wrapped
            places = [int(k) for k in found[1].split()] if found else []
            names = [trained[k][0] for k in places if k < len(trained)] or ["some parameters"]
            raise LockstepError(
                f"{rank_label(self._world.rank)}, --engine {self._name}: the loss of this micro-batch does not use "
                f"{listed(names)}, though the first step did, so gradients were not exchanged; start with "
                "--engine.find-unused-parameters true"
            ) from error


def _silence_advice(ddp: Any) -> None:
    """Keep torch's advice against the search for unused parameters off the screen, where each rank's C++ prints it.

    It comes with the first forward that uses all of them, also where another one does not. Warnings of C++ are Python's
    within a function of torch that calls back, such as `apply_`, and only there can they be told apart.
    """
    after_forward = type(ddp)._post_forward

    def quietly(output: Any) -> Any:
        found = []

        def call(value: float) -> float:
            found.append(after_forward(ddp, output))
            return value

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            torch.zeros((), device="cpu").apply_(call)
        return found[0]

    ddp._post_forward = quietly


def check_launched(name: str, world: World) -> None:
    """Raises ConfigError where no launcher started this process."""
    if world.control is None:
        raise ConfigError(
            f"--engine {name} needs a launcher: torchrun --standalone --nproc-per-node 2 -m lockstep train"
        )


def same_start(model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every rank, as DDP's constructor would have it. None of them is expanded."""
    send_from_rank_0(model.parameters())
    send_from_rank_0(model.buffers())


def send_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Give all ranks rank 0's values of `tensors`, in place. None of them is expanded."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)  # collective


def sum_by_hand(parameters: list[nn.Parameter], world: World) -> None:
    """Sums `.grad` over the ranks, a parameter at a time; None stays where no rank has a gradient."""
    if world.size == 1:
        return
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    dist.all_reduce(flags, group=world.control)  # collective
    for parameter, used in zip(parameters, flags.tolist(), strict=True):
        if used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # collective
