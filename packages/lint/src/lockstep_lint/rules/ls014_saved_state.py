"""LS014: the wrapper's state saved, saved by every rank, or read before it is written."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import COLLECTIVES, passed
from lockstep_lint.analysis.context import Guard, above, apart, guards, inside, withs
from lockstep_lint.analysis.drafts import guard_save, plain_state
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    constant,
    dotted,
    element_of,
    idents,
    keyword,
    last,
    mentions,
    walk,
)
from lockstep_lint.analysis.origins import SAME
from lockstep_lint.analysis.rank_names import RANK, RANKED
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.query import alone, sides, subject
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


# What gives the path that a call writes or reads.
Finder = Callable[[View, Site], ast.expr | None]


def written(view: View, site: Site) -> ast.expr | None:
    """The path that a call saves a model or a checkpoint to."""
    full = view.full(site)
    if full in ("torch.save", "torch.jit.save", "safetensors.torch.save_file"):
        return argument(site.call, 1, "f" if full.startswith("torch") else "filename")
    if site.name == "save_pretrained" and keyword(site.call, "is_main_process") is None:
        model = view.kinds.is_model(site.receiver, site.scope) or any(
            last(call) == "unwrap_model" for call, _, _ in view.origins.calls_of(site.receiver, site.scope)
        )
        return argument(site.call, 0, "save_directory") if model else None
    return None


def makes_file(view: View, site: Site) -> ast.expr | None:
    """The path of a file or data set that a call writes."""
    path = written(view, site)
    if path is not None:
        return path
    full = view.full(site)
    if full in ("numpy.save", "numpy.savez") or site.name in ("save_to_disk", "to_csv", "to_parquet", "to_pickle"):
        return argument(site.call, 0, "file")
    if full in ("shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.rename"):
        return argument(site.call, 1, "dst")
    if full == "shutil.unpack_archive":
        return argument(site.call, 1, "extract_dir")
    mode = constant(argument(site.call, 1, "mode"))
    opens = isinstance(site.call.func, ast.Name) and site.name == "open" and isinstance(mode, str) and mode[:1] in "wx"
    return site.call.args[0] if opens and site.call.args else None


def reads_file(view: View, site: Site) -> ast.expr | None:
    """The path of a file or data set that a call reads."""
    full = view.full(site)
    readers = ("torch.load", "numpy.load", "numpy.loadtxt", "pandas.read_csv", "pandas.read_parquet", "os.listdir")
    if full in readers or site.name in ("load_from_disk", "load_file") or full.endswith("ImageFolder"):
        return site.call.args[0] if site.call.args else None
    mode = argument(site.call, 1, "mode")
    opens = isinstance(site.call.func, ast.Name) and site.name == "open"
    reads = mode is None or str(constant(mode))[:1] == "r"
    return site.call.args[0] if opens and reads and site.call.args else None


def handed_path(view: View, site: Site, find: Finder, side: int) -> ast.expr | None:
    """The path that a call hands to a function of the project, which writes or reads such a file on one side of a test
    of the rank (1), or without any (0).
    """
    function = view.calls.target(site.call, site.scope)
    if function is None or function.owner is not None:
        return None
    for inner, name in taken(view, function, find):
        if view.ranks.side(inner.stmt, function) == side:
            return argument(site.call, 1, "f") if name is None else passed(site, function, name)
    return None


@kept
def taken(view: View, function: Scope, find: Finder) -> tuple[tuple[Site, str | None], ...]:
    """The calls in a function that write or read what one of its parameters names; None where it hands all that it is
    given to torch.save (`def save_on_master(*args): torch.save(*args)`).
    """
    found: list[tuple[Site, str | None]] = []
    for inner in function.sites:
        first = next(iter(inner.call.args), None)
        if isinstance(first, ast.Starred) and view.full(inner) == "torch.save":
            found.append((inner, None))
            continue
        path = find(view, inner)
        if isinstance(path, ast.Name) and path.id in function.params and path.id not in function.binds:
            found.append((inner, path.id))
    return tuple(found)


def same_path(view: View, path: ast.expr, read: ast.expr, scope: Scope) -> bool:
    """Whether two paths are written alike, by themselves or by what the names for them were given last."""
    return bool(forms(view, path, scope) & forms(view, read, scope))


def forms(view: View, path: ast.expr, scope: Scope) -> set[str]:
    """How a path is written, also where a name stands for it."""
    found = view.origins.binds(dotted(path) or "", scope, path.lineno)
    values = [bind.value for bind, _ in found if bind.value is not None and bind.how == "assign" and not bind.path]
    return {ast.unparse(each) for each in (path, *(values if len(found) == 1 else ()))}


# What holds the ranks until all are there: barriers, and exchanges of objects, which the host waits for.
WAITS = {"barrier", "monitored_barrier", "wait_for_everyone", "synchronize"}
WAITS |= {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
# What holds no rank back, but has it wait for the main one.
TOGETHER = COLLECTIVES | {"backward", "allreduce", "allgather"}


def leads_to(view: View, save: Site, written: ast.expr, load: Site, path: ast.expr) -> bool:
    """Whether a call may read what another one has written before: the same path, none of whose names is bound anew
    between, on one way through the function.
    """
    scope = save.scope
    if not same_path(view, written, path, scope) or apart(save, load):
        return False
    names = {dotted(node) or "" for part in (written, path) for node in walk(part)}
    if any(save.line < bind.stmt.lineno < load.line for name in names for bind in scope.binds.get(name, [])):
        return False
    return not any(inside(save.stmt, exit.stmt, save.module) for exit in left_before(load))


def left_before(site: Site) -> list[Guard]:
    """The tests whose arm leaves the function or the loop before a call (`if done: ...; return`)."""
    around = {stmt for stmt, _ in above(site.stmt, site.module)}
    return [guard for guard in guards(site.stmt, site.module) if guard.stmt not in around]


def saved_by_main(view: View, site: Site) -> ast.expr | None:
    """The path of a file that a call writes on rank 0 alone, by the test around it or in a helper."""
    path, helped = makes_file(view, site), handed_path(view, site, makes_file, 1)
    if path is None and helped is None:
        path = handed_path(view, site, makes_file, 0)
    alone = path is not None and view.ranks.side(site.stmt, site.scope) == 1  # the dear question last
    return path if alone else helped


def read_by_all(view: View, site: Site) -> ast.expr | None:
    """The path of a file that a call reads on all ranks, itself or in a helper."""
    if view.ranks.side(site.stmt, site.scope):
        return None
    return reads_file(view, site) or handed_path(view, site, reads_file, 0)


def waits(view: View, scope: Scope, save: Site, load: Site) -> bool:
    """Whether a barrier, or something that may hold one, stands between, also at the end of a helper that writes or at
    the start of one that reads; where a helper writes or reads, whatever the ranks do together.
    """
    writer = None if makes_file(view, save) is not None else view.calls.target(save.call, scope)
    reader = None if reads_file(view, load) is not None else view.calls.target(load.call, scope)
    names = WAITS | (TOGETHER if writer or reader else set())
    between = [s for s in scope.sites if save.line < s.line < load.line]
    if writer is not None:
        between += after(writer.sites, [s for s in writer.sites if view.full(s) == "torch.save" or makes_file(view, s)])
    if reader is not None:
        first = min((s.line for s in reader.sites if reads_file(view, s) is not None), default=0)
        between += [s for s in reader.sites if s.line < first]
    return any(view.full(s) != "torch.cuda.synchronize" and view.effects.does(s, names) for s in between)


def after(sites: list[Site], these: list[Site]) -> list[Site]:
    """Those of some calls that stand after the last of others."""
    end = max((site.line for site in these), default=0)
    return [site for site in sites if site.line > end]


SAVES = Words(
    r"^_*(torch_|async_)?(save|dump|write)(_|[A-Z]|$)|_save$|(write|dump|store|make|create)_(checkpoint|ckpt)"
)
# Calls that give back what they are given, as far as a file is concerned.
COPIES = re.compile(r"^(dict|list|tuple|OrderedDict|deepcopy|copy|asdict|vars|clone_state|.*cpu)$")
# Calls that run a function given as their first argument, with the others.
RUNS = {"Thread", "Process", "submit", "apply_async", "partial", "run_in_executor"}
MAX_CALLERS = 8
MAX_DEPTH = 3

Holds = Callable[[ast.expr], bool]


def is_saved(view: View, node: ast.expr, stmt: ast.stmt, scope: Scope, depth: int = 0) -> bool:
    """Whether the value of an expression is written to a file, in its function, its object or by the callers."""

    def holds(value: ast.expr) -> bool:
        return any(item is node for item in walk(value))

    if any(s.stmt is stmt and s.call is not node and writes(view, s, holds, depth) for s in scope.sites):
        return True
    names = set(saving_taken(stmt, scope, holds))
    if names and under_name(view, names, scope, stmt.lineno, depth):
        return True
    if isinstance(stmt, ast.Return):
        return handed_back(view, scope, depth)
    return any(name.startswith("self.") and elsewhere(view, name, scope, depth) for name in names)


def under_name(view: View, names: set[str], scope: Scope, line: int, depth: int) -> bool:
    """Whether what names hold from a line on is written to a file."""
    follow(names, scope, line)

    def holds(value: ast.expr) -> bool:
        return any(mentions(value, name) for name in names)

    if any(s.line >= line and writes(view, s, holds, depth) for s in scope.sites):
        return True
    return any(holds(value) for value in scope.returns()) and handed_back(view, scope, depth)


def handed_back(view: View, scope: Scope, depth: int) -> bool:
    """Whether a caller of a function writes what it returns to a file."""
    if scope.kind != "function" or depth >= MAX_DEPTH:
        return False
    callers = view.calls.callers(scope) or view.calls.namesakes(scope)
    return any(is_saved(view, site.call, site.stmt, site.scope, depth + 1) for site in callers[:MAX_CALLERS])


def elsewhere(view: View, name: str, scope: Scope, depth: int) -> bool:
    """Whether another method writes an attribute of the object to a file."""
    owner = scope.owner
    methods = [method for method in owner.defs.values() if method is not scope] if owner is not None else []
    return depth < MAX_DEPTH and any(under_name(view, {name}, method, 0, depth + 1) for method in methods)


def saving_taken(stmt: ast.stmt, scope: Scope, holds: Holds) -> Iterator[str]:
    """The names that hold a value after its statement: bound to it, or of the table that it is put into."""
    yield from (bind.key for bind in scope.bound(stmt) if bind.value is not None and holds(bind.value))
    yield from filled(stmt)
    for site in scope.sites:
        if site.stmt is stmt and site.name in ("update", "setdefault", "append") and site.receiver is not None:
            key = dotted(site.receiver)
            if key is not None and any(map(holds, given(site))):
                yield key


def filled(stmt: ast.stmt) -> Iterator[str]:
    """The tables into which an assignment puts something (`state["model"] = ...`)."""
    for target in stmt.targets if isinstance(stmt, ast.Assign) else ():
        key = dotted(target.value) if isinstance(target, ast.Subscript) else None
        if key is not None:
            yield key


def follow(names: set[str], scope: Scope, line: int) -> None:
    """Adds the names to which later assignments pass what `names` hold, by itself, copied or in a table."""
    for stmt in scope.stmts:
        if isinstance(stmt, ast.Assign | ast.AnnAssign) and stmt.lineno >= line and stmt.value is not None:
            value = stmt.value
            passes = not isinstance(value, ast.Call) or COPIES.match(last(value)) or last(value)[:1].isupper()
            if passes and any(mentions(value, name) for name in names):
                names.update(bind.key for bind in scope.bound(stmt))
                names.update(filled(stmt))


def writes(view: View, site: Site, holds: Holds, depth: int) -> bool:
    """Whether a call writes one of its arguments to a file, itself or in a function of the project."""
    values = given(site)
    if not any(map(holds, values)):
        return False
    if SAVES.search(site.name) or (site.name in RUNS and any(SAVES.search(last(value)) for value in values)):
        return True
    function = view.calls.target(site.call, site.scope)
    if function is None or depth >= MAX_DEPTH:
        return False
    params = [name for name in function.params if (v := passed(site, function, name)) is not None and holds(v)]
    return any(under_name(view, {name}, function, 0, depth + 1) for name in params)


def given(site: Site) -> list[ast.expr]:
    """All arguments of a call."""
    return [*site.call.args, *(item.value for item in site.call.keywords)]


# What takes the wrapper's names off.
STRIPS = ("'module.'", '"module.', "_orig_mod", "consume_prefix_in_state_dict", "remove_prefix", "[7:]")
NEAR = 10
# A test of the rank, which says nothing of the wrapper.
RANKS = re.compile(r"not (args\.)?distributed or ")
# What tests for the wrapper, or takes the model out of it.
TESTS = [
    "hasattr",
    "isinstance",
    ".module if",
    "module else",
    ".module.state_dict",
    "not args.distributed",
    "not distributed",
]
WRAPPED = re.compile(r"module|Parallel|DDP")


def stripped(view: View, site: Site) -> bool:
    """Whether the code around a call, or a function that is handed what it gives, takes the wrapper's names off."""
    around = view.module.lines[max(0, site.line - NEAR) : site.line + NEAR]
    if any(word in line for line in around for word in STRIPS):
        return True
    names = {bind.key for bind in site.scope.bound(site.stmt)}
    return any(
        view.effects.mentioned_in(function, word)
        for other in site.scope.sites
        if other.line >= site.stmt.lineno and other is not site and handed(other, site, names)
        for function in view.calls.runs(other)
        for word in STRIPS
    )


def handed(other: Site, site: Site, names: set[str]) -> bool:
    """Whether a call is given what another gives, itself or under one of its names."""
    values = [*other.call.args, *(item.value for item in other.call.keywords)]
    return any(
        any(item is site.call for item in walk(value)) or any(mentions(value, name) for name in names)
        for value in values
    )


def replaced(view: View, site: Site) -> bool:
    """Whether the name of a state gets the plain model's instead right after (`if ddp: state = m.module...`)."""
    for bind in site.scope.bound(site.stmt):
        later = [b for b in site.scope.binds[bind.key] if b.stmt.lineno > site.line and b.value is not None]
        if any(".module.state_dict" in ast.unparse(b.value) for b in later if b.value is not None):
            return True
    return False


def taken_out(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a name stands for the plain model, taken out of the wrapper where there is one."""
    return any(isinstance(o.node, ast.Attribute) and o.node.attr == "module" for o in view.origins.of(node, scope))


def knows_shards(view: View, scope: Scope) -> bool:
    """Whether a function knows of FSDP, whose state it takes in another way."""
    return any(view.effects.mentioned_in(scope, word) for word in ("fsdp", "FSDP", "state_dict_type"))


def by_shards(site: Site) -> bool:
    """Whether FSDP gives the state, in the form that a block around says: its names are the plain model's."""
    return any(last(item) == "state_dict_type" for item in withs(site.stmt, site.module))


def guarded_by_type(view: View, site: Site) -> bool:
    """Whether a test on the wrapper decides, in a statement around it or a conditional expression."""
    if replaced(view, site) or any(parts_wrapped(view, guard) for guard in guards(site.stmt, site.module)):
        return True
    name = re.escape(dotted(site.receiver) or "")
    lines = view.module.lines[max(0, site.line - 6) : site.line + 1]
    other = re.compile(rf"\s*(?!{name} =)[\w.]+ = .*(\.module if|module else)") if name else None
    around = "\n".join(line for line in lines if other is None or not other.match(line))  # not a name for the plain one
    around = RANKS.sub("", around)
    return any(word in around for word in TESTS)


def parts_wrapped(view: View, guard: Guard) -> bool:
    """Whether a test divides wrapped models from plain ones: by what it asks, or by what its other arm takes."""
    test = ast.unparse(guard.test)
    if ("hasattr" in test or "isinstance" in test) and WRAPPED.search(test):
        return True
    other = getattr(guard.stmt, "orelse" if guard.when else "body", [])
    lines = view.module.lines[other[0].lineno - 1 : other[-1].end_lineno] if other else []
    return any(".module.state_dict" in line for line in lines)


ACCELERATE = "Accelerate"
OWN_RANK = re.compile(rf"{RANKED}|shard|process_index|gpu_id|getpid|uuid", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks at what is saved, by whom, and who reads it when."""
    for site in view.sites("state_dict"):
        if (view.wrappers.kinds(view.module) or "accelerate" in view.frameworks) and not stripped(view, site):
            kind = wrapper(view, site)
            if kind and is_saved(view, site.call, site.stmt, site.scope):
                plain = "accelerator.unwrap_model(model)" if kind == ACCELERATE else "model.module"
                yield at(
                    site,
                    f"saves the {kind} wrapper's state, with names in 'module.': save {plain}.state_dict()",
                    severity=Severity.HINT,
                    proposal=() if kind == ACCELERATE else plain_state(view, site),
                )
    for site in view.sites("save"):
        kind = whole(view, site)
        if kind:
            message = f"saves the {kind} wrapper itself, which only such a program can load: save model.module"
            yield at(site, message, severity=Severity.HINT)
    for site in view.sites("save", "save_file", "save_pretrained"):
        path = written(view, site)
        if path is not None and by_all(view, site, path):
            for place in unguarded(view, site, path):
                proposal = guard_save(view, place)
                yield at(place, "every rank writes this file at once: save on rank 0 only", proposal=proposal)
    for site in view.sites():
        if SAVES.search(site.name) and handed_over(view, site):
            yield at(site, "every rank has this helper write one file at once: call it on rank 0 only")
    yield from unwaited(view)


def unguarded(view: View, site: Site, path: ast.expr) -> list[Site]:
    """Where to tell of a save by all ranks: at the calls of its function that forgot the test which others have."""
    every = view.calls.callers(site.scope)
    callers = [call for call in every if not own_name(view, call, site, path)]
    if every and not callers:
        return []
    bare = [call for call in callers if not view.ranks.main_only(call.stmt, call.scope)]
    here = [call for call in bare if call.module is view.module]
    return here if here and len(bare) < len(callers) else [site]


def own_name(view: View, call: Site, save: Site, path: ast.expr) -> bool:
    """Whether a call of a function that saves gives it the rank for the path that it saves to."""
    function = save.scope
    parts = idents_of(path, function)
    given = (passed(call, function, name) for name in function.params if name in parts)
    return any(value is not None and names_rank(view, value, call.scope) for value in given)


@kept
def idents_of(node: ast.expr, scope: Scope) -> frozenset[str]:
    """The names in an expression, and in what these are given in the same function."""
    queue, found = [node], set[str]()
    while queue:
        new = set(idents(queue.pop())) - found
        found |= new
        queue += [bind.value for name in new for bind in scope.binds.get(name, []) if bind.value is not None]
    return frozenset(found)


def replicated(view: View) -> bool:
    """Whether every rank has the whole model: under DDP, or with gradients that the script adds up by hand."""
    kinds = view.wrappers.kinds(view.module)
    return "ddp" in kinds or any(
        not kinds and "grad" in set(idents(value))
        for member in view.project.family(view.module)
        for site in member.sites("all_reduce")
        for value in site.call.args[:1]
    )


def handed_over(view: View, site: Site) -> bool:
    """Whether all ranks have a function of another file write the same file, where no test keeps any of them out."""
    if not by_every_rank(view, site) or view.ranks.chosen(site):
        return False
    function = view.calls.target(site.call, site.scope)
    if function is None or function.module is view.module or function.owner is not None:
        return False
    given = [*site.call.args, *(k.value for k in site.call.keywords)]
    paths = [v for v in given if not view.kinds.is_model(v, site.scope) and not view.kinds.is_optimizer(v, site.scope)]
    if any(names_rank(view, value, site.scope) for value in paths):
        return False
    saves = [(s, path) for s in function.sites if (path := written(view, s)) is not None]
    return bool(saves) and not any(
        view.ranks.side(s.stmt, function) or view.ranks.chosen(s) or in_memory(path) or names_rank(view, path, function)
        for s, path in saves
    )


def whole(view: View, site: Site) -> str:
    """The wrapper that `torch.save` is given as an object, by itself or in a dictionary."""
    if view.full(site) != "torch.save" or not site.call.args or guarded_by_type(view, site):
        return ""
    for origin in view.origins.of(site.call.args[0], site.scope):
        values = origin.node.values if isinstance(origin.node, ast.Dict) else []
        for value, home in ((site.call.args[0], site.scope), *((value, origin.scope) for value in values)):
            kinds = {kind for kind, _, _ in view.wrappers.wrapped(value, home)} if dotted(value) else set()
            if dotted(value) and view.kinds.is_model(value, home) and prepared(view, value, site.stmt, home, 0):
                return ACCELERATE
            if kinds & {"ddp", "dp"} and not taken_out(view, value, home):
                return "DDP" if "ddp" in kinds else "DataParallel"
    return ""


def wrapper(view: View, site: Site) -> str:
    """The wrapper, DDP or DataParallel, that the state is taken from."""
    node = site.receiver
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAME:
        node = node.func.value
    if node is None or guarded_by_type(view, site) or by_shards(site):
        return ""
    if view.kinds.is_model(node, site.scope) and prepared(view, node, site.stmt, site.scope, 0):
        return ACCELERATE
    kinds = made_as(view, node, site.scope) or set(view.wrappers.put_on(node, site.scope))
    if not kinds and any(origin.node is node for origin in view.origins.of(node, site.scope)):
        held = view.wrappers.held(node, site.stmt, site.scope)
        kinds = {kind for value, home in held for kind in made_as(view, value, home)}
    if view.ranks.single(site.stmt, site.scope) or view.ranks.alone(site.scope):
        kinds.discard("ddp")  # the one process there has not wrapped it
    sharded = "fsdp" in kinds and (len(kinds) == 1 or knows_shards(view, site.scope))
    if sharded or taken_out(view, node, site.scope):
        return ""
    return "DDP" if "ddp" in kinds else "DataParallel" if "dp" in kinds else ""


def made_as(view: View, node: ast.expr, scope: Scope) -> set[str]:
    """The wrappers that a value may come from."""
    return {kind for kind, _, _ in view.wrappers.wrapped(node, scope)}


def prepared(view: View, node: ast.expr, stmt: ast.stmt, scope: Scope, depth: int) -> bool:
    """Whether a model, or one in a dictionary of models, is what Accelerate made of it."""
    if "accelerate" not in view.frameworks or depth > 3:
        return False
    if any(
        last(value) == "prepare" for value, _ in view.wrappers.held(node, stmt, scope) if isinstance(value, ast.Call)
    ):
        return True
    key = dotted(node)
    if key is None:
        return False
    given = view.origins.binds(key, scope, node.lineno)
    if any(isinstance(bind.value, ast.Call) and last(bind.value) == "prepare" for bind, _ in given):
        return True
    values: list[tuple[ast.expr, ast.stmt, Scope]] = [
        (value, bind.stmt, home)
        for bind, home in given
        for value in (element_of(bind.value, bind.path) if bind.value is not None else ())
        if isinstance(value, ast.Name | ast.Attribute)
    ]
    for site in view.calls.callers(scope)[:8] if key in scope.params and not given else ():
        value = passed(site, scope, key)
        if value is not None:
            values.append((value, site.stmt, site.scope))
    return any(prepared(view, value, where, home, depth + 1) for value, where, home in values)


def by_all(view: View, site: Site, path: ast.expr) -> bool:
    """Whether all ranks certainly write the same file: a wrapped model's training, no guard on any way here."""
    if not by_every_rank(view, site) or view.ranks.chosen(site):
        return False
    if (
        site.scope.kind == "function"
        and not view.calls.callers(site.scope)
        and not view.ranks.programs.direct(view.module)
        and not view.ranks.programs.accelerated(view.module)
    ):
        return False
    callers = view.calls.callers(site.scope)
    if not callers and (SAVES.search(site.scope.name) or site.scope.owner is not None):
        return False  # who calls it cannot be seen
    if in_memory(path) or passing(view, path, site.scope) or sorted_by_arguments(view, callers):
        return False
    return not names_rank(view, path, site.scope)


def by_every_rank(view: View, site: Site) -> bool:
    """Whether each process of a training with DDP, Accelerate's among them, makes a call."""
    # Each process has the whole model that it hands on.
    named = {"horovod", "transformers", "lightning_fabric"} & view.frameworks
    shared = view.ranks.programs.accelerated(view.module) or named or replicated(view)
    return bool(shared) and view.ranks.everywhere(site, view.module)


def sorted_by_arguments(view: View, callers: list[Site]) -> bool:
    """Whether calls from every rank have another form than those of the main rank (one loads, one saves)."""
    forms = [(len(c.call.args), sorted(k.arg or "" for k in c.call.keywords)) for c in callers]
    main = [form for form, c in zip(forms, callers, strict=True) if view.ranks.main_only(c.stmt, c.scope)]
    rest = [form for form, c in zip(forms, callers, strict=True) if not view.ranks.main_only(c.stmt, c.scope)]
    elsewhere = bool(callers) and not view.ranks.programs.direct(view.module)  # a function for scripts of all kinds
    return bool(main) and (elsewhere or not any(form in main for form in rest))


def in_memory(node: ast.expr) -> bool:
    """Whether the "file" is a buffer of the process."""
    return any(word in name.lower() for name in idents(node) for word in ("stream", "buf", "bytes", "mem_"))


def passing(view: View, path: ast.expr, scope: Scope) -> bool:
    """Whether a file is a temporary one, which each process makes for itself."""
    whole = path.value if isinstance(path, ast.Attribute) and path.attr == "name" else path
    return any(full.startswith("tempfile.") for _, _, full in view.origins.calls_of(whole, scope))


def names_rank(view: View, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a path holds the rank."""
    for name in idents(node):
        if RANK.search(name) or OWN_RANK.search(name):
            return True
    for item in walk(node):
        key = dotted(item) if isinstance(item, ast.Name | ast.Attribute) else None
        if key is not None and depth < 3:
            for bind in scope.binds.get(key, []):
                if bind.value is not None and names_rank(view, bind.value, scope, depth + 1):
                    return True
    return False


EARLY = "may read the file before rank 0 has written it: put torch.distributed.barrier() between"


def read_early(view: View) -> Iterator[Event]:
    """The reads, by all ranks, of a file that rank 0 wrote in another function, where none waited in between."""
    for run in runs(view):
        for read in run.of("read"):
            saves = [save for save in run.of("save") if save.place < read.place and one_file(view, save, read)]
            if read.module is not view.module or not saves or sides(view, read) or alone(view, read):
                continue
            between = run.events[saves[-1].place : read.place]
            waited = any(e.kind in ("collective", "wrap", "backward", "state") and not sides(view, e) for e in between)
            if not waited and sides(view, saves[-1]) and saves[-1].scope is not read.scope:
                yield read


def one_file(view: View, save: Event, read: Event) -> bool:
    """Whether a file is written and read under one path that is written out, or has one name in the file."""
    (written, home), (asked, place) = subject(save), subject(read)
    key = dotted(written)
    if key is None or asked is None:
        return isinstance(written, ast.Constant) and written.value == constant(asked)
    known = len(home.module.top.binds.get(key, [])) == 1 and key not in home.binds
    return known and key == dotted(asked) and home.module is place.module and key not in place.binds


def unwaited(view: View) -> Iterator[Found]:
    """A file that rank 0 writes and all ranks read in the same function, with no barrier between."""
    if not view.distributed:
        return
    told = {event.node: None for event in read_early(view)}
    yield from (Found(node, EARLY) for node in told)
    for scope in view.scopes:
        saves = [(s, path) for s in scope.sites if (path := saved_by_main(view, s)) is not None]
        loads = [(s, path) for s in scope.sites if (path := read_by_all(view, s)) is not None] if saves else []
        for load, path in loads:
            earlier = [s for s, written in saves if s.line < load.line and leads_to(view, s, written, load, path)]
            if earlier and not waits(view, scope, earlier[-1], load) and load.call not in told:
                yield at(load, EARLY)


RULE = Rule(
    code="LS014",
    name="wrapper's state saved",
    what=(
        "The `state_dict` of a DDP or DataParallel wrapper, or of what `accelerator.prepare` made, is saved, every "
        "rank saves the same file, or others read a file before rank 0 has written it."
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
