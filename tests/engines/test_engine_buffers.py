"""Buffers that a maker made in odd ways, or other ones on each rank: every engine begins with rank 0's."""

import torch
from ranks import run
from support import build, whole
from toys import train

import lockstep

LENGTH = 200_000


class Odd(torch.nn.Module):
    """Buffers: expanded ones, and a table that no checkpoint keeps, drawn from a generator of the rank's own."""

    def __init__(self, seed):
        super().__init__()
        own = torch.Generator().manual_seed(seed)
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(1, dtype=torch.float64).expand(LENGTH))
        self.register_buffer("rows", torch.arange(4.0, dtype=torch.float64).expand(3, 4), persistent=False)
        self.register_buffer("mask", torch.tensor(True).expand(4))
        self.register_buffer("table", torch.rand(4, generator=own, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return (self.layer(x) * self.table + self.rows.sum(0) * self.mask + self.ones.mean()).square().sum()


class Task(lockstep.Task):
    def __init__(self, rank):
        self.rank = rank

    def model(self):
        return Odd(self.rank).double()

    def dataset(self, split):
        rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.utils.data.TensorDataset(rows)

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch)


def trained(world, cases):
    """(norms, the layer's bias, the buffers' sums) after three steps, for each engine and its settings."""
    found = []
    for name, settings in cases:
        task = Task(world.rank)
        made, batches = build(world, task, name, size=4, count=3, **settings)
        _, norms = train(world, made, batches, task)
        bias = next(tensor for key, tensor in made.state_dict().items() if key.endswith("layer.bias"))
        module = next(part for part in made.model.modules() if isinstance(part, Odd))
        sums = {key: float(buffer.double().sum()) for key, buffer in module.named_buffers()}
        found.append((norms, whole(bias, world).tolist(), sums))
    return found


CASES = [(name, {"exact": exact}) for name in ("ddp", "zero", "fsdp") for exact in (False, True)]


def test_expanded_buffers_and_other_tables_on_the_ranks_train_as_rank_zero_alone():
    wanted = run(trained, 1, [("single", {"exact": True})])[0][0]
    for of_rank in run(trained, 2, CASES):
        for (name, settings), found in zip(CASES, of_rank, strict=True):
            if settings["exact"]:
                assert found == wanted, name
            for mine, other in zip(found[:2], wanted[:2], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-11, atol=1e-11, msg=name)
            assert found[2] == wanted[2], name
