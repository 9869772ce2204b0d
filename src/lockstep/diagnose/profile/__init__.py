"""Reading the traces of all ranks, and judging them: where a step's time goes, and what to change first."""
