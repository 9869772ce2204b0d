"""Masking, and what environment.json keeps of a machine."""

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import secrets
from lockstep.config.secrets import environment_snapshot, is_secret_name, mask, mask_args, printable
from lockstep.training.state import run_dir

PLANTED = "Zq7-planted_Value/9"
HEX = "0123456789abcdef0123456789abcdef01234567"

UNQUOTED = st.text("abcXYZ019_-./+=:,;!~%&?#$(){}[]", min_size=8, max_size=40)
URL_SAFE = st.text("abcXYZ019_-.~%", min_size=8, max_size=40)
ANYTHING = st.text(st.characters(codec="utf-8", exclude_characters="\0*"), min_size=8, max_size=40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clone https://me:hunter2@host/x", "clone https://***@host/x"),
        ("clone https://ghtoken@host/x", "clone https://***@host/x"),
        ("redis://:pa/ss@host", "redis://***@host"),
        ("GET /x?token=abc&page=2", "GET /x?token=***&page=2"),
        ("https://h/x?page=2&api_key=abc#top", "https://h/x?page=2&api_key=***#top"),
        ("train --token abc --lr 1", "train --token *** --lr 1"),
        ("train --api-key=abc --lr 1", "train --api-key=*** --lr 1"),
        ("['--hub.token', 'abc d', '--lr']", "['--hub.token', ***, '--lr']"),
        ("WANDB_API_KEY=abc make", "WANDB_API_KEY=*** make"),
        ('{"password": "a \\" b", "lr": 1}', '{"password": ***, "lr": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("sent bearer abc.def now", "sent bearer *** now"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        (f"the key is {HEX}", "the key is ***"),
        ("hf_abcdefghijklmnopqrst", "***"),
        ("x=ghp_abcdefghijklmnopqrst.", "x=***."),
        ("github_pat_11ABCDEFG_abcdefghijklmnop", "***"),
        ("sk-proj-abcdefghijklmnop1234", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("xoxb-123456789012-abcdef", "***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "***"),
    ],
)
def test_a_secret_is_hidden_and_what_surrounds_it_stays(text, expected):
    assert mask(text, {}) == expected
    assert mask(mask(text, {}), {}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 10/100  loss 2.5000  lr 3.00e-04  12.3k tokens/s",
        "no such file: outputs/first/config.toml; give --config a file that exists",
        "--tokenizer train:4096 --data.max-tokens 512",
        "unknown key: learning_rate; did you mean lr?",
        "model.pad_token=0 tokens: 12, vocab_tokens=4096",
        f"fingerprint sha256:{HEX}{HEX[:24]}",
        "tcp://localhost:29500 and git@host.org:me/repo.git and https://host/org/repo@main",
        "task-abcdefghijklmnopqrstuvw, hf_transfer",
    ],
)
def test_what_is_no_secret_stays(text):
    assert mask(text, {}) == text


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "DB_PASS", "db_pwd", "--hub-token", "HTTP_AUTH", "SECRETS"]
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "PATH", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "max-tokens"])
def test_names_of_other_things(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "around", ["--token {}", "--api-key={} x", "HUB_TOKEN={}", "password: {}", "a\n--password {}\nb", "Bearer {}"]
)
@given(secret=UNQUOTED)
@settings(max_examples=30, deadline=None)
def test_a_value_that_is_named_a_secret_never_leaks(around, secret):
    assert secret not in mask(around.format(secret), {})


@pytest.mark.parametrize(
    "around", ["https://u:{}@host/x", "https://{}@host", "https://h/?token={}", "https://h/?a=1&api_key={}&b=2"]
)
@given(secret=URL_SAFE)
@settings(max_examples=30, deadline=None)
def test_a_secret_in_a_url_never_leaks(around, secret):
    assert secret not in mask(around.format(secret), {})


PIECES = (
    *(
        "key",
        "Api_Key",
        "to\u212aen",
        "token",
        "SECRET",
        "\u017fecret",
        "passwd",
        "Password",
        "pass",
        "passphrase",
        "_pwd",
        "pwd",
    ),
    *(
        "credential",
        "credent\u0131als",
        "authorization",
        "auth",
        "signature",
        "s\u0131g",
        "sig",
        "cookie",
        "code",
        "login",
    ),
    *(
        "Bearer",
        "://",
        "u:p@h",
        "?",
        "&",
        ";",
        "=",
        ":",
        " ",
        "-",
        "--",
        "_",
        ".",
        '"',
        "is",
        HEX,
        "abc",
        "1",
        "x" * 30,
    ),
    *(
        "hf_",
        "ghp_",
        "github_pat_",
        "glpat-",
        "sk-",
        "npm_",
        "pypi-",
        "AKIA",
        "ASIA",
        "A\u212aIA",
        "xoxb-",
        "AIza",
        "eyJ",
    ),
    *("-----BEGIN PRIVATE KEY-----", "-----end PRIVATE \u212aEY-----", "\n"),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
@settings(max_examples=600, deadline=None)
def test_the_words_before_a_pattern_hide_none_of_its_matches(text):
    every = [match.span("secret") for _, pattern in secrets._PATTERNS for match in pattern.finditer(text)]
    assert list(secrets._pattern_matches(text)) == every


@given(secret=ANYTHING, before=st.text(max_size=20), after=st.text(max_size=20))
@settings(deadline=None)
def test_the_value_of_a_secret_variable_never_leaks(secret, before, after):
    environ = {"MY_TOKEN": secret, "OTHER": "nothing"}
    assert secret not in mask(f"{before}{secret}{after}", environ)
    assert secret not in "".join(mask_args([before, secret, f"--x={secret}"], environ))


def test_secrets_that_overlap_are_both_hidden():
    environ = {"A_KEY": "abcdefgh", "B_KEY": "fghijklm"}
    assert mask("x abcdefghijklm y", environ) == "x *** y"


def test_a_secret_is_found_in_its_url_and_printed_forms():
    environ = {"A_PASSWORD": "it's/a\\pass"}
    assert (
        mask(f"https://h/{'it%27s%2Fa%5Cpass'} {['it' + chr(39) + 's/a' + chr(92) + 'pass']!r}", environ).count("***")
        == 2
    )


def test_short_values_are_left_alone():
    assert mask("true story", {"A_KEY": "true"}) == "true story"


def test_a_snapshot_of_the_environment_is_of_its_start_and_ends(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", PLANTED)
    with environment_snapshot():
        monkeypatch.setenv("MY_API_KEY", "another-value")
        assert mask(f"{PLANTED} and another-value") == "*** and another-value"
    assert mask(f"{PLANTED} and another-value") == f"{PLANTED} and ***"


def test_arguments():
    argv = ["train", "--hub-token", "two words", "--lr", "1", "--key=abc", "--password", "--lr", "2", "tokens.txt", "x"]
    assert mask_args(argv, {}) == [
        *("train", "--hub-token", "***", "--lr", "1", "--key=***", "--password", "--lr", "2", "tokens.txt", "x")
    ]


def test_masking_is_fast_on_long_text():
    began = time.perf_counter()
    for text in ("a" * 100_000, "-" * 100_000, "://" * 3_000, "key " * 20_000, "x.y-" * 20_000):
        mask(text, {})
    assert time.perf_counter() - began < 3


def test_printable_shows_control_characters():
    assert printable("a\x1b[2J\r\n\t\x9b\u202eb\ud800é漢") == "a\\x1b[2J\\r\\n\\t\\x9b\\u202eb\\ud800é漢"
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_variables_are_kept_by_name_and_masked():
    environ = {
        "NCCL_DEBUG": "INFO",
        "TORCH_HUB_URL": "https://me:pass@host/x",
        "TORCHELASTIC_ERROR_FILE": PLANTED,
        "TORCHELASTIC_RUN_ID": "which others need not know",
        "CUDA_LICENSE_KEY": "short",
        "RANK": "0",
        "HF_TOKEN": PLANTED,
        "HOME": "/home/me",
        "NCCL": "x",
    }
    kept, others = run_dir.split_environment(environ)
    assert kept == {
        "CUDA_LICENSE_KEY": "***",
        "NCCL_DEBUG": "INFO",
        "RANK": "0",
        "TORCHELASTIC_ERROR_FILE": "***",
        "TORCH_HUB_URL": "https://***@host/x",
    }
    assert others == ["HF_TOKEN", "HOME", "NCCL", "TORCHELASTIC_RUN_ID"]


def test_the_file_holds_the_machine_and_no_secret(tmp_path):
    environ = {
        "MY_SECRET": PLANTED,
        "NCCL_X": f"a {PLANTED}",
        "HOME": "elsewhere-only",
        "ghp_abcdefghijklmnopqrst": "1",
    }
    argv = ["lockstep", "train", "--token", "tok3n", f"--x={PLANTED}", "https://u:passw@h/"]
    path = tmp_path / "environment.json"
    path.write_text("old")
    run_dir.write_description(path, run_dir.describe_process(argv, environ))
    text = path.read_text()
    for secret in (PLANTED, "tok3n", "passw@", "elsewhere-only", "ghp_abc"):
        assert secret not in text
    found = json.loads(text)
    assert found["versions"]["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert found["versions"]["torch"]
    assert found["versions"]["lockstep"]
    assert found["machine"]["cpu_count"] >= 1
    assert found["machine"]["memory"] > 2**20
    assert found["environment"] == {"NCCL_X": "a ***"}
    assert "HOME" in found["environment_names"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["environment.json"]


def test_git_commit_and_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert run_dir.describe_process([], {})["git"] is None

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert run_dir.describe_process([], {})["git"] == {"commit": None, "changed": False}
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    found = run_dir.describe_process([], {})["git"]
    assert len(found["commit"]) == 40
    assert not found["changed"]
    (tmp_path / "a").write_text("2")
    assert run_dir.describe_process([], {})["git"] == {"commit": found["commit"], "changed": True}


def test_no_git_is_no_error(monkeypatch):
    monkeypatch.setattr(run_dir.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert run_dir.describe_process([], {})["git"] is None


def test_describing_is_quick():
    run_dir.describe_process([], {})  # torch is loaded once
    began = time.perf_counter()
    run_dir._versions(), run_dir._machine(), run_dir.split_environment({f"X{i}": "y" for i in range(200)})
    assert time.perf_counter() - began < 0.5  # aim: 0.1 s; the rest is for busy machines


def test_importing_loads_no_torch():
    code = (
        "import sys, lockstep.training.state.run_dir; import lockstep.logging.console, lockstep.logging.jsonl;"
        "import lockstep.logging.log;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
