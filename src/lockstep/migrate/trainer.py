"""Analyse scripts with a Hugging Face Trainer: `trainer.train()` becomes two lines.

The rest is unchanged, or refused by name.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.adapters.hf_trainer.refusals import (
    ARGUMENTS,
    CALLBACKS,
    EVALUATION,
    LOOP,
    OPTIMIZERS,
    SAMPLING,
    SINKS,
    TRL,
    TRL_TRAINERS,
)
from lockstep.migrate.parsing import Site, constant, dotted, is_true, keyword
from lockstep.migrate.plain import BECOMES, GOES, REFUSED, STAYS, MigrationRow, ParsedScript, shorten

__all__ = ["rows"]

_TRAINER = re.compile(r"^(transformers|trl)\.(\w+\.)*\w*Trainer$")
_ARGUMENTS = re.compile(r"^(transformers\.(\w+\.)*(Seq2Seq)?TrainingArguments|trl\.(\w+\.)*\w+Config)$")
_TRAINING_ARGUMENTS = re.compile(r"^transformers\.(\w+\.)*TrainingArguments$")
_CALLBACK = re.compile(r"^transformers\.(\w+\.)*\w+Callback$")
_TRAIN_LINES = "config, task = lockstep.from_trainer(trainer); result = lockstep.train(config, task)"
_AFTER_TRAINING = {
    "save_model": "saves the trained model",
    "evaluate": "evaluates the trained model",
    "predict": "uses the trained model",
    "save_state": "trainer.state does not change: use result and metrics.jsonl in result.folder",
}
_OUTPUT = {
    "metrics": "result.evaluation, and metrics.jsonl in result.folder",
    "training_loss": "metrics.jsonl in result.folder",
    "global_step": "result.global_step",
}
_IN_THE_LOOP = "do its work in the loop of lockstep.Run"
_CALLED = "its events are called, and control.should_* holds; should_epoch_stop is refused"


def rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield the rows of a script; none if it constructs no Trainer."""
    trainers = script.constructions(_TRAINER)
    keys = script.bound_names(trainers) or {"trainer"}
    if not trainers and not list(script.classes(_TRAINER)):
        return
    yield from _trainer_rows(script, trainers)
    yield from _class_rows(script)
    yield from _argument_rows(script)
    yield from _callback_rows(script, trainers, keys)
    yield from _train_rows(script, trainers, keys)
    yield from _data_rows(script)


def _trainer_rows(script: ParsedScript, trainers: list[Site]) -> Iterator[MigrationRow]:
    for site in trainers:
        full = script.view.full(site)
        if full.startswith("trl.") and (full.startswith("trl.experimental.") or not full.endswith(TRL_TRAINERS)):
            yield script.row(site.call, REFUSED, f"of trl {', '.join(TRL_TRAINERS)} are supported: train it with trl")
        else:
            yield script.row(site.call, STAYS, "unchanged: lockstep uses its model, data, collator and methods")
    for site, full in script.call_names:
        if full.startswith("transformers.") and full.endswith("HfArgumentParser"):
            advice = "if it reads a JSON file, no edit is needed: lockstep train --hf-script FILE --hf-args args.json"
            yield script.row(site.call, STAYS, advice)
        elif full.startswith("trl.") and full.endswith("TrlParser"):
            advice = "no edit is needed: lockstep train --hf-script FILE --hf-args args.yaml, the file of its --config"
            yield script.row(site.call, STAYS, advice)


def _class_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    for owner in script.classes(_TRAINER):
        for name, method in owner.defs.items():
            if name in LOOP:
                advice = f"lockstep does not call it: {_IN_THE_LOOP}, or move its computation to compute_loss"
                yield script.row(method.node, REFUSED, advice)
            elif name in EVALUATION:
                advice = "not called during training: set eval_strategy='no' and call it afterwards, or it is refused"
                yield script.row(method.node, STAYS, advice)
    for owner in script.classes(_CALLBACK):
        yield script.row(owner.node, STAYS, _CALLED)


def _argument_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    for site, full in script.call_names:
        definition = script.view.names.definition(site.call.func, site.scope)
        derived = (
            definition is not None
            and definition.kind == "class"
            and any(_ARGUMENTS.search(name) for name in script.view.names.bases_of(definition))
        )
        if not _ARGUMENTS.search(full) and not derived:
            continue
        name = full.rpartition(".")[2] or site.name
        for option in site.call.keywords:
            code = f"{name}({option.arg or '**'}{'=' if option.arg else ''}{shorten(ast.unparse(option.value))})"
            action, advice = _classify_argument(option.arg, option.value, exact=bool(_TRAINING_ARGUMENTS.search(full)))
            yield script.row(option.value, action, advice, code)


def _classify_argument(name: str | None, value: ast.expr, exact: bool) -> tuple[str, str]:
    """Return an argument's action and advice; `exact`: the class is TrainingArguments itself."""
    if name is None:
        return STAYS, "its content is unknown: see the table in docs/inside/hf-trainer.md"
    if name in _RENAMED:
        action, advice = _classify_argument(_RENAMED[name], value, exact)
        return (REFUSED, advice) if action == REFUSED else (BECOMES, f"{_RENAMED[name]}=..., its new name, {advice}")
    row, setting = ARGUMENTS.get(name) or TRL.get(name), constant(value)
    literal = isinstance(value, ast.Constant)
    if row is None:
        return (REFUSED, "unknown to lockstep: remove it") if exact else (STAYS, "its own methods read it")
    why = _refusal_of(name, setting)
    if why:
        return REFUSED, why
    if row.kind != "refused":
        what = row.what or "no effect in lockstep"
        return STAYS, {"becomes": f"becomes {what}", "task": f"read by {what}"}.get(row.kind, what)
    unset = literal and (not setting or (name, setting) in _DEFAULTS)
    if unset:
        return STAYS, "the default"
    return REFUSED, row.what if literal or not isinstance(value, ast.Name | ast.Attribute) else f"if set: {row.what}"


# Arguments of older versions of transformers.
_RENAMED = {"evaluation_strategy": "eval_strategy"}
_DEFAULTS = (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default"))


def _refusal_of(name: str, setting: object) -> str:
    """Return why a supported argument's value is refused; "" if it is not."""
    if not isinstance(setting, str):
        return ""
    if name == "optim" and setting not in OPTIMIZERS:
        return f"use one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs to the Trainer"
    if name == "train_sampling_strategy" and setting not in SAMPLING:
        return "its lists are made for one number of ranks: use group_by_length"
    if name == "report_to" and setting not in (*SINKS, "none"):
        return f"use {' or '.join(SINKS)}, or log in the loop of lockstep.Run"
    if name == "lr_scheduler_type" and setting == "greedy":
        return "use another scheduler, or dataclasses.replace(config, optim=...)"
    return ""


def _callback_rows(script: ParsedScript, trainers: list[Site], keys: set[str]) -> Iterator[MigrationRow]:
    listed = [keyword(site.call, "callbacks") for site in trainers]
    callbacks = [item for each in listed if isinstance(each, ast.List | ast.Tuple) for item in each.elts]
    callbacks += [site.call.args[0] for site in script.methods(keys, "add_callback".__eq__) if site.call.args]
    for item in callbacks:
        constructor = item.func if isinstance(item, ast.Call) else item
        full = next((script.view.names.qualify(constructor, scope) for scope in script.module.scopes[:1]), "")
        name = full.rpartition(".")[2] if full.startswith(("transformers.", "trl.")) else ""
        if name in CALLBACKS:
            yield script.row(item, STAYS, CALLBACKS[name], shorten(ast.unparse(item)))
        elif name:
            advice = "remove it from the callbacks, and do its work in a callback of your own"
            yield script.row(item, REFUSED, advice, shorten(ast.unparse(item)))
        else:
            yield script.row(item, STAYS, _CALLED, shorten(ast.unparse(item)))


def _train_rows(script: ParsedScript, trainers: list[Site], keys: set[str]) -> Iterator[MigrationRow]:
    calls = {site.call for site in trainers}
    for site in script.module.sites():
        receiver = site.receiver
        if dotted(receiver) not in keys and receiver not in calls:
            continue
        if site.name == "train":
            yield script.row(site.call, BECOMES, _TRAIN_LINES)
            yield from _resume_rows(script, site)
        elif site.name == "hyperparameter_search":
            yield script.row(site.call, REFUSED, "write a search as a loop of runs: examples/sweep.py")
        elif site.name in _AFTER_TRAINING:
            yield script.row(site.call, STAYS, _AFTER_TRAINING[site.name])
    outputs = script.bound_names(list(script.methods(keys, "train".__eq__)))
    for node in script.attributes(outputs):
        if node.attr in _OUTPUT:
            yield script.row(node, BECOMES, _OUTPUT[node.attr])


def _resume_rows(script: ParsedScript, site: Site) -> Iterator[MigrationRow]:
    """Yield the row of `trainer.train(resume_from_checkpoint=...)`."""
    checkpoint = keyword(site.call, "resume_from_checkpoint") or (site.call.args[0] if site.call.args else None)
    if checkpoint is None or (isinstance(checkpoint, ast.Constant) and not checkpoint.value):
        return
    code = f"resume_from_checkpoint={ast.unparse(checkpoint)}"
    if isinstance(constant(checkpoint), str):
        advice = "a run resumes from its folder; load the weights of a Trainer's checkpoint first"
        yield script.row(checkpoint, REFUSED, advice, code)
    else:
        yield script.row(checkpoint, GOES, "a run resumes from the same output_dir, on any number of processes", code)


_QUANTISATION_FLAGS = ("load_in_8bit", "load_in_4bit")


def _data_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    for site, full in script.call_names:
        if full == "datasets.load_dataset" and is_true(keyword(site.call, "streaming")):
            advice = "samples must be accessible by index: load without streaming"
            yield script.row(site.call, REFUSED, advice, "load_dataset(streaming=True)")
        if any(is_true(keyword(site.call, name)) for name in _QUANTISATION_FLAGS) or full.endswith(
            ".BitsAndBytesConfig"
        ):
            yield script.row(site.call, REFUSED, "quantised models are not supported: load it without quantisation")
    for owner in script.classes(re.compile(r"(^|\.)IterableDataset$")):
        yield script.row(owner.node, REFUSED, "samples must be accessible by index: implement __len__ and __getitem__")
