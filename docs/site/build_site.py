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
        for link in re.findall(r"\]\(([^)#:\s]+)", text):
            _copy_linked((ROOT / page).parent / link, target)
    write(target / "index.md", home(navigation, generated))


def _copy_linked(path: Path, target: Path) -> None:
    """Copy a file that is no page: a picture, an example."""
    path = path.resolve()
    if path.is_file() and path.suffix != ".md":
        (target / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(ROOT))


def home(navigation: dict, generated: dict[str, str]) -> str:
    """Write the first page: what it is, and the pages of each section."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    intro = readme.split("\n\n")[1:3]  # the claim, and the paragraph below it
    parts = ["# lockstep", *intro]
    for section in navigation["section"]:
        parts.append(f"## {section['title']}\n\n{section['about']}")
        lines = []
        for page in section["pages"]:
            text = generated.get(page) or (ROOT / page).read_text(encoding="utf-8")
            lines.append(f"- [{title_of(text)}]({page})")
        parts.append("\n".join(lines))
    trees = [toctree(section["pages"], hidden=True, caption=section["title"]) for section in navigation["section"]]
    return "\n\n".join(parts) + "".join(trees)


def title_of(text: str) -> str:
    """Return a page's first heading."""
    return re.search(r"^# (.*)$", text, re.MULTILINE)[1]


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
