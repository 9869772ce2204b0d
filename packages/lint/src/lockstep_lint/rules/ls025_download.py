"""LS025: a download, or a file or folder made or removed, on every rank."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import COLLECTIVES
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, dotted, idents, is_true, last, strings, walk
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.rank_names import RANK, RANKED
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, HandlerBlock
from lockstep_lint.events.query import alone, shown_at, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# What says that a path is the process's own.
OWN = Words(
    rf"{RANKED}|(?<![a-z])te?mp(?!lat)|(?-i:(?<=[a-z])Te?mp(?!lat))|worker(?!s)|(?<![a-z])(get)?pid(?![a-z])|uuid",
    re.IGNORECASE,
)
# What processes hold one after the other, and what waits out of sight.
LOCKS = Words(r"(?<!b)(?<!c)lock(ed|file)?$|process_first|rank_first|zero_first", re.IGNORECASE)
# What a data set is given beside its place and its part.
OPTIONS = {"download", "transform", "target_transform", "transforms", "exist_ok"}
MESSAGES = {
    "fetch": "every rank downloads into the same place at once: let one rank do it, with a barrier for the others",
    "remove": "every rank removes this folder, also what another has put there since: do it on rank 0, then a barrier",
    "take": "every rank removes or renames this file, and all but the first fail: do it on rank 0",
    "unpack": "every rank unpacks into the same folder at once: do it on rank 0, then a barrier",
    "ask": "two ranks may find that there is no such folder, and one then fails: pass exist_ok=True",
    "save": "every rank finds no such file and writes it at once, and may read a half-written one: do it on rank 0",
    "make": "every rank makes this folder, and all but the first fail: pass exist_ok=True, or do it on rank 0",
}
EARLY = "may open the data before rank 0 has downloaded it: put torch.distributed.barrier() between"
HELPED = "every rank has this helper make one folder: call it on rank 0 only, or pass exist_ok=True there"


def check(view: View) -> Iterator[Found]:
    """Look for downloads, files and folders that all ranks handle at once."""
    if not view.distributed and "accelerate" not in view.frameworks:
        return
    for run in runs(view):
        for event in run.of("fetch", "folder"):
            site, made = shown_at(view, event), event.mark.site
            helped = site is not made
            if site is None or made is None or (helped and not helps(view, site, event)) or removes_given(event):
                continue
            at_once = by_all(view, site) and not own(site) and not alone(view, event) and not at_an_end(event)
            if at_once and not in_turn(view, run, event):
                yield at(site, HELPED if helped else MESSAGES[event.detail])
            if event.detail == "fetch" and [side for _, side in sides(view, event)] == [1]:
                yield from find_unwaited(view, made)


def removes_given(event: Event) -> bool:
    """Check whether a function removes its caller's folder. The callers decide which ranks do."""
    given = next(iter(event.node.args), None) if isinstance(event.node, ast.Call) else None
    return event.detail in ("remove", "take") and isinstance(given, ast.Name) and given.id in event.scope.params


def at_an_end(event: Event) -> bool:
    """Check whether a file is removed in an exception handler or a test."""
    handles = any(isinstance(block, HandlerBlock) for block in event.path)
    return event.detail == "take" and (handles or unit_test(event.module))


def helps(view: View, site: Site, event: Event) -> bool:
    """Check whether a call passes a folder to another file's function that makes it."""
    given = not {*event.scope.params}.isdisjoint(idents(event.node))
    return given and event.detail in ("make", "ask") and event.scope in view.calls.runs(site)


def by_all(view: View, site: Site) -> bool:
    """Check whether all ranks, or all but the main one, make a call."""
    return view.ranks.several(site.stmt, site.scope) or view.ranks.everywhere(site, view.module)


def own(site: Site) -> bool:
    """Check whether a call names a path of the process's own, or a variable does."""
    given = [node for node in walk(site.call) if isinstance(node, ast.Name | ast.Attribute)]
    owners = {node.value for node in given if isinstance(node, ast.Attribute)}
    given = [node for node in given if node not in owners]  # `args.data`, not what made `args`
    values = [bind.value for node in given for bind in site.scope.binds.get(dotted(node) or "", [])]
    words = [word for node in (site.call, *filter(None, values)) for word in (*idents(node), *strings(node))]
    return any(RANK.search(word) or OWN.search(word) for word in words)


def in_turn(view: View, run: Run, event: Event) -> bool:
    """Check whether one rank goes first: by a lock, a wait or an earlier call."""
    if any(LOCKS.search(last(block.node)) for block in event.withs):
        return True
    side = [ranks for _, ranks in sides(view, event)]
    before = [e for e in run.events[: event.place] if e.kind in ("collective", event.kind) and sides(view, e)]
    waits = [e for e in before if e.kind == "collective" and not any(block.leaves for block in e.tests)]
    first = [e for e in before if e.kind == event.kind and sides(view, e)[-1][1] == 1 and same_work(e, event)]
    if 1 in side or waits or (side and first):
        return True
    between = run.events[first[-1].place : event.place] if first else []
    return any(e.kind == "collective" and not sides(view, e) for e in between)


def same_work(one: Event, other: Event) -> bool:
    """Check whether two events are calls with the same arguments."""
    first, second = one.node, other.node
    if isinstance(first, ast.Call) and isinstance(second, ast.Call):
        return given_alike(first) == given_alike(second)
    return False


def given_alike(call: ast.Call) -> list[str]:
    """Return a call's arguments that decide which files it writes."""
    words = [k for k in call.keywords if k.arg not in OPTIONS and not (k.arg == "train" and is_true(k.value))]
    return [*map(ast.dump, call.args), *sorted(map(ast.dump, words))]


def find_unwaited(view: View, fetch: Site) -> Iterator[Found]:
    """Find downloads on rank 0 that all ranks open without a collective between."""
    scope, func = fetch.scope, ast.dump(fetch.call.func)
    for site in scope.named(fetch.name) if scope.module is view.module else ():
        if site.line <= fetch.line or ast.dump(site.call.func) != func or view.ranks.single(site.stmt, scope):
            continue
        between = [s for s in scope.sites if fetch.line < s.line < site.line]
        waited = any(view.effects.does(s, COLLECTIVES | {"wait_for_everyone"}) for s in between)
        if not waited and not view.ranks.side(site.stmt, scope):
            yield at(site, EARLY)


MOOT = frozenset({"lightning", "lockstep", "pytorch_lightning"})
RULE = Rule("LS025", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT, placed=True)
