"""Recovery in a run: after a lost rank, or a step that ran out of memory."""
