"""A transformers Trainer as a task."""
