"""Load a finished run: evaluate it, generate text from it, or export its weights.

    model = lockstep.load("outputs/mine", Mine(), which="best")

`opened` makes task and model from the run's own configuration on every process that a launcher started; `load` takes
the caller's task, on one process.
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
from lockstep.checkpoint.check import StoredTensor
from lockstep.checkpoint.export import chosen as export_chosen
from lockstep.checkpoint.export import export
from lockstep.checkpoint.format import dtype_name
from lockstep.checkpoint.read import FullTensors
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.config.secrets import printable
from lockstep.config.task_options import LANGUAGE, OWN, kind_of
from lockstep.distributed.launcher import end_with_launcher
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError
from lockstep.logging.console import waiting
from lockstep.logging.jsonl import plain
from lockstep.models.hf import HubTokenizer, save_trained
from lockstep.models.lora import merge
from lockstep.records import EvaluationRecord
from lockstep.run_state import RunState
from lockstep.task import Task, adapted, written
from lockstep.tasks.columns import check_classes
from lockstep.tasks.language_model import CausalLM, HubCausalLM, Sampling
from lockstep.tasks.regression import on_columns_of
from lockstep.training.build import notify
from lockstep.training.build_engine import model_of
from lockstep.training.defaults import all_fast
from lockstep.training.evaluation import batches_of, evaluate_all, named_sets
from lockstep.training.named_task import load_task, make_task, with_data
from lockstep.training.resolve import StartFacts, draft_of
from lockstep.training.resume import load_weights, select_checkpoint
from lockstep.training.run_dir import RunFolder, read_sources
from lockstep.training.task_check import restore_findings
from lockstep.training.trainable import base_tensor_names, load_with_adapters
from lockstep.transforms.determinism import check_precision, pin

__all__ = [
    "ExportRequest",
    "InferenceRequest",
    "config_of",
    "evaluate_run",
    "export_run",
    "generate_texts",
    "joined",
    "load",
    "opened",
]


@contextmanager
def joined(config: Config, world: World | None = None) -> Iterator[World]:
    """Join the world, and leave it at the end, unless `world` is given.

    After an error the other processes are not waited for.
    """
    end_with_launcher()
    made = world or World.join(config.device, config.timeout)
    try:
        yield made
    except BaseException:
        if world is None:
            made.abandon()  # the other ranks may have no error, and would wait
        raise
    if world is None:
        made.leave()


# --- load and evaluate a run


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Which run and checkpoint to load, and what to override.

    Attributes:
        run: a run's folder.
        which: "last", "best", or a step.
        task: FILE.py:CLASS in place of the configuration's task; "": the configuration's.
        data: as --dataset-name, in place of the run's own; "": the run's.
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
class Used:
    """A loaded run.

    Attributes:
        config: as it was trained, except for engine and kernels.
        step: the checkpoint's.
    """

    config: Config
    world: World
    task: Task
    model: nn.Module
    step: int


@contextlib.contextmanager
def opened(wanted: InferenceRequest) -> Iterator[Used]:
    """Load a run on every process of the launcher; leave the world at the end.

    Raises:
        CheckpointError: no such run or checkpoint, or the task's model is not the one that it holds.
        ConfigError: the task cannot be made.
        DataError: its data is missing.
    """
    path = Path(wanted.run).expanduser()
    config = config_of(path, wanted)
    with joined(config) as world:
        yield _made(path, config, wanted, world)


def config_of(path: Path, wanted: InferenceRequest) -> Config:
    """Read a run's configuration, without what only training needs.

    Raises:
        CheckpointError: the folder is not a run's.
    """
    file = path / "config.toml"
    if not file.is_file():
        raise CheckpointError(f"{printable(str(path))} is no run's folder; pass SAVE_DIR/EXPERIMENT_NAME")
    values = {name: value for name, value in cli.read(file).items() if not name.startswith("engine_options.")}
    training = {"engine": "auto", "weight_copies": "forward", "grad_dtype": "float32", "fused_kernels": "none"}
    values |= training | dict(wanted.changes)
    if wanted.device:
        values["device"] = wanted.device
    config = cli.build(values)
    return dataclasses.replace(config, micro_batch_size=config.micro_size)


def _made(path: Path, config: Config, wanted: InferenceRequest, world: World) -> Used:
    """Make the task and the model, and load the weights. Collective."""
    config, notices = draft_of(config, StartFacts(fast=all_fast(config, world)))  # collective
    for line in notices:
        notify(world)(line)
    pin(exact=config.exact, matmul=config.matmul_precision, device=world.device)
    check_precision(config.precision, world.device)
    found = on_all_ranks(world, lambda: select_checkpoint(path, wanted.which))
    state = on_all_ranks(world, lambda: checkpoint.read_run_state(found))
    task = on_all_ranks(world, lambda: _task_of(path, config, wanted, state, notify(world)))
    restore_findings(task, state)
    model = model_of(config, task, world, dataclasses.replace(state), notify(world))
    without = base_tensor_names(model, state)
    on_all_ranks(world, lambda: _filled(found, model, task, without, wanted.ema))
    return Used(config, world, task, model, state.global_step)


def _task_of(path: Path, config: Config, wanted: InferenceRequest, state: RunState, say: Callable[[str], None]) -> Task:
    """Make the run's task again.

    Raises:
        ConfigError: the run was started from Python, and no task is named.
        DataError: its data is missing.
    """
    trained = state.plan.get("task", "")
    if wanted.task:
        task = load_task(wanted.task)
    elif config.task or trained in (CausalLM.__qualname__, HubCausalLM.__qualname__):
        kind = kind_of(config.task)
        if kind not in (LANGUAGE, OWN):
            asked = dataclasses.replace(config, dataset_name=wanted.data or config.dataset_name)
            if kind == "regression":
                return on_columns_of(read_sources(path), printable(str(path)), asked, say)
            task = make_task(asked, say)
            check_classes(state.plan.get("data", ""), task, str(path))
            return task
        task = make_task(config, say)
    else:
        name = printable(trained) or "CLASS"
        raise ConfigError(f"{printable(str(path))} was trained from Python: name its task with --task FILE.py:{name}")
    return with_data(task, config, wanted.data, say) if wanted.data else task


def _filled(found: Path, model: nn.Module, task: Task, without: frozenset[str], ema: bool) -> None:
    own = task.state_dict()
    try:
        load_weights(found, model, own, without=without, ema=ema)
    except CheckpointError as error:
        raise CheckpointError(f"the task {type(written(task)).__name__} does not fit the checkpoint: {error}") from None
    if own:
        task.load_state_dict(own)


def evaluate_run(wanted: InferenceRequest, *, as_json: bool = False) -> EvaluationRecord:
    """Evaluate a run, and print loss and metrics on rank 0. Collective.

    Raises:
        CheckpointError, ConfigError: see `opened`.
        DataError: there is no evaluation set.
    """
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with aside, opened(wanted) as used:  # hides the task's prints
        record, is_main = _record(used), used.world.is_main
    if is_main:
        _print(record, wanted, as_json)
    return record


def _record(used: Used) -> EvaluationRecord:
    found = on_all_ranks(used.world, lambda: named_sets(used.task.dataset("evaluation")))
    sets = batches_of(used.config, used.task, found, used.world)
    if not sets:
        raise DataError("the task has no evaluation set: its dataset('evaluation') is None or empty")
    with waiting("evaluating", shown=used.world.is_main) as progress:
        return evaluate_all(used, used.task, sets, used.world, step=used.step, seed=used.config.seed, progress=progress)


def _print(record: EvaluationRecord, wanted: InferenceRequest, as_json: bool) -> None:
    if as_json:
        found = asdict(record)
        numbers = {name: plain(value) for name, value in found.pop("metrics").items()}
        found = {"run": wanted.run, **{name: plain(value) for name, value in found.items()}, "metrics": numbers}
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    counts = {name: value for name, value in record.metrics.items() if name.endswith("/items")}  # of several sets
    on = ", ".join(f"{value:,.0f} items of {name.removesuffix('/items')}" for name, value in counts.items())
    which = ", averaged weights" if wanted.ema else ""
    print(f"{printable(wanted.run)} after step {record.step}{which}, on {on or f'{record.items:,} items'}")
    shown = {"loss": record.loss, **record.metrics} if not counts else record.metrics
    width = max(map(len, shown))
    for name, value in shown.items():
        if name not in counts:
            print(f"{printable(name):<{width}}  {value:.6g}")


Say = Callable[[str], None]


# --- export and generate


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Which checkpoint to export, and how.

    Attributes:
        run: a run's folder, or a checkpoint's.
        out: the path to write.
        form: see `checkpoint.export`.
        which: "last" (the newest complete one), "best", or a step.
        merge: add adapters to their base.
        task: FILE.py:CLASS of the run's task, if the run was started from Python and its base is needed.
        ema: export the averaged weights.
    """

    run: str
    out: str
    form: str
    which: str | int = "last"
    merge: bool = False
    task: str = ""
    ema: bool = False


def export_run(asked: ExportRequest, say: Say) -> Path:
    """Export a checkpoint, and return its path.

    Raises:
        CheckpointError: no such run or checkpoint, damage, or weights that the format cannot store.
        ConfigError: `out` exists already, or format and checkpoint do not fit.
    """
    path = export_chosen(Path(asked.run), _step(asked))
    weights = _weights(asked, path, checkpoint.read_run_state(path))
    export(path, Path(asked.out), asked.form, weights=weights, beside=partial(_beside, path, say), ema=asked.ema)
    return path


def _step(asked: ExportRequest) -> int | None:
    """Return the step to export; None: the newest."""
    if asked.which != "best":
        return None if asked.which == "last" else int(asked.which)
    run = Path(asked.run)
    _, selection = RunFolder(str(run.parent), run.name).read_evaluated()
    if not selection.best:
        raise CheckpointError(f"--best: {printable(asked.run)} has no evaluation that is finite; leave --best out")
    return selection.best.step


def _weights(asked: ExportRequest, path: Path, state: RunState) -> FullTensors | None:
    """Return the tensors to write; None: the checkpoint's own."""
    adapters = state.lora is not None
    if asked.merge and not adapters:
        raise ConfigError(f"--merge: {printable(path.name)} holds a whole model, and no adapters; leave --merge out")
    if asked.form == "peft" and asked.merge:
        raise ConfigError("--format peft is for adapters alone: leave --merge out, or use --format hf")
    if not asked.merge:
        if adapters and asked.form != "peft":
            raise ConfigError(
                f"--format {asked.form}: {printable(path.name)} holds adapters alone; use --format peft, or --merge to "
                "add them to their base"
            )
        return None
    run, step = path.parent.parent, int(path.name.rpartition("-")[2])
    with opened(InferenceRequest(str(run), step, asked.task, device="cpu", ema=asked.ema)) as used:
        return _whole(merge(used.model))


def _whole(tensors: dict[str, Tensor]) -> FullTensors:
    """Wrap tensors in memory as a checkpoint's; tied ones are stored once."""
    stored: dict[tuple[int, tuple[int, ...]], StoredTensor] = {}
    named, held = {}, {f"model/{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}
    for name, tensor in held.items():
        kept = StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape), [])
        named[name] = stored.setdefault((tensor.data_ptr(), tuple(tensor.shape)), kept)
    return FullTensors(named, held.__getitem__)


def _beside(path: Path, say: Say, folder: Path) -> None:
    """Write tokenizer and generation settings, for a language model whose run knows its data."""
    run = path.parent.parent
    if not (run / "config.toml").is_file():
        return
    try:
        wanted = InferenceRequest(str(run))
        config = config_of(run, wanted)
        state = checkpoint.read_run_state(path)
        if kind_of(config.task) != LANGUAGE or state.plan.get("task") not in _LANGUAGE:
            return
        corpus: Any = _task_of(run, config, wanted, state, say).corpus  # type: ignore[attr-defined]
    except LockstepError as error:
        say(f"exported without a tokenizer: {error}")
        return
    if isinstance(corpus.tokenizer, HubTokenizer):
        corpus.tokenizer.save(folder)
        corpus.tokenizer.save_generation(folder)
    else:
        plain = Sampling()
        corpus.tokenizer.save(folder / "tokenizer.json")
        save_trained(folder, corpus.separator, temperature=plain.temperature, top_k=plain.top_k)


_LANGUAGE = (CausalLM.__qualname__, HubCausalLM.__qualname__)


def generate_texts(wanted: InferenceRequest, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """Print each prompt with the model's continuation, and return these texts.

    Each text is drawn by itself, from the same seed, so that none depends on the other prompts.

    Raises:
        CheckpointError, ConfigError: see `opened`; ConfigError also if the run is no language model.
    """
    texts = []
    with opened(wanted) as used:
        task = used.task
        if not isinstance(task, CausalLM | HubCausalLM):
            kind = type(written(task)).__name__
            raise ConfigError(
                f"{printable(wanted.run)} trained {kind}, which is no language model that lockstep knows and writes no "
                "text; `lockstep evaluate` shows what it learnt"
            )
        used.model.eval()
        for text in task.write(used.model, prompts, used.world.device, sampling):
            texts.append(text)
            if used.world.is_main:
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

    Any engine and world may have written it. A checkpoint of adapters gives the base, as `task.model()` makes it, with
    the adapters attached.

    Args:
        path: a run's folder, or a checkpoint's.
        task: the task that the run trained; its `model()` is called.
        which: in a run's folder: "best" (the best evaluation; the last checkpoint if nothing was evaluated), "last", or
            a step.
        device: where to put the model.
        ema: load the averaged weights of `--optim.ema`; buffers are the checkpoint's.

    Raises:
        CheckpointError: no such checkpoint, it is damaged, it is of another model (or adapters for another base), or it
            has no averaged weights.
        ConfigError: `which` is none of these.
    """
    if isinstance(which, str) and which not in ("best", "last"):
        raise ConfigError(f"which is '{which}': it must be 'best', 'last', or a step")
    found = select_checkpoint(Path(path).expanduser(), which)
    state = checkpoint.read_run_state(found)
    model = adapted(task).model()
    if state.lora:
        load_with_adapters(model, state.lora)
    load_weights(found, model.to(device), without=base_tensor_names(model, state), ema=ema)
    return model.eval()
