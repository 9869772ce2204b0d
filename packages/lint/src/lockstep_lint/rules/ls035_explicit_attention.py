"""LS035: explicit attention where scaled_dot_product_attention serves."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import SEQUENCES, argument, base, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
# Methods of a mask that leave it the mask that it is.
SHAPES = {"view", "unsqueeze", "squeeze", "to", "bool", "expand", "type", "type_as", "contiguous", "float", "cuda"}
SHAPES |= {"reshape", "repeat", "logical_not", "detach"}
TURNS = {"transpose", "permute", "mT", "T", "swapaxes", "einsum", "rearrange", "t", "transpose_key"}
# Functions that give the weights, or a copy of them.
SAME = {"dropout", "attn_dropout", "attn_drop", "detach", "clone", "cpu", "numpy", "float", "mean", "sum", "view", "to"}


def check(view: View) -> Iterator[Found]:
    """Look for softmax of a product of queries and keys, multiplied with values."""
    for site in view.sites("scaled_dot_product_attention"):
        mask = argument(site.call, 3, "attn_mask")
        if mask is not None and keyword(site.call, "is_causal") is None and causal(view, mask, site.scope, 0):
            yield at(site, "a written causal mask keeps the fast kernel away: pass is_causal=True instead of attn_mask")
    if "scaled_dot_product_attention" in view.module.text:
        return  # the explicit form is the fallback
    told: set[Scope] = set()
    for site in view.sites("softmax"):
        scope = site.scope
        if scope.kind == "function" and scope not in told and of_scores(site) and is_weights(site):
            told.add(scope)
            yield at(site, "writes out the attention matrix: use F.scaled_dot_product_attention")


def causal(view: View, node: ast.expr, scope: Scope, depth: int) -> bool:
    """Check whether a mask certainly is the lower triangle and nothing else."""
    while True:
        if isinstance(node, ast.Subscript):
            if any(isinstance(part, ast.Slice) and part.lower is not None for part in walk(node.slice)):
                return False  # rows of the triangle, for a cache of keys
            node = node.value
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            node = node.operand
        elif isinstance(node, ast.Compare) and constant(node.comparators[0]) in (0, 1):
            node = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
            node = node.func.value
        else:
            break
    if isinstance(node, ast.Call):
        if last(node) == "generate_square_subsequent_mask":
            return True
        full = view.names.qualify(node.func, scope)
        value = node.args[0] if full.startswith("torch.") and node.args else getattr(node.func, "value", None)
        made = isinstance(value, ast.Call) and last(value) in ("ones", "full", "ones_like", "full_like")
        shift = argument(node, 1 if full.startswith("torch.") else 0, "diagonal")
        return made and (last(node), constant(shift) or 0) in (("tril", 0), ("triu", 1))
    key = dotted(node)
    if key is None or depth > 3:
        return False
    binds = [(b.value, home) for b, home in view.origins.binds(key, scope, node.lineno) if b.how == "assign"]
    binds += buffers(key, scope)
    return bool(binds) and all(v is not None and causal(view, v, home, depth + 1) for v, home in binds)


def buffers(key: str, scope: Scope) -> list[tuple[ast.expr | None, Scope]]:
    """Return what a class registers as a buffer of that name."""
    methods = scope.owner.defs.values() if scope.owner is not None and key.startswith("self.") else ()
    sites = [s for method in methods for s in method.named("register_buffer")]
    return [(s.call.args[1], s.scope) for s in sites if len(s.call.args) > 1 and constant(s.call.args[0]) == key[5:]]


def of_scores(site: Site) -> bool:
    """Check whether a softmax is of a product with a transposed factor, also by way of names."""
    values = [*site.call.args[:1], *([site.receiver] if site.receiver is not None else [])]
    queue, seen = list[ast.AST](values), set[str]()
    while queue and len(seen) < 30:
        for node in walk(queue.pop()):
            if is_product(node) and any(
                last(part) in TURNS or getattr(part, "attr", "") in TURNS for part in walk(node)
            ):
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                binds = site.scope.binds.get(node.id, [])
                queue += [b.value for b in binds if b.value is not None and b.stmt.lineno <= site.line]
    return False


def is_product(node: ast.AST) -> bool:
    """Check whether an expression multiplies matrices."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and last(node.func) in PRODUCTS


def is_weights(site: Site) -> bool:
    """Check whether what a softmax gives is multiplied with values, and is given to nothing else that needs it."""
    scope = site.scope
    names = {bind.key for bind in scope.bound(site.stmt)}
    multiplied = False
    for stmt in sorted(scope.stmts, key=lambda each: each.lineno):
        if stmt.lineno < site.line or isinstance(stmt, ast.If | ast.For | ast.With | ast.While):
            continue
        nodes = list(walk(stmt))
        held = [node for node in nodes if is_product(node) and (names & names_in(node) or site.call in walk(node))]
        multiplied = multiplied or bool(held)
        if stmt is site.stmt:
            continue
        if keeps(stmt, names) or any(name.startswith("self.") for name in names):
            return False
        for bind in scope.bound(stmt):
            if bind.value is not None and names & names_in(bind.value):
                names = names - {bind.key} if held else names | {bind.key}
    return multiplied


def keeps(stmt: ast.stmt, names: set[str]) -> bool:
    """Check whether a statement returns or stores the weights themselves, which the fused kernel never makes."""
    value = getattr(stmt, "value", None)
    if isinstance(stmt, ast.Return):
        parts = value.elts if isinstance(value, SEQUENCES) else [value]
        parts += value.values if isinstance(value, ast.Dict) else []
        parts += [item.value for item in value.keywords] if isinstance(value, ast.Call) else []
        return any(is_same(part, names) for part in parts)
    if isinstance(stmt, ast.Assign):
        stored = any(isinstance(t, ast.Subscript | ast.Attribute) and last(base(t)) not in names for t in stmt.targets)
        return stored and is_same(value, names)
    call = value if isinstance(stmt, ast.Expr) and isinstance(value, ast.Call) else None
    given = [*call.args, *(item.value for item in call.keywords)] if call is not None else []
    return not last(value).endswith("_") and any(is_same(part, names) for part in given)


def is_same(value: ast.expr | None, names: set[str]) -> bool:
    """Check whether a value is the weights, or a copy of them (`weights.detach().cpu()`)."""
    while isinstance(value, ast.Call | ast.Subscript | ast.Attribute) and dotted(value) not in names:
        if isinstance(value, ast.Call) and last(value) not in SAME:
            return False
        value = value.func if isinstance(value, ast.Call) else value.value
    return dotted(value) in names


def names_in(node: ast.AST) -> set[str | None]:
    """Return the names in an expression."""
    return {part.id for part in walk(node) if isinstance(part, ast.Name)}


RULE = Rule(
    code="LS035",
    name="explicit attention",
    what=(
        "Attention is computed as softmax(q @ k.transpose()) @ v, and its weights are not needed otherwise; or "
        "scaled_dot_product_attention is given a causal mask that is written out."
    ),
    why=(
        "The matrix of all pairs is written to memory and read back several times. F.scaled_dot_product_attention"
        " runs a fused kernel: a fraction of the memory, several times as fast. With a mask of its own it cannot take "
        "flash attention, which is_causal=True allows."
    ),
    bad="""
import math
import torch

def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v
""",
    good="""
import torch
import torch.nn.functional as F

def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
""",
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Use torch.nn.functional.scaled_dot_product_attention",
    note="It is told at the first such softmax of a function, or at the attention's call that is given the mask.",
)
