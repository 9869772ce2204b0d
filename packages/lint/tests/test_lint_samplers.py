"""LS003 and LS004: samplers and loaders of another file, samplers by name, evaluations that call what trains."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

STEP = "            loss = model(x.to('cuda')).sum()\n            optimizer.zero_grad()\n            loss.backward()\n"
STEP += "            optimizer.step()\n"
DATA = "from torch.utils.data import DataLoader, DistributedSampler\n\ndef make({params}):\n{body}"
RUN = (
    """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from data import make

def main(args, model, optimizer, train_set, val_set):
    dist.init_process_group('nccl')
    model = DistributedDataParallel(model)
    {loaders}
    for epoch in range(args.epochs):
        {extra}
        for x in {loop}:
"""
    + STEP
)
BOTH = "    sampler = DistributedSampler(data)\n    held = DataLoader(other)\n"
BOTH += "    return DataLoader(data, sampler=sampler), held\n"
ONE = "    return DataLoader(data, sampler=DistributedSampler(data) if shared else None)\n"
FIXED = "    return DataLoader(data, sampler=DistributedSampler(data, shuffle=False))\n"


@pytest.mark.parametrize(
    ("body", "loaders", "loop", "extra", "number"),
    [
        (BOTH, "loader, val_loader = make(train_set, val_set)", "loader", "pass", 1),
        (ONE, "loader = make(train_set, shared=True)", "loader", "pass", 1),
        (ONE, "loader = make(train_set, shared=True)", "(tqdm(loader) if args.bar else loader)", "pass", 1),
        (BOTH, "loader, val_loader = make(train_set, val_set)", "loader", "loader.sampler.set_epoch(epoch)", 0),
        (FIXED, "loader = make(train_set)", "loader", "pass", 0),
        (ONE, "val_loader = make(val_set, shared=True)", "args.data", "pass", 0),
        (
            ONE,
            "loader = make(train_set) if dist.get_rank() == 0 else None",
            "args.data",
            "pass",
            0,
        ),  # `shared` is False
        ("    return DataLoader(data)\n", "loader = make(train_set)", "loader", "pass", 0),
    ],
)
def test_set_epoch_of_a_loader_that_another_file_makes(tmp_path, body, loaders, loop, extra, number):
    (tmp_path / "data.py").write_text(DATA.format(params="data, other=None, shared=False", body=body))
    (tmp_path / "run.py").write_text(RUN.format(loaders=loaders, loop=loop, extra=extra))
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))
    assert len(found) == number


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


NUMBERS = (
    """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel

def part(model, optimizer, sampler, loader, number, steps):
    done = 0
    while done < steps:
        {inner}
        for x in loader:
            done += 1
"""
    + STEP
    + """
def main(args, model, optimizer, train_set):
    dist.init_process_group('nccl')
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, sampler=sampler)
    for epoch in range(args.epochs):
        {outer}
        part(model, optimizer, sampler, loader, {given}, 100)
"""
)


@pytest.mark.parametrize(
    ("inner", "outer", "given", "number"),
    [
        ("sampler.set_epoch(number)", "pass", "epoch", 0),
        ("sampler.set_epoch(number)", "pass", "3", 1),
        ("sampler.set_epoch(0)", "pass", "epoch", 1),
        ("pass", "sampler.set_epoch(epoch)\n        sampler.set_epoch(0)", "epoch", 0),
    ],
)
def test_a_number_that_changes_from_call_to_call(inner, outer, given, number):
    text = NUMBERS.format(inner=inner, outer=outer, given=given)
    assert len(check_text(text, configure({}, "LS004", ""))) == number


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
        ({}, 1),
        ({"split": "train = data"}, 1),
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


CHOSEN = """
from torch.utils.data import DistributedSampler, RandomSampler

def make_sampler(data, shared):
    if shared:
        return DistributedSampler(data)
    return RandomSampler(data)
"""


@pytest.mark.parametrize(("shared", "number"), [("True", 1), ("args.ranks > 1", 1), ("False", 0)])
def test_a_helper_that_is_told_to_make_no_distributed_sampler(tmp_path, shared, number):
    loaders = f"args.shared = {shared}\n    sampler = make_sampler(train_set, args.shared)\n"
    loaders += "    loader = DataLoader(train_set, sampler=sampler)"
    text = RUN.format(loaders=loaders, loop="loader", extra="pass").replace("import make", "import make_sampler")
    (tmp_path / "data.py").write_text(CHOSEN)
    (tmp_path / "run.py").write_text("from torch.utils.data import DataLoader\n" + text)
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))) == number
    (tmp_path / "data.py").write_text(CHOSEN.replace("Distributed", "X").replace("Random", "Distributed"))
    turned = check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))
    assert len(turned) == (shared != "True")  # made where the flag is off
    anew = CHOSEN.replace("    if shared", "    shared = 1 < len(data)\n    if shared")
    (tmp_path / "data.py").write_text(anew)
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))) == 1


TWICE = """
from torch.utils.data import DataLoader, DistributedSampler

def main(model, optimizer, train_set, val_set, keep):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, sampler=sampler)
    {between}
    {other}
    for epoch in range(9):
        {call}
        for x in loader:
"""


@pytest.mark.parametrize(
    ("between", "other", "call", "number"),
    [
        ("pass", "sampler = DistributedSampler(val_set, shuffle=False)", "sampler.set_epoch(epoch)", 1),
        ("pass", "val_sampler = DistributedSampler(val_set, shuffle=False)", "sampler.set_epoch(epoch)", 0),
        ("pass", "sampler = DistributedSampler(val_set, shuffle=False)", "loader.sampler.set_epoch(epoch)", 0),
        ("keep.append(sampler)", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 0),
        ("first = sampler", "sampler = DistributedSampler(val_set)", "first.set_epoch(epoch)", 0),
        ("for x in loader: model(x)", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 1),
        ("print(len(loader))", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 1),
        ("pass", "sampler = DistributedSampler(val_set) if keep else None", "sampler.set_epoch(epoch)", 1),
        (
            "pass",
            "if keep:\n        sampler = DistributedSampler(train_set, shuffle=True)",
            "sampler.set_epoch(epoch)",
            0,
        ),
    ],
)
def test_a_sampler_whose_name_is_another_ones(between, other, call, number):
    text = TWICE.format(between=between, other=other, call=call) + STEP
    assert len(check_text(text, configure({}, "LS004", ""))) == number


APART = (
    """
from torch.utils.data import DataLoader, DistributedSampler

def fit(model, optimizer, loader{param}):
    {first}
    for epoch in range(9):
        {call}
        for x in loader:
"""
    + STEP
    + """
def main(model, optimizer, train_set, val_set):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, sampler=sampler)
    sampler = DistributedSampler(val_set, shuffle=False)
    fit(model, optimizer, loader{given})
"""
)
EACH = "for each_sampler in [loader.sampler]: each_sampler.set_epoch(epoch)"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"param": ", sampler", "given": ", sampler"}, 1),
        ({"param": ", sampler", "given": ", loader.sampler"}, 0),
        ({"param": ", sampler=None", "first": "sampler = sampler or loader.sampler"}, 0),
        ({"first": "sampler = loader.sampler"}, 0),
        ({"first": "sampler = getattr(loader, 'sampler', None)"}, 0),
        ({"call": EACH}, 0),
    ],
)
def test_a_sampler_that_is_taken_from_its_loader(change, number):
    usual = {"param": "", "given": "", "first": "pass", "call": "sampler.set_epoch(epoch)"}
    assert len(check_text(APART.format(**usual | change), configure({}, "LS004", ""))) == number


@pytest.mark.parametrize(("call", "number"), [("pass", 1), ("sampler.set_epoch(epoch)", 0), ("begin(sampler)", 0)])
def test_a_method_of_that_name_that_nothing_calls(call, number):
    own = "class Even(DistributedSampler):\n    def set_epoch(self, epoch):\n        super().set_epoch(epoch)\n\n"
    own += "def begin(sampler):\n    getattr(sampler, 'set_epoch')(1)\n" if "begin" in call else ""
    text = TWICE.format(between="pass", other="pass", call=call) + STEP
    assert len(check_text(text.replace("def main", own + "def main"), configure({}, "LS004", ""))) == number


@pytest.mark.parametrize(("split", "number"), [("'first'", 1), ("'val'", 0), ("mode='test'", 0)])
def test_a_helper_that_is_told_for_which_part_it_makes_a_sampler(tmp_path, split, number):
    helper = "from torch.utils.data import DistributedSampler\n\ndef make_sampler(data, mode):\n"
    (tmp_path / "data.py").write_text(f"{helper}    return DistributedSampler(data)\n")
    text = TWICE.format(between="pass", other="sampler = DistributedSampler(keep)", call="sampler.set_epoch(epoch)")
    text = text.replace("sampler = DistributedSampler(train_set)", f"sampler = make_sampler(train_set, {split})")
    (tmp_path / "run.py").write_text(f"from data import make_sampler\n{text}{STEP}")
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))) == number


def test_a_sampler_of_an_object_may_be_read_anywhere():
    call = "sampler.set_epoch(epoch)"
    text = TWICE.format(between="self.keep_first()", other="sampler = DistributedSampler(keep)", call=call)
    text = text.replace("def main(", "def main(self, ").replace("sampler = D", "self.sampler = D")
    text = text.replace("sampler=sampler", "sampler=self.sampler").replace(
        "sampler.set_epoch", "self.sampler.set_epoch"
    )
    assert not check_text(text + STEP, configure({}, "LS004", ""))
