"""What lockstep makes of other libraries' arguments, callbacks and hooks, as plain data: read by the adapters of
`lockstep.tasks`, which do it, and by `lockstep.migrate`, which tells it. Nothing is imported here.
"""
