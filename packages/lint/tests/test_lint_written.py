"""LS028: runs of a tracker that only rank 0 starts, levels that keep lines back, texts that name the rank, helpers."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

START = "import logging\nimport torch.distributed as dist\nimport wandb\n\n"
RUN = "\nif __name__ == '__main__':\n    main(parse())\n"


def messages(text):
    """What the rule says of a script."""
    return [finding.message.partition(":")[0] for finding in check_text(text, configure({}, "LS028", ""))]


def script(*lines, above=""):
    """A program that starts a group and goes on with some lines."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"{START}{above}\ndef main(args):\n    dist.init_process_group('nccl')\n{body}{RUN}"


ON_MAIN = ("if dist.get_rank() == 0:", "    wandb.init()")
FEEDS = "every rank starts or feeds its own tracker run"


@pytest.mark.parametrize(
    ("start", "test", "told"),
    [
        (ON_MAIN, "if wandb.run is not None:", 0),
        (ON_MAIN, "if wandb.run is not None and args.loud:", 0),
        (ON_MAIN, "if wandb.run:", 0),
        (ON_MAIN, "if not wandb.run is None:", 0),
        (ON_MAIN, "if wandb.run is None:", 1),
        (ON_MAIN, "if args.run is not None:", 1),
        (("wandb.init() if dist.get_rank() == 0 else None",), "if wandb.run is not None:", 0),
        (("wandb.init()",), "if wandb.run is not None:", 2),
    ],
)
def test_a_run_that_only_the_main_rank_starts(start, test, told):
    assert messages(script(*start, test, "    wandb.log({'a': 1})")) == [FEEDS] * told


def test_a_return_where_there_is_no_run():
    helper = "def show(args):\n    if wandb.run is None:\n        return\n    wandb.log({'a': 1})\n"
    assert messages(script(*ON_MAIN, "show(args)", above=helper)) == []
    assert messages(script("wandb.init()", "show(args)", above=helper)) == [FEEDS] * 2


@pytest.mark.parametrize(("start", "told"), [(ON_MAIN, 0), (("wandb.init()",), 2)])
def test_a_program_beside_it_that_starts_a_run_on_every_rank(tmp_path, start, told):
    run = script(*start, "if wandb.run is not None:", "    wandb.log({'a': 1})")
    (tmp_path / "run.py").write_text(run)
    (tmp_path / "alone.py").write_text("import wandb\n\ndef train():\n    wandb.init()\n")
    (tmp_path / "pick.py").write_text("import run\nimport alone\n\nalone.train()\nrun.main(None)\n")
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS028", ""))) == told


LOGS = "every rank logs this"
ROOT = "logging.basicConfig(level=logging.INFO)\nlog = logging.getLogger()\n"
OWN = "logging.basicConfig(level=logging.INFO)\nlog = logging.getLogger(__name__)\n"


@pytest.mark.parametrize(
    ("above", "first", "told"),
    [
        (ROOT, "log.setLevel(logging.CRITICAL)", 0),
        (ROOT, "logging.getLogger().setLevel('ERROR')", 0),
        (ROOT, "log.setLevel(30)", 0),
        (OWN, "log.setLevel(logging.WARNING)", 0),
        (OWN, "logging.getLogger(__name__).setLevel(logging.WARNING)", 0),
        ("logging.basicConfig(format='%(message)s')\nlog = logging.getLogger(__name__)\n", "pass", 0),
        ("logging.basicConfig(level=logging.WARNING)\nlog = logging.getLogger(__name__)\n", "pass", 0),
    ],
)
def test_lines_below_the_level_that_is_set(above, first, told):
    assert messages(script(first, "log.info('begin')", above=above)) == [LOGS] * told


NAMES = "every rank writes this line"
PRINTS = "every rank prints this"


@pytest.mark.parametrize(
    ("made", "line", "said"),
    [
        ("prefix = '%i - ' % args.rank", "print(prefix + 'begin')", NAMES),
        ("prefix = f'[{dist.get_rank()}]'", "print(prefix, 'begin')", NAMES),
        ("text = 'rank: ' + str(place)", "print(text)", NAMES),
        ("prefix = f'[{args.name}]'", "print(prefix, 'begin')", PRINTS),
        ("loss = step(args.rank)", "print('loss', loss)", PRINTS),
        ("pass", "print('batches', args.batch_size_per_gpu)", PRINTS),
        ("pass", "print('devices', args.n_gpu)", PRINTS),
        ("pass", "print('device', args.gpu)", NAMES),
    ],
)
def test_a_text_that_names_the_rank(made, line, said):
    assert messages(script(made, line)) == [said]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("raise", 0),
        ("raise error", 0),
        ("return None", 0),
    ],
)
def test_what_an_error_comes_to_below_a_test(end, told):
    lines = ("try:", "    step(args)", "except KeyError as error:", "    if args.loud:", "        print('lengths')")
    assert messages(script(*lines, f"    {end}")) == [PRINTS] * told


ONE = """
    if dist.is_initialized():
        if dist.get_rank() == 0:
            print(text)
    else:
        print(text)
"""


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("print_main", ONE, 0),
        ("print_trainable_parameters", ONE, 0),
    ],
)
def test_helpers_that_print_on_one_rank_or_where_there_is_one_process(tmp_path, name, body, told):
    (tmp_path / "helper.py").write_text(f"import torch.distributed as dist\n\ndef {name}(text):\n{body}")
    (tmp_path / "run.py").write_text(script(f"{name}('begin')", above=f"from helper import {name}\n"))
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS028", ""))
    assert len(found) == told


@pytest.mark.parametrize(
    ("maker", "told"),
    [
        ("from accelerate.logging import get_logger", 0),
    ],
)
def test_a_line_with_the_rank_that_accelerates_logger_writes_once(maker, told):
    above = f"{maker}\n\nlogging.basicConfig(level=logging.INFO)\nlogger = get_logger(__name__)\n"
    assert messages(script("logger.info(f'rank {args.rank}')", above=above)) == [NAMES] * told
