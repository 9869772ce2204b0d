"""Analyse all ranks' traces: the time of a step by part, and the best change."""
