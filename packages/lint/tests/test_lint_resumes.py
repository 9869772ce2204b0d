"""Checkpoints and resumes: keys that no save writes, wrappers' prefixes, best scores that begin anew."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def found(text, rule):
    """The lines of a rule's findings in a script."""
    return [text.splitlines()[finding.line - 1].strip() for finding in check_text(text, configure({}, rule, ""))]


KEYS = """
import torch

def save(model, optimizer, epoch, path):
    state = {{"model": model.state_dict(), "epoch": epoch}}
    {put}
    torch.save(state, path)

def store_progress(table, optimizer):
    table["optimizer"] = optimizer.state_dict()

def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)

def train(model, optimizer, loader, loss_of, args):
    first = 0
    if args.resume:
        checkpoint = load(args.resume)
        model.load_state_dict(checkpoint["model"])
        {read}
        first = checkpoint["epoch"] + 1
    for epoch in range(first, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        save(model, optimizer, epoch, f"{{args.folder}}/last.pt")
"""
READ = 'optimizer.load_state_dict(checkpoint["optimizer"])'


@pytest.mark.parametrize(
    ("put", "read", "told"),
    [
        ("pass", READ, [READ]),
        ('state["optimizer"] = optimizer.state_dict()', READ, []),
        ("state.update(optimizer=optimizer.state_dict())", READ, []),
        ("fill(state, optimizer)", READ, []),
        ('state |= {"optimizer": optimizer.state_dict()}', READ, []),
        ("for hook in args.hooks: hook.on_save_checkpoint(state)", READ, []),
        ("store_progress(state, optimizer)", READ, []),
        ("pass", 'best = checkpoint.get("best")', []),
        ("pass", f'if "optimizer" in checkpoint: {READ}', []),
    ],
)
def test_a_key_that_no_save_writes(put, read, told):
    assert found(KEYS.format(put=put, read=read), "LS062") == told


PLAIN = """
import torch

def train(model, optimizer, loader, loss_of, args):
    if args.{option}:
        state = torch.load(args.{option}, map_location="cpu", weights_only=True)
        {load}
    for epoch in range(args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        torch.save({saved}, "last.pt")
"""
TABLE = '{"model": model.state_dict(), "epoch": epoch}'


def test_a_bare_state_and_a_table_are_not_taken_for_each_other():
    keyed = 'optimizer.load_state_dict(state["optimizer"])'
    assert found(PLAIN.format(option="resume", load=keyed, saved="model.state_dict()"), "LS062") == [keyed]
    assert not found(PLAIN.format(option="pretrained", load=keyed, saved="model.state_dict()"), "LS062")
    whole = "model.load_state_dict(state)"
    assert found(PLAIN.format(option="resume", load=whole, saved=TABLE), "LS062") == [whole]
    assert not found(PLAIN.format(option="resume", load=whole, saved="model.state_dict()"), "LS062")
    assert not found(PLAIN.format(option="resume", load='model.load_state_dict(state["model"])', saved=TABLE), "LS062")


@pytest.mark.parametrize(
    ("save", "told"),
    [
        ("torch.save({table}, path)", 0),
        ("accelerator.save({table}, path)", 0),
        ("shared.save_on_master({table}, path)", 0),
        ("write({table}, path)", 0),
        ("pass", 1),
    ],
)
def test_checkpoints_that_are_written_in_another_way(save, told):
    table = '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
    load = 'optimizer.load_state_dict(state["optimizer"])'
    text = PLAIN.format(option="resume", load=load, saved="model.state_dict()")
    head = "import functools\nimport shared\nimport torch\nwrite = functools.partial(torch.save)\n"
    text = text.replace("import torch\n", head)
    text = text.replace("        torch.save(", f"        {save.replace('{table}', table)}\n        torch.save(")
    text = text.replace("args):", "args, accelerator, path):")
    assert len(found(text, "LS062")) == told


WRAPPER = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def train(args, rank, loader):
    model = torch.nn.Linear(4, 2).to(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    if args.resume:
        state = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict({given})
        optimizer.load_state_dict(state["optimizer"])
    model = DDP(model, device_ids=[rank])
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    if rank == 0:
        torch.save({{"model": {model}.state_dict(), "optimizer": optimizer.state_dict()}}, "last.pt")
"""


def test_a_wrappers_state_in_the_bare_model():
    load = 'model.load_state_dict(state["model"])'
    assert load in found(WRAPPER.format(given='state["model"]', model="model"), "LS014")
    assert load not in found(WRAPPER.format(given='state["model"]', model="model.module"), "LS014")
    assert load not in found(WRAPPER.format(given='state["model"], strict=False', model="model"), "LS014")


PREFIX = """
import torch

def load(model, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = {{key.replace("{old}", "{new}"): value for key, value in state.items()}}
    model.load_state_dict(state, strict=False)
"""


@pytest.mark.parametrize(
    ("old", "new", "number"), [(".module.", "", 1), ("module.", "", 0), (".module.", ".", 0), ("_orig_mod.", "", 0)]
)
def test_a_prefix_that_is_not_there(old, new, number):
    assert len(found(PREFIX.format(old=old, new=new), "LS014")) == number


BEST = """
import torch

def train(model, optimizer, loader, loss_of, score_of, args):
    first, best = 0, 0.0
    best = {begin}
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        {restore}
        first = checkpoint["epoch"] + 1
    for epoch in range(first, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        score = score_of(model)
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "score": score}}
        torch.save(state, args.folder + "/last.pt")
        is_best = score > best
        if is_best:
            best = score
            torch.save(state, {path})
"""
OPTIMIZER = 'optimizer.load_state_dict(checkpoint["optimizer"])'
ONE = 'args.folder + "/best.pt"'


@pytest.mark.parametrize(
    ("restore", "path", "told"),
    [
        (OPTIMIZER, ONE, ["best = 0.0"]),
        (f'{OPTIMIZER}; best = checkpoint["score"]', ONE, [f'{OPTIMIZER}; best = checkpoint["score"]']),
        (f'{OPTIMIZER}; best = checkpoint["best"]', ONE, []),
        (OPTIMIZER, 'f"{args.folder}/best_{epoch}.pt"', []),
        ("pass", ONE, []),
    ],
)
def test_a_best_score_that_begins_anew(restore, path, told):
    assert found(BEST.format(begin="0.0", restore=restore, path=path), "LS063") == told


WEIGHTS = """
import torch

def train(model, loader, loss_of, args):
    optimizer = torch.optim.{optimizer}
    if args.{option}:
        model.load_state_dict(torch.load(args.{option}, map_location="cpu", weights_only=True))
    for epoch in range(args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        torch.save(model.state_dict(), "last.pt")
"""


def test_a_resume_of_the_weights_alone_whose_epochs_begin_at_zero():
    adam, sgd = "AdamW(model.parameters())", "SGD(model.parameters(), 0.1)"
    assert len(found(WEIGHTS.format(optimizer=adam, option="resume"), "LS055")) == 1
    assert not found(WEIGHTS.format(optimizer=sgd, option="resume"), "LS055")
    assert not found(WEIGHTS.format(optimizer=adam, option="weights"), "LS055")


NAMED = """
import torch

def train(model, loader, loss_of, args):
    adam = torch.optim.Adam(model.parameters())
    start_epoch = 0
    if args.resume:
        state = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        {load}
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        for batch in loader:
            adam.zero_grad()
            loss_of(model, batch).backward()
            adam.step()
"""


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ("pass", 1),
        ('adam.load_state_dict(state["adam"])', 0),
        ('for each, part in zip([adam, args.opt], state["adam"]): each.load_state_dict(part)', 0),
    ],
)
def test_an_optimizer_by_any_name(load, told):
    assert len(found(NAMED.format(load=load), "LS055")) == told
    assert not found(NAMED.replace("adam", "opt").format(load='opt.load_state_dict(state["opt"])'), "LS055")


FLAG = {
    "main.py": """
import torch.distributed as dist
from trainer import Trainer

def main(params):
    dist.init_process_group("nccl")
    params["rank"] = dist.get_rank()
    params["loud"] = {flag}
    Trainer(params).train()

if __name__ == "__main__":
    main({{}})
""",
    "trainer.py": """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, params):
        self.loud = params["loud"]
        self.model = DDP(torch.nn.Linear(4, 2).to(params["rank"]), device_ids=[params["rank"]])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if self.loud:
            self.restore(params["path"])

    def restore(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])

    def train(self):
        for batch in self.batches():
            self.optimizer.zero_grad()
            self.model(batch).sum().backward()
            self.optimizer.step()
""",
}


@pytest.mark.parametrize(("flag", "lines"), [('params["rank"] == 0', [11]), ("bool(params)", [])])
def test_a_flag_of_the_rank_in_a_table_that_another_file_fills(tmp_path, flag, lines):
    for name, text in FLAG.items():
        (tmp_path / name).write_text(text.format(flag=flag) if name == "main.py" else text, encoding="utf-8")
    (tmp_path / "setup.py").write_text("", encoding="utf-8")
    told = check_paths([str(tmp_path / "trainer.py")], configure({}, "LS041", ""))
    assert [finding.line for finding in told] == lines


OBJECT = """
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.epoch = model, optimizer, 0

    def save(self, path):
        torch.save({{"model": self.model.state_dict(), "epoch": self.epoch}}, path)

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.epoch = state["epoch"]{more}

def main(model, optimizer, loader, path):
    trainer = Trainer(model, optimizer)
    trainer.load(path)
    for epoch in range(trainer.epoch, 9):
        trainer.epoch = epoch
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
        trainer.save(path)
"""


def test_the_epoch_of_an_object_that_is_resumed():
    assert found(OBJECT.format(more=""), "LS051") == ['self.epoch = state["epoch"]']
    assert not found(OBJECT.format(more=" + 1"), "LS051")
