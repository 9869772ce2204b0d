"""`lockstep lint --migrate`: the rows of a script of each kind, by the adapters' tables."""

import ast
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.adapters.hf_trainer import refusals as trainer_refusals
from lockstep.adapters.lightning import refusals
from lockstep.migrate import objects
from lockstep.migrate.command import rows_of
from lockstep.migrate.parsing import MigrateProblem
from lockstep.migrate.plain import ACTIONS
from lockstep_lint.analysis.source import parse
from lockstep_lint.command import command

ROOT = Path(__file__).parents[2]


def told(text, path="example.py"):
    """The kind, and (line, action, what it becomes) of each row."""
    kind, rows = rows_of(parse(path, text))
    return kind, [(row.line, row.action, row.advice) for row in rows]


def has(rows, line, action, part):
    return any((at, how) == (line, action) and part in here for at, how, here in rows)


def actions(rows):
    return {(line, action) for line, action, _ in rows}


TRAINER = """from transformers import Trainer, TrainingArguments, EarlyStoppingCallback, TrainerCallback
import datasets

class Mine(Trainer):
    def compute_loss(self, model, inputs, **more):
        return model(**inputs).loss

    def training_step(self, *args):
        return super().training_step(*args)

    def evaluate(self):
        return {}

class Noted(TrainerCallback):
    pass

args = TrainingArguments(
    "out",
    learning_rate=1e-4,
    neftune_noise_alpha=5.0,
    bf16_full_eval=False,
    optim="adamw_8bit",
    optim_args=None,
    deepspeed=given.deepspeed,
    turbo=1,
    log_level="info",
    **more,
)
data = datasets.load_dataset("x", streaming=True)
trainer = Mine(model, args, train_dataset=data, callbacks=[EarlyStoppingCallback(3), Noted()])
trainer.add_callback(Noted)
out = trainer.train(resume_from_checkpoint="out/checkpoint-5")
trainer.save_model()
print(out.metrics)
"""


def test_a_trainer():
    kind, rows = told(TRAINER)
    assert kind == "a Hugging Face Trainer"
    assert has(rows, 8, "refused", "compute_loss")
    assert has(rows, 11, "stays", "eval_strategy='no'")
    assert has(rows, 14, "stays", "its events are called")
    assert has(rows, 19, "stays", "becomes lr")
    assert has(rows, 20, "refused", "add the noise in the model's forward")
    assert has(rows, 21, "stays", "the default")
    assert has(rows, 22, "refused", "use one of adamw_torch")
    assert has(rows, 23, "stays", "its optimizer")
    assert has(rows, 24, "refused", "if set: leave it out, and give the config its engine")
    assert has(rows, 25, "refused", "unknown to lockstep")
    assert has(rows, 26, "stays", "has its own levels")
    assert has(rows, 27, "stays", "docs/inside/hf-trainer.md")
    assert has(rows, 29, "refused", "without streaming")
    assert has(rows, 30, "stays", "patience and min_delta")
    assert has(rows, 30, "stays", "its events are called")
    assert has(rows, 31, "stays", "its events are called")
    assert has(
        rows, 32, "becomes", "config, task = lockstep.from_trainer(trainer); result = lockstep.train(config, task)"
    )
    assert has(rows, 32, "refused", "a run resumes from its folder")
    assert has(rows, 33, "stays", "the trained model")
    assert has(rows, 34, "becomes", "result.evaluation")
    assert not any(line in (5, 6) for line, _, _ in rows)  # compute_loss is called as it is


def test_trainers_of_trl_and_subclasses_of_the_arguments():
    text = """from trl import SFTTrainer, GRPOTrainer, SFTConfig, TrlParser
SFTTrainer(model, SFTConfig(output_dir="a", packing=True, auto_find_batch_size=True)).train()
GRPOTrainer(model).train()
TrlParser(SFTConfig).parse_args_and_config()
"""
    kind, rows = told(text)
    assert kind == "a Hugging Face Trainer"
    assert has(rows, 2, "stays", "read by its data")
    assert has(rows, 2, "refused", "per_device_train_batch_size")
    assert has(rows, 2, "becomes", "from_trainer")
    assert has(rows, 3, "refused", "SFTTrainer, DPOTrainer, RewardTrainer")
    assert has(rows, 4, "stays", "--hf-args args.yaml")


LIGHTNING = """import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, BatchSizeFinder

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx, optimizer_idx):
        return self.net(batch).mean()

    def optimizer_step(self, *args):
        pass

    def configure_optimizers(self):
        return None

stop = EarlyStopping("loss")
trainer = L.Trainer(max_epochs=3, precision="int8", callbacks=[stop, ModelCheckpoint(), BatchSizeFinder(), Mine()],
    gradient_clip_algorithm="value", profiler=None)
trainer.fit(Net(), train, val, ckpt_path="some.ckpt")
trainer.test(Net())
"""


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_lightning_module(package):
    text = LIGHTNING
    if package != "lightning":
        text = LIGHTNING.replace("lightning as", f"{package} as").replace("from lightning.pytorch", f"from {package}")
    kind, rows = told(text)
    assert kind == "a Lightning module"
    assert has(rows, 4, "stays", "lockstep train --lightning example.py:Net")
    assert has(rows, 7, "stays", "docs/lightning.md")
    assert has(rows, 9, "refused", "removed in Lightning 2")
    assert has(rows, 12, "refused", "the engine takes the step")
    assert has(rows, 19, "stays", "num_epochs")
    assert has(rows, 19, "refused", "use one of 32-true")
    assert has(rows, 19, "stays", "patience, patience_metric and min_delta")
    assert has(rows, 19, "stays", "best_metric, ckpt_freq")
    assert has(rows, 19, "refused", "lockstep.find_micro_batch(config, task) does it")
    assert has(rows, 19, "stays", "its hooks are called")
    assert has(rows, 20, "refused", "clipped by their norm")
    assert has(rows, 20, "stays", "the default")
    assert has(rows, 21, "becomes", "from_lightning(Net(), (train, val), trainer=trainer)")
    assert has(rows, 21, "refused", "a run resumes from its folder")
    assert has(rows, 22, "becomes", "task.test()")


ACCELERATE = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16", split_batches=True)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=8, collate_fn=collate)
val_loader = DataLoader(held_out, 4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(3):
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss / 4
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            accelerator.frobnicate()
    accelerator.print(accelerator.gather_for_metrics(loss))
"""


def test_an_accelerate_loop():
    kind, rows = told(ACCELERATE)
    assert kind == "an Accelerate loop"
    assert has(rows, 5, "becomes", "world = lockstep.World.join()")
    assert has(rows, 5, "becomes", "lockstep.autocast")
    assert has(rows, 5, "refused", "lockstep.loader splits batches")
    assert has(rows, 7, "becomes", "lockstep.loader(data, world, batch_size=..., micro_batch_size=8, collate=collate)")
    assert has(
        rows, 8, "becomes", "lockstep.loader(held_out, world, batch_size=..., micro_batch_size=4, shuffle=False)"
    )
    assert has(rows, 9, "becomes", "lockstep.engine(")
    assert has(rows, 10, "goes", "epochs=")
    assert has(rows, 11, "becomes", "for batch in step: batch = batch.data")
    assert has(rows, 12, "becomes", "engine.accumulate(batch.last)")
    assert has(rows, 13, "becomes", "remove the division")
    assert has(rows, 14, "becomes", "engine.backward(loss, batch.weight)")
    assert has(rows, 15, "refused", "clip= of lockstep.engine")
    assert has(rows, 16, "becomes", "engine.step()")
    assert has(rows, 17, "stays", "once per step")
    assert has(rows, 18, "goes", "clears")
    assert has(rows, 19, "refused", "no counterpart")
    assert has(rows, 20, "becomes", "world.print")
    assert has(rows, 20, "becomes", "lockstep.gather_for_metrics(step, found)")
    assert (6, "stays") not in actions(rows)  # the engine stands where `prepare` does


DDP = """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DDP(net.cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
other = DataLoader(data, batch_size=16, sampler=WeightedRandomSampler(weights, 100))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with model.no_sync():
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            loss /= 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "m.pt")
dist.destroy_process_group()
"""


def test_a_ddp_loop():
    kind, rows = told(DDP)
    assert kind == "a plain DDP loop"
    assert has(rows, 7, "becomes", "World.join()")
    assert has(rows, 8, "goes", "reads it")
    assert has(rows, 9, "goes", "sets it")
    assert has(rows, 10, "becomes", 'lockstep.engine("ddp", net.cuda(), optimizer, world)')
    assert has(rows, 12, "goes", "loss_scaling=True")
    assert has(rows, 13, "goes", "the order is the same")
    assert (14, "refused") not in actions(rows)
    assert has(rows, 15, "refused", "loader(shuffle=...)")
    assert has(rows, 16, "goes", "epochs=")
    assert has(rows, 17, "goes", "own permutation")
    assert has(rows, 18, "becomes", "for batch in step: x, y = batch.data")
    assert has(rows, 19, "becomes", "engine.accumulate(batch.last)")
    assert has(rows, 20, "becomes", "lockstep.autocast")
    assert has(rows, 22, "becomes", "remove the division")
    assert has(rows, 23, "becomes", "engine.backward(loss, batch.weight)")
    assert {(24, "goes"), (26, "becomes"), (27, "goes"), (28, "goes")} <= actions(rows)
    assert has(rows, 25, "goes", "clip=0.5 of lockstep.engine")
    assert has(rows, 29, "stays", "gather_for_metrics")
    assert has(rows, 30, "becomes", "world.rank")
    assert has(rows, 31, "becomes", "lockstep.save_state")
    assert has(rows, 32, "becomes", "world.leave()")


def test_a_loop_of_one_device_and_what_an_engine_cannot():
    text = """import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    pass

first = torch.optim.Adam(g.parameters())
second = torch.optim.LBFGS(d.parameters())
loader = DataLoader(data, batch_sampler=mine)
for batch in loader:
    loss = g(batch).sum()
    loss.backward()
    first.step()
    optimizer.step(closure)
"""
    kind, rows = told(text)
    assert kind == "a plain loop"
    assert has(rows, 4, "refused", "__len__")
    assert has(rows, 7, "stays", 'lockstep.engine("auto", model.to(world.device), first, world)')
    assert has(rows, 9, "refused", "loader(shuffle=...)")
    assert has(rows, 12, "becomes", "with engine.accumulate(batch.last): engine.backward(loss, batch.weight)")
    assert has(rows, 14, "refused", "without a closure")


EPOCHS = """import torch
from torch.distributed.fsdp import fully_shard

def resume(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

def main(model, loader):
    model.load_state_dict(torch.load("pretrained.pt", map_location="cpu"))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(3):
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
        scheduler.step()
"""


def test_clocks_weights_and_shards():
    """A scheduler keeps its clock, and weights that are loaded are no resume."""
    kind, rows = told(EPOCHS)
    assert kind == "a plain DDP loop"
    assert has(rows, 5, "becomes", "lockstep.load_state(")
    assert has(rows, 10, "stays", "before the engine is built")
    assert has(rows, 12, "goes", "shards each block")
    assert has(rows, 13, "becomes", 'lockstep.engine("fsdp", model')
    assert has(rows, 22, "stays", "once per step")
    assert has(rows, 24, "stays", "once per epoch")


def test_an_old_name_of_an_argument_keeps_what_it_does():
    text = """from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", evaluation_strategy="epoch")
Trainer(model, arguments).train()
"""
    _, rows = told(text)
    assert has(rows, 2, "becomes", "eval_strategy=...")
    assert not has(rows, 2, "refused", "")


def test_a_fabric_loop():
    text = """from lightning.fabric import Fabric

fabric = Fabric(devices=2, strategy="fsdp")
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
for batch in loader:
    fabric.backward(model(batch) / 4)
    optimizer.step()
"""
    kind, rows = told(text)
    assert kind == "a Fabric loop"
    assert has(rows, 3, "becomes", "the engine name")
    assert has(rows, 4, "goes", "torchrun")
    assert has(rows, 5, "becomes", "lockstep.engine(")
    assert has(rows, 7, "becomes", "engine.backward")
    assert has(rows, 7, "becomes", "remove the division")
    assert has(rows, 8, "becomes", "engine.step()")


FABRIC = """from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu")
fabric.launch()
model = net()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
for index, (x, y) in enumerate(loader):
    waiting = (index + 1) % 4 != 0
    with fabric.no_backward_sync(model, enabled=waiting):
        fabric.backward(F.cross_entropy(model(x), y) / 4)
    if not waiting:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
fabric.save("model.ckpt", {"model": model, "optimizer": optimizer})
"""


@pytest.mark.parametrize(
    ("name", "kind", "becomes"),
    [
        ("ddp", "a plain DDP loop", 8),
        ("lightning", "a Lightning module", 1),
        ("fabric", "a Fabric loop", 9),
        ("accelerate", "an Accelerate loop", 9),
        ("hf", "a Hugging Face Trainer", 1),
    ],
)
def test_the_scripts_of_coming_from(name, kind, becomes):
    """Each as its documentation has it: nothing of it is refused."""
    document = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", document, re.DOTALL))
    for script, diff in re.findall(r"<!-- (\w+) kept -->\n```diff\n(.*?)```", document, re.DOTALL):
        blocks[script] = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("+"))
    blocks["fabric"] = FABRIC
    found, rows = told(blocks["shared"] + blocks[name])
    assert found == kind
    assert [row for row in rows if row[1] == "refused"] == []
    assert sum(action == "becomes" for _, action, _ in rows) >= becomes


def test_what_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ddp.py").write_text(DDP)
    Path("clean.py").write_text("loss.backward()\noptimizer.step()\n")
    assert command(["--migrate", "clean.py"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("clean.py: a plain loop: keep the loop")
    assert "clean.py:1: loss.backward()" in out
    assert "    becomes  engine.step()" in out
    assert out[-1] == "clean.py: 2 to replace. Nothing was written."
    assert command(["--migrate", "ddp.py", "clean.py"]) == 1
    assert "1 refused. Nothing was written." in capsys.readouterr().out
    assert command(["--migrate", "ddp.py", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert all(list(each) == ["path", "kind", "line", "action", "there", "here"] for each in found)
    assert {each["action"] for each in found} == set(ACTIONS)
    assert Path("ddp.py").read_text() == DDP


def test_a_notebook_names_its_cells(tmp_path, capsys):
    cells = [{"cell_type": "markdown", "source": "x"}, {"cell_type": "code", "source": "!pip install x\nimport torch"}]
    cells.append({"cell_type": "code", "source": ["a = 1\n", "loss.backward()"]})
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert command(["--migrate", str(tmp_path / "a.ipynb")]) == 0
    assert "a.ipynb:cell 3:2: loss.backward()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--migrate needs the script"),
        (["nowhere.py"], "there is no file or folder 'nowhere.py'"),
        (["folder"], "--migrate folder is a folder: give the training script"),
        (["broken.py"], "--migrate broken.py:1: does not parse"),
        (["empty.py"], "--migrate empty.py: no training found"),
        (["empty.py", "--fix"], "leave out --fix"),
        (["empty.py", "--unsafe-fixes"], "leave out --unsafe-fixes"),
        (["empty.py", "--select", "ALL"], "leave out --select"),
        (["empty.py", "--format", "sarif"], "--format text or json, not sarif"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("broken.py").write_text("def (\n")
    Path("empty.py").write_text("import torch\n")
    assert command(["--migrate", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_callbacks_that_are_told_are_those_that_the_adapters_know():
    from lockstep.adapters.hf_trainer import convert as trainer_callbacks
    from lockstep.adapters.lightning import hooks as lightning_callbacks

    assert trainer_refusals.CALLBACKS.keys() == {
        *trainer_callbacks._REPLACED_BY_RUN,
        *trainer_callbacks._SINKS,
        trainer_callbacks._EARLY_STOPPING,
    }
    served = {"EarlyStopping", "ModelCheckpoint", "EMAWeightAveraging", "LambdaCallback"}
    assert refusals.CALLBACKS.keys() == served | {*lightning_callbacks.DONE}


def test_the_precisions_that_are_told_are_those_that_the_adapter_knows():
    from lockstep.adapters.lightning import arguments as lightning_arguments

    assert set(refusals.PRECISIONS) == lightning_arguments._PRECISIONS.keys()


def test_the_methods_that_rows_name_exist():
    """What a row promises of a world, an engine or the package is there."""
    import lockstep
    from lockstep.distributed.world import World

    tables = [*objects.ACCELERATE.attributes.values(), *objects.FABRIC.attributes.values()]
    text = " ".join(here for _, here in [*tables, *objects.ACCELERATE.arguments.values()])
    assert set(re.findall(r"lockstep\.([A-Za-z_]\w*)", text)) <= set(lockstep.__all__)
    fields = {*vars(World), *World.__dataclass_fields__}
    assert set(re.findall(r"world\.([a-z_]+)", text)) <= fields


def test_any_piece_of_a_script_is_told_or_not_but_never_fails():
    drawn = random.Random(0)
    lines = "\n".join((TRAINER, LIGHTNING, ACCELERATE, DDP)).splitlines()
    for _ in range(60):
        text = "\n".join(line.strip() for line in drawn.sample(lines, 25))
        try:
            ast.parse(text)
        except SyntaxError:
            text = "\n".join(line for line in text.splitlines() if _parses(line))
        kind, rows = rows_of(parse("piece.py", text))
        assert bool(kind) == bool(rows)
        assert all(0 < row.line <= text.count("\n") + 1 and row.code and row.advice for row in rows)
    deep = "loss.backward()\n" + "x = " + "f(" * 80 + ")" * 80
    assert rows_of(parse("deep.py", deep))[0] == "a plain loop"


def _parses(line):
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return True


def test_a_file_that_is_too_intricate_is_one_line(monkeypatch):
    monkeypatch.setattr("lockstep_lint.analysis.budget.LIMIT", 3)
    with pytest.raises(MigrateProblem, match="example.py: too large or too deeply nested"):
        rows_of(parse("example.py", DDP))


def test_it_loads_no_torch(tmp_path):
    (tmp_path / "a.py").write_text(DDP)
    code = (
        "import sys; from lockstep import cli; cli.dispatch(['lint', '--migrate', sys.argv[1]]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'lockstep.task')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.py")], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
