"""`lockstep profile|goodput|report -- COMMAND`: real processes of plain scripts, with planted faults."""

import json
import os
import subprocess
import sys

import pytest
import warm
from handmade_traces import on_cpu
from refusals import names, refuses
from shell import environment, free_port

from lockstep import cli
from lockstep.diagnose.profile.reading import understood
from lockstep.diagnose.profile.verdict import judge
from lockstep.errors import ConfigError
from lockstep.report.goodput import goodput

SCRIPT = """
import os, signal, sys, time, torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
steps = int(os.environ.get("STEPS", "20"))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * steps

    def __getitem__(self, index):
        if "loader" in sys.argv:
            time.sleep(0.01)
        return torch.full((8,), index / 100), index % 3

model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
if world > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(Rows(), 4)
losses = []
for step, (x, y) in enumerate(loader, 1):
    if "slow" in sys.argv and rank == 1:
        time.sleep(0.2)  # far beyond what a busy machine takes from rank 0
    output = model(x)
    if "small" in sys.argv:
        for _ in range(300):
            output = output.neg()
    loss = nn.functional.cross_entropy(output, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step in (4, 8) and "evaluate" in sys.argv:
        model.eval()
        for x in torch.utils.data.DataLoader(range(3)):
            time.sleep(0.1)
        model.train()
        with torch.no_grad():
            for x in torch.utils.data.DataLoader(range(3)):
                time.sleep(0.1)
        torch.save(model.state_dict(), os.devnull) if step == 4 else None
    if "interrupted" in sys.argv and step == 9:
        os.kill(os.getpid(), signal.SIGINT)
if rank == 0:
    print(losses, [p.tolist() for p in model.parameters()], flush=True)
if "failing" in sys.argv:
    raise RuntimeError("my own last line")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def verdict_of(folder, span="6-15"):
    return json.loads((folder / "profile" / span / "verdict.json").read_text())


def test_a_slow_loader_is_named_and_the_script_keeps_its_bits(script, capfd):
    command = [warm.python(), "train.py", "loader"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert cli.dispatch(["profile", "--", *command]) == 0
    out, err = capfd.readouterr()
    assert out == plain
    (folder,) = script.glob("outputs/train-profile-*")
    verdict = verdict_of(folder)
    assert verdict["bottleneck"] == "data"
    assert verdict["parts"]["data"] > 38
    assert names(verdict["next"]["what"], "DataLoader", "num_workers")
    assert verdict["sentence"] in err
    assert any("host side only" in note for note in verdict["notes"])  # it says what it cannot see
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["global_step"] == 20
    assert records[0]["time/data"] > 38
    assert records[0]["running_loss"] == pytest.approx(1.1, abs=0.4)
    found = goodput(folder / "timeline.jsonl")
    assert found.seconds["loading"] > 0.76
    assert json.loads((folder / "ended.json").read_text()) == {"status": "finished", "step": 20}


def test_a_slow_rank_is_named(script, monkeypatch):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "STEPS": "12"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    python = warm.python()
    command = f"RANK=0 {python} train.py slow & RANK=1 {python} train.py slow; wait"
    assert cli.dispatch(["profile", "--out", "mine", "--steps", "8", "--warmup", "3", "--", "sh", "-c", command]) == 0
    verdict = verdict_of(script / "mine", "4-11")
    assert (verdict["bottleneck"], verdict["world_size"]) == ("imbalance", 2)
    assert names(verdict["sentence"], "rank 1")
    assert (script / "mine" / "ranks" / "rank-1.jsonl").is_file()


def test_small_operations_are_counted(script):
    assert cli.dispatch(["profile", "--out", "mine", "--", warm.python(), "train.py", "small"]) == 0
    calls = {each["name"]: each["calls"] for each in verdict_of(script / "mine")["operations"]}
    assert calls["aten::neg"] == 600  # and their backwards


def test_goodput_tells_evaluations_and_keeps_a_failure(script, capfd):
    command = ["goodput", "--out", "mine", "--json", "--", warm.python(), "train.py", "evaluate", "failing"]
    assert cli.dispatch(command) == 1
    out, err = capfd.readouterr()
    seconds = json.loads(out[out.index("{") :])["seconds"]
    assert 1.2 <= seconds["evaluation"] < 1.8  # twelve times 0.1 s
    assert seconds["saves"] > 0
    assert seconds["training"] > 0
    lines = err.splitlines()
    assert names(lines[lines.index("RuntimeError: my own last line") + 1], "exit code 1")
    assert json.loads((script / "mine" / "ended.json").read_text())["status"] == "failed"


def test_an_interrupted_command_leaves_what_it_had(script, capfd):
    assert cli.dispatch(["profile", "--out", "mine", "--", warm.python(), "train.py", "interrupted"]) == 130
    assert names(capfd.readouterr().err.splitlines()[-1], "interrupted", "records: mine")
    assert verdict_of(script / "mine")["steps"] == [6, 9]
    assert json.loads((script / "mine" / "ended.json").read_text()) == {"status": "interrupted", "step": 9}
    assert cli.dispatch(["report", "mine", "-o", "page.html"]) == 0
    assert "Interrupted after 9 steps" in (script / "page.html").read_text()


LOST_INTERRUPT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    if os.environ.get("FAILS"):
        raise ImportError("cannot load module more than once per process")
"""


@pytest.mark.parametrize("fails", ["", "1"])
def test_interrupt_lost_by_the_import_of_torch_ends_the_command(script, monkeypatch, capfd, fails):
    # As the C code of torch that imports numpy loses it, or as numpy's extension fails in place of it.
    (script / "torch.py").write_text(LOST_INTERRUPT)
    monkeypatch.setenv("FAILS", fails)
    command = [sys.executable, "-c", "import torch; print('trains')"]
    assert cli.dispatch(["goodput", "--out", "mine", "--", *command]) == 130
    out, err = capfd.readouterr()
    assert "trains" not in out
    (line,) = err.splitlines()
    assert names(line, "interrupted", "nothing is recorded")
    assert not (script / "mine").exists()


def test_the_real_interpreter_is_attached_to(script, capfd):
    assert cli.dispatch(["report", "--out", "mine", "--", sys.executable, "train.py"]) == 0
    page = (script / "mine" / "report.html").read_text()
    assert "Finished: 20 steps" in page
    versions = json.loads((script / "mine" / "environment.json").read_text())["versions"]
    assert versions["torch"] in page[page.index("Environment") :]
    assert "Proof" not in page  # a script has neither guards nor checkpoints of lockstep


def test_bad_input_is_one_line(script, monkeypatch, capfd):
    python = warm.python()
    with refuses(ConfigError, "--"):
        cli.dispatch(["goodput", "--"])
    with refuses(ConfigError, "train.py", "python"):
        cli.dispatch(["profile", "--", "train.py"])
    with refuses(ConfigError, "--warmup", 0):
        cli.dispatch(["profile", "--warmup", "0", "--", python, "train.py"])
    with refuses(ConfigError, "Python"):
        cli.dispatch(["report", "--", "true"])
    with refuses(ConfigError, "optimizer"):
        cli.dispatch(["goodput", "--", python, "-c", "import torch"])
    assert not list((script / "outputs").iterdir())
    monkeypatch.setenv("STEPS", "3")
    with refuses(ConfigError, "--warmup", "3 steps", "step 6"):
        cli.dispatch(["profile", "--out", "mine", "--", python, "train.py"])
    with refuses(ConfigError, "--out", "mine"):
        cli.dispatch(["profile", "--out", "mine", "--", python, "train.py"])
    assert not os.path.exists("mine/profile")


def test_advice_is_in_the_words_of_torch():
    about = {"script": True, "shares": False, "engine_options": ["bucket_cap_mb"], "slots": 1}
    exchanged = judge(
        [understood(on_cpu(rank=rank, world=2, exchange=20000, cores=16, **about).json) for rank in range(2)]
    )
    assert exchanged.bottleneck == "communication"
    for found in (exchanged, judge([understood(on_cpu(update=9000, ops=300, **about).json)])):
        assert "--" not in found.sentence
        assert "lockstep" not in found.sentence
