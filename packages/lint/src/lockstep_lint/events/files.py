"""Say which calls fetch, write or read files, and which make, fill or remove folders."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above, guards, withs
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import argument, constant, idents, is_true, keyword, last, strings, walk
from lockstep_lint.analysis.view import View

__all__ = ["FETCHES", "FOLDERS", "OPENS", "SHELLS", "fetches", "folder", "path_read", "path_written"]

# What makes folders and takes them away.
FOLDERS = ("rmtree", "makedirs", "mkdir", "extractall", "unpack_archive", "remove", "unlink", "rename")
# What takes a file away, which only one process can.
TAKES = ("os.remove", "os.unlink", "os.rename")
# Tests that ask whether a folder is there.
ASKS = {"exists", "isdir", "is_dir", "path_exists"}
# What a shell is told to fetch.
SHELLS = {"system", "run", "call", "check_call", "check_output", "Popen"}
FETCH = re.compile(
    r"(^|[;&|]\s*)(sudo\s+)?(wget|curl|gdown|git clone|aws s3 (cp|sync)|gsutil|kaggle datasets download)\b"
)
FETCHES = (
    *("nltk.download", "urllib.request.urlretrieve", "wget.download", "gdown.download"),
    "torchvision.datasets.utils.download_url",
)
# Data sets that fetch their files unless they are told not to.
BRINGS = ("torchtext.datasets.", "torch_geometric.datasets.", "dgl.data.")


def fetches(view: View, site: Site, full: str) -> bool:
    """Check whether a call fetches files without a lock."""
    if is_true(keyword(site.call, "download")) or full in FETCHES:
        return True
    if site.name in SHELLS and full.startswith(("os.", "subprocess.")):
        return any(FETCH.search(" ".join(strings(value))) for value in site.call.args[:1])
    return site.name[:1].isupper() and full.startswith(BRINGS) and site.scope.kind != "class"


def folder(view: View, site: Site, full: str) -> Iterator[str]:
    """Yield how processes collide at a folder: make, ask (and then make), remove or unpack."""
    tests = list(guards(site.stmt, site.module))
    if full == "shutil.rmtree":
        yield "remove"
    elif full in TAKES or (site.name == "unlink" and of_path(view, site) and keyword(site.call, "missing_ok") is None):
        yield from () if is_handled(site) else ("take",)
    elif site.name in ("extractall", "unpack_archive"):
        yield from () if tests else ("unpack",)
    elif makes(view, site, full) and not is_handled(site):
        yield "ask" if any(ASKS & set(idents(guard.test)) for guard in tests) else "make"


def makes(view: View, site: Site, full: str) -> bool:
    """Check whether a call makes a folder that must not be there."""
    if keyword(site.call, "exist_ok") is not None:
        return False
    if full in ("os.makedirs", "os.mkdir"):
        return len(site.call.args) < 3
    return site.name == "mkdir" and not full and of_path(view, site)


def of_path(view: View, site: Site) -> bool:
    """Check whether a call is of a method of a path of pathlib."""
    called = [name for _, _, name in view.origins.calls_of(site.receiver, site.scope)]
    called += [view.names.qualify(node, site.scope) for node in walk(site.receiver)] if site.receiver else []
    return any(name.endswith("pathlib.Path") for name in called)


def is_handled(site: Site) -> bool:
    """Check whether an exception of a call is caught."""
    caught = any(isinstance(node, ast.Try) for node, _ in above(site.stmt, site.module))
    return caught or any(last(block) == "suppress" for block in withs(site.stmt, site.module))


# Calls that write or read a file, with the argument that names it; a last name ends in "*".
WRITERS = {
    **dict.fromkeys(("torch.save", "torch.jit.save"), (1, "f")),
    "safetensors.torch.save_file": (1, "filename"),
    **dict.fromkeys(
        ("numpy.save", "numpy.savez", "save_to_disk*", "to_csv*", "to_parquet*", "to_pickle*"), (0, "file")
    ),
    **dict.fromkeys(("shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.rename"), (1, "dst")),
    "shutil.unpack_archive": (1, "extract_dir"),
}
READERS = (
    *("torch.load", "numpy.load", "numpy.loadtxt", "pandas.read_csv", "pandas.read_parquet", "os.listdir"),
    *("load_from_disk*", "load_file*"),
)
OPENS = frozenset(name.rstrip("*").rpartition(".")[2] for name in (*WRITERS, *READERS)) | {"open", "ImageFolder"}


def path_written(site: Site, full: str) -> ast.expr | None:
    """Return the path of a file or data set that a call writes."""
    if opens(site):
        return site.call.args[0] if str(constant(argument(site.call, 1, "mode")))[:1] in ("w", "x") else None
    place = WRITERS.get(full) or WRITERS.get(f"{site.name}*")
    return argument(site.call, *place) if place is not None else None


def path_read(site: Site, full: str) -> ast.expr | None:
    """Return the path of a file or data set that a call reads."""
    if opens(site):
        mode = argument(site.call, 1, "mode")
        return site.call.args[0] if mode is None or str(constant(mode))[:1] == "r" else None
    reads = full in READERS or f"{site.name}*" in READERS or full.endswith("ImageFolder")
    return next(iter(site.call.args), None) if reads else None


def opens(site: Site) -> bool:
    """Check whether a call is Python's own `open`."""
    return site.name == "open" and isinstance(site.call.func, ast.Name) and bool(site.call.args)
