"""Keeps hypothesis's files out of the checkout, and lets no test fail for its time."""

import tempfile

from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

HOME = tempfile.TemporaryDirectory(prefix="hypothesis-")  # removed when the interpreter ends
set_hypothesis_home_dir(HOME.name)

settings.register_profile("lint", deadline=None)
settings.load_profile("lint")
