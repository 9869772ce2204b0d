"""LS017: evaluations over rows of held-out data, methods that a base class runs, helpers named like models."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    return len(check_text(text, configure({}, "LS017", "")))


ROWS = """
import torch

net = torch.nn.Linear(4, 2)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(9):
    for i in range(10):
        optimizer.zero_grad()
        criterion(net(train_set[i]), y_train[i]).backward()
        optimizer.step()
    {inner}
    history["test_loss"][epoch] = 1
{mode}
{loop}
    {rows}
    {forward}
    {score}
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"loop": "for i in range(users):"}, 1),
        ({"loop": "i = 0\nwhile i < users:"}, 1),
        ({"rows": "x, y = test_set[i:i + 32], labels[i]"}, 1),
        ({"rows": "z = Variable(test_set[i]); x = z.unsqueeze(0)"}, 1),
        ({"rows": "pass", "forward": "guess = net(test_set[i])"}, 1),
        ({"inner": "for i in range(9): guess = net(x_val[i])", "rows": "x = train_set[i]"}, 1),
        # nothing says that the rows are held out
        ({"rows": "x = train_set[i]"}, 0),
        ({"rows": "x = test_set[i]; x = train_set[i]"}, 0),
        ({"rows": "x = rows[i]", "score": "print(test_set[i])"}, 0),
        ({"rows": "x = test_losses[i]"}, 0),
        ({"rows": "x = x[valid[i]]"}, 0),
        ({"rows": "x = batch['test_x']"}, 0),
        # in eval mode, without a graph
        ({"mode": "net.eval(); torch.set_grad_enabled(False)"}, 0),
        ({"score": "criterion(guess, x).backward(); optimizer.step()"}, 0),
    ],
)
def test_rows_of_held_out_data_in_a_loop_that_counts(change, found):
    usual = {
        "inner": "pass",
        "mode": "pass",
        "loop": "for i in tqdm(range(0, len(order), 32)):",
        "rows": "x = test_set[i]",
        "forward": "guess = net(x)",
        "score": "total += guess.sum().item()",
    }
    assert told(ROWS.format(**usual | change)) == found


BASE = """
import torch

class Base:
    def train(self):
        for epoch in range(9):
            self.model.train()
            self.train_epoch(epoch)
            {switch}
            {call}

    def to_eval(self):
        self.model.eval()

    def validate(self, epoch):
        raise NotImplementedError

class Trainer(Base):
    def train_epoch(self, epoch):
        for x in self.loader:
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()

    {decorator}
    def validate(self, epoch):
        for x in self.val_loader:
            self.model(x).detach()

Trainer().train()
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"switch": "self.to_eval()"}, 1),
        ({"call": "with torch.no_grad(): self.validate(epoch)", "switch": "pass"}, 1),
        ({"call": "with torch.no_grad(): self.validate(epoch)"}, 0),
        ({"decorator": "@torch.no_grad()"}, 0),
        ({"call": "other.validate(epoch)"}, 0),
    ],
)
def test_a_method_that_a_base_class_runs(change, found):
    usual = {"switch": "self.model.eval()", "call": "self.validate(epoch)", "decorator": "# plain"}
    assert told(BASE.format(**usual | change)) == found


@pytest.mark.parametrize(
    ("name", "found"), [("unwrap_model", 0), ("copy_model", 0), ("big_model", 1), ("accelerator.unwrap_model", 0)]
)
def test_what_gives_a_model_back_is_none(name, found):
    text = f"""
import torch

def validate(model, val_loader):
    for x in val_loader:
        print({name}(model).generate(x))

def main(model, loader, val_loader, optimizer):
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    validate(model, val_loader)

main(None, [], [], None)
"""
    assert told(text) == found


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("model(example)", 0),  # what it gives is thrown away: its layers are shown
        ("print(model(example))", 1),
        ("for x in batches:\n        model(x)", 1),
    ],
)
def test_a_model_that_is_only_run_to_be_shown(call, found):
    text = f"""
def show(model, example, batches):
    model.eval()
    {call}

def main(model, loader, optimizer):
    show(model, loader[0], loader)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

main(None, [], None)
"""
    assert told(text) == found
