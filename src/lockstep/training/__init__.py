"""Build a run from its configuration, train it, resume it and load it again."""
