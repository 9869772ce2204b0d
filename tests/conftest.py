"""Settings for all tests."""

from hypothesis import settings

# No deadline: a machine that is busy with something else is not a failure. pytest's own timeout ends what hangs.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")
