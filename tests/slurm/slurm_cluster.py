"""A real Slurm of two nodes on this machine: `with cluster(folder) as slurm: slurm.run("sinfo")`.

Both nodes, n1 and n2, are this host, on ports of the loopback. Its munge daemon, keys, logs and state lie in one
folder, and nothing of the machine's own Slurm is read. Needs root and the Debian packages slurmctld, slurmd,
slurm-client and munge.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lockstep.distributed.launcher import listen

__all__ = ["NEEDED", "Cluster", "cluster"]

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
_CONFIG = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts again when its old credential is void: 120 s by default.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=10
SlurmdTimeout=10
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Cluster:
    """The cluster's folder, and what is asked of it."""

    def __init__(self, folder):
        self.folder = folder
        own = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, own)),
        }

    def run(self, *words, seconds=120, **variables):
        """The finished process of a command, with `out` in place of two streams."""
        environment = self.environment | variables
        done = subprocess.run(
            list(map(str, words)),
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        done.out = done.stdout
        return done

    def state(self, job):
        """The state of a job, or "" once Slurm has forgotten it or it has ended."""
        return self.run("squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T").out.split("\n")[0].strip()

    def wait(self, job, *states, seconds=150):
        """Wait until the job is in one of these states, and return it."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                shown = self.run("scontrol", "show", "job", job).out
                raise AssertionError(f"job {job} is {state}, not {states}:\n{shown}")
            time.sleep(0.3)
        return state

    def start_node(self, name):
        """Start the daemon of a node."""
        subprocess.run(["slurmd", "-N", name], env=self.environment, check=True)

    def kill_node(self, name):
        """Kill the daemon of a node, as a crash of the node does for Slurm."""
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def await_nodes(self, count=2):
        """Wait until so many nodes are up."""
        deadline = time.monotonic() + 60
        while self.run("sinfo", "--noheader", "--states=idle,mixed,alloc", "--format=%D").out.strip() != str(count):
            assert time.monotonic() < deadline, (self.folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.2)


def _free_ports(count):
    sockets = [listen("127.0.0.1", 0) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextlib.contextmanager
def cluster(folder):
    """Start the cluster in an empty folder, and end all of its processes and jobs afterwards."""
    for name in ("munge", "state"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o711)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(_CONFIG.format(host=socket.gethostname(), folder=folder, ports=_free_ports(3)))
    found = Cluster(folder)
    munge = [f"--{name}={folder}/munge/{name.partition('-')[0]}" for name in ("socket", "key-file", "pid-file")]
    munge += [f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed", "--force"]
    try:
        subprocess.run(["munged", *munge], check=True, stderr=subprocess.DEVNULL)
        subprocess.run(["slurmctld"], env=found.environment, check=True)
        for node in ("n1", "n2"):
            found.start_node(node)
        found.await_nodes()
        yield found
    finally:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            found.run("scancel", "--user=root", "--quiet")
            deadline = time.monotonic() + 20
            while found.run("squeue", "--noheader").out.strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for path in (
            *(folder / f"{node}.pid" for node in ("n1", "n2")),
            folder / "slurmctld.pid",
            folder / "munge/pid",
        ):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def missing():
    """Why there can be no cluster here; "" if there can."""
    absent = [name for name in NEEDED if not shutil.which(name)]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if sys.platform == "linux" and os.geteuid() == 0 else "Slurm's daemons run as root"
