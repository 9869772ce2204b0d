"""BatchNorm layers that run several times in a micro-batch of a LightningModule: as in a plain loop, on any ranks."""

import dataclasses
import importlib
import os

import pytest
import torch
import torch.nn.functional as F
from ranks import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

pytest.importorskip("lightning")

pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]

STEPS, MICRO = 4, 4  # micro-batches of four samples


class Own(nn.BatchNorm1d):
    """A class of one's own, which is not replayed."""


def networks(kind=nn.BatchNorm1d):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        maker = nn.Sequential(nn.Linear(4, 8), kind(8), nn.ReLU(), nn.Linear(8, 6))
        judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        return maker.double(), judge.double()


def samples():
    return torch.randn(STEPS * MICRO * 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def score(out, wanted):
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, wanted))


def adversaries(L, recomputes, norm=nn.BatchNorm1d):
    class Adversaries(L.LightningModule):
        """What is made is judged for the judge, and after its step, by the same graph, for the maker."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = networks(norm)

        def judged(self, x):
            return (
                torch.utils.checkpoint.checkpoint(self.judge, x, use_reentrant=False) if recomputes else self.judge(x)
            )

        def training_step(self, batch, batch_idx):
            (x,) = batch
            make, judge = self.optimizers()
            made = self.maker(x[:, :4])
            judge.zero_grad()
            self.manual_backward(score(self.judged(x), 1.0) + score(self.judged(made.detach()), 0.0))
            judge.step()
            make.zero_grad()
            self.manual_backward(score(self.judged(made), 1.0))
            make.step()

        def configure_optimizers(self):
            kinds = torch.optim.SGD
            return kinds(self.maker.parameters(), lr=0.1), kinds(self.judge.parameters(), lr=0.2)

    return Adversaries


def siamese(L):
    class Siamese(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.maker, _ = networks()

        def training_step(self, batch, batch_idx):
            (x,) = batch
            return F.mse_loss(self.maker(x[:, :4]), self.maker(2.0 * x[:, 2:]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Siamese


def trained(folder, which, exact=False, batchnorm="auto", devices=MICRO):
    package = importlib.import_module("lightning.pytorch")
    norm = Own if which == "own" else nn.BatchNorm1d
    kind = siamese(package) if which == "siamese" else adversaries(package, which == "recomputing", norm)
    data = DataLoader(TensorDataset(samples()), 4 * MICRO // devices)
    config, task = lockstep.from_lightning(kind(), data, devices=devices)
    changes = {"save_dir": str(folder), "report": False, "precision": "float64", "exact": exact, "batchnorm": batchnorm}
    with lockstep.Run(dataclasses.replace(config, **changes), task) as made:
        assert sum(1 for _ in made) == STEPS
    return {name: tensor.tolist() for name, tensor in made.model.state_dict().items()}


def on_ranks(world, folder, which, *settings):
    world.leave()
    os.environ["OMP_NUM_THREADS"] = "1"
    return trained(folder, which, *settings)


def plain(which, micro_batches=MICRO):
    """One process, torch's own layers, one micro-batch after the other before each optimizer's step."""
    maker, judge = networks()
    make, decide = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.2)
    for step in samples().split(4 * MICRO):
        micro = step.split(4 * MICRO // micro_batches)
        if which == "siamese":
            for x in micro:
                (F.mse_loss(maker(x[:, :4]), maker(2.0 * x[:, 2:])) / micro_batches).backward()
        else:
            made = []
            for x in micro:
                made.append(maker(x[:, :4]))
                ((score(judge(x), 1.0) + score(judge(made[-1].detach()), 0.0)) / micro_batches).backward()
            decide.step()
            for each in made:
                (score(judge(each), 1.0) / micro_batches).backward()
        make.step()
        make.zero_grad()
        decide.zero_grad()
    found = {f"maker.{name}": tensor for name, tensor in maker.state_dict().items()}
    return found | (
        {f"judge.{name}": tensor for name, tensor in judge.state_dict().items()} if which != "siamese" else {}
    )


@pytest.mark.parametrize("which", ["adversaries", "recomputing", "siamese"])
def test_each_forward_of_a_layer_counts_as_in_a_plain_loop(tmp_path, which):
    wanted = plain(which)
    counted = {name: int(value) for name, value in wanted.items() if name.endswith("tracked")}
    each = STEPS * MICRO
    assert counted == (
        {"maker.1.num_batches_tracked": 2 * each}
        if which == "siamese"
        else {"maker.1.num_batches_tracked": each, "judge.1.num_batches_tracked": 3 * each}
    )
    threads = torch.get_num_threads()
    try:
        alone = {exact: trained(tmp_path / f"one-{exact}", which, exact) for exact in (False, True)}
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    two = {exact: run(on_ranks, 2, tmp_path / f"two-{exact}", which, exact, timeout=120.0) for exact in (False, True)}
    assert two[True] == [alone[True]] * 2
    for found in (*alone.values(), *two[False]):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name], dtype=value.dtype), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", ["adversaries", "recomputing", "siamese"])
def test_two_ranks_together_are_one_device_with_the_whole_batch(tmp_path, which):
    wanted = plain(which, micro_batches=1)
    for found in run(on_ranks, 2, tmp_path, which, False, "sync", 2, timeout=120.0):
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name], dtype=value.dtype), value, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*leaves 1 layers of other classes")
def test_custom_layer_keeps_the_first_micro_batches_statistics(tmp_path):
    """As each buffer that a forward writes; what a graph of one micro-batch holds is not written for another."""
    wanted, found = plain("adversaries"), trained(tmp_path, "own")
    assert found["maker.1.num_batches_tracked"] == STEPS
    assert found["maker.1.running_mean"] != wanted["maker.1.running_mean"].tolist()
    for name in ("maker.0.weight", "maker.1.weight", "judge.1.running_mean"):
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), wanted[name], rtol=1e-10, atol=1e-12)
