"""Runs whose training set is a stream: the same bits on any ranks, after a resume, and what is refused."""

import pytest
from ranks import run
from small_runs import config
from toys import Ragged, Sentences

import lockstep
from lockstep import checkpoint
from lockstep.config.sections import Data


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
    assert reference[2]["epoch"] == 1


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 1)])
def test_a_run_has_the_same_bits_on_more_ranks(tmp_path, reference, ranks, workers):
    run(train, ranks, tmp_path, EXACT | {"data": Data(workers=workers)})
    assert ended(tmp_path) == reference


def test_a_resume_on_other_ranks_has_the_same_bits(tmp_path, reference):
    run(train, 2, tmp_path, EXACT | {"stop_at": 5})
    run(train, 3, tmp_path, EXACT | {"stop_at": 8})
    run(train, 1, tmp_path, EXACT)
    assert ended(tmp_path) == reference
