"""A training script of Hugging Face's Trainer, with mistakes that can be switched on: `--mistake NAME` (see cases.py).

python train_hf.py
torchrun --nproc-per-node 2 train_hf.py --mistake rank-average --ragged
"""

import tempfile

import torch
from torch.utils.data import DataLoader
from toy import (
    BATCH,
    EPOCHS,
    IGNORED,
    MOMENT,
    Journal,
    Toy,
    arguments,
    collator,
    cross_entropy,
    datasets,
    flip,
    pretrained,
    swap,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

MISTAKES = (
    *("same-seed", "per-rank-weights", "overlapping-data", "dropped-sample", "unsent-gradient", "local-batchnorm"),
    *("rank-average", "other-rate", "rank-dropout", "extra-step", "bit-flip", "clip-before-unscale"),
    *("padded-evaluation", "swapped-state", "tokens-per-device", "batch-per-device", "ignored-data-skip"),
    "frozen",
)
SCALE = 2.0**8


class Model(Toy):
    """The toy with its loss inside, as the Trainer wants it: a sum over the labels divided by their number."""

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        logits = super().forward(x)
        if labels is None:
            return {"logits": logits}
        if num_items_in_batch is None:
            return {"loss": cross_entropy(logits, labels), "logits": logits}
        return {"loss": cross_entropy(logits, labels, "sum") / num_items_in_batch, "logits": logits}


class OwnTrainer(Trainer):
    """The Trainer as people change it."""

    mistake = ""
    peeked = False

    def get_train_dataloader(self):
        if self.mistake == "overlapping-data":  # one's own loader, which nobody shares out
            order = torch.Generator().manual_seed(11)
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                shuffle=True,
                generator=order,
                collate_fn=self.data_collator,
            )
        return super().get_train_dataloader()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.mistake == "dropped-sample" and self.state.global_step and not self.peeked:
            self.peeked = True
            next(epoch_iterator)  # a look at a first batch after the resume, which is lost by it
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.mistake == "unsent-gradient" and model.training:
            model = self.accelerator.unwrap_model(model)  # past DDP, which never learns of this forward
        if self.mistake == "rank-average" and model.training:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = cross_entropy(outputs["logits"], labels)  # num_items_in_batch is not looked at
            return (loss, outputs) if return_outputs else loss
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.mistake == "clip-before-unscale" and model.training:
            return found * SCALE  # a loss scale of one's own
        return found

    @torch.no_grad()
    def evaluate(self, *args, **kwargs):
        if self.mistake != "padded-evaluation":
            return super().evaluate(*args, **kwargs)
        self.model.eval()
        sums, counts = [], []
        for batch in self.get_eval_dataloader():
            losses = [
                cross_entropy(self.model(x[None])["logits"], y[None], "sum")
                for x, y in zip(batch["x"], batch["labels"], strict=True)
            ]
            sums.append(self.accelerator.gather(torch.stack(losses)))  # not gather_for_metrics: padding counts
            counts.append(self.accelerator.gather((batch["labels"] != IGNORED).sum(1)))
        metrics = {"eval_mean": float(torch.cat(sums).double().sum() / torch.cat(counts).sum())}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Mistakes(TrainerCallback):
    """Those that a callback makes; and it hands the evaluation's result to the journal."""

    def __init__(self, args, journal: Journal, plain: Model) -> None:
        self.script, self.mistake, self.journal, self.plain = args, args.mistake, journal, plain

    def on_train_begin(self, args, state, control, optimizer=None, **_):
        if self.mistake == "per-rank-weights" and state.is_world_process_zero:  # loaded late, and by one process alone
            self.plain.load_state_dict(pretrained(self.plain))
        if self.mistake == "swapped-state" and self.script.resume and args.process_index == args.world_size - 1:
            swap(optimizer.optimizer)

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        last = args.process_index == args.world_size - 1
        if self.mistake == "bit-flip" and state.global_step == MOMENT and last:
            flip(self.plain)
        if self.mistake == "other-rate" and state.global_step >= MOMENT and last:
            for group in optimizer.param_groups:
                group["lr"] *= 1.5

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.mistake == "clip-before-unscale":
            for parameter in self.plain.parameters():
                parameter.grad.div_(SCALE)

    def on_optimizer_step(self, args, state, control, optimizer=None, **_):
        if self.mistake == "extra-step" and state.global_step == MOMENT and args.process_index == args.world_size - 1:
            optimizer.step()

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.journal.report(metrics["eval_mean"])


def mean_loss(found) -> dict[str, float]:
    """compute_metrics: the mean loss of a label."""
    logits, labels = torch.tensor(found.predictions), torch.tensor(found.label_ids)
    return {"mean": float(cross_entropy(logits.double(), labels))}


def main() -> None:
    args = arguments(MISTAKES)
    wrong = args.mistake
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=args.save or folder,
            num_train_epochs=EPOCHS,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=0.03,
            lr_scheduler_type="linear",
            max_grad_norm=args.clip,
            seed=7,
            data_seed=11,
            average_tokens_across_devices=wrong != "tokens-per-device",
            ignore_data_skip=wrong == "ignored-data-skip",
            eval_strategy="epoch",
            per_device_eval_batch_size=5,
            logging_steps=1,
            save_strategy="steps" if args.save else "no",
            save_steps=args.save_at,
            dataloader_drop_last=False,
            use_cpu=True,
            bf16=args.dtype == "bf16",
            disable_tqdm=True,
            report_to=[],
        )
        world = settings.world_size
        settings.per_device_train_batch_size = BATCH // (1 if wrong == "batch-per-device" else world) // args.accumulate
        if not args.shake and wrong != "same-seed":  # a shake is one number for all ranks
            settings.seed += settings.process_index
        torch.manual_seed(0)
        model = Model(args, seed_of_mask=100 + settings.process_index if wrong == "rank-dropout" else None)
        if wrong != "per-rank-weights":
            model.load_state_dict(pretrained(model))
        if wrong == "frozen":
            model.block.requires_grad_(False)
        train, valid = datasets(args)
        journal = Journal(model, args.out)
        OwnTrainer.mistake = wrong
        trainer = OwnTrainer(
            model,
            settings,
            train_dataset=train,
            eval_dataset=valid,
            data_collator=collator(args),
            compute_metrics=mean_loss,
            callbacks=[Mistakes(args, journal, model)],
        )
        trainer.train(resume_from_checkpoint=args.resume or None)
        journal.close()


if __name__ == "__main__":
    main()
