"""`lockstep launch --kubernetes`: manifests by the published schemas, and their pods' commands run as processes."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from namespaces import CABLE, cluster
from refusals import refuses
from shell import LINE_TASK, await_listener, environment, free_port

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import agent, kubernetes
from lockstep.launch.command import command

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

SCHEMAS = json.loads(Path(__file__).with_name("manifest_schemas.json").read_text())
NEEDED = ["--image", "registry.example/team/train:1", "--volume", "runs:/runs"]
TRAIN = ["train", "--experiment-name", "My_run", "--save-dir", "/runs"]


def written(capsys, *flags, train=TRAIN):
    assert command(["--kubernetes", "-", *NEEDED, *flags, "--", *train]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def fits(manifest):
    """The ways in which a manifest does not fit its kind's schema."""
    checker = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]])
    return [(list(error.absolute_path), error.message) for error in checker.iter_errors(manifest)]


def job_of(manifests):
    """The template of the pods' Job."""
    spec = manifests[0]["spec"]
    return (spec["template"]["spec"] if manifests[0]["kind"] == "TrainingRuntime" else spec)["replicatedJobs"][0]


ALL = [
    *("--nnodes", "2", "--namespace", "team", "--resource", "nvidia.com/gpu=8", "--resource", "cpu=32"),
    *("--env", "A=$(HOME) and é: '\"", "--secret", "keys", "--grace", "60", "--max-restarts", "3", "--min-ranks", "4"),
    *("--rdzv-secret-file", "/keys/s"),
]


@pytest.mark.parametrize("flags", [[], ALL], ids=["least", "all"])
def test_a_manifest_fits_the_published_schemas(capsys, flags):
    jobset = written(capsys, *flags)
    trainjob = written(capsys, "--kind", "trainjob", *flags)
    assert [each["kind"] for each in [*jobset, *trainjob]] == ["JobSet", "TrainingRuntime", "TrainJob"]
    for manifest in [*jobset, *trainjob]:
        assert fits(manifest) == []
    pods = job_of(jobset)["template"]["spec"]["template"]["spec"]
    pods["restart"] = "Never"  # what no version of the schema knows
    job_of(jobset)["template"]["spec"]["backoffLimit"] = "0"
    assert [where[-1] for where, _ in fits(jobset[0])] == ["backoffLimit", "spec"]


def test_what_follows_a_pods_end_and_what_a_pod_gets(capsys):
    for kind in ("jobset", "trainjob"):
        manifests = written(capsys, "--kind", kind, *ALL)
        spec = job_of(manifests)["template"]["spec"]
        rules = spec["podFailurePolicy"]["rules"]
        codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
        assert codes == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
        assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]
        assert (spec["backoffLimit"], spec["parallelism"], spec["completions"]) == (0, 2, 2)
        pod = spec["template"]["spec"]
        assert (pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == (60, "Never")
        (container,) = pod["containers"]
        assert {each["mountPath"] for each in container["volumeMounts"]} == {"/dev/shm", "/runs"}
        assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory"}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "32"}
        assert container["args"][:6] == ["launch", "--min-ranks", "4", "--rdzv-secret-file", "/keys/s", "--"]
        assert {"name": "OMP_NUM_THREADS", "value": "4"} in container["env"]
        assert manifests[-1]["metadata"] == {"name": "my-run", "namespace": "team"}
    assert manifests[1]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 8}  # one rank for each GPU
    exact = written(capsys, "--resource", "cpu=8", train=[*TRAIN, "--exact"])
    container = job_of(exact)["template"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--image", ""], ["--image"]),
        (["--image", "{{ image }}"], ["--image", "{{ image }}"]),
        (["--image", "<registry>/a"], ["--image", "<registry>/a"]),
        (["--name", "Upper"], ["--name", "Upper"]),
        (["--name", "a" * 50], ["--name", "a" * 50, 48]),
        (["--namespace", "a b"], ["--namespace", "a b"]),
        (["--nnodes", "1:2"], ["--nnodes", "1:2"]),
        (["--node-rank", "1"], ["--node-rank"]),
        (["--master-addr", "host"], ["--master-addr"]),
        (["--nproc-per-node", "0"], ["--nproc-per-node", 0]),
        (["--resource", "cpu"], ["--resource", "cpu"]),
        (["--resource", "memory=much"], ["--resource", "memory=much"]),
        (["--volume", "runs"], ["--volume", "runs"]),
        (["--volume", "runs:here"], ["--volume", "runs:here"]),
        (["--volume", "other:/runs"], ["--volume"]),
        (["--env", "PET_NNODES=3"], ["--env", "PET_NNODES"]),
        (["--env", "WANDB_API_KEY=abc"], ["--env", "WANDB_API_KEY", "--secret"]),
        (["--grace", "0"], ["--grace", 0]),
        (["--max-restarts", "-1"], ["--max-restarts", -1]),
        (["--kind", "pod"], ["--kind", "pod"]),
    ],
)
def test_bad_input_writes_nothing(tmp_path, flags, named):
    with refuses(ConfigError, *named) as caught:
        command(["--kubernetes", str(tmp_path / "run.yaml"), *NEEDED, *flags, "--", *TRAIN])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_bad_input_after_the_dashes(tmp_path):
    for target, named in (
        (["train", "--save-dir", "elsewhere"], ["--save-dir", "elsewhere", "--volume"]),
        (["train", "--lrr", "1"], ["--lrr"]),
        (["script.py"], ["--name"]),  # it is not looked for: it lies in the image
        ([*TRAIN, "--wandb-project", "key=hf_abcdefghijklmnopqrst"], ["--secret"]),
        (["generate"], ["generate"]),
        ([], []),
    ):
        with refuses(ConfigError, *named):
            command(["--kubernetes", str(tmp_path / "run.yaml"), *NEEDED, "--", *target])
    assert not list(tmp_path.iterdir())
    with refuses(ConfigError, "--volume", "--kubernetes"):
        command(["--volume", "a:/b", "--", "train"])


def test_the_file_is_written_once(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    argv = ["--kubernetes", str(path), *NEEDED, "--", *TRAIN]
    assert command(["--dry-run", *argv]) == 0
    assert not path.exists()
    assert command(argv) == 0
    assert path.read_text() == capsys.readouterr().out
    with refuses(ConfigError, "--kubernetes", path):
        command(argv)
    with refuses(ConfigError, "--kubernetes", tmp_path / "no" / "run.yaml"):
        command(["--kubernetes", str(tmp_path / "no" / "run.yaml"), *NEEDED, "--", *TRAIN])


def test_variables_of_torchrun_are_flags_that_the_users_override(monkeypatch):
    jobs = []
    monkeypatch.setattr(agent, "run", lambda job: (jobs.append(job), (True, None, 0))[1])
    for name, value in {"NNODES": "3", "NPROC_PER_NODE": "4", "NODE_RANK": "2", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    assert command(["--", "train"]) == command(["--nnodes", "1", "--nproc-per-node", "2", "--", "train"]) == 0
    assert [(job.nodes, job.processes, job.is_host) for job in jobs] == [((3, 3), 4, False), ((1, 1), 2, False)]
    assert jobs[0].endpoint == "127.0.0.1:29555"
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "a-node-0-0.a")
    assert command(["--", "train"]) == 0
    assert jobs[-1].endpoint == "127.0.0.1:0"
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "auto")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    assert "--nproc-per-node=6" in kubernetes.torchrun_flags(os.environ)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert f"--nproc-per-node={os.cpu_count()}" in kubernetes.torchrun_flags(os.environ)
    monkeypatch.setenv("PET_NODE_RANK", "${JOB_COMPLETION_INDEX}")
    with refuses(ConfigError, "PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        command(["--", "train"])


def test_a_pod_waits_for_the_name_of_pod_0(monkeypatch, capsys):
    asked = []

    def resolve(host, *rest, **options):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(kubernetes, "_SAY", 0.0)
    kubernetes.wait_for_master("a-node-0-0.a", own=False)
    assert asked == ["a-node-0-0.a"] * 3
    assert "a-node-0-0.a" in capsys.readouterr().err
    monkeypatch.setattr(kubernetes, "is_own_address", lambda host: len(asked) > 6)  # the record of the pod before
    kubernetes.wait_for_master("a-node-0-0.a", own=True)
    assert len(asked) == 7
    monkeypatch.setattr(kubernetes, "is_own_address", lambda host: False)
    with refuses(LockstepError, "PET_MASTER_ADDR", "a-node-0-0.a") as caught:
        kubernetes.wait_for_master("a-node-0-0.a", own=True, seconds=0.0)
    assert caught.value.exit_code == 1


def expand(text, variables):
    """Expand an argument as Kubernetes does: $(NAME) is a variable, $$ a dollar."""
    pattern = r"\$(\$|\((\w+)\))"
    return re.sub(pattern, lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text)


def pods(manifests, folder, python):
    """(words, variables) of each pod, as the kubelet would start it; `folder` is the volume, `python` the image's."""
    program = folder / "bin" / "lockstep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {python} -m lockstep "$@"\n')
    program.chmod(0o755)
    container = job_of(manifests)["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer, name = manifests[-1]["spec"].get("trainer"), manifests[-1]["metadata"]["name"]
    for index in range(job_of(manifests)["template"]["spec"]["completions"]):
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        for each in container.get("env", []):
            if "value" in each:
                variables[each["name"]] = expand(each["value"], variables)
            else:
                assert each["valueFrom"]["fieldRef"]["fieldPath"].endswith(
                    "['batch.kubernetes.io/job-completion-index']"
                )
                variables[each["name"]] = str(index)
        if trainer:  # what Kubeflow Trainer sets (pkg/runtime/framework/plugins/torch/torch.go)
            variables |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
            variables |= {"PET_NODE_RANK": str(index), "PET_MASTER_PORT": "29500"}
            variables["PET_MASTER_ADDR"] = f"{name}-node-0-0.{name}"
        words = [expand(word, variables) for word in [*container["command"], *container["args"]]]
        yield words, variables | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def made(capsys, tmp_path, kind, *flags, name="pods", steps=4):
    (tmp_path / "task.py").write_text(LINE_TASK)
    train = ["train", "--task", f"{tmp_path}/task.py:Line", "--experiment-name", name, "--save-dir", str(tmp_path)]
    train += ["--max-steps", str(steps), "--batch-size", "8", "--micro-batch-size", "2", "--device", "cpu"]
    volume = ["--volume", f"runs:{tmp_path}", "--kind", kind, "--nnodes", "2"]
    return written(capsys, *volume, *flags, train=[*train, "--eval-freq", "0", "--timeout", "30"])


@pytest.mark.parametrize("kind", ["jobset", pytest.param("trainjob", marks=pytest.mark.slow)])
def test_the_pods_of_a_manifest_train_together(tmp_path, capsys, kind):
    manifests, port = made(capsys, tmp_path, kind), str(free_port())
    loopback = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for words, variables in pods(manifests, tmp_path, warm.python()):
        variables = environment(**(variables | loopback))
        started.append(subprocess.Popen(words, env=variables, stdout=-1, stderr=-2, text=True))
        await_listener(int(port), started[0])
    shown = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], shown
    assert "over 2 ranks" in shown[0]
    records = [json.loads(line) for line in (tmp_path / "pods" / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("global_step", 0) for record in records) == 4


def test_an_image_without_lockstep_says_so_in_one_line(tmp_path, capsys):
    words, variables = next(pods(made(capsys, tmp_path, "jobset"), tmp_path, "none"))
    (tmp_path / "bin" / "lockstep").unlink()
    variables["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_pods_meet_by_name_and_resume_after_an_eviction(tmp_path, capsys):
    """The names of a headless service, which come late; pod 1 is evicted, and both are started again."""
    manifests = made(capsys, tmp_path, "jobset", "--env", f"GLOO_SOCKET_IFNAME={CABLE}", steps=400)
    commands = list(pods(manifests, tmp_path, sys.executable))
    with cluster(2) as nodes:
        known = (nodes[0].folder / "hosts").read_text()

        def start():
            return [
                node.start(words, env=environment(**variables))
                for node, (words, variables) in zip(nodes, commands, strict=True)
            ]

        first = start()
        time.sleep(2)
        for node in nodes:
            node.name_hosts(known + f"{nodes[0].address} pods-node-0-0.pods\n")
        log = tmp_path / "pods" / "metrics.jsonl"
        until = time.monotonic() + 90
        while not (log.exists() and log.read_text().count("\n") > 3):
            assert time.monotonic() < until, [process.kill() or process.communicate()[0] for process in first]
            time.sleep(0.1)
        first[1].terminate()  # the kubelet's SIGTERM
        said = [process.communicate(timeout=60)[0] for process in first]
        assert [process.returncode for process in first] == [75, 75], said
        second = start()
        shown = [process.communicate(timeout=120)[0] for process in second]
        assert [process.returncode for process in second] == [0, 0], shown
        assert "resum" in shown[0]
