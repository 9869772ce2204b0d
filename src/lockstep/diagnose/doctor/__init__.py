"""Check variables, machine, network, devices and task on every rank: `lockstep doctor`.

`examine.py` runs the checks in order, each with its own time limit; the other files are the checks, by subject.
"""
