"""Finds the mistakes of PyTorch training scripts without running them.

A distribution of its own, `lockstep-lint`: it reads source text only, and imports neither torch nor lockstep.
"""
