"""The command `lockstep launch`: start a run on several processes and nodes.

lockstep launch --nproc-per-node 2 -- train --experiment-name a
lockstep launch --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- train ...     (on the first node)
lockstep launch --nproc-per-node 8 --max-restarts 3 --dry-run -- train ...                      (prints the command)
lockstep launch --kubernetes run.yaml --image ... -- train ...           (writes a manifest, see kubernetes.py)
srun --ntasks-per-node=1 lockstep launch --nproc-per-node 8 -- train ...          (nodes and address from Slurm)
lockstep launch --slurm --nodes 4 --gpus-per-node 8 --time 4:00:00 -- train ...   (submits it, see slurm.py)

torchrun's PET_ variables, which Kubeflow Trainer sets in a pod, replace the flags of their names.

A script with a `lockstep.Run` of its own is started in the same way: ... -- script.py [arguments], or a module of a
package: ... -m package.module [arguments]. The flags of `train` are parsed here before anything starts, so that a wrong
flag is reported once, not once per process.
"""

import argparse
import importlib
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from lockstep.adapters.hf_trainer import flags
from lockstep.config import cli
from lockstep.config.cli import Parser
from lockstep.config.hints import FOREIGN
from lockstep.distributed.cpus import CORES_VARIABLE, cores, numa_nodes, share_cores
from lockstep.distributed.launcher import (
    OPENCV_THREADS,
    check_reachable,
    choose_interface,
    is_own_address,
    torch_variables,
)
from lockstep.distributed.starters import SlurmTask, node_address
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import kubernetes, slurm
from lockstep.launch.job import Job, create_log_folder, log_folder, log_variables
from lockstep.launch.secret import read_secret

__all__ = ["command", "rank_variables"]

# Losses within an hour that a run survives by default.
_MAX_LOSSES = 8
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_CPP_LOG = "TORCH_CPP_LOG_LEVEL"
_ELSEWHERE = "it is not a flag of launch; flags of train go after `-- train`"


def command(argv: list[str]) -> int:
    """Run `lockstep launch` and return its exit code.

    Returns:
        0; 75 if the run saved itself on a signal; 130 on Ctrl-C.

    Raises:
        ConfigError: an unknown or invalid flag, of `launch` or of the command after `--`.
        LockstepError: the run failed; the line names the rank that failed first. Or a signal ended it before it could
            save; the exit code is 128 plus the signal's number.
    """
    launch_flags, target = _split_arguments(argv)
    try:
        parser = _parser()
        args = parser.read([*kubernetes.torchrun_flags(os.environ), *launch_flags])
        if args.kubernetes:
            return kubernetes.write_manifest(parser, parser.read(launch_flags), target)
        kubernetes.check_flags(args)
        exact = _is_exact(target)
    except SystemExit:  # --help
        return 0
    if args.slurm is not None:
        return slurm.submit(args, target)
    for flag in slurm.FLAGS:
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} needs --slurm, which submits the command to Slurm")
    with slurm.record_end():
        return _launch(args, target, exact)


def _launch(args: argparse.Namespace, target: list[str], exact: bool) -> int:
    if args.nccl_debug is None:
        logs = None
    else:
        logs = log_folder(args.nccl_debug, target)
    _use_slurm(args)
    job = _job(args, target, exact)
    if logs:
        job.environment.update(log_variables(logs))
    if args.dry_run:
        print(_torchrun_command(job))
        return 0
    with create_log_folder(logs):
        succeeded, stop_signal, code = _import_agent().run(job)
    if succeeded:
        return int(code)
    number = stop_signal or signal.SIGTERM
    error = LockstepError(
        f"ended by {number.name} before the run could save; the same command resumes from its newest checkpoint, or "
        "starts over if there is none"
    )
    error.exit_code = 128 + number
    raise error


def _import_agent() -> ModuleType:
    """Import the agent, and torch with it, without torch's C++ warnings here.

    torch's store prints a C++ stack where another launcher has ended.

    The ranks keep torch's warnings.
    """
    is_set = _CPP_LOG in os.environ
    # torch reads the level while it is imported.
    os.environ.setdefault(_CPP_LOG, "ERROR")
    agent = importlib.import_module("lockstep.launch.agent")
    if not is_set:
        del os.environ[_CPP_LOG]
    return agent


def _split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into launch's own flags and the command after `--`, or from -m on."""
    for at, word in enumerate(argv):
        if word == "--":
            return argv[:at], argv[at + 1 :]
        # As torchrun does, take the rest as the module and its arguments.
        if word == "-m":
            return argv[:at], argv[at:]
    if "train" in argv:
        raise ConfigError("`--` is missing before `train`: lockstep launch [flags] -- train [flags of train]")
    return argv, []


def _is_exact(target: list[str]) -> bool:
    """Whether the command after `--` is known to be a run under --exact.

    Raises:
        ConfigError: `launch` cannot start it.
    """
    if target and target[0] == "train":
        parser = flags.with_flags(cli.make_parser(target[1:], "lockstep train"))
        options = vars(parser.read(target[1:]))
        values = cli.collect_options(options)
        flags.find_script(options, values)
        return cli.build(cli.apply_preset(values)).exact
    if target and target[0] in ("evaluate", "doctor", "profile"):
        # For evaluate, the run's own configuration decides later.
        return "--exact" in target
    if target and target[0].endswith(".py"):
        if not Path(target[0]).is_file():
            raise ConfigError(f"launch: there is no file {target[0]}; pass a script, or train, after `--`")
        return "--exact" in target
    if target and target[0] == "-m":
        _check_module(target[1] if len(target) > 1 else "")
        return "--exact" in target
    program = f"'{target[0]}'" if target else "nothing"
    raise ConfigError(
        f"launch starts `train`, `evaluate`, `profile`, `doctor`, a script or a module, but {program} follows `--`: "
        "lockstep launch ... -- train [flags], ... -- script.py [arguments], or ... -m package.module [arguments]"
    )


def _check_module(name: str) -> None:
    """Check that `python -m NAME` would find a module to run, without an import.

    Raises:
        ConfigError: there is none.
    """
    if not name or name.startswith("-"):
        raise ConfigError("launch: -m needs the name of a module: lockstep launch ... -m package.module [arguments]")
    # Else a module that was written in the last moment is not seen.
    importlib.invalidate_caches()
    # Python looks into the current folder first.
    folders = [os.getcwd(), *sys.path]
    parent = ""
    for part in name.split("."):
        full_name = f"{parent}.{part}" if parent else part
        spec = PathFinder.find_spec(full_name, folders)
        if spec is None:
            place = f"package {parent}" if parent else f"folder {os.getcwd()} or among the installed packages"
            raise ConfigError(f"launch: -m {name}: there is no {part} in the {place}")
        folders = list(spec.submodule_search_locations or ())
        parent = full_name
    if folders and PathFinder.find_spec(f"{name}.__main__", folders) is None:
        raise ConfigError(f"launch: -m {name} is a package without __main__.py: name one of its modules")


def _parser() -> Parser:
    elsewhere = {}
    for name in (*FOREIGN, *cli.option_list()):
        elsewhere[name.partition(".")[2] or name] = _ELSEWHERE
    parser = Parser(
        prog="lockstep launch",
        usage="lockstep launch [flags] -- train [flags of train]   or   ... -- script.py [arguments]   or   "
        "... -m package.module [arguments]",
        description="Starts a run on several processes, and restarts it after a failure; it resumes by itself.",
        epilog="The flags of train: `lockstep train --help`, and `lockstep train --help-all`.",
        foreign=elsewhere,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=int, metavar="N", help="processes on this node (default: 1)")
    add("--nnodes", metavar="N|MIN:MAX", help="nodes; MIN:MAX continues with fewer (default: 1; under srun its tasks)")
    text = "0 on the node that --master-addr names (default: 0; under srun the task's number)"
    add("--node-rank", type=int, metavar="K", help=text)
    add("--master-addr", metavar="HOST", help="address of node 0, on the interface to be used")
    add("--master-port", type=int, default=0, metavar="PORT", help="its port (default: 29400; one node: any free one)")
    add("--rdzv-backend", default="c10d", metavar="NAME", help="rendezvous of torch's elastic agent (default: c10d)")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="in place of --master-addr and --master-port")
    add("--rdzv-id", metavar="ID", help="the same on all nodes (default: lockstep; one node: a new one)")
    text = "a secret of all nodes' launchers, in a file that nobody else may read (default: LOCKSTEP_RDZV_SECRET)"
    add("--rdzv-secret-file", metavar="FILE", help=text)
    add("--rdzv-conf", default="", metavar="K=V,...", help="further settings of the rendezvous")
    add("--max-restarts", type=int, default=0, metavar="R", help="restarts after a failure (default: 0)")
    add("--min-ranks", type=int, default=1, metavar="N", help="with fewer processes left the run ends (default: 1)")
    add(
        *("--max-losses",),
        type=int,
        metavar="K",
        help="losses within an hour that the run survives; 0: a loss ends all; node 0's value counts (default: 8)",
    )
    text = "NCCL's logs, one file per process, into DIR (default: logs in the run's folder)"
    add("--nccl-debug", nargs="?", const="", metavar="DIR", help=text)
    text = "each rank's standard error also into a file of its own in DIR (so it is not a terminal)"
    add("--stderr", metavar="DIR", help=text)
    text = "print the closest torchrun command, or the manifest or script of --kubernetes or --slurm; start nothing"
    add("--dry-run", action="store_true", help=text)
    kubernetes.add_flags(parser)
    slurm.add_slurm_flags(parser)
    return parser


def _use_slurm(args: argparse.Namespace) -> None:
    """Fill in missing flags from srun, if it started several launchers.

    Each task counts as a node, so that several launchers on one node are served too. With `--nnodes 1` each is a run
    of its own.
    """
    task = SlurmTask.read(os.environ)
    if task is None or args.nnodes == "1":
        return
    if args.nnodes is not None and _nodes(args.nnodes)[1] != task.size:
        raise ConfigError(
            f"--nnodes is {args.nnodes}, but srun started {task.size} launchers: leave --nnodes out, or start one "
            f"launcher for each node (srun -N{task.nodes} --ntasks-per-node=1)"
        )
    args.nnodes = args.nnodes or str(task.size)
    args.node_rank = task.rank if args.node_rank is None else args.node_rank
    args.rdzv_id = args.rdzv_id or task.step
    if not args.rdzv_endpoint:
        args.master_port = args.master_port or (29400 if args.master_addr else task.port)
        args.master_addr = args.master_addr or node_address(task.host)


def _job(args: argparse.Namespace, target: list[str], exact: bool) -> Job:
    # srun and --slurm must see which flags are missing, so the defaults are filled in here.
    defaults = {"nproc_per_node": 1, "nnodes": "1", "node_rank": 0}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    nodes = _nodes(args.nnodes)
    for flag, value, least in (
        ("--nproc-per-node", args.nproc_per_node, 1),
        ("--max-restarts", args.max_restarts, 0),
        ("--node-rank", args.node_rank, 0),
        ("--min-ranks", args.min_ranks, 1),
        ("--max-losses", args.max_losses, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} is {value}: it must be at least {least}")
    if args.min_ranks > args.nproc_per_node * nodes[1]:
        most = args.nproc_per_node * nodes[1]
        raise ConfigError(f"--min-ranks is {args.min_ranks}, but there are {most} processes: it must be at most {most}")
    host, port = _endpoint(args, nodes)
    # A restart would not fix what doctor finds.
    restartable = target[0] != "doctor"
    is_host = args.node_rank == 0 and (not args.rdzv_endpoint or is_own_address(host))
    shares = _shares(args.nproc_per_node, os.environ)
    return Job(
        command=["-u", *target] if target[0] == "-m" or target[0].endswith(".py") else ["-m", "lockstep", *target],
        processes=args.nproc_per_node,
        nodes=nodes,
        backend=args.rdzv_backend,
        endpoint=f"{host}:{port}",
        options=_settings(args.rdzv_conf),
        run_id=args.rdzv_id or ("lockstep" if nodes[1] > 1 else uuid.uuid4().hex),
        is_host=is_host,
        restarts=args.max_restarts if restartable else 0,
        least=args.min_ranks,
        losses=_losses(args, nodes) if restartable else 0,
        environment=rank_variables(args.nproc_per_node, "" if nodes[1] == 1 else host, exact)
        | ({CORES_VARIABLE: str(sum(map(len, shares)))} if shares else {}),
        shares=shares,
        secret=read_secret(args.rdzv_secret_file, os.environ),
        node_rank=args.node_rank,
        stderr=Path(args.stderr).expanduser().absolute() if args.stderr else None,
    )


# Variables by which the user binds threads.
_OWN_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def _shares(processes: int, environ: Mapping[str, str]) -> tuple[frozenset[int], ...]:
    """Divide this node's cores among its processes.

    Returns:
        () unless Slurm gave the cores to this launcher alone.

    Elsewhere another run on this machine may divide the same cores. With GPUs on several NUMA nodes the right share
    depends on where each process's GPU is, which is not known here.
    """
    task = SlurmTask.read(environ)
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    is_alone = "SLURM_STEP_NODELIST" in environ and (task is None or task.local_size == 1)
    if sys.platform != "linux" or not is_alone or processes == 1 or any(name in environ for name in _OWN_BINDING):
        return ()
    cpus = os.sched_getaffinity(0)
    # Slurm confines nothing here, so these cores are not this job's alone.
    if str(len(cpus)) != granted:
        return ()
    if environ.get("SLURM_GPUS_ON_NODE", "0") != "0" and len(numa_nodes(cpus)) > 1:
        return ()
    return tuple(map(frozenset, share_cores(cpus, processes)))


def _losses(args: argparse.Namespace, nodes: tuple[int, int]) -> int:
    """Return how many losses within an hour the run survives.

    Prints why an explicit --max-losses has no effect.
    """
    if nodes[1] > 1 and args.rdzv_backend != "c10d":
        if args.max_losses:
            text = f"--max-losses {args.max_losses} has no effect with --rdzv-backend {args.rdzv_backend}: a loss ends"
            print(f"lockstep: {text} the processes of all nodes, and --max-restarts starts them again", file=sys.stderr)
        return 0
    most = _MAX_LOSSES if args.max_losses is None else args.max_losses
    if args.nproc_per_node * nodes[1] > 1:
        return most
    return 0


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes is '{text}': it must be a number from 1, or MIN:MAX")
    return least, most


def _endpoint(args: argparse.Namespace, nodes: tuple[int, int]) -> tuple[str, int]:
    host = args.master_addr
    port = args.master_port
    if args.rdzv_endpoint:
        host, _, text = args.rdzv_endpoint.rpartition(":")
        # IPv6 without a port, or without its brackets: the last number is part of the address.
        if ":" in host and not host.startswith("["):
            text = ""
        if not host or not text.isascii() or not text.isdigit():
            raise ConfigError(
                f"--rdzv-endpoint is '{args.rdzv_endpoint}': it must be HOST:PORT, or [ADDRESS]:PORT for IPv6"
            )
        port = int(text)
    host = host and host.removeprefix("[").removesuffix("]")
    if not 0 <= port < 65536:
        raise ConfigError(f"--master-port is {port}: it must be from 0 to 65535")
    if nodes[1] == 1:
        return host or _LOOPBACK, port
    if not host:
        raise ConfigError(f"--nnodes {args.nnodes} needs --master-addr, the address of node 0 that all nodes reach")
    if not args.rdzv_endpoint and host == os.environ.get(kubernetes.MASTER_VARIABLE):
        kubernetes.wait_for_master(host, own=args.node_rank == 0)
    check_reachable("--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr", host)
    # Only checks that the name resolves.
    is_own_address(host)
    return host, port or 29400


def _settings(text: str) -> dict[str, str]:
    pairs = []
    for pair in text.split(","):
        if pair:
            pairs.append(pair.partition("="))
    if any(not equals or not key for key, equals, _ in pairs):
        raise ConfigError(f"--rdzv-conf is '{text}': it must be KEY=VALUE,...")
    return {key: value for key, _, value in pairs}


def rank_variables(processes: int, host: str, exact: bool) -> dict[str, str]:
    """Return the variables that torchrun leaves to the user, who may override them.

    Args:
        host: node 0, if there are several.
    """
    threads = 1 if exact else max(1, cores() // processes)
    variables = {
        # If every process used all cores, all would be slow.
        "OMP_NUM_THREADS": str(threads),
        # OpenCV uses all cores in each process and reads no other variable.
        OPENCV_THREADS: "1",
        # With a store shared by ranks and launcher most first restarts on gloo fail.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Number of the last collectives to keep, for the log of a hang.
        "TORCH_FR_BUFFER_SIZE": "1000",
        **torch_variables(processes, os.environ),
    }
    # Linux names the loopback interface lo, macOS lo0.
    loopback = None
    for name in ("lo", "lo0"):
        if Path("/sys/class/net", name).exists():
            loopback = name
            break
    if host:
        choose_interface(host, variables if _INTERFACE not in os.environ else os.environ)
    elif loopback:
        variables[_INTERFACE] = loopback
    return variables


def _torchrun_command(job: Job) -> str:
    """Return the closest command for plain torchrun, with the variables set here."""
    variables = []
    for name, value in sorted(job.environment.items()):
        variables.append(f"{name}={os.environ.get(name, value)}")
    if job.nodes[0] == job.nodes[1]:
        nodes = str(job.nodes[0])
    else:
        nodes = f"{job.nodes[0]}:{job.nodes[1]}"
    rendezvous = [f"--rdzv-endpoint={job.endpoint}", f"--rdzv-backend={job.backend}", f"--rdzv-id={job.run_id}"]
    if job.options:
        rendezvous.append("--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in job.options.items()))
    settings = [f"--nnodes={nodes}", f"--nproc-per-node={job.processes}", f"--max-restarts={job.restarts}", *rendezvous]
    return shlex.join([*variables, sys.executable, "-m", "torch.distributed.run", *settings, *job.command])
