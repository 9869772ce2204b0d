"""LS060, LS061 and LS045: names, options and variables that nothing, some ways or one rank define."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

HEAD = "import argparse\nimport os\nimport torch\nimport torch.distributed as dist\nfrom functools import partial\n"
RULES = configure({}, "LS045,LS060,LS061", None)


def found(text):
    return [finding.rule for finding in check_text(HEAD + text, RULES)]


def parsed(lines, reads="args.name", head=""):
    """A script whose options are parsed in one function, and read in another."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"""{head}
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
{body}    return parser.parse_args()

def save(args):
    print(args.batch_size, {reads})

save(options())
"""


def test_an_option_that_no_parser_adds():
    assert found(parsed([])) == ["LS060"]
    assert found(parsed(["parser.add_argument('--naem')"])) == ["LS060"]
    assert found(parsed([], "args.b")) == ["LS060"]


@pytest.mark.parametrize(
    ("lines", "reads"),
    [
        (["parser.add_argument('--name')"], "args.name"),
        (["parser.add_argument('-n', '--na-me')"], "args.na_me"),
        (["parser.add_argument('-n', dest='name')"], "args.name"),
        (["group = parser.add_argument_group('run')", "group.add_argument('-name')"], "args.name"),
        (["parser.set_defaults(name='last')"], "args.name"),
        (["parser.add_subparsers(dest='name')"], "args.name"),
        (["for each in FIELDS:", "    parser.add_argument(f'--{each}')"], "args.name"),
        (["args = parser.parse_args()", "args.name = 'last'", "return args"], "args.name"),
        (["args = parser.parse_args()", "vars(args).update(read())", "return args"], "args.name"),
        (["args = parser.parse_args()", "table = vars(args)", "table['name'] = 1", "return args"], "args.name"),
        (["args = parser.parse_args()", "for k, v in FIELDS:", "    setattr(args, k, v)", "return args"], "args.name"),
        (["args = parser.parse_args(namespace=DEFAULTS)", "return args"], "args.name"),
        (["toolbox.add_flags(parser)"], "args.name"),
        (["toolbox.add_flags(parser.add_argument_group('run'))"], "args.name"),
        (["group = parser.add_argument_group('run')", "toolbox.add_flags(group)"], "args.name"),
        (["flags = argparse.ArgumentParser()", "toolbox.add_flags(target=flags)"], "args.name"),
        (["for add in FIELDS:", "    add(parser)"], "args.name"),
        (["more = lambda p: toolbox.add_flags(p)", "more(parser)"], "args.name"),
        (["add = parser.add_argument", "add('--name')"], "args.name"),
        (["add = partial(parser.add_argument, type=int)", "add('--name')"], "args.name"),
        (["parser = argparse.ArgumentParser(parents=[toolbox.flags()])"], "args.name"),
        (["parser = argparse.ArgumentParser(parents=toolbox.PARENTS)"], "args.name"),
        (["args = parser.parse_args()", "toolbox.init_distributed(args)", "return args"], "args.name"),
        ([], "getattr(args, 'name', None)"),
        ([], "args.name if hasattr(args, 'name') else ''"),
        ([], "'name' in args and args.name"),
    ],
)
def test_an_option_that_may_be_there(lines, reads):
    assert found(parsed(lines, reads, "import toolbox\nFIELDS = DEFAULTS = read = open\n")) == []


def test_a_parser_that_a_function_hands_on():
    head = "import toolbox\n\ndef common(p, n=2):\n    toolbox.add_flags(p)\n"
    text = parsed(["common(parser)"], head=head)
    assert found(text) == []
    assert found(text.replace("toolbox.add_flags(p)", "toolbox.add_flags(n)")) == ["LS060"]


def test_options_that_an_installed_package_fills():
    text = parsed([], head="from timm import utils\n").replace(
        "save(options())", "args = options()\n{fill}\nsave(args)"
    )
    assert found(text.replace("{fill}", "utils.init_distributed_device(args)")) == []
    assert found(text.replace("{fill}", "utils.random_seed(args)")) == ["LS060"]


def test_options_of_other_files(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "shared.py").write_text(
        "import argparse\n\ndef parser():\n    made = argparse.ArgumentParser()\n"
        "    made.add_argument('-lr', type=float)\n    return made\n"
    )
    (tmp_path / "work.py").write_text("import torch\n\ndef run(args):\n    print(args.lr, args.seed)\n")
    (tmp_path / "first.py").write_text("import torch\nimport shared, work\n\nwork.run(shared.parser().parse_args())\n")
    assert [(f.path.rpartition("/")[2], f.line) for f in check_paths([str(tmp_path / "work.py")], RULES)] == [
        ("work.py", 4)
    ]
    (tmp_path / "second.py").write_text(
        "import torch\nimport shared, work\n\nmade = shared.parser()\nmade.add_argument('--seed')\n"
        "work.run(made.parse_args())\n"
    )
    assert check_paths([str(tmp_path / "work.py")], RULES) == []  # one of the programs adds it


def test_a_name_that_nothing_defines():
    assert found("print(model(2))\n") == ["LS060"]
    assert found("def step(batch):\n    return model(batch)\n\nprint(step(torch.ones(2)))\n") == ["LS060"]
    assert found("class Net:\n    width = 2\n\n    def size(self):\n        return width\n\nprint(Net().size())\n") == [
        "LS060"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "def step(batch):\n    return model(batch)\n",  # nothing calls it
        "from models import *\n\nprint(model(2))\n",
        "def main():\n    for _ in 'ab':\n        with open('a') as f:\n            f.read()\n    print(f)\nmain()\n",
        "print([item for item in range(2)], {k: v for k, v in ()}, lambda x: x)\n",
        "try:\n    print(model)\nexcept NameError:\n    pass\n",
        "try:\n    pass\nexcept OSError as error:\n    print(error)\n",
        "exec(open('settings.py').read())\nprint(model)\n",
        "def main():\n    global model\n    model = 2\n\nmain()\nprint(model)\n",
        "def main(x):\n    if x:\n        raise MissingError(x)\n\nmain(2)\n",
        "def main(*values, **options):\n    print(values, options, __file__)\n\nmain()\n",
        "def main(x):\n    y: Missing = x\n    print(y)\n\nmain(2)\n",
        "print(injected(2))  # noqa: F821\n",
        "print(injected(2))  # type: ignore[name-defined]\n",
        "# In[1]:\n\nget_ipython().run_line_magic('run', 'helpers.py')\n\n# In[2]:\n\nprint(model)\n",
        "# Databricks notebook source\ntable = spark.table('rows')\n",
        "match torch.ones(2):\n    case [first, *rest]:\n        print(first, rest)\n",
    ],
)
def test_a_name_that_may_be_there(text):
    assert found(text) == []


def test_functions_of_one_name_in_two_arms():
    lines = [
        "if args.line:",
        "    def cut(x):",
        "        return x",
        "else:",
        "    def cut(x):",
        "        return 2",
        "cut(1)",
    ]
    assert found(ways(lines)) == []


def test_a_name_that_is_read_before_its_value():
    assert found("def f(x):\n    return x\n\ndef main():\n    f = partial(f, x=2)\n    return f\n\nmain()\n") == [
        "LS060"
    ]
    assert found("def main(data):\n    for x in data:\n        step += 1\n\nmain([])\n") == ["LS060"]
    assert (
        found(
            "def main(data):\n    for x in data:\n        if x > 1:\n            print(y)\n        y = x\n\nmain([])\n"
        )
        == []
    )
    assert found("def main(data):\n    y = 0\n    for x in data:\n        y += 1\n    return y\n\nmain([])\n") == []


def test_names_that_are_nearly_right():
    assert found("dist.all_reduec(torch.ones(1))\n") == ["LS060"]
    assert found("os.environ['CUDA_VISIBLE_DEVICE'] = '0'\n") == ["LS060"]
    assert found("dist.all_reduce(torch.ones(1))\nos.environ['MY_DEVICES'] = '0'\n") == []


def ways(lines, before=()):
    body = "".join(f"    {line}\n" for line in lines)
    head = "".join(f"    {line}\n" for line in before)
    return f"def main(args, data):\n{head}{body}\nmain(None, [])\n"


TWO_ARMS = ["if args.ddp:", "    sampler = data", "else:", "    order = data"]


def test_a_name_that_one_arm_defines():
    assert found(ways([*TWO_ARMS, "print(sampler)"])) == ["LS061"]
    assert found(ways([*TWO_ARMS, "for x in data:", "    print(sampler)"])) == ["LS061"]
    assert found(ways([*TWO_ARMS, "print(sampler)"], ["if not data:", "    return"])) == ["LS061"]
    assert found(ways([*TWO_ARMS, "if dist.get_rank() == 0:", "    print(sampler)"])) == ["LS061"]


def test_a_switch_without_another_arm():
    text = parsed(["parser.add_argument('--ema', action='store_true')"], "2") + "\n"
    read = "def run(args):\n    if args.ema:\n        shadow = 2\n    print(shadow)\n\nrun(options())\n"
    assert found(text + read) == ["LS061"]
    assert found(text.replace(", action='store_true'", "") + read) == []


@pytest.mark.parametrize(
    "lines",
    [
        [*TWO_ARMS, "if args.ddp:", "    print(sampler)"],
        [*TWO_ARMS, "if not args.ddp:", "    return", "print(sampler)"],
        [*TWO_ARMS, "if args.world_size > 1:", "    print(sampler)"],
        [*TWO_ARMS, "args.first = args.ddp and args.rank == 0", "if args.first:", "    print(sampler)"],
        [*TWO_ARMS, "first = args.ddp and dist.get_rank() == 0", "if first:", "    print(sampler)"],
        [*TWO_ARMS, "print(sampler if args.ddp else order)"],
        [*TWO_ARMS, "print(args.ddp and sampler)"],
        [*TWO_ARMS, "assert args.ddp", "print(sampler)"],
        [*TWO_ARMS[:3], "    raise ValueError('no')", "print(sampler)"],
        [*TWO_ARMS[:3], "    order = data", "    exit(1)", "print(sampler)"],
        ["if args.kind == 'a':", "    net = 1", "elif args.kind == 'b':", "    net = 2", "print(net)"],
        ["for x in data:", "    last = x", "print(last)"],
        ["while True:", "    if data:", "        net = 1", "        break", "print(net)"],
        ["try:", "    net = data[0]", "except IndexError:", "    print('none')", "print(net)"],
        ["try:", *(f"    {line}" for line in TWO_ARMS), "    print(sampler)", "except NameError:", "    pass"],
        ["if data:", "    net = 1", "print(net)"],
    ],
)
def test_a_name_that_every_way_defines_or_may(lines):
    assert found(ways(lines)) == []


def test_a_name_that_only_a_handler_defines():
    lines = ["try:", "    import fast", "except ImportError:", "    slow = 2", "print(slow)"]
    assert found(ways(lines)) == ["LS061"]
    assert found(ways([*lines[:2], "    slow = 1", *lines[2:]])) == []


RANK = "def main(rank, data, every):\n    dist.init_process_group('nccl')\n{}    dist.destroy_process_group()\n"


def ranked(lines, head=""):
    return head + RANK.format("".join(f"    {line}\n" for line in lines))


@pytest.mark.parametrize(
    "lines",
    [
        ["if rank == 0:", "    held = data", "data, held = zip(data, held)"],
        ["writer = None", "if rank == 0:", "    writer = open('x')", "writer.write('x')"],
        ["writer = open('x') if rank == 0 else None", "for x in data:", "    writer.write('x')"],
        ["if rank == 0 and every:", "    pipe = open('x')", "if every:", "    pipe.close()"],
    ],
)
def test_a_value_of_one_rank(lines):
    assert found(ranked(lines)) == ["LS045"]


@pytest.mark.parametrize(
    "lines",
    [
        ["writer = None", "if rank == 0:", "    writer = open('x')", "if writer is not None:", "    writer.write('x')"],
        ["writer = open('x') if rank == 0 else None", "if writer:", "    writer.write('x')"],
        ["writer = open('x') if rank == 0 else None", "print(writer)"],
        ["writer = None", "if every:", "    writer = open('x')", "writer.write('x')"],
        ["if rank == 0:", "    x = 1", "elif rank == 1:", "    x = 2", "print(x)"],
        ["if rank == 0:", "    x = 1", "else:", "    return", "print(x)"],
    ],
)
def test_a_value_of_all_ranks(lines):
    assert found(ranked(lines)) == []


def test_none_that_the_other_ranks_hand_on():
    head = (
        "def train(data, writers):\n    if writers is not None:\n        log, table = writers\n    log.write('x')\n\n"
    )
    lines = ["if rank == 0:", "    train(data, (1, 2))", "else:", "    train(data, None)"]
    assert found(ranked(lines, head)) == ["LS045"]
    assert found(ranked(["train(data, None)", *lines], head)) == []


def test_a_global_of_one_rank():
    head = "def prepare(data):\n    log.write('x')\n\n"
    lines = ["global log", "if rank == 0:", "    log = open('x')", "prepare(data)"]
    assert found(ranked(lines, head)) == ["LS045"]
    assert found(ranked([*lines[:3], "if rank == 0:", "    prepare(data)"], head)) == []
    assert found(ranked(lines, f"log = open('x')\n\n{head}")) == []
