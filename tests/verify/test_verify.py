"""`lockstep.verify` and `lockstep verify`, on real processes."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import tasks_for_verify as tasks
import torch
import torch.nn.functional as F
from refusals import names
from shell import environment
from toys import Ragged

import lockstep
from lockstep import cli
from lockstep.config import cli as options
from lockstep.config.engine_options import EngineOptions
from lockstep.config.schema import SINK_FLAGS, Config
from lockstep.config.sections import Optim
from lockstep.errors import ConfigError, DifferenceError, LockstepError
from lockstep.verify import certificate
from lockstep.verify.request import VerifyRequest

PARTS = {"batch_size": 8, "lr": 0.01, "device": "cpu", "timeout": 60.0, "optim": Optim(warmup_steps=1)}
QUICK = {"world_sizes": (2,), "steps": 3, "resume_at": 1}
FLAGS = "--device cpu --timeout 60 --batch-size 8 --steps 2 --resume-at 1 --engines ddp --world-sizes 2"


def config(**changes):
    return Config(**{**PARTS, **changes})


def test_all_engines_and_uneven_worlds_agree_in_float64():
    """Dropout, a tied head, ragged labels, clipping, accumulation, empty slots, and a resume in mid-epoch."""
    table = lockstep.verify(
        Ragged(samples=60, dropout=0.1),
        config(),
        engines=("single", "ddp", "fsdp", "zero"),
        world_sizes=(1, 3),
        steps=4,
    )
    assert table.ok, str(table)
    assert [str(row.combination) for row in table.rows][:2] == ["single x1", "ddp x1"]
    assert {row.verdict for row in table.rows if row.combination.world_size == 1} == {"equal"}
    assert {row.verdict for row in table.rows if row.combination.world_size == 3} == {"close"}
    assert all(row.largest[0] < 1e-13 for row in table.rows)
    assert "bitwise equal" in str(table)


def test_batch_norm_and_float32_images():
    table = lockstep.verify(tasks.Images(), config(micro_batch_size=4), engines=("ddp",), **QUICK)
    assert table.ok, str(table)
    assert "8 samples in 2 micro-batches" in table.title
    assert "--micro-batch-size" not in str(table)
    default = lockstep.verify(tasks.Images(), config(), engines=("ddp",), plant="unsent-gradient", **QUICK)
    assert "8 samples in 2 micro-batches" in default.title, "every rank has work where nothing is asked for"
    assert default.rows[1].difference.stage == "reduction", "the statistics of its forward count as ever"
    asked = lockstep.verify(tasks.Images(), config(micro_batch_size=8), engines=("ddp",), **QUICK)
    assert names(str(asked).splitlines()[-1], "1 micro-batch", "ddp x2", "--micro-batch-size", "--batch-size")
    idle = lockstep.verify(tasks.Images(), config(batch_size=3), engines=("ddp",), **QUICK)
    assert [row.verdict for row in idle.rows] == ["equal", "not proved"]
    assert names(idle.rows[1].reason, "rank 1", "--micro-batch-size", "--batch-size")
    local = lockstep.verify(tasks.Images(), config(micro_batch_size=4, batchnorm="local"), engines=("ddp",), **QUICK)
    assert (local.rows[1].difference.stage, local.rows[1].difference.step) == ("buffers", 0)


@pytest.mark.slow
def test_hybrid_sharding_agrees():
    """Two copies of the model on two ranks each: sums over four ranks would count each shard twice."""
    settings = config(engine_options=EngineOptions(sharding="hybrid", shard_size=2), optim=Optim(clip=0.5))
    table = lockstep.verify(Ragged(), settings, engines=("fsdp",), world_sizes=(4,), steps=2, resume_at=1)
    assert table.ok, str(table)


def test_a_task_may_hold_float32_tensors_and_modules():
    table = lockstep.verify(tasks.ClassWeights(), config(), engines=("ddp",), **QUICK)
    assert table.ok, str(table)
    assert all(row.largest[0] < 1e-13 for row in table.rows)


def test_complex_parameters_agree_within_rounding():
    table = lockstep.verify(tasks.Waves(samples=60), config(), engines=("ddp",), precision="float32", **QUICK)
    assert [row.verdict for row in table.rows] == ["equal", "close"], str(table)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["float64", "exact"])
def test_a_hub_model(exact):
    pytest.importorskip("transformers")
    task, engines = tasks.HubModel(samples=60), ("ddp", "fsdp", "zero")
    table = lockstep.verify(task, config(exact=exact), engines=engines, **QUICK)
    assert table.ok, str(table)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_compiled_agrees_with_eager(precision):
    task = Ragged(samples=60, dropout=0.1)
    table = lockstep.verify(task, config(), engines=("ddp",), precision=precision, compile=True, **QUICK)
    assert table.ok, str(table)
    assert [str(row.combination) for row in table.rows if row.combination.compiled] == [
        "single x1 compiled",
        "ddp x2 compiled",
    ]


@pytest.mark.slow
def test_compiled_engines_have_the_bits_of_a_compiled_process(capfd):
    asked = QUICK | {"world_sizes": (1, 2)}
    task = Ragged(samples=60, dropout=0.1)
    table = lockstep.verify(task, config(exact=True), engines=("ddp",), compile=True, **asked)
    assert table.ok, str(table)
    verdicts = {str(row.combination): row.verdict for row in table.rows}
    assert verdicts["ddp x1 compiled"] == verdicts["ddp x2 compiled"] == "equal"


def test_bfloat16_model_is_no_clipping_mistake():
    """Its gradients' norm, and the factor that clips them, have eight bits."""
    table = lockstep.verify(Ragged(samples=60), config(), engines=("ddp",), precision="bf16-true", **QUICK)
    assert table.ok, str(table)


class Rounded(Ragged):
    """float64 weights and losses, and one activation that the model itself rounds to bfloat16."""

    def loss(self, model, batch):
        logits = model(batch["input"]).to(torch.bfloat16).double().flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def test_models_own_bfloat16_is_held_to_its_rounding():
    """Rounding to eight bits may go either way on a last bit that differs."""
    table = lockstep.verify(Rounded(60), config(), engines=("ddp",), world_sizes=(3,), steps=6)
    assert table.ok, str(table)
    assert table.rows[-1].largest[0] > 1e-6, "nothing was rounded otherwise: the case shows nothing"


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    file = tmp_path / "script.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent.parent)!r})\nimport lockstep, toys\n"
        "lockstep.verify(toys.Ragged(), lockstep.Config(batch_size=8, device='cpu'), engines=('ddp',), steps=2)\n"
    )
    done = subprocess.run(
        [sys.executable, str(file)], env=environment(TMPDIR=str(scratch)), capture_output=True, text=True, check=False
    )
    assert not list(scratch.glob("lockstep-*"))
    assert done.stderr.splitlines()[-1].endswith('under `if __name__ == "__main__":`'), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "interrupted")])
def test_an_end_from_outside_leaves_no_files_and_no_tracebacks(number, code, said, tmp_path):
    """All processes get it, as from a terminal."""
    flags = ["verify", "--device", "cpu", "--scratch", str(tmp_path)]
    command = [sys.executable, "-m", "lockstep", *flags]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a test run in the background ignores
    with subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard
    ) as process:
        while not list(tmp_path.iterdir()) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(1)
        os.killpg(process.pid, number)
        _, words = process.communicate(timeout=30)
    assert process.returncode == code
    assert words == (f"lockstep: {said}\n" if said else "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inside_a_torchrun_job(tmp_path):
    """Rank 0 alone is the single process; its word is the only one."""
    file = tmp_path / "mine.py"
    file.write_text("from toys import Ragged\n\nclass Mine(Ragged):\n    pass\n")
    here = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lockstep"]
    flags = ["verify", *FLAGS.split()[:-2], "--task", f"{file}:Mine"]
    for more, code in (([], 0), (["--plant", "bit-flip", "--plant-at", "2"], 1)):
        done = subprocess.run(
            [*launcher, *flags, *more], env=environment(PYTHONPATH=here), capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr  # torchrun makes 1 of 3
        assert done.stdout.count("single x1") == 1
    assert "step 2, rank 1, embedding.weight" in done.stdout


def test_a_forward_that_depends_on_the_rank_is_named():
    table = lockstep.verify(tasks.Private(samples=60), config(), engines=("ddp",), precision="float32", **QUICK)
    difference = table.rows[1].difference
    assert (difference.step, difference.stage, difference.rank) == (0, "forward", 1)
    assert difference.where == "micro-batch 4, loss"
    assert not table.ok


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (tasks.Undecided, "the first different operation is aten.mul.Tensor"),
        (tasks.Shuffling, "batch['input']"),
    ],
)
def test_a_task_that_is_not_deterministic_is_found_first(task, named):
    table = lockstep.verify(task(samples=60), config(), engines=("ddp",), **QUICK)
    assert not table.ok
    assert [str(row.combination) for row in table.rows] == ["single x1"]
    assert (table.difference.stage, table.difference.rank) == ("determinism", -1)
    assert "rank" not in table.rows[0].text
    assert "nondeterministic" in table.notes[0]
    assert named in table.notes[0]
    assert task is not tasks.Undecided or "in blocks.1.1 (Noise)" in table.notes[0]


def test_a_counter_in_the_loss_is_named_as_what_it_is():
    table = lockstep.verify(tasks.Annealing(samples=60), config(), engines=("ddp",), **QUICK)
    assert not table.ok
    assert table.notes[-1].startswith("`loss` keeps task.calls from call to call, each rank")
    assert not any("nondeterministic" in note for note in table.notes)


def test_nondeterministic_evaluation_is_found_at_the_end():
    table = lockstep.verify(tasks.Counting(samples=60), config(), engines=("ddp",), **QUICK)
    assert not table.ok
    assert "nondeterministic" in table.notes[0]
    assert re.search(r": step 3, evaluation, said: \d+\S* instead of \d+", table.notes[0])


@pytest.mark.parametrize(("task", "word"), [(tasks.Hanging, "sign of life for 4 s"), (tasks.Dying, "the last words")])
def test_a_hang_and_a_death_are_failures_and_leave_no_process(task, word):
    began, before = time.monotonic(), set(multiprocessing.active_children())  # those of other tests' helpers
    table = lockstep.verify(task(samples=60), config(timeout=4.0), engines=("ddp",), **QUICK)
    assert table.rows[1].verdict == "failed"
    assert word in table.rows[1].reason or "rank" in table.rows[1].reason, table.rows[1].reason
    assert time.monotonic() - began < 100
    assert set(multiprocessing.active_children()) <= before


def test_a_fault_that_does_no_harm_is_said_to_have_done_none():
    """All images have one item, and both ranks as many: an average per rank is the average per item."""
    asked = {"engines": ("ddp",), "world_sizes": (2,), "steps": 1, "resume_at": 0}
    table = lockstep.verify(tasks.Images(), config(micro_batch_size=4), plant="rank-average", **asked)
    assert table.ok, str(table)
    assert "no difference" in table.notes[-1]


def test_what_cannot_run_is_listed_and_skipped_only_if_asked():
    asked = {"engines": ("ddp",), "world_sizes": (2, 3), "steps": 2, "resume_at": 0}
    two = config(exact=True, micro_batch_size=4)
    with pytest.raises(ConfigError, match="ddp x3 cannot run here: --exact .* 3 processes.*skip-unavailable"):
        lockstep.verify(Ragged(), two, **asked)
    table = lockstep.verify(Ragged(), two, skip_unavailable=True, **asked)
    assert table.ok
    assert [row.verdict for row in table.rows] == ["equal", "equal", "unavailable"]


def test_a_single_process_that_fails_is_no_difference():
    with pytest.raises(LockstepError, match="the single process failed: rank 0 of 1: NotImplementedError: no loss"):
        lockstep.verify(Broken(), config(), **QUICK)


class Broken(Ragged):
    def loss(self, model, batch):
        if model.training:  # what is tried before step 1 is not
            raise NotImplementedError("no loss")
        return super().loss(model, batch)


def test_command_writes_a_certificate_and_compares_another_run(tmp_path, capsys, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("from toys import Ragged\n\nclass Mine(Ragged):\n    pass\n")
    path = str(tmp_path / "certificate.json")
    assert cli.dispatch(["verify", *FLAGS.split(), "--task", f"{file}:Mine", "--out", path]) == 0
    shown = capsys.readouterr().out
    assert "ddp x2     within rounding" in shown
    assert shown.splitlines()[-1] == f"  certificate: {path}"
    made = json.loads((tmp_path / "certificate.json").read_text())
    assert made["config"]["precision"] == "float64"
    assert len(made["fingerprints"]) == 2
    assert all(text.startswith("sha256:") for text in made["fingerprints"])
    assert made["versions"]["torch"]
    assert made["rows"][1]["verdict"] == "close"

    made["trace"]["steps"][1]["slots"][3]["seeded"] = "0" * 16
    (tmp_path / "other.json").write_text(json.dumps(made))
    again = ["verify", "--device", "cpu", "--timeout", "60"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert cli.dispatch([*again, "--against", path]) == 0
    assert "against the certificate, within rounding: it agrees" in capsys.readouterr().out
    with pytest.raises(DifferenceError, match="not the same training: the certificate"):
        cli.dispatch([*again, "--against", str(tmp_path / "other.json")])
    assert names(capsys.readouterr().out, "step 2", "micro-batch 3", "randomness")
    assert not list(Path.cwd().iterdir()), "only --out writes"


def test_incomplete_certificate_and_flags_with_one_are_refused(tmp_path):
    path = tmp_path / "certificate.json"
    steps = {"steps": [{}, {}]}
    whole = dict.fromkeys(certificate._KEYS, "") | {
        "format": 1,
        "steps": 2,
        "trace": steps,
        "config": options.flatten(config()),
    }
    damaged = [
        ({key: value for key, value in whole.items() if key != "versions"}, "is an incomplete certificate"),
        (whole | {"steps": 3}, "is an incomplete certificate"),
        (whole | {"trace": {}}, "is not a certificate"),
        (whole | {"format": 7}, "has format 7"),
    ]
    for made, words in damaged:
        path.write_text(json.dumps(made))
        with pytest.raises(ConfigError, match=words):
            cli.dispatch(["verify", "--against", str(path)])
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="--against takes --steps, (--optim.clip, --lr|--lr, --optim.clip)"):
        cli.dispatch(
            ["verify", "--device", "cpu", "--against", str(path), "--lr", "1", "--optim.clip", "9", "--steps", "3"]
        )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engines", "dpd"], "--engines 'dpd'"),
        (["--world-sizes", "one"], "--world-sizes 'one' must be numbers"),
        (["--world-sizes", "0"], "--world-sizes 0"),
        (["--steps", "0"], "--steps 0"),
        (["--resume-at", "9"], "--resume-at 9 must be below --steps 8"),
        (["--plant", "nothing"], "--plant 'nothing'"),
        (["--plant", "bit-flip", "--world-sizes", "1"], "--world-sizes 2"),
        (["--task", "nowhere.py:Task"], "no such file"),
        (["--against", "nowhere.json"], "--against nowhere.json: No such file"),
        (["--out", "nowhere/certificate.json"], "--out nowhere/certificate.json"),
        (["--out", "."], "--out ."),
        (["--lrr", "1"], "unknown flag --lrr"),
        (["--steps", "many"], "--steps: 'many' is not a whole number"),
        (["--world-size", "2"], "unknown flag --world-size: did you mean --world-sizes?"),
    ],
)
def test_bad_input_is_one_line(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        cli.dispatch(["verify", "--device", "cpu", *flags])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file has no class Mine"),
        ("import nothing_at_all", "No module named 'nothing_at_all'"),
        ("class Mine:\n    def __init__(self, size): pass", "it must need no arguments"),
    ],
)
def test_a_bad_task_file_is_one_line(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        cli.dispatch(["verify", "--device", "cpu", "--task", f"{tmp_path / 'mine.py'}:Mine"])


def test_a_plan_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="--steps 9: .* 5 steps"):
        lockstep.verify(Ragged(samples=40), config(), engines=("ddp",), world_sizes=(2,), steps=9)


def test_a_proof_leaves_the_sinks_and_an_end_in_between_alone():
    asked = Config(**dict.fromkeys(SINK_FLAGS, True), stop_at=3, resume_anyway=True, batch_size=4)
    plain = VerifyRequest(asked).resolve().config
    assert not any(getattr(plain, name) for name in (*SINK_FLAGS, "stop_at", "resume_anyway"))
    assert (plain.batch_size, plain.precision) == (4, "float64")
