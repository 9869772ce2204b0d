"""Does this training depend on the number of processes? pytest

The same steps are taken by one process and by two, and compared tensor by tensor; the table says where they part.
"""

from pathlib import Path

from task import MyTask

import lockstep

CONFIG = lockstep.Config.from_args(["--config", str(Path(__file__).with_name("config.toml")), "--device", "cpu"])


def test_two_processes_train_what_one_does():
    table = lockstep.verify(MyTask(), CONFIG, engines=("ddp",), world_sizes=(1, 2), steps=4)
    assert table.ok, str(table)


def test_a_seed_that_depends_on_the_rank_would_be_found():
    table = lockstep.verify(MyTask(), CONFIG, engines=("ddp",), world_sizes=(2,), steps=2, plant="per-rank-seed")
    assert not table.ok
