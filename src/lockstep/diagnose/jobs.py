"""From what is wanted to the job of each combination, and what may differ in it."""

import dataclasses
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.diagnose.combination import REFERENCE, Combination
from lockstep.diagnose.fault import Fault
from lockstep.diagnose.tolerance import EXACT, Allowance, Scales, unit_roundoff
from lockstep.diagnose.trial import Job
from lockstep.diagnose.values import Traces
from lockstep.diagnose.wanted import Wanted

__all__ = ["COMPILED", "allowance", "job", "reference_jobs", "traces_of"]

COMPILED = dataclasses.replace(REFERENCE, compiled=True)
_KERNEL_TERMS = 4096  # of the longest sum inside a model, which another compiler or machine may add in another order
_SUMS = {"float64": "float64", "bf16-true": "bfloat16"}  # precision -> dtype of gradients; the others: float32


def reference_jobs(wanted: Wanted, folder: Path, fault: Fault, *, compiled: bool) -> list[Job]:
    """The single process, and in exact mode the compiled one too, since compiled has other bits than eager."""
    jobs = [_job(wanted, REFERENCE, folder, "reference", "")]
    if compiled and wanted.config.exact:
        jobs.append(_job(wanted, COMPILED, folder, "reference-compiled", ""))
    return [dataclasses.replace(one, fault=fault) for one in jobs] if fault.everywhere else jobs


def job(wanted: Wanted, one: Combination, folder: Path, fault: Fault, coarsest: str) -> Job:
    """The job that compares `one` with its reference.

    Args:
        fault: planted on combinations of several ranks.
        coarsest: dtype that the reference's model computes in, at its coarsest.
    """
    exact = wanted.config.exact and one.compiled and one != COMPILED
    reference = "reference-compiled" if exact else "reference"
    made = _job(wanted, one, folder, one.key, reference)
    planted = fault if fault.everywhere or one.world_size > 1 else Fault()
    eager = one.compiled and reference == "reference"
    allowed = EXACT if one == REFERENCE else allowance(wanted.config, one.world_size, coarsest, other_kernels=eager)
    return dataclasses.replace(made, fault=planted, allowance=allowed)


def traces_of(made: Job, reference: dict[str, Any], ranks: list[dict[str, Any]]) -> Traces:
    """What `first_difference` compares, once a job has run."""
    last = len(reference["steps"]) - 1
    drift = made.allowance.drift(last, Scales.of(reference["steps"], made.config)[last])
    return Traces(reference, ranks, made.allowance, made.config.optim.clip, drift)


def allowance(config: Config, world_size: int, coarsest: str, *, other_kernels: bool) -> Allowance:
    """Bits with --exact, where the kernels are the same; else what the dtypes and the number of terms allow."""
    if config.exact and not other_kernels:
        return EXACT
    inner = unit_roundoff(coarsest)
    if config.matmul_precision != "highest" and config.device != "cpu":
        inner = max(inner, 2.0**-11)  # TF32
    terms = config.micro_batches + world_size + _KERNEL_TERMS * other_kernels
    return Allowance(terms, unit_roundoff(_SUMS.get(config.precision, "float32")), inner, other_kernels)


def _job(wanted: Wanted, one: Combination, folder: Path, key: str, reference: str) -> Job:
    resume = wanted.resume if reference else 0
    at: dict[str, Any] = {"steps": wanted.steps, "resume": resume, "fault_step": wanted.fault_step}
    return Job(key, one, wanted.config, wanted.task, wanted.named, folder=folder, reference=reference, **at)
