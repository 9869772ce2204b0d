"""`trace/events.py`: what a listener hears, that listeners do not disturb each other, and that torch is restored."""

import os
import pickle

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from lockstep.trace.events import _FUNCTIONS, Listener, _find


class Heard:
    """A recorder, as far as a listener needs one."""

    def __init__(self):
        self.names = []
        self.closed = False

    def close(self):
        self.closed = True


class Ear(Listener):
    def __init__(self):
        super().__init__(Heard)

    def batch(self, call, iterator, /):
        self.recorder.names.append("batch")
        return call(iterator)

    def backward(self, call, /, tensors, *args, **kwargs):
        self.recorder.names.append("backward")
        return call(tensors, *args, **kwargs)

    def clip(self, call, /, *args, **kwargs):
        self.recorder.names.append(call.__name__)
        return call(*args, **kwargs)

    def save(self, call, /, *args, **kwargs):
        return call(*args, **kwargs)

    def update(self, optimizer, closure):
        self.recorder.names.append(type(optimizer).__name__)

    def end_update(self, optimizer):
        self.recorder.names.append("updated")


class Outer(torch.optim.Optimizer):
    """An optimizer that calls another one."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def train(model, optimizer):
    for (rows,) in DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 3)), 2):
        torch.autograd.backward(tensors=model(rows).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def functions():
    places = [(_find(owner), name) for _, owners, names in _FUNCTIONS["torch"] for owner in owners for name in names]
    return [getattr(place, name) for place, name in places]


def test_two_listeners_hear_the_same_and_torch_is_restored():
    before = functions(), len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    model = nn.Linear(3, 1)
    ears = [Ear(), Ear()]
    for ear in ears:
        ear.attach("torch")
    train(model, Outer(torch.optim.SGD(model.parameters(), 0.1)))
    for ear in reversed(ears):
        ear.detach()
    # The wait for the end of the epoch is one, too; an optimizer within another one is not.
    expected = ["batch", "backward", "clip_grad_norm_", "Outer", "updated", "batch"]
    assert [ear.recorder.names for ear in ears] == [expected, expected]
    assert (functions(), len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert ears[0].recorder.names == expected


def test_a_forked_process_has_a_recorder_of_its_own():
    ear = Ear()
    first = ear.recorder
    child = os.fork()
    if not child:
        os._exit(0 if ear.recorder is not first else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ear.recorder is first
    ear.detach()


def test_a_replaced_function_still_goes_to_another_process():
    ear = Ear()
    ear.attach("torch")
    for function in (torch.save, torch.autograd.backward, nn.utils.clip_grad_norm_):
        assert pickle.loads(pickle.dumps(function)) is function
    ear.detach()
