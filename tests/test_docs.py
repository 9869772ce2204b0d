"""What the documents show is what runs."""

import contextlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from shell import await_listener, environment, free_port, inspected
from slurm.slurm_cluster import cluster, missing

import lockstep
from lockstep import cli
from lockstep.config.cli import option_list

ROOT = Path(__file__).parents[1]


def blocks(name):
    """The Python code of a document, block by block."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_readme_program_has_one_fingerprint_on_two_processes(tmp_path):
    run_page("README.md", tmp_path, ["classes.py"])
    (result,) = re.findall(r"`(evaluation loss \S+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert is_printed(result, go(tmp_path, warm.python(), "classes.py"))
    same_fingerprints(tmp_path, "classes.py", "--exact", "--max-steps", "20", "--experiment-name")
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 500


def test_the_tasks_and_runs_of_the_documents_run(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    names = {}
    for block in (*blocks("docs/task.md"), *blocks("docs/inside/task.md")):
        exec(block, names)
    for number, block in enumerate(blocks("docs/run.md")):
        if "lockstep.launch(" in block:  # of a notebook: tests/launch/test_local.py
            continue
        change = f'experiment_name="mine{number}", max_steps=4'
        exec(block.replace('experiment_name="mine", max_steps=1000', change), names)
        names["config"] = lockstep.Config(experiment_name=f"next{number}", max_steps=3)
    assert names["result"].status == "finished"
    for block in blocks("docs/numbers.md"):
        exec(block, names)
    assert names["result"].status == "finished"
    scored = lockstep.train(lockstep.Config(experiment_name="scored", max_steps=3), names["Scored"]())
    assert 0 <= scored.evaluation.metrics["auc"] <= 1
    for kind, steps in (("RareMore", 16), ("Balanced", 7), ("Curriculum", 16)):
        drawn = lockstep.train(lockstep.Config(experiment_name=kind, num_epochs=1, batch_size=32), names[kind]())
        assert (drawn.status, drawn.global_step) == ("finished", steps)


def test_the_streams_of_the_documents_run(here):
    Path("shards").mkdir()
    for number in range(8):
        rows = [json.dumps({"x": [k / 9.0] * 4, "y": k / 3.0}) + "\n" for k in range(10 + number)]
        Path(f"shards/{number}.jsonl").write_text("".join(rows), encoding="utf-8")
    names = {}
    for block in blocks("docs/data.md"):
        exec(block.replace("max_steps=100", "max_steps=12"), names)
    assert (names["result"].status, names["result"].global_step) == ("finished", 12)


def test_the_programs_of_shards_and_mixtures_run(here, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for page, steps in (("shards", 50), ("mixtures", 60)):
        names = {}
        for block in blocks(f"docs/data/{page}.md"):
            exec(block.replace("lockstep.Config(", f"lockstep.Config(experiment_name='{page}', "), names)
        assert (names["result"].status, names["result"].global_step) == ("finished", steps)
    records = [json.loads(line) for line in Path("outputs/mixtures/metrics.jsonl").read_text().splitlines()]
    shares = [record["data/share/code"] for record in records if "data/share/code" in record]
    assert len(shares) == 6
    assert 0.1 < shares[0] < shares[2] < 0.5
    assert abs(shares[-1] - 0.5) < 0.1


def test_the_states_over_the_steps_run(here):
    names = {}
    for block in blocks("docs/state.md"):
        exec(block, names)
    assert [names[each].status for each in ("result", "distilled", "run")] == ["finished"] * 3


def test_the_losses_over_a_whole_step_run(here, tmp_path, monkeypatch):
    run_page("docs/tutorials/contrastive.md", tmp_path, ["pairs.py", "wrong.py"])
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    for block in blocks("docs/whole-step.md"):
        exec(block, names)
    assert (names["result"].status, names["same"].status) == ("finished", "finished")
    assert names["same"].evaluation.loss == pytest.approx(names["result"].evaluation.loss, rel=1e-4)


def test_the_optimizer_that_evaluates_twice_runs(here):
    names = {}
    exec(next(block for block in blocks("docs/inside/optimizers.md") if "class Sam" in block), names)
    assert names["result"].status == "finished"


def test_the_program_of_what_changes_while_it_trains_runs(here):
    names = {}
    for block in blocks("docs/change-while-training.md"):
        exec(block, names)
    assert names["run"].status == "finished"
    flags = [parameter.requires_grad for parameter in names["run"].model.body.parameters()]
    assert flags == [True] * 4
    with pytest.raises(lockstep.errors.ConfigError, match="task.seen"):
        lockstep.train(lockstep.Config(experiment_name="exact", max_steps=4, exact=True), names["Remembering"]())


def test_what_is_shown_where_something_is_wrong_is_true(here, tmp_path, capsys):
    """Lint finds what is said, and each command has the flags."""
    page = "packages/lint/docs/lint.md"
    (script,) = (block for block in blocks(page) if block.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    capsys.readouterr()
    assert cli.dispatch(["lint", "--hints", "train.py"]) == 1
    text = (ROOT / page).read_text(encoding="utf-8")
    found = set(re.findall(r"LS\d{3}", capsys.readouterr().out))
    assert found == set(
        re.findall(r"LS\d{3}", text.partition("`lockstep lint --hints train.py` finds")[2].partition(", each")[0])
    )
    rules = ROOT / "packages" / "lint" / "src" / "lockstep_lint" / "pages"
    text = (ROOT / "docs" / "wrong.md").read_text(encoding="utf-8")
    assert all((rules / f"{rule}.md").is_file() for rule in re.findall(r"LS\d{3}", text))
    for line in re.findall(r"^    lockstep (.*)$|`lockstep ([^`]*)`", text, re.MULTILINE):
        for words in shown_commands("".join(line)):
            with contextlib.suppress(SystemExit):
                cli.dispatch([words[0], "--help"])
            known = set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", capsys.readouterr().out)) | set(TRAIN)
            assert [word for word in words[1:] if word.startswith("-") and word not in known] == [], words


def shown_commands(line):
    """Each of lockstep's commands in a line, with its flags: `launch -- train` has two."""
    words = shlex.split(line)
    foreign = words[0] == "trace"  # of a program of the user's
    head, _, rest = (" ".join(words)).partition(" -- ")
    yield head.split()
    if rest and not foreign:
        yield rest.split() if not rest.startswith("-") else ["train", *rest.split()]


TRAIN = [f"--{name.split()[0].replace('_', '-')}" for name in option_list()]


def test_the_documents_name_every_method_and_number():
    task = (ROOT / "docs" / "task.md").read_text(encoding="utf-8")
    methods = [name for name, value in vars(lockstep.Task).items() if callable(value) and not name.startswith("_")]
    missing = [name for name in (*methods, *lockstep.Task.__annotations__) if f"`{name}" not in task]
    assert missing == []
    run = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    shown = {name for name in vars(lockstep.Run) if not name.startswith("_")} | {"loss", "norm", "numbers", "applied"}
    shown |= {name for name in lockstep.Step.__slots__ if not name.startswith("_")} - {"record"}
    assert sorted(name for name in shown if f".{name}" not in run) == []


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere():
    lost = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "packages" / "lint").rglob("*.md")):
        for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / path if path else page
            if (path or anchor) and not (target.is_file() and (not anchor or anchor in headings(target))):
                lost.append((page.name, path, anchor))
    assert lost == []


def test_names_that_the_documents_say_are_in_a_file_are_there():
    """`training/state/parts.py: RunParts.lr_factor`: each part of the name is defined in that file."""
    homes = (ROOT, ROOT / "src" / "lockstep", ROOT / "packages" / "lint" / "src" / "lockstep_lint")
    lost = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for file, names in re.findall(r"`([\w/]+\.py): ([^`]+)`", page.read_text(encoding="utf-8")):
            sources = [path.read_text(encoding="utf-8") for home in homes if (path := home / file).is_file()]
            for name in re.split(r"[,.]\s*", names):
                defines = rf"(def|class) {name}\b|^\s*(self\.)?{name}\s*[:=]|\"{name}\""
                if not any(re.search(defines, source, re.MULTILINE) for source in sources):
                    lost.append((page.name, file, name))
    assert lost == []


def run_page(name, folder, files):
    """Write the programs of a page under these names."""
    for block, file in zip(blocks(name), files, strict=True):
        (folder / file).write_text(block, encoding="utf-8")


def go(folder, *words, code=0, **variables):
    done = subprocess.run(
        words, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def same_fingerprints(folder, *words):
    """Train a program on one process and on two; its last word is the run's name."""
    go(folder, warm.python(), *words, "one")
    go(folder, warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", *words, "two")
    assert inspected(folder / "outputs" / "one") == inspected(folder / "outputs" / "two")


def test_quickstart_runs_and_its_folder_is_as_documented(tmp_path):
    run_page("docs/quickstart.md", tmp_path, ["spirals.py"])
    python = warm.python()
    shown = go(tmp_path, python, "spirals.py", "--exact", "--csv")
    assert float(re.search(r"accuracy (\S+) after step 300", shown)[1]) > 0.9
    other = ("spirals.py", "--exact", "--experiment-name", "other")
    go(tmp_path, python, *other, "--stop-at", "120")
    go(tmp_path, python, "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", *other)
    assert inspected(tmp_path / "outputs" / "other") == inspected(tmp_path / "outputs" / "spirals")

    listed = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs/files.md").read_text(encoding="utf-8"), re.MULTILINE))
    run = tmp_path / "outputs" / "spirals"
    for path in run.rglob("*"):
        inside = str(path.relative_to(run))
        if path.is_file() and not inside.startswith("logs/"):
            assert re.sub(r"^checkpoints/step-\d+/", "", inside) in listed, inside
    described = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    fields = set().union(*records) - {"evaluation/accuracy"}  # the task's own
    assert [name for name in fields if f"`{name}`" not in described] == []


def test_the_ideas_run(here):
    names = {}
    exec(blocks("docs/ideas.md")[0], names)
    assert [len(step) for step in names["plan"]] == [4, 4]
    assert sorted(sample for step in names["plan"] for micro in step for sample in micro) == list(range(16))


def test_the_tutorial_of_images_runs(tmp_path):
    run_page("docs/tutorials/images.md", tmp_path, ["draw.py", "own.py"])
    go(tmp_path, warm.python(), "draw.py")
    line = re.search(r"^lockstep (train .*)$", (ROOT / "docs/tutorials/images.md").read_text(), re.MULTILINE)[1]
    go(tmp_path, warm.python(), "-m", "lockstep", *line.split(), "--max-steps", "4")
    shown = go(tmp_path, warm.python(), "-m", "lockstep", "evaluate", "outputs/shapes")
    assert "top1" in shown
    same_fingerprints(tmp_path, "own.py", "--exact", "--max-steps", "4", "--experiment-name")


def test_ddp_tutorial_finds_the_mistake_and_proves_the_fix(tmp_path, bash):
    # A warm Python may have transformers loaded, whose Trainer has another fix.
    put_programs(tmp_path / "bin", sys.executable)
    wrong, mend = blocks("docs/tutorials/check-a-script.md")
    (line,) = (line for line in wrong.splitlines(keepends=True) if "cross_entropy" in line)
    (tmp_path / "ddp.py").write_text(wrong, encoding="utf-8")
    (tmp_path / "mended.py").write_text(wrong.replace(line, mend), encoding="utf-8")
    (commands,) = fenced("docs/tutorials/check-a-script.md", "sh")
    assert fenced("README.md", "sh")[0] == commands
    different = printed_by(bash(f"{commands.strip()} || test $? = 3"))
    for before, after in ((r"ddp\.py", "mended.py"), (r"\bone\b", "three"), (r"\btwo\b", "four")):
        commands = re.sub(before, after, commands)
    same = printed_by(bash(commands))
    for name in ("README.md", "docs/tutorials/check-a-script.md"):
        shown = fenced(name, "")
        assert is_printed(shown[0], different)
        assert is_printed(re.sub(r"[\d.]+e-\d+", "...", shown[1]), same)  # the rounding is the machine's


def test_contrastive_tutorial_has_one_result_on_two_processes(tmp_path, bash):
    name = "docs/tutorials/contrastive.md"
    run_page(name, tmp_path, ["pairs.py", "wrong.py"])
    same_fingerprints(tmp_path, "pairs.py", "--exact", "--max-steps", "20", "--experiment-name")
    command = fenced("README.md", "sh")[1].strip()
    assert f"`{command}`" in (ROOT / name).read_text(encoding="utf-8")
    refused = printed_by(bash(f"{command} || test $? = 2"))
    assert is_printed(fenced("README.md", "")[2], refused)
    assert is_printed(fenced(name, "")[-1].removesuffix("...\n"), refused)
    assert not (tmp_path / "outputs" / "cut").exists()
    go(tmp_path, warm.python(), "wrong.py")


@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightning_tutorial_has_one_result_on_two_processes(here, tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    run_page("docs/tutorials/from-lightning.md", tmp_path, ["module.py", "before.py", "after.py"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["after.py", "one"])
    try:
        for name in ("before.py", "after.py"):
            script = tmp_path / name
            script.write_text(
                script.read_text(encoding="utf-8").replace("max_epochs=20", "max_epochs=2"), encoding="utf-8"
            )
            trained = runpy.run_path(name)
    finally:
        sys.modules.pop("module", None)
    assert trained["result"].status == "finished"
    go(tmp_path, warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", "after.py", "two")
    assert inspected(tmp_path / "outputs" / "two") == inspected(tmp_path / "outputs" / "one")


def test_the_loop_of_ones_own_runs_alone_and_resumes_on_two(tmp_path):
    run_page("docs/own-loop.md", tmp_path, ["train.py", "reinforce.py"])
    shown = go(tmp_path, warm.python(), "train.py")
    assert float(re.search(r"accuracy (\S+) of 256", shown)[1]) > 0.8
    two = (warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", "train.py")
    assert go(tmp_path, *two) == shown  # nothing is left to train


def fenced(name, kind):
    """Return the blocks of a document: of the kind `sh` its commands, of "" what they print."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [
        block for found, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if found == kind
    ]


def put_programs(folder, python):
    for name, words in (("python", ""), ("lockstep", "-m lockstep "), ("torchrun", "-m torch.distributed.run ")):
        (folder / name).write_text(f'#!/bin/sh\nexec {python} {words}"$@"\n')
        (folder / name).chmod(0o755)


@pytest.fixture
def bash(tmp_path):
    """`bash(commands)` starts the commands of a document, with this Python as `python` and `lockstep`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    put_programs(programs, warm.python())
    started = []

    def start(commands, **variables):
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        started.append(
            subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", commands],
                cwd=tmp_path,
                env=environment(PATH=path, HF_HUB_OFFLINE="1", **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def printed_by(process):
    """Return what commands print, which must succeed."""
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    return printed


def is_alike(line, shown):
    """Whether two lines have the same words, and the same numbers but for rounding."""
    number = r"\d+\.\d+"
    found, wanted = ([float(each) for each in re.findall(number, text)] for text in (line, shown))
    return re.sub(number, "", line) == re.sub(number, "", shown) and found == pytest.approx(wanted, rel=0.01)


def is_printed(shown, printed, *, wraps=True):
    """Whether a text of a document was printed.

    Decimals are within 10 %, and `...` is any text of a line. If it `wraps`, the document breaks its lines elsewhere.
    """
    space = " "
    if wraps:
        space = r"\s"
        shown = " ".join(shown.split())
        printed = "\n".join(" ".join(line.split()) for line in printed.splitlines())
    words = re.split(r"(\d+\.\d+)", shown)
    texts = [re.escape(word).replace(r"\.\.\.", ".*").replace(r"\ ", space) for word in words[::2]]
    found = [[float(number) for number in match.groups()] for match in re.finditer(r"(\d+\.\d+)".join(texts), printed)]
    return pytest.approx([float(number) for number in words[1::2]], rel=0.1) in found


def assert_shown(name, printed):
    """Assert that each line of output in a document was printed, and two equal fingerprints."""
    for line in "".join(fenced(name, "")).splitlines():
        assert is_printed(line, printed, wraps=False), line
    fingerprints = re.findall(r"sha256:\w+", printed)
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1


@pytest.mark.parametrize(
    ("page", "files"),
    [("chats", ["chats.py", "small.py", "use.py"]), ("from-hugging-face", ["dates.py", "before.py", "after.py"])],
)
def test_a_tutorial_of_hugging_face_prints_what_it_shows(tmp_path, bash, page, files):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    name = f"docs/tutorials/{page}.md"
    run_page(name, tmp_path, files)
    printed = printed_by(bash("".join(fenced(name, "sh"))))
    assert_shown(name, printed)
    shown = fenced(name, "")[1 if page == "chats" else 0].strip()
    assert len([line for line in printed.splitlines() if is_alike(line, shown)]) >= 2  # by both programs


def test_two_process_tutorial_divides_resumes_and_proves(tmp_path, bash):
    name = "docs/tutorials/two-processes.md"
    printed = printed_by(bash("\n".join(fenced(name, "sh")), OMP_NUM_THREADS="1"))
    for line in "".join(fenced(name, "")).splitlines():
        assert is_printed(line, printed), line
    # Both runs end with the same loss.
    assert len(set(re.findall(r"step 20/20 +(evaluation loss \d+\.\d\d)", printed))) == 1
    assert len(re.findall("step 20/20 +evaluation loss", printed)) == 2


def test_two_node_tutorial_loses_one_and_is_bitwise(tmp_path, bash):
    name = "docs/tutorials/two-nodes.md"
    run_page("docs/quickstart.md", tmp_path, ["spirals.py"])
    port = str(free_port())
    alone, first, second, look, doctors = (block.replace("29400", port) for block in fenced(name, "sh"))

    def start_nodes(first, second):
        node0 = bash(first)
        await_listener(int(port), node0)
        return node0, bash(second)

    printed = printed_by(bash(alone))
    node0, node1 = start_nodes(first, second)
    records, until = tmp_path / "outputs" / "two" / "metrics.jsonl", time.monotonic() + 90
    while not (records.exists() and '"global_step": 50,' in records.read_text(encoding="utf-8")):
        assert node0.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    node1.send_signal(signal.SIGQUIT)  # Ctrl-\
    assert node1.wait(timeout=30)  # at once, not at the end of the run
    printed += printed_by(node0)
    assert_shown(name, printed + printed_by(bash(look)))
    node0, _ = start_nodes(*doctors.splitlines())
    assert re.search(r"^ok +meeting +4 ranks", node0.communicate(timeout=100)[0], re.MULTILINE)


def test_slurm_tutorial_is_bitwise_on_two_nodes(tmp_path, tmp_path_factory, bash):
    name = "docs/tutorials/slurm.md"
    run_page("docs/quickstart.md", tmp_path, ["spirals.py"])
    alone, dry, submit, look, seeds, runs = fenced(name, "sh")
    flags, _, train = alone.partition("\n")
    printed = printed_by(bash(f"{flags}\n{dry}"))
    assert [line for line in fenced(name, "")[0].splitlines() if line not in printed.splitlines()] == []
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        variables = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
        submitted = printed_by(bash("\n".join([flags, submit, seeds]), **variables))
        printed += printed_by(bash(f"{flags}\n{train}"))
        until = time.monotonic() + 120
        while slurm.run("squeue", "--noheader").out.strip():
            assert time.monotonic() < until, submitted
            time.sleep(0.2)
    assert_shown(name, printed + printed_by(bash(look)))
    compared = printed_by(bash(runs))
    assert [run for run in ("one", "two", "seeds-seed1", "seeds-seed2") if run not in compared] == []
