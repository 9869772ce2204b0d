"""Lines that a user writes for five stories, beside the other trainers': python bench/stories.py [--run] [--write]

The programs lie in bench/stories/STORY/TRAINER.py, each the shortest that its trainer's documentation leads to and that
ends with the same: the same net or model, data, epochs, best checkpoint or file. Counted are lines with code: no blank
ones, comments or docstrings; a statement that is broken over several lines is one. Imports count. What all share
(`stories/digits.py`: the net and the samples) counts for nobody.

--run also runs those whose packages are there, in a folder of its own with small data; --write puts the table into
docs/benchmarks.md.
"""

import argparse
import ast
import csv
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- stories -->\n", "<!-- /stories -->\n"
STORIES = {
    "cnn": "own CNN, OneCycle, F1, the best kept",
    "lora": "fine-tune with LoRA, evaluated, adapters written",
    "text": "text classifier, the best kept",
    "sweep": "three rates, the best of them",
    "resume": "resumes by itself, weights exported",
}
TRAINERS = {"lockstep": "lockstep", "lightning": "Lightning", "hf": "HF Trainer", "accelerate": "Accelerate"}


def program(story, trainer):
    """The program's file: Python, or lines of a shell."""
    return next((HERE / "stories" / story).glob(f"{trainer}.*"))


def lines(path):
    """Lines with code: a statement, or the head of one, is a line however it is broken."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        rows = text.replace("\\\n", " ").splitlines()
        return sum(bool(row.strip()) and not row.startswith("#") for row in rows)
    tree = ast.parse(text)
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    count = sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))
    return count - sum(ast.get_docstring(node) is not None for node in owners)


def table():
    rows = [f"| story | {' | '.join(TRAINERS.values())} |", "|---" * (len(TRAINERS) + 1) + "|"]
    for story, text in STORIES.items():
        found = {trainer: lines(program(story, trainer)) for trainer in TRAINERS}
        ours, best = found["lockstep"], min(found.values())
        cells = [f"**{ours}**" + ("" if ours == best else ": missed"), *map(str, list(found.values())[1:])]
        rows.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def prepare(folder):
    """What the text stories take from their folder: a small pretrained model, and texts with a word that decides."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    hub_files = importlib.import_module("hub_files")
    (folder / "model").mkdir()
    hub_files.write_model(folder / "model", weights=True, pad_token_id=0)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    for name in ("notes", "reviews"):
        (folder / name).mkdir()
    for split, count in (("train", 200), ("test", 40)):
        texts = hub_files.texts(count, seed=count)
        hub_files.write_jsonl(folder / "notes" / f"{split}.jsonl", [{"text": text} for text in texts])
        with (folder / "reviews" / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for text in texts:
                label = draw.randrange(2)
                rows.writerow([("rivers " if label else "colours ") + text[:60], label])


def run(story, trainer, folder):
    """The last line that the program prints, or why it was not run."""
    path = program(story, trainer)
    package = {"hf": "transformers"}.get(trainer, trainer)
    if importlib.util.find_spec(package) is None:
        return f"not run: {package} is not installed"
    if story in ("lora", "text"):
        prepare(folder)
    paths = [str(path.parents[1]), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
    if path.suffix == ".sh":
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        command = ["bash", "-e", str(path)]
    else:  # not as a file, whose folder would come first: accelerate.py stands in it
        command = [sys.executable, "-c", f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{story}/{path.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return (done.stdout.strip().splitlines() or ["ran"])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="also run what can be run here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--only", default=",".join(STORIES), help="stories to run")
    given = parser.parse_args()
    print(table())
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
    for story in given.only.split(",") if given.run else ():
        for trainer in TRAINERS:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps([story, trainer, run(story, trainer, Path(folder))]), flush=True)


if __name__ == "__main__":
    main()
