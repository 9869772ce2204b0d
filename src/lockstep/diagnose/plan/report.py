"""The answer in words, and as one JSON object."""

from typing import Any

from lockstep.config import options
from lockstep.diagnose.plan.search import Answer, Row
from lockstep.errors import said
from lockstep.units import bytes_text

__all__ = ["as_json", "described"]


def described(answer: Answer) -> str:
    """A table of where the bytes go, what would fit, and other ways to train."""
    config, found, device = answer.config, answer.found, answer.device
    over = device.room - found.peak
    verdict = f"fits, {bytes_text(over)} to spare" if answer.fits else f"does not fit: {bytes_text(-over)} too much"
    when = _PHASES.get(found.phase.removeprefix("first ").removeprefix("middle ").split()[0], found.phase)
    when += " of the first step, whose gradients lie beside DDP's buffers" if found.phase.startswith("first ") else ""
    lines = [
        f"{answer.sizes.parameters:,} parameters ({answer.sizes.trained:,} trained), {config.precision}; "
        f"{answer.size} x {device.name}, engine {config.engine}: a step of {config.batch_size} in micro-batches of "
        f"{config.micro_size}, {found.slots} on a rank",
        f"each rank takes {bytes_text(found.peak)} of {bytes_text(device.room)}: {verdict}",
        "",
        f"where they go at the peak ({when}):",
    ]
    lines += [f"  {bytes_text(size):>10}  {name}" for name, size in sorted(found.parts.items(), key=lambda at: -at[1])]
    times = answer.times
    lines += [
        "",
        f"a step takes about {_seconds(times.step)}: {_seconds(times.compute)} compute, {_seconds(times.update)} "
        f"update, {_seconds(times.exposed)} exchange that nothing hides (an estimate, not a measurement)",
    ]
    lines += _largest(answer)
    if answer.rows:
        lines += ["", "what fits, the fastest first:"]
        lines += [f"  {'samples/s':>10} {'memory':>10}  add"]
        lines += [_row(row) for row in answer.rows]
    if answer.note:
        lines += ["", answer.note]
    if answer.advice:
        lines += ["", answer.advice]
    return said("\n".join(lines))


_PHASES = {
    "begin": "before the first block",
    "forward": "in a block's forward",
    "loss": "in the loss and what lies behind the last block",
    "backward": "in a block's backward",
    "end": "after the first block's backward",
    "update": "in the update",
    "start": "while the model is made",
}


def _largest(answer: Answer) -> list[str]:
    named = (
        ("micro-batch", answer.micro_batch, "--micro-batch-size {}"),
        ("samples", answer.seq_len, "--seq-len {}"),
        ("model", answer.layers, "{} blocks in place of " + str(answer.sizes.layers)),
    )
    found = [f"{name}: {text.format(size) if size else 'none'}" for name, size, text in named if size is not None]
    return ["", f"the largest that fits, all else as asked: {', '.join(found)}"] if found else []


def _row(row: Row) -> str:
    return f"  {row.rate:>10.4g} {bytes_text(row.peak):>10}  {' '.join(row.flags)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def as_json(answer: Answer) -> dict[str, Any]:
    """Numbers in bytes and seconds."""
    found, times = answer.found, answer.times
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
        "config": options.flat(answer.config),
        "peak": found.peak,
        "peak_phase": found.phase,
        "parts": found.parts,
        "flops": found.work["compute"].flops,
        "step_seconds": times.step,
        "step_parts": {"compute": times.compute, "update": times.update, "exchange": times.exposed},
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
