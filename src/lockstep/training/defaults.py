"""Where the tensors of a model, a task and a batch lie: found before torch stumbles over one, and named when it does.

for found in elsewhere(model, task, batch, device): ...     # Lying("buffer 'norm.mean'", cpu, sure=True)
line = explained(error, model, task, batch)                 # "" unless torch complained of devices
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
from lockstep.config.fields import in_steps, is_span
from lockstep.config.schema import SPANS, Config, default_micro_batch_size, is_auto, lookup
from lockstep.config.task_options import LANGUAGE, kind_of
from lockstep.data.batches import START, Origin
from lockstep.distributed.world import World
from lockstep.engines.registry import name_of
from lockstep.errors import ConfigError, DataError
from lockstep.models.gpt import PRESETS
from lockstep.task import Task, written
from lockstep.training.resume import RunPlan, in_epoch

__all__ = [
    "KINDS",
    "SGD",
    "Lying",
    "asked",
    "capability",
    "described_loss",
    "described_optimizer",
    "described_step",
    "elsewhere",
    "explained",
    "fitted",
    "idle",
    "memory_bound",
    "on_device",
    "settled",
    "warm_up",
    "warnings",
]


# Adapters: 2e-4 for GPT-2 and GPT-3 (Hu et al., arXiv 2106.09685, tables 11 and 12); about ten times what the whole
# model takes (Schulman et al., "LoRA Without Regret", https://thinkingmachines.ai/blog/lora, 2025).
LORA: dict[str, float] = {"lr": 2e-4, "optim.beta2": 0.999, "optim.weight_decay": 0.0}
_LORA_RATES = (5e-5, 5e-3)  # outside of these a warning

# From scratch: the betas and the decay that GPT-3 and its successors are trained with (Brown et al., arXiv 2005.14165,
# appendix B). Pretrained weights: the defaults of the HF Trainer. Else torch's own AdamW: lr 1e-3, decay 0.01; images
# have the better of 1e-3 and 3e-3 for the built-in ResNet on the digits (docs/tasks/images.md).
KINDS: dict[str, dict[str, float]] = {
    "language-model": {"lr": 2e-3, "optim.beta2": 0.95, "optim.weight_decay": 0.1},
    "fine-tuning": {"lr": 5e-5, "optim.beta2": 0.999, "optim.weight_decay": 0.0},
    "images": {"lr": 3e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
    "general": {"lr": 1e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
}
_ADAM: dict[str, float] = {"optim.weight_decay": 0.0}  # torch's own: added to the gradient, a decay is another thing
SGD: dict[str, float] = {"lr": 1e-2, "optim.weight_decay": 1e-4}  # He et al., arXiv 1512.03385, at a batch of 16 to 32

_SHARE, _MOST = 20, 50  # warm-up: one step of 20, and no more than 50
_RISE = 0.3  # one-cycle: share of the plan in which the rate rises, torch's pct_start
_FLOOR = 0.1
_FLOORS = {
    "one-cycle": 4e-6,
    "inverse-sqrt": 0.0,
    "step": 0.0,
    "plateau": 0.0,
}  # torch's final rate of a cycle; no bound
_FEW = 16  # samples below which BatchNorm's statistics cost quality (Wu & He, arXiv 1803.08494, figure 1)


def settled(
    config: Config, task: Task, model: nn.Module, samples: int, origin: Origin = START, epoch: int = 0
) -> RunPlan:
    """The plan, its `config` without any "auto". The same on every rank, and in every world.

    Args:
        task: its attribute `defaults` names one of KINDS.
        model: as it is trained; whether BatchNorm is in it decides how a step is cut.
        samples: of the training set.
        origin: see `RunPlan`.
        epoch: samples of an epoch, where the task's order has more or less than the training set; 0: as many.

    Raises:
        ConfigError: the task names no known kind.
        DataError: all samples are left out.
    """
    norms = _norms(model)
    least = _FEW if norms else 1
    by_itself = config.batch_size if task.reduction == "micro-batch" else 0  # the cut matters to such a loss
    size = config.micro_batch_size or by_itself or default_micro_batch_size(config.batch_size, least)
    config = dataclasses.replace(config, micro_batch_size=size)
    run_plan = RunPlan(in_epoch(config, epoch or samples), config, origin, 2 if norms else 1, samples)
    steps = run_plan.step_plan.steps
    if not steps:
        _refuse(run_plan)
    shape = config.optim.schedule
    chosen: dict[str, Any] = {
        **_suited(config, task),
        "optim.warmup_steps": warm_up(steps, shape),
        "optim.floor": _FLOORS.get(shape, _FLOOR),
        "eval_micro_batch_size": size,
        "eval_workers": config.data.workers,
        "compile": False,  # this, and the precision, where no device has settled them: see training/defaults.py
    }
    values = {name: value for name, value in chosen.items() if is_auto(config, name)}
    values |= {"precision": "float32"} if config.precision == "auto" else {}
    values |= _in_steps(run_plan)
    return dataclasses.replace(run_plan, config=cli.build({**cli.flat(run_plan.config), **values}))


def _in_steps(run_plan: RunPlan) -> dict[str, int]:
    """The lengths that are said in epochs or as a share of the plan, as steps."""
    config = run_plan.config
    known = {"steps": run_plan.step_plan.steps, "samples": run_plan.samples, "batch_size": config.batch_size}
    names = sorted(SPANS - {"extend_to"})  # which is the plan's length itself: see training/resume.py
    return {name: in_steps(value, **known) for name in names if is_span(value := lookup(config, name))}


def _suited(config: Config, task: Task) -> dict[str, float]:
    kind = task.defaults
    if kind not in KINDS:
        raise ConfigError(
            f"the task's defaults are {kind!r}: choose one of {', '.join(KINDS)}, or leave the attribute out"
        )
    if config.optim.name == "sgd":
        return SGD
    return (LORA if config.lora.rank else KINDS[kind]) | (_ADAM if config.optim.name == "adam" else {})


def warm_up(steps: int, shape: str = "") -> int:
    """The default warm-up of a plan of `steps`: 5%, at most 50, and none where that is less than a step; the rise of a
    cycle is 30%."""
    return round(_RISE * steps) if shape == "one-cycle" else min(_MOST, steps // _SHARE)


def _refuse(run_plan: RunPlan) -> None:
    if run_plan.config.data.drop_last:
        raise DataError(
            f"the training set has {run_plan.samples} samples, less than one step, and --data.drop-last leaves short "
            f"ones out: give a --batch-size below {run_plan.config.batch_size}, or --no-data.drop-last"
        )
    raise DataError("the training set has one sample, which BatchNorm cannot learn from alone: give it more")


def described_step(run_plan: RunPlan, ranks: int) -> str:
    """What a step is: `a step of 64 = 8 forwards of 8, over 2 ranks`."""
    config = run_plan.config
    count, over = config.micro_batches, f", over {ranks} ranks" if ranks > 1 else ""
    over += f" ({config.shares})" if config.shares != "equal" else ""
    drawn = "of" if run_plan.samples < run_plan.whole else "draws from"
    part = f"; an epoch is {run_plan.samples:,} {drawn} {run_plan.whole:,} samples"
    over += part if run_plan.samples != run_plan.whole else ""
    return f"a step of {config.batch_size} = {count} forward{'s' * (count > 1)} of {config.micro_batch_size}{over}"


def described_loss(run_plan: RunPlan, task: Task) -> str:
    """Describe which samples a loss sees where another library's batch is the micro-batch; "" for other tasks."""
    framework, size = task.framework, run_plan.config.micro_size
    if not framework or task.reduction != "micro-batch":
        return ""
    batch = f"a batch of {size} samples" if size > 1 else "a batch"
    return f"{batch} is a micro-batch: its loss is computed by itself, as {framework} does"


def described_optimizer(run_plan: RunPlan) -> str:
    """What the configuration's optimizer is: `adamw: lr 0.001, cosine to 0.1 after 3 of 60 steps of warm-up, ...`."""
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
    """What a person should know before step 1, a line each: about the warm-up, and about BatchNorm."""
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
    norms, micro_size = _norms(model), config.micro_batch_size
    if norms and micro_size < _FEW and config.batchnorm != "sync":
        size = default_micro_batch_size(max(config.batch_size, _FEW), _FEW)
        more = f"--batch-size {_FEW} and " if config.batch_size < _FEW else ""
        which = norms[0] + (f" and {len(norms) - 1} more" if len(norms) > 1 else "")
        found.append(
            f"BatchNorm ({which}) normalises over the {micro_size} sample{'s' * (micro_size > 1)} of a forward, and "
            f"{_FEW} or more train better: give {more}--micro-batch-size {size}"
        )
    missing = config.num_epochs * run_plan.samples - run_plan.step_plan.total
    if norms and not (config.max_steps or config.data.drop_last) and missing == 1:
        found.append("the last sample of the last epoch is left out: BatchNorm cannot learn from one alone")
    return found


def idle(config: Config, ranks: int) -> str:
    """Said where a step has fewer micro-batches than ranks: most often a batch per device was meant."""
    batch, micro, held = config.batch_size, config.micro_batch_size, config.micro_batches
    return (
        f"--batch-size {batch} is the whole step's, over all ranks: {held} micro-batch{'es' * (held > 1)} of {micro} "
        f"for {ranks} ranks leave{'s' * (held == 1)} {ranks - held} of them without work; for {batch} on each device: "
        f"--batch-size {batch * ranks} and --micro-batch-size {batch}"
    )


def _norms(model: nn.Module) -> list[str]:
    """The names of the BatchNorm layers that normalise by the batch: those in training mode."""
    layers = model.named_modules()
    return [name or type(layer).__name__ for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]


_NEW = (8, 0)  # Ampere: the first that multiplies bfloat16


def on_device(config: Config, state: Mapping[str, Any], world: World, say: Callable[[str], None]) -> Config:
    """The config with these two settled, alike on every rank: the weakest device decides. Collective.

    Args:
        state: of the checkpoint that the run goes on from: what it was begun with stays, whatever the device.
        say: takes the one line about it.
    """
    open_ones = [name for name in ("precision", "compile") if _is_open(config, name)]
    if not open_ones:
        return config
    plan = state.get("plan", {})
    new = _all_new(config, world)
    suited = {"precision": "bf16" if new else "float32", "compile": new}
    # A run that is older than these defaults was begun without them.
    begun = {"precision": plan.get("precision", "float32"), "compile": bool(state.get("compile"))} if plan else suited
    values: dict[str, Any] = {name: begun[name] for name in open_ones}
    if any(values[name] != suited[name] for name in open_ones):
        say(f"as the run was begun: {_flags(values)}; the default of this device is {_flags(_of(suited, open_ones))}")
    elif new:
        other = _of({"precision": "float32", "compile": False}, open_ones)
        say(f"device default: {_flags(values)}; {_flags(other)} for the other")
    return dataclasses.replace(config, **values)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None of any other, whose numbers mean other things."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def _all_new(config: Config, world: World) -> bool:
    own = capability(world.device)
    every = world.gather(own is not None and own >= _NEW)  # collective
    return all(every) and not ENGINES[name_of(config.engine, world)].plain


def _is_open(config: Config, name: str) -> bool:
    return is_auto(config, name) or getattr(config, name) == "auto"


def _of(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _flags(values: Mapping[str, Any]) -> str:
    """`--precision bf16 --compile`."""
    said = {True: "--compile", False: "--no-compile"}
    return " ".join(said[value] if name == "compile" else f"--{name} {value}" for name, value in values.items())


_VOCABULARY = 1 << 18  # tokens: no tokenizer in use has more
# Bytes a parameter: float32, its gradient, two moments, an average, a bucket, and a copy in half precision.
_STATES = 28
# Bytes that a block keeps of a token and an element of its width: 29 float32 tensors and 7 in half precision.
_KEPT = 160
_WEIGHTS = 12  # bytes of a score that attention keeps where it keeps scores: before and after softmax, and dropped out
_COPIES = 5  # of the logits: in half precision, float32, of softmax, their gradient, and that of the product
_LOGITS = 512 << 20  # bytes of float32 logits above which the loss makes them in chunks (see models/fused.py)
_CONTEXT = 2 << 30  # bytes: CUDA's own, cuBLAS's workspaces, and what the allocator holds back


def memory_bound(config: Config, micro_batch_size: int) -> float | None:
    """Bound the bytes that training takes on one device.

    Returns:
        None for another model than a built-in GPT, and for engines and settings that hold more than is counted here.
    """
    shape = PRESETS.get(config.model_name)
    if shape is None or kind_of(config.task) != LANGUAGE:
        return None
    if config.exact or config.guards.audit or config.precision == "float64":
        return None  # sums of exact steps, deterministic kernels, doubles
    if config.engine in ENGINES and ENGINES[config.engine].plain:
        return None  # it keeps copies of its own
    vocabulary = max(_VOCABULARY, config.data.vocab_size)
    tokens = micro_batch_size * config.seq_len
    parameters = shape.layers * (12 * shape.width**2 + 13 * shape.width)
    parameters += shape.width * (vocabulary + max(shape.context, config.seq_len) + 2)
    kept = (shape.layers + 2) * _KEPT * shape.width * tokens  # two: the block that the backward is in
    if config.data.packing == "documents" or config.attention not in ("auto", "flash", "cudnn", "efficient"):
        kept += (shape.layers + 2) * _WEIGHTS * shape.heads * config.seq_len * tokens
    logits = 4 * tokens * vocabulary
    if config.model.loss_chunk:
        logits = min(logits, max(_LOGITS, 4 * config.model.loss_chunk * vocabulary))
    return float(_STATES * parameters + kept + _COPIES * logits + _CONTEXT)


_PATIENCE = 300.0  # seconds
_PLAIN = 0.5  # of a device's memory: where a bound is below it, the default size fits plainly
_LIKE = "h100-80"  # whose name stands for a device with the memory that is given


def fitted(
    config: Config,
    state: Mapping[str, Any],
    world: World,
    own_task: bool,
    say: Callable[[str], None],
    ask: Callable[[Config, int, float], int] | None = None,
) -> Config:
    """The config, its micro-batch size settled where a checkpoint says it, or the default one does not fit. Collective.

    Args:
        state: of the checkpoint that the run goes on from.
        own_task: the task is an object of the caller's, which no other process can make.
        ask: (config, ranks, bytes) -> the largest size that fits, 0 where the default does or nothing is known; None:
            `asked`, on the memory of the smallest device.
    """
    if not is_auto(config, "micro_batch_size"):
        return config
    plan = state.get("plan", {})
    if plan:
        same = plan.get("batch_size") == config.batch_size
        return dataclasses.replace(config, micro_batch_size=plan["micro_batch_size"]) if same else config
    if world.device.type != "cuda" or own_task:
        return config
    room = min(world.gather(_memory(world.device) if ask is None else 0.0))  # collective
    bound = memory_bound(config, default_micro_batch_size(config.batch_size))
    if bound is not None and bound < _PLAIN * room:
        return config
    say(
        "--micro-batch-size auto: `lockstep plan` computes whether the default size fits this device, in a process of "
        "its own; --micro-batch-size N does without"
    )
    size = world.gather((ask or asked)(config, world.size, room) if world.is_main else 0)[0]  # collective
    if not size:
        return config
    say(
        f"--micro-batch-size auto: {size}, since a larger one does not fit this device by `lockstep plan`; it is kept "
        "for this run"
    )
    return dataclasses.replace(config, micro_batch_size=size)


def _memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def asked(config: Config, ranks: int, room: float) -> int:
    """What `lockstep plan` says in a process of its own, without a device: the largest size that fits where the default
    one does not; 0 where that fits, where none does, or where it cannot be planned."""
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


_COMPLAINT = re.compile(
    r"on the same device|expected device|different devices|two devices|should be the same$|expected.* on (?:cpu|cuda)"
    r"|(?:FloatTensor|HalfTensor|BFloat16Tensor)\) and weight type|is on \w+(?::\d+)?,? but expected",
    re.MULTILINE,
)
_DEEP = 3  # containers within each other that are looked into
_SHOWN = 4


class Lying(NamedTuple):
    """A tensor that is not where the run computes.

    Attributes:
        what: `buffer 'norm.mean'`, `the model's attribute 'scale'`, `batch[1]`.
        where: its device.
        sure: it cannot be meant; else what holds it may move it when it is used.
    """

    what: str
    where: torch.device
    sure: bool


def elsewhere(model: nn.Module, task: Task, batch: Any, device: torch.device) -> list[Lying]:
    """The tensors that do not lie on `device`.

    Looked at are parameters and buffers of the model and of modules that the task holds (a criterion), tensors that are
    plain attributes of these, also in lists and dicts, which `model.to()` leaves where they are; and the batch, as the
    loss gets it. A whole model in host memory (offloaded) is meant, and so are single numbers there.
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
    is_number = tensor.ndim == 0 and tensor.device.type == "cpu"  # torch takes such along
    return not is_number and not _same(tensor.device, device)


def explained(error: BaseException, model: nn.Module, task: Task, batch: Any) -> str:
    """What lies where, if `error` is torch's complaint of tensors on different devices; else ""."""
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
