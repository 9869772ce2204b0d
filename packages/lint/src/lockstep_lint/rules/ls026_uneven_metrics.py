"""LS026: metrics averaged over uneven shards, or reported from one rank's shard."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, parts
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, walk
from lockstep_lint.analysis.rank_names import COUNT
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

MEANS = "averages the ranks' means, but the shards are uneven or padded: sum values and counts"
ALONE = "each rank takes the score of its own shard for the whole: sum values and counts over all ranks"
MAX_CALLERS = 20
# What joins the ranks' lists, before a mean that is then over all samples.
JOINS = {"cat", "concat", "concatenate", "extend", "chain", "from_iterable"}
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
# Whatever may bring the values of several ranks together.
EXCHANGE = Words(
    r"reduce|gather|sync|collect|aggregat|metric|(?<!para)meter|compute|merge|evaluator|average|^dist_", re.IGNORECASE
)
# What works on one rank although its name sounds like an exchange (`torch.cuda.synchronize`, `torch.gather`).
LOCAL = Words(
    r"^torch\.(?!distributed)|^(warnings|gc|numpy|scipy|sklearn|pandas|collections|itertools|statistics)\."
    r"|sync_?batch_?norm|syncbn",
    re.IGNORECASE,
)
SCORE = Words(r"loss|acc(?!el|um)|top_?\d|prec|correct|(?<!para)meter|iou(?!s)|(?<!in)dice|psnr|error", re.IGNORECASE)
PREDICTED = Words(r"pred|label|target|truth|reference|hypothes|output|answer|prob|logit|^y_", re.IGNORECASE)
SCORES = Words(r"score|accuracy|f1|auc|bleu|rouge|report|recall|precision|kappa|confusion", re.IGNORECASE)
SHOWS = ("print", "info", "add_scalar", "log", "write", "debug", "warning", "add_scalars", "log_metrics")
# Frameworks that give each rank its part of the loaders that they prepare.
PREPARING = frozenset({"accelerate", "lightning", "lightning_fabric"})
PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")


def check(view: View) -> Iterator[Found]:
    """Find evaluations of a rank's own shard that average the ranks' means, or that no rank shares."""
    every = [s for member in view.project.family(view.module) for s in member.sites("DistributedSampler")]
    samplers = [s for s in every if constant(keyword(s.call, "drop_last")) is not True]
    by_hand = [text for member in view.project.family(view.module) for text in parts(member)]
    divides = view.analysis.is_moot(view.module, PREPARING)
    if prepared(view) or (not divides and (samplers or by_hand)):
        yield from unshared(view)
    if divides or drops_rest(view) or not (samplers or by_hand):
        return
    held_out_shards = any(map(shards, samplers)) or any("train" not in text for text in by_hand)
    for scope in view.scopes:
        for site in scope.sites if scope.kind != "class" else ():
            if averages(view, site) and held_out(view, site) and (held_out_shards or over_shard(view, scope)):
                yield at(site, MEANS)
                break


@kept
def prepared(view: View) -> frozenset[ast.Call]:
    """Return the loaders that Accelerate or Fabric divides among the ranks."""
    members = [m for m in view.project.family(view.module) if any(m.sites(*PREPARES))]
    members = members if any(view.analysis.named(m) & PREPARING for m in members) else []
    given = [(value, site.scope) for member in members for site in member.sites(*PREPARES) for value in site.call.args]
    made = [each for value, scope in given for each in view.origins.calls_of(value, scope)]
    return frozenset(call for call, _, full in made if full.endswith("DataLoader"))


def shards(site: Site) -> bool:
    """Check whether a sampler divides held-out data, by the words of its statement."""
    text = ast.unparse(site.stmt)
    return any(EVALUATION.search(name) for name in idents(site.stmt)) or "val" in text or "test" in text


def drops_rest(view: View) -> bool:
    """Check whether all loaders with samplers drop the last, smaller batch, so that the ranks' means weigh alike."""
    loaders = [site for member in view.project.family(view.module) for site in member.sites("DataLoader")]
    divided = [site for site in loaders if keyword(site.call, "sampler") is not None]
    return bool(divided) and all(may_drop(keyword(site.call, "drop_last")) for site in divided)


def may_drop(flag: ast.expr | None) -> bool:
    """Check whether a loader's `drop_last` is not a literal False."""
    return flag is not None and constant(flag) is not False


def unshared(view: View) -> Iterator[Found]:
    """Find evaluations over a rank's own shard whose score nobody adds to the others' scores."""
    if view.hidden(EXCHANGE):
        return
    for scope in view.scopes:
        for loop in (stmt for stmt in scope.stmts if isinstance(stmt, ast.For)):
            if adds_up(view, loop, scope) and sharded(view, loop, scope) and not exchanges(view, scope, loop):
                yield Found(loop, ALONE)
                break


def adds_up(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop that does not train adds up scores, which its function returns or shows."""
    within = view.effects.block(loop, scope)
    added = any(isinstance(s, ast.AugAssign) and inside(s, loop, scope.module) for s in scope.stmts)
    added = added or any(site.name in ("update", "append") and SCORE.search(last(site.receiver)) for site in within)
    if not (added or scored(within, loop, scope)) or any(view.steps.backwards(site) for site in within):
        return False
    return any(True for _ in scope.returns()) or any(site.name in SHOWS for site in view.effects.below(scope.sites))


def scored(within: list[Site], loop: ast.For, scope: Scope) -> bool:
    """Check whether lists that a loop fills with predictions are scored after it."""
    fills = [s for s in within if s.name in ("append", "extend") and PREDICTED.search(last(s.receiver))]
    names = {dotted(site.receiver) for site in fills} - {None}
    after = [s for s in scope.sites if s.line > (loop.end_lineno or loop.lineno) and SCORES.search(s.name)]
    return any(names & set(map(dotted, walk(site.call))) for site in after)


def over_shard(view: View, scope: Scope) -> bool:
    """Check whether a function evaluates a rank's own shard."""
    return any(isinstance(stmt, ast.For) and sharded(view, stmt, scope) for stmt in scope.stmts)


def sharded(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop runs over a rank's shard of held-out data, by the names here or at a caller."""
    if EVALUATION.search(scope.name) or any(EVALUATION.search(name) for name in idents(loop.iter)):
        return is_shard(view, loop.iter, scope)
    key = dotted(view.kinds.iterated(loop.iter, scope))
    if key not in scope.params:
        return False
    for site in view.calls.callers(scope)[:MAX_CALLERS]:
        value = passed(site, scope, key)
        if value is not None and any(map(EVALUATION.search, idents(value))) and is_shard(view, value, site.scope):
            return True
    return False


def is_shard(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Check whether a loader has a rank's own shard, by its sampler, its data, or the framework that prepares it."""
    if view.kinds.is_shard(loader, scope):
        return True
    made = {call for call, _, _ in view.origins.calls_of(view.kinds.iterated(loader, scope), scope)}
    return bool(made) and made <= prepared(view)


def exchanges(view: View, scope: Scope, loop: ast.For) -> bool:
    """Check whether an evaluation, what it calls or its callers may bring the ranks' values together."""
    evaluates = EVALUATION.search(scope.name)
    own = scope.sites if evaluates else [site for site in scope.sites if site.line >= loop.lineno]
    if any(EXCHANGE.search(site.name) and not in_sight(view, site) for site in view.effects.below(own)):
        return True
    mapped = [name for site in own if site.name == "map" for value in site.call.args[:1] for name in idents(value)]
    if any(map(EXCHANGE.search, mapped)):
        return True  # `map(reduce_meter if distributed else plain, meters)`
    callers = view.calls.callers(scope)
    return any(passes_on(caller, site) for caller in callers for site in caller.scope.sites) or any(
        EXCHANGE.search(site.name) for caller in callers if caller.scope is scope.parent for site in caller.scope.sites
    )


def in_sight(view: View, site: Site) -> bool:
    """Check whether a call exchanges nothing itself: its own calls are in sight, or torch runs it on one rank."""
    if LOCAL.search(view.full(site)) or LOCAL.search(site.name):
        return True
    if site.name == "gather" and isinstance(constant(next(iter(site.call.args), None)), int):
        return True  # `logits.gather(1, index)`
    owner = view.names.definition(site.call.func, site.scope)
    return owner is not None or view.calls.target(site.call, site.scope) is not None


def passes_on(caller: Site, site: Site) -> bool:
    """Check whether a call exchanges what an evaluation has returned to its caller."""
    if not EXCHANGE.search(site.name) or site.line < caller.line:
        return False
    names = {bind.key for bind in caller.scope.bound(caller.stmt)}
    given = [node for value in (*site.call.args, *(k.value for k in site.call.keywords)) for node in walk(value)]
    return any(node is caller.call or dotted(node) in names for node in given)


def held_out(view: View, site: Site) -> bool:
    """Check whether a call is in an evaluating function or loop, or its argument is named after held-out data."""
    if EVALUATION.search(site.scope.name):
        return True
    around = [n for n in loops(site.stmt, site.module) if isinstance(n, ast.For)]
    headers = [view.kinds.iterated(loop.iter, site.scope) for loop in around]
    values = [*headers, *site.call.args[: 2 if "gather" in site.name else 1]]  # a gather fills its first
    return any(EVALUATION.search(name) for value in values for name in idents(value))


def averages(view: View, site: Site) -> bool:
    """Check whether a call brings the ranks' values together and takes their mean."""
    of_torch = view.full(site).startswith("torch.distributed")
    if site.name in ("all_reduce", "reduce") and of_torch:
        return takes_mean(site) or divided_after(site)
    if site.name in ("all_gather", "gather", "all_gather_object") and of_torch:
        return mean_after(site)
    return any(mean_of(view, function) for function in view.calls.runs(site))


def takes_mean(site: Site) -> bool:
    """Check whether a reduction is told to average (`ReduceOp.AVG`)."""
    return any(last(value) == "AVG" for value in (*site.call.args, *(k.value for k in site.call.keywords)))


def mean_of(view: View, function: Scope) -> bool:
    """Check whether a short function reduces and divides by the number of ranks, or averages what it gathered."""
    if len(function.stmts) > 15:
        return False
    if any(view.full(s).startswith("torch.distributed") and mean_after(s) for s in function.named("all_gather")):
        return True
    reduces = [s for s in function.sites if s.name in ("all_reduce", "reduce")]
    return bool(reduces) and (any(map(takes_mean, reduces)) or any(divides(stmt, None) for stmt in function.stmts))


def mean_after(site: Site) -> bool:
    """Check whether the list of the ranks' values is averaged as it is."""
    name = dotted(site.call.args[0]) if site.call.args else None
    names = {name} if name is not None else set()
    for stmt in site.scope.stmts:
        if stmt.lineno <= site.line or isinstance(stmt, BLOCKS):
            continue
        if any(means(node, each) for each in names for node in walk(stmt)):
            return True
        stacked = isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call) and last(stmt.value) == "stack"
        if stacked and names & set(idents(stmt)):
            names |= {bind.key for bind in site.scope.bound(stmt)}
    return False


def means(node: ast.AST, name: str) -> bool:
    """Check whether an expression is the mean of a list (`sum(parts) / world_size`, `torch.stack(parts).mean()`)."""
    if isinstance(node, ast.Call) and last(node) in ("mean", "fmean"):
        joined = any(isinstance(part, ast.Call) and last(part) in JOINS for part in walk(node))
        return name in idents(node) and not joined
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and last(node.left) == "sum":
        return name in idents(node.left) and (is_count(node.right) or name in idents(node.right))
    return False


def divided_after(site: Site) -> bool:
    """Check whether a later statement divides the reduced value by the number of ranks."""
    name = dotted(site.call.args[0]) if site.call.args else None
    return name is not None and any(divides(stmt, name) for stmt in site.scope.stmts if stmt.lineno >= site.line)


def divides(stmt: ast.stmt, name: str | None) -> bool:
    """Check whether a statement divides a name, or anything, by the number of ranks."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        return name in (None, dotted(stmt.target)) and is_count(stmt.value)
    if isinstance(stmt, BLOCKS):
        return False
    for node in walk(stmt):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and is_count(node.right):
            if name is None or name in idents(node.left):
                return True
        elif isinstance(node, ast.Call) and last(node) == "div_" and node.args and is_count(node.args[0]):
            return name is None or name in idents(node.func)
    return False


def is_count(node: ast.expr) -> bool:
    """Check whether a value is the number of ranks."""
    return last(node) == "gpus" or any(COUNT.search(name) for name in idents(node))


RULE = Rule(
    code="LS026",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    placed=True,
    fix="none",
    moot=frozenset({"pytorch_lightning", "composer", "lockstep", "trl"}),
)
