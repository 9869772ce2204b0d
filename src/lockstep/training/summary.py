"""Describe a run: the lines at its start, and the table of its parameter groups.

announce(built)
show_groups(config)         # lockstep train --show-groups
"""

import logging

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.task import has_own
from lockstep.training import resume
from lockstep.training.agreement import log_ranks
from lockstep.training.build import build
from lockstep.training.build_engine import build_optimizer
from lockstep.training.defaults import (
    describe_data,
    describe_loss,
    describe_optimizer,
    describe_step,
    plan_warnings,
)
from lockstep.training.parts import RunParts

__all__ = ["announce", "group_rows", "show_groups"]


_LOG = logging.getLogger("lockstep")


def announce(built: RunParts) -> None:
    """Log each rank's device, the size of a step, the optimizer and warnings."""
    if built.world.is_main:
        log_ranks(built.places)
    if line := describe_data(built.run_plan, built.task.data_facts):
        _LOG.info(line)
    _LOG.info(describe_step(built.run_plan, built.world.size))
    if line := describe_loss(built.run_plan, built.task):
        _LOG.info(line)
    for line in built.batches.describe():
        _LOG.info(line)
    if not has_own(built.task, "optimizer"):
        _LOG.info(describe_optimizer(built.run_plan))
    if built.config.checkpoint.mode == "none" and built.world.is_main:
        _LOG.warning("--checkpoint.mode none: no checkpoint is written, so these steps cannot be resumed or loaded")
    if built.remote:
        if built.world.leads:
            nodes = f"; each of {len(set(built.world.leads))} nodes has its own"
        else:
            nodes = ""
        _LOG.info("the run's folder is %s, its store %s%s", built.folder.path, built.remote.url, nodes)
    factor_now = built.lr_factor(built.start)
    if factor_now is not None and (
        line := resume.describe_extension(built.state, built.run_plan.step_plan.steps, built.lr * factor_now)
    ):
        _LOG.info(line)
    run = built.run_plan, built.model, built.task.data_facts, built.world.size
    for line in plan_warnings(*run) if built.world.is_main else ():
        _LOG.warning(line)


# --- lockstep train --show-groups

# Columns: a narrower table would cut names.
_MIN_WIDTH = 120


def show_groups(config: Config) -> None:
    """Print the optimizer's groups of the configured run.

    Raises:
        UsageError: the configuration cannot be run.
    """
    world = World.join(config.device, config.timeout)
    try:
        # An existing run in the folder does not matter, because nothing is written.
        built = build(config, None, world, resume=False)
        optimizer = build_optimizer(built.config, built.task, built.model)
        table = Table("group", "tensors", "parameters", "lr", "weight decay", box=None, pad_edge=False)
        table.add_column("names", overflow="fold")
        for row in group_rows(built.model, optimizer):
            table.add_row(*row)
        if world.is_main:
            console = Console()
            console.width = max(console.width, _MIN_WIDTH)
            console.print(table)
    finally:
        world.leave()


def group_rows(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, ...]]:
    """Return a table row for each group, and one for the frozen parameters.

    Returns:
        Rows of (number, tensors, parameters, learning rate, weight decay, names).
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows: list[tuple[str, ...]] = []
    remaining = dict(names)
    for number, group in enumerate(optimizer.param_groups):
        members = [(remaining.pop(parameter), parameter) for parameter in group["params"]]
        rates = (f"{group['lr']:g}", f"{group.get('weight_decay', 0.0):g}")
        label = " muon" if group.get("muon") else ""
        rows.append((f"{number}{label}", *_sizes(members), *rates, _shorten([name for name, _ in members])))
    if remaining:
        members = [(name, parameter) for parameter, name in remaining.items()]
        rows.append(("frozen", *_sizes(members), "", "", _shorten([name for name, _ in members])))
    return rows


def _sizes(members: list[tuple[str, nn.Parameter]]) -> tuple[str, str]:
    return str(len(members)), f"{sum(parameter.numel() for _, parameter in members):,}"


def _shorten(names: list[str]) -> str:
    return "\n".join(names if len(names) < 4 else [names[0], "...", names[-1]])
