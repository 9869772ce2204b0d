"""Which loaders have no workers, by their own arguments or by the options that they are given."""

import ast

from lockstep_lint.analysis.devices import on_device
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.view import View

__all__ = ["no_workers", "own_loader"]


def no_workers(view: View, site: Site) -> bool:
    """Whether a loader certainly has no workers, and gives more than a first batch."""
    if one_batch(site) or moved_before(view, site):
        return False
    value = keyword(site.call, "num_workers")
    if value is not None:
        found = view.origins.of(value, site.scope)
        return bool(found) and all(constant(origin.node) == 0 for origin in found)
    if len(site.call.args) > 5 or any(isinstance(arg, ast.Starred) for arg in site.call.args):
        return False
    return all(leaves_out(view, item.value, site) for item in site.call.keywords if item.arg is None)


def moved_before(view: View, site: Site) -> bool:
    """Whether a data set is made of tensors that are on the device already, which its workers could not hand out."""
    data = argument(site.call, 0, "dataset")
    return any(
        last(call).endswith(("Dataset", "set", "sets", "Data"))
        and any(on_device(view, value, home) for value in call.args)
        for call, home, _ in view.origins.calls_of(data, site.scope)
    )


def own_loader(view: View, site: Site) -> bool:
    """Whether a call of `super().__init__` makes a DataLoader of a class of the project's own."""
    owner = site.scope.owner
    supers = isinstance(site.receiver, ast.Call) and last(site.receiver) == "super"
    return supers and owner is not None and any(base.endswith("data.DataLoader") for base in view.names.bases_of(owner))


def one_batch(site: Site) -> bool:
    """Whether a loader is made for its first batch alone (`next(iter(DataLoader(...)))`)."""
    return any(
        isinstance(node, ast.Call) and last(node) == "iter" and node.args[:1] == [site.call]
        for asks in walk(site.stmt)
        if isinstance(asks, ast.Call) and last(asks) == "next"
        for node in asks.args
    )


def leaves_out(view: View, node: ast.expr, site: Site) -> bool:
    """Whether the options that a loader is given as `**options` are written out, and have no workers among them."""
    name = dotted(node)
    if name is None:
        return False
    given = [bind.value for bind, _ in view.origins.binds(name, site.scope, site.line)]
    fed = any(dotted(other.receiver) == name and not harmless(other) for other in site.scope.sites) or any(
        isinstance(target, ast.Subscript) and dotted(target.value) == name and adds_workers(target.slice)
        for stmt in site.scope.stmts
        if isinstance(stmt, ast.Assign)
        for target in stmt.targets
    )
    return bool(given) and not fed and all(map(without_workers, given))


def harmless(site: Site) -> bool:
    """Whether a dictionary's method gives it no workers (`options.update({"batch_size": 8})`)."""
    if site.name != "update":
        return site.name in ("pop", "get", "items", "keys", "values", "copy")
    named = all(item.arg not in (None, "num_workers") for item in site.call.keywords)
    return named and all(map(without_workers, site.call.args))


def adds_workers(key: ast.expr) -> bool:
    """Whether what is set under a key of a dictionary may be its workers."""
    name = constant(key)
    return not isinstance(name, str) or name == "num_workers"


def without_workers(value: ast.expr | None) -> bool:
    """Whether a dictionary is written out and has no workers, or none of them."""
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(value, ast.Dict):
        pairs = [(constant(key), each) for key, each in zip(value.keys, value.values, strict=True)]
    elif isinstance(value, ast.Call) and last(value) == "dict" and not value.args:
        pairs = [(item.arg, item.value) for item in value.keywords]
    else:
        return False
    return all(key is not None and (key != "num_workers" or constant(each) == 0) for key, each in pairs)
