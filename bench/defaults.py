"""What the defaults reach beside other frameworks': python bench/defaults.py [--seeds 3] [--batch 32] [--only digits]

Three small tasks, all data on this machine: digits (8 x 8 pixels; scikit-learn's where it is installed, else drawn) by
a network with BatchNorm; text (which package of Python's own library 160 characters come from) by a small transformer;
and a tiny causal language model, trained on that library's code and then fine-tuned on the language reference.

Every contestant begins with the same weights and sees the training set as often (--epochs), in batches of --batch
samples; with --batch 0 in its own default: 16 here, 8 for the HF Trainer, and for Lightning, which has none, 8 too.
All else is what it has by itself: lockstep's "auto"; the HF Trainer's TrainingArguments (AdamW, 5e-5, linear to 0,
clipping at 1). Lightning has no optimizer, so it takes those of its guides: Adam at 1e-3 ("Lightning in 15 minutes"),
and, in a row of its own for the fine-tuning, AdamW at 2e-5, linear to 0 ("Finetune Transformers Models").

Quality is measured by the same few lines for all, on samples that no one trained on: accuracy, or perplexity. The ratio
is lockstep's quality over the contestant's (perplexities the other way round): 1 or more means at least as good.
Lightning and the Trainer need the extra `bench`; one that is not installed is left out, and the output says so.
"""

import argparse
import contextlib
import copy
import importlib.util
import io
import json
import math
import multiprocessing
import pydoc_data.topics
import statistics
import sysconfig
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from contest import machine
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.config.schema import Config
from lockstep.models.gpt import GPT, GPTConfig


class Classify:
    """A task for lockstep, and what the others need of it: rows of (x, y), a model, the loss of a batch.

    Attributes:
        training, held_out: (x, y), a tensor each.
        epochs: passes over the training set.
    """

    items_per_sample = 1
    measure = "accuracy"

    def model(self):
        return copy.deepcopy(self.begin)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(*self.training) if split == "train" else None

    def loss(self, model, batch):
        """The sum over the samples."""
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def count(self, batch):
        return len(batch[1])

    def mean_loss(self, model, batch):
        return self.loss(model, batch) / self.count(batch)

    @torch.no_grad()
    def quality(self, model):
        model.eval()
        x, y = self.held_out
        return float(torch.cat([model(part).argmax(-1) for part in x.split(256)]).eq(y).double().mean())


class Digits(Classify):
    epochs = 5

    def __init__(self, seed):
        x, y = _digits()
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        x, y = x[order], y[order]
        cut = len(y) // 2
        self.training, self.held_out = (x[:cut], y[:cut]), (x[cut:], y[cut:])
        torch.manual_seed(seed)
        self.begin = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        )


def _digits():
    """Pixels [n, 1, 8, 8] from 0 to 1, and labels [n]."""
    if importlib.util.find_spec("sklearn"):
        from sklearn.datasets import load_digits

        found = load_digits()
        return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(1)
    # A glyph is five rows of three bits.
    rows = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717"]
    bits = torch.tensor([[[int(c) >> k & 1 for k in (2, 1, 0)] for c in row] for row in rows], dtype=torch.float32)
    y = torch.randint(10, (1797,), generator=generator)
    x = torch.rand(1797, 1, 8, 8, generator=generator) * 0.6
    places = torch.randint(0, 4, (1797, 2), generator=generator).tolist()
    for image, label, (down, right) in zip(x, y.tolist(), places, strict=True):
        image[0, down : down + 5, right : right + 3] += 0.5 * bits[label]
    return x, y


class Text(Classify):
    """Files are kept aside whole, so that no held-out text stands beside one that was seen."""

    epochs = 10
    packages = ("asyncio", "email", "idlelib", "json", "multiprocessing", "tkinter", "unittest", "xml")

    def __init__(self, seed):
        parts = {True: ([], []), False: ([], [])}
        for label, package in enumerate(self.packages):
            files = sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))
            for place, file in enumerate(files):
                data, aside = file.read_bytes(), place % 5 == 4
                rows = [data[at : at + 160] for at in range(0, len(data) - 160, 160)][: 40 if aside else 6]
                xs, ys = parts[aside]
                xs += [list(row) for row in rows]
                ys += [label] * len(rows)
        self.held_out, self.training = ((torch.tensor(xs), torch.tensor(ys)) for xs, ys in (parts[True], parts[False]))
        torch.manual_seed(seed)
        self.begin = Encoder(len(self.packages))


class Encoder(nn.Module):
    """Bytes -> classes: an embedding, pairs of neighbours, two transformer layers, the mean."""

    def __init__(self, classes, width=32):
        super().__init__()
        self.embedding, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(40, width) * 0.02)
        self.join = nn.Conv1d(width, width, 4, stride=4)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = F.gelu(self.join(self.embedding(x).transpose(1, 2))).transpose(1, 2) + self.place
        return self.head(self.layers(x).mean(1))


class Tuned(Classify):
    """Next byte of the language reference, by a model that knows the library's code."""

    defaults, measure, epochs, length = "fine-tuning", "perplexity", 3, 96
    items_per_sample = length

    def __init__(self, seed):
        text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
        cut = len(text) * 9 // 10
        self.training, self.held_out = self._rows(text[:cut], 1200), self._rows(text[cut:], 300)
        folder = Path(sysconfig.get_path("stdlib"))
        code = self._rows(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py"))), 10**6)
        torch.manual_seed(seed)
        self.begin = GPT(GPTConfig(layers=2, heads=4, width=64, vocab_size=256, context=self.length))
        optimizer = torch.optim.AdamW(self.begin.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
        for step in range(200):
            rows = torch.randint(len(code[0]), (16,))
            self.mean_loss(self.begin, (code[0][rows], code[1][rows])).backward()
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1.05 - step / 200)
            optimizer.step()
            optimizer.zero_grad()

    def _rows(self, data, most):
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        count = min(most, (len(whole) - 1) // self.length)
        return whole[: count * self.length].view(count, -1), whole[1 : count * self.length + 1].view(count, -1)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    def count(self, batch):
        return batch[1].numel()

    @torch.no_grad()
    def quality(self, model):
        model.eval()
        parts = zip(*(tensor.split(64) for tensor in self.held_out), strict=True)
        return math.exp(sum(float(self.loss(model, part)) for part in parts) / self.held_out[1].numel())


def by_lockstep(task, batch, seed, folder):
    kept = []
    build = task.model
    task.model = lambda: kept.append(build()) or kept[-1]
    size = {"batch_size": batch} if batch else {}
    lockstep.train(Config(save_dir=folder, num_epochs=task.epochs, seed=seed, ckpt_freq=0, **size), task)
    return kept[-1]


def by_hf(task, batch, seed, folder):
    from transformers import Trainer, TrainingArguments

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = task.model()

        def forward(self, x, labels):
            return {"loss": task.mean_loss(self.inner, (x, labels))}

    rows = [{"x": x, "labels": y} for x, y in task.dataset("train")]
    size = {"per_device_train_batch_size": batch} if batch else {}
    still = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(folder, num_train_epochs=task.epochs, seed=seed, use_cpu=True, **size, **still)
    model = Held()
    Trainer(model, arguments, train_dataset=rows).train()
    return model.inner


def by_lightning(task, batch, seed, folder, tuned=False):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = task.model()

        def training_step(self, batch, index):
            return task.mean_loss(self.inner, batch)

        def configure_optimizers(self):
            if not tuned:
                return torch.optim.Adam(self.parameters(), lr=1e-3)
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-5, weight_decay=0.0)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    lightning.seed_everything(seed, verbose=False)
    loader = torch.utils.data.DataLoader(task.dataset("train"), batch_size=batch or 8, shuffle=True)
    still = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=task.epochs, logger=False, accelerator="cpu", devices=1, default_root_dir=folder, **still
    )
    module = Module()
    trainer.fit(module, loader)
    return module.inner


TASKS = {"digits": Digits, "text": Text, "fine-tuning": Tuned}
CONTESTANTS = {
    "lockstep": (by_lockstep, ()),
    "HF Trainer": (by_hf, ("transformers", "accelerate")),
    "Lightning": (by_lightning, ("lightning",)),
    "Lightning, tuning guide": (partial(by_lightning, tuned=True), ("lightning",)),
}


def qualities(who, name, batch, seeds, folder):
    """The quality of each seed's model, in a process of its own."""
    torch.set_num_threads(1)
    found = []
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for seed in range(seeds):
            task = TASKS[name](seed)
            train, _ = CONTESTANTS[who]
            found.append(task.quality(train(task, batch, seed, tempfile.mkdtemp(dir=folder))))
    return found


def compare(name, batch, seeds, folder):
    task, results = TASKS[name](0), {}
    print(f"\n{name}: {len(task.training[0])} samples, {task.epochs} epochs, batches of {batch or 'its own size'}")
    print(f"  {'':<24} {task.measure:>12} {'by seed':>28} {'ratio':>8}")
    for who, (_, needed) in CONTESTANTS.items():
        if who.endswith("guide") and name != "fine-tuning":
            continue
        if not all(importlib.util.find_spec(package) for package in needed):
            print(f"  {who:<24} left out: {' and '.join(needed)} must be installed")
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(qualities, (who, name, batch, seeds, folder))
        results[who] = quality = statistics.mean(found)
        ours = results["lockstep"]
        ratio = quality / ours if task.measure == "perplexity" else ours / quality
        shown = " ".join(f"{value:.4f}" for value in found)
        print(f"  {who:<24} {quality:>12.4f} {shown:>28} {ratio:>8.3f}{'' if ratio >= 1 else '  MISSED'}", flush=True)
        line = {"bench": "defaults", "task": name, "batch": batch, "contestant": who, "ratio": ratio}
        print(json.dumps(line | {task.measure: quality, "by_seed": found}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--batch", type=int, default=32, help="0: each one's own")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    packages = {name for _, needed in CONTESTANTS.values() for name in needed} | {"scikit-learn"}
    there = {
        name: version(name) for name in sorted(packages) if importlib.util.find_spec(name.replace("scikit-", "sk"))
    }
    print(machine() | there)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-", ignore_cleanup_errors=True) as folder:
        for name in given.only:
            compare(name, given.batch, given.seeds, folder)


if __name__ == "__main__":
    main()
