"""Every check, in the order in which they are made: what is cheap and explains most comes first."""

from lockstep.diagnose.doctor import differences, disk, gpus, group, machine, network, speed, task, variables
from lockstep.diagnose.doctor.finding import Check

__all__ = ["CHECKS", "LAUNCHER"]

_PROMPT = 8.0  # seconds for what takes none: a machine may be busy
LAUNCHER = Check("variables", variables.launcher, _PROMPT)

_LINK = "look at the network between the nodes: interfaces, firewall, `ip -s link`"
_FORM = "a rank that hangs says where in its own line; else the network: see the lines tcp and names above"

CHECKS = (
    Check("settings", variables.settings, _PROMPT),
    Check(
        "names", network.names, 6.0, network.judge_names, stuck="the name server does not answer: see /etc/resolv.conf"
    ),
    Check("versions", differences.versions, 8.0, differences.judge_versions),
    Check("same settings", differences.same_settings, _PROMPT, differences.judge_settings),
    Check("loaders", task.loaders, 20.0, stuck="the module's own code: what it does when it is made"),
    Check("cores", machine.cores, _PROMPT),
    Check("memory", machine.memory, _PROMPT),
    Check("shared memory", machine.shared_memory, _PROMPT),
    Check("open files", machine.open_files, _PROMPT),
    Check("disk", disk.disk, 8.0, stuck=disk.STUCK),
    Check("locks", disk.locks, 4.0, stuck="the lock server does not answer (NFS: lockd); give another --save-dir"),
    Check("folder's clock", disk.clock, 4.0, stuck=disk.STUCK),
    Check("shared folder", disk.shared_folder, 6.0, disk.judge_shared_folder, stuck=disk.STUCK),
    Check("GPUs", gpus.gpus, 10.0, gpus.judge_gpus, stuck="the driver hangs: dmesg, and restart the node"),
    Check("tcp", network.between, 12.0, network.judge_between, stuck=_LINK),
    Check("group", group.group, 16.0, together=True, stuck=_FORM),
    Check("sum", group.sums, 10.0, group.judge_sums, together=True, stuck=_LINK),
    Check("transport", group.transport, _PROMPT, group.judge_transport),
    Check("bandwidth", group.bandwidth, 15.0, group.judge_bandwidth, together=True, stuck=_LINK),
    Check("speed", speed.speed, 25.0, speed.judge_speed),
    Check("task", task.task, 40.0, task.judge_task, together=True, stuck="the task's own code, or a rank that failed"),
)
