"""README's own program beside the same training by hand: python bench/readme_program.py [--rounds 20] [--processes 1]

The program is read out of README.md ("A whole program"), and every flag of lockstep is at its default, so a record is
written every 10 steps and a checkpoint every 100; `--flag NAME=VALUE` changes one, for a second look, and "without
saves" is the same with `--ckpt-freq 0`, which is what the loops by hand do. Beside it are the
best loops that one would write: "tensors" draws a `randperm` an epoch and indexes its tensors by slices of it; "loader"
has a DataLoader(shuffle=True) over the same TensorDataset. Both have what the default has: AdamW (fused, the same
groups), clipping at 1, warm-up and cosine set by hand, gradients freed, loss and norm read every 10 steps; on several
processes DistributedDataParallel with its gradients in buckets, and a DistributedSampler. They write nothing.

Each contestant runs in processes of its own, and all live at once and take turns of `--steps` steps, so that what else
the machine does hits all alike. Reported are a step's processor time and its time by the clock (rank 0's): medians over
the turns, and the median of the ratios to either loop with the distance of its quartiles. Start-up is apart: seconds of
the clock and of the processor from the start of the process to the end of the first step.

`--others` adds Accelerate, the HF Trainer and Lightning (extra `bench`), set up as bench/others.py does, with the
program's model and a DataLoader. `--profile` runs lockstep alone and lists its functions by their own time.
"""

import argparse
import contextlib
import cProfile
import importlib.util
import json
import math
import os
import pstats
import re
import statistics
import tempfile
import time
from pathlib import Path

import others
import torch
import torch.distributed as dist
from contest import machine
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep.config.schema import Config
from lockstep.optim.groups import groups
from lockstep.training.start.defaults import default_warmup

README = Path(__file__).resolve().parent.parent / "README.md"
BATCH, RATE, LOG_FREQ, CLIP = 64, 0.01, 10, 1.0
LOOPS = ("tensors", "loader")
OWN = {"lockstep": {}, "without saves": {"ckpt_freq": 0}}
OTHERS = ("accelerate", "hf", "lightning")


def program(folder):
    """README's program as a module."""
    text = README.read_text(encoding="utf-8")
    code = re.search(r"^## A whole program$.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE).group(1)
    path = Path(folder) / "classes.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("classes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Turns:
    """What a contestant calls after each step: it reports a turn when its steps are done, and waits for the next."""

    def __init__(self, pipe, began):
        self.pipe, self.began, self.left, self.first = pipe, began, 1, True

    def ready(self, model):
        """For the contestants of bench/others.py."""

    def step(self):
        self.left -= 1
        if self.left:
            return
        processor = time.process_time()
        if self.first:
            self.first = False
            self.pipe.send({"first": time.time() - self.began, "processor": processor})
        else:
            self.pipe.send((processor - self.processor, time.perf_counter() - self.clock))
        self.left = self.pipe.recv()
        if not self.left:
            os._exit(0)  # without a teardown that a benchmark need not wait for
        self.processor, self.clock = time.process_time(), time.perf_counter()


class Setting(others.Setting):
    """The program's training as one rank sees it, with what the contestants of bench/others.py ask for."""

    def __init__(self, rank, world, steps, folder):
        self.task = program(folder).Classes()
        self.task.clip, self.task.items_per_sample = CLIP, 1
        self.rank, self.world, self.steps = rank, world, steps
        self.size, self.micro, self.accumulation = BATCH, BATCH // world, 1
        self.warmup = default_warmup(steps)
        self.data = self.task.dataset("train")
        self.table = argparse.Namespace(x=self.data.tensors[0], y=self.data.tensors[1])
        torch.manual_seed(0)
        self.model = self.task.model()

    def factor(self, step):
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))

    def optimizer(self):
        return torch.optim.AdamW(groups(self.model, 0.1), lr=RATE, betas=(0.9, 0.95), fused=True)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)

    def loss(self, model, batch):
        return self.task.loss(model, batch)

    def loader(self, whole=False):
        return DataLoader(self.data, batch_sampler=Endless(self, whole))


class Endless(torch.utils.data.Sampler):
    """A shuffle in each epoch, without an end: some frameworks run through a loader once."""

    def __init__(self, setting, whole):
        self.setting, self.whole = setting, whole
        self.batch_size, self.drop_last = setting.micro, True  # which some frameworks ask for

    def __len__(self):
        return 1_000_000

    def __iter__(self):
        generator, s = torch.Generator().manual_seed(0), self.setting
        while True:
            order = torch.randperm(len(s.data), generator=generator).tolist()
            for first in range(0, len(order) - s.size + 1, s.size):
                for rank in range(s.world) if self.whole else [s.rank]:
                    yield order[first + rank * s.micro : first + (rank + 1) * s.micro]


def sliced(s):
    """Batches of tensors that are indexed by slices of a `randperm`."""
    generator = torch.Generator().manual_seed(0)
    x, y = s.data.tensors
    while True:
        order = torch.randperm(len(x), generator=generator)
        for first in range(s.rank * s.micro, len(order) - s.size + 1 + s.rank * s.micro, s.size):
            mine = order[first : first + s.micro]
            yield x[mine], y[mine]


def loaded(s):
    """Batches of a DataLoader, as its documentation shows it."""
    sampler = DistributedSampler(s.data, s.world, s.rank, drop_last=True) if s.world > 1 else None
    loader = DataLoader(s.data, batch_size=s.micro, sampler=sampler, shuffle=sampler is None, drop_last=True)
    epoch = 0
    while True:
        if sampler:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def by_hand(s, turns, batches):
    model = DistributedDataParallel(s.model, gradient_as_bucket_view=True) if s.world > 1 else s.model
    optimizer, parameters = s.optimizer(), list(s.model.parameters())
    model.train()
    for step, batch in enumerate(batches):
        loss = s.task.loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * s.factor(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_FREQ == 0:
            print(step + 1, loss.item(), norm.item())
        turns.step()


def itself(s, turns, flags, folder):
    """README's program; its own `train` has no body, which is where the steps are counted here."""
    given = {"experiment_name": "classes", "save_dir": folder, "max_steps": s.steps, "batch_size": BATCH, "lr": RATE}
    config = Config(**given | flags)
    task = program(folder).Classes()
    for _ in lockstep.Run(config, task):
        turns.step()


def contestant(pipe, began, who, flags, steps, rank, world, port, folder, log):
    """The life of one process."""
    with open(log, "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        os.environ |= {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {} if world == 1 else {key: str(value) for key, value in places.items()}
        if who == "lightning" and world > 1:
            os.environ |= {"TORCHELASTIC_RUN_ID": "bench", "GROUP_RANK": "0"}  # "these are torchrun's processes"
        torch.set_num_threads(1)
        turns, s = Turns(pipe, began), Setting(rank, world, steps, folder)
        try:
            if who in (*LOOPS, "tensors again"):
                if world > 1:
                    dist.init_process_group("gloo")
                by_hand(s, turns, loaded(s) if who == "loader" else sliced(s))
            elif who in OWN:
                itself(s, turns, flags | OWN[who], folder)
            else:
                others.CONTESTANTS[who](s, turns)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise


def compete(wanted, world, rounds, steps, flags, folder):
    """All contestants by turns: name -> the measured values."""
    running = []
    try:
        for who in wanted:  # one after the other, so that the start of one does not slow another's
            try:
                running.append(others.Group(who, flags, (rounds + 2) * steps, world, folder, target=contestant))
            except RuntimeError as problem:
                print(f"  left out: {problem}")
        for turn in range(rounds + 1):
            for place in range(len(running)):
                group = running[(place + turn) % len(running)]
                took = group.turn(steps)
                if turn:  # the first turn is not measured
                    group.times.append([1e6 * seconds / steps for seconds in took])
        return {group.who: measured(group, running) for group in running}
    finally:
        for group in running:
            group.end()


def measured(group, running):
    found = {"start_clock": group.began["first"], "start_processor": group.began["processor"]}
    for index, clock in enumerate(("processor", "clock")):
        own = [times[index] for times in group.times]
        found[f"{clock}_us"] = statistics.median(own)
        for base in running:
            if base.who in LOOPS:
                ratios = [mine / times[index] for mine, times in zip(own, base.times, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                found[f"{clock}/{base.who}"], found[f"{clock}/{base.who}/spread"] = middle, high - low
    return found


def show(world, found, flags):
    print(f"\n{world} process{'es' * (world > 1)}; flags {flags or 'at their defaults'}")
    columns = [f"{clock}/{base}" for clock in ("processor", "clock") for base in LOOPS if base in found]
    print(
        f"  {'contestant':<14} {'CPU us':>8} {'us':>8}",
        *(f"{name:>24}" for name in columns),
        f"{'start s (CPU s)':>18}",
    )
    for who, each in found.items():
        ratios = [f"{each[name]:.3f} ({each[f'{name}/spread']:.3f})" for name in columns]
        start = f"{each['start_clock']:.1f} ({each['start_processor']:.1f})"
        times = f"{each['processor_us']:>8.0f} {each['clock_us']:>8.0f}"
        print(f"  {who:<14} {times}", *(f"{ratio:>24}" for ratio in ratios), f"{start:>18}")
    for who, each in found.items():
        print(json.dumps({"processes": world, "contestant": who, "flags": flags, **each}))


class Profiled:
    """In place of `Turns`: a profile of the steps after the first 200."""

    def __init__(self, steps):
        self.left, self.steps, self.profile = 200, steps, cProfile.Profile()

    def step(self):
        self.left -= 1
        if self.left == 0 and self.steps:
            self.left, self.steps = self.steps, 0
            self.profile.enable()
        elif self.left == 0:
            self.profile.disable()


def profiled(steps, flags, folder):
    torch.set_num_threads(1)
    turns = Profiled(steps)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        itself(Setting(0, 1, steps + 300, folder), turns, flags, folder)
    pstats.Stats(turns.profile).sort_stats("tottime").print_stats(60)


def flag_of(text):
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name.replace("-", "_"), value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--processes", type=int, action="append")
    parser.add_argument("--others", action="store_true", help="beside the other frameworks; needs the extra `bench`")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", type=flag_of)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    flags = dict(given.flag)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-", ignore_cleanup_errors=True) as folder:
        if given.profile:
            profiled(given.rounds * given.steps, flags, folder)
            return
        print(machine())
        wanted = [*LOOPS, *OWN, "tensors again", *(OTHERS if given.others else ())]
        for world in given.processes or (1,):
            show(world, compete(wanted, world, given.rounds, given.steps, flags, folder), flags)


if __name__ == "__main__":
    main()
