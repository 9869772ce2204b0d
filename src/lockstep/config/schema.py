"""The configuration: frozen dataclasses, filled from defaults < config file < flags.

    config = Config(experiment_name="a", optim={"weight_decay": 0.05})              # or optim=Optim(weight_decay=0.05)
    config = Config.from_args(["--experiment-name", "a", "--optim.weight-decay", "0.05"])       # the same from flags

Every field is a flag: `micro_batch_size` is `--micro-batch-size`, `optim.weight_decay` is `--optim.weight-decay`.
Whatever holds in here is checked when the object is made, so that no bad value travels further. A field whose default
is "auto" is given its value once the task and the plan are known (see `lockstep.training.resolve`): `--lr auto`, or
lr = "auto". So is a number of steps that is said in epochs or as a share of the plan: `--eval-freq 1epoch`.
"""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from lockstep.config.engine_options import BOUNDS as ENGINE_BOUNDS
from lockstep.config.engine_options import ENGINES, EngineOptions
from lockstep.config.fields import (
    SPAN,
    FieldError,
    FieldName,
    check_folder,
    check_name,
    counts_of,
    is_share,
    is_span,
    named,
    option,
    range_of,
)
from lockstep.config.sections import (
    LATER,
    Checkpoint,
    Data,
    Fp16,
    Guards,
    Lora,
    Model,
    Optim,
    auto,
    check_gradients,
    check_together,
    check_unsaved,
)
from lockstep.config.task_options import BOUNDS as TASK_BOUNDS
from lockstep.config.task_options import TASKS, Images, check, suited
from lockstep.errors import SETTINGS, ConfigError

__all__ = [
    "BOUNDS",
    "SPANS",
    "Config",
    "default_micro_batch_size",
    "flag",
    "is_auto",
    "lookup",
    "register_parser",
    "sections",
]


BOUNDS: dict[str, tuple[float, float, str]] = {
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2**63 - 1"),
    "num_epochs": (1, 10**9, "at least 1"),
    "max_steps": (0, 10**12, "a number of steps, or 0 for as many as --num-epochs makes"),
    "extend_to": (0, 10**12, "a number of steps, or of epochs as in 3epochs"),
    "stop_at": (0, 10**12, "a step, or 0"),
    "lr": (0, 1e6, "a finite number, not negative"),
    "batch_size": (1, 10**9, "at least 1"),
    "micro_batch_size": (1, 10**9, "at least 1, or auto"),
    "seq_len": (1, 10**7, "at least 1"),
    "log_freq": (1, 10**9, "at least 1"),
    "ckpt_freq": (0, 10**12, "a number of steps, or 0 for the end alone"),
    "eval_freq": (0, 10**12, "a number of steps, or 0 for the end alone"),
    "limit_train_batches": (0, 10**12, "a number of steps, a share up to 100%, or 0 for all"),
    "limit_eval_batches": (0, 10**12, "a number of micro-batches, a share up to 100%, or 0 for all"),
    "eval_micro_batch_size": (1, 10**9, "at least 1, or auto"),
    "eval_workers": (0, 1024, "a number of processes from 0 to 1024, or auto"),
    "patience": (0, 10**9, "a number of evaluations, or 0 for never"),
    "min_delta": (0, 1e12, "a number from 0"),
    "timeout": (0.1, 10**7, "a number of seconds from 0.1"),
    "data.workers": (0, 1024, "a number of processes from 0 to 1024"),
    "data.prefetch": (1, 10**4, "at least 1"),
    "data.evaluation": (0.0001, 0.5, "a share from 0.0001 to 0.5"),
    "data.vocab_size": (257, 10**7, "at least 257 (256 bytes and the separator)"),
    "model.dropout": (0, 0.99, "a probability from 0 to 0.99"),
    "model.loss_chunk": (-1, 10**9, "a number of tokens, 0 for all at once, or -1 for what their size suggests"),
    "lora.rank": (0, 10**5, "a number of rows, or 0 for no adapters"),
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
    "optim.muon_lr": (0, 1e6, "a rate, or 0 for that of --lr"),
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
    "guards.limit": (0, 10**6, "a number of steps"),
    "guards.desync_freq": (0, 10**12, "a number of steps, or 0 for none"),
    "guards.straggler": (0, 1000, "a ratio, or 0 for never"),
    "guards.retries": (0, 1000, "a number from 0 to 1000"),
    "guards.bad_samples": (0, 10**9, "a number of samples"),
    "guards.audit": (0, 1, "a share from 0 (none) to 1"),
    **TASK_BOUNDS,
    **{f"engine_options.{name}": bounds for name, bounds in ENGINE_BOUNDS.items()},
}

_NAMED = ", ".join(TASKS)


_PARSERS: list[Callable[..., Any]] = []  # what `register_parser` was given


def register_parser(parse: Callable[..., Any]) -> None:
    """Register the function that makes a Config from flags; it makes its flags from the fields below."""
    _PARSERS[:] = [parse]


@named(
    lambda: [prefix + spec.name for owner, prefix in sections(Config()) for spec in dataclasses.fields(owner)], suited
)
@dataclass(frozen=True, slots=True)
class Config:
    """One run. See the field's help texts, which `lockstep train --help-all` prints.

    A section may be given as a dict of its fields.

    Raises:
        FieldError: a value that cannot hold, naming the field, the value and the way out.
        UnknownField: no such field, naming the nearest.
    """

    experiment_name: str = option("default", "the run's folder below --save-dir; the same name resumes")
    dataset_name: str = option(
        "builtin:stdlib", "this Python's own library, a text file, or a folder of them", tasks=_NAMED
    )
    model_name: str = option(
        "builtin:nano", "builtin:nano, builtin:gpt2, gpt2-medium, gpt2-large or gpt2-xl", tasks=_NAMED
    )
    task: str = option("", f"{_NAMED}, or FILE.py:CLASS, a task of your own, made without arguments")
    save_dir: str = option("outputs", "where run folders lie")
    seed: int = option(0, "fixes weights, order and dropout")
    num_epochs: int = option(1, "passes over the training data")
    max_steps: int = option(0, "steps of the whole plan and its schedule; 0: as many as --num-epochs makes")
    extend_to: int = option(
        0, "steps or epochs (3epochs) that the plan of a run is to have from now on; 0: as it is", span=True
    )
    stop_at: int = option(0, "save and end after this step, without changing the plan; 0: no")
    lr: float = auto(
        LATER,
        "peak learning rate; auto: 2e-3 for a language model, 5e-5 for a pretrained one, 2e-4 for adapters, else 1e-3; "
        "sgd 1e-2",
    )
    batch_size: int = option(16, "samples in a step, over all ranks")
    micro_batch_size: int = auto(
        0,
        "samples in one forward on one device; auto: the batch's largest divisor up to 1/8, with BatchNorm 16 or more",
    )
    seq_len: int = option(128, "tokens in a sample", tasks="causal-lm, classification")
    log_freq: int = option(10, "steps between records", span=True)
    log_gradients: str = option(
        "off", "norms of the gradient in each record: by layer, or by parameter group", "off", "layers", "groups"
    )
    ckpt_freq: int = option(100, "steps between checkpoints; 0: only at the end", span=True)
    limit_train_batches: int = option(
        0, "steps of an epoch, which then is the first samples of its shuffle; 0: all", share=True
    )
    eval_freq: int = option(0, "steps between evaluations; 0: only at the end", span=True)
    limit_eval_batches: int = option(0, "first micro-batches of each evaluation set; 0: all", share=True)
    eval_micro_batch_size: int = auto(0, "samples in one forward of an evaluation; auto: as in training")
    eval_workers: int = auto(-1, "loader processes a rank while it evaluates; auto: as --data.workers")
    best_metric: str = option(
        "loss", "what the best evaluation is judged by: loss, or a metric of the task with its direction, accuracy:max"
    )
    patience: int = option(0, "end after so many evaluations in a row that were no better than the best; 0: never")
    patience_metric: str = option("", "what patience goes by, written as best_metric; empty: the best itself")
    min_delta: float = option(
        0.0, "by how much an evaluation must be better than the best to count as better; of patience_metric, if given"
    )
    engine: str = option("auto", "auto: ddp under a launcher, else single", "auto", *ENGINES)
    precision: str = option(
        "auto",
        "bf16, fp16: autocast over float32 parameters; auto: bf16 on a GPU of sm80 or newer, else float32",
        *("auto", "float32", "bf16", "fp16", "bf16-true", "float64"),
    )
    matmul_precision: str = option(
        "highest", "float32 matrix products; high allows TF32 on a GPU", "highest", "high", "medium"
    )
    residual_dtype: str = option(
        "float32",
        "dtype of the built-in GPT's residual stream; bf16: with --precision bf16, less to move",
        *("float32", "bf16"),
        builtin=True,
    )
    weight_copies: str = option(
        "forward",
        "when --precision bf16 casts weights; step: once, into copies kept beside them (single; 2 bytes a parameter)",
        *("forward", "step"),
    )
    grad_dtype: str = option(
        "float32",
        "in which --weight-copies step adds up a step's gradients; bf16: less to move, and coarser sums",
        *("float32", "bf16"),
    )
    fused_kernels: str = option(
        "none",
        "Triton kernels of the built-in GPT; backward: bias gradients in one pass with q, k, v's and GELU's; all: GELU "
        "in its product too",
        *("none", "backward", "all"),
        builtin=True,
    )
    exact: bool = option(False, "sum gradients in a fixed tree: bitwise the same on any number of processes")
    shares: str = option(
        "equal", "micro-batches of a step by rank: 5,3; auto: by measured speed; equal: as many on each (ddp, zero)"
    )
    compile: bool = auto(
        None, "compile model and loss with torch.compile; auto: on such a GPU, and eager goes on where that fails"
    )
    compile_scope: str = option(
        "auto", "what --compile compiles; auto: each block that the task names, else all", "auto", "blocks", "whole"
    )
    batchnorm: str = option(
        "replay",
        "running statistics of BatchNorm; replay: the same at every world size; local: torch's own, of each rank",
        *("replay", "sync", "local"),
    )
    attention: str = option(
        "auto", "kernel of scaled_dot_product_attention", "auto", "flash", "math", "cudnn", "efficient"
    )
    activation_checkpointing: str = option(
        "none", "blocks to compute again in the backward: none, full, every:N, or selective (products are kept)"
    )
    device: str = option("auto", "auto: the local rank's GPU where there is one", "auto", "cpu", "cuda")
    timeout: float = option(600.0, "seconds to wait for another rank before the run fails")
    init_from: str = option("", "a run or a checkpoint whose weights a new run begins with")
    resume_anyway: bool = option(False, "resume although the plan differs, saying what changes")
    preset: str = option(
        "auto",
        "a set of defaults; auto: source where model and data are both on the hub",
        "auto",
        "none",
        "source",
        builtin=True,
    )
    tokenizer: str = option(
        "",
        "a hub name, a folder, or train:VOCAB (default: the model's own, else trained)",
        tasks="causal-lm, classification",
    )
    profile: str = option("", "steps to trace and judge, FIRST:LAST as 100:110; see docs/profile.md")
    report: bool = option(True, "write report.html, a page about the run, at its end")
    tensorboard: bool = option(False, "also write TensorBoard events, into the run's folder")
    wandb: bool = option(False, "also log to Weights & Biases, under the experiment's name")
    wandb_project: str = option("", "project of --wandb (default: $WANDB_PROJECT, else lockstep)")
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    fp16: Fp16 = field(default_factory=Fp16)
    optim: Optim = field(default_factory=Optim)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    guards: Guards = field(default_factory=Guards)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            given = getattr(self, name)
            if isinstance(given, dict):
                object.__setattr__(self, name, kind(**given))
            elif not isinstance(given, kind):
                raise FieldError(f"{name} is {given!r}: give {kind.__name__}(...) or a dict of its fields")
        _check_types(self)
        check_name(self.experiment_name)
        check_folder(self.save_dir)
        for name, (least, most, what) in BOUNDS.items():
            value = lookup(self, name)
            if value == _PLACES.get(name) or (is_share if name in _SHARES else is_span)(value):
                continue
            if isinstance(value, str) or not (math.isfinite(value) and least <= value <= most):
                raise FieldError(FieldName(name), f" is {value}: it must be {what}")
        for owner, prefix in sections(self):
            for spec in dataclasses.fields(owner):
                choices, value = spec.metadata.get("choices"), getattr(owner, spec.name)
                if choices and value not in choices:
                    raise FieldError(
                        FieldName(prefix + spec.name), f" is '{value}': choose one of {', '.join(choices)}"
                    )
        check(self.task, sections(self))
        check_together(self.optim, self.lora, self.fp16, self.precision)
        check_unsaved(self.checkpoint, self.guards)
        check_gradients(self.weight_copies, self.grad_dtype)
        counts_of(self.shares)
        range_of(self.profile)
        _check_best(self)
        if is_span(self.extend_to) and not re.fullmatch(r"[1-9]\d* ?epochs?", str(self.extend_to)):
            raise FieldError(
                FieldName("extend_to"), f" is {self.extend_to}: it must be steps, or whole epochs: 3epochs"
            )
        if self.batch_size % (self.micro_batch_size or 1):
            near = _nearest_divisor(self.batch_size, self.micro_batch_size)
            whole, part = FieldName("batch_size"), FieldName("micro_batch_size")
            multiple = f" {self.batch_size} is not a multiple of "
            raise FieldError(
                *(whole, multiple, part, f" {self.micro_batch_size}: use ", part, f" {near}, or leave it out")
            )

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """The Config that flags ask for, those of `lockstep train`: a script of one's own has them too.

            config = lockstep.Config.from_args(batch_size=64, optim={"clip": 0.5})      # flags win over these

        Args:
            defaults: fields, as for the class itself, where the flags and --config say nothing.
            argv: the flags. None: those that this process was started with; then what is wrong with them is said in one
                line and ends the process with code 2, as `--help` does with code 0.

        Raises:
            ConfigError: an unknown flag (with the nearest one), or a value that cannot hold.
        """
        if not _PARSERS:
            raise ConfigError("Config.from_args needs the flags of lockstep/config/cli.py: take lockstep.Config")
        parse = _PARSERS[0]
        if argv is not None:
            return cast(Self, parse(list(argv), defaults=defaults))
        own = os.path.basename(sys.argv[0])
        try:
            return cast(Self, parse(sys.argv[1:], own, defaults))
        except ConfigError as error:
            print(f"{own}: error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None

    @property
    def micro_size(self) -> int:
        """Samples in one forward: as given, else the default for a model without BatchNorm."""
        return self.micro_batch_size or default_micro_batch_size(self.batch_size)

    @property
    def micro_batches(self) -> int:
        """M: micro-batches in a step, over all ranks; see `micro_size`."""
        return self.batch_size // self.micro_size


_SECTIONS: dict[str, Any] = {
    spec.name: spec.type for spec in dataclasses.fields(Config) if dataclasses.is_dataclass(spec.type)
}

# name -> what holds the place of a value that is chosen later
_PLACES: dict[str, Any] = {
    prefix + spec.name: spec.default
    for kind, prefix in ((Config, ""), (Optim, "optim."))
    for spec in dataclasses.fields(kind)
    if spec.metadata.get("auto")
}


# The numbers of batches that may be said as a share of those that there are.
_SHARES = frozenset(spec.name for spec in dataclasses.fields(Config) if spec.metadata.get("share"))

# The lengths that may be said in epochs, or as a share of the plan.
SPANS = (
    frozenset(
        prefix + spec.name
        for kind, prefix in ((Config, ""), (Optim, "optim."))
        for spec in dataclasses.fields(kind)
        if spec.metadata.get("span")
    )
    - _SHARES
)


def sections(config: Config) -> list[tuple[Any, str]]:
    """The config and each of its sections, with the prefix of their fields: [(config, ""), (data, "data."), ...]."""
    return [(config, ""), *((getattr(config, name), f"{name}.") for name in _SECTIONS)]


def lookup(config: Any, name: str) -> Any:
    """The value of a dotted field name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def flag(name: str) -> str:
    """`optim.weight_decay` -> `--optim.weight-decay`; `engine_options.prefetch` -> `--engine.prefetch`."""
    return "--" + name.replace("engine_options.", "engine.").replace("_", "-")


def _names() -> dict[str, str]:
    """The flag of each field -> its dotted name; `--no-exact` is `exact False`."""
    found = {}
    for owner, prefix in sections(Config()):
        for spec in dataclasses.fields(owner):
            name = prefix + spec.name
            if not dataclasses.is_dataclass(spec.type):
                found[flag(name)] = name
            if spec.type is bool:
                found[flag(name).replace("--", "--no-")] = f"{name} False"
    return found


def is_auto(config: Config, name: str) -> bool:
    """Whether the field of a dotted name is still to be chosen."""
    return name in _PLACES and bool(lookup(config, name) == _PLACES[name])


def default_micro_batch_size(batch_size: int, least: int = 1) -> int:
    """The largest divisor of `batch_size` up to an eighth of it, or the next that is `least` or more, or the batch."""
    size = next(size for size in range(max(1, batch_size // 8), 0, -1) if batch_size % size == 0)
    wanted = min(max(size, least), batch_size)
    return next(size for size in range(wanted, batch_size + 1) if batch_size % size == 0)


def _nearest_divisor(batch_size: int, size: int) -> int:
    return next(near for near in range(min(size, batch_size), 0, -1) if batch_size % near == 0)


def _check_types(config: Config) -> None:
    for owner, prefix in sections(config):
        for spec in dataclasses.fields(owner):
            value, wanted = getattr(owner, spec.name), cast(type, spec.type)
            if spec.metadata.get("span") and is_span(value):
                continue
            if spec.metadata.get("auto") and (value == "auto" or value is spec.default):
                object.__setattr__(owner, spec.name, spec.default)
            elif wanted is float and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(owner, spec.name, float(value))
            elif not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                expected = _KINDS.get(wanted, f"a {wanted.__name__}")
                expected += ", or a share such as 10%" if spec.metadata.get("share") else ""
                expected += f", or {SPAN}" if prefix + spec.name in SPANS else ""
                raise FieldError(FieldName(prefix + spec.name), f" is {value!r}: it must be {expected}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _check_best(config: Config) -> None:
    for option_name, said in (
        ("best_metric", config.best_metric),
        ("patience_metric", config.patience_metric or "loss"),
    ):
        name, _, way = said.partition(":")
        if said != "loss" and not (name and way in ("min", "max") and said != "loss:max"):
            raise FieldError(
                FieldName(option_name),
                f" is '{said}': it must be loss, or a metric of the task and whether more of it is better: "
                "accuracy:max, error:min",
            )
    if config.patience_metric and not config.patience:
        raise FieldError(
            FieldName("patience_metric"),
            " needs ",
            FieldName("patience"),
            ": else nothing goes by it; or make it empty",
        )
    plateau = config.optim.schedule == "plateau"
    if (config.patience or plateau) and not config.eval_freq:
        what = ("optim.schedule", "plateau") if plateau else ("patience", config.patience)
        raise FieldError(
            *(FieldName(what[0]), f" {what[1]} needs ", FieldName("eval_freq")),
            ": else the only evaluation is at the end",
        )


SETTINGS.fields |= _names()
