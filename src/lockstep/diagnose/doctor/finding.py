"""Define checks, their context and their findings; advise on environment variables.

found = CheckResult([ok("cores", "2 cores")], facts={"cores": 2})       # on each rank
check = Check("cores", cores, seconds=2.0)                          # problems of the whole run: judge=...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.config.schema import Config
from lockstep.diagnose.doctor.board import infiniband, interfaces

if TYPE_CHECKING:
    from lockstep.diagnose.doctor.board import Board
    from lockstep.distributed.world import World

__all__ = [
    "FAIL",
    "OK",
    "SKIP",
    "WARN",
    "Check",
    "CheckContext",
    "CheckResult",
    "Finding",
    "advice_on",
    "fail",
    "ok",
    "select_interfaces",
    "skip",
    "warn",
]


OK = "ok"
SKIP = "skip"
WARN = "warn"
FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check.

    Attributes:
        check: the name in front of it.
        level: OK; SKIP: it was not run, for the reason in the text; WARN: it may hurt, or cost time; FAIL: training
            will fail, hang or be wrong.
        text: the fact, with its place if that is not the reporting rank.
        mend: the remedy; "" for OK and SKIP.
    """

    check: str
    level: str
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    """Make a finding of level OK."""
    return Finding(check, OK, text)


def skip(check: str, why: str) -> Finding:
    """Make a finding of level SKIP: the check was not run."""
    return Finding(check, SKIP, why)


def warn(check: str, text: str, mend: str) -> Finding:
    """Make a finding of level WARN: something may hurt."""
    return Finding(check, WARN, text, mend)


def fail(check: str, text: str, mend: str) -> Finding:
    """Make a finding of level FAIL: something is wrong."""
    return Finding(check, FAIL, text, mend)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check on one rank.

    `facts` go to the check's judge, as plain JSON values.
    """

    findings: list[Finding] = field(default_factory=list)
    facts: Any = None


@dataclass
class CheckContext:
    """The context of the checks on this rank.

    Attributes:
        config: of the run.
        with_task: try the task too.
        rank, local_rank, size, local_size: from the launcher.
        host: this machine's name.
        environ: the environment variables.
        root: parent of /proc, /sys and /dev.
        patience: seconds to wait for the other ranks.
        devices: CUDA devices that torch sees here.
        board: exchange with the other ranks; None before they are connected, or if that failed.
        world: their process groups, once formed.
        hosts: host name of each rank; "" for a missing one.
        closing: called at the end.
        given: the caller owns `world`, and leaves it.
        alone: this rank could not connect to the others.
        lost: the launcher's variables do not determine this rank.
        told: the options that the user set; a LightningModule's loaders determine the rest.
        module: the task of a LightningModule, once built; `config` then has its loaders' values.
        broken: the process groups are unusable, so no further check may wait for other ranks.
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
        """Name a rank: `rank 1 on node-b`."""
        if rank < len(self.hosts):
            host = self.hosts[rank]
        else:
            host = self.host * (rank == self.rank)
        return f"rank {rank}" + (f" on {host}" if host else "")

    @property
    def several_nodes(self) -> bool:
        """Whether the run has ranks on other nodes, by the launcher's variables."""
        return self.size > self.local_size

    def text(self, path: str) -> str:
        """Read a small system file such as `proc/meminfo`; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        name: of its line.
        run: on every rank.
        seconds: time limit; a check that exceeds it is abandoned, and reported so.
        judge: on rank 0, with the facts of each rank (None for one that sent nothing): problems of the whole run.
        together: ranks wait for each other in it, so it is skipped once one of them is missing or has hung.
        stuck: the remedy if it times out.
    """

    name: str
    run: Callable[[CheckContext], CheckResult]
    seconds: float = 5.0
    judge: Callable[[list[Any], CheckContext], list[Finding]] | None = None
    together: bool = False
    stuck: str = "check what it waits for"


# NCCL's default, in bytes.
_BUFFER = 4 * 2**20
_DEBUGGING = "unset it unless you are debugging with it"


def _always(value: str, place: CheckContext) -> bool:
    return True


def _is(*values: str) -> Callable[[str, CheckContext], bool]:
    return lambda value, place: value.upper() in values


def _is_large(value: str, place: CheckContext) -> bool:
    return value.isascii() and value.isdigit() and int(value) > _BUFFER


def _hides_infiniband(value: str, place: CheckContext) -> bool:
    return value == "1" and bool(infiniband(place.root))


def _matches_more(value: str, place: CheckContext) -> bool:
    """Whether a prefix is an interface's whole name, and matches others too."""
    available = interfaces(place.root)
    return value in available and len(select_interfaces(value, available)) > 1


class Advice(NamedTuple):
    """A row of the table: a variable, and why to leave it alone.

    Attributes:
        name: of the variable.
        values: those that `applies` matches, for the documentation page.
        effect: the rest of a sentence that starts with the variable and its value.
        remedy: what to do instead.
        applies: whether it applies to a value on this rank.
    """

    name: str
    values: str
    effect: str
    remedy: str
    applies: Callable[[str, CheckContext], bool] = _always


_TABLE = (
    Advice("NCCL_TIMEOUT", "any", "has no effect", "unset it; --timeout limits a collective"),
    *(
        Advice(name, "any", f"is the old name of TORCH_{name}", "unset it; torch's default is right")
        for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
    ),
    Advice("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "turns a lost rank into a hang", "unset it", _is("0")),
    Advice("TORCH_NCCL_BLOCKING_WAIT", "1", "makes the host wait for every collective", "unset it", _is("1")),
    Advice("TORCH_NCCL_TRACE_BUFFER_SIZE", "any", "is the old name of TORCH_FR_BUFFER_SIZE", "set that"),
    Advice("NCCL_RINGS", "any", "was removed in NCCL 2.4, which builds its rings itself", "unset it"),
    Advice("NCCL_TREE_THRESHOLD", "any", "was removed in NCCL 2.5, which chooses by itself", "unset it"),
    Advice("NCCL_LL_THRESHOLD", "any", "was removed in NCCL 2.5, which chooses by itself", "unset it"),
    Advice("NCCL_IB_CUDA_SUPPORT", "any", "was removed in NCCL 2.4", "unset it; use NCCL_NET_GDR_LEVEL"),
    Advice("NCCL_MAX_NRINGS", "any", "is the old name of NCCL_MAX_CTAS", "unset it"),
    Advice("NCCL_MIN_NRINGS", "any", "is the old name of NCCL_MIN_CTAS", "unset it"),
    Advice(
        "NCCL_DEBUG_FILE",
        "with `%r`",
        "is one file for all processes of a node: %r is no placeholder",
        "put %h (host) and %p (process) into the name, as `lockstep launch --nccl-debug` does",
        lambda value, place: "%r" in value,
    ),
    Advice(
        "NCCL_DEBUG_FILE",
        "without `%p`",
        "is one file for all ranks, which overwrite each other",
        "put %h (host) and %p (process) into the name",
        lambda value, place: bool(value) and "%p" not in value and "%r" not in value and place.size > 1,
    ),
    Advice(
        "NCCL_IB_DISABLE",
        "0",
        "is the default and enables nothing",
        "unset it; if NCCL still uses sockets, the container lacks /dev/infiniband, libibverbs or locked memory",
        _is("0"),
    ),
    Advice(
        "NCCL_IB_DISABLE",
        "1",
        "makes NCCL use sockets although an InfiniBand port is up",
        "unset it",
        _hides_infiniband,
    ),
    Advice(
        "NCCL_BUFFSIZE",
        "above 4194304, the default",
        "allocates that much memory for each channel; large messages are split anyway",
        "unset it",
        _is_large,
    ),
    Advice(
        "NCCL_SOCKET_IFNAME",
        "`eth0`, if `eth01` exists too",
        "is a prefix and matches other interfaces too",
        "unset it (NCCL finds interfaces itself), or write = before the name",
        _matches_more,
    ),
    Advice("NCCL_P2P_DISABLE", "1", "copies through host memory instead of NVLink or PCIe", _DEBUGGING, _is("1")),
    Advice("NCCL_SHM_DISABLE", "1", "uses the network instead of shared memory", _DEBUGGING, _is("1")),
    Advice(
        "NCCL_ALGO", "any", "overrides NCCL's choice by message size, and may hang where it is unsupported", _DEBUGGING
    ),
    Advice(
        "NCCL_PROTO", "any", "overrides NCCL's choice by message size, and may hang where it is unsupported", _DEBUGGING
    ),
    Advice("CUDA_LAUNCH_BLOCKING", "1", "makes the host wait for every kernel", _DEBUGGING, _is("1")),
    Advice(
        "TORCH_DISTRIBUTED_DEBUG",
        "`DETAIL`",
        "compares every collective between the ranks first",
        _DEBUGGING,
        _is("DETAIL"),
    ),
    Advice(
        "CUDA_VISIBLE_DEVICES",
        "empty or -1",
        "hides every device",
        "unset it, or give --device cpu",
        lambda value, place: value in ("", "-1") and place.config.device != "cpu",
    ),
)


def advice_on(place: CheckContext) -> list[Advice]:
    """Return the advice that applies to this rank's environment."""
    advices = []
    for advice in _TABLE:
        if advice.name in place.environ and advice.applies(place.environ[advice.name], place):
            advices.append(advice)
    return advices


def select_interfaces(pattern: str, available: list[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects: prefixes; `=` whole names; `^` all others."""
    exclude = pattern.startswith("^")
    text = pattern.removeprefix("^")
    exact = text.startswith("=")
    text = text.removeprefix("=")
    names = [entry for entry in text.split(",") if entry]
    selected = []
    for name in available:
        if any(name == entry if exact else name.startswith(entry) for entry in names) != exclude:
            selected.append(name)
    return selected
