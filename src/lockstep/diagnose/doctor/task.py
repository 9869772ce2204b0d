"""Try the task for a few steps: placement of tensors, gradients, loader.

found = task(place)                        # facts: digests of gradients and weights, seconds of loading and computing

Nothing of the trial is kept.
"""

import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.adapters.lightning.convert import configured
from lockstep.config.task_options import LIGHTNING
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, warn
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import LockstepError
from lockstep.guards.desync import Digests, leaves, of_digests
from lockstep.loop import loss_of, seeder
from lockstep.training.build import Built, build
from lockstep.training.defaults import Lying, elsewhere

__all__ = ["judge_loader", "judge_placement", "judge_task", "loaders", "task"]

_STEPS, _SECONDS = 4, 10.0  # tried at most
_LATE, _SHARE = 0.010, 0.5  # seconds, and a share of the computing, that loading may take a step
_NAMES = 2000  # tensors that are compared by name; more as one
_SHOWN = 4


def loaders(place: CheckContext) -> CheckResult:
    """Make a LightningModule, whose loaders determine the number of loader processes.

    The machine checks use that number. There is no line: a failure is reported by the task's own check.
    """
    if place.with_task and place.config.task.startswith(LIGHTNING):
        with suppress(Exception):
            place.config, place.module = configured(dict(place.told))
    return CheckResult()


def task(place: CheckContext) -> CheckResult:
    """Build the run, and take its first steps from new weights; nothing is written."""
    if not place.with_task:
        return CheckResult([ok("task", "not tried: --task FILE.py:CLASS, or the flags of the run")])
    if place.world is None:
        place.world = World.join(place.config.device, 30.0)
    config, made = place.config, place.module
    try:
        if config.task.startswith(LIGHTNING):
            found = (config, made)
            config, made = on_all_ranks(place.world, lambda: found if made else configured(dict(place.told)))
        built = build(dataclasses.replace(config, compile=False), made, place.world, resume=False)
        size = 3 * sum(p.numel() * p.element_size() for p in built.model.parameters())  # and AdamW's two moments
        on_all_ranks(place.world, lambda: built.folder.check_writable(size) if place.rank == 0 else None)
        return _tried(built)
    except LockstepError as error:
        if error.relayed:  # the rank with the error reports it
            return CheckResult()
        text, _, mend = str(error).partition("; ")
        return CheckResult([fail("task", text, mend or "see above")])


def _tried(built: Built) -> CheckResult:
    world, device = built.world, built.world.device
    steps = min(_STEPS, built.run_plan.step_plan.steps)
    loading, computing, lying = [], [], list[Lying]()
    gradients: dict[str, str] = {}
    began = time.monotonic()
    with closing(built.batches.from_step(0)) as stream, _watched(built, gradients):
        for number in range(steps):
            start = time.perf_counter()
            step, micro = next(stream)
            loaded = time.perf_counter()
            items = math.fsum(
                count for own in world.gather([batch.items for batch in micro]) for count in own
            )  # collective
            if not number:
                lying = elsewhere(built.model, built.task, micro[0].data, device)
            computed = time.perf_counter()
            _step(built, step, micro, items)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # waits for the device
            loading.append(loaded - start)
            computing.append(time.perf_counter() - computed)
            if max(world.gather(time.monotonic() - began)) > _SECONDS:  # collective
                break
    findings = list(judge_placement(lying, device))
    weights = _digests({name: p for name, p in built.model.named_parameters() if _is_whole(p)})
    facts = {
        "data": _sampled(built),
        "gradients": _few(gradients),
        "weights": _few(weights),
        "loading": statistics.median(loading[1:] or loading),
        "computing": statistics.median(computing[1:] or computing),
        "workers": built.config.data.workers,
        "steps": len(loading),
    }
    return CheckResult(findings, facts)


def _step(built: Built, step: int, micro: list[Any], items: float) -> None:
    """Take a step as the training loop does."""
    engine, loss_sum = built.engine, loss_of(built.task)
    seed = seeder(built.config.seed, "micro", built.world.device)
    for batch in micro:
        seed(step, batch.index)
        with engine.accumulate(batch is micro[-1]):
            loss = loss_sum(engine.model, batch)
        engine.backward(loss, batch.weight / (items or 1))
    engine.step(built.rate(step), momentum=built.momentum(step))


@contextmanager
def _watched(built: Built, gradients: dict[str, str]) -> Iterator[None]:
    """Context manager that digests the first update's unsharded gradients as the optimizer gets them."""

    def look(*_: Any) -> None:
        if not gradients:
            held = {name: p.grad for name, p in built.model.named_parameters() if p.grad is not None}
            gradients.update(_digests({name: grad for name, grad in held.items() if _is_whole(grad)}))

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank has the whole tensor, unlike a DTensor."""
    return not hasattr(tensor, "placements") and not tensor.is_meta


def _digests(named: dict[str, Tensor]) -> dict[str, str]:
    bits = Digests()
    for name, tensor in named.items():
        bits.add(name, tensor)
    return bits.read()


def _sampled(built: Built) -> str:
    """Digest the first micro-batch, loaded on this rank."""
    digest = hashlib.sha256()
    for path, leaf in leaves(built.batches.alone(0, 0).held):
        digest.update(f"{path}:{_digests({path: leaf})[path]}".encode() if isinstance(leaf, Tensor) else leaf)
    return digest.hexdigest()


def _few(found: dict[str, str]) -> dict[str, str]:
    return found if len(found) <= _NAMES else {"all": of_digests(found)}


def judge_placement(lying: list[Lying], device: torch.device) -> Iterator[Finding]:
    """Report tensors on another device than the run's."""
    mend = "register_buffer() has a tensor move with its module; a criterion belongs into the model, or moves in `loss`"
    for say, sure in ((fail, True), (warn, False)):
        found = [each for each in lying if each.sure is sure and (sure or "attribute" in each.what)]
        if not sure:  # the purpose of a task's plain tensors is unknown: a dataset's belong on the host
            found = [each for each in found if not each.what.startswith("the task's attribute")]
        if found:
            shown = ", ".join(f"{each.what} on {each.where}" for each in found[:_SHOWN])
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield say("placement", f"the run computes on {device}, and elsewhere lie: {shown}{more}", mend)


def judge_task(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Check that gradients and weights agree on all ranks, and that the loader keeps up."""
    there = {rank: each for rank, each in enumerate(facts) if each}
    if not there:
        return []
    first = min(there)
    found = []
    other = [rank for rank, each in there.items() if each["data"] != there[first]["data"]]
    if other:
        text = f"the dataset of {place.who(other[0])} has other samples at the same indices than that of rank 0"
        mend = "have every rank read the same files in the same order, and draw nothing at random but in __getitem__"
        found.append(fail("data", text, mend))
    elif len(there) > 1:
        found.append(ok("data", "every rank's dataset gives the same first micro-batch"))
    for kind, when in (("gradients", "after one backward"), ("weights", "after the first steps")):
        names = there[first][kind]
        wrong = [
            (
                rank,
                [name for name in names if each[kind].get(name) != names[name]] or sorted(set(each[kind]) - set(names)),
            )
            for rank, each in there.items()
            if each[kind] != names
        ]
        if wrong:
            rank, odd = wrong[0]
            text = f"{place.who(rank)} has other {kind} than rank 0 {when}: {odd[0]}"
            text += f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            mend = (
                "look for hooks that change gradients, and for what the model does by rank; `lockstep verify` says more"
            )
            found.append(fail(kind, text, mend))
        elif len(there) > 1 and names:
            found.append(ok(kind, f"the same on all ranks {when}: {len(names)} tensors"))
        elif len(there) > 1:
            found.append(ok(kind, "split over the ranks, and not compared; `lockstep verify` does"))
    found.append(judge_loader(there[first]))
    taken = f"{there[first]['steps']} steps taken, {1e3 * there[first]['computing']:.3g} ms of computing each"
    return [*found, ok("task", taken), ok("placement", "model and batch are on the device of the run")]


def judge_loader(told: Any) -> Finding:
    """Compare the loading with the computing seconds of a step."""
    loading, computing, workers = told["loading"], told["computing"], told["workers"]
    text = f"{1e3 * loading:.3g} ms of loading a step, {1e3 * computing:.3g} ms of computing"
    if loading > _LATE and loading > _SHARE * computing:
        mend = f"raise --data.workers (now {workers}), or prepare the data once (smaller files, decoded, tokenized)"
        return warn("loader", f"{text}: the device waits for data", mend)
    return ok("loader", text)
