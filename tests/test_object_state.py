"""The state of objects: every kind of object, what is named, what is restored, and what it costs."""

import functools
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import from_lightning
from lockstep.object_state import ObjectState

Pair = namedtuple("Pair", "left right")


class Thing(types.SimpleNamespace):
    pass


class Slotted:
    __slots__ = ("late", "value")

    def __init__(self):
        self.value = [1]


@dataclass(frozen=True)
class Frozen:
    values: list
    count: int = 0


def both(action, **attributes):
    """What is named after `action(task)`, and the task restored."""
    task = Thing(**attributes)
    state = ObjectState({"task": task})
    assert state.changes() == []
    action(task)
    changed = state.changes()
    state.restore()
    assert state.changes() == []
    state.restore()
    return changed, task


def test_numbers_and_new_attributes():
    def act(task):
        task.calls += 1
        task.name = "b"
        task.new = 3
        del task.gone
        task.same = float("nan")

    changed, task = both(act, calls=1, name="a", gone=None, same=float("nan"), other=4)
    assert sorted(changed) == ["task.calls", "task.gone", "task.name", "task.new"]
    assert (task.calls, task.name, task.gone, task.other, hasattr(task, "new")) == (1, "a", None, 4, False)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda x: x.append(3)),
        ([1, 2], lambda x: x.__setitem__(0, 5)),
        ([1, 2], lambda x: x.clear()),
        ({"a": 1}, lambda x: x.update(a=2)),
        ({"a": 1, "b": 2}, lambda x: (x.pop("a"), x.update(a=1))),  # another order
        (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
        (OrderedDict(a=1, b=2), lambda x: x.clear()),
        (defaultdict(list, a=[1]), lambda x: x["b"].append(1)),
        (defaultdict(list, a=[1]), lambda x: x["a"].append(1)),
        (Counter("ab"), lambda x: x.update("b")),
        (deque([1, 2], maxlen=2), lambda x: x.append(3)),
        ({1, 2}, lambda x: x.add(3)),
        (([1], [2]), lambda x: x[1].append(3)),
        (Pair([1], 2), lambda x: x.left.append(3)),
        ([[1], [[2]]], lambda x: x[1][0].append(3)),
        ({"a": {"b": [1]}}, lambda x: x["a"]["b"].append(2)),
        ([torch.zeros(2)], lambda x: x[0].add_(1)),
        ({"t": np.zeros(2)}, lambda x: x["t"].fill(1)),
    ],
)
def test_containers_are_one_change_and_stay_the_same_object(value, change):
    before, kind = repr(value), type(value)
    changed, task = both(lambda task: change(task.box), box=value)
    assert changed == ["task.box"]
    assert task.box is value
    assert type(task.box) is kind
    assert repr(task.box) == before


def test_a_container_that_was_replaced_and_changed():
    def act(task):
        old = task.queue
        old.append(1)
        task.queue = [*old, 2]

    queue = [0]
    changed, task = both(act, queue=queue)
    assert changed == ["task.queue"]
    assert task.queue is queue
    assert queue == [0]


def test_a_write_of_equal_values_is_no_change():
    def act(task):
        task.items = list(task.items)
        task.tensor = task.tensor.clone()
        task.tensor.mul_(1)
        task.written.copy_(task.written.clone())
        task.array = task.array.copy()
        task.text = "".join(["a", "b"])
        task.pair = (1, [2])
        task.nested = {"a": [torch.ones(2)]}
        task.method = task.method.__self__.append

    values = {"items": [1], "tensor": torch.ones(2), "written": torch.full((3,), float("nan")), "array": np.ones(3)}
    changed, _ = both(act, text="ab", pair=(1, [2]), nested={"a": [torch.ones(2)]}, method=[].append, **values)
    assert [each for each in changed if each != "task.method"] == []


@pytest.mark.parametrize(
    "act",
    [
        lambda t: t.add_(1),
        lambda t: t.data.add_(2),
        lambda t: t.detach().fill_(3),
        lambda t: t.resize_(7),
        lambda t: t.resize_(1, 2),
        lambda t: t.t_(),
        lambda t: t.set_(torch.ones(4, dtype=t.dtype)),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: setattr(t, "data", torch.ones(3)),
        lambda t: setattr(t, "data", torch.ones(2, 3, dtype=torch.float32)),
        lambda t: t.numpy().fill(3),
        lambda t: t[0, :1].fill_(-0.0),
    ],
)
def test_a_tensor_gets_its_values_and_its_form_back(act):
    tensor = torch.zeros(2, 3, dtype=torch.float64)
    changed, task = both(lambda task: act(task.tensor), tensor=tensor)
    assert changed == ["task.tensor"]
    assert task.tensor is tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (3, 1), torch.float64)
    assert not tensor.signbit().any()
    assert not tensor.any()
    tensor.add_(1)
    assert tensor.sum() == 6


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 1)[:, 0],  # a stride that is none
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(1.5),
        torch.ones(1, 5)[:, 2:3],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
    ],
)
def test_odd_tensors(tensor):
    before = tensor.clone()
    changed, task = both(lambda task: task.tensor.zero_(), tensor=tensor)
    assert changed == ([] if tensor.numel() == 0 or tensor.is_meta else ["task.tensor"])
    if not tensor.is_meta:
        torch.testing.assert_close(task.tensor, before)


def test_an_inference_tensor_and_one_with_a_graph():
    with torch.inference_mode():
        inference = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)

    def act(task):
        with torch.inference_mode():
            task.inference.add_(1)
        task.hidden = task.hidden * 2

    hidden = weight * 3
    changed, task = both(act, inference=inference, hidden=hidden)
    assert sorted(changed) == ["task.hidden", "task.inference"]
    assert task.hidden is hidden
    assert task.inference.tolist() == [1, 1]


def test_gradients_of_tensors_that_are_not_the_callers():
    def act(task):
        (task.own**2).sum().backward()
        (task.more**2).sum().backward()
        task.frozen.requires_grad_(True)

    more = torch.ones(2, requires_grad=True)
    more.grad = torch.ones(2)
    changed, task = both(act, own=torch.ones(2, requires_grad=True), more=more, frozen=torch.ones(2))
    assert changed == ["task.more.grad"]
    assert task.own.grad is None
    assert more.grad.tolist() == [1, 1]
    assert not task.frozen.requires_grad


def test_slots_and_frozen_dataclasses():
    def act(task):
        task.slotted.value.append(2)
        task.slotted.late = 1
        task.frozen.values.append(1)
        object.__setattr__(task.frozen, "count", 3)

    changed, task = both(act, slotted=Slotted(), frozen=Frozen([]))
    assert sorted(changed) == ["task.frozen.count", "task.frozen.values", "task.slotted.late", "task.slotted.value"]
    assert (task.slotted.value, hasattr(task.slotted, "late"), task.frozen) == ([1], False, Frozen([]))
    _, task = both(lambda task: setattr(task.slotted, "value", 5), slotted=Slotted())
    assert task.slotted.value == [1]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(5, generator=g).tolist()),
        (lambda: random.Random(3), lambda g: g.random()),
        (lambda: np.random.default_rng(3), lambda g: g.random()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(700).tolist()),
        (lambda: np.random.RandomState(3), lambda g: g.randn(3).tolist()),
    ],
)
def test_generators(make, draw):
    changed, task = both(lambda task: draw(task.noise), noise=make())
    assert changed[-1] in ("task.noise", "task.noise.bit_generator")
    assert draw(task.noise) == draw(make())
    assert both(lambda task: draw(task.all["g"]), all={"g": make()})[0][0] == "task.all"


def test_a_list_that_contains_itself():
    ring = []
    ring.append(ring)
    changed, task = both(lambda task: task.items[0].append(2), items=ring)
    assert changed == ["task.items"]
    assert task.items is ring
    assert len(ring) == 1


def test_objects_that_know_each_other():
    task, other = Thing(count=0), Thing(seen=[])
    task.other, other.task, other.method = other, task, Thing.__repr__
    state = ObjectState({"task": task, "other": other})
    task.other.task.other.seen.append(1)
    task.count = 1
    assert state.changes() == ["task.count", "other.seen"]
    state.restore()
    assert (task.count, other.seen) == (0, [])


def test_objects_in_containers_have_paths_and_values_do_not():
    def act(task):
        task.callbacks[1].count += 1
        task.by_name["a"].items.append(1)
        task.by_name["a"].items.append(2)

    changed, _ = both(act, callbacks=[Thing(count=0), Thing(count=0)], by_name={"a": Thing(items=[])})
    assert changed == ["task.callbacks[1].count", "task.by_name['a'].items"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.h = None
        self.seen = 0

    def forward(self, x):
        self.h = x.detach()
        self.seen += 1
        self.mean = self.mean + 1
        self.encoder.note = "x"
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(3), persistent=False)
        return self.encoder(x)


def test_modules_have_dotted_names_and_lose_what_came_late():
    model = nn.Sequential(Net(), nn.Dropout()).eval()
    names = sorted(model.state_dict())
    state = ObjectState({"model": model}, untouched=model.parameters())
    assert state.copied == 1
    model.train()
    model(torch.ones(1, 2))
    changed = state.changes()
    assert changed[:1] == ["model.training"]
    assert {"model.0.h", "model.0.seen", "model.0.mean", "model.0.late", "model.0.table"} <= set(changed)
    assert "model.0.encoder.note" in changed
    state.restore()
    assert sorted(model.state_dict()) == names
    assert not any(module.training for module in model.modules())
    assert (model[0].h, model[0].seen, model[0].mean.tolist()) == (None, 0, [0, 0])
    assert not hasattr(model[0], "table")
    assert not model[0]._non_persistent_buffers_set
    assert state.changes() == []


def test_weights_restored_by_the_caller_are_not_copied():
    model = nn.Linear(2, 2)
    state = ObjectState({"model": model}, untouched=model.parameters())
    assert state.copied == 0
    with torch.no_grad():
        model.weight.clamp_(0, 0)
        model.bias.requires_grad_(False)
    assert state.changes() == ["model.weight"]
    state.restore()
    assert model.bias.requires_grad
    assert not model.weight.any()


def test_a_teacher_and_an_optimizer_made_on_the_way_vanish():
    def act(task):
        task.teacher = nn.Linear(2, 2)
        task.optimizer = torch.optim.Adam(task.teacher.parameters())

    changed, task = both(act, teacher=None)
    assert sorted(changed) == ["task.optimizer", "task.teacher"]
    assert task.teacher is None
    assert not hasattr(task, "optimizer")


def test_a_teacher_an_optimizer_and_its_schedule():
    teacher = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [each.clone() for each in teacher.parameters()]

    def act(task):
        for _ in range(2):
            task.teacher(torch.ones(1, 2)).sum().backward()
            task.optimizer.step()
            task.schedule.step()

    changed, _ = both(act, optimizer=optimizer, schedule=schedule, teacher=teacher)
    assert {"task.optimizer.state", "task.optimizer.param_groups", "task.teacher.weight"} <= set(changed)
    assert len(optimizer.state) == 0
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (1.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    assert teacher.weight.grad is None
    # An optimizer with a state gets it back.
    teacher(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = {key: value.clone() for key, value in optimizer.state[teacher.weight].items()}
    both(act, optimizer=optimizer, schedule=schedule, teacher=teacher)
    assert all(torch.equal(value, optimizer.state[teacher.weight][key]) for key, value in moments.items())


def test_partials_methods_and_closures():
    count = 0

    def closure():
        nonlocal count
        count += 1

    def act(task):
        task.call()
        task.method(1)
        task.partial.args[0].append(2)

    changed, task = both(act, call=closure, method=Box(items=[]).update, partial=functools.partial(max, []))
    assert changed == ["task.call, its variable count", "task.method.__self__.items", "task.partial.args"]
    assert (count, task.method.__self__.items, task.partial.args) == (0, [], ([],))


class Box(Thing):
    def update(self, value):
        self.items.append(value)


class Rude:
    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None

    def __getattr__(self, name):
        raise RuntimeError("no attribute")

    def __bool__(self):
        raise RuntimeError("no truth")

    def __len__(self):
        raise RuntimeError("no length")

    def __getitem__(self, index):
        raise RuntimeError("no item")

    def __iter__(self):
        raise RuntimeError("no iteration")

    @property
    def value(self):
        raise RuntimeError("no value")


class Hidden:
    @property
    def __dict__(self):
        raise RuntimeError("no attributes")


class RudeList(list):
    def __iter__(self):
        raise RuntimeError("no iteration")

    def __len__(self):
        raise RuntimeError("no length")


class Live:
    pass


def test_odd_objects_are_passed_over_and_the_rest_is_restored():
    class Meta(type):
        def __eq__(cls, other):
            raise RuntimeError("no comparison")

        __hash__ = type.__hash__

    class Odd(metaclass=Meta):
        pass

    def act(task):
        task.rude, task.count = Rude(), 2
        task.inside[0] = Rude()

    live = Live()
    odd = {"lock": threading.Lock(), "thread": threading.Thread(), "hidden": Hidden()}
    odd |= {"ref": weakref.ref(live), "refs": weakref.WeakValueDictionary(a=live), "module": types, "kind": Rude}
    odd |= {"generator": (each for each in [1]), "rude_list": RudeList([1]), "odd": Odd(), "event": threading.Event()}
    rude = Rude()
    with Path(__file__).open() as file:
        changed, task = both(act, rude=rude, count=1, inside=[rude, np.zeros(1)], file=file, **odd)
    assert sorted(changed) == ["task.count", "task.inside", "task.rude"]
    assert task.rude is rude
    assert task.inside[0] is rude
    assert task.count == 1


def test_what_the_caller_skips():
    class World:
        count = 0

    task = Thing(world=World(), engine=Thing(count=0), count=0)
    state = ObjectState({"task": task}, skip=[World, task.engine])
    task.world.count = task.engine.count = task.count = 1
    assert state.changes() == ["task.count"]


class Bank:
    """It looks like a data set, and is a small queue."""

    def __init__(self):
        self.rows, self.place = torch.zeros(8, 2), 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.rows[index]


def test_data_sets_and_loaders_are_followed_and_not_copied():
    data = TensorDataset(torch.zeros(100_000, 3), torch.zeros(100_000))
    data.epoch = 0
    loader = DataLoader(data, batch_size=4, generator=torch.Generator().manual_seed(0), shuffle=True)
    bank = Bank()
    task = Thing(x=data.tensors[0], data=data, loader=loader, bank=bank, samples=Samples())
    state = ObjectState({"task": task})
    assert state.copied == 1
    next(iter(loader))
    data.epoch, bank.place = 1, 3
    bank.rows.add_(1)
    data.tensors[0].add_(1)
    assert {"task.x", "task.data.epoch", "task.bank.place", "task.bank.rows"} <= set(state.changes())
    state.restore()
    assert (data.epoch, bank.place, bank.rows.sum()) == (0, 0, 0)
    first = next(iter(loader))
    state.restore()
    assert torch.equal(first[0], next(iter(loader))[0])


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [torch.zeros(3) for _ in range(200)]
        self.arrays = np.zeros(100_000)


def test_a_long_list_is_kept_and_not_followed():
    items = [[index] for index in range(20_000)]
    task = Thing(items=items, table={index: [index] for index in range(20_000)})
    state = ObjectState({"task": task})
    assert len(state._records) == 3
    items.append(1)
    items[0].append(5)
    task.table[1] = 0
    assert sorted(state.changes()) == ["task.items", "task.table"]
    state.restore()
    assert len(items) == 20_000
    assert items[0] == [0, 5]  # not followed
    assert task.table[1] == [1]


def test_many_containers_have_a_bound_together():
    task = Thing(rows=[[0] * 9_000 for _ in range(400)])
    state = ObjectState({"task": task})
    assert state._looked_at <= 50_000
    task.rows.append(1)
    state.restore()
    assert len(task.rows) == 400


def test_values_of_changes_by_path():
    task = Thing(count=1, queue=[torch.zeros(2)], gone=1, mean=torch.zeros(2))
    state = ObjectState({"task": task})
    task.count = 2
    task.queue[0].add_(1)
    task.mean.add_(3)
    del task.gone
    assert state.find_changes() == {
        "task.count": 2,
        "task.gone": None,
        "task.queue": task.queue,
        "task.mean": task.mean,
    }


def test_nothing_is_written_where_nothing_has_changed():
    task = Thing(queue=torch.zeros(4), items=[1], model=nn.BatchNorm1d(2))
    state = ObjectState({"task": task})
    versions = [task.queue._version, task.model.running_mean._version]
    state.restore()
    assert [task.queue._version, task.model.running_mean._version] == versions


def test_torchmetrics():
    metrics = pytest.importorskip("torchmetrics")
    task = Thing(
        accuracy=metrics.MeanMetric(), cat=metrics.CatMetric(), all=metrics.MetricCollection([metrics.MeanMetric()])
    )
    task.accuracy.update(torch.tensor(3.0))

    def act(task):
        task.accuracy.update(torch.tensor(5.0))
        task.cat.update(torch.tensor(5.0))
        task.all.update(torch.tensor(1.0))
        assert task.accuracy.compute() == 4

    state = ObjectState({"task": task})
    act(task)
    assert "task.accuracy.mean_value" in state.changes()
    state.restore()
    assert task.accuracy.compute() == 3
    assert task.cat.value == []
    assert not task.all["MeanMetric"]._update_count
    act(task)


def test_a_trainer_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Mine(transformers.Trainer):
        calls = 0

        def compute_loss(self, model, inputs, **kwargs):
            self.calls += 1
            self.running = 0.9 * getattr(self, "running", 0.0) + self.calls
            self.state.global_step += 1
            self.args.learning_rate = 3.0
            return model(inputs["x"]).sum()

    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, learning_rate=1.0)
    trainer = Mine(nn.Linear(2, 1), arguments)
    state = ObjectState({"trainer": trainer, "model": trainer.model}, untouched=trainer.model.parameters())
    assert state.copied == 0
    trainer.compute_loss(trainer.model, {"x": torch.ones(2, 2)})
    expected = ["calls", "running", "state.global_step", "args.learning_rate"]
    assert sorted(state.changes()) == sorted(f"trainer.{name}" for name in expected)
    state.restore()
    assert (trainer.calls, hasattr(trainer, "running"), trainer.state.global_step) == (0, False, 0)
    assert arguments.learning_rate == 1.0


@pytest.mark.filterwarnings("ignore:The `srun` command:UserWarning")  # where Slurm is installed
def test_a_lightning_module_with_the_adapters_trainer():
    lightning = pytest.importorskip("lightning.pytorch")

    class Mine(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.calls, self.centre = nn.Linear(2, 1), 0, torch.zeros(1)

        def training_step(self, batch, index):
            self.calls += 1
            out = self.net(batch[0])
            self.centre = 0.9 * self.centre + out.detach().mean(0)
            self.trainer.callback_metrics["mine"] = torch.ones(())
            return out.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Mine()
    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, max_epochs=1, accelerator="cpu", devices=1)
    _, task = from_lightning(module, data, trainer)
    task.model()
    state = ObjectState({"module": module, "task": task}, untouched=module.parameters())
    assert state.copied == 5  # the centre, and the task's copy of the untrained module
    batch = task.collate([(torch.ones(2),)] * 4)
    module.training_step(batch.data, 0)
    task.trainer.current_epoch = 7
    assert {"module.calls", "module.centre"} <= set(state.changes())
    assert any(name.endswith("callback_metrics") for name in state.changes())
    state.restore()
    assert (module.calls, module.centre.tolist(), task.trainer.current_epoch) == (0, [0], 0)
    assert "mine" not in task.trainer.callback_metrics
    assert state.changes() == []


def test_large_tensors_are_copied_when_they_are_written():
    size = 1 << 21
    task = Thing(frozen=torch.zeros(size), moved=torch.zeros(size), data=torch.zeros(size), listed=torch.zeros(size))
    task.replaced, task.small, task.view = torch.zeros(size), torch.zeros(2), task.moved[:size]
    task.resized, task.dropped, copied = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    tensors = dict(vars(task))
    state = ObjectState({"task": task}, late=True)
    assert state.copied == 1
    with state.watching():
        task.small.add_(1)
        task.moved.data[3:5].mul_(0.5).add_(1)
        torch._foreach_add_([copied, task.listed], 1.0)
        torch.add(task.frozen, 1, out=copied)
        task.data.data = copied
        task.replaced = task.replaced.clone()
        task.resized.resize_(3).fill_(1)
        task.dropped = task.dropped + 1
        assert task.frozen.sum() == 0
    assert state.copied == 5
    names = ["data", "dropped", "listed", "moved", "resized", "small", "view"]
    assert sorted(state.changes()) == [f"task.{name}" for name in names]
    state.restore()
    assert all(getattr(task, name) is tensor for name, tensor in tensors.items())
    assert all(not tensor.any() for tensor in tensors.values())
    assert len(task.resized) == size
    assert state.changes() == []
