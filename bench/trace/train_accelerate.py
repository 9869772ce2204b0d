"""A training script of Accelerate, with mistakes that can be switched on: `--mistake NAME` (see cases.py).

    python train_accelerate.py
    torchrun --nproc-per-node 2 train_accelerate.py --mistake rank-average --ragged

Samples with other numbers of labels are weighted as Accelerate's guide of gradient accumulation shows it.
"""

import contextlib
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from toy import (
    BATCH,
    EPOCHS,
    IGNORED,
    MOMENT,
    TRAIN,
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
    *("padded-evaluation", "swapped-state", "scheduler-twice", "split-batches", "double-division"),
    "no-zero-grad",
)
SCALE = 2.0**8


def main() -> None:
    args = arguments(MISTAKES)
    wrong = args.mistake
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if args.dtype == "bf16" else "no",
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=11, split_batches=wrong == "split-batches"
        ),
    )
    world, rank = accelerator.num_processes, accelerator.process_index
    last = rank == world - 1
    train, valid = datasets(args)
    plain = model(args, seed_of_mask=100 + rank if wrong == "rank-dropout" else None)
    set_seed(7, device_specific=not args.shake and wrong != "same-seed")
    if wrong != "per-rank-weights":
        plain.load_state_dict(pretrained(plain))
    collate, micro = collator(args), BATCH // world // args.accumulate
    loader = DataLoader(train, batch_size=micro, shuffle=True, drop_last=True, collate_fn=collate)
    valid_loader = DataLoader(valid, batch_size=6, collate_fn=collate)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    # A prepared schedule takes as many steps at each update as there are processes.
    each = 1 if wrong == "scheduler-twice" else world
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.2 * (step // each)))

    ddp, optimizer, schedule, valid_loader = accelerator.prepare(plain, optimizer, schedule, valid_loader)
    if wrong != "overlapping-data":
        loader = accelerator.prepare(loader)
    if wrong == "per-rank-weights" and accelerator.is_main_process:  # loaded late, and by one process alone
        accelerator.unwrap_model(ddp).load_state_dict(pretrained(plain))
    journal = Journal(plain, args.out)

    done, per_epoch = 0, TRAIN // BATCH
    if args.resume:
        accelerator.load_state(args.resume)
        done = args.save_at
        if wrong == "swapped-state" and last:
            swap(optimizer.optimizer)
    for epoch in range(done // per_epoch, EPOCHS):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        skip = (done - epoch * per_epoch) * args.accumulate
        if wrong == "dropped-sample" and args.resume and skip > 0:
            skip += 1  # begins one batch too late
        batches = iter(accelerator.skip_first_batches(loader, skip) if skip else loader)
        while len(group := list(islice(batches, args.accumulate))) == args.accumulate:
            if wrong == "bit-flip" and done == MOMENT and last:
                flip(plain)
            if wrong == "other-rate" and done >= MOMENT and last:
                for each_group in optimizer.param_groups:
                    each_group["lr"] *= 1.5
            update(args, accelerator, ddp, optimizer, group)
            if wrong == "extra-step" and done == MOMENT and last:
                optimizer.step()
            schedule.step()
            if wrong != "no-zero-grad":
                optimizer.zero_grad()
            done += 1
            if args.save and done == args.save_at:
                accelerator.save_state(args.save)
        journal.report(evaluate(args, accelerator, ddp, valid_loader))
    journal.close()
    accelerator.wait_for_everyone()  # or gloo may abort a process whose partner has gone
    accelerator.end_training()


def update(args, accelerator, ddp, optimizer, group) -> None:
    """One step: forward and backward of each micro-batch, then the optimizer."""
    wrong, world = args.mistake, accelerator.num_processes
    ddp.train()
    items = torch.stack([(batch["labels"] != IGNORED).sum() for batch in group]).sum()
    items = accelerator.gather(items).sum()
    for index, batch in enumerate(group):
        sends = index == len(group) - 1
        if wrong == "unsent-gradient":
            sends = index == 0  # off by one: the last micro-batch's gradient stays on its rank
        with contextlib.nullcontext() if sends else accelerator.no_sync(ddp):
            if wrong == "rank-average":
                loss = cross_entropy(ddp(batch["x"]), batch["labels"])
            else:
                loss = cross_entropy(ddp(batch["x"]), batch["labels"], "sum") * world / items
                if wrong != "double-division":
                    loss = loss * accelerator.gradient_accumulation_steps  # by which backward divides
            accelerator.backward(loss * SCALE if wrong == "clip-before-unscale" else loss)
    if args.clip:
        accelerator.clip_grad_norm_(ddp.parameters(), args.clip)
    if wrong == "clip-before-unscale":  # a loss scale of one's own, taken back too late
        for parameter in ddp.parameters():
            parameter.grad.div_(SCALE)
    optimizer.step()


@torch.no_grad()
def evaluate(args, accelerator, ddp, loader) -> float:
    """The mean loss of a label."""
    ddp.eval()
    gather = accelerator.gather if args.mistake == "padded-evaluation" else accelerator.gather_for_metrics
    sums, counts = [], []
    for batch in loader:
        logits, labels = ddp(batch["x"]), batch["labels"]
        losses = torch.stack(
            [cross_entropy(mine[None], theirs[None], "sum") for mine, theirs in zip(logits, labels, strict=True)]
        )
        losses, labels = gather((losses, (labels != IGNORED).sum(1)))
        sums.append(losses)
        counts.append(labels)
    return float(torch.cat(sums).double().sum() / torch.cat(counts).sum())


if __name__ == "__main__":
    main()
