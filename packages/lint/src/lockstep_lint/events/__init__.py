"""Run a program on paper: the events of its training in the order of their effects, for rules to query."""
