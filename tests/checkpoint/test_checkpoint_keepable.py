"""What a checkpoint cannot keep is refused before step 1, and what a module adds to its state comes back."""

import warnings

import pytest
import torch
from ranks import run
from toys import Network, Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.read import open_tensors
from lockstep.config.schema import Config
from lockstep.errors import CheckpointError, UsageError


class Counting(Network):
    """Counts its training forwards in a plain number, which it keeps as its extra state; `kind` makes a value of it."""

    def __init__(self, kind, **settings):
        super().__init__(**settings)
        self.forwards, self.kind = 0, kind

    def forward(self, x):
        self.forwards += self.training
        return super().forward(x)

    def get_extra_state(self):
        return self.kind(self.forwards)

    def set_extra_state(self, state):
        self.forwards = int(state)


class Task(Ragged):
    kind = staticmethod(torch.tensor)

    def model(self):
        return Counting(self.kind, dtype=self.dtype)


class Plain(Task):
    kind = staticmethod(lambda count: {"forwards": count})


def settings(folder, **changes):
    given = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 2, "lr": 0.01, "precision": "float64"}
    return Config(**given | {"save_dir": str(folder), "max_steps": 4} | changes)


def counted(world, folder, engine, stop_at, task):
    """Trains until `stop_at`; the extra state that is in the newest checkpoint then."""
    warnings.simplefilter("ignore")  # torch's own, about views under fsdp
    lockstep.train(settings(folder, engine=engine, stop_at=stop_at), task(), world)
    path = checkpoint.find_newest(folder / "r", world, print)
    with open_tensors(path) as whole:
        return int(whole.read("model/_extra_state"))


@pytest.mark.parametrize("engine", ["single", "ddp", "zero", "fsdp"])
def test_a_tensor_that_a_module_adds_comes_back_on_a_resume(tmp_path, engine):
    size = 1 if engine == "single" else 2
    first = run(counted, size, tmp_path, engine, 2, Task)
    again = run(counted, size, tmp_path, engine, 4, Task)
    assert first[0] > 0
    assert again == [2 * each for each in first], "it was counted on from what was saved"


def test_extra_state_that_is_no_tensor_is_refused_before_writing(tmp_path):
    with pytest.raises(
        UsageError, match="the model returns a dict from get_extra_state, and a checkpoint stores only tensors"
    ):
        (lockstep.train(settings(tmp_path), Plain()))
    assert list(tmp_path.iterdir()) == []


def test_a_tasks_own_state_is_held_to_the_same(tmp_path):
    class Own(Ragged):
        def state_dict(self):
            return {"queue": [1, 2]}

    with pytest.raises(UsageError, match="'task/queue' is a list, and a checkpoint stores only tensors"):
        (lockstep.train(settings(tmp_path), Own()))
    assert list(tmp_path.iterdir()) == []


class Quantised(torch.Tensor):
    """Stands in for a subclass whose values lie in other tensors."""

    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model/encoder.norm._extra_state", {"a": 1}, "the module 'encoder.norm' returns a dict from get_extra_state"),
        ("encoder._extra_state", None, "the module 'encoder' returns a NoneType"),
        ("model/table", [1, 2], "the state's 'model/table' is a list"),
        (
            "model/graph",
            torch.eye(2).to_sparse(),
            "'model/graph' cannot be stored in a checkpoint: it has no dense values",
        ),
        (
            "model/odd",
            torch.zeros(2, dtype=torch.bits8),
            "'model/odd' cannot be stored in a checkpoint: .* has no bits8",
        ),
        ("model/sub", Quantised(), "'model/sub' .* it is a Quantised"),
        ("model/" + "a" * 1000, torch.zeros(2), "its name must be"),
        ("__metadata__", torch.zeros(2), "its name must be"),
    ],
)
def test_what_cannot_be_kept_is_named_in_one_line(tmp_path, name, value, reason):
    with pytest.raises(CheckpointError, match=reason) as found:
        checkpoint.check_storable({"model/a": torch.zeros(2), name: value})
    assert str(found.value).isprintable()
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.save(tmp_path, 1, {name: value}, {}, lockstep.distributed.world.World(), engine="single")
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_kept_is_not_refused():
    conjugate = torch.zeros(2, dtype=torch.complex128).conj()
    later, scalar = torch.zeros(2, device="meta"), torch.nn.Parameter(torch.zeros(()))
    checkpoint.check_storable({"a": later, "b": conjugate, "c": scalar, "d": torch.zeros(0, 3)})
