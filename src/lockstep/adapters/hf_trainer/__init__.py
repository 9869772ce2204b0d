"""Adapter from a transformers Trainer to a task."""
