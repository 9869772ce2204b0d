"""A step, or its trial, that does not fit: with --on-oom smaller it is computed again in halves, to the same weights.

A device that is made up: it runs out where a micro-batch of training has more samples than it takes.
"""

import json
import subprocess
from dataclasses import dataclass, field

import pytest
import torch
import warm
from ranks import RankError, run
from refusals import names, refuses
from safetensors.torch import load_file
from shell import environment
from small_runs import config, mark
from torch import nn
from toys import taken

import lockstep
from lockstep import checkpoint
from lockstep.config.sections import Data, Optim
from lockstep.data.sampler import Shuffled
from lockstep.errors import ConfigError, LockstepError, ResumeError, name_settings
from lockstep.logging.jsonl import read
from lockstep.optim.optimizers import adamw
from lockstep.optim.schedule import factor
from lockstep.report.goodput import goodput

STEPS, BATCH, CLIP = 8, 8, 0.5


class Rows(torch.utils.data.Dataset):
    draws_random = False
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@dataclass
class Tight(lockstep.Task):
    """A regression on a device that takes `limits[n]` samples after n micro-batches of training."""

    limits: dict = field(default_factory=dict)
    dropout: float = 0.0
    norm: bool = False
    sizes: list = field(default_factory=list)

    def model(self):
        middle = nn.BatchNorm1d(6) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(3, 6), middle, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(6, 2))

    def dataset(self, split):
        return Rows() if split == "train" else None

    def collate(self, samples):
        return torch.stack(samples)

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        if model.training:
            limit = min((most for after, most in self.limits.items() if len(self.sizes) >= after), default=len(batch))
            if len(batch) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
            self.sizes.append(len(batch))
        batch = batch.to(next(model.parameters()).dtype)
        return (model(batch[:, :3]) - batch[:, 3:]).square().sum()


class Known(Tight):
    """A declared sum, which trains although the device has no room for the trial's proof."""

    reduction = "sum"


class Counting(Tight):
    """Its own tensor counts the samples that its loss has seen, which nobody can take back but a checkpoint."""

    def __init__(self, limits):
        super().__init__(limits)
        self.seen = torch.zeros(1)

    def loss(self, model, batch):
        if model.training:
            self.seen += len(batch)
        return super().loss(model, batch)

    def state_dict(self):
        return {"seen": self.seen}


class Mean(Tight):
    """A mean, where the device shows only after the forward what it wants."""

    reduction = "mean"

    def loss(self, model, batch):
        return super().loss(model, batch) / len(batch)


def settings(folder, **changes):
    return config(folder, **{"micro_batch_size": 4, "max_steps": STEPS, "optim": Optim(clip=CLIP)} | changes)


def smaller(folder, **changes):
    return settings(folder, on_oom="smaller", **changes)


def weights(folder, name="r"):
    path = checkpoint.newest(folder / name, say=print)
    return {
        key.removeprefix("model/"): tensor
        for file in sorted(path.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
        if key.startswith("model/")
    }


def by_hand(task, plan):
    """The weights of a loop in plain PyTorch, which takes a whole step at once and its loss as it is."""
    torch.manual_seed(plan.seed)
    model, data = task.model().double(), Rows()
    optimizer = adamw(model, lr=plan.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for step in range(STEPS):
        samples = Shuffled(len(data), 0).at(step * BATCH, (step + 1) * BATCH)[1].tolist()
        task.loss(model, torch.stack([data[sample] for sample in samples])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * factor(step, STEPS, 0, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


def cuts(folder, name="r"):
    return json.loads((folder / name / "micro-batch.json").read_text())["cuts"]


@pytest.mark.parametrize("kind", [Tight, Mean])
def test_two_steps_that_do_not_fit_differ_by_rounding_only(tmp_path, kind):
    task = kind({4: 4, 10: 2, 16: 1})
    assert taken(smaller(tmp_path), task) == ([*range(STEPS)], 0)  # no step is lost, and none comes twice
    assert_close(weights(tmp_path), by_hand(kind(), settings(tmp_path)))
    assert [names(line, f"--micro-batch-size {size}") for line, size in zip(cuts(tmp_path), (4, 2), strict=True)]
    assert sorted(set(task.sizes)) == [1, 2, 4]
    records = list(read(tmp_path / "r" / "metrics.jsonl"))
    assert [each["micro_batch_size"] for each in records if "micro_batch_size" in each] == [2, 1]
    starts = goodput(tmp_path / "r" / "timeline.jsonl").starts
    assert [each.ended for each in starts] == ["out of memory", "out of memory", "finished"]


PARTS = {
    "workers, dropout": {"data": Data(workers=2)},
    "fp16": {"precision": "fp16"},
    "average": {"optim": Optim(clip=CLIP, ema=0.9), "checkpoint": {"mode": "sync"}},
    "at the start": {"start": 0},
}


@pytest.mark.parametrize("parts", PARTS)
def test_rest_trains_as_a_resume_with_the_smaller_size(tmp_path, parts):
    changes = dict(PARTS[parts])
    start = changes.pop("start", 3)
    task = Known({2 * start + 1: 2}, dropout=0.2)
    lockstep.train(smaller(tmp_path / "a", **changes), task)
    if start:
        lockstep.train(settings(tmp_path / "b", stop_at=start, **changes), Known(dropout=0.2))
    lockstep.train(settings(tmp_path / "b", **changes | {"micro_batch_size": 2}), Known(dropout=0.2))
    assert mark(tmp_path / "a") == mark(tmp_path / "b")
    names(*cuts(tmp_path / "a"), f"step {start + 1}", "rank 0")


def test_loss_that_wrote_its_tensors_returns_to_a_checkpoint(tmp_path):
    task = Counting({8: 2})  # in step 4; the newest checkpoint is of step 3
    lockstep.train(smaller(tmp_path), task)
    assert float(task.seen) == STEPS * BATCH
    assert_close(weights(tmp_path), by_hand(Tight(), settings(tmp_path)))


def test_a_later_start_takes_the_smaller_size_and_says_so(tmp_path, capfd):
    lockstep.train(smaller(tmp_path, stop_at=5), Tight({6: 2}))
    capfd.readouterr()
    with refuses(ResumeError, name_settings("--micro-batch-size 2")):
        lockstep.train(settings(tmp_path), Tight())
    task = Tight({0: 2})
    lockstep.train(smaller(tmp_path), task)
    assert set(task.sizes) == {2}
    names(capfd.readouterr().err, name_settings("--micro-batch-size 2"), "in place of 4", "micro-batch.json")
    assert_close(weights(tmp_path), by_hand(Tight(), settings(tmp_path)))


def test_sample_that_does_not_fit_ends_the_run(tmp_path):
    with refuses(LockstepError, "rank 0", name_settings("--micro-batch-size 1"), "step 4"):
        lockstep.train(smaller(tmp_path / "a", micro_batch_size=1), Tight({24: 0}))
    with refuses(LockstepError, "rank 0", "2.50 GiB"):
        lockstep.train(settings(tmp_path / "b"), Tight({6: 2}))
    assert not list(tmp_path.glob("*/r/micro-batch.json"))


class Unlike(Tight):
    """Its loss looks at pairs of samples: it is neither a sum nor a mean over them."""

    def loss(self, model, batch):
        return super().loss(model, batch).square()


class Declared(Unlike):
    reduction = "sum"


class Apart(Tight):
    reduction = "micro-batch"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Rows.rows)


class Streamed(Tight):
    def dataset(self, split):
        return Stream() if split == "train" else None


@pytest.mark.parametrize(
    ("task", "changes", "named"),
    [
        (Tight(norm=True), {"batch_size": 32, "micro_batch_size": 16}, "BatchNorm"),
        (Apart(), {}, "micro-batch"),
        (Unlike(), {}, "loss"),
        (Declared(), {"micro_batch_size": BATCH}, "loss"),  # a step has one micro-batch now, but not after a cut
        (Streamed(), {}, "stream"),
        (None, {"exact": True}, "exact"),
        (None, {"shares": "1,1"}, "shares"),
        (None, {"batch_tokens": 64}, name_settings("--batch-tokens")),
    ],
)
def test_unsplittable_training_is_refused_before_writing(tmp_path, task, changes, named):
    with refuses(ConfigError, named) as caught:
        lockstep.train(smaller(tmp_path, **changes), task or Tight())
    assert "on_oom" in str(caught.value).replace("-", "_") or isinstance(task, Unlike)
    assert not list(tmp_path.iterdir())


@dataclass
class Trial(Tight):
    """It does not fit from the trial on, where the trial's model is not in training mode."""

    most: int = 99

    def loss(self, model, batch):
        if torch.is_grad_enabled() and len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(model, batch)


def tried(world, folder):
    task = Trial(most=99 if world.rank == 0 else 2)
    lockstep.train(smaller(folder, micro_batch_size=4), task, world)
    return set(task.sizes)


def test_trial_too_large_on_one_rank_restarts_all_smaller(tmp_path):
    assert run(tried, 2, tmp_path) == [{2}, {2}]
    names(*cuts(tmp_path), "rank 1", "trial", "--micro-batch-size 4")
    assert_close(weights(tmp_path), by_hand(Tight(), settings(tmp_path)))


def alone(world, folder):
    lockstep.train(smaller(folder), Tight({4: 2} if world.rank else {}), world)


def test_without_a_launcher_the_next_start_takes_the_new_size(tmp_path):
    with pytest.raises(RankError) as caught:
        run(alone, 2, tmp_path)
    assert caught.value.rank == 1
    names(str(caught.value), "step 5", name_settings("--on-oom"), "--max-restarts")
    run(alone, 2, tmp_path)
    assert_close(weights(tmp_path), by_hand(Tight(), settings(tmp_path)))


SCRIPT = """
import os
import sys

sys.path.insert(0, {tests!r})
sys.path.insert(0, {here!r})
import lockstep
from test_out_of_memory import Tight, smaller

from pathlib import Path

limits = {{3: 2, 8: 1}} if os.environ["RANK"] == "1" else {{}}
lockstep.train(smaller(Path(sys.argv[1]), engine=sys.argv[2]), Tight(limits))
"""


@pytest.mark.parametrize(("engine", "restarts"), [("ddp", 0), ("zero", 2)])
def test_one_of_two_ranks_runs_out_twice_and_both_go_on(tmp_path, engine, restarts):
    """Where each has the whole model both keep their processes; else the launcher starts them again."""
    here = __file__.rpartition("/")[0]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(here=here, tests=here.rpartition("/")[0]))
    command = [warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    done = subprocess.run(
        [*command, "--", str(script), str(tmp_path), engine],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restart 1 of") == (restarts > 0)
    assert [names(line, "rank 1", "--micro-batch-size") for line in cuts(tmp_path)] == [True, True]
    assert_close(weights(tmp_path), by_hand(Tight(), settings(tmp_path)))
