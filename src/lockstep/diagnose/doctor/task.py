"""Try the task for a few steps: placement of tensors, gradients, loader.

result = task(place)                       # facts: digests of gradients and weights, seconds of loading and computing

The trial writes nothing.
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
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.adapters.lightning.convert import configure
from lockstep.config.task_options import LIGHTNING
from lockstep.data.batches import Batches
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, skip, warn
from lockstep.diagnose.doctor.workers import memory_growth
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.guards.desync import Digests, leaves, of_digests
from lockstep.loop import loss_of, seeder
from lockstep.passes import LossWeights
from lockstep.training.start.build import build
from lockstep.training.state.parts import RunParts
from lockstep.training.trial.misplaced import MisplacedTensor, find_misplaced

__all__ = [
    "judge_task",
    "loaders",
    "task",
]

# Most steps and seconds to try.
_STEPS = 4
_SECONDS = 10.0
# Loading time that is acceptable in a step: seconds, and a share of the computing.
_LATE = 0.010
_SHARE = 0.5
# Tensors that are compared by name; more are compared as one.
_NAMES = 2000
# Tensors that a line names.
_SHOWN = 4


def loaders(place: CheckContext) -> CheckResult:
    """Build a LightningModule, whose loaders determine the number of loader processes.

    The machine checks use that number. There is no line: a failure is reported by the task's own check.
    """
    if place.with_task and place.config.task.startswith(LIGHTNING):
        with suppress(Exception):
            place.config, place.module = configure(dict(place.told))
    return CheckResult()


def task(place: CheckContext) -> CheckResult:
    """Build the run, and take its first steps from new weights; nothing is written."""
    if not place.with_task:
        return CheckResult([skip("task", "give --task FILE.py:CLASS, or the flags of the run")])
    if place.world is None:
        place.world = World.join(place.config.device, 30.0)
    config = place.config
    module = place.module
    try:
        if config.task.startswith(LIGHTNING):
            pair = (config, module)
            config, module = on_all_ranks(place.world, lambda: pair if module else configure(dict(place.told)))
        built = build(dataclasses.replace(config, compile=False), module, place.world, resume=False)
        # The weights and AdamW's two moments.
        size = 3 * sum(p.numel() * p.element_size() for p in built.model.parameters())
        on_all_ranks(place.world, lambda: built.setup.folder.check_writable(size) if place.rank == 0 else None)
        return _train_steps(built)
    except LockstepError as error:
        # The rank with the error reports it.
        if error.relayed:
            return CheckResult()
        text, _, mend = str(error).partition("; ")
        return CheckResult([fail("task", text, mend or "see above")])


def _train_steps(built: RunParts) -> CheckResult:
    world = built.world
    device = built.world.device
    steps = min(_STEPS, built.run_plan.step_plan.steps)
    loading = []
    computing = []
    misplaced = list[MisplacedTensor]()
    gradients: dict[str, str] = {}
    began = time.monotonic()
    stream = built.batches.from_step(0)
    # All ranks: the exchange forms a group of its own.
    exchange = StepExchange(world, stream.items, None, steps)  # collective
    exchange.take_turns(stream.turns)
    exchange.limit_reading(stream.readable_before)
    with closing(exchange), closing(stream), _record_gradients(built.model, gradients):
        for number in range(steps):
            start = time.perf_counter()
            step, micro = next(stream)
            loaded = time.perf_counter()
            # All ranks, once a step: the loss is divided by the items of all.
            items = math.fsum(
                count for counts in world.gather_counted([batch.items for batch in micro]) for count in counts
            )  # collective
            if not number:
                misplaced = find_misplaced(built.model, built.task, micro[0].data, device)
            computed = time.perf_counter()
            _step(built, step, micro, items)
            if device.type == "cuda":
                # The host waits for the device here, once a step: the step's time is measured.
                torch.cuda.synchronize(device)
            loading.append(loaded - start)
            computing.append(time.perf_counter() - computed)
            # All ranks, once a step: they must stop together, so the slowest decides.
            if max(world.gather(time.monotonic() - began)) > _SECONDS:  # collective
                break
    findings = list(judge_placement(misplaced, device))
    weights = _digests({name: p for name, p in built.model.named_parameters() if _is_whole(p)})
    facts = {
        "data": _batch_digest(built.batches),
        "gradients": _merge_digests(_of_stages(gradients, world)),
        "weights": _merge_digests(_of_stages(weights, world)),
        "loading": statistics.median(loading[1:] or loading),
        "computing": statistics.median(computing[1:] or computing),
        "workers": built.config.data.workers,
        "dataset": type(getattr(built.setup.training.dataset, "inner", built.setup.training.dataset)).__name__,
        "growth": memory_growth(built.batches) if _has_workers(built) else 0.0,
        "steps": len(loading),
    }
    return CheckResult(findings, facts)


def _has_workers(built: RunParts) -> bool:
    """Whether loader processes read an indexed dataset.

    A stream is read in step with the other ranks.
    """
    return bool(built.config.data.workers) and built.setup.training.order is not None


def _step(built: RunParts, step: int, micro: list[Any], items: float) -> None:
    """Take a step as the training loop does."""
    engine = built.engine
    loss_function = loss_of(built.task)
    seed = seeder(built.config.seed, "micro", built.world.device)
    for batch in micro:
        seed(step, batch.index)
        with engine.accumulate(batch is micro[-1]):
            loss = loss_function(engine.model, batch)
        engine.backward(loss, batch.weight * LossWeights(built.task.reduction, items).share(batch))
    engine.step(built.lr_factor(step), momentum=built.momentum(step))


@contextmanager
def _record_gradients(model: nn.Module, gradients: dict[str, str]) -> Iterator[None]:
    """Context manager that digests the first update's unsharded gradients as the optimizer gets them."""

    def look(*_: Any) -> None:
        if not gradients:
            grads = {}
            for name, p in model.named_parameters():
                if p.grad is not None:
                    grads[name] = p.grad
            gradients.update(_digests({name: grad for name, grad in grads.items() if _is_whole(grad)}))

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank has the whole tensor, unlike a DTensor."""
    return not hasattr(tensor, "placements") and not tensor.is_meta


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    bits = Digests()
    for name, tensor in tensors.items():
        bits.add(name, tensor)
    return bits.read()


def _of_stages(digests: dict[str, str], world: World) -> dict[str, str]:
    """Return the digests of all stages of a pipeline, which hold different tensors. Collective over them."""
    joined: dict[str, str] = {}
    for part in world.part("pp").gather(digests):  # collective
        joined |= part
    return joined


def _batch_digest(batches: Batches) -> str:
    """Digest the first micro-batch, loaded on this rank."""
    digest = hashlib.sha256()
    for path, leaf in leaves(batches.alone(0, 0).held):
        digest.update(f"{path}:{_digests({path: leaf})[path]}".encode() if isinstance(leaf, Tensor) else leaf)
    return digest.hexdigest()


def _merge_digests(digests: dict[str, str]) -> dict[str, str]:
    if len(digests) <= _NAMES:
        return digests
    return {"all": of_digests(digests)}


def judge_placement(misplaced: list[MisplacedTensor], device: torch.device) -> Iterator[Finding]:
    """Report tensors on another device than the run's."""
    mend = "register_buffer() moves a tensor with its module; put a criterion into the model, or move it in `loss`"
    for say, is_wrong in ((fail, True), (warn, False)):
        tensors = []
        for entry in misplaced:
            if entry.is_wrong is is_wrong and (is_wrong or "attribute" in entry.label):
                tensors.append(entry)
        # The purpose of a task's plain tensors is unknown: those of a dataset belong on the host.
        if not is_wrong:
            tensors = [entry for entry in tensors if not entry.label.startswith("the task's attribute")]
        if tensors:
            listing = ", ".join(f"{entry.label} on {entry.device}" for entry in tensors[:_SHOWN])
            if len(tensors) > _SHOWN:
                more = f" and {len(tensors) - _SHOWN} more"
            else:
                more = ""
            yield say("placement", f"the run computes on {device}, but tensors are elsewhere: {listing}{more}", mend)


def judge_task(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Check that gradients and weights agree on all ranks, and that the loader keeps up."""
    by_rank = {rank: fact for rank, fact in enumerate(facts) if fact}
    if not by_rank:
        return []
    first_rank = min(by_rank)
    findings = []
    different = [rank for rank, fact in by_rank.items() if fact["data"] != by_rank[first_rank]["data"]]
    if different:
        text = f"the dataset of {place.who(different[0])} has different samples at the same indices than rank 0's"
        mend = "read the same files in the same order on every rank, and draw random numbers only in __getitem__"
        findings.append(fail("data", text, mend))
    elif len(by_rank) > 1:
        findings.append(ok("data", "every rank's dataset gives the same first micro-batch"))
    for subject, when in (("gradients", "after one backward"), ("weights", "after the first steps")):
        names = by_rank[first_rank][subject]
        wrong = []
        for other_rank, fact in by_rank.items():
            if fact[subject] != names:
                different_names = []
                for name in names:
                    if fact[subject].get(name) != names[name]:
                        different_names.append(name)
                wrong.append((other_rank, different_names or sorted(set(fact[subject]) - set(names))))
        if wrong:
            rank, odd = wrong[0]
            text = f"{place.who(rank)} has different {subject} than rank 0 {when}: {odd[0]}"
            text += f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            mend = "check hooks that change gradients, and code that depends on the rank; `lockstep verify` shows more"
            findings.append(fail(subject, text, mend))
        elif len(by_rank) > 1 and names:
            findings.append(ok(subject, f"the same on all ranks {when}: {len(names)} tensors"))
        elif len(by_rank) > 1:
            findings.append(ok(subject, "sharded over the ranks, not compared; `lockstep verify` compares them"))
    findings += [judge_loader(by_rank[first_rank]), *judge_memory(list(by_rank.values()))]
    summary = f"{by_rank[first_rank]['steps']} steps of {1e3 * by_rank[first_rank]['computing']:.3g} ms of computing"
    return [*findings, ok("task", summary), ok("placement", "model and batch are on the run's device")]


def judge_memory(facts: list[Any]) -> Iterator[Finding]:
    """Report a dataset with which the memory of loader processes grows.

    Names the rank where it grows most.
    """
    most = max(facts, key=lambda each: each["growth"])
    if most["growth"]:
        text = f"the memory of a loader process grows by {most['growth']:.3g} MB per 1,000 samples of"
        mend = (
            "keep no samples in its attributes, and hold texts, paths and boxes in a numpy array or a tensor: reading "
            "a Python object copies its page into the process"
        )
        yield warn("workers", f"{text} {most['dataset']}", mend)


def judge_loader(timings: Any) -> Finding:
    """Compare the loading with the computing seconds of a step."""
    loading = timings["loading"]
    computing = timings["computing"]
    workers = timings["workers"]
    text = f"{1e3 * loading:.3g} ms of loading a step, {1e3 * computing:.3g} ms of computing"
    if loading > _LATE and loading > _SHARE * computing:
        mend = f"raise --data.workers (now {workers}), or prepare the data once (smaller files, decoded, tokenized)"
        return warn("loader", f"{text}: the device waits for data", mend)
    return ok("loader", text)
