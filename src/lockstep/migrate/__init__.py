"""Show how to move a training script to lockstep: `lockstep lint --migrate FILE`.

It prints the replacement for each line that changes, or why lockstep refuses it. The adapters' `refusals` modules
list what lockstep supports.
"""
