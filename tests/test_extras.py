"""The command that installs an extra, by how lockstep was installed."""

import json

import pytest

from lockstep import extras


class Installed:
    """A distribution with this direct_url.json; None: without the file."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        if isinstance(self.origin, bytes):
            return self.origin.decode()
        return None if self.origin is None else json.dumps(self.origin)


def advice(monkeypatch, origin):
    monkeypatch.setattr(extras.Distribution, "from_name", lambda name: Installed(origin))
    return extras.install_extra("images")


def test_a_path_an_index_and_a_repository(tmp_path, monkeypatch):
    folder = tmp_path / "my clone"
    folder.mkdir()
    from_clone = {"url": folder.as_uri(), "dir_info": {"editable": True}}
    assert f"`pip install -e '{folder}[images]'`" in advice(monkeypatch, from_clone)
    assert f"`pip install '{folder}[images]'`" in advice(monkeypatch, {"url": folder.as_uri(), "dir_info": {}})
    assert "`pip install 'torch-lockstep[images]'`" in advice(monkeypatch, None)
    remote = {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "ab"}}
    assert "'torch-lockstep[images] @ git+https://host/a.git'" in advice(monkeypatch, remote)


@pytest.mark.parametrize("origin", [{"url": "file:///no/such/folder"}, b"not json"])
def test_an_unknown_origin_names_the_extra_only(monkeypatch, origin):
    # The command would fail.
    assert advice(monkeypatch, origin) == "install the extra images of torch-lockstep"
