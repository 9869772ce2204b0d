"""The loop against plain PyTorch written by hand, and against its own past."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from toys import Ragged, fit, parts, train

from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.optim.groups import groups
from lockstep.optim.schedule import factor
from lockstep.seeds import derive

GOLDEN = Path(__file__).parent / "golden" / "losses.json"


def by_hand(task, size, micro, count, lr, clip):
    """The training that the parts promise, with nothing of lockstep's but the order and the seeds."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=lr, betas=(0.9, 0.95), fused=True)
    data = task.dataset("train")
    order, losses, norms = Shuffled(len(data), 0), [], []
    for step in range(count):
        _, samples = order.at(step * size, (step + 1) * size)
        batches = [task.collate([data[i] for i in samples[m : m + micro]]) for m in range(0, size, micro)]
        items = sum(task.count(batch) for batch in batches)
        total = 0.0
        for index, batch in enumerate(batches):
            torch.manual_seed(derive(0, "micro", step, index))
            loss = task.loss(model, batch)
            (loss / items).backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(step, count, 2, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / items)
    return losses, norms, model


@pytest.mark.parametrize(("size", "micro", "dropout"), [(8, 8, 0.0), (8, 2, 0.3), (12, 3, 0.1)])
def test_the_loop_is_plain_pytorch(size, micro, dropout):
    task = Ragged(dropout=dropout)
    made, batches = parts(World(), task, size=size, micro=micro, count=10)
    losses, norms = train(World(), made, batches, task)
    wanted, wanted_norms, model = by_hand(task, size, micro, 10, lr=0.01, clip=1.0)
    assert losses == pytest.approx(wanted, rel=1e-13)
    assert norms == pytest.approx(wanted_norms, rel=1e-12)
    for mine, theirs in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_losses_are_what_they_were():
    """A change that moves this curve changes everybody's training: say so, and run `python tests/test_parity.py`."""
    assert curve() == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-9)


def curve():
    losses, norms, _ = fit(World(), Ragged(samples=64, dropout=0.2), size=12, micro=3, count=30)
    return losses + norms


def test_the_schedule():
    found = [factor(step, 100, 10, 0.1) for step in range(120)]
    assert found[:10] == [pytest.approx((k + 1) / 11) for k in range(10)]
    assert found[10] == 1.0
    assert found[55] == pytest.approx(0.55)
    assert found[100:] == [0.1] * 20
    assert all(a > b for a, b in itertools.pairwise(found[10:101]))
    assert [factor(step, 5, 0, 0.0) for step in (0, 5)] == [1.0, 0.0]
    assert [factor(step, 100, 2, 0.1, "constant") for step in (0, 2, 500)] == [pytest.approx(1 / 3), 1.0, 1.0]
    for step in range(100):  # against PyTorch's own scheduler
        theirs = 0.1 + 0.9 * (1 + math.cos(math.pi * step / 100)) / 2
        assert factor(step, 100, 0, 0.1) == pytest.approx(theirs)


def test_seeds_differ_wherever_their_paths_do():
    paths = [(s, p, a, b) for s in (0, 1, 2**63) for p in ("micro", "sample") for a in range(12) for b in range(12)]
    found = {derive(s, p, a, b) for s, p, a, b in paths}
    assert len(found) == len(paths)
    assert all(0 <= key < 2**64 for key in found)
    assert derive(0, "micro", 1, 2) == 7550793133337812045  # the same on every machine and version
    assert derive(-1, "micro", -2) == derive(2**64 - 1, "micro", 2**64 - 2)  # of any number its 64 lowest bits count


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(curve(), indent=0) + "\n")
