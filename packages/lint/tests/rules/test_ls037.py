"""LS037: ranks leave a loop apart."""

import textwrap

import pytest
from rule_findings import count_in, lines

from lockstep_lint.config import Config, configure, default_codes
from lockstep_lint.runner import check_paths, check_text

LOOP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, rank, show, ends):
    dist.init_process_group("nccl")
    model = DDP(model.to(rank), device_ids=[rank])
    for step, batch in enumerate(loader):
        {before}
        model(batch).sum().backward()
        optimizer.step()
        if {test}:
            show(step)
            {skip}
        {after}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("test", "skip", "after", "number"),
    [
        ("step % 9 == 0 and rank == 0", "continue", "show(step)", 0),
        ("step % 9 == 0 and rank == 0", "pass", "if ends(step): break", 0),
        ("step % 9 == 0", "continue", "if ends(step): break", 0),
    ],
)
def test_a_turn_that_one_rank_skips(test, skip, after, number):
    assert len(lines(LOOP.format(before="pass", test=test, skip=skip, after=after), "LS037")) == number


@pytest.mark.parametrize(("bar", "count"), [("tqdm(loader)", 0), ("tqdm(iterable=loader)", 0), ("shorter()", 1)])
def test_a_bar_around_the_loader_on_one_rank_changes_no_count(bar, count):
    text = f"""
import torch.distributed as dist
from tqdm import tqdm

def total(loader, value, shorter):
    if dist.get_rank() == 0:
        loader = {bar}
    for batch in loader:
        dist.all_reduce(value)
"""
    found = [f for f in check_text(text, Config(default_codes(), frozenset())) if f.rule == "LS037"]
    assert len(found) == count


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("accelerator.wait_for_everyone()", 1),
        ("print(x)", 0),
        ("if accelerator.is_main_process: accelerator.wait_for_everyone()", 0),
    ],
)
def test_a_loop_in_which_accelerates_processes_wait(line, number):
    text = "import torch\nfrom accelerate import Accelerator\n\ndef main(items):\n    accelerator = Accelerator()\n"
    text += f"    for x in items:\n        {line}\n        if accelerator.is_main_process and x:\n            break\n"
    assert len(check_text(text, configure({}, "LS037", ""))) == number


def findings_of(tmp_path, files, rule="LS028"):
    """Return the lines of a rule's findings in the first of some files."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    found = check_paths([str(tmp_path / next(iter(files)))], configure({}, rule, ""))
    return [finding.line for finding in found]


@pytest.mark.parametrize(
    ("leave", "number"),
    [
        ("if rank == 0 and bad:\n            return -1", 1),
        ("if rank == 0 and bad:\n            break", 1),
        ("if bad:\n            return -1", 0),
        ("if rank == 0:\n            print('x')", 0),
    ],
)
def test_a_rank_that_returns_out_of_the_training(tmp_path, leave, number):
    text = "from torch.nn.parallel import DistributedDataParallel as DDP\n\n"
    text += "def main(rank, model, loader, optimizer, bad):\n    model = DDP(model)\n"
    text += "    for x in loader:\n        model(x).backward()\n        optimizer.step()\n"
    assert len(findings_of(tmp_path, {"run.py": f"{text}        {leave}\n"}, "LS037")) == number


@pytest.mark.parametrize(
    ("leave", "number"),
    [
        ("if loss < 0.1 and rank == 0:", 1),
        ("if rank == 0:", 1),
        ("if epoch > 3:", 0),
        ("if epoch > 3 and config:", 0),
    ],
)
def test_a_loop_of_deepspeed_is_left_by_one_rank(tmp_path, leave, number):
    run = (
        "import deepspeed\nimport torch\n\ndef main(model, config, loader, rank):\n"
        "    engine, _, _, _ = deepspeed.initialize(model=model, config=config)\n"
        "    for epoch, x in enumerate(loader):\n        loss = engine(x)\n        engine.backward(loss)\n"
        f"        engine.step()\n        {leave}\n            break\n"
    )
    assert count_in(tmp_path, "LS037", run=run) == number


EPOCHS = """
import torch
from accelerate import Accelerator

def validate(model, loader):
    total = 0
    for x, y in loader:
        total += model(x).sum().item()
    return total

def main(model, optimizer, train_loader, val_loader, accelerator: Accelerator, rest):
    accelerator = Accelerator()
    model, optimizer, train_loader{held} = accelerator.prepare(model, optimizer, train_loader{held})
    best, bad, step = 0, 0, 0
    for epoch in range(9):
        for x, y in train_loader:
            loss = model(x).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        score = {score}
        if score > best:
            best = score
        else:
            bad += 1
        if {test}:
            break
"""


@pytest.mark.parametrize(
    ("held", "score", "test", "expected"),
    [
        ("", "validate(model, val_loader)", "bad > 3", False),
        (", val_loader", "accelerator.gather(validate(model, val_loader)).mean()", "bad > 3", False),
        (", val_loader", "rest", "bad > 3", False),
        (", val_loader", "loss.item()", "bad > 3", True),
        (", val_loader", "rest", "accelerator.is_main_process and bad > 3", True),
        (", val_loader", "rest", "step > len(train_loader) * 9", False),
    ],
)
def test_a_loop_that_accelerates_processes_leave_apart(held, score, test, expected):
    assert bool(lines(EPOCHS.format(held=held, score=score, test=test), "LS037")) is expected


COUNTED = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def main(model, data, optimizer, criterion, device, args):
    loader = DataLoader(data, sampler=DistributedSampler(data))
    model = DDP(model, device_ids=[device])
    step, right = 0, 0
    for epoch in range(args.epochs):
        if step > len(loader) * args.epochs:
            break
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            {count}
"""


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("step += 1", False),
        ("step = step + args.world_size", False),
        ("step = epoch * len(loader) + i", False),
        ("step += loss.item()", True),
        ("if loss < 1: step += 1", True),
        ("step += len(x)", False),
        ("step += x.size(0)", False),
        ("step += x.shape[0]", False),
        ("step, last = epoch * len(loader) + i, 0", False),
        ("step, last = loss.item(), 0", True),
    ],
)
def test_a_counter_of_turns_is_no_score(count, expected):
    assert bool(lines(COUNTED.format(count=count), "LS037")) is expected
