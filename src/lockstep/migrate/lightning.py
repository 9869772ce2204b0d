"""Analyse scripts with a LightningModule: `trainer.fit` becomes two lines, the module is unchanged.

Unsupported hooks, callbacks and arguments are reported.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.adapters.lightning.refusals import ARGUMENTS, CALLBACK_HOOKS, CALLBACKS, HOOKS, PRECISIONS, WAYS
from lockstep.migrate.parsing import Scope, Site, argument, constant, dotted, keyword
from lockstep.migrate.plain import BECOMES, REFUSED, STAYS, MigrationRow, ParsedScript, shorten

__all__ = ["rows"]

_PACKAGE = r"^(lightning|pytorch_lightning)\."
_MODULE = re.compile(_PACKAGE + r"(\w+\.)*LightningModule$")
_DATA = re.compile(_PACKAGE + r"(\w+\.)*LightningDataModule$")
_TRAINER = re.compile(_PACKAGE + r"(\w+\.)*Trainer$")
_CLI = re.compile(_PACKAGE + r"(\w+\.)*LightningCLI$")
_CALLBACK = re.compile(_PACKAGE + r"(\w+\.)*Callback$")
_FROM_PACKAGE = re.compile(_PACKAGE)
_CALLED = "its hooks are called in their order"
_IN_A_CALLBACK = "do its work in a callback of your own"
_AFTER_FIT = {
    "test": "task.test()",
    "validate": "result.evaluation",
    "predict": "task.predict()",
    "save_checkpoint": "the run's own checkpoints: lockstep.load(result.folder, task)",
}


def rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield the rows of a script; none if it has no LightningModule, Trainer or LightningCLI."""
    trainers, modules = script.constructions(_TRAINER), list(script.classes(_MODULE))
    if not (trainers or modules or script.constructions(_CLI)):
        return
    for owner in modules:
        yield from _module_rows(script, owner)
    for owner in script.classes(_DATA):
        yield script.row(
            owner.node, STAYS, "lockstep uses the dataset, batch size, collate function and workers of its loaders"
        )
    for owner in script.classes(_CALLBACK):
        yield script.row(owner.node, STAYS, _CALLED)
        for name, method in owner.defs.items():
            if name in CALLBACK_HOOKS:
                yield script.row(method.node, REFUSED, CALLBACK_HOOKS[name])
    for site in trainers:
        yield from _trainer_rows(script, site)
    yield from _fit_rows(script, trainers)


def _module_rows(script: ParsedScript, owner: Scope) -> Iterator[MigrationRow]:
    yield script.row(owner.node, STAYS, f"unchanged: lockstep train --lightning {script.source.path}:{owner.name}")
    for name, method in owner.defs.items():
        if name in HOOKS:
            yield script.row(method.node, REFUSED, HOOKS[name])
        if name == "training_step":
            for extra, out in _REMOVED_PARAMETERS.items():
                if extra in method.params:
                    yield script.row(method.node, REFUSED, out, f"{name}(..., {extra})")
    for method in owner.defs.values():
        for bind in method.binds.get("self.automatic_optimization", []):
            if constant(bind.value) is False:
                advice = "manual optimization: docs/lightning.md lists what is supported"
                yield script.row(bind.stmt, STAYS, advice)


_REMOVED_PARAMETERS = {
    "optimizer_idx": "removed in Lightning 2: set automatic_optimization = False",
    "hiddens": "removed in Lightning 2: keep the state in the module",
    "dataloader_iter": "lockstep cannot know which batches it reads: use (batch, batch_idx)",
}


def _trainer_rows(script: ParsedScript, site: Site) -> Iterator[MigrationRow]:
    yield script.row(
        site.call, STAYS, "may stay: pass it to from_lightning, which reads its settings; it does not train"
    )
    for option in site.call.keywords:
        code = f"Trainer({option.arg or '**'}{'=' if option.arg else ''}{shorten(ast.unparse(option.value))})"
        if option.arg is None:
            why = "its content is unknown: see the table in docs/inside/lightning.md"
            yield script.row(option.value, STAYS, why, code)
        elif option.arg == "callbacks":
            yield from _callback_rows(script, option.value)
        else:
            action, advice = _classify_argument(option.arg, option.value)
            yield script.row(option.value, action, advice, code)


def _classify_argument(name: str, value: ast.expr) -> tuple[str, str]:
    row, literal = ARGUMENTS.get(name), constant(value)
    if name == "precision" and literal is not None and str(literal) not in PRECISIONS:
        return REFUSED, f"use one of {', '.join(PRECISIONS)}"
    if row is None:
        return REFUSED, "unknown to lockstep: remove it"
    if row.kind != "refused":
        what = row.what or "no effect in lockstep"
        return STAYS, {"becomes": f"becomes {what}", "task": f"read by the task: {what}"}.get(row.kind, what)
    if isinstance(value, ast.Constant):
        return (REFUSED, row.what) if literal and (name, literal) not in _DEFAULTS else (STAYS, "the default")
    return REFUSED, f"if set: {row.what}"


_DEFAULTS = (("gradient_clip_algorithm", "norm"),)


def _callback_rows(script: ParsedScript, value: ast.expr) -> Iterator[MigrationRow]:
    for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        origins = script.view.origins.of(item, script.module.top)
        call = next((each.call for each in origins if each.call is not None), item)
        constructor = call.func if isinstance(call, ast.Call) else call
        full = script.view.names.qualify(constructor, script.module.top)
        name = full.rpartition(".")[2] if _FROM_PACKAGE.search(full) else ""
        if name in CALLBACKS:
            yield script.row(item, STAYS, CALLBACKS[name], shorten(ast.unparse(item)))
        elif name:
            advice = WAYS.get(name) or f"remove it from the callbacks, and {_IN_A_CALLBACK}"
            yield script.row(item, REFUSED, advice, shorten(ast.unparse(item)))
        elif isinstance(value, ast.List | ast.Tuple):
            yield script.row(item, STAYS, _CALLED, shorten(ast.unparse(item)))
        else:
            yield script.row(item, STAYS, "these callbacks are unknown", shorten(ast.unparse(item)))


def _fit_rows(script: ParsedScript, trainers: list[Site]) -> Iterator[MigrationRow]:
    keys, calls = script.bound_names(trainers) or {"trainer"}, {site.call for site in trainers}
    for site in script.module.sites():
        if dotted(site.receiver) not in keys and site.receiver not in calls:
            continue
        if site.name == "fit":
            module, data = argument(site.call, 0, "model"), keyword(site.call, "datamodule")
            loaders = [argument(site.call, 1, "train_dataloaders"), argument(site.call, 2, "val_dataloaders")]
            sources = [ast.unparse(each) for each in (data, *loaders) if each is not None]
            extra = f", ({', '.join(sources)})" if len(sources) > 1 else f", {sources[0]}" if sources else ""
            conversion = (
                f"lockstep.from_lightning({ast.unparse(module) if module else 'module'}{extra}, trainer=trainer)"
            )
            yield script.row(site.call, BECOMES, f"config, task = {conversion}; result = lockstep.train(config, task)")
            ckpt_path = keyword(site.call, "ckpt_path")
            if ckpt_path is not None and constant(ckpt_path) not in (None, "last"):
                advice = (
                    "a run resumes from its folder (same experiment_name); load a Lightning checkpoint's weights first"
                )
                yield script.row(ckpt_path, REFUSED, advice, f"ckpt_path={ast.unparse(ckpt_path)}")
        elif site.name == "tune":
            yield script.row(
                site.call, BECOMES, "lockstep.find_lr(config, task), lockstep.find_micro_batch(config, task)"
            )
        elif site.name in _AFTER_FIT:
            yield script.row(site.call, BECOMES, _AFTER_FIT[site.name])
    for site in script.constructions(_CLI):
        advice = "lockstep train --lightning FILE:Module --datamodule FILE:DataModule, with its flags"
        yield script.row(site.call, BECOMES, advice)
