"""DeepSpeed: ZeRO 0 to 3, with offload. The only file that needs the package `deepspeed`.

Stage 0 exchanges gradients as ddp does; 1 splits the optimizer's states over the ranks, 2 the gradients too, 3 the
parameters too. The optimizer is torch's own. Schedule, clipping and loss scale are those of the other engines.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lockstep.checkpoint.layout import owners_of
from lockstep.config.deepspeed import read_json
from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import (
    NOTHING,
    BareEngine,
    Evaluate,
    ScaledBackward,
    StepResult,
    set_extra,
)
from lockstep.engines.ddp import check_launched
from lockstep.engines.deepspeed.config import DeepSpeedSettings, merge, read_config
from lockstep.engines.group_settings import settings_of
from lockstep.engines.memory import Footprint, add_counter, count_bytes
from lockstep.engines.modes import has_modes
from lockstep.engines.optimizer_step import LossScale, OptimizerStep, UpdateSpec
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.engines.state_dict import begin, first_step
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.extras import install_extra
from lockstep.tensors import local_of

__all__ = [
    "DeepSpeed",
]


class Accessors(Protocol):
    """Functions of deepspeed.utils and deepspeed.zero."""

    safe_get_full_fp32_param: Any
    safe_set_full_fp32_param: Any
    safe_set_local_fp32_param: Any
    safe_get_full_optimizer_state: Any
    safe_set_full_optimizer_state: Any
    safe_set_local_optimizer_state: Any
    gathered: Any


class SplitState:
    """Read and write the state that ZeRO has split over the ranks.

    Its float32 copies are the master weights for an average of the weights.

    Args:
        model: the plain module, as `deepspeed.initialize` left it.
        zero: DeepSpeed's ZeRO optimizer.
        stage: 1, 2 or 3.
        access: DeepSpeed's functions.
        world: every rank takes part in `state_dict` and `load_state_dict`.
    """

    def __init__(self, model: nn.Module, zero: Any, stage: int, access: Accessors, world: World) -> None:
        self._model = model
        self._stage = stage
        self._access = access
        self._world = world
        self._meshes: dict[int, DeviceMesh] = {}
        self._flat = _FlatStates(zero, stage)

    def state_dict(self) -> dict[str, Tensor]:
        """Return `model/NAME` (float32 if trained) and `optimizer/NAME/KEY`. Collective.

        Each parameter and elementwise state is whole on one rank; numbers and buffers are on all.
        """
        state: dict[str, Tensor] = {}
        owners = self._owners()
        for name, parameter in self._model.named_parameters():
            full = f"model/{name}"
            state[full] = self._place_on(self._parameter(parameter), owners[full])
            if parameter.requires_grad:
                for key in self._flat.elementwise():
                    # All ranks: a state is split over them.
                    value = self._access.safe_get_full_optimizer_state(parameter, key)  # collective
                    full = f"optimizer/{name}/{key}"
                    state[full] = self._place_on(value, owners[full])
                for key, number in self._flat.numbers().items():
                    state[f"optimizer/{name}/{key}"] = number.clone()
        for second, first in self._ties():
            state[f"model/{second}"] = state[f"model/{first}"]
        return state | {f"model/{name}": buffer for name, buffer in self._buffers()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of `state_dict`, or plain tensors that every rank holds whole. Collective.

        Another engine's state may lack that of a parameter that never had a gradient: here it starts from its initial
        values, but with the step count that all parameters share.
        """
        # All ranks. The shapes come from here.
        present_state = self.state_dict()
        stepped = {name.rpartition("/")[0] for name in state if name.startswith("optimizer/")}
        unstepped = set()
        for n in present_state:
            if n.startswith("optimizer/") and stepped and n.rpartition("/")[0] not in stepped:
                unstepped.add(n)
        missing = sorted((present_state.keys() - unstepped) ^ state.keys())
        if missing:
            raise CheckpointError(
                f"the state does not match the model: {', '.join(missing[:3])} on one side only; use the model and "
                "optimizer that wrote it"
            )
        numbers: dict[str, Tensor] = {}
        owners = self._owners()
        for name, parameter in self._model.named_parameters():
            full = f"model/{name}"
            self._set_parameter(parameter, self._gather(state[full], owners[full]))
            if parameter.requires_grad:
                for key in self._flat.elementwise():
                    full = f"optimizer/{name}/{key}"
                    if full in unstepped:
                        value = torch.zeros(
                            present_state[full].shape, dtype=present_state[full].dtype, device=self._world.device
                        )
                        self._flat.begin(key, value)
                    else:
                        value = self._gather(state[full], owners[full])
                    self._set_state(parameter, value, key)
                if f"optimizer/{name}" in stepped:
                    numbers |= {key: state[f"optimizer/{name}/{key}"] for key in self._flat.numbers()}
        for key, number in numbers.items():
            self._flat.set_number(key, number)
        for name, buffer in self._buffers():
            buffer.copy_(state[f"model/{name}"])
        set_extra(self._model, state)

    def footprint(self) -> Footprint:
        """Count what ZeRO holds on this rank.

        Under stage 1 gradients are whole until the step ends.
        """
        # Only stage 3 has shards as attributes of the parameters.
        shards = []
        for p in self._model.parameters():
            if hasattr(p, "ds_tensor"):
                shards.append(p.ds_tensor)
        weights = [p.data for p in self._model.parameters()]
        gradients = count_bytes(parameter.data for _, parameter in self._iterate_trained())
        if self._stage > 1:
            size = next((parameter.element_size() for _, parameter in self._iterate_trained()), 0)
            gradients = size * self._flat.elements()
        return Footprint(
            count_bytes([*weights, *shards, *(buffer for _, buffer in self._buffers())]),
            gradients,
            count_bytes(self._flat.tensors()),
        )

    def parts(self) -> list[Tensor]:
        """Return this rank's parts of the float32 weights, flat, with padding to equal lengths."""
        return self._flat.parts()

    def copy_weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name, each whole on one rank. Collective."""
        owners = self._owners()
        return {
            n: self._place_on(self._parameter(p), owners[f"model/{n}"]) for n, p in self._iterate_trained()
        }  # collective

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `copy_weights`, or plain tensors, into the float32 weights only. Collective.

        The parameters that the forward reads are unchanged.
        """
        owners = self._owners()
        for name, parameter in self._iterate_trained():
            self._set_master(parameter, self._gather(state[name], owners[f"model/{name}"]))  # collective

    @torch.no_grad()
    def show(self) -> None:
        """Copy the float32 weights into the parameters that the forward reads. Collective."""
        for _, parameter in self._iterate_trained():
            self._set_model_weight(parameter, self._parameter(parameter))  # collective

    def _iterate_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad)

    def _owners(self) -> dict[str, int]:
        """Assign each tensor to a rank, balanced by bytes; the same on every rank."""
        sizes = []
        for name, parameter in self._model.named_parameters():
            # ZeRO 3 leaves a parameter empty between uses; its size is here.
            count = getattr(parameter, "ds_numel", parameter.numel())
            # Trained parameters are stored in float32.
            element_size = 4 if parameter.requires_grad else parameter.element_size()
            sizes.append((element_size * count, f"model/{name}"))
            if parameter.requires_grad:
                for key in self._flat.elementwise():
                    sizes.append((element_size * count, f"optimizer/{name}/{key}"))
        return owners_of(sizes, self._world.size)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        parameters = set()
        for name, _ in self._model.named_parameters(remove_duplicate=False):
            parameters.add(name)
        for name, tensor in self._model.state_dict().items():
            if name not in parameters:
                yield name, tensor

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Yield (second name, first name) of tied parameters."""
        first_names = {}
        for name, parameter in self._model.named_parameters():
            first_names[parameter] = name
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if first_names[parameter] != name:
                yield name, first_names[parameter]

    def _parameter(self, parameter: nn.Parameter) -> Tensor:
        if parameter.requires_grad:
            # All ranks: each has a part.
            value: Tensor = self._access.safe_get_full_fp32_param(parameter)  # collective
            return value.detach()
        # All ranks, under ZeRO 3.
        with self._access.gathered([parameter], self._stage):  # collective under ZeRO 3
            return parameter.detach().clone()

    def _set_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter.requires_grad:
            self._set_master(parameter, value)
        self._set_model_weight(parameter, value)

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the float32 copy, which the optimizer updates."""
        if self._stage == 3:
            self._access.safe_set_local_fp32_param(parameter, self._part(parameter, value))
        else:
            self._access.safe_set_full_fp32_param(parameter, value)

    def _set_model_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the parameter that the forward reads."""
        with self._access.gathered([parameter], self._stage, 0):  # collective under ZeRO 3
            parameter.data.copy_(value)

    def _set_state(self, parameter: Any, value: Tensor, key: str) -> None:
        if self._stage == 3:
            self._access.safe_set_local_optimizer_state(parameter, self._part(parameter, value), key)
        else:
            self._access.safe_set_full_optimizer_state(parameter, value, key)

    def _part(self, parameter: Any, value: Tensor) -> Tensor:
        """Return this rank's slice of the flat value, padded with zeros on the last ranks.

        ZeRO 3 keeps it in this form.
        """
        shard_size = parameter.ds_tensor.numel()
        flat = torch.nn.functional.pad(value.flatten(), (0, shard_size * self._world.size - value.numel()))
        return flat[self._world.rank * shard_size :][:shard_size]

    def _place_on(self, value: Tensor, owner: int) -> Tensor:
        """Return a DTensor in host memory that only the rank `owner` holds, whole."""
        mesh = self._meshes.get(owner)
        if mesh is None:
            # A mesh of one rank communicates nothing. Without a backend (a private option) it costs no process group.
            mesh = self._meshes[owner] = DeviceMesh("cpu", [owner], _init_backend=False)
        is_owner = owner == self._world.rank
        # Waits for the device, at a save.
        if is_owner:
            local = value.to("cpu", copy=True).contiguous()
        else:
            local = value.new_zeros((), device="cpu")
        stride = torch.empty(value.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Replicate()], shape=value.shape, stride=stride)

    def _gather(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the whole tensor on this rank's device. Collective for a DTensor."""
        if not isinstance(tensor, DTensor):
            return tensor.to(self._world.device)
        if owner == self._world.rank:
            value = local_of(tensor).to(self._world.device)
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        # All ranks: the owner alone has the values.
        collectives.broadcast(value, group_src=owner, group=self._world.group)  # collective
        return value


class _FlatStates:
    """The optimizer state of ZeRO's flat tensors, created before the first step."""

    def __init__(self, zero: Any, stage: int) -> None:
        self._zero = zero
        self._stage = stage
        # Before the first step: DeepSpeed itself would link the states of the first group only, and then assume all.
        self._make_states()

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each flat tensor that is updated."""
        states: dict[Tensor, dict[str, Any]] = self._zero.optimizer.state
        return states

    def parts(self) -> list[Tensor]:
        """Return the flat tensors. Raises ConfigError if they are on a disk."""
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
        return sum(flat_tensor.numel() for flat_tensor in self._parts())

    def tensors(self) -> list[Tensor]:
        """Return this rank's float32 weights and their optimizer states, except those on a disk."""
        states = []
        for values in self._states().values():
            for value in values.values():
                if isinstance(value, Tensor):
                    states.append(value)
        return [*self._parts(), *states]

    def elementwise(self) -> list[str]:
        """Return the keys of states with one value for each element."""
        flat, values = next(iter(self._states().items()), (torch.empty(0), {}))
        keys = []
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                keys.append(key)
        return keys

    def numbers(self) -> dict[str, Tensor]:
        """Return the states shared by all elements (the step count), 0-dim; plain numbers as float64."""
        keys = self.elementwise()
        values = next(iter(self._states().values()), {})
        scalars = {}
        for key, value in values.items():
            if key not in keys and isinstance(value, Tensor | int | float):
                scalars[key] = (
                    value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
                )
        return scalars

    def begin(self, key: str, value: Tensor) -> None:
        """Fill a state of the optimizer, named by `key`, with its initial value."""
        begin(self._zero.optimizer, self._zero.optimizer.param_groups[0], {key: value})

    def set_number(self, key: str, number: Tensor) -> None:
        for values in self._states().values():
            if isinstance(values[key], Tensor):
                values[key].copy_(number)
            else:
                # Reads from the device, at a load only.
                values[key] = type(values[key])(number.item())

    def _make_states(self) -> None:
        """Make the optimizer create its states with their initial values, as its first step would."""
        optimizer = self._zero.optimizer
        if self._stage == 3:
            flats = self._zero.fp32_partitioned_groups_flat
        else:
            flats = None
        if flats is not None:
            # Private to DeepSpeed: under ZeRO 3 its optimizer has parameters only within these two calls.
            self._zero._set_fp32_optimizer_param_groups()
        try:
            first_step(optimizer, optimizer.state)
        finally:
            if flats is not None:
                self._zero._clear_fp32_optimizer_param_groups()
        if self._stage < 3:
            # Private to DeepSpeed: links the states to the model's parameters, so that its accessors find them.
            self._zero._lazy_init_hp_params_optimizer_state()


@final
class DeepSpeed(BareEngine):
    """The engine `deepspeed`.

    Raises:
        ConfigError: no launcher, no package, `--exact`, float64, or a configuration that contradicts a flag, has an
            unsupported key, or is refused by DeepSpeed.
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        check_launched("deepspeed", world)
        file_config = read_config(request.options.config)
        dtypes = {p.dtype for p in model.parameters()}
        _check(request, dtypes)
        package = _package(world)
        instance = optimizer(model)
        options = request.options
        is_bf16 = torch.bfloat16 in dtypes
        flags = DeepSpeedSettings(
            options.zero_stage, options.cpu_offload, request.clip, is_bf16, request.loss_scaling, instance
        )
        config = merge(file_config, flags)
        self._stage = int(config["zero_optimization"]["stage"])
        self._world = world
        self._scaled = bool(request.loss_scaling)
        self._roots = ScaledBackward()
        self._ds = _initialize(package, model, instance, config)
        self.model: nn.Module = self._ds
        self._split = bool(self._stage)
        if self._split:
            self._update: Any = _ZeroStep(self._ds, self._stage, request, world)
            self._split_state = SplitState(model, self._ds.optimizer, self._stage, _accessors(package), world)
            self.masters = self._split_state
            add_counter(self.model, self._split_state.footprint)
        else:
            spec = UpdateSpec(single_pass_flag="--engine deepspeed", dense_flag="--engine deepspeed")
            self._update = OptimizerStep(model, instance, request, spec)
            self._module = model
        request.say(f"--engine deepspeed {package.__version__}: ZeRO stage {self._stage} over {world.size} ranks")

    @staticmethod
    def check_optimizer(optimizer: Optimizer, *, exact: bool) -> None:
        name = type(optimizer).__name__
        if has_modes(optimizer):
            raise ConfigError(
                f"--engine deepspeed does not work with {name}: its eval() and train() move the weights, which the "
                "engine keeps elsewhere; use --engine fsdp, zero or ddp"
            )
        groups = optimizer.param_groups
        if any(parameter.is_complex() for group in groups for parameter in group["params"]):
            raise ConfigError(
                "--engine deepspeed keeps parameters as real numbers, and some are complex; use --engine ddp"
            )
        if any(group.get("dampening") for group in groups):
            # The first step takes the whole gradient as momentum. Under ZeRO the momentum already exists, as zeros.
            raise ConfigError(f"--engine deepspeed does not work with the dampening of {name}; use dampening=0, or ddp")

    @staticmethod
    def check_planned(options: EngineOptions) -> None:
        zero = read_json(options.config).get("zero_optimization", {})
        zero = zero if isinstance(zero, dict) else {}
        if options.zero_stage == 3 or (options.zero_stage < 0 and zero.get("stage") == 3):
            raise ConfigError(
                "--engine deepspeed cannot be planned in stage 3, whose forwards exchange with other ranks; plan "
                "--engine fsdp, which shards the same"
            )
        offload = zero.get("offload_optimizer")
        if options.cpu_offload or (isinstance(offload, dict) and offload.get("device", "cpu") != "none"):
            raise ConfigError(
                "--engine deepspeed cannot be planned with states in host memory: a trace has one device; plan it "
                "without"
            )

    @staticmethod
    def explain_no_backward(*, exact: bool) -> str:
        return "--engine deepspeed has no backward outside of a step"

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        self._ds.set_gradient_accumulation_boundary(last)
        return NOTHING

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._ds.backward(loss * self._roots(loss, self._factor() * weight), scale_wrt_gas=False)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        if self._scaled and not self._split:
            gradients = []
            for p in self._update.parameters:
                if p.grad is not None:
                    gradients.append(p.grad)
            # Private to torch: multiplies all gradients in one kernel. DeepSpeed has averaged them.
            torch._foreach_mul_(gradients, float(self._world.size))
        result: StepResult = self._update(factor, limit, momentum, evaluate)
        return result

    def _factor(self) -> float | Tensor:
        """Return the factor that turns the mean exchanged by DeepSpeed into a sum.

        A scaled loss has the same magnitude as in every other engine: there ZeRO gets a scale divided by the ranks,
        and stage 0 multiplies the gradients after the backward.
        """
        if self._scaled and not self._split:
            scale: float | Tensor = self._update.scale
            return scale
        return float(self._world.size)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Do nothing: DeepSpeed's updates cannot be undone."""

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = (
            self._split_state.state_dict() if self._split else self._update.state_dict(self._module)
        )
        return {**state, **self._update.scaling()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self._split:
            self._split_state.load_state_dict(self._update.restore_scaling(state))  # collective
        else:
            self._update.load_state_dict(self._module, state)


class _ZeroStep:
    """End a step under ZeRO: DeepSpeed's step, with lockstep's rates and loss scale."""

    def __init__(self, ds: Any, stage: int, request: EngineRequest, world: World) -> None:
        self._ds = ds
        self._zero = ds.optimizer
        self._ranks = world.size
        self._group_settings = settings_of(self._zero.optimizer)
        self._scaler = LossScale(request.loss_scaling) if request.loss_scaling else None
        self._limit = math.inf
        self._last_norm = math.nan
        # DeepSpeed calls this function before it updates: the one place where the norm can stop the update.
        method = "scaled_global_norm" if stage < 3 else "_get_norm_groups"
        self._norm = getattr(self._zero, method)
        setattr(self._zero, method, self._limited_norm)
        self._scale()

    def __call__(
        self, factor: float | None, limit: float, momentum: float | None = None, evaluate: Evaluate | None = None
    ) -> StepResult:
        """Update once, without a closure. Waits, since DeepSpeed checks for gradients that are not finite."""
        self._group_settings.write(factor, momentum)
        self._limit = limit
        self._last_norm = math.inf
        # All ranks. Waits for the device, since DeepSpeed reads whether the gradients are finite.
        self._ds.step()  # collective; waits for the device
        applied = not self._zero.overflow
        for gradient in self._stale_gradients():
            gradient.zero_()
        norm = torch.tensor(self._last_norm, dtype=torch.float32)
        if self._scaler:
            self._scaler.learn(norm, applied)
            self._scale()
        return StepResult(norm, applied)

    def _limited_norm(self, *args: Any, **settings: Any) -> Any:
        """Return DeepSpeed's norm; above the limit, infinity, which makes it skip the step.

        The norm is under the loss scale. If DeepSpeed finds an overflow before it asks for the norm, the step's norm
        stays infinite.
        """
        result = self._norm(*args, **settings)  # collective
        groups = [float(norm) for norm in (result if isinstance(result, list) else [result])]  # waits for the device
        # DeepSpeed returns -1 for a norm that is not finite.
        if min(groups) < 0.0:
            self._last_norm = math.inf
        else:
            self._last_norm = math.hypot(*groups) / float(self._zero.loss_scale)
        if self._last_norm < self._limit:
            return result
        if isinstance(result, list):
            return [result[0] * math.inf]
        return math.inf

    def _stale_gradients(self) -> list[Tensor]:
        """Return the gradients that ZeRO keeps beyond a step, to be zeroed.

        ZeRO would reuse or add to them where a micro-batch does not use a parameter: the buffer of stage 3; with
        offload, stage 2's gradients by parameter; and those of the updated flat tensors.
        """
        buffer = getattr(self._zero, "grad_partitions_flat_buffer", None)
        groups = getattr(self._zero, "fp32_partitioned_groups_flat", None) or self._zero.single_partition_of_fp32_groups
        tensors = [
            buffer,
            *getattr(self._zero, "accumulated_grads_in_cpu", {}).values(),
            *(flat.grad for flat in groups),
        ]
        return [tensor for tensor in tensors if tensor is not None]

    def _scale(self) -> None:
        if self._scaler:
            # The loss is multiplied by the number of ranks.
            self._zero.loss_scale = self._scaler.scale / self._ranks

    def scaling(self) -> dict[str, Tensor]:
        if self._scaler:
            return self._scaler.state_dict()
        return {}

    def restore_scaling(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._scaler:
            self._scaler.load_state_dict(state)
            self._scale()
        present = {}
        for name, tensor in state.items():
            if not name.startswith("scaler/"):
                present[name] = tensor
        return present


def _check(request: EngineRequest, dtypes: set[torch.dtype]) -> None:
    if request.exact:
        raise ConfigError(
            "--exact does not work with --engine deepspeed, which sums gradients in its own order; use --engine fsdp, "
            "zero or ddp"
        )
    if torch.float64 in dtypes:
        raise ConfigError("--engine deepspeed updates in float32, not --precision float64; use --engine fsdp")
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(f"--engine deepspeed: the model has parameters in {names}; give them one dtype")


def _package(world: World) -> Any:
    """Import the package for this run's device. Raises ConfigError if it is missing or fails."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    try:
        package: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"--engine deepspeed needs the package deepspeed ({error.name} is missing): {install_extra('deepspeed')}"
        ) from error
    except Exception as error:
        # DeepSpeed searches for compilers and CUDA on import, and raises errors of any class.
        raise ConfigError(
            f"--engine deepspeed: the package cannot start here: {str(error).splitlines()[0]}; use --engine fsdp"
        ) from error
    if world.device.type == "cpu":
        # Exchanges by shared memory need a compiler, and minutes at the first start; gloo needs neither.
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return package


def _initialize(package: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    # Look before DeepSpeed does: stage 3 empties the parameters.
    scalar = None
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            scalar = name
            break
    try:
        # All ranks.
        engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)  # collective
    except LockstepError:
        raise
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        # DeepSpeed raises plain exceptions: only the text shows that a build of its extensions failed.
        missing = "ninja" in message or "CUDA_HOME" in message or "compiler" in message or "Error building" in message
        if missing:
            way_out = "install a compiler and ninja"
        else:
            way_out = "change --engine.config"
        if scalar is not None and not missing:
            way_out = f"the parameter {scalar} is 0-dim: give it the shape (1,), or use --engine fsdp or ddp"
        raise ConfigError(f"--engine deepspeed: DeepSpeed refuses: {message[:300]}; {way_out}") from error
    return engine


def _accessors(package: Any) -> Any:
    """Return the functions that read and write ZeRO's split state."""

    @contextlib.contextmanager
    def gather(parameters: list[nn.Parameter], stage: int, writer: int | None = None) -> Iterator[None]:
        """Gather the parameters within the context; keep what rank `writer` writes."""
        if stage < 3:
            yield
            return
        with package.zero.GatheredParameters(parameters, modifier_rank=writer):
            yield

    utils = package.utils
    names = ("get_full", "set_full", "set_local")
    functions = {}
    for name in names:
        functions[f"safe_{name}_fp32_param"] = getattr(utils, f"safe_{name}_fp32_param")
    for name in names:
        functions[f"safe_{name}_optimizer_state"] = getattr(utils, f"safe_{name}_optimizer_state")
    return SimpleNamespace(gathered=gather, **functions)
