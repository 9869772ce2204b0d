"""LS030: all options written at once, where one of them is a key or a token."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

OPTIONS = """
import argparse
import json
import logging
import wandb

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument({flag})
    return parser.parse_args()

def prepare(args):
    args.steps = 3
    return args

def main(accelerator, writer):
    args = options()
    {before}
    {shown}

main(None, None)
"""
KEY = '"--wandb_api_key"'


@pytest.mark.parametrize(
    ("flag", "before", "shown", "told"),
    [
        (KEY, "pass", "print(args)", True),
        ('"--hub-token", "-t"', "pass", "wandb.init(config=vars(args))", True),
        (KEY, "pass", "wandb.init(config=args, name='run')", True),
        (KEY, "pass", "accelerator.init_trackers('run', config=vars(args))", True),
        (KEY, "pass", "writer.add_text('options', json.dumps(vars(args)))", True),
        (KEY, "pass", "logging.info(f'options: {args}')", True),
        (KEY, "args = prepare(args)", "print(args)", True),
        ('"--start_token"', "pass", "print(args)", False),
        ('"--checkpoint_key"', "pass", "print(args)", False),
        (KEY, "config = vars(args)", "accelerator.init_trackers('run', config=config)", True),
        (KEY, "import copy; config = vars(copy.deepcopy(args))", "accelerator.init_trackers('run', config)", True),
        (KEY, "config = dict(vars(args))", "config.pop('wandb_api_key'); print(config)", False),
        (KEY, "pass", "for k, v in vars(args).items(): print(k)", False),
        (KEY, "pass", "for k in vars(args): print(k)", False),
        (KEY, "pass", "for k in vars(args): print(k, getattr(writer, 'x'))", False),
        (KEY, "sizes = {}", "for k in vars(args): print(k, sizes[k])", False),
        (KEY, "pass", "for k in vars(args): print(k, getattr(writer, k))", False),
        (KEY, "pass", "for k, v in vars(args).items(): print(k, type(v))", False),
        (KEY, "pass", "for k, v in vars(args).items(): print(k, '***' if 'key' in k else v)", False),
        (KEY, "pass", "for k, v in vars(args).items(): print(k, mask(k, v))", False),
        (KEY, "pass", "for k, v in vars(args).items(): v = mask(k, v); print(k, v)", False),
        (KEY, "pass", "print(sorted(vars(args)), list(vars(args)), [k for k in vars(args)])", False),
        (KEY, "pass", "print(', '.join(vars(args)), ', '.join(k for k, v in vars(args).items()))", False),
        (KEY, "pass", "print({k: '***' if 'key' in k else v for k, v in vars(args).items()})", False),
        (
            KEY,
            "pass",
            """for k, v in vars(args).items():
        if 'key' not in k:
            print(k, v)""",
            False,
        ),
        (KEY, "pass", "print(args.lr)", False),
        (KEY, "pass", "print(prepare(args).steps)", False),
        (KEY, "pass", "print(len(vars(args)))", False),
        (KEY, "args.wandb_api_key = None", "print(args)", False),
        (KEY, "del args.wandb_api_key", "print(args)", False),
        (KEY, "if args.wandb_api_key: raise ValueError('not both')", "print(args)", False),
        (KEY, "pass", "print({k: v for k, v in vars(args).items() if 'key' not in k})", False),
    ],
)
def test_all_options_at_once(flag, before, shown, told):
    text = OPTIONS.format(flag=flag, before=before, shown=shown)
    assert bool(check_text(text, configure({}, "LS030", ""))) is told


@pytest.mark.parametrize(
    ("made", "shown", "told"),
    [
        ("types.SimpleNamespace(**yaml.safe_load(text))", "print(args.lr)", False),
        ("Model(text)", "print(args)", False),
    ],
)
def test_options_of_a_file_of_which_a_token_is_read(made, shown, told):
    text = "import types\nimport torch\nimport wandb\nimport yaml\nfrom omegaconf import OmegaConf\n\n"
    text += "def main(text, load, Model):\n"
    text += f"    args = {made}\n    {shown}\n"
    assert bool(check_text(f"{text}    load(token=args.hf_token)\n", configure({}, "LS030", ""))) is told
    assert not check_text(f"{text}    load(token=args.pad_token)\n", configure({}, "LS030", ""))
    elsewhere = "\ndef other(args, load):\n    load(token=args.hf_token)\n"  # of other options by the same name
    assert not check_text(text + elsewhere, configure({}, "LS030", ""))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("os.environ['RANK'] if 'RANK' in os.environ else '0'", False),
        ("'set' if os.environ else 'empty'", False),
        ("not os.environ", False),
        ("password == other", False),
        ("'***' if api_key else None", False),
        ("os.environ if 'RANK' in os.environ else {}", True),
        ("api_key if other else None", True),
    ],
)
def test_what_is_only_asked(value, told):
    text = f"import os\nimport torch\n\ndef main(password, api_key, other):\n    print({value})\n"
    assert bool(check_text(text, configure({}, "LS030", ""))) is told
