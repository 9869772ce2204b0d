"""ZeroRedundancyOptimizer over DDP: every rank holds the model, but updates only its share."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import BareEngine, Evaluate, StepResult, set_extra
from lockstep.engines.closure import Alone
from lockstep.engines.ddp import ReplicatedEngine, check_launched
from lockstep.engines.group_settings import settings_of
from lockstep.engines.modes import has_modes
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec, list_trained
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.engines.state_dict import forget, has_states, materialise
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.tensors import as_bytes, has_gaps, local_of, shared_memory

with warnings.catch_warnings():
    # torch's package warns of its own use of TorchScript when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["Zero"]


@final
class Zero(BareEngine):
    """The engine `zero`: gradients as in ddp, each parameter's optimizer states on one rank.

    After the update each parameter's owner broadcasts it. States are not split within a parameter, so the largest
    parameter limits the memory that more ranks can save. In `state_dict()` a state is a DTensor that only its owner
    holds.
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        check_launched("zero", world)
        self._module = model
        self._world = world
        self._plain = plain = optimizer(model)
        self._group_settings = settings_of(plain)
        self._zero = _split_optimizer(plain)
        # The user's optimizer has the groups, but the split one has the states, so its switches must go there.
        if has_modes(plain):
            # A weak reference: the optimizer may outlive the engine.
            this = weakref.ref(self)
            for name in ("eval", "train"):
                setattr(plain, name, partial(_switch_shards, this, name))
        self._zero.register_step_pre_hook(self._run_pre_hooks)
        self._zero.register_step_post_hook(self._run_post_hooks)
        parameters = list_trained(model, plain)
        name = "--engine zero"
        spec = UpdateSpec(parameters, is_fixed=True, single_pass_flag=name, dense_flag=name)
        self._update = OptimizerStep(model, self._zero, request, spec)
        self._replicas = ReplicatedEngine("zero", model, parameters, world, request)
        self.model = self._replicas.model
        self._meshes: dict[tuple[str, int], DeviceMesh] = {}
        members = set(parameters)
        self._trained = {name: p for name, p in model.named_parameters() if p in members}
        _check_memory(self._trained)
        self._totals: Tensor | None = None  # by trained parameter, int64

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._replicas.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._replicas.backward(loss, self._update.scale * weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._replicas.finish()
        # Taken before the update, in which each owner's copy replaces those of the other ranks.
        self._add_totals()
        self._check_groups()
        self._group_settings.write(factor, momentum)
        for shard_group, user in self._groups():
            _copy_settings(user, shard_group)
        # The user's optimizer never steps itself. Without this mark torch's schedulers warn that it does not.
        self._plain._opt_called = True  # type: ignore[attr-defined]
        # All ranks: each owner broadcasts the parameters that it has updated.
        return self._update(None, limit, None, evaluate)  # collective

    def _add_totals(self) -> None:
        """Add the bits of this rank's copies to their totals, before the owners' replace them."""
        if self._trained:
            totals = torch.stack([_sum_of_words(parameter) for parameter in self._trained.values()])
            if self._totals is None:
                self._totals = totals
            else:
                self._totals = self._totals.add_(totals)

    @staticmethod
    def check_optimizer(optimizer: Optimizer, *, exact: bool) -> None:
        dtypes = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dtypes.add(parameter.dtype)
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ConfigError(f"--engine zero: the parameters are {names}, and it splits those of one dtype; use ddp")

    @staticmethod
    def count_exchanged(options: EngineOptions, parameters: float, trained: float) -> tuple[float, float]:
        # The sum of the gradients, and the owners' broadcasts.
        return 0.0, 1.5 * trained

    @staticmethod
    def least_held(options: EngineOptions, size: int, totals: tuple[float, float, float]) -> float:
        parameters, gradients, states = totals
        return parameters + gradients + states / size

    def copies(self) -> dict[str, Tensor]:
        """Return the total of each trained parameter's bits before each update.

        The totals of two ranks are equal if their copies were equal before all updates.

        The state does not show a copy that a fault changed between two updates: the owner's copy replaced it.
        """
        if self._totals is None:
            return {}
        # Waits for the device; called when replicas are compared.
        return dict(zip(self._trained, self._totals.cpu().unbind(), strict=True))

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        before = [dict(group) for group in self._plain.param_groups]
        try:
            with self._replicas.alone():
                self._update.rehearse(Alone(loss, self._backward_alone))  # collective: the owners broadcast
        finally:
            for group, settings in zip(self._plain.param_groups, before, strict=True):
                group.clear()
                group.update(settings)

    def _backward_alone(self, loss: Tensor) -> None:
        self._replicas.backward_alone(loss, self._update.scale)

    def apart(self) -> AbstractContextManager[Callable[[Tensor, float], None]]:
        return self._replicas.apart()

    def _check_groups(self) -> None:
        if len(self._plain.param_groups) != len(self._zero.param_groups):
            raise LockstepError("--engine zero does not support parameter groups added later; rebuild the engine")

    def _run_pre_hooks(self, *args: Any) -> None:
        """Run the pre-step hooks of the user's optimizer, which may read and set its groups.

        That optimizer never steps itself.
        """
        # Private to torch's Optimizer, which has no public list of hooks.
        if hooks := list(self._plain._optimizer_step_pre_hooks.values()):
            for hook in hooks:
                hook(self._plain, *args[1:])
            for shard_group, user in self._groups():
                _copy_settings(user, shard_group)

    def _run_post_hooks(self, *args: Any) -> None:
        for shard_group, user in self._groups():
            # Some optimizers count steps in their groups.
            _copy_settings(shard_group, user)
        for hook in list(self._plain._optimizer_step_post_hooks.values()):
            hook(self._plain, *args[1:])

    def _groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Pair each group of the split optimizer, whose order differs, with the user's."""
        plain = {}
        for group in self._plain.param_groups:
            if group["params"]:
                plain[id(group["params"][0])] = group
        groups = []
        for group in self._zero.param_groups:
            if group["params"]:
                groups.append((group, plain[id(group["params"][0])]))
        return groups

    def switch(self, name: str) -> None:
        """Call `eval` or `train` of the optimizer on each owner. Collective.

        Each owner then broadcasts its parameters.
        """
        for shard_group, user in self._groups():
            _copy_settings(user, shard_group)
        for shard_group, inner in zip(self._zero.param_groups, self._zero.optim.param_groups, strict=True):
            _copy_settings(shard_group, inner)
        # The settings pass through three levels: the user's groups, the split ones, and those of this rank's shard.
        getattr(self._zero.optim, name)()
        for shard_group, inner in zip(self._zero.param_groups, self._zero.optim.param_groups, strict=True):
            _copy_settings(inner, shard_group)
        for shard_group, user in self._groups():
            _copy_settings(shard_group, user)
        # All ranks. Private to torch, which has no other way to broadcast from the owners.
        self._zero._sync_params()  # type: ignore[attr-defined]  # collective

    def state_dict(self) -> dict[str, Tensor]:
        self._materialise()
        state = {}
        for name, tensor in self._module.state_dict().items():
            state[f"model/{name}"] = tensor
        local = {}
        for name, key, value in self._own_states():
            local[f"optimizer/{name}/{key}"] = value
        described = {}
        for name, value in local.items():
            described[name] = [*_describe(value), self._world.rank]
        # All ranks: only the owner of a state knows its dtype and shape.
        for states_of_rank in self._world.gather(described):  # collective
            for name, (dtype, shape, device_type, owner) in states_of_rank.items():
                state[name] = self._distribute(local.get(name), dtype, shape, device_type, owner)
        return state | self._update.scaling()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        state = self._update.restore_scaling(state)
        self._materialise()
        forget(self._module, self._zero.optim.state, state)
        self._adopt(state)
        present_state = self.state_dict()
        state = state | self._send_to_owners(state, present_state)
        self._update.blank = False
        missing = sorted((present_state.keys() - self._update.scaling().keys()) ^ state.keys())
        if missing:
            raise CheckpointError(
                f"the state does not match the model: {', '.join(missing[:3])} on one side only; use the model and "
                "optimizer that wrote it"
            )
        with torch.no_grad():
            for name, tensor in self._module.state_dict().items():
                tensor.copy_(state[f"model/{name}"])
            set_extra(self._module, state)
            for name, key, value in self._own_states():
                source = local_of(state[f"optimizer/{name}/{key}"])
                if isinstance(value, Tensor):
                    # A tensor of the same memory was loaded in place already.
                    if source.data_ptr() != value.data_ptr():
                        value.copy_(source)
                else:
                    # Reads from the device, at a load only.
                    self._zero.optim.state[self._parameter(name)][key] = type(value)(source.item())

    def _adopt(self, state: dict[str, Tensor]) -> None:
        """Take over the states of now frozen parameters, each on its owner. Collective."""
        # All ranks: a state is adopted only if no rank has it.
        names = {name for shard in self._world.gather([*self._state_names()]) for name in shard}  # collective
        for name, tensor in state.items():
            if name.startswith("optimizer/") and name not in names and _owner(tensor) == self._world.rank:
                parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
                self._zero.optim.state[self._parameter(parameter)][key] = local_of(tensor)

    def _state_names(self) -> Iterator[str]:
        return (f"optimizer/{name}/{key}" for name, key, _ in self._own_states())

    @torch.no_grad()
    def _send_to_owners(self, state: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send states to the ranks that own them now. Collective."""
        received = {}
        for name in sorted(own.keys() & state.keys()):
            source = _owner(state[name])
            target = _owner(own[name])
            if source != target and None not in (source, target):
                tensor = state[name]
                local = local_of(own[name])
                values = local.new_empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
                if source == self._world.rank:
                    values.copy_(local_of(tensor))
                # All ranks take part, in the same order of names; the new owner keeps the values.
                collectives.broadcast(values, group_src=source, group=self._world.group)  # collective
                received[name] = values
        return received

    def _materialise(self) -> None:
        """Create the optimizer's state if no rank has any, on each for its own. Collective."""
        states: dict[Tensor, dict[str, Any]] = self._zero.optim.state
        # All ranks decide together, since creating states steps the optimizer on each.
        if not any(self._world.gather(has_states(states))):  # collective
            self._update.blank = materialise(self._zero.optim, states) or self._update.blank

    def _own_states(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (parameter's name, key, value) of the states on this rank."""
        states = self._zero.optim.state
        for name, parameter in self._module.named_parameters():
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                    yield name, key, value

    def _parameter(self, name: str) -> Tensor:
        return dict(self._module.named_parameters())[name]

    def _distribute(self, value: Any, dtype: str, shape: list[int], kind: str, owner: int) -> Tensor:
        """Return a DTensor that the rank `owner` holds whole, and no other rank holds."""
        mesh = self._meshes.get((kind, owner))
        if mesh is None:
            # A mesh of one rank communicates nothing. Without a backend (a private option) it costs no process group.
            mesh = self._meshes[kind, owner] = DeviceMesh(kind, [owner], _init_backend=False)
        wide = getattr(torch, dtype)
        if isinstance(value, Tensor):
            local = value
        else:
            # A rank without the state needs a value of the right dtype all the same; nobody reads it.
            local = torch.tensor(0.0 if value is None else float(value), dtype=wide)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Replicate()], shape=torch.Size(shape), stride=stride)


def _check_memory(trained: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that their owners cannot send by themselves."""
    gaps = None
    for name, p in trained.items():
        if has_gaps(p):
            gaps = name
            break
    if gaps is not None:
        raise ConfigError(
            f"--engine zero cannot send {gaps}, a view with other numbers between its own; make it contiguous, or use "
            "--engine ddp"
        )
    pair = next(shared_memory(trained), None)
    if pair is not None:
        raise ConfigError(
            f"--engine zero: {pair[0]} and {pair[1]} share memory, and two ranks may update them; use one parameter "
            "for both, or --engine ddp"
        )


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Sum a tensor's memory as int64 words modulo 2**64.

    0-dim. One pass over memory, as fast as a norm.
    """
    data = as_bytes(tensor)
    # A view as int64 must begin at a multiple of 8 bytes.
    if data.storage_offset() % 8:
        data = data.clone()
    end = data.numel() // 8 * 8
    total = data[:end].view(torch.int64).sum()
    if end == data.numel():
        return total
    return total + data[end:].sum()


def _switch_shards(engine: "weakref.ref[Zero]", name: str) -> None:
    """Call `eval` or `train` on the shards of an engine that still exists. Collective."""
    if zero := engine():
        zero.switch(name)


def _copy_settings(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy a group's settings to its counterpart, without `params` and `names`.

    `names` belong to the user's group alone.
    """
    for key, value in source.items():
        if key not in ("params", "names"):
            target[key] = value


def _owner(tensor: Tensor) -> int | None:
    """Return the only rank that holds a state; None if every rank does."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != 1:
        return None
    return int(tensor.device_mesh.mesh.reshape(-1)[0])


def _describe(value: Any) -> tuple[str, list[int], str]:
    """Return (dtype, shape, device type) of a state; numbers count as 0-dim float64."""
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type
    return "float64", [], "cpu"


def _split_optimizer(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Split the optimizer's groups over the ranks by size, with its settings.

    Drops `names`, which would be wrong for a part of a group.
    """
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "names"})
    # Group by group, torch gives each parameter to the least loaded rank. The group with the largest parameter comes
    # first, so that the others even out the loads.
    groups.sort(key=lambda group: -max((p.numel() for p in group["params"]), default=0))
    # torch stores a key in the defaults of AdamW that its constructor does not take.
    takes = signature(type(optimizer)).parameters
    defaults = {}
    for key, value in optimizer.defaults.items():
        if key in takes:
            defaults[key] = value
    return ZeroRedundancyOptimizer(groups, type(optimizer), **defaults)
