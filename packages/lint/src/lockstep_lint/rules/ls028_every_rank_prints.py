"""LS028: print or W&B on every rank."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, walk
from lockstep_lint.analysis.rank_names import RANK
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

# Functions that print, by their full names, and methods of models that print.
PRINTERS = {"pprint.pprint", "pprint.pp", "rich.print", "tqdm.tqdm.write", "tqdm.auto.tqdm.write", "click.echo"}
PRINTERS |= {"torchsummary.summary", "torchinfo.summary", "termcolor.cprint"}
# What a file may import as its `print`, which prints on every rank as well.
AS_PRINT = ("rich.print", "pprint.pprint", "builtins.print")
TRACKERS = {"wandb.init", "wandb.log", "wandb.watch", "swanlab.init", "swanlab.log", "mlflow.log_metric"}
TRACKERS |= {"mlflow.start_run", "mlflow.log_metrics", "mlflow.log_param", "mlflow.log_params", "trackio.init"}
TRACKERS |= {"comet_ml.Experiment", "comet_ml.start", "neptune.init_run", "neptune.init", "aim.Run", "trackio.log"}
TRACKERS |= {"clearml.Task.init"}
# The last names of all these: a method or a module's function of any other name is none of them.
LAST_NAMES = {"SummaryWriter", "print_trainable_parameters"}
LAST_NAMES |= {full.rpartition(".")[2] for full in (*TRACKERS, *PRINTERS)}
# What gives print another meaning, or sends it elsewhere; functions of such names may do so out of sight.
MUTES = re.compile(r"builtins?(__)?\.print\s*=|__builtins?__|setattr\((__)?builtins|sys\.stdout\s*=\s*open")
HUSHES = Words(r"setup_for_dist|suppress|mute|hush|quiet|silen|init_distributed_mode|disable_print")
UNTRACKED = re.compile(r"WANDB_(MODE|DISABLED)|mode\s*=.{0,40}disabled")
PREFIX = re.compile(r"\[?(rank|gpu|process|worker|local_rank|node)\b|rank[=:\s]", re.IGNORECASE)
ENDS = ("exit", "sys.exit", "quit")


def check(view: View) -> Iterator[Found]:
    """Look for output in the code that every rank runs."""
    if not (view.distributed or any(map(view.ranks.programs.accelerated, view.project.users(view.module)))):
        return
    members = view.project.family(view.module)
    texts = [member.text for member in members]
    muted = any(("builtin" in text or "stdout" in text) and MUTES.search(text) for text in texts) or view.hidden(HUSHES)
    ways = [(s, bind) for m in members for s in m.scopes for bind in s.binds.get("sys.stdout", ())]
    muted = muted or any(view.ranks.side(bind.stmt, scope) == -1 for scope, bind in ways)
    untracked = any("wandb" in text and UNTRACKED.search(text) for text in texts)
    for site in view.sites():
        kind = output(view, site)
        if not kind or (muted if kind == "print" else untracked) or not view.ranks.everywhere(site, view.module):
            continue
        if of_error(view, site) or view.ranks.chosen(site) or view.ranks.programs.idle(site.scope):
            continue
        if has_rank(view, site) if kind == "print" else keyword(site.call, "group") is not None:
            yield at(site, "every rank writes this line: keep it on rank 0", severity=Severity.OPINION)
        elif kind == "print":
            yield at(site, "every rank prints this: print on rank 0 only")
        else:
            yield at(site, "every rank starts or feeds its own tracker run: do this on rank 0 only")


def output(view: View, site: Site) -> str:
    """Return what kind of output a call is: "print", "tracker" or ""."""
    if isinstance(site.call.func, ast.Attribute) and site.name not in LAST_NAMES:
        return ""
    full = view.full(site)
    if full in TRACKERS or (site.name == "SummaryWriter" and full.endswith("SummaryWriter")):
        return "tracker"
    plain = dotted(site.call.func) == "print" and (not full or full in AS_PRINT)
    plain = plain and "print" not in (*site.module.top.binds, *site.module.top.defs, *site.scope.binds)
    shown = full in PRINTERS or (site.name == "print_trainable_parameters" and not full)
    if not plain and not shown:
        return ""
    file = dotted(keyword(site.call, "file"))
    elsewhere = (keyword(site.call, "file") is not None and file != "sys.stdout") or keyword(site.call, "stream")
    return "print" if not elsewhere and site.scope.name not in ("__str__", "__repr__") else ""


def of_error(view: View, site: Site) -> bool:
    """Check whether output belongs to an error, which may differ from rank to rank."""
    if any(place == "handlers" for _, place in above(site.stmt, site.module)):
        return True
    block = view.module.up.get(site.stmt)
    siblings = getattr(block[0], block[1], []) if block is not None and block[1] in ("body", "orelse") else []
    return any(isinstance(stmt, ast.Raise) or fails(stmt) for stmt in siblings)


def fails(stmt: ast.stmt) -> bool:
    """Check whether a statement ends the program, or waits for a debugger."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    return (dotted(call.func) in ENDS and constant(next(iter(call.args), None)) != 0) or last(call) == "wait_for_attach"


def has_rank(view: View, site: Site) -> bool:
    """Check whether a line includes the rank that writes it."""
    for value in site.call.args:
        keys = filter(None, map(dotted, walk(value)))
        texts = (text for key in keys for text, _ in view.calls.values(key, site.scope))
        if names_rank(value) or any(names_rank(text) for text in texts if isinstance(text, ast.JoinedStr | ast.BinOp)):
            return True
    return False


def names_rank(value: ast.expr) -> bool:
    """Check whether an expression names the rank, or a text starts with it."""
    if any(RANK.search(name) or name == "get_rank" for name in idents(value)):
        return True
    texts = (constant(node) for node in walk(value))
    return any(isinstance(text, str) and PREFIX.match(text.strip()) for text in texts)


RULE = Rule("LS028", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe", moot=TRAINERS)
