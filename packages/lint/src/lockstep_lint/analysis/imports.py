"""Resolve imports to files, and scan a project's imports without parsing."""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.source import MAX_BYTES

__all__ = ["KNOWN", "SKIPPED", "Graph", "Importers", "Paths", "draw", "oldest_torch", "root_of"]


EXTERNAL = sys.stdlib_module_names | {"torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn"}
EXTERNAL |= {"matplotlib", "transformers", "accelerate", "deepspeed", "lightning", "pytorch_lightning", "wandb", "tqdm"}
EXTERNAL |= {"apex", "yaml", "cv2", "PIL", "timm", "einops", "tensorboardX", "omegaconf", "hydra", "composer"}
EXTERNAL |= {"ignite", "optuna", "loguru", "torchmetrics", "tensorboard", "albumentations"}
# Packages that a project may have a file of the same name for; without one, nothing that they do is hidden.
KNOWN = {
    "datasets",
    "diffusers",
    "peft",
    "bitsandbytes",
    "tokenizers",
    "evaluate",
    "sentencepiece",
    "safetensors",
    "nltk",
}
KNOWN |= {"huggingface_hub", "tiktoken", "torch_geometric", "torch_scatter", "torchtext", "monai", "gym", "gymnasium"}
KNOWN |= {"psutil", "fire", "rich", "click", "requests", "termcolor", "packaging", "absl", "ml_collections", "easydict"}
KNOWN |= {"h5py", "lmdb", "librosa", "soundfile", "skimage", "imageio", "seaborn", "networkx", "dgl", "faiss", "kornia"}
KNOWN |= {"neptune", "mlflow", "comet_ml", "swanlab", "tabulate", "gdown", "yacs", "ftfy", "decord"}
KNOWN |= {"fairscale", "xformers", "lpips", "pycocotools", "segmentation_models_pytorch", "jsonlines", "regex", "boto3"}
ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
SKIPPED = {"__pycache__", "node_modules", "venv", "site-packages", "build", "dist", "wandb"}
# Files of one project that are searched for imports: a bound for a script that lies in a huge tree.
MAX_SCANNED = 5000
MAX_FOLDERS = 5000
MAX_DEPTH = 3
MAX_UP = 6
IMPORTS = re.compile(
    r"\n[ \t]*(?:from[ \t]+(?P<module>[.\w]+)[ \t]+import[ \t\\\n]+(?P<names>\([^)]*\)|(?:[^\n#;\\]|\\\n)*)"
    r"|import[ \t]+(?P<plain>(?:[^\n#;\\]|\\\n)*))"
)
NAME = re.compile(r"(?:(?<=^)|(?<=[\s,(]))([\w.]+|\*)(?:\s+as\s+\w+)?")


# A folder that a program adds to the places where Python looks (`sys.path.append("../utils")`).
ADDS = re.compile(r"""^[ \t]*sys\.path\.(?:append|insert|extend)\(([^\n#]*)""", re.MULTILINE)
TEXT = re.compile(r"""["']([\w./ -]+)["']""")


class Paths:
    """Finds the file that an import means; reads no file. `added` tells the folders where the programs of a project
    look too, those that they add to `sys.path`, by the project's root.
    """

    def __init__(self, added: Callable[[str], tuple[str, ...]] | None = None) -> None:
        self.added = added
        self.is_file = functools.cache(os.path.isfile)
        self.real = functools.cache(os.path.realpath)
        self.root = root_of
        self.known: dict[tuple[str, str, int], str | None] = {}
        self.starts: dict[str, tuple[str, ...]] = {}

    def where(self, folder: str, name: str, level: int = 0) -> str | None:
        """Return the project's file that a dotted name means in `folder`, or None."""
        key = (folder, name, level)
        if key not in self.known:
            self.known[key] = self.search(folder, name, level)
        return self.known[key]

    def search(self, folder: str, name: str, level: int) -> str | None:
        return next(
            (path for start, parts in self.starts_of(folder, name, level) for path in self.at(start, parts)), None
        )

    def starts_of(self, folder: str, name: str, level: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the folders to search for a dotted name, nearest first, with its parts."""
        parts = [part for part in name.split(".") if part and part != "*"]
        if level:
            yield os.path.join(folder, *[".."] * (level - 1)), parts
            return
        if not parts or self.external(folder, parts[0]):
            return
        root = self.root(folder)
        more = self.added(root) if self.added is not None else ()
        bases = self.bases(folder)
        if parts[0] == os.path.basename(root):  # what the project's folder is called says nothing, as in `above`
            bases = tuple(start for start in bases if os.path.realpath(start) != os.path.dirname(root))
        yield from ((start, parts) for start in (*bases, *above(folder, parts[0], root), *more))

    def external(self, folder: str, package: str) -> bool:
        """Check whether a name is a well-known package that no local folder hides."""
        if package not in EXTERNAL:
            return False
        return package in {"torch", "numpy"} or not self.is_file(os.path.join(folder, package, "__init__.py"))

    def bases(self, folder: str) -> tuple[str, ...]:
        """Return the folders where imports can start: `folder` and its parents in the repository."""
        if folder not in self.starts:
            self.starts[folder] = self.climb(folder)
        return self.starts[folder]

    def climb(self, folder: str) -> tuple[str, ...]:
        found = [folder]
        absolute = Path(os.path.abspath(folder))
        for i, parent in enumerate([absolute, *absolute.parents][:MAX_UP]):
            if i:
                found.append(str(parent))
            found.append(str(parent / "src"))
            if any((parent / mark).exists() for mark in ROOT_MARKS):
                return tuple(found)
        return tuple(found[:4])

    def at(self, folder: str, parts: list[str]) -> Iterator[str]:
        """Yield the files of a dotted name in a folder: a module's, and a package's."""
        path = os.path.join(folder, *parts)
        candidates = (f"{path}.py", os.path.join(path, "__init__.py")) if parts else ()
        yield from (candidate for candidate in candidates if self.is_file(candidate))


def above(folder: str, name: str, root: str) -> Iterator[str]:
    """Yield the folder that holds a package which contains the importing file itself.

    `import model.layers` in model/parts/ means the folder that holds model/, however high within the project. The
    project's own folder counts where it is a package. Its name otherwise, and what lies above it, is its user's.
    """
    parents = os.path.relpath(os.path.realpath(folder), root).split(os.sep)[-MAX_UP:]
    if os.path.isfile(os.path.join(root, "__init__.py")):
        parents = [os.path.basename(root), *(part for part in parents if part != ".")]
    if name in parents:
        yield os.path.join(folder, *[".."] * (len(parents) - parents.index(name)))


@functools.cache
def _places() -> tuple[Path, ...]:
    return (Path.home(), Path(tempfile.gettempdir()).resolve(), Path("/"))


@cache_answers
def root_of(folder: str) -> str:
    """Return the root of a folder's project: the repository, or the highest marked folder.

    Without any, the highest of the next folders that hold Python files or the package.
    """
    absolute = Path(os.path.realpath(folder))
    top: Path | None = None
    for count, parent in enumerate([absolute, *absolute.parents]):
        if parent in _places() and parent != absolute:
            break
        if (parent / ".git").exists():
            return str(parent)
        if count < MAX_UP and any((parent / mark).exists() for mark in ROOT_MARKS):
            top = parent
    if top is not None:
        return str(top)
    top = absolute
    for parent in absolute.parents[:3]:
        if parent in _places() or not ((top / "__init__.py").exists() or any(parent.glob("*.py"))):
            break
        top = parent
    return str(top)


def scan(root: str) -> list[str]:
    """Return the Python files of a project, in a fixed order."""
    files: list[str] = []
    top = Path(root)
    marked = any((top / mark).exists() for mark in ROOT_MARKS)
    depth = None if marked else 0 if top in _places() else MAX_DEPTH
    for count, (folder, folders, names) in enumerate(os.walk(root)):
        deep = depth is not None and len(Path(folder).relative_to(top).parts) >= depth
        folders[:] = sorted(name for name in folders if not deep and name not in SKIPPED and not name.startswith("."))
        files += [os.path.realpath(os.path.join(folder, name)) for name in sorted(names) if name.endswith(".py")]
        if len(files) >= MAX_SCANNED or count >= MAX_FOLDERS:
            break
    return files[:MAX_SCANNED]


def stem(path: str) -> str:
    """Return the last word by which a file is imported."""
    folder, name = os.path.split(path)
    return os.path.basename(folder) if name == "__init__.py" else name.removesuffix(".py")


def contents(path: str) -> str:
    """Return the text of a file, "" if it is too long or unreadable."""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            return ""
        return Path(path).read_bytes().decode("utf-8", "ignore").replace("\r", "")
    except OSError:
        return ""


@dataclass(frozen=True)
class Lines:
    """The names that a file may import, and the folders that it adds to `sys.path`.

    A name has its number of leading dots. A folder is the texts in the call that adds it.
    """

    mentioned: tuple[tuple[str, int], ...] = ()
    added: tuple[tuple[str, ...], ...] = ()

    def places(self, path: str, root: str) -> Iterator[str]:
        """Yield the folders of a project that the file at `path` adds to `sys.path`."""
        for texts in self.added:
            start = os.path.dirname(path)
            while start.startswith(root):
                place = os.path.normpath(os.path.join(start, *texts))
                if place.startswith(root + os.sep) and os.path.isdir(place):
                    yield place
                    break
                start = os.path.dirname(start)


def lines_of(path: str) -> Lines:
    """Scan the file at `path`."""
    text = contents(path)
    words = folders_added(text) if "sys.path" in text else ()
    return Lines(tuple(find_imports(text)), tuple(dict.fromkeys(words)))


def folders_added(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the texts that each folder is made of which a file adds to `sys.path`."""
    for call in ADDS.finditer(text):
        found = tuple(word for word in TEXT.findall(call[1]) if word.strip("./ "))
        if found:
            yield found


def find_imports(text: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted names of a text's imports, each with its leading dots."""
    lines = dict.fromkeys(match.group("plain", "module", "names") for match in IMPORTS.finditer(f"\n{text}"))
    for plain, dots, names in lines:
        if plain is not None:
            yield from ((name, 0) for name in NAME.findall(plain))
            continue
        module = dots.lstrip(".")
        level = len(dots) - len(module)
        yield module, level
        for name in NAME.findall(names):
            yield (f"{module}.{name}" if module else name), level


Importers = dict[str, tuple[str, ...]]


class Graph:
    """Import graph of the files of each project, by real path.

    A project is searched when it is first asked about, its answers are its own: they depend on what lies there, not on
    which files are checked, nor on which projects were searched before.
    """

    def __init__(
        self, projects: dict[str, Importers] | None = None, added: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        self.projects = {} if projects is None else projects
        self.added = {} if added is None else added
        self.paths = Paths(self.places)
        self.files = functools.cache(scan)
        self.lines = functools.cache(lines_of)

    def importers(self, path: str) -> tuple[str, ...]:
        """Return the files that seem to import the one at the real path `path`, sorted."""
        return self.project(self.paths.root(os.path.dirname(path))).get(path, ())

    def project(self, root: str) -> Importers:
        """Map each file of one project to the files that seem to import it."""
        if root not in self.projects:
            self.projects[root] = self.search(root)
        return self.projects[root]

    def search(self, root: str) -> Importers:
        files = self.files(root)
        stems = {stem(path) for path in files}
        found: dict[str, set[str]] = {}
        for path in files:
            for target in self.imported(path, stems):
                if target != path and self.paths.root(os.path.dirname(target)) == root:
                    found.setdefault(target, set()).add(path)
        return {target: tuple(sorted(sources)) for target, sources in found.items()}

    def imported(self, path: str, stems: set[str]) -> set[str]:
        """Return the real paths of the project files that a file's import lines mean."""
        folder = os.path.dirname(path)
        named = (one for one in self.lines(path).mentioned if one[0].rpartition(".")[2] in stems)
        found = (self.paths.where(folder, name, level) for name, level in named)
        return {self.paths.real(target) for target in found if target is not None}

    def places(self, root: str) -> tuple[str, ...]:
        """Return the folders that the programs of a project add to those where Python looks."""
        if root not in self.added:
            found = (place for path in self.files(root) for place in self.lines(path).places(path, root))
            self.added[root] = tuple(dict.fromkeys(found))
        return self.added[root]

    def together(self, paths: list[str]) -> list[list[str]]:
        """Return the paths in groups that imports connect."""
        parent: dict[str, str] = {}

        def top(name: str) -> str:
            while parent.setdefault(name, name) != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        for importers in self.projects.values():
            for target, sources in importers.items():
                for source in sources:
                    parent[top(source)] = top(target)
        groups: dict[str, list[str]] = {}
        for path in paths:
            groups.setdefault(top(os.path.realpath(path)), []).append(path)
        return list(groups.values())


def draw(paths: Iterable[str]) -> Graph:
    """Return the graph, with the projects that the paths belong to searched."""
    graph = Graph()
    for root in dict.fromkeys(
        root_of(folder) for folder in dict.fromkeys(os.path.dirname(path) or "." for path in paths)
    ):
        graph.project(root)
    graph.lines.cache_clear()
    return graph


Version = tuple[int, int]
FILES = ("pyproject.toml", "setup.cfg", "environment.yml", "environment.yaml", "conda.yml", "conda.yaml", "setup.py")
LINE = re.compile(
    r"""^[\s\-"'\[]*(?:[\w.-]+::)?(?:py)?torch(?:\[[\w,\s-]*\])?\s*(?P<rules>[(]?\s*(?:[<>=!~^]=?|===?)[^#;"'\n\]]*)""",
    re.MULTILINE,
)
RULE = re.compile(r"(===?|=|>=|~=|\^|>|<=|<)\s*v?(\d+)(?:\.(\d+))?")


def oldest_torch(path: str) -> Version | None:
    """Return the lowest version of torch that a file's project allows; None without a pin."""
    folder = os.path.dirname(os.path.abspath(path))
    return _find_pin(folder, root_of(folder))


@cache_answers
def _find_pin(folder: str, root: str) -> Version | None:
    for place in (Path(folder), *Path(folder).parents):
        found = [version for text in _texts(place) for version in _versions(text)]
        if found:
            return min(found)
        if str(place) == root:
            return None
    return None


def _texts(folder: Path) -> Iterator[str]:
    """Yield the texts of a folder's requirement files."""
    paths = [folder / name for name in FILES]
    for pattern in ("requirements*.txt", "requirements/*.txt"):
        paths += sorted(folder.glob(pattern))
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        except OSError:
            continue
        if path.name == "pyproject.toml":  # one requirement a line, as in the other files
            text = text.replace(' = "', "").replace("[", "\n[").replace(',"', '\n"')
        yield text.replace(", ", ",").replace(",'", "\n'").replace(',"', '\n"')


def _versions(text: str) -> Iterator[Version]:
    """Yield the lowest torch version of each requirement. An upper bound alone counts as itself."""
    for match in LINE.finditer(text):
        rules = [(how, (int(major), int(minor or 0))) for how, major, minor in RULE.findall(match["rules"])]
        lowest = [version for how, version in rules if how not in ("<", "<=")]
        if lowest:
            yield max(lowest)
        elif rules:
            yield min(version for _, version in rules)
