"""Each kind of loss at each moment of a run, judged by `loss_table`; the short form has one row."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from loss_table import judge, table, undisturbed

SHORT = [
    ("exit0", "middle"),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (("kill", "trial"), ("exit3", "groups"))),
]


@pytest.fixture(scope="session")
def right(tmp_path_factory):
    """The weights of an undisturbed run, by engine."""
    found = {}

    def weights(engine):
        if engine not in found:
            found[engine] = undisturbed(engine, tmp_path_factory.mktemp("right") / engine)
        return found[engine]

    return weights


@pytest.mark.parametrize(("kind", "moment"), SHORT)
def test_lost_rank_is_named_and_the_run_is_bitwise(tmp_path, right, kind, moment):
    row = judge("ddp", kind, moment, 1, tmp_path / "run", right("ddp"))
    assert not row.wrong, row


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_every_kind_of_loss_at_every_moment(tmp_path, right, engine):
    rows = [
        judge(engine, kind, moment, 1, tmp_path / f"{kind}-{moment}", right(engine)) for kind, moment in table(engine)
    ]
    assert not [row for row in rows if row.wrong]
