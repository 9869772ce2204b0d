"""LS007: a fixed device in a script of several processes."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import Words, constant, idents, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.query import is_global_rank, sides
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

# Launchers that may show each process its own GPU alone, and words for a place on a machine.
BINDS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL = re.compile(r"LOCAL_?(RANK|ID)")
# What starts the processes, or chooses their devices.
STARTERS = Words(r"launch|init|setup|set_up|dist|spawn", re.IGNORECASE)
SETTERS = ("set_device", "set_device_index", "CUDA_VISIBLE_DEVICES", "set_default_device", "cuda.device(")
# A comment, or several GPUs that every process sees alike.
IDLE = re.compile(r"""^[ \t]*\#[^\n]*$|CUDA_VISIBLE_DEVICES(["']\])?[ ]*=[ ]*["']?\d+([ ]?,[ ]?\d+)+""", re.MULTILINE)
# A program that shows each process its own GPU, by a number that it computes: there its number is 0.
PICKED = re.compile(r"""environ\[["']CUDA_VISIBLE_DEVICES["']\]\s*=(?!=)[^\n]*(rank|range\()""", re.IGNORECASE)
EVENTS = ("device", "move", "batch", "place", "wrap", "collective")
GPU = re.compile(r"cuda:\d+$")
PLAIN = "moves to GPU 0 on every rank: call torch.cuda.set_device(local_rank) first"
NAMED = "every rank uses '{}': use the local rank, f\"cuda:{{local_rank}}\""
NUMBERED = "every rank uses GPU {}: pass the local rank"
GLOBAL = "takes the global rank for the device, which a second machine has no device for: use LOCAL_RANK"


def check(view: View) -> Iterator[Found]:
    """Find calls on every rank that name one GPU, or the global rank, as device."""
    if not view.distributed or any(map(shows_own_gpu, view.project.family(view.module))):
        return
    chosen = any(map(sets_device, view.project.family(view.module))) or view.hidden(STARTERS)
    if view.effects.mentioned(view.module, '"fake"', "FakeStore"):
        return  # a fake group of one process
    chosen = chosen or view.effects.mentioned(view.module, "TrainingArguments")  # they set the device when made
    done: set[Scope] = set()
    own = one_gpu_each(view)
    events = find_places(view)
    for site, found in events.items():
        message = ("" if own else explain_fixed(view, site)) or ("" if chosen else bare(view, site))
        if not message or site.scope in done or not view.ranks.every(site.stmt, site.scope):
            continue
        asked = any("device_count" in idents(guard.test) for guard in guards(site.stmt, site.module))
        if not asked and not all(sides(view, event) for event in found):
            done.add(site.scope)
            yield at(site, message)
    if not view.cpu_only and view.ranks.programs.spawned(view.module) is None:  # spawned ranks count from 0 on a node
        yield from by_global_rank(view, events)


@cache_answers
def shows_own_gpu(module: Module) -> bool:
    """Check whether a file shows each process its own GPU alone."""
    return "CUDA_VISIBLE_DEVICES" in module.text and PICKED.search(module.text) is not None


@cache_answers
def sets_device(module: Module) -> bool:
    """Check whether a file may set each process's own device."""
    return any(word in module.text for word in SETTERS) and any(word in IDLE.sub("", module.text) for word in SETTERS)


def one_gpu_each(view: View) -> bool:
    """Check whether Slurm or MPI may show each process one GPU. Nothing reads a local rank."""
    texts = [member.text for member in view.project.family(view.module)]
    started = any(word in text for word in BINDS for text in texts)
    return started and not any(LOCAL.search(text) for text in texts)


def find_places(view: View) -> dict[Site, list[Event]]:
    """Return the calls of a file that may name a device, with their events."""
    found: dict[Site, list[Event]] = {}
    for run in runs(view):
        for event in run.of(*EVENTS):
            if event.module is view.module and event.mark.site is not None:
                found.setdefault(event.mark.site, []).append(event)
    return dict(sorted(found.items(), key=lambda pair: (pair[0].line, pair[0].call.col_offset)))


def explain_fixed(view: View, site: Site) -> str:
    """Explain that a call names one GPU."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.IfExp) and constant(first.orelse) == "cpu":
        first = first.body
    of_model = view.kinds.is_model(site.receiver, site.scope) if site.name in ("to", "cuda") else False
    for given in (first, keyword(site.call, "device"), keyword(site.call, "map_location")):
        value = constant(given)
        placed_by = site.name in ("device", "to", "load") or given is not first
        if not isinstance(value, str) or not GPU.match(value) or not placed_by:
            continue
        if not set_again(site) and not one_of_two(site.stmt, given):
            return NAMED.format(value)
    if site.name == "to" and of_model and isinstance(first, ast.Name | ast.Attribute):
        named = device_of(view, first, site.scope)
        return NAMED.format(named) if named else ""
    chosen = site.name in ("set_device", "set_device_index") and "cuda" in ast.unparse(site.call.func)
    number = constant(first if chosen or (site.name == "cuda" and of_model) else only_id(site.call))
    return NUMBERED.format(number) if isinstance(number, int) and not isinstance(number, bool) else ""


def only_id(call: ast.Call) -> ast.expr | None:
    """Return the one device that a wrapper is given."""
    ids = keyword(call, "device_ids")
    return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None


def set_again(site: Site) -> bool:
    """Check whether a device's variable is assigned again (`if ddp: device = own`)."""
    return any(len(site.scope.binds[bind.key]) > 1 for bind in site.scope.bound(site.stmt))


def one_of_two(stmt: ast.stmt, node: ast.expr | None) -> bool:
    """Check whether a device is one arm of a choice that may depend on rank."""
    for item in walk(stmt):
        if isinstance(item, ast.IfExp) and node in (item.body, item.orelse):
            return not any(word in ast.unparse(item.test) for word in ("is_available", "cuda"))
    return False


def device_of(view: View, node: ast.expr, scope: Scope) -> str:
    """Return the one numbered GPU that a name means, or "". Options may have other values."""
    if isinstance(node, ast.Attribute) and last(node.value) != "self":
        return ""
    names = names_of(view, node, scope)
    gpus = [name for name in names if isinstance(name, str) and GPU.match(name)]
    return gpus[0] if len(gpus) == 1 and names <= {gpus[0], "cpu"} else ""


def names_of(view: View, node: ast.expr, scope: Scope) -> set[object]:
    """Return the texts that a device may be; None is for what is unknown."""
    names: set[object] = set()
    for origin in view.origins.of(node, scope):
        value: ast.expr | None = origin.node
        if origin.call is not None and view.names.qualify(origin.call.func, origin.scope) == "torch.device":
            value = origin.call.args[0] if len(origin.call.args) == 1 else None
        chosen = isinstance(value, ast.IfExp) and "available" in ast.unparse(value.test)
        names |= {constant(arm) for arm in ([value.body, value.orelse] if chosen else [value])}  # type: ignore[union-attr]
    return names


def bare(view: View, site: Site) -> str:
    """Explain that a model moves to "cuda" without a number."""
    if site.name == "cuda":
        plain = not site.call.args and not site.call.keywords and site.receiver is not None and not view.full(site)
    else:
        names = names_of(view, site.call.args[0], site.scope) if site.name == "to" and site.call.args else set()
        plain = "cuda" in names and names <= {"cuda", "cpu"}
    bound = site.scope.bound(site.stmt) if isinstance(site.receiver, ast.Call) else []  # `model = resnet50().cuda()`
    named = any(MODEL.search(b.key.split(".")[-1]) for b in bound if b.value is site.call and b.how == "assign")
    return PLAIN if plain and (named or view.kinds.is_model(site.receiver, site.scope)) else ""


def by_global_rank(view: View, events: dict[Site, list[Event]]) -> Iterator[Found]:
    """Find each function's first device whose number is the global rank."""
    done: set[Scope] = set()
    for site, found in events.items():
        number = index_of(view, site) if site.scope not in done else None
        alone = all(any(side == 1 for _, side in sides(view, event)) for event in found)
        if number is not None and not alone and is_global_rank(view, number, site.scope):
            done.add(site.scope)
            yield at(site, GLOBAL)


def index_of(view: View, site: Site) -> ast.expr | None:
    """Return the number of the device that a call takes."""
    first = site.call.args[0] if site.call.args else None
    if site.name in ("DistributedDataParallel", "DDP"):
        return only_id(site.call)
    if isinstance(first, ast.JoinedStr) and len(first.values) == 2 and constant(first.values[0]) == "cuda:":
        return first.values[1].value if isinstance(first.values[1], ast.FormattedValue) else None
    if site.name in ("set_device", "set_device_index"):
        return first if view.full(site).startswith("torch.cuda") else None
    moves = site.name in ("to", "cuda") and site.receiver is not None
    return first if moves and isinstance(first, ast.Name | ast.Call | ast.Attribute) else None


MOOT = TRAINERS | {"accelerate", "horovod", "lightning_fabric"}
RULE = Rule("LS007", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT, placed=True)
