"""Muon for hidden matrices and AdamW for the rest, both torch's own, as one optimizer.

    optimizer = MuonAdamW([{"params": matrices, "muon": True, "lr": 1e-3, ...}, {"params": others, "muon": False, ...}])

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is Scalable for LLM
Training", arXiv 2502.16982. The update of a matrix needs all of it. If an engine shards its rows, one rank gathers the
rows of the momentum and computes the update with the same kernels as a single process, so the bits are the same.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

# Private to torch: its Muon has no public functions for one matrix.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from lockstep.distributed.rows import assign_owners, gather_rows, scatter_rows
from lockstep.errors import ConfigError
from lockstep.optim.groups import Rules, embeddings, match_rules
from lockstep.tensors import is_dtensor, local_of

__all__ = ["MuonAdamW", "hidden_matrices"]


@final
class MuonAdamW(Optimizer):
    """torch's Muon for groups whose `muon` is True, torch's AdamW for the others.

    Both work on this optimizer's own groups and states, so it behaves as one optimizer: rates are set in its
    `param_groups`; `state` has "momentum_buffer" for matrices, and "exp_avg", "exp_avg_sq", "step" for the rest.

    Args:
        params: groups, each with `muon` and arguments of torch's Muon or AdamW; their defaults apply to the others.

    Raises:
        ValueError: a number that torch refuses, or a Muon parameter that is not a matrix.
    """

    def __init__(self, params: list[dict[str, Any]]) -> None:
        self._parts: list[Optimizer] = []
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` calls this, too, and makes new groups.
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Build torch's two optimizers over this one's own group dicts."""
        self._parts = []
        for muon in (True, False):
            selected = self._groups_of(muon)
            split = muon and any(is_dtensor(parameter) for group in selected for parameter in group["params"])
            # torch's optimizers must share the group dicts and the state, or rates and checkpoints would not reach
            # them.
            if selected:
                member: Optimizer = _RowsMuon(selected) if split else Muon(selected) if muon else AdamW(selected)
                member.state = self.state
                self._parts.append(member)

    def _groups_of(self, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update with both. Collective if matrices are sharded. Returns the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self._parts:
            # An engine may have split groups that mix sharded and whole parameters for the time of this call.
            member.param_groups = self._groups_of(member.param_groups[0]["muon"])
            member.step()
        return loss


@final
class _RowsMuon(Muon):
    """torch's Muon for matrices with rows sharded over the ranks, as FSDP2's DTensors.

    The momentum is sharded like the matrix. Each matrix is assigned to a rank, balanced by work. One all-to-all brings
    it the rows, rounded to bfloat16 as Muon does first, and one returns the result.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update once; MuonAdamW calls `closure`. Collective, except at rate 0, which moves nothing."""
        entries: list[tuple[Tensor, dict[str, Any]]] = []
        updates: list[Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._momentum(parameter, group)
                # At rate 0, as when states are created, nothing moves, so nothing is exchanged.
                if group["lr"] != 0.0:
                    entries.append((parameter, group))
                    updates.append(update)
        if entries:
            self._apply(entries, updates)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's rows of the matrix to orthogonalise, in bfloat16."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient = local_of(parameter.grad)
        buffer = local_of(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            update = gradient.lerp(buffer, group["momentum"])
        else:
            update = buffer
        # Muon rounds to bfloat16 first, so the exchange may send half of the bytes.
        return update.to(torch.bfloat16, copy=True)

    def _apply(self, entries: list[tuple[Tensor, dict[str, Any]]], updates: list[Tensor]) -> None:
        # mypy does not see that the parameter is a DTensor.
        mesh: Any = entries[0][0].device_mesh  # type: ignore[attr-defined]
        # The last dimension of the mesh is that of the shards.
        shard_dimension = mesh.ndim - 1
        shards = mesh.get_group(shard_dimension)
        rank = mesh.get_local_rank(shard_dimension)
        device = torch.device(mesh.device_type)
        shapes = [tuple(parameter.shape) for parameter, _ in entries]
        # The cost of a Newton-Schulz iteration on a matrix.
        owners = assign_owners(
            [rows * columns * min(rows, columns) for rows, columns in shapes], mesh.size(shard_dimension)
        )
        groups_here = []
        for (_, group), owner in zip(entries, owners, strict=True):
            if owner == rank:
                groups_here.append(group)
        updates = [update.to(device) for update in updates]
        # All ranks of the sharding group: the rows of each matrix go to its owner.
        matrices = [
            _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for matrix, group in zip(
                gather_rows(updates, shapes, owners, shards), groups_here, strict=True
            )  # collective
        ]
        # All ranks of the sharding group: each gets its rows of the results back.
        results = scatter_rows(matrices, shapes, owners, updates[0], shards)  # collective
        for (parameter, group), rows in zip(entries, results, strict=True):
            local = local_of(parameter)
            rate = group["lr"]
            local.mul_(1 - rate * group["weight_decay"])
            step = _adjust_lr(rate, group["adjust_lr_fn"], parameter.shape)
            local.add_(rows.to(local.device), alpha=-step)


def hidden_matrices(model: nn.Module, blocks: Sequence[nn.Module], rules: Rules) -> set[Tensor]:
    """Return the trainable matrices of the hidden layers, which Muon updates.

    These are the matrices within `blocks`; without blocks, all but the last, which is the head. Embeddings and tied
    heads are excluded. A rule's `muon` or `adamw` for a parameter takes precedence.

    Raises:
        ConfigError: there are none, or a rule assigns to Muon a parameter that is not a real matrix.
    """
    tables = embeddings(model)
    chosen = match_rules(model, rules.patterns)
    trainable = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            trainable[name] = p
    plain = []
    for p in trainable.values():
        if p.ndim == 2 and p.numel() and not p.is_complex() and p not in tables:
            plain.append(p)
    inside = {p for block in blocks for p in block.parameters()}
    hidden: set[Tensor] = {p for p in plain if p in inside} if blocks else set(plain[:-1])
    for name, parameter in trainable.items():
        by = chosen[name].by if name in chosen else ""
        if by == "muon" and (parameter.ndim != 2 or parameter.is_complex()):
            raise ConfigError(
                f"--optim.groups '{chosen[name].pattern}: muon': {name} has shape {list(parameter.shape)}, but Muon "
                "updates only real matrices; narrow the pattern"
            )
        if by:
            (hidden.add if by == "muon" else hidden.discard)(parameter)
    if not hidden:
        raise ConfigError(
            "--optim.name muon: the model has no hidden matrix (a trainable 2-D weight inside its layers, neither "
            "embedding nor head); use --optim.name adamw, or assign some with --optim.groups 'PATTERN: muon'"
        )
    return hidden
