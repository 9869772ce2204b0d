"""Optimizers that evaluate the loss several times a step, as people write them, and small tasks for them."""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data.sampler import Sequential

BATCH = 12


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., arXiv 2010.01412) around another optimizer.

    Args:
        calls: how often its step calls the closure: once, after the ascent, or once before it too.
        quiet: it writes parameters through `.data`, which torch's count of writes does not know.
    """

    def __init__(self, params, *, rho=0.05, lr=0.1, momentum=0.9, calls=1, quiet=False):
        super().__init__(params, {"rho": rho, "lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=momentum)
        self.calls, self.quiet, self.steps = calls, quiet, 0

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sam needs a closure"
        self.steps += 1
        if self.calls == 2:
            with torch.enable_grad():
                closure()
        held = [(group["rho"], p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in held]).norm()
        for rho, p in held:
            self.state[p]["before"] = p.data.clone()
            if self.quiet:
                p.data.add_(p.grad, alpha=float(rho / norm))
            else:
                p.add_(p.grad, alpha=float(rho / norm))
        with torch.enable_grad():
            closure()
        for _, p in held:
            p.data = self.state[p]["before"]
        self.inner.step()


def lbfgs(params, **settings):
    return torch.optim.LBFGS(params, **{"lr": 0.1, "max_iter": 4, "history_size": 3} | settings)


def wolfe(params):
    return lbfgs(params, lr=1.0, line_search_fn="strong_wolfe")


class Polite(torch.optim.SGD):
    """Calls its closure once, as torch's own do where they are given one."""

    seen = ()

    def step(self, closure=None):
        self.seen = (*self.seen, super().step(closure))


OPTIMIZERS = {
    "sam": lambda params: Sam(params),
    "sam-twice": lambda params: Sam(params, calls=2),
    "sam-quiet": lambda params: Sam(params, quiet=True),
    "lbfgs": lbfgs,
    "wolfe": wolfe,
    "polite": lambda params: Polite(params, lr=0.1),
}


class Rows(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self, count):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], (self.x[index, 0] > 0).long() + 2 * (self.x[index, 1] > 0).long()


class Classes(lockstep.Task):
    """A summed loss of a small network, with what else a step may have."""

    reduction = "sum"

    def __init__(self, optimizer="sam", dropout=0.0, norm=False, samples=4 * BATCH):
        self.name, self.dropout, self.norm, self.samples = optimizer, dropout, norm, samples

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            middle = nn.BatchNorm1d(10) if self.norm else nn.Identity()
            return nn.Sequential(
                nn.Linear(6, 10), middle, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(10, 4)
            ).double()

    def dataset(self, split):
        return Rows(self.samples) if split == "train" else None

    def order(self, samples, seed):
        return Sequential(samples)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def optimizer(self, model, config):
        return OPTIMIZERS[self.name](model.parameters())


class Penalised(Classes):
    """An L1 penalty on the weights, once a step."""

    def penalty(self, model):
        return 0.01 * sum(p.abs().sum() for p in model.parameters())


def oracle(task, steps, clip=0.0):
    """(losses, parameters, optimizer) of the task in plain PyTorch: one graph over each step's samples."""
    model, data = task.model(), task.dataset("train")
    optimizer, losses = OPTIMIZERS[task.name](model.parameters()), []
    for step in range(steps):
        batch = task.collate([data[place % len(data)] for place in range(step * BATCH, (step + 1) * BATCH)])

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = task.loss(model, batch) / BATCH
            if isinstance(task, Penalised):
                loss = loss + task.penalty(model)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        losses.append(closure().item())
        optimizer.step(closure)
    return losses, {name: p.detach() for name, p in model.named_parameters()}, optimizer
