"""Time the steps of any training script: `lockstep profile|goodput|report -- COMMAND`.

`lockstep.commands.script` starts the command, and reads what its processes wrote:

hooks.py        hooks into torch in these processes; they report to recorder.py which part of a step begins
recorder.py     times by part, rank 0's timeline.jsonl and metrics.jsonl, and the trace of `profile`
"""

__all__ = ["SETTINGS_VARIABLE", "STARTED", "TARGETS"]

# JSON: the folder, and the traced steps [first, last] or null.
SETTINGS_VARIABLE = "LOCKSTEP_SCRIPT"
# A file in the folder: a process has loaded torch.
STARTED = ".torch"
_HOOKS = "lockstep.diagnose.script.hooks"
# Module -> (module of the recorder, function to call once the module is imported).
TARGETS = {
    "torch": (_HOOKS, "attach"),
    "torch.distributed.checkpoint.state_dict_saver": (_HOOKS, "hook_distributed_saves"),
    "safetensors.torch": (_HOOKS, "hook_safetensors"),
}
