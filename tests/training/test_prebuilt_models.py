"""A model that was made before the run has rank 0's values on every rank; what `model()` draws stays compared."""

import contextlib
import io
import warnings

import numpy
import pytest
import small_runs
import torch
import torch.distributed as dist
from ranks import run
from refusals import refuses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from toys import Network, Ragged

import lockstep
from lockstep.config.engine_options import ENGINES
from lockstep.errors import ConfigError, DifferenceError
from lockstep.tensors import local_of

SPLITTING = [name for name in ENGINES if name in ("fsdp", "zero")]


class Stored(nn.Module):
    """With buffers, one of which no checkpoint has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.rand(2, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(()) > 0.5, persistent=False)
        self.register_buffer("weights", torch.rand(29).bfloat16(), persistent=False)

    def forward(self, x):
        return self.inner(x) + self.weights.double()


class Headed(nn.Module):
    """A layer that `model()` draws, behind what was there."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(29, 29).double()

    def forward(self, x):
        return self.head(self.inner(x))


class Given(Ragged):
    """Its model was made before the run, or a part of it was, or nothing."""

    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        self.kind, self.net = kind, Stored(Network())

    def model(self):
        if self.kind == "drawn":
            made = Network()
            nn.init.constant_(made.embedding.weight, numpy.random.rand())
            return made
        return Headed(self.net) if self.kind == "part" else self.net


def trained(folder, kind, seed, world=None, task=None, **more):
    config = small_runs.config(folder, max_steps=4, report=False, **more)
    with lockstep.Run(config, task or Given(kind, seed), world) as made:
        losses = [step.loss for step in made]
    whole = {**made.model.state_dict(), **dict(made.model.named_buffers())}
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else local_of(t) for name, t in whole.items()}
    return losses, {name: tensor.tolist() for name, tensor in full.items()}


def unlike(world, folder):
    """Each rank with values of its own; of a start and of a resume, of each engine, and of what `model()` draws."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of layers that return a view
    found, seed = {}, world.rank + 5
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for kind in ("whole", "part"):
            begun = trained(folder / kind, kind, seed, world, exact=True, stop_at=2)
            found[kind] = begun[0], *trained(folder / kind, kind, seed, world, exact=True)
        for name in SPLITTING:
            found[name] = trained(folder / name, "whole", seed, world, engine=name)
    found["said"] = said.getvalue().count("made before the run")
    try:
        trained(folder / "drawn", "drawn", seed, world)
    except DifferenceError as error:
        found["drawn"] = str(error)
    return found


def test_objects_made_before_the_run_are_rank_0s_on_every_engine(tmp_path):
    before = torch.get_num_threads()
    try:
        alone = {kind: trained(tmp_path / f"alone-{kind}", kind, 5, exact=True) for kind in ("whole", "part")}
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    for rank, found in enumerate(run(unlike, 2, tmp_path)):
        for kind, (losses, weights) in alone.items():
            begun, rest, theirs = found[kind]
            assert begun + rest == pytest.approx(losses, rel=1e-12)  # each rank rounds its sum
            assert theirs == weights
        for name in SPLITTING:
            assert found[name][0] == pytest.approx(alone["whole"][0], abs=1e-9)
        assert "initial weights differ" in found["drawn"]
        assert found["said"] == (0 if rank else 2 + len(SPLITTING))  # once for each new run


class Parallel(Ragged):
    """Its model is sharded already, or has a buffer that is."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.net = kind, Stored(Network())

    def model(self):
        mesh = init_device_mesh("cpu", (1 if self.kind == "buffer" else dist.get_world_size(),))
        if self.kind == "buffer":
            self.net.seen = distribute_tensor(self.net.seen, mesh, [Replicate()])
        elif self.kind == "columns":
            parallelize_module(self.net, mesh, {"inner.head": ColwiseParallel()})
        else:
            fully_shard(self.net, mesh=mesh)
        return self.net


WHERE = {"columns": "inner.head.weight", "sharded": "inner.embedding.weight", "buffer": "seen"}


def refused(world, folder, engines):
    for name in engines:
        for kind in WHERE if world.size > 1 else ["buffer"]:
            with refuses(ConfigError, WHERE[kind], "DTensor", "--engine fsdp", "parallelize_module"):
                trained(folder, kind, 0, world, task=Parallel(kind), engine=name)
    return (folder / "r").exists()


def test_a_parallel_model_is_refused_on_every_engine(tmp_path):
    """By the name of its parameter, before the run's folder is made."""
    several = [name for name, entry in ENGINES.items() if not entry.one_process]
    assert run(refused, 2, tmp_path, several) == [False, False]
    assert run(refused, 1, tmp_path, list(ENGINES)) == [False]
