"""The generated pages are those of the rules as they are."""

from pathlib import Path

from lockstep_lint.docs import main, pages

FOLDER = Path(__file__).parents[1] / "docs" / "rules"


def test_the_pages_are_up_to_date():
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run: python -m lockstep_lint.docs"


def test_the_generator_writes_them(tmp_path):
    main([str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pages())


def test_the_usage_page_lists_every_rule():
    text = (FOLDER.parent / "lint.md").read_text(encoding="utf-8")
    assert all(name.removesuffix(".md") in text for name in pages() if name != "README.md")
