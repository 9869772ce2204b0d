"""Runs with --parallel.pipeline against the same run on one process: weights, records, bits, resumes, refusals."""

import pytest
import small_runs
import torch
from divided_runs import TinyGPT, assert_close, train, weights
from ranks import RankError, run
from refusals import refuses
from torch import nn
from toys import Ragged

import lockstep
from lockstep.config.parallel_options import Parallel
from lockstep.errors import ConfigError, DataError, PeerError

STAGES = Parallel(pipeline=2)
BOTH = Parallel(pipeline=2, tensor=2)
EXACT = {"exact": True}
CHANGES = {"optim": {"clip": 0.5, "ema": 0.9, "layer_decay": 0.8}}


class Residual(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x):
        return x + self.inner(x)


class Chain(Ragged):
    """An own model with a head of its own, dropout, and numbers that the last stage alone can compute."""

    def model(self):
        blocks = [Residual(16, self.dropout) for _ in range(3)]
        return nn.Sequential(nn.Embedding(29, 16), *blocks, nn.Linear(16, 29)).to(self.dtype)

    def blocks(self, model):
        return list(model)[1:4]

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss, {"twice": 2 * loss.detach(), "samples": (len(batch["input"]), 1)}


def trained(world, folder, task, parallel, changes=None):
    return train(world, folder, task, 1, parallel=parallel, **CHANGES | (changes or {}))


@pytest.mark.parametrize("task", [TinyGPT(dropout=0.1), Chain(dropout=0.1)], ids=["tied", "own"])
def test_a_run_in_stages_trains_as_one_process(task, tmp_path):
    """An untied model to the bit; a tied table adds its gradients in another order."""
    records, body = trained(None, tmp_path / "one", task, Parallel(), EXACT)
    for ranks in (2, 4):
        folder = tmp_path / f"{ranks}"
        found = run(trained, ranks, folder, task, STAGES, EXACT)
        for rank in range(ranks):
            assert [items for _, items in found[rank][1]] == [items for _, items in body]
            assert [loss for loss, _ in found[rank][1]] == pytest.approx([loss for loss, _ in body], rel=1e-12)
        for record, wanted in zip(found[0][0], records, strict=True):
            assert record == pytest.approx(wanted, rel=1e-9)
        if isinstance(task, Chain):
            assert small_runs.mark(folder) == small_runs.mark(tmp_path / "one")
        else:
            assert_close(weights(tmp_path / "one"), weights(folder))
    assert small_runs.mark(tmp_path / "2") == small_runs.mark(tmp_path / "4")


def test_gradients_are_added_over_replicas_without_exact_too(tmp_path):
    """With rules for parameters that one stage alone has."""
    task = TinyGPT(dropout=0.1)
    rules = {"optim": {"clip": 0.5, "groups": "blocks.0.*: lr=2x; blocks.1.*: decay=0.3; norm.*: lr=0.5x"}}
    trained(None, tmp_path / "one", task, Parallel(), rules)
    run(trained, 4, tmp_path / "four", task, STAGES, rules)
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "four"))


def test_a_checkpoint_of_stages_resumes_in_any_other_way(tmp_path):
    task = TinyGPT(dropout=0.1)
    trained(None, tmp_path / "one", task, Parallel())
    moved = tmp_path / "moved"
    for ranks, parallel, stop in ((2, STAGES, 1), (2, Parallel(tensor=2), 2), (4, BOTH, 3)):
        run(trained, ranks, moved, task, parallel, {"stop_at": stop})
    trained(None, moved, task, Parallel())
    assert_close(weights(tmp_path / "one"), weights(moved))


class Average:
    """A user's average of the parameters that this stage has."""

    def __init__(self, model):
        self.held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        assert all(state[name] is tensor for name, tensor in self.held.items())


def _in_bf16(world, folder, parallel, stop):
    """Steps under autocast, which wraps the model's forward, with an object of the caller's in the checkpoints."""
    changes = {"parallel": parallel, "precision": "bf16", "max_steps": 2, "stop_at": stop, "report": False}
    with lockstep.Run(small_runs.config(folder, **changes), Chain(), world) as made:
        made.keep("average", Average(made.model))
        return [float(step.loss) for step in made]


def test_stages_in_bf16_resume_with_the_callers_own_object(tmp_path):
    losses = _in_bf16(None, tmp_path / "one", Parallel(), 0)
    found = [run(_in_bf16, 2, tmp_path / "two", STAGES, stop)[0] for stop in (1, 0)]
    assert [len(each) for each in found] == [1, 1]
    assert [*found[0], *found[1]] == pytest.approx(losses, rel=1e-2)


class Evaluating(TinyGPT):
    def evaluate(self, model, batch):
        return self.loss(model, batch), {}


class Counter(nn.Module):
    """Its forward counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class With(Chain):
    """A layer in front of the head."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def model(self):
        network = super().model()
        network[4] = nn.Sequential(self.layer.to(self.dtype), network[4])
        return network


class OwnOptimizer(Chain):
    """Its optimizer fails on one stage."""

    def optimizer(self, model, config):
        if "4.weight" not in dict(model.named_parameters()):
            raise ValueError("no head")
        return super().optimizer(model, config)


class Broken(Chain):
    """A part of the loss after the blocks fails."""

    def loss(self, model, batch):
        super().loss(model, batch)
        raise ValueError("after the model")


def refused(world, folder):
    for task, changes, words in (
        (Evaluating(), {}, ("--parallel.pipeline 2", "evaluate")),
        (With(Counter()), {}, ("--parallel.pipeline 2", "4.0.calls")),
        (With(nn.BatchNorm1d(4)), {}, ("--parallel.pipeline 2", "4.0", "BatchNorm")),
        (TinyGPT(), {"batch_size": 4, "micro_batch_size": 4}, ("--parallel.pipeline 2", "1 micro-batches")),
        (TinyGPT(), {"parallel": Parallel(pipeline=3)}, ("--parallel.pipeline 3", "2 ranks", "multiple of 3")),
    ):
        with refuses(ConfigError, *words):
            train(world, folder, task, 1, **{"parallel": STAGES, **changes})
    with refuses(DataError, "loss", "after the model"):
        trained(world, folder, Broken(), STAGES)
    with refuses(PeerError if world.rank else DataError, "optimizer", "no head"):
        trained(world, folder, OwnOptimizer(), STAGES)
    return (folder / "r").exists()


def _freezing(world, folder):
    with lockstep.Run(small_runs.config(folder, parallel=STAGES, max_steps=3, report=False), Chain(), world) as made:
        for _ in made:
            if world.rank == 0:
                made.model[0].requires_grad_(False)


def test_a_stage_refuses_to_freeze_what_others_do_not_have(tmp_path):
    with pytest.raises(RankError, match=r"froze 0\.weight: --parallel\.pipeline 2 fixed"):
        run(_freezing, 2, tmp_path)


def test_what_cannot_be_cut_is_refused_first(tmp_path):
    assert run(refused, 2, tmp_path) == [False, False]
    for changes, flag in (
        ({"engine": "fsdp"}, "engine fsdp"),
        ({"log_gradients": "layers"}, "log_gradients layers"),
        ({"batchnorm": "sync"}, "batchnorm sync"),
        ({"lora": {"rank": 2}}, "lora.rank"),
    ):
        with refuses(ConfigError, flag, "parallel.pipeline 2"):
            small_runs.config(tmp_path, **{"parallel": {"pipeline": 2}, **changes})
