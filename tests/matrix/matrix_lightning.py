"""The tasks "lightning" and "manual" of the matrix: LightningModules around its models, and what the second ends in.

task = lightning_task("manual", "batchnorm", "none", folder)
wanted = manual_oracle("batchnorm", "none", False, "float32", steps)    # as `oracle`, in a plain loop
"""

import importlib
import warnings
from functools import cache, partial

import matrix_oracle
import torch
from matrix_oracle import CLIP, LR, Wanted
from matrix_subject import BAD, BATCH, HELD_OUT, MICRO, SHARE, STEPS, Samples, collate, loss_sum, make, places
from torch import nn
from torch.utils.data import DataLoader, Subset

import lockstep

__all__ = ["LIGHTNING", "lightning_task", "manual_oracle", "manual_rounding"]

LIGHTNING = ("lightning", "manual")
_MOMENTUM = 0.5  # of the judge's optimizer
_JUDGED = 0.02  # the share of the judge in the loss of what it judges


def judge_of(model):
    """It sees three batches in each micro-batch: two before its own step, one after it."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        normed = model == "batchnorm"  # with a bias before it its gradient would be rounding alone
        norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        return nn.Sequential(nn.Linear(5, 8, bias=not normed), norm, nn.Tanh(), nn.Linear(8, 1))


def judges(judge, made, batch):
    """The judge's loss, a mean over samples."""
    real, false = judge(batch["target"]).float(), judge(made.detach()).float()
    return 0.05 * ((real - 1.0).square() + (false + 1.0).square()).mean()


def makes(judge, made, batch):
    """That of what it judges."""
    error = made - batch["target"]
    own = 0.05 * (error.square() * batch["kept"]).sum() / (SHARE * len(made))
    return own + _JUDGED * (judge(made).float() - 1.0).square().mean()


def scheduled(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(matrix_oracle._factor, whole=steps))


def makers(net):
    return torch.optim.AdamW(matrix_oracle.groups(net), lr=LR, betas=(0.9, matrix_oracle.BETA2), eps=1e-8)


def judging(judge):
    return torch.optim.SGD(judge.parameters(), lr=LR, momentum=_MOMENTUM)


def _automatic(L, model):
    class Automatic(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.turns = make(model), 0

        def training_step(self, batch, batch_idx):
            loss = loss_sum(self.net, batch) / (SHARE * len(batch["x"]))
            self.log("seen", loss.detach(), on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            kept = batch["kept"]
            found, target = self.net(batch["x"], batch["token"]).float()[kept], batch["target"][kept]
            error = found - target
            self.log("absolute", error.abs().mean(), batch_size=len(error))
            return 0.05 * error.square().sum() / (SHARE * len(kept))

        def configure_optimizers(self):
            optimizer = makers(self.net)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [{"scheduler": scheduled(optimizer, steps), "interval": "step"}]

    return Automatic


def _manual(L, model):
    class Manual(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net, self.judge, self.turns = make(model), judge_of(model), 0

        def training_step(self, batch, batch_idx):
            maker, judge = self.optimizers()
            made = self.net(batch["x"], batch["token"]).float()
            judge.zero_grad()
            self.manual_backward(judges(self.judge, made, batch))
            judge.step()
            maker.zero_grad()
            loss = makes(self.judge, made, batch)  # in which the judge has gradients too
            self.manual_backward(loss)
            self.clip_gradients(maker, CLIP, "norm")
            maker.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()
            return loss.detach()

        def configure_optimizers(self):
            both = makers(self.net), judging(self.judge)
            return list(both), [scheduled(each, self.trainer.estimated_stepping_batches) for each in both]

    return Manual


def lightning_task(task, model, fault, folder):
    """The task of a case, as `lockstep.from_lightning` makes it of an unedited module."""
    L = importlib.import_module("lightning.pytorch")
    monitors = [L.callbacks.ModelCheckpoint(folder / "unused", monitor="seen_step", mode="max")]
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this machine has beside
        trainer = L.Trainer(devices=1, max_epochs=1, callbacks=monitors if task == "lightning" else [], **plain)
    kind = {"lightning": _automatic, "manual": _manual}[task](L, model)

    class Counting(kind):
        """Counts its batches over all starts of a run, by what it leaves in checkpoints."""

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.turns += 1

        def on_save_checkpoint(self, checkpoint):
            checkpoint["turns"] = self.turns

        def on_load_checkpoint(self, checkpoint):
            self.turns = checkpoint["turns"]

    Counting.__name__ = Counting.__qualname__ = task
    training = DataLoader(Samples(model, fault, folder / "raised"), MICRO, shuffle=True, collate_fn=collate)
    held_out = DataLoader(Subset(Samples(model, "none"), range(HELD_OUT)), MICRO, collate_fn=collate)
    _, made = lockstep.from_lightning(Counting(), (training, held_out), trainer, devices=BATCH // MICRO)
    made.made = lambda: made.module
    return made


@cache
def manual_oracle(model, fault, left_out, precision, steps, begin=1):
    """What a run of "manual" is after so many steps: all micro-batches up to an optimizer's step, one after the other.

    A step that is left out is not computed, and steps no scheduler.

    Args:
        begin: what the backwards begin with and the gradients are divided by: no power of two rounds them otherwise.
    """
    net, judge, data, positions = make(model), judge_of(model), Samples(model, fault), places()
    both = nn.ModuleDict({"net": net, "judge": judge})
    optimizers = makers(net), judging(judge)
    maker, decide = optimizers
    schedulers = [scheduled(each, STEPS) for each in optimizers]
    trained = [p for p in net.parameters() if p.requires_grad]
    average, taken = {name: parameter.detach().clone() for name, parameter in both.named_parameters()}, 0
    for step in range(steps):
        if not (left_out and step == BAD):
            taken += 1
            chosen = positions[step * BATCH : (step + 1) * BATCH]
            micro = [matrix_oracle._batch(data, chosen[k : k + MICRO]) for k in range(0, len(chosen), MICRO)]
            made = []
            for index, batch in enumerate(micro):
                kept = matrix_oracle._copies(net)
                with matrix_oracle._autocast(precision):
                    made.append(net(batch["x"], batch["token"]).float())
                    loss = judges(judge, made[-1], batch)
                (loss * (begin / len(micro))).backward()
                if model == "buffer" and index:  # the module keeps the buffers of a step's first micro-batch
                    matrix_oracle._put_back(net, kept)
            _divided(judge.parameters(), begin)
            decide.step()
            for batch, each in zip(micro, made, strict=True):
                with matrix_oracle._autocast(precision):
                    loss = makes(judge, each, batch)
                (loss * (begin / len(micro))).backward()
            _divided(trained, begin)
            nn.utils.clip_grad_norm_(trained, CLIP)
            maker.step()
            both.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        for name, parameter in both.named_parameters():
            average[name].mul_(0.75).add_(parameter.detach(), alpha=0.25)
    state = matrix_oracle._state(both, optimizers, False, 1.0, 0)
    state |= {f"kept.average/{name}": tensor for name, tensor in average.items()}
    state |= {f"task/schedulers/{at}": torch.tensor([float(taken)], dtype=torch.float64) for at in range(2)}
    return Wanted(state, matrix_oracle._copies(both), {})


def manual_rounding(model, fault, left_out, precision, steps):
    """{name: how far the same loop is off, at most, where only its rounding is another}."""
    case = model, fault, left_out, precision, steps
    one = manual_oracle(*case).state
    others = [manual_oracle(*case, begin).state for begin in (3, 5, 7)]
    distances = dict.fromkeys(one, 0.0)
    for name, tensor in one.items():
        if tensor.numel():
            distances[name] = max(float((each[name] - tensor).abs().max()) for each in others)
    return distances


def _divided(parameters, begin):
    for parameter in parameters:
        if begin != 1 and parameter.grad is not None:
            parameter.grad.div_(begin)
