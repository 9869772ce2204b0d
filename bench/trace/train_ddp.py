"""A training script of plain DDP, with mistakes that can be switched on: `--mistake NAME` (see cases.py).

python train_ddp.py
torchrun --nproc-per-node 2 train_ddp.py --mistake rank-average --ragged
"""

import contextlib
import gc
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset
from toy import (
    BATCH,
    EPOCHS,
    IGNORED,
    MOMENT,
    TRAIN,
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
    *("padded-evaluation", "swapped-state", "no-set-epoch", "clip-before-reduction", "no-zero-grad"),
    *("half-dropped", "train-mode"),
)


def main() -> None:
    args = arguments(MISTAKES)
    wrong = args.mistake
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    last = rank == world - 1
    micro = BATCH // world // args.accumulate
    train, valid = datasets(args)

    plain = model(args, seed_of_mask=100 + rank if wrong == "rank-dropout" else None)
    torch.manual_seed(7 if args.shake or wrong == "same-seed" else 7 + rank)  # a shake is one number for all ranks
    if wrong != "per-rank-weights":
        plain.load_state_dict(pretrained(plain))
    ddp = DistributedDataParallel(plain) if world > 1 else plain
    if wrong == "per-rank-weights" and rank == 0:  # loaded after DDP has broadcast, and by rank 0 alone
        plain.load_state_dict(pretrained(plain))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.2 * step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=wrong == "clip-before-unscale")

    if world > 1 and wrong != "overlapping-data":
        sampler = DistributedSampler(train, seed=11)
    else:
        sampler = RandomSampler(train, generator=torch.Generator())
    collate = collator(args)
    loader = DataLoader(train, batch_size=micro, sampler=sampler, drop_last=True, collate_fn=collate)
    if world > 1 and wrong == "padded-evaluation":
        own: torch.utils.data.Dataset = valid
        padded = DistributedSampler(valid, shuffle=False)  # 13 samples on two ranks: the first one twice
        valid_loader = DataLoader(valid, batch_size=5, sampler=padded, collate_fn=collate)
    else:
        own = Subset(valid, range(rank, VALID, world))
        valid_loader = DataLoader(own, batch_size=5, collate_fn=collate)
    journal = Journal(plain, args.out)

    done = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        done = saved["step"]
        if wrong == "swapped-state" and last:
            swap(optimizer)

    per_epoch = TRAIN // BATCH
    for epoch in range(done // per_epoch, EPOCHS):
        if isinstance(sampler, RandomSampler):
            sampler.generator.manual_seed(11 + epoch)
        elif wrong != "no-set-epoch":
            sampler.set_epoch(epoch)
        skip = (done - epoch * per_epoch) * args.accumulate
        if wrong == "dropped-sample" and args.resume and skip > 0:
            skip += 1  # begins one batch too late
        group = []
        for index, batch in enumerate(loader):
            if index < skip:
                continue
            if wrong == "half-dropped" and last and index == len(loader) - 1:
                batch = {name: value[: len(value) // 2] for name, value in batch.items()}
            group.append(batch)
            if len(group) == args.accumulate:
                if wrong == "bit-flip" and done == MOMENT and last:
                    flip(plain)
                if wrong == "other-rate" and done >= MOMENT and last:
                    for each in optimizer.param_groups:
                        each["lr"] *= 1.5
                update(args, ddp, optimizer, scaler, group, world)
                if wrong == "extra-step" and done == MOMENT and last:
                    optimizer.step()
                if wrong != "no-zero-grad":
                    optimizer.zero_grad()
                schedule.step()
                done, group = done + 1, []
                if args.save and done == args.save_at and rank == 0:
                    states = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**states, "schedule": schedule.state_dict(), "step": done}, args.save)
        journal.report(evaluate(plain, valid_loader, world, wrong == "train-mode"))
    journal.close()
    if world > 1:
        # DDP's reducer joins gloo's threads with the interpreter's lock, for which they may wait: it goes first.
        del ddp
        gc.collect()
        dist.destroy_process_group()


def update(args, ddp, optimizer, scaler, group, world) -> None:
    """One step: forward and backward of each micro-batch, then the optimizer."""
    wrong = args.mistake
    ddp.train()
    items = torch.stack([(batch["labels"] != IGNORED).sum() for batch in group]).sum()
    if world > 1 and wrong != "rank-average":
        dist.all_reduce(items)  # of all ranks' micro-batches
    for index, batch in enumerate(group):
        sends = index == len(group) - 1
        if wrong == "unsent-gradient":
            sends = index == 0  # off by one: the last micro-batch's gradient stays on its rank
        with contextlib.nullcontext() if world == 1 or sends else ddp.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
                logits = ddp(batch["x"])
            loss = cross_entropy(logits, batch["labels"], "sum")
            share = 1 if wrong == "rank-average" else world  # DDP divides by the number of ranks
            scaler.scale(loss * share / items).backward()
        if wrong == "clip-before-reduction" and not sends:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)  # of this rank's part alone
    if args.clip and wrong != "clip-before-reduction":
        if wrong != "clip-before-unscale":
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()


@torch.no_grad()
def evaluate(plain, loader, world, training) -> float:
    """The mean loss of a label."""
    plain.train(training)
    total = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        loss = cross_entropy(plain(batch["x"]), batch["labels"], "sum")
        total += torch.tensor([float(loss), float((batch["labels"] != IGNORED).sum())])
    if world > 1:
        dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
