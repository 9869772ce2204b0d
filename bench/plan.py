"""Planned memory beside measured: python bench/plan.py [--only TEXT] [--large]

Forty configurations of five models on a CPU: two steps of each are run, by the run's own model, engine, loss and
optimizer, and the bytes of all storages are counted. The aims: within 5 % in the worst case, 2 % in the median one, and
no configuration that takes more than was planned by more than 1 %.

--large: seconds and memory of the plan of a Llama with 70 billion parameters on 512 devices. The aims: 10 s, 2 GB.
"""

import argparse
import dataclasses
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from group import together
from held import Held
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import lockstep
from lockstep.config.schema import Config
from lockstep.diagnose.plan.devices import device_of
from lockstep.diagnose.plan.estimate import Planner
from lockstep.diagnose.plan.subject import subject_of
from lockstep.engines.registry import engine
from lockstep.files import bytes_text
from lockstep.loop import loss_of
from lockstep.run_state import RunState
from lockstep.training.start.build_engine import build_model, build_optimizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LARGE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 7,
    "vocab_size": 1000,
    "n_positions": 256,
}


class Pictures(torch.utils.data.Dataset):
    """Samples that are made when they are asked for."""

    def __len__(self):
        return 512

    def __getitem__(self, place):
        return torch.full((3, 24, 24), float(place)), place % 10


class Cnn(lockstep.Task):
    """Convolutions with BatchNorm."""

    def model(self):
        layers = []
        for wide, out in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 10))

    def dataset(self, split):
        return Pictures()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, values):
        return values + F.dropout(self.outer(F.gelu(self.inner(self.norm(values)))), 0.1, self.training)


class Deep(nn.Module):
    def __init__(self, layers, width=3 * 24 * 24):
        super().__init__()
        self.first, self.blocks = nn.Linear(width, 96), nn.ModuleList(Residual(96) for _ in range(layers))
        self.head = nn.Linear(96, 10)

    def forward(self, values):
        values = self.first(values.flatten(1))
        for block in self.blocks:
            values = block(values)
        return self.head(values)


class Stack(Cnn):
    """Equal blocks, whose depth is drawn from shallow ones."""

    def model(self):
        return Deep(10)

    def blocks(self, model):
        return list(model.blocks)


PART = 4  # configurations in one start of processes
_MOMENT = 0.003  # seconds
TASKS = {"cnn": Cnn, "stack": Stack}


def cases(folder):
    """(name, model, ranks, fields) of each configuration."""
    named = {"gpt": "builtin:nano", "llama": str(folder / "llama"), "gpt2": str(folder / "gpt2")}
    ways = [
        ("plain", {}),
        ("accumulated", {"micro_batch_size": 4}),
        ("bf16", {"precision": "bf16"}),
        ("again", {"activation_checkpointing": "full", "micro_batch_size": 8}),
        ("exact", {"exact": True, "micro_batch_size": 4}),
        ("selective bf16-true", {"activation_checkpointing": "selective", "precision": "bf16-true"}),
        ("sgd", {"optim": {"name": "sgd"}, "micro_batch_size": 8}),
        ("average", {"optim": {"ema": 0.999}}),
    ]
    engines = ("single", "ddp", "zero", "fsdp")
    for place, model in enumerate(("gpt", "llama", "gpt2", "cnn", "stack")):
        for number, (way, fields) in enumerate(ways):
            name = engines[(number + place) % 4]
            if model == "cnn" and "activation_checkpointing" in fields:  # it has no blocks
                way, fields = f"{way} (no blocks)", {**fields, "activation_checkpointing": "none"}
            if model in TASKS and fields.get("precision") == "bf16-true":  # their batches are float32
                way, fields = way.replace("bf16-true", "bf16"), {**fields, "precision": "bf16"}
            own = {"engine": name, "batch_size": 32, "micro_batch_size": 16, "precision": "float32"} | fields
            own |= {"model_name": named[model], "seq_len": 64} if model in named else {}
            yield f"{model} {way}", model, 1 if name == "single" else 2, own


class Settled(Held):
    """Counts once gloo's threads have let go of what they sent. They do so a moment after an exchange has ended, sooner
    or later from run to run: of one in twelve the output of a block's gather lay beside the next block's."""

    @property
    def now(self):
        found = super().now
        if found > self.peak:
            time.sleep(_MOMENT)
            found = super().now
        return found


def planner_of(model, ranks, fields):
    config, task = Config(**fields), TASKS[model]() if model in TASKS else None
    return Planner(config, subject_of(config, task, print), ranks, device_of("cpu"))


def measured(world, wanted):
    """{name: the most bytes of all storages on any rank, from the model's begin through two steps}."""
    found = {}
    for name, model, ranks, fields in wanted:
        planner = planner_of(model, ranks, fields)
        config, subject = planner.config, planner.subject
        gc.collect()
        with Settled() as held:
            task = subject.at(0)
            trained = build_model(config, task, world, RunState(), lambda line: None)
            made = engine(
                config.engine,
                trained,
                lambda each, config=config, task=task: build_optimizer(config, task, each),
                world,
                clip=config.optim.clip,
                exact_micro_batches=config.micro_batches if config.exact else 0,
                blocks=task.blocks(trained) or (),
                options=config.engine_options,
                ema=config.optim.ema,
                say=lambda line: None,
            )
            loss_sum, slots = loss_of(task), -(-config.micro_batches // ranks)
            for _ in range(2):
                batches = [loaded(held, subject.batch(config.micro_size)) for _ in range(slots)]
                for place, batch in enumerate(batches):
                    with made.accumulate(last=place == slots - 1):
                        made.backward(loss_sum(made.model, Loaded(batch, config.micro_size)), 1.0)
                made.step(1.0)
                del batch, batches
        found[name] = held.peak
        del made, trained, task
        gc.collect()
    every = world.gather(found)
    return {name: max(each[name] for each in every) for name in found}


@dataclasses.dataclass
class Loaded:
    data: object
    items: int


def loaded(held, batch):
    for leaf in tree_leaves(batch):
        held.take(leaf)
    return batch


def shown(part, seen):
    """Prints each of these configurations beside what was measured; the errors as shares of that."""
    rows = []
    for name, model, ranks, fields in part:
        planner = planner_of(model, ranks, fields)
        found = planner.estimate(planner.config)
        rows.append(found.peak / seen[name] - 1)
        sizes = f"{bytes_text(found.peak):>10} {bytes_text(seen[name]):>10}"
        print(f"{name:<36} {fields['engine']:<8} {sizes} {100 * rows[-1]:+6.2f} %  {found.phase}", flush=True)
    return rows


def compare(only):
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        wanted = [case for case in cases(Path(folder)) if only in case[0] or only == case[3]["engine"]]
        rows = []
        print(f"{'configuration':<36} {'engine':<8} {'planned':>10} {'measured':>10}  error", flush=True)
        for ranks in (1, 2):
            alike = [case for case in wanted if case[2] == ranks]
            for part in (alike[start : start + PART] for start in range(0, len(alike), PART)):
                rows += shown(part, together(ranks, measured, part))
        sizes = [abs(error) for error in rows]
        worst, median, under = max(sizes), statistics.median(sizes), -min(0.0, *rows)
        met = worst <= 0.05 and median <= 0.02 and under <= 0.01
        print(f"{len(rows)} configurations: worst {worst:.2%}, median {median:.2%}, at most {under:.2%} too little")
        print(
            json.dumps(
                {"bench": "plan", "cases": len(rows), "worst": worst, "median": median, "under": under, "met": met}
            )
        )


def large():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE))
        for more in (["--fast"], []):
            command = [sys.executable, "-m", "lockstep", "plan", "--model-name", folder, "--seq-len", "4096"]
            command += ["--world-sizes", "512", "--device", "h100-80", "--engine", "fsdp", "--precision", "bf16-true"]
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - began
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            peak = spent.ru_maxrss * 1024
            busy = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime  # what a quiet machine takes
            print(done.stdout, done.stderr, sep="")
            print(
                f"{' '.join(['lockstep plan', *more])}: {seconds:.1f} s, {busy:.1f} s of a core, "
                f"{bytes_text(peak)} resident"
            )
            print(
                json.dumps({"bench": "plan 70B", "fast": bool(more), "seconds": seconds, "busy": busy, "bytes": peak})
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose name has this text")
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.large:
        large()
    else:
        compare(given.only)


if __name__ == "__main__":
    main()
