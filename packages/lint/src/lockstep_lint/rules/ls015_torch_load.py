"""LS015: torch.load without map_location or with weights_only=False."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.drafts import load_safely
from lockstep_lint.analysis.nodes import argument, constant, has_star, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at


def check(view: View) -> Iterator[Found]:
    """Look at every torch.load."""
    for site in view.sites("load"):
        if view.full(site) != "torch.load":
            continue
        weights = keyword(site.call, "weights_only")
        if isinstance(weights, ast.Constant) and constant(weights) is False:
            yield at(
                site,
                "runs whatever code the file holds: load with weights_only=True, or from a trusted source only",
                proposal=load_safely(view, site),
            )
        elif argument(site.call, 1, "map_location") is None and not has_star(site.call) and not view.cpu_only:
            whose = "on every rank" if view.distributed else "which may not be there"
            yield at(
                site,
                f"loads onto the GPU that saved the file, {whose}: pass map_location",
                proposal=load_safely(view, site),
            )


RULE = Rule("LS015", Severity.HINT, Confidence.HIGH, check, fix="unsafe")
