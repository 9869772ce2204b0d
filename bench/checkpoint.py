"""What a save costs the training: python bench/checkpoint.py [--width 1024] [--folder DIR] [--rounds 5]

The same state (a GPT's parameters with AdamW), the same steps, one run: steps alone, then with one save among them by
each way. "blocked" is how long the call keeps the loop; "lost" is how much longer the steps take in all, until the save
is done: what a thread takes from the following steps counts too. Medians over the rounds, ways in turn.

With --lock (Linux): how long the thread that writes keeps the interpreter's lock from a loop of tiny operations, as one
that launches kernels is. Counted is what the loop slept, which it never does by itself; when other processes had its
core does not count, so that a busy machine shows the same, but for a writer that loses its core with the lock in hand.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.engines.registry import engine


def step(made, data):
    made.backward(made.model(data).square().mean())
    made.step(1.0)


class Ways:
    """Each begins a save and returns what waits for its end."""

    def __init__(self, folder, made, world):
        self.folder, self.made, self.world, self.number = folder, made, world, 0
        self.saver = checkpoint.Saver(world)
        self.copies = {name: tensor.detach().cpu().clone() for name, tensor in made.state_dict().items()}
        self.sync = checkpoint.Saver(world, background=False)

    def _write(self, share, world):
        checkpoint.write_share(self.folder, self.number, share, {}, world, engine="bench")

    def lockstep(self):
        self.saver.begin(self.made.state_dict(), self._write)
        return self.saver.settle

    def lockstep_sync(self):
        self.sync.begin(self.made.state_dict(), self._write)
        return self.sync.settle

    def copy_alone(self):
        """What no save can be faster than that lets the steps go on: every tensor copied once into kept memory."""
        for name, tensor in self.made.state_dict().items():
            self.copies[name].copy_(tensor)
        return lambda: None

    def torch_save(self):
        path = self.folder / f"{self.number}.pt"
        with path.open("wb") as file:
            torch.save(self.made.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def dcp_async(self):
        made = dcp.async_save(self.made.state_dict(), checkpoint_id=str(self.folder / f"dcp-{self.number}"))
        return made.result


def contest(ways, name, made, data, steps):
    ways.number += 1
    began = time.perf_counter()
    for _ in range(steps):
        step(made, data)
    plain = time.perf_counter() - began
    began = time.perf_counter()
    wait = getattr(ways, name)()
    blocked = time.perf_counter() - began
    for _ in range(steps):
        step(made, data)
    wait()
    lost = time.perf_counter() - began - plain
    for path in ways.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return blocked, lost


def slept():
    """Seconds, of some beginning, in which this thread neither ran nor waited for a core."""
    with open("/proc/thread-self/schedstat") as file:
        ran, waited, _ = map(int, file.read().split())
    return time.perf_counter() - (ran + waited) / 1e9


def many(nbytes):
    """As many tensors as GPT-2 1.5B and its optimizer have, and as different in size: a few hold nearly all."""
    found = {}
    for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        for block in range(48):
            found |= {f"{part}/{block}.{name}": torch.ones(nbytes // 4 // 3 // 48 // 4) for name in "abcd"}
            found |= {f"{part}/{block}.small{number}": torch.ones(1600) for number in range(8)}
    return found


def lock(folder, rounds, nbytes):
    saver, tensors, tiny = checkpoint.Saver(World()), many(nbytes), torch.ones(4)
    size, found = sum(tensor.nbytes for tensor in tensors.values()) / 1e9, []
    for number in range(rounds + 1):

        def write(share, world, number=number):
            checkpoint.write_share(folder, number, share, {}, world, engine="bench")

        saver.begin(tensors, write)
        before, calls, began = slept(), 0, time.perf_counter()
        while saver._thread.is_alive():
            for _ in range(50):
                tiny.add_(1.0)
            calls += 50
        found.append(((slept() - before) / size, (time.perf_counter() - began) / size, calls))
        saver.settle(last=True)
        shutil.rmtree(folder / "checkpoints")
    lost, seconds, calls = (statistics.median(column) for column in zip(*found[1:], strict=True))
    print(
        f"{size:.2f} GB in {len(tensors)} tensors: the loop waits {1e3 * lost:.1f} ms for the lock a GB "
        f"(longest round {1e3 * max(each for each, _, _ in found[1:]):.1f}), {seconds:.2f} s a GB, {calls:.0f} calls"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--lock", action="store_true", help="the interpreter's lock alone")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="with --lock")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.lock:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            lock(Path(name), given.rounds, int(given.gigabytes * 1e9))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [nn.Linear(given.width, given.width) for _ in range(given.layers)]
    model = nn.Sequential(*layers).to(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(device=device)
    made = engine("single", model, lambda held: torch.optim.AdamW(held.parameters(), fused=True), world)
    data = torch.randn(64, given.width, device=device)
    step(made, data)
    size = sum(tensor.nbytes for tensor in made.state_dict().values())
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    names = ("lockstep", "lockstep_sync", "copy_alone", "torch_save", "dcp_async")
    found = {name: [] for name in names}
    try:
        ways = Ways(folder, made, world)
        for number in range(given.rounds + 1):
            for name in names:
                result = contest(ways, name, made, data, given.steps)
                if number:  # the first round makes buffers and threads
                    found[name].append(result)
    finally:
        shutil.rmtree(folder)
    print(
        f"{size / 1e6:.0f} MB on {device}, one process, one thread, {given.steps} steps after each save, fsync included"
    )
    print("| way | blocked, s | lost in all, s |\n|---|---|---|")
    for name, results in found.items():
        blocked, lost = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"| {name} | {blocked:.3f} | {lost:.3f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
