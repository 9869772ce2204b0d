"""The launcher's variables, and those that steer NCCL, gloo and torch: missing, contradictory, without effect.

place_of = numbers(os.environ)              # rank, local rank, size, local size; None where they do not hold
"""

from collections.abc import Iterator, Mapping

from lockstep.diagnose.doctor.addresses import address_of, interfaces
from lockstep.diagnose.doctor.advice import advice_on, chosen
from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.distributed.launcher import unlaunched

__all__ = ["launcher", "numbers", "settings"]

_NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
_NAME = "variables"
_START = "start with `lockstep launch --nproc-per-node N -- ...` or torchrun, which set them all"


def numbers(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE; None where they are no place in a world."""
    found = {}
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if text and (not text.isascii() or not text.isdigit() or int(text) < least):
            return None
        found[name] = int(text) if text else least
    if "LOCAL_WORLD_SIZE" not in environ:
        found["LOCAL_WORLD_SIZE"] = found["WORLD_SIZE"]
    if found["RANK"] >= found["WORLD_SIZE"]:
        return None
    return found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]


def launcher(place: Place) -> Found:
    """Whether the launcher's variables are there, and do not contradict each other."""
    return Found(list(_launcher(place)) or [ok(_NAME, _said(place))])


def _said(place: Place) -> str:
    if "WORLD_SIZE" not in place.environ:
        return "no launcher: one process"
    return f"RANK, LOCAL_RANK, WORLD_SIZE {place.size} and the master's address agree"


def _launcher(place: Place) -> Iterator[Finding]:
    environ = place.environ
    wrong = False
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if name in environ and (not text.isascii() or not text.isdigit() or int(text) < least):
            wrong = True
            yield fail(_NAME, f"{name} is '{text}', and must be a number from {least}", _START)
    if wrong:
        return
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        found = unlaunched(environ)
        if found:
            yield fail(_NAME, found.problem, found.remedy)
        return
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
    ]
    if missing:
        there = next(name for name in ("WORLD_SIZE", "RANK") if name in environ)
        yield fail(
            _NAME, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and {there} is", _START
        )
        return
    rank, local, size = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank >= size:
        yield fail(_NAME, f"RANK is {rank} and WORLD_SIZE {size}: ranks are 0 to {size - 1}", _START)
    on_node = int(environ.get("LOCAL_WORLD_SIZE", size))
    if on_node > size:
        yield fail(_NAME, f"LOCAL_WORLD_SIZE is {on_node}, more than WORLD_SIZE, {size}", _START)
    if local >= on_node:
        yield fail(_NAME, f"LOCAL_RANK is {local}, and LOCAL_WORLD_SIZE {on_node}: they are 0 to {on_node - 1}", _START)
    elif local > rank:
        yield fail(_NAME, f"LOCAL_RANK is {local}, more than RANK, {rank}", _START)
    port = environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        yield fail(_NAME, f"MASTER_PORT is '{port}'", "give a number from 1 to 65535, the same on all nodes")
    ranks = max(local + 1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
    if 1 < place.devices < ranks and place.config.device != "cpu":  # a single one may be this process's own
        seen = environ.get("CUDA_VISIBLE_DEVICES")
        mend = f"start at most {place.devices} processes on this node, or show each one device of its own"
        if seen is not None:
            mend += f", or let each see all devices: CUDA_VISIBLE_DEVICES is '{seen}'"
        yield fail(_NAME, f"{ranks} processes are on this node, and torch sees {place.devices} CUDA devices here", mend)


def settings(place: Place) -> Found:
    """Whether what is set for NCCL, gloo and CUDA has an effect, and a good one."""
    found = [*_interfaces(place), *_advised(place)]
    kept = [name for name in place.environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))]
    told = f"{', '.join(sorted(kept))} set, and nothing against {'it' if len(kept) == 1 else 'them'}"
    return Found(found or [ok("settings", told if kept else "NCCL and gloo are left to choose")])


def _interfaces(place: Place) -> Iterator[Finding]:
    known, environ = interfaces(place.root), place.environ
    shown = ", ".join(sorted(known)) or "none"
    for name in [each for each in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each]:
        if name not in known:
            text = f"GLOO_SOCKET_IFNAME names {name}, and there is no such interface"
            yield fail("settings", text, f"name one of {shown}, by its whole name")
        elif place.root.as_posix() == "/" and not address_of(name):
            yield fail("settings", f"GLOO_SOCKET_IFNAME names {name}, which has no address", f"take one of {shown}")
        elif place.several_nodes and name.startswith("lo"):
            text = "GLOO_SOCKET_IFNAME is the loopback, and there are several nodes"
            yield warn("settings", text, f"name the interface between the nodes, one of {shown}; right on one machine")
    asked = environ.get("NCCL_SOCKET_IFNAME", "")
    if asked and not chosen(asked, known):
        text = f"NCCL_SOCKET_IFNAME is '{asked}', and no interface goes with it"
        yield fail("settings", text, f"there are {shown}; a prefix, =NAME for a whole name, ^NAME for all others")


def _advised(place: Place) -> Iterator[Finding]:
    for advice in advice_on(place):
        yield warn("settings", f"{advice.name}={place.environ[advice.name]} {advice.effect}", advice.remedy)
