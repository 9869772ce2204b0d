"""Flags, files and their bad values: each gets one line with the flag and the way out."""

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

import lockstep
from lockstep import cli
from lockstep.commands.train import command
from lockstep.config.cli import COMMON_FLAGS, flatten, option_list, parse, read_toml, to_toml
from lockstep.config.hints import FOREIGN
from lockstep.config.schema import Config, default_micro_batch_size, flag, sections
from lockstep.config.sections import Data, Optim
from lockstep.config.task_options import TASKS, is_option_of, kind_of
from lockstep.errors import SETTINGS, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_list_of_options_is_known():
    """A new option is a decision: add it to tests/golden/options.txt, and to the documentation."""
    assert (GOLDEN / "options.txt").read_text().split() == option_list()


def test_defaults_are_below_the_file_and_the_file_below_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.5\nbatch-size = 24\n[optim]\nweight-decay = 0.25\nclip = 3\n")
    config = parse(["--config", str(file), "--optim.clip", "2", "--exact", "--seed", "7"])
    assert (config.lr, config.batch_size, config.optim.weight_decay) == (0.5, 24, 0.25)
    assert (config.optim.clip, config.exact, config.seed, config.log_freq) == (2.0, True, 7, Config().log_freq)
    assert parse(["--config", str(file), "--no-exact"]).exact is False


@given(
    st.builds(
        Config,
        experiment_name=st.text(
            st.characters(categories=["L", "N", "Zs"], include_characters="-_'\"#="), min_size=1, max_size=60
        ).filter(lambda text: text.strip() and text.isprintable()),
        lr=st.floats(0, 1e6),
        seed=st.integers(0, 2**63 - 1),
        exact=st.booleans(),
        batch_size=st.integers(1, 10**6),
        optim=st.builds(Optim, eps=st.floats(0, 1), warmup_steps=st.integers(0, 10**12)),
    )
)
def test_the_file_written_is_the_config_read(config):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert read_toml(path) == flatten(config)
        assert parse(["--config", str(path)]) == config


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--lrr", "1"], "unknown flag --lrr: did you mean --lr?"),
        (["--weight-decay", "1"], "unknown flag --weight-decay: did you mean --optim.weight-decay?"),
        (["--expermint-name", "a"], "unknown flag --expermint-name: did you mean --experiment-name?"),
        (["--zzz=3"], "unknown flag --zzz; `lockstep train --help-all` lists them"),
        (["--exact", "false"], "unexpected argument 'false': flags begin with --"),
        (["--checkpoint.mod", "x"], "unknown flag --checkpoint.mod: did you mean --checkpoint.mode?"),
        (["--warmup=3"], "unknown flag --warmup: did you mean --optim.warmup-steps?"),
        (["--learning-rate", "1"], "unknown flag --learning-rate: here it is --lr"),
        (["--learning_rate", "1"], "unknown flag --learning-rate: here it is --lr"),
        (["--bf16"], "unknown flag --bf16: here it is --precision bf16"),
        (["--fp16"], "unknown flag --fp16: here it is --precision fp16"),
        (["--output-dir", "a"], "unknown flag --output-dir: here it is --save-dir"),
        (["--resume"], ("unknown flag --resume", "--experiment-name")),
        (["--name", "a"], "unknown flag --name: here it is --experiment-name"),
        (["--epochs", "3"], "unknown flag --epochs: here it is --num-epochs"),
        (["--steps", "3"], "unknown flag --steps: here it is --max-steps"),
        (["--gradient-accumulation-steps", "2"], "here it is --micro-batch-size, which cuts --batch-size"),
        (["--per-device-train-batch-size", "2"], "here it is --micro-batch-size"),
        (["--nproc-per-node", "2"], "processes are started by `lockstep launch --nproc-per-node N -- train ...`"),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--max-steps", "1e-3"], "--max-steps: '1e-3' is not a whole number"),
        (["--max-steps", "1e16"], "--max-steps: '1e16' is not a whole number"),
        (["--max-steps", "inf"], "--max-steps: 'inf' is not a whole number"),
        (["--lr", "nan"], "--lr is nan: it must be a finite number, not negative"),
        (["--lr", "-1"], "--lr is -1.0: it must be a finite number, not negative"),
        (["--lr", "inf"], "--lr is inf"),
        (["--lr"], "--lr: expected one argument"),
        (["--batch-size", "1.5"], "--batch-size: '1.5' is not a whole number"),
        (["--batch-size", "0"], "--batch-size is 0: it must be at least 1"),
        (
            ["--batch-size", "30", "--micro-batch-size", "31"],
            ("--micro-batch-size 31", "larger than --batch-size 30"),
        ),
        (["--engine", "warp"], "--engine is 'warp': choose one of"),
        (["--precision", "fp8"], "--precision is 'fp8': choose one of"),
        (["--timeout", "0"], "--timeout is 0.0: it must be a number of seconds"),
        (["--data.evaluation", "1"], "--data.evaluation is 1.0: it must be a share"),
        (["--experiment-name", "a/b"], "--experiment-name 'a/b' would lead out of --save-dir"),
        (["--experiment-name", "../../x"], "would lead out of --save-dir"),
        (["--experiment-name", ".."], "would lead out of --save-dir"),
        (["--experiment-name", "a\nb"], ("--experiment-name", r"'a\nb'")),
        (["--experiment-name", "\x1b[31m"], "has characters that cannot be printed"),
        (["--experiment-name", "x" * 201], "has 201 characters, more than 200"),
        (["--experiment-name", " "], "is empty"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
        (["stray"], "unexpected argument 'stray'"),
        (["--task", "imags"], ("--task is 'imags'", "images", "FILE.py:CLASS")),
        (["--task", "zzz"], "--task is 'zzz': choose one of causal-lm, images"),
        (["--images.size", "3"], ("--images.size", "--task causal-lm", "images")),
        (["--task", "images", "--seq-len", "3"], ("--seq-len", "--task images", "causal-lm")),
        (["--optim.cooldown", "0.3"], ("--optim.cooldown", "--optim.schedule cosine", "wsd")),
        (
            ["--optim.schedule", "wsd", "--optim.period", "5"],
            ("--optim.period", "--optim.schedule wsd", "cosine-periodic", "step"),
        ),
        (["--images.flip", "maybe"], "--images.flip is 'maybe': choose one of auto, true, false"),
    ],
)
def test_bad_flags(arguments, line):
    with refuses(ConfigError, *((line,) if isinstance(line, str) else line)) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lrr = 1", "unknown key 'lrr': did you mean lr?"),
        ("[optim]\nweight_decai = 1", "unknown key 'optim.weight_decai': did you mean optim.weight_decay?"),
        ("lr = 1\nlr = 2", "is not a TOML file: Cannot overwrite a value"),
        ('lr = "1e-3"', "--lr is '1e-3': it must be a number"),
        ("lr = true", "--lr is True: it must be a number"),
        ("exact = 1", "--exact is 1: it must be true or false"),
        ("batch_size = 2.0", "--batch-size is 2.0: it must be a whole number"),
        ("lr = nan", "--lr is nan"),
        ("a = [" * 5000, "is not a TOML file"),
        ("[optim.lr]\na = 1", "unknown key 'optim.lr'"),
        ("[nothing]\na = 1", "unknown key 'nothing'"),
        ("optim = 3", "unknown key 'optim'"),
        ("learning_rate = 3", "unknown key 'learning_rate': here it is lr"),
        ("bf16 = true", "unknown key 'bf16': here it is precision bf16"),
        ("[optim]\nmax_grad_norm = 1", "unknown key 'optim.max_grad_norm': here it is optim.clip"),
    ],
)
def test_bad_files(tmp_path, text, line):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        parse(["--config", str(path)])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        parse(["--config", str(path)])


@given(st.integers(1, 5000))
def test_default_micro_batch_divides_and_is_an_eighth_at_most(batch_size):
    size = default_micro_batch_size(batch_size)
    assert batch_size % size == 0
    assert 1 <= size <= max(1, batch_size // 8)
    assert Config(batch_size=batch_size, exact=True).micro_batches * size == batch_size


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_uncut_step_has_one_micro_batch_of_any_size(batch_size, size):
    assert (Config(batch_size=batch_size).micro_size, Config(batch_size=batch_size).micro_batches) == (batch_size, 1)
    if size <= batch_size:
        cut = Config(batch_size=batch_size, micro_batch_size=size)
        assert (cut.micro_batches - 1) * size < batch_size <= cut.micro_batches * size


def test_a_config_cannot_be_changed_after_its_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = float("nan")
    with pytest.raises(ConfigError, match="^data.workers is -1: it must be"):
        Config(data=Data(workers=-1))


def test_a_section_is_a_dict_of_its_fields():
    assert Config(optim={"warmup_steps": 3}) == Config(optim=Optim(warmup_steps=3))
    assert dataclasses.replace(Config(), data={"workers": 2}).data == Data(workers=2)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"batchsize": 3}, "Config has no 'batchsize': did you mean batch_size?"),
        ({"learning_rate": 3}, "Config has no 'learning_rate': here it is lr"),
        ({"warmup_steps": 3}, "Config has no 'warmup_steps': did you mean optim.warmup_steps?"),
        ({"optim": {"warmup": 3}}, "Optim has no 'warmup': did you mean warmup_steps?"),
        ({"data": {"zzz": 3}}, "Data has no 'zzz'; it has workers, prefetch"),
        ({"optim": 3}, "optim is 3: it must be Optim(...)"),
        ({"optim": {"clip": -1}}, "optim.clip is -1.0: it must be"),
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"batch_size": "8"}, "batch_size is '8': it must be a whole number"),
        ({"engine": "warp"}, "engine is 'warp': choose one of"),
        (
            {"batch_size": 30, "micro_batch_size": 31},
            "micro_batch_size 31 is larger than batch_size 30, the samples of",
        ),
        ({"experiment_name": "../x"}, "experiment_name '../x' would lead out of save_dir; use letters"),
        ({"experiment_name": "{lr}"}, None),
        *[({"save_dir": at}, f"save_dir is '{at}'") for at in ("gs:/a", "hdfs:", "http://host/runs", "s3://")],
    ],
)
def test_who_writes_python_is_told_the_fields_name(fields, line):
    if line is None:  # no part of a message is ever read as a format
        assert Config(**fields).experiment_name == "{lr}"
        return
    with pytest.raises(ConfigError) as caught:
        Config(**fields)
    assert str(caught.value).startswith(line)
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_is_a_type_error_too():
    with pytest.raises(TypeError, match="Config has no 'batchsize'"):
        Config(batchsize=3)
    with pytest.raises(TypeError):
        dataclasses.replace(Config(), batchsize=3)


def test_what_the_hints_say_exists():
    """Each name of another program leads to an option, and to a value that this has; none hides an option."""
    known = {*option_list(), "data.drop_last"}
    choices = {
        prefix + spec.name: spec.metadata.get("choices")
        for o, prefix in sections(Config())
        for spec in dataclasses.fields(o)
    }
    assert not FOREIGN.keys() & known
    for text in FOREIGN.values():
        named = re.findall(r"{([\w.]+)}", text)
        assert set(named) <= known, text
        assert named or "lockstep launch" in text, text
        value = re.fullmatch(r"{([\w.]+)} ([\w-]+)", text)
        if value and choices[value[1]]:
            assert value[2] in choices[value[1]], text


PARTS = "--micro-batch-size, which cuts --batch-size, the samples of a step over all ranks"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", ": here it is --lr"),
        ("--bf16", ": here it is --precision bf16"),
        ("--fp16", ": here it is --precision fp16"),
        ("--output-dir", ": here it is --save-dir"),
        ("--resume", ": the same --experiment-name resumes automatically"),
        ("--name", ": here it is --experiment-name"),
        ("--run-name", ": here it is --experiment-name"),
        ("--eval-every", ": here it is --eval-freq"),
        ("--save-every", ": here it is --ckpt-freq"),
        ("--epochs", ": here it is --num-epochs"),
        ("--warmup", ": did you mean --optim.warmup-steps?"),
        ("--warmup-ratio", ": here it is --optim.warmup-steps, which takes a share of the plan too: 5%"),
        ("--resume-from-checkpoint", ": the same --experiment-name resumes automatically"),
        ("--per-device-train-batch-size", ": here it is --micro-batch-size"),
        ("--num-train-epochs", ": here it is --num-epochs"),
        ("--max-epochs", ": here it is --num-epochs"),
        ("--accumulate-grad-batches", f": here it is {PARTS}"),
        ("--gradient-accumulation-steps", f": here it is {PARTS}"),
        ("--devices", ": processes are started by `lockstep launch --nproc-per-node N -- train ...`"),
        ("--strategy", ": here it is --engine"),
        ("--gradient-clip-val", ": here it is --optim.clip"),
        ("--max-grad-norm", ": here it is --optim.clip"),
        ("--optimizer", ": here it is --optim.name"),
        ("--eval-strategy", ": here it is --eval-freq, which takes 1epoch too"),
        ("--load-best-model-at-end", ": the best checkpoint by --best-metric is always kept; lockstep.load loads it"),
        ("--limit-val-batches", ": here it is --limit-eval-batches"),
        ("--per-device-eval-batch-size", ": here it is --eval-micro-batch-size"),
        ("--ema-decay", ": here it is --optim.ema"),
        ("--auto-lr-find", ": examples/find_lr.py tries rates and suggests one for --lr"),
        ("--lora-r", ": here it is --lora.rank"),
        ("--target-modules", ": here it is --lora.targets"),
        ("--overwrite-output-dir", ": a run is never overwritten; use another --experiment-name"),
    ],
)
def test_what_people_type_first_leads_to_the_flag(flag, meant):
    for typed in (flag, flag[:2] + flag[2:].replace("-", "_")):
        with pytest.raises(ConfigError) as caught:
            parse([typed, "1"])
        assert str(caught.value) == f"unknown flag {flag}{meant}"


def test_flags_that_others_have_too_are_taken_as_they_are():
    config = parse(["--eval_freq", "50", "--max_steps", "9", "--batch_size", "4", "--save_dir", "a", "--seed", "1"])
    assert (config.eval_freq, config.max_steps, config.batch_size, config.save_dir, config.seed) == (50, 9, 4, "a", 1)


def test_numbers_as_people_write_them():
    config = parse(["--max-steps", "1e3", "--batch_size=1_024", "--optim.warmup_steps", "2.0", "--lr", "1_0e-4"])
    assert (config.max_steps, config.batch_size, config.optim.warmup_steps, config.lr) == (1000, 1024, 2, 1e-3)
    assert parse(["--seed", str(2**63 - 1)]).seed == 2**63 - 1


def test_underscores_of_names_become_dashes_and_of_values_stay():
    config = parse(["--eval_freq", "3", "--experiment_name=a_b", "--data.vocab_size=300", "--save_dir", "x_y"])
    assert (config.eval_freq, config.experiment_name, config.data.vocab_size) == (3, "a_b", 300)
    assert config.save_dir == "x_y"


def test_train_without_flags_names_three_ways_to_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command([]) == 2
    text = capsys.readouterr().err
    for way in ("lockstep init", "--dataset-name", "lockstep trace", "--lightning", "--hf-script", "make train"):
        assert way in text
    assert not list(tmp_path.iterdir())


SCRIPT = """
import sys
from lockstep import Config
config = Config.from_args()
print(config.max_steps, config.optim.clip, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--max-steps", "7", "--optim.clip", "2"], 0, "7 2.0 False\n"),
        (["--max_step", "7"], 2, "mine.py: error: unknown flag --max-step: did you mean --max-steps?\n"),
        (["--lr", "-1"], 2, "mine.py: error: --lr is -1.0: it must be a finite number, not negative\n"),
        (["--help"], 0, "usage: mine.py [flags]\n"),
    ],
)
def test_a_script_of_ones_own_has_the_flags(tmp_path, flags, code, said):
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "mine.py", *flags], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert (done.stderr if code else done.stdout).startswith(said)


def test_from_args_with_a_list_raises():
    assert Config.from_args(["--lr", "0.5"]) == Config(lr=0.5)
    with pytest.raises(ConfigError, match="unknown flag --lrr"):
        Config.from_args(["--lrr", "0.5"])


def test_from_args_under_a_launcher_raises(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--lrr", "0.5"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "note")
    with pytest.raises(ConfigError, match="unknown flag --lrr"):
        Config.from_args()


def shown(argv, capsys, prog="lockstep train"):
    """What a help prints."""
    with pytest.raises(SystemExit) as caught:
        parse(argv, prog)
    assert caught.value.code == 0
    return capsys.readouterr().out


def flags_of(text):
    """The flags that a help explains."""
    return re.findall(r"^  (?:-\w(?: \w+)?, )?(--[a-z][\w.-]*)", text, re.MULTILINE)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--lr", "3", "--help", "--help-all"]])
def test_the_help_opens_with_the_first_flags_and_two_examples(argv, capsys):
    text = shown(argv, capsys)
    assert text.splitlines()[:2] == ["usage: lockstep train [flags]", ""]
    assert flags_of(text) == [flag(name) for name in COMMON_FLAGS]
    needed = "--save-dir --micro-batch-size --precision --engine --seed --eval-freq --data.workers --wandb"
    assert set(needed.split()) < set(flags_of(text))
    own = flags_of(shown(["--task", "causal-lm", *argv], capsys))
    assert own == [*map(flag, TASKS["causal-lm"].common), *flags_of(text)]
    assert len(text.splitlines()) < 64
    examples = re.findall(r"^  (lockstep .*)", text, re.MULTILINE)
    assert len(examples) == 2
    for line in examples:
        assert parse(line.rpartition("train ")[2].split())  # each flag of it exists
    rest = text.splitlines()[-1]
    assert rest == f"`lockstep train --help-all` lists all {len(flags_of(shown(['--help-all'], capsys)))} flags."


def test_a_scripts_help_has_its_own_name_in_its_examples(capsys):
    text = shown(["--help"], capsys, "mine.py")
    assert "  mine.py --experiment-name first" in text
    assert "-- mine.py --exact\n" in text


def test_a_scripts_help_has_its_own_defaults_and_no_task(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    with pytest.raises(SystemExit):
        Config.from_args(max_steps=7, model_name="mine", optim={"clip": 0.5})
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 7)" in text
    assert "(default: mine)" in text  # the script gives it, so it reads it
    assert "--task" not in text
    assert "--dataset-name" not in text
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help-all"])
    with pytest.raises(SystemExit):
        Config.from_args(max_steps=7, optim={"clip": 0.5})
    assert "(default: 0.5)" in capsys.readouterr().out


OWN = ["mine.py", "--width", "4", "--lr", "0.5", "--my_flag"]


def own_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3, help="of the hidden layer")
    parser.add_argument("--my_flag", action="store_true")
    return parser


def test_own_flags_are_parsed_with_those_of_a_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", OWN)
    config, own = Config.from_parser(own_parser(), max_steps=7)
    assert (config.lr, config.max_steps) == (0.5, 7)
    assert vars(own) == {"width": 4, "my_flag": True}
    assert SETTINGS.typed == {"lr": 0.5}
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    with pytest.raises(SystemExit):
        Config.from_parser(own_parser())
    text = capsys.readouterr().out
    assert flags_of(text)[:3] == ["--width", "--my_flag", "--experiment-name"]
    monkeypatch.setattr(sys, "argv", ["mine.py", "--widht", "4"])
    with pytest.raises(SystemExit):
        Config.from_parser(own_parser())
    assert "mine.py: error: unknown flag --widht: did you mean --width?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [{"name": "--lr"}, {"name": "--mine", "dest": "lr"}])
def test_an_own_flag_that_is_one_of_lockstep_is_refused(words, capsys):
    parser = own_parser()
    parser.add_argument(words.pop("name"), **words)
    with pytest.raises(ConfigError, match="lr"):
        Config.from_parser(parser, [])


def test_flags_left_by_an_own_parser_count_as_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*OWN, "--stop-at", "3"])
    _, rest = own_parser().parse_known_args()
    assert Config.from_args(rest).stop_at == 3
    assert SETTINGS.typed == {"lr": 0.5, "stop_at": 3}
    Config.from_args(["--lr", "0.1"])  # made up
    assert SETTINGS.typed == {"lr": 0.5, "stop_at": 3}
    monkeypatch.setattr(sys, "argv", ["mine.py", "--width", "4", "--lrr", "3"])
    with pytest.raises(SystemExit):
        Config.from_args(own_parser().parse_known_args()[1])
    assert "mine.py: error: unknown flag --lrr" in capsys.readouterr().err


def test_a_notebooks_kernel_has_arguments_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"])
    assert Config.from_args(lr=0.5) == Config(lr=0.5)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with refuses(ConfigError, "batch_size", 0):  # and the kernel goes on
        Config.from_args(batch_size=0)


@pytest.mark.parametrize("words", [["--model-name", "m"], ["--task", "images"], ["--data.split", "train"]])
def test_flags_that_an_own_task_makes_void_are_refused(words, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mine.py", *words, "--save-dir", str(tmp_path)])
    config = Config.from_args()
    with pytest.raises(ConfigError, match=words[0]):
        lockstep.Run(config, object())
    name = words[0].removeprefix("--").replace("-", "_")
    lockstep.Run(config)  # the flags choose the task
    section, _, key = name.rpartition(".")
    lockstep.Run(Config.from_args(**({section: {key: ""}} if section else {name: ""})), object())
    if words[0] != "--task":
        with pytest.raises(ConfigError, match=words[0]):
            command(["--task", "mine.py:Mine", *words])
    assert not any(tmp_path.iterdir())


def test_whole_help_begins_with_one_usage_line_and_has_groups(capsys):
    lines = shown(["--help-all"], capsys).splitlines()
    assert lines[:2] == ["usage: lockstep train [flags]", ""]
    groups = [line.rstrip(":") for line in lines if line.endswith(":") and line[0] != " "]
    assert {"the run", "model and data", "the plan", "computation", "output"} <= set(groups)
    names = [prefix.rstrip(".") for _, prefix in sections(Config()) if prefix and prefix != "images."]
    assert names == groups[-len(names) :]


@pytest.mark.parametrize("task", ["", *TASKS])
def test_the_help_of_a_task_names_its_options_and_no_others(task, capsys):
    named = ["--task", task] if task else []
    whole = flags_of(shown([*named, "--help-all"], capsys))
    for owner, prefix in sections(Config()):
        for spec in dataclasses.fields(owner):
            if not dataclasses.is_dataclass(spec.type):
                assert (flag(prefix + spec.name) in whole) == is_option_of(spec, kind_of(task)), spec.name
    first = flags_of(shown([*named, "--help"], capsys))
    assert ("--images.flip" in first) == (task == "images")
    assert ("--data.target-column" in first) == (task == "regression")


def test_tasks_defaults_give_way_to_what_is_given(tmp_path):
    plain, images = Config(), Config(task="images")
    assert (images.model_name, images.dataset_name) == ("builtin:resnet", "builtin:digits")
    assert (images.batch_size, plain.batch_size, Config(task="images", batch_size=16).batch_size) == (64, 16, 16)
    assert parse(["--task", "images", "--batch-size", "16"]) == Config(task="images", batch_size=16)
    assert Config("default", "builtin:digits", task="images") == images
    assert Config(task="images", data={"workers": 1}).data == Data(workers=1, evaluation=0.2)
    assert Config(task="images", data=Data()).data.evaluation == Data().evaluation
    assert Config.from_args([], task="images") == parse(["--task=images"]) == images
    assert dataclasses.replace(images, batch_size=16).batch_size == 16
    assert Config(task="causal-lm", seq_len=64) == dataclasses.replace(plain, task="causal-lm", seq_len=64)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(Config(task="images", batch_size=16)), encoding="utf-8")
    assert parse(["--config", str(file)]) == Config(task="images", batch_size=16)
    assert "seq_len" not in read_toml(file)
    assert parse(["--task", "images", "--model-name", "a/b", "--dataset-name", "a/b"]).preset == "auto"
    with pytest.raises(TypeError, match="multiple values"):
        Config("a", experiment_name="b")


def test_verify_shows_its_own_flags_and_then_those_of_train(capsys):
    with pytest.raises(ConfigError, match="unknown flag --zzz; `lockstep verify --help-all` lists them"):
        cli.dispatch(["verify", "--zzz"])
    assert cli.dispatch(["verify", "--help"]) == 0
    first = flags_of(capsys.readouterr().out)
    assert cli.dispatch(["verify", "--help-all"]) == 0
    whole = flags_of(capsys.readouterr().out)
    assert {"--engines", "--plant", "--out", "--against", "--task"} <= set(first) < set(whole)
    assert "--optim.clip" not in first
    assert {flag(name) for name in option_list()} <= set(whole)
    own = set(whole) - {flag(name) for name in (*option_list(), "config", "lightning", "datamodule")}
    assert own - {"--help", "--help-all"} <= set(first)  # no flag of its own is out of sight


def test_a_command_of_few_flags_shows_all_either_way(capsys):
    texts = []
    for name in ("--help", "--help-all"):
        assert cli.dispatch(["launch", name]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "--max-restarts" in texts[0]


@pytest.mark.parametrize("argv", [["--task", "f.py:C", "--help-all"], ["--help-all", "--task=f.py:C"]])
def test_help_with_a_custom_task_leaves_out_built_in_options(argv, capsys):
    own = shown(argv, capsys)
    first = flags_of(shown([word.replace("--help-all", "--help") for word in argv], capsys))
    assert first == [flag(name) for name in COMMON_FLAGS if name not in ("model_name", "dataset_name")]
    explained = {name for name in option_list() if flag(name) in flags_of(own)}
    left_out = set(option_list()) - explained
    assert {"model_name", "dataset_name", "seq_len", "tokenizer", "data.vocab_size", "model.dropout"} <= left_out
    assert {name.partition(".")[0] for name in left_out if "." in name} == {"data", "model", "images"}
    assert {"data.workers", "data.prefetch", "lr", "task", "engine_options.prefetch"} <= explained
    assert "model:" not in own.splitlines()  # nothing of it is left
    assert parse(["--task", "f.py:C", "--seq-len", "64", "--model.dropout", "0.1"]).seq_len == 64


def test_a_scripts_own_defaults_stand_below_its_flags():
    own = {"batch_size": 64, "optim": {"clip": 0.5, "floor": 0.2}}
    config = Config.from_args(["--batch-size", "32", "--optim.floor", "0.3"], lr=0.01, **own)
    assert config == Config(batch_size=32, lr=0.01, optim=Optim(clip=0.5, floor=0.3))
    assert Config.from_args([], optim=Optim(clip=0.5)) == Config(optim=Optim(clip=0.5))
    with pytest.raises(ConfigError, match="Config has no 'batchsize': did you mean batch_size"):
        Config.from_args([], batchsize=3)


def test_a_url_has_a_folder_of_its_own_and_no_secrets(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('save_dir = "s3://bucket/../runs"\n')
    for flags in (["--save-dir", "s3://bucket/../runs"], ["--config", str(file)]):
        with refuses(ConfigError, "--save-dir", "s3://bucket/../runs"):
            parse(flags)
    for url in ("s3://key:hunter22@bucket/a", "s3://hunter22@bucket/a", "az://a:hunter22@b/c", "gs://b/a?sig=hunter22"):
        with refuses(ConfigError, "save_dir") as caught:
            Config(save_dir=url)
        assert "hunter22" not in str(caught.value)
    local = {"s3://bucket/runs/": "x/s3/bucket/runs", "abfs://runs@account/a": "x/abfs/runs@account/a", "runs": "runs"}
    for url, folder in local.items():
        assert Config(save_dir=url, checkpoint={"local_dir": "x"}).local_dir == folder
    for folder in ("outputs", "C:/runs", "a/s3://b", "~/runs", "/data/a:b"):
        assert Config(save_dir=folder).save_dir == folder
