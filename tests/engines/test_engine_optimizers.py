"""Optimizers whose states do not begin as zeros: asking for the state before the first step changes nothing."""

import pytest
import torch
from distributed import run
from support import build
from toys import Ragged

from lockstep.engines.optimizers import check_optimizer
from lockstep.errors import ConfigError
from lockstep.world import World

TASK = Ragged()
KINDS = {
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "SGD": {"momentum": 0.9},
}


def _norms(world, name, ask=True):
    """{optimizer: the gradients' norms}, at a constant rate; with `ask` the state is asked for at first."""
    found = {}
    for kind, settings in KINDS.items():
        if (name, kind) == ("fsdp", "Rprop"):
            continue
        made, batches = build(
            world, TASK, name, make=lambda m, k=kind, s=settings: getattr(torch.optim, k)(m.parameters(), lr=0.01, **s)
        )
        if ask:
            made.state()
        found[kind] = []
        for _, group in batches.from_step(0):
            for batch in group:
                with made.accumulate(batch is group[-1]):
                    made.backward(TASK.loss(made.model, batch.data), batch.weight / 50)
            found[kind].append(float(made.step(1.0).norm))
    return found


@pytest.mark.slow
def test_a_look_at_the_state_before_the_first_step_changes_nothing():
    wanted = _norms(World(), "single", ask=False)
    for found in (_norms(World(), "single"), *(run(_norms, 2, name)[0] for name in ("ddp", "zero", "fsdp"))):
        for kind, norms in found.items():
            assert norms == pytest.approx(wanted[kind], rel=1e-10), kind


def test_deepspeed_refuses_dampening():
    damped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="--engine deepspeed does not go with the dampening of SGD; use dampening=0"):
        check_optimizer("deepspeed", damped, exact=False)


def test_one_fused_group_is_enough_to_be_refused_under_exact_fsdp():
    pairs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [pairs[0]], "fused": True}, {"params": [pairs[1]]}]
    for mixed in (torch.optim.AdamW(groups, lr=0.1), torch.optim.AdamW(groups[::-1], lr=0.1)):
        with pytest.raises(ConfigError, match="--exact with --engine fsdp: the fused AdamW rounds"):
            check_optimizer("fsdp", mixed, exact=True)
        check_optimizer("fsdp", mixed, exact=False)
        check_optimizer("ddp", mixed, exact=True)
