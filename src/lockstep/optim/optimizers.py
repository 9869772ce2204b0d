"""The optimizer, and the one rule that says which parameters decay.

optimizer = adamw(model, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
optimizer = make_optimizer(model, config)           # what --optim.name and the section `optim` say
"""

from typing import Any

import torch
from torch import nn

from lockstep.config.config import Config
from lockstep.errors import ConfigError

__all__ = ["adamw", "groups", "make_optimizer", "sgd"]

_FUSED = {"cpu", "cuda"}  # device types whose fused AdamW every supported torch has


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of `--optim.name` with the numbers of `config`, none of which is left to "auto" any more.

    Raises:
        ConfigError: nothing is trainable.
    """
    optim = config.optim
    decay: dict[str, Any] = {"weight_decay": optim.weight_decay, "decay_embeddings": optim.decay_embeddings}
    if optim.name == "sgd":
        return sgd(model, lr=config.lr, momentum=optim.momentum, nesterov=optim.nesterov, **decay)
    return adamw(
        model,
        lr=config.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=False if config.exact else None,
        **decay,
    )


def groups(model: nn.Module, weight_decay: float, decay_embeddings: bool = False) -> list[dict[str, Any]]:
    """The model's trainable parameters in at most two groups, those that decay first; an empty group is left out.

    Biases, norms, every parameter of fewer than two dimensions, and embeddings do not decay. A head that is tied to
    an embedding is that embedding. Parameters with `requires_grad` False are in no group. The order is that of
    `named_parameters()`, so it is the same for the same model on every rank and in every run.

    Args:
        model: before it is wrapped by an engine, so that names are the plain ones.
        weight_decay: that of the group that decays.
        decay_embeddings: whether embeddings decay too.

    Returns:
        Groups for a torch optimizer: "params" (list of parameters), "names" (their names), "weight_decay".

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    embeddings: set[torch.Tensor] = set() if decay_embeddings else _embeddings(model)
    found: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        if parameter.requires_grad:
            found[parameter.ndim >= 2 and parameter not in embeddings].append((name, parameter))
    if not any(found.values()):
        raise ConfigError(
            "--model-name: no parameter of the model has requires_grad=True; unfreeze what is to be trained"
        )
    return [
        {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "weight_decay": weight_decay if decays else 0.0,
        }
        for decays, members in found.items()
        if members
    ]


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_embeddings: bool = False,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101) over `groups(model)`.

    Args:
        lr: base learning rate; a schedule multiplies it.
        betas, eps: as in torch.optim.AdamW.
        weight_decay, decay_embeddings: see `groups`.
        fused: None takes the fused kernel where every parameter can have it. False takes the unfused arithmetic, whose
            result for an element does not depend on where in a tensor it lies: exact mode needs that.

    Raises:
        ConfigError: nothing is trainable.
        ValueError: a number that torch refuses, such as a negative rate.
    """
    members = groups(model, weight_decay, decay_embeddings)
    if fused is None:
        fused = all(_fusable(parameter) for group in members for parameter in group["params"])
    # foreach has the bits of the plain loop and fewer calls.
    return torch.optim.AdamW(members, lr=lr, betas=betas, eps=eps, fused=fused, foreach=None if fused else True)


def sgd(
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 1e-4,
    decay_embeddings: bool = False,
) -> torch.optim.SGD:
    """SGD with momentum over `groups(model)`, as torch has it: the decay is added to the gradient.

    Never fused: where the device leaves a first step out, torch's fused kernel leaves the momentum unset.

    Args:
        lr: base learning rate; a schedule multiplies it.
        momentum: 0 keeps none.
        nesterov: Nesterov's form (Sutskever et al., ICML 2013); it needs a momentum.
        weight_decay, decay_embeddings: see `groups`.

    Raises:
        ConfigError: nothing is trainable, or `nesterov` without a momentum.
    """
    if nesterov and not momentum:
        raise ConfigError("--optim.nesterov needs a momentum: give --optim.momentum a number above 0")
    members = groups(model, weight_decay, decay_embeddings)
    return torch.optim.SGD(members, lr=lr, momentum=momentum, nesterov=nesterov, foreach=True)


def _fusable(parameter: nn.Parameter) -> bool:
    return parameter.device.type in _FUSED and parameter.is_floating_point()


def _embeddings(model: nn.Module) -> set[torch.Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, kinds)}
