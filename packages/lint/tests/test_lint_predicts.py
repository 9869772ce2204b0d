"""LS017: models that predict outside loops and parts of them; LS016: what an evaluation with a graph keeps; LS008:
functions that give a model; LS026: means by other names, samplers for training and evaluation alike; LS034: loaders.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, rule):
    return len(check_text(text, configure({}, rule, "")))


ALONE = """
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    {train}
    optimizer.step()
model.eval()
{after}
{last}
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"train": "pass"}, 0),
        ({"after": "with torch.no_grad(): guess = model(held)"}, 0),
        ({"after": "torch.set_grad_enabled(False)\nguess = model(held)"}, 0),
        ({"after": "model.train()\nguess = model(held)"}, 0),
        ({"last": "guess[0].backward()"}, 0),
        ({"last": "torch.autograd.grad(guess.sum(), held)"}, 0),
        ({"last": "model.train(); model(held).sum().backward()"}, 1),
    ],
)
def test_a_file_that_trains_and_then_predicts(change, found):
    usual = {"train": "model(x).sum().backward()", "after": "guess = model(held)", "last": ""}
    assert told(ALONE.format(**usual | change), "LS017") == found


PARTS = """
import torch

class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([torch.nn.Linear(4, 2)])

    {decorator}
    def embed(self, x):
        return self.convs[0](x)

    def size(self):
        return len(self.convs)

def main(x):
    model = Graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(9):
        model.train()
        model(x).sum().backward()
        optimizer.step()
        if epoch % 3 == 0:
            model.eval()
            found = {call}
            {last}

main([])
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"call": "model(x)"}, 1),
        ({"call": "model.encoder(x)"}, 1),
        ({"call": "model.size()"}, 0),
        ({"decorator": "@torch.no_grad()"}, 0),
        ({"last": "found.sum().backward()"}, 0),
        ({"last": "model.train(); model(x).sum().backward()"}, 1),
    ],
)
def test_parts_and_methods_of_a_model_between_two_steps(change, found):
    usual = {"decorator": "# plain", "call": "model.embed(x)", "last": "model.train()"}
    assert told(PARTS.format(**usual | change), "LS017") == found


HANDED = """
import torch
from elsewhere import launch

def work(model, loader, test_loader, optimizer):
    def {name}():
        model.eval()
        for x in test_loader:
            {result}
        return [model(x) for x in test_loader]

    for x in loader:
        model.train()
        {train}
        optimizer.step()
        {name}()

launch(work)
"""


@pytest.mark.parametrize(
    ("name", "train", "found"),
    [("test", "model(x).sum().backward()", 1), ("test", "pass", 0), ("bounds", "model(x).sum().backward()", 1)],
)
def test_a_caller_that_trains_keeps_no_graph_away(name, train, found):
    assert told(HANDED.format(name=name, train=train, result="model(x)"), "LS017") == found


KEPT = """
import torch
from torch.nn import functional as F

def test(model, test_loader, criterion):
    model.eval()
    total, guesses = 0.0, []
    {context}:
        for x, y in test_loader:
            {forward}
            {keep}
    return total, guesses

def train(model, loader, test_loader, criterion):
    for x, y in loader:
        criterion(model(x), y).backward()
    test(model, test_loader, criterion)

train(torch.nn.Linear(4, 2), [], [], F.mse_loss)
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"keep": "loss = criterion(output, y); total += loss"}, 1),
        ({"keep": "loss = criterion(output, y).item(); total += loss"}, 0),
        ({"keep": "total += criterion(output, y) * len(x)"}, 1),
        ({"keep": "total += criterion(output, y).item()"}, 0),
        ({"keep": "total += criterion(output.detach(), y)"}, 0),
        ({"keep": "total += (output.argmax(1) == y).sum()"}, 0),
        ({"keep": "guesses.append(output.squeeze())"}, 1),
        ({"keep": "guesses.append(output.detach())"}, 0),
        ({"keep": "output = output.argmax(1); guesses.append(output)"}, 0),
        ({"forward": "result = model(x); output = result.logits", "keep": "guesses.append(output)"}, 1),
        ({"context": "with torch.no_grad()"}, 0),
    ],
)
def test_what_an_evaluation_with_a_graph_keeps(change, found):
    usual = {"context": "if True", "forward": "output = model(x)", "keep": "total += F.cross_entropy(output, y)"}
    assert told(KEPT.format(**usual | change), "LS016") == found


LISTS = """
import torch

def train(model, loader, optimizer, criterion):
    losses = []
    for i, (x, y) in enumerate(loader):
        {first}
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append({value})
        if i % 50 == 0:
            print(sum(losses))
            {emptied}
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"value": "[loss, i]"}, 1),
        ({"value": "(i, loss.item())"}, 0),
        ({"first": "losses = []"}, 0),
        ({"emptied": "losses = []; optimizer.step()"}, 0),
    ],
)
def test_lists_of_several_losses_and_lists_that_are_emptied_now_and_then(change, found):
    usual = {"first": "pass", "value": "loss", "emptied": "losses = []"}
    assert told(LISTS.format(**usual | change), "LS016") == found


MEANS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def load(data, train):
    sampler = DistributedSampler(data, shuffle={shuffle})
    return DataLoader(data, batch_size=8, sampler=sampler)

@torch.no_grad()
def validate(model, loader, comm, parts):
    loss = 0.0
    for x, y in loader:
        loss += model(x).item()
    {mean}
    return loss

def main(model, data, comm):
    loader = load(data, train=True)
    val_loader = load(data, train={train})
    validate(model, val_loader, comm, [])
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"mean": "comm.allreduce(loss, op=dist.ReduceOp.SUM)"}, 0),
        ({"mean": "dist.all_gather_object(parts, loss)\n    print(dict_mean(parts))"}, 1),
        ({"mean": "dist.all_gather_object(parts, loss)\n    print(dict_means_of(loss))"}, 0),
        ({"mean": "dist.all_reduce(loss); loss /= dist.get_world_size()"}, 1),
    ],
)
def test_means_over_the_ranks_by_other_names(change, found):
    usual = {"shuffle": "train", "train": "False", "mean": "comm.allreduce(loss, op=dist.ReduceOp.AVG)"}
    assert told(MEANS.format(**usual | change), "LS026") == found


def test_samplers_for_training_and_held_out_data_alike():
    text = MEANS.replace("def validate(model, loader", "def run(model, val_loader").replace(
        "in loader:", "in range(3):"
    )
    text = text.replace("{mean}", "val_loss = loss; dist.all_reduce(val_loss); val_loss /= dist.get_world_size()")
    assert told(text.format(shuffle="train", train="False"), "LS026") == 1
    assert told(text.format(shuffle="train", train="True"), "LS026") == 0
    assert told(text.format(shuffle="True", train="False"), "LS026") == 0


NOISE = """
import numpy as np
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __getitem__(self, i):
        return i + np.random.randn()

class BatchLoader({parent}):
    pass

loader = BatchLoader(Noisy(), num_workers={workers})
"""


@pytest.mark.parametrize(("parent", "workers", "found"), [("DataLoader", 2, 1), ("DataLoader", 0, 0), ("object", 2, 0)])
def test_a_loader_of_the_projects_own_class(parent, workers, found):
    assert told(NOISE.format(parent=parent, workers=workers), "LS034") == found
