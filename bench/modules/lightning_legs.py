"""What bench/lightning_modules.py does with a row: `lightning`, `lockstep`, `verify`.

Under Lightning and under lockstep the module is made twice with the same seed, and takes the same steps over the same
samples in the same order; what is compared is each step's loss, where the training step returns one, and every
parameter at the end; buffers that differ are named. Where a training step drew a random number, which is looked for,
nothing is compared: lockstep seeds each micro-batch, Lightning does not.
"""

import dataclasses
import logging
import math
import random
import tempfile
import traceback
import warnings

import numpy as np
import torch
from lightning_row import BATCHES, EPOCHS, loaders, make

import lockstep
from lockstep.errors import UsageError

STEPS = EPOCHS * BATCHES


def package_of(module):
    """The package whose LightningModule it is: `lightning.pytorch` or `pytorch_lightning`."""
    import lightning.pytorch
    import pytorch_lightning

    return lightning.pytorch if isinstance(module, lightning.pytorch.LightningModule) else pytorch_lightning


def trainer_of(row, package, folder, **more):
    logger = package.loggers.CSVLogger(folder) if row.get("logger") else False
    return package.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **more,
    )


def drawn():
    """The states of all generators, to see whether somebody drew."""
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate()


def numbers_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def under_lightning(row):
    """(the losses of the steps, NaN where there is none; the state at the end; whether a step drew anything)."""
    module = make(row)
    package = package_of(module)

    class Watch(package.Callback):
        def __init__(self):
            self.losses, self.draws = [], False

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = drawn()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.draws |= drawn() != self.before
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.losses.append(math.nan if loss is None else float(loss))

    watch = Watch()
    training, others = loaders(row)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(row, package, folder, callbacks=[watch]).fit(module, training, others or None)
    return watch.losses, numbers_of(module), watch.draws


def lightning(row):
    losses, _, draws = under_lightning(row)
    return {"ok": len(losses) == STEPS, "losses": losses, "draws": draws}


def asked_for(row, folder, parts=1):
    """What `from_lightning` makes of the row, with `parts` micro-batches in a step."""
    module = make(row)
    package = package_of(module)
    training, others = loaders(row, parts)

    trainer = trainer_of(row, package, folder, accumulate_grad_batches=parts)
    return lockstep.from_lightning(module, (training, others or None), trainer)


def largest(theirs, ours):
    """The largest difference of two lists of numbers, relative to the larger where that is above 1."""
    return max(abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in zip(theirs, ours, strict=True))


def apart(theirs, ours):
    """The largest difference of two tensors, relative where they are above 1."""
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(theirs, ours) else math.inf
    return float(((theirs - ours).abs() / theirs.abs().clamp(min=1.0)).max()) if theirs.numel() else 0.0


def under_lockstep(row):
    """Takes the steps through `from_lightning`, and compares with Lightning what can be compared."""
    theirs, state, draws = under_lightning(row)
    with tempfile.TemporaryDirectory() as folder:
        config, task = asked_for(row, folder)
        config = dataclasses.replace(config, save_dir=folder)
        ours = [float(step.loss) for step in lockstep.Run(config, task)]
        mine = numbers_of(task.module)
    if len(ours) != STEPS:
        return {"ok": False, "why": f"took {len(ours)} steps where Lightning took {STEPS}"}
    if draws:
        return {"ok": True, "text": "yes (draws)", "losses": ours}
    if mine.keys() != state.keys():
        return {"ok": False, "why": f"other tensors at the end: {sorted(mine.keys() ^ state.keys())[:3]}"}
    trained = {name for name, _ in task.module.named_parameters(remove_duplicate=False)}
    weights = max(apart(state[name], mine[name]) for name in trained)
    off = max(weights, 0.0 if any(map(math.isnan, theirs)) else largest(theirs, ours))  # by hand: there is no loss
    found = {"ok": off <= 1e-6, "text": f"{off:.1e}", "largest": off, "losses": ours, "theirs": theirs}
    others = [name for name in mine if name not in trained and not apart(state[name], mine[name]) <= 1e-6]
    if not found["ok"]:
        found["why"] = f"differs from Lightning: {off:.1e} (parameters {weights:.1e})"
    elif others:
        found["why"] = f"losses and parameters are equal, {len(others)} buffers are not: {', '.join(others[:2])}"
    return found


def verified(row):
    """`lockstep.verify` of two micro-batches a step: a single process again, and DDP on 2 ranks, each also resumed."""
    with tempfile.TemporaryDirectory() as folder:
        config, task = asked_for(row, folder, parts=2)
        config = dataclasses.replace(config, save_dir=folder)
        table = lockstep.verify(task, config, engines=("ddp",), world_sizes=(2,), steps=STEPS)
    verdicts = [f"x{row.combination.world_size} {row.verdict}" for row in table.rows]
    return {"ok": table.ok, "text": ", ".join(verdicts), "why": "" if table.ok else " ".join(str(table).split())}


LEGS = {"lightning": lightning, "lockstep": under_lockstep, "verify": verified}


def result(row, leg):
    """What this way of this row found, also where it failed."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        return LEGS[leg](row)
    except Exception as error:
        traceback.print_exc()
        refused = isinstance(error, UsageError)
        why = str(error) if refused else f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"ok": False, "refused": refused, "why": why}
