"""Real runs with planted faults: `start` one, `Run.end` it, compare what it left with a run that nothing disturbed.

run = launch(folder, faults=[{"rank": 1, "step": 7, "at": BEAT, "do": "kill"}], restarts=1)
assert run.code == 0 and run.same_as(whole)
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep import checkpoint
from lockstep.logging.jsonl import read

BEAT = "lockstep.distributed.exchange:StepExchange.global_items"
HERE = Path(__file__).resolve().parent
TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}  # the square of {i}\n\n" for i in range(1500))
SETTINGS = "--seq-len 32 --batch-size 4 --micro-batch-size 2 --data.vocab-size 300 --log-freq 1 --max-steps 14"
SETTINGS += " --ckpt-freq 5 --exact --model.dropout 0.1 --model-name builtin:nano"

# A task whose samples draw random numbers, and are others on rank 1 in the split that ODD names.
ODD = """
import os
import torch
from torch import nn
import lockstep

class Numbers(torch.utils.data.Dataset):
    def __init__(self, split):
        self.odd = split == os.environ.get("ODD") and os.environ["RANK"] == "1"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(8) + index % 2 + 0.5 * self.odd * (index == 63), index % 2

class Odd(lockstep.Task):
    def model(self):
        return nn.Linear(8, 2)

    def dataset(self, split):
        return Numbers(split)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

# What makes rank 1 start unlike the others, by the word that must be said.
UNLIKE = {
    "weights": {"at": "lockstep.training.start.build:build_model", "do": "perturb"},
    "configuration": {"at": "lockstep.config.cli:flatten", "do": "result", "value": {"lr": 1.0}},
    "lockstep's code": {"at": "lockstep.guards.startup:program", "do": "result", "value": {"lockstep's code": "other"}},
    "samples": {"at": "lockstep.training.start.datasets:_count", "do": "result", "value": 500},
}


@dataclass
class Run:
    """What a run did: exit code, all that it said, the seconds it took, and its folder."""

    code: int
    said: str
    seconds: float
    folder: Path

    @property
    def last(self):
        """The last line on the screen."""
        return next((line for line in reversed(self.said.splitlines()) if line.strip()), "")

    @property
    def steps(self):
        """The steps that the records hold, in order."""
        return [record["global_step"] for record in read(self.folder / "metrics.jsonl") if "lr" in record]

    @property
    def state(self):
        return json.loads((self.folder / "state.json").read_text())

    def mark(self):
        """Parameters and optimizer, the position in the data, and the trace of losses and norms: all bitwise."""
        path = checkpoint.newest(self.folder, say=print)
        state = checkpoint.read_state(path)
        trace = [(r["global_step"], r["running_loss"]) for r in read(self.folder / "metrics.jsonl") if "lr" in r]
        prints = [checkpoint.fingerprint(path, prefix) for prefix in ("model/", "optimizer/")]
        return prints, state["position"], state["global_step"], trace

    def log(self, rank=0):
        path = self.folder / "logs" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""


def environment(faults=(), **more):
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    if faults:
        paths = [str(HERE / "inject"), *filter(None, [kept.get("PYTHONPATH")])]
        kept |= {"LOCKSTEP_CHAOS": json.dumps(list(faults)), "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def text_in(folder):
    """The data of all runs: a text whose prepared form is cached beside it."""
    path = folder / "code.txt"
    if not path.exists():
        path.write_text(TEXT)
    return path


def arguments(folder, out, *flags, processes=2, restarts=0, losses=0):
    data = ["--dataset-name", str(text_in(folder)), "--data.cache", str(folder / "cache")]
    start = [sys.executable, "-m", "lockstep"]
    if processes:
        start += ["launch", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
        start += ["--max-losses", str(losses), "--"]
    return [*start, "train", "--save-dir", str(out), *SETTINGS.split(), *data, *flags]


def on_node(command, rank, size, port, address="127.0.0.1"):
    """The command of `arguments`, as the launcher of one of several nodes."""
    at = command.index("launch") + 1
    where = ["--nnodes", str(size), "--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
    return [*command[:at], *where, *(["--rdzv-conf", "is_host=0"] if rank else []), *command[at:]]


def torchrun(folder, out, *flags, processes=2, restarts=0):
    """The same run under plain torchrun, with its defaults: one meeting point for all restarts."""
    own = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    python, *rest = arguments(folder, out, *flags, processes=0)
    return [python, *own, *rest]


def start(command, faults=(), **more):
    return subprocess.Popen(
        command,
        env=environment(faults, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process, out, began, timeout=90.0):
    try:
        said = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        end(process)
        raise
    finally:
        end(process)
    return Run(process.returncode, said, time.monotonic() - began, Path(out) / "default")


def launch(folder, out, *flags, faults=(), python=sys.executable, processes=2, timeout=90.0, **more):
    """A run to its end."""
    began = time.monotonic()
    count = {"processes": processes, "restarts": more.pop("restarts", 0), "losses": more.pop("losses", 0)}
    command = [python, *arguments(folder, out, *flags, **count)[1:]]
    process = start(command, faults, **more)
    return finish(process, out, began, timeout)


@contextlib.contextmanager
def memory_group(megabytes):
    """A memory group of cgroup v1 with this limit, for `in_group`; None where that is not allowed."""
    group = Path(f"/sys/fs/cgroup/memory/lockstep-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # a process is still ending
                time.sleep(0.1)


def in_group(group, command):
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]


def until_step(out, step, process, seconds=60.0):
    """Waits for the record of `step`."""
    path, deadline = Path(out) / "default" / "metrics.jsonl", time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and any(record["global_step"] >= step for record in read(path)):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} did not come")


def until_idle(pid, seconds=60.0):
    """Waits until a process that computed for a second or more has computed nothing for another."""
    ticks, deadline = [], time.monotonic() + seconds
    while len(ticks) <= 10 or ticks[-1] > ticks[-11] or ticks[-1] < os.sysconf("SC_CLK_TCK"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        ticks.append(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])))


def workers(process):
    """The pids of the launcher's ranks, by rank: of those that were forked the system knows a name."""
    found = {}
    for pid in children(process.pid):
        path = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):
            rank = re.match(rb"lockstep (\d+)", (path / "comm").read_bytes())
            rank = rank or re.search(rb"(?:^|\0)RANK=(\d+)", (path / "environ").read_bytes())
            if rank:
                found[int(rank[1])] = pid
    return found


def forked(pid):
    """Whether a rank was forked from the process that is kept ready."""
    return Path(f"/proc/{pid}/comm").read_bytes().startswith(b"lockstep ")


def preloaded(process):
    """The pid of the launcher's process that is kept ready to be forked; None: it is not there."""
    for pid in children(process.pid):
        with contextlib.suppress(OSError):
            if b"launch.workers" in Path(f"/proc/{pid}/cmdline").read_bytes() and not forked(pid):
                return pid
    return None


def children(pid):
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]


def _parent(path):
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def end(process):
    """No test leaves a process behind."""
    for pid in workers(process).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()
