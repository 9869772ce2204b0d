"""Recognise the set-up of logging and trackers, and of silenced ranks."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import Calls, passed
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Imported, Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, has_star, is_none, keyword, last, walk
from lockstep_lint.analysis.rank_names import attributes
from lockstep_lint.analysis.view import View

__all__ = [
    "LOGGERS",
    "MUTING_HUSHES",
    "apart_run",
    "by_rank",
    "debugs",
    "disabled",
    "from_logging",
    "kept_back",
    "logs_with_rank",
    "loguru",
    "muted",
    "plain_logging",
    "quietens",
    "silent",
    "too_late",
    "tracked",
    "untracked",
    "whose",
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


# The words of a program that replaces print.
REPLACED = re.compile(r"builtin_print|builtins\.print|__builtin__|\bsetup_for_distributed\b|disable_print")
BUILTINS = re.compile(r"builtins?_*\.print$")
# A program that turns all ranks but one quiet has taken care.
QUIET = ("sys.stdout = open", "devnull", "suppress_output")
# A function of such a name in a file that is not here may turn `print` off.
MUTING_HUSHES = Words(
    r"dist(ributed)?(_mode|_env)?$|^(init|setup|prepare)_(ddp|dist|print|env)|quiet|_print"
    r"|print_(?!arg|conf|opt|model|net|param|info|stat|time|result|metric|loss|summary|trainable)",
    re.IGNORECASE,
)
# What a block's own output, or that of another program, is sent away with.
LENDS = ("redirect_stdout", "redirect_stderr", "Popen", "run", "call", "check_call", "check_output")
MUTING_MAX_CALLERS = 40

Places = dict[Scope, list[int]]


def muted(view: View, site: Site, hidden: tuple[Site, ...]) -> bool:
    """Whether a call may come after what replaces `print` in the file's programs, or a `hidden` call."""
    if not hidden and not any(map(replaces, view.project.family(view.module))):
        return False
    table = places(view.calls, view.module, hidden)
    return table is None or (bool(table) and later(view.calls, site.scope, site.line, table, 0))


@kept
def replaces(module: Module) -> bool:
    """Whether a file has the words of a program that replaces `print`."""
    return (
        any(word in module.text for word in ("print", "builtin", "setup_for"))
        and REPLACED.search(module.text) is not None
    )


def later(calls: Calls, scope: Scope, line: int, table: Places, depth: int) -> bool:
    """Whether a line of a scope is reached after one of the places; what no program that comes there is seen to run
    may be.
    """
    if any(place < line for place in table.get(scope, ())):
        return True
    callers = calls.callers(scope)[:MUTING_MAX_CALLERS] if scope.kind == "function" else []
    if not callers or depth > 5:
        return scope not in table
    return any(later(calls, site.scope, site.line, table, depth + 1) for site in callers)


@kept
def places(calls: Calls, module: Module, hidden: tuple[Site, ...]) -> Places | None:
    """The lines of each function of a file's programs that replace `print`, or call what does, if any program comes
    there; None if what replaces it is not to be found.
    """
    members = calls.project.family(module)
    table: Places = {}
    for scope, line in (place for member in members for place in replaced(member)):
        table.setdefault(scope, []).append(line)
    queue = [scope for scope in table if scope.kind == "function"]
    if any(not calls.callers(scope) and named(scope, members) for scope in queue) or not (table or hidden):
        return None
    for site in hidden:
        table.setdefault(site.scope, []).append(site.line)
        queue += [site.scope] if site.scope.kind == "function" else []
    seen = set(queue)
    while queue:
        for site in calls.callers(queue.pop()):
            table.setdefault(site.scope, []).append(site.line)
            if site.scope.kind == "function" and site.scope not in seen:
                seen.add(site.scope)
                queue.append(site.scope)
    starts = (s for s in table if s.kind != "function" or not calls.callers(s))
    if any(s.kind != "function" or s.name == "main" or named(s, members) for s in starts):
        return table
    return {} if any(member.is_script for member in calls.project.users(module)) else None  # a library's programs


def named(function: Scope, members: tuple[Module, ...]) -> bool:
    """Whether more than its definition names a function."""
    return sum(member.words[function.name] for member in members) > 1


def replaced(module: Module) -> Iterator[tuple[Scope, int]]:
    """The lines of a file that give `print` another meaning everywhere."""
    for scope in module.scopes if "builtin" in module.text else ():
        for key, binds in scope.binds.items():
            if BUILTINS.search(key):
                yield from ((scope, bind.stmt.lineno) for bind in binds)
        for site in scope.named("setattr"):
            if [constant(value) for value in site.call.args[1:2]] == ["print"]:
                yield scope, site.line


def quietens(view: View, module: Module) -> bool:
    """Whether a file sends output to nowhere, other than in functions that all ranks call alike, or that of the other
    ranks to anywhere else.
    """
    scopes = module.scopes if "sys.stdout" in module.text else ()
    if any(view.ranks.side(bind.stmt, s) == -1 for s in scopes for bind in s.binds.get("sys.stdout", ())):
        return True
    if not any(word in module.text for word in QUIET):
        return False
    inside = [s for s in module.scopes if s.kind == "function" and any(view.effects.mentioned_in(s, w) for w in QUIET)]
    return not inside or not all(map(functools.partial(for_all, view), inside))


def for_all(view: View, function: Scope) -> bool:
    """Whether a function says nothing of ranks, nor do the calls of it; or sends away only what runs in its block."""
    if any(view.ranks.side(stmt, function) for stmt in function.stmts):
        return False
    if "sys.stdout" not in function.binds and any(map(function.named, LENDS)):
        return True
    callers = view.calls.callers(function)
    kept_to_some = (view.ranks.main_only(site.stmt, site.scope) or view.ranks.chosen(site) for site in callers)
    return bool(callers) and not any(kept_to_some)


TRACKERS_MAX_CALLERS = 8
LOGGERS = {
    "wandb.init",
    "wandb.log",
    "wandb.watch",
    "swanlab.init",
    "swanlab.log",
    "mlflow.log_metric",
    "mlflow.start_run",
}
LOGGERS |= {"mlflow.log_metrics", "mlflow.log_param", "mlflow.log_params", "comet_ml.Experiment", "comet_ml.start"}
LOGGERS |= {"neptune.init_run", "neptune.init", "aim.Run", "clearml.Task.init", "trackio.init", "trackio.log"}
# The methods of a run of W&B that feed it.
RUNS = ("log", "watch")


def tracked(view: View, site: Site) -> str:
    """The full name of what a call calls; that of a tracker also where a function is given its module, or imports it
    where it is needed (`wandb = None`, then `if args.wandb: import wandb`), and for the methods of a W&B run.
    """
    full, name = view.full(site), dotted(site.call.func) or ""
    if full or not name:
        return full
    if name in LOGGERS:
        head = name.partition(".")[0]
        binds = site.scope.binds.get(head, [])
        none = bool(binds) and all(bind.value is not None and is_none(bind.value) for bind in binds)
        known = (none and head in site.module.imports) or (head in site.scope.params and not binds)
        if known and not any(by_one(view, *each) for each in holders(view, site, head)):
            return name
    if site.name in RUNS and view.project.says(view.module, "wandb.init"):
        made = view.origins.calls_of(site.receiver, site.scope)
        runs = [s for call, home, known in made if known == "wandb.init" for s in home.named("init") if s.call is call]
        kept = all(view.ranks.main_only(s.stmt, s.scope) or view.ranks.chosen(s) for s in runs)
        return "" if kept or any(map(apart_run, runs)) else f"wandb.{site.name}"
    return ""


def holders(view: View, site: Site, head: str) -> Iterator[tuple[str, Scope]]:
    """The names for a tracker's module, where a call reads it and where its function is given it."""
    yield head, site.scope
    for caller in view.calls.callers(site.scope)[:TRACKERS_MAX_CALLERS] if head in site.scope.params else ():
        yield dotted(passed(caller, site.scope, head)) or "", caller.scope


def by_one(view: View, name: str, scope: Scope) -> bool:
    """Whether a function imports a tracker on one rank alone: it is None on the others."""
    stmts = (stmt for stmt in scope.stmts if isinstance(stmt, ast.Import | ast.ImportFrom))
    return any(
        (alias.asname or alias.name) == name and view.ranks.side(stmt, scope) for stmt in stmts for alias in stmt.names
    )


def apart_run(site: Site) -> bool:
    """Whether a tracker's run is one of a group, as W&B says to where each rank has a run."""
    return keyword(site.call, "group") is not None
