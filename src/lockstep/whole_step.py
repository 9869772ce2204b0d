"""Passes for a loss over the whole step: see `Task.step_loss`."""

__all__: list[str] = []
