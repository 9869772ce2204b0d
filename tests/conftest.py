"""Settings for all tests."""

import gc

from hypothesis import settings

# No deadline: a machine that is busy with something else is not a failure. pytest's own timeout ends what hangs.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")


def pytest_collection_finish():
    """Every run ends with a collection, which need not look at all that was imported: a third of a second each."""
    gc.collect()
    gc.freeze()
