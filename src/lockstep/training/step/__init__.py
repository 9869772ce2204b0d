"""What follows each step: records, guards, saves and evaluations."""
