"""How a program sets up logging: alike on all ranks, by the rank, by loguru or Hydra, turned off on some."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Imported, Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.ranknumbers import attributes
from lockstep_lint.analysis.view import View

__all__ = [
    "by_rank",
    "debugs",
    "disabled",
    "from_logging",
    "logs_with_rank",
    "loguru",
    "plain_logging",
    "silent",
    "too_late",
    "untracked",
]

# The calls with which a function sets up logging.
SETS_UP = {"basicConfig", "setLevel", "addHandler", "addFilter", "disable", "StreamHandler", "FileHandler", "Formatter"}
SETS_UP |= {"add", "remove", "configure"}
# The variables of the environment with which W&B is turned off.
WANDB_OFF = ("WANDB_MODE", "WANDB_DISABLED")
# The attributes of a logger that make it quiet, and those that do so where they are certainly a logger's.
SILENCES = (".disabled", ".level", ".handlers")
OF_LOGGERS = (".propagate", ".info", ".warning")
# The calls that make a logger quiet, or all.
HUSHES = ("disable", "clear", "removeHandler", "addFilter")
LOGGER = Words(r"^_?(logger|log)$")
# What such an attribute's object is called, with what it stands in; `model.level` is none's.
HOLDS_LOGGER = Words(r"(^|[._])log(gers?|ging)?($|[._])", re.IGNORECASE)
# How many texts a format is followed through.
MAX_TEXTS = 2
MAX_CALLERS = 20
# What tells the main process; transformers' training arguments give the other ranks a level of their own.
BY_RANK = Words(r"rank|is_main|master|^get_process_log_level$|^should_log$")


def disabled(view: View) -> Iterator[tuple[Scope, int]]:
    """Where a rank's logger is turned off (`if rank != 0: logger.disabled = True`), in another file one that both
    import.
    """
    for member in view.project.family(view.module):
        for scope, key, place in (*set_quiet(view, member), *made_quiet(view, member)):
            name = key.partition(".")[0]
            imported = member.imports.get(name)
            if member is view.module or name == "logging" or (imported and same_name(imported, view.module, name)):
                yield scope, place


def set_quiet(view: View, module: Module) -> Iterator[tuple[Scope, str, int]]:
    """The attributes of loggers that a file gives another value by the rank."""
    for name in (*SILENCES, *OF_LOGGERS):
        for bind, scope in attributes(module).get(name[1:], ()):
            if is_logger(view, bind, scope) if name in SILENCES else LOGGER.search(bind.key.split(".")[-2]):
                told = bind.value is not None and (
                    chosen_by_rank(view, bind.value, scope)
                    or (name == ".disabled" and view.ranks.tests.test(bind.value, scope) != 0)
                )
                if told or view.ranks.side(bind.stmt, scope):
                    yield scope, bind.key, bind.stmt.lineno


def is_logger(view: View, bind: Bind, scope: Scope) -> bool:
    """Whether the object of an attribute is a logger, by its name or by what made it."""
    if HOLDS_LOGGER.search(bind.key.rpartition(".")[0]):
        return True
    targets = bind.stmt.targets if isinstance(bind.stmt, ast.Assign) else []
    held = [each.value for each in targets if isinstance(each, ast.Attribute) and dotted(each) == bind.key]
    return any(full.endswith("getLogger") for each in held for _, _, full in view.origins.calls_of(each, scope))


def made_quiet(view: View, module: Module) -> Iterator[tuple[Scope, str, int]]:
    """The calls of loggers and of logging itself that make some ranks quiet."""
    for site in module.sites(*HUSHES):
        key = dotted(site.receiver) or ""
        of_logger = any(LOGGER.search(part) for part in key.split("."))
        wanted = of_logger if site.name != "disable" else of_logger or key == "logging"
        wanted = wanted and (site.name != "clear" or key.endswith(".handlers"))
        if wanted and (view.ranks.side(site.stmt, site.scope) == -1 or view.ranks.chosen(site)):
            yield site.scope, key, site.line


def same_name(imported: Imported, module: Module, name: str) -> bool:
    """Whether a file imports the same by the same name, as far as the names tell."""
    other = module.imports.get(name)
    return other is not None and other.name == imported.name


def silent(site: Site, silenced: set[tuple[Scope, int]]) -> bool:
    """Whether a call of a logger comes after it was turned off on the other ranks, as far as a file's order tells."""
    return any(site.scope is not scope or site.line > line for scope, line in silenced)


def logs_with_rank(view: View) -> bool:
    """Whether the logging format names the rank, on all ranks alike."""
    named = False
    for member in view.project.family(view.module):
        for site in member.sites("basicConfig", "Formatter"):
            told = keyword(site.call, "format") or keyword(site.call, "fmt") or next(iter(site.call.args), None)
            rest = [k.value for k in site.call.keywords if k.value is not told]
            if any("rank" in ast.unparse(value).lower() for value in rest):
                return False  # the level, most often: other ranks are quiet
            named |= told is not None and says_rank(view, told, site.scope, 0)
    return named


def says_rank(view: View, value: ast.expr, scope: Scope, depth: int) -> bool:
    """Whether a text names the rank, itself or by the texts that it is made of (`head = comm.head + "%(message)s"`)."""
    if "rank" in ast.unparse(value).lower():
        return True
    parts = [node for node in walk(value) if isinstance(node, ast.Name | ast.Attribute)] if depth < MAX_TEXTS else []
    found = (origin for part in parts for origin in view.origins.of(part, scope) if origin.node is not part)
    return any(says_rank(view, origin.node, origin.scope, depth + 1) for origin in found)


def loguru(view: View, site: Site) -> bool:
    """Whether a call logs with loguru, which writes all levels on every rank unless the program sets it up by the
    rank, or gives it no place to write to.
    """
    if not view.full(site).startswith("loguru.logger."):
        return False
    members = view.project.family(view.module)
    found = [s for member in members for s in member.sites("remove", "add", "disable", "configure")]
    found = [s for s in found if view.full(s).startswith("loguru.logger.")]
    if not found:
        return True
    shown = any(s.name == "add" for s in found) and (site.name != "debug" or any(map(shows_debug, found)))
    return shown and not any(by_rank(view, s) or view.ranks.main_only(s.stmt, s.scope) for s in found)


def debugs(view: View, site: Site) -> bool:
    """Whether the logger of a call, or logging as a whole, is set to write debug lines."""
    levels = [s.call for s in view.sites("setLevel") if dotted(s.receiver) == dotted(site.receiver)]
    levels += [s.call for member in view.project.family(view.module) for s in member.sites("basicConfig")]
    return any(last(argument(call, 0, "level")) == "DEBUG" for call in levels)


def shows_debug(site: Site) -> bool:
    """Whether a sink of loguru takes debug lines."""
    level = keyword(site.call, "level")
    return site.name == "add" and (level is None or constant(level) in ("DEBUG", "TRACE", 0, 5, 10))


def from_logging(module: Module) -> bool:
    """Whether a file's loggers may be the standard library's: those of Accelerate write on the main process alone."""
    makers = [site.call.func for site in module.sites("get_logger")]
    given = (item.module for item in module.imports.values())
    return "accelerate.logging" not in {
        *given,
        *(dotted(item.value) for item in makers if isinstance(item, ast.Attribute)),
    }


def too_late(view: View, site: Site) -> bool:
    """Whether a `basicConfig` does nothing, as its file has called it on import already, and this is in a function."""
    if site.name != "basicConfig" or site.scope.kind != "function" or keyword(site.call, "force") is not None:
        return False
    return any(s is not site and on_import(view, s) for s in site.module.sites("basicConfig"))


def plain_logging(view: View) -> bool:
    """Whether the program certainly configures logging alike on every rank."""
    members = view.project.family(view.module)
    found = [s for member in members for s in member.sites("basicConfig") if not too_late(view, s)]
    found += [s for member in members for s in member.sites("addHandler") if s.scope.named("StreamHandler")]
    if not found:
        return any(map(by_hydra, members))
    levels = [s for member in members for s in member.sites("setLevel") if not to_file(view, s)]
    if any(view.ranks.side(s.stmt, s.scope) or by_rank(view, s) for s in levels):
        return False
    shared = (s for s in found if not by_rank(view, s) and asked_for(view, s.scope, members))
    alike = [s for s in shared if on_import(view, s) or view.ranks.everywhere(s, view.module)]
    rest = [s for s in found if s not in alike]
    return not rest or (any(s.name == "basicConfig" for s in alike) and all(view.ranks.reserved(s.scope) for s in rest))


def to_file(view: View, site: Site) -> bool:
    """Whether a method is of what writes to a file, which one rank alone may have."""
    return any(full.endswith("FileHandler") for _, _, full in view.origins.calls_of(site.receiver, site.scope))


def asked_for(view: View, scope: Scope, members: tuple[Module, ...]) -> bool:
    """Whether more than the main rank of the programs of some files calls a function, as far as calls are in sight."""
    callers = view.calls.callers(scope)
    near = [s for s in callers if s.module in members]
    return not callers or any(not view.ranks.main_only(s.stmt, s.scope) for s in near)


def on_import(view: View, site: Site) -> bool:
    """Whether a call is made where its file is imported, which every rank does, the spawned ones too."""
    return site.scope.kind == "module" and not any(True for _ in guards(site.stmt, site.module))


def by_hydra(module: Module) -> bool:
    """Whether a file's main function is Hydra's, which configures logging on every rank alike."""
    return "hydra" in module.imports and any(
        dotted(item.func if isinstance(item, ast.Call) else item) == "hydra.main"
        for scope in module.scopes
        for item in scope.decorators
    )


def by_rank(view: View, site: Site) -> bool:
    """Whether logging is set up by the rank: in what the function gives to logging, in the values that this is made
    from, or in a test around it; a format that names the rank is not.
    """
    scope = site.scope
    sites = [each for each in scope.sites if each is site or each.name in SETS_UP or takes_logger(each)]
    formats = {id(node) for each in sites for part in written(each) for node in walk(part)}
    asked: list[ast.AST] = [each.call for each in sites]
    asked += [guard.test for each in sites for guard in guards(each.stmt, scope.module)]
    asked += [bind.stmt for key, binds in scope.binds.items() if key.endswith(SILENCES) for bind in binds]
    names = {node.id for part in asked for node in walk(part) if isinstance(node, ast.Name) and id(node) not in formats}
    for bind in (bind for name in names for bind in scope.binds.get(name, [])):
        asked += [bind.stmt, *(guard.test for guard in guards(bind.stmt, scope.module))]
    nodes = [node for part in asked for node in walk(part) if id(node) not in formats]
    nodes = [node for node in nodes if not view.ranks.tests.numbers.left_out(node, scope)]
    known = {node.id for node in nodes if isinstance(node, ast.Name)}
    nodes += [node for name in known for value in filled(view, name, scope) for node in walk(value)]
    words = [getattr(node, "id", getattr(node, "attr", getattr(node, "value", ""))) for node in nodes]
    return any(isinstance(word, str) and BY_RANK.search(word) for word in words)


def filled(view: View, name: str, function: Scope) -> Iterator[ast.AST]:
    """What the callers of a function give for a parameter, and the statements that their names for it come from."""
    callers = view.calls.callers(function) if name in function.params and name not in function.binds else []
    for site in callers[:MAX_CALLERS]:
        value = passed(site, function, name)
        if value is not None:
            yield value
            yield from (bind.stmt for bind in site.scope.binds.get(dotted(value) or "", ()))


def takes_logger(site: Site) -> bool:
    """Whether a function of the project is given a logger (`keep_to_main(logger, is_main_process())`)."""
    return any(LOGGER.search(last(value)) for value in site.call.args if isinstance(value, ast.Name))


def written(site: Site) -> Iterator[ast.expr]:
    """What a call that sets up logging says of the form of a line, and of the file beside the screen."""
    if site.name == "Formatter":
        yield from site.call.args
    for part in site.call.keywords if site.name in ("Formatter", "basicConfig") else ():
        if part.arg in ("format", "fmt", "datefmt"):
            yield part.value
    if site.scope.named("StreamHandler"):  # a file of its own keeps no rank from the screen
        if site.name == "FileHandler":
            yield from site.call.args
        yield from (k.value for k in site.call.keywords if k.arg == "filename")


def untracked(view: View) -> bool:
    """Whether the programs turn W&B off on the other ranks, by its mode or by the environment."""
    for member in view.project.family(view.module):
        sites = [s for s in member.sites("init") if view.names.qualify(s.call.func, s.scope) == "wandb.init"]
        modes = [(keyword(site.call, "mode"), site.scope) for site in sites]
        if any(mode is not None and chosen_by_rank(view, mode, scope) for mode, scope in modes):
            return True
        for scope in member.scopes if any(word in member.text for word in WANDB_OFF) else ():
            if any(view.ranks.side(s, scope) or chosen_by_rank(view, s.value, scope) for s in turns_off(scope)):
                return True
    return False


def turns_off(scope: Scope) -> Iterator[ast.Assign]:
    """The statements of a scope that give W&B's variables of the environment a value."""
    for stmt in scope.stmts:
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
        if isinstance(stmt, ast.Assign) and isinstance(target, ast.Subscript) and constant(target.slice) in WANDB_OFF:
            yield stmt


def chosen_by_rank(view: View, value: ast.expr, scope: Scope) -> bool:
    """Whether a value, or all that a name is given, is another on the main rank than on the rest."""
    given = [(value, scope)]
    if isinstance(value, ast.Name):
        given = list(view.calls.values(value.id, scope))
    parts = [(node, home) for each, home in given for node in walk(each) if isinstance(node, ast.IfExp)]
    return any(view.ranks.tests.test(node.test, home) for node, home in parts)
