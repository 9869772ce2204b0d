"""LS003: DDP without a distributed sampler."""

import pytest
from rule_examples import examples
from rule_findings import count

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


@pytest.mark.parametrize("code", ["LS003", "LS009", "LS037"])
def test_a_wrapper_under_a_name_of_its_own(code):
    bad = next(text for text in examples(code, "bad") if "DistributedDataParallel as DDP" in text)
    renamed = bad.replace("DDP", "Replicated")
    assert {finding.rule for finding in check_text(renamed, configure({}, code, ""))} == {code}
    other = renamed.replace("import DistributedDataParallel as", "import Module as").replace("init_process_group", "x")
    assert check_text(other, configure({}, code, "")) == []


STEP = "            loss = model(x.to('cuda')).sum()\n            optimizer.zero_grad()\n            loss.backward()\n"
STEP += "            optimizer.step()\n"


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("sampler = RandomSampler(data) if args.random else None", 1),
        ("sampler = WeightedRandomSampler(weights, 10)", 1),
        ("sampler = None\n    if args.even:\n        sampler = EvenSampler(data)", 1),
        ("sampler = None", 0),
        ("sampler = args.sampler", 0),
        ("sampler = RandomSampler(data)\n    if sampler is not None:\n        return None", 0),
    ],
)
def test_a_sampler_that_a_name_holds_beside_shuffle(line, number):
    start = (
        "from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler\nfrom mine import EvenSampler\n"
    )
    body = f"\ndef main(args, data, weights):\n    {line}\n    return DataLoader(data, shuffle=True, sampler=sampler)\n"
    assert len(check_text(start + body, configure({}, "LS003", ""))) == number


@pytest.mark.parametrize(
    ("name", "training", "number"),
    [
        *(("fit", "True", 1), ("run_epoch", "True", 1), ("one_pass", "True", 1), ("fit", "False", 0)),
        *(("evaluate", "False", 0), ("validate", "False", 0), ("test", "False", 0), ("test", "args.train", 0)),
    ],
)
def test_an_evaluation_that_calls_the_method_that_trains(name, training, number):
    text = f"""
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

class Model:
    def __init__(self, net, rank):
        self.net = DistributedDataParallel(net, device_ids=[rank])

    def update(self, x, training=True):
        loss = self.net(x).sum()
        if training:
            loss.backward()

def {name}(net, rank):
    dist.init_process_group('nccl')
    model = Model(net, rank)
    for x, y in DataLoader(CIFAR10('data'), batch_size=16):
        model.update(x, training={training})

if __name__ == '__main__':
    {name}(make(), 0)
"""
    assert len(check_text(text, configure({}, "LS003", ""))) == number


ENDLESS = (
    """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10

def forever(loader):
    while True:
        for batch in loader:
            yield batch

def main(args, model, optimizer):
    train_set = CIFAR10("data")
    dist.init_process_group('nccl')
    model = DistributedDataParallel(model)
    loader = DataLoader(train_set, {given})
    held = {held}
    for epoch in range(args.epochs):
        for step in range(100):
            x = next(held)
"""
    + STEP
)


@pytest.mark.parametrize("held", ["iter(loader)", "forever(loader)"])
@pytest.mark.parametrize(("given", "number"), [("shuffle=True", 1), ("sampler=DistributedSampler(train_set)", 0)])
def test_a_loader_that_is_asked_for_the_next_batch(held, given, number):
    assert len(check_text(ENDLESS.format(held=held, given=given), configure({}, "LS003", ""))) == number


OPTIONS = (
    """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10

def main(args, model, optimizer):
    dist.init_process_group('nccl')
    model = DistributedDataParallel(model)
    data = CIFAR10("data")
    {split}
    options = dict({options})
    {then}
    loader = DataLoader(train, **options)
    for epoch in range(args.epochs):
        for x in loader:
            pass
"""
    + STEP
)


USUAL = {"split": "train, val = random_split(data, [0.9, 0.1])", "options": "batch_size=8", "then": "pass"}


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"options": "batch_size=8, sampler=DistributedSampler(data)"}, 0),
        ({"options": "**args.options"}, 0),
        ({"then": "options['sampler'] = DistributedSampler(data)"}, 0),
        ({"then": "options.update(sampler=DistributedSampler(data))"}, 0),
        ({"split": "train = random_split(data, args.parts)[dist.get_rank()]"}, 0),
        ({"split": "train, val = args.split(data)"}, 0),
    ],
)
def test_options_that_are_written_out_and_parts_of_a_data_set(change, number):
    assert len(check_text(OPTIONS.format(**USUAL | change), configure({}, "LS003", ""))) == number


DIVIDED = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def load(data, rank, count):
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas={number}, rank={rank}))

dist.init_process_group("nccl")
{after}
"""


@pytest.mark.parametrize(
    ("number", "rank", "after", "found"),
    [
        ("count", "rank", "", 0),
        ("1", "rank", "", 0),
        ("2", "0", "", 0),
        ("2", "rank", "world_size = 2", 0),
        ("2", "rank", "WORLD_SIZE = 2", 0),
        ("2", "rank", "mp.spawn(main, nprocs=2)", 0),
    ],
)
def test_a_number_of_ranks_that_is_written_out(number, rank, after, found):
    assert count(DIVIDED.format(number=number, rank=rank, after=after), "LS003") == found


PARTS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from mine import Cached, divide

def main(local_rank, model, optimizer, criterion, config):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    files = {files}
    loader = DataLoader(Cached(data=files), batch_size=32, shuffle=True)
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("files", "number"), [("config.files", 1), ("divide(config.files, dist.get_world_size())[dist.get_rank()]", 0)]
)
def test_a_data_set_of_the_rank_s_own_files(files, number):
    assert count(PARTS.format(files=files), "LS003") == number
