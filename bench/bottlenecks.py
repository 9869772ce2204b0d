"""Planted bottlenecks: is each named by `--profile`, and does its mend gain what was predicted?

python bench/bottlenecks.py                     every case, about 10 minutes on a quiet machine of two cores
python bench/bottlenecks.py --only loader       those whose names have this in them, a regular expression
python bench/bottlenecks.py --named             the verdicts alone
python bench/bottlenecks.py --json out.json     the sentences too

Each case is trained in processes of its own: traced, for the verdict; then plain and mended in turns (`turns.py`), the
latter with the flags that the verdict proposes, or with the planted cause taken away where it proposes words. A round
is ten steps of each, evaluations and saves included; the measured gain is the median over the rounds of plain / mended,
and their quartiles stand beside it. A prediction within 20 % of the median is counted; how many of the others lie
between the quartiles is said apart. What needs a GPU is judged from traces written by hand, and has no measured gain.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from turns import Going, in_turns, spread

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "diagnose" / "profile")]

FIRST, LAST = 16, 45  # traced; a case may say more
ROUNDS, TURN = 7, 10  # and steps of each in a round
NEAR = 0.2  # of the measured gain
ENDLESS = 100_000  # steps
_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Knobs:
    """What is planted in the task. Seconds, or numbers; `rank` limits the sleeps to one rank."""

    width: int = 384
    layers: int = 4
    rows: int = 8  # inputs of a sample
    sample: float = 0.0
    spins: int = 0  # in Python, for each sample
    collate: float = 0.0
    forward: float = 0.0
    uneven: int = 0  # further forwards in every other step, on one rank and then on the other
    even: int = 0  # further forwards in every step, on each
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
ANEW = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # else it is chance whether malloc keeps what is given back
SYNC = {"ckpt_freq": 2, "checkpoint.mode": "sync", "checkpoint.keep": 1}
CASES = [
    Case("slow samples, from a disk", "data", Knobs(sample=0.002)),
    Case("slow collation", "data", Knobs(collate=0.06)),
    Case("slow samples, in Python", "data", Knobs(spins=60_000)),
    Case("too few loader processes", "data", Knobs(sample=0.002), config={"data.workers": 1}),
    Case("a rank that loads slowly", "data", Knobs(sample=0.003, rank=1), ranks=2),
    Case(
        "a rank that computes slowly",
        "imbalance",
        Knobs(forward=0.02, rank=1),
        ranks=2,
        config={"micro_batch_size": 4},
        steps=(100, 109),
    ),
    Case("steps of unlike length", "imbalance", Knobs(uneven=8), Knobs(even=4), ranks=2),
    Case("micro-batches of one", "micro-batches", Knobs(width=128, rows=1), config={"micro_batch_size": 1}),
    Case(
        "one bucket",
        "communication",
        Knobs(width=1024, rows=1),
        ranks=2,
        config={"engine_options.bucket_cap_mb": 1000.0, "batch_size": 128},
    ),
    Case(
        "a large model and a small batch",
        "communication",
        Knobs(width=1536, layers=6, rows=1),
        ranks=2,
        config={"batch_size": 4},
    ),
    Case("a record each step, to a slow place", "records", Knobs(sink=0.04), config={"log_freq": 1}),
    Case("an evaluation every two steps", "evaluation", config={"eval_freq": 2}),
    Case("a checkpoint every two steps, waited for", "checkpoint", Knobs(width=1024, rows=1), config=SYNC),
    Case("memory that comes and goes", "memory", Knobs(churn=200), env=ANEW),
    Case("four fifths of padding", "padding", Knobs(rows=20, empty=0.8), Knobs(rows=4)),
    Case(
        "an update tensor by tensor",
        "update",
        Knobs(width=128, layers=150, rows=1, loose=True),
        Knobs(width=128, layers=150, rows=1),
    ),
    Case("Python in the forward", "host", Knobs(python=1_000_000), Knobs()),
    Case("many small operations", "operations", Knobs(width=256, rows=1, tiny=1500)),
    Case("a wait in the forward", "host", Knobs(forward=0.03), Knobs()),
    Case("a slow body of the loop", "host", Knobs(body=0.03), Knobs()),
    Case(
        "forwards computed again",
        "recomputation",
        Knobs(width=512, layers=12, rows=4),
        config={"activation_checkpointing": "full"},
    ),
    Case(
        "more threads than cores",
        "threads",
        Knobs(width=512, rows=1),
        ranks=2,
        config={"batch_size": 256},
        env={"OMP_NUM_THREADS": str(os.cpu_count())},
    ),
    Case("large gradients, made anew each step", "memory", Knobs(width=1024, rows=1), env=ANEW),
    Case("healthy, one process", "compute", Knobs(width=1024, rows=1), config={"batch_size": 128}, env=KEPT),
    Case("healthy, two processes", "compute", Knobs(width=512, rows=1), ranks=2, config={"batch_size": 1024}),
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
                for _ in range(knobs.even + knobs.uneven * ((self.calls + rank) % 2)):
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
    """One training, on one rank; rank 0 notes when each step ended."""
    import lockstep
    from lockstep.config.cli import build
    from lockstep.logging.jsonl import JsonLines

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)  # it would go on for ever, or stay stopped
    said = json.loads(argument)
    knobs, rank = Knobs(**said["knobs"]), int(os.environ.get("RANK", "0"))
    if knobs.sink:
        plain = JsonLines.log
        JsonLines.log = lambda self, record: (time.sleep(knobs.sink), plain(self, record))
    with open(f"{said['ends']}", "a" if rank == 0 else "r", buffering=1) as ends:
        for _ in lockstep.Run(build(said["config"]), task_of(knobs, rank)):
            if knobs.body:
                time.sleep(knobs.body)
            if rank == 0:
                ends.write(f"{time.monotonic()}\n")


def going(case, knobs, more, folder, name, env=None):
    """A training with these knobs, and options beside those of the case."""
    config = {"experiment_name": name, "save_dir": str(folder), "batch_size": 32, "max_steps": ENDLESS, "ckpt_freq": 0}
    config |= {"log_freq": 10, "precision": "float32", "device": "cpu"} | case.config
    if "micro_batch_size" not in case.config:
        config["micro_batch_size"] = config["batch_size"] // case.ranks
    config |= more
    ends = folder / f"{name}.ends"
    ends.touch()
    said = {"knobs": dataclasses.asdict(knobs), "config": config, "ends": str(ends)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path[:1])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", **(case.env if env is None else env)}
    return Going([sys.executable, __file__, "--worker", json.dumps(said)], ends, environment, case.ranks)


def traced(case, folder):
    """The verdict."""
    first, last = case.steps
    with going(case, case.planted, {"profile": f"{first}:{last}"}, folder, "traced") as run:
        run.until(last + 1)
    return json.loads((folder / "traced" / "profile" / f"{first}-{last}" / "verdict.json").read_text())


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
    """One case, as a row: the last fields are None where nothing was measured."""
    found = traced(case, folder)
    row = {"name": case.name, "wanted": case.wanted, "found": found["bottleneck"], "sentence": found["sentence"]}
    row |= {"predicted": found["next"]["gain"], "measured": None}
    if case.wanted == "compute" or found["bottleneck"] != case.wanted or named_alone:
        return row
    what = found["next"]["what"]
    fields, variables = flags_in(what, case) if case.mended is None or what.startswith("--eval") else ({}, {})
    env = {**case.env, **variables}
    with (
        going(case, case.planted, {}, folder, "plain") as plain,
        going(case, case.mended or case.planted, fields, folder, "mended", env) as mended,
    ):
        ratios, before, after = in_turns(plain, mended, case.steps[0], ROUNDS, TURN)
    times = fields.get("batch_size", 1) / case.config.get("batch_size", 32) if fields.get("batch_size") else 1.0
    low, high = spread(ratios)
    row |= {"measured": times * statistics.median(ratios), "low": times * low, "high": times * high}
    return row | {"plain_ms": before, "mended_ms": after}


def by_hand():
    """What needs a GPU, as rows."""
    from test_verdict import HEALTHY, PLANTED, verdict

    cases = [(name, wanted, made) for name, (wanted, _, made) in PLANTED.items()]
    cases += [(f"{name}, healthy", "compute", made) for name, made in HEALTHY.items()]
    for name, wanted, made in cases:
        if name.startswith("CUDA"):
            found = verdict(*made())
            row = {"name": f"{name} (by hand)", "wanted": wanted, "found": found.bottleneck, "measured": None}
            yield row | {"sentence": found.sentence}


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
    planted = [row for row in rows if row["wanted"] != "compute"]
    print(f"named right: {sum(row['wanted'] == row['found'] for row in planted)} of {len(planted)} planted")
    healthy = [row for row in rows if row["wanted"] == "compute"]
    print(f"healthy and called compute: {sum(row['found'] == 'compute' for row in healthy)} of {len(healthy)}")
    timed = [row for row in planted if row["measured"]]
    near = [row for row in timed if is_near(row)]
    within = [row for row in timed if row not in near and row["low"] <= row["predicted"] <= row["high"]]
    print(f"predicted gain within {NEAR:.0%} of the measured: {len(near)} of {len(timed)}")
    print(f"further off, but between the quartiles of the rounds: {len(within)}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))
    return 0


def is_near(row):
    return abs(row["predicted"] / row["measured"] - 1.0) <= NEAR


def show(row):
    numbers, right = "", row["wanted"] == row["found"]
    if row["measured"]:
        numbers = f"{row['predicted']:6.2f} predicted {row['measured']:6.2f} measured ({row['low']:.2f} to "
        numbers += f"{row['high']:.2f}; {row['plain_ms']:.1f} and {row['mended_ms']:.1f} ms) {'near' * is_near(row)}"
    said = f"{row['name']:<42} {row['wanted']:<14} {row['found']:<14} {'right' if right else 'WRONG':<6} {numbers}"
    print(said.rstrip(), flush=True)
    if not right:
        print(f"    {row['sentence']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
