"""What all guards together cost a step of the GPT benchmark: python bench/guards.py [--steps 60] [--rounds 5]

    python bench/guards.py --audit 0.02 --ranks 2       # what --guards.audit costs alone
    python bench/guards.py --saves --ranks 2            # what the comparison before each save adds to a save
    python bench/guards.py --saves --ranks 2 --tiny     # the same for a model of 1 layer and width 16

Whole runs of `lockstep.train` in this process, guards as by default against guards that do next to nothing (comparisons
of replicas, spikes and stragglers off; the watch and the finiteness of the gradient's norm cannot be turned off), in
turn. Also the parts alone, in microseconds per step: what each costs where it is called.

Of an audit: what audited steps take more than others, and what the others take more than those of a run without, in
turn; both with deterministic kernels. A quarter of the steps is audited, so that there are enough to time. --cpu counts
processor time, for a machine that has other work.

Of a save: what runs with a save every 20 steps and no comparison take longer than their ordinary steps would, and what
a comparison of the same tensors takes.
"""

import argparse
import contextlib
import io
import itertools
import statistics
import tempfile
import time

import torch

import lockstep
from lockstep.config.schema import Config
from lockstep.config.sections import Guards, Optim
from lockstep.distributed.balance import equal_shares
from lockstep.distributed.progress import COMPUTING, Progress
from lockstep.distributed.spawn import start
from lockstep.guards.audit import choose_audits
from lockstep.guards.desync import check, fingerprints
from lockstep.guards.nonfinite import DeferredReader
from lockstep.guards.spike import Spike
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.records import StepRecord

LENGTH, VOCABULARY, MICRO = 128, 512, 4
SAVE_EVERY = 20
OFF = Guards(spike="off", desync_freq=0, straggler=0.0)


class Rows(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self):
        self.rows = torch.randint(VOCABULARY, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Task(lockstep.Task):
    items_per_sample = LENGTH
    layers, heads, width = 4, 4, 192

    def model(self):
        return GPT(
            GPTConfig(vocab_size=VOCABULARY, context=LENGTH, layers=self.layers, heads=self.heads, width=self.width)
        )

    def dataset(self, split):
        return Rows() if split == "train" else None

    def collate(self, samples):
        return torch.stack(samples)

    def count(self, batch):
        return batch.shape[0] * LENGTH

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


class Tiny(Task):
    layers, heads, width = 1, 1, 16


def seconds(guards, steps, world=None, now=time.perf_counter, save_every=0, task=Task):
    """Of each step after the fifth."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = world.gather(folder)[0] if world else folder
        config = Config(
            save_dir=folder, max_steps=10**6, batch_size=8, micro_batch_size=MICRO, seq_len=LENGTH,
            ckpt_freq=save_every, log_freq=100, optim=Optim(), guards=guards,
        )  # fmt: skip
        times = []
        for step in lockstep.Run(config, task(), world):
            times.append(now())
            if step.record.step == steps:
                break
    return [after - before for before, after in itertools.pairwise(times[5:])]


def per_step(guards, steps):
    return statistics.median(seconds(guards, steps))


def both(world, say, steps, rounds, on_cpu):
    """What a round's audited steps take of its others, and these of the steps without audits; of this rank."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    now, slots = time.process_time if on_cpu else time.perf_counter, 8 // MICRO // world.size
    share = 0.25 / slots
    found = []
    for _ in range(rounds):
        plain = statistics.median(seconds(Guards(), steps, world, now))
        say()
        times = seconds(Guards(audit=share), steps, world, now)
        say()
        runs = equal_shares(8 // MICRO, world.size).runs
        marked = [bool(choose_audits(0, step + 6, share, runs)) for step in range(len(times))]
        two, one = (
            statistics.median(t for t, mark in zip(times, marked, strict=True) if mark is is_audited)
            for is_audited in (True, False)
        )
        found.append((two / one, one / plain, plain))
    return [statistics.median(column) for column in zip(*found, strict=True)]


def audit(share, ranks, steps, rounds, on_cpu):
    slots = 8 // MICRO // ranks
    double, others, plain = start(both, ranks, (steps, rounds, on_cpu), patience=600.0)[0]
    cost = share * slots * (double - 1) + others - 1
    print(
        f"--guards.audit {share:g}, ranks: {ranks}; an audited step takes {double:.3f} of another one, where "
        f"{1 + 1 / slots:.3f} is one micro-batch more; the others {others:.4f} of the {1e3 * plain:.1f} ms without; "
        f"in all {100 * cost:.2f} % (goal {100 * share + 0.5:.2f} %)"
    )


def lost_to_saves(guards, steps, world, now, task):
    """Return the seconds that a save costs the run, on this rank."""
    times = seconds(guards, steps, world, now, SAVE_EVERY, task)
    saves = steps // SAVE_EVERY
    return (sum(times) - len(times) * statistics.median(times)) / saves


def both_saves(world, say, steps, rounds, on_cpu, task):
    """Return a save's seconds without the comparison and the comparison's seconds, medians on this rank."""
    torch.set_num_threads(1)
    now = time.process_time if on_cpu else time.perf_counter
    state = {
        f"{kind}/{name}": tensor.clone()
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, tensor in task().model().state_dict().items()
    }
    alone, comparisons = [], []
    for _ in range(rounds):
        alone.append(lost_to_saves(Guards(desync_freq=0), steps, world, now, task))
        say()
        for _ in range(20):
            world.barrier()  # so that no wait for the other rank is counted
            began = now()
            check(state, world, 1)  # collective
            comparisons.append(now() - began)
    return statistics.median(alone), statistics.median(comparisons), statistics.stdev(alone)


def saves(ranks, steps, rounds, on_cpu, task):
    alone, comparison, deviation = start(both_saves, ranks, (steps, rounds, on_cpu, task), patience=600.0)[0]
    print(
        f"a save on {ranks} ranks: {1e3 * alone:.1f} ms ({1e3 * deviation:.1f}), the comparison before it "
        f"{1e3 * comparison:.2f} ms: ratio {1 + comparison / alone:.3f} (goal 1.05)"
    )


def micro(function, count=20000):
    began = time.perf_counter()
    for _ in range(count):
        function()
    return 1e6 * (time.perf_counter() - began) / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--audit", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.saves:
        saves(given.ranks, given.steps, given.rounds, given.cpu, Tiny if given.tiny else Task)
        return
    if given.audit:
        audit(given.audit, given.ranks, given.steps, given.rounds, given.cpu)
        return
    torch.set_num_threads(1)
    results = {"off": [], "on": []}
    for _ in range(given.rounds):
        for name, guards in (("off", OFF), ("on", Guards())):
            results[name].append(per_step(guards, given.steps))
    off, on = (statistics.median(results[name]) for name in ("off", "on"))
    ratio = statistics.median(one / other for one, other in zip(results["on"], results["off"], strict=True))
    print(f"step with guards {1e3 * on:.2f} ms, without {1e3 * off:.2f} ms: ratio {ratio:.4f} (goal 1.01)")
    progress, spike, reader, counted = Progress(), Spike(), DeferredReader(torch.device("cpu")), itertools.count()
    record = StepRecord(0, 1, [torch.ones(())] * 2, torch.ones(()), 1.0)
    for name, function in (
        ("progress", lambda: progress.at(1, COMPUTING)),
        ("spike", lambda: spike.sees(next(counted), 1.0)),
        ("norm and losses", lambda: reader.add(record, [])),
    ):
        print(f"{name}: {micro(function):.2f} us a step")
    state = {f"model/{name}": tensor for name, tensor in Task().model().state_dict().items()}
    began = time.perf_counter()
    fingerprints(state)
    seconds, size = time.perf_counter() - began, sum(tensor.nbytes for tensor in state.values())
    share = 3 * seconds / (100 * on)  # parameters and AdamW's two moments, every 100 steps
    print(f"fingerprint of {size / 1e6:.0f} MB: {1e3 * seconds:.1f} ms; as compared by default {100 * share:.2f} %")


if __name__ == "__main__":
    main()
