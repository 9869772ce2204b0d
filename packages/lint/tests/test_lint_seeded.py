"""LS008: what counts as a seed of the weights, when, and the ways in which a model is made."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

SCRIPT = """
import random
import sys
import timeit
import numpy as np
import torch
import torchvision.models as models
from torch import nn
from torch.utils.data import DataLoader

def seed_all(seed):
    torch.manual_seed(seed)

def worker(number):
    {worker}

def main(data):
    {before}
    model = {model}
    {after}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, worker_init_fn=worker):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

main([])
"""


def told(text, code="LS008"):
    return bool(check_text(text, configure({}, code, "")))


def script(before="pass", after="pass", model="nn.Linear(4, 2)", worker="pass"):
    return SCRIPT.format(before=before, after=after, model=model, worker=worker)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # random numbers that make no weights
        (script(worker="np.random.seed(42 + number)"), True),
        (script(before="np.random.seed(0)"), True),
        (script(before="random.seed(0); np.random.seed(0)"), True),
        (script(before="np.random.seed(0); torch.manual_seed(0)"), False),
        (script(before="torch.set_default_device('cuda'); torch.cuda.manual_seed(0)"), False),
        (script(before="torch.cuda.manual_seed(0); torch.nn.Linear(2, 2, device='cuda')"), False),
        # too late
        (script(after="torch.manual_seed(0)"), True),
        (script(after="seed_all(0)"), True),
        (script(before="seed_all(0)"), False),
        (script(before="seed_all(0)", after="seed_all(1)"), False),
        (script(before="model_config = nn.Identity()", after="torch.manual_seed(0); net = nn.Linear(2, 2)"), True),
        # a class that is looked up
        (script(model="getattr(models, sys.argv[1])()"), True),
        (script(model="models.__dict__[sys.argv[1]](num_classes=4)"), True),
        (script(before="torch.manual_seed(0)", model="getattr(models, sys.argv[1])()"), False),
    ],
)
def test_what_seeds_the_weights(text, expected):
    assert told(text) is expected


BENCHMARK = """
import timeit
import torch
from torch import nn

{seed}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

{run}
"""


@pytest.mark.parametrize(
    ("seed", "run", "expected"),
    [
        ("", "timeit.timeit(step, number=10)", True),
        ("", "for _ in range(3):\n    timeit.timeit(step, number=10)", True),
        ("torch.manual_seed(0)", "timeit.timeit(step, number=10)", False),
        ("", "print(step)", False),
    ],
)
def test_a_benchmark_hands_its_step_to_timeit(seed, run, expected):
    assert told(BENCHMARK.format(seed=seed, run=run)) is expected


FIT = """
import pytorch_lightning as pl
from nets import Net

class Runner:
    def train(self, loader):
        {seed}
        self.model = Net()
        trainer = pl.Trainer(max_epochs=1)
        trainer.{verb}(self.model, loader)
"""


@pytest.mark.parametrize(
    ("seed", "verb", "expected"),
    [
        ("pl.seed_everything(0)", "fit", False),
        ("pass", "validate", False),
    ],
)
def test_a_file_that_has_a_trainer_fit_is_told_though_another_starts_it(tmp_path, seed, verb, expected):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "nets.py").write_text("from torch import nn\n\nclass Net(nn.Module):\n    pass\n")
    (tmp_path / "runner.py").write_text(FIT.format(seed=seed, verb=verb))
    (tmp_path / "start.py").write_text(
        "from runner import Runner\n\nif __name__ == '__main__':\n    Runner().train([])\n"
    )
    assert bool(check_paths([str(tmp_path / "runner.py")], configure({}, "LS008", ""))) is expected


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (
            "from runner import Runner\n\nif __name__ == '__main__':\n    torch.manual_seed(0)\n    Runner().train([])",
            False,
        ),
    ],
)
def test_the_file_that_starts_a_training_may_seed_where_it_is_run(tmp_path, start, expected):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "nets.py").write_text("from torch import nn\n\nclass Net(nn.Module):\n    pass\n")
    (tmp_path / "other.py").write_text("import torch\n\nif __name__ == '__main__':\n    torch.manual_seed(0)\n")
    (tmp_path / "runner.py").write_text(FIT.format(seed="pass", verb="fit"))
    (tmp_path / "start.py").write_text(f"import torch\n{start}\n")
    assert bool(check_paths([str(tmp_path / "runner.py")], configure({}, "LS008", ""))) is expected


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("resnet18 = models.resnet18()", True),
        ("torch.manual_seed(0); resnet18 = models.resnet18()", False),
        ("resnet18 = models.get_weight('resnet18')", False),
        ("model = models.list_models()", False),
        ("model = models.get_model_weights('resnet18')", False),
        ("model = models.get_model('resnet18')", True),
        ("rates = hydra.utils.instantiate(cfg.rates)", False),
    ],
)
def test_a_known_model_by_any_name(made, expected):
    text = (
        "import hydra\nimport torch\nfrom torchvision import models\n\ndef main(cfg, loader, resnet18=None):\n    {}\n"
    )
    text += "    opt = torch.optim.SGD(resnet18.parameters(), lr=0.1)\n    for x in loader:\n"
    text += "        resnet18(x).sum().backward()\n        opt.step()\n\nmain(None, [])\n"
    assert told(text.format(made)) is expected


HELPER = """
import random
import torch

__all__ = ["manual_seed"]

def manual_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [("print(helper)", True), ("helper.manual_seed(1)", False), ("start(helper.manual_seed)", False)],
)
def test_a_helper_named_like_torchs_that_nothing_calls(tmp_path, use, expected):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "helper.py").write_text(HELPER)
    text = "import helper\n" + script(before=use).replace("def seed_all(seed):\n    torch.manual_seed(seed)\n", "")
    (tmp_path / "train.py").write_text(text)
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS008", ""))) is expected


FACTORY = """
import torch

def get_gan(device):
    return torch.nn.Linear(2, 2).to(device), torch.nn.Linear(2, 2).to(device)

def get_size(device):
    return 3

def train(loader, device):
    {seed}
    {made}
    optimizer = torch.optim.Adam(d_net.parameters())
    for x in loader:
        optimizer.zero_grad()
        d_net(x).sum().backward()
        optimizer.step()

train([], "cpu")
"""


@pytest.mark.parametrize(
    ("seed", "made", "expected"),
    [
        ("torch.manual_seed(0)", "d_net, g_net = get_gan(device)", False),
        ("pass", "size = get_size(device); d_net = device", False),
    ],
)
def test_a_function_that_builds_makes_a_model(seed, made, expected):
    assert told(FACTORY.format(seed=seed, made=made)) is expected


HANDED = """
import torch
import torchvision.models as models
from transformers import TrainingArguments
from elsewhere import pass_epoch

class Args:
    pass

resnet = models.resnet18()
{optimizer}
for epoch in range(3):
    pass_epoch(resnet, {name})
if __name__ == "__main__":
    print({used})
"""


@pytest.mark.parametrize(
    ("optimizer", "name", "used", "expected"),
    [
        ("schedule = torch.optim.lr_scheduler", "schedule", "1", False),
        ("metric = torch.nn.MSELoss()", "metric", "1", False),
        # transformers' Trainer seeds
        ("optimizer = torch.optim.Adam(resnet.parameters())", "optimizer", "TrainingArguments('out')", False),
    ],
)
def test_a_model_that_a_hidden_loop_trains(optimizer, name, used, expected):
    assert told(HANDED.format(optimizer=optimizer, name=name, used=used)) is expected


OTHER = """
import torch

class Classifier:
    def __init__(self, seed=1):
        {constructor}

class Probe(Classifier):
    def __init__(self):
        super().__init__(seed=3)

def helper(x):
    return x

if __name__ == "__main__":
    {run}
"""


@pytest.mark.parametrize(
    ("constructor", "run", "use", "expected"),
    [
        # what runs only where the other file is run by itself
        ("pass", "torch.manual_seed(15)", "other.helper(1)", True),
        ("pass", "torch.manual_seed(15); print(helper(2))", "other.helper(1)", True),
        ("torch.manual_seed(seed)", "Classifier()", "other.Classifier()", False),
        # classes of which nothing is made here
        ("torch.manual_seed(seed)", "pass", "other.helper(1)", True),
        ("torch.manual_seed(seed)", "pass", "other.Probe()", False),
        ("torch.manual_seed(seed)", "pass", "getattr(other, 'Classifier')()", True),  # what is looked up is not run
        # a seed that is asked for
        ("pass", "pass", "torch.manual_seed(torch.initial_seed())", False),
    ],
)
def test_a_seed_in_another_file_that_this_program_never_sets(tmp_path, constructor, run, use, expected):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "other.py").write_text(OTHER.format(constructor=constructor, run=run))
    (tmp_path / "train.py").write_text("import other\n" + script(before=use))
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS008", ""))) is expected


EPOCHS = """
import torch
from torch import nn

def main(loader, folds):
    {before}
    for fold in folds:
        {made}
        for epoch in range(3):
            {inside}
            for x in loader:
                output_net = model(x)
                output_net.backward()

main([], [0])
"""


@pytest.mark.parametrize(
    ("before", "made", "inside", "expected"),
    [
        ("pass", "torch.manual_seed(fold); model = nn.Linear(2, 2)", "pass", False),
        ("torch.manual_seed(0)", "model = nn.Linear(2, 2)", "torch.manual_seed(epoch)", False),
        ("torch.manual_seed(0); model = nn.Linear(2, 2)", "pass", "pass", False),
    ],
)
def test_a_seed_in_the_loop_over_epochs_comes_too_late(before, made, inside, expected):
    assert told(EPOCHS.format(before=before, made=made, inside=inside)) is expected


SCHEME = """
import torch
from torch import nn

{header}

def build(config):
    score_model = nn.Linear(2, 2)
    {more}
    step = make_step(score_model)
    return step

def make_step(model):
    def step(x):
        model(x).sum().backward()
    return step
"""


@pytest.mark.parametrize(
    ("header", "more", "expected"),
    [
        ("pass", "print(config)", False),
        ("torch.manual_seed(0)", "optimizer = get_optimizer(config, score_model.parameters())", False),
        ("pass", "torch.manual_seed(0); optimizer = get_optimizer(score_model); ema_model = nn.Linear(2, 2)", False),
    ],
)
def test_a_file_that_prepares_a_training(header, more, expected):
    assert told(SCHEME.format(header=header, more=more)) is expected


LAYERS = """
class Deterministic(nn.Module):
    pass

def deterministic(seed):
    torch.manual_seed(seed)
"""


@pytest.mark.parametrize(("call", "expected"), [("block = Deterministic()", True), ("deterministic(1)", False)])
def test_a_layer_that_is_called_like_a_seed(call, expected):
    assert told(script(before=call).replace("def seed_all", f"{LAYERS}\ndef seed_all", 1)) == expected


LOOP = """
import torch
from torch import nn

def fit_one(data):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x in data:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
    return net
"""


@pytest.mark.parametrize(("use", "found"), [("model.train_on([])", True), ("print(model)", True)])
def test_a_program_that_runs_a_file_and_makes_a_model_is_told_itself(tmp_path, use, found):
    (tmp_path / "loop.py").write_text(LOOP)
    main = "import torch\nimport loop\n\nif __name__ == '__main__':\n    model = torch.nn.Linear(2, 2)\n"
    (tmp_path / "main.py").write_text(f"{main}    {use}\n")
    assert bool(check_paths([str(tmp_path / "loop.py")], configure({}, "LS008", ""))) is found


@pytest.mark.parametrize(("call", "found"), [("loop.fit_one(net, [])", True), ("print(net)", False)])
def test_a_file_that_is_called_a_test_and_runs_what_trains(tmp_path, call, found):
    loop = LOOP.replace("def fit_one(data):\n    net = nn.Linear(2, 2)", "def fit_one(net, data):")
    (tmp_path / "loop.py").write_text(loop)
    text = f"import torch\nimport loop\n\nnet = torch.nn.Linear(2, 2)\n{call}\n"
    (tmp_path / "test_all.py").write_text(text)
    assert bool(check_paths([str(tmp_path / "test_all.py")], configure({}, "LS008", ""))) is found
