"""Small tasks of many kinds, and the same training in plain PyTorch: one graph over each step, in float64.

    case = Case("weighted", batch=12, micro=4, short=True, optimizer="adam", trained="unfrozen")
    task, wanted = made(case), oracle(case)

`oracle` knows nothing of lockstep: `_WHOLE` says for each kind what the loss of a whole step is.
"""

from typing import NamedTuple

import torch
from closure_tasks import Sam
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data.sampler import Sequential

__all__ = ["CHANGE", "KINDS", "OPTIMIZERS", "TRAINED", "WRONG", "Case", "change", "made", "oracle"]

STEPS, CHANGE = 4, 2  # the trained set changes before step CHANGE, 0-based
SHORT = 5  # samples of a short last step
_WEIGHTS = torch.tensor([5.0, 1.0, 1.0, 0.2], dtype=torch.float64)
_TOKENS = 3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, 0.02),
    "sam": lambda params: Sam(params, lr=0.05),
}
TRAINED = ("fixed", "unfrozen", "frozen")


class Case(NamedTuple):
    """One task and how its steps are cut.

    Attributes:
        micro: 0: as it is by default.
        short: whether the last step has fewer samples.
        trained: what happens to the first layer before step CHANGE.
    """

    kind: str
    batch: int
    micro: int
    short: bool
    optimizer: str
    trained: str

    def __str__(self):
        return "-".join(map(str, self))

    @property
    def samples(self):
        return (STEPS - 1) * self.batch + (SHORT if self.short else self.batch)


class Rows(torch.utils.data.Dataset):
    """Vectors, each with a class and with one to three tokens' classes."""

    draws_random = False

    def __init__(self, samples):
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 6, generator=draw, dtype=torch.float64)
        self.label = torch.randint(4, (samples,), generator=draw)
        self.tokens = torch.randint(4, (samples, _TOKENS), generator=draw)
        kept = torch.arange(_TOKENS) < torch.randint(1, _TOKENS + 1, (samples, 1), generator=draw)
        self.tokens[~kept] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "label": self.label[index], "tokens": self.tokens[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def _moved(x):
    return x + 0.3 * x.roll(1, 1)


def _contrast(a, b, first=0, every=None):
    """The sum over the rows of `a` of the cross entropy against all of `b`."""
    logits = F.normalize(a, dim=1) @ F.normalize(b if every is None else every, dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(first, first + len(a)), reduction="sum")


def _dice(p, label):
    t = F.one_hot(label, 4).to(p.dtype)
    return 1 - (2 * (p * t).sum(0) / (p.sum(0) + t.sum(0))).mean()


def _by_tokens(out):
    """Logits of each token, of a model that has four outputs."""
    return torch.stack([out.roll(place, 1) for place in range(_TOKENS)], 1).flatten(0, 1)


def _size(model):
    return 0.01 * sum(p.abs().sum() for p in model.parameters())


class Made(lockstep.Task):
    """The base of all."""

    def __init__(self, case):
        self.case = case

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = Net().double()
        net.first.requires_grad_(self.case.trained != "unfrozen")
        return net

    def dataset(self, split):
        return Rows(self.case.samples) if split == "train" else None

    def order(self, samples, seed):
        return Sequential(samples)

    def optimizer(self, model, config):
        return OPTIMIZERS[self.case.optimizer](model.parameters())


class Sum(Made):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")


class DeclaredSum(Sum):
    reduction = "sum"


class Mean(Made):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"])


class Tokens(Made):
    def count(self, batch):
        return int((batch["tokens"] >= 0).sum())

    def loss(self, model, batch):
        return F.cross_entropy(_by_tokens(model(batch["x"])), batch["tokens"].flatten())


class Uncounted(Made):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"], _WEIGHTS)


class Weighted(Uncounted):
    def count(self, batch):
        return float(_WEIGHTS[batch["label"]].sum())


class NegativesOfTheBatch(Made):
    def loss(self, model, batch):
        return _contrast(model(batch["x"]), model(_moved(batch["x"]))) / len(batch["x"])


class StepLoss(Made):
    def outputs(self, model, batch):
        return model(batch["x"]), model(_moved(batch["x"]))

    def step_loss(self, outputs):
        return _contrast(*outputs) / len(outputs[0])


class StepLossRows(StepLoss):
    step_loss = lockstep.Task.step_loss

    def step_loss_rows(self, own, whole, first):
        return _contrast(own[0], None, first, whole[1]) / len(whole[1])


class Dice(Made):
    def outputs(self, model, batch):
        return {"p": model(batch["x"]).softmax(1), "label": batch["label"]}

    def step_loss(self, outputs):
        return _dice(**outputs)


class OverlapOfTheBatch(Made):
    def loss(self, model, batch):
        return _dice(model(batch["x"]).softmax(1), batch["label"])


class MicroBatch(OverlapOfTheBatch):
    reduction = "micro-batch"


class SizeInTheSum(Sum):
    def loss(self, model, batch):
        return super().loss(model, batch) + _size(model)


class Penalty(Sum):
    def penalty(self, model):
        return _size(model)


class PenaltyOfAStep(StepLoss):
    penalty = Penalty.penalty


class Slopes(Made):
    """A penalty on the gradient with respect to the input."""

    def loss(self, model, batch):
        x = batch["x"].clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["label"]) + 0.5 * slope.square().sum(1).mean()


class Beside(Mean):
    """A mean, with a number of its own beside it."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss, {"twice": 2 * loss.detach()}


KINDS = {
    "sum": Sum,
    "declared-sum": DeclaredSum,
    "mean": Mean,
    "tokens": Tokens,
    "weighted": Weighted,
    "uncounted": Uncounted,
    "negatives": NegativesOfTheBatch,
    "overlap": OverlapOfTheBatch,
    "micro-batch": MicroBatch,
    "step-loss": StepLoss,
    "rows": StepLossRows,
    "dice": Dice,
    "size-in-sum": SizeInTheSum,
    "penalty": Penalty,
    "penalty-of-step": PenaltyOfAStep,
    "slopes": Slopes,
    "beside": Beside,
}
WRONG = ("uncounted", "negatives", "overlap", "size-in-sum")  # unless a step has one micro-batch


def made(case):
    """The task of a case, as a user writes it."""
    return KINDS[case.kind](case)


def change(model, case, done):
    """What the body of the user's loop does after so many steps."""
    if done == CHANGE and case.trained != "fixed":
        model.first.requires_grad_(case.trained == "unfrozen")


def _mean(model, batch):
    return F.nll_loss(F.log_softmax(model(batch["x"]), 1), batch["label"])


def _sum(model, batch):
    return F.nll_loss(F.log_softmax(model(batch["x"]), 1), batch["label"], reduction="sum")


def _token_mean(model, batch):
    kept = batch["tokens"].flatten() >= 0
    return F.cross_entropy(_by_tokens(model(batch["x"]))[kept], batch["tokens"].flatten()[kept])


def _weighted(model, batch):
    each = F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    weights = _WEIGHTS[batch["label"]]
    return (each * weights).sum() / weights.sum()


def _negatives(model, batch):
    a, b = (F.normalize(model(x), dim=1) for x in (batch["x"], _moved(batch["x"])))
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def _overlap(model, batch):
    return _dice(model(batch["x"]).softmax(1), batch["label"])


def _slopes(model, batch):
    x = batch["x"].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return _mean(model, batch) + 0.5 * slope.square().sum() / len(x)


_WHOLE = {"sum": _sum} | dict.fromkeys(("declared-sum", "mean", "beside"), _mean)
_WHOLE |= dict.fromkeys(("negatives", "step-loss", "rows"), _negatives)
_WHOLE |= dict.fromkeys(("weighted", "uncounted"), _weighted)
_WHOLE |= {"tokens": _token_mean, "dice": _overlap, "overlap": _overlap, "slopes": _slopes}
_WHOLE |= dict.fromkeys(("penalty", "size-in-sum"), lambda model, batch: _sum(model, batch) + _size(model))
_WHOLE |= {"penalty-of-step": lambda model, batch: _negatives(model, batch) + _size(model)}


def _whole(case, model, batch):
    """The loss of a step."""
    if case.kind != "micro-batch":
        return _WHOLE[case.kind](model, batch)
    cut = zip(*(values.split(case.micro or case.batch) for values in batch.values()), strict=True)
    parts = [dict(zip(batch, each, strict=True)) for each in cut]
    return sum(len(part["x"]) * _overlap(model, part) for part in parts) / len(batch["x"])


def oracle(case):
    """(losses, parameters) after all steps."""
    task, data = made(case), Rows(case.samples)
    model = task.model()
    optimizer, losses = OPTIMIZERS[case.optimizer](model.parameters()), []
    for step in range(STEPS):
        change(model, case, step)
        rows = slice(step * case.batch, (step + 1) * case.batch)
        batch = {"x": data.x[rows], "label": data.label[rows], "tokens": data.tokens[rows]}

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = _whole(case, model, batch)
            loss.backward()
            return loss

        losses.append(closure().item())
        optimizer.step(*([closure] if case.optimizer == "sam" else []))
    return losses, [p.detach().clone() for p in model.parameters()]
