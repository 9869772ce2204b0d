"""Analyse scripts with a LightningModule: `trainer.fit` becomes two lines, the module stays.

Hooks, callbacks and arguments that are not served are named.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.adapters.lightning.refusals import ARGUMENTS, CALLBACKS, HOOKS, PRECISIONS, WAYS
from lockstep.migrate.parsing import Scope, Site, argument, constant, dotted, keyword
from lockstep.migrate.plain import BECOMES, REFUSED, STAYS, Row, Script, shortened

__all__ = ["rows"]

_PACKAGE = r"^(lightning|pytorch_lightning)\."
_MODULE = re.compile(_PACKAGE + r"(\w+\.)*LightningModule$")
_DATA = re.compile(_PACKAGE + r"(\w+\.)*LightningDataModule$")
_TRAINER = re.compile(_PACKAGE + r"(\w+\.)*Trainer$")
_CLI = re.compile(_PACKAGE + r"(\w+\.)*LightningCLI$")
_CALLBACK = re.compile(_PACKAGE + r"(\w+\.)*Callback$")
_THEIRS = re.compile(_PACKAGE)
_LINE = "write what it does as a line in the loop of lockstep.Run"
_AFTER = {
    "test": "task.test()",
    "validate": "result.evaluation",
    "predict": "task.predict()",
    "save_checkpoint": "the run's own checkpoints: lockstep.load(result.folder, task)",
}


def rows(script: Script) -> Iterator[Row]:
    """Yield the rows of a script; none if it has neither module nor Trainer."""
    trainers, modules = script.made(_TRAINER), list(script.classes(_MODULE))
    if not (trainers or modules or script.made(_CLI)):
        return
    for owner in modules:
        yield from _module(script, owner)
    for owner in script.classes(_DATA):
        yield script.row(owner.node, STAYS, "its loaders are taken apart into dataset, batch size, collate and workers")
    for owner in script.classes(_CALLBACK):
        yield script.row(owner.node, REFUSED, f"a callback of your own is not called: {_LINE}")
    for site in trainers:
        yield from _trainer(script, site)
    yield from _fits(script, trainers)


def _module(script: Script, owner: Scope) -> Iterator[Row]:
    yield script.row(owner.node, STAYS, f"unedited: lockstep train --lightning {script.source.path}:{owner.name}")
    for name, method in owner.defs.items():
        if name in HOOKS:
            yield script.row(method.node, REFUSED, HOOKS[name])
        if name == "training_step":
            for more, out in _OLD.items():
                if more in method.params:
                    yield script.row(method.node, REFUSED, out, f"{name}(..., {more})")
    for method in owner.defs.values():
        for bind in method.binds.get("self.automatic_optimization", []):
            if constant(bind.value) is False:
                here = "its training_step takes its optimizers' steps itself: docs/lightning.md says what is served"
                yield script.row(bind.stmt, STAYS, here)


_OLD = {
    "optimizer_idx": "Lightning 2 removed it: set automatic_optimization = False",
    "hiddens": "Lightning 2 removed it: keep the state in the module",
    "dataloader_iter": "which batches it reads is not known: take (batch, batch_idx)",
}


def _trainer(script: Script, site: Site) -> Iterator[Row]:
    yield script.row(site.call, STAYS, "may stay as from_lightning's third argument, which reads it; it does not train")
    for given in site.call.keywords:
        there = f"Trainer({given.arg or '**'}{'=' if given.arg else ''}{shortened(ast.unparse(given.value))})"
        if given.arg is None:
            yield script.row(given.value, STAYS, "what is in it cannot be seen: docs/lightning.md has the table", there)
        elif given.arg == "callbacks":
            yield from _callbacks(script, given.value)
        else:
            action, here = _argument(given.arg, given.value)
            yield script.row(given.value, action, here, there)


def _argument(name: str, value: ast.expr) -> tuple[str, str]:
    row, given = ARGUMENTS.get(name), constant(value)
    if name == "precision" and given is not None and str(given) not in PRECISIONS:
        return REFUSED, f"use one of {', '.join(PRECISIONS)}"
    if row is None:
        return REFUSED, "lockstep does not know it: leave it out"
    if row.kind != "refused":
        what = row.what or "it has no meaning here"
        return STAYS, {"becomes": f"read as {what}", "task": f"read by the task: {what}"}.get(row.kind, what)
    if isinstance(value, ast.Constant):
        return (REFUSED, row.what) if given and (name, given) not in _DEFAULTS else (STAYS, "as it is by default")
    return REFUSED, f"where it is set: {row.what}"


_DEFAULTS = (("gradient_clip_algorithm", "norm"),)


def _callbacks(script: Script, value: ast.expr) -> Iterator[Row]:
    for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        made = script.view.origins.of(item, script.module.top)
        call = next((each.call for each in made if each.call is not None), item)
        named = call.func if isinstance(call, ast.Call) else call
        full = script.view.names.qualify(named, script.module.top)
        name = full.rpartition(".")[2] if _THEIRS.search(full) else ""
        if name in CALLBACKS:
            yield script.row(item, STAYS, CALLBACKS[name], shortened(ast.unparse(item)))
        elif isinstance(value, ast.List | ast.Tuple):
            here = WAYS.get(name) or f"leave it out of the callbacks, and {_LINE}"
            yield script.row(item, REFUSED, here, shortened(ast.unparse(item)))
        else:
            yield script.row(item, STAYS, "which callbacks these are cannot be seen", shortened(ast.unparse(item)))


def _fits(script: Script, trainers: list[Site]) -> Iterator[Row]:
    keys, calls = script.named(trainers) or {"trainer"}, {site.call for site in trainers}
    for site in script.module.sites():
        if dotted(site.receiver) not in keys and site.receiver not in calls:
            continue
        if site.name == "fit":
            module, data = argument(site.call, 0, "model"), keyword(site.call, "datamodule")
            loaders = [argument(site.call, 1, "train_dataloaders"), argument(site.call, 2, "val_dataloaders")]
            given = [ast.unparse(each) for each in (data, *loaders) if each is not None]
            more = f", ({', '.join(given)})" if len(given) > 1 else f", {given[0]}" if given else ""
            made = f"lockstep.from_lightning({ast.unparse(module) if module else 'module'}{more}, trainer=trainer)"
            yield script.row(site.call, BECOMES, f"config, task = {made}; result = lockstep.train(config, task)")
            resumed = keyword(site.call, "ckpt_path")
            if resumed is not None and constant(resumed) not in (None, "last"):
                here = (
                    "a run resumes by its folder: the same experiment_name; of a Lightning checkpoint load the weights"
                )
                yield script.row(resumed, REFUSED, here, f"ckpt_path={ast.unparse(resumed)}")
        elif site.name == "tune":
            yield script.row(
                site.call, BECOMES, "lockstep.find_lr(config, task), lockstep.find_micro_batch(config, task)"
            )
        elif site.name in _AFTER:
            yield script.row(site.call, BECOMES, _AFTER[site.name])
    for site in script.made(_CLI):
        here = "lockstep train --lightning FILE:Module --datamodule FILE:DataModule, with its flags"
        yield script.row(site.call, BECOMES, here)
