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


def trained(folder, stop_at=0, engine="auto", kind="causal"):
    """Of a run of a Trainer with dropout and three micro-batches a step: what it came to, and the weights' bits."""
    trainers = importlib.import_module("hf_trainers")  # by the ranks too, which import this file
    make = trainers.sft if kind == "sft" else trainers.KINDS[kind]
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    if kind == "causal":
        more |= {"dropout": 0.2, "compute_metrics": accuracy}
        more |= {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = make(folder, **more)
    config, task = lockstep.from_trainer(trainer, devices=3)
    with lockstep.Run(dataclasses.replace(config, exact=True, stop_at=stop_at, engine=engine), task) as made:
        losses = [step.loss for step in made]
    found = dataclasses.asdict(made.result.evaluation) if made.result.evaluation else {}
    weights = {name: full(tensor).tolist() for name, tensor in made.model.state_dict().items()}
    return losses, found, weights, trainer, task


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_ranks(world, folder, *more):
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    *found, trainer, task = trained(folder, *more)
    assert dist.is_initialized()  # by accelerate, and still there
    if more[1] == "fsdp":  # whose model stays split
        whole = lockstep.load(folder, task, "last")
        assert trainer.model is whole
        assert {name: tensor.tolist() for name, tensor in whole.state_dict().items()} == found[-1]
    rows = trainer.evaluate().get("eval_rows", len(trainer.eval_dataset))
    trainer.save_model(str(folder / "saved"))
    dist.destroy_process_group()
    return *found, rows


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_before")
def test_two_ranks_have_the_bits_of_one_and_resume_what_it_began(tmp_path):
    """Under fsdp, on from what one rank began."""
    *alone, _, _ = trained(tmp_path / "one")
    *begun, _, _ = trained(tmp_path / "two", stop_at=2)
    for losses, *found, rows in run(on_ranks, 2, tmp_path / "two", 0, "fsdp", timeout=180.0):
        assert begun[0] + losses == alone[0]
        assert found == alone[1:]
        assert rows == 10
    saved = importlib.import_module("transformers").GPT2LMHeadModel.from_pretrained(tmp_path / "two" / "saved")
    assert {name: tensor.tolist() for name, tensor in saved.state_dict().items()} == alone[2]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
@pytest.mark.parametrize("kind", ["seq2seq", "text classification", "sft"])
def test_other_kinds_on_two_ranks_have_the_bits_of_one(tmp_path, kind, engine):
    if kind == "sft":
        pytest.importorskip("trl")
    *alone, _, _ = trained(tmp_path / "one", kind=kind)
    for *found, rows in run(on_ranks, 2, tmp_path / "two", 0, engine, kind, timeout=180.0):
        assert found == alone
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
    with pytest.raises(ConfigError, match="in its own process group"):
        World.join(device="cpu", timeout=30.0)
    dist.destroy_process_group()
    return float(total), names[0]


def test_a_group_that_is_there_already_is_taken_and_left():
    (total, name), other = run(as_guest, 2)
    assert total == 2.0
    assert other == (total, name)


def within(world):
    """What makes a task within a run may join the ranks, as `prepare_data` of a LightningModule does."""
    inner = World.join(device="cpu", timeout=30.0)
    told = inner.gather(inner.rank)
    inner.leave()
    return told, world.gather(world.rank)


def test_ranks_that_have_joined_are_joined_again_and_stay():
    assert run(within, 2) == [([0, 1], [0, 1])] * 2


def by_processes(folder):
    """A Trainer whose own methods derive rates from the number of processes, and whose callback names files by them."""
    trainers = importlib.import_module("hf_trainers")  # by the ranks too, which import this file
    transformers = importlib.import_module("transformers")
    seen = []

    class Scaled(transformers.Trainer):
        def processes(self):
            return self.args.world_size, self.args.process_index, self.accelerator.num_processes

        def create_optimizer(self, *_):
            seen.append(self.processes())
            lr = self.args.learning_rate * self.args.world_size
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
            return self.optimizer

        def create_scheduler(self, steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: self.accelerator.num_processes / (1 + step)
            )
            return self.lr_scheduler

    class Named(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, **_):
            seen.append((args.world_size, args.process_index))

    trainer = trainers.made(
        folder, trainers.causal_model(), trainers.causal_rows(), kind=Scaled, callbacks=[Named()], eval_strategy="no"
    )
    config, task = lockstep.from_trainer(trainer, devices=2)
    with lockstep.Run(dataclasses.replace(config, exact=True), task) as made:
        rates = [step.lr for step in made]
    return rates, {name: tensor.tolist() for name, tensor in made.model.state_dict().items()}, seen


def by_processes_on(world, folder):
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = by_processes(folder)
    dist.destroy_process_group()
    return found


@pytest.mark.usefixtures("as_before")
def test_rates_are_set_up_as_on_one_device(tmp_path):
    rates, weights, seen = by_processes(tmp_path / "one")
    assert rates == pytest.approx([1e-2 / (1 + step) for step in range(4)])
    assert set(seen[:-1]) == {(1, 0, 1)}
    for rank, other in enumerate(run(by_processes_on, 2, tmp_path / "two", timeout=180.0)):
        assert other[:2] == (rates, weights)
        assert other[2] == [*seen[:-1], (2, rank)]
