"""LS017: whose mode a call switches, and who sees to the graph; LS016: losses that a step gives back; LS034, LS020,
LS011."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def told(text, code="LS017"):
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
def test_the_model_that_an_evaluation_is_given_stays_in_eval_mode(own, before, given, after, expected):
    assert told(RESTORED.format(own=own, before=before, given=given, after=after)) is expected


ALONE = """
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
    assert told(ALONE.format(decorator=decorator, mode=mode, clears=clears, more=more)) is expected


SHARED = """
import torch

class Solver:
    def fit(self):
        for epoch in range(3):
            self.model.train()
            self.run(epoch)
            self.model.eval()
            {call}

    def run(self, epoch, cross_valid=False, verbose=False, do_evaluate=False):
        for x in self.loader:
            {forward}
            if not cross_valid:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

if __name__ == "__main__":
    Solver().fit()
"""


@pytest.mark.parametrize(
    ("call", "forward", "expected"),
    [
        ("self.run(epoch, cross_valid=True)", "loss = self.model(x)", True),
        ("score = self.run(epoch=epoch, cross_valid=True)", "loss = self.model(x).mean()", True),
        ("print(self.run(epoch, cross_valid=True))", "y = self.model(x); loss = y.sum()", True),
        ("with torch.no_grad(): self.run(epoch, cross_valid=True)", "loss = self.model(x)", False),
        ("self.run(epoch, verbose=True)", "loss = self.model(x)", True),  # it trains, in eval mode
        ("self.run(epoch, do_evaluate=True)", "loss = self.model(x)", True),
        ("self.model.train(); self.run(epoch, verbose=True)", "loss = self.model(x)", False),
        (
            "self.model.train(); self.run(epoch, do_evaluate=True)",
            "loss = self.model(x)",
            False,
        ),  # besides its training
        (
            "self.run(epoch, cross_valid=True)",
            "with torch.set_grad_enabled(not cross_valid): loss = self.model(x)",
            False,
        ),
    ],
)
def test_a_shared_loop_that_keeps_a_graph_to_validate(call, forward, expected):
    assert told(SHARED.format(call=call, forward=forward)) is expected


GIVEN = """
class Runner:
    def batch(self, x, y):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        {after}
        return {given}

    def epoch(self):
        {start}
        for x, y in self.loader:
            {take}
            {add}
        return total
"""
SUM = ("total = 0.0", "loss = self.batch(x, y)", "total += loss")


@pytest.mark.parametrize(
    ("after", "given", "start", "take", "add", "expected"),
    [
        ("pass", "loss", *SUM, True),
        ("pass", "x, loss", "total = 0.0", "x, loss = self.batch(x, y)", "total += loss", True),
        ("pass", "loss", "total = []", "loss = self.batch(x, y)", "total.append(loss)", True),
        ("pass", "loss", "total = torch.zeros(2)", "loss = self.batch(x, y)", "total[0] += loss", True),
        ("pass", "loss.item()", *SUM, False),
        ("pass", "loss.detach()", *SUM, False),
        ("loss = loss.item()", "loss", *SUM, False),
        ("pass", "loss, x", "total = 0.0", "x, loss = self.batch(x, y)", "total += loss", False),
        ("pass", "loss", "total = torch.zeros(2)", "loss = self.batch(x, y)", "total[0] += loss.detach()", False),
    ],
)
def test_a_loss_that_the_step_gives_back(after, given, start, take, add, expected):
    text = GIVEN.format(after=after, given=given, start=start, take=take, add=add)
    assert told("import torch\n" + text, "LS016") is expected


DATA = """
import numpy as np
from torch.utils.data import Dataset

class First(Dataset):
    def __getitem__(self, i):
        return np.random.randn()

class Second(Dataset):
    def __getitem__(self, i):
        return np.random.rand() if {draws} else i
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader
from data import First, Second

def worker_init_fn(number):
    torch.manual_seed(number)

def main(kind):
    data = First() if kind else Second()
    train_loader = DataLoader(data, num_workers=2{worker})
    held = Second()
    return train_loader, DataLoader(held, num_workers=2)
"""


@pytest.mark.parametrize(("worker", "lines"), [("", [11]), (", worker_init_fn=worker_init_fn", [])])
def test_a_function_that_no_loader_is_given_seeds_no_worker_and_a_data_set_is_told_once(tmp_path, worker, lines):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "data.py").write_text(DATA.format(draws="True"))
    (tmp_path / "train.py").write_text(LOADERS.format(worker=worker))
    found = check_paths([str(tmp_path / "train.py")], configure({}, "LS034", ""))
    assert [finding.line for finding in found] == lines


@pytest.mark.parametrize(
    ("given", "expected"),
    [("rate", False), ("0.0", False), ("other", True), ("args.decay", True), ("1e-4", True), ("ZERO", False)],
)
def test_a_decay_that_is_nothing_by_its_name(given, expected):
    text = f"""
import torch
ZERO = 0
def make(model, args):
    rate, other = 0, 0.1
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay={given})
"""
    assert told(text, "LS020") is expected


JOINS = """
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Subset, random_split
from data import Noisy, Quiet

def main():
    data, parts = Noisy(), []
    for _ in range(2):
        parts.append(Noisy())
    train, rest = random_split(data, [6, 2])
    return DataLoader({data}, num_workers=2)
"""
NOISY = """
import numpy as np
from torch.utils.data import Dataset

class Quiet(Dataset):
    def __getitem__(self, i):
        return i

class Noisy(Dataset):
    def __getitem__(self, i):
        return i + np.random.randn()
"""


@pytest.mark.parametrize(
    "data",
    [
        "ConcatDataset([Quiet(), Noisy()])",
        "ConcatDataset(parts)",
        "Subset(Noisy(), [1, 2])",
        "train",
        "ConcatDataset([Subset(Noisy(), [1]), Quiet()])",
        "ConcatDataset([Quiet(), Quiet()])",
        "Subset(Quiet(), [1])",
    ],
)
def test_data_sets_that_are_joined_or_cut_are_told_in_their_own_file(tmp_path, data):
    (tmp_path / "data.py").write_text(NOISY)
    (tmp_path / "train.py").write_text(JOINS.format(data=data))
    found = check_paths([str(tmp_path / name) for name in ("train.py", "data.py")], configure({}, "LS034", ""))
    assert [(finding.path[-7:], finding.line) for finding in found] == [("data.py", 11)]


GENERATORS = """
import numpy as np
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.{made}(0)

    def __getitem__(self, i):
        return i + {drawn}

loader = DataLoader(Noisy(), num_workers=2)
"""


@pytest.mark.parametrize(
    ("made", "drawn", "torch", "levels"),
    [
        ("default_rng", "self.rng.normal()", "2.1", ["error"]),
        ("RandomState", "self.rng.randn()", "2.1", ["error"]),
        ("default_rng", "np.random.randn()", "2.1", ["hint"]),  # seeded in each worker
        ("default_rng", "np.random.randn()", "1.8", ["error"]),
        ("default_rng", "torch.randn(())", "1.8", []),
    ],
)
def test_numpys_generators_in_workers(tmp_path, made, drawn, torch, levels):
    (tmp_path / "requirements.txt").write_text(f"torch=={torch}\n")
    (tmp_path / "train.py").write_text(GENERATORS.format(made=made, drawn=drawn))
    found = check_paths([str(tmp_path / "train.py")], configure({}, "LS034", ""))
    assert [finding.severity.value for finding in found] == levels


STALE = """
import torch

def train(model, loader, optimizer, criterion):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        {lines}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([CLIP, "optimizer.zero_grad()", "loss.backward()", "optimizer.step()"], True),
        (["optimizer.zero_grad()", CLIP, "loss.backward()", "optimizer.step()"], True),
        (["optimizer.zero_grad()", "loss.backward()", CLIP, "optimizer.step()"], False),
        (["loss.backward()", CLIP, "optimizer.step()", "optimizer.zero_grad()"], False),
        ([CLIP, "optimizer.step()", "optimizer.zero_grad()", "loss.backward()"], False),
        ([CLIP, "finish(optimizer)", "optimizer.zero_grad()", "loss.backward()"], False),
    ],
)
def test_a_clip_of_what_is_cleared_next(lines, expected):
    text = STALE.format(lines="\n        ".join(lines))
    assert bool(check_text(text, configure({}, "LS011", ""))) == expected
