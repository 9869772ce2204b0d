"""A module's `test_step` and `predict_step` on the trained weights, in one process.

numbers = tested(task)                      # name -> number, as an evaluation gives them; `task.test()`
outputs = predicted(task)                   # what predict_step returned, by batch; `task.predict()`
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.data.device import mover
from lockstep.errors import ConfigError
from lockstep.tasks.lightning_data import Parts, Placed
from lockstep.tasks.lightning_loaders import more_loaders
from lockstep.tasks.lightning_package import calls, written

__all__ = ["predicted", "tested"]


def tested(task: Any) -> dict[str, float]:
    """What `test_step` logs over the test loaders, with the weights that the module has now. Every sample counts once.

    Raises:
        ConfigError: the module has no test_step, or there is no test_dataloader.
    """
    _check(task, "test_step")
    sets = more_loaders(task.module, task.loaders.datamodule, "test_dataloader")
    made = task.testing(sets)
    found: dict[str, float] = {}
    with _resting(task):
        for name, place, epoch in made.epochs():
            for batch in _batches(list(sets.values())[place], place, task.trainer.limit_test_batches):
                made.evaluate(task.module, _moved(task, batch))
            numbers = epoch.compute()
            found |= {f"{name}/{key}" if name else key: value for key, value in numbers.items()}
    return found


def predicted(task: Any) -> list[Any]:
    """What `predict_step` returns for each batch; a list for each loader where there are several.

    Raises:
        ConfigError: there is no predict_dataloader.
    """
    sets = more_loaders(task.module, task.loaders.datamodule, "predict_dataloader")
    life, found = task.life, list[list[Any]]()
    task.trainer.stage = "predict"
    with _resting(task):
        for name in ("start", "epoch_start"):
            life.hook(f"on_predict_{name}")
        for place, parts in enumerate(sets.values()):
            found.append([])
            for number, batch in enumerate(_batches(parts, place, task.trainer.limit_predict_batches)):
                data = task.received(_moved(task, batch).data, place)
                given = (data, number, place) if len(sets) > 1 else (data, number)
                life.hook("on_predict_batch_start", *given)
                output = life.call("predict_step", *calls(task.module.predict_step, *given))
                life.hook("on_predict_batch_end", output, *given)
                found[-1].append(output)
        for name in ("epoch_end", "end"):
            life.hook(f"on_predict_{name}")
    return found[0] if len(found) == 1 else found


@contextlib.contextmanager
def _resting(task: Any) -> Iterator[None]:
    """Within it the module is in eval mode, without gradients."""
    modes = [(each, each.training) for each in task.module.modules()]
    task.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        task.trainer.stage = "train"
        for each, mode in modes:
            each.training = mode


def _check(task: Any, step: str) -> None:
    if not written(task.module, step):
        raise ConfigError(f"{type(task.module).__name__} has no `{step}`: write it")


def _moved(task: Any, batch: Placed) -> Placed:
    device = next((p.device for p in task.module.parameters()), torch.device("cpu"))
    move = mover(device)
    return batch._replace(data=move(batch.data)) if move else batch


def _batches(parts: Parts, place: int, limit: int | float) -> Iterator[Placed]:
    """The batches of a set in the order of the data."""
    size, samples = parts.batch_size, len(parts.dataset)
    whole = -(-samples // size)
    most = limit if isinstance(limit, int) and not isinstance(limit, bool) else int(whole * limit)
    for number in range(min(whole, most)):
        within = range(number * size, min((number + 1) * size, samples))
        yield Placed(place, len(within), parts.collate([parts.dataset[at] for at in within]))
