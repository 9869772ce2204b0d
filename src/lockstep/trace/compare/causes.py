"""Describe the result of a comparison: causes with fixes, the first difference, the verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "TraceFinding",
    "TraceVerdict",
    "explain_cause",
]


_SHARDING_FIXES: Mapping[str, str] = {
    "": "give the loader a DistributedSampler",
    "accelerate": "pass the loader to accelerator.prepare()",
    "lightning": "keep Trainer(use_distributed_sampler=True), or give the loader a DistributedSampler",
    "transformers": "leave the loaders to the Trainer, which shards them",
}
_WEIGHTING_FIXES: Mapping[str, str] = {
    "": "sum the loss, divide by the items of all ranks (all_reduce of the count) and multiply by the world size, by "
    "which DDP divides",
    "accelerate": "divide the summed loss by accelerator.gather(items).sum() and multiply by accelerator.num_processes",
    "lightning": "divide the summed loss by self.all_gather(items).sum() and multiply by self.trainer.world_size",
    "transformers": "let compute_loss use num_items_in_batch, with average_tokens_across_devices=True",
}
# cause -> (its text, framework -> fix; "": any other framework)
_CAUSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "alone": (
        "the processes do not train together: without a process group they exchange nothing",
        {
            "": "call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel",
            "accelerate": "pass the model, the optimizer and the loaders to accelerator.prepare(); without GPUs use "
            "Accelerator(cpu=True)",
            "transformers": "without GPUs set TrainingArguments(use_cpu=True)",
        },
    ),
    "rank-weights": (
        "a rank starts with different weights",
        {
            "": "wrap the model in DistributedDataParallel, which sends rank 0's weights to all, and change "
            "no weight after that",
            "accelerate": "load the weights before you pass the model to accelerator.prepare()",
            "lightning": "create all weights in __init__ or configure_model, identically on all ranks",
        },
    ),
    "other-weights": (
        "the two runs do not start with the same weights",
        {"": "use the same seed in both runs before the model is built, or load the same checkpoint"},
    ),
    "changed-weights": (
        "something other than the optimizer changed the weights between two updates",
        {
            "": "check what else writes weights: a perturbation that is not taken back (SAM), a load, an average of "
            "weights, a clamp; if nothing does, suspect faulty memory"
        },
    ),
    "frozen": (
        "part of the model is frozen in one run only",
        {"": "set requires_grad equally in both runs, before the optimizer is created"},
    ),
    "outside-optimizer": (
        "the optimizer does not have all of the model's parameters",
        {"": "create the optimizer with all parameters of the complete model, or call add_param_group() later"},
    ),
    "stale-optimizer": (
        "the optimizer updates other tensors than the model's: it was created before they were replaced",
        {
            "": "create the optimizer after loading, copying, sharding or converting the model",
            "accelerate": "pass the model and the optimizer to accelerator.prepare() in one call",
        },
    ),
    "other-model": (
        "the two runs train different models: only one has a tensor",
        {"": "build the same model in both runs"},
    ),
    "no-gradient": (
        "part of the model gets no gradient in one run only",
        {"": "look for a detach(), a no_grad() or a branch of the forward that skips it"},
    ),
    "kept-gradient": (
        "the previous update's gradients were not cleared, so this step's were added to them",
        {"": "call optimizer.zero_grad() after each update, before the next backward"},
    ),
    "overlapping": ("every rank reads the same samples", _SHARDING_FIXES),
    "batch-size": (
        "the global batch has more samples: the batch size is per process",
        {
            "": "divide the batch size or the accumulation by the number of processes",
            "accelerate": "divide batch_size by the number of processes, or use Accelerator(split_batches=True)",
            "transformers": "divide per_device_train_batch_size or gradient_accumulation_steps by the number of "
            "processes",
            "lightning": "divide the loader's batch_size or accumulate_grad_batches by the number of devices",
        },
    ),
    "batch-share": (
        "the global batch has fewer samples: the batch size is split over the processes, or a batch is cut short",
        {
            "": "raise the batch size per process or the accumulation until the global batch is the same",
            "accelerate": "keep Accelerator(split_batches=False), or give the loader the global batch size",
        },
    ),
    "set-epoch": (
        "set_epoch is not called, so each epoch repeats the order of the first",
        {
            "": "call sampler.set_epoch(epoch) at the start of each epoch",
            "accelerate": "pass the loader to accelerator.prepare(), or call loader.set_epoch(epoch)",
            "lightning": "keep use_distributed_sampler=True, or call your sampler's set_epoch in on_train_epoch_start",
        },
    ),
    "lost-samples": ("samples are left out", {"": "check drop_last, and where the loader starts after a resume"}),
    "repeated-samples": (
        "samples are read again",
        {"": "check where the loader starts after a resume: skip the samples of the steps before it"},
    ),
    "late-resume": (
        "the resume starts too late in the data: it skips samples",
        {"": "skip only the batches before the checkpoint: its steps times the accumulation"},
    ),
    "early-resume": (
        "the resume reads samples again that were trained before the checkpoint",
        {
            "": "save the loader's position in the checkpoint and continue from there",
            "accelerate": "use accelerator.skip_first_batches(loader, batches) for the first epoch after the resume",
            "transformers": "keep ignore_data_skip=False",
        },
    ),
    "other-order": (
        "the samples come in a different order",
        {
            "": "use one sampler with one seed in both runs (with one process: a DistributedSampler of one replica)",
            "lightning": "give both runs the same sampler, or shuffle=False: on several devices Lightning replaces a "
            "RandomSampler by a DistributedSampler",
        },
    ),
    "other-shuffle": (
        "the ranks shuffle with different seeds, so their shards overlap",
        {"": "use the same shuffling seed on all ranks; DistributedSampler(seed=...) splits one order over them"},
    ),
    "other-samples": ("the samples are different", {"": "compare the datasets, their order and their preprocessing"}),
    "other-contents": (
        "the same samples have different contents: augmentation or preprocessing depends on the process",
        {"": "seed the dataset's random draws by sample or by step (worker_init_fn, a generator per index)"},
    ),
    "equal-draws": (
        "ranks draw the same random numbers, so their samples get the same masks",
        {
            "": "seed each rank with seed + rank, after the model is created",
            "accelerate": "set_seed(seed, device_specific=True)",
            "lightning": "call torch.manual_seed(seed + self.global_rank) in on_fit_start; seed_everything gives all "
            "ranks the same seed",
            "transformers": "call torch.manual_seed(seed + rank) in on_train_begin; the Trainer gives all ranks the "
            "same seed",
        },
    ),
    "repeated-draws": (
        "a generator is seeded again before or in the forward, so that its random numbers repeat",
        {"": "seed once before the training, or by step and rank"},
    ),
    "random": (
        "random numbers differ although both runs split the batch alike",
        {"": "seed torch, numpy and random before you create the model and the data"},
    ),
    "forward": (
        "with the same weights, samples and generators the model's output is different",
        {"": "look for code that depends on the rank, on the batch's shape, or on a generator made in the forward"},
    ),
    "batchnorm": (
        "BatchNorm statistics differ: each rank normalises by its own samples",
        {
            "": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before you wrap the model",
            "lightning": "set Trainer(sync_batchnorm=True)",
        },
    ),
    "left-padding": (
        "the output of a sample depends on how far its batch is padded on the left, as with absolute positions",
        {
            "": "count positions from the first token: position_ids = attention_mask.cumsum(-1) - 1, clamped at 0, and "
            "mask the padding in the attention; or pad on the right"
        },
    ),
    "padding": (
        "the output of a sample depends on how far its batch is padded",
        {"": "mask the padding in attention, pooling, norms and the loss"},
    ),
    "diverging-buffers": (
        "each rank keeps a buffer of its own, from its own samples",
        {
            "": "compute it from all ranks' samples (all_reduce), or let DDP send rank 0's",
        },
    ),
    "rank-average": ("the loss is averaged per rank", _WEIGHTING_FIXES),
    "scaled-loss": (
        "the loss has a different scale",
        {
            "": "divide by the number of micro-batches of a step only; DDP divides by the ranks",
            "transformers": "set model.accepts_loss_kwargs = False if its loss ignores num_items_in_batch, or "
            "TrainingArguments(average_tokens_across_devices=False)",
        },
    ),
    "loss": ("the same outputs give a different loss", {"": "check the loss's weights and what it is divided by"}),
    "unreduced": (
        "the gradients are not reduced over the ranks",
        {
            "": "call the wrapped model, not model.module, and exit no_sync() before a step's last backward",
            "accelerate": "use the model that accelerator.prepare() returned, and accelerator.backward(loss)",
            "lightning": "call self.manual_backward(loss), and exit no_sync before the last micro-batch",
        },
    ),
    "part-unreduced": (
        "part of the gradient is missing or not reduced over the ranks",
        {"": "create every parameter before you wrap the model, and reduce each backward once"},
    ),
    "summed": (
        "gradients are summed over the ranks, not averaged",
        {"": "divide either the gradients or the loss by the world size"},
    ),
    "reduction": (
        "the gradient is not the mean over all ranks",
        {"": "check what runs between the backward and the update"},
    ),
    "gradient": (
        "the gradient differs although weights, samples and loss agree",
        {"": "check what runs between the backward and the update: hooks, a second loss, gradients not cleared"},
    ),
    "clip-before-reduce": (
        "gradients are clipped before they are reduced, by the norm of each rank's own",
        {
            "": "clip after the gradients are reduced, before optimizer.step()",
            "accelerate": "call accelerator.clip_grad_norm_ if accelerator.sync_gradients is true",
            "lightning": "set Trainer(gradient_clip_val=...), or call self.clip_gradients after the reduction",
        },
    ),
    "clip-before-unscale": (
        "gradients are clipped before they are unscaled",
        {
            "": "call scaler.unscale_(optimizer) before clip_grad_norm_",
            "accelerate": "call accelerator.clip_grad_norm_, which unscales first",
        },
    ),
    "clipping": (
        "the gradient is clipped differently",
        {"": "clip by the same limit, and by the norm of all gradients, in both runs"},
    ),
    "rank-rate": ("a rank has a different learning rate", {"": "use the same optimizer and schedule on all ranks"}),
    "world-rate": (
        "the learning rate depends on the number of processes",
        {"": "do not multiply it by the world size if the global batch is the same"},
    ),
    "other-rate": ("the learning rate is different", {"": "compare the optimizers' settings"}),
    "settings": ("the optimizer's settings are different", {"": "compare the optimizers' settings"}),
    "extra-step": (
        "an optimizer updates again with the same gradients",
        {"": "call optimizer.step() once for each step"},
    ),
    "update": ("the same gradient gives a different update", {"": "compare the optimizers, their states and versions"}),
    "schedule-ranks": (
        "the schedule steps more often with more processes",
        {
            "": "step it once for each optimizer step",
            "accelerate": "a prepared scheduler steps num_processes times: do not prepare it, multiply its length by "
            "num_processes, or use Accelerator(step_scheduler_with_optimizer=False)",
        },
    ),
    "schedule-resume": ("the schedule restarts after the resume", {"": "save and load scheduler.state_dict()"}),
    "schedule": ("the schedule is at a different step", {"": "compare how often and when scheduler.step() is called"}),
    "state": (
        "the optimizer's state is different",
        {"": "save and load optimizer.state_dict(), each rank its own shard"},
    ),
    "padded-evaluation": (
        "the evaluation counts samples twice: the sampler pads the last batch",
        {
            "": "drop the padding before you score, or split the set without padding",
            "accelerate": "use accelerator.gather_for_metrics(...) instead of gather",
            "lightning": "use a validation sampler without padding, or a set whose length the devices divide",
        },
    ),
    "train-mode": (
        "the evaluation runs in training mode, with dropout and the statistics of its batches",
        {"": "call model.eval() before an evaluation, and model.train() after it"},
    ),
    "lost-evaluation": (
        "the evaluation leaves samples out",
        {"": "set drop_last=False in the evaluation, and use a sampler that covers the whole set"},
    ),
    "rank-evaluation": (
        "each rank scores its own shard, and nothing combines the scores",
        {
            "": "all_reduce the sums and counts before you divide",
            "accelerate": "call accelerator.gather_for_metrics(...) before you score",
            "lightning": "use self.log(..., sync_dist=True), or a torchmetrics metric",
        },
    ),
    "evaluation": ("the evaluation reads different samples", {"": "compare the evaluation's loaders"}),
    "step-count": (
        "one run makes more steps",
        {"": "compare the samples per epoch, drop_last, the accumulation and the length of the training"},
    ),
}


def explain_cause(cause: str, frameworks: Iterable[str]) -> str:
    """Return a cause with the fix for the first framework that has one."""
    text, ways = _CAUSES[cause]
    names = []
    for name in frameworks:
        if name == "pytorch_lightning":
            names.append("lightning")
        else:
            names.append(name)
    order = []
    for name in ("lightning", "transformers", "accelerate"):
        if name in names:
            order.append(name)
    way = ways[""]
    for name in order:
        if name in ways:
            way = ways[name]
            break
    return f"{text}. Fix: {way}"


# In the causal order in which a step is judged: the inputs of a stage are compared before it.
_STAGES = (
    *("initial weights", "weights", "parameters", "data", "randomness", "forward", "normalisation", "buffers"),
    *("gradient", "reduction", "clipping", "optimizer", "schedule", "optimizer state", "evaluation", "steps"),
)
# Kinds of values that a verdict counts, in this order.
_REPORTED_KINDS = (
    "gradients",
    "gradient norms",
    "weights",
    "updates",
    "buffers",
    "losses",
    "samples",
)


@dataclass(frozen=True)
class TraceFinding:
    """The first difference between two trainings.

    Attributes:
        step: of the first trace, 0-based; `other`: of the second. Both are shown as numbers from 1.
        stage: one of `_STAGES`.
        where: the tensor, or what else was compared.
        rank: the wrong rank; -1 for all.
        cause: a key of `_CAUSES`.
        text: the difference, in numbers.
        way: the cause and its fix for the framework in use, in words.
    """

    step: int
    other: int
    stage: str
    where: str
    rank: int
    cause: str
    text: str
    way: str

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank >= 0 else ""
        where = f", {self.where}" if self.where else ""
        step = f"step {self.step + 1}" + (f" (in the second: {self.other + 1})" if self.step != self.other else "")
        return f"{step}{rank}, {self.stage}{where}: {self.text}\n  cause: {self.way}"


@dataclass
class TraceVerdict:
    """The result of a comparison.

    Attributes:
        bits: leading steps after which the weights of both runs are bitwise equal.
        judged: steps that were compared.
        largest: the largest relative distance of the weights over these steps.
        compared: number of compared pairs of each kind, over all steps.
        hidden: share of a gradient below which a difference would not show: in the first step, and in any.
        unproven: why later steps cannot be compared: random numbers that differ by construction, or grown rounding.
        missing: what a proof lacks: a run's end, its gradients, a common step.
        not_finite: values of each kind that are not finite in both runs, so not comparable.
        notes: anything else that the user should know.
    """

    one: str
    two: str
    finding: TraceFinding | None = None
    bits: int = 0
    judged: int = 0
    largest: float = 0.0
    compared: Counter[str] = field(default_factory=Counter)
    hidden: tuple[float, float] = (0.0, 0.0)
    unproven: str = ""
    missing: list[str] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether the recorded steps prove that both are the same training."""
        return self.finding is None and not self.unproven and not self.missing

    @property
    def word(self) -> str:
        """Return SAME, DIFFERENT or NOT PROVED."""
        if self.same:
            return "SAME"
        if self.finding:
            return "DIFFERENT"
        return "NOT PROVED"

    def __str__(self) -> str:
        lines = []
        if self.finding:
            if self.bits:
                before = f"the {self.bits} steps before it have the same bits"
            else:
                before = ""
            if not before and self.finding.step and self.judged > 1:
                before = f"before it the weights differ by at most {self.largest:.1e}, relative"
            lines.append(f"DIFFERENT from {self.finding}")
            for reason in [before, *self.missing]:
                if reason:
                    lines.append(f"  {reason}")
        elif self.missing:
            bits = f", {self.bits} of them with the same bits" if self.bits else ""
            lines.append(f"NOT PROVED: no difference in {self.judged} steps{bits}, but {self.missing[0]}")
            for reason in [*self.missing[1:], *filter(None, [self.unproven])]:
                lines.append(f"  and {reason}")
        elif self.unproven:
            lines.append(f"NO MISTAKE FOUND in {self.judged} steps, but not proved: {self.unproven}")
        elif self.bits == self.judged:
            lines.append(f"SAME: the weights of all {self.judged} steps have the same bits")
        else:
            lines.append(
                f"SAME within rounding: {self.judged} steps, the weights differ by {self.largest:.1e} of themselves "
                + "at most"
                + (f"; the same bits to step {self.bits}" if self.bits else "")
            )
        counts = ", ".join(
            f"{self.compared[category]} {category}" for category in _REPORTED_KINDS if self.compared[category]
        )
        if not self.finding:
            lines.append(f"  compared: {counts or 'nothing'}")
        if self.same and self.bits < self.judged:
            lines.append(f"  {self._hidden}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    @property
    def _hidden(self) -> str:
        initial, most = (f"{bound:.2g}" if bound < 1e-4 else f"{bound:.2%}" for bound in self.hidden)
        later = f" ({most} in later steps)" if most != initial else ""
        below = f"an error in a tensor's gradient under {initial} of the whole gradient's length{later}"
        return f"would not show: {below}, and any error in a tensor whose gradient is shorter than that"

    def plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        finding = None
        if self.finding:
            finding = vars(self.finding) | {"step": self.finding.step + 1, "other": self.finding.other + 1}
        return {
            "verdict": self.word,
            "same": self.same,
            "one": self.one,
            "two": self.two,
            "finding": finding,
            "steps_with_the_same_bits": self.bits,
            "steps": self.judged,
            "largest_relative_difference": self.largest,
            "compared": dict(self.compared),
            "not_finite": self.not_finite,
            "hidden_below": self.hidden[1] if self.bits < self.judged else 0.0,
            "unproven": self.unproven,
            "missing": self.missing,
            "notes": self.notes,
        }
