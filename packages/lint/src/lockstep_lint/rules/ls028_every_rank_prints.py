"""LS028: print, log or W&B on every rank."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Guard, above, guards
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.logs import (
    LOGGERS,
    MUTING_HUSHES,
    apart_run,
    by_rank,
    debugs,
    disabled,
    from_logging,
    kept_back,
    logs_with_rank,
    loguru,
    muted,
    plain_logging,
    quietens,
    silent,
    too_late,
    tracked,
    untracked,
    whose,
)
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, walk
from lockstep_lint.analysis.rank_names import RANK
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

WRITERS = ("SummaryWriter",)
# Other ways to print, by their full names; and methods of models that print.
PRINTERS = {"pprint.pprint", "pprint.pp", "rich.print", "tqdm.tqdm.write", "tqdm.auto.tqdm.write", "click.echo"}
PRINTERS |= {"torchsummary.summary", "torchinfo.summary", "termcolor.cprint", "print_trainable_parameters"}
# What a file may import as its `print`, which prints on every rank as well.
AS_PRINT = ("rich.print", "pprint.pprint", "builtins.print")
# A function of such a name in a file that is not here may set up logging by the rank.
SETS_LOGS = Words(r"^(init|setup|prepare)_logg", re.IGNORECASE)
# What a function that only shows something is called (`progress.display(i)`).
SHOWS = Words(r"^(display|show|report|print|describe|summary)(_|$)")
PREFIX = re.compile(r"\[?(rank|gpu|process|worker|local_rank|node)\b|rank[=:\s]", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks for output in the code that every rank runs."""
    if not (view.distributed or any(map(view.ranks.programs.accelerated, view.project.users(view.module)))):
        return
    imported = view.module.imports.get("print")
    if "print" in view.module.top.defs or (imported is not None and imported.full not in AS_PRINT):
        return
    setting = Setting(view)
    for site in view.sites():
        what = speaks(view, site) or passed_on(view, site)
        if not what or setting.hushes(site, what) or not view.ranks.everywhere(site, view.module):
            continue
        if failing(view, site) or view.ranks.chosen(site) or view.ranks.programs.idle(site.scope):
            continue
        if (what == "log" and not (loguru(view, site) or from_logging(site.module))) or borrowed(view, site, what):
            continue  # of Accelerate, which writes on the main process alone
        if what == "log" and not (loguru(view, site) or setting.plain):
            continue
        grouped = what == "tracker" and apart_run(site)
        if (prefixed(view, site) and (grouped or what != "tracker")) or (what == "log" and setting.prefixed):
            yield at(site, "every rank writes this line: keep it on rank 0", severity=Severity.OPINION)
        elif what == "print":
            yield at(site, "every rank prints this: print on rank 0 only")
        elif what == "tracker":
            yield at(site, "every rank starts or feeds its own tracker run: do this on rank 0 only")
        else:
            yield at(site, "every rank logs this: log on rank 0 only")


class Setting:
    """What a file's programs do to make the other ranks quiet."""

    def __init__(self, view: View) -> None:
        members = view.project.family(view.module)
        self.view = view
        self.prefixed = logs_with_rank(view)
        self.quiet = any(quietens(view, member) for member in members)
        self.hidden = tuple(view.hidden_calls(MUTING_HUSHES))
        set_up = (site for member in members for site in member.sites("basicConfig"))
        self.levelled = (
            bool(self.hidden)
            or view.hidden(SETS_LOGS)
            or any(by_rank(view, site) for site in set_up if not too_late(view, site))
        )
        self.silenced = set(disabled(view))
        self.untracked = untracked(view)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether logging is certainly set up alike on all ranks."""
        return plain_logging(self.view)

    def hushes(self, site: Site, what: str) -> bool:
        """Whether the output of a call is turned off on the other ranks."""
        if what == "tracker":
            return self.untracked and tracked(self.view, site).startswith("wandb.")
        if what == "log":
            if self.quiet or self.levelled or silent(site, self.silenced):
                return True
            return not loguru(self.view, site) and kept_back(self.view, site)
        return what == "print" and (self.quiet or muted(self.view, site, self.hidden))


def speaks(view: View, site: Site) -> str:
    """What kind of output a call is: "print", "log", "tracker" or ""."""
    if isinstance(site.call.func, ast.Name) and site.name == "print":
        if "print" in site.module.top.binds or "print" in site.scope.binds:
            return ""  # `print = accelerator.print`
        return "" if elsewhere(site.call) or site.scope.name in ("__str__", "__repr__") else "print"
    full = tracked(view, site)
    if full in PRINTERS or (site.name in PRINTERS and view.calls.target(site.call, site.scope) is None):
        return "" if elsewhere(site.call) or keyword(site.call, "stream") is not None else "print"
    if full in LOGGERS or (site.name in WRITERS and full.endswith(WRITERS)):
        return "tracker"
    shown = site.name in ("info", "warning", "warn") or (
        site.name == "debug" and (loguru(view, site) or debugs(view, site))
    )
    return "log" if shown and site.receiver is not None and is_logger(view, site, site.receiver) else ""


def borrowed(view: View, site: Site, what: str) -> bool:
    """Whether the logger may be Accelerate's, handed on by a script that uses it, or another package's."""
    programs = view.ranks.programs
    if what != "log" or programs.direct(site.module) or programs.accelerated(site.module):
        return False
    own = dotted(site.receiver) == "logging" or site.module.top.binds.get(dotted(site.receiver) or "")
    return view.ranks.beneath(site.scope) and not (loguru(view, site) or (own and whose(view, site)))


def elsewhere(call: ast.Call) -> bool:
    """Whether a call prints to anything else than stdout: what goes to stderr is mostly an error, of one rank."""
    file = keyword(call, "file")
    return file is not None and dotted(file) != "sys.stdout"


def is_logger(view: View, site: Site, receiver: ast.expr) -> bool:
    """Whether a method is a logger's, by what its object is called or by where it comes from."""
    name = last(receiver).lower()
    if name in ("logging", "logger", "log", "_logger"):
        return view.full(site) != "warnings.warning"
    made = view.origins.calls_of(receiver, site.scope) if "log" in name else ()
    return any(full == "logging.getLogger" for _, _, full in made)


def passed_on(view: View, site: Site) -> str:
    """ "print" for a call that only shows something, by a function of another file that prints on every rank."""
    function = view.calls.target(site.call, site.scope) if SHOWS.search(site.name) else None
    if function is None or function.module is view.module or "print" in function.module.top.defs:
        return ""
    prints = [s for s in function.named("print") if isinstance(s.call.func, ast.Name)]
    kept = (view.ranks.side, view.ranks.single)
    told = [s for s in prints if not any(test(s.stmt, function) for test in kept)]
    told = [s for s in told if not view.ranks.chosen(s) and not prefixed(view, s)]
    told = [s for s in told if not any(map(flag, guards(s.stmt, function.module)))]
    return "print" if told else ""


def flag(guard: Guard) -> bool:
    """Whether a test asks for an option of an object (`if self.enable`), which may be another on each rank."""
    return (dotted(guard.test) or "").startswith("self.")


def failing(view: View, site: Site) -> bool:
    """Whether the output belongs to an error, which may differ from rank to rank, or to a debugger's start."""
    if not all(goes_on(site, handler, tests) for handler, tests in handlers(site)):
        return True
    block = view.module.up.get(site.stmt)
    siblings = getattr(block[0], block[1], []) if block is not None and block[1] in ("body", "orelse") else []
    if any(isinstance(stmt, ast.Expr) and last(stmt.value) == "wait_for_attach" for stmt in siblings):
        return True
    return any(isinstance(stmt, ast.Raise) or gives_up(stmt, siblings) for stmt in siblings)


def gives_up(stmt: ast.stmt, siblings: list[ast.stmt]) -> bool:
    """Whether a statement of a block ends the program with an error: by its code, or after nothing but output."""
    call = ends_program(stmt)
    if call is None:
        return False
    if call.args:
        return constant(call.args[0]) != 0
    return all(isinstance(each, ast.Expr) for each in siblings)


def ends_program(stmt: ast.stmt) -> ast.Call | None:
    """The call with which a statement ends the program."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    named = isinstance(call, ast.Call) and ast.unparse(call.func) in ("exit", "sys.exit", "quit")
    return call if named and isinstance(call, ast.Call) else None


def handlers(site: Site) -> Iterator[tuple[ast.ExceptHandler, list[ast.If]]]:
    """The handlers of exceptions around a call, each with the tests in it that the call stands under."""
    current, tests = site.stmt, list[ast.If]()
    for node, place in above(site.stmt, site.module):
        if place == "handlers" and isinstance(node, ast.Try | ast.TryStar):
            yield from ((handler, tests) for handler in node.handlers if current in handler.body)
            tests = []
        elif isinstance(node, ast.If):
            tests = [*tests, node]
        current = node


def goes_on(site: Site, handler: ast.ExceptHandler, tests: list[ast.If]) -> bool:
    """Whether the handler of an exception only says that something is not there, and leaves what it did then."""
    asked = (site.call, *(test.test for test in tests))
    told = any(isinstance(node, ast.Name) and node.id == handler.name for part in asked for node in walk(part))
    ends = (ast.Raise, ast.Return, ast.Continue)
    blocks = (handler.body, *(block for test in tests for block in (test.body, test.orelse)))
    left = any(isinstance(stmt, ends) or ends_program(stmt) is not None for block in blocks for stmt in block)
    return not told and not left


def prefixed(view: View, site: Site) -> bool:
    """Whether the line says which rank writes it, itself or by a text that it is made of (`prefix = f"[{rank}]"`)."""
    for value in (*site.call.args, *(k.value for k in site.call.keywords)):
        keys = filter(None, map(dotted, walk(value)))
        texts = (text for key in keys for text, _ in view.calls.values(key, site.scope) if is_text(text))
        if names_rank(value) or any(map(names_rank, texts)):
            return True
    return False


def names_rank(value: ast.expr) -> bool:
    """Whether an expression names the rank, in a name or at the start of a text."""
    if any(RANK.search(name) or name == "get_rank" for name in idents(value)):
        return True
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and PREFIX.match(node.value.strip())
        for node in walk(value)
    )


def is_text(value: ast.expr) -> bool:
    """Whether an expression makes a text out of others."""
    if isinstance(value, ast.BinOp):
        return any(isinstance(constant(node), str) for node in walk(value))
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Call) and last(value.func) == "format")


RULE = Rule(
    code="LS028",
    name="output on every rank",
    what=(
        "Code that every rank runs prints, logs, or starts a tracker run. Lines that name their rank are an "
        "opinion only."
    ),
    why="Eight GPUs write every line eight times, in mixed order, and W&B gets eight runs of which seven are noise.",
    bad="""
import torch.distributed as dist

def main(loss):
    dist.init_process_group("nccl")
    print("loss", loss)
    dist.destroy_process_group()
""",
    good="""
import torch.distributed as dist

def say(*words):
    if dist.get_rank() == 0:
        print(*words)

def main(loss):
    dist.init_process_group("nccl")
    say("loss", loss)
    dist.destroy_process_group()
""",
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Write on rank 0 only",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep", "composer", "trl"}),
    note=(
        "A test of any rank is enough: the global one, the local one, the node's, or a flag that was set by one. A "
        "`SummaryWriter`, like `wandb.init`, is a tracker; `if wandb.run is not None` is a test of the rank where "
        "rank 0 alone starts a run. The process that starts the others (with Ray, submitit, a launcher of functions, "
        "torchrun) is none of them; a turn (`main_process_first`) is all of them. "
        "Progress bars (tqdm) are not looked at. Logging counts "
        "where it is configured alike on all ranks (by Hydra too), at a level that lets the line through, or is "
        "loguru's. The processes of Accelerate and Fabric count, but not their own loggers, nor notebooks, which are "
        "one process unless they start others. What an `except` prints counts where it goes on without its error, and "
        "so does what is printed before the program turns `print` off on the other ranks. Each process that "
        "`torch.multiprocessing.spawn` starts imports the script anew, and runs what stands outside functions."
    ),
)
