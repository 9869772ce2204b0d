"""Trainers of trl on two ranks, which they join themselves before lockstep comes."""

import dataclasses
import importlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run

import lockstep

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # what trl calls of transformers


def trained(folder, kind, stop_at=0, engine="auto", **more):
    """Of a run with three micro-batches a step: losses, numbers, evaluation and the weights' bits."""
    trainers = importlib.import_module("trl_trainers")  # by the ranks too, which import this file
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "dtype": torch.float32, **more}
    trainer = trainers.KINDS[kind](folder, **given)
    config, task = lockstep.from_trainer(trainer, devices=3)
    with lockstep.Run(dataclasses.replace(config, exact=True, stop_at=stop_at, engine=engine), task) as made:
        steps = [(step.loss, dict(step.numbers)) for step in made]
    evaluation = dataclasses.asdict(made.result.evaluation) if made.result.evaluation else {}
    weights = {name: full(tensor).tolist() for name, tensor in made.model.state_dict().items()}
    return steps, evaluation, weights


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_ranks(world, folder, kind, stop_at, engine, more):
    world.leave()
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = trained(folder, kind, stop_at, engine, **more)
    dist.destroy_process_group()
    return found


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_before")
def test_two_ranks_have_the_bits_of_one_and_resume_what_it_began(tmp_path):
    """DPO with LoRA, whose reference is the model without its adapter; one rank begins, two go on under ddp."""
    steps, *whole = trained(tmp_path / "one", "dpo", peft=True)
    begun, _, _ = trained(tmp_path / "two", "dpo", stop_at=2, peft=True)
    for rest, *found in run(on_ranks, 2, tmp_path / "two", "dpo", 0, "ddp", {"peft": True}, timeout=180.0):
        assert begun + rest == steps
        assert found == whole


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("sft", {"data": "completion"}),
        ("sft", {"packing": True, "peft": True}),
        ("dpo", {}),
        ("dpo", {"peft": True}),
        ("dpo", {"adapted": True}),
        ("reward", {}),
    ],
    ids=["sft", "sft-packed-lora", "dpo", "dpo-lora", "dpo-adapted", "reward"],
)
def test_other_trainers_and_engines_are_bitwise_on_two_ranks(tmp_path, kind, more, engine):
    alone = trained(tmp_path / "one", kind, **more)
    for found in run(on_ranks, 2, tmp_path / "two", kind, 0, engine, more, timeout=180.0):
        assert found == alone
