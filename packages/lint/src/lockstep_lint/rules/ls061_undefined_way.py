"""LS061: a name that one arm of a test defines, and the other leaves undefined."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.flow import Fact, Way, gaps
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import constant, dotted, idents
from lockstep_lint.analysis.origins import default
from lockstep_lint.analysis.rank_names import attributes
from lockstep_lint.analysis.reach import ends_run
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule
from lockstep_lint.rules.ls060_undefined import BUILTIN, is_notebook

__all__ = ["RULE"]

MAX_CALLERS = 20


def check(view: View) -> Iterator[Found]:
    """Looks for names that are read where a test has come out so that nothing has given them a value."""
    if is_notebook(view.module):
        return
    for scope in view.scopes:
        for read in gaps(scope, view.calls):
            hidden = scope.kind == "module" and (read.name in BUILTIN or scope.module.stars)
            if read.never or hidden or not ends_run(view, read.stmt, scope):
                continue
            for way in read.ways:
                if not way:
                    yield Found(read.node, f"'{read.name}' gets its value from a handler of exceptions alone")
                    break
                fact = cause(view, way)
                if fact is not None and fact.node is not None:
                    text = ast.unparse(fact.node)
                    says = "is true" if fact.holds else "is not true"
                    yield Found(read.node, f"'{read.name}' has no value where `{text}` {says}: a NameError here")
                    break


def cause(view: View, way: Way) -> Fact | None:
    """Return the one test that leads past all values of a name, if nothing after it depends on it."""
    tests = view.ranks.tests
    sides = [tests.test(fact.node, fact.scope, fact.holds) for fact in way if fact.node is not None]
    if len(sides) < len(way) or any(side < 0 for side in sides):
        return None
    plain = [fact for fact, side in zip(way, sides, strict=True) if not side]
    causes = [fact for fact in way if fact.cause]
    fact = causes[0] if len(causes) == 1 and causes[0] in plain else None
    if fact is None or fact.node is None or not is_flag(fact.node, fact.scope):
        return None
    own = {*atoms(fact.node)}
    others = [other for other in way if other is not fact and other.node is not None]
    if any(own.intersection(atoms(other.node)) for other in others if other in plain and other.node is not None):
        return None
    ends = {each.rpartition(".")[2] for each in own}
    if any(ends.intersection(idents(value)) for other in others for value in made_of(view, other)):
        return None  # `alone = args.distributed and rank == 0`
    if way.index(fact) < len(way) - 1 and not all(sides[way.index(fact) + 1 :]):
        return None
    return fact if fact.arms or happens(view, fact) else None


def atoms(test: ast.expr) -> Iterator[str]:
    """Yield the names, attributes and keys that a test asks for."""
    stack: list[ast.AST] = [test]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name | ast.Attribute) or (isinstance(node, ast.Subscript) and dotted(node.value)):
            yield ast.unparse(node)
        else:
            stack.extend(ast.iter_child_nodes(node))


def made_of(view: View, fact: Fact) -> list[ast.expr]:
    """Return the conditions that a flag of a way was given."""
    key = dotted(fact.node)
    if key is None or fact.node is None:
        return []
    binds = [bind for bind, _ in view.origins.binds(key, fact.scope, fact.node.lineno)]
    if "." in key:  # `args.alone = ...`, perhaps in another function
        members = view.project.family(fact.scope.module)
        binds += [bind for member in members for bind, _ in attributes(member).get(key.rpartition(".")[2], ())]
    return [bind.value for bind in binds if isinstance(bind.value, ast.BoolOp)]


def is_flag(test: ast.expr, scope: Scope) -> bool:
    """Check whether a test is of an option that nothing in its function changes."""
    if isinstance(test, ast.Compare):
        if len(test.ops) > 1 or constant(test.comparators[0]) is None:
            return False
        test = test.left
    if isinstance(test, ast.Subscript):
        return isinstance(constant(test.slice), str) and dotted(test.value) is not None
    key = dotted(test)
    if key is None or key in scope.binds:
        return False
    return "." in key or key in scope.params


def happens(view: View, fact: Fact) -> bool:
    """Whether a program makes a test come out as it did: an option that is off by default, or a literal of a call."""
    test, scope = fact.node, fact.scope
    if isinstance(test, ast.Attribute):
        return view.options.switch(test, scope)
    if isinstance(test, ast.Name) and test.id in scope.params:
        for site in view.calls.callers(scope)[:MAX_CALLERS]:
            value = given(site.call, scope, test.id) or default(scope, test.id, site.call)
            if isinstance(value, ast.Constant) and bool(value.value) is fact.holds:
                return True
    return False


RULE = Rule(
    code="LS061",
    name="undefined on one way",
    what="A name gets its value in one arm of a test alone, and is read where the other arm comes too.",
    why="The run ends there with a NameError as soon as the option is set the other way.",
    bad="""
import settings
import torch

def main(args, data):
    if args.distributed:
        sampler = torch.utils.data.DistributedSampler(data)
    else:
        order = torch.utils.data.RandomSampler(data)
    return torch.utils.data.DataLoader(data, sampler=sampler)

def run(args):
    main(args, torch.ones(8, 2))

if __name__ == "__main__":
    run(settings.read())
""",
    good="""
import settings
import torch

def main(args, data):
    if args.distributed:
        sampler = torch.utils.data.DistributedSampler(data)
    else:
        sampler = torch.utils.data.RandomSampler(data)
    return torch.utils.data.DataLoader(data, sampler=sampler)

def run(args):
    main(args, torch.ones(8, 2))

if __name__ == "__main__":
    run(settings.read())
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Give the name a value in both arms, or read it under the same test",
    note=(
        "One test of an option must lead past all values, with two arms, or as a switch of a parser, or by a literal "
        "of a call; nothing after it but the rank may decide whether the read is reached. Chains of `elif` and loops "
        "that may not turn do not count."
    ),
)
