"""Define an event of a program's run, and the blocks that it stands in."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.index import Module, Scope, Site

__all__ = [
    "ArmBlock",
    "Block",
    "CallBlock",
    "Event",
    "HandlerBlock",
    "LoopBlock",
    "Mark",
    "WithBlock",
    "apart",
    "parting",
    "turn",
]


@dataclass(eq=False, slots=True)
class LoopBlock:
    """A loop, comprehension or step function of an engine. `start` and `end` count its events."""

    node: ast.AST
    scope: Scope
    start: int = 0
    end: int = 0


@dataclass(eq=False, slots=True)
class ArmBlock:
    """A test with the outcome `when`, of an `if` or an early exit. Both arms share a `branch`."""

    node: ast.expr
    when: bool
    scope: Scope
    branch: object
    leaves: bool = False  # the other arm ends the turn or the function


@dataclass(eq=False, slots=True)
class WithBlock:
    """A context that is entered: by a `with`, or by a decorator of the function."""

    node: ast.expr
    scope: Scope


@dataclass(eq=False, slots=True)
class CallBlock:
    """A call of a project's function, or an unknown call that is `handed` the function."""

    site: Site
    function: Scope
    handed: bool = False


@dataclass(eq=False, slots=True)
class HandlerBlock:
    """A handler of an exception."""

    scope: Scope


Block = LoopBlock | ArmBlock | WithBlock | CallBlock | HandlerBlock


@dataclass(eq=False, slots=True)
class Mark:
    """What a call, or an assignment, does in a training: the kind of its events.

    `subject` is what it is done to: a model, an optimizer, a tensor. `detail` says more of the kind.
    """

    kind: str
    node: ast.expr | ast.stmt
    stmt: ast.stmt
    scope: Scope
    subject: ast.expr | None = None
    detail: str = ""
    site: Site | None = None


@dataclass(eq=False, slots=True)
class Event:
    """Something that a run does: `place` is its number, `path` the blocks around, outermost first."""

    mark: Mark
    path: tuple[Block, ...]
    place: int
    kind: str = field(init=False)
    _loops: list[LoopBlock] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.kind = self.mark.kind

    @property
    def node(self) -> ast.expr | ast.stmt:
        """The call, or the assignment."""
        return self.mark.node

    @property
    def scope(self) -> Scope:
        """The function that it is in."""
        return self.mark.scope

    @property
    def module(self) -> Module:
        """The file that it is in."""
        return self.mark.scope.module

    @property
    def line(self) -> int:
        """The line that it stands on."""
        return self.mark.node.lineno

    @property
    def detail(self) -> str:
        """More of the kind: a wrapper's, a collective's name."""
        return self.mark.detail

    @property
    def loops(self) -> list[LoopBlock]:
        """The loops around it, in all functions on the way, outermost first."""
        if self._loops is None:  # each rule asks
            self._loops = [block for block in self.path if isinstance(block, LoopBlock)]
        return self._loops

    @property
    def tests(self) -> list[ArmBlock]:
        """The tests that decide whether it happens, outermost first."""
        return [block for block in self.path if isinstance(block, ArmBlock)]

    @property
    def withs(self) -> list[WithBlock]:
        """The contexts that it happens in, outermost first."""
        return [block for block in self.path if isinstance(block, WithBlock)]

    def within(self, loop: Block | None) -> tuple[Block, ...]:
        """Return the blocks between a loop, or another block, and the event."""
        return self.path[self.path.index(loop) + 1 :] if loop is not None else self.path


def parting(one: Event, other: Event) -> ArmBlock | None:
    """Return the arm around an event whose other arm holds the other event."""
    for here, there in zip(one.path, other.path, strict=False):
        if here is not there:
            arms = isinstance(here, ArmBlock) and isinstance(there, ArmBlock)
            return here if arms and here.branch is there.branch else None  # type: ignore[union-attr, return-value]
    return None


def apart(one: Event, other: Event) -> bool:
    """Check whether two events are in two arms of one test."""
    return parting(one, other) is not None


def seen_from(event: Event, other: Event) -> Site | None:
    """Return the call that causes an event in a function that both events share."""
    calls = (block for block in event.path if isinstance(block, CallBlock) and block not in other.path)
    return next((block.site for block in calls), event.mark.site)


def turn(events: list[Event], loop: LoopBlock, *kinds: str) -> Iterator[Event]:
    """Yield the events of one turn of a loop, in order."""
    return (event for event in events[loop.start : loop.end] if event.kind in kinds)
