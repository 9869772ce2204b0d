"""Build an engine by name, and check what it supports.

engine = make_engine("ddp", model, make_optimizer, world, request)
reason = engine_class("ddp").explain_no_backward(exact=True)

`engine` is the front for users. The `check_*` functions refuse what an engine does not support. `engine_class` answers
for an engine that is not built yet, by the static methods of `BareEngine`. `variants` serves `lockstep plan`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.engine_options import ENGINES, EngineOptions, own_options
from lockstep.config.schema import flag
from lockstep.config.sections import Fp16
from lockstep.distributed.balance import ShareSchedule, shares_of_counts
from lockstep.distributed.world import World
from lockstep.engines.base import BareEngine, Engine, ForwardingEngine, bare_engine
from lockstep.engines.buffers import with_buffers
from lockstep.engines.ema import EMAEngine
from lockstep.engines.exact import check_servable
from lockstep.engines.gradient_norms import NO_NORMS, GradientNorms
from lockstep.engines.manual import Manual
from lockstep.engines.model_init import copy_expanded, init_context
from lockstep.engines.optimizer_step import OptimizerStep
from lockstep.engines.request import Changes, EngineRequest, MakeOptimizer, MakePenalty, OwnState
from lockstep.engines.wrappers import Copied, Hooked, Remade
from lockstep.errors import ConfigError
from lockstep.hooks import Hooks, OwnSteps
from lockstep.run_state import TrainedSet
from lockstep.tensors import is_dtensor
from lockstep.transforms.batchnorm import recording
from lockstep.transforms.weight_copies import copies_of

__all__ = [
    "backward_apart",
    "check_audit",
    "check_copies",
    "check_embeddings",
    "check_optimizer",
    "check_shares",
    "check_sharing",
    "engine",
    "engine_class",
    "explain_no_replica",
    "kinds",
    "load_weights",
    "make_engine",
    "model_init",
    "name_of",
    "options_for",
    "replaced_copies",
    "trained_set",
    "undo_step",
    "variants",
]


_REBUILD_REFUSAL = (
    "--engine {} fixed the trained parameters when it was built; set requires_grad in the task's model(), or use "
    "--engine fsdp"
)
_PIPELINE_REFUSAL = (
    "--parallel.pipeline {} fixed the trained parameters when the stages were made; set requires_grad in the task's "
    "model()"
)


# PLR0913: a function for users, who name the arguments that they need.
def engine(  # noqa: PLR0913
    name: str,
    model: nn.Module,
    optimizer: Optimizer | MakeOptimizer,
    world: World,
    *,
    clip: float = 0.0,
    exact_micro_batches: int = 0,
    shares: Sequence[int] | ShareSchedule | None = None,
    loss_scaling: bool | Fp16 = False,
    blocks: Iterable[nn.Module] = (),
    options: EngineOptions | None = None,
    say: Callable[[str], None] | None = None,
    ema: float = 0.0,
    batchnorm: Literal["local", "replay"] = "local",
    hooks: Hooks | None = None,
    own_steps: OwnSteps | None = None,
    gradients: GradientNorms = NO_NORMS,
    penalty: MakePenalty | None = None,
    own: OwnState | None = None,
    changes: Changes | None = None,
) -> Engine:
    """Build the engine `name` around a model, for the built-in loop or your own.

        engine = lockstep.engine("fsdp", model, lambda model: AdamW(model.parameters(), lr=1e-3), world, clip=1.0)
        for batch in micro_batches:
            with engine.accumulate(last=batch is micro_batches[-1]):
                engine.backward(loss(engine.model, batch), 1 / items)   # items of the whole step, over all ranks
        norm, applied = engine.step()           # a scheduler of your own sets the rates; step(factor) does it here

    Args:
        name: a key of ENGINES, or "auto": ddp if a launcher started this process, else single.
        model: on `world.device`; fsdp accepts any device, and moves it there block by block.
        optimizer: one over the model's parameters, or a function that builds it from the model as the engine holds it;
            fsdp needs the function.
        world: see `World.join`.
        clip: largest 2-norm of the gradient; 0 does not clip.
        exact_micro_batches: M, to sum a step's M micro-batches in the fixed tree; 0: as the backend does. Each rank
            then has ceil(M / world) backwards in every step; those of empty slots have weight 0.
        shares: number of a step's micro-batches that each rank computes, consecutive by rank; or a `ShareSchedule`,
            which gives it for the current step; None: equal shares. For single, ddp and zero.
        loss_scaling: scales the loss, and skips a step that overflows, for a model under float16 autocast. True uses
            the defaults of `Config.fp16`.
        blocks: the model's repeated blocks, in order; fsdp searches for them if none are given.
        options: options of the engine; None: the defaults.
        say: reports one line to the user, on every rank; None: the log.
        ema: decay of an average of the weights (see `lockstep.engines.ema`); 0: none.
        batchnorm: how running statistics of BatchNorm layers are kept. "local": torch's own, with rank 0's on all
            ranks after each step. "replay": over all ranks' micro-batches in order, so that they do not depend on the
            world size; the layers are changed in place, and every rank must make the same number of backwards in a
            step (except with `shares`). A step of the built-in loop does the same.
        hooks: a task's hooks, called after each backward and each update; None: none.
        own_steps: of a task that steps its optimizers itself, with single and ddp; None: the engine steps.
        gradients: takes gradient norms by block, for the built-in loop.
        penalty: returns a term of the loss from the model without the engine's wrapper: a 0-dim tensor that depends on
            the parameters alone, added once a step for any number of micro-batches and ranks.
        own: a task's own tensors; what a forward writes to them is part of the step, as with buffers. None: no task.
        changes: settings of a run for changes to the trained parameters, see `Changes`; None: none.

    Raises:
        ConfigError: an unknown engine, one that this world cannot form, an option or argument that it does not
            support, or an optimizer that does not work with it.
    """
    name = name_of(name, world)
    options = options or EngineOptions()
    request = EngineRequest(
        clip=clip,
        exact=exact_micro_batches,
        sharing=_share_schedule(name, shares, exact_micro_batches, world, options),
        loss_scaling=Fp16() if loss_scaling is True else loss_scaling or None,
        blocks=tuple(blocks),
        options=options,
        ema=ema,
        batchnorm=batchnorm,
        hooks=hooks,
        own_steps=own_steps,
        gradients=gradients,
        penalty=penalty,
        own=own or OwnState(),
        changes=changes or Changes(),
    )
    if say is not None:
        request = dataclasses.replace(request, say=say)
    return make_engine(name, model, optimizer, world, request)


def make_engine(
    name: str, model: nn.Module, optimizer: Optimizer | MakeOptimizer, world: World, request: EngineRequest
) -> Engine:
    """Make the engine `name` around a model, as `engine` does.

    Raises:
        ConfigError: see `engine`.
    """
    name = name_of(name, world)
    if copies_of(model):
        request = dataclasses.replace(request, single_pass_flag="--weight-copies step")
    if world.replica.size > 1 and not ENGINES[name].replicas:
        raise ConfigError(
            f"--engine {name} does not work with replicas of {world.replica.size} ranks (form_replicas): use "
            "--engine ddp"
        )
    # The ranks that compute different samples, or different positions of them.
    peers = world.gradient_group
    # Checks before anything is changed in the model.
    if world.replica.size == 1:
        # Otherwise its parameters are cut, see `parallel.tensor`.
        _check_uncut(name, model)
    _check_request(name, model, peers, request)
    if request.batchnorm == "replay":
        recording(model, request.say)
    copy_expanded(model)
    builder = _Builder(name, model, optimizer, peers, request)
    refusal = "" if ENGINES[name].remade else _REBUILD_REFUSAL.format(name)
    if request.pipeline:
        # Norm and checkpoint know the parameters that were trained when the stages were made.
        refusal = _PIPELINE_REFUSAL.format(request.pipeline.stages.size)
    return Remade(
        model,
        world,
        builder,
        builder.make_optimizer,
        request.changes,
        fixed_optimizer=isinstance(optimizer, Optimizer),
        refusal=refusal,
        reads_groups=request.own_steps is not None,
    )


class _Builder:
    """Build an engine with its wrappers, once more after each change of the trained parameters.

    Args:
        name: a key of ENGINES.
        model: the plain module.
        optimizer: one over the model's parameters, or a function that builds it from the model as the engine holds it.
        world: the ranks.
        request: checked.
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer | MakeOptimizer, world: World, request: EngineRequest
    ) -> None:
        self._name = name
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._request = request
        self._class = Manual if request.own_steps else engine_class(name)
        # The optimizer that `make_optimizer` has built last, for the averages of its weights.
        self._newest: Optimizer | None = None

    def make_optimizer(self, module: nn.Module) -> Optimizer:
        """Return the optimizer of the model as the engine holds it. Raises ConfigError if it does not fit."""
        optimizer = self._optimizer
        instance = optimizer if isinstance(optimizer, Optimizer) else optimizer(module)
        self._newest = instance
        check_optimizer(self._name, instance, exact=bool(self._request.exact) and self._world.size > 1)
        self._request.gradients.look_at(self._model, self._request.blocks, instance)
        return instance

    def __call__(self, make_optimizer: MakeOptimizer, wrapper: nn.Module | None, rested: Collection[str]) -> Engine:
        """Build the engine; see `Make`. The wrappers, from the inside: weight copies, hooks, buffers, averages."""
        request = dataclasses.replace(self._request, wrapper=wrapper)
        bare: BareEngine = self._class(self._model, make_optimizer, self._world, request)
        engine: Engine = bare
        if copies := copies_of(self._model):
            engine = Copied(engine, copies)
        if request.hooks:
            engine = Hooked(engine, request.hooks)
        # Manual keeps the buffers itself.
        if not request.own_steps:
            # What forwards write is exchanged among the ranks that compute different samples.
            engine = with_buffers(engine, self._model, self._world.data_parallel, request)
        if request.ema:
            engine = EMAEngine(engine, self._model, request.ema, bare.masters, rested, self._newest)
        return engine


def _check_uncut(name: str, model: nn.Module) -> None:
    """Raise ConfigError if parameters are DTensors already, but of a model that fsdp itself has sharded."""
    # fsdp's model returns here after the failure of a rank.
    if hasattr(model, "reshard"):
        return
    for key, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ConfigError(f"--engine {name}: the parameter {key} is a DTensor already: give the plain model")


def _check_request(name: str, model: nn.Module, world: World, request: EngineRequest) -> None:
    """Raise ConfigError if the engine does not support the request, in this world or with this model."""
    is_exact = bool(request.exact)
    if is_exact:
        check_servable(request.exact, world.data_parallel.size)
    has_own_steps = request.own_steps is not None
    if copies := copies_of(model):
        check_copies(
            name, narrow=copies.narrow, exact=is_exact, hooked=request.hooks is not None, own_steps=has_own_steps
        )
    _check_gradient_norms(name, request)
    _check_options(name, request.options)
    if request.sharing:
        check_sharing(name, "auto", request.options)
    if request.penalty is not None:
        check_penalty(name, exact=is_exact and world.size > 1, own_steps=has_own_steps)
    if request.batchnorm not in ("local", "replay"):
        raise ConfigError(f"lockstep.engine: batchnorm is '{request.batchnorm}': use 'local' or 'replay'")
    check_embeddings(name, model, exact=is_exact, once=request.single_pass_flag)
    if has_own_steps:
        _check_own_steps(name, world, request)


def _check_own_steps(name: str, world: World, request: EngineRequest) -> None:
    """Raise ConfigError unless a task can step its optimizers itself with this engine and request."""
    if request.clip or request.ema:
        raise ConfigError("lockstep.engine: clip and ema do not work with own_steps, which take several updates")
    if request.own.by_sample:
        raise ConfigError("the task's sample_state does not work with own_steps, which take several updates in a step")
    if not ENGINES[name].own_steps:
        raise ConfigError(
            f"--engine {name} does not work with a task that steps its optimizers itself, within a micro-batch: use "
            "--engine ddp"
        )
    if ENGINES[name].one_process and world.size > 1:
        raise ConfigError(f"--engine {name} with {world.size} processes: use --engine ddp, or start one process")


def check_optimizer(name: str, optimizer: Optimizer, *, exact: bool) -> None:
    """Raise ConfigError if the optimizer does not work with the engine.

    One whose update of an element depends on that element alone works with every engine. Optimizers outside torch are
    the user's responsibility.

    Args:
        exact: exact mode with several ranks.
    """
    known = {kind for entry in ENGINES.values() for kind in entry.refused}
    # The nearest base class decides, for a subclass of an optimizer.
    kind = ""
    for base in type(optimizer).__mro__:
        if base.__name__ in known:
            kind = base.__name__
            break
    if why := ENGINES[name].refused.get(kind):
        raise ConfigError(
            f"--engine {name} does not work with {type(optimizer).__name__}: {why}; use AdamW, or see docs/engines.md"
        )
    engine_class(name).check_optimizer(optimizer, exact=exact)


def check_embeddings(engine: str, model: nn.Module, *, exact: bool, once: str) -> None:
    """Raise ConfigError for an embedding with sparse gradients where gradients must be dense.

    Args:
        exact: gradients are added in a fixed tree.
        once: another flag that requires dense gradients; "": none does.
    """
    if ENGINES[engine].sparse_gradients and not exact and not once:
        return
    why = "--exact" if exact else once or f"--engine {engine}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            weight = f"{name}.weight".lstrip(".")
            raise ConfigError(
                f"the gradient of {weight} is sparse, and {why} needs dense ones: build the embedding with "
                "sparse=False, or use --engine single without --exact"
            )


def check_penalty(name: str, *, exact: bool, own_steps: bool) -> None:
    """Raise ConfigError if the engine does not support a penalty.

    Args:
        exact: exact mode with several ranks.
        own_steps: the task steps its optimizers itself.
    """
    if own_steps:
        raise ConfigError(
            "`penalty` does not work with a task that steps its optimizers itself: add it to the loss there"
        )
    if not ENGINES[name].penalty:
        raise ConfigError(f"--engine {name} does not work with `penalty`: use --engine fsdp, zero or ddp")
    if exact and not ENGINES[name].exact_penalty:
        raise ConfigError(
            f"--exact with --engine {name} does not work with `penalty`, whose sums over shards depend on the number "
            "of processes: use --engine zero or ddp"
        )


def _share_schedule(
    name: str, shares: Sequence[int] | ShareSchedule | None, micro_batches: int, world: World, options: EngineOptions
) -> ShareSchedule | None:
    """Return the schedule of the shares; None: equal ones. Raises ConfigError if the numbers do not fit."""
    if not shares:
        return None
    if isinstance(shares, ShareSchedule):
        return shares
    check_shares(name, shares, micro_batches or sum(shares), world.data_parallel.size, options)
    counts = shares_of_counts(shares)
    return ShareSchedule(lambda step: counts)


def check_shares(name: str, counts: Sequence[int], micro_batches: int, ranks: int, options: EngineOptions) -> None:
    """Raise ConfigError if the shares do not fit the step, the world or the engine."""
    text = ",".join(map(str, counts))
    if len(counts) != ranks:
        raise ConfigError(f"--shares {text} has {len(counts)} numbers for {ranks} processes: give one for each")
    if sum(counts) != micro_batches:
        raise ConfigError(
            f"--shares {text} adds up to {sum(counts)} micro-batches, but a step has {micro_batches}: change a share "
            "or --micro-batch-size"
        )
    check_sharing(name, text, options)


def check_sharing(name: str, shares: str, options: EngineOptions) -> None:
    """Raise ConfigError if the engine does not support unequal shares."""
    if not ENGINES[name].shares:
        raise ConfigError(
            f"--shares {shares} does not work with --engine {name}, whose forwards involve every rank, so that one "
            "with less work would wait: use --engine ddp or zero"
        )
    if options.static_graph:
        raise ConfigError(
            f"--shares {shares} does not work with --engine.static-graph, which exchanges after each micro-batch; drop "
            "one"
        )


def undo_step(engine: Engine) -> None:
    """Undo an unfinished step, except changes to parameters.

    An engine that survives the loss of a rank changes parameters last, after its last exchange.
    """
    if isinstance(engine, ForwardingEngine):
        engine.undo_step()


def load_weights(engine: Engine, state: dict[str, Tensor]) -> None:
    """Load a state with other weights into the engine.

    The first step still creates the optimizer's states, since these belong to the weights.

    Some optimizers keep copies of the weights, such as schedule-free ones.
    """
    update = getattr(bare_engine(engine), "_update", None)
    is_blank = isinstance(update, OptimizerStep) and update.blank
    engine.load_state_dict(state)
    if is_blank and isinstance(update, OptimizerStep):
        update.blank = True


def replaced_copies(engine: Engine) -> dict[str, Tensor]:
    """Return totals of the copies that updates have replaced, by parameter.

    {}: the engine's updates replace none.

    They differ between ranks if a copy did before an update.
    """
    bare = bare_engine(engine)
    return bare.copies() if isinstance(bare, BareEngine) else {}


def backward_apart(engine: Engine) -> AbstractContextManager[Callable[[Tensor, float], None]]:
    """Return a context with a backward (loss, weight) outside of steps.

    It leaves no trace but `.grad`.

    With sharded parameters it is collective, and sums over the ranks; else it is of this rank's plain module.
    """
    bare = bare_engine(engine)
    assert isinstance(bare, BareEngine)
    return bare.apart()


def explain_no_replica(name: str, options: EngineOptions, optimizer: Optimizer | None) -> str:
    """Return why the run cannot continue after a rank fails.

    Its states may be lost with it, or left between two steps. "": the other ranks have them whole.
    """
    kind = engine_class(name)
    if not ENGINES[name].survives_loss or not kind.has_replicas(options):
        return (
            f"--engine {name} splits the states over the ranks, so a lost rank takes its part along; ddp survives, and "
            "fsdp with --engine.sharding hybrid"
        )
    return kind.explain_no_undo(optimizer)


def trained_set(engine: Engine) -> TrainedSet | None:
    """Return the trained parameters; None while they are those of a new run."""
    if isinstance(engine, Remade):
        return engine.find_trained_set()
    return None


def kinds(engine: Engine) -> dict[str, str]:
    """Describe, by name in the state, tensors that forwards write and unfrozen parameters."""
    if isinstance(engine, ForwardingEngine):
        return engine.kinds()
    return {}


def check_audit(name: str) -> None:
    """Raise ConfigError if a rank cannot compute a micro-batch by itself."""
    if not ENGINES[name].shares:
        raise ConfigError(
            f"--guards.audit does not work with --engine {name}, where a rank cannot compute another's micro-batch by "
            "itself: use --engine ddp or zero, or drop it"
        )


def _check_gradient_norms(name: str, request: EngineRequest) -> None:
    """Raise ConfigError if the engine cannot take the requested gradient norms."""
    if request.gradients.by == "off":
        return
    if request.own_steps is not None:
        raise ConfigError(
            "--log-gradients does not work with a task that steps its optimizers itself, since each step has its own "
            "gradients: log them there, or drop it"
        )
    if not ENGINES[name].block_norms:
        able = ", ".join(engine_name for engine_name, spec in ENGINES.items() if spec.block_norms)
        raise ConfigError(
            f"--log-gradients {request.gradients.by} does not work with --engine {name}, which has one norm of all "
            f"gradients: use one of {able}, or drop it"
        )


def check_copies(name: str, *, narrow: bool, exact: bool, hooked: bool, own_steps: bool) -> None:
    """Raise ConfigError if the engine or task does not support `--weight-copies step`.

    Args:
        narrow: a step's gradients are added in bfloat16.
        exact: they are added in a fixed tree.
        hooked: the task has hooks, which may read gradients after each backward.
        own_steps: the task steps its optimizers itself.
    """
    if not ENGINES[name].weight_copies:
        raise ConfigError(
            f"--weight-copies step does not work with --engine {name}, which exchanges the parameters' own gradients: "
            "use --engine single, or drop it"
        )
    if own_steps:
        raise ConfigError("--weight-copies step does not work with a task that steps its optimizers itself: drop it")
    if narrow and (exact or hooked):
        if exact:
            conflict = "--exact, whose tree adds"
        else:
            conflict = "a task with hooks, which may read"
        raise ConfigError(
            f"--grad-dtype bf16 does not work with {conflict} the gradients of each micro-batch: drop it, and "
            "--weight-copies step sums them in float32"
        )


def name_of(name: str, world: World) -> str:
    """Return the engine's name with "auto" resolved. Raises ConfigError for an unknown one."""
    if name == "auto":
        name = "single" if world.control is None else "ddp"
    if name not in ENGINES:
        raise ConfigError(f"--engine is '{name}': choose one of auto, {', '.join(ENGINES)}")
    return name


class ModelInit(NamedTuple):
    """How to build a model for an engine.

    Attributes:
        where: the context to build it in.
        moves: the caller then moves it to the device; otherwise the engine does.
    """

    where: AbstractContextManager[object]
    moves: bool


def model_init(name: str, world: World, options: EngineOptions) -> ModelInit:
    """Return how to build the model. Raises ConfigError for an unsupported name or option."""
    name = name_of(name, world)
    _check_options(name, options)
    return ModelInit(init_context(options, world), not ENGINES[name].places_model)


def options_for(name: str, options: EngineOptions) -> EngineOptions:
    """Keep the options that the engine has; reset the others to their defaults."""
    return EngineOptions(**{option: getattr(options, option) for option in own_options(name)})


def engine_class(name: str) -> type[BareEngine]:
    """Import the class of the engine `name`, a key of ENGINES.

    On demand, so that an engine's package is loaded only where it is used.
    """
    module, _, class_name = ENGINES[name].path.partition(":")
    found: type[BareEngine] = getattr(importlib.import_module(f"lockstep.engines.{module}"), class_name)
    return found


def _check_options(name: str, options: EngineOptions) -> None:
    """Raise ConfigError for an option that the engine does not have."""
    has = own_options(name)
    for spec in dataclasses.fields(options):
        if spec.name not in has and getattr(options, spec.name) != spec.default:
            options_here = ", ".join(flag(f"engine_options.{option}") for option in has) or "none"
            raise ConfigError(
                f"{flag(f'engine_options.{spec.name}')} is not an option of --engine {name}; drop it "
                f"(its own: {options_here})"
            )


_SPLIT = ("full", "grad-op")


def variants(size: int, options: EngineOptions, replica: int = 1) -> Iterator[tuple[str, EngineOptions]]:
    """Yield the engines, with each way to shard, that `size` processes can form and trace.

    Args:
        options: the requested options; each engine uses those that it has.
        replica: ranks that hold one model between them.
    """
    for name, entry in ENGINES.items():
        if not entry.everywhere or entry.one_process != (size == 1) or (replica > 1 and not entry.replicas):
            continue
        options_of_engine = EngineOptions(**{option: getattr(options, option) for option in own_options(name)})
        if "sharding" not in own_options(name) or options_of_engine.sharding not in _SPLIT:
            yield name, options_of_engine
            continue
        for sharding in _SPLIT:
            yield name, dataclasses.replace(options_of_engine, sharding=sharding)
