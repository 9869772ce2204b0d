"""Analyse loops around an `Accelerator` or a `Fabric`, by a table of their methods.

`plain.loop_rows` analyses the rest of the loop. A method that the table does not have is refused.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep.migrate.parsing import constant
from lockstep.migrate.plain import BECOMES, GOES, REFUSED, STAYS, MigrationRow, ParsedScript, loop_rows, shorten

__all__ = [
    "ACCELERATE",
    "FABRIC",
    "rows",
]

_ENGINE = 'engine = lockstep.engine("auto", model.to(world.device), optimizer, world)'
_LOADER_CUTS = "lockstep.loader splits batches, the same on any number of processes: remove it"


class Framework(NamedTuple):
    """A framework's central object, and the replacements for its API.

    Attributes:
        constructor: the full name of its constructor.
        arguments: of the constructor -> (action, the replacement).
        attributes: its methods and attributes -> (action, the replacement).
    """

    constructor: re.Pattern[str]
    arguments: Mapping[str, tuple[str, str]]
    attributes: Mapping[str, tuple[str, str]]


ACCELERATE = Framework(
    re.compile(r"^accelerate\.(\w+\.)*Accelerator$"),
    {
        "gradient_accumulation_steps": (GOES, "batch_size and micro_batch_size of lockstep.loader"),
        "gradient_accumulation_plugin": (GOES, "batch_size and micro_batch_size of lockstep.loader"),
        "mixed_precision": (BECOMES, "with lockstep.autocast(world, precision) around the forward"),
        "cpu": (BECOMES, 'lockstep.World.join(device="cpu")'),
        "log_with": (GOES, "your tracker's own calls, where world.is_main"),
        "project_dir": (GOES, "the folder of lockstep.save_state"),
        "project_config": (GOES, "the folder of lockstep.save_state"),
        "device_placement": (GOES, "the loader's batches are already on world.device"),
        "step_scheduler_with_optimizer": (GOES, "step a scheduler once per step"),
        "split_batches": (REFUSED, _LOADER_CUTS),
        "dispatch_batches": (REFUSED, _LOADER_CUTS),
        "even_batches": (GOES, "every sample is used once; a short step is padded with weight 0"),
        "dataloader_config": (REFUSED, _LOADER_CUTS),
        "fsdp_plugin": (BECOMES, 'lockstep.engine("fsdp", ...)'),
        "deepspeed_plugin": (BECOMES, 'lockstep.engine("zero" or "deepspeed", ...)'),
        "deepspeed_plugins": (REFUSED, "one engine for each model"),
        "megatron_lm_plugin": (REFUSED, "tensor and pipeline parallelism are not supported"),
        "parallelism_config": (REFUSED, "tensor and sequence parallelism are not supported"),
        "dynamo_backend": (BECOMES, "torch.compile of your own"),
        "dynamo_plugin": (BECOMES, "torch.compile of your own"),
        "kwargs_handlers": (STAYS, "check each: engine options go into options=lockstep.EngineOptions(...)"),
        "rng_types": (GOES, "generators are seeded by step and micro-batch"),
    },
    {
        "prepare": (BECOMES, f"{_ENGINE}, the loader as below; call engine.model(...) for model(...)"),
        "prepare_model": (BECOMES, _ENGINE),
        "prepare_optimizer": (BECOMES, _ENGINE),
        "prepare_data_loader": (BECOMES, "lockstep.loader(dataset, world, batch_size=..., micro_batch_size=...)"),
        "prepare_scheduler": (GOES, "use the scheduler unchanged"),
        "accumulate": (BECOMES, "with engine.accumulate(batch.last):"),
        "no_sync": (BECOMES, "with engine.accumulate(batch.last):"),
        "backward": (BECOMES, "engine.backward(loss, batch.weight)"),
        "clip_grad_norm_": (GOES, "clip=... of lockstep.engine; the norm is engine.step().norm"),
        "clip_grad_value_": (REFUSED, "an engine clips by the norm: clip= of lockstep.engine"),
        "sync_gradients": (GOES, "put the code for a complete step after the loop over its micro-batches"),
        "gradient_accumulation_steps": (GOES, "loader.micro_batches, over all processes"),
        "optimizer_step_was_skipped": (BECOMES, "not engine.step().applied"),
        "gather_for_metrics": (BECOMES, "lockstep.gather_for_metrics(step, found), found for each micro-batch"),
        "gather": (BECOMES, "lockstep.gather_for_metrics(step, found), or world.gather(value) of plain values"),
        "reduce": (BECOMES, "a sum over world.gather(value), or torch.distributed.all_reduce"),
        "pad_across_processes": (GOES, "gather_for_metrics accepts any number of rows of equal width"),
        "print": (BECOMES, "world.print(...)"),
        "is_main_process": (BECOMES, "world.is_main"),
        "is_local_main_process": (BECOMES, "world.is_main, if one process should print"),
        "is_last_process": (BECOMES, "world.rank == world.size - 1"),
        "process_index": (BECOMES, "world.rank"),
        "local_process_index": (BECOMES, "world.local_rank"),
        "num_processes": (BECOMES, "world.size"),
        "device": (BECOMES, "world.device"),
        "distributed_type": (BECOMES, "the engine name in your script"),
        "mixed_precision": (BECOMES, "the precision that your script passes to lockstep.autocast"),
        "use_distributed": (BECOMES, "world.size > 1"),
        "autocast": (BECOMES, "lockstep.autocast(world, precision)"),
        "save_state": (BECOMES, "lockstep.save_state(folder, world, step.number + 1, engine=engine, loader=loader)"),
        "load_state": (BECOMES, "lockstep.load_state(folder, world, engine=engine, loader=loader)"),
        "register_for_checkpointing": (GOES, "pass it to save_state and load_state"),
        "skip_first_batches": (GOES, "a restored loader continues at its position"),
        "save": (BECOMES, "torch.save where world.is_main"),
        "save_model": (
            BECOMES,
            "`lockstep export` of the saved state, or model.save_pretrained where world.is_main",
        ),
        "unwrap_model": (BECOMES, "the model itself; under fsdp read it from a checkpoint"),
        "get_state_dict": (BECOMES, "engine.state_dict(), or `lockstep export` of the saved state"),
        "wait_for_everyone": (BECOMES, "world.barrier(), if still needed: save_state waits by itself"),
        "main_process_first": (BECOMES, "if world.is_main: ...; world.barrier()"),
        "local_main_process_first": (BECOMES, "if world.is_main: ...; world.barrier()"),
        "on_main_process": (BECOMES, "if world.is_main:"),
        "on_local_main_process": (BECOMES, "if world.is_main:"),
        "init_trackers": (BECOMES, "your tracker's own call, where world.is_main"),
        "get_tracker": (BECOMES, "your tracker itself"),
        "trackers": (BECOMES, "your trackers themselves"),
        "log": (BECOMES, "your tracker's own call, where world.is_main"),
        "end_training": (BECOMES, "world.leave()"),
        "free_memory": (GOES, "del engine"),
        "clear": (GOES, "del engine"),
        "split_between_processes": (
            BECOMES,
            "lockstep.loader(..., shuffle=False), or your rows[world.rank :: world.size]",
        ),
        "join_uneven_inputs": (GOES, "every process gets the same number of micro-batches"),
        "unscale_gradients": (GOES, "the engine does it before clipping"),
        "scaler": (GOES, "lockstep.engine(..., loss_scaling=True)"),
        "set_trigger": (REFUSED, "no counterpart: use any(world.gather(flag))"),
        "check_trigger": (REFUSED, "no counterpart: use any(world.gather(flag))"),
        "state": (STAYS, "no counterpart: check what the script reads from it"),
    },
)

FABRIC = Framework(
    re.compile(r"^(lightning\.(\w+\.)*|lightning_fabric\.(\w+\.)*)Fabric$"),
    {
        "accelerator": (GOES, "lockstep.World.join(device=...)"),
        "devices": (GOES, "the launcher sets the number: torchrun, or lockstep launch"),
        "num_nodes": (GOES, "the launcher sets the number"),
        "strategy": (BECOMES, "the engine name: ddp, fsdp, zero, deepspeed"),
        "precision": (BECOMES, "with lockstep.autocast(world, precision) around the forward"),
        "loggers": (GOES, "your logger's own calls, where world.is_main"),
        "callbacks": (GOES, "lines of your loop"),
        "plugins": (STAYS, "no counterpart: check each"),
    },
    {
        "launch": (GOES, "torchrun, or lockstep launch"),
        "setup": (BECOMES, f"{_ENGINE}; call engine.model(...) for model(...)"),
        "setup_module": (BECOMES, _ENGINE),
        "setup_optimizers": (BECOMES, _ENGINE),
        "setup_dataloaders": (BECOMES, "lockstep.loader(dataset, world, batch_size=..., micro_batch_size=...)"),
        "no_backward_sync": (BECOMES, "with engine.accumulate(batch.last):"),
        "backward": (BECOMES, "engine.backward(loss, batch.weight)"),
        "clip_gradients": (GOES, "clip=... of lockstep.engine, by the norm"),
        "autocast": (BECOMES, "lockstep.autocast(world, precision)"),
        "save": (BECOMES, "lockstep.save_state(folder, world, step.number + 1, engine=engine, loader=loader)"),
        "load": (BECOMES, "lockstep.load_state(folder, world, engine=engine, loader=loader)"),
        "load_raw": (BECOMES, "torch.load before building the engine"),
        "print": (BECOMES, "world.print(...)"),
        "is_global_zero": (BECOMES, "world.is_main"),
        "global_rank": (BECOMES, "world.rank"),
        "local_rank": (BECOMES, "world.local_rank"),
        "world_size": (BECOMES, "world.size"),
        "device": (BECOMES, "world.device"),
        "to_device": (GOES, "the loader's batches are already on world.device"),
        "all_gather": (BECOMES, "lockstep.gather_for_metrics(step, found), or world.gather(value) of plain values"),
        "all_reduce": (BECOMES, "a sum over world.gather(value), or torch.distributed.all_reduce"),
        "broadcast": (BECOMES, "world.gather(value)[0]"),
        "barrier": (BECOMES, "world.barrier()"),
        "seed_everything": (STAYS, "torch.manual_seed for the model; seed= of lockstep.loader for the data"),
        "log": (BECOMES, "your logger's own call, where world.is_main"),
        "log_dict": (BECOMES, "your logger's own call, where world.is_main"),
        "logger": (BECOMES, "your logger itself"),
        "call": (BECOMES, "a line of your loop"),
        "rank_zero_first": (BECOMES, "if world.is_main: ...; world.barrier()"),
    },
)


def rows(script: ParsedScript, framework: Framework) -> Iterator[MigrationRow]:
    """Yield the rows of a script; none if it constructs no such object."""
    calls = script.constructions(framework.constructor)
    if not calls:
        return
    keys = script.bound_names(calls)
    for site in calls:
        yield script.row(site.call, BECOMES, "world = lockstep.World.join()")
        for option in site.call.keywords:
            code = f"{site.name}({option.arg or '**'}{'=' if option.arg else ''}{shorten(ast.unparse(option.value))})"
            if option.arg is None:
                yield script.row(option.value, STAYS, "its content is unknown", code)
            elif isinstance(option.value, ast.Constant) and constant(option.value) is None:
                continue
            else:
                action, advice = framework.arguments.get(option.arg, _UNKNOWN)
                yield script.row(option.value, action, advice, code)
    for node in script.attributes(keys):
        action, advice = framework.attributes.get(node.attr, _UNKNOWN)
        yield script.row(node, action, advice)
    for site, full in script.call_names:
        if full.endswith(("accelerate.skip_first_batches", "accelerate.utils.set_seed")):
            yield script.row(site.call, *_FUNCTIONS[site.name])
    own = {getattr(node, "lineno", 0) for node in script.attributes(keys)}
    for row in loop_rows(script):
        if row.line not in own or row.action == REFUSED or "division" in row.advice:
            yield row


_UNKNOWN = (REFUSED, "no counterpart in lockstep: remove it, or use torch directly")
_FUNCTIONS = {
    "skip_first_batches": (GOES, "a restored loader continues at its position"),
    "set_seed": (STAYS, "torch.manual_seed for the model; seed= of lockstep.loader for the data"),
}
