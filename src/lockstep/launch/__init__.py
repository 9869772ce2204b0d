"""Start a run on several processes and nodes, and restart it after a failure."""
