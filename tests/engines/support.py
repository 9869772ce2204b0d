"""Runs of any engine for these tests: a few steps, and the whole state afterwards, gathered.

Many cases go through one group of processes, so that their start is paid once: `run(each, 2, cases)`.
"""

import warnings

import pytest
import torch
from torch import distributed as dist
from toys import train

from lockstep import checkpoint
from lockstep.config.engine_options import EngineOptions
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.engines.fsdp.apply import FILLS_UNUSED
from lockstep.engines.model_init import init_context
from lockstep.engines.registry import engine
from lockstep.errors import LockstepError
from lockstep.optim.optimizers import adamw
from lockstep.transforms import autocast
from lockstep.transforms.determinism import pin

# Of tests in which ranks use different parameters under fsdp; test_fsdp_usage_check.py has the refusal.
needs_filling = pytest.mark.skipif(
    not FILLS_UNUSED, reason="this torch has no FSDPModule.set_reduce_scatter_unused_params (it came with 2.13)"
)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(
    world,
    task,
    name="auto",
    *,
    size=8,
    micro=1,
    count=4,
    exact=False,
    clip=1.0,
    precision="float32",
    make=None,
    blocks=False,
    lines=None,
    ema=0.0,
    own=None,
    **options,
):
    """(engine, batches) of a run of `count` steps."""
    # A block that ends in a Linear returns a view, which only matters to a model that changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    pin(exact=exact, matmul="highest", device=world.device)
    options = EngineOptions(**options)
    torch.manual_seed(0)
    with init_context(options, world):
        model = task.model()
    found = list(model.blocks) if blocks else ()
    if precision in HALF:
        model = autocast(model, HALF[precision], world.device.type)
    made = engine(
        name,
        model if name == "fsdp" else model.to(world.device),
        make or (lambda held: adamw(held, lr=0.01, fused=False)),
        world,
        clip=clip,
        exact_micro_batches=size // micro if exact else 0,
        loss_scaling=precision == "fp16",
        blocks=found,
        options=options,
        say=(lines if lines is not None else []).append,
        ema=ema,
        own=own,
    )
    dataset = task.dataset("train")
    step_plan = StepPlan(size, micro, count * size)
    return made, Batches(task, dataset, Shuffled(len(dataset), 0), step_plan, world, seed=0)


def whole(tensor, world):
    """The full tensor on every rank, also of a DTensor that one rank alone holds."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach().clone()
    if tensor.device_mesh.size() == 1 and world.size > 1:
        owner = int(tensor.device_mesh.mesh.reshape(-1)[0])
        mine = tensor.to_local().detach().clone()
        full = mine if owner == world.rank else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(full, src=owner)
        return full
    return tensor.detach().full_tensor()


def digest(made, world):
    """One text for the whole state, model and optimizer."""
    return checkpoint.fingerprint_of({name: whole(t, world) for name, t in sorted(made.state_dict().items())})


def fit(world, task, name="auto", **settings):
    """(losses, norms, digest of the state) of a short run; norms as text, since an overflow's is no number."""
    made, batches = build(world, task, name, **settings)
    losses, norms = train(world, made, batches, task)
    return losses, [str(norm) for norm in norms], digest(made, world)


def each(world, cases):
    """`fit` of each of the cases (task, engine, settings); a LockstepError gives its line."""
    found = []
    for task, name, settings in cases:
        try:
            found.append(fit(world, task, name, **settings))
        except LockstepError as error:
            found.append(str(error))
    return found


def alone(task, **settings):
    """`fit` of the engine single in this process, whose switches are put back."""
    from lockstep.distributed.world import World

    threads = torch.get_num_threads()
    try:
        return fit(World(), task, "single", **settings)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def close(found, wanted, tolerance):
    """Whether losses and norms of two runs agree."""
    for mine, other in zip(found[:2], wanted[:2], strict=True):
        mine, other = ([float(number) for number in numbers] for numbers in (mine, other))
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=tolerance, atol=tolerance)
