"""Trials before step 1: what the loss is, whether the task's methods work, and whether the model compiles."""
