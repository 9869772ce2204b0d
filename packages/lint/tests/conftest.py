"""Keeps hypothesis's files out of the checkout."""

import tempfile

from hypothesis.configuration import set_hypothesis_home_dir

HOME = tempfile.TemporaryDirectory(prefix="hypothesis-")  # removed when the interpreter ends
set_hypothesis_home_dir(HOME.name)
