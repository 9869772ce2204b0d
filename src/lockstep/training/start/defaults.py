"""Define default settings, measure what the devices support, and describe a plan.

    rate = TASK_DEFAULTS["images"]["lr"]
    default_warmup(steps)

The tables name their sources; `training/start/resolve.py` chooses from them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import cli
from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import (
    Config,
    choose_micro_batch_size,
    default_micro_batch_size,
    is_auto,
    requested_seq_len,
)
from lockstep.config.task_options import LANGUAGE, kind_of
from lockstep.distributed.world import World
from lockstep.engines.registry import name_of
from lockstep.models.gpt import PRESETS
from lockstep.optim.schedule import NONE
from lockstep.task import DataFacts, Task
from lockstep.training.state.plan import RunPlan, describe_replicas
from lockstep.transforms.batchnorm import Synchronised

__all__ = [
    "ADAM_DEFAULTS",
    "LORA_DEFAULTS",
    "LR_FLOOR",
    "LR_FLOORS",
    "MIN_BATCHNORM_SAMPLES",
    "SGD_DEFAULTS",
    "TASK_DEFAULTS",
    "all_devices_fast",
    "batchnorm_names",
    "default_log_freq",
    "default_warmup",
    "describe_data",
    "describe_idle_ranks",
    "describe_loss",
    "describe_optimizer",
    "describe_run",
    "find_largest_micro_batch",
    "fine_tuning_rate",
    "has_synchronised",
    "is_device_default",
    "plan_warnings",
    "prompt_defaults",
]


# Adapters: 2e-4 for GPT-2 and GPT-3 (Hu et al., arXiv 2106.09685, tables 11 and 12); about ten times the rate of the
# whole model (Schulman et al., "LoRA Without Regret", https://thinkingmachines.ai/blog/lora, 2025).
LORA_DEFAULTS: dict[str, float] = {"lr": 2e-4, "optim.beta2": 0.999, "optim.weight_decay": 0.0}
# Warn outside this range.
_LORA_RATES = (5e-5, 5e-3)

# From scratch: the betas and the decay of GPT-3 and its successors (Brown et al., arXiv 2005.14165, appendix B).
# Pretrained weights: the defaults of the HF Trainer. Otherwise torch's AdamW: lr 1e-3, decay 0.01; for images the
# better of 1e-3 and 3e-3 with the built-in ResNet on the digits (docs/tasks/images.md).
TASK_DEFAULTS: dict[str, dict[str, float]] = {
    "language-model": {"lr": 2e-3, "optim.beta2": 0.95, "optim.weight_decay": 0.1},
    "fine-tuning": {"lr": 5e-5, "optim.beta2": 0.999, "optim.weight_decay": 0.0},
    "images": {"lr": 3e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
    "general": {"lr": 1e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
}
# Prompts and conversations: the epochs and the batch of the HF Trainer and of trl; of few samples half that batch, so
# that there are steps enough to learn from (`python bench/chats.py --survey`: 100, 300 and 1,000 samples).
_PROMPT_EPOCHS = 3
_PROMPT_BATCHES = (4, 8)
_FEW_PROMPTS = 500
# Warn about a plan with fewer steps.
_MIN_STEPS = 50
# torch's own: Adam adds the decay to the gradient.
ADAM_DEFAULTS: dict[str, float] = {"optim.weight_decay": 0.0}
# He et al., arXiv 1512.03385, with a batch of 16 to 32.
SGD_DEFAULTS: dict[str, float] = {"lr": 1e-2, "optim.weight_decay": 1e-4}

# Steps between records.
_LOG_FREQ = 10
# Warm-up: 1/20 of the steps, at most 50.
_WARMUP_DIVISOR = 20
_MAX_WARMUP = 50
# Share of the plan with a rising rate: torch's pct_start.
_ONE_CYCLE_RISE = 0.3
# The lowest learning rate, as a share of --lr.
LR_FLOOR = 0.1
# One-cycle: torch's final rate; the others have no lower bound.
LR_FLOORS = {"one-cycle": 4e-6, "inverse-sqrt": 0.0, "step": 0.0, "plateau": 0.0}
# Fewer samples hurt BatchNorm's statistics (Wu & He, arXiv 1803.08494, figure 1).
MIN_BATCHNORM_SAMPLES = 16


def default_warmup(steps: int, shape: str = "") -> int:
    """Return the default warm-up in steps: 5%, at most 50; 30% for one-cycle."""
    if shape == "one-cycle":
        return round(_ONE_CYCLE_RISE * steps)
    return min(_MAX_WARMUP, steps // _WARMUP_DIVISOR)


def default_log_freq(steps: int) -> int:
    """Return the default steps between records: 10, or 1 in a run that would have two records at most."""
    return _LOG_FREQ if steps > 2 * _LOG_FREQ else 1


def describe_run(run_plan: RunPlan, ranks: int, *, own_optimizer: bool = False) -> str:
    """Describe a run in a line: `60 steps of 64 samples; adamw, lr 0.001`.

    Args:
        ranks: number of them.
        own_optimizer: the optimizer is the task's, so it is not described.
    """
    config = run_plan.config
    steps = run_plan.step_plan.steps
    optimizer = "" if own_optimizer else f"; {config.optim.name}, lr {config.lr:g}"
    return f"{steps:,} step{'s' * (steps != 1)} of {_describe_step(run_plan, ranks)}{optimizer}"


def _describe_step(run_plan: RunPlan, ranks: int) -> str:
    """Describe what a step trains on: `64 samples in 2 micro-batches of 32`."""
    config = run_plan.config
    count = config.micro_batches
    over = f", over {ranks} ranks" if ranks > 1 else ""
    over += describe_replicas(ranks, config.parallel.size)
    over += f" ({config.shares})" if config.shares != "equal" else ""
    if run_plan.samples < run_plan.dataset_samples:
        verb = "of"
    else:
        verb = "draws from"
    if config.batch_tokens:
        parts = f"{count} micro-batch{'es' * (count > 1)} of at most {config.micro_batch_tokens:,}"
        return f"at most {config.batch_tokens:,} tokens in {parts}{over}"
    if run_plan.grouped:
        return f"{count} list{'s' * (count > 1)} of the batch sampler, {run_plan.samples:,} in an epoch{over}"
    epoch_note = f"; an epoch is {run_plan.samples:,} {verb} {run_plan.dataset_samples:,} samples"
    over += epoch_note if run_plan.samples != run_plan.dataset_samples else ""
    samples = f"{config.batch_size} sample{'s' * (config.batch_size > 1)}"
    if count == 1:
        return f"{samples}{over}"
    most = "at most " if config.batch_size % config.micro_batch_size else ""
    return f"{samples} in {count} micro-batches of {most}{config.micro_batch_size}{over}"


def prompt_defaults(samples: int) -> dict[str, int]:
    """Return the epochs and the batch of prompts or conversations.

    Args:
        samples: of the training set.
    """
    return {"num_epochs": _PROMPT_EPOCHS, "batch_size": _PROMPT_BATCHES[samples >= _FEW_PROMPTS]}


def fine_tuning_rate(width: int, lora: bool = False) -> float:
    """Return the rate of a pretrained language model that learns prompts, rounded to two digits.

    A power of the width, through trl's 2e-5 at the 4096 of a model of 7 billion parameters, and 2e-3 at 128
    (`python bench/chats.py --survey`); at most that of a model from scratch. Adapters take ten times as much, at least
    their rate for other data, and at most the largest that is not warned of.

    Args:
        width: of the hidden states; 0: unknown.
        lora: of adapters.
    """
    if not width:
        return (LORA_DEFAULTS if lora else TASK_DEFAULTS["fine-tuning"])["lr"]
    rate = 2e-5 * (4096 / width) ** (4 / 3)
    low, high = (LORA_DEFAULTS["lr"], _LORA_RATES[1]) if lora else (0.0, TASK_DEFAULTS["language-model"]["lr"])
    return min(max(float(f"{10 * rate if lora else rate:.1e}"), low), high)


def describe_data(run_plan: RunPlan, facts: DataFacts | None) -> str:
    """Return a line about prompts or conversations and their steps, or ""."""
    if not (facts and facts.has_prompts):
        return ""
    epoch = -(-run_plan.samples // run_plan.config.batch_size)
    steps = run_plan.step_plan.steps
    return f"{facts.summary}; {epoch:,} step{'s' * (epoch != 1)} an epoch, {steps:,} in the run"


def describe_loss(run_plan: RunPlan, task: Task) -> str:
    """Return a line about the samples of a framework task's loss; otherwise ""."""
    framework = task.framework
    size = run_plan.config.micro_size
    if not framework or task.reduction != "micro-batch":
        return ""
    batch = f"a batch of {size} samples" if size > 1 else "a batch"
    return f"{batch} is a micro-batch with a loss of its own, as in {framework}"


def describe_optimizer(run_plan: RunPlan) -> str:
    """Return a line about the optimizer: `adamw: lr 0.001, cosine to 0.1 ...`."""
    config = run_plan.config
    optim = run_plan.config.optim
    if optim.schedule in ("constant", "inverse-sqrt", "step", "plateau"):
        to = ""
    else:
        to = f" to {optim.floor:.3g}"
    rates = f"{optim.schedule}{to} after {optim.warmup_steps} of {run_plan.step_plan.steps} steps of warm-up"
    if optim.schedule == NONE:
        rates = "a learning rate that lockstep never writes"
    if optim.name != "sgd":
        numbers = f"betas {optim.beta1:g} and {optim.beta2:g}"
    else:
        numbers = f"momentum {optim.momentum:g}"
    if optim.name == "muon":
        numbers += f"; matrices: lr {optim.muon_lr or config.lr:g}, momentum {optim.muon_momentum:g}"
    return f"{optim.name}: lr {config.lr:g}, {rates}, weight decay {optim.weight_decay:g}, {numbers}"


def plan_warnings(run_plan: RunPlan, model: nn.Module, facts: DataFacts | None = None, ranks: int = 1) -> list[str]:
    """Return a line for each warning about warm-up, few steps, the adapters' rate and BatchNorm.

    Args:
        facts: of a language model's data.
        ranks: number of them.
    """
    config = run_plan.config
    steps = run_plan.step_plan.steps
    lines = []
    if facts and facts.has_prompts and steps < _MIN_STEPS:
        epochs = -(-_MIN_STEPS * config.batch_size // max(1, run_plan.samples))
        if config.max_steps:
            more = f"--max-steps {_MIN_STEPS}"
        else:
            more = f"--num-epochs {max(epochs, config.num_epochs + 1)}"
        lines.append(f"the run has {steps} step{'s' * (steps > 1)}, few to learn an answer from: give {more} or more")
    if config.optim.warmup_steps >= steps and config.optim.schedule != NONE:
        lines.append(
            f"--optim.warmup-steps {config.optim.warmup_steps} is longer than the plan of {steps} "
            f"step{'s' * (steps > 1)}, so the learning rate never reaches --lr {config.lr:g}; leave it out for "
            f"{default_warmup(steps, config.optim.schedule)}"
        )
    low, high = _LORA_RATES
    if config.lora.rank and config.optim.name != "sgd" and not low <= config.lr <= high:
        lines.append(
            f"--lr {config.lr:g} is {'low' if config.lr < low else 'high'} for adapters, which need about ten times "
            f"the rate of the whole model: leave it out for {LORA_DEFAULTS['lr']:g}"
        )
    norms = batchnorm_names(model)
    if line := _batchnorm_warning(run_plan, norms, ranks if has_synchronised(model) else 1):
        lines.append(line)
    missing = config.num_epochs * run_plan.samples - run_plan.step_plan.total
    if norms and not (config.max_steps or config.data.drop_last) and missing == 1:
        lines.append("the last sample of the last epoch is left out: BatchNorm cannot normalise a single sample")
    return lines


def _batchnorm_warning(run_plan: RunPlan, norms: list[str], ranks: int) -> str:
    """Return a line if BatchNorm layers normalise over few samples; "" otherwise.

    Args:
        norms: names of the layers.
        ranks: that normalise together.
    """
    config = run_plan.config
    if run_plan.grouped:
        # The sizes count lists, and a list has as many samples as `order` put into it: on average these.
        samples = ranks * max(1, run_plan.dataset_samples // run_plan.samples)
    else:
        samples = min(config.micro_batch_size * ranks, config.batch_size)
    if not norms or samples >= MIN_BATCHNORM_SAMPLES:
        return ""
    if run_plan.grouped:
        advice = "put more samples into each list of `order`"
    else:
        advice = f"set {_batchnorm_flags(config, ranks)}"
    layers = norms[0] + (f" and {len(norms) - 1} more" if len(norms) > 1 else "")
    return (
        f"BatchNorm ({layers}) normalises over the {samples} sample{'s' * (samples > 1)} of "
        f"{'a forward' if ranks == 1 else 'all ranks'}, and {MIN_BATCHNORM_SAMPLES} or more train better: {advice}"
    )


def _batchnorm_flags(config: Config, ranks: int) -> str:
    """Return the flags under which BatchNorm normalises over enough samples."""
    size = default_micro_batch_size(max(config.batch_size, MIN_BATCHNORM_SAMPLES), MIN_BATCHNORM_SAMPLES)
    if ranks > 1:
        micro = f"--micro-batch-size {-(-size // ranks)}"
    else:
        micro = f"--micro-batch-size {size}"
    if config.batch_size >= MIN_BATCHNORM_SAMPLES:
        return micro
    if ranks > 1:
        return f"--batch-size {MIN_BATCHNORM_SAMPLES}"
    return f"--batch-size {MIN_BATCHNORM_SAMPLES} and {micro}"


def describe_idle_ranks(config: Config, ranks: int) -> str:
    """Return the warning for a step with fewer micro-batches than ranks.

    Such a --batch-size was most often meant for each device.
    """
    batch = config.batch_size
    micro = config.micro_batch_size
    count = config.micro_batches
    return (
        f"--batch-size {batch} counts all ranks together: {count} micro-batch{'es' * (count > 1)} of {micro} for "
        f"{ranks} ranks leave{'s' * (count == 1)} {ranks - count} of them idle; for {batch} on each device: "
        f"--batch-size {batch * ranks} and --micro-batch-size {batch}"
    )


def has_synchronised(model: nn.Module) -> bool:
    """Whether BatchNorm layers normalise over the samples of all ranks."""
    return any(isinstance(layer, Synchronised | nn.SyncBatchNorm) for layer in model.modules())


def batchnorm_names(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers in training mode, which normalise by the batch."""
    layers = model.named_modules()
    return [name or type(layer).__name__ for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]


# --- device


def is_device_default(config: Config, name: str) -> bool:
    """Whether the devices decide precision or compile."""
    return is_auto(config, name) or getattr(config, name) == "auto"


def all_devices_fast(config: Config, world: World, every: Sequence[bool]) -> bool:
    """Whether all devices and the engine suit bf16 and compilation.

    False if the configuration leaves neither open.

    Args:
        every: by rank, `is_fast` of its device.
    """
    if not (is_device_default(config, "precision") or is_device_default(config, "compile")):
        return False
    return all(every) and not ENGINES[name_of(config.engine, world)].plain


# --- device memory

# Tokens: an upper bound over the tokenizers in use.
_VOCABULARY = 1 << 18
# Bytes per parameter: float32 value, gradient, two moments, average, bucket, and a copy in half precision.
_STATES = 28
# Bytes that a block stores per token and element of its width: 29 float32 tensors and 7 in half precision.
_ACTIVATIONS = 160
# Bytes per attention score that is stored: before and after softmax, and after dropout.
_SCORES = 12
# Copies of the logits: half precision, float32, softmax, their gradient, and the product's gradient.
_LOGIT_COPIES = 5
# Bytes of float32 logits above which the loss makes them in chunks (models/chunked_loss.py).
_CHUNKED_LOGITS = 512 << 20
# Bytes: CUDA's context, cuBLAS's workspaces, and the allocator's reserve.
_CUDA_CONTEXT = 2 << 30


def memory_bound(config: Config, micro_batch_size: int) -> float | None:
    """Return an upper bound of the bytes that training takes on one device.

    Returns:
        None for another model than a built-in GPT, and for engines and settings that take more than is counted.
    """
    shape = PRESETS.get(config.model_name)
    if shape is None or kind_of(config.task) != LANGUAGE:
        return None
    if config.exact or config.guards.audit or config.precision == "float64":
        # Sums of exact steps, deterministic kernels and doubles are not counted.
        return None
    if config.engine in ENGINES and ENGINES[config.engine].plain:
        # A plain engine has more copies than are counted.
        return None
    vocabulary = max(_VOCABULARY, config.data.vocab_size)
    seq_len = requested_seq_len(config)
    tokens = micro_batch_size * seq_len
    # The weights, biases and norms of a block's attention and MLP.
    parameters = shape.layers * (12 * shape.width**2 + 13 * shape.width)
    parameters += shape.width * (vocabulary + max(shape.context, seq_len) + 2)
    # Two more blocks, for the one that the backward is in.
    activations = (shape.layers + 2) * _ACTIVATIONS * shape.width * tokens
    if config.data.packing == "documents" or config.attention not in ("auto", "flash", "cudnn", "efficient"):
        activations += (shape.layers + 2) * _SCORES * shape.heads * seq_len * tokens
    logits = 4 * tokens * vocabulary
    if config.model.loss_chunk:
        logits = min(logits, max(_CHUNKED_LOGITS, 4 * config.model.loss_chunk * vocabulary))
    return float(_STATES * parameters + activations + _LOGIT_COPIES * logits + _CUDA_CONTEXT)


# Seconds that `lockstep plan` may take.
_PLAN_TIMEOUT = 300.0
# Share of a device's memory: a bound below it fits without a measurement.
_SAFE_SHARE = 0.5
# The device profile to plan with; its memory is overridden.
_PROFILE = "h100-80"


def find_largest_micro_batch(
    config: Config,
    world: World,
    say: Callable[[str], None],
    plan: Callable[[Config, int, float], int] | None = None,
) -> int:
    """Find the largest micro-batch size that fits the devices. Collective.

    Args:
        config: with the precision of the run.
        say: called with a line for the user.
        plan: (config, ranks, bytes of a device) -> the size, or 0; None: `plan_micro_batch`.

    Returns:
        The size; 0 if the default fits, or it is unknown.
    """
    if world.device.type != "cuda":
        return 0
    # The device with the least memory decides for all ranks.
    memory = min(world.gather(_device_memory(world.device) if plan is None else 0.0))
    bound = memory_bound(config, choose_micro_batch_size(config, world.data_parallel.size))
    if bound is not None and bound < _SAFE_SHARE * memory:
        return 0
    say(
        "--micro-batch-size auto: `lockstep plan` computes in another process whether the default size fits this "
        "device; --micro-batch-size N skips this"
    )
    if world.is_main:
        planned = (plan or plan_micro_batch)(config, world.size, memory)
    else:
        planned = 0
    # Rank 0 plans for all ranks.
    size: int = world.gather(planned)[0]
    if size:
        say(f"--micro-batch-size auto: {size}, the largest that fits this device by `lockstep plan`")
    return size


def _device_memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def plan_micro_batch(config: Config, ranks: int, memory: float) -> int:
    """Run `lockstep plan` for the largest micro-batch size that fits, in a process without devices.

    Args:
        ranks: world size.
        memory: bytes of the smallest device.

    Returns:
        The size; 0 if the default fits, if none does, or if the plan fails.
    """
    launcher_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {}
    for name, value in os.environ.items():
        if name not in launcher_names and "TORCHELASTIC" not in name:
            environment[name] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(cli.to_toml(dataclasses.replace(config, compile=False)), encoding="utf-8")
        command = [sys.executable, "-m", "lockstep", "plan", "--config", str(file), "--fast", "--json"]
        command += ["--world-sizes", str(ranks), "--device", _PROFILE, "--memory", f"{memory / 2**30:.4f}GiB"]
        try:
            process = subprocess.run(
                command,
                env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=_PLAN_TIMEOUT,
                check=False,
            )
            plan = json.loads(process.stdout)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return 0
    if plan["fits"]:
        return 0
    return int(plan["largest"]["micro_batch_size"] or 0)
