"""LS043: data shuffled without a seed on each rank before it is divided among them."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import divides
from lockstep_lint.analysis.nodes import dotted, mentions
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.query import alone, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "each rank shuffles in its own order before the data is divided: samples repeat and are left out; give a seed"


def check(view: View) -> Iterator[Found]:
    """Looks for unseeded shuffles of what a statement after them divides among the ranks."""
    if not view.distributed and "accelerate" not in view.frameworks:
        return
    for run in runs(view):
        for event in run.of("shuffle"):
            everywhere = not sides(view, event) and not alone(view, event)
            if event.module is view.module and everywhere and unseeded(run, event) and divided(event):
                yield Found(event.node, MESSAGE)


def unseeded(run: Run, event: Event) -> bool:
    """Whether nothing before makes the random numbers of all ranks alike."""
    return not any(seed.detail in (event.detail, "all") for seed in run.of("seed") if seed.place < event.place)


def divided(event: Event) -> bool:
    """Whether the function divides what was shuffled among the ranks: in the same statement, or after it."""
    stmt, scope = event.mark.stmt, event.scope
    if not isinstance(stmt, ast.Assign | ast.Expr | ast.Return):
        return False
    if divides(stmt):
        return not divides(event.mark.subject or stmt)
    names = {bind.key for bind in scope.bound(stmt)} or {dotted(event.mark.subject) or ""}
    return any(parts(later, scope, names) for later in sorted(scope.stmts, key=line) if line(later) > line(stmt))


def parts(stmt: ast.stmt, scope: Scope, names: set[str]) -> bool:
    """Whether a statement divides what one of the names stands for; `names` gets those that it gives that to."""
    if not isinstance(stmt, ast.Assign | ast.Expr | ast.Return) or stmt.value is None:
        return False
    used = any(mentions(stmt.value, name) for name in names if name)
    if used and (divides(stmt) or "DistributedSampler(" in ast.unparse(stmt)):
        return True
    names |= {bind.key for bind in scope.bound(stmt)} if used else set()
    return False


def line(stmt: ast.stmt) -> int:
    """Where a statement stands."""
    return stmt.lineno


RULE = Rule(
    code="LS043",
    name="shuffled apart",
    what="Each rank shuffles a data set or a list of files without a seed, and then takes its own part of it.",
    why=(
        "Every process draws its own order, so the parts overlap: some samples are trained on several times an epoch, "
        "others never. Nothing fails, and the score is a little worse than it should be."
    ),
    bad="""
import torch.distributed as dist
from datasets import load_dataset

def main():
    dist.init_process_group("nccl")
    data = load_dataset("imdb", split="train").shuffle()
    data = data.shard(num_shards=dist.get_world_size(), index=dist.get_rank())
    dist.destroy_process_group()
    return data
""",
    good="""
import torch.distributed as dist
from datasets import load_dataset

def main():
    dist.init_process_group("nccl")
    data = load_dataset("imdb", split="train").shuffle(seed=0)
    data = data.shard(num_shards=dist.get_world_size(), index=dist.get_rank())
    dist.destroy_process_group()
    return data
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Shuffle with one seed on all ranks, or divide first",
)
