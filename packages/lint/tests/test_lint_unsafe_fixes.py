"""`--fix` is idempotent and fits the project's torch; `--unsafe-fixes` is a diff that applies."""

import ast
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pitfall_cases import SCRIPTS, cases
from rule_examples import all_examples, examples

from lockstep_lint.analysis import budget
from lockstep_lint.analysis.imports import oldest_torch
from lockstep_lint.command import command
from lockstep_lint.fixes import apply_proposals
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_text

BAD = all_examples("bad")
OLD = """\
import torch
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader


def train(model, data, optimizer, criterion, d):
    scaler = GradScaler()
    for x, y in DataLoader(data, pin_memory=True):
        x, y = x.to(d), y.to(d)
        optimizer.zero_grad()
        with autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.fixture(autouse=True)
def fresh():
    yield
    budget.forget()


def fixed(path):
    command(["--fix", "--select", "ALL", str(path)])
    return path.read_text(encoding="utf-8")


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(st.sampled_from([*BAD, OLD]), min_size=1, max_size=3))
def test_a_second_fix_changes_nothing(texts, tmp_path_factory, capsys):
    path = tmp_path_factory.mktemp("fix") / "train.py"
    path.write_text("\n".join(texts), encoding="utf-8")
    once = fixed(path)
    ast.parse(once)
    assert fixed(path) == once
    capsys.readouterr()


def test_two_edits_on_a_line(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(OLD)
    text = fixed(path)
    assert "x, y = x.to(d, non_blocking=True), y.to(d, non_blocking=True)" in text
    assert 'scaler = torch.amp.GradScaler("cuda")' in text
    assert 'with torch.amp.autocast("cuda"):' in text
    assert "from torch.cuda.amp import GradScaler, autocast\n" in text  # ruff removes it
    assert "no file of the project pins torch: assumed 2.3 or newer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "version"),
    [
        ("requirements.txt", "numpy\ntorch==2.1.0  # old\ntorchvision==0.16\n", (2, 1)),
        ("requirements-dev.txt", "torch>=1.13,<2.5\n", (1, 13)),
        ("requirements.txt", "pytorch-lightning==2.0\ntorch\n", None),
        ("requirements.txt", "torch<2.2\n", (2, 2)),
        ("pyproject.toml", '[project]\nname = "x"\ndependencies = ["numpy", "torch~=2.0"]\n', (2, 0)),
        ("pyproject.toml", '[tool.poetry.dependencies]\npython = "^3.11"\ntorch = "^2.4"\n', (2, 4)),
        ("pyproject.toml", "not toml [\n", None),
        ("setup.cfg", "[options]\ninstall_requires =\n    torch >= 2.0\n    numpy\n", (2, 0)),
        ("environment.yml", "dependencies:\n  - pytorch=1.12.1\n  - pip:\n    - timm\n", (1, 12)),
        ("environment.yml", "dependencies:\n  - pytorch::pytorch==2.3\n", (2, 3)),
        ("setup.py", "setup(install_requires=['numpy', 'torch>=1.9'])\n", (1, 9)),
    ],
)
def test_pins(tmp_path, name, content, version):
    (tmp_path / "src").mkdir()
    (tmp_path / name).write_text(content)
    (tmp_path / ".git").mkdir()
    assert oldest_torch(str(tmp_path / "src" / "train.py")) == version


def test_nothing_is_written_that_the_pinned_torch_lacks(tmp_path, capsys):
    (tmp_path / "requirements.txt").write_text("torch==2.1\n")
    path = tmp_path / "train.py"
    path.write_text(OLD)
    text = fixed(path)
    assert "scaler = GradScaler()" in text
    assert 'torch.amp.autocast("cuda")' in text
    assert "assumed" not in capsys.readouterr().err


def unsafe(text):
    return apply_proposals(text, [finding.proposal for finding in check_text(text)])


def rules(text):
    return {finding.rule for finding in check_text(text)}


@pytest.mark.parametrize(
    ("code", "number", "written"),
    [
        ("LS004", 0, "sampler.set_epoch(epoch)"),
        ("LS011", 0, "scaler.unscale_(optimizer)"),
        ("LS014", 0, "model.module.state_dict()"),
        ("LS015", 0, 'torch.load(path, map_location="cpu")'),
    ],
)
def test_the_proposal_mends_the_finding(code, number, written):
    text = examples(code, "bad")[number]
    assert code in rules(text)
    after = unsafe(text)
    assert written in after
    assert rules(after) == set()


def test_a_clip_after_the_step_moves_before_it():
    text = next(t for t in examples("LS011", "bad") if rules(t) == {"LS011"} and "unscale" not in unsafe(t))
    assert rules(unsafe(text)) == set()


LOADS = """\
import torch

def read(path):
    one = torch.load(path, weights_only=False)
    two = torch.load(
        path,
    )
    return one, two, torch.load((path))
"""


def test_a_load_is_made_safe_where_its_last_argument_stands():
    assert unsafe(LOADS).splitlines()[3:] == [
        "    one = torch.load(path, weights_only=True)",
        "    two = torch.load(",
        '        path, map_location="cpu",',
        "    )",
        "    return one, two, torch.load((path))",  # not worth a parser
    ]


def test_a_state_is_saved_and_loaded_by_plain_names():
    text = RULES["LS014"].page.examples[0] + "\n"
    assert "module" not in text
    assert "LS014" not in rules(unsafe(text))


SAVES = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main(loader, rank):
    dist.init_process_group("nccl")
    model = DDP(nn.Linear(4, 2).to(rank), device_ids=[rank])
    torch.save(
        model.module.state_dict(),
        "model.pt",
    )
    dist.destroy_process_group()

if __name__ == "__main__":
    main([], 0)
"""


def test_a_save_of_every_rank_is_kept_to_one():
    assert rules(SAVES) == {"LS014"}
    after = unsafe(SAVES)
    assert "    if torch.distributed.get_rank() == 0:\n        torch.save(\n            model.module" in after
    assert rules(after) == set()


def test_no_proposal_makes_a_new_mistake(tmp_path):
    texts = all_examples("bad", "good")
    for case in (case for base in SCRIPTS for case in cases(base)):
        case.write(tmp_path)
        texts.append((tmp_path / f"{case.base}.py").read_text(encoding="utf-8"))
    changed = 0
    for text in texts:
        found = check_text(text)
        after = apply_proposals(text, [finding.proposal for finding in found])
        changed += after != text
        assert after == text or rules(after) <= {finding.rule for finding in found}, after
    assert changed > 10


def test_it_is_said_that_there_is_nothing_to_propose(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        LOADS.replace("torch.load(path, weights_only=False)", "0").replace("two = torch.load", "two = print")
    )
    assert command(["--select", "ALL", "--unsafe-fixes", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing to propose" in err
    (tmp_path / "train.py").write_text("import torch\n")
    assert command(["--hints", "--unsafe-fixes", "train.py"]) == 0
    assert capsys.readouterr().err == "no findings\n"


def test_the_diff_applies_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    text = RULES["LS015"].page.examples[0] + "\n"
    path.write_text(text)
    assert command(["--select", "LS015", "--unsafe-fixes", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert path.read_text() == text
    assert out.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "LS015" in err
    if shutil.which("git") is not None:
        subprocess.run(["git", "apply", "-"], input=out, text=True, check=True, cwd=tmp_path)
        assert command(["--select", "LS015", "train.py"]) == 0
    capsys.readouterr()


def test_proposals_on_one_place_do_not_mix():
    text = "import torch\nx = 1\n"
    from lockstep_lint.finding import Change

    one, two, broken = Change(2, 1, ("y = 2",)), Change(2, 1, ("z = 3",)), Change(1, 1, ("def",))
    assert apply_proposals(text, [(one,), (two,), (broken,)]) == "import torch\ny = 2\n"
