"""What `lockstep plan` does with its flags, which are in commands/plan.py."""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any

import torch

from lockstep.config import options, presets
from lockstep.config.config import Config
from lockstep.diagnose.plan.devices import DEVICES, Device, device_of
from lockstep.diagnose.plan.estimate import Planner, check_size
from lockstep.diagnose.plan.report import as_json, described
from lockstep.diagnose.plan.search import Answer, searched
from lockstep.diagnose.plan.subject import subject_of
from lockstep.errors import ConfigError, said
from lockstep.tasks.lightning_files import configured
from lockstep.tasks.options import LIGHTNING

__all__ = ["answered", "device_here", "run"]

_NOTHING_FITS = 3


def run(own: argparse.Namespace) -> int:
    """Prints what the flags ask for; returns 0, or 3 where it does not fit.

    Raises:
        UsageError: it cannot be planned.
    """
    values = options.told(vars(own))
    check_size(own.world_size)
    device = _device(str(values.pop("device", "auto")), own.memory)
    told = frozenset(values)
    config, task = options.build(presets.applied(values)), None
    if config.task.startswith(LIGHTNING):  # its loaders say what the flags do not
        with contextlib.redirect_stdout(sys.stderr):  # what the module prints
            config, task = configured(dict(values))
    if "batch_size" not in told:  # a step has at least one micro-batch for each device
        config = _widened(config, own.world_size)
    answer = answered(config, task, own.world_size, device, fast=own.fast, open_batch="batch_size" not in told)
    print(json.dumps(as_json(answer)) if own.json else described(answer), flush=True)
    return 0 if answer.fits else _NOTHING_FITS


def answered(config: Config, task: Any, size: int, device: Device, *, fast: bool, open_batch: bool) -> Answer:
    """What there is to say of a training.

    Args:
        task: the caller's own; None: the one that `config` names.
        fast: only what was asked for.
        open_batch: the batch may be as large as suits the devices.

    Raises:
        UsageError: it cannot be planned.
    """
    planner = Planner(config, subject_of(config, task, _say), size, device)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed and models of others write lines of their own
        return searched(planner, fast=fast, open_batch=open_batch)


def _widened(config: Config, size: int) -> Config:
    """With a batch that gives each device a micro-batch."""
    micro = config.micro_size
    if micro * size <= config.batch_size:
        return config
    return dataclasses.replace(config, batch_size=micro * size, micro_batch_size=micro)


def _device(name: str, memory: str) -> Device:
    """The device that is named; by "auto" and "cuda" the one that is here, where one is."""
    cuda = name.split(":")[0] == "cuda"
    if not cuda and name != "auto":
        return device_of(name, memory)
    if torch.cuda.is_available():
        return device_here(memory)
    if cuda:
        raise ConfigError(f"--device {name}: none is here; name what is meant: {', '.join(DEVICES)}")
    return device_of("cpu", memory)


def device_here(memory: str) -> Device:
    """This machine's first CUDA device, with the figures of the known one that it is, or of an h100-80; `memory` of it,
    where that is given."""
    found = torch.cuda.get_device_properties(0)
    near = [each for each in DEVICES if each.split("-")[0] in found.name.lower().replace(" ", "")]
    near.sort(key=lambda each: abs(DEVICES[each].memory - found.total_memory))
    plain = device_of(near[0] if near else "h100-80", memory)
    return plain if memory else dataclasses.replace(plain, name=found.name, memory=float(found.total_memory))


def _say(line: str) -> None:
    print(said(line), file=sys.stderr, flush=True)
