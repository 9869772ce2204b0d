"""The site has every page once, its reference every name, option, command and error, its messages the code's words."""

import ast
import html
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep import cli, errors
from lockstep.config.cli import option_list
from lockstep.config.schema import flag

ROOT = Path(__file__).parents[1]
SECTIONS = {"Start", "Tutorials", "How-to", "Gallery", "Troubleshooting"}  # for those who train
# All pages of docs/ but these are for users. The pages of the reference that are generated are not in docs/.
DEVELOPERS = ("docs/adr/", "docs/inside/", "docs/architecture.md", "docs/benchmarks.md")
WORDS = 28_000  # of all users' pages together, with their tables, programs and output


@pytest.fixture(scope="module")
def site():
    """The modules `build_site` and `reference` of docs/site."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import build_site
        import reference

        yield build_site, reference
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))


@pytest.fixture(scope="module")
def pages(site):
    return site[1].pages()


def test_every_page_is_in_the_navigation_once(site, pages):
    shown = site[0].pages_of(site[0].read_navigation())
    assert len(shown) == len(set(shown))
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    linter = (ROOT / "packages/lint/docs", ROOT / "packages/lint/src/lockstep_lint/pages")
    rules = {str(path.relative_to(ROOT)) for folder in linter for path in folder.rglob("*.md")}
    assert set(shown) == written | rules | set(pages) | {"CONTRIBUTING.md", "CHANGELOG.md"}


@pytest.fixture(scope="module")
def for_users():
    """The users' pages: path -> text."""
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "docs").rglob("*.md")}
    return {page: path.read_text(encoding="utf-8") for page, path in paths.items() if not page.startswith(DEVELOPERS)}


def count_words(text):
    """Count what has a letter or a digit: the bars of a table and the operators of a program are no words."""
    return len(re.findall(r"\S*\w\S*", text))


def read_prose(text):
    """Yield ("paragraph" or "cell", text) of a page, without its programs; an item of a list is a paragraph."""
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\n( {4}(?! *[-*\d]).*\n+)+", "\n", text, flags=re.MULTILINE)  # an indented program
    text = re.sub(r"^(#+ .*|<!--.*-->)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?= *(?:[-*]|\d+\.) )", "\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        for line in re.findall(r"^ *\|.*", block, re.MULTILINE):
            yield from (("cell", cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])
        yield "paragraph", re.sub(r"^ *\|.*", "", block, flags=re.MULTILINE).strip()


def test_a_users_page_is_short(for_users):
    words = {page: count_words(text) for page, text in for_users.items()}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda item: item[1])
    long = [
        (page, text)
        for page in for_users
        for kind, text in read_prose(for_users[page])
        if kind == "paragraph" and len(text.split()) > 90
    ]
    assert long == []


def test_the_sections_for_those_who_train_are_short(site, for_users):
    """By `wc -w`, which counts the bars of tables too."""
    navigation = site[0].read_navigation()
    listed = [page for section in navigation["section"] if section["title"] in SECTIONS for page in section["pages"]]
    listed += [page for parent in listed for page in navigation["under"].get(parent, [])]
    assert 0 < sum(len(for_users[page].split()) for page in listed) <= WORDS


def test_a_cell_of_a_table_is_short():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    long = [
        (page.name, text)
        for page in pages
        for kind, text in read_prose(page.read_text(encoding="utf-8"))
        if kind == "cell" and len(text.split()) > 30
    ]
    assert long == []


def test_words_are_counted_in_tables_and_programs():
    assert count_words("# A b\n\n| c | `d` |\n|---|---|\n\n```python\ne = f(1) + 2\n```\n") == 8


def test_long_prose_is_found():
    text = "# One\n\na b\nc\n- d\n  e\n- f\n\n```sh\ng h\n```\ni\n\n    j k\n\n"
    text += "| l | `m \\| n` |\n|---|---|\n| o p | |\n"
    found = list(read_prose(text))
    assert [text.split() for kind, text in found if kind == "paragraph" and text] == [
        ["a", "b", "c"],
        ["-", "d", "e"],
        ["-", "f"],
        ["i"],
    ]
    assert [text for kind, text in found if kind == "cell" and text.strip("-")] == ["l", "`m \\| n`", "o p"]


def test_the_reference_has_every_public_name(site, pages):
    text = pages["reference/python.md"]
    described = re.findall(r"^:+\{py:(?:class|function)\} lockstep\.(\w+)\(", text, re.MULTILINE)
    assert sorted(described) == lockstep.__all__
    assert [name for name in lockstep.__all__ if not inspect.getdoc(getattr(lockstep, name))] == []
    for kind in (lockstep.Task, lockstep.Run):
        own = text.partition(f"}} lockstep.{kind.__name__}(")[2].partition("\n::::\n")[0]
        for name, value in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert re.search(rf"^:::\{{py:\w+\}} {name}\b", own, re.MULTILINE), (kind, name)
    assert "0x" not in text  # the address of an object in a signature


def test_the_reference_has_every_option_with_its_default(pages):
    text = pages["reference/options.md"]
    blocks = dict(re.findall(r"^:::\{option\} (\S+).*\n(.*\n\n.*)\n:::$", text, re.MULTILINE))
    assert sorted(blocks) == sorted(flag(name) for name in option_list())
    assert "default `3`" in blocks["--checkpoint.keep"]
    assert "default `auto`" in blocks["--lr"]
    assert "`images` `64`" in blocks["--batch-size"]


def test_the_reference_has_every_command_and_action(pages):
    text = pages["reference/commands.md"]
    titles = re.findall(r"^##+ lockstep (.*)\n\n(?:.*\n\n)?```text\n(.*)", text, re.MULTILINE)
    assert [title for title, _ in titles if " " not in title] == list(cli.COMMANDS)
    assert {title for title, _ in titles if title.startswith("checkpoint ")} == {
        f"checkpoint {action}" for action in ("list", "inspect", "verify", "prune", "import")
    }
    assert [title for title, usage in titles if not usage.startswith(f"usage: lockstep {title}")] == []


def test_the_reference_has_every_error_with_its_code(pages):
    for name in errors.__all__:
        value = getattr(errors, name)
        if inspect.isclass(value):
            assert f"| `{name}` | {value.exit_code} | " in pages["reference/errors.md"]


INTERNAL = {
    "RankLost": "the other ranks catch it and go on; the launcher reports the loss",
}


def test_each_message_in_troubleshooting_is_one_of_the_code():
    """A heading is what stays the same of a message; each class of errors has an entry, or never reaches a user."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) >= 40
    found, explained = messages(), set()
    for heading in headings:
        assert re.fullmatch(r"`[^`]+`", heading), "nothing but the message, as code"
        parts = [part.strip() for part in heading.strip("`").split("…")]
        assert len("".join(parts)) >= 11, f"{heading}: too short to find it in a line"
        renamed = [word for word in heading.split() if word in errors.SETTINGS.fields]
        assert renamed == [], f"{heading}: a configuration made in Python names the field"
        where = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        kinds = [kind for message, kind in found if where.search(message)]
        assert kinds, f"{heading}: no message of the code has it"
        explained |= set(kinds)
    kinds = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    assert kinds - explained == INTERNAL.keys()


def messages():
    """Each string of the source, with … for a value in it, and the class of errors that is made with it, or ""."""
    kinds = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    found = []

    def visit(node, kind):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            kind = node.func.id
        if isinstance(node, ast.JoinedStr):
            found.append(("".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values), kind))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((re.sub(r"%[\w.]*[sdgf]", "…", node.value), kind))  # of the log
        for each in ast.iter_child_nodes(node):
            visit(each, kind)

    for path in (ROOT / "src" / "lockstep").rglob("*.py"):
        visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_the_search_of_messages_uses_what_sphinx_has():
    """`search.js` extends functions of Sphinx that are no interface."""
    sphinx = pytest.importorskip("sphinx")
    theirs = Path(sphinx.__file__).parent.joinpath("themes/basic/static/searchtools.js").read_text(encoding="utf-8")
    ours = (ROOT / "docs" / "site" / "search.js").read_text(encoding="utf-8")
    assert {"_performSearch", "_index"} <= (names := set(re.findall(r"Search\.(\w+)", ours)))
    assert [name for name in names if f"  {name}:" not in theirs] == []
    fields = {"alltitles", "docnames", "filenames", "titles", "terms"}
    assert {name for name in fields if f"Search._index.{name}" in theirs and name in ours} == fields
    assert "[docName, title, anchor, descr, score, _filename, kind] = item" in theirs


def read_lines(svg):
    """The lines of a terminal that a picture shows, from the top."""
    lines = {}
    for text, row in re.findall(r'<text [^>]*clip-path="url\(#t-line-(\d+)\)">([^<]*)</text>', svg):
        lines[int(text)] = lines.get(int(text), "") + html.unescape(row).replace("\xa0", " ").rstrip("\n")
    return [lines[row].rstrip() for row in sorted(lines)]


def test_the_terminal_shows_what_readme_shows():
    """`tests/test_docs.py` runs the commands of README."""
    svg = (ROOT / "docs" / "terminal.svg").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands, printed = re.findall(r"^```(?:sh|)\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)[:2]
    lines = read_lines(svg)
    assert [line[2:] for line in lines if line.startswith("$ ")] == commands.splitlines()
    assert " ".join(printed.split()) in " ".join(" ".join(lines).split())
    assert len(svg) < 60_000
    assert "<script" not in svg


def test_a_terminal_is_complete_without_its_animation(site):
    import pictures

    svg = pictures.draw([("a b", [(0.5, "c"), (90.0, "d < e")])])
    assert read_lines(svg) == ["$ a b", "c", "d < e"]
    still, _, moving = svg.partition("@media screen and (prefers-reduced-motion: no-preference)")
    assert "animation:" not in still
    hidden = [float(seconds) for seconds in re.findall(r"hide ([\d.]+)s", moving)]
    assert hidden == sorted(hidden)
    assert len(hidden) == 3
    assert hidden[-1] - hidden[-2] == pytest.approx(pictures.PAUSE)


def test_a_command_is_recorded_line_by_line(site, tmp_path):
    import pictures

    lines = pictures.run("echo one; echo $PWD/two >&2; false", tmp_path)
    assert [line for _, line in lines] == ["one", "two"]


def test_the_first_page_has_programs_and_what_they_print(site):
    home = site[0].home(site[0].read_navigation())
    assert "class Classes(lockstep.Task):" in home
    assert "DIFFERENT from step 1" in home
    for picture in ("docs/terminal.svg", "docs/report.png"):
        assert f"]({picture})" in home
        assert (ROOT / picture).stat().st_size < 150_000
    for page in ("docs/coming-from.md", "docs/status.md"):
        assert f"]({page})" in home


def test_the_gallery_shows_what_its_commands_print_and_write(site, tmp_path):
    import gallery

    shown = gallery.render(
        '```sh\necho "<p>$((6 * 7))</p>" | tee a.html\nls\n```\n\n<!-- page: a.html: one -->\n', tmp_path / "g"
    )
    assert "```text\n<p>42</p>\na.html\nddp.py\nspirals.py\n```" in shown
    assert '<a href="g/a.html">one</a>' in shown
    assert (tmp_path / "g" / "a.html").read_text() == "<p>42</p>\n"
    with pytest.raises(subprocess.CalledProcessError):
        gallery.render("```sh\nfalse\n```\n", tmp_path / "g")
