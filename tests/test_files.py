"""A file is there whole or as it was, and no link leads a write elsewhere."""

import errno
import os
import subprocess
import sys
from functools import partial

import pytest

from lockstep.files import create_file, replace_file, sync, write_whole


def test_the_new_content_or_the_old_and_nothing_beside_it(tmp_path):
    path = tmp_path / "state.json"
    write_whole(path, "gr\u00fcn\n")
    assert path.read_bytes() == "grün\n".encode()
    write_whole(path, b"two")
    with pytest.raises(TypeError), replace_file(path) as file:
        file.writelines([b"half", None])
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_kill_leaves_the_old_content(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    code = "import os, sys; from pathlib import Path; from lockstep.files import replace_file\n"
    code += "with replace_file(Path(sys.argv[1])) as file: file.write(b'new'); file.flush(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert path.read_text() == "old"
    assert next(name for name in os.listdir(tmp_path) if name != "state.json").startswith(".state.json.tmp-")


def test_the_content_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []

    def seen(what, real, *given):
        events.append(what)
        return real(*given)

    monkeypatch.setattr(os, "fsync", partial(seen, "sync", os.fsync))
    monkeypatch.setattr(os, "replace", partial(seen, "rename", os.replace))
    write_whole(tmp_path / "a", "x")
    write_whole(tmp_path / "a", "x", lasting=False)
    sync(tmp_path)
    assert events == ["sync", "rename", "rename", "sync"]


def test_permissions_stay_and_links_are_not_followed(tmp_path):
    path, precious = tmp_path / "a", tmp_path / "precious"
    write_whole(path, "x")
    path.chmod(0o640)
    write_whole(path, "y")
    assert path.stat().st_mode & 0o777 == 0o640
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link")
    write_whole(tmp_path / "link", "z")
    assert not (tmp_path / "link").is_symlink()
    assert precious.read_text() == "mine"


def test_an_error_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_whole(tmp_path / "a", "x")
    assert caught.value.filename == str(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "nowhere" / "a", "x")
    assert caught.value.filename == str(tmp_path / "nowhere" / "a")
