"""Write the golden set: what a change of structure, names or words must reproduce, or load.

    PYTHONPATH=src:tests python -m golden.capture [help certificate checkpoints]

`losses.json` and `options.txt` are written by the tests that read them. A change of any of these files is a change that
users see: say so in CHANGELOG.md.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep import cli

HERE = Path(__file__).parent
ENGINES = {"single": 1, "ddp": 2, "zero": 2, "fsdp": 2, "deepspeed": 2}  # the ranks that wrote each checkpoint
STEPS, SAVED = 8, 4
KEPT = ("config.toml", "checkpoints", "state.json")  # of a run's folder


def help_text():
    """Return what `lockstep COMMAND --help` prints, command after command, 80 columns wide."""
    pages = []
    for name in sorted(set(cli.COMMANDS) - {"lint"}):  # the linter's own suite has its page
        page = io.StringIO()
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            cli.dispatch([name, "--help-all" if name == "train" else "--help"])
        pages.append(f"=== lockstep {name}\n{page.getvalue()}")
    return "\n".join(pages)


def lockstep(folder, *arguments):
    """Run the command in `folder`, so that no path of a machine is recorded; return its output, or raise with it."""
    shutil.copy(HERE / "task.py", folder)
    command = [sys.executable, "-m", "lockstep", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise AssertionError(f"{command[2:]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(folder, engine, *more, ranks=None):
    """Train the golden task for `STEPS` steps in `folder`/`engine`, on as many ranks as its checkpoint's."""
    flags = [
        *("--task", "task.py:Golden", "--engine", engine, "--experiment-name", engine),
        *("--save-dir", ".", "--batch-size", 8, "--micro-batch-size", 2, "--max-steps", STEPS, "--log-freq", 1),
        *("--device", "cpu", "--precision", "float32", "--optim.ema", 0.9, "--checkpoint.keep", 1, "--no-report"),
    ]
    ranks = ENGINES[engine] if ranks is None else ranks
    launch = ("launch", "--nproc-per-node", ranks, "--") if ranks > 1 else ()
    return lockstep(folder, *launch, "train", *flags, *more)


def losses(run):
    """Return {step: loss} of the steps after the golden checkpoint, as the run's records have them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["global_step"]: row["running_loss"] for row in rows if row["global_step"] > SAVED}


def prove(folder):
    """Write folder/certificate.json: the golden task is the same, bit for bit, on each engine."""
    asked = ("--batch-size", 8, "--micro-batch-size", 2, "--engines", "ddp,zero,fsdp", "--world-sizes", 2, "--steps", 4)
    lockstep(folder, "verify", "--task", "task.py:Golden", "--exact", *asked, "--out", "certificate.json")


def write_checkpoints():
    """Write checkpoints/ENGINE, each a run's folder that has SAVED of STEPS steps, and what the others' losses are."""
    target = HERE / "checkpoints"
    shutil.rmtree(target, ignore_errors=True)
    following = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES:
            train(folder, engine, "--stop-at", SAVED)
            run = Path(folder, engine)
            (target / engine).mkdir(parents=True)
            for name in KEPT:
                copy = shutil.copytree if (run / name).is_dir() else shutil.copy
                if (run / name).exists():
                    copy(run / name, target / engine / name)
            train(folder, engine)
            following[engine] = losses(run)
    (target / "losses.json").write_text(json.dumps(following, indent=1) + "\n")


def main(names):
    """Write the parts that are named, or all."""
    if not names or "help" in names:
        (HERE / "help.txt").write_text(help_text())
    if not names or "certificate" in names:
        with tempfile.TemporaryDirectory() as folder:
            prove(folder)
            shutil.copy(Path(folder, "certificate.json"), HERE)
    if not names or "checkpoints" in names:
        write_checkpoints()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    main(sys.argv[1:])
