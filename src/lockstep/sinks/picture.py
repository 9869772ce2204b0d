"""Curves as pictures. The only file that needs the package `matplotlib`, the extra `plot`.

rates_picture(Path("rates.svg"), rates, losses, smoothed, lr=3e-3)
"""

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError

__all__ = ["rates_picture"]


def rates_picture(
    path: Path, rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], lr: float | None
) -> None:
    """Losses by rate, on a logarithmic axis, with the rate that was chosen; as what the path's name ends with.

    Raises:
        ConfigError: matplotlib is missing, or knows no such kind of picture.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs the package matplotlib: pip install 'torch-lockstep[plot]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates[: len(smoothed)], losses[: len(smoothed)], ".", color="0.7", label="loss of each step")
    axes.plot(rates[: len(smoothed)], smoothed, label="smoothed")
    if lr is not None:
        axes.axvline(lr, linestyle="--", color="0.4", label=f"falls fastest: {lr:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}; name it .svg") from error
