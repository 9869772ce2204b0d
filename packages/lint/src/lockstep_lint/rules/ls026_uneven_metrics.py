"""LS026: metrics averaged over uneven shards, or reported from one rank's shard."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.engines import PREPARING, find_prepared, is_shard
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, parts
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, walk
from lockstep_lint.analysis.rank_names import COUNT
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

MEANS = "averages the ranks' means, but the shards are uneven or padded: sum values and counts"
ALONE = "each rank takes the score of its own shard for the whole: sum values and counts over all ranks"
# They join the ranks' lists.
JOINS = {"cat", "concat", "concatenate", "extend", "chain", "from_iterable"}
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
# Whatever may bring the values of several ranks together.
EXCHANGE = Words(
    r"(?i)reduce|gather|sync|collect|aggregat|metric|(?<!para)meter|compute|merge|evaluator|average|^dist_"
)
# What works on one rank although its name sounds like an exchange (`torch.cuda.synchronize`, `torch.gather`).
LOCAL = Words(
    r"(?i)^torch\.(?!distributed)|^(warnings|gc|numpy|scipy|sklearn|pandas|collections|itertools|statistics)\."
    r"|sync_?batch_?norm|syncbn"
)
SCORE = Words(r"loss|acc(?!el|um)|top_?\d|prec|correct|(?<!para)meter|iou(?!s)|(?<!in)dice|psnr|error", re.IGNORECASE)
PREDICTED = Words(r"pred|label|target|truth|reference|hypothes|output|answer|prob|logit|^y_", re.IGNORECASE)
SCORES = Words(r"score|accuracy|f1|auc|bleu|rouge|report|recall|precision|kappa|confusion", re.IGNORECASE)
ADDS = ("append", "extend")
REDUCES = ("all_reduce", "reduce")
GATHERS = ("all_gather", "gather", "all_gather_object")
SHOWS = ("print", "info", "add_scalar", "log", "write", "debug", "warning", "add_scalars", "log_metrics")


def check(view: View) -> Iterator[Found]:
    """Find evaluations of shards that average the ranks' means, or keep them local."""
    every = [s for member in view.project.family(view.module) for s in member.sites("DistributedSampler")]
    samplers = [s for s in every if constant(keyword(s.call, "drop_last")) is not True]
    by_hand = [text for member in view.project.family(view.module) for text in parts(member)]
    divides = view.analysis.is_moot(view.module, PREPARING)
    if find_prepared(view) or (not divides and (samplers or by_hand)):
        yield from find_unshared(view)
    loaders = [site for member in view.project.family(view.module) for site in member.sites("DataLoader")]
    flags = [keyword(s.call, "drop_last") for s in loaders if keyword(s.call, "sampler") is not None]
    equal = bool(flags) and all(flag is not None and constant(flag) is not False for flag in flags)
    if divides or equal or not (samplers or by_hand):
        return  # shards of one size: the ranks' means weigh alike
    words = [name for site in samplers for name in idents(site.stmt)]
    held_out_shards = any(map(EVALUATION.search, words)) or any("train" not in text for text in by_hand)
    for scope in view.scopes:
        for site in scope.sites if scope.kind != "class" else ():
            if averages(view, site) and held_out(view, site):
                over = (stmt for stmt in scope.stmts if isinstance(stmt, ast.For))
                if held_out_shards or any(is_sharded(view, loop, scope) for loop in over):
                    yield at(site, MEANS)
                    break


def find_unshared(view: View) -> Iterator[Found]:
    """Find evaluations over a rank's own shard whose score nobody adds to the others' scores."""
    if view.hidden(EXCHANGE):
        return
    for scope in view.scopes:
        for loop in (stmt for stmt in scope.stmts if isinstance(stmt, ast.For)):
            if is_sharded(view, loop, scope) and adds_up(view, loop, scope) and not exchanges(view, scope, loop):
                yield Found(loop, ALONE)
                break


def adds_up(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop without training sums scores that its function reports."""
    within = view.effects.block(loop, scope)
    added = any(isinstance(s, ast.AugAssign) and inside(s, loop, scope.module) for s in scope.stmts)
    added = added or any(site.name in ("update", "append") and SCORE.search(last(site.receiver)) for site in within)
    filled = {dotted(s.receiver) for s in within if s.name in ADDS and PREDICTED.search(last(s.receiver))} - {None}
    later = [s for s in scope.sites if s.line > (loop.end_lineno or loop.lineno) and SCORES.search(s.name)]
    scored = any(filled & set(map(dotted, walk(site.call))) for site in later)
    if not (added or scored) or any(view.steps.backwards(site) for site in within):
        return False
    return any(True for _ in scope.returns()) or any(site.name in SHOWS for site in view.effects.below(scope.sites))


def is_sharded(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop runs over a rank's shard of held-out data."""
    if EVALUATION.search(scope.name) or any(map(EVALUATION.search, idents(loop.iter))):
        return is_shard(view, loop.iter, scope)
    key = dotted(view.kinds.iterated(loop.iter, scope))
    callers = view.calls.callers(scope)[:20] if key in scope.params else []
    given = [(find_passed(site, scope, key or ""), site.scope) for site in callers]
    held = [(value, home) for value, home in given if value is not None and any(map(EVALUATION.search, idents(value)))]
    return any(is_shard(view, value, home) for value, home in held)


def exchanges(view: View, scope: Scope, loop: ast.For) -> bool:
    """Check whether an evaluation, its callees or callers may combine the ranks' values."""
    own = [site for site in scope.sites if EVALUATION.search(scope.name) or site.line >= loop.lineno]
    if any(EXCHANGE.search(site.name) and not in_sight(view, site) for site in view.effects.below(own)):
        return True
    callers = view.calls.callers(scope)
    return any(passes_on(caller, site) for caller in callers for site in caller.scope.sites) or any(
        EXCHANGE.search(site.name) for caller in callers if caller.scope is scope.parent for site in caller.scope.sites
    )


def in_sight(view: View, site: Site) -> bool:
    """Check whether a call itself exchanges nothing: it is the project's, or local in torch."""
    along = site.name == "gather" and isinstance(constant(next(iter(site.call.args), None)), int)  # `x.gather(1, y)`
    local = along or LOCAL.search(view.full(site)) or LOCAL.search(site.name)
    owner = view.names.definition(site.call.func, site.scope)
    return local or owner is not None or view.calls.target(site.call, site.scope) is not None


def passes_on(caller: Site, site: Site) -> bool:
    """Check whether a call exchanges what an evaluation has returned to its caller."""
    if not EXCHANGE.search(site.name) or site.line < caller.line:
        return False
    names = {bind.key for bind in caller.scope.bound(caller.stmt)}
    given = [node for value in (*site.call.args, *(k.value for k in site.call.keywords)) for node in walk(value)]
    return any(node is caller.call or dotted(node) in names for node in given)


def held_out(view: View, site: Site) -> bool:
    """Check whether a call evaluates, by its function, loop or argument's name."""
    around = [loop.iter for loop in loops(site.stmt, site.module) if isinstance(loop, ast.For)]
    headers = [view.kinds.iterated(over, site.scope) for over in around]
    values = [*headers, *site.call.args[: 2 if "gather" in site.name else 1]]  # a gather fills its first
    return any(map(EVALUATION.search, (site.scope.name, *(name for value in values for name in idents(value)))))


def averages(view: View, site: Site) -> bool:
    """Check whether a call brings the ranks' values together and takes their mean."""
    if site.name in (*REDUCES, *GATHERS) and view.full(site).startswith("torch.distributed"):
        if site.name in GATHERS:
            return averages_list(site)
        return averages_self(site) or any(divides(s, target(site)) for s in site.scope.stmts if s.lineno >= site.line)
    functions = view.calls.runs(site)
    return bool(functions) and any(is_averaging(view, function) for function in functions)


@cache_answers
def is_averaging(view: View, function: Scope) -> bool:
    """Check whether a short function averages over ranks what it reduces or gathers."""
    if len(function.stmts) > 15:
        return False
    gathers = [s for s in function.named("all_gather") if view.full(s).startswith("torch.distributed")]
    reduces = [s for s in function.sites if s.name in REDUCES]
    if any(map(averages_list, gathers)):
        return True
    divided = any(map(averages_self, reduces)) or any(divides(stmt, "") for stmt in function.stmts if reduces)
    return bool(reduces) and divided


def averages_self(site: Site) -> bool:
    """Check whether a reduction averages (`ReduceOp.AVG`)."""
    return any(last(value) == "AVG" for value in (*site.call.args, *(k.value for k in site.call.keywords)))


def target(site: Site) -> str:
    """Return the name of what a collective reduces, or gathers into."""
    return (dotted(site.call.args[0]) if site.call.args else None) or "?"


def averages_list(site: Site) -> bool:
    """Check whether the mean of a gathered list, or its stack, is taken."""
    names = {target(site)}
    for stmt in site.scope.stmts:
        if stmt.lineno > site.line and not isinstance(stmt, BLOCKS):
            if any(is_mean(node, name) for name in names for node in walk(stmt)):
                return True
            stacks = isinstance(stmt, ast.Assign) and last(stmt.value) == "stack"
            names |= {bind.key for bind in site.scope.bound(stmt)} if stacks and names & set(idents(stmt)) else set()
    return False


def is_mean(node: ast.AST, name: str) -> bool:
    """Check whether an expression is the mean of a list (`sum(parts) / world_size`, `torch.stack(parts).mean()`)."""
    if isinstance(node, ast.Call) and last(node) in ("mean", "fmean"):
        joins = any(isinstance(part, ast.Call) and last(part) in JOINS for part in walk(node))
        return name in idents(node) and not joins
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and last(node.left) == "sum":
        return name in idents(node.left) and (is_count(node.right) or name in idents(node.right))
    return False


def divides(stmt: ast.stmt, name: str) -> bool:
    """Check whether a statement divides a name, or anything, by the number of ranks."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        return name in ("", dotted(stmt.target)) and is_count(stmt.value)
    parts = list(walk(stmt)) if not isinstance(stmt, BLOCKS) else []
    shares = [(node.left, node.right) for node in parts if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    calls = (node for node in parts if isinstance(node, ast.Call) and node.args)
    shares += [(node.func, node.args[0]) for node in calls if last(node) == "div_"]
    return any(is_count(count) and (not name or name in idents(part)) for part, count in shares)


def is_count(node: ast.expr) -> bool:
    """Check whether a value is the number of ranks."""
    return last(node) == "gpus" or any(COUNT.search(name) for name in idents(node))


RULE = Rule("LS026", Severity.ERROR, Confidence.MEDIUM, check, moot=TRAINERS - {"lightning"}, placed=True)
