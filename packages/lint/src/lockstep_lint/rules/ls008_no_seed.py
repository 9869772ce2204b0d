"""LS008: no seed before the model is made (an opinion)."""

from collections.abc import Iterator

from lockstep_lint.analysis.view import View
from lockstep_lint.events.query import shown_at
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

MESSAGE = "no seed is set before the model is made: call torch.manual_seed(seed) first"
# The generators that weights are drawn from.
WEIGHTS = ("torch", "all")


def check(view: View) -> Iterator[Found]:
    """Look for the first model that a program trains, and for a seed before it."""
    found = [made for run in runs(view) if trains(view, run) and (made := next(iter(run.of("make")), None)) is not None]
    seeded = any(seeds(run) for run in runs(view))
    site = shown_at(view, found[0]) if found and not seeded else None
    if site is not None:
        yield at(site, MESSAGE)


def trains(view: View, run: Run) -> bool:
    """Check whether a program that starts in the file trains."""
    return run.entry.module is view.module and bool(run.of("fit") or (run.of("backward") and run.of("step")))


def seeds(run: Run) -> bool:
    """Check whether a run seeds the weights' generators before it makes a model."""
    if run.entry.kind == "function" and not run.of("make", "backward"):
        return False
    made = next((event.place for event in run.of("make")), len(run.events))
    return any(seed.detail in WEIGHTS and seed.place < made for seed in run.of("seed"))


MOOT = frozenset({"lockstep", "transformers", "trl"})
RULE = Rule("LS008", Severity.OPINION, Confidence.MEDIUM, check, fix="unsafe", moot=MOOT)
