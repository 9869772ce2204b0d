"""Which samplers divide held-out data: by what their statements, the tests around them or their callers say."""

import ast

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import Guard, guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, idents, keyword, last
from lockstep_lint.analysis.view import View

__all__ = ["serves_both", "shards"]

MAX_CALLERS = 20


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
