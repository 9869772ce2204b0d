"""Record, guard, save and evaluate after each step."""
