"""Recorder of a training script."""
