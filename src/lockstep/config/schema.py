"""Define the configuration: a frozen dataclass that checks its values.

    config = Config(experiment_name="a", optim={"weight_decay": 0.05})              # or optim=Optim(weight_decay=0.05)
    config = Config.from_args(["--experiment-name", "a", "--optim.weight-decay", "0.05"])       # the same from flags

Every field is a flag: `micro_batch_size` is `--micro-batch-size`, `optim.weight_decay` is `--optim.weight-decay`. Two
kinds of values are resolved later, when the task and the plan are known (see `lockstep.training.start.resolve`):
"auto", and steps as epochs or as a share of the plan, `--eval-freq 1epoch`.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self, cast

from lockstep.config.engine_options import BOUNDS as ENGINE_BOUNDS
from lockstep.config.engine_options import ENGINES, EngineOptions
from lockstep.config.fields import (
    SPAN,
    FieldError,
    FieldName,
    check_folder,
    check_name,
    is_share,
    is_span,
    local_dir,
    option,
    parse_profile,
    parse_shares,
    suggest_fields,
)
from lockstep.config.parallel_options import Parallel, check_parallel
from lockstep.config.sections import (
    LATER,
    AutoInt,
    Checkpoint,
    Data,
    Fp16,
    Guards,
    Lora,
    Model,
    Optim,
    auto,
    check_gradients,
    check_load_in,
    check_together,
    check_unsaved,
)
from lockstep.config.task_options import BOUNDS as TASK_BOUNDS
from lockstep.config.task_options import TASKS, Images, check_task_options, with_task_defaults
from lockstep.errors import SETTINGS, ConfigError

__all__ = [
    "BOUNDS",
    "DEFAULTS",
    "SINK_FLAGS",
    "SOURCE_SEQ_LEN",
    "SPANS",
    "Config",
    "choose_micro_batch_size",
    "default_micro_batch_size",
    "flag",
    "has_fixed_cut",
    "is_auto",
    "is_typed",
    "lookup",
    "nearest_divisor",
    "options",
    "register_parser",
    "requested_seq_len",
    "sections",
]


BOUNDS: dict[str, tuple[float, float, str]] = {
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2**63 - 1"),
    "num_epochs": (1, 10**9, "at least 1"),
    "max_steps": (0, 10**12, "a number of steps, or 0 for those of --num-epochs"),
    "extend_to": (0, 10**12, "a number of steps, or of epochs such as 3epochs"),
    "stop_at": (0, 10**12, "a step, or 0"),
    "lr": (0, 1e6, "a finite number, not negative"),
    "batch_size": (1, 10**9, "at least 1"),
    "micro_batch_size": (1, 10**9, "at least 1, or auto"),
    "batch_tokens": (0, 10**12, "a number of tokens, or 0 for --batch-size"),
    "micro_batch_tokens": (0, 10**12, "a number of tokens, or 0 for 1/8 of --batch-tokens"),
    "seq_len": (1, 10**7, "at least 1"),
    "log_freq": (1, 10**9, "at least 1"),
    "ckpt_freq": (0, 10**12, "a number of steps, or 0 for the end only"),
    "eval_freq": (0, 10**12, "a number of steps, 0 for the end only, or auto"),
    "limit_train_batches": (0, 10**12, "a number of steps, a share up to 100%, or 0 for all"),
    "limit_eval_batches": (0, 10**12, "a number of micro-batches, a share up to 100%, or 0 for all"),
    "eval_micro_batch_size": (1, 10**9, "at least 1, or auto"),
    "eval_workers": (0, 1024, "a number of processes from 0 to 1024, or auto"),
    "patience": (0, 10**9, "a number of evaluations, or 0 for never"),
    "min_delta": (0, 1e12, "a number from 0"),
    "timeout": (0.1, 10**7, "a number of seconds from 0.1"),
    "data.workers": (0, 1024, "a number of processes from 0 to 1024"),
    "data.prefetch": (1, 10**4, "at least 1"),
    "data.shuffle_shards": (0, 10**6, "a number of shards, or 0 to shuffle all samples"),
    "data.evaluation": (0.0001, 0.5, "a share from 0.0001 to 0.5"),
    "data.skip": (0.0, 1.0, "a share from 0 to 1"),
    "data.vocab_size": (257, 10**7, "at least 257 (256 bytes and the separator)"),
    "model.dropout": (0, 0.99, "a probability from 0 to 0.99"),
    "model.loss_chunk": (-1, 10**9, "a number of tokens, 0 for all at once, or -1 to choose by their size"),
    "lora.rank": (0, 10**5, "a rank, or 0 for no adapters"),
    "lora.alpha": (0, 1e6, "a number above 0, or 0 for twice the rank"),
    "lora.dropout": (0, 0.99, "a probability from 0 to 0.99"),
    "fp16.initial_scale_power": (0, 64, "a power of two from 0 to 64"),
    "fp16.loss_scale_window": (1, 10**9, "at least 1"),
    "fp16.hysteresis": (1, 10**6, "at least 1"),
    "fp16.min_loss_scale": (2.0**-64, 2.0**64, "a number above 0"),
    "optim.beta1": (0, 0.999999, "from 0 to below 1"),
    "optim.beta2": (0, 0.9999999, "from 0 to below 1"),
    "optim.eps": (0, 1, "from 0 to 1"),
    "optim.momentum": (0, 0.999999, "from 0 to below 1"),
    "optim.muon_lr": (0, 1e6, "a learning rate, or 0 for --lr"),
    "optim.muon_momentum": (0, 0.999999, "from 0 to below 1"),
    "optim.ns_steps": (1, 99, "a number of iterations from 1 to 99"),
    "optim.weight_decay": (0, 1e6, "a finite number, not negative"),
    "optim.layer_decay": (0.01, 1, "a share from 0.01 to 1"),
    "optim.ema": (0, 0.9999999, "from 0 (none) to below 1"),
    "optim.clip": (0, 1e12, "a norm above 0, or 0 for no clipping"),
    "optim.warmup_steps": (0, 10**12, "a number of steps, or auto"),
    "optim.period": (0, 10**12, "a number of steps, or 0 for the whole plan"),
    "optim.cooldown": (0, 1, "a share from 0 to 1"),
    "optim.power": (0.001, 100, "a number from 0.001 to 100"),
    "optim.gamma": (0, 1, "a share from 0 to 1"),
    "optim.plateau_patience": (0, 10**9, "a number of evaluations from 0"),
    "optim.plateau_cooldown": (0, 10**9, "a number of evaluations from 0"),
    "optim.floor": (0, 1, "a share from 0 to 1"),
    "checkpoint.keep": (1, 10**6, "at least 1"),
    "checkpoint.every": (0, 10**12, "a number of steps, or 0"),
    "checkpoint.upload_wait": (0, 10**9, "a number of seconds"),
    "parallel.tensor": (1, 4096, "a number of ranks from 1"),
    "parallel.pipeline": (1, 4096, "a number of ranks from 1"),
    "parallel.context": (1, 4096, "a number of ranks from 1"),
    "guards.limit": (0, 10**6, "a number of steps"),
    "guards.desync_freq": (0, 10**12, "a number of steps, or 0 for none"),
    "guards.straggler": (0, 1000, "a ratio, or 0 for never"),
    "guards.retries": (0, 1000, "a number from 0 to 1000"),
    "guards.bad_samples": (0, 10**9, "a number of samples"),
    "guards.loss_check": (0, 10**12, "a step, or 0 for never"),
    "guards.audit": (0, 1, "a share from 0 (none) to 1"),
    **TASK_BOUNDS,
    **{f"engine_options.{name}": bounds for name, bounds in ENGINE_BOUNDS.items()},
}

# Commands other than train switch these off.
SINK_FLAGS = ("csv", "tensorboard", "wandb", "mlflow")
_TASK_NAMES = ", ".join(TASKS)


# At most one, see `register_parser`.
_PARSERS: list[Callable[..., Any]] = []


def register_parser(parse: Callable[..., Any]) -> None:
    """Register the function that parses flags into a Config; it imports this module."""
    _PARSERS[:] = [parse]


@suggest_fields(
    lambda: [*(spec.name for spec in dataclasses.fields(Config)), *(name for section, name, _ in _OPTIONS if section)],
    with_task_defaults,
)
@dataclass(frozen=True, slots=True)
class Config:
    """The options of one run; `lockstep train --help-all` describes each.

    A section can be a dict of its fields.

    Raises:
        FieldError: an invalid value.
        UnknownField: no such field.
    """

    experiment_name: str = option("default", "name of the run's folder in --save-dir; the same name resumes the run")
    dataset_name: str = option(
        "builtin:stdlib",
        "builtin:stdlib (Python's standard library), a text file or a folder of them, a json, jsonl, csv or parquet "
        "file, or a hub dataset",
        tasks=_TASK_NAMES,
    )
    model_name: str = option(
        "builtin:nano",
        "builtin:nano, builtin:gpt2, gpt2-medium, gpt2-large or gpt2-xl, or a model's folder or hub name",
        tasks=_TASK_NAMES,
    )
    task: str = option("", f"{_TASK_NAMES}, or your own task, FILE.py:CLASS, constructed without arguments")
    save_dir: str = option(
        "outputs", "parent folder of all runs, or its URL in an object store, such as s3://bucket/runs"
    )
    seed: int = option(0, "seed of the weights, the data order and dropout")
    num_epochs: int = auto(AutoInt(1), "passes over the training data; auto: 3 over prompts and conversations, else 1")
    max_steps: int = option(0, "steps of the whole run and its schedule; 0: the steps of --num-epochs")
    extend_to: int = option(0, "new length of the run's plan, in steps or epochs (3epochs); 0: unchanged", span=True)
    stop_at: int = option(0, "save and exit after this step, with the plan unchanged; 0: off")
    lr: float = auto(
        LATER,
        "peak learning rate; auto: 2e-3 for a language model, 5e-5 if pretrained, 2e-4 for adapters (both by the "
        "model's width for prompts and conversations), else 1e-3; sgd 1e-2",
    )
    batch_size: int = auto(
        AutoInt(16),
        "samples per step, over all ranks; auto: 8 of prompts and conversations (4 if fewer than 500), else 16",
    )
    micro_batch_size: int = auto(
        0,
        "samples per forward pass on one device; auto: the step's samples divided by the ranks, with --exact or "
        "--shares an eighth of them; a given size fixes the cut of a step for any number of ranks",
    )
    on_oom: str = option(
        "stop",
        "when a step runs out of memory; smaller: compute it again with micro-batches cut in half, if the loss adds up",
        *("stop", "smaller"),
    )
    batch_tokens: int = option(
        0,
        "tokens per step, padding included, in place of --batch-size: micro-batches of samples of like length; 0: off",
    )
    micro_batch_tokens: int = option(
        0, "with --batch-tokens: maximum tokens per forward pass on one device, padding included; 0: 1/8 of it"
    )
    seq_len: int = auto(
        AutoInt(128),
        "tokens per sample; auto: up to 1024 of a prompt or conversation, and with --preset source, else 128",
        tasks="causal-lm, classification",
    )
    log_freq: int = auto(
        AutoInt(10), "steps between log records; auto: 10, or 1 in a run of at most 20 steps", span=True
    )
    log_gradients: str = option(
        "off", "gradient norms in each record, by layer or by parameter group", "off", "layers", "groups"
    )
    ckpt_freq: int = option(100, "steps between checkpoints; 0: only at the end", span=True)
    limit_train_batches: int = option(0, "steps per epoch, over the first samples of its shuffle; 0: all", share=True)
    eval_freq: int = auto(
        -1,
        "steps between evaluations; 0: only at the end; auto: an epoch, or as many as have 10 steps and the samples of "
        "an evaluation; with --max-steps 0",
        span=True,
    )
    limit_eval_batches: int = option(0, "micro-batches of each evaluation set, from its start; 0: all", share=True)
    eval_micro_batch_size: int = auto(
        0,
        "samples per forward pass in evaluation; auto: as in training where its cut is fixed, else the batch size (of "
        "a language model an eighth), on any number of ranks",
    )
    eval_workers: int = auto(-1, "loader processes per rank in evaluation; auto: as --data.workers")
    best_metric: str = option(
        "loss",
        "metric that selects the best checkpoint: loss, or one of the task's with its direction, such as accuracy:max",
    )
    patience: int = option(0, "stop after this many evaluations in a row without improvement; 0: never")
    patience_metric: str = option(
        "", "metric of --patience, written as for --best-metric; empty: that of --best-metric"
    )
    min_delta: float = option(0.0, "smallest change that counts as an improvement; of --patience-metric, if given")
    engine: str = option("auto", "auto: ddp under a launcher, else single", "auto", *ENGINES)
    precision: str = option(
        "auto",
        "bf16, fp16: autocast over float32 parameters; auto: bf16 on a GPU of compute capability 8.0 or newer, "
        "else float32",
        *("auto", "float32", "bf16", "fp16", "bf16-true", "float64"),
    )
    matmul_precision: str = option(
        "highest", "precision of float32 matrix products; high allows TF32 on a GPU", "highest", "high", "medium"
    )
    residual_dtype: str = option(
        "float32",
        "dtype of the built-in GPT's residual stream; bf16 halves its memory traffic and needs --precision bf16",
        *("float32", "bf16"),
        builtin=True,
    )
    weight_copies: str = option(
        "forward",
        "when --precision bf16 casts the weights: in each forward pass, or once per step into copies (single; 2 "
        "bytes per parameter)",
        *("forward", "step"),
    )
    grad_dtype: str = option(
        "float32",
        "dtype in which --weight-copies step accumulates gradients; bf16: less memory traffic, coarser sums",
        *("float32", "bf16"),
    )
    exact: bool = option(False, "sum gradients in a fixed tree: bitwise the same result on any number of processes")
    shares: str = option(
        "equal",
        "micro-batches per step of each rank, such as 5,3; equal: the same for all; auto: by measured speed "
        "(ddp, zero)",
    )
    compile: bool = auto(
        None,
        "compile model and loss with torch.compile; auto: on a GPU of compute capability 8.0 or newer, eager if "
        "that fails",
    )
    compile_scope: str = option(
        "auto",
        "what --compile compiles; auto: each block that the task names, else the whole model",
        "auto",
        "blocks",
        "whole",
    )
    batchnorm: str = option(
        "auto",
        "statistics of BatchNorm; auto: sync where a step is one micro-batch for each rank, else replay; replay: each "
        "forward's own; sync: of all ranks' forwards; local: each forward's own, running ones of each rank",
        *("auto", "replay", "sync", "local"),
    )
    attention: str = option(
        "auto", "kernel of scaled_dot_product_attention", "auto", "flash", "math", "cudnn", "efficient"
    )
    activation_checkpointing: str = option(
        "none", "blocks to recompute in the backward pass: none, full, every:N, or selective (keeps matrix products)"
    )
    device: str = option("auto", "device to train on; auto: the local rank's GPU, else the CPU", "auto", "cpu", "cuda")
    timeout: float = option(600.0, "seconds to wait for another rank before the run fails")
    init_from: str = option(
        "", "run, checkpoint, or weights in another format, from which a new run starts; see docs/checkpoints.md"
    )
    init_drop: str = option(
        "",
        "patterns of tensors or modules that --init-from leaves as the model initialises them, such as 'head.*'; "
        "separated by commas (default: the task's untrained())",
    )
    resume_anyway: bool = option(False, "resume although the plan differs, and log what changes")
    preset: str = option(
        "auto",
        "set of defaults; auto: source if model and dataset are both from the hub, and the model is not pretrained",
        "auto",
        "none",
        "source",
        builtin=True,
    )
    tokenizer: str = option(
        "",
        "a hub name, a folder, or train:VOCAB to train one (default: the model's own, else a trained one)",
        tasks="causal-lm, classification",
    )
    profile: str = option("", "steps to profile, FIRST:LAST, such as 100:110; see docs/profile.md")
    report: bool = option(True, "write report.html, a page about the run, at its end")
    csv: bool = option(False, "also write metrics.csv to the run's folder")
    tensorboard: bool = option(False, "also write TensorBoard events to the run's folder")
    wandb: bool = option(False, "also log to Weights & Biases, under the experiment's name")
    wandb_project: str = option("", "project of --wandb (default: $WANDB_PROJECT, else lockstep)")
    mlflow: bool = option(False, "also log to MLflow: $MLFLOW_TRACKING_URI, else mlflow.db in the run's folder")
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    fp16: Fp16 = field(default_factory=Fp16)
    optim: Optim = field(default_factory=Optim)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    parallel: Parallel = field(default_factory=Parallel)
    guards: Guards = field(default_factory=Guards)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        for name, section_class in _SECTIONS.items():
            section = getattr(self, name)
            if isinstance(section, dict):
                object.__setattr__(self, name, section_class(**section))
            elif not isinstance(section, section_class):
                raise FieldError(
                    f"{name} is {section!r}: it must be {section_class.__name__}(...) or a dict of its fields"
                )
        _check_types(self)
        check_name(self.experiment_name)
        check_folder(self.save_dir)
        for name, (least, most, allowed) in BOUNDS.items():
            value = lookup(self, name)
            if value == _AUTO_VALUES.get(name) or (is_share if name in _SHARES else is_span)(value):
                continue
            if isinstance(value, str) or not (math.isfinite(value) and least <= value <= most):
                raise FieldError(FieldName(name), f" is {value}: it must be {allowed}")
        for owner, name, spec in options(self):
            choices = spec.metadata["choices"]
            value = getattr(owner, spec.name)
            if choices and value not in choices:
                raise FieldError(FieldName(name), f" is '{value}': choose one of {', '.join(choices)}")
        check_task_options(self.task, options(self))
        check_together(self.optim, self.lora, self.fp16, self.precision)
        check_load_in(self.model, self.lora, self.precision, self.engine, self.engine_options)
        check_unsaved(self.checkpoint, self.guards)
        check_gradients(self.weight_copies, self.grad_dtype)
        check_parallel(self)
        _check_init_drop(self)
        parse_shares(self.shares)
        parse_profile(self.profile)
        _check_metrics(self)
        if is_span(self.extend_to) and not re.fullmatch(r"[1-9]\d* ?epochs?", str(self.extend_to)):
            raise FieldError(
                FieldName("extend_to"),
                f" is {self.extend_to}: it must be a number of steps, or of whole epochs such as 3epochs",
            )
        _check_tokens(self.batch_tokens, self.micro_batch_tokens)
        _check_on_oom(self)
        if self.micro_batch_size > self.batch_size:
            batch = FieldName("batch_size")
            micro_batch = FieldName("micro_batch_size")
            advice = f" {self.batch_size}, the samples of a step; lower it, or remove it"
            raise FieldError(micro_batch, f" {self.micro_batch_size} is larger than ", batch, advice)

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Make a Config from the flags of `lockstep train`, in a script.

            config = lockstep.Config.from_args(batch_size=64, optim={"clip": 0.5})      # flags override these

        Args:
            argv: the flags. None: those of this process, in a notebook none; an error then prints one line and exits
                with code 2 (under a launcher and in a notebook it is raised), and `--help` exits with code 0. So do the
                flags of this process that the script's own `parse_known_args` left.
            defaults: fields, as for the class; the flags and --config override them.

        Raises:
            ConfigError: an unknown flag (with the nearest one), or an invalid value.
        """
        return cls._parse(argv, defaults, None)

    @classmethod
    def from_parser(
        cls, parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **defaults: Any
    ) -> tuple[Self, argparse.Namespace]:
        """Make a Config as `from_args` does, and parse the script's own flags.

            parser = argparse.ArgumentParser()
            parser.add_argument("--width", type=int, default=128, help="of the hidden layer")
            config, own = lockstep.Config.from_parser(parser, batch_size=64)
            lockstep.train(config, Mine(own.width))

        Args:
            parser: has the script's own flags, which `--help` lists first; none may be a flag of `lockstep train`.
            argv: as for `from_args`.
            defaults: as for `from_args`.

        Returns:
            The configuration, and the values of the own flags.

        Raises:
            ConfigError: as for `from_args`, or a flag of the parser is one of `lockstep train`.
        """
        values = argparse.Namespace()
        return cls._parse(argv, defaults, (parser, values)), values

    @classmethod
    def _parse(
        cls,
        argv: Sequence[str] | None,
        defaults: Mapping[str, Any],
        own: tuple[argparse.ArgumentParser, argparse.Namespace] | None,
    ) -> Self:
        if not _PARSERS:
            raise ConfigError("Config.from_args needs lockstep.config.cli; use lockstep.Config")
        parse = _PARSERS[0]
        if argv is not None and not is_typed(argv):
            return cast(Self, parse(list(argv), defaults=defaults, own=own))
        script = os.path.basename(sys.argv[0])
        flags = list(sys.argv[1:] if argv is None else argv)
        # The arguments of a notebook's kernel (ipykernel_launcher.py, colab_kernel_launcher.py) are not the cell's.
        if script.endswith("kernel_launcher.py"):
            flags = []
        try:
            return cast(Self, parse(flags, script, defaults, own))
        except ConfigError as error:
            # Under torchrun raise the error, so that torch's own error file gets its message. At a prompt and in a
            # notebook an exit would be answered with advice on how to leave.
            if "TORCHELASTIC_ERROR_FILE" in os.environ or hasattr(sys, "ps1"):
                raise
            print(f"{script}: error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None

    @property
    def local_dir(self) -> str:
        """The parent folder of all runs on this machine; for a URL, of their copies."""
        return local_dir(self.save_dir, self.checkpoint.local_dir)

    @property
    def micro_size(self) -> int:
        """Samples in one forward.

        If "auto", the default on one device for a model without BatchNorm.
        """
        return self.micro_batch_size or choose_micro_batch_size(self)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, over all ranks (M); see `micro_size`."""
        return -(-self.batch_size // self.micro_size)


_SECTIONS: dict[str, Any] = {
    spec.name: spec.type for spec in dataclasses.fields(Config) if dataclasses.is_dataclass(spec.type)
}

# dotted name -> the value that marks "auto"
_AUTO_VALUES: dict[str, Any] = {
    prefix + spec.name: spec.default
    for kind, prefix in ((Config, ""), (Optim, "optim."))
    for spec in dataclasses.fields(kind)
    if spec.metadata.get("auto")
}


# Dotted names of the options that only built-in tasks have.
_TASK_OPTIONS = frozenset(
    prefix + spec.name
    for prefix, kind in (("", Config), *((f"{name}.", section) for name, section in _SECTIONS.items()))
    for spec in dataclasses.fields(kind)
    if spec.metadata.get("tasks")
)
# Options that may be a share of all batches.
_SHARES = frozenset(spec.name for spec in dataclasses.fields(Config) if spec.metadata.get("share"))

# Options that may be a number of epochs or a share of the plan.
SPANS = (
    frozenset(
        prefix + spec.name
        for kind, prefix in ((Config, ""), (Optim, "optim."))
        for spec in dataclasses.fields(kind)
        if spec.metadata.get("span")
    )
    - _SHARES
)


def is_typed(argv: Sequence[str]) -> bool:
    """Whether `argv` is this process's command line, or what is left of it without the script's own flags.

    Not a list that a test or a notebook makes up: typed settings count for the whole process.
    """
    words = iter(sys.argv[1:])
    return bool(argv) and all(word in words for word in argv)


def check_typed(typed: Mapping[str, Any], defaults: Collection[str], *, is_script: bool = False) -> None:
    """Refuse flags that a user's own task makes void.

    Args:
        typed: the options of the command line, by dotted name.
        defaults: options that the script gives to `Config.from_args`, because it reads them itself.
        is_script: a script makes the task, so --task is void too.

    Raises:
        ConfigError: only the built-in tasks have one of the options.
    """
    for name, value in typed.items():
        is_void = name in _TASK_OPTIONS or (name == "task" and is_script)
        if is_void and name not in defaults:
            advice = f"; if the script reads config.{name}, give its default to Config.from_args" if is_script else ""
            raise ConfigError(f"{flag(name)} {value} has no effect on a task of your own: remove it{advice}")


def sections(config: Config) -> list[tuple[Any, str]]:
    """Return the config and its sections with their prefixes: [(config, ""), (data, "data."), ...]."""
    return [(config, ""), *((getattr(config, name), f"{name}.") for name in _SECTIONS)]


# (name of the section or "", dotted name of the option, its field), listed once: a run reads them 20 times.
_OPTIONS: tuple[tuple[str, str, "dataclasses.Field[Any]"], ...] = (
    *(("", spec.name, spec) for spec in dataclasses.fields(Config) if spec.name not in _SECTIONS),
    *(
        (section, f"{section}.{spec.name}", spec)
        for section, section_class in _SECTIONS.items()
        for spec in dataclasses.fields(section_class)
    ),
)


def options(config: Config) -> Iterator[tuple[Any, str, "dataclasses.Field[Any]"]]:
    """Yield each option: the config or section that has it, its dotted name, its field."""
    owners = {"": config, **{section: getattr(config, section) for section in _SECTIONS}}
    for section, name, spec in _OPTIONS:
        yield owners[section], name, spec


def lookup(config: Any, name: str) -> Any:
    """Return the value of a dotted field name."""
    return attrgetter(name)(config)


def flag(name: str) -> str:
    """Return the flag of a dotted name: `engine_options.meta_init` -> `--engine.meta-init`."""
    return "--" + name.replace("engine_options.", "engine.").replace("_", "-")


def _names_by_flag() -> dict[str, str]:
    """Map the flag of each field to its dotted name, and `--no-exact` to `exact False`."""
    names = {}
    for _, name, spec in options(DEFAULTS):
        names[flag(name)] = name
        if spec.type is bool:
            names[flag(name).replace("--", "--no-")] = f"{name} False"
    return names


def is_auto(config: Config, name: str) -> bool:
    """Whether the option of this dotted name is "auto"."""
    if name not in _AUTO_VALUES:
        return False
    value = lookup(config, name)
    marker = _AUTO_VALUES[name]
    # 16 equals AutoInt(16), but only the latter means "auto".
    return type(value) is type(marker) and bool(value == marker)


# Tokens of a block in the script of the guide that `--preset source` follows.
SOURCE_SEQ_LEN = 1024


def requested_seq_len(config: Config) -> int:
    """Return the tokens per sample before a model's context limits them."""
    if config.preset == "source" and is_auto(config, "seq_len"):
        return SOURCE_SEQ_LEN
    return int(config.seq_len)


def has_fixed_cut(config: Config) -> bool:
    """Whether the configuration cuts a step into the same micro-batches on any number of ranks."""
    sized = bool(config.micro_batch_size or config.batch_tokens)
    return sized or config.exact or config.shares != "equal"


def choose_micro_batch_size(config: Config, ranks: int = 1, least: int = 1) -> int:
    """Choose the samples of a forward for a configuration that leaves them open.

    Args:
        ranks: that share a step; each gets one micro-batch unless the cut is fixed.
        least: smallest size of a fixed cut.
    """
    if has_fixed_cut(config):
        return default_micro_batch_size(config.batch_size, least)
    return -(-config.batch_size // ranks)


def default_micro_batch_size(batch_size: int, least: int = 1) -> int:
    """Choose the largest divisor of `batch_size` up to 1/8 of it.

    Args:
        batch_size: samples per step.
        least: choose the next divisor that is at least this, or the whole batch.
    """
    size = next(size for size in range(max(1, batch_size // 8), 0, -1) if batch_size % size == 0)
    start = min(max(size, least), batch_size)
    return next(size for size in range(start, batch_size + 1) if batch_size % size == 0)


def _check_tokens(step: int, micro_batch: int) -> None:
    if micro_batch and (not step or step % micro_batch):
        raise FieldError(
            FieldName("micro_batch_tokens"),
            f" is {micro_batch}: ",
            FieldName("batch_tokens"),
            f", {step}, must be a multiple of it",
        )


def _check_init_drop(config: Config) -> None:
    if config.init_drop and not config.init_from:
        advice = ", the weights to begin with: set it, or remove this"
        raise FieldError(FieldName("init_drop"), " needs ", FieldName("init_from"), advice)


def _check_on_oom(config: Config) -> None:
    """Refuse options with which a step computed with smaller micro-batches is another step."""
    if config.on_oom == "stop":
        return
    start = (FieldName("on_oom"), f" {config.on_oom} does not go with ")
    if config.exact:
        raise FieldError(*start, FieldName("exact"), ": smaller micro-batches change the bits; remove either")
    if parse_shares(config.shares):
        advice = f" {config.shares}, which counts micro-batches; use auto or equal"
        raise FieldError(*start, FieldName("shares"), advice)
    if config.batch_tokens:
        advice = ", whose micro-batches have no size in samples; lower "
        raise FieldError(*start, FieldName("batch_tokens"), advice, FieldName("micro_batch_tokens"), ", or remove it")


def nearest_divisor(batch_size: int, size: int) -> int:
    """Return the largest divisor of `batch_size` that is at most `size`."""
    return next(near for near in range(min(size, batch_size), 0, -1) if batch_size % near == 0)


def _check_types(config: Config) -> None:
    for owner, name, spec in options(config):
        value = getattr(owner, spec.name)
        field_type = cast(type, spec.type)
        if type(value) is field_type and "auto" not in spec.metadata:
            continue
        if spec.metadata.get("span") and is_span(value):
            continue
        if spec.metadata.get("auto") and (value == "auto" or value is spec.default):
            object.__setattr__(owner, spec.name, spec.default)
        elif field_type is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(owner, spec.name, float(value))
        elif not isinstance(value, field_type) or (isinstance(value, bool) and field_type is not bool):
            expected = _KINDS.get(field_type, f"a {field_type.__name__}")
            expected += ", or a share such as 10%" if spec.metadata.get("share") else ""
            expected += f", or {SPAN}" if name in SPANS else ""
            raise FieldError(FieldName(name), f" is {value!r}: it must be {expected}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _check_metrics(config: Config) -> None:
    for option_name, metric in (
        ("best_metric", config.best_metric),
        ("patience_metric", config.patience_metric or "loss"),
    ):
        name, _, direction = metric.partition(":")
        if metric != "loss" and not (name and direction in ("min", "max") and metric != "loss:max"):
            raise FieldError(
                FieldName(option_name),
                f" is '{metric}': it must be loss, or a metric of the task with its direction, such as accuracy:max or "
                "error:min",
            )
    if config.patience_metric and not config.patience:
        raise FieldError(
            FieldName("patience_metric"),
            " has no effect without ",
            FieldName("patience"),
            "; set it, or remove this",
        )
    plateau = config.optim.schedule == "plateau"
    if (config.patience or plateau) and not config.eval_freq:
        name, setting = ("optim.schedule", "plateau") if plateau else ("patience", config.patience)
        raise FieldError(
            *(FieldName(name), f" {setting} needs ", FieldName("eval_freq")),
            ": without it the only evaluation is at the end",
        )


DEFAULTS = Config()

SETTINGS.fields |= _names_by_flag()
