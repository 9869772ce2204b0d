"""Measure what uploads cost the training loop: the time of steps during an upload against that of the others.

    python bench/uploads.py

The store takes a bounded number of bytes a second, as a network does, into memory: it costs no disk and no core of its
own, so what is left is the thread in the training's process: its share of the interpreter and of the memory's
bandwidth. Steps during a save, which has a thread of its own, are left out. Both kinds of steps come from the same run,
so that a busy machine slows both.
"""

import argparse
import os
import shutil
import statistics
import time

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

import lockstep

_BLOCK = 1 << 20  # bytes


class BoundedStore(LocalFileSystem):
    """Files of this machine, written at `rate` bytes a second at most."""

    protocol = "bounded"
    rate = 100e6

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bounded://"))

    def put_file(self, lpath, rpath, callback=None, **_):
        began, sent = time.perf_counter(), 0
        self.makedirs(self._parent(rpath), exist_ok=True)
        with open(lpath, "rb") as source, open(self._strip_protocol(rpath), "wb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
                sent += len(block)
                time.sleep(max(0.0, began + sent / self.rate - time.perf_counter()))


fsspec.register_implementation("bounded", BoundedStore)


class Layers(lockstep.Task):
    """Twelve layers of 1024: 13 million parameters, checkpoints of 151 MB with AdamW's states."""

    def model(self):
        layers = [torch.nn.Linear(1024, 1024) for _ in range(12)]
        return torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.GELU())))

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(256, 1024)) if split == "train" else None

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def measure(options, number):
    """Train, and return the seconds of the steps during uploads and of those without one."""
    config = lockstep.Config(
        experiment_name=f"uploads-{os.getpid()}-{number}",
        save_dir=options.url,
        checkpoint={"local_dir": options.local},
        batch_size=options.batch_size,
        max_steps=options.steps,
        ckpt_freq=options.save_every,
        eval_freq=0,
        log_freq=50,
        report=False,
    )
    run = lockstep.Run(config, Layers())
    during, without = [], []
    with run:
        status = run._status
        begin, before = time.perf_counter(), None
        for step in run:
            end = time.perf_counter()
            uploader, saver = status.outputs.uploader, status.built.saver
            state = (
                uploader.sending is not None,
                saver is not None and bool(saver._thread and saver._thread.is_alive()),
            )
            if step.global_step > 10 and state == before and not state[1]:
                (during if state[0] else without).append(end - begin)
            begin, before = time.perf_counter(), state
    return during, without


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="bounded:///dev/shm/lockstep-uploads")
    parser.add_argument("--megabytes-per-second", type=float, default=100.0)
    parser.add_argument("--local", default="/dev/shm/lockstep-uploads-local")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    BoundedStore.rate = options.megabytes_per_second * 1e6
    ratios = []
    for number in range(options.repeats):
        during, without = measure(options, number)
        if len(during) < 5:
            print(f"only {len(during)} steps during uploads: more --steps, or a slower store")
            continue
        ratios.append(statistics.median(during) / statistics.median(without))
        print(
            f"a step: {statistics.median(without) * 1e3:.1f} ms without ({len(without)}), "
            f"{statistics.median(during) * 1e3:.1f} ms during an upload ({len(during)}): {ratios[-1]:.3f}",
            flush=True,
        )
    for path in (options.url.partition("://")[2], options.local):
        shutil.rmtree(path, ignore_errors=True)
    if ratios:
        print(f"ratio: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
