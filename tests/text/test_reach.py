"""What a download left in HF_HOME, found without the packages that made it."""

import pytest

from lockstep.text.cache import snapshot


@pytest.mark.parametrize("said", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_snapshot_is_found_by_branch_tag_or_commit(tmp_path, monkeypatch, said):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv(said, str(tmp_path / "home"))
    held = tmp_path / "home" / ("hub" if said == "HF_HOME" else "") / "datasets--some-one--some-data"
    for commit in ("a" * 40, "b" * 40):
        (held / "snapshots" / commit).mkdir(parents=True)
    (held / "refs" / "pr").mkdir(parents=True)
    for name, commit in (("main", "a"), ("v2", "b"), ("pr/1", "b"), ("gone", "c")):
        (held / "refs" / name).write_text(commit * 40 + "\n")
    found = {
        revision: path and path.name[0]
        for revision in ("", "main", "v2", "pr/1", "a" * 40, "b" * 40, "c" * 40, "gone", "v3")
        for path in [snapshot("some-one/some-data", "dataset", revision)]
    }
    none = dict.fromkeys(("c" * 40, "gone", "v3"))
    assert found == {"": "a", "main": "a", "v2": "b", "pr/1": "b", "a" * 40: "a", "b" * 40: "b", **none}
    assert snapshot("some-one/some-data", "model") is None
    assert snapshot("some-one/other", "dataset") is None
