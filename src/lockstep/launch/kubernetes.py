"""Write a run as a Kubernetes manifest, and read the variables of its pods.

lockstep launch --kubernetes run.yaml --image IMAGE --nnodes 2 --resource nvidia.com/gpu=8 --volume runs:/runs -- \
    train --experiment-name a --save-dir /runs                                                  (a JobSet)
lockstep launch --kubernetes - --kind trainjob ... -- train ... | kubectl apply -f -            (a Kubeflow TrainJob)

One pod a node runs `lockstep launch`. Its node number comes from the PET_ variables, which Kubeflow Trainer sets for
torchrun, and the JobSet here sets too. How a pod ends decides what follows: see `_JOB` below.
"""

import argparse
import importlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.adapters.hf_trainer import flags
from lockstep.config import cli
from lockstep.config.cli import Parser
from lockstep.config.schema import Config
from lockstep.config.secrets import is_secret_name, mask_args
from lockstep.distributed.launcher import is_own_address
from lockstep.errors import FINAL_CODES, ConfigError, LockstepError
from lockstep.files import create_file

__all__ = ["MASTER_VARIABLE", "add_flags", "check_flags", "torchrun_flags", "wait_for_master", "write_manifest"]

# Has the address of pod 0.
MASTER_VARIABLE = "PET_MASTER_ADDR"

_KINDS = ("jobset", "trainjob")
# Seconds for a pod to save before it is killed.
_GRACE = 300
# The port that Kubeflow Trainer sets.
_PORT = 29500

# Flags of launch that the manifest or the controller replaces.
_SET_BY_CONTROLLER = ("node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")
# Flags that each pod's launcher needs too.
_OF_PODS = ("min_ranks", "max_losses", "nccl_debug", "rdzv_backend", "rdzv_conf", "rdzv_secret_file")

_SCRIPT = (
    'command -v lockstep >/dev/null || { echo "lockstep: this image has no lockstep on its PATH; install '
    'torch-lockstep in it" >&2; exit 2; }; exec lockstep "$@"'
)

# A JobSet's spec. Exit codes: 2 and 3 would fail again (a run that goes back to before a difference ends with 1); 75
# saved itself (or its storage did not answer) and is started again without being counted, as is a pod that the cluster
# evicted. Anything else fails the Job, and the JobSet starts all pods again, --max-restarts times: the pods that only
# lost one of the others end like that too.
_JOB = """\
failurePolicy:
  maxRestarts: {{ restarts }}  # of all pods, after one failed or was lost; they resume from the newest checkpoint
  rules:
  - name: badInput
    action: FailJobSet
    onJobFailureReasons: [PodFailurePolicy]
replicatedJobs:
- name: node
  replicas: 1
  template:
{%- if trainjob %}
    metadata:
      labels:
        trainer.kubeflow.org/trainjob-ancestor-step: trainer
{%- endif %}
    spec:
      parallelism: {{ nodes }}
      completions: {{ nodes }}
      completionMode: Indexed
      backoffLimit: 0
      podFailurePolicy:
        rules:
        - action: FailJob  # bad input, or a check that found a difference: another start would not help
          onExitCodes: {containerName: node, operator: In, values: {{ final }}}
        - action: Ignore  # the run saved itself: its pod is started again, and this is not counted
          onExitCodes: {containerName: node, operator: In, values: [75]}
        - action: Ignore  # preempted, drained, or its machine was lost
          onPodConditions:
          - {type: DisruptionTarget, status: "True"}
      template:
        spec:
          restartPolicy: Never  # the policies above decide
          terminationGracePeriodSeconds: {{ grace }}  # from SIGTERM to SIGKILL: the step's end and a save
          automountServiceAccountToken: false
          securityContext: {fsGroup: 1000}  # the image's user may write to the volumes
          containers:
          - name: node
            image: {{ image | tojson }}
            command: {{ command | tojson }}
            args:
{%- for each in args %}
            - {{ each | tojson }}
{%- endfor %}
{%- if not trainjob or env %}
            env:
{%- endif %}
{%- for name, value in env.items() %}
            - {name: {{ name | tojson }}, value: {{ value | tojson }}}
{%- endfor %}
{%- if not trainjob %}
            - {name: PET_NNODES, value: "{{ nodes }}"}
            - {name: PET_NPROC_PER_NODE, value: "{{ processes }}"}
            - name: PET_NODE_RANK
              valueFrom:
                fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            - {name: PET_MASTER_ADDR, value: "{{ name }}-node-0-0.{{ name }}"}  # pod 0, by the headless service
            - {name: PET_MASTER_PORT, value: "{{ port }}"}
{%- endif %}
{%- if secrets %}
            envFrom:
{%- for each in secrets %}
            - secretRef: {name: {{ each | tojson }}}
{%- endfor %}
{%- endif %}
{%- if resources %}
            resources:
              requests: {{ resources | tojson }}
              limits: {{ resources | tojson }}
{%- endif %}
            terminationMessagePolicy: FallbackToLogsOnError  # `kubectl describe pod` shows the run's last lines
            volumeMounts:
            - {name: shm, mountPath: /dev/shm}
{%- for claim, path in volumes %}
            - {name: volume-{{ loop.index0 }}, mountPath: {{ path | tojson }}}
{%- endfor %}
          volumes:
          - name: shm  # batches come from the loader processes through it; the default of 64 MiB is too small
            emptyDir: {medium: Memory}
{%- for claim, path in volumes %}
          - name: volume-{{ loop.index0 }}
            persistentVolumeClaim: {claimName: {{ claim | tojson }}}
{%- endfor %}
"""

_JOBSET = """\
# Written by `lockstep launch --kubernetes`. Needs JobSet (jobset.sigs.k8s.io); start it with `kubectl apply -f`.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{ metadata | tojson }}
spec:
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}
  {{ job | indent(2) }}
"""

_TRAINJOB = """\
# Written by `lockstep launch --kubernetes`. Needs Kubeflow Trainer 2; start it with `kubectl apply -f`.
# The runtime has what a TrainJob cannot state itself: volumes, and what follows a pod's end.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {{ metadata | tojson }}
spec:
  mlPolicy:
    numNodes: {{ nodes }}
    torch: {}  # sets PET_NNODES and the other variables of torchrun in each pod
  template:
    spec:
      {{ job | indent(6) }}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{ metadata | tojson }}
spec:
  runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {{ name | tojson }}}
  trainer:
    numNodes: {{ nodes }}
    numProcPerNode: {{ processes }}
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lockstep launch --kubernetes`."""
    add = parser.add_argument_group("Kubernetes").add_argument
    add("--kubernetes", metavar="FILE", help="write the run as a manifest, and start nothing; - is the screen")
    add("--kind", choices=_KINDS, help="a JobSet, or a TrainJob of Kubeflow (default: jobset)")
    add("--image", help="container image, with lockstep and the task's file")
    add("--name", help="name of the job (default: that of --experiment-name)")
    add("--namespace", help="its namespace (default: kubectl's)")
    text = "of each pod, e.g. nvidia.com/gpu=8 (then the default of --nproc-per-node), cpu=32, memory=200Gi"
    add("--resource", action="append", metavar="NAME=AMOUNT", help=text)
    text = "persistent volume claim, and where the pods see it; --save-dir must be on one"
    add("--volume", action="append", metavar="CLAIM:PATH", help=text)
    add("--env", action="append", metavar="NAME=VALUE", help="environment variable of the pods")
    add("--secret", action="append", metavar="NAME", help="secret whose keys become variables of the pods")
    add("--grace", type=int, metavar="SECONDS", help="time to save when a pod must go (default: 300)")


# Flags that need --kubernetes.
_FLAGS = ("kind", "image", "name", "namespace", "resource", "volume", "env", "secret", "grace")


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that only --kubernetes uses."""
    for name in _FLAGS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} needs --kubernetes FILE, which writes the manifest")


def write_manifest(parser: Parser, args: argparse.Namespace, target: list[str]) -> int:
    """Write the manifest to the file, or print it; return the exit code 0.

    Args:
        parser: of launch.
        args: what it parsed.
        target: command after `--`.

    Raises:
        ConfigError: a flag is missing or invalid, or the file cannot be written. Nothing was written.
    """
    text = _manifest(parser, args, target)
    if args.dry_run or args.kubernetes == "-":
        print(text, end="")
        return 0
    path = Path(args.kubernetes)
    try:
        with create_file(path) as file:
            file.write(text.encode(errors="replace"))
    except FileExistsError:
        raise ConfigError(f"--kubernetes {path} exists; remove it, or give another name (- prints)") from None
    except OSError as error:
        raise ConfigError(f"--kubernetes {path} cannot be written: {error.strerror or error}") from error
    print(f"lockstep: wrote {path}; start it with `kubectl apply -f {path}`", file=sys.stderr)
    if not args.max_restarts:
        line = "without --max-restarts the job fails if a pod fails or is lost; one that saved itself resumes"
        print(f"lockstep: {line}", file=sys.stderr)
    return 0


def _manifest(parser: Parser, args: argparse.Namespace, target: list[str]) -> str:
    for name in _SET_BY_CONTROLLER:
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is set in each pod by the controller; leave it out")
    config = _config(target)
    resources = _resources(args.resource or ())
    volumes = _volumes(args.volume or ())
    nodes = _nodes(args.nnodes or "1")
    processes = _processes(args, resources)
    if config and "://" not in config.save_dir:
        _check_save_dir(config.save_dir, volumes)
    name = _job_name(args.name, config, nodes)
    if mask_args(target) != target:
        raise ConfigError("a flag after `--` holds a secret, and the manifest would show it; give it by --secret NAME")
    trainjob = args.kind == "trainjob"
    # Imported here, since setup.py loads this module for its flags, where nothing is installed.
    import jinja2

    environment = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    values: dict[str, Any] = {
        "name": name,
        "metadata": {"name": name} | ({"namespace": _label("--namespace", args.namespace)} if args.namespace else {}),
        "nodes": nodes,
        "processes": processes,
        "restarts": _at_least("--max-restarts", args.max_restarts, 0),
        "grace": _at_least("--grace", _GRACE if args.grace is None else args.grace, 1),
        "image": _image(args.image),
        "command": [_literal(word) for word in ("sh", "-c", _SCRIPT, "lockstep")],
        "args": [_literal(word) for word in ["launch", *_launcher_flags(parser, args), "--", *target]],
        "env": {
            key: _literal(value) for key, value in _variables(args.env or (), resources, processes, config).items()
        },
        "secrets": [_label("--secret", word) for word in args.secret or ()],
        "resources": resources,
        "volumes": volumes,
        "port": _PORT,
        "trainjob": trainjob,
        "final": list(FINAL_CODES),
    }
    job = environment.from_string(_JOB).render(values).rstrip()
    return environment.from_string(_TRAINJOB if trainjob else _JOBSET).render(values, job=job).rstrip() + "\n"


def _config(target: list[str]) -> Config | None:
    """Check the command that the pods start.

    Returns:
        The configuration of `train`; None for other commands.
    """
    program = target[0] if target else ""
    if program == "train":
        options = vars(flags.with_flags(cli.make_parser(target[1:], "lockstep train")).read(target[1:]))
        values = cli.collect_options(options)
        flags.find_script(options, values)
        return cli.build(cli.apply_preset(values))
    # A script is in the image, so its file is not looked for here.
    if program in ("evaluate", "doctor", "profile", "-m") or program.endswith(".py"):
        return None
    raise ConfigError(
        f"launch starts `train`, `evaluate`, `profile`, `doctor` or a script, but '{program}' follows `--`"
    )


def _launcher_flags(parser: Parser, args: argparse.Namespace) -> list[str]:
    parsed = []
    for name in _OF_PODS:
        parsed.append((f"--{name.replace('_', '-')}", getattr(args, name), parser.get_default(name)))
    return [word for flag, value, default in parsed if value != default for word in (flag, str(value))]


def _literal(text: str) -> str:
    """Escape `text` against Kubernetes, which replaces $(NAME) in arguments and values."""
    return text.replace("$", "$$")


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{flag} is {value}: it must be at least {least}")
    return value


def _nodes(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ConfigError(f"--nnodes is '{text}': Kubernetes starts a fixed number of pods; give a number from 1")
    return int(text)


def _processes(args: argparse.Namespace, resources: Mapping[str, str]) -> int:
    gpus = []
    for name, amount in resources.items():
        if name.endswith("/gpu") and amount.isdigit():
            gpus.append(int(amount))
    return _at_least("--nproc-per-node", (sum(gpus) or 1) if args.nproc_per_node is None else args.nproc_per_node, 1)


def _image(image: str | None) -> str:
    if not image:
        raise ConfigError("--kubernetes needs --image, the container image that the pods run")
    if not re.fullmatch(r"[a-zA-Z0-9][\w.:/@-]*", image):
        raise ConfigError(f"--image is '{image}': it must be an image's name, like registry.example/team/train:1")
    return image


def _label(flag: str, name: str, length: int = 63) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) or len(name) > length:
        raise ConfigError(f"{flag} is '{name}': it must have a-z, 0-9 and - only, and at most {length} characters")
    return name


def _job_name(flag: str | None, config: Config | None, nodes: int) -> str:
    """Return the job's name.

    It is short enough for the pods' host names, which have at most 63 characters.
    """
    if not flag and config is None:
        raise ConfigError("--kubernetes needs --name, the job's name: only that of `train` is known here")
    name = flag or re.sub(r"[^a-z0-9]+", "-", (config.experiment_name if config else "").lower()).strip("-")
    # Kubernetes appends the pod's index and five random characters.
    most = 63 - len(f"-node-0-{nodes - 1}-abcde")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > most:
        text = f"it must begin with a letter, have a-z, 0-9 and - only, and at most {most} characters"
        raise ConfigError(f"--name is '{name}': {text}")
    return name


def _pairs(flag: str, words: Sequence[str], sign: str, form: str) -> list[tuple[str, str]]:
    pairs = [word.partition(sign) for word in words]
    for word, (key, _, value) in zip(words, pairs, strict=True):
        if not key or not value:
            raise ConfigError(f"{flag} is '{word}': it must be {form}")
    return [(key, value) for key, _, value in pairs]


def _resources(words: Sequence[str]) -> dict[str, str]:
    pairs = dict(_pairs("--resource", words, "=", "NAME=AMOUNT, like nvidia.com/gpu=8"))
    for name, amount in pairs.items():
        if not re.fullmatch(r"\d+(\.\d+)?([mkMGTPE]|[KMGTPE]i)?", amount):
            raise ConfigError(f"--resource is '{name}={amount}': the amount must be a number, like 8, 500m or 200Gi")
    return pairs


def _volumes(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = _pairs("--volume", words, ":", "CLAIM:PATH, like runs:/runs")
    for claim, path in pairs:
        _label("--volume", claim, 253)
        if not path.startswith("/") or ":" in path or ".." in path.split("/"):
            raise ConfigError(f"--volume is '{claim}:{path}': the path must be absolute")
    if len({path for _, path in pairs}) < len(pairs):
        raise ConfigError("two --volume have the same path; a pod can mount one of them")
    return pairs


def _check_save_dir(folder: str, volumes: Sequence[tuple[str, str]]) -> None:
    path = PurePosixPath(folder)
    if not any(path.is_relative_to(mount) for _, mount in volumes):
        raise ConfigError(
            f"--save-dir {folder} is on no volume: checkpoints would go with the pod; give --volume CLAIM:PATH, and a "
            "--save-dir in PATH"
        )


def _variables(
    words: Sequence[str], resources: Mapping[str, str], processes: int, config: Config | None
) -> dict[str, str]:
    variables = dict(_pairs("--env", words, "=", "NAME=VALUE"))
    for name in variables:
        if name.startswith("PET_") or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {name}: it must be a variable's name, and not one that the controller sets")
        if is_secret_name(name):
            raise ConfigError(f"--env {name}: the manifest would show this secret; put it into a Secret, and --secret")
    cores = resources.get("cpu", "")
    # A pod sees every core of its machine, so share out those that it may use.
    if cores.isdigit():
        if config and config.exact:
            threads = 1
        else:
            threads = max(1, int(cores) // processes)
        variables.setdefault("OMP_NUM_THREADS", str(threads))
    return variables


# The flags that a controller sets for torchrun, as PET_NNODES for --nnodes.
_VARIABLES = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
)


def torchrun_flags(environ: Mapping[str, str]) -> list[str]:
    """Convert torchrun's PET_ variables to flags of launch.

    Flags that the user writes after them override them.

    Raises:
        ConfigError: PET_NPROC_PER_NODE or PET_NODE_RANK is no number.
    """
    values = {name: environ.get(f"PET_{name.upper()}", "") for name in _VARIABLES}
    # A single pod meets on loopback: its own name may not resolve yet.
    if values["nnodes"] == "1":
        values |= {"master_addr": "", "master_port": ""}
    if values["nproc_per_node"] in ("auto", "gpu", "cpu"):
        values["nproc_per_node"] = str(_count_devices(values["nproc_per_node"]))
    for name in ("nproc_per_node", "node_rank", "master_port", "max_restarts"):
        if values[name] and not (values[name].isascii() and values[name].isdigit()):
            raise ConfigError(f"the environment variable PET_{name.upper()} is '{values[name]}': it must be a number")
    # Without a flag torchrun uses its own default.
    options = []
    for name, value in values.items():
        if value:
            options.append(f"--{name.replace('_', '-')}={value}")
    return options


def _count_devices(kind: str) -> int:
    """Count the GPUs of this node, or its cores, as torchrun does.

    Counts cores if there is no GPU, or if `kind` is "cpu".
    """
    if kind == "cpu":
        gpus = 0
    else:
        gpus = importlib.import_module("torch").cuda.device_count()
    if kind == "gpu" and not gpus:
        raise ConfigError("the environment variable PET_NPROC_PER_NODE is 'gpu', and this node has none")
    return int(gpus or os.cpu_count() or 1)


# Seconds for pod 0 to get an address: its image is pulled, its machine is started.
_WAIT = 600.0
# Seconds between two reports of waiting.
_SAY = 15.0


def wait_for_master(host: str, own: bool, seconds: float = _WAIT) -> None:
    """Wait until the name of pod 0 has an address.

    The cluster's name server knows a pod only once that pod has an address, and the old one for some seconds after it
    was replaced.

    Args:
        host: PET_MASTER_ADDR.
        own: whether this is pod 0, so that the address must be one of its own.
        seconds: how long.

    Raises:
        LockstepError: it has none after that time.
    """
    until = time.monotonic() + seconds
    say = time.monotonic() + _SAY
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            # The name server may still have the old address of a replaced pod.
            if not own or is_own_address(host):
                return
            state = "is not this pod's address yet"
        except socket.gaierror:
            state = "has no address yet"
        if time.monotonic() >= until:
            break
        if time.monotonic() >= say:
            print(f"lockstep: waiting for node 0: PET_MASTER_ADDR {host} {state}", file=sys.stderr, flush=True)
            say += _SAY
        time.sleep(1.0)
    raise LockstepError(
        f"node 0: PET_MASTER_ADDR {host} {state}, after {seconds:.0f} s; is its pod scheduled (kubectl get pods), and "
        "does the job have its headless service?"
    )
