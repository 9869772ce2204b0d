"""Apply `fully_shard`: the mesh, the units, dtypes, offload and prefetch, in `shard`.

`again` prepares a sharded model for a changed set of trained parameters. `leave_groups` and `shard` bring it from one
set of ranks to another (see training/recovery/regroup.py). `UsageCheck` refuses, on older versions of torch, an
exchange in which ranks used different parameters.
"""

import copy
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

# Private: FSDP describes with these how it shards what tensor ranks have divided.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.blocks import BlockUnits, find_blocks
from lockstep.engines.ddp import GradientUsage, send_from_rank_0, shorten
from lockstep.engines.fsdp.whole import find_whole, is_whole
from lockstep.engines.model_init import check_placeable, place
from lockstep.engines.request import EngineRequest
from lockstep.errors import ConfigError
from lockstep.tensors import shared_memory

__all__ = [
    "CAN_RESET",
    "FILLS_UNUSED",
    "WATCH",
    "UsageCheck",
    "again",
    "check",
    "correct_placements",
    "discard_iteration",
    "leave_groups",
    "replica_size",
    "shard",
]


# torch 2.13 and later fill in gradients of unused parameters.
FILLS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
# torch 2.13 and later can discard an unfinished iteration.
CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
# An attribute of the model: the engine's hook on its output.
WATCH = "_lockstep_output_watch"


class UsageCheck:
    """A check before each backward that exchanges gradients.

    Args:
        usage: counts this rank's backwards since the step began.
        world: the ranks.
        every: each micro-batch is exchanged, rather than the sum of a step's micro-batches.
    """

    def __init__(self, usage: GradientUsage, world: World, every: bool) -> None:
        self._usage = usage
        self._world = world
        self._every = every
        self._first: list[bool] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._usage.begin()
        self._first = None

    def __call__(self, loss: Tensor) -> None:
        """Check the backward of `loss` before it runs. One small collective.

        Raises:
            ConfigError: on every rank, if the coming exchange would not match.
        """
        flags = self._predict_use(loss)
        first_flags = self._first = self._first or flags
        mixed = []
        for flag, before in zip(flags, first_flags, strict=True):
            mixed.append(self._every and flag is not before)
        counts = torch.tensor([flags, mixed], dtype=torch.int32)
        # All ranks, before each backward that exchanges: FSDP would otherwise hang, or mix up gradients.
        collectives.all_reduce(counts, group=self._world.control)  # collective
        # On the host, so it does not wait for the device.
        users, mixing = counts.tolist()
        names = []
        for name, n in zip(self._usage.names, users, strict=True):
            if n not in (0, self._world.size):
                names.append(name)
        if names:
            self._refuse(names, self._describe_users(names[0], flags))
        names = []
        for name, n in zip(self._usage.names, mixing, strict=True):
            if n:
                names.append(name)
        if names:
            self._refuse(names, "used by some micro-batches of this step and not by others")

    def _predict_use(self, loss: Tensor) -> list[bool]:
        """Return which parameters will have a gradient after the backward of `loss`."""
        if self._every:
            flags = [False] * len(self._usage.names)
        else:
            flags = self._usage.list_used()
        if all(flags):
            return flags
        leaves = find_leaves(loss)
        uses = []
        for before, parameter in zip(flags, self._usage.parameters, strict=True):
            uses.append(before or parameter in leaves)
        return uses

    def _describe_users(self, name: str, flags: list[bool]) -> str:
        index = self._usage.names.index(name)
        # All ranks, only before an error: which of them use the parameter?
        by_rank = self._world.gather(flags[index])  # collective
        users = []
        idle = []
        for rank, uses in enumerate(by_rank):
            if uses:
                users.append(str(rank))
            else:
                idle.append(str(rank))
        return f"used by rank {shorten(users)} and not by rank {shorten(idle)} in this step"

    def _refuse(self, names: list[str], reason: str) -> None:
        raise ConfigError(
            f"--engine fsdp: torch {torch.__version__} cannot exchange the gradients of {shorten(names)}, {reason}; "
            "use torch 2.13 or newer, or --engine ddp, or have every rank use the same parameters in every step"
        )


def find_leaves(loss: Tensor) -> set[Tensor]:
    """Return the leaves that the backward of `loss` gives a gradient.

    Excludes what a reentrant activation checkpoint hides.
    """
    visited = {loss.grad_fn}
    todo = [loss.grad_fn]
    leaves = set()
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            # torch declares no `variable`; AccumulateGrad nodes have the parameter there.
            leaves.add(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following not in visited:
                visited.add(following)
                todo.append(following)
    return leaves


_DTYPES = {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def check(request: EngineRequest, world: World) -> None:
    """Raise ConfigError for options that this world, or exact mode, does not support."""
    options = request.options
    if options.cpu_offload and world.device.type != "cuda":
        raise ConfigError("--engine.cpu-offload frees GPU memory, and this process uses none; drop it")
    if request.exact:
        conflicts = {
            "--engine.sharding": options.sharding in ("hybrid", "none"),
            "--engine.cpu-offload": options.cpu_offload,
            "--engine.param-dtype": options.param_dtype != "same",
            "--engine.reduce-dtype": options.reduce_dtype != "same",
            "--engine.output-dtype": options.output_dtype != "same",
            "--engine.accumulate shard": options.accumulate == "shard",
        }
        wrong = []
        for name, is_set in conflicts.items():
            if is_set:
                wrong.append(name)
        if wrong:
            raise ConfigError(f"--exact with --engine fsdp does not work with {', '.join(wrong)}; drop it")
    if options.shard_size and options.sharding != "hybrid":
        raise ConfigError("--engine.shard-size is for --engine.sharding hybrid; set that, or drop it")


def shard(model: nn.Module, world: World, request: EngineRequest) -> DeviceMesh:
    """Shard the model in place on `world.device`; return the mesh. Collective.

    The shards are the mesh's last dimension. Each unit is moved to the device and sharded before the next, so at most
    one whole unit is there at a time. After the loss of a rank the others, whose model is sharded already, keep their
    shards, and a new process shards its model without them, since it gets its values later.

    Raises:
        ConfigError: a sharding that the world cannot form, or parameters that cannot be sharded.
    """
    options = request.options
    is_sharded = isinstance(model, FSDPModule)
    joins = not world.is_first and any(world.gather(is_sharded))  # collective, after a loss
    mesh = _mesh(options, world)
    if is_sharded:
        _renew(model, mesh)
        return again(model)
    blocks = find_blocks(model, request.blocks)
    _check_parameters(model, blocks, options)
    if options.meta_init and not joins:
        check_placeable(model, world)  # collective
    policies: dict[str, Any] = {
        "mesh": mesh,
        # None is FSDP's default: a unit frees its gathered parameters after its forward. The root does not, since the
        # backward would gather it again at once.
        "reshard_after_forward": False if options.sharding == "grad-op" else None,
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    for block in blocks.modules:
        place(list(block.modules()), world, send=options.meta_init, alone=joins)
        whole = set(find_whole(block))
        fully_shard(block, mp_policy=_precision(options, is_root=False), ignored_params=whole, **policies)
    inside = {module for block in blocks.modules for module in block.modules()}
    place([module for module in model.modules() if module not in inside], world, send=options.meta_init, alone=joins)
    whole = set(find_whole(model))
    fully_shard(model, mp_policy=_precision(options, is_root=True), ignored_params=whole, **policies)
    correct_placements(model)
    if not joins:
        send_from_rank_0((parameter.data for parameter in find_whole(model)), world)  # collective
    _prefetch(blocks.modules, options.prefetch)
    _report(blocks, mesh, request)
    return mesh


def again(model: nn.Module) -> DeviceMesh:
    """Make a sharded model exchange the currently required gradients; return its mesh.

    In its first forward a unit records the dtype in which its trained parameters are exchanged; a unit without trained
    parameters has recorded none.

    Raises:
        ConfigError: a unit would train parameters of several dtypes.
    """
    for name, module in model.named_modules():
        for parameter_group in _parameter_groups(module):
            trained = []
            for parameter in parameter_group.fsdp_params:
                if parameter.sharded_param.requires_grad:
                    trained.append(parameter)
            if len({parameter.sharded_param.dtype for parameter in trained}) > 1:
                raise ConfigError(
                    f"--engine fsdp: the block '{name}' would train parameters of several dtypes, which it exchanges "
                    "together; give them one dtype, or use --engine ddp"
                )
            # Private to FSDP: recomputes the dtypes that the group's first forward recorded.
            parameter_group._init_mp_dtypes()
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))


def correct_placements(model: nn.Module) -> None:
    """Place the shards of packed layers as they are cut: by tensor ranks first, then by FSDP.

    torch before 2.13 places them as if FSDP had cut first, so a checkpoint would store rows under the wrong numbers.
    Before the optimizer is made.
    """
    for module in model.modules():
        for parameter_group in _parameter_groups(module):
            for parameter in parameter_group.fsdp_params:
                _correct_placement(parameter)


def _correct_placement(parameter: Any) -> None:
    """Correct FSDP's placement of one parameter, if its layer is packed."""
    spec = parameter._sharding_spec
    if len(spec.placements) < 2:
        return
    own, divided = spec.placements[-2:]
    if type(divided) is not _StridedShard or type(own) is not Shard or own.dim != divided.dim:
        return
    ranks = spec.mesh.size(spec.mesh.ndim - 1)
    placements = (*spec.placements[:-2], _StridedShard(own.dim, split_factor=ranks), divided)
    parameter._spmd_placements = placements
    parameter._sharding_spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    parameter.sharded_param._spec = parameter._sharding_spec


def _parameter_groups(module: nn.Module) -> list[Any]:
    """Return FSDP's notes of the parameters that a unit exchanges together; none for another module."""
    # Private to FSDP, which has no public access to a unit's groups of parameters.
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    # torch 2.13 and later have several groups per unit.
    group = getattr(state, "_fsdp_param_group", None)
    return getattr(state, "_fsdp_param_groups", None) or ([group] if group else [])


def leave_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Discard a sharded model's unfinished step; return its groups, now unreferenced.

    `shard` brings other groups.

    The remains of the step: gathered parameters, gradients on their way, and the units' records of where they are.
    """
    units: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.append(module)
    if not units:
        return []
    # The hook keeps the engine, and with it a process group.
    if watching := vars(model).pop(WATCH, None):
        watching.remove()
    discard_iteration(units)
    groups = dict[dist.ProcessGroup, None]()
    for unit in units:
        unit.reshard()
        for parameter_group in _parameter_groups(unit):
            for parameter in parameter_group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
            for name in _GROUPS:
                if group := vars(parameter_group.mesh_info).get(name):
                    groups[group] = None
                    setattr(parameter_group.mesh_info, name, None)
            # Private to DeviceMesh: its registry keeps references to the groups.
            parameter_group.mesh_info.mesh._pg_registry.clear()
    return [*groups]


def discard_iteration(units: Sequence[Any]) -> None:
    """Discard what a failed forward or backward left in FSDP's units; the root comes first.

    Otherwise FSDP believes that a backward is still running, and exchanges no gradient in the next ones.
    """
    root = units[0]._get_fsdp_state()
    # The first forward marks the root; before it there is nothing to discard.
    if not root._is_root:
        return
    if CAN_RESET:
        units[0].reset_iter_state()
        return
    # torch 2.11 and 2.12 have no public function. This does what `reset_iter_state` of torch 2.13 does.
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root._state_ctx.post_backward_final_callback_queued = False
    root._state_ctx.iter_forward_root = None
    root._comm_ctx.post_forward_order.clear()
    for unit in units:
        unit._get_fsdp_state()._training_state = TrainingState.IDLE
        unit.reshard()
        for group in _parameter_groups(unit):
            group._training_state = TrainingState.IDLE


# Attributes of FSDP's mesh_info that refer to process groups.
_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")


def _renew(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give a sharded model the groups of `mesh`, where this rank has the same shard.

    The shards, averages and optimizer states are DTensors on DeviceMesh objects, which become copies of `mesh`: so
    these tensors stay as they are. This rank's shard has the same place and size in any number of replicas.
    """
    present: dict[int, DeviceMesh] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            present[id(parameter.device_mesh)] = parameter.device_mesh
    for former in present.values():
        vars(former).update(vars(_with_dimensions(mesh, former)))
    for module in model.modules():
        for parameter_group in _parameter_groups(module):
            # FSDP reads groups and sizes from the mesh in this constructor only.
            parameter_group.mesh_info.__post_init__()


def _with_dimensions(mesh: DeviceMesh, former: DeviceMesh) -> DeviceMesh:
    """Return the mesh, with the dimension of the tensor ranks too if `former` has it."""
    assert former.mesh_dim_names is not None
    divided = former.mesh_dim_names[mesh.ndim :]
    if not divided:
        return mesh
    # Private, as FSDP joins the dimensions of its shards and of a divided layer.
    return DeviceMesh._concatenate([mesh, mesh._get_root_mesh()[divided]])


def replica_size(options: EngineOptions, world: World) -> int:
    """Return the number of ranks that together have one copy of the states."""
    if options.sharding in ("full", "grad-op"):
        return world.size
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if options.sharding == "none":
        return 1
    return options.shard_size or node


def _mesh(options: EngineOptions, world: World) -> DeviceMesh:
    """Form the ranks' mesh. Collective."""
    device_type = world.device.type
    size = replica_size(options, world)
    if options.sharding in ("full", "grad-op"):
        # Joined with the dimension over which layers are cut, so it comes from the same mesh.
        if world.mesh is not None:
            return world.mesh
        return init_device_mesh(device_type, (world.size,), mesh_dim_names=("shard",))
    # After a failure a single group of replicas may remain.
    too_few = world.is_first and world.size == size
    if options.sharding == "hybrid" and (size < 2 or world.size % size or too_few):
        raise ConfigError(
            f"--engine.sharding hybrid cannot form groups of {size} from {world.size} processes: it needs at least two "
            "groups of at least two; set --engine.shard-size, or use --engine.sharding full"
        )
    names = ("replicate", "shard")
    if world.is_first and world.mesh is None:
        return init_device_mesh(device_type, (world.size // size, size), mesh_dim_names=names)
    # New groups, not the default one: the failure of a further rank then shows soon.
    ranks = torch.arange(world.size).view(-1, size)
    # Tensors on the host: no device is waited for.
    copies = ranks[:, world.rank % size].tolist()
    shard_ranks = ranks[world.rank // size].tolist()
    # All ranks make their two groups in this order.
    groups = [world.new_group(copies, None), world.new_group(shard_ranks, None)]  # collective
    if world.mesh is not None:
        return _divide_dimension(world.mesh, groups, (world.size // size, size), names)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _divide_dimension(
    mesh: DeviceMesh, groups: list[dist.ProcessGroup], sizes: tuple[int, int], names: tuple[str, str]
) -> DeviceMesh:
    """Return a mesh of one dimension as one of two, with these groups, on the same mesh of all ranks."""
    # Private: torch has no public way to divide a dimension. A mesh without groups gets none there.
    bare = copy.copy(mesh)
    del bare._dim_group_names
    divided = bare._unflatten(0, sizes, names)
    divided._dim_group_names = [group.group_name for group in groups]
    divided._get_root_mesh()._pg_registry.update({group.group_name: group for group in groups})
    return divided


def _precision(options: EngineOptions, is_root: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[options.param_dtype],
        reduce_dtype=_DTYPES[options.reduce_dtype],
        output_dtype=_DTYPES[options.output_dtype] if is_root else None,  # between blocks nothing is cast
    )


def _check_parameters(model: nn.Module, blocks: BlockUnits, options: EngineOptions) -> None:
    whole = [
        f"the {'empty' if p.ndim else '0-dim'} parameter {name}" for name, p in model.named_parameters() if is_whole(p)
    ]
    if whole and options.cpu_offload:
        raise ConfigError(
            f"--engine.cpu-offload does not work with {whole[0]}, which stays on the device; give it the shape [1], or "
            "drop the flag"
        )
    if whole and len(whole) == len(list(model.parameters())):
        raise ConfigError(f"--engine fsdp cannot split {whole[0]}, and the model has no other; use --engine ddp")
    strided = [name for name, p in model.named_parameters() if not p.is_contiguous()]
    if strided:
        raise ConfigError(
            f"--engine fsdp cannot split {strided[0]}, which is not contiguous (channels_last, or transposed); make it "
            "contiguous, or use --engine ddp"
        )
    # AdamW and similar optimizers update `view_as_real` of a parameter. For a shard that is a copy, so the shard would
    # never change.
    complexes = [name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad]
    if complexes:
        raise ConfigError(
            f"--engine fsdp cannot train the complex parameter {complexes[0]}: torch's optimizers do not move shards "
            "of such; store it as real numbers (torch.view_as_complex in the forward), or use --engine ddp"
        )
    _check_aliases(model)
    inside = {p for block in blocks.modules for p in block.parameters()}
    groups = [list(block.parameters()) for block in blocks.modules]
    groups.append([p for p in model.parameters() if p not in inside])
    for group in groups:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in group if p.requires_grad and not is_whole(p)}
        if len(dtypes) > 1:
            raise ConfigError(
                f"--engine fsdp: a block has parameters in {' and '.join(sorted(dtypes))}, and exchanges them "
                "together; give them one dtype, or use --engine ddp"
            )


def _check_aliases(model: nn.Module) -> None:
    """Refuse a second reference to a trained parameter.

    It would keep the values from before the split.
    """
    way_out = "take it from its module in the forward, or use --engine ddp"
    trained = {}
    for name, p in model.named_parameters():
        if p.requires_grad and not is_whole(p):
            trained[name] = p
    for pair in shared_memory(dict([*model.named_parameters(), *model.named_buffers()])):
        if not trained.keys().isdisjoint(pair):
            raise ConfigError(f"--engine fsdp: {pair[0]} and {pair[1]} share memory that it splits; {way_out}")
    names = {id(p): name for name, p in trained.items()}
    for prefix, module in model.named_modules():
        setter: Any = type(module).__setattr__
        if setter is not nn.Module.__setattr__:
            # A custom setter, as an RNN's, notices that FSDP replaces a parameter.
            continue
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules"):
                continue
            alias = None
            for leaf in pytree.tree_leaves(value):
                if id(leaf) in names:
                    alias = names[id(leaf)]
                    break
            if alias is not None:
                path = f"{prefix}.{attribute}".lstrip(".")
                raise ConfigError(f"--engine fsdp: {path} holds {alias}, a parameter that it splits; {way_out}")


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    if not ahead:
        return
    units = [cast(Any, block) for block in blocks]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1])


def _report(blocks: BlockUnits, mesh: DeviceMesh, request: EngineRequest) -> None:
    options = request.options
    suffix = " and the rest" if blocks.modules else ""
    request.say(f"--engine fsdp, sharding {options.sharding} over {list(mesh.shape)} ranks: {blocks.origin}{suffix}")
    if options.cpu_offload:
        request.say(
            "--engine.cpu-offload: each step copies all parameters to the GPU and all gradients back, and the update "
            "runs on the CPU, so a step may take several times as long; it is for models that do not fit otherwise"
        )
