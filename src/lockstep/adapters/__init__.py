"""Adapters that turn another trainer's code into a lockstep task."""
