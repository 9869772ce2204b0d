"""Scores of a rank's own part of held-out data (LS026), in the ways in which scripts write them."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def main(model, train_data, test_data, rank):
    dist.init_process_group("nccl")
    train_loader, test_loader = make(train_data), make(test_data)
    for epoch in range(3):
        score = compute(model, test_loader)
        if rank == 0:
            print(score)
    dist.destroy_process_group()
"""
MAKE = """
def make(data):
    return DataLoader(data, batch_size=8, num_workers=2, sampler={sampler})
"""
SUM = """
def compute(model, loader):
    right, count = 0, 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()
        count += len(x)
    {end}
    return right / count
"""
SHARD = MAKE.format(sampler="DistributedSampler(data)")


def found(text):
    return [finding.rule for finding in check_text(HEAD + text, configure({}, "LS026", ""))]


SAMPLERS = {
    "of a helper that makes all loaders": ("DistributedSampler(data)", True),
    "of one that may be there": ("DistributedSampler(data) if dist.is_initialized() else None", True),
    "none": ("None", False),
    "of one process": ("torch.utils.data.SequentialSampler(data)", False),
    "one that pads nothing": ("DistributedSampler(data, drop_last=True)", False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_sampler(name):
    sampler, told = SAMPLERS[name]
    assert found(MAKE.format(sampler=sampler) + SUM.format(end="pass")) == ["LS026"] * told


ENDS = {
    "nothing": ("pass", True),
    "only waits": ("torch.cuda.synchronize()", True),
    "picks from a tensor": ("right = torch.gather(right, 0, count)", True),
    "picks with a method": ("right = right.gather(0, count)", True),
    "sums over the ranks": ("dist.all_reduce(right)", False),
    "a helper that is not here": ("right = reduce_values(right)", False),
    "a method that is not here": ("right = model.sync_scores(right)", False),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_happens_to_the_sums(name):
    end, told = ENDS[name]
    assert found(SHARD + SUM.format(end=end)) == ["LS026"] * told


def test_a_training_set_is_not_held_out():
    text = SHARD + SUM.format(end="pass")
    assert found(text) == ["LS026"]
    only = HEAD.replace("compute(model, test_loader)", "compute(model, train_loader)")
    assert check_text(only + text, configure({}, "LS026", "")) == []


def test_the_held_out_part_must_be_the_sharded_one():
    whole = HEAD.replace("make(test_data)", "DataLoader(test_data, num_workers=2)")
    assert check_text(whole + SHARD + SUM.format(end="pass"), configure({}, "LS026", "")) == []


LISTS = {
    "losses": ("losses.append(model(x).item())", "return np.mean(losses)", True),
    "scores": ("losses.append(model(x).item())", "print(sum(losses) / len(losses))", True),
    "losses of all ranks": ("losses.append(model(x).item())", "return gather_mean(losses)", False),
    "nothing is told": ("losses.append(model(x).item())", "pass", False),
    "what is no score": ("model.files.append(x)", "return model.files", False),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_scores(name):
    kept, end, told = LISTS[name]
    assert (
        found(
            SHARD + f"def compute(model, loader):\n    losses = []\n    for x in loader:\n        {kept}\n    {end}\n"
        )
        == ["LS026"] * told
    )


MEANS = {
    "gathered and averaged": ("dist.all_gather(parts, score)\n    score = torch.stack(parts).mean()", True),
    "gathered objects": ("dist.all_gather_object(parts, score)\n    score = sum(parts) / len(parts)", True),
    "numpy": ("dist.all_gather_object(parts, score)\n    score = np.mean(parts)", True),
    "averaged by the reduction": ("dist.all_reduce(score, op=dist.ReduceOp.AVG)", True),
    "gathered samples": ("dist.all_gather(parts, score)\n    score = torch.cat(parts).mean()", False),
    "sums over counts": ("dist.all_gather(parts, score)\n    score = sum(parts) / len(test_data)", False),
    "another list": ("dist.all_gather(parts, score)\n    score = np.mean(others)", False),
    "a maximum": ("dist.all_reduce(score, op=dist.ReduceOp.MAX)", False),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_of_means(name):
    lines, told = MEANS[name]
    text = f"""
def evaluate(score, test_data, others):
    test_sampler = DistributedSampler(test_data)
    parts = [None] * dist.get_world_size()
    {lines}
    return score
"""
    assert found(text) == ["LS026"] * told


AFTER = """
def run(model, val_data, train_loss):
    val_sampler = DistributedSampler(val_data)
    score = {call}(model, val_data)
    dist.all_reduce({value}, op=dist.ReduceOp.AVG)
    return score
"""
VALUES = [("validate", "score", True), ("test", "score", True), ("count", "val_score", True)]
VALUES += [("count", "score", False), ("validate", "train_loss", False), ("count", "train_loss", False)]


@pytest.mark.parametrize(("call", "value", "told"), VALUES)
def test_what_an_evaluation_found_is_averaged_by_its_caller(call, value, told):
    assert found(AFTER.format(call=call, value=value)) == ["LS026"] * told


HOROVOD = """
import horovod.torch as hvd

def mean(value):
    return hvd.allreduce(value{more})

def evaluate(model, test_data):
    hvd.init()
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())
    return mean(model(test_sampler))
"""


@pytest.mark.parametrize(
    ("more", "told"), [("", True), (", name='x'", True), (", op=hvd.Sum", False), (", False", False)]
)
def test_horovod_takes_the_mean(more, told):
    assert found(HOROVOD.format(more=more)) == ["LS026"] * told


COUNTED = """
def sampled(data, world_size=2):
    return DistributedSampler(data, num_replicas=world_size, rank=0)
"""


@pytest.mark.parametrize(("given", "told"), [("data, world_size=1", False), ("data, 2", True), ("data", True)])
def test_a_sampler_for_one_process_divides_nothing(given, told):
    assert found(COUNTED + MAKE.format(sampler=f"sampled({given})") + SUM.format(end="pass")) == ["LS026"] * told


COLLECTED = """
import evaluate as hf
from sklearn.metrics import f1_score

def compute(model, loader):
    bleu = hf.load("bleu"{options})
    preds, labels, losses = [], [], []
    for x, y in loader:
        {keep}
    {end}
"""
ENDED = {
    "scored by a library": ("preds.extend(model(x))", "return f1_score(labels, preds)", "", True),
    "joined first": (
        "preds.append(model(x))",
        "both = np.concatenate(preds)\n    return f1_score(labels, both)",
        "",
        True,
    ),
    "a metric of one process": ("preds.extend(model(x))", "return bleu.compute(predictions=preds)", "", True),
    "a metric of several": (
        "preds.extend(model(x))",
        "return bleu.compute(predictions=preds)",
        ", num_process=2",
        False,
    ),
    "gathered": ("preds.extend(model(x))", "return f1_score(labels, gather_all(preds))", "", False),
    "kept for a file": ("preds.extend(model(x))", "return preds", "", False),
    "numpy's average": ("losses.append(model(x))", "return np.average(losses)", "", True),
    "a sum that is written out": ("total = total + model(x)", "return total", "", True),
    "no sum": ("total = other + model(x)", "return total", "", False),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_is_collected_and_scored_after_the_loop(name):
    keep, end, options, told = ENDED[name]
    assert found(SHARD + COLLECTED.format(keep=keep, end=end, options=options)) == ["LS026"] * told


PHASES = """
def main(model, sets, criterion, optimizer):
    samplers = {{phase: DistributedSampler(sets[phase]) for phase in ["train", "val"]}}
    loaders = {{phase: DataLoader(sets[phase], sampler={sampler}) for phase in ["train", "val"]}}
    for phase in {phases}:
        total = 0.0
        for x, y in tqdm(loaders[phase]):
            with torch.set_grad_enabled(phase == "train"):
                loss = criterion(model(x), y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            total += loss.item()
        {end}
        print(phase, total)
"""


@pytest.mark.parametrize(
    ("sampler", "phases", "end", "told"),
    [
        ("samplers[phase]", "['train', 'val']", "pass", True),
        ("samplers[phase]", "['train']", "pass", False),
        ("samplers[phase]", "['train', 'val']", "dist.all_reduce(total)", False),
        ("samplers[phase] if phase == 'train' else None", "['train', 'val']", "pass", False),
    ],
)
def test_a_loop_over_phases(sampler, phases, end, told):
    text = (
        "import torch\nimport torch.distributed as dist\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
    )
    text += "from tqdm import tqdm\n" + PHASES.format(sampler=sampler, phases=phases, end=end)
    assert [f.rule for f in check_text(text, configure({}, "LS026", ""))] == ["LS026"] * told


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("torch.tensor(val_loss)", True),
        ("torch.tensor([val_loss]).to(0)", True),
        ("torch.tensor(train_loss)", False),
        ("torch.tensor(val)", False),
    ],
)
def test_a_tensor_of_a_score_is_averaged(made, told):
    text = f"""
def run(model, val_data, val_loss, train_loss, val):
    val_sampler = DistributedSampler(val_data)
    total = {made}
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
"""
    assert found(text) == ["LS026"] * told


LINES = """
val_loader = DataLoader(val_data, sampler={sampler})
for epoch in range(3):
    val_loss = validate(model, val_loader)
    dist.reduce({value}, 0, op=dist.ReduceOp.{op})
"""


@pytest.mark.parametrize(
    ("sampler", "value", "op", "told"),
    [
        ("DistributedSampler(val_data)", "val_loss", "AVG", True),
        ("DistributedSampler(val_data)", "val_loss", "SUM", False),
        ("DistributedSampler(val_data)", "train_loss", "AVG", False),
        ("None", "val_loss", "AVG", False),
    ],
)
def test_means_in_a_files_own_lines(sampler, value, op, told):
    assert found(LINES.format(sampler=sampler, value=value, op=op)) == ["LS026"] * told


BAR = """
from tqdm import tqdm

class Trainer:
    def __init__(self, model, val_loader):
        self.model, self.val_loader = model, val_loader

    def validate(self):
        shown_loader = {bar}(self.val_loader)
        right = 0
        for x, y in shown_loader:
            right += (self.model(x).argmax(1) == y).sum()
        print(right / len(self.val_loader))

def run(model, val_data):
    val_sampler = DistributedSampler(val_data)
    Trainer(model, DataLoader(val_data, sampler=val_sampler)).validate()
"""


@pytest.mark.parametrize(("bar", "told"), [("tqdm", True), ("prefetch", False)])
def test_a_bar_that_is_called_a_loader(bar, told):
    assert found(BAR.format(bar=bar)) == ["LS026"] * told
