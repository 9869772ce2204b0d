"""GPT-2 on one GPU, beside a tuned bare loop and other frameworks: python bench/gpu.py [--only bare lockstep] [--toy]

Every contestant trains the same weights on the same random tokens in each step, in bf16, compiled, with fused AdamW and
clipping, and is set up for speed as its documentation advises. The model they get computes its own loss and is compiled
for them in the same way (each block, and what follows the blocks up to the loss; or --scope whole), so that all share
one compilation. "bare" is a loop by hand with everything tuned: batches pinned and copied on a side stream one step
ahead, cuDNN's attention where it is the faster, and no wait for the device. lockstep is the whole product.

Each lives in a process of its own and takes turns of a few steps. Between its turns it holds weights and optimizer
states alone, and the first step of a turn is not timed. At most three are on the card at once (--at-once): the first
stays, the others come two at a time. "bare again" is the A/A control; a name such as residual_dtype=bf16 is lockstep
with that option. At the end each is evaluated on the same samples: a loss that differs by more than 0.5% means that one
trained something else. An error in one contestant is a line, and the others go on.

MFU = tokens/s * FLOPs per token / peak, see bench/device/common.py. Aims on an H100 or H200: the MFU of llm.c, 40.5%
for GPT-2 124M (stretch 45%), and 0.99 of the tuned loop's speed.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "device"))

import torch
from common import (
    LLM_C,
    STRETCH,
    Sizes,
    failed,
    figure,
    language_model,
    option,
    read_arguments,
    sizes,
    throughput,
)
from loop import STEPS, rate
from others import Group, Micro, Turns, measured
from torch import nn

from lockstep.optim.groups import groups
from lockstep.transforms.precision import compile_blocks, eager

ROWS = 1024
AIM = 0.99  # of the bare loop's speed


class WithLoss(nn.Module):
    """A GPT that returns its loss: cross entropy in nats, summed. Compiled, by blocks or as a whole."""

    def __init__(self, inner, scope):
        super().__init__()
        self.inner = inner
        if scope == "blocks":
            compile_blocks(inner, list(inner.blocks))
        else:
            self.compile()

    def forward(self, ids, labels):
        return self.inner(ids, labels=labels)


class Rows:
    """The corpus's samples as pairs."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        found = self.samples[index]
        return found["input_ids"], found["labels"]


class Setting:
    """Model, data and optimizer of a contestant.

    Args:
        kind: the arguments of the contest.
    """

    def __init__(self, name, kind, folder):
        shape: Sizes = shape_of(name, kind)
        self.device, self.scope = kind.device, kind.scope
        self.shape, self.size, self.micro, self.rank, self.world = shape, shape.batch, shape.micro, 0, 1
        self.accumulation = shape.batch // shape.micro
        self.task = language_model(f"{folder}/tokens", shape, ROWS)
        self.data = Rows(self.task.corpus.train)
        self.table = self.data  # for Micro, which asks for its length
        torch.manual_seed(0)  # what lockstep draws the weights under
        self.model = self.task.model()

    def optimizer(self, model):
        return torch.optim.AdamW(groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def mean(self, total):
        return total / (self.micro * self.shape.time)

    def loader(self):
        """The order is lockstep's; two workers and pinned memory."""
        more = {"num_workers": 2, "persistent_workers": True, "pin_memory": self.device.type == "cuda"}
        return torch.utils.data.DataLoader(self.data, batch_sampler=Micro(self, False), **more)


def shape_of(name, kind):
    """The sizes that the arguments `kind` ask for."""
    return sizes(name, kind, micro=kind.micro, batch=kind.batch)


def bare(setting, turns):
    s, device = setting, setting.device
    model = WithLoss(s.model, s.scope).to(device)
    optimizer = s.optimizer(s.model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    batches = ahead(s.loader(), device)
    turns.ready(s.model)
    with faster_attention(device):
        for k in range(STEPS):
            for _ in range(s.accumulation):
                ids, labels = next(batches)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(ids, labels)
                (s.mean(loss) / s.accumulation).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate(k)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            turns.step()


def ahead(loader, device):
    """Batches on the device, each copied while the one before is computed."""
    if device.type == "cpu":
        yield from loader
        return
    stream, coming = torch.cuda.Stream(), None

    def copied(batch):
        with torch.cuda.stream(stream):
            return [part.to(device, non_blocking=True) for part in batch]

    for batch in loader:
        present, coming = coming, copied(batch)
        if present is not None:
            yield present
        torch.cuda.current_stream().wait_stream(stream)
        for part in coming:
            part.record_stream(torch.cuda.current_stream())


def faster_attention(device):
    """cuDNN's attention first on Hopper and newer, where torch does not prefer it by itself."""
    cudnn = torch.backends.cudnn.version() or 0
    if device.type == "cpu" or torch.cuda.get_device_capability(device) < (9, 0) or cudnn > 91500:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def lockstep_itself(setting, turns, **options):
    """The whole product, with its records, heartbeat, guards and timers, as `lockstep train` has it."""
    from runs import settings

    import lockstep

    s = setting
    config = settings(
        "bench",
        s.shape,
        save_dir=os.environ["BENCH_FOLDER"],
        device=s.device.type,
        engine="single",
        max_steps=STEPS,
        lr=1e-3,
        compile_scope=s.scope,
        **{"optim.warmup_steps": 20, "data.workers": 2} | options,
    )
    run = lockstep.Run(config, s.task)
    records = iter(run)
    turns.ready(s.model)
    for _ in records:
        turns.model = run.model  # from the same weights as the setting's
        turns.step()


def lightning(setting, turns):
    """Trainer.fit, lean, bf16-mixed."""
    import lightning

    s = setting

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = WithLoss(s.model, s.scope)

        def training_step(self, batch, index):
            return s.mean(self.inner(*batch))

        def configure_optimizers(self):
            optimizer = s.optimizer(s.model)
            return [optimizer], [{"scheduler": s.schedule(optimizer), "interval": "step"}]

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            # Lightning's own refuses a fused optimizer under mixed precision, bf16 too, which has nothing to unscale.
            torch.nn.utils.clip_grad_norm_(s.model.parameters(), gradient_clip_val)

        def on_train_start(self):
            turns.ready(s.model)

        def on_train_batch_end(self, outputs, batch, index):
            if (index + 1) % s.accumulation == 0:
                turns.step()

    trainer = lightning.Trainer(
        accelerator="gpu" if s.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        accumulate_grad_batches=s.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), s.loader())


def accelerate(setting, turns):
    """Accelerator with bf16."""
    from accelerate import Accelerator

    s = setting
    made = Accelerator(
        cpu=s.device.type == "cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=s.accumulation,
    )
    plain = s.optimizer(s.model)
    model, optimizer, loader = made.prepare(WithLoss(s.model, s.scope), plain, s.loader())
    schedule = s.schedule(plain)
    turns.ready(s.model)
    for batch in loader:
        with made.accumulate(model):
            made.backward(s.mean(model(*batch)))
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if made.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if made.sync_gradients:
            turns.step()


def hf(setting, turns):
    """The Trainer of `transformers`, with bf16."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    s = setting

    class Hook(TrainerCallback):
        def on_train_begin(self, *_, **__):
            turns.ready(s.model)

        def on_step_end(self, *_, **__):
            turns.step()

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return s.mean(model(inputs["ids"], inputs["labels"]))

        def get_train_dataloader(self):
            loader = s.loader()
            loader.collate_fn = Named()
            return self.accelerator.prepare(loader)

    arguments = TrainingArguments(
        output_dir=os.environ["BENCH_FOLDER"],
        use_cpu=s.device.type == "cpu",
        bf16=True,
        per_device_train_batch_size=s.micro,
        gradient_accumulation_steps=s.accumulation,
        max_grad_norm=1.0,
        max_steps=STEPS,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    optimizer = s.optimizer(s.model)
    pair = (optimizer, s.schedule(optimizer))
    Own(
        WithLoss(s.model, s.scope).to(s.device), arguments, train_dataset=s.data, optimizers=pair, callbacks=[Hook()]
    ).train()


class Named:
    """Pairs as the dict that the Trainer wants."""

    def __call__(self, rows):
        ids, labels = map(torch.stack, zip(*rows, strict=True))
        return {"ids": ids, "labels": labels}


CONTESTANTS = {
    "bare": bare,
    "lockstep": lockstep_itself,
    "lightning": lightning,
    "hf": hf,
    "accelerate": accelerate,
    "bare again": bare,
}


class DeviceTurns(Turns):
    """A turn's clock runs from the end of its first step, which takes memory, until the device has done the last."""

    turn_began, opening = 0.0, False

    def step(self):
        closing = self.left == 1
        if self.opening or closing:
            synchronize()
        if self.opening:
            self.opening, self.turn_began = False, time.perf_counter()
            return
        if closing:
            ended = time.perf_counter()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # until the next turn it holds weights and states alone
            self.turn_began += time.perf_counter() - ended
        super().step()
        self.opening = closing


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def contestant(pipe, began, who, name, kind, rank, world, port, folder, log):
    """The life of one process."""
    with open(log, "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        os.environ["BENCH_FOLDER"] = folder
        if kind.toy:
            torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        turns = DeviceTurns(pipe, began)
        try:
            setting = Setting(name, kind, folder)
            rows = [setting.data[i] for i in range(min(setting.micro, 16))]

            def evaluate(model):
                total = count = 0
                for at in range(0, len(rows), 2):  # few at a time: logits of all would take gigabytes
                    ids, labels = (
                        torch.stack(part).to(setting.device) for part in zip(*rows[at : at + 2], strict=True)
                    )
                    with torch.autocast(setting.device.type, torch.bfloat16), eager():
                        total += float(model(ids, labels=labels))
                    count += labels.numel()
                return total / count

            turns.evaluate = evaluate
            if who in CONTESTANTS:
                CONTESTANTS[who](setting, turns)
            else:
                lockstep_itself(setting, turns, **dict(map(option, who.split(","))))
        except Exception as error:
            traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {error}")
            raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=LLM_C, default="gpt2")
    parser.add_argument("--only", nargs="*", type=known, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--micro", type=int, default=0, help="samples of a micro-batch (default: the model's)")
    parser.add_argument("--batch", type=int, default=0, help="samples of a step (default: the model's)")
    parser.add_argument("--at-once", type=int, default=3, help="contestants on the card, the first among them")
    parser.add_argument("--scope", choices=["blocks", "whole"], default="blocks", help="what is compiled")
    parser.add_argument("--rounds", type=int, default=6, help="0: one step each, which fills the compiler's cache")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--seconds", type=float, default=240, help="after which no further round begins")
    arguments = read_arguments(parser)
    if arguments.small and arguments.rounds:
        arguments.rounds, arguments.steps = 2, 2
    Contest(arguments).run()


def known(name):
    """A contestant by its name, or options of lockstep as NAME=VALUE,NAME=VALUE."""
    if name not in CONTESTANTS and "=" not in name:
        raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(CONTESTANTS)}, nor NAME=VALUE")
    return name


class Contest:
    """Waves of contestants, each wave by turns with the first of all."""

    def __init__(self, arguments):
        self.arguments, self.began = arguments, time.monotonic()
        self.shape = shape_of(arguments.model, arguments)
        self.folder, self.groups = "", []
        self.base_times, self.losses = [], {}

    def run(self):
        first, *others = self.arguments.only
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as self.folder:
            try:
                base = self.start(first)
                if base is None:
                    return
                beside = self.arguments.at_once - 1
                for at in range(0, max(len(others), 1), beside):
                    self.wave(base, others[at : at + beside])
                if self.base_times:
                    base.times = self.base_times
                    self.rate(first, measured(base, base))
            finally:
                for group in self.groups:
                    group.end()

    def seconds(self):
        return time.monotonic() - self.began

    def start(self, who):
        """A contestant whose first step is done; None where it failed."""
        try:
            group = Group(who, self.arguments.model, self.arguments, 1, self.folder, contestant, daemon=False)
        except RuntimeError as problem:
            failed(who, problem)
            return None
        self.groups.append(group)
        print(f"{who} is ready after {self.seconds():.0f} s", flush=True)
        return group

    def wave(self, base, names):
        """Some contestants beside the base, by turns; an error ends the one that has it alone."""
        base.times = []
        with ThreadPoolExecutor(1 if self.arguments.toy else len(names) or 1) as pool:
            present = [base, *filter(None, pool.map(self.start, names))]
        for turn in range(self.arguments.rounds + 1 if self.arguments.rounds else 0):
            for place in range(len(present)):
                self.take_turn(present[(place + turn) % len(present)], measured=turn > 0)
            if not base.alive:
                return
            present = [group for group in present if group.alive]
            if turn:
                self.print_round(turn, present)
            if self.seconds() > self.arguments.seconds:
                break
        self.base_times += base.times
        for group in present[1:]:
            if base.times:
                self.compare(group, base)
            group.end()

    def take_turn(self, group, measured):
        """A turn of one contestant; its time counts where it is `measured`."""
        try:
            took = group.turn(self.arguments.steps) / self.arguments.steps * 1e6
        except (RuntimeError, OSError) as problem:
            failed(group.who, problem)
            group.alive = False
            return
        if measured:
            group.times.append(took)

    def print_round(self, turn, present):
        """Prints a round's figures, so that a contest that is cut short leaves its figures."""
        base, *others = present
        speeds = "".join(f"; {group.who} {base.times[-1] / group.times[-1]:.4f} of its speed" for group in others)
        print(f"round {turn}: {base.who} {base.times[-1] / 1e3:.2f} ms a step{speeds}", flush=True)

    def rate(self, name, found):
        """Prints a contestant's own throughput."""
        more = {"loss": found["loss"], "first_s": found["first_step"]}
        is_own = name == "lockstep" or "=" in name
        aim = LLM_C[self.arguments.model] if is_own else None
        throughput(
            f"{self.arguments.model}, compiled: {self.arguments.scope}: {name}",
            found["microseconds"] * 1e-6,
            self.shape,
            self.arguments.device,
            aim=aim,
            **more | ({"stretch": STRETCH[self.arguments.model]} if is_own else {}),
        )

    def compare(self, group, base):
        """Prints a contestant's throughput, and beside the base's."""
        try:
            found = measured(group, base)
        except (RuntimeError, OSError) as problem:
            failed(group.who, problem)
            return
        self.rate(group.who, found)
        title = f"{self.arguments.model}: speed of {group.who} beside {base.who}"
        aim = AIM if (group.who, base.who) == ("lockstep", "bare") else None
        figure(title, 1 / found["ratio"], "times", aim=aim, spread=found["spread"], rounds=len(base.times))
        apart = [who for who, loss in self.losses.items() if abs(found["loss"] / loss - 1) > 5e-3]
        self.losses[group.who] = found["loss"]
        if apart:
            failed(group.who, ValueError(f"its loss is {found['loss']:.5f}, another than that of {', '.join(apart)}"))


if __name__ == "__main__":
    main()
