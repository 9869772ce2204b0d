"""Check variables, machine, network, devices and task on every rank: `lockstep doctor`.

`examine.py` runs the checks in order, each in a thread with its own time limit: one that hangs becomes that
check's line. The other files are the checks, by subject. Ranks exchange findings through keys of a store and not
by collectives, so a missing rank is missing from one answer, is named, and is not waited for again.

- `speed`: a rank is slow if its best of 25 rounds is above 1.1 times the median of every other rank's, in three
  measurements. Ranks of one host share its memory, so copies are compared between hosts only.
- `workers`: a cache that fills up and mapped files are not reported.
- `placement` runs in `train` too, where torch complains of tensors on different devices before step 1.

`bench/doctor.py` counts false alarms over clean runs.
"""
