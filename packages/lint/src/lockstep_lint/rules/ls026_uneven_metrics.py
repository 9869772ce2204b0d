"""LS026: metrics averaged over uneven shards."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import Guard, guards, inside, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, parts
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    constant,
    dotted,
    idents,
    is_true,
    keyword,
    last,
    strings,
    walk,
)
from lockstep_lint.analysis.origins import default
from lockstep_lint.analysis.rank_names import COUNT
from lockstep_lint.analysis.tensors import MADE
from lockstep_lint.analysis.view import View
from lockstep_lint.events.query import sides
from lockstep_lint.events.results import evaluations, over, prepared_by, reported
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


MAX_CALLERS = 20
PART = "a rank's result over its own part of the data is reported as the whole's: sum values and counts over all ranks"


def shards(site: Site) -> bool:
    """Whether a sampler says that it divides held-out data."""
    text = ast.unparse(site.stmt)
    if constant(keyword(site.call, "shuffle")) is False and any(map(apart, guards(site.stmt, site.module))):
        return True
    return any(EVALUATION.search(name) for name in idents(site.stmt)) or "val" in text or "test" in text


def apart(guard: Guard) -> bool:
    """Whether a test leaves the other arm to the training (`if mode == "train": ... else: ...`)."""
    test = guard.test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        return not guard.when and constant(test.comparators[0]) == "train"
    return not guard.when and last(test) in ("train", "is_train", "training", "is_training")


def serves_both(view: View, site: Site) -> bool:
    """Whether the function that makes a sampler makes those of the training and of held-out data alike: its callers
    say whether it shuffles, and one asks for held-out data in order, or it shuffles where `split == "train"`.
    """
    asked = keyword(site.call, "shuffle")
    if isinstance(asked, ast.Compare) and constant(asked.comparators[0]) == "train":
        return True
    flag = dotted(asked)
    return flag in site.scope.params and asked_in_order(view, site.scope, flag, 0)


def asked_in_order(view: View, function: Scope, flag: str, depth: int) -> bool:
    """Whether a caller gives a function False under a name, for held-out data by what the statement says."""
    for caller in view.calls.callers(function)[:MAX_CALLERS]:
        value = passed(caller, function, flag)
        if constant(value) is False and any(map(EVALUATION.search, idents(caller.stmt))):
            return True
        name = dotted(value)
        if {True, False} <= {constant(bind.value) for bind in caller.scope.binds.get(name or "", [])}:
            return True  # `if is_train: shuffle = True ... else: shuffle = False`
        if depth < 2 and name in caller.scope.params and asked_in_order(view, caller.scope, name, depth + 1):
            return True
    return False


def phased(loop: ast.For, scope: Scope) -> bool:
    """Whether a loop runs over the loader of a phase, one of which evaluates (`for x, y in loaders[phase]`)."""
    outer = (each for each in loops(loop, scope.module) if isinstance(each, ast.For))
    names = {dotted(each.target) for each in outer if any(map(EVALUATION.search, strings(each.iter)))} - {None}
    chosen = (item.slice for item in walk(loop.iter) if isinstance(item, ast.Subscript))
    return bool(names) and any(names & set(idents(item)) for item in chosen)


# What makes one list of the ranks' lists.
JOINS = {"cat", "concat", "concatenate", "extend", "chain", "from_iterable"}
# Functions that take the mean, of a list or of a list of dictionaries.
MEAN = Words(r"^(mean|fmean)$|^_?(dict|dicts|metrics)_(mean|average|avg)$|^_?(mean|average|avg)_(of_)?(dict|metric)s?$")
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)


def mean_after(site: Site) -> bool:
    """Whether the list into which the ranks' values are gathered is averaged as it is."""
    name = dotted(site.call.args[0]) if site.call.args else None
    after = [stmt for stmt in site.scope.stmts if stmt.lineno > site.line and not isinstance(stmt, BLOCKS)]
    names = {name} if name is not None else set()
    for stmt in after:
        if any(means(node, each) for each in names for node in walk(stmt)):
            return True
        stacked = isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call) and last(stmt.value) == "stack"
        if stacked and names & set(idents(stmt)):
            names |= {bind.key for bind in site.scope.bound(stmt)}
    return False


def means_given(site: Site) -> bool:
    """Whether the list of the ranks' values that a call gives is averaged as it is (`sum(losses) / len(losses)`)."""
    names = {bind.key for bind in site.scope.bound(site.stmt) if bind.value is site.call}
    after = [stmt for stmt in site.scope.stmts if stmt.lineno > site.line and not isinstance(stmt, BLOCKS)]
    return any(means(node, name) for stmt in after[:3] for name in names for node in walk(stmt))


def means(node: ast.AST, name: str) -> bool:
    """Whether an expression is the mean of a list (`sum(parts) / world_size`, `torch.stack(parts).mean()`)."""
    if isinstance(node, ast.Call) and MEAN.search(last(node)):
        joined = any(isinstance(part, ast.Call) and last(part) in JOINS for part in walk(node))
        return name in {*idents(node)} and not joined
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and last(node.left) == "sum":
        return name in {*idents(node.left)} and (is_count(node.right) or name in {*idents(node.right)})
    return False


def by_ranks(stmt: ast.stmt, function: Scope) -> bool:
    """Whether a statement divides by the number of ranks."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        return is_count(stmt.value)
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and is_count(node.right) for node in walk(stmt)
    )


def is_count(node: ast.expr) -> bool:
    """Whether a value is the number of ranks."""
    return last(node) == "gpus" or any(COUNT.search(name) for name in idents(node))


def divided_after(site: Site) -> bool:
    """Whether the reduced value itself is divided by the number of ranks, on the way in or later in the function."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.Call) and last(first) in ("div", "div_") and first.args and is_count(first.args[0]):
        return True
    name = dotted(first)
    names = {name} if name is not None else set()
    for stmt in site.scope.stmts if names else ():
        if stmt.lineno < site.line:
            continue
        call = stmt.value if isinstance(stmt, ast.Expr) else None
        if isinstance(call, ast.Call) and last(call) == "div_" and names & set(idents(call.func)):
            return bool(call.args) and is_count(call.args[0])
        if divides(stmt, names):
            return True
        if isinstance(stmt, ast.Assign) and taken_out(stmt.value) in names:
            names |= {bind.key for bind in site.scope.bound(stmt)}
    return False


def divides(stmt: ast.stmt, names: set[str]) -> bool:
    """Whether a statement divides one of the names by the number of ranks."""
    if isinstance(stmt, ast.AugAssign):
        return dotted(stmt.target) in names and isinstance(stmt.op, ast.Div) and is_count(stmt.value)
    if not isinstance(stmt, ast.Assign | ast.Return | ast.Expr):
        return False
    quotients = (node for node in walk(stmt) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
    return any(names & set(idents(node.left)) and is_count(node.right) for node in quotients)


def taken_out(value: ast.expr) -> str | None:
    """The name of the tensor whose parts a value is (`loss, right = sums[:2].tolist()`)."""
    while True:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
            value = value.func.value
        elif isinstance(value, ast.Subscript):
            value = value.value
        else:
            return dotted(value)


# Whatever may bring the values of several ranks together.
EXCHANGE = Words(
    r"reduce|gather|sync|collect|aggregat|metric|(?<!para)meter|compute|merge|evaluator|average|^dist_", re.IGNORECASE
)

# What an average of a score is called.
SCORE = Words(r"loss|acc(?!el|um)|top_?\d|prec|correct|(?<!para)meter|iou(?!s)|(?<!in)dice|psnr|error", re.IGNORECASE)

# What says that a statement is about held-out data, as text (`create_pipeline(valdir, is_training=False)`).
HELD = re.compile(r"(?<![a-z])(val(?!u)|test|eval)", re.IGNORECASE)
# What works on one rank alone, though its name sounds like an exchange (`torch.cuda.synchronize`, `torch.gather`).
ALONE = Words(
    r"^torch\.(?!distributed)|^(warnings|gc|numpy|scipy|sklearn|pandas|collections|itertools|statistics|nltk|sacrebleu)\."
    r"|^timm\.utils\.\w*Meter|sync_?batch_?norm|syncbn",
    re.IGNORECASE,
)
# What a list is called that takes in what is scored after the loop, and what scores it.
PREDICTED = Words(
    r"pred|label|target|truth|reference|^refs$|hypothes|^hyps$|gold|output|answer|prob|logit|^y_", re.IGNORECASE
)
SCORES = Words(
    r"score|accuracy|f1|auc|bleu|rouge|compute|metric|report|recall|precision|kappa|confusion", re.IGNORECASE
)
# They make a metric of Hugging Face's, which knows of other processes only what it is told.
METRICS = ("evaluate.load", "datasets.load_metric")
TELLS = ("print", "info", "add_scalar", "log", "write", "debug", "warning", "add_scalars", "log_metrics")


# They give each rank its own part of the loaders that they prepare.
PREPARING = frozenset({"accelerate", "lightning", "lightning_fabric"})
PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")


@kept
def prepared(view: View) -> frozenset[ast.Call]:
    """The loaders that Accelerate or Fabric divides among the ranks."""
    members = [m for m in view.project.family(view.module) if any(m.sites(*PREPARES))]
    members = members if any(view.analysis.named(m) & PREPARING for m in members) else []
    given = ((value, site.scope) for member in members for site in member.sites(*PREPARES) for value in site.call.args)
    made = (each for value, scope in given for each in view.origins.calls_of(value, scope))
    return frozenset(call for call, _, full in made if full.endswith("DataLoader"))


def check(view: View) -> Iterator[Found]:
    """Looks at evaluations over a DistributedSampler that average per-rank means, or that share nothing."""
    every = [s for member in view.project.family(view.module) for s in member.sites("DistributedSampler")]
    samplers = [s for s in every if constant(keyword(s.call, "drop_last")) is not True]
    by_hand = [text for member in view.project.family(view.module) for text in parts(member)]
    divides = view.analysis.is_moot(view.module, PREPARING)
    found = list(unshared(view)) if prepared(view) or (not divides and (samplers or by_hand)) else []
    yield from found
    if divides or by_hand or prepared(view) or view.project.says(view.module, "DistributedSampler"):
        yield from parts_told(view, {each.node for each in found})
    if divides or drops_rest(view) or not (samplers or by_hand):
        return
    said = any(shards(s) or serves_both(view, s) for s in samplers) or any(map(held_part, by_hand))
    for scope in view.scopes:
        for site in scope.sites if scope.kind != "class" else ():
            if averages(view, site) and held_out(view, site) and (said or over_shard(view, scope)):
                yield at(
                    site,
                    "averages the ranks' means, but the shards are uneven or padded: sum values and counts",
                )
                break


def drops_rest(view: View) -> bool:
    """Whether all loaders that are given samplers leave a last, smaller batch out: the ranks' means weigh alike."""
    loaders = [site for member in view.project.family(view.module) for site in member.sites("DataLoader")]
    divided = [site for site in loaders if keyword(site.call, "sampler") is not None]
    return bool(divided) and all(map(functools.partial(drops, view), divided))


def drops(view: View, site: Site) -> bool:
    """Whether a loader drops its last batch, by a literal of its own or of each caller."""
    flag, function = keyword(site.call, "drop_last"), site.scope
    name = dotted(flag)
    if name not in function.params or name in function.binds:
        return is_true(flag)
    callers = view.calls.callers(function)
    return bool(callers) and all(is_true(passed(c, function, name) or default(function, name, c.call)) for c in callers)


def held_part(text: str) -> bool:
    """Whether a statement that divides data may divide held-out data; those of DALI name both sorts (`is_training`)."""
    return "train" not in text or ("shard_id" in text and HELD.search(text) is not None)


def over_shard(view: View, scope: Scope) -> bool:
    """Whether a function evaluates a rank's own part of the data."""
    return any(isinstance(stmt, ast.For) and sharded(view, stmt, scope) for stmt in scope.stmts)


def sharded(view: View, loop: ast.For, scope: Scope) -> bool:
    """Whether a loop runs over a rank's own part of held-out data, by the names here or where a caller gives it."""
    if EVALUATION.search(scope.name) or any(EVALUATION.search(name) for name in idents(loop.iter)):
        return is_shard(view, loop.iter, scope)
    if phased(loop, scope):
        return view.kinds.is_shard(loop.iter, scope, alike=True)
    key = dotted(view.kinds.iterated(loop.iter, scope))
    if key not in scope.params:
        return False
    given = [(passed(site, scope, key), site.scope) for site in view.calls.callers(scope)[:MAX_CALLERS]]
    return any(
        value is not None and any(map(EVALUATION.search, idents(value))) and is_shard(view, value, home)
        for value, home in given
    )


def is_shard(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Whether a loader has a rank's own part of the data, by sampler, data, or the framework that prepares it."""
    if view.kinds.is_shard(loader, scope):
        return True
    made = {call for call, _, _ in view.origins.calls_of(view.kinds.iterated(loader, scope), scope)}
    return bool(made) and made <= prepared(view)


def unshared(view: View) -> Iterator[Found]:
    """An evaluation over a rank's own shard whose score nobody adds to the others' scores."""
    if view.hidden(EXCHANGE):
        return
    for scope in view.scopes:
        for loop in (stmt for stmt in scope.stmts if isinstance(stmt, ast.For)):
            if not sums(view, loop, scope) or not sharded(view, loop, scope):
                continue
            if not exchanges(view, scope, loop) or some_kept(view, scope, loop):
                yield Found(
                    loop,
                    "each rank takes the score of its own shard for the whole: sum values and counts over all ranks",
                )
                break


def parts_told(view: View, known: set[ast.AST]) -> Iterator[Found]:
    """Reports of what an evaluation of a rank's own part has added up, followed to where they stand."""
    if view.hidden(EXCHANGE):
        return
    told: set[ast.AST] = set()
    for run in runs(view):
        for event, loop in evaluations(view, run):
            node, home = over(view, event, loop)
            if loop.node in known or any(ranks == 1 for _, ranks in sides(view, event)):
                continue  # what one rank alone tries on its part is a sample
            if not (is_shard(view, node, home) or prepared_by(view, node, home)):
                continue
            stmt, scope = reported(view, event, loop, SCORE, functools.partial(brings, view)) or (None, None)
            if stmt is not None and scope is not None and scope.module is view.module and stmt not in told:
                told.add(stmt)
                yield Found(stmt, PART)


def brings(view: View, site: Site) -> bool:
    """Check whether a call may bring the ranks' values together."""
    return EXCHANGE.search(site.name) and not seen(view, site)


def some_kept(view: View, scope: Scope, loop: ast.For) -> bool:
    """Whether an evaluation exchanges some of its meters by their own method, and gives back others as they are."""
    filled = {dotted(s.receiver) for s in view.effects.block(loop, scope) if s.name == "update"} - {None}
    asked = [site for site in scope.sites if EXCHANGE.search(site.name) and not is_made(view, site)]
    own = {dotted(site.receiver) for site in asked}
    given = {dotted(part.value) for value in scope.returns() for part in walk(value) if isinstance(part, ast.Attribute)}
    called = [caller for caller in view.calls.callers(scope) for site in caller.scope.sites if passes_on(caller, site)]
    return bool(own) and own < filled and not called and bool(given & (filled - own))


def is_made(view: View, site: Site) -> bool:
    """Whether a call makes an object of a class (`AverageMeter()`), or scores what it is given."""
    owner = view.names.definition(site.call.func, site.scope)
    return owner is not None and (owner.kind == "class" or not any(EXCHANGE.search(each.name) for each in owner.sites))


def exchanges(view: View, scope: Scope, loop: ast.For) -> bool:
    """Whether an evaluation, what it calls or a function that calls it may bring the ranks' values together."""
    own = (
        [site for site in scope.sites if site.line >= loop.lineno] if not EVALUATION.search(scope.name) else scope.sites
    )
    if any(EXCHANGE.search(site.name) and not seen(view, site) for site in view.effects.below(own)):
        return True
    mapped = (name for site in own if site.name == "map" for value in site.call.args[:1] for name in idents(value))
    if any(map(EXCHANGE.search, mapped)):
        return True  # `map(reduce_meter if distributed else plain, meters)`
    outer = (
        {dotted(site.receiver) for site in view.effects.block(loop, scope)} - scope.binds.keys() - {*scope.params, None}
    )
    return any(
        passes_on(caller, site) or (caller.scope is scope.parent and exchanges_of(view, site, outer))
        for caller in view.calls.callers(scope)
        for site in caller.scope.sites
    )


def exchanges_of(view: View, site: Site, names: set[str | None]) -> bool:
    """Whether a call brings the ranks' values of an object together, which the loop fills (`top1.all_reduce()`)."""
    return dotted(site.receiver) in names and any(EXCHANGE.search(each.name) for each in view.effects.below([site]))


def seen(view: View, site: Site) -> bool:
    """Whether it is known that a call exchanges nothing itself: what it runs is in sight, so that its own calls tell (a
    meter of the project), or it is a function of torch that works on one rank.
    """
    if ALONE.search(view.full(site)) or ALONE.search(site.name):
        return True
    if site.name == "compute" and loaded(view, site):
        return True
    if site.name == "gather" and isinstance(constant(next(iter(site.call.args), None)), int):
        return True  # `logits.gather(1, index)`
    owner = view.names.definition(site.call.func, site.scope)
    return owner is not None or view.calls.target(site.call, site.scope) is not None


def loaded(view: View, site: Site) -> bool:
    """Whether a call is of a metric that works on what one process has collected (`evaluate.load("bleu")`)."""
    made = [(call, full) for call, _, full in view.origins.calls_of(site.receiver, site.scope)]
    return bool(made) and all(full in METRICS and keyword(call, "num_process") is None for call, full in made)


def passes_on(caller: Site, site: Site) -> bool:
    """Whether a call exchanges what an evaluation has returned to its caller."""
    if not EXCHANGE.search(site.name) or site.line < caller.line:
        return False
    names = {bind.key for bind in caller.scope.bound(caller.stmt)}
    given = [node for value in (*site.call.args, *(k.value for k in site.call.keywords)) for node in walk(value)]
    return any(node is caller.call or dotted(node) in names for node in given)


def sums(view: View, loop: ast.For, scope: Scope) -> bool:
    """Whether a loop adds up numbers, and the function tells them."""
    within = view.effects.block(loop, scope)
    added = any(adds(stmt) and inside(stmt, loop, scope.module) for stmt in scope.stmts)
    added = added or any(site.name in ("update", "append") and SCORE.search(last(site.receiver)) for site in within)
    if not added and not scored(within, loop, scope):
        return False
    told = any(True for _ in scope.returns()) or any(site.name in TELLS for site in view.effects.below(scope.sites))
    return told and (phased(loop, scope) or not any(view.steps.backwards(site) for site in within))


def adds(stmt: ast.stmt) -> bool:
    """Whether a statement adds to a sum (`total += loss`, `total = total + loss`)."""
    if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.BinOp) and isinstance(stmt.value.op, ast.Add):
        return len(stmt.targets) == 1 and dotted(stmt.value.left) == dotted(stmt.targets[0]) is not None
    return isinstance(stmt, ast.AugAssign)


def scored(within: list[Site], loop: ast.For, scope: Scope) -> bool:
    """Whether lists that a loop fills with predictions are scored after it."""
    lists = {
        dotted(s.receiver) for s in within if s.name in ("append", "extend") and PREDICTED.search(last(s.receiver))
    }
    names = lists - {None}
    end = loop.end_lineno or loop.lineno
    for stmt in scope.stmts if names else ():
        if stmt.lineno > end and isinstance(stmt, ast.Assign) and names & set(map(dotted, walk(stmt.value))):
            names |= {bind.key for bind in scope.bound(stmt)}
    after = [site for site in scope.sites if site.line > end and SCORES.search(site.name)] if names else []
    return any(names & set(map(dotted, walk(site.call))) for site in after)


def held_out(view: View, site: Site) -> bool:
    """Whether a call stands in an evaluating function, in a loop or after one, or is given what an evaluation found."""
    if EVALUATION.search(site.scope.name):
        return True
    if any(
        isinstance(n, ast.For) and any(map(EVALUATION.search, idents(view.kinds.iterated(n.iter, site.scope))))
        for n in loops(site.stmt, site.module)
    ):
        return True
    values = site.call.args[: 2 if "gather" in site.name else 1]  # of those the first is the list that is filled
    given = (name for value in values for name in idents_of(view, value, site))
    return any(map(EVALUATION.search, given))


def idents_of(view: View, value: ast.expr, site: Site) -> Iterator[str]:
    """The names in what a call is given, of the call that made it, and in what that made a tensor of
    (`total = torch.tensor(val_loss)`).
    """
    yield from idents(value)
    for bind, home in view.origins.binds(dotted(value) or "", site.scope, site.line):
        made = bind.value if isinstance(bind.value, ast.Call) else None
        while made is not None and isinstance(made.func, ast.Attribute) and isinstance(made.func.value, ast.Call):
            made = made.func.value  # `torch.tensor(val_loss).to(device)`
        if made is not None:
            yield last(made)
            tensor = view.names.qualify(made.func, home) in MADE
            inside_it = (name for given in made.args for name in idents(given) if tensor)
            yield from (name for name in inside_it if name != "val")  # any value, in a helper


def averages(view: View, site: Site) -> bool:
    """Whether a call brings the ranks' values together and takes their mean."""
    if site.name in ("all_reduce", "allreduce", "reduce") and any(
        last(value) == "AVG" for value in (*site.call.args, *(k.value for k in site.call.keywords))
    ):
        return True  # `ReduceOp.AVG`, of whatever carries it out
    if site.name in ("all_reduce", "reduce") and view.full(site).startswith("torch.distributed"):
        return divided_after(site)
    if site.name in ("all_gather", "gather", "all_gather_object") and view.full(site).startswith("torch.distributed"):
        return mean_after(site)
    if site.name.startswith("all_gather") and gathers(view, view.calls.target(site.call, site.scope)):
        return means_given(site)
    return (
        horovod_mean(view, site)
        or mean_gathered(view, site)
        or any(mean_of(view, function) for function in view.calls.runs(site))
    )


def horovod_mean(view: View, site: Site) -> bool:
    """Whether a call is Horovod's allreduce, which takes the mean unless it is told to sum."""
    if site.name not in ("allreduce", "allreduce_") or not view.full(site).startswith("horovod."):
        return False
    summed = any(last(value) == "Sum" for value in (*site.call.args, *(k.value for k in site.call.keywords)))
    return not summed and constant(argument(site.call, 1, "average")) is not False


def mean_gathered(view: View, site: Site) -> bool:
    """Whether a call is the mean of what a function of the project has gathered (`mean(gather(loss))`)."""
    inner = site.call.args[0] if site.name in ("mean", "fmean") and site.call.args else None
    function = view.calls.target(inner, site.scope) if isinstance(inner, ast.Call) else None
    return gathers(view, function)


def gathers(view: View, function: Scope | None) -> bool:
    """Whether a function of the project gathers what the ranks give it into a list."""
    if function is None:
        return False
    found = [*function.named("all_gather_object"), *function.named("all_gather")]
    joins = JOINS - {"cat"} if any(function.named("loads")) else JOINS  # bytes are joined with what fills them up
    return any(view.full(s).startswith("torch.distributed") for s in found) and not any(
        s.name in joins for s in function.sites
    )


def mean_of(view: View, function: Scope) -> bool:
    """Whether a function is `all_reduce, then divide by the number of ranks`."""
    if len(function.stmts) <= 15 and any(horovod_mean(view, site) for site in function.sites):
        return True
    if len(function.stmts) > 15:
        return False
    if any(view.full(s).startswith("torch.distributed") and mean_after(s) for s in function.named("all_gather")):
        return True
    reduces = [s for s in function.sites if s.name in ("all_reduce", "reduce")]
    if not reduces:
        return False
    return any(last(v) == "AVG" for s in reduces for v in (*s.call.args, *(k.value for k in s.call.keywords))) or any(
        by_ranks(stmt, function) for stmt in function.stmts
    )


RULE = Rule(
    code="LS026",
    name="metrics over uneven shards",
    what=(
        "An evaluation divides its data among the ranks and averages the ranks' means, or takes one rank's shard "
        "for the whole."
    ),
    why=(
        "DistributedSampler pads the last shard with repeated samples, and batches differ in size: the mean of means "
        "is not the mean, and the score changes with the number of GPUs. Without any exchange it is a "
        "part's score."
    ),
    bad="""
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def make(val_data):
    val_sampler = DistributedSampler(val_data, shuffle=False)
    return DataLoader(val_data, batch_size=8, num_workers=2, sampler=val_sampler)

@torch.no_grad()
def validate(model, val_loader, criterion, world_size, device):
    model.eval()
    for x, y in val_loader:
        loss = criterion(model(x.to(device)), y.to(device))
        dist.all_reduce(loss)
        loss /= world_size
    model.train()
""",
    good="""
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def make(val_data):
    val_sampler = DistributedSampler(val_data, shuffle=False)
    return DataLoader(val_data, batch_size=8, num_workers=2, sampler=val_sampler)

@torch.no_grad()
def validate(model, val_loader, criterion, device):
    model.eval()
    total = torch.zeros(2, device=device)
    for x, y in val_loader:
        total[0] += criterion(model(x.to(device)), y.to(device)) * len(x)
        total[1] += len(x)
    dist.all_reduce(total)
    model.train()
    return total[0] / total[1]
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="none",
    remedy="Sum values and counts over all ranks, then divide once",
    moot=frozenset({"pytorch_lightning", "composer", "lockstep", "trl"}),
    note=(
        "Data that the script divides itself counts like a DistributedSampler's (`data[rank::world_size]`, "
        "`indices.split(n)[rank]`, `data.shard(...)`). It is told at the call that averages over the ranks, or at the "
        "loop over the data where nothing is exchanged. What Accelerate or Fabric prepares is a rank's part, too."
    ),
)
