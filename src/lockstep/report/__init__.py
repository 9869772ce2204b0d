"""Reports from a run's files alone: a goodput table, and an HTML page.

Curves are thinned in bounded memory; fingerprints are computed for the newest 512 MiB of checkpoints. Runs are
equal up to the step at which records have equal digits, and bitwise where both have a checkpoint.

Rank 0 writes `timeline.jsonl`: a line at each start, recovery and end, and between them at most one per second. A
resume removes nothing from it. After a kill -9 of rank 0 the time since its last line is unknown, without
`lockstep launch` until the next start. If another rank is killed under plain torchrun, rank 0 records that, and
the time is lost.
"""
