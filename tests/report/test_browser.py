"""The page in a real browser: it fits three widths, is light and dark, and asks nothing of any network.

Chromium (Debian's package) is looked for on the PATH. CI installs it and sets LOCKSTEP_CHROMIUM, so that these do not
skip there.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from folders import made, records, state
from PIL import Image
from test_page import EVIL

from lockstep.report.facts import gather
from lockstep.report.page import page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None and "LOCKSTEP_CHROMIUM" not in os.environ, reason="chromium is not installed (apt install chromium)"
)
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
QUIET += ("--disable-sync", "--no-first-run", "--disable-default-apps", "--disable-dev-shm-usage", "--hide-scrollbars")
QUIET += ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",)  # what the browser itself wants stays here
WIDTHS = (360, 800, 1400)
# What each width is: of the page, and of what reaches furthest to the right without a scroller of its own.
MEASURE = """<body><pre id="found"></pre><script>
const found = [];
const widths = WIDTHS;
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = "page.html";
  frame.onload = () => {
    const page = frame.contentDocument, own = frame.contentWindow;
    page.querySelectorAll("details").forEach((each) => { each.open = true; });
    const scrolls = (node) => node && (own.getComputedStyle(node).overflowX === "auto" || scrolls(node.parentElement));
    const all = [...page.querySelectorAll("body *")];
    const far = all.filter((node) => !scrolls(node.parentElement) && !node.closest("svg"));
    found.push({ width, inner: own.innerWidth, scroll: page.documentElement.scrollWidth, hacked: own.hacked === 1,
      right: Math.max(...far.map((node) => node.getBoundingClientRect().right)),
      font: Math.min(...[...page.querySelectorAll("td, p, span, li, dd, dt, summary")].map((node) =>
        parseFloat(own.getComputedStyle(node).fontSize))), charts: page.querySelectorAll("svg[role=img]").length });
    if (found.length === widths.length) document.getElementById("found").textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script>"""


def browse(folder, name, *flags):
    """What Chromium prints for a file of `folder`, with a profile of its own."""
    assert BROWSER, "LOCKSTEP_CHROMIUM is set and there is no chromium on the PATH"
    profile = folder / f"profile-{len(list(folder.iterdir()))}"
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *flags, f"file://{folder / name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def asked(log):
    """The addresses that a page asked for, by a net log; what the browser wants for itself has no page behind it."""
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    pages = [each for each in events if "url" in each and each.get("initiator", "not an origin") != "not an origin"]
    return {each["url"] for each in pages if not each["url"].startswith(("file:", "data:", "about:", "chrome:"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page with long names, long words and many numbers in it."""
    scratch = tmp_path_factory.mktemp("browser")
    more = {"a_metric_with_a_name_of_some_length/" + "x" * 70: 1.5, f"<script>hacked = 1</script>{EVIL}": 2.0}
    run = made(
        scratch / "a-run",
        records(400, **more),
        state_json=state(4000, restarts=3, best={"step": 3990, "value": 3.00125, "metric": "loss"}),
        ended_json={"status": "finished", "step": 4000},
        config_toml=f"lr = 0.02\ntask = '{'/a/long/path' * 20}'\nnot_known = '{'y' * 400}'\n",
        environment_json={"versions": {"torch": "2.13"}, "command": ["train", "--x", "z" * 300]},
        certificate_json={
            "rows": [{"combination": "ddp at 4", "verdict": "same", "found": "w" * 300}],
            "fingerprints": [],
        },
    )
    lines = [{"t": 1010.0, "what": "start", "step": 0, "world": 4, "spent": {"start": 10.0}}]
    for k in range(1, 12):
        parts = ("training", "loading", "saves", "evaluation", "body", "recovery")
        lines.append({"t": 1010.0 + 60 * k, "what": "at", "step": 40 * k, "spent": dict.fromkeys(parts, 10.0)})
    (run / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "logs").mkdir()
    (run / "logs" / "rank-00000.log").write_text(f"2026-01-01T00:00:00.000+00:00 rank 0 WARNING {'/long/path' * 40}\n")
    (scratch / "page.html").write_text(page([gather(run)]))
    (scratch / "measure.html").write_text(MEASURE.replace("WIDTHS", str(list(WIDTHS))))
    return scratch


def test_nothing_overflows_at_three_widths_and_no_request_leaves(folder):
    log = folder / "net.json"
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=8000", f"--log-net-log={log}", "--dump-dom")
    said = browse(folder, "measure.html", *flags)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', said, re.DOTALL)[1])
    assert sorted(each["width"] for each in found) == list(WIDTHS)
    for each in found:
        assert each["inner"] == each["width"]
        assert each["scroll"] <= each["inner"], each
        assert each["right"] <= each["inner"] + 0.5, each
        assert each["font"] >= 11
        assert each["charts"] >= 7
        assert not each["hacked"]
    assert asked(log) == set()


def test_the_checks_above_would_see_a_request_and_an_overflow(folder):
    wide = '<p style="width:2000px">wide</p><img src="http://127.0.0.1:9/away.png">'
    (folder / "bad").mkdir()
    (folder / "bad" / "page.html").write_text(f"<!doctype html><body>{wide}</body>")
    (folder / "bad" / "measure.html").write_text((folder / "measure.html").read_text())
    log = folder / "bad-net.json"
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=8000", f"--log-net-log={log}", "--dump-dom")
    said = browse(folder, "bad/measure.html", *flags)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', said, re.DOTALL)[1])
    assert all(each["scroll"] > each["inner"] for each in found)
    assert asked(log) == {"http://127.0.0.1:9/away.png"}


@pytest.mark.parametrize(("scheme", "flags"), [("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))])
def test_it_is_light_and_dark(folder, scheme, flags):
    browse(folder, "page.html", f"--screenshot={folder / f'{scheme}.png'}", "--window-size=800,1200", *flags)
    with Image.open(folder / f"{scheme}.png") as image:
        assert image.size == (800, 1200)
        colours = image.convert("RGB").getcolors(1 << 24)
        corner = image.convert("L").getpixel((2, 2))
        lightness = sorted(image.convert("L").tobytes())
    assert len(colours) > 50  # it is drawn
    assert (corner > 200) == (scheme == "light")
    text = lightness[20] if scheme == "light" else lightness[-20]
    assert abs(text - corner) > 150  # text stands out
