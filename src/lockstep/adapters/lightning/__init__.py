"""Adapter from a LightningModule to a task."""
