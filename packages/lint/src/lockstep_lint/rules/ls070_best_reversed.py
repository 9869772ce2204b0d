"""LS070: the best score by the wrong comparison."""

import ast
import math
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, walk
from lockstep_lint.analysis.rank_names import attributes
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

NEVER = "'{best}' begins at {start}, and nothing is {than}: this never comes out true, so no best model is kept"
HIGHEST = "keeps the highest {name} as the best: compare the other way round"
BEST = Words(r"best|(^|_)(min|max|lowest|highest|smallest|largest)(_|$)")
LOSS = Words(r"(^|_)loss(es)?(_|$|\d)|Loss$")
# Scores that are never below zero.
POSITIVE = Words(
    r"(^|_)(acc|accuracy|f1|iou|miou|auc|ppl|perplexity|error|err|rmse|mse|mae|wer|cer|fid|top1|acc1)(_|$|\d)"
)
CRITERION = Words(
    r"^(criterion|loss_?(fn|func|function)|cross_entropy|nll_loss|(CrossEntropy|NLL|MSE|L1)Loss|mse_loss|l1_loss)$"
)
SCORES = Words(r"acc|score|f1|iou|auc|reward|return|corr|rocc|plcc|psnr|ssim|bleu|dice|elbo|likelihood|lcc", 2)
SAVES = Words(r"^save|_save|save_|checkpoint|ckpt|state_dict", 2)
INFINITE = {"inf", "Inf", "infty", "Infinity", "PINF", "maxsize"}
LARGE = 1e8
MAX_NODES = 400
OPPOSITE = {ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Lt: ast.GtE, ast.LtE: ast.Gt}
MIRRORED = {ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Lt: ast.Gt, ast.LtE: ast.GtE}
Test = tuple[ast.Compare, str, type[ast.cmpop]]


def check(view: View) -> Iterator[Found]:
    """Look at each score that becomes the best under a comparison with the best so far."""
    text = view.module.text
    if not any(word in text for word in ("best", "min", "max", "lowest", "highest", "smallest", "largest")):
        return
    told: set[ast.expr] = set()
    for scope in view.scopes:
        for key, binds in scope.binds.items():
            if BEST.search(key.rpartition(".")[2]) and key not in scope.params and scope.kind != "class":
                for bind in binds:
                    compare, message = judged(view, scope, key, bind)
                    if compare is not None and compare not in told:
                        told.add(compare)
                        yield Found(compare, message)


def judged(view: View, scope: Scope, key: str, bind: Bind) -> tuple[ast.Compare | None, str]:
    """Return the comparison by which a binding keeps the wrong score, and what is wrong with it."""
    if bind.how != "assign" or bind.path or bind.value is None:
        return None, ""
    compare, name, way = next(tests(bind, scope, key), (None, "", ast.Eq))
    if compare is None:
        return None, ""
    found = starts(view, scope, key)
    larger = way in (ast.Gt, ast.GtE)
    bound = math.inf if larger else -math.inf
    if found and all(value == bound or (larger and value >= LARGE) or (not larger and value <= -LARGE) for value in found):
        return compare, NEVER.format(best=key, start="infinity", than="larger") if larger else NEVER.format(
            best=key, start="minus infinity", than="smaller"
        )
    if found and way is ast.Lt and set(found) == {0} and POSITIVE.search(last_part(name)):
        return compare, NEVER.format(best=key, start="0", than="smaller")
    losses = LOSS.search(last_part(name)) and LOSS.search(last_part(key))
    if losses and found and larger and max(found) <= 0 and saves(bind, scope) and is_loss(view, bind.value, scope):
        return compare, HIGHEST.format(name=last_part(name))
    return None, ""


def last_part(key: str) -> str:
    """The last part of a name, in small letters."""
    return key.rpartition(".")[2]


def tests(bind: Bind, scope: Scope, key: str) -> Iterator[Test]:
    """Yield the comparisons that must come out so for a binding, as the score against the best."""
    for guard in guards(bind.stmt, scope.module):
        joins = ast.And if guard.when else ast.Or
        test = guard.test
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, joins) else [test]
        for part in parts:
            if not isinstance(part, ast.Compare) or len(part.ops) != 1 or type(part.ops[0]) not in OPPOSITE:
                continue
            way = type(part.ops[0]) if guard.when else OPPOSITE[type(part.ops[0])]
            score, best = part.left, part.comparators[0]
            if dotted(score) == key:
                score, best, way = best, score, MIRRORED[way]
            if dotted(best) == key and bind.value is not None and ast.dump(score) == ast.dump(bind.value):
                yield part, dotted(score) or last(score), way


def starts(view: View, scope: Scope, key: str) -> list[float]:
    """Return the numbers that a best score begins with; none where it may get any other value."""
    found: list[float] = []
    head, _, name = key.rpartition(".")
    if head:
        pairs = [pair for member in view.project.family(scope.module) for pair in attributes(member).get(name, ())]
    else:
        pairs = [(bind, scope) for bind in scope.binds[key]]
    for bind, home in pairs:
        value = part_of(bind)
        if value is None or bind.how != "assign":
            return []
        if any(True for _ in tests(bind, home, bind.key)):
            continue
        first = number(value)
        if first is None:
            return []
        found.append(first)
    return found


def part_of(bind: Bind) -> ast.expr | None:
    """The value of a name, also in a tuple that is written out."""
    value = bind.value
    for place in bind.path:
        if not isinstance(value, ast.Tuple | ast.List) or place >= len(value.elts):
            return None
        value = value.elts[place]
    return value


def number(value: ast.expr) -> float | None:
    """The number that an expression is: a literal, or an infinity."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        inner = number(value.operand)
        return None if inner is None else -inner
    literal = constant(value)
    if isinstance(literal, int | float):
        return float(literal)
    if isinstance(value, ast.Call) and last(value) in ("float", "tensor") and len(value.args) == 1:
        text = constant(value.args[0])
        signed = {"inf": math.inf, "+inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
        return signed.get(text.lower()) if isinstance(text, str) else number(value.args[0])
    if isinstance(value, ast.Attribute) and last(value) in INFINITE:
        return math.inf
    return -math.inf if isinstance(value, ast.Attribute) and last(value) == "NINF" else None


def saves(bind: Bind, scope: Scope) -> bool:
    """Whether a model is saved in the arm in which a score becomes the best."""
    block, _ = scope.module.up.get(bind.stmt, (None, ""))
    return block is not None and any(SAVES.search(name) for name in idents(block))


def is_loss(view: View, value: ast.expr, scope: Scope) -> bool:
    """Whether a value is certainly worked out from a criterion alone, as it is."""
    queue, seen, sure = [(value, scope)], set[ast.AST](), False
    while queue and len(seen) < MAX_NODES:
        current, home = queue.pop()
        for node in walk(current):
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, ast.USub | ast.Sub) or (
                isinstance(node, ast.UnaryOp | ast.BinOp) and isinstance(node.op, ast.USub | ast.Sub)
            ):
                return False
            if isinstance(node, ast.Call) and CRITERION.search(last(node)):
                sure = True
            key = dotted(node)
            if key is None:
                continue
            if SCORES.search(key):
                return False
            for bind in home.binds.get(key, ()):
                if bind.value is None or bind.how == "for":
                    continue
                if bind.path and isinstance(bind.value, ast.Call):
                    target = view.calls.target(bind.value, home)
                    pairs = [] if target is None else [(v, target) for v in target.returns()]
                    queue += [
                        (v.elts[bind.path[0]], where)
                        for v, where in pairs
                        if isinstance(v, ast.Tuple) and bind.path[0] < len(v.elts)
                    ]
                else:
                    queue.append((bind.value, home))
            if isinstance(node, ast.Name) and node.id in home.params:
                queue += [
                    (given, site.scope)
                    for site in view.calls.callers(home)[:4]
                    if (given := passed(site, home, node.id)) is not None
                ]
        if isinstance(current, ast.Call) and not CRITERION.search(last(current)):
            target = view.calls.target(current, home)
            queue += [(v, target) for v in target.returns()] if target is not None else []
    return sure and len(seen) < MAX_NODES


RULE = Rule(
    code="LS070",
    name="best by the wrong comparison",
    what="The best score so far is replaced by a worse one, or by none, as the comparison or its first value is reversed.",
    why=(
        "The file of the best model is then that of the worst one, or is never written. Nothing fails: the run ends, "
        "and what it leaves is the wrong model."
    ),
    bad="""
import torch

def train(model, optimizer, loader, val_loader, criterion, evaluate, epochs):
    best_acc = float("inf")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        acc = evaluate(model, val_loader)
        if acc > best_acc:
            best_acc = acc
            torch.save(model.state_dict(), "best.pt")
""",
    good="""
import torch

def train(model, optimizer, loader, val_loader, criterion, evaluate, epochs):
    best_acc = float("-inf")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        acc = evaluate(model, val_loader)
        if acc > best_acc:
            best_acc = acc
            torch.save(model.state_dict(), "best.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Keep the larger score and the smaller loss; begin at the end that every score passes",
    note=(
        "A name alone says little: what is called a loss is sometimes a score. The highest loss is told where the value "
        "comes from a criterion of torch alone; otherwise only a comparison that can never come out true."
    ),
)
