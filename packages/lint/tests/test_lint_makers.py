"""LS008: what makes a model, what seems to, and heads that are added to a loaded one; packages that are named with
their files; folders that a function adds to the path.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def lines(text, code="LS008"):
    return [text.splitlines()[finding.line - 1].strip() for finding in check_text(text, configure({}, code, ""))]


SCRIPT = """
import sentencepiece as spm
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

class Story(GPT2LMHeadModel):
    pass

class FocalLoss(nn.Module):
    pass

def {function}(options):
    return Net()

def main(loader, options):
    {first}
    thing = {made}
    optimizer = torch.optim.SGD(thing.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(thing(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    main([], None)
"""


@pytest.mark.parametrize(
    ("function", "first", "made", "found"),
    [
        ("new_model", "pass", "new_model(options)", True),
        ("init_GAN", "pass", "init_GAN(options)", True),
        ("Story_of", "pass", "Story(GPT2Config())", True),
        # no model of torch comes first
        ("new_model", "sp_model = spm.SentencePieceProcessor(model_file=options)", "new_model(options)", True),
        ("new_model", "generator = torch.Generator().manual_seed(0)", "new_model(options)", True),
        ("new_model", "criterion = FocalLoss()", "new_model(options)", True),
        # nothing says that the function makes one
        ("half", "pass", "half(options)", False),
        ("get_loss", "pass", "get_loss(options)", False),
    ],
)
def test_what_makes_a_model(function, first, made, found):
    text = SCRIPT.format(function=function, first=first, made=made)
    assert lines(text) == ([f"thing = {made}"] if found else [])


HEADS = """
import torch
from torch import nn
from transformers import BertModel, BertPreTrainedModel, Trainer, TrainingArguments, set_seed

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

class Scorer(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        {layer}

def main(data, path):
    {before}
    model = Scorer.from_pretrained({path})
    {after}
    Trainer(model=model, args=TrainingArguments("out"), train_dataset=data).train()

if __name__ == "__main__":
    main([], "bert-base-uncased")
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"layer": "self.mlp = Head()"}, True),
        ({"path": "'openai/whisper-small'"}, True),
        ({"after": "torch.manual_seed(0)"}, True),
        ({"before": "set_seed(0)"}, False),
        # what a public checkpoint has, or one of the project's own
        ({"layer": "self.lm_head = nn.Linear(8, 2)"}, False),
        ({"layer": "self.drop = nn.Dropout(0.1)"}, False),
        ({"layer": "pass"}, False),
        ({"path": "'./model'"}, False),
        ({"path": "checkpoint_path"}, False),
        ({"path": "output_dir"}, False),
        ({"path": "'best/model'"}, False),
        ({"path": "*path"}, False),
        ({"path": "path, cache_dir='./cache'"}, True),
        ({"path": "'openai/bestow-savedata'"}, True),
        ({"before": "checkpoint = 'bert-base-cased'", "path": "checkpoint"}, True),
        ({"before": "base = './model'", "path": "base"}, False),
    ],
)
def test_a_head_that_is_added_to_a_loaded_model(change, found):
    usual = {"layer": "self.ranker = nn.Linear(8, 2)", "before": "pass", "path": "path", "after": "pass"}
    assert bool(lines(HEADS.format(**usual | change))) is found


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.layer = nn.BatchNorm1d(4)
"""
WRAPPED = """
{line}
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(rank):
    return DDP({made}.to(rank), device_ids=[rank])
"""


@pytest.mark.parametrize(
    ("line", "made", "found"),
    [
        ("import parts.builder", "parts.builder.Net()", True),
        ("import parts.deep.more", "parts.deep.more.Net()", True),
        ("import parts", "parts.builder.Net()", True),
        ("from parts import deep", "deep.more.Net()", True),
        ("import parts.builder", "parts.builder.Other()", False),
        ("import pieces.builder", "pieces.builder.Net()", False),
    ],
)
@pytest.mark.parametrize("package", [True, False])
def test_a_package_that_is_named_with_its_file(tmp_path, line, made, found, package):
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "builder.py").write_text(NET)
    (tmp_path / "parts" / "deep" / "more.py").write_text(NET)
    if package:
        (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "main.py").write_text(WRAPPED.format(line=line, made=made))
    assert bool(check_paths([str(tmp_path / "main.py")], configure({}, "LS005", ""))) is found


ADDS = (
    "import os.path as osp\nimport sys\n\ndef add_path(path):\n    if path not in sys.path:\n        {does}\n\n{call}\n"
)


@pytest.mark.parametrize(
    ("does", "call", "found"),
    [
        ("sys.path.insert(0, path)", "lib_path = osp.join(this_dir, '..', 'lib')\nadd_path(lib_path)", True),
        ("sys.path.append(path)", "add_path(osp.join(this_dir, '..', 'lib'))", True),
        ("print(path)", "lib_path = osp.join(this_dir, '..', 'lib')\nsys.path.insert(0, lib_path)", True),
        ("print(path)", "add_path(osp.join(this_dir, '..', 'lib'))", False),
        ("sys.path.insert(0, path)", "add_path(osp.join(this_dir, '..', 'bin'))", False),
    ],
)
def test_a_function_that_adds_to_the_path(tmp_path, does, call, found):
    for name in ("lib", "bin", "tools"):
        (tmp_path / name).mkdir()
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "lib" / "nets.py").write_text(NET)
    (tmp_path / "tools" / "_init_paths.py").write_text(ADDS.format(does=does, call=call))
    script = WRAPPED.format(line="import _init_paths\nfrom nets import Net", made="Net()")
    (tmp_path / "tools" / "main.py").write_text(script)
    assert bool(check_paths([str(tmp_path / "tools" / "main.py")], configure({}, "LS005", ""))) is found


@pytest.mark.parametrize(
    ("name", "step", "found"),
    [
        ("train.py", "pass", True),
        ("test.py", "optimizer.step()", True),
        ("unit_test.py", "pass", False),  # tries out what it differentiates
    ],
)
def test_a_file_that_tests_by_its_name(name, step, found):
    text = (
        NET + f"\nnet = Net()\nfor x in range(9):\n    net(x).sum().backward()\n    {step}\nif __name__ == '__main__':"
    )
    assert bool(check_text(text + "\n    pass\n", configure({}, "LS008", ""), name)) is found
