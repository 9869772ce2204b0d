"""LS065: what a framework prepares lands under another name, or nowhere."""

import ast
from collections import Counter
from collections.abc import Iterator

from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.engines import prepares
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, dotted, has_star, last, mentions
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

LOST = "what prepare() gives back is thrown away, so nothing is wrapped or divided: assign it"
# What deepspeed.initialize gives back, and how its two last are called.
OF_DEEPSPEED = 4
LOADER, SCHEDULE = Words(r"loader|(^|_)dl$"), Words(r"sched")


def check(view: View) -> Iterator[Found]:
    """Looks at the names that take what a framework has prepared."""
    for site in view.sites("prepare", "setup", "setup_dataloaders", "initialize"):
        given = prepares(view, site)
        if given is None or has_star(site.call) or unit_test(view.module):
            continue
        message = "" if site.name == "initialize" and len(given) == 0 else repeated(given)
        targets = names(site)
        if targets is not None:
            message = (
                message or counted(site, given, targets) or misnamed(given, targets) or replaced(site, given, targets)
            )
        elif isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call and is_used(view, site, given):
            message = LOST
        if message:
            yield at(site, message)


def names(site: Site) -> list[ast.expr] | None:
    """Return the targets of a call that an assignment unpacks, or its one target; None for anything else."""
    stmt = site.stmt
    if not isinstance(stmt, ast.Assign) or len(stmt.targets) != 1 or stmt.value is not site.call:
        return None
    target = stmt.targets[0]
    found = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return None if any(isinstance(each, ast.Starred) for each in found) else found


def repeated(given: list[ast.expr]) -> str:
    """Explain that an object is handed over twice."""
    counts = Counter(key for value in given if (key := dotted(value)) is not None)
    twice = next((key for key, count in counts.items() if count > 1), "")
    return f"{twice} is handed over twice, and one of the objects not at all" if twice else ""


def counted(site: Site, given: list[ast.expr], targets: list[ast.expr]) -> str:
    """Explain that a call gives back more objects, or fewer, than there are names."""
    results = len(given) if site.name != "initialize" or given else OF_DEEPSPEED
    if len(targets) == results or results == 1:
        return ""
    if len(targets) > 1 or isinstance(getattr(site.stmt, "targets", [None])[0], ast.Tuple):
        return f"gives back {results} objects for {len(targets)} names: the unpacking fails"
    key = dotted(targets[0]) or ""
    binds = [bind for bind in site.scope.binds.get(key, []) if bind.stmt.lineno > site.line]
    end = min((bind.stmt.lineno for bind in binds), default=10**9)
    used = (s for s in site.scope.sites if site.line < s.line <= end)
    if any(dotted(s.call.func) == key or dotted(s.receiver) == key for s in used):
        return f"gives back {results} objects, and {key} is all of them: unpack the tuple"
    return ""


def misnamed(given: list[ast.expr], targets: list[ast.expr]) -> str:
    """Explain that an object takes the name of another that is handed over beside it."""
    if not given:
        swapped = SCHEDULE.search(last(targets[2])) or LOADER.search(last(targets[3]))
        return "gives back the engine, the optimizer, the loader and the schedule, in this order" if swapped else ""
    keys = [dotted(value) for value in given]
    for target, key in zip(map(dotted, targets), keys, strict=False):
        if target is not None and target != key and key is not None and target in keys:
            return f"{target} becomes what {key} was: name the objects in the order in which they are handed over"
    return ""


def replaced(site: Site, given: list[ast.expr], targets: list[ast.expr]) -> str:
    """Explain that an object that was made for nothing else is replaced by another one."""
    scope = site.scope
    if loops(site.stmt, site.module):
        return ""
    for target, key in zip(map(dotted, targets), map(dotted, given), strict=False):
        if target is None or key is None or target in (key, "_"):
            continue
        before = [bind for bind in scope.binds.get(target, []) if bind.stmt.lineno < site.line]
        start = before[0].stmt if len(before) == 1 and isinstance(before[0].value, ast.Call) else None
        if start is None:
            continue
        after = (stmt for stmt in scope.stmts if start.lineno < stmt.lineno <= site.line and stmt is not site.stmt)
        if not any(mentions(node, target) for node in (*after, *given)):
            return f"{target} becomes what {key} was, and what {target} was is never used"
    return ""


def is_used(view: View, site: Site, given: list[ast.expr]) -> bool:
    """Check whether a training, or a loop over a loader, goes on with the objects that were handed over."""
    kinds = (view.kinds.is_optimizer, view.kinds.is_loader)
    taken = [dotted(value) for value in given if any(ask(value, site.scope) for ask in kinds)]
    later = (stmt for stmt in site.scope.stmts if stmt.lineno > site.line)
    return any(key is not None and mentions(stmt, key) for stmt in later for key in taken)


RULE = Rule(
    code="LS065",
    name="prepared under another name",
    what=(
        "What Accelerate's `prepare`, Fabric's `setup`, apex's or DeepSpeed's `initialize` gives back is unpacked into "
        "other names than those that were handed over, or thrown away."
    ),
    why=(
        "A schedule under two names is stepped twice, and the other network's never; a model that is not taken back is "
        "not wrapped, and every process trains for itself."
    ),
    bad="""
import torch
from accelerate import Accelerator

def main(generator, critic, loader):
    accelerator = Accelerator()
    fast = torch.optim.AdamW(generator.parameters())
    slow = torch.optim.AdamW(critic.parameters())
    generator, critic, fast, slow, loader = accelerator.prepare(generator, critic, slow, fast, loader)
""",
    good="""
import torch
from accelerate import Accelerator

def main(generator, critic, loader):
    accelerator = Accelerator()
    fast = torch.optim.AdamW(generator.parameters())
    slow = torch.optim.AdamW(critic.parameters())
    generator, critic, fast, slow, loader = accelerator.prepare(generator, critic, fast, slow, loader)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    remedy="Unpack the results in the order of the arguments",
)
