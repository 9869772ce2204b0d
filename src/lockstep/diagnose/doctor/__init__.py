"""`lockstep doctor`: small checks of the variables, the machine, the network, the devices and the task, on every rank.

`examine.py` runs them one after another, each within a time of its own; the other files are the checks, by subject.
"""
