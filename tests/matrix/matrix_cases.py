"""The factors of the matrix, which combinations are runs, and sets of them that have every pair or triple.

    for case in read("pairs"): ...      # each pair of two factors' values that a run can have is in one
    case = parse("fsdp-exact-4-batchnorm-2-nan-skip-fp16-late-after-own-sum")
    python tests/matrix/matrix_cases.py         # writes pairs.txt and triples.txt, after a change of the factors

A combination is a run (`valid`), or is refused (`refusal` says with what words), or makes no sense.
"""

import functools
import itertools
import os
import random
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
    "parse",
    "read",
    "reference",
    "refusal",
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

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)

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
}
UNDECLARED = ("mean", "weighted", "drawn", "counted")  # of FACTORS["step"]: losses whose reduction is to be proved
assert tuple(FACTORS) == Case._fields


def refusal(case: Case) -> str:
    """What the error's line must say where the combination is refused; "" where it is not."""
    if case.engine == "single" and case.world > 1:
        return "single"
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
    return Case("single", "exact", 1, case.model, 0, fault, policy, case.precision, "now", "none", case.task, case.step)


def parse(line: str) -> Case:
    """The case that a line names. Raises ValueError for one that is none."""
    words = line.strip().split("-")
    known = [{str(value): value for value in values} for values in FACTORS.values()]
    if len(words) != len(known) or any(word not in values for word, values in zip(words, known, strict=True)):
        raise ValueError(f"{line!r} names no case: it is twelve words, one of each of {FACTORS}")
    return Case(*(values[word] for word, values in zip(words, known, strict=True)))  # type: ignore[arg-type]


@functools.cache
def everything() -> tuple[Case, ...]:
    """All runs."""
    beside: dict[str, tuple[object, ...]] = {"task": ("default",), "workers": (0,)}  # see `_shows_the_step`
    found = []
    for step in FACTORS["step"]:
        factors = FACTORS | {"step": (step,)} | ({} if step == "sum" else beside)
        found += [case for values in itertools.product(*factors.values()) if valid(case := Case(*values))]  # type: ignore[arg-type]
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
    kill = 0.5 * case.world * (case.fault == "killed")  # new processes
    return 0.2 + starts * case.world * (rank + loaders) + kill


class _Row(NamedTuple):
    """A run that a covering set may have, its tuples as the bits of a number, and its work."""

    case: Case
    tuples: int
    work: float


def covering(
    runs: Sequence[Case], size: int, having: Iterable[Case] = (), seed: int = 16, rounds: int = 0
) -> list[Case]:
    """Some of `runs` that, with those of `having`, have every pair or triple of values which any of `runs` has.

    A greedy set for its work; then in each round a few of its runs are chosen again, which stay if they take less.
    """
    draw, bits = random.Random(seed), dict[object, int]()
    rows = [_Row(case, _bits(case, size, bits), work(case)) for case in _pool(runs, draw)]
    wanted = functools.reduce(int.__or__, (row.tuples for row in rows))
    for case in having:
        wanted &= ~_bits(case, size, bits)
    best = _complete([], rows, wanted, draw)
    for _ in range(rounds):
        kept = draw.sample(best, max(0, len(best) - draw.choice((3, 6, 12))))
        best = min(best, _complete(kept, rows, wanted, draw), key=lambda some: sum(row.work for row in some))
    return [row.case for row in best]


def _bits(case: Case, size: int, bits: dict[object, int]) -> int:
    return sum(1 << bits.setdefault(each, len(bits)) for each in tuples(case, size))


def _pool(runs: Sequence[Case], draw: random.Random) -> list[Case]:
    """Some runs of each model, task and step, mostly those of little work; a test holds that no tuple is missing."""
    kinds: dict[object, list[Case]] = {}
    for case in runs:
        kinds.setdefault((case.model, case.task, case.step), []).append(case)
    found = []
    for kind in kinds.values():
        found += draw.sample(kind, min(120, len(kind)))
        found += draw.choices(kind, [1 / work(case) for case in kind], k=240)
    return list(dict.fromkeys(found))


def _complete(kept: list[_Row], rows: list[_Row], wanted: int, draw: random.Random) -> list[_Row]:
    """With `kept` what is still missing, most of it for its work first; without the runs that others make needless."""
    power, chosen, missing = draw.choice((0.5, 0.7, 0.9, 1.0)), list(kept), wanted
    for row in kept:
        missing &= ~row.tuples
    while missing:
        few = draw.sample(rows, min(1500, len(rows)))
        few = [row for row in few if row.tuples & missing] or [row for row in rows if row.tuples & missing & -missing]
        chosen.append(max(few, key=lambda row: (row.tuples & missing).bit_count() / row.work**power))
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


def write() -> None:
    """Compute the covering sets and write their files: minutes."""
    pairs = covering(everything(), 2, rounds=1500)
    # A killed process costs seconds: in these nobody is.
    triples = covering([case for case in everything() if case.fault != "killed"], 3, having=pairs)
    for name, cases in (("pairs", pairs), ("triples", triples)):
        lines = "".join(f"{case}\n" for case in sorted(cases, key=str))
        (_FOLDER / f"{name}.txt").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write()
