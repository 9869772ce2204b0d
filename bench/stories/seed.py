"""The seed of a program, which the measurement sets."""

import os

seed = int(os.environ.get("SEED", "0"))
