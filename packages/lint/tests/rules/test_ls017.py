"""LS017: evaluation mode."""

import pytest
from rule_findings import count

from lockstep_lint.config import Config, configure
from lockstep_lint.runner import check_text


def findings_of(text):
    """Return the rule's lines and messages in a text."""
    return [(finding.line, finding.message) for finding in check_text(text, configure({}, "LS017", ""))]


CODE = frozenset({"LS017"})


def lines(text):
    return [finding.line for finding in check_text(text, Config(CODE, CODE))]


AVERAGED = """import torch

def train(net, other, loader, optimizer, ema, epochs):
    for epoch in range(epochs):
        for x in loader:
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.step(net.parameters())
        {test}
            {shadow}
            {put}
            torch.save(net.state_dict(), f"{{epoch}}.pt")
            {back}
"""


SELDOM = "if (epoch + 1) % 50 == 0:"


@pytest.mark.parametrize(
    ("test", "shadow", "put", "back", "expected"),
    [
        (SELDOM, "ema.store(net.parameters())", "ema.copy_to(net.parameters())", "ema.restore(net.parameters())", []),
        (SELDOM, "kept = net.state_dict()", "ema.copy_to(net.parameters())", "net.load_state_dict(kept)", []),
        (SELDOM, "pass", "ema.copy_to(other.parameters())", "pass", []),
        (SELDOM, "pass", "ema.copy_to(net.parameters())", "break", []),
        ("if epoch == epochs - 1:", "pass", "ema.copy_to(net.parameters())", "pass", []),
    ],
)
def test_averaged_weights_that_stay(test, shadow, put, back, expected):
    assert lines(AVERAGED.format(test=test, shadow=shadow, put=put, back=back)) == expected


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
    assert count(ALONE.format(**usual | change), "LS017") == found


def findings_of_3(text, code="LS017"):
    return bool(check_text(text, configure({}, code, "")))


RESTORED = """
import torch

def validate(generator, valloader):
    {own}
    with torch.no_grad():
        for x in valloader:
            generator(x)

def train(gen, critic, teacher, loader, valloader, optimizer):
    {before}
    gen.train()
    for epoch in range(3):
        validate({given}, valloader)
        {after}
        for x in loader:
            optimizer.zero_grad()
            gen(x).sum().backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("own", "before", "given", "after", "expected"),
    [
        ("generator.eval()", "pass", "gen", "pass", True),
        ("generator.eval()", "shape = eval('1, 2')", "gen", "pass", True),
        ("generator.eval()", "critic.train()", "critic", "pass", True),
        ("generator.eval()", "pass", "gen", "gen.train()", False),
        ("generator.eval(); generator.train()", "pass", "gen", "gen.train()", True),  # it evaluates in training mode
        ("generator.eval()", "pass", "teacher", "pass", False),
        ("generator.eval()", "gen.eval()", "gen", "pass", False),
        ("net = torch.nn.Linear(2, 2); net.eval(); generator = net", "pass", "gen", "pass", False),
    ],
)
def test_the_model_that_an_evaluation_is_given_stays_in_eval(own, before, given, after, expected):
    assert findings_of_3(RESTORED.format(own=own, before=before, given=given, after=after)) is expected


ALONE_2 = """
import torch

{decorator}
def evaluate(net, test_loader):
    {mode}
    right = 0
    for x, y in test_loader:
        {clears}
        right += (net(x).argmax(1) == y).sum().item()
    return right

{more}
"""


@pytest.mark.parametrize(
    ("decorator", "mode", "clears", "more", "expected"),
    [
        ("", "net.eval()", "pass", "", True),
        ("", "net = net.eval(); net.eval()", "pass", "", True),
        ("", "net.eval()", "net.zero_grad()", "", True),
        ("@torch.no_grad()", "net.eval()", "pass", "", False),
        ("", "pass", "pass", "", False),
        ("", "net.eval()", "pass", "HOOKS = [evaluate]", False),
        ("", "net.eval()", "pass", "with torch.no_grad(): evaluate(1, 2)", False),
        ("", "net.eval()", "torch.autograd.grad(net(x), x)", "", False),
    ],
)
def test_an_evaluation_that_nothing_in_sight_calls(decorator, mode, clears, more, expected):
    assert findings_of_3(ALONE_2.format(decorator=decorator, mode=mode, clears=clears, more=more)) is expected
