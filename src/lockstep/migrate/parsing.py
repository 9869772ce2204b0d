"""Import the parts of the linter that `--migrate` uses: its parser and its analysis.

The extra `lint` installs the linter. No other file of lockstep imports it.
"""

from lockstep_lint.analysis.budget import WORK, TooIntricate
from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import argument, constant, dotted, idents, is_true, keyword, last, walk
from lockstep_lint.analysis.project import Project
from lockstep_lint.analysis.source import Source, parse, place, read
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import Analysis, View
from lockstep_lint.command import MigrateProblem

__all__ = [
    "EVALUATION",
    "WORK",
    "Analysis",
    "MigrateProblem",
    "Module",
    "Project",
    "Scope",
    "Site",
    "Source",
    "TooIntricate",
    "Training",
    "View",
    "argument",
    "constant",
    "dotted",
    "idents",
    "is_true",
    "keyword",
    "last",
    "loops",
    "parse",
    "place",
    "read",
    "walk",
]
