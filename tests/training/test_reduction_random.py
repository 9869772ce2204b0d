"""Of 200 tasks that are sums or means at most two are refused, and none is taken for the other."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from weighed import Written, verdict_of


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(samples, seed, *shape):
    return torch.randn(samples, *shape, generator=generator(seed))


def whole_numbers(samples, seed, most, *shape):
    return torch.randint(0, most, (samples, *shape), generator=generator(seed + 100))


def vectors(samples, seed):
    """x [n, 6], classes [n], values [n, 5]."""
    return numbers(samples, seed, 6), whole_numbers(samples, seed, 5), numbers(samples, seed + 1, 5)


def pictures(samples, seed):
    return numbers(samples, seed, 3, 6, 6), whole_numbers(samples, seed, 5)


def sequences(samples, seed):
    return whole_numbers(samples, seed, 20, 7), numbers(samples, seed, 7, 6)


def labelled_tokens(samples, seed):
    inputs = whole_numbers(samples, seed, 20, 9)
    targets = inputs.clone()
    targets[torch.rand(targets.shape, generator=generator(seed)) < 0.4] = -100
    return inputs, targets


def padded(samples, seed):
    inputs = whole_numbers(samples, seed, 19, 9) + 1
    lengths = whole_numbers(samples, seed, 7) + 2
    inputs[torch.arange(9) >= lengths[:, None]] = 0
    return inputs


def boxes(samples, seed):
    """Up to six boxes a sample, [n, 6, 4], and which of them there are, [n, 6]."""
    present = torch.arange(6) < whole_numbers(samples, seed, 7)[:, None]
    present[0] = True
    return numbers(samples, seed, 6), numbers(samples, seed, 6, 4), present


def dense(outputs=5, dropout=0.0, zero=False, inputs=6):
    torch.manual_seed(1)
    layers = [nn.Linear(inputs, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, outputs)]
    if zero:
        nn.init.zeros_(layers[3].weight)
        nn.init.zeros_(layers[3].bias)
    return nn.Sequential(*layers)


def convolutional(*middle):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class Tokens(nn.Module):
    def __init__(self, batch_first=True, dropout=0.1, recomputed=False, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.batch_first, self.recomputed = batch_first, recomputed
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=batch_first)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x if self.batch_first else x.t())
        h = checkpoint(self.block, h, use_reentrant=False) if self.recomputed else self.block(h)
        return self.head(h if self.batch_first else h.transpose(0, 1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.body = nn.Embedding(20, 8), kind(8, 8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(self.embedding(x))[0][:, -1])


class StochasticDepth(nn.Module):
    """A residual block that some samples skip, by torch's bernoulli_."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        h = self.first(x)
        keep = h.new_empty(len(h), 1).bernoulli_(0.7)
        return self.head(h + keep * torch.tanh(self.block(h)) / 0.7)


def to_class(model, batch, **options):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none", **options)


def to_values(loss, model, batch):
    return loss(model(batch[0]), batch[2], reduction="none").mean(1)


# --- one loss for each sample: its mean and its sum are two tasks


def diffused(model, batch, t, predict="noise", weight=None):
    x = batch[0][:, :2]
    noise, t = torch.randn_like(x), t(len(x))
    out = model(torch.cat([x * (1 - t) + noise * t, t.expand(len(x), 1)], 1))
    target = {"noise": noise, "data": x, "velocity": noise - x}[predict]
    each = ((out - target) ** 2).mean(1)
    return each if weight is None else each * weight(t).flatten()


def guided(model, batch):
    """A condition that is dropped for some samples, as for classifier-free guidance."""
    x, t = batch[0][:, :2], torch.rand(len(batch[0]), 1)
    condition = batch[2][:, :1] * (torch.rand(len(x), 1) > 0.2)
    noise = torch.randn_like(x)
    return ((model(torch.cat([x * t + noise * (1 - t), condition], 1)) - noise) ** 2).mean(1)


def masked(model, batch):
    x = batch[0]
    mask = torch.rand(len(x), 6).argsort(1) < 2
    return (((model(x * ~mask) - x) ** 2) * mask).sum(1) / 2


def variational(model, batch, samples=1, beta=1.0):
    out = model(batch[0])
    mean, log_variance = out[:, :3], out[:, 3:]
    z = mean + torch.randn(samples, *mean.shape) * (0.5 * log_variance).exp()
    error = ((z - batch[0][:, :3]) ** 2).sum(2)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return error.logsumexp(0) + beta * divergence


def penalised(model, batch):
    x = batch[0].clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1], reduction="none") + (slope.norm(dim=1) - 1) ** 2


def ctc(model, batch):
    scores = model(batch[1]).log_softmax(2).transpose(0, 1)
    targets = batch[0][:, :3] % 4 + 1
    lengths = torch.full((len(targets),), 7), torch.full((len(targets),), 3)
    return F.ctc_loss(scores, targets, *lengths, reduction="none", zero_infinity=True)


def adversarial(model, batch):
    x = batch[0].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(to_class(model, (x, batch[1])).sum(), x)
    return to_class(model, ((x + 0.1 * slope.sign()).detach(), batch[1]))


def views(model, batch):
    first, second = model(torch.cat([batch[0], batch[0]])).chunk(2)
    return ((first - second) ** 2).mean(1) + F.cross_entropy(first, batch[1], reduction="none")


def student_teacher(model, batch):
    with torch.no_grad():
        teacher = model(batch[0] + 0.1 * torch.randn_like(batch[0])).softmax(1)
    return F.kl_div(model(batch[0]).log_softmax(1), teacher, reduction="none").sum(1)


def mixture(model, batch):
    centres = model(batch[0]).unsqueeze(2)
    return -(-((centres - batch[2].unsqueeze(1)) ** 2).sum(2)).logsumexp(1)


def policy(model, batch):
    scores = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None]).flatten()
    ratio, advantage = (scores - scores.detach()).exp(), batch[2][:, 0]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * scores.exp() * scores


def preferred(model, batch):
    better, worse = model(batch[0]).mean(1), model(batch[0] + batch[2][:, :1]).mean(1)
    return -F.logsigmoid(better - worse)


def quantised(model, batch):
    h = model(batch[0])
    code = h + (h.round() - h).detach()
    return ((code - batch[2]) ** 2).mean(1) + 0.25 * ((h - h.round().detach()) ** 2).mean(1)


def negatives(model, batch):
    """A contrast with negatives of each sample's own."""
    own = torch.randint(0, 5, (len(batch[0]), 3))
    out = model(batch[0])
    return -out.gather(1, batch[1][:, None]).flatten() + out.gather(1, own).logsumexp(1)


def dice(model, batch):
    p, t = model(batch[0]).sigmoid(), (batch[2] > 0).float()
    return 1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)


def focal(model, batch):
    p = torch.exp(-to_class(model, batch))
    return (1 - p) ** 2 * -p.log()


def survival(model, batch):
    out = model(batch[0])[:, 0]
    return torch.where(batch[1] > 2, out.exp(), out.exp() - out)


def sampled(model, batch):
    action = torch.multinomial(model(batch[0]).softmax(1), 1)
    return -model(batch[0]).log_softmax(1).gather(1, action).flatten() * batch[2][:, 0]


def gumbel(model, batch):
    return ((F.gumbel_softmax(model(batch[0]), 0.7) - batch[2]) ** 2).mean(1)


def uniform_steps(n):
    return torch.rand(n, 1)


def integer_steps(n):
    return torch.randint(0, 1000, (n, 1)) / 1000.0


def normal_steps(n):
    return torch.randn(n, 1).sigmoid()


def drawn_steps(n):
    return torch.multinomial(torch.arange(1.0, 11.0), n, replacement=True)[:, None] / 10.0


def one_step(n):
    return torch.rand(1)


def snr(t):
    return 1 / (t + 0.1)


Model = Callable[[], nn.Module]
small = partial(dense, outputs=2, inputs=3)
VALUES = [F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss]
PREDICTED = ("noise", "data", "velocity")
PER_SAMPLE = {  # name -> model, data, losses [n]
    "dense": (dense, vectors, to_class),
    "dropout": (partial(dense, dropout=0.3), vectors, to_class),
    "zero head": (partial(dense, zero=True), vectors, to_class),
    "smoothing": (dense, vectors, partial(to_class, label_smoothing=0.1)),
    "stochastic depth": (StochasticDepth, vectors, to_class),
    "convolution": (convolutional, pictures, to_class),
    "batch norm": (partial(convolutional, nn.BatchNorm2d(8)), pictures, to_class),
    "group norm": (partial(convolutional, nn.GroupNorm(2, 8), nn.Dropout2d(0.2)), pictures, to_class),
    "instance norm": (partial(convolutional, nn.InstanceNorm2d(8)), pictures, to_class),
    "feature dropout": (partial(convolutional, nn.FeatureAlphaDropout(0.2)), pictures, to_class),
    "gru": (partial(Recurrent, nn.GRU), lambda n, s: (sequences(n, s)[0], whole_numbers(n, s, 5)), to_class),
    "lstm": (partial(Recurrent, nn.LSTM), lambda n, s: (sequences(n, s)[0], whole_numbers(n, s, 5)), to_class),
    **{
        f"{loss.__name__}": (dense, vectors, partial(to_values, loss))
        for loss in VALUES
        if loss is not F.soft_margin_loss
    },
    **{
        f"uniform {p}": (small, vectors, partial(diffused, t=uniform_steps, predict=p))
        for p in ("noise", "data", "velocity")
    },
    "integer steps": (small, vectors, partial(diffused, t=integer_steps)),
    "normal steps": (small, vectors, partial(diffused, t=normal_steps, weight=snr)),
    "drawn steps": (small, vectors, partial(diffused, t=drawn_steps)),
    "one step for all": (small, vectors, partial(diffused, t=one_step)),
    "diffusion, zero head": (partial(small, zero=True), vectors, partial(diffused, t=uniform_steps, weight=snr)),
    "diffusion, dropout": (partial(small, dropout=0.1), vectors, partial(diffused, t=uniform_steps)),
    "guided": (small, vectors, guided),
    "masked": (partial(dense, 6), vectors, masked),
    "masked, zero head": (partial(dense, 6, zero=True), vectors, masked),
    "variational": (partial(dense, 6), vectors, variational),
    "variational, beta": (partial(dense, 6), vectors, partial(variational, beta=4.0)),
    "importance weighted": (partial(dense, 6), vectors, partial(variational, samples=4)),
    "gradient penalty": (dense, vectors, penalised),
    "adversarial": (dense, vectors, adversarial),
    "connectionist": (dense, sequences, ctc),
    "two views": (partial(dense, dropout=0.2), vectors, views),
    "noisy teacher": (dense, vectors, student_teacher),
    "mixture": (dense, vectors, mixture),
    "policy": (dense, vectors, policy),
    "preference": (dense, vectors, preferred),
    "quantised": (dense, vectors, quantised),
    "own negatives": (dense, vectors, negatives),
    "dice of each": (dense, vectors, dice),
    "focal": (dense, vectors, focal),
    "survival": (dense, vectors, survival),
    "sampled action": (dense, vectors, sampled),
    "gumbel": (dense, vectors, gumbel),
}


# --- torch's own reductions

BINARY = lambda batch: (batch[2] > 0).float()  # noqa: E731
SIGNS = lambda batch: batch[2].sign()  # noqa: E731
FUNCTIONAL = {
    "cross_entropy": lambda o, b, **k: F.cross_entropy(o, b[1], **k),
    "cross_entropy, soft": lambda o, b, **k: F.cross_entropy(o, b[2].softmax(1), **k),
    "nll_loss": lambda o, b, **k: F.nll_loss(o.log_softmax(1), b[1], **k),
    "l1_loss": lambda o, b, **k: F.l1_loss(o, b[2], **k),
    "mse_loss": lambda o, b, **k: F.mse_loss(o, b[2], **k),
    "smooth_l1_loss": lambda o, b, **k: F.smooth_l1_loss(o, b[2], **k),
    "huber_loss": lambda o, b, **k: F.huber_loss(o, b[2], **k),
    "binary_cross_entropy": lambda o, b, **k: F.binary_cross_entropy(o.sigmoid(), BINARY(b), **k),
    "with_logits": lambda o, b, **k: F.binary_cross_entropy_with_logits(o, BINARY(b), **k),
    "pos_weight": lambda o, b, **k: F.binary_cross_entropy_with_logits(
        o, BINARY(b), pos_weight=torch.arange(1.0, 6.0), **k
    ),
    "poisson_nll_loss": lambda o, b, **k: F.poisson_nll_loss(o, b[2].abs(), **k),
    "gaussian_nll_loss": lambda o, b, **k: F.gaussian_nll_loss(o, b[2], F.softplus(o), **k),
    "soft_margin_loss": lambda o, b, **k: F.soft_margin_loss(o, SIGNS(b), **k),
    "multi_margin_loss": lambda o, b, **k: F.multi_margin_loss(o, b[1], **k),
    "multilabel_margin_loss": lambda o, b, **k: F.multilabel_margin_loss(
        o, F.pad(b[1][:, None], (0, 4), value=-1), **k
    ),
    "multilabel_soft_margin_loss": lambda o, b, **k: F.multilabel_soft_margin_loss(o, BINARY(b), **k),
    "hinge_embedding_loss": lambda o, b, **k: F.hinge_embedding_loss(o, SIGNS(b), **k),
    "margin_ranking_loss": lambda o, b, **k: F.margin_ranking_loss(o[:, 0], o[:, 1], SIGNS(b)[:, 0], 1.0, **k),
    "cosine_embedding_loss": lambda o, b, **k: F.cosine_embedding_loss(o, b[2], SIGNS(b)[:, 0], **k),
    "triplet_margin_loss": lambda o, b, **k: F.triplet_margin_loss(o, b[2], b[2].flip(1), 9.0, **k),
    "triplet_with_distance": lambda o, b, **k: F.triplet_margin_with_distance_loss(
        o, b[2], b[2].flip(1), margin=9.0, **k
    ),
    "kl_div": lambda o, b, reduction: F.kl_div(
        o.log_softmax(1), b[2].softmax(1), reduction="batchmean" if reduction == "mean" else reduction
    ),
}


def functional(loss, reduction, model, batch):
    return loss(model(batch[0]), batch, reduction=reduction)


# --- items that are not samples


def labels(batch):
    return int((batch[1] >= 0).sum())


def embedded():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.2), nn.Linear(8, 20))


def token_loss(reduction, model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def padded_loss(reduction, model, batch):
    batch = batch[:, : int((batch > 0).sum(1).max())]  # as a collate pads to the longest
    each = F.cross_entropy(model(batch).transpose(1, 2), batch, ignore_index=0, reduction="sum")
    return each / (batch > 0).sum() if reduction == "mean" else each


def pads(batch):
    return int((batch > 0).sum())


def detected(reduction, model, batch):
    x, targets, present = batch
    error = (F.smooth_l1_loss(model(x).view(-1, 6, 4), targets, reduction="none").sum(2) * present).sum()
    return error / present.sum() if reduction == "mean" else error


def found(batch):
    return int(batch[2].sum())


WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.3, 10.0])


def weighted(reduction, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS, reduction=reduction)


COUNTED = {  # name -> model, data, loss, count
    "tokens": (Tokens, labelled_tokens, token_loss, labels),
    "tokens without dropout": (partial(Tokens, dropout=0.0), labelled_tokens, token_loss, labels),
    "tokens, sequence first": (partial(Tokens, batch_first=False), labelled_tokens, token_loss, labels),
    "tokens, recomputed": (partial(Tokens, recomputed=True), labelled_tokens, token_loss, labels),
    "tokens, tied": (partial(Tokens, tied=True), labelled_tokens, token_loss, labels),
    "padded": (
        lambda: nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.2), nn.Linear(8, 20)),
        padded,
        padded_loss,
        pads,
    ),
    "boxes": (partial(dense, 24), boxes, detected, found),
    "boxes, dropout": (partial(dense, 24, 0.2), boxes, detected, found),
    "weights": (dense, vectors, weighted, lambda batch: WEIGHTS[batch[1]].sum()),
    "weights, zero head": (partial(dense, zero=True), vectors, weighted, lambda batch: WEIGHTS[batch[1]].sum()),
}


def tasks():
    """Yield (name, task, data, what it is)."""
    for reduction in ("mean", "sum"):
        for name, (model, make, each) in PER_SAMPLE.items():
            loss = lambda model, batch, each=each, reduction=reduction: getattr(each(model, batch), reduction)()  # noqa: E731
            yield f"{name}, {reduction}", Written(model(), loss), make, reduction
        for name, loss in FUNCTIONAL.items():
            for dropout in (0.0, 0.3):
                task = Written(dense(dropout=dropout), partial(functional, loss, reduction))
                yield f"{name}, {reduction}, dropout {dropout}", task, vectors, reduction
        for name, (model, make, loss, count) in COUNTED.items():
            yield f"{name}, {reduction}", Written(model(), partial(loss, reduction), count), make, reduction


def test_sums_and_means_are_shown_and_not_confused():
    refused, confused, tried = [], [], 0
    for name, task, make, right in tasks():
        kind = verdict_of(task, make, 8, places=(3, 4)).kind
        tried += 1
        if kind in ("neither", "unknown", "not finite"):
            refused.append((name, kind))
        elif kind != right:
            confused.append((name, kind))
    assert tried >= 200
    assert confused == []
    assert len(refused) <= 2, refused
