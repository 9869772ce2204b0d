"""Environment variables that are set in vain or at a price: the one table of `lockstep doctor` and docs/network.md.

for advice in advice_on(place): print(advice.effect)        # what is set here, and should not be
print("\\n".join(page_rows()))                               # the table of the page, which a test compares
"""

from collections.abc import Callable
from typing import NamedTuple

from lockstep.diagnose.doctor.addresses import infiniband, interfaces
from lockstep.diagnose.doctor.finding import Place

__all__ = ["TABLE", "Advice", "advice_on", "chosen", "page_rows"]

_BUFFER = 4 * 2**20  # NCCL's default
_SEARCH = "unset it, unless you search for a fault with it"


def _always(value: str, place: Place) -> bool:
    return True


def _is(*values: str) -> Callable[[str, Place], bool]:
    return lambda value, place: value.upper() in values


def _is_large(value: str, place: Place) -> bool:
    return value.isascii() and value.isdigit() and int(value) > _BUFFER


def _hides_infiniband(value: str, place: Place) -> bool:
    return value == "1" and bool(infiniband(place.root))


def _takes_more(value: str, place: Place) -> bool:
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
    applies: Callable[[str, Place], bool] = _always


TABLE = (
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


def advice_on(place: Place) -> list[Advice]:
    """Give the advice that holds for this rank's environment."""
    return [each for each in TABLE if each.name in place.environ and each.applies(place.environ[each.name], place)]


def page_rows() -> list[str]:
    """Write the table as docs/network.md has it."""
    return [f"| `{each.name}` | {each.values} | {each.effect} | {each.remedy} |" for each in TABLE]


def chosen(asked: str, known: list[str]) -> list[str]:
    """Give the interfaces that NCCL_SOCKET_IFNAME leaves: prefixes; `=` whole names; `^` all others."""
    others, text = asked.startswith("^"), asked.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [part for part in text.split(",") if part]
    return [name for name in known if any(name == part if exact else name.startswith(part) for part in names) != others]
