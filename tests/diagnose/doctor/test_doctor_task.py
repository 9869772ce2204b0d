"""Planted faults of the task: where its tensors lie, gradients, data, the loader."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from doctor_places import on_rank, place, silent, wrong
from ranks import run
from refusals import names
from torch import nn
from torch.nn import functional as F

from lockstep.diagnose.doctor import task as checked
from lockstep.diagnose.doctor import workers
from lockstep.diagnose.doctor.workers import rate_of_growth
from lockstep.engines import ddp
from lockstep.errors import DataError
from lockstep.task import Task
from lockstep.training.trial import loss_check
from lockstep.training.trial.misplaced import explain_device_error, find_misplaced

FILE = """
import torch, lockstep
from torch import nn
from torch.nn import functional as F

class Digits(lockstep.Task):
    draws = 0

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    def dataset(self, split):
        torch.manual_seed(self.draws)
        return torch.utils.data.TensorDataset(torch.randn(64, 4, 4), torch.randint(4, (64,)))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Sums(torch.utils.data.Dataset):
    kept = None

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        sample = torch.full((4, 4), float(index)), index % 4
        if self.kept is not None:
            self.kept.append((sample, bytes(4000)))
        return sample


class Keeping(Sums):
    def __init__(self):
        self.kept = []


class Rows(Sums):
    def __init__(self):
        self.rows = [{"name": str(index), "box": [index + 1000]} for index in range(100_000)]

    def __getitem__(self, index):
        return super().__getitem__(self.rows[25 * index]["box"][0] - 1000 - 24 * index)


class Even(Digits):
    def dataset(self, split):
        return Sums()


class Kept(Digits):
    def dataset(self, split):
        return Keeping()


class Copied(Digits):
    def dataset(self, split):
        return Rows()


class Shifted(Digits):
    def model(self):
        made = super().model()
        made[1].shift = torch.zeros(8, device="meta")
        made[1].register_forward_hook(lambda layer, given, out: out + layer.shift)
        return made


class Failing(Digits):
    def loss(self, model, batch):
        raise KeyError("label")


class ByRank(Digits):
    def dataset(self, split):
        import os
        self.draws = int(os.environ["RANK"])
        return super().dataset(split)
"""


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "digits.py").write_text(FILE)
    (tmp_path / "out").mkdir()
    return lambda name="Digits": {
        "task": f"{tmp_path}/digits.py:{name}",
        "save_dir": str(tmp_path / "out"),
        "batch_size": 16,
        "max_steps": 20,
    }


class Scaled(nn.Module):
    """A tensor that is no buffer, one in a list, and one that is a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.scale = torch.ones(4)
        self.tables = [torch.ones(2), {"deep": torch.ones(3)}]
        self.factor = torch.tensor(2.0)


class Holding(Task):
    def __init__(self):
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
        self.images = torch.ones(8, 4)

    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


def test_every_kind_of_tensor_is_found_where_it_lies():
    model, there = Scaled(), torch.device("meta")
    model.layer.to("meta")
    misplaced = find_misplaced(model, Holding(), [torch.ones(2)], there)
    assert {each.label: (each.device.type, each.is_wrong) for each in misplaced} == {
        "buffer 'mean'": ("cpu", True),
        "attribute 'scale', no buffer": ("cpu", False),
        "attribute 'tables[0]', no buffer": ("cpu", False),
        "attribute 'tables[1]['deep']', no buffer": ("cpu", False),
        "the task's criterion: buffer 'weight'": ("cpu", True),
        "the task's attribute 'images'": ("cpu", False),
        "batch[0]": ("cpu", True),
    }
    assert find_misplaced(Scaled(), Holding(), torch.ones(2), torch.device("cpu")) == []


def test_criterion_and_parameter_on_another_device_are_faults():
    there = torch.device("meta")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    found = list(checked.judge_placement(find_misplaced(model, Holding(), (), there), there))
    told = wrong(found, "placement", "parameter '0.weight' on cpu", "the task's criterion: buffer 'weight' on cpu")
    assert [each.level for each in told] == ["FAIL"]
    plain = Scaled().to("meta")
    told = wrong(
        list(checked.judge_placement(find_misplaced(plain, Holding(), (), there)[:2], there)), "placement", "'scale'"
    )
    assert [each.level for each in told] == ["warn"]
    assert "register_buffer()" in told[0].mend


def test_a_model_that_is_offloaded_is_meant():
    misplaced = find_misplaced(nn.Linear(2, 2), Holding(), (), torch.device("cuda", 0))
    assert misplaced[0].label.startswith("the task's criterion")
    assert not [each for each in misplaced if "parameter" in each.label]


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "Tensor on device meta is not on the expected device cpu!",
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
        "Expected all tensors to be on the same device, but got mat2 is on cpu, different from other tensors on cuda:0",
    ],
)
def test_torchs_complaint_is_explained(text):
    model = Scaled()
    model.scale = model.scale.to("meta")
    line = explain_device_error(RuntimeError(text), model, Holding(), (torch.ones(2),))
    assert names(line, "cpu", "attribute 'scale'", "meta", "register_buffer")
    assert "the method" in explain_device_error(RuntimeError(text), Scaled(), Holding(), ())


def test_other_errors_are_left_alone():
    other = RuntimeError("shapes cannot be multiplied (2x3 and 4x5)")
    assert explain_device_error(other, Scaled(), Holding(), ()) == ""
    assert explain_device_error(KeyError("same device"), Scaled(), Holding(), ()) == ""


def test_train_says_which_tensor_stands_where():
    model = Scaled()
    model.scale = model.scale.to("meta")
    batch = torch.ones(2, 4)
    with pytest.raises(DataError, match="failed at the first micro-batch.*attribute 'scale', no buffer on meta"):
        loss_check.call_method("loss", lambda data: (model.layer(data) * model.scale).sum(), batch, model, Holding())
    with pytest.raises(DataError) as caught:
        loss_check.call_method("loss", lambda data: F.mse_loss(data, 3), batch, model, Holding())
    assert "no buffer" not in str(caught.value)


def tried(config):
    """What the check says of a task in one process."""
    here = dataclasses.replace(place(config=config), with_task=True)
    found = checked.task(here)
    return found.findings + checked.judge_task([found.facts], here)


def test_a_task_that_is_well(digits, tmp_path):
    silent(tried(digits()))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tensor_on_another_device_is_found_before_step_one(digits):
    wrong(tried(digits("Shifted")), "task", "Tensor on device meta", "attribute '1.shift', no buffer on meta")


def test_a_loss_that_fails(digits):
    wrong(tried(digits("Failing")), "task", "the task's `loss` failed at the first micro-batch", "KeyError")


def test_a_task_that_is_not_there(digits):
    wrong(tried(digits("Missing")), "task", "Missing")


def test_a_checkpoint_that_does_not_fit(digits, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    wrong(tried(digits()), "task", "has 100 B free", "make room")


def growth_on_rank(world, config):
    workers._WALL_SECONDS = 60.0  # on a busy machine too its share of a core is 3 s
    return [each for each in tried(config) if each.check == "workers"]


def test_memory_of_loader_processes_that_grows_with_each_sample(digits):
    def growth(name):
        """In a process like a user's: what is kept copies pages of the large one that has run other tests."""
        return run(growth_on_rank, 1, digits(name) | {"data": {"workers": 1}, "max_steps": 100})[0]

    wrong(growth("Kept"), "workers", "by [456](.[0-9]+)? MB per 1,000 samples of Keeping")
    wrong(growth("Copied"), "workers", "MB per 1,000 samples of Rows")
    assert growth("Even") == []


def test_quick_samples_are_not_all_loaded_between_slow_ones(monkeypatch):
    readings = []
    monkeypatch.setattr(workers, "_own_memory", lambda: readings.append(time.sleep(0.05)) or 1.0)
    batches = type("Batches", (), {"__getitem__": lambda self, key: (None, 4.0)})()
    fetch, key = workers.MemoryFetch(batches), SimpleNamespace(samples=[0, 1, 2, 3])
    assert [fetch[key][1] for _ in range(100)] == [4.0] * 100
    assert len(readings) >= 4


def test_memory_that_comes_to_rest_is_no_growth():
    fills = [(step, 100.0 + 50 * min(step, 300) / 300) for step in range(0, 1000, 20)]
    noise = [(step, 100.0 + 3 * (step % 3)) for step in range(0, 1000, 20)]
    grows = [(step, 100.0 + step / 50 + step % 3) for step in range(0, 1000, 20)]
    jumps = [[(step, 100.0 + 5 * (step >= at)) for step in range(0, 1000, 20)] for at in range(0, 1000, 20)]
    assert [rate_of_growth(each) for each in ([], fills, noise, grows[:2], *jumps)] == [0.0] * (4 + len(jumps))
    assert rate_of_growth(grows) == pytest.approx(20, rel=0.1)


def test_a_loader_that_is_slower_than_the_step():
    told = {"loading": 0.2, "computing": 0.05, "workers": 1}
    wrong(
        [checked.judge_loader(told)],
        "loader",
        "200 ms of loading a step, 50 ms of computing",
        r"--data.workers \(now 1\)",
    )
    silent([checked.judge_loader({"loading": 0.004, "computing": 0.001, "workers": 0})])


def unequal(world, config, fault):
    if fault == "gradients":
        ddp.sum_by_hand = lambda parameters, world, compression: None
    return on_rank(world, config, ("task",), with_task=True)


def test_gradients_that_were_not_exchanged(digits):
    lines, failed = run(unequal, 2, digits(), "gradients")[0]
    told = "\n".join(lines)
    assert failed == ["gradients", "weights"]
    assert (
        "FAIL  gradients       rank 1 on node-1 has different gradients than rank 0 after one backward: 1.weight and 3"
        in told
    )


def test_a_dataset_that_differs_by_rank(digits):
    lines, failed = run(unequal, 2, digits("ByRank"), "")[0]
    assert failed == ["task"]  # as a run would say it, before its first step
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert "rank 1" in line
    assert "sample 0 of the training set" in line


def test_two_ranks_with_a_task_that_is_well(digits, tmp_path):
    lines, failed = run(unequal, 2, digits(), "")[0]
    told = "\n".join(lines)
    assert failed == []
    assert "the same on all ranks after one backward: 4 tensors" in told
    assert list((tmp_path / "out").iterdir()) == []
