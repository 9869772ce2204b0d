"""Run `lockstep plan` and format its answer; the flags are in commands/diagnose.py."""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any

import torch

from lockstep.adapters.lightning.convert import configure
from lockstep.config import cli
from lockstep.config.schema import Config, choose_micro_batch_size, has_fixed_cut
from lockstep.config.task_options import LIGHTNING
from lockstep.diagnose.plan.devices import DEVICES, DeviceSpec, device_of
from lockstep.diagnose.plan.estimate import Planner, check_size
from lockstep.diagnose.plan.search import PlanResult, PlanRow, find_plan
from lockstep.diagnose.plan.subject import subject_of
from lockstep.diagnose.scale.runs import ascending
from lockstep.errors import ConfigError, name_settings
from lockstep.files import bytes_text

__all__ = [
    "as_json",
    "describe",
    "device_here",
    "run",
]


def describe(answer: PlanResult) -> str:
    """Format the memory by part, the largest sizes that fit, and alternatives."""
    config = answer.config
    estimate = answer.found
    device = answer.device
    over = device.room - estimate.peak
    if answer.fits:
        verdict = f"fits, {bytes_text(over)} to spare"
    else:
        verdict = f"does not fit: {bytes_text(-over)} too much"
    when = _PHASES.get(estimate.phase.removeprefix("first ").removeprefix("middle ").split()[0], estimate.phase)
    when += " of the first step, with gradients next to DDP's buffers" if estimate.phase.startswith("first ") else ""
    devices = f"{answer.size} x {device.name}"
    pipeline = config.parallel.pipeline
    who = "each rank"
    if pipeline > 1:
        who = f"a rank of stage {estimate.stage} (of {pipeline}, from 0), which takes most,"
    if config.parallel.size > 1:
        devices += f" as {answer.size // config.parallel.size} x {config.parallel.size} for one model"
    lines = [
        f"{answer.sizes.parameters:,} parameters ({answer.sizes.trained:,} trained), {config.precision}; "
        f"{devices}, engine {config.engine}: a step of {config.batch_size} in micro-batches of "
        f"{config.micro_size}, {estimate.slots} on a rank",
        f"{who} uses {bytes_text(estimate.peak)} of {bytes_text(device.room)}: {verdict}",
        "",
        f"memory at the peak ({when}):",
    ]
    lines += [
        f"  {bytes_text(size):>10}  {name}" for name, size in sorted(estimate.parts.items(), key=lambda at: -at[1])
    ]
    times = answer.times
    lines += [
        "",
        f"a step takes about {_seconds(times.step)}: {_seconds(times.compute)} compute, {_seconds(times.update)} "
        f"update, {_seconds(times.exposed)} exposed exchange (an estimate, not a measurement)",
    ]
    if pipeline > 1:
        lines.append(
            f"a stage waits for {estimate.bubble:.0%} of the time of the passes: {pipeline} stages share "
            f"{estimate.slots} micro-batches a step; more of them make it less"
        )
    compute = estimate.work["compute"]
    if compute.messages:
        messages = "1 message" if compute.messages == 1 else f"{compute.messages:,.0f} messages"
        lines.append(
            f"for a micro-batch a rank sends {bytes_text(compute.sent)} in {messages} within its replica, whose ranks "
            "wait for each"
        )
    if times.launch_bound:
        calls = compute.calls
        lines.append(
            f"launches bound it: the host takes {_seconds(times.launching)} to launch its {calls:,.0f} operations a "
            f"micro-batch, which run in {_seconds(times.computing)}; a larger --micro-batch-size has the same number"
        )
    lines += _largest(answer)
    if answer.rows:
        lines += ["", "configurations that fit, the fastest first:"]
        lines += [f"  {'samples/s':>10} {'memory':>10}  add"]
        lines += [_row(row) for row in answer.rows]
    if answer.note:
        lines += ["", answer.note]
    if answer.advice:
        lines += ["", answer.advice]
    return name_settings("\n".join(lines))


_PHASES = {
    "begin": "before the first block",
    "forward": "in a block's forward",
    "loss": "in the loss and the layers after the last block",
    "backward": "in a block's backward",
    "end": "after the first block's backward",
    "update": "in the update",
    "start": "while the model is built",
}


def _largest(answer: PlanResult) -> list[str]:
    searches = (
        ("micro-batch", answer.micro_batch, "--micro-batch-size {}"),
        ("samples", answer.seq_len, "--seq-len {}"),
        ("model", answer.layers, "{} blocks instead of " + str(answer.sizes.layers)),
    )
    lines = []
    for name, size, text in searches:
        if size is not None:
            lines.append(f"{name}: {text.format(size) if size else 'none'}")
    if lines:
        return ["", f"the largest that fits, all else unchanged: {', '.join(lines)}"]
    return []


def _row(row: PlanRow) -> str:
    return f"  {row.rate:>10.4g} {bytes_text(row.peak):>10}  {' '.join(row.flags)}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def as_json(answer: PlanResult) -> dict[str, Any]:
    """Return the answer as plain values, in bytes and seconds."""
    estimate = answer.found
    times = answer.times
    return {
        "fits": answer.fits,
        "device": {
            "name": answer.device.name,
            "memory": answer.device.memory,
            "room": answer.device.room,
            "source": answer.device.source,
        },
        "world_size": answer.size,
        "parameters": answer.sizes.parameters,
        "trained": answer.sizes.trained,
        "layers": answer.sizes.layers,
        "config": cli.flatten(answer.config),
        "peak": estimate.peak,
        "peak_phase": estimate.phase,
        "parts": estimate.parts,
        "flops": estimate.work["compute"].flops,
        "replica": {
            "ranks": answer.config.parallel.size,
            "sent_bytes": estimate.work["compute"].sent,
            "messages": estimate.work["compute"].messages,
            "stage": estimate.stage,
            "bubble": estimate.bubble,
        },
        "step_seconds": times.step,
        "step_parts": {"compute": times.compute, "update": times.update, "exchange": times.exposed},
        "launching_seconds": times.launching,
        "launches_bound": times.launch_bound,
        "largest": {"micro_batch_size": answer.micro_batch, "seq_len": answer.seq_len, "layers": answer.layers},
        "ways": [
            {
                "flags": list(row.flags),
                "peak": row.peak,
                "step_seconds": row.times.step,
                "samples_per_second": row.rate,
                "traced": row.traced,
            }
            for row in answer.rows
        ],
        "advice": answer.advice,
        "note": answer.note,
    }


# The exit code if a size does not fit, the one of a failed check.
_NOTHING_FITS = 3


def run(own: argparse.Namespace) -> int:
    """Print the estimate of each size; return 0, or 3 if one does not fit.

    Raises:
        UsageError: it cannot be planned.
    """
    values = cli.collect_options(vars(own))
    sizes = ascending("--world-sizes", own.world_sizes)
    device = _device(str(values.pop("device", "auto")), own.memory)
    options = frozenset(values)
    config = cli.build(cli.apply_preset(values))
    for size in sizes:
        check_size(size, config.parallel)
    task = None
    # The loaders of a LightningModule give values that the flags leave out.
    if config.task.startswith(LIGHTNING):
        # The module's own output goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            config, task = configure(dict(values))
    answers = []
    for size in sizes:
        # A step has at least one micro-batch for each replica.
        is_open = "batch_size" not in options
        replicas = size // config.parallel.size
        sized = _widen(config, replicas) if is_open else config
        micro = sized.micro_batch_size or choose_micro_batch_size(sized, replicas)
        sized = dataclasses.replace(sized, micro_batch_size=micro)
        answers.append(_plan(sized, task, size, device, fast=own.fast, open_batch=is_open))
        if not own.json:
            # A plan is one process; its ranks are fake.
            print(("\n" if len(answers) > 1 else "") + describe(answers[-1]), flush=True)  # noqa: LS028
    if own.json:
        values_by_size = as_json(answers[0]) if len(sizes) == 1 else [as_json(answer) for answer in answers]
        print(json.dumps(values_by_size), flush=True)  # noqa: LS028
    if all(answer.fits for answer in answers):
        return 0
    return _NOTHING_FITS


def _plan(config: Config, task: Any, size: int, device: DeviceSpec, *, fast: bool, open_batch: bool) -> PlanResult:
    """Estimate a training.

    Args:
        task: the caller's own; None: the one of `config`.
        fast: only the requested configuration.
        open_batch: the batch may be as large as suits the devices.

    Raises:
        UsageError: it cannot be planned.
    """
    planner = Planner(config, subject_of(config, task, _say), size, device)
    # DeepSpeed and other libraries' models print lines of their own.
    with contextlib.redirect_stdout(sys.stderr):
        return find_plan(planner, fast=fast, open_batch=open_batch)


def _widen(config: Config, replicas: int) -> Config:
    """Raise the batch size to a micro-batch for each replica."""
    micro = config.micro_batch_size or choose_micro_batch_size(config, replicas)
    if micro * replicas <= config.batch_size or not has_fixed_cut(config):
        return dataclasses.replace(config, batch_size=max(config.batch_size, replicas))
    return dataclasses.replace(config, batch_size=micro * replicas, micro_batch_size=micro)


def _device(name: str, memory: str) -> DeviceSpec:
    """Return the named device; for "auto" and "cuda" the local one, if any."""
    cuda = name.split(":")[0] == "cuda"
    if not cuda and name != "auto":
        return device_of(name, memory)
    if torch.cuda.is_available():
        return device_here(memory)
    if cuda:
        raise ConfigError(f"--device {name}: this machine has no CUDA device; give one of {', '.join(DEVICES)}")
    return device_of("cpu", memory)


def device_here(memory: str) -> DeviceSpec:
    """Describe this machine's first CUDA device, by its known specs or else an h100-80's.

    Args:
        memory: its memory, if not all of it; "": all.
    """
    properties = torch.cuda.get_device_properties(0)
    near = []
    for each in DEVICES:
        if each.split("-")[0] in properties.name.lower().replace(" ", ""):
            near.append(each)
    near.sort(key=lambda each: abs(DEVICES[each].memory - properties.total_memory))
    plain = device_of(near[0] if near else "h100-80", memory)
    if memory:
        return plain
    return dataclasses.replace(plain, name=properties.name, memory=float(properties.total_memory))


def _say(line: str) -> None:
    print(name_settings(line), file=sys.stderr, flush=True)
