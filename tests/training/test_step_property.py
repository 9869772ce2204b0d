"""A task of any kind trains as one graph over each step in plain PyTorch, on 1, 2 and 3 ranks, or is refused."""

import gc
import random
from itertools import product

import pytest
import tasks_at_random as tasks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from small_runs import config
from tasks_at_random import Case

import lockstep
from lockstep.config.schema import default_micro_batch_size
from lockstep.errors import LockstepError

CUTS = [(size, part) for size, part in product((8, 12, 15), (0, 1, 2, 3, 4)) if not part or size % part == 0]
PLAIN = {"name": "sgd", "schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0, "momentum": 0.0}
cases = st.builds(
    lambda kind, cut, *rest: Case(kind, *cut, *rest),
    st.sampled_from([*tasks.KINDS]),
    st.sampled_from(CUTS),
    st.booleans(),
    st.sampled_from([*tasks.OPTIMIZERS]),
    st.sampled_from(tasks.TRAINED),
)


def trained(world, folder, case, **changes):
    """(losses, parameters) of a run, or the line that refuses it; nothing may lie in its folder then."""
    sizes = {"batch_size": case.batch, "micro_batch_size": case.micro, "max_steps": 0, "num_epochs": 1, "ckpt_freq": 0}
    chosen, losses = config(folder, **sizes | {"optim": PLAIN, "report": False} | changes), []
    try:
        with lockstep.Run(chosen, tasks.made(case), world) as made:
            for step in made:
                losses.append(step.loss)
                tasks.change(made.model, case, step.global_step)
            return losses, [p.detach().tolist() for p in made.model.parameters()]
    except LockstepError as error:
        assert not losses, (str(case), error)
        assert "\n" not in str(error), case
        world.barrier()
        assert not any(folder.rglob("*")), case
        return str(error)


def is_wrong(case, exact=False):
    """Whether the case must be refused, on one process or with a size of its micro-batches."""
    size = case.micro or (default_micro_batch_size(case.batch) if exact else case.batch)
    return case.kind in tasks.WRONG and size != case.batch


def assert_is_plain(case, found, exact=False):
    if is_wrong(case, exact):
        assert isinstance(found, str), case
        return
    assert not isinstance(found, str), (str(case), found)
    losses, parameters = tasks.oracle(case)
    assert found[0] == pytest.approx(losses, rel=1e-10), case
    for mine, wanted in zip(found[1], parameters, strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), wanted, rtol=0, atol=1e-10, msg=str(case))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cases, st.booleans())
def test_one_process_is_plain_torch_or_refuses(tmp_path_factory, case, exact):
    assert_is_plain(case, trained(lockstep.World(), tmp_path_factory.mktemp("run"), case, exact=exact), exact)


def sampled():
    """One case of each kind, cut so that there is a micro-batch for each of three ranks."""
    draw = random.Random(3)
    cuts = [(size, part) for size, part in CUTS if part and size >= 3 * part]
    rest = [*product(tasks.OPTIMIZERS, tasks.TRAINED, (True, False))]
    chosen = draw.sample(rest, len(tasks.KINDS))
    for kind, (optimizer, change, short) in zip(tasks.KINDS, chosen, strict=True):
        yield Case(kind, *draw.choice(cuts), short, optimizer, change)


SAMPLE = [*sampled()]


def on_ranks(world, folder):
    """(exact, not exact) of each case."""
    gc.freeze()  # each run ends with collections, which need not look at all that was imported
    found = []
    for case in SAMPLE:
        places = folder / f"{case}-exact", folder / str(case)
        found.append([trained(world, place, case, exact=place is places[0], engine="ddp") for place in places])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The parameters of each case on one rank, exact."""
    folder = tmp_path_factory.mktemp("alone")
    return [trained(lockstep.World(), folder / str(case), case, exact=True) for case in SAMPLE]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_are_plain_torch_and_exact_ones_have_the_same_bits(ranks, alone, tmp_path):
    first, *others = run(on_ranks, ranks, tmp_path, timeout=120.0)
    for case, found, wanted, *same in zip(SAMPLE, first, alone, *others, strict=True):
        exact, plain = found
        for each in found:
            assert_is_plain(case, each)
        if not is_wrong(case):
            assert exact[1] == wanted[1], case
            assert all(theirs[0][1] == exact[1] and theirs[1][1] == plain[1] for theirs in same), case
