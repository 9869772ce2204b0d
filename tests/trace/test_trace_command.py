"""`lockstep trace -- COMMAND`: the command's own output and exit code, what is refused, what is left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import warm
from refusals import names, refuses
from shell import environment, free_port

from lockstep import cli
from lockstep.errors import ConfigError, DifferenceError
from lockstep.trace.compare.reading import FOLDER_FILE, FORMAT, read

SCRIPT = """
import os, sys, torch
from torch import nn
secret = os.environ["MY_TOKEN"]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with torch.inference_mode():
    model(torch.ones(2, 3))
steps = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(20, 3)), 4, num_workers=1)
for step, (x,) in enumerate(steps):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure) if step % 2 else (closure(), optimizer.step())
    if "--die" in sys.argv and step == 2:
        os.kill(os.getpid(), 9)
    if "--raise" in sys.argv and step == 3:
        raise RuntimeError(secret)
print([p.tolist() for p in model.parameters()], flush=True)
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("CODE", "7")))
"""

FULL = """
import errno, importlib.util, os, random
assert importlib.util.find_spec("torch")
import torch
class Drawing(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()
random.seed(0)
torch.manual_seed(0)
model, write = Drawing(3, 1), os.write
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
for step in range(4):
    if step == 2:
        os.write = full
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print("to its end")
"""


def ran(*words, cwd, python=sys.executable, **variables):
    given = {**environment(MY_TOKEN="hunter2-hunter2"), **variables}
    command = [python, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def test_the_commands_bits_output_and_exit_code_are_kept(folder):
    plain = ran("train.py", cwd=folder)
    traced = ran("-m", "lockstep", "trace", "-o", "one", "--", sys.executable, "train.py", cwd=folder)
    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout)
    assert plain.returncode == 7
    lines = traced.stderr.splitlines()
    assert lines[0].startswith("lockstep trace: every step into ")
    assert "at most 1024 MiB (--max-mb)" in lines[0]
    assert [line for line in lines if not line.startswith("lockstep trace: ")] == plain.stderr.splitlines()
    assert lines[-3] == "lockstep trace: the command ended with exit code 7"
    assert lines[-2].startswith("lockstep trace: 5 steps of 1 rank, ")
    assert "`lockstep lint train.py`" in lines[-1]
    assert names(lines[-1], "to check")  # an offer: nothing was found
    assert json.loads((folder / "one" / FOLDER_FILE).read_text())["code"] == 7
    text = "".join(path.read_text() for path in (folder / "one").iterdir())
    assert "hunter2" not in text
    assert os.uname().nodename not in text
    first = read(folder / "one").parts[0].ranks[0].steps[0]
    assert first["loads"][0]["i"] == [0, 1, 2, 3]
    assert first["loss"][0]["v"]
    python = warm.python()
    cut = ran("-m", "lockstep", "trace", "-o", "cut", "--", python, "train.py", "--die", cwd=folder, python=python)
    assert cut.returncode == 128 + signal.SIGKILL
    done = ran("-m", "lockstep", "compare", "one", "cut", "--json", cwd=folder)  # as people start it
    assert done.returncode == 3, done
    found = json.loads(done.stdout)
    assert (found["verdict"], found["same"], found["steps_with_the_same_bits"]) == ("NOT PROVED", False, 3)
    assert [words.split()[0] for words in found["missing"]] == ["one", "cut"]


def test_two_runs_that_end_by_the_same_error_are_not_the_same(folder):
    """Although the command hides it."""
    hiding, python = "import subprocess, sys; subprocess.run([sys.executable, 'train.py', '--raise'])", warm.python()
    done = ran("-m", "lockstep", "trace", "-o", "raised", "--", python, "-c", hiding, cwd=folder, python=python)
    assert done.returncode == 0, done
    assert "hunter2" not in "".join(path.read_text() for path in (folder / "raised").iterdir())
    with pytest.raises(DifferenceError, match="RuntimeError"):
        cli.dispatch(["compare", str(folder / "raised"), str(folder / "raised")])


def test_processes_each_doing_the_whole_training_are_reported(folder, monkeypatch, capsys):
    both = (
        "import os, subprocess, sys\n"
        "environments = [{**os.environ, 'RANK': rank} for rank in '01']\n"
        "started = [subprocess.Popen([sys.executable, 'train.py'], env=each) for each in environments]\n"
        "[process.wait() for process in started]\n"
    )
    python = warm.python()
    for name, world, words in (("single", "1", ["train.py"]), ("both", "2", ["-c", both])):
        command = ["-m", "lockstep", "trace", "-o", name, "--", python, *words]
        ran(*command, cwd=folder, python=python, WORLD_SIZE=world, CODE="0")
    monkeypatch.chdir(folder)
    assert cli.dispatch(["compare", "single", "both"]) == 0
    said = capsys.readouterr().out
    assert "  both: its 2 processes have no process group of torch" in said
    assert "single: its" not in said


def test_process_without_torch_is_free_and_keeps_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = (
        "import sys; print(sorted({'torch', 'numpy', 'lockstep.trace.record.hooks'} & set(sys.modules))); sys.exit(5)"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = ran("-m", "lockstep", "trace", "-o", "out", "--", sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 5
    assert done.stdout.splitlines()[-2:] == ["mine", "[]"]
    assert done.stderr.splitlines()[1] == "lockstep trace: the command ended with exit code 5"
    assert "nothing was recorded" in done.stderr
    assert not (tmp_path / "out").exists()


def test_signals_go_on_to_the_command(tmp_path):
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    code = f"import signal, sys, time; {handler}; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "lockstep", "trace", "-o", tmp_path / "out", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    time.sleep(0.1)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-o", "{}/new"], "no command after `--`"),
        (["-o", "{}/new", "--"], "no command after `--`"),
        (["-o", "{}/new", "--", "train.py"], "'train.py'.*`--`: python train.py"),
        (["-o", "{}", "--", "true"], "is not empty: give a new folder"),
        (["-o", "{}/there", "--", "true"], "Not a directory|File exists"),
        (["-o", "{}/new", "--steps", "5", "--", "true"], "--steps '5'"),
        (["-o", "{}/new", "--steps", "5:2", "--", "true"], "--steps '5:2'"),
        (["-o", "{}/new", "--max-mb", "0", "--", "true"], "--max-mb is 0: it must be a number above 0"),
        (["-o", "{}/new", "--max-mb", "nan", "--", "true"], "--max-mb is nan: it must be a number above 0"),
        (["-o", "{}/new", "--max-mb", "inf", "--", "true"], "--max-mb is inf"),
        (["-o", "{}/new", "--", "{}/there"], "there' cannot be started: Exec format error"),
        (["--", "true"], "-o/--out"),
        (["-o", "{}/new", "--tipo", "--", "true"], "unknown flag --tipo"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(argv, said, tmp_path):
    (tmp_path / "there").write_text("echo\n")
    (tmp_path / "there").chmod(0o755)
    with pytest.raises(ConfigError, match=said):
        cli.dispatch(["trace", *(word.format(tmp_path) for word in argv)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_script_that_requires_torch_first_and_a_full_disk(tmp_path):
    (tmp_path / "train.py").write_text(FULL)
    traced = ran("-m", "lockstep", "trace", "-o", "one", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (traced.returncode, traced.stdout) == (0, "to its end\n"), traced.stderr
    assert "recording ended in step 3: OSError: [Errno 28] No space left on device" in traced.stderr
    (path,) = (tmp_path / "one").glob("rank*")
    first, second = (step["fwd"][0]["rng"][1]["python"] for step in read(tmp_path / "one").parts[0].ranks[0].steps)
    assert first != second
    python = warm.python()
    again = ran("-m", "lockstep", "trace", "-o", "two", "--", python, "train.py", cwd=tmp_path, python=python)
    assert again.returncode == 0
    path.write_bytes(path.read_bytes() + b"3\n\xff\xfe\n")  # no lines of a trace: they end it
    done = ran(
        "-m", "lockstep", "compare", "one", "two", cwd=tmp_path, python=python
    )  # forwards draw from Python's generator
    assert done.stdout.startswith("NOT PROVED"), done.stdout + done.stderr
    assert " 4 gradients" in done.stdout


def test_what_is_no_trace_is_refused(tmp_path):
    for made, content, named in (
        ("nothing", None, ()),
        ("other", {"notes.txt": "x"}, (FOLDER_FILE,)),
        ("damaged", {FOLDER_FILE: "{"}, (FOLDER_FILE,)),
        ("later", {FOLDER_FILE: '{"format": 99}'}, (99, FORMAT)),
        ("empty", {FOLDER_FILE: f'{{"format": {FORMAT}}}'}, ("optimizer step",)),
    ):
        if content is not None:
            (tmp_path / made).mkdir()
            for name, text in content.items():
                (tmp_path / made / name).write_text(text)
        with refuses(ConfigError, tmp_path / made, *named):
            cli.dispatch(["compare", str(tmp_path / made), str(tmp_path / made)])


def test_a_difference_is_a_line_an_object_and_a_code(folder, tmp_path, capsys):
    if not (folder / "one").is_dir():
        pytest.skip("the trace of another test of this file is taken")
    other = tmp_path / "other"
    other.mkdir()
    for path in (folder / "one").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for group in line.get("groups", ()):
                group["lr"] = 0.2 if line["k"] > 1 else group["lr"]
        (other / path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DifferenceError, match="not the same training: schedule in step 3") as caught:
        cli.dispatch(["compare", str(folder / "one"), str(other)])
    assert caught.value.exit_code == 3
    assert "the learning rate is 0.2 instead of 0.1" in capsys.readouterr().out
    with pytest.raises(DifferenceError):
        cli.dispatch(["compare", str(folder / "one"), str(other), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["finding"]["step"], found["finding"]["cause"]) == (False, 3, "schedule")


SPAWNING = """
import gc, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(rank + step))).sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 3))
    del model
    gc.collect()  # else DDP joins gloo's threads with the interpreter's lock, for which they may wait
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
"""


def test_spawned_processes_are_recorded_to_their_end(tmp_path):
    (tmp_path / "spawning.py").write_text(SPAWNING)
    python = warm.python()  # what it spawns are new interpreters
    spawning = [python, "spawning.py", str(free_port())]
    done = ran("-m", "lockstep", "trace", "-o", "out", "--", *spawning, cwd=tmp_path, python=python)
    assert done.returncode == 0, done.stderr
    lines = {path.name[:9]: path.read_text().splitlines() for path in sorted((tmp_path / "out").glob("rank*"))}
    assert sorted(lines) == ["rank00000", "rank00001"]
    for each in lines.values():
        kinds = [json.loads(line)["t"] for line in each]
        assert (kinds.count("step"), kinds.count("end"), kinds[-1]) == (3, 1, "end")


SHORT = """
import os, sys, torch, multiprocessing
torch.manual_seed(0)

def train():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(47):
        model(torch.full((2, 3), 1.0 + step / 47)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if "--fork" in sys.argv:
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
else:
    train()
if "--die" in sys.argv:
    os.kill(os.getpid(), 9)
"""


def test_no_step_is_lost_however_a_process_ends(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SHORT)
    found, python = {}, warm.python()
    for name, words in (("end", []), ("fork", ["--fork"]), ("die", ["--die"])):
        command = ["-m", "lockstep", "trace", "-o", name, "--", python, "train.py", *words]
        done = ran(*command, cwd=tmp_path, python=python, LOCKSTEP_TRACE_DEBUG="1")
        assert done.returncode == (128 + signal.SIGKILL if "--die" in words else 0), done.stderr
        (rank,) = read(tmp_path / name).parts[0].ranks.values()
        assert [record["k"] for record in rank.steps] == list(range(len(rank.steps)))
        found[name] = len(rank.steps), rank.end is not None
    assert found["end"] == found["fork"] == (47, True)
    assert found["die"] == (47, False)
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["compare", "end", "fork"]) == 0
    assert capsys.readouterr().out.startswith("SAME: the weights of all 47 steps have the same bits")


BETWEEN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    if step == 5:
        exec(sys.argv[1])
    model(torch.full((2, 3), 1.0 + step / 47)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("touch", "moved"),
    [
        ("pass", False),
        ("model.weight.data = model.weight.data.clone()", False),  # another place, the same bits
        ("model.weight.data.view(torch.int32)[0, 2] ^= 1", True),
        ("model.bias.detach().numpy()[0] += 1", True),  # torch does not count it as a change
    ],
)
def test_a_weight_that_moves_between_two_steps_is_seen(touch, moved, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    between(tmp_path / "touched", touch)
    with pytest.raises(DifferenceError) if moved else contextlib.nullcontext():
        cli.dispatch(["compare", str(plain), "touched"])
    assert ("step 6" in capsys.readouterr().out) is moved


def test_older_trace_that_refers_to_earlier_weights_is_read(plain, tmp_path, capsys):
    older = tmp_path / "older"
    shutil.copytree(plain, older)
    (path,) = older.glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["t"] == "step" and record["k"]:
            record["begin"] = "weights"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.dispatch(["compare", str(plain), str(older)]) == 0
    assert capsys.readouterr().out.startswith("SAME: the weights of all 8 steps have the same bits")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The trace of the script that touches nothing."""
    folder = tmp_path_factory.mktemp("between") / "plain"
    between(folder, "pass")
    return folder


def between(folder, touch):
    """The trace of the script, in a folder of that name."""
    python = warm.python()
    (folder.parent / "train.py").write_text(BETWEEN)
    words = ["-m", "lockstep", "trace", "-o", folder.name, "--", python, "train.py", touch]
    done = ran(*words, cwd=folder.parent, python=python)
    assert done.returncode == 0, done.stderr
