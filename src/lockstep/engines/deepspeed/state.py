"""The state of a model under ZeRO 1 to 3 by plain names, through DeepSpeed's tensor accessors.

A tensor is put together on all ranks at once (a collective each) and then kept by one of them, so that a rank holds
its share of the state and one whole tensor besides. In `state` it is a DTensor that only its owner has.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.checkpoint.layout import owners_of
from lockstep.distributed.world import World
from lockstep.engines.shared.extra import set_extra
from lockstep.engines.shared.memory import Footprint, count_bytes
from lockstep.engines.shared.state_dict import begin, first_step
from lockstep.errors import CheckpointError, ConfigError
from lockstep.tensors import local_of

__all__ = ["Accessors", "SplitState"]


class Accessors(Protocol):
    """What is used of deepspeed.utils and deepspeed.zero."""

    safe_get_full_fp32_param: Any
    safe_set_full_fp32_param: Any
    safe_set_local_fp32_param: Any
    safe_get_full_optimizer_state: Any
    safe_set_full_optimizer_state: Any
    safe_set_local_optimizer_state: Any
    gathered: Any


class SplitState:
    """Reads and writes what ZeRO has split. To an average of the weights its float32 copies are the masters.

    Args:
        model: the plain module, as `deepspeed.initialize` left it.
        zero: DeepSpeed's ZeRO optimizer.
        stage: 1, 2 or 3.
        access: DeepSpeed's functions.
        world: every rank takes part in `state` and `restore`.
    """

    def __init__(self, model: nn.Module, zero: Any, stage: int, access: Accessors, world: World) -> None:
        self._model, self._stage, self._access, self._world = model, stage, access, world
        self._meshes: dict[int, DeviceMesh] = {}
        self._flat = _FlatStates(zero, stage)

    def state_dict(self) -> dict[str, Tensor]:
        """`model/NAME` (float32), `optimizer/NAME/KEY`. Whole tensors are on one rank each, numbers on all."""
        found: dict[str, Tensor] = {}
        owners = self._owners()
        for name, parameter in self._model.named_parameters():
            full = f"model/{name}"
            found[full] = self._kept(self._parameter(parameter), owners[full])
            if parameter.requires_grad:
                for key in self._flat.elementwise():
                    value = self._access.safe_get_full_optimizer_state(parameter, key)  # collective
                    full = f"optimizer/{name}/{key}"
                    found[full] = self._kept(value, owners[full])
                for key, number in self._flat.numbers().items():
                    found[f"optimizer/{name}/{key}"] = number.clone()
        for second, first in self._ties():
            found[f"model/{second}"] = found[f"model/{first}"]
        return found | {f"model/{name}": buffer for name, buffer in self._buffers()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what `state` gave, or plain tensors that every rank has whole.

        Another engine's may have no optimizer state of a parameter that never had a gradient: here it begins anew,
        beside the count of steps that all parameters share.
        """
        own = self.state_dict()
        stepped = {name.rpartition("/")[0] for name in state if name.startswith("optimizer/")}
        unstepped = {n for n in own if n.startswith("optimizer/") and stepped and n.rpartition("/")[0] not in stepped}
        missing = sorted((own.keys() - unstepped) ^ state.keys())
        if missing:
            raise CheckpointError(f"the state does not fit the model: {', '.join(missing[:3])} on one side only")
        numbers: dict[str, Tensor] = {}
        owners = self._owners()
        for name, parameter in self._model.named_parameters():
            full = f"model/{name}"
            self._set_parameter(parameter, self._whole(state[full], owners[full]))
            if parameter.requires_grad:
                for key in self._flat.elementwise():
                    full = f"optimizer/{name}/{key}"
                    if full in unstepped:
                        whole = torch.zeros(own[full].shape, dtype=own[full].dtype, device=self._world.device)
                        self._flat.begin(key, whole)
                    else:
                        whole = self._whole(state[full], owners[full])
                    self._set_state(parameter, whole, key)
                if f"optimizer/{name}" in stepped:
                    numbers |= {key: state[f"optimizer/{name}/{key}"] for key in self._flat.numbers()}
        for key, number in numbers.items():
            self._flat.set_number(key, number)
        for name, buffer in self._buffers():
            buffer.copy_(state[f"model/{name}"])
        set_extra(self._model, state)

    def footprint(self) -> Footprint:
        """Count what ZeRO holds on this rank; under stage 1 gradients are whole until the step ends."""
        shards = [p.ds_tensor for p in self._model.parameters() if hasattr(p, "ds_tensor")]  # of stage 3
        weights = [p.data for p in self._model.parameters()]
        gradients = count_bytes(parameter.data for _, parameter in self._trained())
        if self._stage > 1:
            size = next((parameter.element_size() for _, parameter in self._trained()), 0)
            gradients = size * self._flat.elements()
        return Footprint(
            count_bytes([*weights, *shards, *(buffer for _, buffer in self._buffers())]),
            gradients,
            count_bytes(self._flat.tensors()),
        )

    def parts(self) -> list[Tensor]:
        """This rank's parts of the float32 weights, flat, with what fills them up to equal lengths."""
        return self._flat.parts()

    def named(self) -> dict[str, Tensor]:
        """The float32 weights by name, each whole on one rank."""
        owners = self._owners()
        return {n: self._kept(self._parameter(p), owners[f"model/{n}"]) for n, p in self._trained()}  # collective

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `named` gave, or plain tensors. The parameters that the forward reads stay as they are."""
        owners = self._owners()
        for name, parameter in self._trained():
            self._set_master(parameter, self._whole(state[name], owners[f"model/{name}"]))  # collective

    @torch.no_grad()
    def show(self) -> None:
        """Gives the parameters that the forward reads the float32 weights' values."""
        for _, parameter in self._trained():
            self._set_read(parameter, self._parameter(parameter))  # collective

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad)

    def _owners(self) -> dict[str, int]:
        """Which rank keeps which tensor, so that all keep about as many bytes; the same on every rank."""
        sizes = []
        for name, parameter in self._model.named_parameters():
            count = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 leaves a parameter empty between uses
            each = 4 if parameter.requires_grad else parameter.element_size()  # what is trained is kept in float32
            sizes.append((each * count, f"model/{name}"))
            if parameter.requires_grad:
                sizes += [(each * count, f"optimizer/{name}/{key}") for key in self._flat.elementwise()]
        return owners_of(sizes, self._world.size)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name, tensor in self._model.state_dict().items():
            if name not in parameters:
                yield name, tensor

    def _ties(self) -> Iterator[tuple[str, str]]:
        """(second name, first name) of tied parameters."""
        first = {parameter: name for name, parameter in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if first[parameter] != name:
                yield name, first[parameter]

    def _parameter(self, parameter: nn.Parameter) -> Tensor:
        if parameter.requires_grad:
            whole: Tensor = self._access.safe_get_full_fp32_param(parameter)  # collective
            return whole.detach()
        with self._access.gathered([parameter], self._stage):  # collective under ZeRO 3
            return parameter.detach().clone()

    def _set_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter.requires_grad:
            self._set_master(parameter, value)
        self._set_read(parameter, value)

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The float32 copy, which is updated."""
        if self._stage == 3:
            self._access.safe_set_local_fp32_param(parameter, self._part(parameter, value))
        else:
            self._access.safe_set_full_fp32_param(parameter, value)

    def _set_read(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The one that the forward reads."""
        with self._access.gathered([parameter], self._stage, 0):  # collective under ZeRO 3
            parameter.data.copy_(value)

    def _set_state(self, parameter: Any, value: Tensor, key: str) -> None:
        if self._stage == 3:
            self._access.safe_set_local_optimizer_state(parameter, self._part(parameter, value), key)
        else:
            self._access.safe_set_full_optimizer_state(parameter, value, key)

    def _part(self, parameter: Any, value: Tensor) -> Tensor:
        """This rank's slice of the flattened value; the last rank's is filled up with zeros, as ZeRO 3 keeps it."""
        each = parameter.ds_tensor.numel()
        flat = torch.nn.functional.pad(value.flatten(), (0, each * self._world.size - value.numel()))
        return flat[self._world.rank * each :][:each]

    def _kept(self, value: Tensor, owner: int) -> Tensor:
        """A DTensor in host memory that lies whole on the rank `owner`, and on no other."""
        mesh = self._meshes.get(owner)
        if mesh is None:
            # A mesh of one rank communicates nothing: without a backend it costs no process group.
            mesh = self._meshes[owner] = DeviceMesh("cpu", [owner], _init_backend=False)
        mine = owner == self._world.rank
        local = value.to("cpu", copy=True).contiguous() if mine else value.new_zeros((), device="cpu")  # waits
        stride = torch.empty(value.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Replicate()], shape=value.shape, stride=stride)

    def _whole(self, tensor: Tensor, owner: int) -> Tensor:
        """All of it, on this rank's device."""
        if not isinstance(tensor, DTensor):
            return tensor.to(self._world.device)
        if owner == self._world.rank:
            whole = local_of(tensor).to(self._world.device)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        dist.broadcast(whole, src=owner)  # collective
        return whole


class _FlatStates:
    """What ZeRO's optimizer keeps for the flat tensors that it updates, from before its first step on."""

    def __init__(self, zero: Any, stage: int) -> None:
        self._zero, self._stage = zero, stage
        # Before the first step: DeepSpeed itself links those of the first group only, and then believes in all.
        self._make_states()

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """Of the flat tensors that are updated."""
        found: dict[Tensor, dict[str, Any]] = self._zero.optimizer.state
        return found

    def parts(self) -> list[Tensor]:
        """The flat tensors. Raises ConfigError where they are on a disk."""
        if getattr(self._zero, "swap_optimizer", False):
            raise ConfigError(
                "--optim.ema: zero_optimization.offload_optimizer keeps the weights on nvme; offload them to cpu"
            )
        return self._parts()

    def _parts(self) -> list[Tensor]:
        three = self._stage == 3
        return list(self._zero.fp32_partitioned_groups_flat if three else self._zero.single_partition_of_fp32_groups)

    def elements(self) -> int:
        """Count the elements that this rank updates."""
        return sum(part.numel() for part in self._parts())

    def tensors(self) -> list[Tensor]:
        """Give the float32 weights that this rank updates, with what the optimizer keeps for them, but on a disk."""
        states = [value for values in self._states().values() for value in values.values() if isinstance(value, Tensor)]
        return [*self._parts(), *states]

    def elementwise(self) -> list[str]:
        """What the optimizer keeps for each element."""
        flat, values = next(iter(self._states().items()), (torch.empty(0), {}))
        return [key for key, value in values.items() if isinstance(value, Tensor) and value.shape == flat.shape]

    def numbers(self) -> dict[str, Tensor]:
        """What it keeps for all together: its count of steps. 0-dim; a plain number is float64."""
        keys, values = self.elementwise(), next(iter(self._states().values()), {})
        return {
            key: value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
            for key, value in values.items()
            if key not in keys and isinstance(value, Tensor | int | float)
        }

    def begin(self, key: str, value: Tensor) -> None:
        """Fills what the optimizer keeps as `key` with what it begins with."""
        begin(self._zero.optimizer, self._zero.optimizer.param_groups[0], {key: value})

    def set_number(self, key: str, number: Tensor) -> None:
        for values in self._states().values():
            if isinstance(values[key], Tensor):
                values[key].copy_(number)
            else:
                values[key] = type(values[key])(number.item())

    def _make_states(self) -> None:
        """Makes the optimizer create its states, as its first step would, with the values that they begin with."""
        optimizer = self._zero.optimizer
        flats = self._zero.fp32_partitioned_groups_flat if self._stage == 3 else None
        if flats is not None:
            self._zero._set_fp32_optimizer_param_groups()
        try:
            first_step(optimizer, optimizer.state)
        finally:
            if flats is not None:
                self._zero._clear_fp32_optimizer_param_groups()
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
