"""The factors of the matrix, which combinations are runs, and sets of them that have every pair or triple.

    for case in covering(everything(), 2): ...      # each pair of two factors' values that a run can have is in one
    case = parse("fsdp-exact-4-batchnorm-2-nan-skip-fp16-late-after-own-sum")

A combination is a run (`valid`), or is refused (`refusal` says with what words), or makes no sense.
"""

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
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
    "reference",
    "refusal",
    "sample",
    "tuples",
    "valid",
]


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


def work(case: Case) -> int:
    """About how long a run takes, by its ranks, starts, loader processes and compilation."""
    return (
        case.world
        * (1 + (case.resume != "none") + (case.fault == "killed"))
        * (1 + (case.workers > 0) + (case.task == "plateau"))
    )


def covering(
    runs: Sequence[Case], size: int, having: Iterable[Case] = (), seed: int = 16, tries: int = 300
) -> list[Case]:
    """Some of `runs` that, with those of `having`, have every pair or triple of values which any of `runs` has.

    Greedily: of some runs with the rarest tuple that is still missing, the one that has most of the missing for its
    work. Of sixteen seeds one takes less, but has no cheap run of several ranks with loader processes.
    """
    draw = random.Random(seed)
    those: dict[object, list[Case]] = {}
    kinds: dict[object, list[Case]] = {}
    for case in runs:
        kinds.setdefault((case.model, case.task, case.step), []).append(case)
    for kind in kinds.values():
        for case in draw.sample(kind, min(240, len(kind))):  # of so many each tuple has some; a test holds that
            for each in tuples(case, size):
                those.setdefault(each, []).append(case)
    had = {each for case in having for each in tuples(case, size)}
    missing, chosen = dict.fromkeys(sorted(those.keys() - had, key=repr)), []
    while missing:
        rarest = those[min(missing, key=lambda each: len(those[each]))]
        few = draw.sample(rarest, min(tries, len(rarest)))
        chosen.append(max(few, key=lambda case: len(tuples(case, size) & missing.keys()) / work(case) ** 0.2))
        for each in tuples(chosen[-1], size):
            missing.pop(each, None)
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
    """So many runs, drawn from all."""
    runs = everything()
    return random.Random(seed).sample(runs, min(count, len(runs)))
