"""The loop's steps, one call after the other: where the time goes, what is seeded, and what an empty slot does."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from toys import Partial

from lockstep.clock import HostClock, make_clock
from lockstep.data.batches import MicroBatch
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.errors import ConfigError
from lockstep.loop import StepControl, check_scalar, loss_of, steps
from lockstep.passes import LossWeights


class Told:
    """Stands in for clock and engine, and writes down what is asked of them, in order."""

    def __init__(self):
        self.said, self.model = [], torch.nn.Linear(1, 1)

    def start(self):
        self.said.append("start")

    def lap(self, name):
        self.said.append(name)

    def seed(self, step, index):
        self.said.append(f"seed {step} {index}")

    def accumulate(self, last, counts=True):
        self.said.append(f"last {last}")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def backward(self, loss, weight):
        self.said.append(f"backward {float(loss.detach()):g} {weight:g}")

    def step(self, factor, limit, momentum=None, evaluate=None):
        self.said.append(f"step {factor} {limit}")
        return StepResult(torch.tensor(2.0), limit > 0)


@dataclass
class Task(Partial):
    """The loss of a micro-batch is its data, times the model's weight, which is one."""

    reduction: str = "sum"

    def loss(self, model, batch):
        return model.weight.sum() / model.weight.sum().detach() * batch


def run(task, micro, items):
    told = Told()
    feed = [(step, micro) for step in range(2)]
    exchange = StepExchange(World(), lambda step: items, None)
    plan = StepControl(lambda step: 0.5 + step, told.seed, told, lambda step: 7.0 - 8.0 * step)
    records = list(steps(told, task, iter(feed), exchange, plan))
    return told.said, records


def test_the_calls_of_two_steps_in_order():
    """What comes before the first forward is the loading, as is what is told before the update and heard after it. The
    clock begins anew after each step's record was handed out: the caller's body belongs to nobody."""
    micro = [MicroBatch(3.0, 4, 2, 1.0), MicroBatch(5.0, 5, 2, 1.0), MicroBatch(5.0, 5, 2, 0.0)]
    said, records = run(Task(), micro, 4)
    wanted = ["start"]
    for step, update in enumerate(("step 0.5 7.0", "step 1.5 -1.0")):
        wanted += [
            "data",
            *(f"seed {step} 4", "last False", "forward", "backward 3 0.25", "backward/alone"),
            *(f"seed {step} 5", "last False", "forward", "backward 5 0.25", "backward/alone"),
            *(f"seed {step} 5", "last True", "forward", "backward 5 0", "backward"),
            *("data", update, "update", "data", "start"),
        ]
    assert said == wanted
    assert [[float(loss) for loss in record.losses] for record in records] == [[3.0, 5.0]] * 2  # the empty slot's not
    assert not any(loss.requires_grad for record in records for loss in record.losses)
    found = [(record.step, record.items, record.factor, float(record.norm), record.applied) for record in records]
    assert found == [(0, 4, 0.5, 2.0, True), (1, 4, 1.5, 2.0, False)]


def test_a_step_without_items_divides_by_one():
    said, _ = run(Task(), [MicroBatch(0.0, 0, 0, 1.0)], 0)
    assert "backward 0 1" in said


@pytest.mark.parametrize(
    ("reduction", "weights", "recorded"),  # of micro-batches of 3 and 1 of 4 items, with losses 3 and 5
    [
        ("sum", (0.25, 0.25), [3.0, 5.0]),
        ("mean", (0.75, 0.25), [9.0, 5.0]),
        ("micro-batch", (0.75, 0.25), [9.0, 5.0]),
        ("total", (1, 1), [12.0, 20.0]),
        ("whole", (1, 1), [12.0, 20.0]),
    ],
)
def test_each_reduction_weighs_the_micro_batches_of_a_step(reduction, weights, recorded):
    said, records = run(Task(reduction), [MicroBatch(3.0, 0, 3, 1.0), MicroBatch(5.0, 1, 1, 1.0)], 4)
    backwards = [line for line in said if line.startswith("backward ")]
    assert backwards == [f"backward 3 {weights[0]:g}", f"backward 5 {weights[1]:g}"] * 2
    assert [[float(loss) for loss in record.losses] for record in records] == [recorded] * 2  # divided by the items


@pytest.mark.parametrize("reduction", ["mean", "micro-batch", "total", "whole"])
def test_the_only_micro_batch_of_a_step_is_weighted_by_exactly_1(reduction):
    """A mean times its items and divided by them is not the same bits."""
    for items in (3, 7, 49, 0.3):
        assert LossWeights(reduction, items).share(MicroBatch(None, 0, items, 1.0)) == 1.0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_is_that_of_the_task(reduction):
    batch = SimpleNamespace(data=3.0, items=4)
    assert loss_of(Task(reduction))(torch.nn.Linear(1, 1), batch).item() == pytest.approx(3.0)


def test_a_loss_that_is_no_tensor_is_one_line():
    """A run that resumes does not try the task before its first step."""
    task = SimpleNamespace(reduction="sum", loss=lambda model, data: 3.0)
    with pytest.raises(ConfigError, match="`loss` returned a float: it must return one number"):
        loss_of(task)(torch.nn.Linear(1, 1), SimpleNamespace(data=3.0, items=4))


def test_a_loss_is_one_number_whatever_its_shape():
    model, batch = torch.nn.Linear(1, 1), SimpleNamespace(data=None, items=4)
    task = SimpleNamespace(reduction="sum", loss=lambda model, data: (model.weight * 0 + 3.0).reshape(1))
    loss = loss_of(task)(model, batch)
    assert (loss.shape, loss.item(), loss.requires_grad) == ((), 3.0, True)
    for value in (torch.tensor(3), torch.tensor([3.0, 4.0]), torch.tensor(3j)):  # an evaluation's, without a graph
        with torch.no_grad(), pytest.raises(ConfigError, match="must return one number, a 0-dim float tensor"):
            check_scalar(value)


def test_device_clock_reports_finished_laps_without_waiting():
    with FakeCuda(fast=False) as cuda:
        clock = make_clock(DEVICE)
        assert clock.read() == clock.spent() == {}
        for step in range(4):
            clock.start()
            for name in ("data", "backward/alone", "backward", "backward/alone"):
                clock.lap(name)  # an event each millisecond
            assert clock.steps == max(0, step - 1)  # the device is a step behind, and a start looks
            cuda.reached = cuda.clock - 5  # the end of the step before
        assert clock.read() == {"data": 1.0, "backward": 3.0}
        assert clock.steps == 3
        assert clock.spent() == pytest.approx({"data": 3e-3, "backward/alone": 6e-3, "backward": 3e-3})
        assert clock.read() == {"data": 1.0, "backward": 3.0}  # nothing is new
        clock.start()
        assert clock.steps == 3  # one that was begun is none yet
        cuda.reached = cuda.clock
        assert clock.read() == {"data": 1.0, "backward": 3.0}
        assert clock.steps == 4
        assert clock.spent()["data"] == pytest.approx(4e-3)
        assert len(cuda.events) <= 15  # taken again
    assert not [line for line in cuda.log if line.startswith("wait")]


def test_clock_reports_laps_of_one_start_together_by_step(monkeypatch):
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr("lockstep.clock.time", SimpleNamespace(perf_counter=lambda: now.value))
    clock = HostClock()
    for count in (2, 3):
        for _ in range(count):
            clock.start()
            for name, seconds in (("data", 0.25), ("backward/alone", 0.5), ("backward", 1.0), ("backward/alone", 0.5)):
                now.value += seconds
                clock.lap(name)
            now.value += 9.0  # nobody's
        assert clock.read() == {"data": 250.0, "backward": 2000.0}
    assert clock.steps == 5
    assert clock.spent() == {"data": 1.25, "backward/alone": 5.0, "backward": 5.0}
