"""Build the site from docs/ and the code, without a network.

python docs/site/build_site.py       # writes build/site/html; a warning fails, and so does a dead link or anchor

The pages are copied to build/site/source at their places in the repository, so that their links work unchanged. There
`reference.py` adds the pages that are written from the code, and this file the first page and the navigation.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import gallery  # noqa: E402 - beside this file, which need not be on the path
import reference  # noqa: E402 - beside this file

LIMIT = 500_000  # bytes of a page
REPORT = """\
## What a run leaves

Checkpoints, records and a page about the run, [report.html](docs/report.md):

![The top of a report: how the run ended, and its curves](docs/report.png)

"""


def read_navigation() -> dict:
    """Return navigation.toml, with its patterns replaced by the pages."""
    found = tomllib.loads((HERE / "navigation.toml").read_text(encoding="utf-8"))
    listed = {page for section in found["section"] for page in section["pages"]} | set(found["under"])
    for parent, patterns in found["under"].items():
        paths = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        found["under"][parent] = [path for path in paths if path not in listed or path in patterns]
    return found


def pages_of(navigation: dict) -> list[str]:
    """List every page of the navigation, in its order."""
    listed = [page for section in navigation["section"] for page in section["pages"]]
    return listed + [page for under in navigation["under"].values() for page in under]


def stage(target: Path, html: Path) -> None:
    """Copy all pages, and the files that they show or link to, to `target`; write the generated ones.

    The pages that the gallery's commands write come to `html`, beside the gallery.
    """
    navigation = read_navigation()
    generated = reference.pages()
    for page in pages_of(navigation):
        text = generated.get(page) or (ROOT / page).read_text(encoding="utf-8")
        if page == "docs/gallery.md":
            text = gallery.render(text, html / "docs" / "gallery")
        if under := navigation["under"].get(page):
            text += toctree(under, hidden=True)
        write(target / page, text)
        _copy_linked(text, (ROOT / page).parent, target)
    text = home(navigation)
    _copy_linked(text, ROOT, target)
    write(target / "index.md", text)


def _copy_linked(text: str, folder: Path, target: Path) -> None:
    """Copy the files that a page of `folder` links to and that are no pages: pictures, examples."""
    for link in re.findall(r"\]\(([^)#:\s]+)", text):
        path = (folder / link).resolve()
        if path.is_file() and path.suffix != ".md":
            (target / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / path.relative_to(ROOT))


def home(navigation: dict) -> str:
    """Write the first page: README.md without what GitHub shows elsewhere, and the picture of a report."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    programs, rest = readme.split("## Install\n", 1)
    begin = rest[rest.index("## Where to begin\n") : rest.index("## Compared with")]
    trees = [toctree(section["pages"], hidden=True, caption=section["title"]) for section in navigation["section"]]
    return programs + REPORT + begin + "".join(trees)


def toctree(pages: list[str], *, hidden: bool, caption: str = "") -> str:
    """Write a table of contents as Sphinx reads it."""
    head = ["```{toctree}", *[":hidden:"] * hidden, *[f":caption: {caption}"] * bool(caption)]
    return "\n".join(["\n", *head, "", *(f"/{page}" for page in pages), "```", ""])


def write(path: Path, text: str) -> None:
    """Write a page, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(target: Path) -> int:
    """Build the site in `target`, and return the exit code."""
    source, html = target / "source", target / "html"
    for folder in (source, html):
        shutil.rmtree(folder, ignore_errors=True)
    stage(source, html)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-j", "2"]
    code = subprocess.run([*command, "-c", HERE, "-d", target / "cache", source, html], check=False).returncode
    large = [path for path in html.rglob("*.html") if path.stat().st_size > LIMIT]
    for path in large:
        print(f"{path}: {path.stat().st_size:,} bytes, more than {LIMIT:,}; split the page")
    print(f"{html / 'index.html'}")
    return code or int(bool(large))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "site"))
