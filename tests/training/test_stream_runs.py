"""Runs whose training set is a stream: the same bits on any ranks, after a resume, and what is refused."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import warm
from ranks import run
from refusals import refuses
from shaken import shaken
from small_runs import config
from toys import Ragged, Sentences

import lockstep
from lockstep import checkpoint
from lockstep.config.sections import Data, Guards
from lockstep.errors import ConfigError, DataError, ResumeError


class Rows:
    """The rows of `Sentences` in parts of these lengths, one after the other."""

    def __init__(self, lengths):
        self.parts, self.lengths = len(lengths), lengths
        self.rows = Sentences(sum(lengths))

    def iter(self, part, start):
        first = sum(self.lengths[:part])
        for offset in range(start, self.lengths[part]):
            yield self.rows[first + offset]


UNEVEN = [9, 4, 0, 13, 7, 7, 2, 11]


class Streamed(Ragged):
    def __init__(self, lengths=UNEVEN, dropout=0.2):
        super().__init__(dropout=dropout)
        self.lengths = lengths

    def dataset(self, split):
        return Rows(self.lengths) if split == "train" else Sentences(7)


def train(world, folder, changes, lengths=UNEVEN):
    return lockstep.train(config(folder, **changes), Streamed(lengths), world).global_step


EXACT = {"exact": True, "eval_freq": 4, "max_steps": 16}


def ended(folder):
    path = checkpoint.newest(folder / "r", say=print)
    state = checkpoint.read_state(path)
    return (
        checkpoint.fingerprint(path),
        state["running_loss"],
        {k: v for k, v in state["stream"].items() if k != "cursors"},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(train, 1, folder, EXACT)
    return ended(folder)


def test_one_rank_counts_epochs_and_samples(reference):
    _, _, stream = reference
    assert stream["epoch"] == 1
    assert stream["samples"] == sum(UNEVEN) + stream["epoch_samples"]
    assert stream["last_steps"] + stream["epoch_steps"] == 16


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 1)])
def test_a_run_has_the_same_bits_on_more_ranks(tmp_path, reference, ranks, workers):
    run(train, ranks, tmp_path, EXACT | {"data": Data(workers=workers)})
    assert ended(tmp_path) == reference


def test_a_resume_on_other_ranks_has_the_same_bits(tmp_path, reference):
    run(train, 2, tmp_path, EXACT | {"stop_at": 5})
    run(train, 3, tmp_path, EXACT | {"stop_at": 8})
    run(train, 1, tmp_path, EXACT)
    assert ended(tmp_path) == reference
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    epochs = [each["epoch"] for each in records if "epoch" in each]
    assert (len(epochs), epochs, epochs[0], epochs[-1]) == (8, sorted(epochs), 0, 1)
    assert (
        f"epoch 0 of the stream: {sum(UNEVEN)} samples in" in (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    )


class Mixed(Streamed):
    """Two streams, one of which takes over."""

    def dataset(self, split):
        sources = {"a": Rows(self.lengths), "b": Rows([5, 4, 0, 6])}
        weights = [(3, {"a": 1.0}), (9, {"a": 0.25, "b": 0.75})]
        return lockstep.mixture(sources, weights) if split == "train" else Sentences(7)


def mix(world, folder, changes, lengths=UNEVEN):
    return lockstep.train(config(folder, **changes), Mixed(lengths), world).global_step


def test_mixture_is_bitwise_on_more_ranks_and_after_a_resume(tmp_path):
    run(mix, 1, tmp_path / "one", EXACT)
    run(mix, 3, tmp_path / "two", EXACT | {"stop_at": 7, "data": Data(workers=1)})
    with refuses(ResumeError, "parts") as caught:
        lockstep.train(config(tmp_path / "two", **EXACT), Mixed([*UNEVEN, 5]))
    assert "'a': 9" in str(caught.value)
    run(mix, 2, tmp_path / "two", EXACT)
    assert ended(tmp_path / "two") == ended(tmp_path / "one")
    assert ended(tmp_path / "one")[2]["epoch"] == 0  # a mixture never ends
    records = [json.loads(line) for line in (tmp_path / "two" / "r" / "metrics.jsonl").read_text().splitlines()]
    shares = [each["data/share/b"] for each in records if "data/share/b" in each]
    assert (len(shares), shares[0]) == (8, 0)
    assert shares[-1] > 0.5


class OneRow(Streamed):
    def order(self, samples, seed):
        return range(samples)


class Random(Rows):
    """Two readings differ."""

    def iter(self, part, start):
        return iter([self.rows[os.urandom(1)[0] % 30] for _ in range(9)])


class Drawn(Streamed):
    def dataset(self, split):
        return Random([9] * 4) if split == "train" else None


class Evaluated(Streamed):
    def dataset(self, split):
        return Rows([5])


BAD = [
    (Streamed(), {"max_steps": 0, "num_epochs": 2}, ConfigError, "--max-steps"),
    (Streamed(), {"eval_freq": "1epochs"}, ConfigError, "--eval-freq"),
    (Streamed(), {"limit_train_batches": 2}, ConfigError, "--limit-train-batches"),
    (Streamed(), {"guards": Guards(bad_samples=1)}, ConfigError, "--guards.bad-samples 1"),
    (Streamed(), {"guards": Guards(audit=0.1)}, ConfigError, "--guards.audit 0.1"),
    (OneRow(), {}, ConfigError, "`order`"),
    (Drawn(), {}, DataError, "two readings"),
    (Streamed([0, 0]), {}, DataError, "none of the 2 parts"),
    (Streamed([]), {}, DataError, "parts = 0"),
    (Evaluated(), {}, DataError, "list"),
]


@pytest.mark.parametrize(("task", "changes", "kind", "words"), BAD, ids=[each[3] for each in BAD])
def test_what_a_stream_cannot_have_is_one_line_before_writing(tmp_path, task, changes, kind, words):
    with refuses(kind, words) as caught:
        lockstep.train(config(tmp_path, **changes), task)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "lengths", "words"),
    [
        ({"batch_size": 16}, UNEVEN, "--batch-size 8 (now 16)"),
        ({"micro_batch_size": 4}, UNEVEN, "--micro-batch-size 2 (now 4)"),
        ({"seed": 1}, UNEVEN, "--seed 0 (now 1)"),
        ({}, [*UNEVEN, 5], "parts 8 (now 9)"),
    ],
)
def test_resume_that_divides_the_stream_otherwise_is_refused(started, changes, lengths, words):
    for anyway in (False, True):
        with refuses(ResumeError, words.partition(" (")[0].split()[-1]) as caught:
            lockstep.train(config(started, **changes, resume_anyway=anyway), Streamed(lengths))
        assert "\n" not in str(caught.value)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("started")
    lockstep.train(config(folder, stop_at=3), Streamed())
    return folder


class LateShuffle(Rows):
    """A counter shuffles what comes after the samples that a start reads."""

    def __init__(self):
        super().__init__([200])
        self.readings = 0

    def iter(self, part, start):
        self.readings += 1
        rows = list(super().iter(part, 0))
        late = rows[100:]
        random.Random(self.readings).shuffle(late)
        return iter([*rows[:100], *late][start:])


class LatelyShuffled(Streamed):
    def dataset(self, split):
        return LateShuffle() if split == "train" else None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffle_by_a_counter_that_no_start_sees_ends_a_resume(tmp_path, workers):
    changes = {"max_steps": 24, "data": {"workers": workers}}
    lockstep.train(config(tmp_path, stop_at=6, **changes), LatelyShuffled())
    lockstep.train(config(tmp_path, stop_at=20, **changes), LatelyShuffled())  # before the shuffle
    with refuses(DataError, "LateShuffle", "sample 160 of part 0", "set_epoch") as caught:
        lockstep.train(config(tmp_path, **changes), LatelyShuffled())
    assert "\n" not in str(caught.value)


def test_a_longer_plan_goes_on_in_the_stream(tmp_path):
    lockstep.train(config(tmp_path, max_steps=6), Streamed())
    lockstep.train(config(tmp_path, max_steps=6, extend_to=14), Streamed())
    assert ended(tmp_path)[2]["epoch"] == 1
    lockstep.train(config(tmp_path / "whole", max_steps=14), Streamed())
    assert ended(tmp_path)[2] == ended(tmp_path / "whole")[2]


LOST = """
import os
import signal
import sys
from pathlib import Path

sys.path[:0] = {paths}
from test_stream_runs import Streamed


class Lost(Streamed):
    \"\"\"Rank 1 is killed in its eighth step, once.\"\"\"

    def loss(self, model, batch):
        once = Path({once!r})
        if os.environ.get("RANK") == "1" and self.step == 7 and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


def test_a_lost_rank_s_slots_are_read_by_the_others(tmp_path, reference):
    """The survivors open its lanes at the last save, and read past the rest; a new process takes some over."""
    (tmp_path / "once").touch()
    here = Path(__file__).parent
    paths = [str(here), str(here.parent)]
    (tmp_path / "lost.py").write_text(LOST.format(paths=paths, once=str(tmp_path / "once")), encoding="utf-8")
    flags = (
        "--experiment-name r --batch-size 8 --micro-batch-size 2 --log-freq 2 --ckpt-freq 3 --max-steps 16 --lr 0.01"
    )
    command = [warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "3", "--max-losses", "2", "--", "train"]
    command += ["--task", f"{tmp_path / 'lost.py'}:Lost", "--save-dir", str(tmp_path), *flags.split()]
    command += ["--precision", "float64", "--exact", "--eval-freq", "4"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (tmp_path / "once").exists()
    assert ended(tmp_path)[0] == reference[0]
    assert ended(tmp_path)[2] == reference[2]
    assert checkpoint.read_state(checkpoint.newest(tmp_path / "r", say=print))["losses"] == 1


def shaken_train(world, folder, changes, lengths):
    shaken()
    return train(world, folder, changes, lengths)


def test_shares_changing_at_epoch_ends_lose_and_double_nothing(tmp_path):
    """Epochs of two to four steps, and turns without samples, which were divided for another step."""
    lengths, changes = [3, 1, 6, 2, 0, 5, 1, 9], EXACT | {"max_steps": 40, "engine": "ddp"}
    run(train, 1, tmp_path / "one", changes | {"engine": "single"}, lengths)
    run(shaken_train, 3, tmp_path / "three", changes | {"shares": "auto", "data": Data(workers=1)}, lengths)
    assert ended(tmp_path / "three") == ended(tmp_path / "one")
    assert ended(tmp_path / "one")[2]["epoch"] > 3
    records = map(json.loads, (tmp_path / "three" / "r" / "metrics.jsonl").read_text().splitlines())
    assert len({record["shares"] for record in records if "shares" in record}) > 1
