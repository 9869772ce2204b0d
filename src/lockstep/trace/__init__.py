"""`lockstep trace` and `lockstep compare`: what any training script does, recorded and held against another run.

Recording, in the script's own process (torch is there; nothing else of lockstep is):

attach/sitecustomize.py     run by Python at its start; imports.py waits for torch to be imported
hooks.py, frameworks.py     where it is attached
recorder.py                 what they fill: passes.py (batches, forwards, backwards), updates.py, both by names.py
journal.py                  a record a step, of sums.py (tensors), samples.py (batches), states.py (generators)
pooled.py, held.py          small work of a few steps at once, one read of the device a step
writing.py                  one line of a file

Comparing, without torch: reading.py, pairing.py (which step belongs to which), judge*.py (stage by stage), causes.py.
"""
