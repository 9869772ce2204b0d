"""A message fits its script, and the gravest comes first."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.output import fold_hints, render
from lockstep_lint.runner import check_text

ALL = configure({}, "ALL", None)

ONE_PROCESS = """\
import torch
from torch import nn

def main():
    model = nn.Linear(4, 2).cuda()
    model.load_state_dict(torch.load("model.pt"))

if __name__ == "__main__":
    main()
"""
SEVERAL = ONE_PROCESS.replace("    model = ", "    torch.distributed.init_process_group('nccl')\n    model = ")

FLAG = """\
import argparse
import os
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""

EVALUATES = """\
import torch

def train(model, teacher, loader, optimizer, criterion):
    model.train()
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        with torch.no_grad():
            with torch.autocast("cuda", dtype=torch.float16):
                target = teacher(x)
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
"""

MOVED = """\
import torch
from torch.cuda.amp import GradScaler, autocast

def train(model, loader, optimizer, criterion):
    scaler = GradScaler()
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with autocast():
            loss = criterion(model(x), y)
        with autocast():
            loss = loss + criterion(model(x + 1), y)
        with autocast():
            loss = loss + criterion(model(x - 1), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

DEADLOCK = """\
import torch
import torch.distributed as dist

def train(model, loader, optimizer, criterion):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        print(loss.item())
        if dist.get_rank() == 0:
            dist.barrier()

train(None, [], None, None)
"""

UNPINNED = """\
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, debug):
    if debug:
        loader = DataLoader(data, 8, num_workers=2, pin_memory=False)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        return
    loader = DataLoader(data, 8, num_workers=2, pin_memory=True)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
        optimizer.step()
"""


def told(text, code):
    return [finding for finding in check_text(text, ALL) if finding.rule == code]


def test_a_load_in_one_process_is_not_told_of_ranks():
    (one,), (several,) = told(ONE_PROCESS, "LS015"), told(SEVERAL, "LS015")
    assert "rank" not in one.message
    assert "rank" in several.message


def test_a_leftover_flag_is_silent_where_the_variable_is_read():
    assert told(FLAG, "LS029") == []
    assert len(told(FLAG.replace('int(os.environ["LOCAL_RANK"])', "args.local_rank"), "LS029")) == 1


def test_no_scaler_is_asked_for_where_no_gradient_is_kept():
    assert told(EVALUATES, "LS023") == []
    decorated = EVALUATES.replace("        with torch.no_grad():\n    ", "        if True:\n    ")
    assert len(told(decorated, "LS023")) == 1


def test_a_moved_name_is_told_a_person_once_a_file():
    findings = told(MOVED, "LS029")
    assert len(findings) == 4
    assert [finding.line for finding in fold_hints(findings)] == [5]  # one line for the rule
    assert "3 more places" in fold_hints(findings)[0].message


@pytest.mark.parametrize("form", ["text", "github"])
def test_errors_come_before_warnings(form):
    findings = check_text(DEADLOCK)
    assert findings[0].severity != "error"
    lines = [line for line in render(findings, form, {}).splitlines() if "LS0" in line and "--explain" not in line]
    assert [("error" in line.split("LS0")[0] + line.split(": ")[1]) for line in lines[:2]] == [True, False]


def test_a_copy_of_memory_that_is_not_pinned_is_not_told():
    assert told(UNPINNED, "LS022") == []


def test_a_habit_is_not_told_unasked():
    assert {finding.rule for finding in check_text(DEADLOCK, configure({}, None, None))} == {"LS018"}
