"""Options that a file writes out itself (`class Arguments: local_rank = -1`), and what they keep from being run."""

import ast

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant

__all__ = ["never"]

# What may set an option from outside of the class.
SETS = ("setattr(", "vars(", "__dict__")


def never(calls: Calls, site: Site) -> bool:
    """Whether options that are written out keep a call from ever being made."""
    return any(outcome(calls, guard.test, site.scope) is (not guard.when) for guard in guards(site.stmt, site.module))


def outcome(calls: Calls, test: ast.expr, scope: Scope) -> bool | None:
    """How a test comes out, where written options decide it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = outcome(calls, test.operand, scope)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        ends = isinstance(test.op, ast.Or)
        found = [outcome(calls, value, scope) for value in test.values]
        return ends if ends in found else None if None in found else not ends
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        left, right = written(calls, test.left, scope), constant(test.comparators[0])
        return None if left is None or right is None else (left == right) is isinstance(test.ops[0], ast.Eq)
    value = written(calls, test, scope)
    return None if value is None else bool(value)


def written(calls: Calls, node: ast.expr, scope: Scope) -> object:
    """The literal that an option of an object always is: its class, of this file, is all that gives it one."""
    module = scope.module
    if not isinstance(node, ast.Attribute) or any(word in module.text for word in SETS):
        return None
    owner = calls.class_of(node.value, scope)
    if owner is None or owner.module is not module or owner.decorators or any(calls.names.bases_of(owner)):
        return None
    own, name = (owner, *owner.defs.values()), node.attr
    binds = [
        (place, bind)
        for place in module.scopes
        for key, given in place.binds.items()
        if key.rpartition(".")[2] == name and (place is owner or "." in key)
        for bind in given
    ]
    values = [constant(bind.value) if place in own and not bind.path else None for place, bind in binds]
    return values[0] if len(values) == 1 else None
