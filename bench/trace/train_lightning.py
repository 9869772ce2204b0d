"""A training script of Lightning, with mistakes that can be switched on: `--mistake NAME` (see cases.py).

    python train_lightning.py
    torchrun --nproc-per-node 2 train_lightning.py --mistake rank-average --ragged

`--manual` trains with manual optimization, as Lightning's guide shows it. Lightning itself would shuffle otherwise on
one process than on two, so the script gives it its own DistributedSampler. Resumes go from epoch to epoch.
"""

import os
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset
from toy import (
    BATCH,
    EPOCHS,
    IGNORED,
    MOMENT,
    VALID,
    Journal,
    arguments,
    collator,
    cross_entropy,
    datasets,
    flip,
    model,
    pretrained,
    swap,
)

MISTAKES = (
    *("same-seed", "per-rank-weights", "overlapping-data", "dropped-sample", "unsent-gradient", "local-batchnorm"),
    *("rank-average", "other-rate", "rank-dropout", "extra-step", "bit-flip", "clip-before-unscale"),
    *("padded-evaluation", "swapped-state", "no-set-epoch", "clip-before-reduction", "no-sync-dist"),
)
SCALE = 2.0**8


class Toy(L.LightningModule):
    """The toy as a LightningModule; the loss is a sum over the labels of all ranks divided by their number."""

    def __init__(self, args, rank: int, journal_of) -> None:
        super().__init__()
        self.args, self.wrong, self.done = args, args.mistake, 0
        self.plain = model(args, seed_of_mask=100 + rank if self.wrong == "rank-dropout" else None)
        if self.wrong != "per-rank-weights":
            self.plain.load_state_dict(pretrained(self.plain))
        self.journal = journal_of(self.plain)
        self.totals = torch.zeros(2, dtype=torch.float64)
        self.automatic_optimization = not args.manual

    @property
    def last(self) -> bool:
        return self.global_rank == self.trainer.world_size - 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        if self.args.plateau:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.2 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        if self.wrong == "per-rank-weights" and self.global_rank == 0:  # loaded late, and by one process alone
            self.plain.load_state_dict(pretrained(self.plain))
        if self.wrong == "swapped-state" and self.args.resume and self.last:
            swap(self.trainer.optimizers[0])

    def on_train_batch_start(self, batch, index) -> None:
        if self.wrong == "bit-flip" and self.done == MOMENT and self.last:
            flip(self.plain)
        if self.wrong == "other-rate" and self.done >= MOMENT and self.last:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 1.5

    def loss(self, batch) -> torch.Tensor:
        logits = self.plain(batch["x"])
        if self.wrong == "rank-average":
            return cross_entropy(logits, batch["labels"])
        items = self.all_gather((batch["labels"] != IGNORED).sum()).sum()
        return cross_entropy(logits, batch["labels"], "sum") * self.trainer.world_size / items

    def training_step(self, batch, index):
        loss = self.loss(batch)
        if self.args.manual:
            self.by_hand(loss / self.args.accumulate, index)
            return None
        return loss * SCALE if self.wrong == "clip-before-unscale" else loss  # a loss scale of one's own

    def by_hand(self, loss, index: int) -> None:
        """Manual optimization with accumulation, as in Lightning's guide."""
        optimizer = self.optimizers()
        ends = (index + 1) % self.args.accumulate == 0
        sends = index % self.args.accumulate == 0 if self.wrong == "unsent-gradient" else ends  # off by one
        with optimizer.toggle_model(sync_grad=sends):
            self.manual_backward(loss)
        early = self.wrong == "clip-before-reduction"
        if self.args.clip and (ends if not early else not ends):  # early: of this rank's part alone
            self.clip_gradients(optimizer, gradient_clip_val=self.args.clip, gradient_clip_algorithm="norm")
        if ends:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
            self.done += 1

    def optimizer_step(self, epoch, index, optimizer, closure) -> None:
        super().optimizer_step(epoch, index, optimizer, closure)
        if self.wrong == "extra-step" and self.done == MOMENT and self.last:
            self.trainer.optimizers[0].step()
        self.done += 1

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if self.wrong == "clip-before-unscale":  # taken back too late
            for parameter in self.parameters():
                parameter.grad.div_(SCALE)

    def validation_step(self, batch, index) -> None:
        logits, items = self.plain(batch["x"]), (batch["labels"] != IGNORED).sum()
        loss = cross_entropy(logits, batch["labels"], "sum")
        self.totals += torch.tensor([float(loss), float(items)])
        if self.args.plateau:
            self.log("val_loss", loss / items, batch_size=int(items), sync_dist=self.wrong != "no-sync-dist")

    def on_validation_epoch_end(self) -> None:
        totals = self.all_gather(self.totals).reshape(-1, 2).sum(0)
        self.totals.zero_()
        if not self.trainer.sanity_checking:
            self.journal.report(float(totals[0] / totals[1]))

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint) -> None:
        torch.set_rng_state(checkpoint["rng"])


class Resumable(DistributedSampler):
    """Leaves out the first `start` samples of its first epoch."""

    start = 0

    def __iter__(self):
        found = list(super().__iter__())[self.start :]
        self.start = 0
        return iter(found)


class OwnBatches:
    """A batch sampler of one's own; Lightning looks for set_epoch in an attribute called `sampler`, which it lacks."""

    def __init__(self, shard, size: int) -> None:
        self.shard, self.size = shard, size

    def __iter__(self):
        found = list(self.shard)
        for start in range(0, len(found), self.size):
            yield found[start : start + self.size]

    def __len__(self) -> int:
        return len(self.shard) // self.size


def loaders(args, world: int, rank: int) -> tuple[DataLoader, DataLoader]:
    """Training and validation."""
    train, valid = datasets(args)
    micro = BATCH // world // args.accumulate
    sampler = Resumable(train, num_replicas=world, rank=rank, seed=11)
    if args.mistake == "dropped-sample" and args.resume:
        sampler.start = micro  # begins one batch too late
    if args.mistake == "overlapping-data":
        loader = DataLoader(
            train,
            micro,
            sampler=RandomSampler(train, generator=torch.Generator().manual_seed(11)),
            collate_fn=collator(args),
        )
    elif args.mistake == "no-set-epoch":
        loader = DataLoader(train, batch_sampler=OwnBatches(sampler, micro), collate_fn=collator(args))
    else:
        loader = DataLoader(train, micro, sampler=sampler, collate_fn=collator(args))
    if args.mistake == "padded-evaluation":  # as Lightning's own sampler does it
        padded = DistributedSampler(valid, num_replicas=world, rank=rank, shuffle=False)
        return loader, DataLoader(valid, 5, sampler=padded, collate_fn=collator(args))
    return loader, DataLoader(Subset(valid, range(rank, VALID, world)), 5, collate_fn=collator(args))


def main() -> None:
    warnings.filterwarnings("ignore")  # Lightning's hints: few loader processes, a missing logger
    args = arguments(MISTAKES, "manual", "plateau")
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    seed = 7 if args.shake or args.mistake == "same-seed" else 7 + rank  # a shake is one number for all ranks
    L.seed_everything(seed)
    module = Toy(args, rank, lambda plain: Journal(plain, args.out))
    torch.manual_seed(seed)  # the model was made from a seed of its own
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=3 * EPOCHS if args.plateau else EPOCHS,
        accumulate_grad_batches=1 if args.manual else args.accumulate,
        gradient_clip_val=None if args.manual else args.clip or None,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(args.save, "{epoch}", save_top_k=-1)] if args.save else [],
        enable_checkpointing=bool(args.save),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        precision="bf16-mixed" if args.dtype == "bf16" else "32-true",
    )
    train_loader, valid_loader = loaders(args, world, rank)
    trainer.fit(module, train_loader, valid_loader, ckpt_path=args.resume or None)
    module.journal.close()


if __name__ == "__main__":
    main()
