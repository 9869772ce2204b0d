"""`lockstep lint --migrate FILE`: which lines of a training script become which in lockstep, and what would be refused.

What lockstep serves is told by the tables of `lockstep.tasks.tables`, which the adapters read too.
"""
