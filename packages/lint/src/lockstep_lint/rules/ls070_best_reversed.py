"""LS070: the best score by the wrong comparison."""

import ast
import math
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import Words, constant, dotted, element_of, idents, last, walk
from lockstep_lint.analysis.rank_names import attributes
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

NEVER = "'{best}' begins at {start}, and nothing is {than}: this never comes out true, so no best model is kept"
HIGHEST = "keeps the highest {name} as the best: compare the other way round"
CONTRARY = "takes the worse score for the best: '{best}' is updated the other way round"
BEST = Words(r"best|(^|_)(min|max|lowest|highest|smallest|largest)(_|$)")
LOSS = Words(r"(^|_)loss(es)?(_|$|\d)|Loss$")
# Scores that are never below zero.
POSITIVE = Words(
    r"(^|_)(acc|accuracy|f1|iou|miou|auc|ppl|perplexity|error|err|rmse|mse|mae|wer|cer|fid|top1|acc1)(_|$|\d)"
)
CRITERION = Words(
    r"^(criterion|loss_?(fn|func|function)|cross_entropy|nll_loss|(CrossEntropy|NLL|MSE|L1)Loss|mse_loss|l1_loss)$"
)
SCORES = Words(
    r"acc|score|f1|iou|auc|reward|return|corr|rocc|plcc|psnr|ssim|bleu|dice|elbo|likelihood|lcc", re.IGNORECASE
)
SAVES = Words(r"^save|_save|save_|checkpoint|ckpt|state_dict", re.IGNORECASE)
INFINITE = {"inf", "Inf", "infty", "Infinity", "PINF", "maxsize"}
FLAG = Words(r"best|better|improve", re.IGNORECASE)
NOT = Words(r"(^|_)(no|not|non|un)_|worse|since", re.IGNORECASE)
SMALLER = (ast.Lt, ast.LtE)
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
    turned = next(contrary(bind, scope, key), None)
    if turned is not None:
        return turned, CONTRARY.format(best=key)
    compare, name, way = next(tests(bind, scope, key), (None, "", ast.Eq))
    found = starts(view, scope, key) if compare is not None else []
    if compare is None or not found:
        return None, ""
    if way in SMALLER:
        if all(value <= -LARGE for value in found):
            return compare, NEVER.format(best=key, start="minus infinity", than="smaller")
        never = way is ast.Lt and set(found) == {0} and POSITIVE.search(last_part(name))
        return (compare, NEVER.format(best=key, start="0", than="smaller")) if never else (None, "")
    if all(value >= LARGE for value in found):
        return compare, NEVER.format(best=key, start="infinity", than="larger")
    losses = LOSS.search(last_part(name)) and LOSS.search(last_part(key))
    if losses and max(found) <= 0 and saves(bind, scope) and is_loss(view, bind.value, scope):
        return compare, HIGHEST.format(name=last_part(name))
    return None, ""


def contrary(bind: Bind, scope: Scope, key: str) -> Iterator[ast.Compare]:
    """Yield the flags that take the smaller score for the best, where the larger is kept, or the other way round."""
    call = bind.value
    if not isinstance(call, ast.Call) or last(call) not in ("max", "min") or len(call.args) != 2:
        return
    scores = [each for each in call.args if dotted(each) != key]
    for flag, binds in scope.binds.items():
        if len(scores) != 1 or not FLAG.search(flag) or NOT.search(flag):
            continue
        for each in binds:
            compare = each.value
            if isinstance(compare, ast.Compare) and not each.path and each.stmt.lineno < bind.stmt.lineno:
                found = against(compare, scores[0], key, True)
                if found is not None and (found[2] in SMALLER) is (last(call) == "max"):
                    yield compare


def last_part(key: str) -> str:
    """The last part of a name, in small letters."""
    return key.rpartition(".")[2]


def tests(bind: Bind, scope: Scope, key: str) -> Iterator[Test]:
    """Yield the comparisons that must come out so for a binding, as the score against the best."""
    for guard in guards(bind.stmt, scope.module):
        test, when = guard.test, guard.when
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, when = test.operand, not when
        joins = ast.And if when else ast.Or
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, joins) else [test]:
            found = against(part, bind.value, key, when)
            yield from () if found is None else [found]


def against(part: ast.expr, value: ast.expr | None, key: str, when: bool) -> Test | None:
    """Return a comparison of a score with the best, as it comes out."""
    if not isinstance(part, ast.Compare) or len(part.ops) != 1 or type(part.ops[0]) not in OPPOSITE:
        return None
    way = type(part.ops[0]) if when else OPPOSITE[type(part.ops[0])]
    score, best = part.left, part.comparators[0]
    if dotted(score) == key:
        score, best, way = best, score, MIRRORED[way]
    same = dotted(best) == key and value is not None and ast.dump(score) == ast.dump(value)
    return (part, dotted(score) or last(score), way) if same else None


def starts(view: View, scope: Scope, key: str) -> list[float]:
    """Return the numbers that a best score begins with; none where it may get any other value."""
    found: list[float] = []
    head, _, name = key.rpartition(".")
    if head:
        pairs = [pair for member in view.project.family(scope.module) for pair in attributes(member).get(name, ())]
    else:
        pairs = [(bind, scope) for bind in scope.binds[key]]
    for bind, home in pairs:
        value = next(element_of(bind.value, bind.path), None)
        if value is None or bind.how != "assign":
            return []
        if any(True for _ in tests(bind, home, bind.key)):
            continue
        first = number(value)
        if first is None:
            return []
        found.append(first)
    return found


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
            negative = isinstance(node, ast.UnaryOp | ast.BinOp) and isinstance(node.op, ast.USub | ast.Sub)
            if negative or SCORES.search(dotted(node) or ""):
                return False
            sure = sure or (isinstance(node, ast.Call) and CRITERION.search(last(node)))
            queue += before(view, node, home)
    return sure and len(seen) < MAX_NODES


def before(view: View, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield what a name was given, in its function or by the calls of that, and what a call of the project returns."""
    if isinstance(node, ast.Call) and not CRITERION.search(last(node)):
        target = view.calls.target(node, scope)
        yield from ((value, target) for value in target.returns()) if target is not None else ()
    key = dotted(node)
    for bind in scope.binds.get(key, ()) if key is not None else ():
        target = view.calls.target(bind.value, scope) if bind.path and isinstance(bind.value, ast.Call) else None
        if target is not None:
            yield from ((part, target) for value in target.returns() for part in element_of(value, bind.path))
        elif bind.value is not None and bind.how != "for":
            yield bind.value, scope
    if isinstance(node, ast.Name) and node.id in scope.params:
        given = ((passed(site, scope, node.id), site.scope) for site in view.calls.callers(scope)[:4])
        yield from ((value, home) for value, home in given if value is not None)


RULE = Rule(
    code="LS070",
    name="best by the wrong comparison",
    what=(
        "The best score so far is replaced by a worse one, or by none, as the comparison or its first value is the "
        "wrong way round."
    ),
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
        "A name alone says little: what is called a loss is sometimes a score. The highest loss is told where the "
        "value comes from a criterion alone; else a comparison that can never come out true, and a flag at "
        "odds with the update (`is_best = acc < best`, then `best = max(acc, best)`)."
    ),
)
