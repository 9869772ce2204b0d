"""LS026 and LS037: parts by DALI, gathered lists, loaders of one of two branches, loaders in a returned list."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

START = "import torch\nimport torch.distributed as dist\nfrom statistics import mean\n"
START += "from torch.utils.data import DataLoader, DistributedSampler\n"


def number(text, codes="LS026"):
    """How often a rule is told in a script."""
    return len(check_text(START + text, configure({}, codes, "")))


@pytest.mark.parametrize(
    ("argument", "divided", "told"),
    [
        ("shard_id=args.local_rank", "loss.item() / dist.get_world_size()", 1),
        ("num_shards=4, shard_id=rank", "loss.item() / (len(val_loader) * dist.get_world_size())", 1),
        ("shard_id=dist.get_rank()", "loss / args.world_size", 1),
        ("shard_id=0", "loss.item() / dist.get_world_size()", 0),
        ("num_shards=4", "loss.item() / dist.get_world_size()", 0),
        ("shard_id=args.local_rank", "loss.item()", 0),
        ("shard_id=args.local_rank", "loss.item() / len(val_loader)", 0),
    ],
)
def test_parts_of_dali_and_a_division_where_it_is_told(argument, divided, told):
    text = f"""
def validate(model, val_loader, args):
    loss = torch.zeros(1)
    for batch in val_loader:
        loss += model(batch)
    dist.all_reduce(loss)
    if args.local_rank == 0:
        print({divided})

def main(args, model, rank):
    dist.init_process_group('nccl')
    val_loader = make_pipeline(args.valdir, {argument}, is_training=False)
    validate(model, val_loader, args)
"""
    assert number(text) == told


def test_training_data_in_parts_says_nothing_of_the_evaluation():
    text = """
def validate(model, val_loader, args):
    loss = torch.zeros(1)
    for batch in val_loader:
        loss += model(batch)
    dist.all_reduce(loss)
    loss /= args.world_size

def main(args, model, rank):
    dist.init_process_group('nccl')
    loader = make_pipeline(args.traindir, shard_id=rank, is_training=True)
    validate(model, make_pipeline(args.valdir), args)
"""
    assert number(text) == 0
    assert number(text.replace("args.valdir)", "args.valdir, shard_id=rank)")) == 1


@pytest.mark.parametrize(
    ("body", "value", "told"),
    [
        ("    parts = [None] * 8\n    dist.all_gather_object(parts, x)\n    return parts", "mean(share(val_loss))", 1),
        (
            "    parts = [None] * 8\n    dist.all_gather_object(parts, x)\n    return parts",
            "np.mean(share(val_loss))",
            1,
        ),
        (
            "    parts = [x] * 8\n    dist.all_gather(parts, x)\n    return parts",
            "statistics.fmean(share(val_loss))",
            1,
        ),
        ("    parts = [x] * 8\n    dist.all_gather(parts, x)\n    return torch.cat(parts)", "mean(share(val_loss))", 0),
        ("    parts = [None] * 8\n    return parts", "mean(share(val_loss))", 0),
        ("    parts = [x] * 8\n    dist.all_gather(parts, x)\n    return parts", "max(share(val_loss))", 0),
    ],
)
def test_the_mean_of_what_a_function_has_gathered(body, value, told):
    text = f"""
def share(x):
{body}

def evaluate(model, val_loader):
    val_loss = 0.0
    for batch in val_loader:
        val_loss += model(batch).item()
    return {value}

def main(model, val_set):
    dist.init_process_group('nccl')
    val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, shuffle=False))
    print(evaluate(model, val_loader))
"""
    found = check_text(START + text, configure({}, "LS026", ""))
    assert any("means" in finding.message for finding in found) == bool(told)


TRAINER = """
class Trainer:
    def __init__(self, model, loaders):
        self.model = model
        self.train_loader, self.val_loader = loaders

    def validate(self):
        right = 0
        for x, y in self.val_loader:
            right += (self.model(x).argmax(1) == y).sum().item()
        return right / len(self.val_loader.dataset)
"""


@pytest.mark.parametrize(
    ("sampler", "form", "told"),
    [
        ("DistributedSampler(val_set, shuffle=False)", "[{}, {}]", 1),
        ("DistributedSampler(val_set, shuffle=False)", "({}, {})", 1),
        ("DistributedSampler(val_set) if shared else None", "[{}, {}]", 1),
        ("None", "[{}, {}]", 0),
        ("SequentialSampler(val_set)", "[{}, {}]", 0),
        ("OwnSampler(val_set)", "({}, {})", 0),
    ],
)
def test_loaders_in_a_list_that_a_function_returns(tmp_path, sampler, form, told):
    pair = form.format("DataLoader(train_set, sampler=DistributedSampler(train_set))", "DataLoader(val_set, sampler=s)")
    (tmp_path / "data.py").write_text(
        f"{START}\ndef loaders(train_set, val_set, shared):\n    s = {sampler}\n    return {pair}\n"
    )
    own = TRAINER.replace("loaders):", "sets):").replace("= loaders", "= loaders(*sets)")
    own = own.replace("loaders(*sets)", "loaders(sets.train, sets.val, True)")
    main = "\ndef main(model, sets):\n    dist.init_process_group('nccl')\n    print(Trainer(model, sets).validate())\n"
    (tmp_path / "run.py").write_text(f"{START}from data import loaders\n{own}{main}")
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS026", ""))) == told


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("sampler=DistributedSampler(test_set)", "shuffle=False", 1),
        ("shuffle=False", "sampler=DistributedSampler(test_set)", 1),
        ("sampler=DistributedSampler(test_set)", "sampler=DistributedSampler(test_set)", 1),
        ("shuffle=False", "shuffle=True", 0),
        ("shuffle=False", "sampler=mine(test_set)", 0),
        ("num_workers=2", "num_workers=4", 0),
    ],
)
def test_a_loader_is_in_parts_if_one_branch_makes_it_so(first, second, told):
    text = f"""
def evaluate(model, test_loader):
    right = 0
    for x, y in test_loader:
        right += (model(x).argmax(1) == y).sum().item()
    return right / len(test_loader.dataset)

def main(model, train_set, test_set, args):
    dist.init_process_group('nccl')
    sampler = DistributedSampler(train_set)
    if args.shared:
        test_loader = DataLoader(test_set, {first})
    else:
        test_loader = DataLoader(test_set, {second})
    for epoch in range(9):
        score = evaluate(model, test_loader)
        print(score)
"""
    assert number(text) == told
