"""Gradients show whether a loss is a sum or a mean over its items, and the proof leaves no trace."""

import random

import numpy as np
import pytest
import torch
from ranks import run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from weighed import Restoring, Written, halved, trial_of, verdict_of

from lockstep.training.trial.evidence import cut_rows, sketch, weigh
from lockstep.training.trial.weight_moves import move_weights
from lockstep.transforms.precision import autocast

WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.3, 10.0])


def labelled(samples, seed, ignored=0.0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(0, 5, (samples,), generator=generator)
    if ignored:
        y[torch.rand(samples, generator=generator) < ignored] = -100
    return x, y


def partly_labelled(samples, seed):
    return labelled(samples, seed, 0.4)


def tokens(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 20, (samples, 9), generator=generator)
    targets = inputs.clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.4] = -100
    return inputs, targets


def network(zero=False, dropout=0.0, outputs=5, inputs=6):
    torch.manual_seed(7)
    layers = [nn.Linear(inputs, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, outputs)]
    if zero:
        nn.init.zeros_(layers[3].weight)
        nn.init.zeros_(layers[3].bias)
    return nn.Sequential(*layers)


class Routed(nn.Module):
    """A router whose balance loss is of the batch, in training alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.router, self.head = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x):
        shares = self.router(x).softmax(1)
        return self.head(shares), (shares.mean(0) ** 2).sum() if self.training else shares.sum() * 0


class BatchDeviation(nn.Module):
    """A feature that is the deviation over the batch, in training alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body, self.head = nn.Linear(6, 12), nn.Linear(13, 5)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        deviation = h.std(0).mean() if self.training else h.sum() * 0
        return self.head(torch.cat([h, deviation.expand(len(h), 1)], 1))


class Language(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(7)
        self.reentrant, self.embedding = reentrant, nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        h = self.embedding(x)
        h = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.head(h)


class Counting:
    """A loss that warms up by the number of its calls, and keeps a queue."""

    def __init__(self):
        self.calls, self.queue = 0, ()

    def __call__(self, model, batch):
        self.calls += 1
        self.queue += (batch[0].mean(),)
        return classes(model, batch) * min(1, 0.1 * self.calls)


def classes(model, batch, **options):
    return F.cross_entropy(model(batch[0]), batch[1], **options)


def weighted(model, batch):
    return classes(model, batch, weight=WEIGHTS)


def hard(model, batch):
    losses = classes(model, batch, reduction="none")
    return losses.topk(max(1, len(losses) // 3)).values.mean() if model.training else losses.mean()


def contrastive(z):
    z = F.normalize(z, dim=1)
    scores = z @ z.T / 0.5 - 1e9 * torch.eye(len(z))
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def info_nce(model, batch):
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.roll(1, 1).T / 0.5, torch.arange(len(z)))


def noisy(x, share=0.1):
    return x + share * torch.randn_like(x)


def diffusion(model, batch):
    x = batch[0][:, :2]
    t, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(model(torch.cat([x * (1 - t) + noise * t, t], 1)), noise)


def integer_steps(model, batch):
    x = batch[0][:, :2]
    t, noise = torch.randint(0, 1000, (len(x),))[:, None] / 1000.0, torch.randn_like(x)
    return F.mse_loss(model(torch.cat([x * (1 - t) + noise * t, t], 1)), noise)


def masked(model, batch):
    x = batch[0]
    mask = torch.rand_like(x) < 0.3
    return (((model(x * ~mask) - x) ** 2) * mask).sum() / mask.sum()


def masked_alike(model, batch):
    x = batch[0]
    mask = torch.rand(len(x), 6).argsort(1) < 2
    return (((model(x * ~mask) - x) ** 2) * mask).sum() / mask.sum()


def variational(model, batch):
    out = model(batch[0])
    mean, log_variance = out[:, :3], out[:, 3:]
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return F.mse_loss(z, batch[0][:, :3], reduction="sum") + divergence


def variance(model, batch):
    z, w = model(noisy(batch[0])), model(noisy(batch[0]))
    return F.mse_loss(z, w) * 25 + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()


def focal(model, batch):
    y = torch.where(batch[1] > 2, batch[1], 0)
    target, out = F.one_hot(y, 5).float(), model(batch[0])
    p = torch.sigmoid(out)
    factor = (target * (1 - p) + (1 - target) * p) ** 2
    losses = F.binary_cross_entropy_with_logits(out, target, reduction="none") * factor
    return losses.sum() / (y > 0).sum().clamp(min=1)


def language(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def two_views(model, batch):
    """A mean over samples of two noisy views that go through the model as one batch."""
    first, second = model(torch.cat([batch[0], batch[0]])).chunk(2)
    return F.mse_loss(first, second) + F.cross_entropy(first, batch[1])


def by_numpy(model, batch):
    noise = torch.from_numpy(np.random.randn(*batch[0].shape)).float()
    return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])


RNG = np.random.default_rng(3)


def by_a_generator(model, batch):
    return F.cross_entropy(model(batch[0] + torch.from_numpy(RNG.normal(size=batch[0].shape)).float()), batch[1])


def by_a_coin(model, batch):
    return classes(model, batch) * (2 if random.random() < 0.5 else 1)


def mixed_up(model, batch):
    order = torch.randperm(len(batch[0]))
    out = model(0.7 * batch[0] + 0.3 * batch[0][order])
    return 0.7 * F.cross_entropy(out, batch[1]) + 0.3 * F.cross_entropy(out, batch[1][order])


def positives(batch):
    return (batch[1] > 2).sum()


def labels(batch):
    return (batch[1] >= 0).sum()


def normalised():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))


CASES = [  # name, model, loss, data, count, what it is
    ("cross entropy", network, classes, labelled, None, "mean"),
    ("sum", network, lambda m, b: classes(m, b, reduction="sum"), labelled, None, "sum"),
    ("dropout", lambda: network(dropout=0.3), classes, labelled, None, "mean"),
    ("dropout, zero head", lambda: network(True, 0.3), classes, labelled, None, "mean"),
    ("label smoothing", network, lambda m, b: classes(m, b, label_smoothing=0.1), labelled, None, "mean"),
    ("class weights", network, lambda m, b: classes(m, b, weight=WEIGHTS), labelled, None, "neither"),
    (
        "class weights, counted",
        network,
        lambda m, b: classes(m, b, weight=WEIGHTS),
        labelled,
        lambda b: WEIGHTS[b[1]].sum(),
        "mean",
    ),
    (
        "class weights, zero head",
        lambda: network(True),
        lambda m, b: classes(m, b, weight=WEIGHTS),
        labelled,
        None,
        "neither",
    ),
    ("ignored labels", network, classes, partly_labelled, None, "neither"),
    ("ignored labels, zero head", lambda: network(True), classes, partly_labelled, None, "neither"),
    ("ignored labels, counted", lambda: network(True), classes, partly_labelled, labels, "mean"),
    ("offset", network, lambda m, b: classes(m, b, weight=WEIGHTS) + 1000.0, labelled, None, "neither"),
    (
        "top k, zero head",
        lambda: network(True),
        lambda m, b: classes(m, b, reduction="none").topk(max(1, len(b[0]) // 2)).values.mean(),
        labelled,
        None,
        "neither",
    ),
    ("in-batch negatives", network, info_nce, labelled, None, "neither"),
    (
        "router in training",
        Routed,
        lambda m, b: (lambda out: F.cross_entropy(out[0], b[1]) + out[1])(m(b[0])),
        labelled,
        None,
        "neither",
    ),
    ("batch deviation in training", BatchDeviation, classes, labelled, None, "neither"),
    ("hard mining in training", network, hard, labelled, None, "neither"),
    ("diffusion", lambda: network(outputs=2, inputs=3), diffusion, labelled, None, "mean"),
    ("diffusion, zero head", lambda: network(True, outputs=2, inputs=3), diffusion, labelled, None, "mean"),
    ("integer steps, zero head", lambda: network(True, outputs=2, inputs=3), integer_steps, labelled, None, "mean"),
    (
        "noisy contrast",
        network,
        lambda m, b: contrastive(m(torch.cat([noisy(b[0]), noisy(b[0])]))),
        labelled,
        None,
        "neither",
    ),
    ("any number masked", lambda: network(outputs=6), masked, labelled, None, "neither"),
    ("a fixed number masked", lambda: network(outputs=6), masked_alike, labelled, None, "mean"),
    ("variational", lambda: nn.Linear(6, 6), variational, labelled, None, "sum"),
    ("variance over the batch", network, variance, labelled, None, "neither"),
    (
        "class weights, noise",
        network,
        lambda m, b: F.cross_entropy(m(noisy(b[0], 0.05)), b[1], weight=WEIGHTS),
        labelled,
        None,
        "neither",
    ),
    ("focal by positives", network, focal, labelled, None, "neither"),
    ("focal, counted", network, focal, labelled, positives, "mean or neither"),
    ("language model", Language, language, tokens, None, "neither"),
    ("language model, counted", Language, language, tokens, labels, "mean"),
    ("checkpointed", lambda: Language(False), language, tokens, labels, "mean"),
    ("checkpointed, reentrant", lambda: Language(True), language, tokens, labels, "mean"),
    ("batch norm", normalised, classes, labelled, None, "mean"),
    ("numpy's noise", network, by_numpy, labelled, None, "unknown"),
    ("noise of an own generator of numpy", network, by_a_generator, labelled, None, "unknown"),
    ("one coin of Python's", network, by_a_coin, labelled, None, "mean"),
    ("a permutation of the batch", network, mixed_up, labelled, None, "unknown"),
    ("two views", lambda: network(dropout=0.3), two_views, labelled, None, "mean"),
    ("1e30", network, lambda m, b: classes(m, b) * 1e30, labelled, None, "mean"),
    ("1e-30", network, lambda m, b: classes(m, b) * 1e-30, labelled, None, "mean"),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_what_a_loss_is(case):
    _, model, loss, make, count, right = case
    task = Written(model(), loss, count)
    before = [p.clone() for p in task.module.parameters()]
    buffers = [b.clone() for b in task.module.buffers()]
    for samples in (4, 8, 32):
        verdict = verdict_of(task, make, samples)
        assert verdict.kind in right, (samples, verdict)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, task.module.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, task.module.buffers(), strict=True))


def test_a_loss_with_a_memory_is_what_each_call_is():
    loss = Counting()
    for samples in (4, 8, 32):
        assert verdict_of(Written(network(), loss), labelled, samples, restoring=Restoring(loss)).kind == "mean"
    assert (loss.calls, loss.queue) == (0, ())


def test_halves_without_items():
    whole = labelled(8, 3)
    whole[1][4:] = -100  # the second half's loss is 0 / 0
    task = Written(network(), classes, labels)
    assert weigh(trial_of(task), [halved(task, whole, 8)]).kind == "unknown"
    sure = halved(task, labelled(8, 4), 8)
    assert weigh(trial_of(task), [halved(task, whole, 8), sure]).kind == "mean"
    uncounted = Written(network(), classes)
    assert weigh(trial_of(uncounted), [halved(uncounted, whole, 8), sure]).kind == "neither"


def test_losses_that_show_nothing():
    for loss, kind, words in (
        (lambda m, b: classes(m, b) * 0, "unknown", "zero"),
        (lambda m, b: classes(m, b) * torch.inf, "not finite", "not finite"),
        (lambda m, b: classes(m, b).detach(), "unknown", "graph"),
        (lambda m, b: 1 / 0, "unknown", "ZeroDivisionError"),
    ):
        verdict = verdict_of(Written(network(), loss), labelled, 8)
        assert verdict.kind == kind
        assert words in verdict.evidence
    assert weigh(trial_of(Written(network(), classes)), []).kind == "unknown"


def test_weights_that_cannot_be_moved_are_no_error_of_the_run():
    model = network()
    model[0].bias = nn.Parameter(torch.ones(1).expand(12))
    verdict = verdict_of(Written(model, classes), labelled, 8)
    assert verdict.kind == "unknown"
    assert "RuntimeError" in verdict.evidence


def test_loss_that_needs_a_batch_is_shown_by_those_that_have_one():
    def loss(model, batch):
        assert len(batch[0]) >= 8
        return classes(model, batch)

    task = Written(network(), loss)
    verdict = weigh(trial_of(task), [halved(task, labelled(n, 3), n) for n in (16, 4, 4)])
    assert (verdict.kind, verdict.failed) == ("mean", 2)


def test_a_mean_over_samples_beside_a_count_of_others_is_named():
    def loss(model, batch):
        kept = batch[1] >= 0
        each = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none").view(kept.shape)
        return (each.sum(1) / kept.sum(1).clamp(min=1)).mean()

    verdict = verdict_of(Written(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), loss, labels), tokens, 8)
    assert (verdict.kind, verdict.by_samples) == ("neither", True)


def test_padding_to_the_longest_of_a_batch_leaves_dropout_exact():
    """The halves are shorter than the whole; the places that they have are dropped alike."""

    def make(samples, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (samples,), generator=generator)
        lengths[-1] = 9
        x = torch.randint(1, 20, (samples, 9), generator=generator)
        x[torch.arange(9) >= lengths[:, None]] = 0
        return x

    def loss(model, batch):
        batch = batch[:, : int((batch > 0).sum(1).max())]
        each = F.cross_entropy(model(batch).transpose(1, 2), batch, reduction="none") * (batch > 0)
        return each.sum() / (batch > 0).sum()

    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Dropout(0.2), nn.Linear(16, 20))
    assert verdict_of(Written(model, loss, lambda b: (b > 0).sum()), make, 8).kind == "mean"


def test_the_proof_leaves_no_trace():
    model = normalised()
    foreign = torch.ones(5, requires_grad=True)
    foreign.grad = torch.full((5,), 3.0)

    def loss(model, batch):
        return F.cross_entropy(model(noisy(batch[0])) * foreign, batch[1])

    task = Written(model, loss)
    trial = trial_of(task)
    model[0].eval()
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    versions = [p._version for p in model.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    place = halved(task, labelled(8, 3), 8)
    assert weigh(trial, [place]).kind == "mean"
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(foreign.grad, torch.full((5,), 3.0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert [module.training for module in model] == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_moved_weights_come_back_bit_for_bit(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(300, 300), torch.zeros(7), torch.ones(9), torch.randn(6, 4).t(), torch.zeros(3) * -1.0]
    tensors = [each.to(dtype) for each in tensors]
    before = [each.clone() for each in tensors]
    with move_weights(tensors, 0):
        for now, then in zip(tensors, before, strict=True):
            change = (now.double() - then.double()).abs()
            assert change.max() > 0
            assert (change <= 0.02 * then.abs().double() + 0.06 * (then == 0) + 2e-6).all()
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(tensors, before, strict=True))
    others = [torch.arange(4), torch.ones((), dtype=dtype), torch.ones(0)]
    with move_weights(others, 0):
        assert torch.equal(others[0], torch.arange(4))
    assert others[1] == 1


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_complex_weights_move_too():
    weights = torch.randn(8, dtype=torch.complex64)
    before = weights.clone()
    with move_weights([weights], 0):
        assert not torch.equal(weights, before)
    assert torch.equal(weights, before)


def test_a_sketch_is_linear_and_has_the_norm():
    torch.manual_seed(0)
    for shape in ((5,), (64, 64), (4093, 8), (1000, 500)):
        a, b = torch.randn(shape), torch.randn(shape[:1] + (1,) * (len(shape) - 1)) * torch.ones(shape)
        torch.testing.assert_close(sketch(a + 2 * b, a), sketch(a, a) + 2 * sketch(b, a), rtol=1e-4, atol=1e-3)
        for each in (a, b):
            assert sketch(each, each).norm() == pytest.approx(float(each.norm()), rel=0.3)
    assert not sketch(None, torch.ones(3)).any()


def test_weights_of_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model = network().to(dtype)

        def make(samples, seed, dtype=dtype):
            x, y = labelled(samples, seed)
            return x.to(dtype), y

        assert verdict_of(Written(model, classes), make, 8).kind == "mean"
        assert verdict_of(Written(model, lambda m, b: classes(m, b, reduction="sum")), make, 8).kind == "sum"
        assert verdict_of(Written(model, info_nce), make, 8).kind == "neither"


def test_a_loss_that_relies_on_autocast_is_tried_with_it():
    for loss, right in ((classes, "mean"), (info_nce, "neither")):
        model = network()
        task = Written(autocast(model, torch.bfloat16, "cpu"), lambda m, b, loss=loss: loss(m, (b[0].bfloat16(), b[1])))
        assert verdict_of(task, labelled, 8, precision="bf16").kind == right
        assert verdict_of(task, labelled, 8, precision="float32").kind == "unknown"


def test_weights_that_others_are_computed_from_and_frozen_ones():
    model = network()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[3])
    model[0].bias.requires_grad_(False)
    assert verdict_of(Written(model, classes), labelled, 8).kind == "mean"


def test_a_collated_batch_is_cut_by_rows():
    task = Written(network(), classes, lambda b: len(b["x"]))
    whole = halved(task, {"x": torch.arange(8), "y": [torch.arange(16), np.arange(8)], "names": [*"abcdefgh"]}, 8).whole
    first, second = cut_rows(whole, (3, 5), task)
    assert first.held["x"].tolist() == [0, 1, 2]
    assert second.held["y"][0].tolist() == [*range(6, 16)]
    assert second.held["y"][1].tolist() == [*range(3, 8)]
    assert second.held["names"] == [*"defgh"]
    assert (first.items, second.items) == (3, 5)
    for batch in ({"x": torch.arange(7)}, {"x": torch.tensor(1)}, {"x": "a"}):
        whole.held = batch
        assert cut_rows(whole, (3, 5), task) is None


def of_ranks(world, name, exact):
    """Verdicts on two ranks, whose data and items differ."""
    found = {}
    torch.manual_seed(7)
    for title, loss, count in (
        ("mean", classes, None),
        ("sum", lambda m, b: classes(m, b, reduction="sum"), None),
        ("weights", lambda m, b: classes(m, b, weight=WEIGHTS), None),
        ("ignored", classes, None),
        ("ignored, counted", classes, labels),
    ):
        task = Written(network(dropout=0.2), loss, count)
        trial = trial_of(task, world, name=name)
        make = partly_labelled if "ignored" in title else labelled
        before = [p.full_tensor().clone() if hasattr(p, "full_tensor") else p.clone() for p in trial.model.parameters()]
        places = [halved(task, make(8, 10 * world.rank + place), 8) for place in (3, 4, 5)]
        found[title] = weigh(trial, places).kind
        after = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trial.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in trial.model.parameters())
    return found


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_ranks_find_the_same(name):
    wanted = {"mean": "mean", "sum": "sum", "weights": "neither", "ignored": "neither", "ignored, counted": "mean"}
    assert run(of_ranks, 2, name, False) == [wanted, wanted]
