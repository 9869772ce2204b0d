"""Does two processes' training end with the parameters of one? python bench/parity.py [--only lockstep,accelerate]

Each trainer is compared with itself alone: the same model, data and optimizer in one process, and the largest
difference of any parameter after eight steps. Labels are masked and of different lengths, as in language modelling. In
float64, so that what shows is arithmetic and not rounding; without dropout and shuffling, which would only add to it.

Each is set up as its documentation says: batch size per process divided by the processes, its own loss averaging, its
own sampler, its own checkpoints. The loss is the mean over the labels of a batch, as torch's cross entropy gives it,
except where a trainer counts the items itself: the HF Trainer hands its count to the model, which is known to pass this
test without a resume; Accelerate has a guide for samples of different lengths, which is the contestant "accelerate,
guide"; lockstep takes a sum.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS, HALF, BATCH, RATE, SAMPLES = 8, 4, 16, 1e-2, 200
CASES = ("masked", "accumulated", "resumed")  # resumed: accumulated, stopped after HALF steps in mid-epoch, and resumed


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(29, (SAMPLES, 13), generator=generator)
        self.kept = torch.randint(1, 13, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        labels = self.rows[index, 1:].clone()
        labels[self.kept[index] :] = -100
        return {"input_ids": self.rows[index, :-1], "labels": labels}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(29, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 29)
        self.double()

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **_):
        """The HF Trainer gives labels, and in num_items_in_batch the labels of the whole step; others take logits."""
        logits = self.head(self.body(self.embedding(input_ids)))
        if labels is None:
            return logits
        total = loss_sum(logits, labels)
        return {"loss": total / (num_items_in_batch or (labels != -100).sum()), "logits": logits}


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def loss_mean(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Plan:
    """What a contestant is to do: how much a process takes at a time, and where it begins and ends."""

    def __init__(self, case, folder, resume, size):
        self.folder, self.resume = folder, resume
        self.accumulate = 1 if case == "masked" else (4 if size == 1 else 2)
        self.micro = BATCH // size // self.accumulate
        self.begin = HALF if resume else 0
        self.end = HALF if case == "resumed" and not resume and size > 1 else STEPS
        self.saves = self.end < STEPS

    def loader(self, **more):
        return DataLoader(Sentences(), batch_size=self.micro, **more)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def lockstep(plan, size):
    import lockstep as product
    from lockstep.config.sections import Optim

    class Task:
        def model(self):
            return Model()

        def dataset(self, split):
            return Sentences() if split == "train" else None

        def collate(self, samples):
            return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

        def count(self, batch):
            return int((batch["labels"] != -100).sum())

        def loss(self, model, batch):
            return loss_sum(model(batch["input_ids"]), batch["labels"])

    config = product.Config(
        experiment_name="parity",
        save_dir=str(plan.folder),
        max_steps=STEPS,
        stop_at=0 if plan.end == STEPS else plan.end,
        batch_size=BATCH,
        micro_batch_size=4 if plan.accumulate > 1 else 8,
        lr=RATE,
        precision="float64",
        device="cpu",
        optim=Optim(warmup_steps=0, schedule="constant", clip=0.0, weight_decay=0.0, beta2=0.999),
    )
    world = product.World.join("cpu", 60.0)
    for _ in product.train(config, Task(), world):
        pass
    from lockstep import checkpoint

    model = Model()
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.load(checkpoint.path_of(plan.folder / "parity", plan.end), state, world)
    return model


def ddp(plan, size):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    model = Model()
    if size > 1:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
        loader = plan.loader(sampler=DistributedSampler(Sentences(), shuffle=False))
    else:
        wrapped, loader = model, plan.loader()
    optimizer = adamw(model)
    if plan.resume:
        saved = torch.load(plan.folder / "ddp.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for index, batch in enumerate(loader):
        step, part = divmod(index, plan.accumulate)
        if step < plan.begin:
            continue
        if step == plan.end:
            break
        last = part == plan.accumulate - 1
        with wrapped.no_sync() if size > 1 and not last else torch.enable_grad():
            (loss_mean(wrapped, batch) / plan.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    if plan.saves and int(os.environ.get("RANK", "0")) == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plan.folder / "ddp.pt")
    return model


def accelerate(plan, size, guide=False):
    """`guide`: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, its last section."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulate)
    model = Model()
    wrapped, optimizer, loader = accelerator.prepare(model, adamw(model), plan.loader())
    if plan.resume:
        accelerator.load_state(str(plan.folder / "accelerate"))
        loader = accelerator.skip_first_batches(loader, plan.begin * plan.accumulate)
    batches = iter(loader)
    for _ in range(plan.begin, plan.end):
        window = [next(batches) for _ in range(plan.accumulate)]
        items = accelerator.gather(sum((batch["labels"] != -100).sum() for batch in window)).sum()
        for batch in window:
            with accelerator.accumulate(wrapped):
                if guide:
                    loss = loss_sum(wrapped(batch["input_ids"]), batch["labels"]) / items
                    loss = loss * accelerator.num_processes * plan.accumulate
                else:
                    loss = loss_mean(wrapped, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    if plan.saves:
        accelerator.save_state(str(plan.folder / "accelerate"))
    return model


def accelerate_guide(plan, size):
    return accelerate(plan, size, guide=True)


def fabric(plan, size):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    plain = Model()
    model, optimizer = fabric.setup(plain, adamw(plain))
    loader = fabric.setup_dataloaders(plan.loader())
    if plan.resume:
        fabric.load(plan.folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    for index, batch in enumerate(loader):
        step, part = divmod(index, plan.accumulate)
        if step < plan.begin:
            continue
        if step == plan.end:
            break
        last = part == plan.accumulate - 1
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(loss_mean(model, batch) / plan.accumulate)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    if plan.saves:
        fabric.save(plan.folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    return plain


def lightning(plan, size):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def training_step(self, batch, _):
            return loss_mean(self.inner, batch)

        def configure_optimizers(self):
            return adamw(self.inner)

    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        max_steps=plan.end,
        accumulate_grad_batches=plan.accumulate,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(plan.folder),
    )
    module = Module()
    path = str(plan.folder / "lightning.ckpt")
    trainer.fit(module, plan.loader(), ckpt_path=path if plan.resume else None, weights_only=False)
    if plan.saves:
        trainer.save_checkpoint(path)
    return module.inner


def hf(plan, size):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(plan.folder / "hf"),
        per_device_train_batch_size=plan.micro,
        gradient_accumulation_steps=plan.accumulate,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=HALF,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    model = Model()
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=str(plan.folder / "hf" / f"checkpoint-{HALF}") if plan.resume else None)
    return model


CONTESTANTS = {
    "lockstep": lockstep,
    "raw ddp": ddp,
    "accelerate": accelerate,
    "accelerate, guide": accelerate_guide,
    "fabric": fabric,
    "lightning": lightning,
    "hf trainer": hf,
}


def contest(name, case, folder):
    """Largest parameter difference of two processes to one, or why there is none."""
    alone = launch(name, case, folder / "1", 1)
    both = launch(name, case, folder / "2", 2)
    if case == "resumed":
        both = launch(name, case, folder / "2", 2, resume=True)
    return max(float((a - b).abs().max()) for a, b in zip(alone.values(), both.values(), strict=True))


def launch(name, case, folder, size, resume=False):
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    flags = ["--contestant", name, "--case", case, "--folder", str(folder), *(["--resume"] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = [sys.executable, *launcher, __file__, *flags]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
        raise RuntimeError(lines[0][:160] if lines else f"exit code {done.returncode}")
    return torch.load(folder / "end.pt", weights_only=True)


def run(given):
    """In the process of a contestant."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(given.folder)
    model = CONTESTANTS[given.contestant](Plan(given.case, folder, given.resume, size), size)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, folder / "end.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # without teardown, which can wait for a peer that has gone


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(name for name in CONTESTANTS if "," not in name) + ",accelerate+")
    parser.add_argument("--cases", default=",".join(CASES))
    for name in ("--contestant", "--case", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        run(given)
    names = [name.replace("accelerate+", "accelerate, guide") for name in given.only.split(",")]
    cases = given.cases.split(",")
    print(f"largest parameter difference, 2 processes against 1, {STEPS} steps of {BATCH} samples, float64\n")
    print(f"  {'trainer':<18}" + "".join(f"{case:>14}" for case in cases))
    for name in names:
        found = {}
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="lockstep-parity-") as folder:
                try:
                    found[case] = contest(name, case, Path(folder))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    found[case] = f"failed: {error}"
        cells = [f"{value:>14.1e}" if isinstance(value, float) else f"{'failed':>14}" for value in found.values()]
        print(f"  {name:<18}" + "".join(cells), flush=True)
        print(json.dumps({"setting": "parity", "contestant": name, **found}), flush=True)


if __name__ == "__main__":
    main()
