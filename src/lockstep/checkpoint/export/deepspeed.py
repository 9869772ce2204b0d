"""A checkpoint as DeepSpeed's "universal checkpoint", which it loads at any world size and ZeRO stage.

    OUT/latest_universal                                the name of the folder beside it
    OUT/global_step500_universal/
        mp_rank_00_model_states.pt                      the module's state and the counters
        zero_pp_rank_0_mp_rank_00_model_states.pt       the counters, where ZeRO 3 looks for them
        zero/optimizer_state.pt
        zero/NAME/fp32.pt  exp_avg.pt  exp_avg_sq.pt  step.pt

DeepSpeed reads it where its config has {"checkpoint": {"load_universal": true}}. The format follows its own converter
(deepspeed/checkpoint/ds_to_universal.py). The package itself is not needed here.
"""

from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.read import Whole
from lockstep.errors import CheckpointError

__all__ = ["write_universal"]

_VERSION = "0.16.0"  # the oldest DeepSpeed whose universal checkpoints are like this
_GROUPS = 64  # more than an optimizer has; empty, so that each group of the reader keeps its own settings


def write_universal(tensors: Whole, step: int, out: Path) -> None:
    """Makes the folder `out`. One parameter at a time is in memory, and the module's state once, at the end."""
    folder = out / f"global_step{step}_universal"
    (folder / "zero").mkdir(parents=True)
    (out / "latest_universal").write_text(folder.name, encoding="utf-8")
    states = _states(tensors)
    for name, keys in states.items():
        home = folder / "zero" / name
        home.mkdir()
        torch.save({"param": _wide(tensors, f"model/{name}")}, home / "fp32.pt")
        for key in keys:
            value = _wide(tensors, f"optimizer/{name}/{key}")
            torch.save(value if key == "step" else {"param": value}, home / f"{key}.pt")
    steps = [tensors.read(f"optimizer/{name}/step") for name, keys in states.items() if "step" in keys]
    settings = {"state": {0: {"step": steps[0].float() if steps else torch.tensor(float(step))}}, "param_groups": [{}]}
    common = {"ds_version": _VERSION, "param_groups": [{}] * _GROUPS, "optimizer_state_dict": settings}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    _write_module(tensors, step, list(states), folder)


def _states(tensors: Whole) -> dict[str, list[str]]:
    """{trained parameter: the keys of its optimizer state}."""
    found: dict[str, list[str]] = {}
    for full in sorted(tensors.stored):
        group, _, rest = full.partition("/")
        if group == "optimizer":
            name, _, key = rest.rpartition("/")
            found.setdefault(name, []).append(key)
    return found


def _wide(tensors: Whole, name: str) -> torch.Tensor:
    """In float32, as DeepSpeed keeps what it updates; a copy, so that no mapped file is saved with it."""
    if tensors.stored[name].dtype.startswith("complex"):
        raise CheckpointError(f"--format deepspeed: '{name}' is complex, and DeepSpeed updates real numbers alone")
    return tensors.read(name).to(torch.float32, copy=True)


def _write_module(tensors: Whole, step: int, trained: list[str], folder: Path) -> None:
    names = [name.removeprefix("model/") for name in tensors.stored if name.startswith("model/")]
    shapes = {name: torch.Size(tensors.stored[f"model/{name}"].shape) for name in names}
    counters: dict[str, Any] = {
        "param_shapes": [{name: shapes[name] for name in trained}],
        "buffer_names": [],
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
    torch.save({"module": {}, **counters}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    module = {name: tensors.read(f"model/{name}").clone() for name in names}
    torch.save({"module": module, **counters}, folder / "mp_rank_00_model_states.pt")
