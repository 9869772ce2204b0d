"""LS035: explicit attention where scaled_dot_product_attention serves."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.nodes import dotted, last, walk
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
TURNS = {"transpose", "permute", "mT", "T", "swapaxes", "einsum", "rearrange", "t", "transpose_key"}


def check(view: View) -> Iterator[Found]:
    """Looks for softmax of a product of queries and keys, multiplied with values."""
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
                and not returned(site, scope)
            ):
                yield at(site, "writes out the attention matrix: use F.scaled_dot_product_attention")
                break


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


def returned(site: Site, scope: Scope) -> bool:
    """Whether the function gives the weights away, which the fused kernel never makes."""
    names = {bind.key for bind in scope.bound(site.stmt)}
    for binds in scope.binds.values():
        for bind in binds:
            if (
                bind.value is not None
                and bind.stmt.lineno > site.line
                and last(bind.value) in ("dropout", "attn_dropout", "attn_drop")
            ) and any(dotted(n) in names for n in walk(bind.value) if isinstance(n, ast.Name)):
                names.add(bind.key)
    for value in scope.returns():
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        if any(dotted(part) in names for part in parts):
            return True
    return any(name.startswith("self.") for name in names)


RULE = Rule(
    code="LS035",
    name="explicit attention",
    what="Attention is computed as softmax(q @ k.transpose()) @ v, and its weights are not needed otherwise.",
    why=(
        "The matrix of all pairs is written to memory and read back several times. F.scaled_dot_product_attention"
        " runs a fused kernel: a fraction of the memory, several times as fast."
    ),
    bad=(
        """
import math
import torch

def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v
""",
    ),
    good=(
        """
import torch
import torch.nn.functional as F

def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
""",
        """
import math
import torch

def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v, weights
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Use torch.nn.functional.scaled_dot_product_attention",
)
