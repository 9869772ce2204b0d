"""Parse and check the flags of `lockstep train` before torch is imported, then train."""

import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.adapters.hf_trainer import flags
from lockstep.config import cli
from lockstep.config.cli import Parser
from lockstep.config.schema import Config, check_typed
from lockstep.config.task_options import LIGHTNING, OWN, kind_of
from lockstep.distributed import failures
from lockstep.distributed.launcher import allocator_variables
from lockstep.distributed.progress import MEMBER_VARIABLE
from lockstep.distributed.starters import read_starter
from lockstep.errors import ConfigError, UsageError
from lockstep.interrupts import keep_interrupts
from lockstep.training.state.run_dir import RunFolder

__all__ = ["command", "config_and_task", "import_training"]

_BEGIN = """lockstep train trains what its flags name, and there are none. Three ways to begin:

  your own model:            lockstep init mine          writes a task, a config and a test
  a text file or folder:     lockstep train --dataset-name FILE
  the training code you have:
    any script               lockstep trace -o one -- python train.py        records its steps, changes nothing
    a LightningModule        lockstep train --lightning FILE.py:Module
    a Hugging Face Trainer   lockstep train --hf-script FILE.py --hf-args FILE.json

`lockstep train --experiment-name NAME` trains a small GPT on this Python's own library, as `make train` does.
`lockstep train --help` lists the flags."""


def command(argv: list[str]) -> int:
    """Run `lockstep train` and return its exit code.

    Raises:
        UsageError: an invalid flag or combination; nothing was written.
        LockstepError: the run failed.
    """
    # A launcher's processes train with the defaults.
    if not argv and "WORLD_SIZE" not in os.environ:
        print(_BEGIN, file=sys.stderr)
        return UsageError.exit_code
    # CUDA may be initialised as soon as torch is imported, so set the allocator's variables before.
    if "torch" not in sys.modules:
        os.environ.update(allocator_variables(os.environ))
    args = vars(_parser(argv).read(argv))
    options = cli.collect_options(args)
    # Fail on a wrong value before torch is imported, which takes seconds.
    cli.build(cli.apply_preset(options))
    read_starter(os.environ)
    failures.note_interrupt("interrupted before the run began: this start saved nothing")
    script = flags.find_script(args, options)
    if script:
        _check_alone(args)
        import_training()
        hf_script = importlib.import_module("lockstep.training.hf_script")
        return failures.process_code(int(hf_script.run_script(script, options)))
    config, task = config_and_task(options)
    if kind_of(config.task) == OWN:
        check_typed(options, ())
    if args["show_groups"]:
        importlib.import_module("lockstep.training.summary").show_groups(config)
        return 0
    # Only the rank that will lock the folder checks it.
    if os.environ.get("RANK", "0") == "0" and not os.environ.get(MEMBER_VARIABLE):
        RunFolder(config.local_dir, config.experiment_name).check_free()
    run = import_training().Run(config, task)
    try:
        return failures.process_code(run().exit_code)
    except KeyboardInterrupt:
        # A run that saved on Ctrl-C returns its code; any other interrupt passes.
        if run.status != "interrupted":
            raise
        return failures.process_code(run.result.exit_code)


def config_and_task(options: Mapping[str, Any]) -> tuple[Config, Any]:
    """Build the Config of the options, and the task of a LightningModule.

    The module's loaders set what the options leave out.

    Raises:
        ConfigError: an invalid option, or a module that is not supported.
    """
    config = cli.build(cli.apply_preset(dict(options)))
    if not config.task.startswith(LIGHTNING):
        return config, None
    result: tuple[Config, Any] = importlib.import_module("lockstep.adapters.lightning.convert").configure(dict(options))
    return result


def _parser(argv: Sequence[str] = ()) -> Parser:
    parser = cli.make_parser(list(argv), "lockstep train")
    add = parser.add_argument
    add("--show-groups", action="store_true", help="print the optimizer's parameter groups and exit")
    return flags.with_flags(parser)


def _check_alone(args: Mapping[str, Any]) -> None:
    if args["show_groups"]:
        raise ConfigError("--show-groups cannot be used with --hf-script; remove one")


def import_training() -> Any:
    """Import lockstep.training.run, and the modules that the first optimizer imports.

    Garbage collection is off meanwhile: it finds nothing among half a million live objects and takes a sixth of the
    time. `gc.freeze` keeps later collections from scanning them.
    """
    gc.disable()
    try:
        with keep_interrupts():
            # The first optimizer imports torch._dynamo: do it here, while garbage collection is off.
            importlib.import_module("torch._dynamo")
            return importlib.import_module("lockstep.training.run")
    finally:
        gc.freeze()
        gc.enable()
