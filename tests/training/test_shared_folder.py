"""Every rank sees the folder that rank 0 writes into, or nothing is trained: at a start and at a resume."""

import os
import socket

import pytest
import small_runs
from ranks import run
from refusals import names
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError
from lockstep.training.start.shared_folder import _sees_token, write_token
from lockstep.training.state.run_dir import RunFolder


def started(world, folder):
    """What runs come to, where rank 1 has a working folder of its own, as on a node without the shared one."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    os.chdir(own if world.rank else folder)
    found = []
    for save_dir, steps in ((folder / "a/runs", 2), ("a/runs", 0), ("b/runs", 0), (folder / "a/runs", 0)):
        try:
            config = small_runs.config(save_dir, max_steps=4, stop_at=steps, report=False)
            found.append(lockstep.train(config, Ragged(), world).global_step)
        except ConfigError as error:
            found.append(str(error))
        world.barrier()
    return found


def test_rank_that_does_not_see_the_runs_folder_is_named_early(tmp_path):
    for new, resumed, other, again in run(started, 2, tmp_path):
        assert (new, again) == (2, 4)
        for said, path in ((resumed, "a/runs/r"), (other, "b/runs/r")):
            parts = (f"rank 1 on {socket.gethostname()}", f"{tmp_path / 'own' / path} ", f"{tmp_path / path} ", "save")
            assert all(part in said for part in parts), said
    assert not os.listdir(tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"own", "a"}
    assert not list(tmp_path.rglob(".lockstep*"))


def read_only(world, folder):
    """Run where rank 1's node has the folder mounted read-only, and return the error."""
    if world.rank:
        os.access = lambda path, mode, **_: not mode & os.W_OK
    try:
        lockstep.train(small_runs.config(folder, max_steps=1, report=False), Ragged(), world)
    except ConfigError as error:
        return str(error), error.shared
    return "", False


def test_node_that_may_not_write_is_named_before_writing(tmp_path):
    for said, shared in run(read_only, 2, tmp_path):
        assert shared  # it is none of rank 0's own
        assert names(said, "rank 1", socket.gethostname(), tmp_path, "--save-dir")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("made", "above"), [("", 2), ("a", 1), ("a/r", 0)])
def test_a_token_lies_in_the_folder_or_in_the_nearest_above_it(tmp_path, monkeypatch, made, above):
    monkeypatch.setattr("lockstep.training.start.shared_folder._READ_DELAYS", (0.0,))
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    folder = RunFolder(str(tmp_path / "a"), "r")
    with write_token(folder) as found:
        assert found[1] == above
        assert _sees_token(folder.path, *found)
        assert not _sees_token(tmp_path / "b" / "r" / "other", *found)
    assert not _sees_token(folder.path, *found)
    assert sorted(tmp_path.rglob("*")) == sorted(tmp_path / each for each in ("a", "a/r")[: 2 - above])


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"), write_token(RunFolder(str(tmp_path), "file")):
        pass
