"""LS022: by how many hands batches go before they are moved, and which of them Accelerate moves."""

import ast

import pytest

from lockstep_lint.analysis.nodes import constant, element_of
from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    """How many moves LS022 tells in a script."""
    return len(check_text(text, configure({}, "LS022", "")))


LOOP = """
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, device, stack):
    for batch in DataLoader(data, num_workers=2, pin_memory=True):
        {first}
        {second}
        model(x).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [
        ("nodes, atoms = batch", "place, _ = atoms; x = place.to(device)", 1),
        ("graph = batch['graph']", "x = graph['nodes']; x = x.cuda()", 1),
        ("nodes, atoms = stack(batch)", "place, _ = atoms; x = place.to(device)", 0),
        ("x = batch['x'].to(device)", "x = x.clone(); y = x.clone(); y.to(device)", 1),
        ("x = batch['x'].to(torch.float32)", "x = x.to(device)", 1),
    ],
)
def test_parts_of_parts_of_a_batch(first, second, number):
    assert told(LOOP.format(first=first, second=second)) == number


OWNED = """
import torch
from torch.utils.data import DataLoader

def make(data):
    return DataLoader(data, num_workers=2, pin_memory=True)

class Base:
    def __init__(self, {name}, model, optimizer, device):
        self.{name}, self.model, self.optimizer, self.device = {name}, model, optimizer, device

    def train(self):
        rows = self.{name}["train"]
        for batch in rows:
            self.model(self.{call}(batch)).backward()
            self.optimizer.step()

    def parse(self, batch):
        raise NotImplementedError

class Trainer(Base):
    def parse(self, batch):
        images, _ = batch
        return images.to(self.device)

    def look(self, batch):
        return batch[0].to(self.device)
"""


@pytest.mark.parametrize(("name", "call", "number"), [("loaders", "model", 0), ("tables", "parse", 0)])
def test_a_method_that_stands_in_for_one_of_a_base_class(name, call, number):
    assert told(OWNED.format(name=name, call=call)) == number


PREPARED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

def main(model, optimizer, data, parts):
    accelerator = Accelerator()
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    {line}
    for x in loader:
        x = x.to(accelerator.device)
        accelerator.backward(model(x))
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)", 0),
        ("model, optimizer, parts = accelerator.prepare(model, optimizer, parts)", 0),
        ("model, *rest = accelerator.prepare(model, *parts)", 0),
        ("model = accelerator.prepare(model); loader = accelerator.prepare_data_loader(loader)", 0),
        ("pass", 0),
    ],
)
def test_accelerate_moves_the_batches_of_what_it_prepares(line, number):
    assert told(PREPARED.format(line=line)) == number


@pytest.mark.parametrize(
    ("value", "path", "found"),
    [
        ("(1, 2)", (1,), [2]),
        ("(1, (2, 3))", (1, 0), [2]),
        ("(*xs, 2)", (1,), []),
        ("(1, *xs)", (0,), [1]),
        ("(1, 2)", (2,), []),
        ("xs", (0,), []),
    ],
)
def test_what_stands_at_a_place_of_a_tuple(value, path, found):
    node = ast.parse(value, mode="eval").body
    assert [constant(each) for each in element_of(node, path)] == found
