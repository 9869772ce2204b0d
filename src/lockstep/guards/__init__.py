"""What watches a run and stops, skips or repairs: one guard a file."""
