"""Show how to move a training script to lockstep: `lockstep lint --migrate FILE`.

For each line that changes it shows the replacement, or why it would be refused. The tables of the adapters'
`refusals` modules decide what lockstep serves.
"""
