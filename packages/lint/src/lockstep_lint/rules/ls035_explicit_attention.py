"""LS035: explicit attention where scaled_dot_product_attention serves."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, base, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
# Methods of a mask that leave it the mask that it is.
SHAPES = {"view", "unsqueeze", "squeeze", "to", "bool", "expand", "type", "type_as", "contiguous", "float", "cuda"}
SHAPES |= {"reshape", "repeat", "logical_not", "detach"}
# Methods that give the weights on.
COPIES = ("detach", "clone", "cpu", "numpy", "float", "mean", "sum", "squeeze", "view", "reshape", "tolist")
TURNS = {"transpose", "permute", "mT", "T", "swapaxes", "einsum", "rearrange", "t", "transpose_key"}


def check(view: View) -> Iterator[Found]:
    """Looks for softmax of a product of queries and keys, multiplied with values."""
    for site in view.sites("scaled_dot_product_attention"):
        mask = argument(site.call, 3, "attn_mask")
        if mask is not None and keyword(site.call, "is_causal") is None and causal(view, mask, site.scope, 0):
            yield at(site, "a written causal mask keeps the fast kernel away: pass is_causal=True instead of attn_mask")
    if "scaled_dot_product_attention" in view.module.text:
        return  # the explicit form is the fallback
    for scope in view.scopes:
        if scope.kind != "function":
            continue
        for site in scope.sites:
            if (
                site.name == "softmax"
                and from_product(site, scope)
                and into_product(site, scope)
                and not kept_for_others(site, scope)
            ):
                yield at(site, "writes out the attention matrix: use F.scaled_dot_product_attention")
                break


def causal(view: View, node: ast.expr, scope: Scope, depth: int) -> bool:
    """Whether a mask certainly is the lower triangle and nothing else."""
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
    """What a class registers as a buffer of that name."""
    methods = scope.owner.defs.values() if scope.owner is not None and key.startswith("self.") else ()
    sites = [s for method in methods for s in method.named("register_buffer")]
    return [(s.call.args[1], s.scope) for s in sites if len(s.call.args) > 1 and constant(s.call.args[0]) == key[5:]]


def from_product(site: Site, scope: Scope) -> bool:
    """Whether the scores come from a product with a transposed factor."""
    value = site.call.args[0] if site.call.args else None
    if site.receiver is not None and dotted(site.receiver) not in (
        "F",
        "torch",
        "nn.functional",
        "torch.nn.functional",
        "self",
    ):
        value = site.receiver
    return value is not None and product(value, scope, site.line, 0)


def product(value: ast.expr, scope: Scope, line: int, depth: int) -> bool:
    """Whether an expression, or what its names were given, is a product with a transposed factor."""
    for node in walk(value):
        if is_product(node) and any(last(part) in TURNS or getattr(part, "attr", "") in TURNS for part in walk(node)):
            return True
    if depth > 4:
        return False
    for node in walk(value):
        key = dotted(node) if isinstance(node, ast.Name) else None
        for bind in scope.binds.get(key or "", []):
            if (
                bind.value is not None
                and bind.stmt.lineno <= line
                and bind.value is not value
                and product(bind.value, scope, bind.stmt.lineno - 1, depth + 1)
            ):
                return True
    return False


def is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and last(node.func) in PRODUCTS


def into_product(site: Site, scope: Scope) -> bool:
    """Whether the weights go into another product, through names and dropout."""
    names = {bind.key for bind in scope.bound(site.stmt)}
    for _ in range(4):
        for binds in scope.binds.values():
            for bind in binds:
                if (
                    bind.value is not None
                    and bind.stmt.lineno >= site.line
                    and not any(is_product(n) for n in walk(bind.value))
                ) and any(dotted(n) in names for n in walk(bind.value) if isinstance(n, ast.Name)):
                    names.add(bind.key)
    for stmt in scope.stmts:
        if stmt.lineno < site.line:
            continue
        for node in walk(stmt) if not isinstance(stmt, ast.If | ast.For | ast.With | ast.While) else ():
            if is_product(node) and (
                any(dotted(n) in names for n in walk(node) if isinstance(n, ast.Name))
                or any(n is site.call for n in walk(node))
            ):
                return True
    return False


def kept_for_others(site: Site, scope: Scope) -> bool:
    """Whether the function gives the weights away or keeps them, which the fused kernel never makes."""
    names, stmts = {bind.key for bind in scope.bound(site.stmt)}, {site.stmt}
    later = (bind for binds in scope.binds.values() for bind in binds if bind.stmt.lineno > site.line)
    for bind in sorted(later, key=lambda bind: bind.stmt.lineno):
        if bind.value is None or not any(dotted(n) in names for n in walk(bind.value) if isinstance(n, ast.Name)):
            continue
        if last(bind.value) in ("dropout", "attn_dropout", "attn_drop") or whole(bind.value, names):
            names.add(bind.key)
            stmts.add(bind.stmt)
    if any(name.startswith("self.") for name in names):
        return True
    after = (stmt for stmt in scope.stmts if stmt.lineno >= site.line and isinstance(stmt, ast.Assign | ast.Expr))
    given = [(stmt, part) for stmt in scope.stmts if isinstance(stmt, ast.Return) for part in parts(stmt.value)]
    still = (part for stmt, part in given if not anew(part, stmt, stmts, scope))
    return any(whole(part, names) for part in still) or any(stores(stmt, names) for stmt in after)


def anew(value: ast.expr, use: ast.stmt, stmts: set[ast.stmt], scope: Scope) -> bool:
    """Whether the name that a value is made of certainly holds something else than weights where it is used, which only
    some statements give it (`weights = weights @ values; return weights`).
    """
    found = [bind.stmt for bind in scope.binds.get(dotted(base(value)) or "", []) if bind.stmt.lineno < use.lineno]
    around = {stmt for stmt, _ in above(use, scope.module)}
    sure = bool(found) and around.issuperset(stmt for stmt, _ in above(found[-1], scope.module))
    return sure and found[-1] not in stmts


def parts(value: ast.expr | None) -> list[ast.expr]:
    """What is given away with a value: the elements of a tuple, a list or a dictionary, what an object is made of."""
    if value is None:
        return []
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts
    if isinstance(value, ast.Dict):
        return value.values
    if isinstance(value, ast.Call) and value.keywords and not is_product(value):
        return [value, *(item.value for item in value.keywords)]  # Output(hidden, attentions=weights)
    return [value]


def stores(stmt: ast.Assign | ast.Expr, names: set[str]) -> bool:
    """Whether a statement puts the weights into a list, a table or an object, or hands them to something for that alone
    (`maps[i] = weights`, `self.maps.append(weights)`, `self.save(weights)`).
    """
    if isinstance(stmt, ast.Assign):
        places = [target for target in stmt.targets if isinstance(target, ast.Subscript | ast.Attribute)]
        own = any(dotted(base(place)) in names for place in places)
        return bool(places) and not own and any(whole(part, names) for part in parts(stmt.value))
    call = stmt.value
    if not isinstance(call, ast.Call) or last(call).endswith("_") or keyword(call, "inplace") is not None:
        return False  # changes them in their place
    given = [*call.args, *(item.value for item in call.keywords)]
    return any(whole(part, names) for item in given for part in parts(item))


def whole(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is the weights, or a copy of them (`weights.detach().cpu()`)."""
    while True:
        if isinstance(value, ast.Subscript) or (isinstance(value, ast.Attribute) and value.attr == "data"):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in COPIES:
            value = value.func.value
        else:
            return dotted(value) in names


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
