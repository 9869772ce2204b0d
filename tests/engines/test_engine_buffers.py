"""Buffers that a maker made in odd ways, or other ones on each rank: every engine begins with rank 0's."""

import math

import pytest
import torch
from ranks import run
from support import build, whole
from toys import train

import lockstep
from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, StepResult
from lockstep.engines.buffers import as_before, with_buffers
from lockstep.engines.request import EngineRequest, OwnState
from lockstep.errors import ConfigError

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


def test_expanded_buffers_train_as_rank_zero_alone():
    wanted = run(trained, 1, [("single", {"exact": True})])[0][0]
    for of_rank in run(trained, 2, CASES):
        for (name, settings), found in zip(CASES, of_rank, strict=True):
            if settings["exact"]:
                assert found == wanted, name
            for mine, other in zip(found[:2], wanted[:2], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-11, atol=1e-11, msg=name)
            assert found[2] == wanted[2], name


class Counting(torch.nn.Module):
    """A forward that moves buffers of several dtypes and shapes, one of them by another tensor in its place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("calls", torch.tensor([3, 4]))
        self.register_buffer("wide", torch.arange(3, dtype=torch.float64))
        self.register_buffer("still", torch.ones(2))

    def forward(self, x):
        for buffer in (self.mean, self.calls, self.wide):
            buffer += 1
        self.scale = self.scale + 1
        return x


class Still:
    """An engine that moves no weight; the norm of every step is 1, and the host may not know what came of it."""

    def __init__(self, model, knows):
        self.model, self._knows = model, knows

    def accumulate(self, last, counts=True):
        return NOTHING

    def backward(self, loss, weight=1.0):
        pass

    def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
        return StepResult(torch.tensor(1.0), limit > 1.0 if self._knows else None)


def moved(made, *weights, limit=math.inf):
    """By how much each buffer was moved in a step of micro-batches of these weights."""
    before = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
    for number, weight in enumerate(weights):
        with made.accumulate(number == len(weights) - 1):
            made.backward(made.model(torch.zeros(1)), weight)
    made.step(1.0, limit)
    found = {name: (buffer - before[name]).reshape(-1).tolist() for name, buffer in made.model.named_buffers()}
    assert all(buffer.dtype == before[name].dtype for name, buffer in made.model.named_buffers())
    assert all(len(set(each)) == 1 for each in found.values())
    return {name: each[0] for name, each in found.items()}


@pytest.mark.parametrize("knows", [True, False])
def test_only_applied_steps_and_slots_that_count_move_buffers(knows):
    model = Counting()
    made = with_buffers(Still(model, knows), model, World(), EngineRequest())

    def by(count):
        return {"mean": count, "scale": count, "calls": count, "wide": count, "still": 0.0}

    assert moved(made, 1.0) == by(1)
    assert moved(made, 1.0, 1.0, 0.0) == by(2)
    assert moved(made, 1.0, 1.0, limit=1.0) == by(0)  # not below the limit
    assert moved(made, 0.0, 1.0) == by(1)
    assert moved(made, 1.0, limit=-math.inf) == by(0)
    assert moved(made, 1.0, limit=1.5) == by(1)
    model(torch.zeros(1))  # outside of a step, which begins with what is there
    assert moved(made, 1.0, limit=1.0) == by(0)


class Two(World):
    """One of two ranks; `shapes` are those that the other has for its buffers, where they are other ones."""

    def gather(self, value):
        return [value, value if isinstance(value, list) else value | self.shapes]


def test_ranks_share_forward_buffers_of_equal_shapes(monkeypatch):
    sent, model, world = [], Counting(), Two(size=2)
    monkeypatch.setattr(
        collectives.dist, "broadcast", lambda tensor, group, group_src: sent.append((tensor.dtype, group_src))
    )
    # The other writes the same.
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda writers, group: writers.mul_(2))
    world.shapes = {"mean": [7, 3]}
    made = with_buffers(Still(model, True), model, world, EngineRequest())
    for _ in range(4):
        moved(made, 1.0)
        assert sent == [(torch.float32, 0), (torch.int64, 0), (torch.float64, 0)]
        sent.clear()
    alone = with_buffers(
        Still(model, True), model, world, EngineRequest(options=EngineOptions(broadcast_buffers=False))
    )
    moved(alone, 1.0)
    assert sent == []


class Silent(torch.nn.Module):
    """A forward that writes buffers behind torch's count of writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("uses", torch.tensor([3.0, 4.0]))
        self.register_buffer("holes", torch.tensor([1.0, torch.nan]))

    def forward(self, x):
        self.codes.data += 1
        if self.uses.device.type == "cpu":
            self.uses.numpy()[:] += 1
        return x


@pytest.mark.parametrize("knows", [True, False])
def test_untracked_buffer_writes_belong_to_the_step(knows):
    model = Silent()
    del model._buffers["holes"]
    made = with_buffers(Still(model, knows), model, World(), EngineRequest())
    for limit, weights, by in (
        (1.0, (1.0,), 0),  # not applied
        (math.inf, (1.0, 0.0, 1.0), 2),
        (math.inf, (0.0, 1.0), 1),
        (1.0, (1.0, 1.0), 0),
    ):
        assert moved(made, *weights, limit=limit) == {"codes": by, "uses": by}


def refused(model, own=None, forward=None):
    """The line with which exact mode on one rank refuses the second step; "" where it takes it."""
    made = with_buffers(Still(model, True), model, World(), EngineRequest(exact=1, own=OwnState(own)))
    try:
        for _ in range(4):
            with made.accumulate(True):
                made.backward((forward or model)(torch.zeros(1)))
            made.step()
    except ConfigError as error:
        return str(error)
    return ""


def test_exact_mode_refuses_by_name_on_one_rank_too():
    assert "buffer codes" in refused(Silent())
    still = Silent()
    assert refused(still, forward=lambda x: x) == ""  # a NaN that stays is no write
    queue = torch.zeros(4)
    assert "task/queue" in refused(still, lambda: {"queue": queue}, lambda x: queue.add_(1))
    assert "task/queue" in refused(still, lambda: {"queue": queue}, lambda x: queue.numpy().__iadd__(1))
    steps = []
    late = lambda x: steps.append(0) or (queue.add_(1) if len(steps) == 4 else x)  # noqa: E731
    assert "task/queue" in refused(still, lambda: {"queue": queue}, late)


class Queue:
    """A task's tensors: a queue that the loss writes in one of several ways, and an average that it does not."""

    def __init__(self, write):
        self.queue, self.average, self.write = torch.arange(4.0), torch.zeros(3), write

    def state_dict(self):
        return {"queue": self.queue, "average": self.average}

    def loss(self, x):
        self.write(self, x)
        return x.sum()


def in_place(task, x):
    task.queue[:-1] = task.queue[1:].clone()
    task.queue[-1] = x.sum()


def by_another(task, x):
    task.queue = torch.cat([task.queue[1:], x.sum().reshape(1)])


def behind(task, x):
    task.queue.numpy()[:] = [*task.queue.tolist()[1:], float(x.sum())]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("write", [in_place, by_another, behind])
def test_task_tensor_that_the_loss_writes_belongs_to_the_step(write, knows):
    task, model = Queue(write), torch.nn.Linear(2, 2)
    made = with_buffers(Still(model, knows), model, World(), EngineRequest(own=OwnState(task.state_dict)))

    def step(*numbers, limit=math.inf, counts=True):
        before = task.queue.tolist()
        for place, number in enumerate(numbers):
            with made.accumulate(place == len(numbers) - 1, counts):
                made.backward(task.loss(torch.tensor([abs(number)])), float(number > 0))
        if counts:
            made.step(1.0, limit)
        return before, task.queue.tolist()

    for _ in range(3):
        before, after = step(5.0, -6.0, 7.0)  # the second is an empty slot
        assert after == [*before[2:], 5.0, 7.0]
        before, after = step(8.0, limit=1.0)
        assert after == before
        before, after = step(9.0, counts=False)
        assert after == before
        task.average += 1  # in the loop's body
        made.step(1.0)
        assert task.average.tolist()[0] == task.average.tolist()[2]
    assert task.average.tolist() == [3.0, 3.0, 3.0]


def test_task_tensor_that_cannot_be_restored_is_refused():
    def growing(task, x):
        task.queue = torch.cat([task.queue, x])

    def once(write, state=Queue.state_dict):
        task, model = Queue(write), torch.nn.Linear(2, 2)
        made = with_buffers(Still(model, True), model, World(), EngineRequest(own=OwnState(lambda: state(task))))
        with made.accumulate(True):
            made.backward(task.loss(torch.ones(1)))
        made.step()

    with pytest.raises(ConfigError, match="task/queue"):
        once(growing)
    with pytest.raises(ConfigError, match=r"task/queue.*copy"):
        once(in_place, lambda task: {"queue": task.queue.clone()})


class Coded(Odd):
    """Buffers and a task's queue that each rank's forward would fill with its own."""

    def forward(self, x):
        self.table.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Queued(Task):
    def __init__(self, rank):
        super().__init__(rank)
        self.queue = torch.zeros(8, dtype=torch.float64)
        self.untouched = torch.zeros(2)

    def model(self):
        return Coded(self.rank).double()

    def state_dict(self):
        return {"queue": self.queue, "untouched": self.untouched}

    def loss(self, model, batch):
        loss = model(batch) + (self.queue.clone() * batch.sum()).sum()
        self.queue = torch.cat([self.queue[len(batch) :], batch[:, 0]])
        return loss


def shared(world, names):
    found = []
    for name in names:
        task = Queued(world.rank)
        settings = {"own": OwnState(task.state_dict)}
        made, batches = build(world, task, name, size=4, count=5, **settings)
        train(world, made, batches, task)
        module = next(part for part in made.model.modules() if isinstance(part, Coded))
        found.append((module.table.tolist(), task.queue.tolist()))
    return found


def test_what_forwards_write_is_rank_zeros_in_every_engine():
    first, second = run(shared, 2, ["ddp", "zero", "fsdp"])
    assert first == second
    assert all(any(queue) for _, queue in first)


class Resizing(torch.nn.Module):
    """As the observers of quantisation-aware training: buffers that a first forward makes or resizes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.zeros(0))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("later", None)

    def forward(self, x):
        self.least.resize_(x.shape).copy_(x)
        self.scale = x.abs().max()
        self.register_buffer("later", x.clone())
        self.register_buffer("more", x.clone())
        return x


def test_buffers_that_a_forward_resizes_or_makes_are_restored():
    model, task = Resizing(), Queue(by_another)
    least, scale = model.least, model.scale
    with as_before(model, task.state_dict):
        model(torch.ones(3))
        task.loss(torch.ones(1))
        task.average.add_(1)
    assert {name: None if b is None else b.tolist() for name, b in model._buffers.items()} == {
        "least": [],
        "scale": [1.0],
        "later": None,
    }
    assert (model.least, model.scale) == (least, scale)
    assert (task.queue.tolist(), task.average.tolist()) == ([0.0, 1.0, 2.0, 3.0], [0.0] * 3)
