"""Build the optimizer that the configuration names, over the groups of `optim.groups`.

optimizer = adamw(model, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
optimizer = make_optimizer(model, config)           # as set by --optim.name and the section `optim`

`Several` combines several optimizers into one, for tasks that step their own.
"""

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.optim.groups import NO_RULES, Rules, groups, parse
from lockstep.optim.muon import MuonAdamW, hidden_matrices
from lockstep.tensors import is_dtensor

__all__ = [
    "Several",
    "adamw",
    "make_optimizer",
    "rules_of",
]


@final
class Several(Optimizer):
    """An optimizer made of several optimizers.

    Attributes:
        members: the optimizers, in order.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        """Combine the members. Raises ConfigError if two of them share a parameter."""
        self.members = list(members)
        # Bound now, since other code may later replace the members' `step`.
        self._steps = [_own_step(member) for member in self.members]
        owned: set[Tensor] = set()
        for group in (group for member in self.members for group in member.param_groups):
            if any(parameter in owned for parameter in group["params"]):
                raise ConfigError(
                    "two of the optimizers share a parameter, so its state would be ambiguous; give each parameter to "
                    "one optimizer"
                )
            owned.update(group["params"])
        super().__init__([group for member in self.members for group in member.param_groups], {})
        # mypy expects a dict; this mapping delegates to the members' states.
        self.state = _States(self.members)  # type: ignore[assignment]

    # mypy: the parent returns a loss, and this method has none.
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for index in range(len(self.members)):
            self.step_one(index)

    def step_one(self, place: int) -> None:
        """Step one member."""
        self._steps[place]()


def _own_step(optimizer: Optimizer) -> Callable[[], Any]:
    return optimizer.step


class _States(MutableMapping[Any, Any]):
    """The states of all members, by parameter."""

    def __init__(self, members: list[Optimizer]) -> None:
        self._members = members

    def __getitem__(self, parameter: Any) -> Any:
        for member in self._members:
            if parameter in member.state:
                return member.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Any, value: Any) -> None:
        owner = self._members[0]
        for m in self._members:
            if any(parameter is p for group in m.param_groups for p in group["params"]):
                owner = m
                break
        owner.state[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        for member in self._members:
            member.state.pop(parameter, None)

    def __iter__(self) -> Iterator[Any]:
        return (parameter for member in self._members for parameter in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


# Device types whose fused AdamW every supported torch has.
_FUSED = {"cpu", "cuda"}


def rules_of(config: Config, blocks: Sequence[nn.Module] = (), elsewhere: Collection[str] = ()) -> Rules:
    """Return the rules of `--optim.groups` and `--optim.layer-decay`.

    Raises:
        ConfigError: a rule is malformed, or needs another optimizer.
    """
    rules = parse(config.optim.groups)
    assigned = [rule for rule in rules if rule.by]
    if assigned and config.optim.name != "muon":
        raise ConfigError(
            f"--optim.groups '{assigned[0].pattern}: {assigned[0].by}' needs --optim.name muon, not "
            f"{config.optim.name}; remove '{assigned[0].by}'"
        )
    return Rules(rules, config.optim.layer_decay, blocks, elsewhere)


def make_optimizer(
    model: nn.Module, config: Config, blocks: Sequence[nn.Module] = (), elsewhere: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of `--optim.name` from `config`, in which no number is "auto" any more.

    Args:
        model: before an engine wraps it.
        config: the run's.
        blocks: the model's layers, in forward order.
        elsewhere: names of parameters that other stages of a pipeline have.

    Raises:
        ConfigError: nothing is trainable, or a rule for groups does not fit the model.
    """
    optim = config.optim
    decay: dict[str, Any] = {
        "weight_decay": optim.weight_decay,
        "decay_embeddings": optim.decay_embeddings,
        "rules": rules_of(config, blocks, elsewhere),
    }
    if optim.name == "sgd":
        # Exact mode needs arithmetic that does not depend on an element's place in a tensor.
        decay["fused"] = False if config.exact else None
        return sgd(model, lr=config.lr, momentum=optim.momentum, nesterov=optim.nesterov, **decay)
    adams: dict[str, Any] = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    adams |= {"fused": False if config.exact else None, **decay}
    if optim.name == "muon":
        return muon(
            model,
            lr=config.lr,
            muon_lr=optim.muon_lr or config.lr,
            scale=optim.muon_scale,
            momentum=optim.muon_momentum,
            ns_steps=optim.ns_steps,
            **adams,
        )
    return (adam if optim.name == "adam" else adamw)(model, lr=config.lr, **adams)


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_embeddings: bool = False,
    rules: Rules = NO_RULES,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """Build AdamW over `groups(model)`.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.

    Args:
        model: before an engine wraps it.
        lr: base learning rate; a schedule multiplies it.
        betas, eps: as in torch.optim.AdamW.
        weight_decay, decay_embeddings, rules: see `groups`.
        fused: None uses the fused kernel if every parameter supports it. False uses the unfused arithmetic, whose
            result for an element does not depend on its place in a tensor, as exact mode needs.

    Raises:
        ConfigError: nothing is trainable.
        ValueError: a number that torch refuses, such as a negative rate.
    """
    members = groups(model, weight_decay, decay_embeddings, rules=rules, lr=lr)
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return torch.optim.AdamW(members, **settings, **_kernel(members, fused))


def adam(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_embeddings: bool = False,
    rules: Rules = NO_RULES,
    fused: bool | None = None,
) -> torch.optim.Adam:
    """Build Adam over `groups(model)`, with the decay added to the gradient.

    Source: Kingma & Ba, arXiv 1412.6980, as implemented by torch. Arguments and errors as for `adamw`.
    """
    members = groups(model, weight_decay, decay_embeddings, rules=rules, lr=lr)
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return torch.optim.Adam(members, **settings, **_kernel(members, fused))


def _kernel(members: list[dict[str, Any]], fused: bool | None) -> dict[str, Any]:
    if fused is None:
        fused = all(_fusable(parameter) for group in members for parameter in group["params"])
    # torch's foreach implementation has the bits of its plain loop, with fewer calls.
    return {"fused": fused, "foreach": None if fused else True}


def sgd(
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 1e-4,
    decay_embeddings: bool = False,
    rules: Rules = NO_RULES,
    fused: bool | None = None,
) -> torch.optim.SGD:
    """Build SGD with momentum over `groups(model)`, with the decay added to the gradient.

    As implemented by torch.

    Args:
        model: before an engine wraps it.
        lr: base learning rate; a schedule multiplies it.
        momentum: 0 for none.
        nesterov: Nesterov's form (Sutskever et al., ICML 2013); needs a momentum.
        weight_decay, decay_embeddings, rules: see `groups`.
        fused: None uses the fused kernel if every parameter is whole on a CUDA device; then no step waits for the
            device. Use it only with an engine of lockstep: if the device skips the first step, the kernel leaves
            momentum unset.

    Raises:
        ConfigError: nothing is trainable, or `nesterov` without a momentum.
    """
    if nesterov and not momentum:
        raise ConfigError("--optim.nesterov needs a momentum; set --optim.momentum above 0")
    members = groups(model, weight_decay, decay_embeddings, rules=rules, lr=lr)
    settings: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    if fused is None:
        fused = all(p.is_cuda and _fusable(p) and not is_dtensor(p) for group in members for p in group["params"])
    return torch.optim.SGD(members, **settings, **({"fused": True} if fused else {"foreach": True}))


# Names of the scales in torch.
_SCALES = {"match-rms": "match_rms_adamw", "original": "original"}


# PLR0913: the settings of two optimizers.
def muon(  # noqa: PLR0913
    model: nn.Module,
    *,
    lr: float,
    muon_lr: float,
    scale: str = "match-rms",
    momentum: float = 0.95,
    ns_steps: int = 5,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_embeddings: bool = False,
    rules: Rules = NO_RULES,
    fused: bool | None = None,
) -> MuonAdamW:
    """Build Muon for `hidden_matrices(model)` and AdamW for the rest.

    Muon uses Nesterov's momentum; both work over `groups(model)`.

    Args:
        model: before an engine wraps it.
        lr: AdamW's base rate.
        muon_lr: Muon's base rate.
        scale: factor of the rate of a matrix [a, b]. match-rms: 0.2 * sqrt(max(a, b)), which makes an update as large
            as AdamW's usual ones (arXiv 2502.16982, 2.2); original: sqrt(max(1, a / b)), Jordan's.
        momentum: decay of the gradient's running mean.
        ns_steps: Newton-Schulz iterations.
        betas, eps, fused: AdamW's, see `adamw`.
        weight_decay, decay_embeddings, rules: of both, see `groups`.

    Raises:
        ConfigError: nothing is trainable, or the model has no hidden matrix.
    """
    hidden = hidden_matrices(model, rules.blocks, rules)
    members = groups(model, weight_decay, decay_embeddings, rules=rules, lr=lr, separate=hidden, separate_lr=muon_lr)
    muon_groups = []
    for group in members:
        if group["params"][0] in hidden:
            muon_groups.append(group)
    adamw_groups = []
    for group in members:
        if group["params"][0] not in hidden:
            adamw_groups.append(group)
    for group in muon_groups:
        group.setdefault("lr", muon_lr)
        group |= {"muon": True, "momentum": momentum, "nesterov": True, "ns_steps": ns_steps}
        group |= {"adjust_lr_fn": _SCALES[scale]}
    for group in adamw_groups:
        group.setdefault("lr", lr)
        group |= {"muon": False, "betas": betas, "eps": eps, **_kernel(adamw_groups, fused)}
    return MuonAdamW(members)


def _fusable(parameter: nn.Parameter) -> bool:
    return parameter.device.type in _FUSED and parameter.is_floating_point()
