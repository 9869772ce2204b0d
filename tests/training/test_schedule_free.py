"""Optimizers with weights for training and others for evaluation (schedule-free): as in plain PyTorch."""

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn

import lockstep
from lockstep.checkpoint.export import export
from lockstep.config.sections import Optim
from lockstep.engines.registry import check_optimizer
from lockstep.errors import ConfigError

STEPS, SIZE, RATE = 12, 8, 0.5
CONSTANT = Optim(clip=0.0, schedule="constant", warmup_steps=0)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., arXiv 2405.15682): the model is at y in training, and at x after `eval()`."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "taken": 0, "trains": False})

    @torch.no_grad()
    def move(self, trains, share):
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] is not trains else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], share(group["beta"]))
            group["trains"] = trains

    def eval(self):
        self.move(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self.move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["trains"], "call train() before a step"
            group["taken"] += 1
            share, beta, rate = 1 / group["taken"], group["beta"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, share)
                    parameter.add_(parameter.grad, alpha=rate * (beta * (1 - share) - 1))
                    z.sub_(parameter.grad, alpha=rate)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def rows(split):
    generator = torch.Generator().manual_seed(int(split == "train"))
    x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :2].sin()


class Free(lockstep.Task):
    reduction = "mean"

    def model(self):
        return network()

    def dataset(self, split):
        return torch.utils.data.TensorDataset(*rows(split))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def order(self, samples, seed):
        return range(samples)

    def optimizer(self, model, config):
        return ScheduleFree(model.parameters(), lr=config.lr)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def evaluated(model):
    x, y = rows("evaluation")
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def by_hand(every=4, decay=0.0):
    """Weights for evaluation and losses after each evaluation; of their average, if it has a decay."""
    model, (x, y), found, average = network(), rows("train"), {}, None
    made = ScheduleFree(model.parameters(), lr=RATE)
    average = flat(model)
    for step in range(STEPS):
        made.train()
        part = slice(step % 4 * SIZE, (step % 4 + 1) * SIZE)
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        made.step()
        made.zero_grad()
        made.eval()
        share = min(decay, (1 + step) / (10 + step))
        average = share * average + (1 - share) * flat(model)
        if (step + 1) % every == 0:
            at = network()
            nn.utils.vector_to_parameters(average if decay else flat(model), at.parameters())
            found[step + 1] = flat(at), evaluated(at)
    return found


def trained(folder, task=None, optim=CONSTANT, **changes):
    settings = {"batch_size": SIZE, "micro_batch_size": 4, "max_steps": STEPS, "ckpt_freq": 4, "eval_freq": 4}
    settings |= {"lr": RATE, "optim": optim, "report": False} | changes
    losses = {}
    with lockstep.Run(config(folder, **settings), task or Free()) as begun:
        for step in begun:
            if step.evaluation:
                losses[step.global_step] = step.evaluation.loss
    return begun, losses


def of_run(folder, which="last", **more):
    return flat(lockstep.load(folder / "r", Free(), which, **more))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def check(losses, wanted):
    assert losses == pytest.approx({step: loss for step, (_, loss) in wanted.items()}, rel=1e-12)


def test_evaluation_best_load_and_export_have_evaluation_weights(tmp_path):
    wanted = by_hand()
    begun, losses = trained(tmp_path / "whole")
    check(losses, wanted)
    close(flat(begun.model), wanted[STEPS][0])
    close(of_run(tmp_path / "whole"), wanted[STEPS][0])
    best = min(losses, key=losses.get)
    close(of_run(tmp_path / "whole", "best"), wanted[best][0])
    close(of_run(tmp_path / "whole", 4), wanted[4][0])
    checkpoint = tmp_path / "whole" / "r" / "checkpoints" / f"step-{STEPS:08d}"
    out = export(checkpoint, tmp_path / "out.pt", "torch")
    exported = network()
    exported.load_state_dict(torch.load(out, weights_only=True))
    close(flat(exported), wanted[STEPS][0])


def test_another_run_begins_with_the_weights_for_evaluation(tmp_path):
    trained(tmp_path)
    begun, _ = trained(tmp_path, experiment_name="new", init_from=str(tmp_path / "r"), max_steps=1, lr=0.0)
    close(flat(begun.model), by_hand()[STEPS][0])


def test_a_resume_and_evaluations_leave_the_bits_of_training(tmp_path):
    trained(tmp_path / "whole")
    trained(tmp_path / "rare", eval_freq=0)
    trained(tmp_path / "parts", stop_at=6)
    trained(tmp_path / "parts")
    whole, rare, parts = (of_run(tmp_path / name) for name in ("whole", "rare", "parts"))
    assert torch.equal(rare, whole)
    assert torch.equal(parts, whole)


def test_an_average_is_of_the_weights_for_evaluation(tmp_path):
    decay = 0.6
    wanted = by_hand(decay=decay)
    optim = Optim(clip=0.0, schedule="constant", warmup_steps=0, ema=decay)
    begun, losses = trained(tmp_path, optim=optim)
    check(losses, wanted)
    close(flat(begun.model), by_hand()[STEPS][0])
    close(of_run(tmp_path, ema=True), wanted[STEPS][0])
    close(of_run(tmp_path), by_hand()[STEPS][0])


def on_engines(world, folder):
    world.leave()
    found = {}
    for name in ("ddp", "zero", "fsdp"):
        trained(folder / name, engine=name, stop_at=6)
        losses = trained(folder / name, engine=name)[1]
        found[name] = losses, of_run(folder / name).tolist()
    return found


def test_every_engine_switches_on_two_ranks(tmp_path):
    wanted = by_hand()
    for found in run(on_engines, 2, tmp_path, timeout=120.0):
        for losses, weights in found.values():
            check(losses, {step: each for step, each in wanted.items() if step > 6})
            close(torch.tensor(weights, dtype=torch.float64), wanted[STEPS][0])


def test_deepspeed_refuses_them_by_name():
    with refuses(ConfigError, "--engine deepspeed", "ScheduleFree"):
        check_optimizer("deepspeed", ScheduleFree(network().parameters(), lr=RATE), exact=False)
