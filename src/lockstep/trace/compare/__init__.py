"""Compare two recorded trainings."""
