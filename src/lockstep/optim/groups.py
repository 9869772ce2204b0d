"""Group parameters by weight decay and learning rate, and freeze some of them.

rules = Rules(parse("head.*: lr=10x; *.bias: decay=0; tokens.*: freeze"), layer_decay=0.8, blocks=blocks)
freeze(model, rules)                        # before an engine takes the model
members = groups(model, weight_decay=0.1, rules=rules, lr=1e-3)     # for a torch optimizer
"""

import difflib
import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import ConfigError

__all__ = [
    "NO_RULES",
    "Rules",
    "embeddings",
    "freeze",
    "groups",
    "match_rules",
    "parse",
]

_FORM = "PATTERN: lr=RATE, decay=NUMBER; or PATTERN: freeze"
_KINDS = ("muon", "adamw")


class GroupRule(NamedTuple):
    """Settings for the parameters whose names match a pattern.

    Attributes:
        pattern: for the whole name, with `*`, `?` and `[...]` as in a shell; a dot is an ordinary character.
        lr: their own rate, or None.
        times: factor of --lr, if `lr` is None.
        decay: their own weight decay, or None.
        frozen: they are not trained.
        by: the part of --optim.name muon that updates them, muon or adamw; "": decided by shape and place.
    """

    pattern: str
    lr: float | None = None
    times: float = 1.0
    decay: float | None = None
    frozen: bool = False
    by: str = ""


class Rules(NamedTuple):
    """Rules for parameter groups; the default is the general rule of decay alone.

    Attributes:
        patterns: the first match of a parameter counts.
        layer_decay: factor of the rate from each layer to the one before it; 1: the same rate in all layers.
        blocks: the model's layers in forward order, for `layer_decay`.
        elsewhere: names of parameters that other stages of a pipeline have; a pattern may match these alone.
    """

    patterns: Sequence[GroupRule] = ()
    layer_decay: float = 1.0
    blocks: Sequence[nn.Module] = ()
    elsewhere: Collection[str] = ()


NO_RULES = Rules()


def parse(text: str) -> list[GroupRule]:
    """Parse `--optim.groups`: `PATTERN: lr=1e-4, decay=0; PATTERN: lr=0.1x; PATTERN: freeze; ...`.

    A pattern may also be assigned to `muon` or `adamw`.

    Raises:
        ConfigError: the text is not of that form.
    """
    rules = []
    for rule_text in filter(None, (rule_text.strip() for rule_text in text.split(";"))):
        pattern, colon, settings = rule_text.partition(":")
        if not (pattern.strip() and colon and settings.strip()):
            raise ConfigError(f"--optim.groups '{rule_text}' is not of the form {_FORM}")
        rule = GroupRule(pattern.strip())
        for setting in settings.split(","):
            rule = rule._replace(**_parse_setting(setting.strip(), rule_text))
        if rule.frozen and rule != GroupRule(rule.pattern, frozen=True):
            raise ConfigError(
                f"--optim.groups '{rule_text}': frozen parameters have no learning rate and no decay; remove either"
            )
        rules.append(rule)
    return rules


def _parse_setting(setting: str, part: str) -> dict[str, Any]:
    name, _, value = (word.strip() for word in setting.partition("="))
    if setting == "freeze":
        return {"frozen": True}
    if setting in _KINDS:
        return {"by": setting}
    if name not in ("lr", "decay"):
        raise ConfigError(
            f"--optim.groups '{part}': '{setting}' is none of lr=RATE, lr=NUMBERx, decay=NUMBER, freeze, muon, adamw"
        )
    times = name == "lr" and value.endswith("x")
    try:
        number = float(value[:-1] if times else value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"--optim.groups '{part}': '{value}' is not a finite number >= 0")
    return {"times" if times else name: number}


def freeze(model: nn.Module, rules: Rules) -> list[str]:
    """Freeze the parameters that the rules name, and return their names.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    chosen = match_rules(model, rules.patterns)
    frozen = []
    for name, rule in chosen.items():
        if rule.frozen:
            frozen.append(name)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def groups(
    model: nn.Module,
    weight_decay: float,
    decay_embeddings: bool = False,
    *,
    rules: Rules = NO_RULES,
    lr: float = 0.0,
    separate: Collection[torch.Tensor] = (),
    separate_lr: float = 0.0,
) -> list[dict[str, Any]]:
    """Group the model's trainable parameters by rate and weight decay.

    Groups with decay under the general rule come first. By that rule biases, norms, all parameters with fewer than two
    dimensions, and embeddings do not decay. A head tied to an embedding is that embedding. Parameters with
    `requires_grad` False are in no group. Without `rules` there are at most two groups. The order is that of
    `named_parameters()`, so it is the same for the same model on every rank and in every run.

    With `rules.layer_decay` d and L layers the rate is multiplied by d ** (L + 1 - k), where k is 0 for what comes
    before the first layer and for embeddings, 1 to L for the layers, L + 1 for what comes after (Clark et al.,
    "ELECTRA", arXiv 2003.10555, appendix A; Bao et al., "BEiT", arXiv 2106.08254). No rate exceeds `lr`.

    Args:
        model: before an engine wraps it, so that names are the plain ones.
        weight_decay: of the parameters that decay.
        decay_embeddings: whether embeddings decay too.
        rules: exceptions to the general rule.
        lr: the base rate; used if a rule changes the rate.
        separate: parameters that share no group with the others, and come after them.
        separate_lr: their base rate.

    Returns:
        Groups for a torch optimizer: "params" (list of parameters), "names" (their names), "weight_decay", and "lr" if
        it is not the base rate.

    Raises:
        ConfigError: the model has no trainable parameter, a pattern matches nothing, or there are no layers for a
            decay.
    """
    undecayed: set[torch.Tensor] = set() if decay_embeddings else embeddings(model)
    chosen = match_rules(model, rules.patterns, rules.elsewhere)
    depths = _depths(model, rules)
    buckets: dict[tuple[bool, bool, float, float], list[tuple[str, nn.Parameter]]] = {}
    # `named_parameters` yields a tied parameter once.
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and parameter not in undecayed
        rule = chosen.get(name, GroupRule(""))
        if rule.decay is None:
            decay = weight_decay if decays else 0.0
        else:
            decay = rule.decay
        base = separate_lr if parameter in separate else lr
        if rule.lr is None:
            rate = base * rule.times * depths.get(name, 1.0)
        else:
            rate = rule.lr
        buckets.setdefault((parameter in separate, not decays, decay, rate), []).append((name, parameter))
    if not buckets:
        raise ConfigError("--model-name: no parameter of the model has requires_grad=True; unfreeze the ones to train")
    param_groups = []
    for (is_separate, _, decay, rate), members in sorted(buckets.items(), key=lambda item: item[0][:2]):
        group: dict[str, Any] = {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "weight_decay": decay,
        }
        # At the base rate a group takes the optimizer's default.
        if rate != (separate_lr if is_separate else lr):
            group["lr"] = rate
        param_groups.append(group)
    return param_groups


def embeddings(model: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the model's embeddings, which includes tied heads."""
    embedding_types = (nn.Embedding, nn.EmbeddingBag)
    weights = set()
    for module in model.modules():
        if isinstance(module, embedding_types):
            weights.add(module.weight)
    return weights


def match_rules(model: nn.Module, rules: Sequence[GroupRule], elsewhere: Collection[str] = ()) -> dict[str, GroupRule]:
    """Map each name, also those `elsewhere`, to its first matching rule.

    Raises ConfigError for a rule without a match.
    """
    names = [*(name for name, _ in model.named_parameters()), *elsewhere] if rules else []
    matches: dict[str, GroupRule] = {}
    for rule in rules:
        matching = []
        for name in names:
            if fnmatchcase(name, rule.pattern):
                matching.append(name)
        fresh = [name for name in matching if name not in matches]
        if not fresh:
            raise ConfigError(_explain_unmatched(rule.pattern, names, matching and matches[matching[0]].pattern))
        matches |= dict.fromkeys(fresh, rule)
    return matches


def _explain_unmatched(pattern: str, names: list[str], earlier: str | list[str]) -> str:
    # An earlier rule matches the same parameters, so this one would never apply.
    if earlier:
        return f"--optim.groups: '{pattern}' has no effect: '{earlier}' before it matches the same; put it first"
    # A misspelt pattern may mean all of a module, such as `blocks.0.*`.
    modules = set()
    for name in names:
        modules.add(f"{name.rpartition('.')[0]}.*")
        modules.add(f"{name.partition('.')[0]}.*")
    close = difflib.get_close_matches(pattern, sorted({*names, *modules}), n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"a name looks like {names[0]}"
    return f"--optim.groups: '{pattern}' matches no parameter; {hint}"


def _depths(model: nn.Module, rules: Rules) -> dict[str, float]:
    """Map each name to its factor of the rate by layer decay; {} without one."""
    if rules.layer_decay == 1.0:
        return {}
    if len(rules.blocks) < 2:
        raise ConfigError(
            "--optim.layer-decay: the model has no list of repeated layers; return them from the task's "
            "`blocks(model)`, or drop the flag"
        )
    layer_of = {parameter: k for k, block in enumerate(rules.blocks, 1) for parameter in block.parameters()}
    tables = embeddings(model)
    last_layer = len(rules.blocks) + 1
    entered = False
    depths = {}
    for name, parameter in model.named_parameters():
        layer = layer_of.get(parameter)
        entered = entered or layer is not None
        if layer is None:
            # Before the first layer: 0. After a layer: the head. Embeddings are 0 wherever they are.
            layer = last_layer if entered and parameter not in tables else 0
        depths[name] = rules.layer_decay ** (last_layer - layer)
    return depths
