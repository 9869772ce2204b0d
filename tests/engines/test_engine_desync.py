"""Under every engine what several ranks hold is compared, part by part: one flipped bit is named with its rank."""

import pytest
import torch
from ranks import run
from support import build
from toys import train

import lockstep
from lockstep.errors import DifferenceError
from lockstep.guards import desync
from lockstep.tensors import local_of

CASES = [
    # engine, its options, ranks, tensor in which a bit flips
    ("ddp", {}, 3, "optimizer/last.weight/exp_avg_sq"),
    ("ddp", {}, 3, "model/offset"),
    ("zero", {}, 3, "model/last.bias"),
    ("zero", {}, 3, "model/offset"),
    ("fsdp", {}, 3, "model/offset"),
    ("fsdp", {}, 3, "optimizer/first.weight/step"),
    ("fsdp", {"sharding": "hybrid", "shard_size": 2}, 4, "model/offset"),
    ("fsdp", {"sharding": "none"}, 3, "model/first.weight"),
]


class Shifted(torch.nn.Module):
    """Two Linears and a buffer between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x):
        return self.last((self.first(x) + self.offset).relu())


class Squares(lockstep.Task):
    def model(self):
        return Shifted().double()

    def dataset(self, split):
        rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.utils.data.TensorDataset(rows)

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).square().sum()


def flip(tensor):
    """The lowest bit of the last number that this rank holds."""
    local = local_of(tensor).reshape(-1)
    words = local.view(torch.int64 if local.element_size() == 8 else torch.int32)
    words[-1] ^= 1


def said(world, made):
    try:
        desync.check(made.state_dict(), world, 3)
    except DifferenceError as error:
        return str(error)
    return ""


def flipped(world, engine, options, cases):
    """What the guard says of a healthy run, and after the flip of a bit on rank 1 of each of the tensors in turn."""
    made, batches = build(world, Squares(), engine, size=12, count=3, **options)
    train(world, made, batches, Squares())
    found = [said(world, made)]
    for name in cases:
        for _ in range(2):  # the second flip puts it back
            state = made.state_dict()  # collective under zero
            if world.rank == 1:
                flip(state[name])
            found.append(said(world, made))
    return found


@pytest.mark.parametrize(
    ("engine", "options", "size"), list(dict.fromkeys((c[0], tuple(c[1].items()), c[2]) for c in CASES))
)
def test_one_bit_of_what_several_ranks_hold_is_named(engine, options, size):
    names = [case[3] for case in CASES if (case[0], tuple(case[1].items()), case[2]) == (engine, options, size)]
    ranks = run(flipped, size, engine, dict(options), names)
    assert all(found == ranks[0] for found in ranks)
    healthy, *rest = ranks[0]
    assert healthy == ""
    for name, (wrong, back) in zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True):
        _, parameter, key = name.rsplit("/", 2) if name.startswith("optimizer/") else ("", "", "")
        shown = f"the optimizer state {key} of {parameter}" if key else name
        wanted = (
            f"after step 3 rank 1 differs from the other ranks in {shown}; "
            "resume from a checkpoint, and test the memory"
        )
        assert wrong == wanted
        assert back == ""


def shards(world):
    """A bit of a shard that ranks 1 and 3 hold, flipped on rank 1; then one of the optimizer's state for it."""
    made, batches = build(world, Squares(), "fsdp", size=8, count=3, sharding="hybrid", shard_size=2)
    train(world, made, batches, Squares())
    found = []
    for name in ("model/first.weight", "optimizer/first.weight/exp_avg"):
        if world.rank == 1:
            flip(made.state_dict()[name])
        found.append(said(world, made))
    return found


def test_a_copy_of_a_shard_is_compared_with_its_copies_alone():
    for first, both in run(shards, 4):
        assert first.startswith("after step 3 rank 1 and rank 3 differ (no majority) in model/first.w")
        assert " in model/first.weight (and 1 more tensors); " in both


def exchanges(world):
    """How often the ranks spoke in a check of a healthy state, and which tensors were read."""
    made, batches = build(world, Squares(), "fsdp", size=8, count=1)
    train(world, made, batches, Squares())
    state, read, gathered = made.state_dict(), [], []
    kept, gather = desync.fingerprints, world.gather
    desync.fingerprints = lambda held: read.extend(held) or kept(held)
    type(world).gather = lambda self, value: gathered.append(1) or gather(value)
    desync.check(state, world, 1)
    return len(gathered), sorted(read)


def test_check_reports_once_and_reads_no_private_part():
    count, read = run(exchanges, 2)[0]
    assert count == 1
    assert read == [
        "model/offset",
        *(f"optimizer/{layer}.{kind}/step" for layer in ("first", "last") for kind in ("bias", "weight")),
    ]


class Moving(Shifted):
    """Forwards write its buffers: in place, by another tensor, by torch's own layers, and where no state keeps them."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.parametrizations.spectral_norm(self.first)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("codebook", torch.zeros(3, 8), persistent=False)

    def forward(self, x):
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
                self.codebook = self.codebook * 0.9 + x[0]
        return self.last(self.norm(x + self.average).relu())


class Writing(Shifted):
    """A forward that writes a weight, from what this rank computes."""

    def forward(self, x):
        with torch.no_grad():
            self.last.weight[0, 0] += 1e-9 * x.sum()
        return super().forward(x)


class Made(Squares):
    def __init__(self, kind):
        self.kind = kind

    def model(self):
        return self.kind().double()


def guarded(world, kind, engines):
    """What the guard says after four steps under each engine, and the buffers that no state keeps."""
    found = []
    for name in engines:
        made, batches = build(world, Made(kind), name, size=12, micro=2, count=4)
        train(world, made, batches, Made(kind))
        plain = next(part for part in made.model.modules() if isinstance(part, kind))
        found.append((said(world, made), [buffer.tolist() for buffer in plain.buffers()]))
    return found


def test_buffers_that_forwards_write_raise_no_alarm():
    one, two = run(guarded, 2, Moving, ["ddp", "zero", "fsdp"])
    assert one == two
    assert [line for line, _ in one] == ["", "", ""]
    assert all(any(buffers[0]) for _, buffers in one)


def test_a_weight_that_a_forward_writes_is_named():
    """Under zero nobody sees it: the update ends with the owner's values on every rank."""
    for found in run(guarded, 3, Writing, ["ddp"]):
        assert " in model/last.weight" in found[0][0]
