"""Models that `--engine.meta-init` cannot make."""

import pytest
import torch
from distributed import run

from lockstep.config import EngineOptions
from lockstep.engines import birth, engine
from lockstep.errors import LockstepError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Untold(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale = torch.ones(2)


def _untold(world):
    options = EngineOptions(meta_init=True)
    with birth("fsdp", world, options).where:
        model = Untold()
    with pytest.raises(LockstepError) as caught:
        engine("fsdp", model, sgd, world, options=options)
    return str(caught.value), caught.value.exit_code


def test_a_plain_tensor_that_meta_init_would_leave_without_values_is_named():
    for line, code in run(_untold, 2):
        assert "--engine.meta-init: scale of the model is a plain tensor" in line
        assert code == 2
