"""Submit a run to Slurm, and record in the job which node's launcher ended first.

lockstep launch --slurm --nodes 4 --gpus-per-node 8 --time 4:00:00 --partition gpu -- train ...
lockstep launch --slurm --nodes 4 --gpus-per-node 8 --dry-run -- train ...                  (prints the script)
lockstep launch --slurm --seeds 1-5 --set account=lab -- train ...                          (one run for each seed)

`submit` writes the sbatch script into the run's folder and submits it. In the job srun starts one launcher a node,
which reads node rank, address and port from Slurm's variables (`distributed/starters.py: SlurmTask`). `record_end`
keeps a file for each launcher: empty while it runs, then one line with its error.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.config import cli
from lockstep.config.cli import Parser
from lockstep.config.fields import is_url
from lockstep.distributed.failures import describe_error
from lockstep.errors import FINAL_CODES, ConfigError, LockstepError

__all__ = ["FLAGS", "add_slurm_flags", "record_end", "submit"]


# Set by the script to a folder with a file for each node.
_ENDS_VARIABLE = "LOCKSTEP_SLURM_ENDS"

_SCRIPT = """\
#!/bin/bash
# Written by `lockstep launch --slurm`. To submit it again: sbatch @{script}
@{options}

slurm=@{folder}
ends=$slurm/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.ends    # a file for each node: empty until its launcher ends
mkdir -p "$ends"
export LOCKSTEP_SLURM_ENDS=$ends PYTHONUNBUFFERED=1

# By which the launchers of the nodes know each other; other users cannot read the environment of this job's processes.
export LOCKSTEP_RDZV_SECRET=${LOCKSTEP_RDZV_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}

# One launcher a node. It starts the ranks, and finds the other nodes by Slurm's variables. If one is lost, the others
# end by themselves, or go on.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0@{label} \\
    @{command}
code=$?

# Nodes whose launcher has not reported an end; none if that is all of them, since then it was not the nodes.
lost=$(find "$ends" -type f -empty -printf '%f\\n' 2>/dev/null)
[ "$(wc -w <<<"$lost")" = "$SLURM_JOB_NUM_NODES" ] && lost=
first=$(sort -n "$ends"/* 2>/dev/null | head -n 1)
cause=$(cut -d ' ' -f 3- <<<"$first")

again() {    # $1: why. The next job of a chain continues; otherwise this one is requeued, without the failed nodes.
    echo "lockstep: $1; the run continues in the next job" >&2
    [ -e "$slurm/$SLURM_JOB_ID.chain" ] && exit "$code"
    trap '' TERM    # by which Slurm ends this script once the job is requeued
    scontrol requeue "$SLURM_JOB_ID" || exit "$code"
    if [ -n "$lost" ]; then
        echo "$lost" >>"$slurm/$SLURM_JOB_ID.excluded"
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$(sort -u "$slurm/$SLURM_JOB_ID.excluded" | paste -sd ,)"
    fi
    exit "$code"
}

early=$slurm/$SLURM_JOB_ID.early
if [ "${first%% *}" = -1 ]; then    # bad input, or a difference that another start would find again
    rm -f "$early"
elif [ "$code" = 75 ]; then
    rm -f "$early"
    again "saved before the time limit, or on a signal"
elif [ "$code" = 138 ] && [ ! -e "$early" ]; then    # 128 + SIGUSR1
    touch "$early"
    again "the signal came before the first step"
elif [ -n "$lost" ]; then
    again "lost $(paste -sd , <<<"$lost")"
fi

# The run is at its end, or has failed: the rest of a chain is not needed.
[ -e "$slurm/$SLURM_JOB_ID.chain" ] && scancel --quiet --state=PENDING $(cat "$slurm/$SLURM_JOB_ID.chain")
rm -rf "$ends" "$early"
[ "$code" = 138 ] && cause="lockstep: error: ended by SIGUSR1 before the first step, twice: raise --time"
[ "$code" = 0 ] || echo "${cause:-lockstep: error: srun ended with code $code, before a launcher could say why}" >&2
exit "$code"
"""

# Flags of --slurm alone.
FLAGS = ("nodes", "gpus_per_node", "time", "partition", "set", "seeds", "chain")
# Options of sbatch that are chosen here, with what to use instead.
_OURS = {
    "ntasks": "srun starts one launcher a node; use --nproc-per-node for the ranks",
    "ntasks-per-node": "srun starts one launcher a node; use --nproc-per-node for the ranks",
    "nodes": "use --nodes",
    "gpus-per-node": "use --gpus-per-node",
    "time": "use --time",
    "partition": "use --partition",
    "array": "use --seeds",
    "wrap": "the command is what follows `--`",
}
# With one of these options nodes may be shared.
_CORE_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "exclusive", "oversubscribe")
# Seconds before the time limit, so that the run can save; at most a fifth of the limit.
_SIGNAL_SECONDS = 300
# A value without control characters: a line break would begin another option.
_SECRET_FREE = re.compile(r"[^\x00-\x1f]*")
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(\d+)(?::(\d+)(?::(\d+))?)?)")
# Flags that the launchers in the job get too, with their defaults.
_PASSED_ON = {
    "max_restarts": 0,
    "min_ranks": 1,
    "max_losses": None,
    "rdzv_conf": "",
    "rdzv_secret_file": None,
    "master_port": 0,
}


# A hole of a script. Not $, which shell scripts use everywhere.
_HOLE = re.compile(r"@\{([\w-]+)\}")


def add_slurm_flags(parser: Parser) -> None:
    """Add the flags of `launch --slurm`."""
    add = parser.add_argument_group("on Slurm").add_argument
    text = "submit the command to Slurm; FILE: an sbatch script with @{holes}, in place of the built-in one"
    add("--slurm", nargs="?", const="", metavar="FILE", help=text)
    add("--nodes", type=int, metavar="N", help="nodes (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of each node, and ranks if --nproc-per-node is not given")
    add("--time", metavar="D-HH:MM:SS", help="time limit; ahead of it the run saves, and the job is requeued")
    add("--partition", metavar="NAME", help="partition (default: the cluster's)")
    text = "any other option of sbatch, such as account=lab, or the value of a hole of FILE; may be repeated"
    add("--set", action="append", metavar="KEY=VALUE", help=text)
    add("--seeds", metavar="LIST", help="an array of runs NAME-seedK with --seed K, as 1-5 or 1,3,7%%2")
    add("--chain", type=int, metavar="N", help="N jobs, each after the one before, in place of requeueing one")


def submit(args: argparse.Namespace, target: Sequence[str]) -> int:
    """Submit the command to Slurm, or print its script with --dry-run; return 0.

    Args:
        args: flags of `launch`.
        target: the command after `--`.

    Raises:
        ConfigError: an invalid flag, a hole of the template without a value, no sbatch, or sbatch refused the job.
    """
    values = _check_flags(args)
    name, folder = _run_folder(target, array=bool(args.seeds))
    options = _options(args, values, name, folder)
    script = Path(str(folder).replace("%a", "array")) / "job.sh"
    text = _fill(args, values, options, folder, script, target)
    if args.dry_run:
        print(text, end="")
        return 0
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--slurm: there is no sbatch on the PATH; run this on a login node of the cluster, or print the script "
            "with --dry-run"
        )
    # Slurm opens the output before the script runs, so its folders must exist when the job starts.
    folders = [script.parent, *(Path(str(folder).replace("%a", str(seed))) for seed in _seeds(args.seeds))]
    with _new_folders(folders):
        script.write_text(text, encoding="utf-8")
        jobs = _submit_chain(script, args.chain or 1)
        if len(jobs) > 1:
            for job in jobs:
                (script.parent / f"{job}.chain").write_text(" ".join(jobs) + "\n", encoding="utf-8")
    output = options["output"].replace("%A", jobs[0]).replace("%j", jobs[0])
    print(f"submitted job {', '.join(jobs)}; output: {output}; to cancel: scancel {' '.join(jobs)}")
    return 0


def _check_flags(args: argparse.Namespace) -> dict[str, str]:
    """Check the flags, and return the values of --set by key."""
    for flag in ("nnodes", "node_rank", "master_addr", "rdzv_endpoint", "rdzv_id"):
        if getattr(args, flag) is not None:
            if flag == "nnodes":
                way = "use --nodes"
            else:
                way = "the launchers read it from Slurm in the job; leave it out"
            raise ConfigError(f"--{flag.replace('_', '-')} cannot be used with --slurm: {way}")
    for flag in ("nodes", "gpus_per_node", "chain"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}: it must be at least 1")
    if args.seeds is not None and not _ARRAY.fullmatch(args.seeds):
        raise ConfigError(f"--seeds is '{args.seeds}': it must be a list as sbatch's --array takes it: 1-5, or 1,3,7%2")
    if args.seeds and args.chain:
        raise ConfigError("--seeds and --chain cannot be used together: without --chain each run is requeued by itself")
    if args.time is not None:
        _seconds(args.time)
    values = {}
    for pair in args.set or ():
        key, equals, value = pair.partition("=")
        key = key.lstrip("-")
        if not equals or not re.fullmatch(r"[A-Za-z][\w-]*", key) or not _SECRET_FREE.fullmatch(value):
            raise ConfigError(f"--set is {pair!r}: it must be KEY=VALUE, an option of sbatch, as in --set account=lab")
        if key in _OURS:
            raise ConfigError(f"--set {key}={value}: {_OURS[key]}")
        values[key] = value
    return values


def _seconds(text: str) -> int:
    """Parse a time limit as Slurm does; 0 if there is no limit."""
    if text.lower() in ("infinite", "unlimited"):
        return 0
    match = _TIME.fullmatch(text)
    if not match:
        raise ConfigError(f"--time is '{text}': it must be MINUTES, HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds, value, minutes_or_seconds, third = (int(number or 0) for number in match.groups())
    if match[1]:
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif match[7]:
        total = (value * 60 + minutes_or_seconds) * 60 + third
    else:
        # The text was MINUTES or MINUTES:SECONDS.
        total = value * 60 + minutes_or_seconds
    if not total:
        raise ConfigError(f"--time is '{text}': it must be more than 0")
    return total


def _run_folder(target: Sequence[str], *, array: bool) -> tuple[str, Path]:
    """Return the job's name, and the folder of its script and output.

    In the folder, Slurm replaces %a by the seed.
    """
    if target[0] == "train":
        config = cli.parse(list(target[1:]))
        name = config.experiment_name
        run = Path(config.local_dir).expanduser().absolute() / (f"{name}-seed%a" if array else name)
        return name, run / "slurm"
    if array:
        raise ConfigError(f"--seeds: only `train` takes them, but the command is {target[0]}")
    if target[0] == "evaluate" and len(target) > 1 and not (target[1].startswith("-") or is_url(target[1])):
        run = Path(target[1]).expanduser().absolute()
        return f"evaluate-{run.name}", run / "slurm"
    program = target[1] if target[0] == "-m" else Path(target[0]).stem
    return program, Path.cwd() / "slurm"


def _seeds(text: str | None) -> list[int]:
    """Expand the list of --seeds."""
    seeds: list[int] = []
    for entry in (text or "").partition("%")[0].split(","):
        bounds, _, stride = entry.partition(":")
        begin, _, end = bounds.partition("-")
        if begin:
            seeds += range(int(begin), int(end or begin) + 1, int(stride or 1))
    return seeds


def _options(args: argparse.Namespace, values: Mapping[str, str], name: str, folder: Path) -> dict[str, str]:
    """Return the options of sbatch.

    An empty value is a flag; it also removes a value that was chosen here.
    """
    options = {"job-name": name, "nodes": str(args.nodes or 1), "ntasks-per-node": "1"}
    if args.gpus_per_node:
        options["gpus-per-node"] = str(args.gpus_per_node)
    # Without a choice of cores the job gets whole nodes, since the ranks use all cores.
    if not any(key in values for key in _CORE_OPTIONS):
        options["exclusive"] = ""
    requested = {"time": args.time, "partition": args.partition, "array": args.seeds}
    for key, value in requested.items():
        if value:
            options[key] = value
    limit = _seconds(args.time) if args.time else 0
    # USR1 goes to the job's processes so many seconds before the time limit, and makes the run save.
    options["signal"] = f"USR1@{min(_SIGNAL_SECONDS, limit // 5) if limit else _SIGNAL_SECONDS}"
    options["requeue"] = ""
    options["open-mode"] = "append"
    options["chdir"] = str(Path.cwd())
    options["output"] = f"{folder}/{'%A' if args.seeds else '%j'}.out"
    # A flag with an empty value removes the option of that name.
    dropped = []
    for key, value in values.items():
        if not value and options.get(key):
            dropped.append(key)
    settings = {}
    for key, value in {**options, **values}.items():
        if key not in dropped:
            settings[key] = value
    return settings


def _fill(
    args: argparse.Namespace,
    values: Mapping[str, str],
    options: Mapping[str, str],
    folder: Path,
    script: Path,
    target: Sequence[str],
) -> str:
    """Fill the holes of the script."""
    text = _SCRIPT
    holes = dict[str, str]()
    if args.slurm:
        try:
            text = Path(args.slurm).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--slurm {args.slurm}: cannot read the template: {error}") from error
        holes = {}
        for name in _HOLE.findall(text):
            if name in values:
                holes[name] = values[name]
    lines = []
    for key, value in options.items():
        lines.append(f"#SBATCH --{key}" + (f"={_quote(value)}" if value else ""))
    quoted = f'"{folder}"'.replace("%a", "$SLURM_ARRAY_TASK_ID")
    holes = {
        "command": _command(args, target, quoted, options["job-name"] if args.seeds else ""),
        "folder": quoted,
        "label": " --label" if (args.nodes or 1) > 1 else "",
        "options": "\n".join(line for line in lines if line.partition("--")[2].partition("=")[0] not in holes),
        "script": shlex.quote(str(script)),
    } | holes
    missing = []
    for name in dict.fromkeys(_HOLE.findall(text)):
        if name not in holes:
            missing.append(name)
    if missing:
        names = ", ".join(f"@{{{name}}}" for name in missing)
        raise ConfigError(f"--slurm {args.slurm}: no value for {names}; add --set {missing[0]}=VALUE")
    return _HOLE.sub(lambda hole: holes[hole[1]], text)


def _quote(value: str) -> str:
    """Quote a value as sbatch reads it in a script."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + value.replace('"', '\\"') + '"'


def _command(args: argparse.Namespace, target: Sequence[str], folder: str, name: str) -> str:
    """Return the shell command of a node's launcher.

    Args:
        args: flags of `launch`.
        target: the command after `--`.
        folder: of the job's output, quoted for the shell.
        name: of the runs of an array, which adds its seed; "" for a single run.
    """
    words = [sys.executable, "-m", "lockstep", "launch"]
    words += ["--nproc-per-node", str(args.nproc_per_node or args.gpus_per_node or 1)]
    for flag, default in _PASSED_ON.items():
        if getattr(args, flag) != default:
            words += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    if args.nccl_debug is not None:
        words += ["--nccl-debug", *([args.nccl_debug] if args.nccl_debug else [])]
    if args.stderr:
        errors = shlex.quote(args.stderr)
    else:
        errors = f"{folder}/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.stderr"
    text = f"{shlex.join(words)} --stderr {errors} \\\n    -- {shlex.join(target)}"
    if name:
        text += f' --experiment-name {shlex.quote(name)}-seed"$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID"'
    return text


@contextlib.contextmanager
def _new_folders(folders: Sequence[Path]) -> Iterator[None]:
    """Create folders; after an error remove what is new in them.

    Raises:
        ConfigError: one cannot be created or written.
    """
    new = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in dict.fromkeys(new):
            with contextlib.suppress(OSError):
                if (path / "job.sh").exists():
                    (path / "job.sh").unlink()
                path.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {error.filename or folders[0]}: {error.strerror or error}") from error
        raise


def _submit_chain(script: Path, count: int) -> list[str]:
    """Submit the script `count` times, each after the one before; return the jobs' numbers."""
    jobs: list[str] = []
    for _ in range(count):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        command = ["sbatch", "--parsable", *after, str(script)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        # Cancel the first jobs of a chain that cannot be completed.
        if result.returncode:
            if jobs:
                subprocess.run(["scancel", *jobs], check=False)
            words = []
            for line in result.stderr.splitlines():
                words.append(line.removeprefix("sbatch: ").removeprefix("error: "))
            raise ConfigError(f"sbatch refused the job: {'; '.join(filter(None, words)) or 'it gave no reason'}")
        jobs.append(result.stdout.strip().partition(";")[0])
    return jobs


def _order(error: BaseException) -> int:
    if not isinstance(error, LockstepError):
        return 0
    if error.follows:
        return 1
    if error.exit_code in FINAL_CODES:
        return -1
    return 0


@contextlib.contextmanager
def record_end() -> Iterator[None]:
    """Record how this node's launcher ends, for the job's script; does nothing in other launchers.

    The file is empty from here on. At the end it has one line: -1 for a cause that another start would meet again, 0
    for any other cause, 1 for a consequence of a failure elsewhere, 2 for neither; seconds since 1970; the error. A
    launcher that is killed, or whose node is lost, leaves it empty.
    """
    folder = os.environ.get(_ENDS_VARIABLE)
    if not folder:
        yield
        return
    file = Path(folder) / os.environ.get("SLURMD_NODENAME", "node")
    with contextlib.suppress(OSError):
        file.touch()
    order = 2
    line = ""
    try:
        yield
    except BaseException as error:
        order = _order(error)
        line = f"lockstep: error: {describe_error(error)}"
        raise
    finally:
        try:
            file.write_text(f"{order} {time.time():.3f} {line}\n", encoding="utf-8")
        except OSError:
            # A full disk. No record is better than an empty one, which would name a lost node.
            with contextlib.suppress(OSError):
                file.unlink()
