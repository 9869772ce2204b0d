"""Define the defaults, measure what they need of the devices, describe a plan, and check tensor devices.

    for found in elsewhere(model, task, batch, device): ...     # Lying("buffer 'norm.mean'", cpu, sure=True)
    line = explained(error, model, task, batch)                 # "" unless torch complained of devices

The sources of the numbers are given with the tables; `training/resolve.py` chooses from them. Tensors on the wrong
device are found before torch fails on one.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import cli
from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import Config, default_micro_batch_size, is_auto
from lockstep.config.task_options import LANGUAGE, kind_of
from lockstep.distributed.world import World
from lockstep.engines.registry import name_of
from lockstep.models.gpt import PRESETS
from lockstep.task import Task, written
from lockstep.training.resume import RunPlan

__all__ = [
    "ADAM",
    "FEW",
    "FLOOR",
    "FLOORS",
    "KINDS",
    "LORA",
    "SGD",
    "Lying",
    "all_fast",
    "batchnorms",
    "described_loss",
    "described_optimizer",
    "described_step",
    "elsewhere",
    "explained",
    "idle",
    "is_open",
    "largest_micro_batch",
    "warm_up",
    "warnings",
]


# Adapters: 2e-4 for GPT-2 and GPT-3 (Hu et al., arXiv 2106.09685, tables 11 and 12); about ten times what the whole
# model takes (Schulman et al., "LoRA Without Regret", https://thinkingmachines.ai/blog/lora, 2025).
LORA: dict[str, float] = {"lr": 2e-4, "optim.beta2": 0.999, "optim.weight_decay": 0.0}
_LORA_RATES = (5e-5, 5e-3)  # warn outside this range

# From scratch: the betas and the decay that GPT-3 and its successors are trained with (Brown et al., arXiv 2005.14165,
# appendix B). Pretrained weights: the defaults of the HF Trainer. Else torch's own AdamW: lr 1e-3, decay 0.01; images
# have the better of 1e-3 and 3e-3 for the built-in ResNet on the digits (docs/tasks/images.md).
KINDS: dict[str, dict[str, float]] = {
    "language-model": {"lr": 2e-3, "optim.beta2": 0.95, "optim.weight_decay": 0.1},
    "fine-tuning": {"lr": 5e-5, "optim.beta2": 0.999, "optim.weight_decay": 0.0},
    "images": {"lr": 3e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
    "general": {"lr": 1e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
}
ADAM: dict[str, float] = {"optim.weight_decay": 0.0}  # torch's own; Adam adds decay to the gradient
SGD: dict[str, float] = {"lr": 1e-2, "optim.weight_decay": 1e-4}  # He et al., arXiv 1512.03385, at a batch of 16 to 32

_SHARE, _MOST = 20, 50  # warm-up: 1/20 of the steps, at most 50
_RISE = 0.3  # one-cycle: share of the plan with a rising rate, torch's pct_start
FLOOR = 0.1
FLOORS = {
    "one-cycle": 4e-6,
    "inverse-sqrt": 0.0,
    "step": 0.0,
    "plateau": 0.0,
}  # one-cycle: torch's final rate; the others have no lower bound
FEW = 16  # fewer samples hurt BatchNorm's statistics (Wu & He, arXiv 1803.08494, figure 1)


def warm_up(steps: int, shape: str = "") -> int:
    """Return the default warm-up in steps: 5% of the plan, at most 50.

    It is 0 for less than a step; the rise of a one-cycle schedule is 30%.
    """
    return round(_RISE * steps) if shape == "one-cycle" else min(_MOST, steps // _SHARE)


def described_step(run_plan: RunPlan, ranks: int) -> str:
    """Describe a step: `a step of 64 = 8 forwards of 8, over 2 ranks`."""
    config = run_plan.config
    count, over = config.micro_batches, f", over {ranks} ranks" if ranks > 1 else ""
    over += f" ({config.shares})" if config.shares != "equal" else ""
    drawn = "of" if run_plan.samples < run_plan.dataset_samples else "draws from"
    part = f"; an epoch is {run_plan.samples:,} {drawn} {run_plan.dataset_samples:,} samples"
    over += part if run_plan.samples != run_plan.dataset_samples else ""
    return f"a step of {config.batch_size} = {count} forward{'s' * (count > 1)} of {config.micro_batch_size}{over}"


def described_loss(run_plan: RunPlan, task: Task) -> str:
    """Describe which samples a loss covers, for a task of another framework.

    There the framework's batch is the micro-batch. "" for other tasks.
    """
    framework, size = task.framework, run_plan.config.micro_size
    if not framework or task.reduction != "micro-batch":
        return ""
    batch = f"a batch of {size} samples" if size > 1 else "a batch"
    return f"{batch} is a micro-batch: its loss is computed by itself, as {framework} does"


def described_optimizer(run_plan: RunPlan) -> str:
    """Describe the configuration's optimizer in one line.

    For example `adamw: lr 0.001, cosine to 0.1 after 3 of 60 steps of warm-up, ...`.
    """
    config, optim = run_plan.config, run_plan.config.optim
    to = "" if optim.schedule in ("constant", "inverse-sqrt", "step", "plateau") else f" to {optim.floor:.3g}"
    numbers = f"betas {optim.beta1:g} and {optim.beta2:g}" if optim.name != "sgd" else f"momentum {optim.momentum:g}"
    if optim.name == "muon":
        numbers += f"; matrices: lr {optim.muon_lr or config.lr:g}, momentum {optim.muon_momentum:g}"
    return (
        f"{optim.name}: lr {config.lr:g}, {optim.schedule}{to} after {optim.warmup_steps} of "
        f"{run_plan.step_plan.steps} steps of warm-up, weight decay {optim.weight_decay:g}, {numbers}"
    )


def warnings(run_plan: RunPlan, model: nn.Module) -> list[str]:
    """Return warnings before step 1, a line each: on warm-up, adapter rate and BatchNorm."""
    config, steps = run_plan.config, run_plan.step_plan.steps
    found = []
    if config.optim.warmup_steps >= steps:
        found.append(
            f"--optim.warmup-steps {config.optim.warmup_steps} is longer than the plan of {steps} "
            f"step{'s' * (steps > 1)}, so the rate never reaches --lr {config.lr:g}; leave it out for "
            f"{warm_up(steps, config.optim.schedule)}"
        )
    least, most = _LORA_RATES
    if config.lora.rank and config.optim.name != "sgd" and not least <= config.lr <= most:
        found.append(
            f"--lr {config.lr:g} is {'low' if config.lr < least else 'high'} for adapters, which take about ten times "
            f"the rate of the whole model: leave it out for {LORA['lr']:g}"
        )
    norms, micro_size = batchnorms(model), config.micro_batch_size
    if norms and micro_size < FEW and config.batchnorm != "sync":
        size = default_micro_batch_size(max(config.batch_size, FEW), FEW)
        more = f"--batch-size {FEW} and " if config.batch_size < FEW else ""
        which = norms[0] + (f" and {len(norms) - 1} more" if len(norms) > 1 else "")
        found.append(
            f"BatchNorm ({which}) normalises over the {micro_size} sample{'s' * (micro_size > 1)} of a forward, and "
            f"{FEW} or more train better: give {more}--micro-batch-size {size}"
        )
    missing = config.num_epochs * run_plan.samples - run_plan.step_plan.total
    if norms and not (config.max_steps or config.data.drop_last) and missing == 1:
        found.append("the last sample of the last epoch is left out: BatchNorm cannot learn from one alone")
    return found


def idle(config: Config, ranks: int) -> str:
    """Return the warning for a step with fewer micro-batches than ranks.

    Most often a batch per device was meant.
    """
    batch, micro, held = config.batch_size, config.micro_batch_size, config.micro_batches
    return (
        f"--batch-size {batch} is the whole step's, over all ranks: {held} micro-batch{'es' * (held > 1)} of {micro} "
        f"for {ranks} ranks leave{'s' * (held == 1)} {ranks - held} of them without work; for {batch} on each device: "
        f"--batch-size {batch * ranks} and --micro-batch-size {batch}"
    )


def batchnorms(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers that normalise by the batch.

    Those are the ones in training mode.
    """
    layers = model.named_modules()
    return [name or type(layer).__name__ for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]


# --- device

_NEW = (8, 0)  # Ampere: the first with bfloat16 matrix units


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for any other device.

    ROCm reports numbers with another meaning.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def is_open(config: Config, name: str) -> bool:
    """Whether precision or compile is left to the devices."""
    return is_auto(config, name) or getattr(config, name) == "auto"


def all_fast(config: Config, world: World) -> bool:
    """Whether bf16 and compilation suit the devices of all ranks and the engine. Collective.

    False if the configuration leaves neither to the devices.
    """
    if not (is_open(config, "precision") or is_open(config, "compile")):
        return False
    own = capability(world.device)
    every = world.gather(own is not None and own >= _NEW)  # collective
    return all(every) and not ENGINES[name_of(config.engine, world)].plain


# --- device memory

_VOCABULARY = 1 << 18  # tokens: an upper bound over tokenizers in use
# Bytes per parameter: float32 value, gradient, two moments, average, bucket, and a copy in half precision.
_STATES = 28
# Bytes that a block keeps per token and element of its width: 29 float32 tensors and 7 in half precision.
_KEPT = 160
_WEIGHTS = 12  # bytes per attention score, if scores are kept: before and after softmax, and after dropout
_COPIES = 5  # copies of the logits: half precision, float32, softmax, their gradient, and the product's gradient
_LOGITS = 512 << 20  # bytes of float32 logits above which the loss makes them in chunks (see models/fused.py)
_CONTEXT = 2 << 30  # bytes: CUDA's context, cuBLAS's workspaces, and the allocator's reserve


def memory_bound(config: Config, micro_batch_size: int) -> float | None:
    """Return an upper bound of the bytes that training takes on one device.

    Returns:
        None for a model that is not a built-in GPT, and for engines and settings that take more than is counted here.
    """
    shape = PRESETS.get(config.model_name)
    if shape is None or kind_of(config.task) != LANGUAGE:
        return None
    if config.exact or config.guards.audit or config.precision == "float64":
        return None  # sums of exact steps, deterministic kernels, doubles
    if config.engine in ENGINES and ENGINES[config.engine].plain:
        return None  # it holds more copies than are counted here
    vocabulary = max(_VOCABULARY, config.data.vocab_size)
    tokens = micro_batch_size * config.seq_len
    parameters = shape.layers * (12 * shape.width**2 + 13 * shape.width)
    parameters += shape.width * (vocabulary + max(shape.context, config.seq_len) + 2)
    kept = (shape.layers + 2) * _KEPT * shape.width * tokens  # two more: the block that the backward is in
    if config.data.packing == "documents" or config.attention not in ("auto", "flash", "cudnn", "efficient"):
        kept += (shape.layers + 2) * _WEIGHTS * shape.heads * config.seq_len * tokens
    logits = 4 * tokens * vocabulary
    if config.model.loss_chunk:
        logits = min(logits, max(_LOGITS, 4 * config.model.loss_chunk * vocabulary))
    return float(_STATES * parameters + kept + _COPIES * logits + _CONTEXT)


_PATIENCE = 300.0  # seconds
_PLAIN = 0.5  # share of a device's memory: a bound below it fits without a measurement
_LIKE = "h100-80"  # the device profile to plan with; its memory is overridden


def largest_micro_batch(
    config: Config,
    world: World,
    say: Callable[[str], None],
    ask: Callable[[Config, int, float], int] | None = None,
) -> int:
    """Measure the largest micro-batch size that fits the devices. Collective.

    Args:
        config: with the precision of the run.
        say: called with a line for the user.
        ask: (config, ranks, bytes) -> the largest size that fits; 0 if the default fits or nothing is known. None:
            `asked`, with the memory of the smallest device.

    Returns:
        The size; 0 if the default fits, or it cannot be known.
    """
    if world.device.type != "cuda":
        return 0
    room = min(world.gather(_memory(world.device) if ask is None else 0.0))  # collective
    bound = memory_bound(config, default_micro_batch_size(config.batch_size))
    if bound is not None and bound < _PLAIN * room:
        return 0
    say(
        "--micro-batch-size auto: `lockstep plan` computes whether the default size fits this device, in a process of "
        "its own; --micro-batch-size N does without"
    )
    size: int = world.gather((ask or asked)(config, world.size, room) if world.is_main else 0)[0]  # collective
    if size:
        say(
            f"--micro-batch-size auto: {size}, since a larger one does not fit this device by `lockstep plan`; it is "
            "kept for this run"
        )
    return size


def _memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def asked(config: Config, ranks: int, room: float) -> int:
    """Ask `lockstep plan` in a separate process for the largest micro-batch size that fits.

    No device is used.

    Args:
        ranks: world size.
        room: bytes of the smallest device's memory.

    Returns:
        The size; 0 if the default fits, if none does, or if it cannot be planned.
    """
    apart = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in apart and "TORCHELASTIC" not in name}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(cli.to_toml(dataclasses.replace(config, compile=False)), encoding="utf-8")
        command = [sys.executable, "-m", "lockstep", "plan", "--config", str(file), "--fast", "--json"]
        command += ["--world-size", str(ranks), "--device", _LIKE, "--memory", f"{room / 2**30:.4f}GiB"]
        try:
            done = subprocess.run(
                command,
                env={**own, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
            found = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return 0
    return 0 if found["fits"] else int(found["largest"]["micro_batch_size"] or 0)


# --- tensors on the wrong device

_COMPLAINT = re.compile(
    r"on the same device|expected device|different devices|two devices|should be the same$|expected.* on (?:cpu|cuda)"
    r"|(?:FloatTensor|HalfTensor|BFloat16Tensor)\) and weight type|is on \w+(?::\d+)?,? but expected",
    re.MULTILINE,
)
_DEEP = 3  # levels of nested containers that are searched
_SHOWN = 4


class Lying(NamedTuple):
    """A tensor that is not on the device where the run computes.

    Attributes:
        what: `buffer 'norm.mean'`, `the model's attribute 'scale'`, `batch[1]`.
        where: its device.
        sure: certainly wrong; otherwise its owner may still move it when it uses it.
    """

    what: str
    where: torch.device
    sure: bool


def elsewhere(model: nn.Module, task: Task, batch: Any, device: torch.device) -> list[Lying]:
    """Find the tensors that are not on `device`.

    Searched are parameters and buffers of the model and of modules that the task holds (a criterion), their tensors in
    plain attributes, also in lists and dicts, which `model.to()` does not move; and the batch as the loss gets it. A
    whole model in host memory (offloaded) is accepted, and so are single numbers there.
    """
    found = list(_of_module(model, "", device))
    own = written(task)
    for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
        if isinstance(value, nn.Module) and value is not model:
            found += [each._replace(what=f"the task's {name}: {each.what}") for each in _of_module(value, "", device)]
        elif not isinstance(value, nn.Module):
            found += [
                Lying(f"the task's attribute '{path}'", tensor.device, tensor.is_meta)
                for path, tensor in _tensors(value, name)
                if _apart(tensor, device)
            ]
    found += [Lying(path, tensor.device, True) for path, tensor in _tensors(batch, "batch") if _apart(tensor, device)]
    return found


def _of_module(module: nn.Module, prefix: str, device: torch.device) -> Iterator[Lying]:
    places = {parameter.device.type for parameter in module.parameters()}
    offloaded = places == {"cpu"} and device.type != "cpu"
    for name, parameter in module.named_parameters():
        if not offloaded and not _same(parameter.device, device):
            yield Lying(f"parameter '{prefix}{name}'", parameter.device, True)
    for name, buffer in module.named_buffers():
        if not offloaded and _apart(buffer, device):
            yield Lying(f"buffer '{prefix}{name}'", buffer.device, True)
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if attribute in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            for path, tensor in _tensors(value, attribute):
                if _apart(tensor, device):
                    where = f"{prefix}{name}.{path}" if name else f"{prefix}{path}"
                    yield Lying(f"attribute '{where}', no buffer", tensor.device, tensor.is_meta)


def _tensors(value: Any, path: str, deep: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif deep < _DEEP and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}[{key!r}]", deep + 1)
    elif deep < _DEEP and isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{path}[{place}]", deep + 1)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _apart(tensor: Tensor, device: torch.device) -> bool:
    is_number = tensor.ndim == 0 and tensor.device.type == "cpu"  # torch accepts these on any device
    return not is_number and not _same(tensor.device, device)


def explained(error: BaseException, model: nn.Module, task: Task, batch: Any) -> str:
    """List misplaced tensors, if `error` is torch's error about devices; else ""."""
    if not isinstance(error, RuntimeError | TypeError | ValueError) or not _COMPLAINT.search(str(error)):
        return ""
    counts = Counter(parameter.device for parameter in model.parameters())
    if not counts:
        return ""
    device = counts.most_common(1)[0][0]
    found = elsewhere(model, task, batch, device)
    if not found:
        return f"all that was looked at lies on {device}: a tensor made inside the method lies elsewhere"
    shown = ", ".join(f"{each.what} on {each.where}" for each in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"the model lies on {device}, and elsewhere: {shown}{more}; register_buffer() has a tensor move with its module"
    )
