"""Record the pictures of README.md and the site's first page from real runs.

python docs/site/pictures.py         # writes docs/terminal.svg and docs/report.png; needs Chromium

The terminal runs the first commands of README.md. Its SVG shows all lines at first, on paper, and to readers who asked
for less motion. Else CSS hides them after a moment, and shows each line again at its time.
"""

import io
import os
import pty
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import gallery  # beside this file
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
TRAINING = "lockstep train --experiment-name first-light --max-steps 700"  # `make train`, some minutes
COLUMNS = 76
PAUSE = 0.6  # seconds: the longest wait that is shown, as `asciinema --idle-time-limit`
TYPING = 0.03  # seconds a character of a command
START = 2.0  # seconds until the animation starts
REPORT = (1000, 925)  # pixels of report.png: its verdict and the first curves

SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
{styles}
@keyframes hide {{ from, to {{ opacity: 0 }} }}
@keyframes type {{ from {{ clip-path: inset(0 100% 0 0) }} }}
@media screen and (prefers-reduced-motion: no-preference) {{
ANIMATION}}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: str, folder: Path) -> list[tuple[float, str]]:
    """Run a command in a terminal.

    Returns:
        Each line that it printed, with its second from the start.
    """
    terminal, inside = pty.openpty()
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**gallery.environment(), "COLUMNS": str(COLUMNS)},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    lines = []
    with open(terminal, newline="\r\n", encoding="utf-8") as output:
        try:
            for line in output:
                lines.append((time.monotonic() - start, line.rstrip().replace(f"{folder}/", "")))
        except OSError:  # Linux reports the end of a terminal as an error
            pass
    process.wait()
    return lines


def draw(commands: list[tuple[str, list[tuple[float, str]]]]) -> str:
    """Draw commands and what they printed as an SVG.

    Args:
        commands: Each command, with the lines of `run`.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    rules: list[str] = []
    now = 0.5

    def show(text: Text, animation: str = "") -> None:
        for line in text.wrap(console, COLUMNS):
            console.print(line, end="\n", no_wrap=True)
            row = f'[clip-path$="-line-{len(rules)})"]'
            rules.append(f"{row} {{ animation: hide {now:.2f}s {START}s{animation} }}\n")

    for command, lines in commands:
        typing = TYPING * len(command)
        prompt = Text.assemble(("$ ", "green"), (command, "bold"))
        show(prompt, f", type {typing:.2f}s {START + now:.2f}s steps({len(command)})")
        now += typing
        before = 0.0
        for second, line in lines:
            now += min(second - before, PAUSE)
            before = second
            show(Text.from_ansi(line))
        now += PAUSE
    return console.export_svg(title="", code_format=SVG, unique_id="t").replace("ANIMATION", "".join(rules))


def photograph(page: Path, target: Path) -> None:
    """Write a picture of the top of a page."""
    browser = shutil.which("chromium") or "google-chrome"
    size = ",".join(map(str, REPORT))
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}", f"--screenshot={target}"]
    subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Run the programs, and write both pictures."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.search(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[1].splitlines()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        gallery.write_programs(folder)
        shown = [(command, run(command, folder)) for command in commands]
        (ROOT / "docs" / "terminal.svg").write_text(draw(shown), encoding="utf-8")
        run(TRAINING, folder)
        photograph(folder / "outputs" / "first-light" / "report.html", ROOT / "docs" / "report.png")


if __name__ == "__main__":
    main()
