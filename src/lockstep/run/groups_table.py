"""`lockstep train --show-groups`: the optimizer's groups as a table, and nothing trained or written.

group  tensors  parameters  lr     weight decay  names
"""

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lockstep.config.config import Config
from lockstep.distributed.world import World
from lockstep.run.build import build
from lockstep.run.own_optimizer import optimizer_of

__all__ = ["groups_of", "show_groups"]

_WIDE = 120  # columns at least, so that names stay whole


def show_groups(config: Config) -> None:
    """Prints the groups of the run that `config` asks for. Raises what `build` raises."""
    world = World.join(config.device, config.timeout)
    try:
        built = build(config, None, world, resume=False)  # a run that lies there has no say
        made = optimizer_of(built.config, built.task, built.model)
        table = Table("group", "tensors", "parameters", "lr", "weight decay", box=None, pad_edge=False)
        table.add_column("names", overflow="fold")
        for row in groups_of(built.model, made):
            table.add_row(*row)
        if world.is_main:
            console = Console()
            console.width = max(console.width, _WIDE)
            console.print(table)
    finally:
        world.leave()


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, ...]]:
    """A row for each group, and one for what is in none: number, tensors, parameters, rate, decay, names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows: list[tuple[str, ...]] = []
    left = dict(names)
    for number, group in enumerate(optimizer.param_groups):
        own = [(left.pop(parameter), parameter) for parameter in group["params"]]
        rates = (f"{group['lr']:g}", f"{group.get('weight_decay', 0.0):g}")
        kind = " muon" if group.get("muon") else ""
        rows.append((f"{number}{kind}", *_counted(own), *rates, _shown([name for name, _ in own])))
    if left:
        own = [(name, parameter) for parameter, name in left.items()]
        rows.append(("frozen", *_counted(own), "", "", _shown([name for name, _ in own])))
    return rows


def _counted(own: list[tuple[str, nn.Parameter]]) -> tuple[str, str]:
    return str(len(own)), f"{sum(parameter.numel() for _, parameter in own):,}"


def _shown(names: list[str]) -> str:
    return "\n".join(names if len(names) < 4 else [names[0], "...", names[-1]])
