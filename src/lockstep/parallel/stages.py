"""Cut a model into the stages of a pipeline, without a change of its code or of the task's loss.

    stage = cut_stage(model, blocks, loss, batch, StageIndex(rank, size))  # model keeps this stage's parameters
    output, generators = stage.forward(lambda: loss(model, batch), arrival)

Every stage runs the whole of `loss`. Its own blocks compute; the block before them returns the hidden states that the
previous stage sent, and the one after them carries its input out of the loss by an exception. What runs before the
blocks on a later stage computes with NaN in place of parameters, and its result is dropped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.parallel.context import watch
from lockstep.parallel.stage_trace import BlockUse, trace_blocks
from lockstep.task import Task, has_own, has_step_loss
from lockstep.tensors import local_of

__all__ = [
    "PipelineStage",
    "StageIndex",
    "StageInput",
    "check_pipeline",
    "cut_stage",
    "generator_states",
]


@dataclass(frozen=True, slots=True)
class StageIndex:
    """A stage's index, 0 <= index < stages, and their number."""

    index: int
    stages: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def own(self, blocks: int) -> range:
        """Return the indices of this stage's blocks; the numbers of two stages differ by at most one."""
        return range(self.index * blocks // self.stages, (self.index + 1) * blocks // self.stages)


class StageInput(NamedTuple):
    """Hidden states and generator states that a stage receives for a micro-batch.

    Attributes:
        hidden: the last block's output, a leaf of this stage's graph.
        generators: states of torch's generators after that block, see `generator_states`.
    """

    hidden: Tensor
    generators: Tensor


class _StageEnd(BaseException):
    """Carry the output of a stage's last block out of the task's loss.

    No error, and no Exception, so that a task's own `except Exception` does not stop it.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _PassThrough:
    """A block of another stage, as the first base of the block's class, whose attributes a model may read."""

    _carrier: int | str

    # Not `forward`: neither hooks nor recomputation of the block apply.
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = args[self._carrier] if isinstance(self._carrier, int) else kwargs[self._carrier]
        return self._pass(hidden)

    def _pass(self, hidden: Tensor) -> Tensor:
        return hidden


class _StageEntry(_PassThrough):
    """The block before a stage's first one: returns what the previous stage sent."""

    _inbox: "_Inbox"

    def _pass(self, hidden: Tensor) -> Tensor:
        arrival = self._inbox.arrival
        if arrival is None:
            raise ConfigError(
                "--parallel.pipeline: the task calls the model's blocks twice for a micro-batch, which has arrived "
                "once; call the model once"
            )
        self._inbox.arrival = None
        # Here and not before the forward: what runs before the blocks draws too, on every stage.
        _set_generators(arrival.generators, arrival.hidden.device)
        return arrival.hidden


class _StageExit(_PassThrough):
    """The block after a stage's last one: ends the task's loss."""

    def _pass(self, hidden: Tensor) -> Tensor:
        raise _StageEnd(watch(hidden))


@dataclass(slots=True)
class _Inbox:
    arrival: StageInput | None = None


class PipelineStage:
    """This rank's stage of a model.

    Attributes:
        index: of the stage, and the number of stages.
        holders: parameter of the whole model, in its order -> the stages that hold it: one, or both ends.
        trained: those that were trained when the model was cut.
        norm_dtype: of the norm of the trained ones.
        elsewhere: names in the whole model's `state_dict()` that this stage does not have.
        blocks: of all stages, in order; those of other stages have no parameters here.
    """

    def __init__(
        self, index: StageIndex, parameters: Mapping[str, Tensor], holders: dict[str, tuple[int, ...]]
    ) -> None:
        self.index = index
        self.holders = holders
        self.elsewhere: set[str] = set()
        self.blocks: Sequence[nn.Module] = ()
        self.trained: list[str] = []
        self.norm_dtype = torch.float32
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self.trained.append(name)
                if parameter.dtype is torch.float64:
                    self.norm_dtype = torch.float64
        self._inbox = _Inbox()

    @property
    def tied(self) -> list[str]:
        """The trained parameters that the first and the last stage hold, in the model's order."""
        return [name for name in self.trained if len(self.holders[name]) > 1]

    @property
    def parameters_elsewhere(self) -> list[str]:
        """The parameters that this stage does not hold, in the model's order."""
        return [name for name, stages in self.holders.items() if self.index.index not in stages]

    def forward(self, loss: Callable[[], Any], arrival: StageInput | None) -> tuple[Any, Tensor | None]:
        """Run the task's loss of a micro-batch as far as this stage goes.

        Args:
            loss: of the cut model.
            arrival: from the previous stage; None on the first.

        Returns:
            Before the last stage, the output of its last block, and the generators' states then. On the last stage,
            what `loss` returned, and None.

        Raises:
            ConfigError: the loss did not call this stage's blocks.
        """
        self._inbox.arrival = arrival
        generators: Tensor | None = None
        is_end = self.index.is_last
        try:
            output = loss()
        except _StageEnd as end:
            output = end.output
            is_end = True
            generators = generator_states(output.device)
        finally:
            # The graph holds what the backward needs.
            is_taken = self._inbox.arrival is None
            self._inbox.arrival = None
        if not (is_end and is_taken):
            raise ConfigError(
                f"{_flag(self.index.stages)}: the task's loss returned without a call of every block; call the model "
                "in the loss of every micro-batch"
            )
        return output, generators


def generator_states(device: torch.device) -> Tensor:
    """Return the states of torch's generators of the host and a device as bytes on the host; 5 KB."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        # A seed and an offset that the host knows: this does not wait for the device.
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_generators(states: Tensor, device: torch.device) -> None:
    size = torch.get_rng_state().numel()
    # Copies: torch 2.13 reads the host's state from the start of the memory, and crashes with a view into it.
    torch.set_rng_state(states[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[size:].clone(), device)


def check_pipeline(stages: int, micro_batches: int, task: Task, *, hooks: bool = False, closures: bool = False) -> None:
    """Refuse what does not work in a pipeline, before anything is cut.

    Args:
        stages: P.
        micro_batches: of a step, in one replica.
        task: of the run.
        hooks: the run has hooks that see each micro-batch.
        closures: the optimizer evaluates the loss several times in a step.

    Raises:
        ConfigError: fewer micro-batches than stages, or one of these.
    """
    if micro_batches < stages:
        raise ConfigError(
            f"{_flag(stages)}: a replica has {micro_batches} micro-batches a step, fewer than stages; use a degree of "
            f"at most {micro_batches}, or a smaller --micro-batch-size"
        )
    methods = [
        (f"the task's `{name}`", has_own(task, name)) for name in ("penalty", "evaluate", "state_dict", "set_groups")
    ]
    for name, is_used in (
        *methods,
        ("the task's `own_steps`", task.own_steps is not None),
        ("the task's `step_loss`", has_step_loss(task)),
        ("an optimizer that evaluates the loss several times", closures),
        ("a hook that sees each micro-batch", hooks),
    ):
        # Each needs the whole model, or the loss, on every rank.
        if is_used:
            raise ConfigError(f"{_flag(stages)}: {name} does not work with it yet; leave one out")


def cut_stage(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    index: StageIndex,
    *,
    divide: Callable[[], None] = lambda: None,
) -> PipelineStage:
    """Keep one stage's parameters of a whole model. Changes the model, unless it raises.

    Args:
        model: in training mode, on its device. Its optimizer is made afterwards.
        blocks: its repeated blocks, in the order of their calls.
        loss: the task's.
        batch: a micro-batch, of which only shapes are read.
        index: of the stage.
        divide: keeps this rank's part of each layer, under the same names. Called before the model is cut: a trace
            needs whole layers, and a plan names the layers of all blocks.

    Raises:
        ConfigError: there are fewer blocks than stages, or something else than one tensor goes from block to block.
    """
    flag = _flag(index.stages)
    if len(blocks) < index.stages:
        raise ConfigError(
            f"{flag}: the model has {len(blocks)} repeated blocks, fewer than stages; use a smaller degree, or name "
            "more modules in the task's blocks(model)"
        )
    use = trace_blocks(model, blocks, loss, batch, flag)
    divide()
    parameters = dict(model.named_parameters())
    names = set(model.state_dict())
    stage = PipelineStage(index, parameters, _place(parameters, use, index))
    _check_trained(stage, flag)
    for number in range(1, index.stages):
        first = StageIndex(number, index.stages).own(len(blocks)).start
        if first in use.joined:
            raise ConfigError(
                f"{flag}: the model recomputes blocks {first - 1} and {first} together, which are on two stages; "
                "give torch.utils.checkpoint one block at a time, or use --activation-checkpointing"
            )
    own = index.own(len(blocks))
    for number, block in enumerate(blocks):
        if number not in own:
            _replace(block, _replacement(number, own), use.carrier, stage._inbox)
    dropped: set[Tensor] = set()
    for name, stages in stage.holders.items():
        if index.index not in stages:
            dropped.add(parameters[name])
    _drop(model, dropped)
    stage.elsewhere = names - set(model.state_dict())
    stage.blocks = blocks
    return stage


def _place(parameters: Mapping[str, Tensor], use: BlockUse, index: StageIndex) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter of the whole model."""
    holders: dict[str, tuple[int, ...]] = {}
    stage_of = {}
    for stage in range(index.stages):
        for number in StageIndex(stage, index.stages).own(use.blocks):
            stage_of[number] = stage
    last = index.stages - 1
    for name in parameters:
        if name in use.block_of:
            holders[name] = (stage_of[use.block_of[name]],)
        elif name in use.after:
            holders[name] = (0, last) if name in use.before else (last,)
        else:
            # What no forward uses is on the first stage too, so that a checkpoint has it.
            holders[name] = (0,)
    return holders


def _check_trained(stage: PipelineStage, flag: str) -> None:
    """Refuse a stage without a trained parameter: it would have no optimizer. The same on every stage."""
    trains: set[int] = set()
    for name in stage.trained:
        trains.update(stage.holders[name])
    for number in range(stage.index.stages):
        if number not in trains:
            raise ConfigError(
                f"{flag}: stage {number} (the first is 0) has no parameter that is trained; use a smaller degree, or "
                "train some of its blocks"
            )


def _replacement(number: int, own: range) -> type[_PassThrough]:
    if number == own.start - 1:
        return _StageEntry
    if number == own.stop:
        return _StageExit
    return _PassThrough


def _replace(block: Any, kind: type[_PassThrough], carrier: int | str, inbox: _Inbox) -> None:
    """Turn a block into one without parameters that passes its input on."""
    for parts in (block._parameters, block._buffers, block._modules):
        parts.clear()
    block._carrier = carrier
    block._inbox = inbox
    # Change the class and keep the object: the model and the task may refer to it, and read its attributes.
    block.__class__ = type(f"{kind.__name__}{type(block).__name__}", (kind, type(block)), {})


def _drop(model: nn.Module, dropped: set[Tensor]) -> None:
    """Put NaN of the same shape on this rank and of one element's memory in the place of parameters.

    What uses them where it must not, such as metrics, is then NaN and not a plausible number.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in dropped:
                delattr(module, name)
                # A plain attribute: neither the optimizer nor a checkpoint may see it.
                is_float = parameter.is_floating_point() or parameter.is_complex()
                local = local_of(parameter)
                stub = local.new_full((), math.nan if is_float else 0)
                setattr(module, name, stub.expand(local.shape))


def _flag(stages: int) -> str:
    return f"--parallel.pipeline {stages}"
