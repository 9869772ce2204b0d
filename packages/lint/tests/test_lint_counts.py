"""LS013 and LS012: what a schedule's length counts, and who divides the loss of several micro-batches."""

import pytest

from lockstep_lint.config import Config
from lockstep_lint.runner import check_text


def lines(code, text):
    codes = frozenset({code})
    return [finding.line for finding in check_text(text, Config(codes, codes))]


GROUPS = """import argparse
import torch
from transformers import get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, default={default})
args = parser.parse_args()

def train(model, loader, optimizer, epochs):
    total = len(loader) // args.accum * epochs
    schedule = get_linear_schedule_with_warmup(optimizer, 100, total)
    for epoch in range(epochs):
        for i, x in enumerate(loader):
            (model(x).mean() / args.accum).backward()
            {test}
                optimizer.step()
                optimizer.zero_grad()
            {step}
"""
EACH, GROUP = "if True:", "if (i + 1) % args.accum == 0 or i + 1 == len(loader):"


@pytest.mark.parametrize(
    ("default", "test", "step", "expected"),
    [
        (4, EACH, "schedule.step()", [11]),
        (1, EACH, "schedule.step()", []),
        (1, GROUP, "schedule.step()", [11]),
        (4, GROUP, "    schedule.step()", []),
        (4, GROUP, "pass", []),
    ],
)
def test_a_length_that_is_divided(default, test, step, expected):
    assert lines("LS013", GROUPS.format(default=default, test=test, step=step)) == expected


BY_HAND = """import torch
from rates import rate_at

def train(model, loader, optimizer, epochs, n):
    updates = {start}
    total = {total}
    for epoch in range(epochs):
        for i, x in enumerate(loader):
            rate = rate_at({count}, 100, total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            (model(x).mean() / n).backward()
            if (i + 1) % n == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
"""


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [
        ("len(loader) * epochs", "updates", [6]),
        ("len(loader) // n_micro_steps * epochs", "updates", []),
        ("len(loader) * epochs", "i", []),
        ("10000", "updates", []),
    ],
)
def test_a_rate_by_hand(total, count, expected):
    assert lines("LS013", BY_HAND.format(start=0, total=total, count=count)) == expected


ENGINE = """import torch
import deepspeed

def train(model, loader, options, made):
    engine, optimizer, _, {name} = deepspeed.initialize(model=model, config=options{given})
    for x in loader:
        engine.backward(engine(x).mean())
        engine.step()
        {step}
"""


@pytest.mark.parametrize(
    ("name", "given", "step", "expected"),
    [
        ("schedule", "", "schedule.step()", [9]),
        ("schedule", ", lr_scheduler=made", "if schedule is not None: schedule.step()", [9]),
        ("schedule", "", "if schedule is not None: schedule.step()", []),
        ("_", ", lr_scheduler=made_schedule", "made_schedule.step()", [9]),
        ("_", "", "made_schedule.step()", []),
    ],
)
def test_a_schedule_that_the_engine_steps(name, given, step, expected):
    assert lines("LS013", ENGINE.format(name=name, given=given, step=step)) == expected


REPEATED = """import torch
from transformers import get_linear_schedule_with_warmup

def train(model, loader, optimizer, epochs):
    repeats = 5
    schedule = get_linear_schedule_with_warmup(optimizer, 0, {total})
    for epoch in range(epochs):
        for x in loader:
            for turn in range(repeats):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                {test}schedule.step()
"""


@pytest.mark.parametrize(
    ("total", "test", "expected"),
    [
        ("len(loader) * epochs", "", [6]),
        ("len(loader) * epochs * repeats", "", []),
        ("len(loader) * epochs", "if turn == repeats - 1: ", []),
    ],
)
def test_a_loop_within_the_batches(total, test, expected):
    assert lines("LS013", REPEATED.format(total=total, test=test)) == expected


PREPARED = """import torch
from accelerate import Accelerator
from transformers import get_linear_schedule_with_warmup

def train(model, loader, optimizer, epochs):
    accelerator = Accelerator({options})
    {before}
    schedule = get_linear_schedule_with_warmup(optimizer, 0, {total})
    {after}
    for epoch in range(epochs):
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
TAKEN = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
ALL = "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)"
SCHEDULE = "schedule = accelerator.prepare(schedule)"


@pytest.mark.parametrize(
    ("options", "before", "total", "after", "expected"),
    [
        ("", TAKEN, "len(loader) * epochs", SCHEDULE, [8]),
        ("", TAKEN, "len(loader) * epochs * accelerator.num_processes", SCHEDULE, []),
        ("split_batches=True", TAKEN, "len(loader) * epochs", SCHEDULE, []),
        ("", TAKEN, "len(loader) * epochs", "pass", []),
        ("", "pass", "len(loader) * epochs", ALL, []),
    ],
)
def test_a_schedule_that_accelerate_steps_for_each_process(options, before, total, after, expected):
    text = PREPARED.format(options=options, before=before, total=total, after=after)
    assert lines("LS013", text) == expected


EPOCHS = """import torch
from torch.optim.lr_scheduler import LinearLR

def train(model, loader, optimizer, warm_epochs):
    schedule = LinearLR(optimizer, total_iters={total})
    for turn in range({turns}):
        {loop}
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            schedule.step()
"""


@pytest.mark.parametrize(
    ("total", "turns", "loop", "expected"),
    [
        ("warm_epochs", "10", "for x in loader:", [11]),
        ("warm_epochs * len(loader)", "10", "for x in loader:", []),
        ("warm_epochs", "warm_epochs", "with torch.enable_grad() as x:", []),
    ],
)
def test_a_length_in_epochs(total, turns, loop, expected):
    assert lines("LS013", EPOCHS.format(total=total, turns=turns, loop=loop)) == expected


ACCELERATE = """import torch
from accelerate import Accelerator

def train(model, loader, optimizer, n):
    accelerator = Accelerator({options})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).mean()
            shown = loss / n
            {divided}
            accelerator.backward({loss})
            optimizer.step()
            optimizer.zero_grad()
"""
TOLD = "gradient_accumulation_steps=n"


@pytest.mark.parametrize(
    ("options", "divided", "loss", "expected"),
    [
        (TOLD, "loss = loss / n", "loss", [12]),
        (TOLD, "loss /= n", "loss", [12]),
        (TOLD, "pass", "loss / accelerator.gradient_accumulation_steps", [12]),
        (TOLD, "pass", "loss", []),
        (TOLD, "loss = loss / 2", "loss", []),
        ("", "loss = loss / n", "loss", []),
        ("gradient_accumulation_steps=1", "loss = loss / n", "loss", []),
    ],
)
def test_a_loss_that_accelerate_divides(options, divided, loss, expected):
    assert lines("LS012", ACCELERATE.format(options=options, divided=divided, loss=loss)) == expected


RANKS = """import torch

def train(model, loader, optimizer, n, world_size, share):
    for i, x in enumerate(loader):
        loss = model(x).mean()
        loss = loss * {factor}
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("factor", "expected"), [("world_size", [7]), ("share", [])])
def test_a_loss_times_the_ranks(factor, expected):
    assert lines("LS012", RANKS.format(factor=factor)) == expected


LEFTOVERS = """
import torch

def train(model, loader, optimizer, n):
    for i, x in enumerate(loader):
        (model(x).sum() / n).backward()
        full = (i + 1) % n == 0
        ends = {ends}
        if {test}:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("ends", "test", "told"),
    [("i + 1 == len(loader)", "full or ends", 0), ("i + 1 == len(loader)", "full", 1)],
)
def test_the_last_turn_may_stand_beside_a_name_of_the_group(ends, test, told):
    assert len(lines("LS012", LEFTOVERS.format(ends=ends, test=test))) == told
