"""Measure what a rank of a large run costs: host time, requests and memory, by the number of ranks.

    python bench/scale.py [--ranks 8,64,256,1024] [--tensors 2000] [--only verdict,recovery]
    python bench/scale.py --only gathers             the gathers of a real start, resume and end on 2 ranks, by caller
    PYTHONPATH=BASE/src python bench/scale.py        the same of another version: before and after

One process plays one rank among N: a collective is replaced by one that fills the buffers of all N at once, so the
figures are this rank's own work, in CPU seconds, without the network. The verdict and the recovery run N ranks, threads
of 32 processes, on a real store. The checkpoint is one of fsdp, of N ranks and T tensors, on /dev/shm. The last column
is the exponent of growth between the two largest N: 1 is linear, 0 constant.
"""

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.checkpoint import check, layout, write
from lockstep.checkpoint.files import write_file
from lockstep.checkpoint.format import MANIFEST, STATE, Manifest, dump
from lockstep.data.batches import Batches, Loading, StepPlan, slots
from lockstep.data.sampler import Sequential, Shuffled
from lockstep.distributed.balance import equal_shares
from lockstep.distributed.exchange import BusySeconds, StepExchange
from lockstep.distributed.failures import ProcessFailure
from lockstep.distributed.launcher import listen
from lockstep.distributed.membership import LeaveReport, Member, key_prefix
from lockstep.distributed.progress import COMPUTING, Progress
from lockstep.distributed.world import World
from lockstep.engines.exact import Tree
from lockstep.guards import desync, watchdog
from lockstep.guards.watchdog import Inquiry
from lockstep.launch.losses import Membership
from lockstep.task import Task
from lockstep.training.evaluation import evaluate, one_step_plan

LOST = 1
_PROCESSES = 32  # that play the ranks of a verdict: threads of one process would wait for its interpreter


def cpu(call, seconds=0.4):
    """CPU milliseconds of a call, over as many calls as take so long."""
    call()
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
        call()
        count += 1
    return spent / count * 1e3


@contextlib.contextmanager
def alike():
    """All ranks send what this one does, at once."""

    def all_gather(buffers, own, group=None, async_op=False):
        torch._foreach_copy_(buffers, [own] * len(buffers))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    before, dist.all_gather = dist.all_gather, all_gather
    fresh, World.new_group = World.new_group, lambda self: object()
    try:
        yield
    finally:
        dist.all_gather, World.new_group = before, fresh


def collectives(size):
    """Work of a rank in the agreements of a start, a step, a record, a desync check and a save."""
    world = World(rank=0, size=size, control=object())
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(20)])
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    files = {f"rank-{size:05d}.safetensors": {"size": 123456789, "xxh3_64": "0123456789abcdef"}}
    keys = {f"key{k}": "0123456789abcdef" for k in range(7)}
    step = [0]
    exchange = StepExchange(world, lambda step: 123, None, 10**9, BusySeconds)

    def one_exchange():
        count = exchange.count
        while exchange.count == count:  # up to 16 steps, all in one exchange
            exchange.global_items(step[0])
            exchange.send(step[0])
            exchange.receive()
            step[0] += 1

    yield "gather of a small value, ms", cpu(lambda: world.gather({"a": 1, "b": "x" * 16}))
    yield "check_same of 7 keys, ms", cpu(lambda: world.check_same("program", keys))
    yield "gather of a save's files, ms", cpu(lambda: world.gather(files))
    yield "desync check, ms", cpu(lambda: desync.check(state, world, 0))
    yield "step exchange of 16 ragged steps, ms", cpu(one_exchange)
    yield "totals of a record, ms", cpu(lambda: exchange.totals([1.0] * 6))


class Squares(Task):
    """A linear model, one sample a micro-batch."""

    def model(self):
        return torch.nn.Linear(1, 1)

    def dataset(self, split):
        return None

    def loss(self, model, batch):
        return model(batch).square().sum()

    def metrics(self, model, batch):
        return {name: (float(batch.sum()), len(batch)) for name in ("accuracy", "top5")}


def evaluation(size):
    """An evaluation of 4 micro-batches a rank: their forwards, and the agreement on loss and two metrics."""
    world, data = World(rank=0, size=size, control=object()), torch.ones(4 * size, 1)
    task, holder = Squares(), SimpleNamespace(model=torch.nn.Linear(1, 1))
    batches = Batches(
        task, data, Sequential(len(data)), one_step_plan(len(data), 1), world, seed=0, loading=Loading(0, 1)
    )
    with alike():
        yield "evaluation of 4 samples a rank, ms", cpu(lambda: evaluate(holder, task, batches, world, step=0, seed=0))


def exact(size):
    """A rank's own work in the sum of a step with --exact, of 100 small tensors, and its messages."""

    def all_to_all(received, sent, into=None, out=None, group=None):
        messages[0] += 1
        received.zero_()

    before, dist.all_to_all_single = dist.all_to_all_single, all_to_all
    world = World(rank=0, size=size, control=object())
    try:
        for name, count in (("M = N", size), ("M = 3 N", 3 * size)):
            model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(50)])
            parameters, messages = list(model.parameters()), [0]
            began = time.process_time()
            tree = Tree(parameters, count, world)
            yield f"exact, {name}: the division, once, ms", (time.process_time() - began) * 1e3
            gradients = [torch.ones_like(p) for p in parameters]

            def step(tree=tree, parameters=parameters, gradients=gradients):
                for _ in range(tree._subtrees.slots):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient.clone()
                    tree.push()
                tree.finish()

            def push(tree=tree, parameters=parameters, gradients=gradients):
                for _ in range(tree._subtrees.slots):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient.clone()
                    tree.push()
                tree._count = 0
                list(tree._sums.take())

            with alike():
                step()
                messages[0] = 0
                step()
                yield f"exact, {name}: all-to-alls of a step", messages[0]
                yield f"exact, {name}: a step's exchange, ms", cpu(step) - cpu(push)
    finally:
        dist.all_to_all_single = before


def recovery(size):
    """A lost rank among N on a real store: the launcher's polls, and how long the others wait for their new ranks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = listen("127.0.0.1", 0)  # as launch/nodes.py
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    membership, names = Membership(store), [str(rank) for rank in range(size)]
    membership.begin("bench", names)
    context = multiprocessing.get_context("fork")
    gate, queue = context.Barrier(min(size, _PROCESSES) + 1), context.Queue()
    args = [(range(first, size, _PROCESSES), gate, queue, port) for first in range(min(size, _PROCESSES))]
    processes = [context.Process(target=rejoin, args=each) for each in args]
    for process in processes:
        process.start()
    gate.wait()  # all have reported that they are ready
    yield "recovery: descriptors of the launcher", len(os.listdir("/proc/self/fd"))
    count, began, spent = 20, time.monotonic(), time.process_time()
    for _ in range(count):
        membership.update(set(names), {})
    yield "recovery: the launcher's poll of a run that has lost nobody, ms", (time.monotonic() - began) / count * 1e3
    living, failure = set(names) - {str(LOST)}, ProcessFailure(LOST, 1, "killed", when=time.time())
    gate.wait()  # all leave their groups now
    began, spent = time.monotonic(), time.process_time()
    while membership.number == 0:
        assert not membership.update(living, {str(LOST): failure})
        time.sleep(0.05)  # as launch/agent.py
    yield "recovery: wall s until the launcher has decided", time.monotonic() - began
    seconds = [queue.get() for _ in range(size - 1)]
    for process in processes:
        process.join()
    yield "recovery: wall s of the slowest rank", max(seconds)
    yield "recovery: CPU s of the launcher, with its store", time.process_time() - spent
    text = store.get(f"{key_prefix('bench')}/members/1")
    yield "recovery: kB that each rank reads", len(text) / 1e3


def rejoin(ranks, gate, queue, port):
    """Play these members, a thread each."""
    own = threading.Barrier(len(ranks), action=gate.wait)

    def member(rank):
        me = Member(str(rank), 0, key_prefix("bench"), ("127.0.0.1", port))
        me.report_ready()
        own.wait()
        own.wait()
        if rank == LOST:
            return
        began = time.monotonic()
        me.regroup(LeaveReport(7, -1, "0123456789abcdef", True, 600.0), 60.0)
        queue.put(time.monotonic() - began)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gathers(size):
    """Exchanges of a real start, resume and end of `lockstep train` on two ranks, counted at World."""
    if size > 8:
        return
    with tempfile.TemporaryDirectory() as folder:
        for what, steps in (("new run", 2), ("resume", 4)):
            flags = ["--save-dir", folder, "--experiment-name", "r", "--device", "cpu", "--max-steps", str(steps)]
            flags += ["--extend-to", "4"] if what == "resume" else []
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "--count"]
            result = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
            line = next(line for line in result.stdout.splitlines() if line.startswith("{"))
            for part, callers in json.loads(line).items():
                for caller in callers:
                    print(f"  {what}, {part}: {caller}", file=sys.stderr, flush=True)
                yield f"gathers of a {what}: {part}", len(callers)


def count_gathers(flags):
    """Train, and print the callers of each exchange of this rank as JSON."""
    from lockstep import cli
    from lockstep.training import trainer
    from lockstep.training.step.components import StepComponents

    found, part = {"start": [], "steps and saves": [], "end": []}, ["start"]
    name = "_gather" if hasattr(World, "_gather") else "gather"
    gather, iterate, finish = getattr(World, name), StepComponents.iterate, trainer._finish

    def counted(world, value):
        frames = [frame for frame in traceback.extract_stack() if "/lockstep/" in frame.filename]
        frames = [frame for frame in frames if not frame.filename.endswith("distributed/world.py")]
        places = [f"{frame.filename.partition('/lockstep/')[2]}:{frame.name}" for frame in frames[-2:]]
        found[part[0]].append(" < ".join(reversed(places)))
        return gather(world, value)

    def begin(*args):
        part[0] = "steps and saves"
        return iterate(*args)

    def end(*args):
        part[0] = "end"
        return finish(*args)

    setattr(World, name, counted)
    StepComponents.iterate, trainer._finish, sys.argv = begin, end, ["lockstep", "train", *flags]
    with contextlib.suppress(SystemExit):
        cli.main()
    if os.environ["RANK"] == "0":
        print(f"\n{json.dumps(found)}", flush=True)


def order(size):
    """Sample indices of a rank in a step of a million samples, 1024 micro-batches."""
    data, plan = Shuffled(10**9, 0), StepPlan(10**6, -(-(10**6) // 1024), 10**9)
    shares = equal_shares(plan.micro_batches, size)

    def samples():
        for slot in slots(shares, 1, plan.micro_batches):
            data.at(*plan.positions(7, slot.micro))

    yield "order of a batch of 10^6, ms", cpu(samples)


def verdict(size):
    """N ranks as threads on a real store, rank 1 silent: all ask at once, as after a lost rank."""
    script = (
        "import sys, time; from torch._C._distributed_c10d import TCPStore\n"
        "s = TCPStore('127.0.0.1', int(sys.argv[1]), None, True, wait_for_workers=False); print('up', flush=True)\n"
        "sys.stdin.read(); print(time.process_time(), flush=True)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    store = subprocess.Popen([sys.executable, "-c", script, str(port)], **pipes)
    store.stdout.readline()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    watchdog.dump = lambda *_: None  # the stacks of all threads, once for each
    watchdog.where_main = lambda: ("its exchange with the others", True)
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    context = multiprocessing.get_context("fork")
    gate, queue = context.Barrier(min(size, _PROCESSES)), context.Queue()
    args = [(size, range(first, size, _PROCESSES), gate, queue, folder) for first in range(min(size, _PROCESSES))]
    processes = [context.Process(target=ask, args=each) for each in args]
    for process in processes:
        process.start()
    results = [queue.get() for _ in range(size - 1)]
    for process in processes:
        process.join()
    store.stdin.close()
    spent = float(store.stdout.read())
    store.wait()
    shutil.rmtree(folder)
    yield "verdict: ranks with a false one", sum(not right for right, _ in results)
    yield "verdict, wall s of the slowest rank", max(seconds for _, seconds in results)
    yield "verdict, CPU s of the store's process", spent


def ask(size, ranks, gate, queue, folder):
    """Play these ranks, a thread each."""
    own = threading.Barrier(len(ranks), action=gate.wait)

    def rank(number):
        world = World(rank=number, size=size, control=object(), timeout=60.0)
        world._scope = "x"
        progress = Progress()
        progress.at(7, COMPUTING)
        inquiry = Inquiry(world, progress, folder)
        inquiry.tell(inquiry.heartbeats)
        own.wait()
        if number == LOST:
            return
        began = time.monotonic()
        line = inquiry.verdict("an exchange failed")
        right = line.startswith("rank 1 did not arrive") and line.count("did not") == 1
        if not right:
            print(f"  rank {number}: {line}", file=sys.stderr, flush=True)
        queue.put((right, time.monotonic() - began))

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def checkpoint(size, tensors):
    """A checkpoint of fsdp: index written and read, and what a rank reads before it fills its part."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm")) / "step-00000005"
    folder.mkdir()
    os.fsync = lambda handle: None
    new = "index" in layout.Share.__dataclass_fields__
    shape, local = (size, 4), torch.zeros(1, 4)
    names = [f"model/layers.{t}.attention.weight" for t in range(tensors)]
    files = {}
    for rank in range(size):
        pieces = [layout.TensorPiece(name, shape, (rank, 0), local) for name in names]
        share = layout.Share(pieces, {}, {}, {}) if new else layout.Share(pieces, {}, {})
        files |= write._write_share(folder, share, rank)
    files[STATE] = write_file(folder / STATE, [dump({})])
    began = time.process_time()
    if new:
        from lockstep.checkpoint.format import INDEX
        from lockstep.checkpoint.grid import grid_of

        grid = grid_of(shape, torch.arange(size), {0: 0})
        share = layout.Share([], {}, {}, dict.fromkeys(names, ("float32", grid)))
        files[INDEX] = write_file(folder / INDEX, [write._index(share, {}, [tensors] * size)])
        manifest = Manifest(5, size, "fsdp", 1, files)
    else:
        manifest = Manifest(5, size, "fsdp", 1, files, format=1) if hasattr(Manifest, "format") else None
    (folder / MANIFEST).write_bytes(manifest.dump())
    yield "checkpoint: index and manifest written by rank 0, s", time.process_time() - began
    yield "checkpoint: files", len(files) + 1
    yield "checkpoint: MB of JSON", sum(path.stat().st_size for path in folder.glob("*.json")) / 1e6
    reader = subprocess.run(
        [sys.executable, __file__, "--read", str(folder), str(size)], capture_output=True, text=True, check=True
    )
    yield from json.loads(reader.stdout).items()
    shutil.rmtree(folder.parent)


def read(folder, size):
    """One rank's part of a load whose checksums were verified, in a process of its own."""
    from lockstep.checkpoint.read import _check_files

    with (folder / "rank-00000.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = [name for name in header if name != "__metadata__"]
    wanted = {name: torch.zeros(size, 4) for name in names}
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    contents = _check_files(folder, wanted, World(rank=1, size=size, control=object()), True)
    within = getattr(check.StoredTensor, "within", None)
    for name in names:
        box = layout.TensorBox((1, 0), (1, 4))
        entries = within(contents[name], box) if within else contents[name].entries
        assert sum(entry.offsets[0] == 1 for entry in entries) == 1
    seconds = time.process_time() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
    print(json.dumps({"checkpoint: index read by each rank, s": seconds, "checkpoint: MiB of it": memory}))


def descriptors(size):
    """Descriptors of a rank with four gloo groups, ranks forked, after the collectives of a run."""
    if size > 64:  # more processes than this machine can run
        return
    found = subprocess.run(
        [sys.executable, __file__, "--groups", str(size)], capture_output=True, text=True, check=True
    )
    yield "descriptors of a rank with 4 groups", float(found.stdout.split()[-1])


def groups(size):
    """Fork ranks, make what a run makes, and print the most descriptors of a rank."""
    place = tempfile.mktemp(dir="/dev/shm")
    pipes = []
    with contextlib.suppress(ImportError):
        from lockstep.distributed.descriptors import CONNECT_ON_DEMAND

        os.environ.setdefault(CONNECT_ON_DEMAND, "1")
    for rank in range(size):
        here, there = os.pipe()
        if os.fork() == 0:
            for pipe in (here, *pipes):
                os.close(pipe)
            store = dist.FileStore(place, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            made = [None, *(dist.new_group(backend="gloo") for _ in range(3))]
            own = torch.zeros(22)
            for group in made:
                dist.all_gather([torch.empty_like(own) for _ in range(size)], own, group=group)
                dist.all_reduce(torch.zeros(1000), group=group)
                dist.broadcast(own, 0, group=group)
                dist.barrier(group=group)
            os.write(there, str(len(os.listdir("/proc/self/fd"))).encode())
            dist.barrier()
            os._exit(0)
        os.close(there)
        pipes.append(here)
    print(max(int(os.read(pipe, 20)) for pipe in pipes))
    for _ in pipes:
        os.wait()
    os.unlink(place)


def regroups(size):
    """Descriptors of a rank of gloo before and after it lost a peer, twice, ranks forked."""
    if size > 64:
        return
    found = subprocess.run(
        [sys.executable, __file__, "--regroup", str(size)], capture_output=True, text=True, check=True
    )
    for name, value in json.loads(found.stdout.splitlines()[-1]).items():
        yield f"descriptors of a rank {name}", value


def lose_twice(size):
    """Fork ranks, end the last one twice, regroup the others, and print the most descriptors of a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    pipes = []
    for rank in range(size):
        here, there = os.pipe()
        if os.fork() == 0:
            for pipe in (here, *pipes):
                os.close(pipe)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            world = World.join("cpu", 60.0)
            for generation in range(3):
                extra = [world.new_group(), world.new_group()]  # of the step exchange and the saver
                for group in (None, *extra):
                    dist.all_reduce(torch.zeros(1000), group=group)
                world.gather("x" * 300)
                os.write(there, f"{len(os.listdir('/proc/self/fd'))} ".encode())
                world.barrier()
                if generation == 2:
                    break
                group = None
                world.drop_groups(extra)
                if rank == world.size - 1:
                    time.sleep(20.0)  # its store's connection stays; it takes no part
                    os._exit(0)
                time.sleep(1.0)  # the threads that free the groups
                world = world.regroup(rank, world.size - 1, generation + 1, tries=5)
            os._exit(0)
        os.close(there)
        pipes.append(here)
    rows = []
    for pipe in pipes:
        with os.fdopen(pipe) as file:
            rows.append([int(value) for value in file.read().split()])
    for _ in pipes:
        os.wait()
    names = ("of a run", "after a lost rank", "after two")
    print(json.dumps({name: max(row[k] for row in rows if len(row) > k) for k, name in enumerate(names)}))


def main():
    if sys.argv[1:2] == ["--count"]:
        count_gathers(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--tensors", type=int, default=2000)
    parts = "collectives,evaluation,exact,order,verdict,recovery,regroups,descriptors,checkpoint,gathers"
    parser.add_argument("--only", default=parts)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--regroup", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.read:
        read(Path(options.read[0]), int(options.read[1]))
        return
    if options.regroup:
        lose_twice(options.regroup)
        return
    if options.groups:
        groups(options.groups)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = [int(size) for size in options.ranks.split(",")]
    rows = {}
    for size in sizes:
        for part in options.only.split(","):
            call = globals()[part]
            with alike() if part == "collectives" else contextlib.nullcontext():
                measured = call(size, options.tensors) if part == "checkpoint" else call(size)
                for name, value in measured:
                    rows.setdefault(name, {})[size] = value
                    print(f"  {size}: {name}: {value:.4g}", file=sys.stderr, flush=True)
    print(f"| {'what':<52} | {' | '.join(f'{size:>7}' for size in sizes)} | growth |")
    for name, values in rows.items():
        cells = [f"{values[size]:>7.3g}" if size in values else " " * 7 for size in sizes]
        last = [size for size in sizes if size in values][-2:]
        both = len(last) == 2 and min(values[size] for size in last) > 0
        growth = math.log(values[last[1]] / values[last[0]]) / math.log(last[1] / last[0]) if both else 0.0
        print(f"| {name:<52} | {' | '.join(cells)} | N^{growth:<4.1f} |")


if __name__ == "__main__":
    main()
