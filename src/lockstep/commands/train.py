"""`lockstep train`: what can be refused at once is refused before torch is loaded, which takes seconds."""

import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.adapters.hf_trainer import flags
from lockstep.config import cli
from lockstep.config.cli import Parser
from lockstep.config.schema import Config
from lockstep.config.task_options import LIGHTNING
from lockstep.distributed.launcher import allocator_variables, check_launched
from lockstep.distributed.progress import MEMBER_VARIABLE
from lockstep.errors import ConfigError
from lockstep.training.run_dir import RunFolder

__all__ = ["asked", "command", "loaded"]


def command(argv: list[str]) -> int:
    """Trains to the end and returns the exit code.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed.
    """
    if "torch" not in sys.modules:  # later it would come too late: torch, and whoever loaded it, may have begun CUDA
        os.environ.update(allocator_variables(os.environ))
    given = vars(_parser(argv).read(argv))
    told = cli.told(given)
    cli.build(cli.applied(told))  # what is wrong with it is said at once
    check_launched(os.environ)
    script = flags.asked(given, told)
    if script:
        _check_alone(given)
        loaded()
        return _code(int(importlib.import_module("lockstep.training.hf_script").run_script(script, told)))
    config, task = asked(told)
    if given["show_groups"]:
        importlib.import_module("lockstep.training.build").show_groups(config)
        return 0
    if given["find_lr"]:
        importlib.import_module("lockstep.training.tuning").show_rates(config)
        return 0
    if given["find_micro_batch"]:
        importlib.import_module("lockstep.training.tuning").show_sizes(config)
        return 0
    if os.environ.get("RANK", "0") == "0" and not os.environ.get(MEMBER_VARIABLE):  # the one that will claim it
        RunFolder(config.save_dir, config.experiment_name).check_free()
    run = loaded().Run(config, task)
    try:
        return _code(run().exit_code)
    except KeyboardInterrupt:
        if run.status != "interrupted":
            raise
        return _code(run.result.exit_code)


def asked(told: Mapping[str, Any]) -> tuple[Config, Any]:
    """The config that the options `told` ask for, and a LightningModule's task, whose loaders say what they do not.

    Raises:
        ConfigError: an option that does not hold, or a module that is not served.
    """
    config = cli.build(cli.applied(dict(told)))
    if not config.task.startswith(LIGHTNING):
        return config, None
    found: tuple[Config, Any] = importlib.import_module("lockstep.adapters.lightning.convert").configured(dict(told))
    return found


def _parser(argv: Sequence[str] = ()) -> Parser:
    parser = cli.parser_of(list(argv), "lockstep train")
    add = parser.add_argument
    add("--show-groups", action="store_true", help="print the optimizer's groups, and train nothing")
    add(
        "--find-lr", action="store_true", help="try 100 rates, print the curve of the loss and a rate, and keep nothing"
    )
    add("--find-micro-batch", action="store_true", help="try sizes of a forward on a CUDA device, and keep nothing")
    return flags.with_flags(parser)


def _check_alone(given: Mapping[str, Any]) -> None:
    for name in ("show_groups", "find_lr", "find_micro_batch"):
        if given[name]:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --hf-script; leave one out")


def loaded() -> Any:
    """Import lockstep.training.run, and what the first optimizer imports.

    Without collections, which find no garbage among half a million objects that stay: a sixth of the time, and later
    collections leave them out.
    """
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
        return importlib.import_module("lockstep.training.run")
    finally:
        gc.freeze()
        gc.enable()


def _code(code: int) -> int:
    """Under torchrun a run that saved itself ends with 0, or it would be started again or called failed.

    What it ended with stands in its folder; `lockstep launch` hears of it, and returns it.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code
