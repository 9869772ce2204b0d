"""Judgement of all ranks' traces: where a step's time goes, and what to change first."""
