"""Record what any training script computes (`lockstep trace`), and compare two records (`lockstep compare`).

Recording runs in the script's own process, with torch and nothing else of lockstep:

attach/sitecustomize.py     run by Python at its start; record/imports.py waits for torch to be imported
events.py                   hooks into torch and the frameworks, for any recorder
record/hooks.py             listens to the events, and fills record/states.py (passes and updates)
record/journal.py           one record a step, of sums.py (tensors), samples.py (batches), names.py (tensor names)
record/pending.py           reads a device once a step

Comparing needs no torch: compare/reading.py, pairing.py (matching steps), judge*.py (stage by stage),
rounding.py (the bounds, which `lockstep verify` shares), causes.py.
"""
