"""What is wrong with a case that was played: nothing, or lines that say what was expected and what was found.

problems = verdict(case, folder)        # [] is a pass
state, buffers = final(case, folder)
"""

import csv
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from matrix_cases import Case, reference
from matrix_lightning import LIGHTNING, manual_oracle, manual_rounding
from matrix_oracle import Wanted, oracle
from matrix_run import BEST, NAME, Start, begins, folder_of, resumes_at, shares, starts
from matrix_subject import BAD, BATCH, MICRO, steps_of

from lockstep import checkpoint
from lockstep.adapters.lightning.state import unpack
from lockstep.errors import CheckpointError
from lockstep.logging.jsonl import read

__all__ = ["compared", "compared_evaluations", "verdict"]

# The largest difference, as a share of a tensor's largest element: of a weight or buffer, and of a moment. Measured
# over the covering sets: 4e-7 in float32 and fp16, and in bf16, where a sum in another order now and then rounds an
# activation to its neighbour, 1e-3 of a weight and 6e-3 of a moment. A step too many or too few is 1e-2 and 0.1.
_TOLERANCE = {"float32": (2e-6, 2e-6), "fp16": (5e-4, 1e-3), "bf16": (4e-3, 2e-2)}
# And of a number of an evaluation, as a share of it. Measured: 5e-7 in each precision.
_EVALUATION = {"float32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}


def verdict(case: Case, root: Path) -> list[str]:
    """The case's problems; the exact run that it is compared with must have been played too."""
    folder = folder_of(root, case)
    said = {start: _said(folder, start) for start in starts(case)}
    broken = [file.read_text() for file in sorted(folder.glob("*-broken.txt"))]
    if broken:
        return [f"broken: {broken[0]}"]
    problems = [line for start, each in said.items() for line in _starts_well(start, each)]
    if problems:
        return problems
    done = BAD - 1 if case.stops else steps_of(case.task)  # the newest checkpoint before the fault is that after step 6
    found, problems = _state(case, folder, done)
    if problems:
        return problems
    problems = compared(case, found, _wanted(case, done).state, _rounding(case, done))
    problems += [] if case.stops else _buffers(case, folder)
    problems += _evaluations(case, root, done)
    problems += _hooks(folder, done) if case.task == "hooked" else []
    problems += _turns(case, folder, done) if case.task in LIGHTNING else []
    problems += _patience(folder, done) if case.task == "own" else []
    problems += _best(BEST[case.task].partition(":")[0], folder, done) if case.task in BEST else []
    problems += _csv(folder)
    if case.exact and case != reference(case):
        other, missing = _state(reference(case), folder_of(root, reference(case)), done)
        if missing:
            return [*problems, *(f"the reference {reference(case)}: {line}" for line in missing)]
        differ = [name for name in found if _bits(found[name]) != _bits(other[name])]
        problems += [f"other bits than {reference(case)} in {', '.join(differ)}"] if differ else []
    return problems + _silent(case, folder)


def _said(folder: Path, start: Start) -> list[dict[str, object]]:
    files = [folder / f"{start.number}-{rank}.json" for rank in range(start.world)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _starts_well(start: Start, said: list[dict[str, object]]) -> list[str]:
    """What each start must have said: no error, or that of the bad step; and that it came to its end."""
    where = f"start {start.number} on {start.world}"
    if start.kills:  # one that hangs in a collective is ended from outside, and says nothing here
        return [f"{where}: a survivor said {e['error']!r}" for e in said if not str(e["error"]).startswith("PeerError")]
    if len(said) < start.world:
        return [f"{where}: {len(said)} ranks came to its end"]
    errors, ends = {str(each["error"]) for each in said}, {tuple(each["taken"])[-1:] for each in said}
    if len(ends) > 1:
        return [f"{where}: the ranks ended in different steps, {ends}"]
    if start.case.stops and start.meets_the_fault:
        bad = [e for e in errors if not e.startswith("LockstepError: ") or f"step {BAD + 1}" not in e or "\n" in e]
        wrong = f"{where}: expected one line that names step {BAD + 1}, found {bad or 'none'}"
        return [wrong] if bad or not errors else []
    if errors != {""}:
        return [f"{where}: expected no error, found {sorted(errors)}"]
    after_stop = start.number == 1 and start.case.fault != "killed"  # a kill has a start of its own after it
    first = resumes_at(start.case) if after_stop else None
    if first and {next(iter(each["taken"])) for each in said} != {first}:
        return [f"{where}: went on from another step than {first}"]
    last = (start.stop_at or steps_of(start.case.task)) - 1
    return [] if ends == {(last,)} else [f"{where}: ended in step {ends}, not in {last}"]


def _state(case: Case, folder: Path, done: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    path = folder / NAME
    lines: list[str] = []
    newest = checkpoint.newest(path, say=lines.append) if path.exists() else None
    if newest is None or newest != checkpoint.path_of(path, done):
        return {}, [f"the newest checkpoint is {newest and newest.name}, not that of step {done} {lines}"]
    wanted = {name: torch.empty_like(tensor) for name, tensor in _wanted(case, done).state.items()}
    try:
        checkpoint.load(newest, wanted, None)
    except CheckpointError as error:
        return {}, [f"{type(error).__name__}: {error}"]
    absent = sorted(_wanted(case, done).state.keys() - wanted.keys())  # loading passes over what was never stepped
    return wanted, [f"{newest.name} has no {', '.join(absent)}"] if absent else []


def _wanted(case: Case, done: int) -> Wanted:
    fault = "none" if case.fault in ("killed", "oom") else case.fault
    if case.task == "manual":
        return manual_oracle(case.model, fault, case.leaves_out, case.precision, done)
    first, *_ = *shares(case, case.engine, case.world), -(-(BATCH // MICRO) // starts(case)[-1].replicas)
    return oracle(case.model, fault, case.leaves_out, case.precision, case.task, done, first, begins(case), case.step)


def _rounding(case: Case, done: int) -> dict[str, float]:
    """What rounding may do to each tensor, where it is no share of its size.

    The judge's gradients are differences of large numbers, right minus wrong, of which bf16 leaves a few percent. How
    much differs from model to model, so the plain loop is rounded otherwise, and says.
    """
    if case.task != "manual" or case.precision != "bf16":
        return {}
    fault = "none" if case.fault == "killed" else case.fault
    found = manual_rounding(case.model, fault, case.leaves_out, case.precision, done)
    return {name: size for name, size in found.items() if "/judge." in name}


def compared(
    case: Case,
    found: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Tensors beyond the tolerance, or beyond their `rounding` where that is larger.

    Counters and float16's scale must be equal.
    """
    problems = [f"{name} is not there" for name in wanted if name not in found]
    for name in wanted.keys() & found.keys():
        expected = wanted[name]
        equal = name.startswith(("scaler/", "task/")) or name.endswith("/step") or not expected.is_floating_point()
        size = float(expected.abs().max()) if expected.numel() else 0.0
        worst = _distance(found[name], expected)
        if not worst <= (0.0 if equal else max(_tolerance(case, name) * size, rounding.get(name, 0.0))):
            problems.append(f"{name} differs by {worst:.3g} of {size:.3g}")
    return problems


def _tolerance(case: Case, name: str) -> float:
    """Muon rounds gradients to bfloat16, whatever the precision."""
    return _TOLERANCE["bf16" if case.task == "muon" else case.precision][name.startswith("optimizer/")]


def _buffers(case: Case, folder: Path) -> list[str]:
    """Every rank's buffers, in the model itself: the same bits on all, and the oracle's but for rounding."""
    held = [torch.load(folder / f"buffers-{rank}.pt") for rank in range(case.world)]
    problems = []
    for name, expected in _wanted(case, steps_of(case.task)).buffers.items():
        mine = held[0].get(name)
        if mine is None or mine.dtype != expected.dtype:
            problems.append(f"buffer {name} is {mine if mine is None else mine.dtype}, not {expected.dtype}")
            continue
        if any(_bits(other[name]) != _bits(mine) for other in held):
            problems.append(f"buffer {name} differs between the ranks")
        worst = _distance(mine, expected)
        if not worst <= _tolerance(case, name) * float(expected.abs().max()):
            problems.append(f"buffer {name} on rank 0 differs by {worst:.3g} of {float(expected.abs().max()):.3g}")
    return problems


def _evaluations(case: Case, root: Path, done: int) -> list[str]:
    """The evaluations up to the newest checkpoint; exact ones must have the reference's bits."""
    found = _evaluated(folder_of(root, case), done)
    problems = compared_evaluations(case, found, _wanted(case, done).evaluations)
    if case.exact and not problems and str(found) != str(_evaluated(folder_of(root, reference(case)), done)):
        problems.append(f"other bits than {reference(case)} in an evaluation")
    return problems


def compared_evaluations(
    case: Case, found: list[tuple[int, dict[str, float]]], wanted: dict[int, dict[str, float]]
) -> list[str]:
    """Each evaluation must have been made once, and its numbers be the oracle's but for rounding."""
    if [step for step, _ in found] != list(wanted):
        return [f"evaluated after steps {[step for step, _ in found]}, not after {list(wanted)}"]
    problems = []
    for step, values in found:
        expected = wanted[step]
        if values.keys() != expected.keys() or values["items"] != expected["items"]:
            problems.append(f"the evaluation after step {step} is {values}, not {expected}")
            continue
        for name, value in expected.items():
            near = abs(values[name] - value) <= _EVALUATION[case.precision] * abs(value)
            if not near and not (math.isnan(values[name]) and math.isnan(value)):  # of the step of the fault
                problems.append(f"evaluation/{name} after step {step} differs by {values[name] - value:.3g} of {value}")
    return problems


def _hooks(folder: Path, done: int) -> list[str]:
    """What the hooks have counted over all starts lies in the checkpoint."""
    counted = checkpoint.read_state(checkpoint.path_of(folder / NAME, done)).get("hooks")
    return [] if counted == {"steps": done} else [f"the hooks' state is {counted} after step {done}"]


def _turns(case: Case, folder: Path, done: int) -> list[str]:
    """What a LightningModule has counted over all starts, and put into the checkpoint.

    One that takes its steps itself is not run in a step that is left out.
    """
    kept = checkpoint.read_state(checkpoint.path_of(folder / NAME, done))["hooks"]
    turns = unpack(kept["module"])["turns"]
    wanted = done - (case.task == "manual" and case.leaves_out)
    return [] if turns == wanted else [f"the module has counted {turns} batches after step {done}"]


def _patience(folder: Path, done: int) -> list[str]:
    """What `--patience-metric` has counted over all starts: the evaluations since the largest error."""
    errors = [(values["absolute"], step) for step, values in _evaluated(folder, done)]
    kept = checkpoint.read_state(checkpoint.path_of(folder / NAME, done)).get("patience")
    if not errors:
        return [] if kept is None else [f"patience is {kept} before an evaluation"]
    (_, step), place = max(errors), errors.index(max(errors))
    since = len(errors) - 1 - place
    right = kept is not None and (kept["best"]["step"], kept["since"]) == (step, since)
    return [] if right else [f"patience is {kept}, not {since} evaluations since that after step {step}"]


def _best(name: str, folder: Path, done: int) -> list[str]:
    """Compare the best value and its step, over all starts, with the evaluations in the records."""
    values = [(numbers[name], step) for step, numbers in _evaluated(folder, done)]
    values = [(value, step) for value, step in values if math.isfinite(value)]
    kept = checkpoint.read_state(checkpoint.path_of(folder / NAME, done)).get("best")
    found = (kept["value"], kept["step"]) if kept else None
    wanted = max(values, key=lambda pair: pair[0]) if values else None
    return [] if found == wanted else [f"the best {name} is {found}, not {wanted}"]


def _csv(folder: Path) -> list[str]:
    """Compare the rows of metrics.csv with the records, over all starts."""
    records = [json.loads(line) for line in (folder / NAME / "metrics.jsonl").read_text().splitlines()]
    with (folder / NAME / "metrics.csv").open(newline="") as file:
        rows = [{name: cell for name, cell in row.items() if cell != ""} for row in csv.DictReader(file)]
    wanted = [{name: str(value) for name, value in record.items() if value is not None} for record in records]
    return [] if rows == wanted else [f"metrics.csv has {rows}, not {wanted}"]


def _evaluated(folder: Path, done: int) -> list[tuple[int, dict[str, float]]]:
    """(steps taken, values) of each record of an evaluation, in the file's order."""
    records = read(folder / NAME / "metrics.jsonl")
    found = [record for record in records if "evaluation/loss" in record and record["global_step"] <= done]
    values = [{n.removeprefix("evaluation/"): v for n, v in r.items() if n.startswith("evaluation/")} for r in found]
    return list(zip([record["global_step"] for record in found], values, strict=True))


def _silent(case: Case, folder: Path) -> list[str]:
    """A run without a fault warns of nothing, but that BatchNorm has few samples, which is so in the matrix."""
    if case.fault != "none":
        return []
    lines = [line for log in folder.glob(f"{NAME}/logs/rank-*.log") for line in log.read_text().splitlines()]
    lines = [line for line in lines if " WARNING " in line or " ERROR " in line]
    return [f"a healthy run says {line!r}" for line in lines if " samples of a forward, and 16 or more " not in line]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not other.numel():
        return 0.0
    wide = torch.complex128 if other.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max())


def _bits(tensor: torch.Tensor) -> str:
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"
