"""LS035: explicit attention where scaled_dot_product_attention serves."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, idents, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
TURNS = {"transpose", "permute", "mT", "T", "swapaxes", "einsum", "rearrange", "t"}
# Methods that leave a mask what it is.
SHAPES = {"view", "unsqueeze", "to", "bool", "expand"}


def check(view: View) -> Iterator[Found]:
    """Find attention written out as softmax and products, and explicit causal masks."""
    for site in view.sites("scaled_dot_product_attention"):
        mask = argument(site.call, 3, "attn_mask")
        if mask is not None and keyword(site.call, "is_causal") is None and causal(view, mask, site.scope):
            yield at(site, "a written causal mask keeps the fast kernel away: pass is_causal=True instead of attn_mask")
    if "scaled_dot_product_attention" in view.module.text:
        return  # the explicit form is the fallback
    for scope in {site.scope: None for site in view.sites("softmax")}:
        found = [site for site in scope.named("softmax") if scope.kind == "function" and is_attention(site)]
        if found:
            yield at(found[0], "writes out the attention matrix: use F.scaled_dot_product_attention")


def causal(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether a mask certainly is the lower triangle and nothing else (`torch.ones(n, n).tril()`)."""
    values = [origin.node for origin in view.origins.of(node, scope)]
    return bool(values) and all(is_triangle(value) for value in values)


def is_triangle(node: ast.expr) -> bool:
    """Check whether an expression makes a lower triangle."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
        node = node.func.value
    if isinstance(node, ast.Compare) and constant(node.comparators[0]) == 0:
        node = node.left
    if not isinstance(node, ast.Call):
        return False
    filled = any(isinstance(part, ast.Call) and last(part) in ("ones", "full") for part in walk(node))
    shift = keyword(node, "diagonal") or (
        node.args[-1] if isinstance(constant(node.args[-1] if node.args else None), int) else None
    )
    return last(node) == "generate_square_subsequent_mask" or (
        filled and (last(node), constant(shift) or 0) in (("tril", 0), ("triu", 1))
    )


def is_attention(site: Site) -> bool:
    """Check whether a softmax of a transposed product is multiplied, and never returned."""
    scope = site.scope
    names = {bind.key for bind in scope.bound(site.stmt)}
    multiplied = any(is_product(node) and site.call in walk(node) for node in walk(site.stmt))
    names = names if not multiplied else set()
    for stmt in scope.stmts:
        value = getattr(stmt, "value", None)
        if stmt.lineno <= site.line or value is None or not names & set(idents(value)):
            continue
        held = {part for node in walk(stmt) if is_product(node) for part in walk(node)}
        rest = {part.id for part in walk(stmt) if isinstance(part, ast.Name) and part not in held}
        product = bool(names & {part.id for part in held if isinstance(part, ast.Name)})
        plain = isinstance(stmt, ast.Assign) and all(isinstance(target, ast.Name) for target in stmt.targets)
        if not plain and (not product or names & rest):
            return False  # the weights themselves are needed, which the fused kernel never makes
        multiplied = multiplied or product
        names |= {bind.key for bind in scope.bound(stmt)} if not product else set()
    return multiplied and not any(name.startswith("self.") for name in names) and of_scores(site)


def of_scores(site: Site) -> bool:
    """Check whether a softmax's input is a product with a transpose, also by names."""
    queue, seen = list[ast.AST]([*site.call.args[:1], *filter(None, [site.receiver])]), set[str]()
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


RULE = Rule("LS035", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe")
