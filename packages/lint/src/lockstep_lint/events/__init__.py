"""Simulate a program: the events of its training in their order, for rules to query."""
