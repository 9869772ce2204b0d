"""Speed of training by the number of ranks: measured and explained. See docs/scale.md.

Rounds alternate in order (1, 2, 4, 4, 2, 1, ...), so that a machine that slows down affects all sizes equally. A
run is `train`, or `launch -- train` for several ranks or with `--engine`. Without a profile the records' `time/`
parts of rank 0 show what does not scale.
"""
