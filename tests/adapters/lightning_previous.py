"""Trains a few modules under the Lightning that is found first, and by lockstep; what both come to is printed as JSON.

PYTHONPATH=FOLDER python lightning_previous.py SAVE_DIR lightning.pytorch pytorch_lightning     # a line for each
"""

import dataclasses
import importlib
import json
import sys

import torch
from lightning_modules import classifier, gan, loaders, seeded, their_losses, trainer

import lockstep


def one_cycle(module, optimizer):
    steps = module.trainer.estimated_stepping_batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def ours(folder, module, data, made):
    config, task = lockstep.from_lightning(module, data, made)
    with lockstep.Run(dataclasses.replace(config, save_dir=str(folder), report=False), task) as run:
        return config, [step.loss for step in run], run.result.evaluation


def main(package, folder):
    L = importlib.import_module(package)
    torch.set_num_threads(1)
    found = {"version": L.__version__}

    module = seeded(classifier(L, configure=one_cycle))
    theirs, fitted = their_losses(L, module, loaders())
    again = seeded(classifier(L, configure=one_cycle))
    stopping = L.callbacks.EarlyStopping("val_loss", patience=5)
    keeping = L.callbacks.ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_top_k=2)
    made = trainer(L, callbacks=[stopping, keeping], enable_checkpointing=True)
    config, losses, evaluation = ours(f"{folder}/automatic", again, loaders(), made)
    found["automatic"] = {"theirs": theirs, "ours": losses}
    found["rates"] = {"theirs": module.rates, "ours": again.rates}
    found["logs"] = {
        "theirs": {name: float(fitted.callback_metrics[name]) for name in ("seen", "all")},
        "ours": {name: evaluation.metrics[name] for name in ("seen", "all")},
    }
    found["callbacks"] = [config.best_metric, config.patience, config.checkpoint.keep]

    theirs, _ = their_losses(L, seeded(gan(L)), loaders()[0:1])
    _, losses, _ = ours(f"{folder}/manual", seeded(gan(L)), loaders()[0], trainer(L))
    found["manual"] = {"theirs": theirs, "ours": losses}
    print(json.dumps(found))


if __name__ == "__main__":
    for package in sys.argv[2:]:
        main(package, f"{sys.argv[1]}/{package}")
