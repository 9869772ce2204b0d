"""Muon for hidden matrices and AdamW for the rest, both torch's own, as one optimizer.

    optimizer = MuonAdamW([{"params": matrices, "muon": True, "lr": 1e-3, ...}, {"params": others, "muon": False, ...}])

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is Scalable for LLM
Training", arXiv 2502.16982. The update of a matrix needs the whole of it. Where an engine splits its rows, one rank
brings the rows of the momentum together and computes it, with the same kernels as a single process: the bits are those.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from lockstep.distributed.exchange import gather_rows, scatter_rows, shared_out
from lockstep.errors import ConfigError
from lockstep.optim.groups import Rules, embeddings, matched
from lockstep.tensors import is_dtensor, local_of

__all__ = ["MuonAdamW", "hidden_matrices"]


@final
class MuonAdamW(Optimizer):
    """torch's Muon for groups whose `muon` is True, torch's AdamW for the others.

    The two work on this optimizer's own groups and states, so that whoever holds it sees one optimizer: rates are set
    in its `param_groups`, `state` has "momentum_buffer" for matrices, and "exp_avg", "exp_avg_sq", "step" for the rest.

    Args:
        params: groups, each with `muon` and what else torch's Muon or AdamW takes; what is left out is theirs.

    Raises:
        ValueError: a number that torch refuses, or a parameter for Muon that is no matrix.
    """

    def __init__(self, params: list[dict[str, Any]]) -> None:
        self._parts: list[Optimizer] = []
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also of load_state_dict, which makes new groups
        self._share()

    def _share(self) -> None:
        """Makes torch's two optimizers, over the very dicts that this one has."""
        self._parts = []
        for muon in (True, False):
            own = [group for group in self.param_groups if group["muon"] is muon]
            split = muon and any(is_dtensor(parameter) for group in own for parameter in group["params"])
            if own:
                part: Optimizer = _RowsMuon(own) if split else Muon(own) if muon else AdamW(own)
                part.state = self.state
                self._parts.append(part)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of both. Collective where matrices are split. Returns what `closure` does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


@final
class _RowsMuon(Muon):
    """torch's Muon for matrices whose rows are split over the ranks: DTensors, as FSDP2 has them.

    The momentum is split as the matrix is. For the update each matrix has one rank, chosen by the work that it makes:
    one all-to-all brings it the rows, rounded to bfloat16 as Muon does at first, and one takes the result back.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; `closure` is MuonAdamW's to call. Collective, but for rates of 0, which move no parameter."""
        moved: list[tuple[Tensor, dict[str, Any]]] = []
        updates: list[Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._momentum(parameter, group)
                if group["lr"] != 0.0:
                    moved.append((parameter, group))
                    updates.append(update)
        if moved:
            self._apply(moved, updates)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's rows of what is to be orthogonalised, in bfloat16."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = local_of(parameter.grad), local_of(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(torch.bfloat16, copy=True)

    def _apply(self, moved: list[tuple[Tensor, dict[str, Any]]], updates: list[Tensor]) -> None:
        mesh: Any = moved[0][0].device_mesh  # type: ignore[attr-defined]
        last = mesh.ndim - 1  # the shards' dimension
        shards, rank, where = mesh.get_group(last), mesh.get_local_rank(last), torch.device(mesh.device_type)
        shapes = [tuple(parameter.shape) for parameter, _ in moved]
        owners = shared_out([rows * columns * min(rows, columns) for rows, columns in shapes], mesh.size(last))
        mine = [group for (_, group), owner in zip(moved, owners, strict=True) if owner == rank]
        updates = [update.to(where) for update in updates]
        wholes = [
            _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for whole, group in zip(gather_rows(updates, shapes, owners, shards), mine, strict=True)  # collective
        ]
        turned = scatter_rows(wholes, shapes, owners, updates[0], shards)  # collective
        for (parameter, group), rows in zip(moved, turned, strict=True):
            local, rate = local_of(parameter), group["lr"]
            local.mul_(1 - rate * group["weight_decay"])
            step = _adjust_lr(rate, group["adjust_lr_fn"], parameter.shape)
            local.add_(rows.to(local.device), alpha=-step)


def hidden_matrices(model: nn.Module, blocks: Sequence[nn.Module], rules: Rules) -> set[Tensor]:
    """The trainable matrices of the hidden layers, which Muon is for.

    Those within `blocks`; in a model without such, all but the last, which is its head. Embeddings, and heads that are
    tied to one, are none. What `rules` says of a parameter, `muon` or `adamw`, comes before that.

    Raises:
        ConfigError: there is none, or a rule gives Muon what is no matrix.
    """
    tables, chosen = embeddings(model), matched(model, rules.patterns)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = [p for p in named.values() if p.ndim == 2 and not p.is_complex() and p not in tables]
    inside = {p for block in blocks for p in block.parameters()}
    found: set[Tensor] = {p for p in plain if p in inside} if blocks else set(plain[:-1])
    for name, parameter in named.items():
        by = chosen[name].by if name in chosen else ""
        if by == "muon" and (parameter.ndim != 2 or parameter.is_complex()):
            raise ConfigError(
                f"--optim.groups '{chosen[name].pattern}: muon': {name} has shape {list(parameter.shape)}, and Muon "
                "takes matrices of real numbers alone; narrow the pattern"
            )
        if by:
            (found.add if by == "muon" else found.discard)(parameter)
    if not found:
        raise ConfigError(
            "--optim.name muon: the model has no hidden matrix, a trained 2-D weight within its layers that is no "
            "embedding and no head; use --optim.name adamw, or name some with --optim.groups 'PATTERN: muon'"
        )
    return found
