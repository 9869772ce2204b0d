"""Time the steps of any training script: `lockstep profile|goodput|report -- COMMAND`.

`lockstep.commands.script` starts the command, and reads what its processes wrote:

hooks.py        listens to the events of these processes; tells recorder.py which part of a step begins
recorder.py     times by part, rank 0's timeline.jsonl and metrics.jsonl, and the trace of `profile`
"""

__all__ = ["HOOKS", "MODULES", "SETTINGS_VARIABLE", "STARTED"]

# JSON: the folder, and the traced steps [first, last] or null.
SETTINGS_VARIABLE = "LOCKSTEP_SCRIPT"
# A file in the folder: a process has loaded torch.
STARTED = ".torch"
# The listener's module, and the modules that it hooks once they are imported.
HOOKS = "lockstep.diagnose.script.hooks"
MODULES = ("torch", "torch.distributed.checkpoint.state_dict_saver", "safetensors.torch")
