"""The files that a script writes and reads: models, checkpoints and data."""

import ast
from collections.abc import Callable

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword, last
from lockstep_lint.analysis.view import View

__all__ = ["handed_path", "makes_file", "reads_file", "same_path", "written"]

# What gives the path that a call writes or reads.
Finder = Callable[[View, Site], ast.expr | None]


def written(view: View, site: Site) -> ast.expr | None:
    """The path that a call saves a model or a checkpoint to."""
    full = view.full(site)
    if full in ("torch.save", "torch.jit.save", "safetensors.torch.save_file"):
        return argument(site.call, 1, "f" if full.startswith("torch") else "filename")
    if site.name == "save_pretrained" and keyword(site.call, "is_main_process") is None:
        model = view.kinds.is_model(site.receiver, site.scope) or any(
            last(call) == "unwrap_model" for call, _, _ in view.origins.calls_of(site.receiver, site.scope)
        )
        return argument(site.call, 0, "save_directory") if model else None
    return None


def makes_file(view: View, site: Site) -> ast.expr | None:
    """The path of a file or data set that a call writes."""
    path = written(view, site)
    if path is not None:
        return path
    full = view.full(site)
    if full in ("numpy.save", "numpy.savez") or site.name in ("save_to_disk", "to_csv", "to_parquet", "to_pickle"):
        return argument(site.call, 0, "file")
    if full in ("shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.rename"):
        return argument(site.call, 1, "dst")
    if full == "shutil.unpack_archive":
        return argument(site.call, 1, "extract_dir")
    mode = constant(argument(site.call, 1, "mode"))
    opens = isinstance(site.call.func, ast.Name) and site.name == "open" and isinstance(mode, str) and mode[:1] in "wx"
    return site.call.args[0] if opens and site.call.args else None


def reads_file(view: View, site: Site) -> ast.expr | None:
    """The path of a file or data set that a call reads."""
    full = view.full(site)
    readers = ("torch.load", "numpy.load", "numpy.loadtxt", "pandas.read_csv", "pandas.read_parquet", "os.listdir")
    if full in readers or site.name in ("load_from_disk", "load_file") or full.endswith("ImageFolder"):
        return site.call.args[0] if site.call.args else None
    mode = argument(site.call, 1, "mode")
    opens = isinstance(site.call.func, ast.Name) and site.name == "open"
    reads = mode is None or str(constant(mode))[:1] == "r"
    return site.call.args[0] if opens and reads and site.call.args else None


def handed_path(view: View, site: Site, find: Finder, side: int) -> ast.expr | None:
    """The path that a call hands to a function of the project, which writes or reads such a file on one side of a test
    of the rank (1), or without any (0).
    """
    function = view.calls.target(site.call, site.scope)
    if function is None or function.owner is not None:
        return None
    for inner, name in taken(view, function, find):
        if view.ranks.side(inner.stmt, function) == side:
            return argument(site.call, 1, "f") if name is None else passed(site, function, name)
    return None


@kept
def taken(view: View, function: Scope, find: Finder) -> tuple[tuple[Site, str | None], ...]:
    """The calls in a function that write or read what one of its parameters names; None where it hands all that it is
    given to torch.save (`def save_on_master(*args): torch.save(*args)`).
    """
    found: list[tuple[Site, str | None]] = []
    for inner in function.sites:
        first = next(iter(inner.call.args), None)
        if isinstance(first, ast.Starred) and view.full(inner) == "torch.save":
            found.append((inner, None))
            continue
        path = find(view, inner)
        if isinstance(path, ast.Name) and path.id in function.params and path.id not in function.binds:
            found.append((inner, path.id))
    return tuple(found)


def same_path(view: View, path: ast.expr, read: ast.expr, scope: Scope) -> bool:
    """Whether two paths are written alike, by themselves or by what the names for them were given last."""
    return bool(forms(view, path, scope) & forms(view, read, scope))


def forms(view: View, path: ast.expr, scope: Scope) -> set[str]:
    """How a path is written, also where a name stands for it."""
    found = view.origins.binds(dotted(path) or "", scope, path.lineno)
    values = [bind.value for bind, _ in found if bind.value is not None and bind.how == "assign" and not bind.path]
    return {ast.unparse(each) for each in (path, *(values if len(found) == 1 else ()))}
