"""Imports match the declared packages, and both wheels train, lint and verify in an empty environment."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lockstep

ROOT = Path(__file__).parents[1]
LINT = ROOT / "packages" / "lint"
PROJECT, LINTER = (
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in (ROOT, LINT)
)
EXTRAS = PROJECT["optional-dependencies"]


NAMED = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "pynvml": "nvidia-ml-py",
}  # what is imported -> its distribution, where they differ


def plain(name):
    return re.sub(r"[-_.]+", "-", NAMED.get(name, name)).lower()


def names(requirements):
    return {plain(Requirement(text).name) for text in requirements}


_LATER = {"compression"}  # packages that are Python's own from 3.14 on


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
                if top not in {*sys.stdlib_module_names, *_LATER, "lockstep"}:
                    found.setdefault(plain(top), set()).add(str(path.relative_to(ROOT / "src")))
    return found


def test_what_is_imported_is_declared():
    """Each import's distribution is a dependency; that of an extra stands in one file, which says what is missing."""
    used, main = imported(), names(PROJECT["dependencies"])
    extras = set().union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra not in ("dev", "bench")))
    assert names(used) <= main | extras, "not declared"
    assert main - names(used) == set(), "declared and never imported"
    for name in names(used) - main:
        assert len(used[name]) == 1, f"{name} is an extra: {used[name]}"


def test_nothing_installs_the_distributions_from_an_index():
    """Nobody has reserved their names there, so pip gets a path; messages name the extra."""
    assert (PROJECT["name"], LINTER["name"]) == ("torch-lockstep", "lockstep-lint")
    names = re.compile(r"pip install[^`\n]*(?<![/\w.-])(?:torch-)?lockstep(?:-lint)?(?:\[[^`\n]*)?")
    folders = [ROOT / "docs", ROOT / "src", ROOT / "examples", ROOT / "scripts", LINT]
    texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".py", ".yaml", ".sh")]
    for path in [*ROOT.glob("*.md"), *texts]:
        assert names.findall(path.read_text(encoding="utf-8")) == [], path
    assert names.search("pip install torch-lockstep"), "the pattern finds one"
    assert names.search("pip install 'torch-lockstep[lint]'"), "and one with an extra"


def test_both_distributions_declare_the_same():
    """One version in all places, which the extra takes; the same Pythons and licence."""
    version = PROJECT["version"]
    assert version == LINTER["version"] == lockstep.__version__
    assert re.search(r"^## (.*) \(", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1] == version
    (extra,) = (Requirement(text) for text in EXTRAS["lint"])
    assert (extra.name, extra.extras) == ("lockstep-lint", {"fix"})
    assert extra.specifier.contains(version)
    major, minor = version.split(".")[:2]
    assert not extra.specifier.contains(f"{major}.{int(minor) + 1}.0"), "another minor version may not fit"
    for key in ("requires-python", "license", "license-files"):
        assert PROJECT[key] == LINTER[key]
    assert (ROOT / "LICENSE").read_bytes() == (LINT / "LICENSE").read_bytes()
    pythons = [[line for line in each["classifiers"] if "Python :: 3." in line] for each in (PROJECT, LINTER)]
    assert pythons[0] == pythons[1]
    assert pythons[0][0].endswith(PROJECT["requires-python"].removeprefix(">="))


def test_a_distributions_readme_has_no_link_into_the_repository():
    specification = importlib.util.spec_from_file_location("setup_of_lockstep", ROOT / "setup.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    text = "![a](x.svg)\n\n[one](docs/a.md#b) [two](https://example.org) [three](#there) [`four`](x)\n"
    assert module.without_local_links(text) == "one [two](https://example.org) [three](#there) `four`\n"
    readme = module.without_local_links((ROOT / "README.md").read_text(encoding="utf-8"))
    for text in (readme, (LINT / "README.md").read_text(encoding="utf-8")):
        assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []


def test_the_release_stops_before_it_builds(tmp_path):
    """With changes in the tree, a changelog without the version's date, or versions that differ."""
    for name in ("scripts/release.sh", "pyproject.toml", "packages/lint/pyproject.toml", "src/lockstep/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version, changes = PROJECT["version"], tmp_path / "CHANGELOG.md"
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    go([*git, "init", "--quiet"])

    def refusal(commit=True):
        go([*git, "add", "."])
        if commit:
            go([*git, "commit", "--quiet", "--message", "a"])
        return go(["env", f"PYTHON={sys.executable}", "bash", "scripts/release.sh"], code=2, cwd=tmp_path).stderr

    changes.write_text(f"## {version} (2026-12-01)\n")
    assert "the working tree has changes" in refusal(commit=False)
    changes.write_text(f"## {version} (unreleased)\n")
    assert "CHANGELOG.md" in refusal()
    changes.write_text(f"## {version}1 (2026-12-01)\n")
    assert "CHANGELOG.md" in refusal()
    changes.write_text(f"## {version} (2026-12-01)\n")
    go([*git, "tag", f"v{version}"])
    assert f"the tag v{version} exists" in refusal()
    linter = tmp_path / "packages" / "lint" / "pyproject.toml"
    linter.write_text(linter.read_text().replace(f'"{version}"', '"9.9.9"'))
    assert "the versions differ" in refusal()
    assert not (tmp_path / "dist").exists()


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


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
QUIET = ["--quiet", "--no-deps", "--no-index"]
SDIST = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both sdists and the wheels that are made from them, as `python -m build` makes them.

    They are built from a copy, so that no build folder stands in the checkout.
    """
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("src", "packages/lint"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    for name in (source, source / "packages" / "lint"):
        go([sys.executable, "-c", SDIST, folder], cwd=name)
    go([*PIP, "wheel", *QUIET, "--no-build-isolation", "--wheel-dir", folder, *folder.glob("*.tar.gz")])
    shutil.rmtree(source)
    return folder


def environment(folder, wheels, requirements):
    """Makes an environment with these wheels and what they require, without an index; its bin folder.

    What they require is linked from this environment, distribution by distribution: what is not declared cannot be
    imported.
    """
    go([sys.executable, "-m", "venv", "--without-pip", folder])
    go([*PIP, "--python", folder / "bin" / "python", "install", *QUIET, *wheels])
    borrowed(next(folder.glob("lib/python*/site-packages")), requirements)
    return folder / "bin"


@pytest.fixture(scope="module")
def empty(built, tmp_path_factory):
    """The bin folder of an environment with the wheel and its dependencies, without extras."""
    folder = tmp_path_factory.mktemp("packaging") / "env"
    return environment(folder, built.glob("torch_lockstep-*.whl"), PROJECT["dependencies"])


def go(command, code=0, cwd=None):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOCKSTEP", "VIRTUAL"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_each_distribution_holds_what_it_needs_and_nothing_else(built):
    pages = {f"lockstep/templates/{name}" for name in ("task.py", "config.toml", "test_task.py")}
    pages |= {"lockstep/report/page.html"}
    for package, wanted in (("torch_lockstep", pages | {"lockstep/py.typed"}), ("lockstep_lint", set())):
        (wheel,), (source,) = built.glob(f"{package}-*.whl"), built.glob(f"{package}-*.tar.gz")
        info = wheel.name.rpartition("-py3")[0] + ".dist-info"
        name = {"torch_lockstep": "lockstep"}.get(package, package)
        with zipfile.ZipFile(wheel) as content:
            assert {entry.partition("/")[0] for entry in content.namelist()} == {name, info}
            assert wanted | {f"{name}/py.typed", f"{info}/licenses/LICENSE"} <= set(content.namelist())
            description = content.read(f"{info}/METADATA").decode().partition("\n\n")[2]
        assert description.startswith("# lockstep")
        assert re.findall(r"\]\((?!https?:|#)[^)]*\)", description) == []
        with tarfile.open(source) as content:
            tops = {"/".join(entry.split("/")[1:2]) for entry in content.getnames()}
        assert {"LICENSE", "README.md", "pyproject.toml", "src"} <= tops
        assert "tests" not in tops


@pytest.mark.slow
def test_wheel_has_itself_and_nothing_undeclared(empty, tmp_path):
    code = "import lockstep, sys; print(lockstep.__file__)\n"
    code += "import importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    absent = ["libcst", "transformers", "datasets", "wandb", "tensorboard", "deepspeed", "pytest"]
    done = go([empty / "python", "-c", code, *absent], cwd=tmp_path)
    assert done.stdout.splitlines()[0].startswith(str(empty.parent / "lib"))
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.slow
def test_both_wheels_train_lint_and_verify_when_installed(built, tmp_path):
    requirements = [*PROJECT["dependencies"], *LINTER["optional-dependencies"]["fix"]]
    place = environment(tmp_path / "env", built.glob("*.whl"), requirements)
    done = go(["bash", ROOT / "scripts" / "smoke.sh", place], cwd=tmp_path)
    assert f"trained, linted and verified with lockstep {PROJECT['version']}" in done.stdout


@pytest.mark.slow
def test_an_extra_that_is_missing_is_named(empty, tmp_path):
    (tmp_path / "code.txt").write_text("".join(f"def f_{i}(x):\n    return x + {i * i}\n\n" for i in range(800)))
    settings = "--dataset-name code.txt --data.vocab-size 300 --seq-len 32 --batch-size 8 --device cpu"
    for flags, way_out in (
        (["lint", "train.py"], "install packages/lint"),
        (["completion", "bash"], "install the extra completion"),
        (["train", "--model-name", "a/model", "--dataset-name", "code.txt", "--device", "cpu"], "the extra hf of"),
        (["train", *settings.split(), "--wandb"], "the extra wandb of torch-lockstep"),
    ):
        last = go([empty / "lockstep", *flags], code=2, cwd=tmp_path).stderr.splitlines()[-1]
        assert way_out in last, last


@pytest.mark.slow
def test_the_linters_wheel_runs_without_torch(built, empty, tmp_path):
    """In an environment with nothing else; then beside lockstep, which finds it, and which it finds."""
    (wheel,) = built.glob("lockstep_lint-*.whl")
    alone = environment(tmp_path / "env", [wheel], [])
    go([*PIP, "--python", empty / "python", "install", *QUIET, wheel])
    (tmp_path / "fixable.py").write_text(FIXABLE)
    try:
        for command in ([alone / "lockstep-lint"], [empty / "lockstep", "lint"]):
            command = [*command, "--select", "LS029"]  # a hint
            assert "LS029" in go([*command, "fixable.py"], code=1, cwd=tmp_path).stdout
            refused = go([*command, "--fix", "fixable.py"], code=2, cwd=tmp_path).stderr
            assert "pip install libcst" in refused
    finally:
        go([*PIP, "--python", empty / "python", "uninstall", "--quiet", "--yes", "lockstep-lint"])


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
