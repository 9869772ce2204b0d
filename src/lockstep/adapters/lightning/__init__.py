"""A LightningModule as a task."""
