"""Build the task to plan, at any depth and micro-batch, often without data.

    subject = subject_of(config, None, say)
    subject.at(4)           # the task, whose model has 4 of its blocks; 0: all
    subject.batch(8)        # a micro-batch of 8 samples, as it is loaded

A language model by name needs no corpus: every sample is a full window of tokens. Other tasks are made, and their
first samples loaded, since only these determine the form of a batch.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from lockstep.config.fields import is_hub_name
from lockstep.config.schema import Config, is_auto, requested_seq_len
from lockstep.config.task_options import LANGUAGE, kind_of
from lockstep.data.loader import blame, check_dataset
from lockstep.data.stream_adapters import is_stream, source_of
from lockstep.data.stream_mixture import MixtureSource, reader_of
from lockstep.data.streams import Lanes, StreamSource
from lockstep.engines.blocks import find_blocks
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.files import cache_folder
from lockstep.models.gpt import PRESETS
from lockstep.models.hf import HubModel
from lockstep.task import Task, as_task
from lockstep.tasks.language_model import CausalLM, HubCausalLM, loss_inside, quantization_of
from lockstep.tasks.prepare import trained_size
from lockstep.training.evaluation import sets_by_name
from lockstep.training.start.datasets import check_stream, make_dataset
from lockstep.training.start.named_task import make_task

__all__ = ["Subject", "call_task", "layers_of", "subject_of"]

Say = Callable[[str], None]
_DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A task to plan.

    Attributes:
        task: with the whole model.
        samples: of the training set; 0: unknown, and many.
        at: layers -> the task whose model has so many of its repeated layers; 0: all.
        batch: samples -> a micro-batch in host memory.
        windows: tokens -> the same with samples of so many tokens; None: the length is not a choice.
        context: the longest sample that the model takes, in tokens; 0: unlimited, or unknown.
    """

    task: Task
    samples: int
    at: Callable[[int], Task]
    batch: Callable[[int], Any]
    windows: Callable[[int], "Subject"] | None = None
    context: int = 0


def subject_of(config: Config, own_task: Any, say: Say) -> Subject:
    """Make the subject of `config`'s task, or of the task `own_task`.

    Raises:
        UsageError: as in training.
    """
    if own_task is None and kind_of(config.task) == LANGUAGE:
        return _language_model(config, say)
    task = make_task(config, say) if own_task is None else as_task(own_task)
    if task.own_steps is not None:
        raise ConfigError(
            "lockstep plan: the task steps its optimizers itself (manual optimization), which cannot be traced without "
            "its devices; `lockstep profile` measures it"
        )
    dataset = call_task("dataset", lambda: make_dataset(task, "train", config.seed))
    if is_stream(dataset):
        return _make_stream_subject(config, task, source_of(dataset))
    check_dataset(dataset, "train")
    call_task("dataset", lambda: sets_by_name(make_dataset(task, "evaluation", config.seed)))
    samples = call_task("dataset", lambda: len(dataset))
    if not samples:
        raise DataError("the training set is empty: the task's dataset('train') has no samples")

    def batch(size: int) -> Any:
        loaded = call_task("dataset", lambda: [dataset[index % samples] for index in range(size)])
        return call_task("collate", lambda: task.collate(loaded))

    return Subject(task, samples, lambda layers: _with_layers(task, layers), batch)


def _make_stream_subject(config: Config, task: Task, source: StreamSource | MixtureSource) -> Subject:
    """Make the subject of a task whose training set is a stream."""
    check_stream(config, task, source)

    def batch(size: int) -> Any:
        lanes = Lanes(source.parts, 1, size, config.seed)
        samples, _ = reader_of(source, lanes).read(lanes.count, 0, size, epoch=0)
        if not samples:
            raise DataError("the training set is empty: no part of the stream yields a sample")
        repeated = [samples[index % len(samples)] for index in range(size)]
        return call_task("collate", lambda: task.collate(repeated))

    return Subject(task, 0, lambda layers: _with_layers(task, layers), batch)


def call_task(method: str, call: Callable[[], Any]) -> Any:
    """Call a method of the task.

    Raises:
        DataError: it fails; one line with the method, the reason and the place.
    """
    try:
        return call()
    except LockstepError:
        raise
    except Exception as error:
        raise blame(method, error, "its plan") from error


def _with_layers(task: Task, layers: int) -> Task:
    """Return the task with only the first `layers` blocks of its model.

    The blocks are all in one list.
    """
    if not layers:
        return task
    shallow: Any = copy.copy(task)

    def model() -> nn.Module:
        network = task.model()
        blocks = _list_of(task, network)
        if blocks is not None:
            del blocks[layers:]
        return network

    shallow.model = model
    return cast(Task, shallow)


def layers_of(task: Task, model: nn.Module) -> int:
    """Count the model's equal blocks in one list, which may be cut; 0: none."""
    blocks = _list_of(task, model)
    if blocks is None:
        return 0
    return len(blocks)


def _list_of(task: Task, model: nn.Module) -> nn.ModuleList | None:
    declared = task.blocks(model)
    if declared is None:
        blocks = find_blocks(model).modules
    else:
        blocks = list(declared)
    shapes = set()
    # Blocks that differ in shape cannot stand for each other.
    for block in blocks:
        shapes.add(str([(name, p.shape, p.dtype) for name, p in block.named_parameters()]))
    if len(shapes) != 1 or len({type(block) for block in blocks}) != 1:
        return None
    lists = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            lists.append(module)
    for module_list in lists:
        if list(module_list) == blocks:
            return module_list
    return None


def _language_model(config: Config, say: Say) -> Subject:
    """Return the built-in GPT, or one of `transformers` by its configuration.

    Needs neither corpus nor weights.
    """
    hub = is_hub_name(config.model_name) or (Path(config.model_name).expanduser() / "config.json").is_file()
    file = Path(config.model_name).expanduser()
    if file.name == "config.json" and file.is_file():
        config = dataclasses.replace(config, model_name=str(file.parent))
        hub = True
    if not hub and config.model_name not in PRESETS:
        # Raises an error that lists the known names.
        make_task(config, say)
    if hub:
        return _of_hub(config, say)
    return _built_in(config)


def _built_in(config: Config) -> Subject:
    shape = PRESETS[config.model_name]
    config = _within(config, shape.context)
    vocabulary = trained_size(config.tokenizer) or config.data.vocab_size
    shape = dataclasses.replace(shape, vocab_size=vocabulary, dropout=config.model.dropout)

    def task(layers: int = 0) -> CausalLM:
        cut = dataclasses.replace(shape, layers=layers or shape.layers)
        corpus: Any = _ShapeOnlyCorpus(vocabulary, config.seq_len)
        return CausalLM(corpus, cut, loss_chunk=config.model.loss_chunk, inside=loss_inside(config))

    def windows(tokens: int) -> Subject:
        return _built_in(dataclasses.replace(config, seq_len=tokens))

    full = task()
    return Subject(full, 0, task, _tokens(config), windows, shape.context)


def _of_hub(config: Config, say: Say) -> Subject:
    options = config.model
    source = HubModel(
        config.model_name,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        cache=cache_folder(config.data.cache),
        say=say,
    )
    config = _within(config, source.context)
    vocabulary = trained_size(config.tokenizer) or source.vocab_size
    checkpoint_dtype = getattr(source.settings, "dtype", None) or getattr(source.settings, "torch_dtype", None)
    dtype = _DTYPES.get(config.precision, torch.float32)
    # With LoRA the pretrained weights keep the dtype of their checkpoint.
    if config.lora.rank and options.pretrained:
        if isinstance(checkpoint_dtype, torch.dtype):
            dtype = checkpoint_dtype
        else:
            dtype = torch.float32
    corpus: Any = _ShapeOnlyCorpus(vocabulary, config.seq_len)

    def task(layers: int = 0) -> HubCausalLM:
        instance = HubCausalLM(
            corpus,
            source.with_layers(layers) if layers else source,
            vocab_size=vocabulary,
            dtype=dtype,
            pretrained=False,
            sources={},
            loss_chunk=options.loss_chunk,
            inside=loss_inside(config),
            quantization=quantization_of(config),
        )
        if options.pretrained:
            instance.defaults = "fine-tuning"
        else:
            instance.defaults = "language-model"
        return instance

    def windows(tokens: int) -> Subject:
        return _of_hub(dataclasses.replace(config, seq_len=tokens), say)

    return Subject(task(), 0, task, _tokens(config), windows, source.context)


def _within(config: Config, context: int) -> Config:
    """Replace a sequence length that is auto by the one that a run would choose for texts.

    Args:
        context: of the model, in tokens; 0: without a limit.

    Raises:
        ConfigError: the user's own length is longer.
    """
    length = requested_seq_len(config)
    if context and length > context:
        if not is_auto(config, "seq_len"):
            raise ConfigError(
                f"--seq-len {length} is longer than the context of {config.model_name}, {context}; lower it"
            )
        length = context
    return dataclasses.replace(config, seq_len=length)


class _ShapeOnlyCorpus:
    """A corpus that only has the form of its samples."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size = vocab_size
        self.separator = -1
        self.fingerprint = ""
        self.packing = "stream"
        self.chat = self.prompts = False
        self.learned = (0, 0, 0)
        self.train = self.evaluation = SimpleNamespace(seq_len=seq_len, items_per_sample=seq_len)


def _tokens(config: Config) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function: samples -> a micro-batch of full windows."""
    names = ["input_ids", "labels"]
    if config.data.packing == "documents":
        names += ["positions", "documents"]

    def batch(size: int) -> dict[str, torch.Tensor]:
        try:
            return {name: torch.ones(size, config.seq_len, dtype=torch.int64) for name in names}
        except RuntimeError as error:
            raise ConfigError(
                f"--micro-batch-size {size}: a batch of {size} samples of {config.seq_len} tokens does not fit this "
                "machine's memory; lower it"
            ) from error

    return batch
