"""A place for a check, without a launcher or with one, and what a check says there."""

import re

from lockstep.config.schema import Config
from lockstep.diagnose.doctor.board import Board
from lockstep.diagnose.doctor.differences import numbers
from lockstep.diagnose.doctor.examine import CHECKS, examine
from lockstep.diagnose.doctor.finding import OK, SKIP, CheckContext

LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def place(environ=None, hosts=(), **more):
    """Where a check runs: `environ` in place of this process's variables."""
    environ = {} if environ is None else environ
    rank, local, size, on_node = numbers(environ) or (0, 0, 1, 1)
    config = Config(**more.pop("config", {}))
    made = CheckContext(config, False, rank, local, size, on_node, host="here", environ=environ, **more)
    made.hosts = list(hosts)
    made.board = Board(None, 0, 1)
    return made


def wrong(findings, check, *texts):
    """The findings that are not OK: all are of `check`, and together they have each of `texts`, and each a way out."""
    found = [each for each in findings if each.level != OK]
    assert found, "nothing was found"
    assert {each.check for each in found} == {check}
    told = "\n".join(f"{each.level} {each.text}; {each.mend}" for each in found)
    missing = [text for text in texts if not re.search(text, told)]
    assert not missing, f"{missing} not in:\n{told}"
    assert all(each.mend for each in found)
    return found


def silent(findings):
    """Nothing is wrong, and it is said."""
    assert [each for each in findings if each.level not in (OK, SKIP)] == []


def on_rank(world, config, names, *, patience=10.0, with_task=False, before=None):
    """The lines that this rank says of the checks of these names, among the ranks of `world`; () : of all."""
    import os

    asked = [check for check in CHECKS if not names or check.name in names]
    known = numbers(os.environ)
    here = CheckContext(
        Config(**config), with_task, *known, host=f"node-{world.rank}", environ=os.environ, patience=patience
    )
    here.world, here.given = world, True
    if before:
        before(here)
    lines = []
    report = examine(here, lines.append, asked)
    return [str(line) for line in lines], report.failed
