"""GPT-2 on one GPU, beside a tuned bare loop and other frameworks: python bench/gpu.py [--only bare lockstep] [--toy]

Every contestant trains the same weights on the same random tokens in each step, in bf16, compiled, with fused AdamW and
clipping, and is set up for speed as its documents say. The model they get computes its own loss, so that their compiler
sees it too. "bare" is a loop by hand with everything tuned: model and loss in one graph, batches pinned and copied on a
side stream one step ahead, cuDNN's attention where it is the faster, and no wait for the device. lockstep is the whole
product. Each lives in a process of its own and takes turns of a few steps; "bare again" is the A/A control. At the end
all are evaluated on the same samples: a loss that differs by more than 0.5% means that one trained something else.

MFU = tokens/s * FLOPs per token / peak, see bench/device/common.py. Aims on an H100 or H200: MFU 45% for GPT-2 124M;
0.99 of the tuned loop, 1.10 of Lightning, 1.20 of HF Trainer, 1.12 of Accelerate.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "device"))

import torch
from common import SIZES, TOY, Sizes, failed, figure, given, language_model, mfu
from loop import STEPS, rate
from others import Group, Micro, Turns, measured
from torch import nn

from lockstep.models.chunked import summed_cross_entropy
from lockstep.optim.groups import groups
from lockstep.seeds import derive

ROWS = 1024
AIMS = {"bare": 0.99, "lightning": 1.10, "hf": 1.20, "accelerate": 1.12}


class WithLoss(nn.Module):
    """A model that returns its loss: cross entropy in nats, summed."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids, labels):
        return summed_cross_entropy(self.inner(ids), labels)


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
    """What a contestant is given."""

    def __init__(self, name, toy, folder):
        shape: Sizes = TOY if toy else SIZES[name]
        self.device = torch.device("cpu" if toy else "cuda")
        self.shape, self.size, self.micro, self.rank, self.world = shape, shape.batch, shape.micro, 0, 1
        self.accumulation = shape.batch // shape.micro
        self.task = language_model(f"{folder}/tokens", shape, ROWS)
        self.data = Rows(self.task.corpus.train)
        self.table = self.data  # for Micro, which asks for its length
        torch.manual_seed(derive(0, "model"))  # what lockstep draws the weights under
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


def bare(setting, turns):
    s, device = setting, setting.device
    model = WithLoss(s.model).to(device)
    model.compile()
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


def lockstep_itself(setting, turns):
    """The whole product, with its records, heartbeat, guards and timers, as `lockstep train` has it."""
    from parts import settings

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
        **{"optim.warmup_steps": 20, "data.workers": 2},
    )
    run = lockstep.Run(config, s.task)
    records = iter(run)
    turns.ready(s.model)
    for _ in records:
        turns.model = run.model  # from the same weights as the setting's
        turns.step()


def lightning(setting, turns):
    """Trainer.fit, lean, bf16-mixed, its module's model compiled."""
    import lightning

    s = setting

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = WithLoss(s.model)
            self.inner.compile()

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
    """Accelerator with bf16 and the model compiled by it."""
    from accelerate import Accelerator

    s = setting
    made = Accelerator(
        cpu=s.device.type == "cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=s.accumulation,
        dynamo_backend="inductor",
    )
    plain = s.optimizer(s.model)
    model, optimizer, loader = made.prepare(WithLoss(s.model), plain, s.loader())
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
    """The Trainer of `transformers`, with bf16 and torch_compile."""
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
        torch_compile=True,
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
    Own(WithLoss(s.model).to(s.device), arguments, train_dataset=s.data, optimizers=pair, callbacks=[Hook()]).train()


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
    """A turn is over when the device has done it."""

    def step(self):
        if self.left == 1 and torch.cuda.is_available():
            torch.cuda.synchronize()
        super().step()


def contestant(pipe, began, who, name, toy, rank, world, port, folder, log):
    """The life of one process."""
    with open(log, "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        os.environ["BENCH_FOLDER"] = folder
        if toy:
            torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        turns = DeviceTurns(pipe, began)
        try:
            setting = Setting(name, toy, folder)
            first = [setting.data[i] for i in range(setting.micro)]
            ids, labels = (torch.stack(part).to(setting.device) for part in zip(*first, strict=True))

            def evaluate(model):
                with torch.autocast(setting.device.type, torch.bfloat16):
                    return float(summed_cross_entropy(model(ids), labels)) / labels.numel()

            turns.evaluate = evaluate
            CONTESTANTS[who](setting, turns)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt2", "gpt2-xl"], default="gpt2")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=240, help="after which no further round begins")
    arguments = given(parser)
    rounds, steps = (2, 2) if arguments.toy else (arguments.rounds, arguments.steps)
    shape = TOY if arguments.toy else SIZES[arguments.model]
    began, running, found = time.monotonic(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for who in arguments.only:  # one after the other, so that the start of one does not slow another's
                try:
                    running.append(Group(who, arguments.model, arguments.toy, 1, folder, contestant, daemon=False))
                    print(f"{who} is ready after {time.monotonic() - began:.0f} s", flush=True)
                except RuntimeError as problem:
                    failed(who, problem)
            for turn in range(rounds + 1):
                for place in range(len(running)):
                    group = running[(place + turn) % len(running)]
                    took = group.turn(steps) / steps * 1e6
                    if turn:  # the first turn is not measured
                        group.times.append(took)
                if time.monotonic() - began > arguments.seconds:
                    break
            for group in running:
                found[group.who] = measured(group, running[0])
        finally:
            for group in running:
                group.end()
    report(arguments, shape, found)


def report(arguments, shape, found):
    for name, each in found.items():
        tokens = shape.batch * shape.time / (each["microseconds"] * 1e-6)
        utilisation = mfu(tokens, shape, arguments.device)
        aim = {"aim": {"gpt2": 0.45, "gpt2-xl": 0.52}[arguments.model]} if name == "lockstep" else {}
        title = f"{arguments.model}: {name}, MFU"
        figure(title, utilisation, "", **aim, tokens_per_second=tokens, loss=each["loss"], first_s=each["first_step"])
    own = found.get("lockstep")
    for name, aim in AIMS.items():
        if own and name in found:
            times = found[name]["microseconds"] / own["microseconds"]
            title = f"{arguments.model}: throughput beside {name}"
            figure(title, times, "times", aim=aim, spread=found[name]["spread"])
            apart = abs(found[name]["loss"] - own["loss"]) / own["loss"]
            if apart > 5e-3:
                print(f"{name} and lockstep trained different things: losses {found[name]['loss']}, {own['loss']}")


if __name__ == "__main__":
    main()
