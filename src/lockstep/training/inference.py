"""Load a finished run, to evaluate it, generate text from it, or export its weights.

model = lockstep.load("outputs/mine", Mine(), which="best")     # one process, the caller's task
with load_run(InferenceRequest("outputs/mine")) as run: ...     # every process, the run's own task
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint.check import StoredTensor, read_contents
from lockstep.checkpoint.export import choose_checkpoint as export_chosen
from lockstep.checkpoint.export import export
from lockstep.checkpoint.format import dtype_name, read_manifest
from lockstep.checkpoint.read import FullTensors
from lockstep.checkpoint.stored import open_run
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.config.secrets import printable
from lockstep.config.task_options import LANGUAGE, OWN, kind_of
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.launcher import end_with_launcher
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError
from lockstep.logging.console import perplexity, waiting
from lockstep.logging.jsonl import plain
from lockstep.models.hf import HubTokenizer, save_trained
from lockstep.models.lora import merge
from lockstep.records import EvaluationRecord
from lockstep.run_state import RunState
from lockstep.task import Task, as_task, user_task
from lockstep.tasks.columns import check_classes
from lockstep.tasks.language_model import CausalLM, HubCausalLM, Sampling
from lockstep.tasks.regression import on_columns_of
from lockstep.training.evaluation import build_evaluation_batches, evaluate_all, sets_by_name
from lockstep.training.start.build_engine import build_model
from lockstep.training.start.datasets import make_dataset
from lockstep.training.start.defaults import all_devices_fast
from lockstep.training.start.lora_base import base_tensor_names, load_with_adapters
from lockstep.training.start.named_task import load_task, make_task, replace_data
from lockstep.training.start.resolve import StartFacts, draft_of
from lockstep.training.start.weights import load_model, select_checkpoint
from lockstep.training.state.parts import notify
from lockstep.training.state.run_dir import RunFolder, read_sources
from lockstep.training.trial.task_check import restore_findings
from lockstep.transforms.determinism import check_precision, pin
from lockstep.transforms.precision import PARAMETERS, is_fast, parameters_in, task_in_precision

__all__ = [
    "ExportRequest",
    "InferenceRequest",
    "evaluate_run",
    "export_run",
    "generate_texts",
    "join_world",
    "load",
    "load_run",
    "read_config",
]


@contextmanager
def join_world(config: Config, world: World | None = None) -> Iterator[World]:
    """Join the world, and leave it at the end, unless `world` is given.

    After an error it is abandoned, because the other processes may still be at work.
    """
    end_with_launcher()
    current = world or World.join(config.device, config.timeout)
    try:
        yield current
    except BaseException:
        if world is None:
            current.abandon()
        raise
    if world is None:
        current.leave()


# --- load and evaluate a run


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Which run and checkpoint to load, and what to override.

    Attributes:
        run: a run's folder, or its URL.
        which: "last", "best", or a step.
        task: FILE.py:CLASS; "": the configuration's task.
        data: as --dataset-name; "": the run's data.
        device: auto, cpu or cuda; "": the run's.
        changes: fields of the configuration to override.
        ema: load the averaged weights.
    """

    run: str
    which: str | int = "last"
    task: str = ""
    data: str = ""
    device: str = ""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    ema: bool = False


@dataclass(slots=True)
class LoadedRun:
    """A run that is loaded for inference.

    Attributes:
        config: the run's, except for engine and kernels.
        step: the checkpoint's.
    """

    config: Config
    world: World
    task: Task
    model: nn.Module
    step: int


@contextlib.contextmanager
def load_run(request: InferenceRequest) -> Iterator[LoadedRun]:
    """Load a run on every process, and leave the world at the end. Collective.

    Raises:
        CheckpointError: no such run or checkpoint, or it is of another model.
        ConfigError: the task cannot be made.
        DataError: its data is missing.
    """
    with open_run(request.run) as path:
        config = read_config(path, request)
        with join_world(config) as world:
            yield _build_loaded_run(path, config, request, world)


def read_config(path: Path, request: InferenceRequest) -> Config:
    """Read a run's configuration, without the settings that only training needs.

    Raises:
        CheckpointError: the folder is not a run's.
    """
    file = path / "config.toml"
    if not file.is_file():
        raise CheckpointError(f"{printable(str(path))} is not a run's folder: pass SAVE_DIR/EXPERIMENT_NAME")
    values = {}
    for name, value in cli.read_toml(file).items():
        if not name.startswith(("engine_options.", "parallel.")):
            values[name] = value
    training = {"engine": "auto", "weight_copies": "forward", "grad_dtype": "float32"}
    values |= training | dict(request.changes)
    if request.device:
        values["device"] = request.device
    config = cli.build(values)
    return dataclasses.replace(config, micro_batch_size=config.micro_size)


def _build_loaded_run(path: Path, config: Config, request: InferenceRequest, world: World) -> LoadedRun:
    """Make the task and the model, and load the weights. Collective."""
    # All devices must be fast for the precision that the device decides.
    every = world.gather(is_fast(world.device))
    config, notices = draft_of(config, StartFacts(fast=all_devices_fast(config, world, every)))
    for line in notices:
        notify(world)(line)
    pin(exact=config.exact, matmul=config.matmul_precision, device=world.device)
    check_precision(config.precision, world.device)
    source = on_all_ranks(world, lambda: select_checkpoint(path, request.which))
    state = on_all_ranks(world, lambda: checkpoint.read_run_state(source))
    task = on_all_ranks(world, lambda: _make_task(path, config, request, state, notify(world)))
    task = task_in_precision(task, config.precision, world.device.type, notify(world))
    restore_findings(task, state)
    model = build_model(config, task, world, dataclasses.replace(state), notify(world), note=lambda line: None)
    without = base_tensor_names(model, state)
    on_all_ranks(world, lambda: _load_model(source, model, task, without, request.ema))
    return LoadedRun(config, world, task, model, state.global_step)


def _make_task(
    path: Path, config: Config, request: InferenceRequest, state: RunState, say: Callable[[str], None]
) -> Task:
    """Make the run's task.

    Raises:
        ConfigError: the run was started from Python, and `request` names no task.
        DataError: its data is missing.
    """
    trained = state.plan.get("task", "")
    if request.task:
        task = load_task(request.task)
    elif config.task or trained in (CausalLM.__qualname__, HubCausalLM.__qualname__):
        task_name = kind_of(config.task)
        if task_name not in (LANGUAGE, OWN):
            with_data = dataclasses.replace(config, dataset_name=request.data or config.dataset_name)
            if task_name == "regression":
                return on_columns_of(read_sources(path), printable(str(path)), with_data, say)
            task = make_task(with_data, say)
            check_classes(state.plan.get("data", ""), task, str(path))
            return task
        task = make_task(config, say)
    else:
        name = printable(trained) or "CLASS"
        raise ConfigError(f"{printable(str(path))} was trained from Python: pass its task as --task FILE.py:{name}")
    if request.data:
        return replace_data(task, config, request.data, say)
    return task


def _load_model(source: Path, model: nn.Module, task: Task, without: frozenset[str], ema: bool) -> None:
    """Load the checkpoint `source` into model and task, except the tensors named in `without`."""
    tensors = task.state_dict()
    try:
        load_model(source, model, tensors, without=without, ema=ema)
    except CheckpointError as error:
        raise CheckpointError(
            f"the task {type(user_task(task)).__name__} does not fit the checkpoint: {error}"
        ) from None
    if tensors:
        task.load_state_dict(tensors)


def evaluate_run(request: InferenceRequest, *, as_json: bool = False) -> EvaluationRecord:
    """Evaluate a run, and print loss and metrics on rank 0. Collective.

    Raises:
        CheckpointError, ConfigError: see `load_run`.
        DataError: there is no evaluation set.
    """
    redirect = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    # Keep the task's prints out of the JSON.
    with redirect, load_run(request) as run:
        record = _evaluate(run)
        is_main = run.world.is_main
        task = run.task
    if is_main:
        _print_record(record, request, as_json, task)
    return record


def _evaluate(run: LoadedRun) -> EvaluationRecord:
    datasets = on_all_ranks(run.world, lambda: sets_by_name(make_dataset(run.task, "evaluation", run.config.seed)))
    sets = build_evaluation_batches(run.config, run.task, datasets, run.world)
    if not sets:
        raise DataError("the task has no evaluation set: its dataset('evaluation') is None; return one there")
    with waiting("evaluating", shown=run.world.is_main) as progress:
        return evaluate_all(run, run.task, sets, run.world, step=run.step, seed=run.config.seed, progress=progress)


def _print_record(record: EvaluationRecord, request: InferenceRequest, as_json: bool, task: Task) -> None:
    items = task.item_name
    if as_json:
        fields = asdict(record)
        numbers = {name: plain(value) for name, value in fields.pop("metrics").items()}
        fields = {"run": request.run, **{name: plain(value) for name, value in fields.items()}, "metrics": numbers}
        if items == "tokens":
            fields |= {"item_name": items, "perplexity": plain(perplexity(record.loss))}
        print(json.dumps(fields, indent=1, allow_nan=False))
        return
    # The items of each set, if there are several sets.
    counts = {}
    for name, value in record.metrics.items():
        if name.endswith("/items"):
            counts[name] = value
    on = ", ".join(f"{value:,.0f} {items} of {name.removesuffix('/items')}" for name, value in counts.items())
    weights = ", averaged weights" if request.ema else ""
    print(f"{printable(request.run)} after step {record.step}{weights}, on {on or f'{record.items:,} {items}'}")
    has_loss = task.evaluates_loss and not counts
    if has_loss:
        rows = {"loss": record.loss, **record.metrics}
    else:
        rows = dict(record.metrics)
    for name in [name for name in rows if items == "tokens" and name.rpartition("/")[2] == "loss"]:
        rows[f"{name.removesuffix('loss')}perplexity"] = perplexity(rows[name])
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        if name not in counts:
            print(f"{printable(name):<{width}}  {value:.6g}")


Say = Callable[[str], None]


# --- export and generate


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Which checkpoint to export, and how.

    Attributes:
        run: a run's folder, or a checkpoint's; or the URL of one.
        out: the path to write.
        form: the format, see `checkpoint.export`.
        which: "last" (the newest complete one), "best", or a step.
        merge: merge adapters into their base.
        task: FILE.py:CLASS; a run that was started from Python needs it for `merge`.
        ema: export the averaged weights.
    """

    run: str
    out: str
    form: str
    which: str | int = "last"
    merge: bool = False
    task: str = ""
    ema: bool = False


def export_run(request: ExportRequest, say: Say) -> Path:
    """Export a checkpoint, and return its path.

    Raises:
        CheckpointError: no such run or checkpoint, a damaged one, or weights that the format cannot store.
        ConfigError: `out` exists already, or the format does not fit the checkpoint.
    """
    with open_run(request.run) as run:
        return _export(request, run, say)


def _export(request: ExportRequest, run: Path, say: Say) -> Path:
    path = export_chosen(run, _find_step(request, run))
    weights = _merge_weights(request, path, checkpoint.read_run_state(path))
    export(
        path,
        Path(request.out),
        request.form,
        weights=weights,
        write_extras=partial(_export_tokenizer, path, say),
        ema=request.ema,
    )
    return path


def _find_step(request: ExportRequest, run: Path) -> int | None:
    """Return the step to export; None for the newest.

    Raises:
        CheckpointError: the run has no finite evaluation.
    """
    if request.which != "best":
        if request.which == "last":
            return None
        return int(request.which)
    _, selection = RunFolder(str(run.parent), run.name).read_evaluated()
    if not selection.best:
        raise CheckpointError(f"--best: {printable(request.run)} has no finite evaluation; leave --best out")
    return selection.best.step


def _merge_weights(request: ExportRequest, path: Path, state: RunState) -> FullTensors | None:
    """Return the merged weights to write; None for the checkpoint's own.

    Raises:
        ConfigError: --format and --merge do not fit the checkpoint.
    """
    adapters = state.lora is not None
    if request.merge and not adapters:
        raise ConfigError(f"--merge: {printable(path.name)} has a whole model and no adapters; leave --merge out")
    if request.form == "peft" and request.merge:
        raise ConfigError("--format peft stores adapters without their base: leave --merge out, or use --format hf")
    if not request.merge:
        if adapters and request.form != "peft":
            raise ConfigError(
                f"--format {request.form}: {printable(path.name)} has only adapters; use --format peft, or --merge to "
                "merge them into their base"
            )
        return None
    run = path.parent.parent
    step = int(path.name.rpartition("-")[2])
    with load_run(InferenceRequest(str(run), step, request.task, device="cpu", ema=request.ema)) as loaded:
        return _as_checkpoint(merge(loaded.model))


def _as_checkpoint(tensors: dict[str, Tensor]) -> FullTensors:
    """Wrap tensors in memory as those of a checkpoint; tied ones are stored once."""
    by_storage: dict[tuple[int, tuple[int, ...]], StoredTensor] = {}
    entries = {}
    contiguous = {}
    for name, tensor in tensors.items():
        contiguous[f"model/{name}"] = tensor.detach().contiguous()
    for name, tensor in contiguous.items():
        entry = StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape), [])
        entries[name] = by_storage.setdefault((tensor.data_ptr(), tuple(tensor.shape)), entry)
    return FullTensors(entries, contiguous.__getitem__)


def _export_tokenizer(path: Path, say: Say, folder: Path) -> None:
    """Write tokenizer and generation settings, for a language model whose run names its data."""
    run = path.parent.parent
    if not (run / "config.toml").is_file():
        return
    try:
        request = InferenceRequest(str(run))
        config = read_config(run, request)
        state = checkpoint.read_run_state(path)
        if kind_of(config.task) != LANGUAGE or state.plan.get("task") not in _LANGUAGE_TASKS:
            return
        # Only language models come here, and they have a corpus.
        corpus: Any = _make_task(run, config, request, state, say).corpus  # type: ignore[attr-defined]
    except LockstepError as error:
        say(f"exporting without a tokenizer: {error}")
        return
    if isinstance(corpus.tokenizer, HubTokenizer):
        corpus.tokenizer.save(folder)
        corpus.tokenizer.save_generation(folder)
    else:
        default = Sampling()
        corpus.tokenizer.save(folder / "tokenizer.json")
        save_trained(folder, corpus.separator, temperature=default.temperature, top_k=default.top_k)


_LANGUAGE_TASKS = (CausalLM.__qualname__, HubCausalLM.__qualname__)


def generate_texts(request: InferenceRequest, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """Print each prompt with the model's continuation, and return these texts.

    Each text is sampled from the same seed, so it does not depend on the other prompts.

    Raises:
        CheckpointError, ConfigError: see `load_run`; ConfigError also if the run is no language model.
    """
    texts = []
    with load_run(request) as run:
        task = run.task
        if not isinstance(task, CausalLM | HubCausalLM):
            class_name = type(user_task(task)).__name__
            raise ConfigError(
                f"{printable(request.run)} trained {class_name}, which is not one of lockstep's language models and "
                "generates no text; use `lockstep evaluate`"
            )
        run.model.eval()
        for text in task.write(run.model, prompts, run.world.device, sampling):
            texts.append(text)
            if run.world.is_main:
                print("\n" * (len(texts) > 1) + printable(text, keep="\n\t"), flush=True)
    return texts


# --- lockstep.load


def load(
    path: str | os.PathLike[str],
    task: Any,
    which: str | int = "best",
    device: str | torch.device = "cpu",
    *,
    ema: bool = False,
) -> nn.Module:
    """Load a finished run's model for inference, in eval mode.

    Any engine and world may have written it. For a checkpoint of adapters, `task.model()` makes the base. The model has
    the dtypes of the run.

    Args:
        path: a run's folder, or a checkpoint's; or the URL of one.
        task: the task of the run.
        which: for a run's folder: "best" (by evaluation; the last if nothing was evaluated), "last", or a step.
        device: of the returned model.
        ema: load the averaged weights of `--optim.ema`; buffers are not averaged.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged, of another model, or without averaged weights.
        ConfigError: `which` is none of these.
    """
    if isinstance(which, str) and which not in ("best", "last"):
        raise ConfigError(f"which is '{which}': use 'best', 'last', or a step")
    with open_run(os.fspath(path), "path") as folder:
        source = select_checkpoint(folder, which)
        state = checkpoint.read_run_state(source)
        model = as_task(task).model()
        if state.lora:
            load_with_adapters(model, state.lora)
        _convert_as_stored(model, source, state)
        load_model(source, model.to(device), without=base_tensor_names(model, state), ema=ema)
        return model.eval()


def _convert_as_stored(model: nn.Module, source: Path, state: RunState) -> None:
    """Convert the model as --precision did, and each tensor to its stored dtype."""
    precision = state.plan.get("precision")
    if precision in PARAMETERS and not state.lora:
        parameters_in(model, PARAMETERS[precision], mixes=True)
    contents = read_contents(source, read_manifest(source))
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored = contents.get(f"model/{name}")
        if stored is not None and tensor.is_floating_point() and stored.dtype.startswith(("float", "bfloat")):
            tensor.data = tensor.data.to(getattr(torch, stored.dtype))
