"""Records in words and short numbers, as the console shows them. Pure functions of text and numbers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.units import bytes_text

__all__ = ["count_text", "duration_text", "line_of", "loss_text", "numbers_of", "summary_rows"]

_OWN_SHOWN = 3  # numbers of the task's own in a line


def count_text(count: float) -> str:
    """A count or rate in at most five characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:#.3g}".rstrip(".") + unit
    return f"{count:.3g}" if count < 100 else f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """Seconds as a clock: 0:07, 1:02:03, 3 d 04:00:00."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def loss_text(loss: float) -> str:
    """A loss with four decimals where it is of usual size, else in five digits."""
    return f"{loss:.4f}" if 0.001 <= abs(loss) < 10000 else f"{loss:.5g}"


def numbers_of(seen: Mapping[str, Any], items: str) -> list[str]:
    """The record's main numbers with their names, most wanted first; those that are missing are left out."""
    shown = (
        ("running_loss", lambda value: f"loss {loss_text(value)}"),
        ("evaluation/loss", lambda value: f"evaluation {_losses(seen, value)}"),
        ("best", str),
        ("lr", lambda value: f"lr {value:.2e}"),
        ("items_per_second", lambda value: f"{count_text(value)} {items}/s"),
        ("memory", bytes_text),
    )
    return [text(seen[name]) for name, text in shown if seen.get(name) is not None]


def _losses(seen: Mapping[str, Any], loss: float) -> str:
    """The evaluation's loss; of several sets that of each, with its name."""
    named = [f"{name} {loss_text(seen[f'evaluation/{name}/loss'])}" for name in _sets(seen)]
    return "  ".join(named) or loss_text(loss)


def line_of(record: Mapping[str, Any], steps: int, items: str, left: float | None) -> str:
    """A record as one plain line of ASCII (but for names of the user's).

    Args:
        steps: the last step.
        left: seconds until then, where known.
    """
    parts = [f"step {record.get('global_step', '?')}/{steps}"]
    if "evaluation/loss" in record:
        numbers = _evaluated(record, items)
        return "  ".join([*parts, "evaluation " + "  ".join(f"{name} {text}" for name, text in numbers)])
    if "running_loss" not in record:  # numbers of the caller's own, whatever their names
        own = {name: value for name, value in record.items() if name != "global_step"}
        return "  ".join([*parts, *(f"{name} {value:.5g}" for name, value in own.items())])
    epochs = _epochs(record)
    parts += [f"epoch {epochs:.2f}"] if epochs is not None else []
    parts += numbers_of(record, items)
    parts += [f"grad {record['grad_norm']:.3g}"] if record.get("grad_norm") is not None else []
    beside = [name for name in record if name.startswith("train/")][:_OWN_SHOWN]
    parts += [f"{name.removeprefix('train/')} {record[name]:.5g}" for name in beside]
    parts += [f"{duration_text(left)} left"] if left else []
    return "  ".join(parts)


def summary_rows(values: Mapping[str, Any], steps: int, items: str) -> list[tuple[str, str]]:
    """The summary's rows, name and text; what is not known has no row.

    Args:
        values: the names of the records and of `Console.close`.
        steps: the last step planned.
        items: what a batch counts.
    """
    memory = values.get("memory") or None  # 0 where nobody measured it
    evaluated = [
        (name if name == "perplexity" else f"evaluation {name}", text) for name, text in _evaluated(values, items)
    ]
    rows: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("experiment", values.get("experiment"), str),
        ("steps", values.get("global_step"), lambda step: f"{step} of {steps}"),
        ("epochs", _epochs(values), lambda epoch: f"{epoch:.3g}"),
        ("training loss", values.get("running_loss"), loss_text),
        *((name, text, str) for name, text in evaluated),
        ("best evaluation", values.get("best"), str),
        (f"{items}/s", values.get("items_per_second"), count_text),
        ("time", values.get("seconds"), duration_text),
        ("peak memory", memory, bytes_text),
        ("processes", values.get("world_size"), str),
        ("engine", values.get("engine"), str),
    )
    return [(name, text(value)) for name, value, text in rows if value is not None]


def _evaluated(record: Mapping[str, Any], items: str) -> list[tuple[str, str]]:
    """An evaluation's numbers, name and text: loss, perplexity of tokens, metrics; of several sets those of each."""
    found: list[tuple[str, str]] = []
    for prefix in [f"{name}/" for name in _sets(record)] or [""]:
        loss = record.get(f"evaluation/{prefix}loss")
        if loss is not None:
            found.append((f"{prefix}loss", loss_text(loss)))
            found += [(f"{prefix}perplexity", _perplexity(loss))] if items == "tokens" else []
        own = [name.removeprefix(f"evaluation/{prefix}") for name in record if name.startswith(f"evaluation/{prefix}")]
        metrics = [name for name in own if name not in ("loss", "items")]
        found += [(f"{prefix}{name}", f"{record[f'evaluation/{prefix}{name}']:.5g}") for name in metrics]
    return found


def _sets(record: Mapping[str, Any]) -> list[str]:
    """The names of the evaluation's sets, where they have names."""
    counted = [name.removesuffix("/items") for name in record if name.endswith("/items") and name != "evaluation/items"]
    return [name.removeprefix("evaluation/") for name in counted if f"{name}/loss" in record]


def _epochs(record: Mapping[str, Any]) -> float | None:
    """Epochs so far: the whole ones and the part of the one that runs."""
    return record["epoch"] + record.get("epoch_progress", 0) if "epoch" in record else None


def _perplexity(loss: float) -> str:
    """exp(loss), for a loss that is a mean over tokens in nats."""
    return f"{math.exp(loss):.4g}" if loss < 700 else str(math.inf if loss > 0 else math.nan)
