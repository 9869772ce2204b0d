"""LS014: the wrapper's state saved, saved by every rank, or read before it is written."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.checkpoints import handled, loaded, of_program, saves
from lockstep_lint.analysis.context import guards, withs
from lockstep_lint.analysis.drafts import guard_save, plain_state
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, element_of, idents, keyword, last, mentions, walk
from lockstep_lint.analysis.origins import SAME, default
from lockstep_lint.analysis.rank_names import RANK, RANKED
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event, apart
from lockstep_lint.events.query import alone, given_as, same, shown_at, sides, subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

STATE = "saves the {kind} wrapper's state, with names in 'module.': save {plain}.state_dict()"
MISFIT = "loads the bare model's state into its DDP wrapper, whose names have 'module.': load it into {plain}"
BARE = (
    "loads what the {kind} wrapper saved, with names in 'module.', into the bare model: save model.module.state_dict()"
)
STRIP = "leaves the 'module.' that a wrapper's names begin with: replace 'module.', or removeprefix('module.')"
OBJECT = "saves the {kind} wrapper itself, which only such a program can load: save model.module"
ALL = "every rank writes this file at once: save on rank 0 only"
HELPED = "every rank has this helper write one file at once: call it on rank 0 only"
EARLY = "may read the file before rank 0 has written it: put torch.distributed.barrier() between"
ACCELERATE = "Accelerate"
# What writes a model or a checkpoint, and the name of a function that is there to do so.
MODELS = ("torch.save", "torch.jit.save", "safetensors.torch.save_file", "save_pretrained")
SAVES = Words(r"^_*(save|dump|write|store)|_save$|(checkpoint|ckpt)$", re.IGNORECASE)
# Calls that give back what they are given, or take it in.
COPIES = re.compile(r"^(dict|list|OrderedDict|deepcopy|copy|asdict|vars|update|setdefault|append|.*cpu|[A-Z].*)$")
# What takes the wrapper's names off near a state, and what tests for the wrapper or takes the model out of it.
STRIPS = ("'module.'", '"module.', "_orig_mod", "consume_prefix_in_state_dict", "remove_prefix", "[7:]")
TESTS = re.compile(
    r"(hasattr|isinstance)\(.*(module|Parallel|DDP)|\.module (if|\.state_dict)|module else"
    r"|not (args\.)?distributed(?! or)"
)
OWN = Words(rf"{RANKED}|shard|process_index|gpu_id|getpid|uuid|stream|buf|bytes|mem_|^te?mp", re.IGNORECASE)
NEAR = 10
# How many names a path is followed through.
MAX_NAMES = 5


def check(view: View) -> Iterator[Found]:
    """Looks at what is saved, by whom, and who reads it when."""
    for run in runs(view):
        yield from of_wrappers(view, run)
        yield from by_all(view, run)
        yield from read_early(view, run)
        yield from misfits(view, run)
        yield from of_wrapper(view, run)
    yield from stripped(view)


def of_wrappers(view: View, run: Run) -> Iterator[Found]:
    """The states of wrappers, and wrappers themselves, that are written to a file."""
    for event in run.of("state", "save"):
        site = event.mark.site
        if site is None or event.module is not view.module or knows_wrapper(view, site):
            continue
        if any(last(other.mark.subject) == "module" and apart(event, other) for other in run.of("state")):
            continue  # what the other arm of a test saves: this one knows of the wrapper
        if event.kind == "save" and event.detail == "torch.save":
            kind = next(filter(None, (wrapped(view, value, event) for value in parts(view, site))), "")
            if kind:
                yield at(site, OBJECT.format(kind=kind), severity=Severity.HINT)
        elif site.name == "state_dict" and site.receiver is not None:
            kind = wrapped(view, site.receiver, event)
            if kind and saved(view, event):
                plain = "accelerator.unwrap_model(model)" if kind == ACCELERATE else "model.module"
                change = () if kind == ACCELERATE else plain_state(view, site)
                yield at(site, STATE.format(kind=kind, plain=plain), severity=Severity.HINT, proposal=change)


def misfits(view: View, run: Run) -> Iterator[Found]:
    """The states of bare models, saved under a key, that a wrapper loads by the same key: its names have `module.`."""
    for event in run.of("load") if ".module.state_dict" in view.module.text else ():
        site = event.mark.site
        given = next(iter(site.call.args), None) if site is not None else None
        if site is None or event.module is not view.module or not isinstance(given, ast.Subscript):
            continue
        if constant(keyword(site.call, "strict")) is False or any(word in view.module.text for word in STRIPS):
            continue
        key, tests = constant(given.slice), (ast.unparse(guard.test) for guard in guards(site.stmt, site.module))
        states = list(kept_under(view, key)) if isinstance(key, str) and not any(map(TESTS.search, tests)) else []
        bare = bool(states) and all(isinstance(each, str) for each in map(bare_state, states))
        named = dotted(site.receiver)
        if site.receiver is None or not bare or named is None or named not in map(bare_state, states):
            continue
        if in_wrapper(view, run, event) and wrapped(view, site.receiver, event) == "DDP":
            yield at(site, MISFIT.format(plain=f"{named}.module"))


def of_wrapper(view: View, run: Run) -> Iterator[Found]:
    """Yield the bare models that load, by a resume, a state that the program saves from their wrapper alone."""
    text = view.module.text
    if not run.of("wrap") or "load_state_dict" not in text or any(word in text for word in STRIPS):
        return
    written = saves(view.analysis, view.module)
    for event in run.of("load") if written else ():
        site = event.mark.site
        given = next(iter(site.call.args), None) if site is not None else None
        if site is None or given is None or event.module is not view.module or keyword(site.call, "strict") is not None:
            continue
        key = constant(given.slice) if isinstance(given, ast.Subscript) else ""
        made = loaded(view, given.value if isinstance(given, ast.Subscript) else given, event.scope)
        own = of_program(view, made, [(site.stmt, event.scope)], written, True) if made and isinstance(key, str) else []
        nodes = {value for saved in own for value, _ in saved.values.get(str(key), ())}
        states = [each for each in run.of("state") if each.node in nodes and each.mark.site is not None]
        if not nodes or {each.node for each in states} != nodes or handled(site.stmt, event.scope):
            continue
        late = all(w.place > event.place for w in run.of("wrap") if same(view, w, event))
        kinds = {wrapped(view, each.mark.subject, each) for each in states if each.mark.subject is not None}
        alike = all(things(view, *subject(each)) <= things(view, *subject(event)) for each in states)  # no average's
        if (
            late
            and alike
            and kinds
            and kinds <= {"DDP", "DataParallel"}
            and any(same(view, w, event) for w in run.of("wrap"))
        ):
            yield at(site, BARE.format(kind=min(kinds)))


def stripped(view: View) -> Iterator[Found]:
    """Yield what takes too little, or too much, off the names of a wrapper's state."""
    for site in view.sites("replace") if "'.module.'" in view.module.text or '".module."' in view.module.text else ():
        loads = site.scope.named("load_state_dict") and len(site.call.args) == 2
        if loads and constant(site.call.args[0]) == ".module." and constant(site.call.args[1]) == "":
            yield at(site, STRIP)


def in_wrapper(view: View, run: Run, event: Event) -> bool:
    """Whether the model is in its wrapper wherever the run comes to an event."""
    wraps = [wrap for wrap in run.of("wrap") if wrap.detail == "ddp" and same(view, wrap, event)]
    return all(any(w.place < e.place for w in wraps) for e in run.of(event.kind) if e.node is event.node)


def kept_under(view: View, key: str) -> Iterator[ast.expr]:
    """Yield the states of models that a file's dictionaries keep under a key."""
    for table in view.module.dicts:
        for name, value in zip(table.keys, table.values, strict=True):
            if name is not None and constant(name) == key:
                yield value


def bare_state(value: ast.expr) -> str | None:
    """The name of the wrapper whose model's state an expression is, at least where there is a wrapper."""
    if isinstance(value, ast.IfExp):
        return bare_state(value.body) or bare_state(value.orelse)
    func = value.func if isinstance(value, ast.Call) else None
    model = func.value if isinstance(func, ast.Attribute) and func.attr == "state_dict" else None
    return dotted(model.value) if isinstance(model, ast.Attribute) and model.attr == "module" else None


def parts(view: View, site: Site) -> Iterator[ast.expr]:
    """The objects that `torch.save` is given, by themselves or in a dictionary."""
    for origin in view.origins.of(next(iter(site.call.args), None), site.scope):
        yield from origin.node.values if isinstance(origin.node, ast.Dict) else site.call.args[:1]


def wrapped(view: View, node: ast.expr, event: Event) -> str:
    """The wrapper, DDP or DataParallel, that a model is in, or Accelerate, which prepared it; "" where it is plain."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (*SAME, "deepcopy"):
        node = node.func.value if node.func.attr in SAME or not node.args else node.args[0]
    if dotted(node) is None and not isinstance(node, ast.Subscript):
        return ""
    model, scope = given_as(event, node, event.scope)
    assert model is not None
    made = [origin.node for origin in view.origins.of(model, scope)]
    if any(isinstance(each, ast.Attribute) and each.attr == "module" for each in made):
        return ""  # taken out of its wrapper
    binds = [bind.value for bind, _ in view.origins.binds(dotted(model) or "", scope, model.lineno)]
    if "accelerate" in view.frameworks and view.kinds.is_model(model, scope) and "prepare" in map(last, binds):
        return ACCELERATE
    kinds = {kind for kind, _, _ in view.wrappers.wrapped(model, scope)} or {*view.wrappers.put_on(model, scope)}
    if not kinds and isinstance(node, ast.Name | ast.Subscript):
        held = list(view.wrappers.held(node, event.mark.stmt, event.scope))
        if any(last(value) == "prepare" for value, _ in held):
            return ACCELERATE
        kinds = {kind for value, home in held for kind, _, _ in view.wrappers.wrapped(value, home)}
    kinds -= {"ddp"} if alone(view, event) or view.ranks.alone(event.scope) else set()
    return "" if "fsdp" in kinds else "DDP" if "ddp" in kinds else "DataParallel" if "dp" in kinds else ""


def knows_wrapper(view: View, site: Site) -> bool:
    """Whether the code around takes the wrapper's names off, or tests for the wrapper."""
    if any(last(item) == "state_dict_type" for item in withs(site.stmt, site.module)):
        return True
    lines, start, end = view.module.lines, site.stmt.lineno, site.stmt.end_lineno or site.stmt.lineno
    if any(word in line for line in lines[max(0, start - NEAR) : end + NEAR] for word in STRIPS):
        return True
    later = (
        s for s in site.scope.sites if s.line >= start and not all(isinstance(a, ast.Constant) for a in s.call.args)
    )
    helpers = (f for s in later if (f := view.calls.target(s.call, s.scope)) is not None)
    if any(view.effects.mentioned_in(function, word) for function in helpers for word in STRIPS):
        return True
    tests = [ast.unparse(guard.test) for guard in guards(site.stmt, site.module)]
    return any(map(TESTS.search, (*tests, *lines[start - 1 : end]))) or ".module.state_dict" in "".join(
        lines[max(0, start - 6) : end + 6]
    )


def saved(view: View, event: Event) -> bool:
    """Whether a state gets into a file: in the call that writes it, by a name, or by what its function returns."""
    node, stmt, scope = event.node, event.mark.stmt, event.scope
    for block in (*reversed(event.path), None):
        names = holders(scope, stmt, node)
        if any(holds(value, node, names, home, scope) for value, home in written(view, scope)):
            return True
        if not isinstance(block, CallBlock):
            continue
        if not isinstance(stmt, ast.Return) and not any(mentions(v, n) for v in scope.returns() for n in names):
            return False
        node, stmt, scope = block.site.call, block.site.stmt, block.site.scope
    return False


def written(view: View, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """What the calls of all runs write to files, as it stands in one function."""
    for event in (event for run in runs(view) for event in run.of("save", "hand")):
        call = event.node
        for value in (*call.args, *(item.value for item in call.keywords)) if isinstance(call, ast.Call) else ():
            given, home = given_as(event, value, event.scope, scope)
            if given is not None:
                yield given, home


def holders(scope: Scope, stmt: ast.stmt, node: ast.AST) -> set[str]:
    """The names of a function that hold a value, by themselves, copied, or in a table."""
    names: set[str] = set()
    for other in (stmt, *(each for each in scope.stmts if each.lineno >= stmt.lineno and each is not stmt)):
        value = getattr(other, "iter" if isinstance(other, ast.For) else "value", None)
        if not isinstance(other, ast.Assign | ast.AnnAssign | ast.Expr | ast.For) or value is None:
            continue
        copies = not isinstance(value, ast.Call) or COPIES.search(last(value))
        if any(part is node for part in walk(value)) or (copies and any(mentions(value, name) for name in names)):
            names |= {bind.key for bind in scope.bound(other) if bind.how in ("assign", "for")}
            tables = other.targets if isinstance(other, ast.Assign) else [getattr(value, "func", value)]
            names |= {key for t in tables if isinstance(t, ast.Subscript | ast.Attribute) and (key := dotted(t.value))}
    return names - {"self"}


def holds(value: ast.expr, node: ast.AST, names: set[str], home: Scope, scope: Scope) -> bool:
    """Whether what is written is a state, or one of the names that hold it."""
    if any(part is node for part in walk(value)):
        return True
    known = names if home is scope else {n for n in names if n.startswith("self.") and home.owner is scope.owner}
    return any(mentions(value, name) for name in known)


def by_all(view: View, run: Run) -> Iterator[Found]:
    """The files of a model that all ranks write, told at the call that forgot the test which others have."""
    saves = [event for event in run.of("save") if event.detail in MODELS]
    guarded = {event.node for event in saves if sides(view, event)}
    for event in saves:
        call = shown_at(view, event)
        if call is None or sides(view, event) or alone(view, event) or out_of_sight(view, run, event):
            continue
        helper = event.module is not view.module
        if helper and (event.scope.owner is not None or event.scope not in view.calls.runs(call)):
            continue
        site = call if helper or event.node not in guarded else called(view, event) or call
        shared = replicated(view) and view.ranks.everywhere(site, view.module) and not view.ranks.chosen(site)
        if shared and not own_path(view, event):
            yield at(site, HELPED if helper else ALL, proposal=() if helper else guard_save(view, site))


def called(view: View, event: Event) -> Site | None:
    """The last call of another function in the file, on the way to an event."""
    calls = [block.site for block in event.path if isinstance(block, CallBlock) and block.site.module is view.module]
    return calls[-1] if calls else None


def out_of_sight(view: View, run: Run, event: Event) -> bool:
    """Whether who runs a function that saves cannot be seen."""
    entry = run.entry
    if entry.kind != "function" or event.scope is not entry or view.calls.callers(entry):
        return False
    programs = view.ranks.programs
    return not (programs.direct(view.module) or programs.accelerated(view.module)) or bool(
        SAVES.search(entry.name) or entry.owner is not None
    )


def replicated(view: View) -> bool:
    """Whether every rank has the whole model."""
    named = {"horovod", "transformers", "lightning_fabric"} & view.frameworks
    if named or "ddp" in view.wrappers.kinds(view.module) or view.ranks.programs.accelerated(view.module):
        return True
    reduced = (s for member in view.project.family(view.module) for s in member.sites("all_reduce"))
    return not view.wrappers.kinds(view.module) and any("grad" in set(idents(s.call)) for s in reduced)


def own_path(view: View, event: Event) -> bool:
    """Whether a path holds the rank, or is of a temporary file or of a buffer in memory, there or where it is given."""
    queue, seen = [(event.mark.subject, event.scope)], set[object]()
    while queue and len(seen) < 30:
        node, scope = given_as(event, *queue.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(RANK.search(name) or OWN.search(name) for name in idents(node)):
            return True
        keys = {key: part for part in walk(node) if (key := dotted(part)) is not None}
        queue += [(v, scope) for key in keys for b in scope.binds.get(key, []) for v in element_of(b.value, b.path)]
        params = (part for key, part in keys.items() if key in scope.params and part is not node)
        queue += [(part, scope) for part in params if isinstance(part, ast.expr)]
    return False


def read_early(view: View, run: Run) -> Iterator[Found]:
    """The reads, by all ranks, of a file that rank 0 alone has written, where none waited in between."""
    waits = {"collective", "wrap", "backward"}
    if view.wrappers.kinds(view.module) != {"ddp"}:
        waits.add("state")  # FSDP gathers it from all ranks
    for read in run.of("read") if view.distributed else ():
        site = shown_at(view, read)
        if site is None or (read.module is not view.module and called(view, read) is None) or sides(view, read):
            continue
        saves = [e for e in run.of("save") if e.place < read.place and not apart(e, read) and one_file(view, e, read)]
        if not saves or alone(view, read) or [side for _, side in sides(view, saves[-1])] != [1]:
            continue
        between = run.events[saves[-1].place : read.place]
        if not any(e.kind in waits and not sides(view, e) for e in between):
            yield at(site, EARLY)


def one_file(view: View, save: Event, read: Event) -> bool:
    """Whether a file is written and read under one path: written out, or by the same names in one function."""
    (written, home), (asked, place) = meant(*subject(save)), meant(*subject(read))
    if written is None or asked is None:
        return False
    path = spelled(view, save, written, home)
    if path is not None:
        return path == spelled(view, read, asked, place)
    keys = {key for node in (subject(save)[0], written) if node for p in walk(node) if (key := dotted(p)) is not None}
    changed = any(len(home.binds.get(key, [])) > (key not in home.params and "." not in key) for key in keys)
    known = home is place or (home.module is place.module and not keys & (home.binds.keys() | place.binds.keys()))
    return known and not changed and ast.dump(written) == ast.dump(asked)


def spelled(view: View, event: Event, node: ast.expr, scope: Scope, depth: int = 0) -> str | None:
    """Return a path that literals alone make up, by names that have one value; None if anything else is in it."""
    node, scope = given_as(event, node, scope)  # type: ignore[assignment]
    text = constant(node)
    if isinstance(text, str) or depth > MAX_NAMES:
        return text if isinstance(text, str) else None
    if isinstance(node, ast.Call) and view.names.qualify(node.func, scope).endswith("path.join"):
        parts = [spelled(view, event, part, scope, depth + 1) for part in node.args]
        return "/".join(filter(None, parts)) if None not in parts else None
    if not isinstance(node, ast.Name):
        return None
    calls = [block.site.call for block in event.path if isinstance(block, CallBlock) and block.function is scope]
    if node.id in scope.params and node.id not in scope.binds and calls:
        usual = default(scope, node.id, calls[-1])
        return None if usual is None else spelled(view, event, usual, scope.module.scopes[0], depth + 1)
    found = [item for item in view.origins.of(node, scope) if item.node is not node]
    return spelled(view, event, found[0].node, found[0].scope, depth + 1) if len(found) == 1 else None


def meant(path: ast.expr | None, scope: Scope) -> tuple[ast.expr | None, Scope]:
    """What a name of a path stands for, if it has one value."""
    binds = scope.binds.get(dotted(path) or "", [])
    plain = len(binds) == 1 and binds[0].how == "assign" and not binds[0].path and dotted(path) not in scope.params
    return (binds[0].value, scope) if plain and binds[0].value is not None else (path, scope)


RULE = Rule(
    code="LS014",
    name="wrapper's state saved",
    what=(
        "The `state_dict` of a DDP or DataParallel wrapper, or of what `accelerator.prepare` made, is saved, every "
        "rank saves the same file, others read a file before rank 0 has written it, or a bare model's state is "
        "loaded into its wrapper."
    ),
    why=(
        "A wrapper's names start with `module.`, so the checkpoint fits no plain model. Files written by all ranks at "
        "once are torn; files read too early are old or half written."
    ),
    bad="""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank, rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
""",
    good="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank, rank):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
    model.module.load_state_dict(torch.load("model.pt", map_location="cpu"))
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Save model.module.state_dict() on rank 0, then a barrier",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
    note=(
        "A save by every rank is told where all of them certainly write one path: not a temporary file, not one with "
        "the rank in its name (also where a helper's callers give it), and at those calls of a helper that forgot the "
        "test which others have. What rank 0 writes and all read is followed through helpers too; it is silent where a "
        "barrier or an exchange of objects stands between, at the end of the helper that writes or at the start of the "
        "one that reads, where the path is bound anew, and where no run does both."
    ),
)
