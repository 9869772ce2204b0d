"""What is trained in the matrix: five small models, one data set with one bad sample, the loss, and the tasks.

Nothing in here knows of lockstep but `order`, its documented order of samples, `noise`, its documented seed of a
sample, and `Parts`, its lanes of a stream: the oracle trains the same models on the same samples in its own loop.
"""

import os
import random
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, Subset

import lockstep
from lockstep.data.groups import TokenGroups
from lockstep.data.sampler import Shuffled
from lockstep.data.shard_order import Geometry, ShardOrder
from lockstep.data.streams import Lanes
from lockstep.hooks import Hooks
from lockstep.seeds import derive
from lockstep.tensors import local_of

__all__ = [
    "BAD",
    "BATCH",
    "BITS",
    "BOUND",
    "CHANGE",
    "GROUP",
    "HELD_OUT",
    "HIDDEN",
    "LIMITED",
    "MICRO",
    "SAMPLES",
    "SHARE",
    "SILENT",
    "STEPS",
    "WHOLE",
    "Ascending",
    "Own",
    "change",
    "evaluates",
    "loss_sum",
    "make",
    "mixed_rows",
    "order",
    "places",
    "quantize",
    "seeded",
    "seeded_collation",
    "seeded_micro",
    "steps_of",
    "subject",
    "warmed",
    "weights_of",
    "whole_loss",
]

BATCH, MICRO = 16, 4  # M = 4: a world of 3 has empty slots, and one of its ranks nothing else
STEPS = 10
SAMPLES = STEPS * BATCH - MICRO  # the last step is short
MIXED = (110, 46), (0.75, 0.25)  # samples of each source and their weights, with the task "plateau"
SHARDS, GROUP = (20, 7, 40, 1, 0, 30, 58), 2  # samples of each shard, with the task "muon"; shards in a group
assert sum(SHARDS) == sum(MIXED[0]) == SAMPLES
BAD = 7  # the step of the fault, 0-based
HELD_OUT = 11  # samples of the evaluation: three micro-batches, the last short
LIMITED = 9  # of these, with --limit-eval-batches
CHANGE = 2  # steps, after which the trained set of "unfrozen" and "frozen" changes
BOUND = 0.25  # of each weight, which the hooks of "hooked" hold
SHARE = 3.0  # of the outputs of a sample, that a LightningModule's loss, a mean over samples, is divided by
SILENT = 1  # the step in which the own schedule says nothing
_BAD_MICRO = {"mlp": 3, "batchnorm": 0, "buffer": 0, "tied": 2, "rotary": 1}  # and its micro-batch: on some rank
_SPIKE = {"tied": 1000.0}  # the bad sample's targets, else 60
_INPUTS, _WIDTH, _OUTPUTS = 6, 8, 5
_POSITIONS = 4  # of a sequence: a head and a tail for each of two context ranks


def steps_of(task):
    """The steps of the whole run: one less where the last, which is short, is left out."""
    return STEPS - (task == "options")


def evaluates(task):
    """The steps between evaluations: one is right after the step of the fault."""
    return 2 if task == "plateau" else 4


def order(task=""):
    """The samples in the order of the run, which has one epoch: with the task "muon" that of shards, with "adapters" by
    their lengths, which are all alike, with "plateau" that of a mixture, with "trainer" a Trainer's.
    """
    return [sample for _, sample in places(task)]


def places(task=""):
    """The samples in the order of the run, each with its epoch: a source of a mixture may begin again."""
    if task == "plateau":
        epochs, samples = mixed(range(SAMPLES)).make_order(0, 0).at(0, SAMPLES)
        return list(zip(epochs.tolist(), samples.tolist(), strict=True))
    return [(0, sample) for sample in _once(task)]


def mixed(samples):
    """A mixture of the samples: its sources are the first of them and the others."""
    first = MIXED[0][0]
    sources = {"first": Subset(samples, range(first)), "others": Subset(samples, range(first, SAMPLES))}
    return lockstep.mixture(sources, dict(zip(sources, MIXED[1], strict=True)))


def _once(task):
    if task == "trainer":
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    if task == "adapters":
        groups = TokenGroups(np.ones(SAMPLES), MICRO, 0)
        return [int(sample) for number in groups.at(0, groups.size)[1] for sample in groups.samples(0, number)[1]]
    if task == "muon":
        shards = ShardOrder(SHARDS, 0, GROUP).placed(Geometry(BATCH, MICRO), 0)
        return shards.at(0, SAMPLES)[1].tolist()
    return [int(sample) for sample in Shuffled(SAMPLES, 0).at(0, SAMPLES)[1]]


def seeded(sample, epoch=0):
    """Seeds every generator as a data set finds it where `sample` is asked for."""
    _seed(derive(0, "sample", epoch, sample))


def seeded_collation(step, index):
    """Seeds every generator as the collation of a micro-batch finds it."""
    _seed(derive(0, "collate", step, index))


def seeded_micro(step, index):
    """Seeds every generator as the forward of a micro-batch finds it."""
    _seed(derive(0, "micro", step, index))


def _seed(key):
    torch.default_generator.manual_seed(key)  # torch.manual_seed formats three stacks for absent devices: 3 ms
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(_INPUTS, _WIDTH), nn.Linear(_WIDTH, _OUTPUTS)
        self.act = nn.Tanh()

    def forward(self, x, token):
        return self.last(self.act(self.first(x))).clone()  # of sequences it is a view, of which FSDP2 warns


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(_INPUTS, _WIDTH, bias=False)  # with a bias its gradient would be rounding alone
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.act = nn.Tanh()
        self.last = nn.Linear(_WIDTH, _OUTPUTS)

    def forward(self, x, token):
        return self.last(self.act(self.norm(self.first(x))))


class Moving(Mlp):
    """Its forward moves two buffers, which the loss does not see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(_WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, token):
        hidden = self.act(self.first(x))
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(hidden.float().mean(0), alpha=0.1)
                self.count += 1
        return self.last(hidden)


class Tied(nn.Module):
    """The head is the embedding, and a layer is frozen. Its gradients overflow float16 in the first step, and where the
    spike is."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(_OUTPUTS, _WIDTH)
        self.frozen, self.middle = nn.Linear(_INPUTS, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.act = nn.Tanh()
        self.head = nn.Linear(_WIDTH, _OUTPUTS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            self.embedding.weight.mul_(2.0)

    def forward(self, x, token):
        return self.head(self.act(self.middle(self.embedding(token) + self.frozen(x))))


class Rotary(Mlp):
    """Complex buffers turn pairs of features by the token's angle: a table, and one that is kept in checkpoints.

    A 0-dim parameter scales the outputs. Another parameter is empty.
    """

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(float(_OUTPUTS)), 2.0 ** -torch.arange(_WIDTH // 2))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("phase", torch.polar(torch.ones(_WIDTH // 2), torch.linspace(0.1, 1.0, _WIDTH // 2)))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x, token):
        pairs = torch.view_as_complex(self.first(x).float().unflatten(-1, (_WIDTH // 2, 2)))
        hidden = self.act(torch.view_as_real(pairs * self.table[token] * self.phase).flatten(-2))
        return self.scale * self.last(hidden) + self.none.sum()


HIDDEN = {"tied": "middle.weight"} | dict.fromkeys(("mlp", "batchnorm", "buffer", "rotary"), "first.weight")
WHOLE = {"tied": ""} | dict.fromkeys(("mlp", "batchnorm", "buffer", "rotary"), "last")  # trained beside adapters
# How the layers are divided over two ranks: what is computed of all columns has them, as a head has all logits.
_PLANS = {"mlp": {"first": "columns", "last": "rows"}, "tied": {"frozen": "vocabulary", "middle": "vocabulary"}}
_MODELS = {"mlp": Mlp, "batchnorm": BatchNorm, "buffer": Moving, "tied": Tied, "rotary": Rotary}


BITS = {"mlp": "4bit", "batchnorm": "8bit", "buffer": "8bit", "tied": "4bit", "rotary": "4bit"}  # of a quantized base


def quantize(net, name):
    """Puts bitsandbytes' layers in the place of all that adapters are beside."""
    from bitsandbytes import nn as layers  # a second: other tasks need not wait for it

    for own in ("frozen", "middle") if name == "tied" else ("first",):
        plain = net.get_submodule(own)
        kind, more = layers.LinearNF4, {}
        if BITS[name] == "8bit":
            kind, more = layers.Linear8bitLt, {"has_fp16_weights": False}
        layer = kind(plain.in_features, plain.out_features, plain.bias is not None, **more)
        layer.load_state_dict(plain.state_dict())
        setattr(net, own, layer.to("cpu").requires_grad_(False))
    return net


def make(name):
    """The model, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return _MODELS[name]()


def loss_sum(model, batch):
    """The summed square error of the outputs that are kept; small, so that float16 can hold its scaled gradient.

    With the fault "oom" half as many samples as the bad one is among would fit.
    """
    # Stages refuse a loss that reads values.
    if len(batch["x"]) > MICRO // 2 and "large" in batch and batch["large"].any():
        raise torch.OutOfMemoryError("more memory than there is")
    error = model(batch["x"], batch["token"]).float() - batch["target"]
    return 0.05 * (error.square() * batch["kept"]).sum()


def drawn_sum(model, batch, step):
    """The summed square error with a share that each sample draws, warmed up over four steps."""
    error = model(batch["x"], batch["token"]).float() - batch["target"]
    share = torch.rand(len(batch["x"]), 1) * warmed(step)
    return 0.05 * (error.square() * share * batch["kept"]).sum()


def warmed(steps):
    """The factor of a loss that is warmed up over four steps."""
    return min(1.0, (steps + 1) / 4)


def weights_of(batch):
    """Of each output, of the loss "weighted": by the sample's token; of one that is not kept 0."""
    return (0.5 + 0.5 * batch["token"])[:, None] * batch["kept"]


def whole_loss(out, batch, own=None):
    """The mean square error of a step, and the square of the outputs' means, which no sum over samples is.

    Args:
        own: (outputs, batch) of some samples, whose part of it is returned.
    """
    some, rows = own or (out, batch)
    error = 0.05 * ((some - rows["target"]).square() * rows["kept"]).sum() / batch["kept"].sum()
    counts = batch["kept"].sum(0).clamp(min=1)
    part, mean = ((each * kept["kept"]).sum(0) / counts for each, kept in ((some, rows), (out, batch)))
    return error + 0.01 * (part * mean).sum()


def change(step, model, net, done):
    """Freezes a layer of the model, or trains it from now on, after so many steps."""
    if step in ("unfrozen", "frozen") and done == CHANGE:
        net.get_submodule(HIDDEN[model].rpartition(".")[0]).requires_grad_(step == "unfrozen")


class Ascending(torch.optim.AdamW):
    """Takes the gradient where the loss is higher (sharpness-aware minimisation)."""

    @torch.no_grad()
    def step(self, closure):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before, norm = [p.clone() for p in held], torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.add_(p.grad, alpha=0.05 / (float(norm) + 1e-12))
        with torch.enable_grad():
            closure()
        for p, value in zip(held, before, strict=True):
            p.copy_(value)
        super().step()


def collate(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def mixed_rows(samples):
    """A batch in which each sample has a share of the one before it, as mixup draws it: in the collation."""
    batch = collate(samples)
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    more = {name: batch[name].roll(1, 0) * (1 - share) + batch[name] * share for name in ("x", "target")}
    return batch | more


class Samples(torch.utils.data.Dataset):
    """Ragged: of each sample's outputs one to five are kept. With the fault "error" a sample draws noise, and the bad
    one then raises, once in all processes and starts of the run.

    Args:
        model, fault: as in the case; another sample is bad for each model.
        raised: the file that says that it has raised.
        task: as in the case; with "muon" they lie in shards.
    """

    shard_sizes = SHARDS

    def __init__(self, model, fault, raised=None, task=""):
        draw = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, _INPUTS, generator=draw)
        self.token = torch.randint(_OUTPUTS, (SAMPLES,), generator=draw)
        self.target = 0.3 * torch.randn(SAMPLES, _OUTPUTS, generator=draw)
        self.kept = torch.arange(_OUTPUTS) < torch.randint(1, _OUTPUTS + 1, (SAMPLES, 1), generator=draw)
        drawn, first = order(task), BAD * BATCH + _BAD_MICRO[model] * MICRO
        self.bad = next(sample for sample in drawn[first + 2 : first + MICRO] if drawn.count(sample) == 1)
        self.kept[self.bad] = True
        self.step = torch.empty(SAMPLES, dtype=torch.int64)  # that trains on the sample
        self.step[order(task)] = torch.arange(SAMPLES) // BATCH
        self.noisy, self.raised = fault == "error", raised
        self.mixes = task == "hooked"
        self.draws_random = self.noisy or self.mixes
        self.runs_out, self.large = fault == "oom", torch.arange(SAMPLES) == self.bad
        if fault == "nan":
            self.x[self.bad, 2] = torch.nan
        if fault == "spike":
            self.target[self.bad] = _SPIKE.get(model, 60.0)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = self.x[index]
        if self.noisy:
            x = x + torch.randn(_INPUTS) + float(np.random.rand()) + random.random()
            if index == self.bad and self.raised and _first(self.raised):
                raise OSError(5, "Input/output error", f"{index}.png")
        names = ("token", "target", "kept", "step", *(["large"] if self.runs_out else []))
        return {"x": x} | {name: getattr(self, name)[index] for name in names}


class Parts:
    """The same samples in the same micro-batches, as a stream: each slot has two parts, which take turns."""

    def __init__(self, samples):
        self.samples, self.order, self.parts = samples, order(), 2 * BATCH // MICRO
        lanes = Lanes(self.parts, BATCH // MICRO, MICRO, 0)
        self.lane_of = {lanes.parts_of(0, lane)[0]: lane for lane in range(self.parts)}

    def iter(self, part, start):
        slot, turn = divmod(self.lane_of[part], 2)
        firsts = range(turn * BATCH + slot * MICRO, SAMPLES, 2 * BATCH)
        for place in [place for first in firsts for place in range(first, first + MICRO)][start:]:
            sample = self.order[place]
            seeded(sample)  # as a data set finds it
            yield self.samples[sample]


def _first(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Subject(lockstep.Task):
    """The task, as a user writes it."""

    reduction = "sum"  # divided by the items of the step

    def __init__(self, model, fault, folder):
        self.name, self.fault, self.folder = model, fault, Path(folder)
        self.made = lambda: None
        self.kind = ""  # the task in the case, where it decides the order
        self.parallel = "none"

    def model(self):
        made = make(self.name)
        self.made = weakref.ref(made)  # to look at; whoever trains it holds it
        return made

    def dataset(self, split):
        return Samples(self.name, self.fault, self.folder / "raised", self.kind) if split == "train" else None

    def collate(self, samples):
        return self.placed(collate(samples))

    def placed(self, batch):
        """The batch, for context ranks with each sample at a position of a sequence that is empty elsewhere."""
        if self.parallel != "context":
            return batch
        rows, places = torch.arange(len(batch["x"])), batch["token"] % _POSITIONS
        found = {name: leaf.new_zeros(len(leaf), _POSITIONS, *leaf.shape[1:]) for name, leaf in batch.items()}
        for name, leaf in batch.items():
            found[name][rows, places] = leaf
        return found

    def count(self, batch):
        return int(batch["kept"].sum())

    def loss(self, model, batch):
        return loss_sum(model, batch)

    def sequence(self, batch):
        return dict.fromkeys(batch, 1)

    def parallelize(self, model):
        return _PLANS.get(self.name, {"first": "vocabulary"})

    def blocks(self, model):
        """Stages end with the layer that `change` freezes; without stages there are no blocks."""
        names = (HIDDEN[self.name].rpartition(".")[0], "act")
        return [model.get_submodule(name) for name in names] if self.parallel == "pipeline" else None


class Changed(Subject):
    """Its trained set changes: from what it is here to what `change` makes of it."""

    def __init__(self, model, fault, folder, *, frozen):
        super().__init__(model, fault, folder)
        self.frozen = frozen

    def model(self):
        made = super().model()
        made.get_submodule(HIDDEN[self.name].rpartition(".")[0]).requires_grad_(not self.frozen)
        return made


class Mean(Subject):
    """Its loss is a mean, which it does not say."""

    reduction = "auto"

    def loss(self, model, batch):
        return loss_sum(model, batch) / batch["kept"].sum()


class Weighted(Subject):
    """A weighted mean; its items are the weights."""

    reduction = "auto"

    def count(self, batch):
        return float(weights_of(batch).sum())

    def loss(self, model, batch):
        error = model(batch["x"], batch["token"]).float() - batch["target"]
        weights = weights_of(batch)
        return 0.05 * (error.square() * weights).sum() / weights.sum()


class Drawn(Subject):
    """Its loss is a mean that draws random numbers, and knows the step."""

    reduction = "auto"

    def loss(self, model, batch):
        return drawn_sum(model, batch, self.step) / batch["kept"].sum()


class Counted(Subject):
    """Its loss is warmed up by its own count of steps, a plain number that a hook moves."""

    reduction = "auto"

    def __init__(self, model, fault, folder):
        super().__init__(model, fault, folder)
        self.updates = 0
        self.hooks = Counting(self)

    def loss(self, model, batch):
        return warmed(self.updates) * loss_sum(model, batch) / batch["kept"].sum()

    def state_dict(self):
        return {"updates": torch.tensor(self.updates)}

    def load_state_dict(self, state):
        self.updates = int(state["updates"])


class Counting(Hooks):
    """Counts a task's steps."""

    def __init__(self, task):
        self.task = task

    def after_update(self):
        self.task.updates += 1


class Whole(Subject):
    """A loss over the whole step."""

    loss = lockstep.Task.loss

    def outputs(self, model, batch):
        return {"out": model(batch["x"], batch["token"]).float(), "target": batch["target"], "kept": batch["kept"]}

    def step_loss(self, outputs):
        return whole_loss(outputs["out"], outputs)


class Rows(Whole):
    """The same, each micro-batch's part by itself."""

    step_loss = lockstep.Task.step_loss

    def step_loss_rows(self, own, whole, first):
        return whole_loss(whole["out"], whole, (own["out"], own))


class Twice(Subject):
    """Its optimizer evaluates a second time in each step."""

    def optimizer(self, model, config):
        from matrix_oracle import groups  # which imports this module

        return Ascending(groups(model), lr=config.lr, betas=(0.9, config.optim.beta2))


class Adapted(Subject):
    """Its model counts as trained, but its last layer as new. Its micro-batches are made by tokens."""

    defaults = "fine-tuning"

    def work(self, dataset, samples):
        return float(len(samples))

    def untrained(self):
        return [WHOLE[self.name]] if WHOLE[self.name] else []


class Quantized(Subject):
    """Adapters beside layers of 4 or 8 bits, which the task's own model has."""

    defaults = "fine-tuning"
    untrained = Adapted.untrained

    def model(self):
        made = quantize(make(self.name), self.name)
        self.made = weakref.ref(made)
        return made


class Evaluated(Subject):
    """The task with a held-out set, by which its rate falls. It trains on a mixture."""

    def dataset(self, split):
        return (
            mixed(super().dataset(split)) if split == "train" else Subset(Samples(self.name, "none"), range(HELD_OUT))
        )


class Streamed(Subject):
    """Its samples come as a stream."""

    def dataset(self, split):
        samples = super().dataset(split)
        return samples if samples is None else Parts(samples)


class Watching(Hooks):
    """Hooks that count, on all ranks and over all starts of a run, and that hold the weights within bounds."""

    def __init__(self, task):
        self.task, self.computed, self.slots = task, [], 0

    def before_batch(self, step, index, slot, slots, *, counts):
        assert not self.slots or slot, "a step began before the one before it was over"
        self.slots += 1
        if counts:
            self.computed.append((step, index))

    @torch.no_grad()
    def after_update(self):
        for parameter in self.task.made().parameters():
            if parameter.requires_grad:
                local_of(parameter).clamp_(-BOUND, BOUND)

    def before_run(self, context, done):
        assert context.state.get("steps", 0) == done, (context.state, done)
        self.computed, self.slots = [], 0

    def after_step(self, context, done):
        computed = sorted(tuple(pair) for each in context.gather(self.computed) for pair in each)
        micro = min(BATCH, SAMPLES - (done - 1) * BATCH) // MICRO
        assert computed == [(done - 1, index) for index in range(micro)], computed
        context.state["steps"] = context.state.get("steps", 0) + 1
        self.computed, self.slots = [], 0


class Hooked(Subject):
    """A task whose hooks change the weights, as a part of the step. A batch sampler makes its micro-batches, whose rows
    the collation mixes."""

    def __init__(self, model, fault, folder):
        super().__init__(model, fault, folder)
        self.hooks = Watching(self)

    def order(self, samples, seed):
        return BatchSampler(order(), MICRO, drop_last=False)

    def collate(self, samples):
        return self.placed(mixed_rows(samples))


class Own(Subject):
    """A task that has all of its own: optimizer, schedule, state and an evaluation."""

    def __init__(self, model, fault, folder):
        super().__init__(model, fault, folder)
        from torchmetrics.regression import R2Score  # as long as torch: other tasks need not wait for it

        self.r2 = R2Score()
        self.times = 0  # steps seen: as a plain number, which only load_state_dict brings back
        self.last: int | None = None  # the step that was counted last
        zero = torch.zeros((), dtype=torch.int64)
        self.seen = {"times": zero, "last": zero - 1, "trace": torch.zeros((), dtype=torch.float64)}

    def optimizer(self, model, config):
        """Over all parameters, a frozen layer's too; vectors have twice the rate."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "lr": 200 * config.lr}]
        return torch.optim.SGD(groups, lr=100 * config.lr, momentum=0.8)

    def schedule(self, step, steps):
        return None if step == SILENT else (step + 1) / steps

    def dataset(self, split):
        samples = Samples(self.name, "none")
        return super().dataset(split) if split == "train" else Subset(samples, range(HELD_OUT))

    def loss(self, model, batch):
        step, seen = batch["step"][0], self.seen
        if step != seen["last"]:  # in a rank's first forward of a step: so alike on all, however many they are
            if model.training:
                was_put_back = self.last is not None and self.last != int(seen["last"])
                self.times += 0 if was_put_back else 1  # a step that is left out moves no tensor, and so no number
                self.last = int(step)
            seen["times"].fill_(self.times)
            seen["last"].copy_(step)
            seen["trace"].mul_(0.5).add_(step + 1)
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        kept = batch["kept"]
        found, target = model(batch["x"], batch["token"]).float()[kept], batch["target"][kept]
        self.r2.update(found, target)
        error = found - target
        return 0.05 * error.square().sum(), {"absolute": (error.abs().sum(), len(error)), "r2": self.r2}

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.times, self.last = int(state["times"]), int(state["last"])


_STEPS = {
    "mean": Mean,
    "weighted": Weighted,
    "drawn": Drawn,
    "counted": Counted,
    "whole": Whole,
    "rows": Rows,
    "unfrozen": partial(Changed, frozen=True),
    "frozen": partial(Changed, frozen=False),
    "closure": Twice,
}


def subject(task, model, fault, folder, step="sum", parallel="none"):
    """The task of a case; `parallel` as in its present start."""
    if step != "sum":
        made = _STEPS[step](model, fault, folder)
        made.parallel = parallel
        return made
    kinds = {"own": Own, "adapters": Adapted, "plateau": Evaluated, "hooked": Hooked, "stream": Streamed}
    kinds["quantized"] = Quantized
    made = kinds.get(task, Subject)(model, fault, folder)
    made.kind, made.parallel = task, parallel
    return made
