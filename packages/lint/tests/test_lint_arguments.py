"""LS058, calls that do not fit, and LS059, results that do not come back: what is certain, and what is not."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

HEAD = "import functools, torch\nfrom torch import nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"


def lines(text, code):
    found = check_text(HEAD + text, configure({}, code, "", hints=True))
    return [finding.line - HEAD.count("\n") for finding in found]


SAVE = """
def save(model, path, epoch=0, *, name):
    torch.save(model, path)

{before}
save({given})
"""


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("model, 'last.pt', name='a'", False),
        ("model, 'last.pt', 3, name='a'", False),
        ("path='last.pt', model=model, name='a'", False),
        ("*parts, name='a'", False),
        ("model, **options", False),
        ("*parts, **options", False),
        ("model, name='a'", True),  # no path
        ("model, 'last.pt'", True),  # no name
        ("model, 'last.pt', 3, 'a'", True),
        ("model, 'last.pt', nam='a'", True),
        ("model, 'last.pt', path='a', name='a'", True),
        ("model, 'last.pt', 3, 4, *parts, **options", True),
        ("*parts, step=1, **options", True),
    ],
)
def test_arguments(given, wrong):
    assert bool(lines(SAVE.format(before="", given=given), "LS058")) is wrong


@pytest.mark.parametrize(
    "before",
    [
        "def save(model):\n    torch.save(model, 'last.pt')",  # of two definitions one takes the call
        "save = functools.partial(save, path='last.pt', name='a')",
        "from helpers import save",
        "from helpers import *",
        "if torch.cuda.is_available():\n    def save(model):\n        pass",
    ],
)
def test_another_function_of_the_name(before):
    assert lines(SAVE.format(before=before, given="model"), "LS058") == []


@pytest.mark.parametrize(
    ("around", "wrong"),
    [
        ("{}", True),
        ("for epoch in range(9):\n    {}", True),
        ("try:\n    {}\nfinally:\n    print(1)", True),
        ("try:\n    {}\nexcept OSError:\n    print(1)", True),
        ("try:\n    {}\nexcept Exception:\n    print(1)", False),
        ("try:\n    {}\nexcept (OSError, TypeError):\n    print(1)", False),
        ("with pytest.raises(TypeError):\n    {}", False),
        ("if False:\n    {}", False),
        ("debug = False\nif debug:\n    {}", False),
        ("def later():\n    {}", False),  # nothing calls it
        ("def later():\n    {}\nlater()", True),
        ("def later():\n    raise ValueError\n    {}\nlater()", False),
        ("class Out(nn.Module):\n    def forward(self, x):\n        {}\nOut()(1)", True),
        ("class Out(nn.Module):\n    def forward(self, x):\n        {}", False),
        ("found = [{} for save in parts]", False),
        ("found = lambda save: {}", False),
    ],
)
def test_where_a_run_ends(around, wrong):
    text = "def save(model, path):\n    torch.save(model, path)\n" + around.format("save(model)")
    assert bool(lines(text, "LS058")) is wrong


@pytest.mark.parametrize(
    ("decorator", "wrong"),
    [
        ("@torch.no_grad()", True),
        ("@torch.inference_mode()", True),
        ("@functools.lru_cache(maxsize=None)", True),
        ("@with_config", False),
        ("@hydra.main(config_path='conf')", False),
    ],
)
def test_decorators(decorator, wrong):
    assert bool(lines(f"{decorator}\ndef run(config):\n    print(config)\nrun()", "LS058")) is wrong


NET = """
class Base(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.scale(self.layer(x))

    def scale(self, x):
        return x * 2

    @staticmethod
    def half(x):
        return x / 2

    @classmethod
    def wide(cls, factor):
        return cls(8 * factor)

    def no_object(x):
        return x

class Net(Base):
    def forward(self, x, mask):
        return super().forward(x) * mask

{use}
"""


def test_a_member_of_an_enumeration():
    text = "import enum\n\nclass Size(enum.Enum):\n    SMALL = (1, 2)\n\n"
    text += "    def __init__(self, width, depth):\n        self.area = width * depth\n\nSize((1, 2))\n"
    assert lines(text, "LS058") == []
    assert lines(text.replace("(enum.Enum)", ""), "LS058") == [9]


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        ("Net(8)(x, mask)", False),
        ("Net()", True),
        ("Net(8, 8)", True),
        ("net = Net(8)\nnet(x)", True),
        ("net = Net(8).cuda()\nnet(x)", True),
        ("net = DDP(Net(8))\nnet(x)", True),
        ("net = DDP(Net(8))\nnet(x, mask)", False),
        ("net = Base(8) if small else Net(8)\nnet(x)", False),  # one of the two takes it
        ("net = Base(8) if small else Net(8)\nnet(x, mask, 1)", True),
        ("net = Net(8)\nnet.forward = run\nnet(x)", False),
        ("net = Net(8)\nsetattr(net, 'forward', run)\nnet(x)", False),
        ("net = Net(8)\nnet.scale()", True),
        ("net = Net(8)\nnet.half(x)\nNet.half(x)\nNet.wide(2)\nnet.wide(2)\nNet.scale(net, x)", False),
        ("Net.half()", True),
        ("Net.wide()", True),
        ("Net.scale(x)", True),
        ("Base(8).no_object()", False),
        ("Base(8).no_object(x)", True),
        ("def run(net):\n    if masked:\n        net(x, mask)\n    else:\n        net(x)\nrun(Net(8))", False),
        ("def run(net):\n    net(x)\nrun(Net(8))", True),
    ],
)
def test_objects(use, wrong):
    assert bool(lines(NET.format(use=use), "LS058")) is wrong


OWN = """
class Base:
    def run(self):
        return self.step(1, 2)

    def step(self, x):
        {body}

{more}
Base().run()
"""


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, True),
        ({"body": "raise NotImplementedError"}, False),
        ({"more": "class Two(Base):\n    def step(self, x, y):\n        return x"}, False),
        ({"more": "class Two(Base):\n    def step(self, x, z=1, *, y):\n        return x"}, True),
        ({"more": "def other(x, y):\n    return x\nBase.step = other"}, False),
    ],
)
def test_methods_of_the_object_itself(change, wrong):
    assert bool(lines(OWN.format(**({"body": "return x", "more": ""} | change)), "LS058")) is wrong


def test_a_class_with_a_part_that_one_option_forbids():
    text = """
class Norm(nn.Module):
    def forward(self, x, gain):
        return x * gain

class Net(nn.Module):
    def __init__(self, own, shared):
        super().__init__()
        if shared:
            raise NotImplementedError
        elif own:
            self.norm = Norm()
        self.own, self.shared = own, shared

    def forward(self, x):
        if self.own:
            return self.norm(x, 1)
        elif self.shared:
            return self.norm(x)
        return x

Net(True, False)(torch.ones(1))
"""
    assert lines(text, "LS058") == []


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import torch\n{text}\n")
    found = check_paths(sorted(map(str, folder.rglob("*.py"))), configure({}, "LS058,LS059", "", hints=True))
    return [(finding.path.rsplit("/", 1)[-1], finding.line, finding.severity.name) for finding in found]


def test_functions_of_other_files(tmp_path):
    (tmp_path / "setup.py").write_text("")
    helpers = "def save(model, path):\n    torch.save(model, path)"
    main = "from tools.helpers import save\nimport tools.helpers\nsave(1)\ntools.helpers.save(1)\n"
    assert write(tmp_path, tools__helpers=helpers, main=main) == [("main.py", 4, "ERROR"), ("main.py", 5, "ERROR")]
    main += "tools.helpers.save = print\n"
    assert write(tmp_path, tools__helpers=helpers, main=main) == []


def test_a_name_that_two_files_of_the_project_have(tmp_path):
    (tmp_path / "setup.py").write_text("")
    more = {"utils": "def save(model):\n    torch.save(model, 'a')", "tools__utils": "def save(model, path):\n    pass"}
    assert write(tmp_path, **more, tools__layer="from utils import save\nsave(1)") == []


def test_a_file_that_is_tried_out_by_itself(tmp_path):
    (tmp_path / "setup.py").write_text("")
    net = "def make(width):\n    return torch.nn.Linear(width, 1)\nif __name__ == '__main__':\n    make()"
    assert write(tmp_path, net=net, main="from net import make\nmake(8)") == [("net.py", 5, "HINT")]


RESULT = """
def evaluate(model, loader):
    {body}

{use}
"""


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        ("evaluate(m, d)", False),
        ("stats = evaluate(m, d)\nprint(stats)", False),
        ("stats = evaluate(m, d)\nprint(stats['acc'])", True),
        ("stats = evaluate(m, d)\nif stats is not None:\n    print(stats['acc'])", False),
        ("stats = evaluate(m, d)\nprint(stats['acc'] if stats else 0)", False),
        ("stats = evaluate(m, d)\nstats = {}\nprint(stats['acc'])", False),
        ("stats = {}\nif late:\n    stats = evaluate(m, d)\nprint(stats['acc'])", False),
        ("acc, loss = evaluate(m, d)", True),
        ("evaluate(m, d).backward()", True),
        ("loss = evaluate(m, d)\nloss.backward()", True),
        ("accelerator.backward(evaluate(m, d))", True),
        ("total = 1 + evaluate(m, d)", True),
        ("total = 0\ntotal += evaluate(m, d)", True),
        ("print('acc %s' % evaluate(m, d))", False),
        ("for row in evaluate(m, d):\n    print(row)", True),
        ("print([row for row in evaluate(m, d)])", True),
        ("print(*evaluate(m, d))", True),
        ("try:\n    evaluate(m, d)['acc']\nexcept TypeError:\n    pass", False),
    ],
)
def test_a_function_that_returns_nothing(use, wrong):
    assert bool(lines(RESULT.format(body="print(model(loader))", use=use), "LS059")) is wrong
    assert lines(RESULT.format(body="return model(loader)", use=use), "LS059") == []


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("pass", False),
        ("raise NotImplementedError", False),
        ("sys.exit(1)", False),
        ("yield model", False),
        ("return", True),
        ("return None", True),
        ("if loader:\n        return\n    print(1)", True),
        ("if loader:\n        return model\n    print(1)", False),
        ("print(lambda: (yield))", True),
    ],
)
def test_what_gives_nothing_back(body, wrong):
    assert bool(lines(RESULT.format(body=body, use="evaluate(m, d)['acc']"), "LS059")) is wrong


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        ("acc, loss = evaluate(m, d)", False),
        ("acc, *more = evaluate(m, d)", False),
        ("acc, loss, f1 = evaluate(m, d)", True),
        ("acc, loss, f1, *more = evaluate(m, d)", True),
        ("(acc, loss), f1 = evaluate(m, d)", False),
        ("acc = evaluate(m, d)[1]", False),
        ("acc = evaluate(m, d)[:5]", False),
        ("acc = evaluate(m, d)[-3]", True),
        ("acc = evaluate(m, d)[:, 0]", True),
        ("acc = evaluate(m, d)['acc']", True),
        ("evaluate(m, d).backward()", True),
        ("evaluate(m, d).count(1)", False),
        ("both = evaluate(m, d) + (1, 2)", False),
        ("half = evaluate(m, d) / 2", True),
        ("image = (image - evaluate(m, d)) / 255", False),  # an array takes a tuple
        ("image /= evaluate(m, d)", False),
    ],
)
def test_a_function_that_returns_two_values(use, wrong):
    assert bool(lines(RESULT.format(body="return model, loader", use=use), "LS059")) is wrong
    assert lines(RESULT.format(body="return model(loader)", use=use), "LS059") == []
    mixed = "if loader:\n        return model\n    return model, loader"
    assert lines(RESULT.format(body=mixed, use=use), "LS059") == []


LOSS = """
class Loss(nn.Module):
    def forward(self, x, y):
        {body}

loss_fn = Loss()
loss = loss_fn(torch.ones(2), torch.ones(2))
{use}
"""


def test_a_forward_that_forgets_its_value():
    text = "total = ((x - y) ** 2).sum()"
    assert lines(LOSS.format(body=text, use="print(loss)"), "LS059") == [6]
    assert lines(LOSS.format(body="self.total = ((x - y) ** 2).sum()", use="print(loss)"), "LS059") == []
    assert lines(LOSS.format(body=f"{text}\n        return total", use="loss.backward()"), "LS059") == []
    assert lines(LOSS.format(body="print(x - y)", use="loss.backward()"), "LS059") == [8]
