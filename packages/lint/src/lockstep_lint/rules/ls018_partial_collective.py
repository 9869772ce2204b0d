"""LS018: a collective that only some ranks reach."""

import ast
import os
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import choices, guards
from lockstep_lint.analysis.engines import asks_for_deepspeed, saves_on_all, waits_in_accelerate
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import dotted, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def check(view: View) -> Iterator[Found]:
    """Looks at the calls that are reserved for some ranks: are they collectives, or do they lead to one?"""
    for scope in view.scopes:
        yield from sharded(view, scope)
        sides = [(site, view.ranks.side(site.stmt, scope)) for site in scope.sites if relevant(view, site)]
        for site, side in sides:
            if not side or paired(view, site, side, sides):
                continue
            if makes_wrapper(view, site):
                yield at(
                    site, "only some ranks wrap the model: the wrapper waits for all of them, so wrap on every rank"
                )
                continue
            inner = None if waits_for_all(view, site) else led_to(view, site)
            if inner is not None:
                where = "" if inner.module is view.module else f" of {os.path.basename(inner.module.path)}"
                yield at(
                    site,
                    f"leads to {inner.name}() on line {inner.line}{where}, which other ranks never reach: they hang",
                )
            elif waits_for_all(view, site):
                yield at(site, f"only some ranks reach {site.name}(): they wait forever for the others")


def sharded(view: View, scope: Scope) -> Iterator[Found]:
    """A forward of a model that FSDP has wrapped, which gathers its parameters from all ranks."""
    if "fsdp" not in view.wrappers.kinds(view.module) and "fully_shard" not in view.module.text:
        return
    sides = [(site, view.ranks.side(site.stmt, scope)) for site in scope.sites if names_model(site)]
    calls = [(site, side) for site, side in sides if side and runs_sharded(view, site)]
    names = {(site.name, side) for site, side in calls}
    for site, side in calls:
        if (site.name, -side) not in names:
            yield at(
                site, "runs the sharded model on some ranks only, which then wait for the parameters of the others"
            )


def names_model(site: Site) -> bool:
    """Whether a call is of a model, or is given one, by its name."""
    given = (site.call.func, *site.call.args, *(k.value for k in site.call.keywords))
    return any(isinstance(value, ast.Name | ast.Attribute) and MODEL.search(last(value)) for value in given)


def runs_sharded(view: View, site: Site) -> bool:
    """Whether a call runs a model that is certainly FSDP's, itself or in a function that is handed the model."""
    if holds_sharded(view, site.call.func, site):
        return True
    for function in view.calls.runs(site):
        for name in function.params:
            value = passed(site, function, name)
            if value is not None and function.named(name) and holds_sharded(view, value, site):
                return True
    return False


def holds_sharded(view: View, node: ast.expr, site: Site) -> bool:
    """Whether a name holds FSDP's wrapper, whatever way was taken, or was given to `fully_shard` before."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if any(s.line < site.line and s.call.args and same(s.call.args[0], node) for s in site.scope.named("fully_shard")):
        return True
    kinds = [kind for kind, _, _ in view.wrappers.wrapped(node, site.scope)]
    return bool(kinds) and set(kinds) == {"fsdp"} and len(kinds) == len(view.origins.of(node, site.scope))


def same(one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are one name."""
    return dotted(one) is not None and dotted(one) == dotted(other)


def waits_for_all(view: View, site: Site) -> bool:
    """Whether a call ends when all ranks are in it: a collective, Accelerate's too, or a save of DeepSpeed's."""
    return view.effects.is_collective(site) or saves_on_all(view, site) or waits_in_accelerate(view, site)


def relevant(view: View, site: Site) -> bool:
    """Whether a call is a collective or runs a function of the project."""
    return (
        waits_for_all(view, site) or makes_wrapper(view, site) or view.calls.target(site.call, site.scope) is not None
    )


def makes_wrapper(view: View, site: Site) -> bool:
    """Whether a call wraps a model, which compares and broadcasts its parameters among all ranks."""
    return view.wrappers.wrapper(site) in ("ddp", "fsdp")


def led_to(view: View, site: Site) -> Site | None:
    """The first collective that a call of the project certainly reaches."""
    seen: set[Scope] = set()
    queue = list(view.calls.runs(site)) if site.name not in ("spawn", "Process") else []
    while queue and len(seen) < 30:
        function = queue.pop()
        if function in seen or has_both_sides(view, function):
            continue
        seen.add(function)
        for inner in function.sites:
            if not certain(view, inner, function):
                continue
            if waits_for_all(view, inner):
                return inner
            queue += view.calls.runs(inner)
    return None


def certain(view: View, site: Site, scope: Scope) -> bool:
    """Whether a function that is called reaches a call in it, wherever there are several processes."""
    tests = (*guards(site.stmt, scope.module), *choices(site))
    return all(
        view.ranks.tests.many(guard.test, scope, guard.when) == 1
        or (guard.when and asks_for_deepspeed(guard.test) and saves_on_all(view, site))
        for guard in tests
    )


def has_both_sides(view: View, function: Scope) -> bool:
    return any(s.name == "get_rank" for s in function.sites) and any(
        view.ranks.side(s.stmt, function) for s in function.sites
    )


def paired(view: View, site: Site, side: int, sides: list[tuple[Site, int]]) -> bool:
    """Whether the other ranks reach a collective of the same kind elsewhere in the function."""
    kind = name_of(view, site)
    return any(other == -side and name_of(view, s) == kind for s, other in sides) or handed_over(view, site, side)


def handed_over(view: View, site: Site, side: int) -> bool:
    """Whether the other ranks hand the function of a call to what may call it (`study.optimize(objective)`)."""
    functions = list(view.calls.runs(site))
    return bool(functions) and any(
        view.names.definition(value, site.scope) in functions
        for other in site.scope.sites
        if other is not site and view.ranks.side(other.stmt, site.scope) == -side
        for value in other.call.args
        if isinstance(value, ast.Name)
    )


def name_of(view: View, site: Site) -> str:
    if waits_for_all(view, site) or makes_wrapper(view, site):
        return site.name
    inner = led_to(view, site)
    return inner.name if inner is not None else ""


RULE = Rule(
    code="LS018",
    name="collective on some ranks only",
    what=(
        "A collective (`barrier`, `all_reduce`, ..., Accelerate's `wait_for_everyone`, Fabric's `save`) stands where "
        "only some ranks arrive, directly or in a function called there; or only some ranks run a model that FSDP has "
        "wrapped, or wrap one, or have DeepSpeed's engine save."
    ),
    why=(
        "A collective ends when all ranks are in it. If one stays away, the others wait until the timeout, by "
        "default half an hour, and the job dies."
    ),
    bad="""
import torch.distributed as dist

def log(loss, rank):
    if rank == 0:
        dist.all_reduce(loss)
        print(loss)
""",
    good="""
import torch.distributed as dist

def log(loss, rank):
    dist.all_reduce(loss)
    if rank == 0:
        print(loss)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Let every rank call the collective; guard only what is done with the result",
)
