"""Describe what a comparison found: causes and fixes, the first difference, the verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "TraceFinding",
    "TraceVerdict",
    "said",
]


_SHARD: Mapping[str, str] = {
    "": "give the loader a DistributedSampler",
    "accelerate": "give the loader to accelerator.prepare()",
    "lightning": "leave Trainer(use_distributed_sampler=True), or give the loader a DistributedSampler",
    "transformers": "leave the loaders to the Trainer, which shards them",
}
_WEIGHT: Mapping[str, str] = {
    "": "sum the loss, divide by the items of all ranks (all_reduce of the count) and multiply by the world size, by "
    "which DDP divides",
    "accelerate": "divide the summed loss by accelerator.gather(items).sum() and multiply by accelerator.num_processes",
    "lightning": "divide the summed loss by self.all_gather(items).sum() and multiply by self.trainer.world_size",
    "transformers": "let compute_loss use num_items_in_batch, with average_tokens_across_devices=True",
}
# cause -> (the cause, framework -> the way out; "" is any other)
_CAUSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "alone": (
        "the processes do not train together: there is no process group, and nothing is exchanged",
        {
            "": "torch.distributed.init_process_group() and DistributedDataParallel around the model",
            "accelerate": "give the model, the optimizer and the loaders to accelerator.prepare(); without GPUs "
            "Accelerator(cpu=True)",
            "transformers": "without GPUs give TrainingArguments(use_cpu=True)",
        },
    ),
    "rank-weights": (
        "a rank begins with other weights",
        {
            "": "wrap the model in DistributedDataParallel, which sends rank 0's weights to all, and change "
            "nothing after it",
            "accelerate": "give the model to accelerator.prepare() after it has its weights",
            "lightning": "make all weights in __init__ or configure_model, alike on all ranks",
        },
    ),
    "other-weights": (
        "the two runs do not begin with the same weights",
        {"": "seed before the model is made, alike in both runs, or load the same checkpoint"},
    ),
    "changed-weights": (
        "something other than the optimizer changed the weights between two updates",
        {
            "": "look at what runs besides the update: a perturbation that is not taken back (SAM), a load, an "
            "average of weights, a clamp; where nothing does, a defective memory"
        },
    ),
    "frozen": (
        "part of the model is frozen in one run alone",
        {"": "set requires_grad alike in both runs, before the optimizer is made"},
    ),
    "outside-optimizer": (
        "the optimizer was not given all of the model's parameters",
        {"": "make the optimizer once the model is whole, of all its parameters, or add_param_group() later"},
    ),
    "stale-optimizer": (
        "the optimizer holds other tensors than the model's: it was made before they were replaced",
        {
            "": "make the optimizer after what replaces parameters: loading, copying, sharding or converting the model",
            "accelerate": "give the model and the optimizer to accelerator.prepare() in one call",
        },
    ),
    "other-model": (
        "the two runs train other models: a tensor is in one alone",
        {"": "make the model alike in both runs"},
    ),
    "no-gradient": (
        "part of the model gets no gradient in one run alone",
        {"": "look for a detach(), a no_grad() or a branch of the forward that leaves it out"},
    ),
    "kept-gradient": (
        "the gradients of the update before were not cleared, so this step's were added to them",
        {"": "call optimizer.zero_grad() once for each update, before the first backward that follows it"},
    ),
    "overlapping": ("every rank reads the same samples", _SHARD),
    "batch-size": (
        "a step holds another number of samples: the batch size counts for each process",
        {
            "": "divide the batch size (or the accumulation) by the number of processes, so that a step holds as many",
            "accelerate": "divide batch_size by the processes, or make Accelerator(split_batches=True)",
            "transformers": "divide per_device_train_batch_size or gradient_accumulation_steps by the processes",
            "lightning": "divide the loader's batch_size or accumulate_grad_batches by the devices",
        },
    ),
    "batch-share": (
        "a step holds fewer samples: the batch size is shared among the processes, or a batch is cut short",
        {
            "": "give each process the batch size that makes a step as large, or accumulate as often",
            "accelerate": "leave Accelerator(split_batches=False), or give the loader the batch size of the whole step",
        },
    ),
    "set-epoch": (
        "set_epoch is missing, so each epoch has the first one's order",
        {
            "": "call sampler.set_epoch(epoch) at the begin of each epoch",
            "accelerate": "give the loader to accelerator.prepare(), or call loader.set_epoch(epoch)",
            "lightning": "leave use_distributed_sampler=True, or call set_epoch of your sampler in "
            "on_train_epoch_start",
        },
    ),
    "lost-samples": ("samples are left out", {"": "look at where the loader begins after a resume, and at drop_last"}),
    "repeated-samples": (
        "samples are read again",
        {"": "look at where the loader begins after a resume: the samples of the steps before are to be skipped"},
    ),
    "late-resume": (
        "the resume reads what comes later: it skips samples",
        {"": "skip as many batches as there were steps before the checkpoint, times the accumulation, and no more"},
    ),
    "early-resume": (
        "the resume reads again what was trained before the checkpoint",
        {
            "": "save the loader's place with the checkpoint and go on from there",
            "accelerate": "use accelerator.skip_first_batches(loader, batches) for the first epoch after the resume",
            "transformers": "leave ignore_data_skip=False",
        },
    ),
    "other-order": (
        "the samples come in another order",
        {
            "": "use one sampler with one seed in both runs (a DistributedSampler of one replica where there is "
            "one process)",
            "lightning": "Lightning puts a DistributedSampler in the place of a RandomSampler where there are several "
            "devices: give both runs the same sampler, or shuffle=False",
        },
    ),
    "other-shuffle": (
        "the ranks shuffle by different seeds, so that their parts overlap",
        {"": "give all ranks the same seed for the order; DistributedSampler(seed=...) cuts one order into parts"},
    ),
    "other-samples": ("the samples are other ones", {"": "compare the data sets, their order and their preparation"}),
    "other-contents": (
        "the same samples have other contents: random augmentation or preparation that depends on the process",
        {"": "seed what the data set draws by sample or by step (worker_init_fn, a generator per index)"},
    ),
    "rank-seed": (
        "the generators are seeded differently on each rank, and the forward draws from them",
        {
            "": "seed alike on all ranks, or switch what draws (dropout) off to compare",
            "accelerate": "set_seed(seed, device_specific=False)",
            "lightning": "seed_everything(seed) alike on all ranks",
        },
    ),
    "own-generator": (
        "the model draws from a generator that is seeded by rank",
        {"": "seed it alike on all ranks, or by step and sample, and not within the forward"},
    ),
    "random": (
        "random numbers differ although the runs have the same shape",
        {"": "seed torch, numpy and random before the model and the data are made"},
    ),
    "forward": (
        "with the same weights, samples and generators the model computes another output",
        {"": "look for what depends on the rank, on the batch's shape, or on a generator made within the forward"},
    ),
    "batchnorm": (
        "BatchNorm statistics differ: each rank normalises by its own samples",
        {
            "": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped",
            "lightning": "Trainer(sync_batchnorm=True)",
        },
    ),
    "rank-average": ("the loss is averaged per rank", _WEIGHT),
    "scaled-loss": (
        "the loss has another scale",
        {
            "": "divide by the number of micro-batches of a step, and let DDP alone divide by the ranks",
            "transformers": "model.accepts_loss_kwargs = False where its loss does not use num_items_in_batch, or "
            "TrainingArguments(average_tokens_across_devices=False)",
        },
    ),
    "loss": ("the same outputs lead to another loss", {"": "look at what the loss is divided by, and at its weights"}),
    "unreduced": (
        "the ranks' gradients are not added up",
        {
            "": "call the wrapped model (not model.module), and leave no_sync() for a step's last backward",
            "accelerate": "use the model that accelerator.prepare() returned, and accelerator.backward(loss)",
            "lightning": "call self.manual_backward(loss), and leave no_sync for the last micro-batch",
        },
    ),
    "part-unreduced": (
        "part of the gradient is missing or is not exchanged",
        {"": "every parameter must be in the wrapped model when it is wrapped, and each backward count once"},
    ),
    "summed": (
        "gradients are added up over the ranks, not averaged",
        {"": "divide by the world size, or count on it in the loss alone"},
    ),
    "reduction": (
        "the gradient is not the mean over all ranks",
        {"": "look at what happens between backward and the update"},
    ),
    "gradient": (
        "the gradient is another one, although weights, samples and loss agree",
        {"": "look at what happens between backward and the update: gradients left over, hooks, a second loss"},
    ),
    "clip-before-reduce": (
        "gradients are clipped before they are reduced: each rank by the norm of its own",
        {
            "": "clip after the gradients were exchanged, before optimizer.step()",
            "accelerate": "accelerator.clip_grad_norm_ where accelerator.sync_gradients is true",
            "lightning": "Trainer(gradient_clip_val=...), or self.clip_gradients after the exchange",
        },
    ),
    "clip-before-unscale": (
        "gradients are clipped before they are divided by the loss's scale",
        {
            "": "scaler.unscale_(optimizer) before clip_grad_norm_",
            "accelerate": "accelerator.clip_grad_norm_ unscales itself",
        },
    ),
    "clipping": (
        "the gradient is clipped differently",
        {"": "clip by the same norm, of all gradients together, in both"},
    ),
    "rank-rate": ("a rank has another learning rate", {"": "make the optimizer and the schedule alike on all ranks"}),
    "world-rate": (
        "the learning rate depends on the number of processes",
        {"": "keep it where the step holds as many samples; do not multiply it by the world size"},
    ),
    "other-rate": ("the learning rate is another one", {"": "compare the optimizers' settings"}),
    "settings": ("the optimizer has other settings", {"": "compare the optimizers' settings"}),
    "extra-step": (
        "an optimizer updates again with the same gradients",
        {"": "call optimizer.step() once for each step"},
    ),
    "update": ("the same gradient leads to another update", {"": "compare the optimizers, their states and versions"}),
    "schedule-ranks": (
        "the schedule steps more often where there are more processes",
        {
            "": "step it once for each optimizer step",
            "accelerate": "a prepared scheduler steps num_processes times: do not prepare it, count its steps in those "
            "of one process, or make Accelerator(step_scheduler_with_optimizer=False)",
        },
    ),
    "schedule-resume": ("the schedule begins anew after the resume", {"": "save and load scheduler.state_dict()"}),
    "schedule": ("the schedule is at another place", {"": "compare how often and when scheduler.step() is called"}),
    "state": (
        "the optimizer's state is another one",
        {"": "save and load optimizer.state_dict(), each rank its own part"},
    ),
    "padded-evaluation": (
        "the evaluation counts samples twice: the sampler fills up the last batch",
        {
            "": "drop what was filled up before scoring, or cut the set without filling up",
            "accelerate": "accelerator.gather_for_metrics(...) in place of gather",
            "lightning": "a validation sampler that does not fill up; or a set whose length the devices divide",
        },
    ),
    "lost-evaluation": (
        "the evaluation leaves samples out",
        {"": "drop_last=False in the evaluation, and a sampler for all"},
    ),
    "rank-evaluation": (
        "each rank scores its own part, and nothing brings the parts together",
        {
            "": "all_reduce the sums and counts before dividing",
            "accelerate": "accelerator.gather_for_metrics(...) before scoring",
            "lightning": "self.log(..., sync_dist=True), or a torchmetrics metric",
        },
    ),
    "evaluation": ("the evaluation takes other samples", {"": "compare the evaluation's loaders"}),
    "step-count": (
        "one run makes more steps",
        {"": "compare the samples of an epoch, drop_last, the accumulation and when training ends"},
    ),
}


def said(cause: str, frameworks: Iterable[str]) -> str:
    """Return a cause with the fix for the first framework that has one."""
    text, ways = _CAUSES[cause]
    names = ["lightning" if name == "pytorch_lightning" else name for name in frameworks]
    order = [name for name in ("lightning", "transformers", "accelerate") if name in names]
    way = next((ways[name] for name in order if name in ways), ways[""])
    return f"{text}. Way out: {way}"


# In the causal order in which a step is judged: the inputs of a stage are compared before it.
_STAGES = (
    *("initial weights", "weights", "parameters", "data", "randomness", "forward", "normalisation", "buffers"),
    *("gradient", "reduction", "clipping", "optimizer", "schedule", "optimizer state", "evaluation", "steps"),
)
_SHOWN = (
    "gradients",
    "gradient norms",
    "weights",
    "updates",
    "buffers",
    "losses",
    "samples",
)  # shown kinds


@dataclass(frozen=True)
class TraceFinding:
    """The first difference between two trainings.

    Attributes:
        step: of the first trace, counted from 0; `other`: of the second.
        stage: one of `_STAGES`.
        where: the tensor, or whatever else was compared.
        rank: the wrong rank; -1 for all.
        cause: a key of `_CAUSES`.
        text: the difference, in numbers.
        way: the cause, and the way out in the framework that is used, in words.
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
        step = f"step {self.step}" if self.step == self.other else f"step {self.step} (in the second: {self.other})"
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
        missing: what a proof would need and does not have: a run's end, its gradients, a common step.
        not_finite: values of each kind that are not finite in both runs, which makes them incomparable.
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
        """Whether both are proved to be the same training, as far as they were recorded."""
        return self.finding is None and not self.unproven and not self.missing

    @property
    def word(self) -> str:
        """SAME, DIFFERENT or NOT PROVED."""
        return "SAME" if self.same else "DIFFERENT" if self.finding else "NOT PROVED"

    def __str__(self) -> str:
        lines = []
        if self.finding:
            before = f"the {self.bits} steps before it have the same bits" if self.bits else ""
            if not before and self.finding.step and self.judged > 1:
                before = f"before it the weights differ by {self.largest:.1e} of themselves at most"
            lines.append(f"DIFFERENT from {self.finding}")
            lines += [f"  {reason}" for reason in [before, *self.missing] if reason]
        elif self.missing:
            bits = f", {self.bits} of them with the same bits" if self.bits else ""
            lines.append(f"NOT PROVED: no difference in {self.judged} steps{bits}, but {self.missing[0]}")
            lines += [f"  and {reason}" for reason in [*self.missing[1:], *filter(None, [self.unproven])]]
        elif self.unproven:
            lines.append(f"NO MISTAKE FOUND in {self.judged} steps, but not proved: {self.unproven}")
        elif self.bits == self.judged:
            lines.append(f"SAME: the weights of all {self.judged} steps have the same bits")
        else:
            lines.append(
                f"SAME within rounding: {self.judged} steps, the weights differ by {self.largest:.1e} of themselves "
                + "at most"
                + (f"; the same bits to step {self.bits - 1}" if self.bits else "")
            )
        counts = ", ".join(f"{self.compared[kind]} {kind}" for kind in _SHOWN if self.compared[kind])
        if not self.finding:
            lines.append(f"  compared: {counts or 'nothing'}")
        if self.same and self.bits < self.judged:
            lines.append(f"  {self._hidden}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    @property
    def _hidden(self) -> str:
        first, most = (f"{each:.2g}" if each < 1e-4 else f"{each:.2%}" for each in self.hidden)
        later = f" ({most} in later steps)" if most != first else ""
        below = f"an error in a tensor's gradient under {first} of the whole gradient's length{later}"
        return f"would not show: {below}; of a tensor whose gradient is shorter, any"

    def plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        found = None if self.finding is None else vars(self.finding)
        return {
            "verdict": self.word,
            "same": self.same,
            "one": self.one,
            "two": self.two,
            "finding": found,
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
