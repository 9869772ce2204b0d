"""Runs with --parallel.context against the same run on one process: weights, records, resumes, refusals."""

import pytest
import small_runs
from divided_runs import TinyGPT, assert_close, train, weights
from ranks import run
from refusals import refuses
from torch import nn
from torch.nn import functional as F
from toys import Sentences

from lockstep.config.parallel_options import Parallel
from lockstep.errors import ConfigError, DifferenceError


class Divided(TinyGPT):
    """The built-in GPT on sequences of 16 tokens."""

    def dataset(self, split):
        return Sentences(self.samples if split == "train" else 13, length=16)

    def loss(self, model, batch):
        return super().loss(lambda ids: model(ids, positions=batch.get("positions")), batch)

    def metrics(self, model, batch):
        return super().metrics(lambda ids: model(ids, positions=batch.get("positions")), batch)

    def sequence(self, batch):
        return {"input": 1, "labels": 1, "positions": 1}


def _train(world, folder, degree, task=None, **changes):
    changes = {"optim": {"clip": 0.5, "ema": 0.9}, "parallel": Parallel(context=degree)} | changes
    return train(world, folder, task or Divided(dropout=0.1), 1, **changes)


def test_a_run_with_divided_sequences_trains_as_one_process(tmp_path):
    records, body = _train(None, tmp_path / "one", 1)
    for ranks, degree, engine in ((2, 2, "ddp"), (4, 4, "ddp"), (4, 2, "fsdp")):
        folder = tmp_path / f"{degree}-{engine}"
        found = run(_with_engine, ranks, folder, degree, engine)
        assert [items for _, items in found[0][1]] == [items for _, items in body]
        assert all(rank[1] == found[0][1] for rank in found)
        assert [loss for loss, _ in found[0][1]] == pytest.approx([loss for loss, _ in body], rel=1e-12)
        for record, wanted in zip(found[0][0], records, strict=True):
            assert record == pytest.approx(wanted, rel=1e-9)
        assert_close(weights(tmp_path / "one"), weights(folder))


def _with_engine(world, folder, degree, engine):
    return _train(world, folder, degree, engine=engine)


def _until(world, folder, degree, stop, engine):
    return _train(world, folder, degree, stop_at=stop, engine=engine)


def test_a_checkpoint_of_any_degree_resumes_on_any_other(tmp_path):
    _train(None, tmp_path / "one", 1)
    run(_until, 2, tmp_path / "moved", 2, 1, "fsdp")
    _train(None, tmp_path / "moved", 1, stop_at=2)
    run(_until, 4, tmp_path / "moved", 2, 0, "ddp")
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "moved"))


def _several(world, folder, parallel, dropout):
    # Recomputation, as the backward of a stage must know which positions it has.
    transforms = {"activation_checkpointing": "full"}
    return _train(world, folder, 1, Divided(dropout=dropout), parallel=parallel, exact=True, **transforms)


def _refused_both(world, folder):
    with refuses(ConfigError, "--parallel.tensor 2 --parallel.context 2", "dropout"):
        _several(world, folder, Parallel(tensor=2, context=2), 0.1)


@pytest.mark.parametrize(
    ("parallel", "dropout"),
    [
        (Parallel(tensor=2, context=2), 0.0),
        (Parallel(pipeline=2, context=2), 0.1),
        (Parallel(pipeline=2, tensor=2), 0.1),
    ],
    ids=["tensor-context", "pipeline-context", "pipeline-tensor"],
)
def test_each_two_degrees_go_together(parallel, dropout, tmp_path):
    if parallel.pipeline == 1:
        run(_refused_both, 4, tmp_path / "refused")
    records, body = _several(None, tmp_path / "one", Parallel(), dropout)
    found = run(_several, 4, tmp_path / "four", parallel, dropout)
    for rank in found:
        assert [loss for loss, _ in rank[1]] == pytest.approx([loss for loss, _ in body], rel=1e-12)
        assert [items for _, items in rank[1]] == [items for _, items in body]
    for record, wanted in zip(found[0][0], records, strict=True):
        assert record == pytest.approx(wanted, rel=1e-9)
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "four"))


class Undescribed(Divided):
    def sequence(self, batch):
        return None


class Averaged(Divided):
    reduction = "mean"


class WithPenalty(Divided):
    def penalty(self, model):
        return sum(p.square().sum() for p in model.parameters())


class Normalised(Divided):
    def model(self):
        return nn.Sequential(nn.Embedding(29, 8), nn.BatchNorm1d(16), nn.Linear(8, 29)).double()


class ShiftsInLoss(Divided):
    """Its loss compares each position with the next one, which the last of a part does not have."""

    def loss(self, model, batch):
        logits = model(batch["input"], positions=batch.get("positions"))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["input"][:, 1:].flatten(), reduction="sum")


class NoPositions(Divided):
    """Its model counts the positions from 0 on each rank."""

    def loss(self, model, batch):
        return super().loss(model, {name: leaf for name, leaf in batch.items() if name != "positions"})


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 29)

    def forward(self, ids, positions=None):
        x = self.tokens(ids)[:, None]
        return self.head((x + self.out(F.scaled_dot_product_attention(x, x, x, is_causal=True)))[:, 0])


class SeesItsPart(Divided):
    def model(self):
        return OwnAttention().double()


class BehindZeros(Divided):
    """At first its loss does not depend on attention."""

    def model(self):
        model = OwnAttention()
        nn.init.zeros_(model.out.weight)
        return model.double()


def refused(world, folder):
    for kind, error, words in (
        (Undescribed, ConfigError, ("no dimensions",)),
        (TinyGPT, ConfigError, ("TinyGPT", "sequence(batch)")),
        (Averaged, ConfigError, ("a sum", 'reduction = "sum"')),
        (WithPenalty, ConfigError, ("penalty",)),
        (Normalised, ConfigError, ("BatchNorm",)),
        (ShiftsInLoss, DifferenceError, ("add up to", "shift labels")),
        (NoPositions, DifferenceError, ("add up to", "lockstep.attention")),
        (SeesItsPart, DifferenceError, ("add up to", "lockstep.attention")),
        (BehindZeros, DifferenceError, ("add up to", "lockstep.attention")),
    ):
        with refuses(error, "--parallel.context 2", *words):
            _train(world, folder, 2, kind())
    with refuses(ConfigError, "--parallel.context 3", "2 ranks", "multiple of 3"):
        _train(world, folder, 3)
    return (folder / "r").exists()


def test_what_cannot_be_divided_is_refused_first(tmp_path):
    assert run(refused, 2, tmp_path) == [False, False]
    for changes, flag in (
        ({"engine": "zero"}, "engine zero"),
        ({"precision": "fp16"}, "precision fp16"),
        ({"lora": {"rank": 2}}, "lora.rank"),
        ({"compile": True}, "compile"),
        ({"data": {"packing": "documents"}}, "data.packing"),
        ({"parallel": {"context": 2, "tensor": 2}, "engine": "fsdp"}, "engine fsdp"),
        ({"exact": True, "engine": "fsdp"}, "engine fsdp with exact"),
    ):
        with refuses(ConfigError, flag, "parallel.context 2"):
            small_runs.config(tmp_path, **{"parallel": {"context": 2}} | changes)
