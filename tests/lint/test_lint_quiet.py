"""LS028: a run that only one rank has, handlers that give up, the rank under other names, loggers of Accelerate."""

import pytest

from lockstep.lint.config import configure
from lockstep.lint.runner import check_paths

START = "import os\nimport logging\nimport torch.distributed as dist\nimport wandb\n"
RUN = "\nif __name__ == '__main__':\n    main(parse())\n"


def told(folder, **files):
    """The lines at which the rule is told in run.py, beside other files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return [finding.line for finding in check_paths([str(folder / "run.py")], configure({}, "LS028", ""))]


@pytest.mark.parametrize(
    ("handler", "number"),
    [
        ("except KeyError:\n        if args.loud:\n            print('none')", 1),
        ("except KeyError:\n        if args.loud:\n            print('none')\n        args = None", 1),
        ("except KeyError:\n        for name in args.names:\n            print(name)", 1),
        ("except KeyError:\n        if args.loud:\n            print('none')\n        raise", 0),
        ("except KeyError as error:\n        if args.loud:\n            print(error)", 0),
        ("except RuntimeError as error:\n        if 'memory' in str(error):\n            print('full')", 0),
        ("except RuntimeError:\n        if full():\n            print('full')\n        else:\n            raise", 0),
        ("except RuntimeError:\n        if full():\n            print('full')\n            return", 0),
    ],
)
def test_a_test_in_a_handler_of_exceptions(tmp_path, handler, number):
    body = f"    try:\n        step(args)\n    {handler}\n"
    run = f"{START}\ndef main(args):\n    dist.init_process_group('nccl')\n{body}{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("maker", "number"),
    [
        ("from accelerate.logging import get_logger\nlogger = get_logger(__name__)", 0),
        ("logger = logging.getLogger(__name__)\nlogging.basicConfig(level=logging.INFO)", 1),
    ],
)
@pytest.mark.parametrize("line", ["'batch a GPU: %d', batch_per_gpu", "f'rank {args.local_rank}'"])
def test_a_logger_of_accelerate_names_a_rank(tmp_path, maker, number, line):
    start = f"from accelerate import Accelerator\n{maker}\n\ndef main(args):\n    accelerator = Accelerator()\n"
    run = f"import logging\n{start}    logger.info({line})\n{RUN}"
    assert len(told(tmp_path, run=run)) == number
