"""Nodes of a cluster, each a network namespace of this machine with a host name of its own; needs root.

with cluster(2) as (first, second):          # the test is skipped where namespaces cannot be made
    process = first.start([sys.executable, "-m", "lockstep", ...], env=environment())
    second.unplug()                          # its cable; `plug` connects it again
    second.kill()                            # everything that runs on it, as if the machine had died

All nodes hang on one bridge, in a namespace of its own, so nothing of this machine's network is touched. Names resolve
by each node's own /etc/hosts: node0, node1, ... and localhost. No name server is asked.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["CABLE", "Node", "cluster", "in_mount_namespace"]

CABLE = "wire"  # the network interface of each node
_NUMBERS = itertools.count()


@dataclass
class Node:
    """A node: its namespace, host name, addresses and files."""

    namespace: str
    name: str
    address: str
    address6: str
    folder: Path

    def command(self, words, *, hidden=()):
        """The words of a command that runs `words` on this node.

        Args:
            hidden: folders that are empty on this node, as where a shared one is not mounted.
        """
        mounts = [f"mount --bind {self.folder / name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
        mounts += [f"mount -t tmpfs none '{each}'" for each in hidden]
        script = " && ".join([f"hostname {self.name}", *mounts, 'exec "$@"'])
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script, "sh"]
        return [*inside, *map(str, words)]

    def start(self, words, *, hidden=(), **options):
        """Start a command on this node; its output is one pipe of text. The process's id is the command's own."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        command = self.command(words, hidden=hidden)
        return subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **options)

    def name_hosts(self, text):
        """Replace the node's /etc/hosts for commands that start from now on."""
        (self.folder / "hosts").write_text(text)

    def processes(self):
        """The ids of all processes on this node."""
        return [int(word) for word in _ip("netns", "pids", self.namespace).stdout.split()]

    def ranks(self):
        """The process of each rank on this node, by its rank: the one that the launcher started, not its children."""
        variables = {pid: _variables(pid) for pid in self.processes()}
        ranks = {pid: each["RANK"] for pid, each in variables.items() if "RANK" in each}
        return {int(rank): pid for pid, rank in ranks.items() if _parent(pid) not in ranks}

    def kill(self, number=signal.SIGKILL):
        """Send a signal to all that runs on this node; after a SIGKILL wait until it is gone."""
        until = time.monotonic() + 10
        while (pids := self.processes()) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number != signal.SIGKILL:
                return
            time.sleep(0.02)

    def ip(self, *words):
        """Run `ip` on this node, such as `route add blackhole ...`."""
        _must("-n", self.namespace, *words)

    def unplug(self):
        """Pull the cable: packets are lost without a word."""
        self.ip("link", "set", CABLE, "down")

    def plug(self):
        """Connect the cable again."""
        self.ip("link", "set", CABLE, "up")


@contextlib.contextmanager
def cluster(size):
    """Make `size` nodes on one network, and end all that runs on them."""
    prefix = f"lockstep{os.getpid()}x{next(_NUMBERS)}"
    switch, names = f"{prefix}s", [f"{prefix}n{number}" for number in range(size)]
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        nodes = [
            Node(name, f"node{number}", f"10.77.0.{number + 1}", f"fd00:77::{number + 1}", Path(folder, str(number)))
            for number, name in enumerate(names)
        ]
        try:
            if not shutil.which("ip") or any(_ip("netns", "add", name).returncode for name in (switch, *names)):
                pytest.skip("network namespaces can be made as root alone")
            _connect(switch, nodes)
            yield nodes
        finally:
            if shutil.which("ip"):
                for node in nodes:
                    node.kill()
                for name in (*names, switch):
                    _ip("netns", "del", name)


def _connect(switch, nodes):
    _must("-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
    _must("-n", switch, "link", "set", "bridge", "up")
    hosts = "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in nodes)
    for number, node in enumerate(nodes):
        end = f"port{number}"
        _must("-n", switch, "link", "add", end, "type", "veth", "peer", "name", CABLE, "netns", node.namespace)
        _must("-n", switch, "link", "set", end, "master", "bridge", "up")
        node.ip("addr", "add", f"{node.address}/24", "dev", CABLE)
        node.ip("addr", "add", f"{node.address6}/64", "dev", CABLE, "nodad")
        for link in ("lo", CABLE):
            node.ip("link", "set", link, "up")
        node.folder.mkdir()
        node.name_hosts(hosts)
        (node.folder / "nsswitch.conf").write_text("hosts: files\n")


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _must(*words):
    ended = _ip(*words)
    assert not ended.returncode, f"ip {' '.join(words)}: {ended.stderr}"


def _variables(pid):
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return {}
    return dict(line.partition("=")[::2] for line in text.split("\0"))


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def in_mount_namespace(words, folder, path):
    """The words of a command for which `path` is another folder, as on a machine of its own.

    The test is skipped where mount namespaces cannot be made.
    """
    shift = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(folder), str(path)]
    if not shutil.which("unshare") or subprocess.run([*shift, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces can be made as root alone")
    return [*shift, *map(str, words)]
