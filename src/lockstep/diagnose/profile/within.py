"""Propose changes to the computing itself: Python, operations, micro-batches, update, memory, threads.

for remedy in within(measured): ...
"""

from collections.abc import Iterator
from statistics import fmean

from lockstep.diagnose.profile.measured import ProfileSummary, Remedy, empty

__all__ = ["within"]

# Largest factor on the samples of a forward.
_MICRO = 8
# Microseconds of a kernel below which launching it dominates.
_SMALL = 25.0
# Share of the cost of calls and of Python that --compile removes.
_COMPILED = 0.7


def within(run: ProfileSummary) -> Iterator[Remedy]:
    """Yield every such change that applies, in no order."""
    for rule in (_host, _micro_batches, _update, _recomputation, _padding, _waits, _memory, _threads, _cores):
        yield from rule(run)


def _host(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose fewer operations, or less Python between them."""
    idle = run.steady["host"] - fmean(rank.waits + rank.allocates for rank in run.ranks)
    count = fmean(rank.trace.count / rank.trace.steps for rank in run.ranks)
    calls = _calls(run)
    calling = _calling(run)
    whole_model = run.option("compile_scope") == "whole"
    change = " ".join(["--compile"] * (not run.option("compile")) + ["--compile-scope whole"] * (not whole_model))
    change = change or "fewer and larger operations"
    if run.on_cpu and count:
        cost = calls + calling
        why = f"{count:.0f} operations a step, one after another: calling them takes {cost:.1f} ms"
        yield Remedy("operations", change, run.without(savings=_COMPILED * cost), why)
        # The cost of checkpointing belongs to _recomputation.
        idle -= calling + 2.0 * fmean(rank.framing for rank in run.ranks)
    elif count and 1e3 * run.steady["compute"] / count < _SMALL:
        kernel_us = 1e3 * run.steady["compute"] / count
        why = f"{count:.0f} kernels a step take {kernel_us:.0f} us each, less than it takes to launch them"
        yield Remedy("host", change, run.without(savings=_COMPILED * (idle + calls)), why)
        return
    if idle > 0.0:
        effect = "nothing is computed" if run.on_cpu else "the device is idle"
        why = f"for {idle:.1f} ms a step {effect} while Python runs"
        change = f"{change}, or less Python in the model's forward and the loss"
        several = int(run.about.get("slots", 1)) > 1
        yield Remedy("host", change, run.without(savings=idle * (_COMPILED if several else 1.0)), why)


def _micro_batches(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose fewer passes, since each has a fixed cost."""
    slots = int(run.about.get("slots", 1))
    size = int(run.about.get("micro_batch_size", 1))
    if slots < 2:
        return
    fixed = max(0.0, fmean(rank.passes for rank in run.ranks) - _framing(run)) + _calls(run)
    fewer = max(1, -(-slots // _MICRO))
    larger = size * (slots // fewer)
    why = f"{slots} forwards of {size} a step: {fixed:.1f} ms is their fixed cost, whatever their size"
    after = run.without(savings=fixed * (1.0 - fewer / slots))
    yield Remedy("micro-batches", f"--micro-batch-size {larger}, if the memory allows it", after, why)


def _update(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose one fused kernel instead of an operation for each tensor."""
    names = set()
    for rank in run.ranks:
        for name in rank.trace.names:
            names.add(name.lower())
    fused = any("fused" in name for name in names)
    nanoseconds = run.about.get("fused_ns")
    if fused or not nanoseconds or run.option("exact"):
        return
    after = run.steady["update"] - float(nanoseconds) * float(run.about.get("parameters", 0)) / 1e6
    if after > 0.0:
        why = f"the update takes {run.steady['update']:.1f} ms a step, tensor by tensor"
        yield Remedy("update", "fused=True in the optimizer that the task makes", run.without(savings=after), why)


def _recomputation(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose no recomputed forward, if there is memory for the activations."""
    mode = str(run.option("activation_checkpointing") or "none")
    recompute = fmean(rank.again for rank in run.ranks)
    # A compiled backward does not show recomputed forwards in the trace.
    if not recompute and mode != "none":
        share = {"full": 1.0, "selective": 0.3}.get(mode, 1.0 / int(mode.partition(":")[2] or 1))
        recompute = share * fmean(rank.forward for rank in run.ranks)
    # Saving random states and hooks in the forward costs as much as restoring them in the backward.
    recompute += fmean(rank.framing for rank in run.ranks)
    free = float(run.about.get("memory_free", 0))
    in_use = float(run.about.get("memory_used", 1))
    if recompute > 0.0 and free > in_use:
        room = f"{free / 1e9:.1f} GB are free, {in_use / 1e9:.1f} in use"
        why = f"the backwards recompute forwards, {recompute:.1f} ms a step, and {room}"
        if mode == "none":
            change = "less checkpointing of activations in the model"
        else:
            change = "--activation-checkpointing none"
        yield Remedy("recomputation", change, run.without(savings=recompute), why)


def _padding(run: ProfileSummary) -> Iterator[Remedy]:
    share = empty(run)
    if share <= 0.0:
        return
    packs = run.option("data.packing") == "padded"
    if packs:
        change = "--data.packing documents"
    else:
        change = "samples of similar length in a micro-batch, or several in one row"
    savings = share * run.steady["compute"]
    yield Remedy("padding", change, run.without(savings=savings), f"{share:.0%} of the positions are padding")


def _waits(run: ProfileSummary) -> Iterator[Remedy]:
    savings = fmean(rank.waits for rank in run.ranks)
    if savings > 0.0:
        why = (
            f"the host waits for the device in the middle of a step, and then the device for the host: {savings:.1f} ms"
        )
        change = "no .item(), .cpu() or print of a tensor in the loss and the model"
        yield Remedy("synchronisation", change, run.without(savings=savings), why)


def _memory(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose to keep memory that is allocated and freed in every step."""
    savings = fmean(rank.allocates for rank in run.ranks)
    if savings > 0.0:
        why = f"every step requests memory from the driver, {savings:.1f} ms"
        change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and shapes that stay the same"
        yield Remedy("memory", change, run.without(savings=savings), why)
    system = run.usage("system")
    minor = run.usage("minor")
    major = run.usage("major")
    if major > 1.0:
        why = f"{major:.0f} pages a step are read back from the disk: the machine swaps"
        yield Remedy(
            "memory", "a smaller --micro-batch-size, or fewer processes here", run.without(savings=system), why
        )
        return
    savings = min(system, minor * float(run.about.get("page_us", 0.0)) / 1e3)
    if savings > 0.0:
        why = f"{minor:.0f} new pages of memory a step take the system {savings:.1f} ms: large tensors come and go"
        change = (
            "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 in the environment, which keeps it"
        )
        yield Remedy("memory", change, run.without(savings=savings), why)


def _threads(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose fewer threads, if there are more than cores.

    The gain was measured before the trace, on all ranks.
    """
    fewer = [rank.trace.about.get("fewer_threads") or {} for rank in run.ranks]
    gain = fmean(float(measurement.get("gain", 1.0)) for measurement in fewer)
    if not all(fewer) or gain <= 1.0:
        return
    cores, ranks, threads = (int(run.about.get(name, 1)) for name in ("cores", "local_ranks", "threads"))
    # The ranks' differences and the cores' share of an exchange shrink by the same factor.
    slowed = sum(run.steady[name] for name in ("compute", "update", "queued", "imbalance"))
    savings = (slowed + run.steady["exposed_communication"] * run.exchanging) * (1.0 - 1.0 / gain)
    why = f"{ranks} processes of {threads} threads share {cores} cores"
    yield Remedy("threads", f"OMP_NUM_THREADS={fewer[0]['count']}", run.without(savings=savings), why)


def _cores(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose cores without other processes.

    The run's own exchanges and loaders do not count as others.
    """
    cores, ranks, threads = (int(run.about.get(name, 1)) for name in ("cores", "local_ranks", "threads"))
    if threads * ranks > cores or run.option("data.workers"):
        return
    savings = run.steady["queued"] - run.usage("others") * ranks / cores
    if savings > 0.0:
        why = f"for {savings:.1f} ms a step the training waits for cores that other processes use"
        yield Remedy("cores", "a machine of its own, or fewer other processes", run.without(savings=savings), why)


def _calls(run: ProfileSummary) -> float:
    """Return the milliseconds a step of the operations' fixed cost."""
    return min(fmean(rank.trace.calls / rank.trace.steps for rank in run.ranks) / 1e3, run.steady["compute"])


def _calling(run: ProfileSummary) -> float:
    """Return the milliseconds a step between consecutive operations, without tracing."""
    return max(0.0, fmean(rank.calling for rank in run.ranks) - _framing(run))


def _framing(run: ProfileSummary) -> float:
    """Return the milliseconds a step that tracing takes between operations."""
    frames = fmean(rank.trace.frames / rank.trace.steps for rank in run.ranks)
    return frames * run.event
