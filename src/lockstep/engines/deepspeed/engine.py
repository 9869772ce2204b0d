"""DeepSpeed: ZeRO 0 to 3, with offload. The only file that needs the package `deepspeed`.

Stage 0 exchanges gradients as ddp does; 1 splits the optimizer's states over the ranks, 2 the gradients too, 3 the
parameters too. The optimizer is torch's own, the schedule, the clipping and the loss's scale are the other engines'.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, Evaluate, MakeOptimizer, Settings, StepResult, set_momentum
from lockstep.engines.deepspeed.config import Wanted, merged, read_config
from lockstep.engines.deepspeed.state import SplitState
from lockstep.engines.shared.ddp_common import check_launched
from lockstep.engines.shared.loss_scale import LossScale
from lockstep.engines.shared.memory import add_counter
from lockstep.engines.shared.optimizer_step import OptimizerStep
from lockstep.engines.shared.scaled_backward import ScaledBackward
from lockstep.errors import ConfigError

__all__ = ["DeepSpeed"]


@final
class DeepSpeed:
    """The engine `deepspeed`.

    Raises:
        ConfigError: no launcher, no package, `--exact`, float64, or a configuration that contradicts a flag, has a key
            that is not served, or that DeepSpeed itself refuses.
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, settings: Settings) -> None:
        check_launched("deepspeed", world)
        given = read_config(settings.options.config)
        dtypes = {p.dtype for p in model.parameters()}
        _check(settings, dtypes)
        package = _package(world)
        made, options = optimizer(model), settings.options
        halved = torch.bfloat16 in dtypes
        wanted = Wanted(options.zero_stage, options.cpu_offload, settings.clip, halved, settings.loss_scaling, made)
        config = merged(given, wanted)
        self._stage = int(config["zero_optimization"]["stage"])
        self._world, self._scaled = world, bool(settings.loss_scaling)
        self._roots = ScaledBackward()
        self._ds = _initialised(package, model, made, config)
        self.model: nn.Module = self._ds
        self._split = bool(self._stage)
        self.masters: SplitState | None = None
        if self._split:
            self._finish: Any = _ZeroStep(self._ds, self._stage, settings, world)
            self._held = SplitState(model, self._ds.optimizer, self._stage, _accessors(package), world)
            self.masters = self._held
            add_counter(self.model, self._held.footprint)
        else:
            self._finish = OptimizerStep(model, made, settings, once="--engine deepspeed", dense="--engine deepspeed")
            self._module = model
        settings.say(f"--engine deepspeed {package.__version__}: ZeRO stage {self._stage} over {world.size} ranks")

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
            gradients = [p.grad for p in self._finish.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, float(self._world.size))
        result: StepResult = self._finish(factor, limit, momentum, evaluate)
        return result

    def _factor(self) -> float | Tensor:
        """What makes a sum of the mean that DeepSpeed exchanges. A scaled loss is as large as in every other engine:
        there ZeRO gets a scale that is smaller by this, and stage 0 makes up for it after the backward."""
        if self._scaled and not self._split:
            scale: float | Tensor = self._finish.scale
            return scale
        return float(self._world.size)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Nothing: what DeepSpeed has updated cannot be put back."""

    def state_dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._held.state_dict() if self._split else self._finish.state_dict(self._module)
        return {**found, **self._finish.scaling()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self._split:
            self._held.load_state_dict(self._finish.restore_scaling(state))  # collective
        else:
            self._finish.load_state_dict(self._module, state)


class _ZeroStep:
    """The end of a step under ZeRO: DeepSpeed's own, with lockstep's rates and loss scale."""

    def __init__(self, ds: Any, stage: int, settings: Settings, world: World) -> None:
        self._ds, self._zero, self._ranks = ds, ds.optimizer, world.size
        self._groups = [(group, float(group["lr"])) for group in self._zero.param_groups]
        self._scaler = LossScale(settings.loss_scaling) if settings.loss_scaling else None
        self._limit, self._seen = math.inf, math.nan
        asked = "scaled_global_norm" if stage < 3 else "_get_norm_groups"  # what DeepSpeed asks before it updates
        self._norm = getattr(self._zero, asked)
        setattr(self._zero, asked, self._limited_norm)
        self._scale()

    def __call__(
        self, factor: float | None, limit: float, momentum: float | None = None, evaluate: Evaluate | None = None
    ) -> StepResult:
        """One update, without a closure. DeepSpeed skips a step whose gradients are not finite: it waits to see."""
        if factor is not None:
            for group, rate in self._groups:
                group["lr"] = rate * factor
        for group, _ in self._groups:
            set_momentum(group, momentum)
        self._limit, self._seen = limit, math.inf
        self._ds.step()  # collective; waits for the device
        applied = not self._zero.overflow
        for gradient in self._left():
            gradient.zero_()
        norm = torch.tensor(self._seen, dtype=torch.float32)
        if self._scaler:
            self._scaler.learn(norm, applied)
            self._scale()
        return StepResult(norm, applied)

    def _limited_norm(self, *args: Any, **settings: Any) -> Any:
        """DeepSpeed's own norm, under the loss's scale; infinite, which has it skip the step, above the limit.

        Where it finds an overflow before it asks for the norm, the step's norm stays infinite.
        """
        found = self._norm(*args, **settings)  # collective
        groups = [float(norm) for norm in (found if isinstance(found, list) else [found])]  # waits for the device
        # -1 stands for a norm that is not finite
        self._seen = math.inf if min(groups) < 0.0 else math.hypot(*groups) / float(self._zero.loss_scale)
        if self._seen < self._limit:
            return found
        return [found[0] * math.inf] if isinstance(found, list) else math.inf

    def _left(self) -> list[Tensor]:
        """What ZeRO keeps of gradients beyond a step, and takes or adds to where a micro-batch leaves a parameter out.

        Under stage 3 its buffer; with offload those of stage 2 by parameter, and those of what is updated.
        """
        buffer = getattr(self._zero, "grad_partitions_flat_buffer", None)
        groups = getattr(self._zero, "fp32_partitioned_groups_flat", None) or self._zero.single_partition_of_fp32_groups
        kept = [buffer, *getattr(self._zero, "accumulated_grads_in_cpu", {}).values(), *(flat.grad for flat in groups)]
        return [tensor for tensor in kept if tensor is not None]

    def _scale(self) -> None:
        if self._scaler:
            self._zero.loss_scale = self._scaler.scale / self._ranks  # the loss is multiplied by the ranks

    def scaling(self) -> dict[str, Tensor]:
        return self._scaler.state_dict() if self._scaler else {}

    def restore_scaling(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._scaler:
            self._scaler.load_state_dict(state)
            self._scale()
        return {name: tensor for name, tensor in state.items() if not name.startswith("scaler/")}


def _check(settings: Settings, dtypes: set[torch.dtype]) -> None:
    if settings.exact:
        raise ConfigError(
            "--exact cannot hold with --engine deepspeed, which adds gradients in an order of its own; use --engine "
            "fsdp, zero or ddp"
        )
    if torch.float64 in dtypes:
        raise ConfigError("--engine deepspeed updates in float32, not --precision float64; use --engine fsdp")
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(f"--engine deepspeed: the model has parameters in {names}; give them one dtype")


def _package(world: World) -> Any:
    """The package, imported for the device of this run. Raises ConfigError where it is missing or cannot start."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    try:
        package: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"--engine deepspeed needs the package deepspeed ({error.name} is missing): "
            "pip install 'torch-lockstep[deepspeed]'"
        ) from error
    except Exception as error:  # it looks for compilers and CUDA while it is imported
        raise ConfigError(
            f"--engine deepspeed: the package cannot start here: {str(error).splitlines()[0]}; use --engine fsdp"
        ) from error
    if world.device.type == "cpu":
        # Exchanges by shared memory need a compiler and minutes at the first start; gloo does without.
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return package


def _initialised(package: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    try:
        made, *_ = package.initialize(model=model, optimizer=optimizer, config=config)  # collective
    except (AssertionError, ImportError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        missing = "ninja" in said or "CUDA_HOME" in said or "compiler" in said or "Error building" in said
        way_out = "install a compiler and ninja" if missing else "change --engine.config"
        raise ConfigError(f"--engine deepspeed: DeepSpeed refuses: {said[:300]}; {way_out}") from error
    return made


def _accessors(package: Any) -> Any:
    """The functions that read and write what ZeRO has split."""

    @contextlib.contextmanager
    def gathered(parameters: list[nn.Parameter], stage: int, writer: int | None = None) -> Iterator[None]:
        """Within, the parameters are whole; what rank `writer` wrote into them is kept."""
        if stage < 3:
            yield
            return
        with package.zero.GatheredParameters(parameters, modifier_rank=writer):
            yield

    utils = package.utils
    names = ("get_full", "set_full", "set_local")
    functions = {f"safe_{name}_fp32_param": getattr(utils, f"safe_{name}_fp32_param") for name in names}
    functions |= {f"safe_{name}_optimizer_state": getattr(utils, f"safe_{name}_optimizer_state") for name in names}
    return SimpleNamespace(gathered=gathered, **functions)
