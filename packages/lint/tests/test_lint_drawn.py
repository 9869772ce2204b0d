"""LS008: weights that are drawn before a Trainer is made, which seeds only then; models that a function makes."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

TRAINER = """
import torch
from torch import nn
import transformers
from accelerate import Accelerator, init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2LMHeadModel
from transformers import GPT2Config, PreTrainedModel, Trainer, TrainingArguments, set_seed
from trl import SFTTrainer

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModelForCausalLM.from_pretrained("base")
        self.head = nn.Linear(8, 2)

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModelForCausalLM.from_pretrained("base")
        self.drop = nn.Dropout(0.1)

class Small(PreTrainedModel):
    pass

class OwnTrainer(Trainer):
    pass

def load(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    return get_peft_model(model, LoraConfig())

def main(data):
    args = TrainingArguments("out", seed=42)
    {before}
    model = {made}
    {after}
    trainer = {trainer}
    trainer.train()

if __name__ == "__main__":
    main([])
"""
PLAIN = "AutoModelForCausalLM.from_pretrained('base')"
ADAPTED = f"get_peft_model({PLAIN}, LoraConfig())"


def told(text, code="LS008"):
    return bool(check_text(text, configure({}, code, "")))


def program(made, before="pass", after="pass", trainer="Trainer(model=model, args=args, train_dataset=data)"):
    return TRAINER.format(made=made, before=before, after=after, trainer=trainer)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (ADAPTED, True),
        ("load('base')", True),
        ("Tagger()", True),
        ("Small(GPT2Config())", True),
        ("GPT2LMHeadModel(GPT2Config())", True),
        ("AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('base'))", True),
        ("AutoModelForSequenceClassification.from_pretrained('base', num_labels=3)", True),
        (
            "AutoModelForSequenceClassification.from_pretrained('base', config=AutoConfig.from_pretrained("
            "'base', num_labels=3))",
            True,
        ),
        # all of the weights are loaded
        (PLAIN, False),
        (f"PeftModel.from_pretrained({PLAIN}, 'adapters')", False),
        ("AutoModelForSequenceClassification.from_pretrained('trained')", False),
        ("Frozen()", False),
        ("Small.from_pretrained('base')", False),
    ],
)
def test_weights_that_are_drawn_before_a_trainer(made, expected):
    assert told(program(made)) is expected


@pytest.mark.parametrize(
    ("before", "after", "trainer", "expected"),
    [
        ("set_seed(1)", "pass", "Trainer(model=model, args=args)", False),
        ("torch.manual_seed(1)", "pass", "Trainer(model=model, args=args)", False),
        ("transformers.enable_full_determinism(1)", "pass", "Trainer(model=model, args=args)", False),
        ("pass", "set_seed(1)", "Trainer(model=model, args=args)", True),
        ("pass", "model = Accelerator().prepare_model(model)", "transformers.Trainer(model, args)", True),
        ("pass", "pass", "OwnTrainer(model, args)", True),
        ("pass", "pass", "SFTTrainer(model=model, args=args)", True),
        # drawn within the Trainer, after its seed
        ("pass", "pass", "Trainer(model_init=lambda: load('base'), args=args)", False),
        ("pass", "pass", "SFTTrainer(model='base', peft_config=LoraConfig())", False),
    ],
)
def test_what_seeds_before_a_trainer(before, after, trainer, expected):
    assert told(program(ADAPTED, before, after, trainer)) is expected


def test_a_model_that_holds_no_memory_yet_is_not_drawn():
    empty = "with init_empty_weights():\n        model = GPT2LMHeadModel(GPT2Config())"
    assert not told(program("None", after=empty))
    assert told(program("None", after=empty.replace("init_empty_weights()", "torch.device('cuda')")))


@pytest.mark.parametrize(("seed", "expected"), [("pass", True), ("torch.manual_seed(0)", False)])
def test_weights_that_another_file_draws(tmp_path, seed, expected):
    head = TRAINER.partition("def main")[0]
    (tmp_path / "parts.py").write_text(head + "def trainer(model):\n    return SFTTrainer(model=model)\n")
    script = f"import torch\nfrom parts import load, trainer\n{seed}\nmodel = load('base')\ntrainer(model).train()\n"
    (tmp_path / "run.py").write_text(script)
    paths = [str(tmp_path / name) for name in ("parts.py", "run.py")]
    assert bool(check_paths(paths, configure({}, "LS008", ""))) is expected


MADE = """
import torch
from torch import nn

REGISTRY = dict()

def {name}(spec):
    return REGISTRY[spec]()

def train(loader):
    {bound} = {name}("small").cuda()
    optimizer = torch.optim.SGD({bound}.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        {bound}(x).sum().backward()
        optimizer.step()

train([])
"""


@pytest.mark.parametrize(
    ("name", "bound", "expected"),
    [("make", "model", True), ("build", "net", True), ("make", "thing", False), ("remake", "model", False)],
)
def test_a_function_that_only_makes(name, bound, expected):
    assert told(MADE.format(name=name, bound=bound)) is expected


FED = """
from torch import nn
from torch.utils.data import DataLoader

training_generator = DataLoader([])
{made} = nn.Linear(2, 2)
for x in training_generator:
    {made}(x).sum().backward()
"""


def test_what_feeds_a_model_is_none():
    (found,) = check_text(FED.format(made="model"), configure({}, "LS008", ""))
    assert found.line == 6
