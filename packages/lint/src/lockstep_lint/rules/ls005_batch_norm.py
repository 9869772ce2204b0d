"""LS005: BatchNorm under DDP without conversion."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import find_argument
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.nodes import REFERENCES, dotted, last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.query import subject
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

MESSAGE = "each rank normalises by its own share of the batch: convert the model with nn.SyncBatchNorm first"
# A conversion, or a choice of layers that share their statistics.
CONVERSIONS = ("convert_syncbn", "SyncBN", "sync_bn", "syncbn")
SHARED = re.compile(r"SyncBatchNorm|InPlaceABN")
# What says nothing of the layers: an option that is declared, an import, a class, layers that a loop looks for.
IDLE = re.compile(
    r"""add_argument\(\s*["']--?sync_?bn["']|^[ \t]*(from|import)\b.*$|\bclass\s+\w*InPlaceABN\w*"""
    r"|\bsuper\(\w*InPlaceABN\w*|\b\w*InPlaceABN\w*\.apply\b|isinstance\([^()]*\([^()]*\)|isinstance\([^()]*\)"
    r"|\((?=[^()]*\b(?:_?BatchNorm|GroupNorm))[^()]*,[^()]*\)",
    re.MULTILINE,
)


def check(view: View) -> Iterator[Found]:
    """Look at the models that DDP wraps for BatchNorm layers that nothing converts."""
    for run in runs(view):
        for wrap in run.of("wrap"):
            site = wrap.mark.site if wrap.module is view.module and wrap.detail == "ddp" else None
            if site is None or any(map(converts, view.project.family(view.module))):
                continue
            if not view.on_cpu(site) and has_norm(view, run, wrap):
                yield Found(wrap.node, MESSAGE)


@cache_answers
def converts(module: Module) -> bool:
    """Check whether a file converts BatchNorm layers, or may make others."""
    text = IDLE.sub("", module.text) if any(word in module.text for word in (*CONVERSIONS, "SyncB", "ABN")) else ""
    return any(word in text for word in CONVERSIONS) or SHARED.search(text) is not None


def has_norm(view: View, run: Run, wrap: Event) -> bool:
    """Check whether the wrapped model certainly has BatchNorm layers."""
    makers = dict(find_calls(view, *subject(wrap), 0))
    for norm in run.of("norm"):
        calls = [norm.node, *(block.site.call for block in norm.path if isinstance(block, CallBlock))]
        typed = any(last(test.node) == "isinstance" for test in norm.tests)  # of an argument that is not known
        if norm.place < wrap.place and not typed and any(call in makers for call in calls):
            return True
    return False


def find_calls(view: View, node: ast.expr | None, scope: Scope, depth: int) -> Iterator[tuple[ast.Call, Scope]]:
    """Yield the calls that make a model or its parts."""
    for origin in view.origins.of(node, scope):
        found = [(origin.node, origin.scope)]
        if isinstance(origin.node, REFERENCES):
            binds = view.origins.binds(dotted(origin.node) or "", origin.scope, origin.node.lineno)
            found = [(bind.value, home) for bind, home in binds if bind.path[:1] == (0,) and bind.value is not None]
        for value, home in found:
            if isinstance(value, ast.Call):
                yield value, home
                for part in find_parts(view, value, home) if depth < 2 else ():
                    yield from find_calls(view, part, home, depth + 1)


def find_parts(view: View, call: ast.Call, scope: Scope) -> Iterator[ast.expr]:
    """Yield the arguments that become parts of a model (`Classifier(backbone, head)`)."""
    start = view.calls.target(call, scope)
    if start is None:
        yield from call.args if last(call) == "Sequential" else ()
        return
    kept = {dotted(bind.value) for key, binds in start.binds.items() if key.startswith("self.") for bind in binds}
    tuples = [bind.value for key, binds in start.binds.items() if key.startswith("self.") for bind in binds]
    kept |= {dotted(part) for value in tuples if isinstance(value, ast.Tuple) for part in value.elts}
    yield from filter(None, (find_argument(call, start, name) for name in start.params[1:] if name in kept))


RULE = Rule("LS005", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe")
