"""A project's own training, kept honest in CI: pytest examples/test_my_training.py

The task is the one of own_task.py; put your own in its place. The first test takes a few steps in one process and in
two, and fails with the step, the tensor, the rank and the cause where they differ. The second shows that it would.
"""

from own_task import Spirals

import lockstep

CONFIG = lockstep.Config(batch_size=32, lr=0.01, device="cpu", timeout=60.0)


def test_two_processes_train_what_one_does():
    table = lockstep.verify(Spirals(), CONFIG, engines=("single", "ddp"), world_sizes=(1, 2), steps=4)
    assert table.ok, str(table)


def test_a_seed_that_depends_on_the_rank_would_be_found():
    table = lockstep.verify(Spirals(), CONFIG, engines=("ddp",), world_sizes=(2,), steps=2, plant="per-rank-seed")
    difference = table.rows[-1].difference
    assert (difference.step, difference.stage, difference.rank) == (0, "randomness", 1)
