"""A rank of the matrix under a launcher, with what `ranks.run` sets for its own: python matrix_rank.py STARTS ROOT."""

import importlib
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch
from matrix_run import RANK_SECONDS, play_all

from lockstep.distributed.world import World

if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    importlib.import_module("torch._inductor.config").compile_threads = 1
    todo = pickle.loads(Path(sys.argv[1]).read_bytes())
    world = World.join("cpu", RANK_SECONDS)
    play_all(world, todo, Path(sys.argv[2]))
    world.leave()
    sys.stdout.flush()
    os._exit(0)
