"""The page about one run: what it says, what no name in a folder can do to it, how large it may be."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from folders import made, records, state
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.errors import ConfigError
from lockstep.report.charts import figures
from lockstep.report.facts import gather
from lockstep.report.page import LIMIT, page

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}\x1b[31m\u202e"


VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """The tags of a page, with their attributes; that each is closed; what the headings say."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.headings, self.words = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and re.fullmatch(r"h\d", self.open[-1]):
            self.headings.append((int(self.open[-1][1]), data))
        if "style" not in self.open:
            self.words.append(data)


def read(html):
    found = Outline()
    found.feed(html)
    found.close()
    assert not found.open
    return found


def harmless(html):
    """Nothing in the page runs, loads or leads away, and every tag is closed."""
    found = read(html)
    allowed = {"html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "figure"}
    allowed |= {"figcaption", "div", "span", "p", "b", "strong", "code", "dl", "dt", "dd", "ul", "li", "h1", "h2", "h3"}
    allowed |= {"h4", "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "details", "summary"}
    allowed |= {"svg", "desc", "path", "rect"}
    assert {tag for tag, _ in found.tags} <= allowed
    for tag, attributes in found.tags:
        assert not any(
            name.startswith("on") or name in ("src", "href", "xlink:href", "action") for name in attributes
        ), tag
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert len(html.encode()) <= LIMIT
    return found


def test_a_real_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "hunter2hunter2")
    for _ in range(2):  # stopped, and resumed
        lockstep.train(config(tmp_path, eval_freq=4, stop_at=0 if (tmp_path / "r").exists() else 6), Ragged())
    folder = tmp_path / "r"
    assert dispatch(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    found = harmless(html)
    words = " ".join(" ".join(found.words).split())
    print_ = checkpoint.fingerprint(checkpoint.path_of(folder, 12))
    assert print_ in words
    assert "Finished: 12 of 12 steps" in words
    best = json.loads((folder / "state.json").read_text())["best"]
    assert f"best evaluation loss {best['value']:.5g} after step {best['step']}" in words
    assert "SOME_API_KEY" not in words or "hunter2" not in words
    for heading in ("Curves", "Time", "Guards and losses", "Proof", "Configuration and environment"):
        assert (2, heading) in found.headings
    assert found.headings[0] == (1, "r")
    assert all(b - a <= 1 for (a, _), (b, _) in zip(found.headings, found.headings[1:], strict=False))
    drawings = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(drawings) >= 8
    assert all(each["role"] == "img" and each["aria-label"] for each in drawings)
    cells = [attributes for tag, attributes in found.tags if tag == "th"]
    assert all(each.get("scope") in ("row", "col") for each in cells)
    for name, value in (("ckpt_freq", "3"), ("log_freq", "2"), ("max_steps", "12"), ("precision", "float64")):
        assert re.search(rf">{name}</th><td class=\"mono\">{value}<", html), name
    assert "weight_decay" not in html.partition("Settings that differ")[2].partition("chosen automatically")[0]
    assert "evaluation/accuracy" in words
    assert page([gather(folder)]) == html  # the same bytes again
    assert re.search(r"<th scope=\"row\" class=\"n\">6</th><td class=\"n\">12</td>", html)  # the second start


def test_no_name_in_a_folder_runs_a_script(tmp_path):
    more = {f"{EVIL}{k}": 1.0 + k for k in range(30)} | {EVIL * 40: 2.0, f"evaluation/{EVIL}": 3.0, f"time/{EVIL}": 1.0}
    folder = made(
        tmp_path / "<b>x' onload='alert(1)",
        records(20, **more, shares=EVIL),
        state_json=state(best={"step": 3, "value": 1.0, "metric": EVIL}),
        ended_json={"status": EVIL, "step": EVIL},
        config_toml=f"task = {json.dumps(EVIL)}\n{json.dumps(EVIL)} = {json.dumps(EVIL)}\nseed = '{'x' * 10_000}'\n",
        environment_json={
            "versions": {EVIL: EVIL},
            "machine": {"memory": EVIL, EVIL: [EVIL]},
            "command": [EVIL] * 50,
            "devices": [{EVIL: EVIL}],
            "git": EVIL,
        },
        certificate_json={
            "rows": [{"combination": EVIL, "verdict": EVIL, "found": EVIL}, 3],
            "fingerprints": [],
            "steps": EVIL,
        },
        profile__1_2__verdict_json={},
        timeline_jsonl=json.dumps({"t": 5, "what": "end", "step": 0, "status": EVIL, "spent": {EVIL: 5}}) + "\n",
        logs__rank_log="",
    )
    verdict = {
        "steps": [EVIL, EVIL],
        "parts": {EVIL: 3.0, "x": "y"},
        "sentence": EVIL,
        "next": {"what": EVIL, "gain": EVIL},
    }
    (folder / "profile" / "1-2").mkdir(parents=True)
    (folder / "profile" / "1-2" / "verdict.json").write_text(json.dumps(verdict))
    (folder / "logs" / "rank-00000.log").write_text(f"2026-01-01T00:00:00 rank 0 WARNING {EVIL}\n" * 3)
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000003" / "manifest.json").write_text(EVIL)
    html = page([gather(folder)])
    found = harmless(html)
    words = "".join(found.words)
    assert "<script>alert(1)</script>" in words  # as text
    assert "\\x1b[31m\\u202e" in words
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "{{7*7}}" in words
    harmless(page([gather(folder, digits=True), gather(folder, digits=True)]))


def test_secrets_are_never_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    folder = made(
        tmp_path / "r",
        records(3),
        config_toml='wandb_project = "0123456789abcdef0123"\nhub_token = "abc"\ndataset_name = "https://me:pw@host/x"\n',
        environment_json={
            "command": ["train", "--hub-token", "hf_abcdefghijklmnopqrst"],
            "versions": {"x": "Bearer zzzz"},
        },
    )
    html = page([gather(folder)])
    for secret in ("0123456789abcdef0123", ">abc<", "me:pw", "hf_abcdefghijklmnopqrst", "zzzz"):
        assert secret not in html
    assert "***" in html


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path):
    spike = 12_340
    many = records(6000, loss=lambda step: 99.0 if step == spike else 2.0 + math.sin(step / 7) / 9)
    extra = [{"global_step": 10 * k, **{f"mine/{'n' * 150}{j}": k * 0.1 for j in range(60)}} for k in range(300)]
    folder = made(tmp_path / "r", [*many, *extra], state_json=state(60_000))
    html = page([gather(folder)])
    harmless(html)
    assert '<th scope="row" class="n">12,340</th><td class="n">99</td>' in html
    assert "60,000" in html
    facts = gather(folder)
    assert len(facts.records.curves) <= 200
    top = re.search(r'aria-label="Loss">.*?</svg>', html, re.DOTALL)[0]
    area = re.search(r'class="area s0" d="M([^"]*)"', top)[1]
    heights = [int(point.split()[1]) for point in area.removesuffix("Z").split("L")]
    assert min(heights) <= 20  # the envelope reaches to the top
    assert sorted(heights)[5] > 500  # and nothing else does


def test_several_evil_runs_still_fit(tmp_path):
    folders = [
        made(
            tmp_path / f"run{k}",
            records(600, **{f"mine/{'é' * 90}{j}": float(j) for j in range(40)}),
            config_toml="".join(f"odd_{j} = '{k}{'<&>' * 60}'\n" for j in range(200)),
        )
        for k in range(8)
    ]
    harmless(page([gather(folder, digits=True) for folder in folders]))


def test_what_is_not_finite_is_said_and_not_drawn(tmp_path):
    losses = {30: math.nan, 40: math.inf, 50: -math.inf, 60: 1e308, 70: -1e308}
    given = [
        {
            **each,
            "running_loss": str(value) if not math.isfinite(value := losses.get(each["global_step"], 2.0)) else value,
        }
        for each in records(20)
    ]
    html = page([gather(made(tmp_path / "r", given))])
    harmless(html)
    assert "3 non-finite values are not drawn" in html
    assert "records with a non-finite loss: 3" in html
    assert "nan" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL).lower().replace("finance", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("config.toml", "x = ["),
        ("environment.json", "\x00"),
        ("ended.json", "nothing"),
        ("metrics.jsonl", '{"global_step": 1}\nhalf a li'),
        ("metrics.jsonl", '{"global_step": "x", "lr": 1}\n{"global_step": true}\n[1]\n'),
    ],
)
def test_a_half_damaged_run_has_a_report_that_says_so(tmp_path, name, content):
    folder = made(tmp_path / "r", records(5), state_json=state())
    (folder / name).write_text(content)
    html = page([gather(folder)])
    harmless(html)
    assert "Missing or damaged files" in html
    assert re.search(rf"{name} (is damaged|cannot be read)|lines? of {name} could not be read", html)


def test_odd_things_in_the_place_of_files(tmp_path):
    folder = made(tmp_path / "r", records(5))
    for name in ("state.json", "config.toml", "timeline.jsonl", "logs"):
        (folder / name).unlink(missing_ok=True)
    (folder / "state.json").mkdir()
    (folder / "logs").write_text("")
    (folder / "checkpoints").write_text("")
    (folder / "config.toml").symlink_to(folder / "config.toml")
    harmless(page([gather(folder)]))


def test_foreign_folders_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    made(tmp_path / "r", records(5))
    for argv, line in (
        ([str(tmp_path / "empty")], "is not a run's folder: it has none of config.toml"),
        ([str(tmp_path / "file")], "is not a folder; give a run's"),
        ([str(tmp_path / "r"), str(tmp_path / "r")], "--output FILE"),
        ([str(tmp_path / "r"), "-o", str(tmp_path / "no" / "page.html")], "--output .*page.html: No such file"),
        ([*[str(tmp_path / "r")] * 9, "-o", str(tmp_path / "p.html")], "9 runs exceed the limit"),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            dispatch(["report", *argv])
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "r"]


def test_a_run_without_a_single_record(tmp_path):
    html = page([gather(made(tmp_path / "r"))])
    harmless(html)
    assert "There are no records to draw" in html
    assert "No end recorded" in html


def test_troubles_and_profiles_are_told(tmp_path):
    folder = made(
        tmp_path / "r",
        records(5, steps_left_out=3, skipped_steps=2, **{"loading/retries": 7}),
        state_json=state(restarts=1, losses=2),
    )
    (folder / "logs").mkdir()
    line = "2026-01-01T00:00:00.000+00:00 rank 0 WARNING step 7: the gradient's norm 9 is above 3, "
    line += "three times the usual or more"
    other = "2026-01-02T00:00:00.000+00:00 rank 0 WARNING another\n"
    (folder / "logs" / "rank-00000.log").write_text(other * 20 + f"{line}; and so on\n".replace("01-01", "01-03") * 30)
    (folder / "profile" / "3-5").mkdir(parents=True)
    parts = {"compute": 60.0, "hidden_communication": 9.0, "data": 40.0}
    verdict = {
        "steps": [3, 5],
        "step_ms": 100.0,
        "parts": parts,
        "sentence": "It waits for data.",
        "next": {"what": "--data.workers 4", "gain": 1.31},
    }
    (folder / "profile" / "3-5" / "verdict.json").write_text(json.dumps(verdict))
    html = page([gather(folder)])
    words = " ".join(" ".join(harmless(html).words).split())
    assert "It waits for data. Problems: updates not applied, in the last start: 2; steps skipped" in words
    assert "gradient norm spikes, by the logs: 30" in words
    assert "The last 12 of 50 warnings and errors in the logs" in words
    assert (words.count("three times the usual or more"), words.count("another")) == (1, 11)
    assert "Next: --data.workers 4 (predicted: 1.31 times as fast)." in words
    assert "60.00 ms 60.0%" in words


def test_tasks_numbers_have_a_curve_each_and_blocks_one(tmp_path):
    more = {"train/kl": 0.5, "gradients/head": 1.0, "gradients/blocks.0": 2.0}
    evaluation = {"global_step": 50, "evaluation/loss": 1.0, "evaluation/items": 4, "evaluation/kl": 0.25}
    folder = made(tmp_path / "r", [*records(5, **more), evaluation], state_json=state())
    drawn = {figure.title: [label for label, _ in figure.legend] for figure in figures([gather(folder)], points=24)}
    assert drawn["kl"] == ["training", "evaluation"]
    assert drawn["Gradient norms by block"] == ["head", "blocks.0"]
    assert "evaluation/kl" not in drawn


@pytest.mark.parametrize(("degree", "words"), [(1, "2"), (2, "2 in replicas of 2"), (EVIL, "2")])
def test_ranks_are_shown_with_the_size_of_their_replicas(tmp_path, degree, words):
    config_toml = f"[parallel]\ntensor = {json.dumps(degree)}\n"
    folder = made(tmp_path / "r", records(3), state_json=state(), config_toml=config_toml)
    found = read(page([gather(folder)])).words
    assert found[[word.strip() for word in found].index("ranks") + 1 :][:2].count(words) == 1
