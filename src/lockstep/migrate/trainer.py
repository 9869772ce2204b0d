"""Analyse scripts with a Hugging Face Trainer: `trainer.train()` becomes two lines.

The rest stays, or is refused by name.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.adapters.hf_trainer.refusals import ARGUMENTS, CALLBACKS, EVALUATION, LOOP, OPTIMIZERS, SAMPLING, SINKS
from lockstep.migrate.parsing import Site, constant, dotted, is_true, keyword
from lockstep.migrate.plain import BECOMES, GOES, REFUSED, STAYS, Row, Script, shortened

__all__ = ["rows"]

_TRAINER = re.compile(r"^(transformers|trl)\.(\w+\.)*\w*Trainer$")
_ARGUMENTS = re.compile(r"^(transformers\.(\w+\.)*(Seq2Seq)?TrainingArguments|trl\.(\w+\.)*\w+Config)$")
_OWN = re.compile(r"^transformers\.(\w+\.)*TrainingArguments$")
_CALLBACK = re.compile(r"^transformers\.(\w+\.)*\w+Callback$")
_TRAINED = "config, task = lockstep.from_trainer(trainer); result = lockstep.train(config, task)"
_AFTER = {
    "save_model": "it writes the trained model",
    "evaluate": "it evaluates the trained model",
    "predict": "it takes the trained model",
    "save_state": "trainer.state is as before the training: result and metrics.jsonl in result.folder have the numbers",
}
_OUTPUT = {
    "metrics": "result.evaluation, and metrics.jsonl in result.folder",
    "training_loss": "metrics.jsonl in result.folder",
    "global_step": "result.global_step",
}
_LINE = "write what it does as a line in the loop of lockstep.Run"


def rows(script: Script) -> Iterator[Row]:
    """Yield the rows of a script; none if it makes no Trainer."""
    trainers = script.made(_TRAINER)
    keys = script.named(trainers) or {"trainer"}
    if not trainers and not list(script.classes(_TRAINER)):
        return
    yield from _trainers(script, trainers)
    yield from _classes(script)
    yield from _arguments(script)
    yield from _callbacks(script, trainers, keys)
    yield from _trained(script, trainers, keys)
    yield from _data(script)


def _trainers(script: Script, trainers: list[Site]) -> Iterator[Row]:
    for site in trainers:
        full = script.view.full(site)
        if full.startswith("trl.") and not full.endswith("SFTTrainer"):
            yield script.row(
                site.call, STAYS, "of trl SFTTrainer alone was tried; from_trainer refuses a loop of its own"
            )
        else:
            yield script.row(site.call, STAYS, "made as before: lockstep takes its model, data, collator and methods")
    for site, full in script.called:
        if full.startswith("transformers.") and full.endswith("HfArgumentParser"):
            here = "or no edit at all: lockstep train --hf-script FILE --hf-args args.json, if it reads a JSON file"
            yield script.row(site.call, STAYS, here)


def _classes(script: Script) -> Iterator[Row]:
    for owner in script.classes(_TRAINER):
        for name, method in owner.defs.items():
            if name in LOOP:
                here = f"lockstep would not call it: {_LINE}, or what it computes as compute_loss"
                yield script.row(method.node, REFUSED, here)
            elif name in EVALUATION:
                here = "not called in the training: with eval_strategy='no' call it afterwards; else refused"
                yield script.row(method.node, STAYS, here)
    for owner in script.classes(_CALLBACK):
        yield script.row(owner.node, REFUSED, f"a callback of your own is not called: {_LINE}")


def _arguments(script: Script) -> Iterator[Row]:
    for site, full in script.called:
        found = script.view.names.definition(site.call.func, site.scope)
        derived = (
            found is not None
            and found.kind == "class"
            and any(_ARGUMENTS.search(name) for name in script.view.names.bases_of(found))
        )
        if not _ARGUMENTS.search(full) and not derived:
            continue
        name = full.rpartition(".")[2] or site.name
        for given in site.call.keywords:
            there = f"{name}({given.arg or '**'}{'=' if given.arg else ''}{shortened(ast.unparse(given.value))})"
            action, here = _argument(given.arg, given.value, known=bool(_OWN.search(full)))
            yield script.row(given.value, action, here, there)


def _argument(name: str | None, value: ast.expr, known: bool) -> tuple[str, str]:
    """The treatment of an argument; `known`: the class is TrainingArguments itself."""
    if name is None:
        return STAYS, "what is in it cannot be seen: docs/hf-trainer.md has the table"
    row, given = ARGUMENTS.get(name), constant(value)
    literal = isinstance(value, ast.Constant)
    if row is None:
        return (REFUSED, "lockstep does not know it: leave it out") if known else (STAYS, "read by its own methods")
    why = _value(name, given)
    if why:
        return REFUSED, why
    if row.kind != "refused":
        what = row.what or "it has no meaning here"
        return STAYS, {"becomes": f"read as {what}", "task": f"read by {what}"}.get(row.kind, what)
    unset = literal and (not given or (name, given) in _DEFAULTS)
    if unset:
        return STAYS, "as it is by default"
    return REFUSED, row.what if literal or not isinstance(
        value, ast.Name | ast.Attribute
    ) else f"where it is set: {row.what}"


_DEFAULTS = (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default"))


def _value(name: str, given: object) -> str:
    """Why a value of a served argument is refused; else ""."""
    if not isinstance(given, str):
        return ""
    if name == "optim" and given not in OPTIMIZERS:
        return f"use one of {', '.join(OPTIMIZERS)}, or give the Trainer optimizer_cls_and_kwargs"
    if name == "train_sampling_strategy" and given not in SAMPLING:
        return "batches by length would depend on the data: use random"
    if name == "report_to" and given not in (*SINKS, "none"):
        return f"the sinks are {' and '.join(SINKS)}: log to others in the loop of lockstep.Run"
    if name == "lr_scheduler_type" and given == "greedy":
        return "use another, or dataclasses.replace(config, optim=...)"
    return ""


def _callbacks(script: Script, trainers: list[Site], keys: set[str]) -> Iterator[Row]:
    listed = [keyword(site.call, "callbacks") for site in trainers]
    given = [item for each in listed if isinstance(each, ast.List | ast.Tuple) for item in each.elts]
    given += [site.call.args[0] for site in script.methods(keys, "add_callback".__eq__) if site.call.args]
    for item in given:
        named = item.func if isinstance(item, ast.Call) else item
        full = next((script.view.names.qualify(named, scope) for scope in script.module.scopes[:1]), "")
        name = full.rpartition(".")[2] if full.startswith(("transformers.", "trl.")) else ""
        if name in CALLBACKS:
            yield script.row(item, STAYS, CALLBACKS[name], shortened(ast.unparse(item)))
        else:
            here = f"leave it out of the callbacks, and {_LINE}"
            yield script.row(item, REFUSED, here, shortened(ast.unparse(item)))


def _trained(script: Script, trainers: list[Site], keys: set[str]) -> Iterator[Row]:
    calls = {site.call for site in trainers}
    for site in script.module.sites():
        receiver = site.receiver
        if dotted(receiver) not in keys and receiver not in calls:
            continue
        if site.name == "train":
            yield script.row(site.call, BECOMES, _TRAINED)
            yield from _resumed(script, site)
        elif site.name == "hyperparameter_search":
            yield script.row(site.call, REFUSED, "a search is a loop of runs: examples/sweep.py")
        elif site.name in _AFTER:
            yield script.row(site.call, STAYS, _AFTER[site.name])
    outputs = script.named(list(script.methods(keys, "train".__eq__)))
    for node in script.attributes(outputs):
        if node.attr in _OUTPUT:
            yield script.row(node, BECOMES, _OUTPUT[node.attr])


def _resumed(script: Script, site: Site) -> Iterator[Row]:
    """`trainer.train(resume_from_checkpoint=...)`."""
    given = keyword(site.call, "resume_from_checkpoint") or (site.call.args[0] if site.call.args else None)
    if given is None or (isinstance(given, ast.Constant) and not given.value):
        return
    there = f"resume_from_checkpoint={ast.unparse(given)}"
    if isinstance(constant(given), str):
        here = "a run resumes by its folder; a Trainer's checkpoint gives weights: load them first"
        yield script.row(given, REFUSED, here, there)
    else:
        yield script.row(given, GOES, "the same output_dir resumes, on any number of processes", there)


_QUANTISED = ("load_in_8bit", "load_in_4bit")


def _data(script: Script) -> Iterator[Row]:
    for site, full in script.called:
        if full == "datasets.load_dataset" and is_true(keyword(site.call, "streaming")):
            here = "any sample must be had by its index: load it without streaming"
            yield script.row(site.call, REFUSED, here, "load_dataset(streaming=True)")
        if any(is_true(keyword(site.call, name)) for name in _QUANTISED) or full.endswith(".BitsAndBytesConfig"):
            yield script.row(site.call, REFUSED, "a quantised model is not served: load it as it is")
    for owner in script.classes(re.compile(r"(^|\.)IterableDataset$")):
        yield script.row(owner.node, REFUSED, "any sample must be had by its index: give it __len__ and __getitem__")
