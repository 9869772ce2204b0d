"""What is declared is what is imported, and a wheel in an empty environment trains and verifies, the linter's lints."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


NAMED = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "pynvml": "nvidia-ml-py",
}  # what is imported -> its distribution, where they differ
WITH_TORCH = {"triton"}  # a dependency of torch's CUDA builds, which alone need it, in the version that fits


def plain(name):
    return re.sub(r"[-_.]+", "-", NAMED.get(name, name)).lower()


def names(requirements):
    return {plain(Requirement(text).name) for text in requirements}


def imported():
    """{top-level name: files} of what the package imports from elsewhere, by statement or by name."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.parent.name == "templates":  # a user's files, which import one another
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                modules = [word.value for word in node.args if isinstance(word, ast.Constant)]
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "lockstep":
                    found.setdefault(plain(top), set()).add(str(path.relative_to(ROOT / "src")))
    return found


def test_what_is_imported_is_declared():
    """Each import's distribution is a dependency; that of an extra stands in one file, which says what is missing."""
    used, main = imported(), names(PROJECT["dependencies"])
    extras = set().union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra not in ("dev", "bench")))
    assert names(used) <= main | extras | WITH_TORCH, "not declared"
    assert main - names(used) == set(), "declared and never imported"
    for name in names(used) - main:
        assert len(used[name]) == 1, f"{name} is an extra: {used[name]}"


def test_the_distributions_name_is_ours():
    assert PROJECT["name"] == "torch-lockstep"
    tracked = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(ROOT / "src").rglob("*.py")]
    for path in tracked:
        for found in re.findall(r"pip install[^`\n]*lockstep[\w\[\],-]*", path.read_text(encoding="utf-8")):
            assert re.search(r"torch-lockstep|/lockstep|\./?lockstep", found), f"{path}: {found}"


def needed(requirements):
    """The names of all distributions that these requirements bring, as they are installed here."""
    found, waiting = set(), [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        if plain(wanted.name) in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(plain(wanted.name))
        waiting += [Requirement(text) for text in importlib.metadata.requires(wanted.name) or ()]
    return found


def borrowed(site, requirements):
    """Links each distribution that is needed, and no other, into the empty `site` from this environment."""
    for name in needed(requirements):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))


BUILD = """
import importlib.util, pathlib, sys
sys.modules |= dict.fromkeys(sys.argv[3:])  # None: cannot be imported
spec = importlib.util.spec_from_file_location("setup", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.write(pathlib.Path(sys.argv[2]))
"""


def test_the_build_needs_only_what_it_requires(tmp_path):
    """The completion files are written without any dependency: pip builds in an environment that has none."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    modules = {distribution: module for module, distribution in NAMED.items()}
    absent = [modules.get(name, name).replace("-", "_") for name in imported() if name not in names(built)]
    assert "torch" in absent
    assert "numpy" in absent
    go([sys.executable, "-c", BUILD, ROOT / "setup.py", tmp_path, *absent])
    assert (tmp_path / "lockstep.bash").read_text().endswith("-F _lockstep lockstep\n")
    assert "launch" in (tmp_path / "_lockstep").read_text()


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """The bin folder of an environment with the wheel and its dependencies, without extras and without an index.

    The wheel is built from a copy, so that no build folder stands in the checkout. What it depends on is linked from
    this environment, distribution by distribution: what is not declared cannot be imported.
    """
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet = ["--quiet", "--no-deps", "--no-index"]
    go([*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", folder, source])
    wheel = next(folder.glob("*.whl"))
    assert wheel.name.startswith("torch_lockstep-")
    with zipfile.ZipFile(wheel) as content:
        assert {name.partition("/")[0] for name in content.namelist()} == {
            "lockstep",
            wheel.name.rpartition("-py3")[0] + ".dist-info",
        }
        wanted = {"lockstep/py.typed", "lockstep/completions/lockstep.bash", "lockstep/completions/_lockstep"}
        wanted.add("lockstep/report/page.html")
        wanted |= {f"lockstep/templates/{name}" for name in ("task.py", "config.toml", "test_task.py")}
        assert wanted <= set(content.namelist())
    go([sys.executable, "-m", "venv", "--without-pip", folder / "env"])
    go([*pip, "--python", folder / "env" / "bin" / "python", "install", *quiet, wheel])
    borrowed(next((folder / "env").glob("lib/python*/site-packages")), PROJECT["dependencies"])
    return folder / "env" / "bin"


def go(command, code=0, cwd=None):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOCKSTEP", "VIRTUAL"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_wheel_brings_itself_and_nothing_that_is_not_declared(empty, tmp_path):
    code = "import lockstep, sys; print(lockstep.__file__)\n"
    code += "import importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    absent = ["libcst", "transformers", "datasets", "wandb", "tensorboard", "deepspeed", "pytest"]
    done = go([empty / "python", "-c", code, *absent], cwd=tmp_path)
    assert done.stdout.splitlines()[0].startswith(str(empty.parent / "lib"))
    assert done.stdout.splitlines()[1] == "[]"
    assert go([empty / "lockstep", "completion", "bash"], cwd=tmp_path).stdout.endswith("-F _lockstep lockstep\n")


@pytest.mark.slow
def test_the_wheel_trains_and_verifies_in_an_empty_environment(empty, tmp_path):
    (tmp_path / "code.txt").write_text("".join(f"def f_{i}(x):\n    return x + {i * i}\n\n" for i in range(800)))
    settings = (
        "--dataset-name code.txt --data.vocab-size 300 --data.cache cache --seq-len 32 --batch-size 8 --device cpu"
    )
    done = go([empty / "lockstep", "train", *settings.split(), "--max-steps", "3"], cwd=tmp_path)
    assert "finished" in done.stdout
    assert (tmp_path / "outputs" / "default" / "checkpoints" / "step-00000003").is_dir()
    done = go([empty / "lockstep", "checkpoint", "verify", "outputs/default"], cwd=tmp_path)
    assert "step-00000003: whole" in done.stdout
    go([empty / "lockstep", "export", "outputs/default", "model.safetensors"], cwd=tmp_path)
    flags = ["--engines", "single,ddp", "--world-sizes", "1,2", "--steps", "2", "--resume-at", "0"]
    done = go([empty / "lockstep", "verify", *settings.split(), *flags], cwd=tmp_path)
    assert "ddp x2" in done.stdout
    assert not list(tmp_path.glob("*.json"))

    line = "pip install 'torch-lockstep["
    for flags in (
        ["lint", "train.py"],
        ["train", "--model-name", "someone/model", "--dataset-name", "code.txt", "--device", "cpu"],
        ["train", *settings.split(), "--wandb"],
    ):
        last = go([empty / "lockstep", *flags], code=2, cwd=tmp_path).stderr.splitlines()[-1]
        assert line in last, last


@pytest.mark.slow
def test_the_linters_wheel_runs_without_torch(empty, tmp_path):
    """In an environment with nothing else; then beside lockstep, which finds it, and which it finds."""
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    shutil.copytree(ROOT / "packages" / "lint", tmp_path / "source", ignore=ignored)
    pip, quiet = [sys.executable, "-m", "pip", "--disable-pip-version-check"], ["--quiet", "--no-deps", "--no-index"]
    go([*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", tmp_path, tmp_path / "source"])
    wheel = next(tmp_path.glob("lockstep_lint-*.whl"))
    with zipfile.ZipFile(wheel) as content:
        assert {name.partition("/")[0].partition("-")[0] for name in content.namelist()} == {"lockstep_lint"}
    go([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"])
    alone = tmp_path / "env" / "bin"
    for python in (alone / "python", empty / "python"):
        go([*pip, "--python", python, "install", *quiet, wheel])
    (tmp_path / "fixable.py").write_text(FIXABLE)
    try:
        for command in ([alone / "lockstep-lint"], [empty / "lockstep", "lint"]):
            command = [*command, "--select", "LS029"]  # a hint
            assert "LS029" in go([*command, "fixable.py"], code=1, cwd=tmp_path).stdout
            refused = go([*command, "--fix", "fixable.py"], code=2, cwd=tmp_path).stderr
            assert "pip install 'lockstep-lint[fix]'" in refused
        (tmp_path / "loop.py").write_text("loss.backward()\noptimizer.step()\n")
        assert "a plain loop" in go([empty / "lockstep", "lint", "--migrate", "loop.py"], cwd=tmp_path).stdout
        refused = go([alone / "lockstep-lint", "--migrate", "loop.py"], code=2, cwd=tmp_path).stderr
        assert "pip install 'torch-lockstep[lint]'" in refused
    finally:
        go([*pip, "--python", empty / "python", "uninstall", "--quiet", "--yes", "lockstep-lint"])


FIXABLE = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"


def test_the_image_is_built_of_what_its_context_holds():
    """What the Dockerfile copies is there and not ignored, and its user may write to a manifest's volumes."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {word.removeprefix("./") for word in copied} <= allowed
    assert all((ROOT / word).exists() for word in copied)
    assert "USER 1000" in lines
    manifest = (ROOT / "src/lockstep/launch/kubernetes.py").read_text(encoding="utf-8")
    assert "fsGroup: 1000" in manifest
    assert f"ARG TORCH={re.search(r'torch==([0-9.]+)', (ROOT / 'Makefile').read_text())[1]}" in lines
