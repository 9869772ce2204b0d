"""LS027: what is read from a model that Accelerate prepared; LS017: evaluations by a model's own method."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

PREPARED = """
import torch
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator({plugin})
    {names} = accelerator.prepare(model, optimizer, loader)
    {then}
    for x in loader:
        loss = {read}
        accelerator.backward(loss)
        optimizer.step()
"""
USUAL = {"plugin": "", "names": "model, optimizer, loader", "then": "pass", "read": "model.features(x)"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"read": "x[:model.config.size]"}, True),
        ({"read": "model(x)"}, False),
        ({"read": "accelerator.unwrap_model(model).features(x)"}, False),
        ({"then": "model = accelerator.unwrap_model(model)"}, False),
        ({"names": "wrapped, optimizer, loader"}, False),
        ({"read": "model.module.features(x)"}, False),
        ({"read": "x[:optimizer.size]"}, False),
        ({"plugin": "fsdp_plugin=None"}, False),
        ({"then": "model.features = model.forward"}, False),
        ({"then": "if not hasattr(model, 'features'): return"}, False),
    ],
)
def test_reads_from_a_prepared_model(change, told):
    assert bool(check_text(PREPARED.format(**USUAL | change), configure({}, "LS027", ""))) is told


SCORED = """
import torch

def score(loader, model):
    {switch}
    for x in loader:
        print(model.{method}(x))

def main(model, loader, optimizer, build):
    for x in loader:
        model.train()
        model.step(x)
        {step}
    {frozen}
    score(loader, model)

main(None, [], None, None)
"""
PLAIN = {"switch": "model.eval()", "method": "forward", "step": "optimizer.step()", "frozen": "pass"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"frozen": "model.head.requires_grad_(False)"}, True),
        ({"frozen": "model.head.requires_grad_(False)", "step": "pass"}, False),
        ({"method": "describe"}, False),
        ({"switch": "build.eval()"}, False),
        ({"switch": "model.eval(); model.train()"}, False),
        ({"switch": "model.eval(); torch.set_grad_enabled(False)"}, False),
    ],
)
def test_a_model_that_is_run_by_its_method(change, told):
    assert bool(check_text(SCORED.format(**PLAIN | change), configure({}, "LS017", ""))) is told
