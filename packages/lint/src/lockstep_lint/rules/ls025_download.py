"""LS025: a download on every rank."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above, guards, withs
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, dotted, idents, is_true, keyword, last, strings, walk
from lockstep_lint.analysis.rank_names import RANK, RANKED
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What says that a path is the process's own.
OWN = Words(
    rf"{RANKED}|(?<![a-z])te?mp(?!lat)|(?-i:(?<=[a-z])Te?mp(?!lat))|worker(?!s)|(?<![a-z])(get)?pid(?![a-z])|uuid",
    re.IGNORECASE,
)
WAITS = {"barrier", "wait_for_everyone", "synchronize", "monitored_barrier", "all_reduce", "broadcast"}
HELPERS = Words(r"barrier|sync|wait|first", re.IGNORECASE)
# What processes hold one after the other (`with FileLock(path):`).
LOCKS = Words(r"(?<!b)(?<!c)lock(ed|file)?$", re.IGNORECASE)
# What a data set is given beside its place and its part.
OPTIONS = {"download", "transform", "target_transform", "transforms", "exist_ok"}
# How far up the calls of a function are followed.
MAX_CALLS = 3
MAX_CALLERS = 20
# What a function is called that makes the folder it is given.
MAKES_FOLDER = Words(r"dir|folder|path", re.IGNORECASE)
# Tests that ask whether the folder is there.
ASKS = {"exists", "isdir", "is_dir", "path_exists"}


# What a shell is told to fetch.
SHELLS = {"system", "run", "call", "check_call", "check_output", "Popen"}
FETCH = re.compile(
    r"(^|[;&|]\s*)(sudo\s+)?(wget|curl|gdown|git clone|aws s3 (cp|sync)|gsutil|kaggle datasets download)\b"
)


# Data sets that fetch their files unless they are told not to.
BRINGS = ("torchtext.datasets.", "torch_geometric.datasets.", "dgl.data.")

FETCHED = "every process downloads into the same place: open it under accelerator.main_process_first()"
# What makes folders and takes them away.
FOLDERS = ("rmtree", "makedirs", "mkdir", "extractall", "unpack_archive")


def check(view: View) -> Iterator[Found]:
    """Looks for `download=True` and fetching calls in the code that all ranks run."""
    if not view.distributed:
        if "accelerate" in view.frameworks:
            yield from beside_accelerator(view)
        return
    for site in view.sites():
        if not fetches(view, site) or own(site) or in_turn(view, site):
            continue
        if view.ranks.several(site.stmt, site.scope):
            yield at(
                site,
                "every rank downloads into the same place at once: let one rank do it, with a barrier for the others",
            )
    for site in view.sites(*FOLDERS):
        message = removes(view, site)
        if message and not own(site) and view.ranks.every(site.stmt, site.scope) and not in_turn(view, site):
            yield at(site, message)
    for site in view.sites():
        if MAKES_FOLDER.search(site.name) and helped(view, site):
            yield at(
                site, "every rank has this helper make one folder: call it on rank 0 only, or pass exist_ok=True there"
            )
    yield from unwaited(view)


def helped(view: View, site: Site) -> bool:
    """Whether all ranks have a function of another file make the folder that they give it, which only one of them can
    make (`ensure_dir(out)`).
    """
    if own(site) or not view.ranks.every(site.stmt, site.scope) or in_turn(view, site):
        return False
    function = view.calls.target(site.call, site.scope)
    if function is None or function.module is view.module or function.owner is not None:
        return False
    return any(
        removes(view, s)
        and dotted(next(iter(s.call.args), None)) in function.params
        and not view.ranks.main_only(s.stmt, function)
        and not view.ranks.single(s.stmt, function)
        for name in ("makedirs", "mkdir")
        for s in function.named(name)
    )


def own(site: Site) -> bool:
    """Whether a call names a place of the process's own, or is given one by a name."""
    words = [*idents(site.call), *strings(site.call)]
    inner = {id(node.value) for node in walk(site.call) if isinstance(node, ast.Attribute)}  # `args` in `args.folder`
    given = {dotted(node) or "" for node in walk(site.call) if id(node) not in inner}
    for bind in (bind for name in given for bind in site.scope.binds.get(name, [])):
        if bind.value is not None and bind.stmt.lineno < site.line:
            words += [*idents(bind.value), *strings(bind.value)]
    return any(RANK.search(word) or OWN.search(word) for word in words)


def beside_accelerator(view: View) -> Iterator[Found]:
    """A download, or a folder that only one process can make, in the function that makes the Accelerator, of which
    `accelerate launch` starts several.
    """
    for site in view.sites():
        message = FETCHED if fetches(view, site) else removes(view, site) if site.name in FOLDERS else ""
        made = [s for s in site.scope.named("Accelerator") if view.full(s).startswith("accelerate")] if message else []
        if not made or view.ranks.main_only(site.stmt, site.scope) or in_turn(view, site):
            continue
        if message is FETCHED or not own(site):
            yield at(site, message)


def unwaited(view: View) -> Iterator[Found]:
    """What rank 0 downloads and all ranks then open in the same function, with nothing that lets them wait."""
    for scope in view.scopes:
        first = [s for s in scope.sites if fetches(view, s) and view.ranks.side(s.stmt, scope) == 1]
        for site in scope.sites if first else ():
            before = [s for s in first if s.line < site.line and ast.dump(s.call.func) == ast.dump(site.call.func)]
            if (
                not before
                or fetches(view, site)
                or view.ranks.side(site.stmt, scope)
                or view.ranks.single(site.stmt, scope)
            ):
                continue
            between = [s for s in scope.sites if before[-1].line < s.line < site.line]
            if not any(view.effects.does(s, WAITS) for s in between) and not view.hidden(HELPERS):
                yield at(
                    site, "may open the data before rank 0 has downloaded it: put torch.distributed.barrier() between"
                )


def removes(view: View, site: Site) -> str:
    """What is wrong with a call in which ranks get in each other's way."""
    full = view.full(site)
    if full == "shutil.rmtree":
        return "every rank removes this folder, also what another has put there since: do it on rank 0, then a barrier"
    if site.name in ("extractall", "unpack_archive"):
        tested = any(True for _ in guards(site.stmt, site.module))
        return "" if tested else "every rank unpacks into the same folder at once: do it on rank 0, then a barrier"
    path = site.name == "mkdir" and not full and view.names.definition(site.call.func, site.scope) is None
    plain = full in ("os.makedirs", "os.mkdir") and len(site.call.args) < 3
    plain = (plain or (path and is_path(view, site))) and keyword(site.call, "exist_ok") is None
    tested = any(ASKS & set(idents(guard.test)) for guard in guards(site.stmt, site.module))
    handled = any(isinstance(node, ast.Try) for node, _ in above(site.stmt, site.module)) or any(
        last(block) == "suppress" for block in withs(site.stmt, site.module)
    )
    if plain and not handled:
        if tested:
            return "two ranks may find that there is no such folder, and one then fails: pass exist_ok=True"
        return "every rank makes this folder, and all but the first fail: pass exist_ok=True, or do it on rank 0"
    return ""


def fetches(view: View, site: Site) -> bool:
    """Whether a call fetches files without a lock."""
    if is_true(keyword(site.call, "download")):
        return True
    if site.name in SHELLS and view.full(site).startswith(("os.", "subprocess.")):
        return any(FETCH.search(text) for text in words(site.call))
    full = view.full(site)
    if site.name[:1].isupper() and full.startswith(BRINGS) and site.scope.kind != "class":
        return True
    return full in (
        "nltk.download",
        "urllib.request.urlretrieve",
        "wget.download",
        "gdown.download",
        "torchvision.datasets.utils.download_url",
    )


def words(call: ast.Call) -> Iterator[str]:
    """The commands that a call of the shell is given, whole or in a list of words."""
    for value in call.args[:1]:
        yield " ".join(strings(value))


def is_path(view: View, site: Site) -> bool:
    """Whether the receiver of a `mkdir()` is a path of pathlib."""
    called = [full for _, _, full in view.origins.calls_of(site.receiver, site.scope)]
    parts = (
        [full for node in walk(site.receiver) for full in [view.names.qualify(node, site.scope)]]
        if site.receiver
        else []
    )
    return any(full.endswith("pathlib.Path") for full in (*called, *parts))


def in_turn(view: View, site: Site, depth: int = 0) -> bool:
    """Whether one rank goes first: at the call, by a block around it, or where its function is called."""
    if waits_here(view, site) or any(map(functools.partial(orders, view, site), withs(site.stmt, site.module))):
        return True
    callers = [c for c in view.calls.callers(site.scope) if not view.ranks.kept_out(c)] if depth < MAX_CALLS else []
    return bool(callers) and all(in_turn(view, caller, depth + 1) for caller in callers[:MAX_CALLERS])


def waits_here(view: View, site: Site) -> bool:
    """Whether a barrier that some ranks wait at lets one rank go first, or the main rank has done the same before."""
    before = [
        s for s in site.scope.named(site.name) if view.ranks.side(s.stmt, s.scope) == 1 and same_work(view, s, site)
    ]
    first = before or any(fetches(view, s) and view.ranks.side(s.stmt, s.scope) == 1 for s in site.scope.sites)
    own = view.ranks.side(site.stmt, site.scope)
    if first and own == -1:
        return True  # the main rank has fetched it, and the others find it there
    for one in before if not own else ():
        between = [s for s in site.scope.sites if one.line < s.line < site.line]
        if any(view.effects.does(s, WAITS) and not view.ranks.side(s.stmt, s.scope) for s in between):
            return True
    return any(
        view.ranks.side(s.stmt, site.scope) not in (0, own)
        for s in site.scope.sites
        if s.name in ("barrier", "wait_for_everyone") and not left(s, site) and (own or s.line < site.line)
    )


def same_work(view: View, one: Site, other: Site) -> bool:
    """Whether two calls of one name do the same: they run a function of the project, or are given the same."""
    return view.calls.target(other.call, other.scope) is not None or given_alike(one.call) == given_alike(other.call)


def given_alike(call: ast.Call) -> tuple[str, ...]:
    """What a call is given, without what says nothing of the files that it writes."""
    words = [k for k in call.keywords if k.arg not in OPTIONS and not (k.arg == "train" and is_true(k.value))]
    return (*map(ast.dump, call.args), *sorted(map(ast.dump, words)))


def orders(view: View, site: Site, block: ast.expr) -> bool:
    """Whether a block is a lock, or a context manager of the project that has some ranks wait for the others."""
    if LOCKS.search(last(block)):
        return True
    function = view.calls.target(block, site.scope) if isinstance(block, ast.Call) else None
    waits = function.named("barrier") if function is not None else []
    return any(view.ranks.side(wait.stmt, wait.scope) for wait in waits)


def left(wait: Site, site: Site) -> bool:
    """Whether the ranks that wait there never come to the download (`if rank == 0: barrier(); return`)."""
    around = [node for node, place in above(wait.stmt, wait.module) if isinstance(node, ast.If) and place == "body"]
    return any(isinstance(node.body[-1], ast.Return) and (node.end_lineno or 0) < site.line for node in around)


RULE = Rule(
    code="LS025",
    name="prepared on every rank",
    what=(
        "All ranks download a dataset to the same place, or make or remove the same folder, without one going first; "
        "or one rank downloads and the others do not wait."
    ),
    why=(
        "The processes write the same files at the same time: some read a half-written archive and fail, or train"
        " on broken data."
    ),
    bad="""
import torch.distributed as dist
from torchvision.datasets import MNIST

def main():
    dist.init_process_group("nccl")
    data = MNIST("data", download=True)
    dist.destroy_process_group()
    return data
""",
    good="""
import torch.distributed as dist
from torchvision.datasets import MNIST

def main(rank):
    dist.init_process_group("nccl")
    if rank == 0:
        MNIST("data", download=True)
    dist.barrier()
    data = MNIST("data")
    dist.destroy_process_group()
    return data
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Download on rank 0, then a barrier, then open it on all ranks",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep"}),
    note=(
        "A test before (`if not os.path.exists(...)`) does not help, since two ranks may pass it at once; folders that "
        "are made in a `try` are left alone. It is told also where a helper of another file makes the folder that it "
        "is given (`ensure_dir(out)`). Data sets of torchtext, PyTorch Geometric and DGL fetch unasked. "
        "Downloads that lock their place (`from_pretrained`, `load_dataset`, "
        "the Hub) are no finding."
    ),
)
