"""Show the table of a run's parameter groups: `lockstep train --show-groups`.

show_groups(config)
"""

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.training.start.build import build
from lockstep.training.start.build_engine import build_optimizer

__all__ = [
    "group_rows",
    "show_groups",
]


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
        members = []
        for parameter in group["params"]:
            members.append((remaining.pop(parameter), parameter))
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
