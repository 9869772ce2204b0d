"""Nothing here reaches a network: the hub's address is a port of this machine at which nobody listens."""

import os
import sys

import pytest

from hf import made


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    for name in (
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    held = [name for name in ("datasets.config", "huggingface_hub.constants") if name in sys.modules]
    offline = {name: sys.modules[name].HF_HUB_OFFLINE for name in held}
    yield
    os.environ.pop("HF_HUB_OFFLINE", None)  # set by `reach`, which monkeypatch did not see
    for name, value in offline.items():
        sys.modules[name].HF_HUB_OFFLINE = value


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Config and tokenizer, without weights."""
    return made.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """The same with weights."""
    return made.write_model(tmp_path_factory.mktemp("weights"), weights=True)
