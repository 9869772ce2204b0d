"""Hold the state of a run, divided by how long each part lives, and give a task's hooks access to it.

    spec = RunSpec(config, task, world)     # what the caller gave: it never changes
    status = RunStatus.of(spec)             # what changes while the run goes on; `status.built` has its parts
    context = HookContext(status, built)
    task.hooks.before_run(context, built.start)

Hooks may log, gather over the ranks, store state in checkpoints and stop the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.distributed.exchange import CONTINUE
from lockstep.distributed.membership import Member
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, RankLost
from lockstep.guards.nonfinite import Rollback
from lockstep.records import Best, EvaluationRecord, Step
from lockstep.training.state.outputs import RunOutputs
from lockstep.training.state.parts import RunParts
from lockstep.training.state.selection import Criterion, select_value

__all__ = [
    "BuildInputs",
    "HookContext",
    "MicroBatchCut",
    "ReadNumbers",
    "Rebuild",
    "RunRanks",
    "RunSpec",
    "RunStatus",
    "update_best",
]


ReadNumbers = Callable[[Step], tuple[float, dict[str, float]]]


class PendingStop:
    """The strongest stop request of a signal while no exchange can pass it on."""

    def __init__(self) -> None:
        self.request = CONTINUE

    def stop(self, stop_request: int) -> None:
        """Request a stop, as `StepExchange.stop` does."""
        self.request = max(self.request, stop_request)


@dataclass(frozen=True)
class RunSpec:
    """Request of a run's caller; it never changes.

    Attributes:
        config: as the caller gave it; `BuildInputs.config` has the resolved one.
        task: the caller's task, or None.
        world: the process groups that the caller joined, or None.
        min_steps: minimum length of the plan; epochs are added to reach it.
    """

    config: Config
    task: Any = None
    world: World | None = None
    min_steps: int = 0


@dataclass
class BuildInputs:
    """Inputs of the next build, as the last build left them.

    Attributes:
        config: the caller's; after a build the resolved one.
        cut: of a step, as the last build chose it: `resume.FIXED` or `BY_RANKS`; "": nothing is built yet.
        trial_cut: why the trial needs smaller micro-batches, until the folder records it; "": it does not.
        user_objects: objects that the caller stores in checkpoints, by name.
        tensors: initial values of the tensors of these objects and of the task.
    """

    config: Config
    cut: str = ""
    trial_cut: str = ""
    user_objects: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def copy_tensors(self, own: dict[str, Tensor], *, survives_loss: bool) -> None:
        """Copy the initial values of `own` if the run may go back to its start.

        Args:
            survives_loss: the run continues without a lost rank.
        """
        guards = self.config.guards
        if survives_loss or "rollback" in (guards.nonfinite, guards.spike) or self.config.on_oom == "smaller":
            for name, tensor in own.items():
                self.tensors[name] = tensor.detach().clone()

    def restore_tensors(self, built: RunParts) -> None:
        """Restore the initial values for a rollback without a checkpoint."""
        tensors = built.own_tensors
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.tensors[name])
        built.load_state_dict(tensors)


@dataclass
class RunRanks:
    """The ranks of a run, and what this process knows of those that were lost.

    Attributes:
        world: the current process groups.
        member: this process in a run that survives lost ranks; None: a lost rank ends the run.
        is_main: whether this process is rank 0.
        initial_size: number of ranks before the first loss; 0: none was lost.
        lost: a line for each rank that this start of the run lost.
        losses: ranks lost over all starts that were noticed here; a checkpoint may be from before it.
        last_error: text of the last error that reported a lost rank.
        timed_out: this process waited for the others nearly all of `--timeout`.
        regroup_tries: attempts to form new groups since the last step.
        digest: hash of what must be equal on all members.
        evaluated_step: step of the last evaluation; -1: none.
        pending_stop: stop request of a signal while there is no exchange.
    """

    world: World | None = None
    member: Member | None = None
    is_main: bool = True
    initial_size: int = 0
    lost: list[str] = field(default_factory=list)
    losses: int = 0
    last_error: str = ""
    timed_out: bool = False
    regroup_tries: int = 0
    digest: str = ""
    evaluated_step: int = -1
    pending_stop: PendingStop = field(default_factory=PendingStop)


@dataclass
class RunStatus:
    """State of a run, from its start to after its end.

    Attributes:
        name: "new", "running", or a status of `run.Result`; "failed" after an error.
        built: the run's parts; None before and after.
        model: as the task made it; it outlives `built`.
        has_body: the caller loops over the steps.
        current_step: the step whose loop body runs.
        reader: reads the loss and the numbers of that step.
        wants_stop: the caller asked to stop in this loop body.
        abandoned: the caller asked to end without a save.
        save_due: a checkpoint up to the current step was lost with a rank.
    """

    inputs: BuildInputs
    ranks: RunRanks = field(default_factory=RunRanks)
    outputs: RunOutputs = field(default_factory=RunOutputs)
    name: str = "new"
    exit_code: int = 0
    built: RunParts | None = None
    model: nn.Module | None = None
    has_body: bool = True
    current_step: Step | None = None
    reader: ReadNumbers | None = None
    wants_stop: bool = False
    abandoned: bool = False
    save_due: bool = False
    global_step: int = 0
    evaluation: EvaluationRecord | None = None
    best: Best | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        """Return the status of a run that has not started."""
        return cls(BuildInputs(spec.config))

    def hold(self, built: RunParts) -> None:
        """Store the parts of a build, and what the next one starts from."""
        self.built = built
        self.model = built.model
        self.inputs.config = built.config
        self.inputs.cut = built.run_plan.cut

    @property
    def early_name(self) -> str:
        """The status of a run whose loop the caller leaves early."""
        if self.abandoned:
            return "abandoned"
        return "stopped"

    def read_numbers(self, step: Step) -> tuple[float, dict[str, float]]:
        """Read the loss and the numbers of `step` while its loop body runs.

        A `Step` holds this method and not the run: a caller that keeps steps must not keep the model alive.

        Raises:
            LockstepError: the next step has begun, or the run has ended.
        """
        if self.reader is None or self.current_step is not step:
            raise LockstepError(
                f"the loss of step {step.global_step} is no longer available; read step.loss in the loop body of its "
                "own step"
            )
        return self.reader(step)


@final
class HookContext:
    """Access of a task's hooks to the run, as `lockstep.hooks.RunContext`."""

    def __init__(self, status: RunStatus, built: RunParts) -> None:
        self._status = status
        self._built = built
        self.state: dict[str, Any] = built.hook_state
        self.log_freq: int = built.config.log_freq

    def log(self, values: Mapping[str, float]) -> None:
        if self._status.ranks.is_main and values:
            self._status.outputs.sinks.log({"global_step": self._status.global_step, **values})

    def gather(self, value: Any) -> list[Any]:
        # For the task's hooks, which every rank runs.
        return self._built.world.gather(value)

    def stop(self) -> None:
        self._status.wants_stop = True

    def compare(self, metric: str, value: float, *, higher: bool) -> bool:
        built = self._built
        step = self._status.global_step
        return select_value(built.state.selection, Criterion(metric, 1 if higher else -1, 0.0), step, value)

    @property
    def best(self) -> Best | None:
        update_best(self._status)
        return self._status.best


def update_best(status: RunStatus) -> None:
    """Set the best evaluation from the run's state."""
    built = status.built
    best = built.state.selection.best if built else None
    if built and best:
        path = checkpoint.path_of(built.setup.folder.path, best.step)
        # An earlier start of the run may have written it.
        exists = built.config.checkpoint.mode != "none" or path.is_dir()
        status.best = Best(best.step, best.loss, str(path) if exists else "", best.metric, best.metric_value)


class Rebuild(RankLost):
    """A request that all ranks rebuild the whole run.

    A rank failed during a rollback, or needs smaller micro-batches.
    """


class MicroBatchCut(Rollback):
    """Request to build the run again with the smaller micro-batches that its folder records."""
