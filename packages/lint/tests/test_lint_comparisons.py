"""LS028: tests of the rank in other words, flags and functions that tell it, and what is turned off on the others."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

START = "import os\nimport sys\nimport wandb\nimport torch.distributed as dist\n"
PRINTS = configure({}, "LS028", "")
GROUP = "    dist.init_process_group('nccl')\n"
RUN = "\nmain(int(os.environ['RANK']), parse())\n"


def told(body, before=""):
    """How often the rule is told in a script with these lines, indented from the second on, in its main function."""
    return len(check_text(f"{START}{before}\ndef main(rank, args):\n{GROUP}    {body}\n{RUN}", PRINTS))


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("rank", 0),
        ("dist.get_rank()", 0),
        ("bool(rank)", 0),
        ("int(os.environ['RANK'])", 0),
        ("rank and args.loud", 1),  # the other ranks go on where args.loud is not set
        ("args.lora_rank", 1),
        ("args.ranks", 1),
        ("args.gpu", 1),  # as a rule an option
        ("rank >= 1", 0),
        ("rank >= 2", 1),
        ("0 < rank", 0),
        ("dist.get_world_size() > 1 and rank > 0", 0),
        ("args.distributed and dist.get_rank() != 0", 0),
        ("dist.is_available() and dist.is_initialized() and dist.get_rank() != 0", 0),
        ("args.quiet and dist.get_rank() != 0", 1),
        ("args.distributed and args.quiet and rank != 0", 1),
        ("rank is None", 1),
        ("xm.get_ordinal() != 0", 0),
        ("rank != args.master_rank", 0),
        ("rank != args.bound", 1),
    ],
)
def test_who_leaves_before_it_prints(test, number):
    assert told(f"if {test}:\n        return\n    print('begin')") == number


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("not (args.distributed and rank != 0)", 0),
        ("rank == MAIN", 0),
        ("rank == BOUND", 1),
        ("str(rank) == '0'", 0),
        ("getattr(args, 'rank', 0) == 0", 0),
        ("getattr(args, 'step', 0) == 0", 1),
        ("(me := dist.get_rank()) == 0", 0),
        ("1 > rank", 0),
        ("2 > rank", 1),
        ("args.is_leader", 0),
        ("int(rank == 0)", 0),
    ],
)
def test_who_prints(test, number):
    assert told(f"if {test}:\n        print('begin')", "MAIN = 0\nBOUND = 2\n") == number


WHO = """
def who(group):
    {}
    return {}

class Place:
    def __init__(self, size):
        self.size = size

    @property
    def {}(self):
        return {}

    def tell(self):
        if self.speaks:
            print('place', self.size)
"""


@pytest.mark.parametrize(
    ("give", "number"),
    [("dist.get_rank()", 0), ("int(os.environ['RANK'])", 0), ("dist.get_world_size()", 1), ("None", 1)],
)
def test_a_function_that_gives_the_rank(give, number):
    assert (
        told("me = who(1)\n    if me == 0:\n        print('begin')", WHO.format("", give, "speaks", "True")) == number
    )


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [("speaks", "dist.get_rank() == 0", 0), ("speaks", "self.size > 1", 1), ("other", "dist.get_rank() == 0", 1)],
)
def test_a_property_that_tells_the_rank(name, value, number):
    assert told("Place(args.size).tell()", WHO.format("", "1", name, value)) == number


DECORATOR = """
def once(function):
    def run(*given):
        {}
    return run

@once
def say(text):
    print(text)
"""


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("if dist.get_rank() == 0:\n            return function(*given)", 0),
        ("return function(*given) if dist.get_rank() == 0 else None", 0),
        ("if dist.get_rank() != 0:\n            return None\n        return function(*given)", 0),
        ("return function(*given)", 1),
        ("if len(given) == 0:\n            return function(*given)", 1),
    ],
)
def test_a_decorator_of_the_project(lines, number):
    assert told("say('begin')", DECORATOR.format(lines)) == number


METER = """
class Meter:
    def __init__(self):
        self.count = 0

    def step(self):
        print(self.count)
"""


@pytest.mark.parametrize(
    ("made", "number"),
    [
        ("[Meter()] if rank == 0 else []", 0),
        ("[Meter()]", 1),
        ("[Meter()] if args.loud else []", 1),
        ("[Meter()] if rank == 0 else [Meter()]", 1),
    ],
)
def test_an_object_that_the_main_rank_makes(made, number):
    assert told(f"meters = {made}\n    for meter in meters:\n        meter.step()", METER) == number


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("if rank == 0:\n        args.loop.add_handler('end', report)", 0),
        ("if rank == 0:\n        list(map(report, args.all))", 0),
        ("args.loop.add_handler('end', report)", 1),
        ("if rank == 0:\n        args.loop.add_handler('end', report)\n    args.loop.on_end = report", 1),
    ],
)
def test_a_function_that_the_main_rank_hands_on(lines, number):
    assert told(lines, "def report(state):\n    print(state)\n") == number


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("if rank == 0:\n        def say(text):\n            print(text)\n    else:\n        say = args.none", 0),
        ("if args.loud:\n        def say(text):\n            print(text)\n    else:\n        say = args.none", 1),
    ],
)
def test_a_function_that_the_main_rank_has(lines, number):
    assert told(f"{lines}\n    say('begin')") == number


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("wandb.init(mode='online' if rank == 0 else 'disabled')", 0),
        ("mode = 'online' if rank == 0 else 'disabled'\n    wandb.init(mode=mode)", 0),
        ("wandb.init(mode='online' if args.online else 'offline')", 2),
        ("wandb.init(mode='online')", 2),
        ("if rank != 0:\n        os.environ['WANDB_MODE'] = 'disabled'\n    wandb.init()", 0),
        ("os.environ['WANDB_MODE'] = 'online' if rank == 0 else 'disabled'\n    wandb.init()", 0),
    ],
)
def test_a_tracker_that_is_off_on_the_other_ranks(lines, number):
    assert told(f"{lines}\n    wandb.log(args.scores)") == number


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("if rank != 0:\n        sys.stdout = args.nowhere", 0),
        ("if rank == 0:\n        sys.stdout = args.both", 1),
        ("sys.stdout = args.both", 1),
    ],
)
def test_output_that_goes_elsewhere_on_the_other_ranks(lines, number):
    assert told(f"{lines}\n    print('begin')") == number


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("group='run', name=f'rank-{rank}'", 0),
        ("name=f'rank-{rank}'", 1),
    ],
)
def test_a_run_for_each_rank_in_a_group_is_an_opinion(given, number):
    script = f"{START}\ndef main(rank, args):\n{GROUP}    wandb.init({given})\n{RUN}"
    assert len([f for f in check_text(script) if f.rule == "LS028"]) == number
