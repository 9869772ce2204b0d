"""LS036: losses that are read by other files, by deriving classes, in texts, dictionaries, sums and late steps."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

START = (
    "import torch\nimport wandb\nfrom other import Meters, Base, Plain, as_numbers, as_tensors, step_of, number_of\n\n"
)
LOOP = """
def train(model, loader, optimizer, criterion, meters, log, cfg, pbar, start, writer, plain, i=0):
    model.cuda()
    total_loss = 0.0
    meters = Meters()
    plain = Plain()
    for x, y in loader:
        output = model(x.cuda())
        losses = {"box": criterion(output, y.cuda()), "cls": output.mean()}
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        i += 1
"""
OTHER = """
import torch

class Base:
    def fit(self, loader, optimizer):
        for x in loader:
            loss = self.model(x.cuda())
            loss.backward()
            optimizer.step()
            self.note(loss)

    def note(self, loss):
        pass

class Meters:
    def update(self, **values):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                value = value.item()
            self.sums[name] += value

    def keep(self, value):
        self.last = value.detach()

class Plain:
    def update(self, value, n):
        self.sum += value * n

def as_numbers(value):
    return value.detach().cpu().numpy()

def as_tensors(value):
    return value.detach()

def number_of(model, optimizer, x):
    loss = model(x)
    loss.backward()
    return loss.item()

def step_of(model, optimizer, x):
    loss = model(x)
    loss.backward()
    optimizer.step()
    return x, {"loss_all": loss, "image": x}
"""


def lines(folder, body):
    """What is told of run.py, a loop with `body` in it, as the lines of the body."""
    (folder / "other.py").write_text(OTHER)
    text = START + LOOP + "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "run.py").write_text(text)
    first = (START + LOOP).count("\n")
    return [f.line - first for f in check_paths([str(folder / "run.py")], configure({}, "LS036", ""))]


@pytest.mark.parametrize(
    "body",
    [
        'told = {"loss": loss, "lr": 0.1}\nwandb.log(told)',
        "hits = float((output.argmax(1) == y.cuda()).sum())",
        "for key in losses:\n    if 'box' in key:\n        log.append(losses[key].item())",
        "if i > cfg.start_step:\n    log.append(loss.item())",
    ],
)
def test_a_hidden_reading_is_told(tmp_path, body):
    assert len(lines(tmp_path, body)) == 1


@pytest.mark.parametrize(
    "body",
    [
        "meters.keep(loss)",
        "plain.update(loss, 1)",
        "log.append({k: as_tensors(v) for k, v in losses.items()})",
        'line = f"step {i}"\nlog.append(line)',
        'if i % 100 == 0:\n    line = f"loss {loss:.3f}"',
        'told = {"lr": 0.1}\nwandb.log(told)',
        "hits = (output.argmax(1) == y.cuda()).sum()",
        "for key in losses:\n    if 'box' in key:\n        log.append(losses[key].detach())",
        "if i > cfg.last_step:\n    log.append(loss.item())",
        "_, info = step_of(model, optimizer, x.cuda())\nprint(info)",
        'loss = number_of(model, optimizer, x)\nprint(f"{loss:.3f}")',
    ],
)
def test_what_reads_nothing_is_not(tmp_path, body):
    assert lines(tmp_path, body) == []


def test_a_number_and_what_is_made_of_it_can_be_written(tmp_path):
    body = (
        'total_loss += loss.item()\nmean_loss = total_loss / i\nprint(f"{mean_loss:.3f}")\nmeters.update(a=mean_loss)'
    )
    assert lines(tmp_path, body) == [1]


@pytest.mark.parametrize(("body", "number"), [("loss.detach()", 0)])
def test_a_method_of_a_deriving_class_runs_in_the_steps_of_its_base(tmp_path, body, number):
    (tmp_path / "other.py").write_text(OTHER)
    text = f"{START}class Mine(Base):\n    def note(self, loss):\n        self.last = {body}\n\nMine().fit([], None)\n"
    (tmp_path / "run.py").write_text(text)
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS036", ""))) == number


@pytest.mark.parametrize(
    ("device", "number"),
    [
        ("torch.device(cfg.device)", 1),
        ("torch.device(args.trainer.device)", 1),
        ("torch.device(self.target)", 1),
        ("torch.device('cpu')", 0),
        ("torch.get_device(cfg.device)", 0),
        ("cfg.device", 1),
        ("x.device", 0),
    ],
)
def test_a_device_that_an_option_names_may_be_one_to_wait_for(tmp_path, device, number):
    text = (
        "import torch\n\ndef fit(self, model, loader, optimizer, cfg, args):\n    model.to(%s)\n"
        "    for x in loader:\n        loss = model(x)\n        loss.backward()\n        optimizer.step()\n"
        "        print(loss.item())\n"
    )
    (tmp_path / "run.py").write_text(text % device)
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS036", ""))) == number
