"""Clean scripts are silent; with a pitfall edited into their tree they are not."""

import ast
from pathlib import Path

import pytest

from lockstep_lint.config import configure
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_text

SCRIPTS = {name: (Path(__file__).parent / "scripts" / f"clean_{name}.py.txt").read_text() for name in ("ddp", "fsdp")}
ALL = configure({}, "ALL", None)


def dump(node):
    return ast.dump(node) if node is not None else ""


class Swap(ast.NodeTransformer):
    """Puts an expression in the place of every equal one."""

    def __init__(self, old, new):
        self.old, self.new, self.count = dump(ast.parse(old, mode="eval").body), ast.parse(new, mode="eval").body, 0

    def visit(self, node):
        if isinstance(node, ast.expr) and dump(node) == self.old:
            self.count += 1
            return self.new
        return self.generic_visit(node)


class Statements(ast.NodeTransformer):
    """Puts statements in the place of every statement that starts with the given text."""

    def __init__(self, start, new, keep=""):
        self.start, self.new, self.keep, self.count = start, ast.parse(new).body, keep, 0

    def visit(self, node):
        if isinstance(node, ast.stmt) and ast.unparse(node).startswith(self.start):
            self.count += 1
            return {"": self.new, "before": [node, *self.new], "after": [*self.new, node]}[self.keep]
        return self.generic_visit(node)


def drop(start):
    return Statements(start, "pass")


def replace(start, new):
    return Statements(start, new)


def append(start, new):
    """New statements after an old one."""
    return Statements(start, new, "before")


def prepend(start, new):
    """New statements before an old one."""
    return Statements(start, new, "after")


LOADER = "loader = DataLoader(train_data, 32, num_workers=4, pin_memory=True, shuffle=True"
LOAD = "torch.load('model.pt', map_location='cpu', weights_only=True)"
LAST = "(i + 1) % steps == 0 or i + 1 == len(loader)"
EVALUATE = "evaluate(model, val_loader, criterion, device)"
SAVED = "{'model': model.module.state_dict(), 'rng': states}"
FUSED = "nn.functional.scaled_dot_product_attention(q, k, v)"
WRAP = "model = DistributedDataParallel(model, device_ids=[local_rank])"
LINES = """
from torch.utils.data import IterableDataset
class Lines(IterableDataset):
    def __iter__(self):
        for line in open("data"):
            yield line
lines = DataLoader(Lines(), num_workers=2)
"""
MUTATIONS = [
    ("LS001", "ddp", [prepend("model = DistributedDataParallel", "teacher = nn.DataParallel(Net())")]),
    ("LS002", "ddp", [replace("model = Net()", "model = Net()"), replace(WRAP, f"{WRAP}\nmodel = model.to(device)")]),
    ("LS002", "ddp", [replace("model = Net()", "model = Net()\nmodel.body = model.body.to(device)")]),
    ("LS003", "ddp", [
        drop("sampler = "), drop("sampler.set_epoch"), replace("train_data = ", "train_data = CIFAR10('data')"),
        replace("loader = ", LOADER + ")"),
    ]),
    ("LS003", "ddp", [replace("loader = ", LOADER + ", sampler=DistributedSampler(train_data))")]),
    ("LS004", "ddp", [drop("sampler.set_epoch")]),
    ("LS004", "ddp", [replace("sampler.set_epoch", "sampler.set_epoch(0)")]),
    ("LS005", "ddp", [Swap("nn.GroupNorm(2, 8)", "nn.BatchNorm2d(8)")]),
    ("LS006", "ddp", [Swap("torch.ones(10).to(device)", "torch.ones(10)")]),
    ("LS006", "fsdp", [replace("x, y = ", "x = x.to(device)")]),
    ("LS007", "ddp", [Swap("torch.device('cuda', local_rank)", "torch.device('cuda:0')")]),
    ("LS007", "ddp", [replace("torch.cuda.set_device", "torch.cuda.set_device(0)")]),
    ("LS008", "ddp", [drop("torch.manual_seed")]),
    ("LS009", "ddp", [Swap("nullcontext() if last else model.no_sync()", "nullcontext()")]),
    ("LS010", "ddp", [replace(WRAP, WRAP[:-1] + ", find_unused_parameters=True)")]),
    ("LS011", "ddp", [drop("scaler.unscale_")]),
    ("LS011", "fsdp", [append("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)")]),
    ("LS012", "ddp", [Swap("criterion(model(x), y) / steps", "criterion(model(x), y)")]),
    ("LS012", "ddp", [Swap(LAST, "i % steps == 0")]),
    ("LS012", "ddp", [Swap(LAST, "(i + 1) % steps == 0")]),
    ("LS013", "ddp", [drop("scheduler.step()"), append("train_epoch(", "scheduler.step()")]),
    ("LS013", "ddp", [
        replace("scheduler = ", "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)"),
    ]),
    ("LS014", "ddp", [Swap("model.module.state_dict()", "model.state_dict()")]),
    ("LS014", "ddp", [append("score = ", "torch.save(model.module.state_dict(), 'all.pt')")]),
    ("LS015", "ddp", [Swap(LOAD, "torch.load('model.pt')")]),
    ("LS015", "ddp", [Swap(LOAD, "torch.load('model.pt', 'cpu', weights_only=False)")]),
    ("LS016", "ddp", [replace("running += ", "running += loss")]),
    ("LS017", "ddp", [drop("model.eval()")]),
    ("LS017", "ddp", [Swap("torch.no_grad()", "torch.jit.ignore()")]),
    ("LS018", "ddp", [replace("dist.all_reduce(total)", "if dist.get_rank() == 0:\n    dist.all_reduce(total)")]),
    ("LS018", "ddp", [replace("score = evaluate", f"if rank == 0:\n    score = {EVALUATE}")]),
    ("LS019", "ddp", [drop("dist.destroy_process_group")]),
    ("LS020", "ddp", [Swap("groups(model)", "model.parameters()")]),
    ("LS021", "ddp", [drop("optimizer.zero_grad()")]),
    ("LS021", "fsdp", [drop("optimizer.zero_grad()"), append("loss.backward()", "optimizer.zero_grad()")]),
    ("LS022", "ddp", [replace("x, y = ", "x, y = x.to(device), y.to(device)")]),
    ("LS022", "fsdp", [replace("loader = ", "loader = DataLoader(data, batch_size=8, sampler=sampler)")]),
    ("LS029", "ddp", [Swap("torch.amp.GradScaler('cuda')", "torch.cuda.amp.GradScaler()")]),
    ("LS023", "ddp", [Swap("torch.float16", "torch.bfloat16")]),
    ("LS024", "ddp", [
        drop("torch.cuda.set_device"), prepend("torch.manual_seed", "Net().cuda()\ntorch.cuda.set_device(local_rank)"),
    ]),
    ("LS024", "ddp", [
        drop("dist.init_process_group"), append("rank = dist.get_rank()", "dist.init_process_group('nccl')"),
    ]),
    ("LS025", "ddp", [replace("val_data = ", "val_data = CIFAR10('data', train=False, download=True)")]),
    ("LS026", "ddp", [replace("dist.all_reduce(total)", "dist.all_reduce(total, op=dist.ReduceOp.AVG)")]),
    ("LS027", "ddp", [append(WRAP, "model.attend(1, 2, 3)")]),
    ("LS028", "ddp", [append("score = ", "print('score', score)")]),
    ("LS028", "ddp", [append("score = ", "print(f'[rank {rank}] {score}')")]),
    ("LS029", "ddp", [prepend("import os", "from apex import amp")]),
    ("LS031", "ddp", [
        drop("model = DistributedDataParallel"), drop("from torch.nn.parallel"), Swap("model.module", "model"),
        Swap("nullcontext() if last else model.no_sync()", "nullcontext()"),
    ]),
    ("LS033", "fsdp", [
        drop("state = "),
        replace("if rank == 0:", "if rank == 0:\n    torch.save(get_model_state_dict(model), 'model.pt')"),
    ]),
    ("LS034", "ddp", [prepend("import os", "import numpy as np"), Swap("torch.randn(())", "np.random.randn()")]),
    ("LS035", "ddp", [Swap(FUSED, "torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v")]),
    ("LS036", "ddp", [replace("running += ", "running += loss.item()")]),
    ("LS004", "ddp", [
        Swap("range(epochs)", "range(start, epochs)"), prepend("for epoch in", "start = 3"),
        replace("sampler.set_epoch", "sampler.set_epoch(start)"),
    ]),
    ("LS005", "ddp", [
        prepend("import os", "import timm"),
        replace("model = Net()", "model = timm.create_model('resnet50').to(device)"),
    ]),
    ("LS007", "ddp", [replace("torch.cuda.set_device", "torch.cuda.set_device(int(os.environ['RANK']))")]),
    ("LS010", "ddp", [append("self.head = ", "self.extra = nn.Linear(8, 10)")]),
    ("LS010", "ddp", [
        append("self.head = ", "self.extra = nn.Linear(8, 8)"),
        prepend("return self.head", "if torch.rand(()).item() < 0.5:\n    x = self.extra(x)"),
    ]),
    ("LS014", "ddp", [append("score = ", "model.module.save_pretrained('model')")]),
    ("LS014", "ddp", [
        prepend("import os", "import numpy as np"),
        prepend("if os.path.exists", "if rank == 0:\n    np.save('x.npy', [1])\nnp.load('x.npy')"),
    ]),
    ("LS016", "ddp", [replace("running += ", "running += loss.mean()")]),
    ("LS018", "ddp", [replace(WRAP, f"if rank == 0:\n    {WRAP}")]),
    ("LS021", "ddp", [
        prepend("import os", "from helpers.amp import Scaler"), drop("optimizer.zero_grad()"), drop("scaler.unscale_"),
        drop("torch.nn.utils.clip"), drop("scaler.update()"), replace("scaler = ", "scaler = None"),
        prepend("running = ", "loss_scaler = Scaler()"), replace("scaler.step(optimizer)", "pass"),
        replace("scaler.scale(loss).backward()", "loss_scaler(loss, optimizer)"),
    ]),
    ("LS025", "ddp", [drop("dist.barrier()")]),
    ("LS025", "ddp", [append("torch.manual_seed", "os.makedirs('logs')")]),
    ("LS026", "ddp", [drop("dist.all_reduce(total)")]),
    ("LS031", "ddp", [
        replace("model = DistributedDataParallel", "pass  # DDP"), Swap("model.module", "model"),
        Swap("nullcontext() if last else model.no_sync()", "nullcontext()"),
    ]),
    ("LS035", "ddp", [
        Swap(FUSED, FUSED.replace("v)", "v, attn_mask=torch.ones(8, 8).tril().bool())")),
    ]),
    ("LS037", "ddp", [append("score = ", "stop = False\nif rank == 0:\n    stop = score > 0.9\nif stop:\n    break")]),
    ("LS037", "ddp", [append("score = ", "if rank == 0 and score > 0.9:\n    break")]),
    ("LS037", "ddp", [
        prepend("for epoch in", "if rank == 0:\n    epochs = len(os.listdir('x'))"),
    ]),
    ("LS029", "ddp", [append("local_rank = ", "os.environ['NCCL_BLOCKING_WAIT'] = '1'")]),
    ("LS040", "ddp", [
        prepend("model = DistributedDataParallel", (
            "lr, rates = 1e-3, []\nfor i, block in enumerate(model.layers):\n    "
            "rates.append({'params': block.parameters(), 'lr': lr * 0.9 ** i})"
        )),
    ]),
    ("LS041", "ddp", [
        replace("if os.path.exists", (
            "if rank == 0:\n"
            "    model.module.load_state_dict(torch.load('m.pt', map_location='cpu', weights_only=True))"
        )),
    ]),
    ("LS042", "ddp", [
        prepend("import os", (
            "from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=4)"
        )),
        replace("with nullcontext()", (
            "with accelerator.accumulate(model):\n"
            "    optimizer.zero_grad()\n"
            "    loss = criterion(model(x), y)\n"
            "    accelerator.backward(loss)\n"
            "    optimizer.step()"
        )),
        drop("if last:"), replace("model = DistributedDataParallel", "model = accelerator.prepare(model)"),
        drop("last = "),
    ]),
    ("LS043", "ddp", [
        prepend("import os", "import random"),
        prepend("sampler = DistributedSampler", (
            "order = list(range(50000))\nrandom.shuffle(order)\ntrain_data = torch.utils.data.Subset(train_data, order)"
        )),
    ]),
    ("LS044", "ddp", [
        replace("dist.init_process_group", (
            "dist.init_process_group('nccl', rank=local_rank, world_size=int(os.environ['WORLD_SIZE']))"
        )),
    ]),
    ("LS048", "fsdp", [
        drop("optimizer = "), prepend("fully_shard(model)", "optimizer = torch.optim.Adam(model.parameters())"),
    ]),
    ("LS049", "ddp", [Swap(FUSED, FUSED.replace("v)", "v, dropout_p=0.1)"))]),
    ("LS053", "ddp", [append("from contextlib", LINES)]),
    ("LS055", "ddp", [
        prepend("for epoch in", (
            "if 'RESUME' in os.environ:\n"
            "    state = torch.load('model.pt', map_location='cpu', weights_only=True)\n"
            "    model.module.load_state_dict(state['model'])\n"
            "first = int(os.environ.get('FIRST', 0))"
        )),
        Swap("range(epochs)", "range(first, epochs)"),
    ]),
    ("LS068", "ddp", [
        append("import torch", (
            "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--tf32', type=bool, default=True)\n"
            "torch.backends.cuda.matmul.allow_tf32 = parser.parse_args().tf32"
        )),
    ]),
]  # fmt: skip


def found(text):
    return [(finding.rule, finding.line) for finding in check_text(text, ALL)]


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_the_scripts_are_clean_before(name):
    assert found(SCRIPTS[name]) == []
    assert found(ast.unparse(ast.parse(SCRIPTS[name]))) == []


@pytest.mark.parametrize(("code", "name", "edits"), MUTATIONS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MUTATIONS)])
def test_the_pitfall_is_found_after(code, name, edits):
    tree = ast.parse(SCRIPTS[name])
    for edit in edits:
        edit.count = 0
        tree = edit.visit(tree)
        assert edit.count, "the edit found nothing to change"
    graph = (
        {"LS016"} if any("no_grad" in str(getattr(edit, "old", "")) for edit in edits) else set()
    )  # its sum keeps what is built
    placed = {ast.unparse(line) for edit in edits if isinstance(edit, Statements) for line in edit.new}
    # A sampler of its own that no set_epoch is called on; a model that is made before the seed.
    beside = {"LS004"} if code == "LS003" and any("DistributedSampler(" in line for line in placed) else set()
    beside |= {"LS008"} if "Net().cuda()" in placed else set()
    told = {rule for rule, _ in found(ast.unparse(ast.fix_missing_locations(tree)))}
    assert told == {code} | graph | beside


def test_every_rule_has_a_mutation():
    assert {code for code, _, _ in MUTATIONS} == set(RULES)
