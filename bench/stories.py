"""Compare a first day with lockstep and with other trainers: python bench/stories.py [--run] [--write]

The programs lie in bench/stories/STORY/SYSTEM.py (or .sh), each as its trainer's documentation leads to. Those of a
story end with the same: the same net or model, samples, epochs, and weights or a checkpoint in a file. Counted are
statements without imports, blank lines, comments and docstrings, by one counter for all; a statement that is broken
over several lines is one, and so is a command. What all share (`stories/digits.py`, `stories/seed.py`) counts for
nobody.

    OMP_NUM_THREADS=1 python bench/stories.py --run --only images,cnn,chats,chats-same,ddp --seeds 3

also runs them, seed by seed in turns, each in a new folder: processor time of the whole process tree (user and system,
start and imports included), the largest resident memory of one of its processes, and the quality on samples that no
program has seen, by one function from the weights that each has saved. deepspeed is hidden from all: accelerate and
transformers would import it unasked. "images" and "chats" leave to each what it chooses by itself; in "cnn" and
"chats-same" batch, optimizer, rate and schedule are equal. `from_lightning` and `from_trainer` are the others'
programs, handed to lockstep. --write puts the table of lines into docs/benchmarks.md.
"""

import argparse
import ast
import csv
import importlib.util
import io
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import tokenize
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- stories -->\n", "<!-- /stories -->\n"
STORIES = {
    "images": "own CNN, defaults",
    "cnn": "own CNN, OneCycle, F1, the best kept",
    "chats": "300 chats, defaults",
    "chats-same": "300 chats, a given recipe",
    "ddp": "a DDP loop of one's own",
    "lora": "fine-tune with LoRA, evaluated, adapters written",
    "text": "text classifier, the best kept",
    "sweep": "three rates, the best of them",
    "resume": "resumes by itself, weights exported",
}
TRAINERS = {
    "lockstep": "lockstep",
    "lightning": "Lightning",
    "hf": "HF Trainer",
    "trl": "trl",
    "accelerate": "Accelerate",
    "plain": "plain PyTorch",
}
HANDED_OVER = {
    "from_lightning": "Lightning's, handed to lockstep",
    "from_trainer": "the Trainer's, handed to lockstep",
    "profile": "plain PyTorch, under `lockstep profile`",
    "trace": "plain PyTorch, under `lockstep trace`",
}
PACKAGES = {"hf": "transformers", "plain": "torch", "from_lightning": "lightning", "from_trainer": "transformers"}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def program(story, system):
    """The program's file, Python or lines of a shell; None where the story has none of this system."""
    return next((HERE / "stories" / story).glob(f"{system}.*"), None)


def lines(path):
    """Lines with code but imports: a statement, or the head of one, is a line however it is broken."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        rows = text.replace("\\\n", " ").splitlines()
        return sum(bool(row.strip()) and not row.startswith("#") for row in rows)
    nodes = list(ast.walk(ast.parse(text)))
    owners = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    count = sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))
    count -= sum(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
    return count - sum(ast.get_docstring(node) is not None for node in owners)


def table():
    rows = [f"| story | {' | '.join(TRAINERS.values())} |", "|---" * (len(TRAINERS) + 1) + "|"]
    for story, text in STORIES.items():
        found = {trainer: lines(path) for trainer in TRAINERS if (path := program(story, trainer))}
        missed = "" if found["lockstep"] == min(found.values()) else ": missed"
        cells = [f"**{found['lockstep']}**{missed}", *(str(found.get(name, "")) for name in list(TRAINERS)[1:])]
        rows.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def prepare_texts(folder):
    """Write a small pretrained model, and texts with a word that decides."""
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


def prepare_chats(folder):
    """Write bench/chats.py's model, its template with marks around what the assistant says, and its chats."""
    sys.path.insert(0, str(HERE))
    chats = importlib.import_module("chats")
    from transformers import AutoTokenizer

    (folder / "model").mkdir()
    chats.write_base(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    for name, split, count, seed in (
        ("chats", "train", chats.CHATS, 0),
        ("chats", "validation", chats.HELD_OUT, 1),
        ("judged", "validation", chats.HELD_OUT, 2),
    ):
        (folder / name).mkdir(exist_ok=True)
        rows = "".join(json.dumps(row) + "\n" for row in chats.chats(count, seed))
        (folder / name / f"{split}.jsonl").write_text(rows)


def judge_digits(folder):
    """Return loss and accuracy of a program's weights on the images that no program trains on or evaluates."""
    sys.path.insert(0, str(HERE / "stories"))
    import torch

    digits = importlib.import_module("digits")
    safetensors = importlib.import_module("safetensors.torch")
    net = digits.net().eval()
    net.load_state_dict(safetensors.load_file(folder / "digits.safetensors"))
    images, labels = digits.judged
    with torch.no_grad():
        logits = net(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).double().mean().item()}


def judge_chats(folder):
    """Return the mean loss of the assistant's tokens on chats that no program has seen."""
    sys.path.insert(0, str(HERE))
    return {"loss": importlib.import_module("chats").held_out_loss(folder / "tuned", folder / "judged")}


PREPARE = {"lora": prepare_texts, "text": prepare_texts, "chats": prepare_chats, "chats-same": prepare_chats}
JUDGES = {"images": judge_digits, "cnn": judge_digits, "ddp": judge_digits}
JUDGES |= {"chats": judge_chats, "chats-same": judge_chats}


def elsewhere(function, *arguments):
    """Call a function in a process of its own, so that this one stays small and its programs' memory is theirs."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run(story, system, source, seed):
    """Run a program in a new folder.

    Returns:
        What it took: processor seconds, MiB and its quality, and the last line that it printed.
    """
    path = program(story, system)
    package = PACKAGES.get(system, system if system in TRAINERS else "lockstep")
    if importlib.util.find_spec(package) is None:
        return {"last": f"not run: {package} is not installed"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for file in (*(HERE / "stories").glob("*.py"), path, *path.parent.glob("plain.py")):
            shutil.copy(file, folder / (f"program{file.suffix}" if file == path else file.name))
        (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["deepspeed"] = None\n')
        command = ["bash", "-e", "program.sh"] if path.suffix == ".sh" else [sys.executable, "program.py"]
        if story == "ddp" and path.suffix == ".py":
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                command[1],
            ]
        paths = [str(folder), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths), "SEED": str(seed)}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hf", "TOKENIZERS_PARALLELISM": "false"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        with (folder / "shown").open("w+") as shown:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=shown, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            shown.seek(0)
            text = shown.read()
        if process.returncode:
            sys.exit(f"{story}/{path.name} ended with {process.returncode}:\n{text}")
        quality = elsewhere(JUDGES[story], folder) if story in JUDGES else {}
        took = {"processor_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}
        return {**took, **quality, "last": (text.strip().splitlines() or ["ran"])[-1]}


def measured(story, found):
    """A table of what each system took, in the mean over the seeds, with the standard deviation of the quality."""
    rows = [f"| {STORIES[story]} | lines | processor, min | loss | accuracy | peak, MiB |", "|---" * 6 + "|"]
    for system, runs in found.items():
        cells = [(TRAINERS | HANDED_OVER)[system], str(lines(program(story, system)))]
        for key, digits in (("processor_s", 3), ("loss", 4), ("accuracy", 4), ("peak_mib", 0)):
            values = [each[key] / (60 if key == "processor_s" else 1) for each in runs if key in each]
            spread = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 and key != "peak_mib" else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}" if values else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="also run what can be run here")
    parser.add_argument("--write", action="store_true", help="put the table of lines into docs/benchmarks.md")
    parser.add_argument("--only", default=",".join(STORIES), help="stories to run")
    parser.add_argument("--systems", default=",".join(TRAINERS | HANDED_OVER), help="whose programs to run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each program")
    given = parser.parse_args()
    print(table())
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
    for story in given.only.split(",") if given.run else ():
        with tempfile.TemporaryDirectory() as source:
            if story in PREPARE:
                elsewhere(PREPARE[story], Path(source))
            found = {system: [] for system in given.systems.split(",") if program(story, system)}
            for seed in range(given.seeds):
                for system, runs in found.items():
                    runs.append(run(story, system, source, seed))
                    print(json.dumps([story, system, seed, runs[-1]]), flush=True)
        print("\n" + measured(story, found), flush=True)


if __name__ == "__main__":
    main()
