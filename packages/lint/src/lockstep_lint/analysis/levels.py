"""From which level on the standard library's loggers write, where all that may set it is in sight."""

import ast

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.logs import by_hydra, too_late
from lockstep_lint.analysis.nodes import argument, constant, dotted, has_star, is_none, keyword, last
from lockstep_lint.analysis.view import View

__all__ = ["kept_back", "whose"]

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "WARN": 30, "ERROR": 40, "CRITICAL": 50, "FATAL": 50}
# What the root logger writes as long as nobody sets its level.
DEFAULT = LEVELS["WARNING"]
ROOT = "root"
# The words of a program that sets levels in other ways than by basicConfig and setLevel, or logs with another package.
OTHERWISE = ("dictConfig", "fileConfig", "coloredlogs", "logging.root", ".level =", "absl", "LOGLEVEL")


def kept_back(view: View, site: Site) -> bool:
    """Whether no rank writes a line of a logger, as the programs set a level above its own on all ranks."""
    members = view.project.family(view.module)
    if any(word in member.text for member in members for word in OTHERWISE):
        return False
    sets = [(s, whose(view, s)) for member in members for s in member.sites("setLevel")]
    asked = whose(view, site)
    own = [s for s, names in sets if names & asked]
    least = LEVELS[site.name.upper()]
    if not asked or any(level(view, s) <= least for s, names in sets if s not in own and not elsewhere(names)):
        return False
    if ROOT not in asked and own:
        return min(level(view, s) for s in own) > least
    if any(s.module is site.module and s.scope.kind == "module" and level(view, s) > least for s in own):
        return True  # the file's own word, whatever others of its programs say
    root = [s for s, names in sets if ROOT in names]
    root += [s for member in members for s in member.sites("basicConfig") if not too_late(view, s)]
    later = [s for s in root if s.scope.kind == "function"]  # what is set on import comes first
    levels = [level(view, s) for s in later or root]
    if any(map(by_hydra, members)) and not later:
        levels.append(LEVELS["INFO"])
    return min(levels, default=DEFAULT) > least


def whose(view: View, site: Site) -> frozenset[str]:
    """The loggers that a method may be of, by what `getLogger` is given; none for what comes from elsewhere."""
    if dotted(site.receiver) == "logging":
        return frozenset({ROOT})
    made = view.origins.calls_of(site.receiver, site.scope)
    return frozenset(called(call, home.module.path) for call, home, full in made if full == "logging.getLogger")


def called(call: ast.Call, path: str) -> str:
    """The name of a logger: as it is written out, or as a file calls it."""
    given = argument(call, 0, "name")
    if given is None or is_none(given):
        return ROOT
    return str(constant(given) or f"{path}:{ast.unparse(given)}")


def elsewhere(names: frozenset[str]) -> bool:
    """Whether loggers are files' own, whose levels are no other file's (`getLogger(__name__)`), or the root."""
    own = (name.endswith(".py:__name__") and not name.endswith("__init__.py:__name__") for name in names - {ROOT})
    return bool(names) and all(own)


def level(view: View, site: Site) -> int:
    """The level that a call sets on every rank; 0 where it is not written out, or depends on the rank."""
    value = argument(site.call, 0, "level") if site.name == "setLevel" else keyword(site.call, "level")
    if value is None:
        return DEFAULT if site.name == "basicConfig" and not has_star(site.call) else 0
    if view.ranks.side(site.stmt, site.scope):
        return 0
    number = constant(value)
    if isinstance(number, int):
        return number
    return LEVELS.get(str(number) if number is not None else last(value), 0)
