"""Each engine's step in absolute numbers: norms, clipping, rates and loss scaling against plain PyTorch's SGD.

Under AdamW a gradient that is wrong by a constant factor trains the same; SGD shows it.
"""

import itertools
import math

import pytest
import torch
from ranks import run
from support import whole
from torch import nn

import lockstep
from lockstep.distributed.world import World
from lockstep.engines.fsdp.apply import FILLS_UNUSED
from lockstep.errors import LockstepError
from lockstep.transforms import autocast

FACTORS = (1.0, 0.5, 0.25)
COUNTS = (2, 2, 1, 2)  # of the samples in a step's micro-batches: seven in all, so that no factor is a power of two


class Table(nn.Module):
    """An embedding larger than any matrix, and a matrix with its bias."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.out = nn.Embedding(7, 6), nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, words):
        return self.out(self.table(words).sum(1))


def batches(step, dtype):
    """A step's micro-batches: (words, wanted outputs)."""
    generator = torch.Generator().manual_seed(10 + step)
    made = [
        (torch.randint(7, (count, 2), generator=generator), torch.randn(count, 3, generator=generator).to(dtype))
        for count in COUNTS
    ]
    return [(words, wanted * 3.0**step) for words, wanted in made]  # steps of different norms


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().sum()


def sgd(model, rate=0.02):
    """Two groups at rates of their own; the embedding, which is largest, in the second."""
    tables = [p for name, p in model.named_parameters() if "table" in name]
    others = [p for name, p in model.named_parameters() if "table" not in name]
    return torch.optim.SGD([{"params": others}, {"params": tables, "lr": 0.07}], lr=rate, momentum=0.9)


def by_hand(clip, dtype=torch.float64, steps=3):
    """(norms, parameters) of plain PyTorch: the loss is summed over seven samples and divided by seven."""
    model = Table(dtype)
    optimizer = sgd(model)
    base, norms = [group["lr"] for group in optimizer.param_groups], []
    for step in range(steps):
        for batch in batches(step, dtype):
            (loss_of(model, batch) / sum(COUNTS)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * FACTORS[step]
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def take(world, made, group):
    """One step's micro-batches through an engine: each rank its contiguous slots, an empty one with weight 0."""
    share = -(-len(group) // world.size)
    slots = range(world.rank * share, (world.rank + 1) * share)
    for slot in slots:
        with made.accumulate(slot == slots[-1]):
            made.backward(loss_of(made.model, group[slot % len(group)]), (slot < len(group)) / sum(COUNTS))


def by_engine(world, name, clip, scaled, exact, dtype=torch.float64, steps=3):
    """(norms, parameters, which steps were applied) of an engine's own loop."""
    made = lockstep.engine(
        name, Table(dtype), sgd, world, clip=clip, loss_scaling=scaled, exact_micro_batches=4 if exact else 0,
        say=lambda line: None,
    )  # fmt: skip
    norms, applied = [], []
    for step in range(steps):
        take(world, made, batches(step, dtype))
        result = made.step(FACTORS[step])
        norms.append(result.norm.item())
        applied.append(result.applied)
    state = {name: whole(tensor, world) for name, tensor in made.state_dict().items()}
    return norms, {name[6:]: tensor.tolist() for name, tensor in state.items() if name[:6] == "model/"}, applied


def every(world, cases):
    return [by_engine(world, *case) for case in cases]


CLIPS = (0.0, 5.0)  # the norms are 4.0, 11 and 18


def check(found, cases):
    for case, (norms, parameters, applied) in zip(cases, found, strict=True):
        wanted_norms, wanted = by_hand(case[1])
        assert norms == pytest.approx(wanted_norms, rel=1e-12), case
        assert applied == [True] * 3, case
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(parameters[name], dtype=value.dtype), value, rtol=1e-11, atol=1e-13)


def test_clipping_is_active_in_some_steps_alone():
    norms, _ = by_hand(5.0)
    assert norms[0] < 5.0 < norms[1] < norms[2]


def test_a_step_of_one_process_is_plain_pytorchs():
    cases = [("single", *rest) for rest in itertools.product(CLIPS, (False, True), (False, True))]
    check(every(World(), cases), cases)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_of_every_engine_is_plain_pytorchs(size):
    kinds = list(itertools.product(("ddp", "zero", "fsdp"), CLIPS, (False, True), (False, True)))
    cases = [case for case in kinds if size == 2 or not case[3]]  # three ranks own no subtrees
    for found in run(every, size, cases, timeout=120):
        check(found, cases)


class Mixed(nn.Module):
    """Parameters of many sizes, the largest of them last and in a group of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ParameterList(torch.randn(size) for size in (3, 8, 5, 13, 2))
        self.table = nn.Parameter(torch.randn(50))

    def forward(self, x):
        return sum((p * x).tanh().square().sum() for p in (*self.parts, self.table))


def bits(world, name):
    """The norms of 24 steps in float32 under exact, and the parameters after them."""
    made = lockstep.engine(name, Mixed(), sgd, world, exact_micro_batches=4, say=lambda line: None)
    norms, mine = [], 4 // world.size
    for step in range(24):
        for slot in range(world.rank * mine, (world.rank + 1) * mine):
            with made.accumulate(slot % mine == mine - 1):
                made.backward(made.model(torch.tensor(0.1 + 0.3 * step + slot)))
        norms.append(made.step(1.0).norm.item())
    return norms, {key: whole(tensor, world).tolist() for key, tensor in made.state_dict().items()}


def all_bits(world, names):
    return [bits(world, name) for name in names]


def test_the_order_of_the_parameters_shows_in_the_norm():
    """Else the next test would see nothing."""
    norms = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
    turned = norms[:, [5, 0, 1, 2, 3, 4]]
    norm = torch.linalg.vector_norm
    assert sum(bool(norm(norms[row]) != norm(turned[row])) for row in range(200)) > 20


def test_under_exact_a_norm_has_the_bits_of_one_process():
    """Whatever order an engine keeps parameters in: zero sorts its groups by their largest."""
    wanted = bits(World(), "single")
    for found in run(all_bits, 2, ("ddp", "zero", "fsdp")):
        assert [norms for norms, _ in found] == [wanted[0]] * 3
        assert [state for _, state in found] == [wanted[1]] * 3


class Whole(nn.Module):
    """Weights, data and gradients that float16 holds exactly, so that its results can be written down."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.line.weight.copy_(torch.tensor([[0.5, -0.25]]))

    def forward(self, x):
        return self.line(x)


def half(world, name, clip):
    """Two steps under float16 autocast: y = 0.5 a - 0.25 b, whose gradient is the mean of the data."""
    model = autocast(Whole(), torch.float16, "cpu")
    made = lockstep.engine(
        name, model, lambda held: torch.optim.SGD(held.parameters(), lr=0.5), world, clip=clip, loss_scaling=True,
        say=lambda line: None,
    )  # fmt: skip
    data = torch.tensor([[0.25, 0.5], [0.75, 0.0], [1.25, 1.0], [0.75, 2.5]])
    norms = []
    for _ in range(2):
        rows = data.chunk(world.size)[world.rank].split(1)
        for number, row in enumerate(rows):
            with made.accumulate(number == len(rows) - 1):
                made.backward(made.model(row).float().sum(), 0.25)
        norms.append(made.step(1.0).norm.item())
    state = {key: whole(tensor, world) for key, tensor in made.state_dict().items()}
    return norms, state["model/line.weight"].tolist(), state["scaler/scale"].item()


def halves(world, cases):
    return [half(world, *case) for case in cases]


def test_float16_in_numbers():
    """The gradient is (0.75, 1), its norm 1.25; two steps at a rate of 0.5, clipped to half of it or not."""
    cases = [(name, clip) for name in ("ddp", "zero", "fsdp") for clip in (0.0, 0.625)]
    one = [("single", clip) for _, clip in cases[:2]]
    found = run(halves, 2, cases)
    for (_, clip), (norms, weight, scale) in zip(one + cases + cases, sum(found, halves(World(), one)), strict=True):
        part = 0.5 if clip else 1.0
        assert norms == pytest.approx([1.25, 1.25], rel=1e-6)
        assert weight[0] == pytest.approx([0.5 - 0.75 * part, -0.25 - part], rel=1e-5)
        assert scale == 2.0**16


def scaled(scale, good):
    """An engine whose loss is scaled by `scale` since `good` steps, and its model."""
    model = nn.Linear(2, 1, bias=False).double()
    made = lockstep.engine(
        "single", model, torch.optim.SGD(model.parameters(), lr=0.125), World(), loss_scaling=True
    )  # fmt: skip
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    state["scaler/scale"].fill_(scale)
    state["scaler/good_steps"].fill_(good)
    made.load_state_dict(state)
    return made, model


def step(made, overflows=False):
    loss = made.model(torch.tensor([[3.0, 4.0]], dtype=torch.float64)).sum()
    made.backward(loss * math.inf if overflows else loss)
    return made.step(1.0).applied


def scaling(made):
    state = made.state_dict()
    assert {state[f"scaler/{name}"].dtype for name in ("scale", "good_steps")} == {torch.float64}
    return state["scaler/scale"].item(), int(state["scaler/good_steps"])


def test_scale_doubles_after_exactly_2000_good_steps():
    made, _ = scaled(8.0, 1998)
    assert step(made)
    assert scaling(made) == (8.0, 1999)
    assert step(made)
    assert scaling(made) == (16.0, 0)
    assert step(made)
    assert scaling(made) == (16.0, 1)


def test_overflow_halves_the_scale_and_leaves_the_weights():
    made, model = scaled(8.0, 1999)
    before = model.weight.detach().clone()
    assert not step(made, overflows=True)
    assert scaling(made) == (4.0, 0)
    assert torch.equal(model.weight, before)
    assert step(made)
    assert scaling(made) == (4.0, 1)
    assert (before - model.weight).tolist()[0] == pytest.approx([0.375, 0.5])


def test_a_resume_keeps_the_scale_and_its_good_steps():
    made, _ = scaled(32.0, 7)
    step(made)
    other, _ = scaled(1.0, 0)
    other.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()})
    assert scaling(other) == (32.0, 8)


def test_a_scale_that_halves_without_end_is_an_error():
    made, _ = scaled(2.0**-13, 0)
    assert not step(made, overflows=True)
    assert scaling(made)[0] == 2.0**-14
    with pytest.raises(LockstepError, match="gradients are not finite even at loss scale 6.1"):
        step(made, overflows=True)


class Branch(nn.Module):
    """Uses `extra` where it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.extra = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()

    def forward(self, x, branch):
        return self.extra(self.base(x)) if branch else self.base(x)


def branching(world, name, uses):
    """What an engine says in a first step whose backwards use `extra` or not, and the parameters after two steps."""
    lines, model = [], Branch()
    made = lockstep.engine(
        name, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.125), world, say=lines.append
    )  # fmt: skip
    rows = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]], dtype=torch.float64)
    mine = len(rows) // world.size
    for _ in range(2):
        for number in range(mine):
            slot = world.rank * mine + number
            with made.accumulate(number == mine - 1):
                made.backward(made.model(rows[slot : slot + 1], uses[slot]).square().sum(), 0.25)
        made.step(1.0)
    state = {key[6:]: whole(tensor, world).tolist() for key, tensor in made.state_dict().items() if key[:6] == "model/"}
    return [line for line in lines if "not used by every" in line], state


def each_branch(world, cases):
    return [branching(world, *case) for case in cases]


def test_a_parameter_that_one_of_two_backwards_uses_is_told():
    missed = [(True, False, True, True), (True, True, False, True), (False, False, False, True)]
    cases = [(name, uses) for name in ("ddp", "zero", "fsdp") for uses in (*missed, (True,) * 4)]
    if not FILLS_UNUSED:
        cases.remove(("fsdp", missed[2]))  # one rank alone uses it: refused
    for found in run(each_branch, 2, cases):
        for (name, uses), (lines, state) in zip(cases, found, strict=True):
            if uses == (True,) * 4:
                assert lines == [], (name, uses)
            else:
                assert "2 parameters" in lines[0], (name, uses)
                assert "extra.weight" in lines[0]
            wanted = branching(World(), "single", uses)[1]
            for key, value in wanted.items():
                torch.testing.assert_close(torch.tensor(state[key]), torch.tensor(value), rtol=1e-6, atol=1e-8)


class Shifted(nn.Module):
    """A layer whose input is shifted by a buffer that is in no state."""

    def __init__(self, shift):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(2, 1).double()
        self.register_buffer("shift", torch.tensor(shift, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return self.line(x + self.shift)


def shifted(world, names):
    """The weights after two steps under exact; each rank has made its buffer with another value."""
    found = []
    for name in names:
        model = Shifted(0.5 + 3.0 * world.rank)
        made = lockstep.engine(
            name, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.125), world, exact_micro_batches=4
        )  # fmt: skip
        rows, mine = (
            torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]], dtype=torch.float64),
            4 // world.size,
        )
        for _ in range(2):
            for slot in range(world.rank * mine, (world.rank + 1) * mine):
                with made.accumulate(slot % mine == mine - 1):
                    made.backward(made.model(rows[slot : slot + 1]).square().sum(), 0.25)
            made.step(1.0)
        found.append({key: whole(tensor, world).tolist() for key, tensor in made.state_dict().items()})
    return found


def test_exact_ranks_begin_with_rank_0s_buffers():
    wanted = shifted(World(), ["single"])
    for found in run(shifted, 2, ["ddp", "zero"]):
        assert found == wanted * 2
