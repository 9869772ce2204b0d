"""Reports from a run's files alone: a goodput table, and an HTML page."""
