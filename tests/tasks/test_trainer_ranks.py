"""A Hugging Face Trainer on two ranks, which it joins itself before lockstep comes."""

import dataclasses
import importlib
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def accuracy(prediction):
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(right)}


def trained(folder, stop_at=0):
    """Of a run of a Trainer with dropout and three micro-batches a step: what it came to, and the weights' bits."""
    causal = importlib.import_module("hf_trainers").causal  # by the ranks too, which import this file
    more = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    more |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    trainer = causal(folder, dropout=0.2, **more)
    config, task = lockstep.from_trainer(trainer, devices=3)
    with lockstep.Run(dataclasses.replace(config, exact=True, stop_at=stop_at), task) as made:
        losses = [step.loss for step in made]
    found = dataclasses.asdict(made.result.evaluation) if made.result.evaluation else {}
    weights = {name: tensor.tolist() for name, tensor in made.model.state_dict().items()}
    return losses, found, weights, trainer


def on_ranks(world, folder, stop_at):
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    *found, trainer = trained(folder, stop_at)
    assert dist.is_initialized()  # by accelerate, and still there
    rows = trainer.evaluate()["eval_rows"]
    dist.destroy_process_group()
    return *found, rows


def test_two_ranks_have_the_bits_of_one_and_resume_what_it_began(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    try:
        *alone, _ = trained(tmp_path / "one")
        *begun, _ = trained(tmp_path / "two", stop_at=2)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    for losses, *found, rows in run(on_ranks, 2, tmp_path / "two", 0, timeout=180.0):
        assert begun[0] + losses == alone[0]
        assert found == alone[1:]
        assert rows == 10


def as_guest(world):
    world.leave()
    dist.init_process_group("gloo")
    for _ in range(2):
        guest = World.join(device="cpu", timeout=30.0)
        assert guest.gather(guest.rank) == [0, 1]
        names = guest.gather(guest.name("watch"))
        assert names[0] == names[1]
        guest.leave()
        assert dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    os.environ["RANK"] = str(1 - int(os.environ["RANK"]))
    with pytest.raises(ConfigError, match="in the process group that it has made"):
        World.join(device="cpu", timeout=30.0)
    dist.destroy_process_group()
    return float(total), names[0]


def test_a_group_that_is_there_already_is_taken_and_left():
    (total, name), other = run(as_guest, 2)
    assert total == 2.0
    assert other == (total, name)
