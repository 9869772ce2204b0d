"""Show a Trainer one device while its own methods make samplers, models, optimizers and schedulers.

    with one_device(trainer):
        trainer.create_optimizer()      # args.world_size is 1, as on one device

`args.world_size`, `args.process_index` and `accelerator.num_processes` all read accelerate's state.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = [
    "one_device",
]


_ONE_DEVICE = {"num_processes": 1, "process_index": 0, "local_process_index": 0}


@contextlib.contextmanager
def one_device(trainer: Any) -> Iterator[None]:
    """Give accelerate's state one process, in a context without collectives."""
    accelerator = getattr(trainer, "accelerator", None)
    states = [getattr(trainer.args, "distributed_state", None), getattr(accelerator, "state", None)]
    # Accelerate's state objects share one dict for each class.
    shared = []
    for state in states:
        if state is not None:
            shared.append(vars(state))
    before = []
    for state in shared:
        before.append({name: state[name] for name in _ONE_DEVICE if name in state})
    for state, saved in zip(shared, before, strict=True):
        state.update({name: _ONE_DEVICE[name] for name in saved})
    try:
        yield
    finally:
        for state, saved in zip(shared, before, strict=True):
            state.update(saved)
