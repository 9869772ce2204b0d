"""The task "trainer" of the matrix: a Trainer of transformers around its models, with a scheduler made by hand.

task = trainer_task("batchnorm", "none", folder)
"""

import os

import numpy as np
import torch
from matrix_oracle import BETA2, LR, cyclic, groups
from matrix_subject import BATCH, HELD_OUT, MICRO, SHARE, Samples, collate, make
from torch import nn
from torch.utils.data import Subset

import lockstep

__all__ = ["trainer_task"]


class Served(nn.Module):
    """The model as a Trainer wants it: with its loss, a mean over samples."""

    def __init__(self, name):
        super().__init__()
        self.net = make(name)

    def forward(self, x, token, target, kept, step):
        found = self.net(x, token).float()
        return {"loss": 0.05 * ((found - target).square() * kept).sum() / (SHARE * len(x)), "logits": found}


def absolute(prediction):
    target, kept = prediction.label_ids
    return {"absolute": float(np.abs((prediction.predictions - target)[kept.astype(bool)]).mean())}


def trainer_task(model, fault, folder):
    """The task of a case, as `lockstep.from_trainer` makes it of a Trainer."""
    import transformers  # seconds: other tasks need not wait for it

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate warns and sets it
    net = Served(model)
    optimizer = torch.optim.AdamW(groups(net), lr=LR, betas=(0.9, BETA2))
    settings = {"output_dir": str(folder / "unused"), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": MICRO, "num_train_epochs": 1, "remove_unused_columns": False}
    settings |= {"eval_strategy": "steps", "eval_steps": 4, "label_names": ["target", "kept"], "save_strategy": "no"}
    made = transformers.Trainer(
        net,
        transformers.TrainingArguments(**settings),
        collate,
        Samples(model, fault, folder / "raised", task="trainer"),
        Subset(Samples(model, "none"), range(HELD_OUT)),
        compute_metrics=absolute,
        optimizers=(optimizer, cyclic(optimizer)),
    )
    _, task = lockstep.from_trainer(made, devices=BATCH // MICRO)
    task.made = lambda: made.model
    return task
