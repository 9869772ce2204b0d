"""Settings for all tests."""

import gc
import os
import sys

import hub_files
import pytest
from hypothesis import settings

from lockstep.errors import SETTINGS

# ATen reads it at the first cuBLAS call of the process, which may be a test's own, made before lockstep is imported.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# No deadline: a machine that is busy with something else is not a failure. pytest's own timeout ends what hangs.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")


@pytest.fixture(autouse=True)
def by_flags(monkeypatch):
    """Messages are read as they are written, with flags, whichever tests came before; tests/config/test_said.py has
    those for Python."""
    monkeypatch.setattr(SETTINGS, "flags", True)


# The files that take longest, which are begun first: at the end one of them would keep one worker busy alone.
LONGEST = (
    "trace/test_trace_cases",
    "matrix/test_matrix",
    "commands/test_command",
    "chaos/test_lost_ranks",
    "run/test_hf_run",
)


def pytest_collection_modifyitems(items):
    """The longest files first, each file's tests together and in their order."""
    items.sort(
        key=lambda item: next((n for n, name in enumerate(LONGEST) if f"{name}.py" in item.nodeid), len(LONGEST))
    )


def pytest_collection_finish():
    """Every run ends with a collection, which need not look at all that was imported: a third of a second each."""
    gc.collect()
    gc.freeze()
    _imported[0] = len(sys.modules)
    if "torch" in sys.modules:  # two files are tested at a time: threads that wait for each other would take both cores
        sys.modules["torch"].set_num_threads(1)


_imported = [0]


@pytest.fixture(autouse=True)
def imported_is_frozen():
    """The same for what a test imports, such as transformers."""
    yield
    if len(sys.modules) > _imported[0] + 200:
        _imported[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """The hub's address is a port of this machine at which nobody listens, and its folders are the test's own."""
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
    return hub_files.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """The same with weights."""
    return hub_files.write_model(tmp_path_factory.mktemp("weights"), weights=True)
