"""Guards that watch a run and stop, skip or repair: one per file."""
