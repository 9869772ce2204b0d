"""LS014: the wrapper's state saved, saved by every rank, or read before it is written."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.awaited import leads_to, read_by_all, saved_by_main, waits
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.filed import written
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import dotted, element_of, idents, last, walk
from lockstep_lint.analysis.origins import SAME
from lockstep_lint.analysis.rankwords import RANK, RANKED
from lockstep_lint.analysis.saving import SAVES, is_saved
from lockstep_lint.analysis.unwrapped import by_shards, guarded_by_type, knows_shards, stripped, taken_out
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

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
                )
    for site in view.sites("save"):
        kind = whole(view, site)
        if kind:
            yield at(site, f"saves the {kind} wrapper itself, which only such a program can load: save model.module")
    for site in view.sites("save", "save_file", "save_pretrained"):
        path = written(view, site)
        if path is not None and by_all(view, site, path):
            for place in unguarded(view, site, path):
                yield at(place, "every rank writes this file at once: save on rank 0 only")
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


def unwaited(view: View) -> Iterator[Found]:
    """A file that rank 0 writes and all ranks read in the same function, with no barrier between."""
    if not view.distributed:
        return
    for scope in view.scopes:
        saves = [(s, path) for s in scope.sites if (path := saved_by_main(view, s)) is not None]
        loads = [(s, path) for s in scope.sites if (path := read_by_all(view, s)) is not None] if saves else []
        for load, path in loads:
            earlier = [s for s, written in saves if s.line < load.line and leads_to(view, s, written, load, path)]
            if earlier and not waits(view, scope, earlier[-1], load):
                yield at(
                    load, "may read the file before rank 0 has written it: put torch.distributed.barrier() between"
                )


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
    severity=Severity.WARNING,
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
