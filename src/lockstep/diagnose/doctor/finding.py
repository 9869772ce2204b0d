"""What a check is, what it is given, and what it finds.

found = Found([ok("cores", "2 cores")], facts={"cores": 2})         # on each rank
check = Check("cores", cores, seconds=2.0)                          # what is wrong with the whole: judge=...
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
    "WARN",
    "Advice",
    "Check",
    "CheckContext",
    "CheckResult",
    "Finding",
    "advice_on",
    "chosen",
    "fail",
    "ok",
    "page_rows",
    "warn",
]


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
class CheckResult:
    """What a check found on one rank; `facts` go to the check's judge, and must be plain JSON values."""

    findings: list[Finding] = field(default_factory=list)
    facts: Any = None


@dataclass
class CheckContext:
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
    run: Callable[[CheckContext], CheckResult]
    seconds: float = 5.0
    judge: Callable[[list[Any], CheckContext], list[Finding]] | None = None
    together: bool = False
    stuck: str = "look at what it waits for"


_BUFFER = 4 * 2**20  # NCCL's default
_SEARCH = "unset it, unless you search for a fault with it"


def _always(value: str, place: CheckContext) -> bool:
    return True


def _is(*values: str) -> Callable[[str, CheckContext], bool]:
    return lambda value, place: value.upper() in values


def _is_large(value: str, place: CheckContext) -> bool:
    return value.isascii() and value.isdigit() and int(value) > _BUFFER


def _hides_infiniband(value: str, place: CheckContext) -> bool:
    return value == "1" and bool(infiniband(place.root))


def _takes_more(value: str, place: CheckContext) -> bool:
    """Whether a prefix is the whole name of an interface, and takes others too."""
    known = interfaces(place.root)
    return value in known and len(chosen(value, known)) > 1


class Advice(NamedTuple):
    """One row of the table: a variable, and why to leave it alone.

    Attributes:
        name: of the variable.
        values: those that `applies` takes, for the page.
        effect: a sentence's rest, behind the variable and its value.
        remedy: what to do instead.
        applies: whether it holds for a value on this rank.
    """

    name: str
    values: str
    effect: str
    remedy: str
    applies: Callable[[str, CheckContext], bool] = _always


_TABLE = (
    Advice("NCCL_TIMEOUT", "any", "is read by nobody", "unset it; --timeout is how long a collective may take"),
    *(
        Advice(name, "any", f"is the old name of TORCH_{name}", "unset it; torch's default is right")
        for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
    ),
    Advice("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "makes a lost rank a hang", "unset it", _is("0")),
    Advice("TORCH_NCCL_BLOCKING_WAIT", "1", "makes the host wait for every collective", "unset it", _is("1")),
    Advice("TORCH_NCCL_TRACE_BUFFER_SIZE", "any", "is the old name of TORCH_FR_BUFFER_SIZE", "set that"),
    Advice("NCCL_RINGS", "any", "is gone since NCCL 2.4, which finds its rings itself", "unset it"),
    Advice("NCCL_TREE_THRESHOLD", "any", "is gone since NCCL 2.5, which chooses by itself", "unset it"),
    Advice("NCCL_LL_THRESHOLD", "any", "is gone since NCCL 2.5, which chooses by itself", "unset it"),
    Advice("NCCL_IB_CUDA_SUPPORT", "any", "is gone since NCCL 2.4", "unset it; NCCL_NET_GDR_LEVEL is what there is"),
    Advice("NCCL_MAX_NRINGS", "any", "is the old name of NCCL_MAX_CTAS", "unset it"),
    Advice("NCCL_MIN_NRINGS", "any", "is the old name of NCCL_MIN_CTAS", "unset it"),
    Advice(
        "NCCL_DEBUG_FILE",
        "with `%r`",
        "is one file for all processes of a node: %r stands for nothing",
        "put %h (host) and %p (process) into the name; `lockstep launch --nccl-debug` does",
        lambda value, place: "%r" in value,
    ),
    Advice(
        "NCCL_DEBUG_FILE",
        "without `%p`",
        "is one file for all ranks, who write over each other",
        "put %h (host) and %p (process) into the name",
        lambda value, place: bool(value) and "%p" not in value and "%r" not in value and place.size > 1,
    ),
    Advice(
        "NCCL_IB_DISABLE",
        "0",
        "is the default, and enables nothing",
        "unset it; where NCCL takes sockets anyway, the container lacks /dev/infiniband, libibverbs or locked memory",
        _is("0"),
    ),
    Advice(
        "NCCL_IB_DISABLE",
        "1",
        "makes NCCL take sockets, though an InfiniBand port is up",
        "unset it",
        _hides_infiniband,
    ),
    Advice(
        "NCCL_BUFFSIZE",
        "above 4194304, the default",
        "costs that memory on each channel: large messages are cut into pieces anyway",
        "unset it",
        _is_large,
    ),
    Advice(
        "NCCL_SOCKET_IFNAME",
        "`eth0`, where there is `eth01` too",
        "is a prefix, and takes other interfaces too",
        "unset it, since NCCL finds interfaces itself, or put = before the name",
        _takes_more,
    ),
    Advice("NCCL_P2P_DISABLE", "1", "sends through host memory what NVLink or PCIe would carry", _SEARCH, _is("1")),
    Advice("NCCL_SHM_DISABLE", "1", "sends through the network what shared memory would carry", _SEARCH, _is("1")),
    Advice("NCCL_ALGO", "any", "keeps NCCL from choosing by message size, and may hang where it does not fit", _SEARCH),
    Advice(
        "NCCL_PROTO", "any", "keeps NCCL from choosing by message size, and may hang where it does not fit", _SEARCH
    ),
    Advice("CUDA_LAUNCH_BLOCKING", "1", "makes the host wait for every kernel", _SEARCH, _is("1")),
    Advice(
        "TORCH_DISTRIBUTED_DEBUG",
        "`DETAIL`",
        "compares every collective between the ranks first",
        _SEARCH,
        _is("DETAIL"),
    ),
    Advice(
        "CUDA_VISIBLE_DEVICES",
        "empty or -1",
        "hides every device",
        "unset it, or say --device cpu",
        lambda value, place: value in ("", "-1") and place.config.device != "cpu",
    ),
)


def advice_on(place: CheckContext) -> list[Advice]:
    """Give the advice that holds for this rank's environment."""
    return [each for each in _TABLE if each.name in place.environ and each.applies(place.environ[each.name], place)]


def page_rows() -> list[str]:
    """Write the table as docs/network.md has it."""
    return [f"| `{each.name}` | {each.values} | {each.effect} | {each.remedy} |" for each in _TABLE]


def chosen(asked: str, known: list[str]) -> list[str]:
    """Give the interfaces that NCCL_SOCKET_IFNAME leaves: prefixes; `=` whole names; `^` all others."""
    others, text = asked.startswith("^"), asked.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [part for part in text.split(",") if part]
    return [name for name in known if any(name == part if exact else name.startswith(part) for part in names) != others]
