"""The task's base class: what it gives to whom, and which mistakes it names."""

import dataclasses
import pickle
import sys

import pytest
import torch
from refusals import refuses
from toys import Partial, Ragged

from lockstep.errors import ConfigError
from lockstep.task import Task, as_task, has_own, items_of_a_sample, user_task
from lockstep.training.start.named_task import load_task


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str


class Plain:
    """Not a subclass; what it does not have is the default."""

    item_name = "words"

    def model(self):
        return torch.nn.Linear(2, 1)

    def dataset(self, split):
        return torch.ones(6, 2)

    def loss(self, model, batch):
        return model(batch).sum()

    def metrics(self, model, batch):
        return {"rows": (len(batch), 1)}


def test_a_plain_object_gets_the_defaults_and_keeps_its_own():
    plain = Plain()
    task = as_task(plain)
    assert isinstance(task, Task)
    assert user_task(task) is plain
    assert (task.item_name, task.reduction, task.items_per_sample) == ("words", "auto", None)
    assert task.collate([torch.ones(2), torch.zeros(2)]).shape == (2, 2)
    pair = task.collate([Pair(torch.ones(2), "a"), Pair(torch.zeros(2), "b")])
    assert (type(pair), pair.x.tolist(), pair.name) == (Pair, [[1, 1], [0, 0]], ["a", "b"])
    assert task.count(pair) == 2
    loss, metrics = task.evaluate(task.model(), torch.ones(3, 2))
    assert loss.ndim == 0
    assert metrics == {"rows": (3, 1)}
    assert (task.optimizer(task.model(), None), task.schedule(0, 10), task.blocks(task.model())) == (None, None, None)
    assert [has_own(task, name) for name in ("metrics", "evaluate", "count")] == [True, False, False]


def test_a_task_stays_itself():
    task = Ragged()
    assert as_task(task) is task
    assert user_task(task) is task


def test_items_are_samples_unless_the_task_counts():
    class Four(Ragged):
        items_per_sample = 4

    assert items_of_a_sample(as_task(Plain())) == 1
    assert items_of_a_sample(Ragged()) is None
    assert items_of_a_sample(Four()) == 4


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(4), torch.ones(4)], 4),
        ({"x": (torch.ones(5),)}, 5),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch, samples):
    assert as_task(Plain()).count(batch) == samples


def test_a_batch_that_cannot_be_counted_is_named():
    with pytest.raises(ConfigError, match=r"returned str, whose samples cannot be counted; define `count\(batch\)`"):
        as_task(Plain()).count("abc")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("metrcs", "metrics"),
        ("optimiser", "optimizer"),
        ("evalute", "evaluate"),
        ("colate", "collate"),
        ("configure_optimizers", "optimizer"),
        ("validation_step", "evaluate"),
        ("collate_fn", "collate"),
    ],
)
def test_a_method_that_is_never_called_is_named(name, meant):
    task = type("Mine", (Partial,), {name: lambda self: None})()
    with refuses(ConfigError, "Mine", f"`{name}`", f"`{meant}`"):
        as_task(task)


@pytest.mark.parametrize("name", ["training_step", "metric", "encode", "_metric"])
def test_helpers_are_let_be(name):
    task = type("Mine", (Ragged,), {name: lambda self: None})()  # which has `loss` and `metrics`
    assert as_task(task) is task


def test_the_class_itself_is_not_a_task():
    with pytest.raises(ConfigError, match=r"the task is the class Plain; give an object: Plain\(\)"):
        as_task(Plain)


def test_task_imports_its_own_neighbours_first(tmp_path, monkeypatch):
    for folder, value in (("mine", 1), ("other", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour_of_a_task.py").write_text(f"VALUE = {value}\n")
    code = "from neighbour_of_a_task import VALUE\nfrom toys import Ragged\nclass Mine(Ragged):\n    value = VALUE\n"
    (tmp_path / "mine" / "tasked.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    assert load_task(f"{tmp_path}/mine/tasked.py:Mine").value == 1


def test_missing_method_is_named_before_the_task_is_made(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import lockstep\nclass A(lockstep.Task):\n    def model(self): ...\nclass B(A):\n    datset = A.model\n"
    )
    with refuses(ConfigError, "A", "`dataset`"):
        load_task(f"{file}:A")
    with refuses(ConfigError, "B", "`datset`", "`dataset`"):
        load_task(f"{file}:B")


def test_a_task_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from toys import Ragged\nclass Mine(Ragged):\n    pass\nmade=Mine()\nclass Needs(Ragged):\n    model = None\n"
    )
    task = load_task(f"{file}:Mine")
    assert type(task).__name__ == "Mine"
    assert type(pickle.loads(pickle.dumps(task))) is type(task)  # as it is sent to loader processes
    with pytest.raises(ConfigError, match="has no method `model`"):
        load_task(f"{file}:Needs")
    with pytest.raises(ConfigError, match="no such file"):
        load_task(f"{tmp_path}/other.py:Mine")
    with pytest.raises(ConfigError, match=f"the file has no class Other; give {file}:Mine$"):
        load_task(f"{file}:Other")
    assert type(load_task(f"{file}:made")).__name__ == "Mine"  # an object that the file has made


@pytest.mark.parametrize(
    ("content", "asked", "line"),
    [
        ("class Mine(Ragged):\n    pass\n", "", "no class is named; give {file}:Mine"),
        (
            "class Mine(Ragged):\n    pass\nclass Two(Mine):\n    pass\n",
            "",
            "no class is named; give {file}:Mine or {file}:Two",
        ),
        ("class Mine(Ragged):\n    pass\n", ":", "no class is named; give {file}:Mine"),
        ("class Mine(Ragged):\n    pass\n", ":Mina", "the file has no class Mina; did you mean {file}:Mine?"),
        (
            "class Half(lockstep.Task):\n    pass\n",
            "",
            "no class is named; give {file}:CLASS, a subclass of",
        ),
        ("class Mine(Ragged:\n", ":Mine", "SyntaxError: invalid syntax (mine.py, line 2); the file must import"),
        ("import no_such_thing\n", ":Mine", "ModuleNotFoundError: No module named 'no_such_thing'; the file must imp"),
        ("from toys import Nothing\n", ":Mine", "ImportError: cannot import name 'Nothing' from 'toys'"),
        ("import sys\nsys.exit('usage: x')\n", ":Mine", "SystemExit: usage: x; the file must import without an error"),
    ],
)
def test_what_is_wrong_with_a_tasks_file_is_one_line(tmp_path, content, asked, line):
    file = tmp_path / "mine.py"
    file.write_text(f"import lockstep; from toys import Ragged\n{content}")
    with pytest.raises(ConfigError) as caught:
        load_task(f"{file}{asked}")
    assert line.format(file=file) in str(caught.value)
    assert "\n" not in str(caught.value)
