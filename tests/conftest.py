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


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def by_flags(no_variables_are_left, monkeypatch):  # the former before the latter, which takes back its own changes
    """Name settings by flag in messages, whichever tests ran before; tests/config/test_setting_names.py has fields."""
    monkeypatch.setattr(SETTINGS, "flags", True)
    # A script's flags count for all runs of its process.
    monkeypatch.setattr(SETTINGS, "typed", {})
    monkeypatch.setattr(SETTINGS, "defaults", ())


# The files that take longest, which are begun first: at the end one of them would keep one worker busy alone. xdist
# would begin those with the most tests (`--no-loadscope-reorder` in the Makefile).
LONGEST = (
    "matrix/test_matrix",
    "chaos/test_chaos",
    "chaos/test_lost_ranks",
    "transforms/test_graphs",
    "training/test_run_loop",
    "training/test_trained_set",
    "trace/test_trace_cases",
    "test_examples",
    "training/test_whole_step",
    "engines/test_deepspeed_average",
    "verify/test_verify",
    "trace/test_trace_command",
    "commands/test_command",
)


def pytest_collection_modifyitems(items):
    """The longest files first, each file's tests together and in their order."""
    items.sort(
        key=lambda item: next((n for n, name in enumerate(LONGEST) if f"{name}.py" in item.nodeid), len(LONGEST))
    )


def pytest_collection_finish():
    """Every run ends with a collection, which need not look at all that was imported: a third of a second each."""
    _freeze()
    if "torch" in sys.modules:  # two files are tested at a time: threads that wait for each other would take both cores
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def imported_is_frozen():
    """The same for what a test imports or leaves, such as transformers.

    A run with many new objects would end with `gc.unfreeze()`, which gives all modules back to every later collection:
    a second each. tests/training/test_garbage_collection.py has the limit of the package.
    """
    if trainer := sys.modules.get("lockstep.training.trainer"):
        trainer._MIN_OBJECTS = sys.maxsize
    yield
    if len(gc.get_objects(generation=2)) > 20_000:  # not gc.get_freeze_count(), which visits all that is frozen: 0.1 s
        _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_variables_are_left():
    """A launcher's variables that a test leaves make a later run in this process end itself by a signal."""
    before = _launch_variables()
    yield
    assert _launch_variables() == before


def _launch_variables():
    return {name: value for name, value in os.environ.items() if name.startswith("LOCKSTEP_") or name in LAUNCHED}


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
