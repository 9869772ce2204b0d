"""LS004: set_epoch missing."""

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
