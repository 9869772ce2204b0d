"""What became of a run, from its files alone: where its wall time went, and one page about it."""
