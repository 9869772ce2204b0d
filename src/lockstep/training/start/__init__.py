"""Start of a run: resolve the configuration, build the parts, and load the state."""
