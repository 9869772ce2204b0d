"""What a check is, what it is given, and what it finds.

found = Found([ok("cores", "2 cores")], facts={"cores": 2})         # on each rank
check = Check("cores", cores, seconds=2.0)                          # what is wrong with the whole: judge=...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.config import Config

if TYPE_CHECKING:
    from lockstep.diagnose.doctor.board import Board
    from lockstep.distributed.world import World

__all__ = ["FAIL", "OK", "WARN", "Check", "Finding", "Found", "Place", "fail", "ok", "warn"]

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say.

    Attributes:
        check: the name that stands before it.
        level: OK; WARN: it may hurt, or cost time; FAIL: training will fail, hang or be wrong.
        text: what is, with its place where that is not the rank that found it.
        mend: the way out; "" for OK.
    """

    check: str
    level: str
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, OK, text)


def warn(check: str, text: str, mend: str) -> Finding:
    """Something may hurt."""
    return Finding(check, WARN, text, mend)


def fail(check: str, text: str, mend: str) -> Finding:
    """Something is wrong."""
    return Finding(check, FAIL, text, mend)


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found on one rank; `facts` go to the check's judge, and must be plain JSON values."""

    findings: list[Finding] = field(default_factory=list)
    facts: Any = None


@dataclass
class Place:
    """Where a check runs.

    Attributes:
        config: the run that is asked about.
        with_task: the task is to be tried too.
        rank, local_rank, size, local_size: as the launcher says.
        host: this machine's name.
        environ: the environment's variables.
        root: where /proc, /sys and /dev are looked for.
        patience: seconds to wait for the other ranks to come.
        devices: CUDA devices that torch sees here.
        board: what the ranks tell each other; None before they have met, or where they did not.
        world: their groups, once these are formed.
        hosts: by rank, its machine's name; "" of one that did not come.
        closing: called at the end.
        given: `world` is the caller's, who leaves it.
        alone: this rank did not meet the others.
        lost: the launcher's variables do not say which rank this is.
        told: the options that were given, beside which a LightningModule's loaders say the rest.
        module: the task of a LightningModule that was made; `config` then has what its loaders say.
        broken: ranks waited for each other in vain, so that no check may have them do so again.
    """

    config: Config
    with_task: bool
    rank: int
    local_rank: int
    size: int
    local_size: int
    host: str
    environ: Mapping[str, str]
    root: Path = Path("/")
    patience: float = 20.0
    devices: int = 0
    board: "Board | None" = None
    world: "World | None" = None
    hosts: list[str] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    given: bool = False
    alone: bool = False
    lost: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)
    module: Any = None
    broken: bool = False

    def who(self, rank: int) -> str:
        """`rank 1 on node-b`."""
        host = self.hosts[rank] if rank < len(self.hosts) else self.host * (rank == self.rank)
        return f"rank {rank}" + (f" on {host}" if host else "")

    @property
    def several_nodes(self) -> bool:
        """Whether ranks of other nodes belong to the run, as the launcher says."""
        return self.size > self.local_size

    def text(self, path: str) -> str:
        """The content of a small file of the system, such as `proc/meminfo`; "" where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: of its line.
        run: on every rank.
        seconds: it may take; after that it is given up, and that is its line.
        judge: on rank 0, of the facts of each rank (None of one that said nothing): what is wrong with the whole.
        together: ranks wait for each other in it, so it is left out once one of them is missing or has hung.
        stuck: the way out where it does not end.
    """

    name: str
    run: Callable[[Place], Found]
    seconds: float = 5.0
    judge: Callable[[list[Any], Place], list[Finding]] | None = None
    together: bool = False
    stuck: str = "look at what it waits for"
