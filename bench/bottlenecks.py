"""Planted bottlenecks: is each named by `--profile`, and does its mend gain what was predicted?

python bench/bottlenecks.py                     every case, about 15 minutes on a quiet machine of two cores
python bench/bottlenecks.py --only loader       those whose names have this in them, a regular expression
python bench/bottlenecks.py --named             the verdicts alone
python bench/bottlenecks.py --json out.json     the sentences too

Each case is trained in processes of its own: traced, for the verdict; twice plain, for the time of a step; and twice
mended, with the flags that the verdict proposes, or with the planted cause taken away where it proposes words. The
measured gain is plain / mended, in wall time over the same steps, evaluations and saves included. What needs a GPU is
judged from traces written by hand, and has no measured gain.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "diagnose" / "profile")]

FIRST, LAST = 16, 45  # traced, and timed; a case may say more
NEAR = 0.2  # of the measured gain


@dataclass(frozen=True)
class Knobs:
    """What is planted in the task. Seconds, or numbers; `rank` limits the sleeps to one rank."""

    width: int = 384
    layers: int = 4
    rows: int = 1  # inputs of a sample
    sample: float = 0.0
    spins: int = 0  # in Python, for each sample
    collate: float = 0.0
    forward: float = 0.0
    uneven: int = 0  # further forwards in every other step, on one rank and then on the other
    python: int = 0  # turns of a loop in the forward
    tiny: int = 0  # small operations
    churn: int = 0  # MB that are asked for and given back
    empty: float = 0.0  # share of the rows that are padding
    loose: bool = False  # an update tensor by tensor
    sink: float = 0.0
    body: float = 0.0
    rank: int = -1


@dataclass(frozen=True)
class Case:
    name: str
    wanted: str
    planted: Knobs = Knobs()
    mended: Knobs | None = None  # where the verdict proposes words
    config: dict = field(default_factory=dict)
    ranks: int = 1
    env: dict = field(default_factory=dict)
    steps: tuple = (FIRST, LAST)


KEPT = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
SYNC = {"ckpt_freq": 2, "checkpoint.mode": "sync", "checkpoint.keep": 1}
CASES = [
    Case("slow samples, from a disk", "data", Knobs(sample=0.001)),
    Case("slow collation", "data", Knobs(collate=0.06)),
    Case("slow samples, in Python", "data", Knobs(spins=12000)),
    Case("too few loader processes", "data", Knobs(sample=0.002), config={"data.workers": 1}),
    Case("a rank that loads slowly", "data", Knobs(sample=0.002, rank=1), ranks=2),
    Case(
        "a rank that computes slowly",
        "imbalance",
        Knobs(forward=0.02, rank=1),
        ranks=2,
        config={"micro_batch_size": 4},
        steps=(100, 109),
    ),
    Case("steps of unlike length", "imbalance", Knobs(width=512, uneven=8), Knobs(width=512), ranks=2),
    Case("micro-batches of one", "micro-batches", Knobs(width=64), config={"micro_batch_size": 1}),
    Case(
        "one bucket",
        "communication",
        Knobs(width=1024),
        ranks=2,
        config={"engine_options.bucket_cap_mb": 1000.0, "batch_size": 128},
    ),
    Case(
        "a large model and a small batch",
        "communication",
        Knobs(width=1536, layers=6),
        ranks=2,
        config={"batch_size": 4},
    ),
    Case("a record each step, to a slow place", "records", Knobs(sink=0.04), config={"log_freq": 1}),
    Case("an evaluation every two steps", "evaluation", config={"eval_freq": 2}),
    Case("a checkpoint every two steps, waited for", "checkpoint", Knobs(width=1024), config=SYNC),
    Case("memory that comes and goes", "memory", Knobs(churn=200), env={"MALLOC_MMAP_THRESHOLD_": "1048576"}),
    Case("four fifths of padding", "padding", Knobs(rows=10, empty=0.8), Knobs(rows=2)),
    Case(
        "an update tensor by tensor", "update", Knobs(width=128, layers=150, loose=True), Knobs(width=128, layers=150)
    ),
    Case("Python in the forward", "host", Knobs(python=400_000), Knobs()),
    Case("many small operations", "operations", Knobs(tiny=600)),
    Case("a wait in the forward", "host", Knobs(forward=0.03), Knobs()),
    Case("a slow body of the loop", "host", Knobs(body=0.03), Knobs()),
    Case(
        "forwards computed again",
        "recomputation",
        Knobs(width=512, layers=12),
        config={"activation_checkpointing": "full"},
    ),
    Case(
        "more threads than cores",
        "threads",
        Knobs(width=512),
        ranks=2,
        config={"batch_size": 256},
        env={"OMP_NUM_THREADS": str(os.cpu_count())},
    ),
    Case("large gradients, made anew each step", "memory", Knobs(width=1024)),
    Case("healthy, one process", "compute", Knobs(width=1024), config={"batch_size": 128}, env=KEPT),
    Case("healthy, two processes", "compute", Knobs(width=512), ranks=2, config={"batch_size": 1024}),
]


def task_of(knobs, rank):
    """The planted task of this rank. Imported late: torch loads here."""
    import torch
    from torch import nn

    import lockstep

    mine = knobs.rank in (-1, rank)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            wide = knobs.width
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(wide, wide), nn.ReLU()) for _ in range(knobs.layers))
            self.head = nn.Linear(wide, 8)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            out = self.head(x)
            for _ in range(knobs.tiny):
                out = out + 0.0
            return out

    class Samples(torch.utils.data.Dataset):
        draws_random = False

        def __init__(self, count, slow):
            self.count, self.slow = count, slow
            self.row = torch.randn(knobs.rows, knobs.width, generator=torch.Generator().manual_seed(1))
            self.real = (torch.arange(knobs.rows) < round(knobs.rows * (1 - knobs.empty))).long()
            self.labels = list(torch.arange(8))

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            if self.slow and mine and knobs.sample:  # to sleep for no time takes 50 us
                time.sleep(knobs.sample)
            if self.slow and mine:
                _ = sum(range(knobs.spins))
            return {"x": self.row, "attention_mask": self.real, "y": self.labels[index % 8]}

    class Planted(lockstep.Task):
        items_per_sample = 1
        calls = 0

        def blocks(self, model):
            return list(model.blocks)

        def model(self):
            return Net()

        def dataset(self, split):
            return Samples(8192 if split == "train" else 512, split == "train")

        def collate(self, samples):
            if knobs.collate and len(samples) > 1:
                time.sleep(knobs.collate)
            first, count = (
                samples[0],
                len(samples),
            )  # all have the same row: to copy it would be a bottleneck of its own
            return {
                "x": first["x"].expand(count, -1, -1),
                "attention_mask": first["attention_mask"].expand(count, -1),
                "y": torch.stack([sample["y"] for sample in samples]),
            }

        def loss(self, model, batch):
            if model.training:
                self.calls += 1
                if mine and knobs.forward:
                    time.sleep(knobs.forward)
                for _ in range(knobs.uneven * ((self.calls + rank) % 2)):
                    with torch.no_grad():
                        model(batch["x"])
                found = 0
                for k in range(knobs.python):
                    found += k & 3
            out = model(batch["x"])
            mask = batch["attention_mask"].unsqueeze(-1)
            out = (out * mask).sum(1) / mask.sum(1)
            if knobs.churn:
                for _ in range(4):
                    out = out + 0.0 * torch.ones(knobs.churn * 65536).sum()
            return nn.functional.cross_entropy(out, batch["y"], reduction="sum")

        if knobs.loose:

            def optimizer(self, model, config):
                return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)

    return Planted()


def worker(argument):
    """One training, on one rank; rank 0 writes what was found."""
    import lockstep
    from lockstep.config.options import build
    from lockstep.sinks.jsonl import JsonLines

    said = json.loads(argument)
    knobs, rank = Knobs(**said["knobs"]), int(os.environ.get("RANK", "0"))
    if knobs.sink:
        plain = JsonLines.log
        JsonLines.log = lambda self, record: (time.sleep(knobs.sink), plain(self, record))
    config, marks = build(said["config"]), []
    with lockstep.Run(config, task_of(knobs, rank)) as run:
        for step in run:
            time.sleep(knobs.body)
            if step.global_step in (said["steps"][0] - 1, said["steps"][1]):
                marks.append(time.perf_counter())
    if rank == 0 and len(marks) > 1:
        count = said["steps"][1] - said["steps"][0] + 1
        Path(said["out"]).write_text(json.dumps({"step_ms": 1e3 * (marks[1] - marks[0]) / count}))


def trained(case, knobs, more, folder, *, profile=False, env=None):
    """What a training of its own found: {"step_ms": ...}, or the verdict."""
    first, last = case.steps
    name = "traced" if profile else f"run{len(list(folder.iterdir()))}"
    config = {"experiment_name": name, "save_dir": str(folder), "batch_size": 32, "micro_batch_size": 32 // case.ranks}
    config |= {"max_steps": last + 2, "ckpt_freq": 0, "log_freq": 10, "precision": "float32", "device": "cpu"}
    config |= case.config
    if "micro_batch_size" not in case.config:
        config["micro_batch_size"] = config["batch_size"] // case.ranks
    config |= {"profile": f"{first}:{last}"} if profile else {}
    config |= more
    out = folder / f"{name}.json"
    said = {"knobs": dataclasses.asdict(knobs), "config": config, "steps": case.steps, "out": str(out)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command = command if case.ranks > 1 else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path[:1])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", **(case.env if env is None else env)}
    done = subprocess.run(
        [*command, __file__, "--worker", json.dumps(said)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    found = json.loads(out.read_text()) if out.exists() else {}
    if profile:
        found |= json.loads((folder / name / "profile" / f"{first}-{last}" / "verdict.json").read_text())
    return found


def flags_in(what, case):
    """The flags in a proposal, as fields; {} where it is words. And the variables of an environment."""
    fields = dict(re.findall(r"--([a-z][\w.-]*) ([^\s,:-][^\s,:]*)", what))
    held = {name.replace("-", "_").replace("engine.", "engine_options."): value for name, value in fields.items()}
    types = {"data.workers": int, "micro_batch_size": int, "batch_size": int, "eval_freq": int, "ckpt_freq": int}
    types |= {"compile": bool, "log_freq": int, "engine_options.bucket_cap_mb": float}
    if held.get("batch_size"):
        held |= {"micro_batch_size": str(case.config.get("batch_size", 32) // case.ranks)}
    if re.search(r"--compile\b", what):
        held["compile"] = "1"
    variables = dict(re.findall(r"([A-Z][A-Z_]+)=(\w+)", what))
    return {name: types.get(name, str)(value) for name, value in held.items()}, variables


def tried(case, folder, named_alone):
    """[name, wanted, found, predicted gain, measured gain]"""
    found = trained(case, case.planted, {}, folder, profile=True)
    if case.wanted == "compute":
        return [case.name, case.wanted, found["bottleneck"], None, None, found["sentence"]]
    what, gain = found["next"]["what"], found["next"]["gain"]
    right = found["bottleneck"] == case.wanted and not named_alone
    fields, variables = flags_in(what, case) if case.mended is None or what.startswith("--eval") else ({}, {})
    plain, mended = [], []
    for _ in range(2 if right else 0):
        plain.append(trained(case, case.planted, {}, folder)["step_ms"])
        env = {**case.env, **variables} if variables else case.env
        mended.append(trained(case, case.mended or case.planted, fields, folder, env=env)["step_ms"])
    measured = statistics.fmean(plain) / statistics.fmean(mended) if right else None
    if right and fields.get("batch_size"):
        measured *= fields["batch_size"] / case.config.get("batch_size", 32)
    return [case.name, case.wanted, found["bottleneck"], gain, measured, found["sentence"]]


def by_hand():
    """What needs a GPU: (name, wanted, found)."""
    from test_verdict import HEALTHY, PLANTED, verdict

    for name, (wanted, _, made) in PLANTED.items():
        if name.startswith("CUDA"):
            yield [f"{name} (by hand)", wanted, verdict(*made()).bottleneck, None, None, ""]
    for name, made in HEALTHY.items():
        if name.startswith("CUDA"):
            yield [f"{name}, healthy (by hand)", "compute", verdict(*made()).bottleneck, None, None, ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--named", action="store_true", help="the verdicts alone, no gains: a third of the time")
    parser.add_argument("--json", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker)
    rows = []
    for case in [case for case in CASES if re.search(given.only, case.name)]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(tried(case, Path(folder), given.named))
        show(rows[-1])
    for row in [] if given.only else by_hand():
        rows.append(row)
        show(row)
    planted = [row for row in rows if row[1] != "compute"]
    near = [row for row in planted if row[4] and abs(row[3] / row[4] - 1.0) <= NEAR]
    print(f"named right: {sum(row[1] == row[2] for row in planted)} of {len(planted)} planted")
    healthy = [row for row in rows if row[1] == "compute"]
    print(f"healthy and called compute: {sum(row[2] == 'compute' for row in healthy)} of {len(healthy)}")
    print(f"predicted gain within {NEAR:.0%} of the measured: {len(near)} of {sum(bool(row[4]) for row in planted)}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))
    return 0


def show(row):
    name, wanted, found, gain, measured, sentence = row
    numbers = f"{gain:6.2f} predicted {measured:6.2f} measured" if measured else ""
    print(f"{name:<44} {wanted:<14} {found:<14} {'right' if wanted == found else 'WRONG':<6} {numbers}", flush=True)
    if wanted != found:
        print(f"    {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
