"""Divide the ranks of a run into replicas, whose ranks hold one model between them.

form_replicas(world, tensor=2)      # collective; then world.replica, world.data_parallel, world.part("tp")
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from lockstep.distributed.world import Replicas, World
from lockstep.errors import ConfigError

__all__ = ["form_replicas"]


def form_replicas(world: World, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> None:
    """Divide the ranks into replicas, and form their groups. Collective; once after the join.

    The mesh of all ranks is (dp, pp, cp, tp): the ranks of a replica follow each other, its tensor ranks closest.

    Args:
        world: all ranks of the run.
        tensor, context, pipeline: degrees; a replica has their product of ranks.

    Raises:
        ConfigError: the ranks are not a whole number of such replicas.
    """
    size = tensor * context * pipeline
    if min(tensor, context, pipeline) < 1 or world.size % size:
        raise ConfigError(
            f"{world.size} ranks are no whole number of replicas of {tensor} x {context} x {pipeline} (tensor, "
            "context, pipeline): choose degrees of at least 1 whose product divides the ranks"
        )
    if size == 1:
        return
    # A dimension of one rank has no group. "dp" always has, since the run's other ranks are found by it.
    sizes = {"dp": world.size // size}
    for name, degree in (("pp", pipeline), ("cp", context), ("tp", tensor)):
        if degree > 1:
            sizes[name] = degree
    ranks = torch.arange(world.size, device="cpu").view(*sizes.values())
    parts: dict[str, World] = {}
    for dim, name in enumerate(sizes):
        # All ranks form the groups of one dimension after the other.
        rows = ranks.movedim(dim, -1).reshape(-1, sizes[name])
        parts[name] = world.form_part(name, _row_of(rows, world.rank))  # collective
    mesh = _share_mesh(world, parts, ranks)
    gradient_group = parts["dp"]
    if context > 1:
        gradient_group = _form_gradient_group(world, parts, mesh)  # collective
    data_parallel = parts.pop("dp")
    if len(parts) == 1:
        (replica,) = parts.values()
    else:
        replica = world.form_part("replica", _row_of(ranks.view(-1, size), world.rank))  # collective
    # The loss is known on the last stage, so its first rank counts.
    leaders = tuple(range(size - tensor * context, world.size, size))
    by_stage = ranks.view(world.size // size, pipeline, -1).movedim(1, 0).reshape(pipeline, -1)
    stages = tuple(tuple(row) for row in by_stage.tolist())
    loss_ranks: list[int] = []
    for leader in leaders:
        # Each context rank has the loss of its positions; the tensor ranks have the same.
        loss_ranks += range(leader, leader + tensor * context, tensor)
    world.replicas = Replicas(data_parallel, replica, gradient_group, parts, leaders, tuple(loss_ranks), stages)


def _form_gradient_group(world: World, parts: dict[str, World], mesh: DeviceMesh) -> World:
    """Form the world of the ranks that differ in the dimensions "dp" and "cp" alone. Collective."""
    both = mesh["dp", "cp"]
    group = world.form_part("dp_cp", both.mesh.flatten().tolist())  # collective
    assert group.group is not None
    mesh = DeviceMesh.from_group(group.group, world.device.type, mesh_dim_names=("dp_cp",))
    group.mesh = _keep_mesh(world, mesh)
    context = parts["cp"]
    group.replicas = Replicas(parts["dp"], context, group, {"cp": context}, (), (), ())
    return group


def _row_of(rows: torch.Tensor, rank: int) -> list[int]:
    """Return the row that has the rank."""
    found: list[int] = rows[(rows == rank).any(dim=1)][0].tolist()
    return found


def _share_mesh(world: World, parts: dict[str, World], ranks: torch.Tensor) -> DeviceMesh:
    """Give the parts their dimension of one mesh of all ranks, with the groups that they have; return the mesh."""
    groups = []
    for part in parts.values():
        # None is the default group, which a world of some of the ranks never uses.
        assert part.group is not None
        groups.append(part.group)
    # One mesh, since FSDP joins the dimensions, and a save finds a tensor's other holders by the whole mesh.
    mesh = DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=tuple(parts))
    mesh = _keep_mesh(world, mesh)
    for name, part in parts.items():
        part.mesh = _keep_mesh(world, mesh[name])
    return mesh


def _keep_mesh(world: World, mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh as the object that the tensors of this process refer to.

    After a loss that is the mesh of the former ranks, which becomes a copy of the new one. This rank has the same part
    of each tensor among any number of replicas.
    """
    assert mesh.mesh_dim_names is not None
    kept = world.meshes.setdefault("-".join(mesh.mesh_dim_names), mesh)
    if kept is not mesh:
        vars(kept).update(vars(mesh))
    return kept
