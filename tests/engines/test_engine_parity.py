"""Every engine trains as `single` does, at every world size; with `exact` bit for bit."""

import itertools

import pytest
import torch
from ranks import run
from support import alone, close, each
from toys import Ragged

from lockstep.engines.fsdp.apply import FILLS_UNUSED

SEARCH = "true" if FILLS_UNUSED else "auto"  # an older torch has it refused
VARIANTS = {
    "ddp": ("ddp", {}),
    "ddp static": ("ddp", {"static_graph": True, "bucket_cap_mb": 0.001, "gradient_as_bucket_view": False}),
    "ddp search": ("ddp", {"find_unused_parameters": "true", "broadcast_buffers": False}),
    "zero": ("zero", {}),
    "fsdp": ("fsdp", {}),
    "fsdp blocks": ("fsdp", {"blocks": True, "prefetch": 1, "find_unused_parameters": SEARCH}),
    "fsdp grad-op": ("fsdp", {"sharding": "grad-op", "find_unused_parameters": "false"}),
    "fsdp none": ("fsdp", {"sharding": "none"}),
    "fsdp shard": ("fsdp", {"accumulate": "shard", "meta_init": True}),
}
EXACT = {
    "ddp": ("ddp", {}),
    "zero": ("zero", {}),
    "fsdp": ("fsdp", {}),
    "fsdp grad-op": ("fsdp", {"sharding": "grad-op", "meta_init": True, "blocks": True}),
}


def compare(world_sizes, sizes, variants=VARIANTS):
    task = Ragged(dropout=0.1)
    cases = [(task, name, {**given, **size}) for (name, given), size in itertools.product(variants.values(), sizes)]
    wanted = {str(size): alone(task, **size) for size in sizes}
    for world_size in world_sizes:
        found = run(each, world_size, cases, timeout=250)[-1]
        for (_, name, settings), result in zip(cases, found, strict=True):
            assert not isinstance(result, str), (name, settings, result)
            size = {key: settings[key] for key in ("size", "micro")}
            close(result, wanted[str(size)], 1e-11)


def test_each_engine_is_single_on_two_processes():
    compare([2], [{"size": 8, "micro": 1}])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_engine_is_single_at_every_world_and_accumulation(world_size):
    sizes = [{"size": 12, "micro": 3}, {"size": 8, "micro": 1}, {"size": 10, "micro": 2}]
    sizes += [{"size": 2 * world_size, "micro": 2}]  # one micro-batch a rank: no accumulation
    compare([world_size], sizes)


def exactly(world_size, variants, precisions, sizes):
    task = Ragged(samples=100, dropout=0.2, dtype=torch.float32)
    kinds = [{"precision": p, **size, "exact": True} for p, size in itertools.product(precisions, sizes)]
    cases = [(task, name, {**given, **kind}) for (name, given), kind in itertools.product(variants.values(), kinds)]
    wanted = [alone(task, **kind) for kind in kinds] * len(variants)
    for found in run(each, world_size, cases, timeout=250):
        for case, mine, other in zip(cases, found, wanted, strict=True):
            assert mine == other, case[1:]


def test_exact_is_bitwise_single_on_two_processes():
    exactly(2, {key: EXACT[key] for key in ("zero", "fsdp grad-op")}, ["float32", "bf16"], [{"size": 24, "micro": 2}])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exact_is_bitwise_single(world_size):
    sizes = [{"size": 8, "micro": 1}, {"size": 24, "micro": 2}]
    exactly(world_size, EXACT, ["float32", "bf16", "fp16"], sizes)


@pytest.mark.slow
def test_hybrid_sharding_of_two_times_two_is_single():
    compare([4], [{"size": 8, "micro": 1}], {"hybrid": ("fsdp", {"sharding": "hybrid", "shard_size": 2})})
    compare(
        [4],
        [{"size": 8, "micro": 1}],
        {"hybrid": ("fsdp", {"sharding": "hybrid", "shard_size": 2, "accumulate": "shard"})},
    )


def test_half_precision_exchange_agrees_to_its_precision():
    task = Ragged(dtype=torch.float32)
    wanted = alone(task)
    cases = [(task, name, {"compression": kind}) for name in ("ddp", "zero") for kind in ("bf16", "fp16")]
    for result in run(each, 2, cases)[0]:
        close(result, wanted, 2e-2)
        assert result[2] != wanted[2]  # it was compressed


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_agrees_with_single_to_its_precision(precision):
    task = Ragged(dtype=torch.float32)
    wanted = alone(task, precision=precision)
    cases = [(task, name, {"precision": precision}) for name in ("ddp", "zero", "fsdp")]
    for world_size in (2, 3):
        for result in run(each, world_size, cases)[0]:
            close((result[0], []), (wanted[0], []), 3e-2)


@pytest.mark.slow
def test_fsdp_dtypes_of_its_own_train():
    task = Ragged(dtype=torch.float32)
    wanted = alone(task)
    kinds = [{"param_dtype": "bf16"}, {"reduce_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "float32"}]
    for result in run(each, 2, [(task, "fsdp", {**kind, "output_dtype": "float32"}) for kind in kinds])[0]:
        close((result[0], []), (wanted[0], []), 3e-2)
        assert result[2] != wanted[2]
