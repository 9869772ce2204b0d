"""The factors of the matrix, which combinations are runs, and sets of them that have every pair or triple.

    for case in read("pairs"): ...      # each pair of two factors' values that a run can have is in one
    case = parse("fsdp-exact-4-batchnorm-2-nan-skip-fp16-late-after-own-sum")
    case = parse("ddp-plain-2-mlp-0-none-stop-bf16-now-none-own-sum-tensor")       # two ranks have a model
    python tests/matrix/matrix_cases.py         # writes pairs.txt and triples.txt, after a change of the factors

A combination is a run (`valid`), or is refused (`refusal` says with what words), or makes no sense.
"""

import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matrix_subject import BITS

__all__ = [
    "FACTORS",
    "SEED",
    "UNDECLARED",
    "Case",
    "covering",
    "everything",
    "fewest",
    "in_triples",
    "lighten",
    "parse",
    "read",
    "reference",
    "refusal",
    "rounds_otherwise",
    "sample",
    "tuples",
    "valid",
    "write",
]

_FOLDER = Path(__file__).parent
SEED = int(os.environ.get("MATRIX_SEED") or random.SystemRandom().randrange(10**6))  # of the sample of all runs


class Case(NamedTuple):
    """One combination. Its line, `str(case)`, names it."""

    engine: str
    sums: str
    world: int
    model: str
    workers: int
    fault: str
    policy: str
    precision: str
    reader: str
    resume: str
    task: str
    step: str
    parallel: str = "none"

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self[:-1] if self.parallel == "none" else self))

    @property
    def exact(self) -> bool:
        return self.sums == "exact"

    @property
    def stops(self) -> bool:
        """Whether the fault ends the run."""
        return self.fault == "nan" and self.policy == "stop"

    @property
    def leaves_out(self) -> bool:
        """Whether the step of the fault is left out of the run."""
        return self.fault in ("nan", "spike") and self.policy != "stop"


FACTORS: dict[str, tuple[object, ...]] = {
    "engine": ("single", "ddp", "zero", "fsdp"),
    "sums": ("plain", "exact"),
    "world": (1, 2, 3, 4),
    "model": ("mlp", "batchnorm", "buffer", "tied", "rotary"),
    "workers": (0, 2),
    "fault": ("none", "nan", "spike", "error", "killed", "oom"),
    "policy": ("stop", "skip", "rollback"),
    "precision": ("float32", "bf16", "fp16"),
    "reader": ("now", "late"),
    "resume": ("none", "before", "after"),
    "task": (
        *("default", "own", "options", "muon", "adapters", "plateau", "hooked", "lightning", "manual", "stream"),
        *("quantized", "trainer"),
    ),
    # The loss, what is trained, and how often a step evaluates; tests/training/test_step_property.py mixes these.
    "step": ("sum", "mean", "weighted", "drawn", "counted", "whole", "rows", "unfrozen", "frozen", "closure"),
    # What two ranks divide, which have the model between them.
    "parallel": ("none", "tensor", "pipeline", "context"),
}
UNDECLARED = ("mean", "weighted", "drawn", "counted")  # of FACTORS["step"]: losses whose reduction is to be proved
assert tuple(FACTORS) == Case._fields


def refusal(case: Case) -> str:
    """What the error's line must say where the combination is refused; "" where it is not."""
    if case.engine == "single" and case.world > 1:
        return "single"
    if case.parallel != "none" and (said := _refused_to_divide(case)):
        return said
    if case.fault == "oom" and (said := _refused_to_cut(case)):
        return said
    if case.task == "manual":
        return _refused_by_own_steps(case)
    if case.task == "quantized" and case.engine == "fsdp" and BITS[case.model] == "8bit":
        return "--engine fsdp"
    if case.exact and case.model == "buffer":
        return "buffer"
    if case.exact and case.task == "own":  # whose loss writes its tensors
        return "task/"
    if case.exact and case.engine == "fsdp" and case.step in UNDECLARED:  # there a loss cannot be weighed
        return "reduction"
    if case.step == "closure" and case.engine in ("zero", "fsdp"):
        return f"--engine {case.engine}"
    if case.step == "closure" and case.precision == "fp16":
        return "--precision fp16"
    return ""


def _refused_to_divide(case: Case) -> str:
    """Return what the error must say where two ranks cannot divide the training; "" where they can."""
    flag = f"parallel.{case.parallel} 2"
    is_alone = case.engine == "fsdp" and (case.parallel == "pipeline" or (case.parallel == "context" and case.exact))
    said = {
        "precision fp16": case.precision == "fp16",
        f"engine {case.engine}": case.engine in ("single", "zero") or is_alone,
        "optim.name muon": case.task == "muon",
        "lora.rank": case.task in ("adapters", "quantized"),
        "on_oom smaller": case.fault == "oom",
        f"{flag}: the run has": case.world % 2 == 1,
        "own_steps": case.task == "manual",
        f"{flag}: the task": case.task in ("lightning", "trainer"),  # which does not say how
    }
    if case.parallel == "pipeline":
        said |= {
            "BatchNorm": case.model == "batchnorm",
            "evaluate": case.task == "own",
            "hook": case.task == "hooked",
            "step_loss": case.step in ("whole", "rows"),
            "several times": case.step == "closure",
            "state_dict": case.step == "counted",
            "seen": case.model == "buffer",
            "unchanged": case.model == "rotary",
        }
    if case.parallel == "context":
        said |= {
            "BatchNorm": case.model == "batchnorm",
            "must be a sum over positions": case.step in (*UNDECLARED, "whole", "rows"),
        }
    return next((words for words, is_refused in said.items() if is_refused), "")


def _refused_by_own_steps(case: Case) -> str:
    """Own steps are taken already when the whole step is known, and their engine is theirs."""
    if case.policy == "skip":
        return "--guards.nonfinite skip"
    if case.engine in ("zero", "fsdp"):
        return f"--engine {case.engine} does not work with a task that steps its optimizers itself"
    return "--precision fp16" if case.precision == "fp16" else ""


def _refused_to_cut(case: Case) -> str:
    """Return what the error must say where smaller micro-batches change the training; "" where they do not."""
    tasks = ("manual", "lightning", "stream", "hooked", "adapters", "trainer")
    other = case.exact or case.model == "batchnorm" or case.task in tasks
    return "oom smaller does not go with" if other else ""


def valid(case: Case) -> bool:
    """Whether the combination is a run, to its end or to the fault that ends it.

    One of several ranks that runs out of memory is restarted by its launcher: tests/training/test_out_of_memory.py.
    """
    never_after = case.stops and case.resume == "after"  # there is no after
    # Of smaller micro-batches there are more, and each moves the buffer once.
    unlike = case.fault == "oom" and (case.world > 1 or case.model == "buffer")
    # The stage with the layer refuses that it changes.
    unlike |= case.parallel == "pipeline" and case.step in ("unfrozen", "frozen")
    # Each rank has a part of the positions, moves the buffer by their mean, and has a part of the metric r2.
    unlike |= case.parallel == "context" and (case.model == "buffer" or case.task == "own")
    return not (refusal(case) or never_after or unlike) and (case.step == "sum" or _shows_the_step(case))


def _shows_the_step(case: Case) -> bool:
    """Whether all else is what a step may depend on: other tasks have losses, or optimizers, of their own."""
    beside = (case.task, case.workers) == ("default", 0) and case.fault in ("none", "nan", "spike")
    return beside and case.model in ("mlp", "batchnorm", "tied")


def reference(case: Case) -> Case:
    """The exact run whose bits the exact run `case` must have: what is not to matter is at its simplest."""
    # A step left out is left out, whether in its place or by a rollback.
    out = "rollback" if case.task == "manual" else "skip"
    policy = out if case.leaves_out else "stop"
    fault = "none" if case.fault in ("killed", "oom") else case.fault
    engine, world, parallel = ("ddp", 2, case.parallel) if rounds_otherwise(case) else ("single", 1, "none")
    setting = (fault, policy, case.precision, "now", "none", case.task, case.step, parallel)
    return Case(engine, "exact", world, case.model, 0, *setting)


def rounds_otherwise(case: Case) -> bool:
    """Whether two ranks add in another order than one: stages do where both ends of the model are one weight."""
    return case.parallel in ("tensor", "context") or (case.parallel == "pipeline" and case.model == "tied")


def parse(line: str) -> Case:
    """The case that a line names. Raises ValueError for one that is none."""
    words = line.strip().split("-")
    words += ["none"] if len(words) == len(FACTORS) - 1 else []
    known = [{str(value): value for value in values} for values in FACTORS.values()]
    if len(words) != len(known) or any(word not in values for word, values in zip(words, known, strict=True)):
        raise ValueError(f"{line!r} names no case: it is twelve words, or thirteen, one of each of {FACTORS}")
    return Case(*(values[word] for word, values in zip(words, known, strict=True)))  # type: ignore[arg-type]


@functools.cache
def everything() -> tuple[Case, ...]:
    """All runs."""
    beside: dict[str, tuple[object, ...]] = {"task": ("default",), "workers": (0,)}  # see `_shows_the_step`
    divided: dict[str, tuple[object, ...]] = {  # see `_refused_to_divide`
        "engine": ("ddp", "fsdp"),
        "world": (2, 4),
        "precision": ("float32", "bf16"),
        "task": ("default", "own", "options", "plateau", "hooked", "stream"),
    }
    found = []
    for step, parallel in itertools.product(FACTORS["step"], FACTORS["parallel"]):
        factors = FACTORS | {"step": (step,), "parallel": (parallel,)}
        factors |= {} if parallel == "none" else divided
        factors |= {} if step == "sum" else beside
        # Of the others alone it depends what is a run.
        free = list(itertools.product(factors["workers"], factors["reader"]))
        factors |= {"workers": (0,), "reader": ("now",)}
        for values in itertools.product(*factors.values()):
            if valid(case := Case(*values)):  # type: ignore[arg-type]
                found += [case._replace(workers=workers, reader=reader) for workers, reader in free]
    return tuple(found)


def tuples(case: Case, size: int) -> set[tuple[tuple[str, object], ...]]:
    """Its pairs (size 2) or triples (3) of (factor, value)."""
    return set(itertools.combinations(zip(Case._fields, case, strict=True), size))


def work(case: Case) -> float:
    """About how many CPU seconds a run and its verdict take.

    Without the exact run that it may be compared with: few others see as much.
    """
    starts = 1 + (case.resume != "none") + (case.fault == "killed")
    loaders = 1.2 * (case.workers > 0) * (2 if case.task == "plateau" else 1)
    rank = 0.35 + {"plateau": 0.4, "adapters": 0.2, "stream": 0.2}.get(case.task, 0.0) + 0.1 * (case.engine == "fsdp")
    rank += {"tensor": 0.25, "pipeline": 0.1}.get(case.parallel, 0.0)
    kill = 0.5 * case.world * (case.fault == "killed")  # new processes
    return 0.2 + starts * case.world * (rank + loaders) + kill


class _Row(NamedTuple):
    """A run that a covering set may have, its tuples as the bits of a number, and its work."""

    case: Case
    tuples: int
    work: float


def covering(runs: Sequence[Case], size: int, having: Iterable[Case] = (), seed: int = 16) -> list[Case]:
    """Some of `runs` that, with those of `having`, have every pair or triple of values which any of `runs` has.

    A greedy set for its work; `lighten` finds better ones.
    """
    draw, bits = random.Random(seed), dict[object, int]()
    rows = [_Row(case, _bits(case, size, bits), work(case)) for case in _pool(runs, draw)]
    wanted = functools.reduce(int.__or__, (row.tuples for row in rows))
    for case in having:
        wanted &= ~_bits(case, size, bits)
    return [row.case for row in _complete(rows, wanted, draw)]


def lighten(
    cases: Sequence[Case],
    size: int,
    having: Iterable[Case] = (),
    allowed: Callable[[Case], bool] = valid,
    *,
    seconds: float,
    seed: int = 16,
) -> list[Case]:
    """Return a covering set that takes less work than `cases`, after a search of so many CPU seconds.

    A run gets other values where no pair needs its own, or takes some of another's, or the place of both. What costs
    more stays now and then, the more seldom the longer the search lasts.
    """
    draw, bits = random.Random(seed), dict[object, int]()
    had = functools.cache(lambda case: _bits(case, size, bits))
    best = present = list(cases)
    least = cost = _total(present)
    wanted = _joined(map(had, present)) & ~_joined(map(had, having))
    end = time.process_time() + seconds
    while (left := end - time.process_time()) > 0:
        some = draw.sample(range(len(present)), draw.choice((1, 2)))
        others = [case for place, case in enumerate(present) if place not in some]
        redrawn = _redraw([present[place] for place in some], draw)
        if not all(map(allowed, redrawn)) or wanted & ~_joined(map(had, others + redrawn)):
            continue
        other = _total(others + redrawn)
        if other <= cost or draw.random() < math.exp((cost - other) / (0.2 * (left / seconds) ** 2 + 0.004)):
            present, cost = others + redrawn, other
        if cost < least:
            best, least = present, cost
    return best


def _redraw(cases: list[Case], draw: random.Random) -> list[Case]:
    """One run with other values, or none; two that exchange values, or one of both."""
    first, *second = cases
    if not second:
        values = [draw.choice(FACTORS[n]) if draw.random() < 0.2 else value for n, value in first._asdict().items()]
        return [Case(*values)] if draw.random() < 0.9 else []  # type: ignore[arg-type]
    pairs = [pair if draw.random() < 0.7 else pair[::-1] for pair in zip(first, *second, strict=True)]
    both = [Case(*values) for values in zip(*pairs, strict=True)]
    return both if draw.random() < 0.7 else both[:1]


def _joined(bits: Iterable[int]) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _total(cases: Iterable[Case]) -> float:
    """The work of the runs, and of the exact ones that they are compared with."""
    known = set(cases)
    known |= {reference(case) for case in known if case.exact}
    return sum(map(work, known))


def _bits(case: Case, size: int, bits: dict[object, int]) -> int:
    return sum(1 << bits.setdefault(each, len(bits)) for each in tuples(case, size))


def _pool(runs: Sequence[Case], draw: random.Random) -> list[Case]:
    """Some runs of each model, task and step, mostly those of little work; a test holds that no tuple is missing."""
    kinds: dict[object, list[Case]] = {}
    for case in runs:
        kinds.setdefault((case.model, case.task, case.step, case.parallel), []).append(case)
    found = []
    for kind in kinds.values():
        found += draw.sample(kind, min(120, len(kind)))
        found += draw.choices(kind, [1 / work(case) for case in kind], k=240)
    return list(dict.fromkeys(found))


def _complete(rows: list[_Row], wanted: int, draw: random.Random) -> list[_Row]:
    """Rows with all that is wanted, most of it for their work first; without those that others make needless."""
    chosen, missing = list[_Row](), wanted
    while missing:
        few = draw.sample(rows, min(1500, len(rows)))
        few = [row for row in few if row.tuples & missing] or [row for row in rows if row.tuples & missing & -missing]
        chosen.append(max(few, key=lambda row: (row.tuples & missing).bit_count() / row.work**0.7))
        missing &= ~chosen[-1].tuples
    for row in sorted(chosen, key=lambda row: -row.work):
        others = functools.reduce(int.__or__, (other.tuples for other in chosen if other is not row), 0)
        if not row.tuples & wanted & ~others:
            chosen.remove(row)
    return chosen


def fewest(runs: Sequence[Case], parts: Iterable[Callable[[Case], bool]]) -> list[Case]:
    """A few of `runs` that have each of the parts, those with most of them for their work first."""
    missing, chosen = list(parts), []
    while missing:
        best = max(runs, key=lambda case: sum(part(case) for part in missing) / work(case) ** 0.2)
        chosen.append(best)
        left = [part for part in missing if not part(best)]
        assert len(left) < len(missing)
        missing = left
    return chosen


def sample(count: int, seed: int) -> list[Case]:
    """So many runs, each as likely as any other."""
    draw, found = random.Random(seed), dict[Case, None]()
    while len(found) < count:
        case = Case(*(draw.choice(values) for values in FACTORS.values()))  # type: ignore[arg-type]
        if valid(case):
            found[case] = None
    return list(found)


def read(name: str) -> list[Case]:
    """The covering set "pairs" or "triples", as it was written."""
    return [parse(line) for line in (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()]


def in_triples(case: Case) -> bool:
    """Whether its triples are in the covering set: a killed process costs seconds, and divided models have pairs."""
    return case.fault != "killed" and case.parallel == "none"


def write() -> None:
    """Compute the covering sets and write their files: minutes."""
    pairs = lighten(covering(everything(), 2), 2, seconds=180)
    triples = covering([case for case in everything() if in_triples(case)], 3, having=pairs)
    triples = lighten(triples, 3, pairs, lambda case: valid(case) and in_triples(case), seconds=180)
    for name, cases in (("pairs", pairs), ("triples", triples)):
        lines = "".join(f"{case}\n" for case in sorted(cases, key=str))
        (_FOLDER / f"{name}.txt").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write()
