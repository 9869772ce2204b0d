"""Plain loops, of one device or with DistributedDataParallel: the loop stays, its parts become lockstep's."""

import ast
import re
from collections.abc import Iterator

from lockstep.migrate.loops import loop_rows
from lockstep.migrate.parsing import Site, dotted, idents
from lockstep.migrate.script import BECOMES, GOES, STAYS, Row, Script

__all__ = ["is_distributed", "rows"]

_WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "fully_shard": "fsdp",
    "DataParallel": "ddp",
    "ZeroRedundancyOptimizer": "zero",
}
_SAVED = "lockstep.save_state(folder, world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)"
_LOADED = "lockstep.load_state(folder, world, engine=engine, scheduler=scheduler, loader=loader)"
_DIST = {
    "init_process_group": (BECOMES, "world = lockstep.World.join()"),
    "destroy_process_group": (BECOMES, "world.leave()"),
    "get_rank": (BECOMES, "world.rank"),
    "get_world_size": (BECOMES, "world.size"),
    "barrier": (BECOMES, "world.barrier(), where it is still needed: save_state waits by itself"),
    "is_initialized": (BECOMES, "world.size > 1"),
    "all_gather": (BECOMES, "lockstep.gather_for_metrics(step, found)"),
    "all_gather_object": (BECOMES, "world.gather(value)"),
    "broadcast_object_list": (BECOMES, "world.gather(value)[0]"),
    "all_reduce": (STAYS, "of a metric it may stay; lockstep.gather_for_metrics counts each sample once"),
    "reduce": (STAYS, "of a metric it may stay; lockstep.gather_for_metrics counts each sample once"),
}
_RANK = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")


def is_distributed(script: Script) -> bool:
    """Whether the script starts or joins processes of its own."""
    return any(full.startswith("torch.distributed.") or _wrapper(full) for _, full in script.called)


def rows(script: Script) -> Iterator[Row]:
    """What is told of a script; nothing where it computes no gradients."""
    if not any(script.view.steps.backwards(site) for site, _ in script.called):
        return
    wrapped = [site for site, full in script.called if _wrapper(full)]
    yield from _begin(script, wrapped)
    for site, full in script.called:
        yield from _call(script, site, full)
    yield from _environment(script)
    yield from loop_rows(script)


def _wrapper(full: str) -> str:
    return _WRAPPERS.get(full.rpartition(".")[2], "") if full.startswith("torch.") else ""


def _begin(script: Script, wrapped: list[Site]) -> Iterator[Row]:
    """Where the engine is made: in the place of a wrapper, else behind the optimizer."""
    for site in wrapped:
        name = _wrapper(script.view.full(site))
        held = ast.unparse(site.call.args[0]) if site.call.args else "model"
        if name == "zero":
            yield script.row(site.call, BECOMES, f'the optimizer itself, and lockstep.engine("{name}", ...)')
            continue
        given = "lambda model: make_optimizer(model)" if name == "fsdp" else "optimizer"
        here = f'engine = lockstep.engine("{name}", {held}, {given}, world), behind the optimizer; '
        yield script.row(site.call, BECOMES, f"{here}in the loop engine.model(...)")
    if wrapped:
        return
    for site, full in script.called:
        if re.search(r"^torch\.optim\.(?!lr_scheduler|swa)\w+(\.\w+)*$", full) and site.name[:1].isupper():
            target = dotted(site.stmt.targets[0]) if isinstance(site.stmt, ast.Assign) else None
            here = (
                "as it is; behind it world = lockstep.World.join() and engine = "
                f'lockstep.engine("auto", model.to(world.device), {target or "optimizer"}, world)'
            )
            yield script.row(site.call, STAYS, here)


def _call(script: Script, site: Site, full: str) -> Iterator[Row]:
    name, call = full.rpartition(".")[2] or site.name, site.call
    if full.startswith("torch.distributed.") and name in _DIST:
        if name == "all_reduce" and call.args and "grad" in set(idents(call.args[0])):
            yield script.row(call, GOES, "the engine sums gradients over the ranks")
        else:
            yield script.row(call, *_DIST[name])
    elif name == "DistributedSampler" and full:
        yield script.row(call, GOES, "lockstep.loader: the order is the same on any number of processes")
    elif name == "set_epoch" and site.receiver is not None:
        yield script.row(call, GOES, "each epoch of lockstep.loader has its own permutation")
    elif name == "no_sync" and site.receiver is not None:
        yield script.row(call, BECOMES, "with engine.accumulate(batch.last):")
    elif name == "GradScaler" and full:
        yield script.row(call, GOES, "lockstep.engine(..., loss_scaling=True)")
    elif name in ("update", "unscale_") and script.view.kinds.is_scaler(site.receiver, site.scope):
        yield script.row(call, GOES, "engine.step() does it")
    elif full in ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast"):
        yield script.row(call, BECOMES, 'lockstep.autocast(world, "bf16"), or "fp16" with loss_scaling=True')
    elif full == "torch.cuda.set_device":
        yield script.row(call, GOES, "World.join() sets it; world.device")
    elif full in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
        yield script.row(call, GOES, "torchrun, or lockstep launch --nproc-per-node N -- script.py")
    elif full == "torch.save":
        yield script.row(call, BECOMES, _SAVED)
    elif full == "torch.load":
        yield script.row(call, BECOMES, _LOADED)
    elif name == "convert_sync_batchnorm":
        here = 'may stay; lockstep.engine(..., batchnorm="replay") does not depend on the number of processes'
        yield script.row(call, STAYS, here)
    elif script.view.steps.backwards(site):
        yield script.row(call, BECOMES, "with engine.accumulate(batch.last): engine.backward(loss, batch.weight)")


def _environment(script: Script) -> Iterator[Row]:
    """Variables of a launcher that the script reads or sets itself."""
    for scope in script.module.scopes:
        for stmt in scope.stmts:
            if isinstance(stmt, ast.Assign | ast.Expr) and "environ" in set(idents(stmt)):
                names = {node.value for node in ast.walk(stmt) if isinstance(node, ast.Constant)}
                if any(isinstance(name, str) and _RANK.search(name) for name in names):
                    yield script.row(stmt, GOES, "World.join() reads it: world.rank, world.size, world.device")
