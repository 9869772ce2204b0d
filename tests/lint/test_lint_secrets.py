"""LS030: all options written at once, where one of them is a key or a token."""

import pytest

from lockstep.lint.config import configure
from lockstep.lint.runner import check_text

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
        (KEY, "pass", "print('\\n'.join('%s: %s' % pair for pair in sorted(vars(args).items())))", True),
        (KEY, "args = prepare(args)", "print(args)", True),
        ('"--start_token"', "pass", "print(args)", False),
        ('"--checkpoint_key"', "pass", "print(args)", False),
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
