"""Answer which ranks reach an event, and whether two events concern one object."""

import ast

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, strings
from lockstep_lint.analysis.origins import Origin
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Block, CallBlock, Event, WithBlock

__all__ = [
    "alone",
    "calls_after",
    "exclude_each_other",
    "given_as",
    "is_global_rank",
    "many",
    "same",
    "shown_at",
    "side",
    "sides",
    "subject",
    "things",
]

# A decorator that keeps its function to the main rank (`@rank_zero_only`, `@accelerator.on_main_process`).
ONLY = Words(r"(rank_?(zero|0)|main(_process|_rank)?|master)_?only$|^on_(local_)?main_process$|^only_on_(main|rank)")


@cache_answers
def side(view: View, block: Block) -> int:
    """Return 1 for the main rank's block, -1 for the others', -2 for one's."""
    if isinstance(block, WithBlock):
        decorates = any(block.node is item for item in block.scope.decorators)
        return int(decorates and ONLY.search(last(block.node)))
    if not isinstance(block, ArmBlock):
        return 0
    return view.ranks.tests.test(block.node, block.scope, block.when)


def sides(view: View, event: Event) -> list[tuple[Block, int]]:
    """Return the rank tests around an event, each with the ranks that pass, outermost first."""
    found = ((block, side(view, block)) for block in event.path)
    return [(block, ranks) for block, ranks in found if ranks]


@cache_answers
def many(view: View, block: Block) -> int:
    """Return 1 if a test needs several processes, -1 if it needs one, else 0."""
    return view.ranks.tests.many(block.node, block.scope, block.when) if isinstance(block, ArmBlock) else 0


def alone(view: View, event: Event) -> bool:
    """Check whether an event happens only where there is one process."""
    return any(many(view, block) == -1 for block in event.tests)


# What gives back the model that it is given, wrapped or changed, by its first argument or by the named one.
KEEPING = ("compile", "convert_sync_batchnorm", "prepare_model", "unwrap_model", "extract_model_from_parallel")


@cache_answers
def things(view: View, node: ast.expr | None, scope: Scope) -> frozenset[object]:
    """Return what made an object. Two objects may be one if they share a member."""
    found: set[object] = set()
    queue = [(node, scope)]
    seen: set[tuple[ast.expr, Scope]] = set()
    while queue and len(seen) < 40:
        current, home = queue.pop()
        if current is None or (current, home) in seen:
            continue
        seen.add((current, home))
        for origin in view.origins.of(current, home):
            made, place = origin.node, origin.scope
            inner = kept_inside(view, made, place)
            if inner is not None:
                queue.append((inner, place))
            else:
                named = dotted(made) is not None
                found.add((owner_of(made, place), dotted(made)) if named else made)
    return frozenset(found)


def kept_inside(view: View, made: ast.expr, scope: Scope) -> ast.expr | None:
    """Return the model in a wrapper, or the wrapped one of `model.module`."""
    if isinstance(made, ast.Attribute) and made.attr in ("module", "_orig_mod"):
        return made.value
    if isinstance(made, ast.Call) and (view.wrappers.of_call(made, scope) or last(made) in KEEPING):
        return made.args[0] if made.args else keyword(made, "module") or keyword(made, "model")
    return None


def owner_of(node: ast.expr, scope: Scope) -> object:
    """Return the function, class or file that a name without a value belongs to."""
    key = dotted(node) or ""
    if key.startswith("self.") and scope.owner is not None:
        return scope.owner
    current: Scope | None = scope
    while current is not None:
        if key.split(".")[0] in current.params or key in current.binds:
            return current
        current = current.parent
    return scope.module


def subject(event: Event, within: Scope | None = None) -> tuple[ast.expr | None, Scope]:
    """Return the object that an event acts on; calls replace parameters by arguments."""
    return given_as(event, event.mark.subject, event.scope, within)


def given_as(
    event: Event, node: ast.expr | None, scope: Scope, within: Scope | None = None
) -> tuple[ast.expr | None, Scope]:
    """Resolve an expression of an event's function through the calls on its path."""
    for block in reversed(event.path) if isinstance(node, ast.Name) else ():
        if isinstance(block, CallBlock) and block.function is scope and isinstance(node, ast.Name):
            if scope is within or node.id not in scope.params or node.id in scope.binds:
                break
            given = find_passed(block.site, scope, node.id)
            if given is None:
                break
            node, scope = given, block.site.scope
    return node, scope


def same(view: View, one: Event, other: Event) -> bool:
    """Check whether two events may act on one object, by name or by origin."""
    (first, here), (second, there) = subject(one), subject(other)
    if dotted(first) is not None and dotted(first) == dotted(second) and here is there:
        return True
    return bool(things(view, first, here) & things(view, second, there))


def shown_at(view: View, event: Event) -> Site | None:
    """Return the file's own call that causes an event, directly or through another file."""
    if event.module is view.module:
        return event.mark.site
    calls = [block.site for block in event.path if isinstance(block, CallBlock) and block.site.module is view.module]
    return calls[-1] if calls else None


def calls_after(event: Event, block: Block) -> list[CallBlock]:
    """Return the calls of project functions between a block and an event."""
    rest = event.path[event.path.index(block) + 1 :]
    return [inner for inner in rest if isinstance(inner, CallBlock)]


def exclude_each_other(one: Event, other: Event) -> bool:
    """Check whether two tests of one value exclude each other (`phase == "val"` and `"train"`)."""
    pairs = [(here, there) for here in one.tests for there in other.tests if here.branch is not there.branch]
    return any(here.scope is there.scope and contradicts(here, there) for here, there in pairs)


def contradicts(one: ArmBlock, other: ArmBlock) -> bool:
    """Check whether two tests exclude each other: opposite arms, or different literals."""
    here, there = one.node, other.node
    if ast.dump(here) == ast.dump(there):
        return one.when is not other.when
    if not isinstance(here, ast.Compare) or not isinstance(there, ast.Compare):
        return False
    equal = isinstance(here.ops[0], ast.Eq) and isinstance(there.ops[0], ast.Eq) and one.when and other.when
    return equal and ast.dump(here.left) == ast.dump(there.left)


# The rank among all processes, as launchers call it.
RANKS = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}


def is_global_rank(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether a number certainly is the rank among all processes."""
    found = [origin for origin in view.origins.of(node, scope) if constant(origin.node) not in (0, "cuda", "cpu")]
    return bool(found) and all(global_rank(view, origin) for origin in found)


def global_rank(view: View, origin: Origin) -> bool:
    """Check whether a value is `get_rank()`, or the environment's RANK."""
    if isinstance(origin.node, ast.Subscript):
        return "environ" in idents(origin.node) and bool(RANKS & set(strings(origin.node)))
    if origin.call is None:
        return False
    full = view.names.qualify(origin.call.func, origin.scope) or dotted(origin.call.func)
    if full in ("torch.distributed.get_rank", "dist.get_rank"):
        return not origin.call.args and not origin.call.keywords
    reads = last(origin.call) in ("int", "getenv", "get") and {"environ", "getenv"} & set(idents(origin.node))
    return bool(reads) and bool(RANKS & set(strings(origin.node)))
