"""LS014: states of what Accelerate prepared, files that its processes write, and names taken off somewhere else."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

SCRIPT = """
import os
import torch
from accelerate import Accelerator

def save(accelerator, net, path):
    {helper}

def main(build, data, path, names):
    accelerator = Accelerator()
    model = build()
    models = {{name: build() for name in names}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in names:
        models[name] = {each}
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x in data:
        accelerator.backward(model(x).mean())
        optimizer.step()
    {last}
    if accelerator.is_main_process:
        {main}

main(None, [], "x", [])
"""


def lines(text, code="LS014"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


def script(main="pass", last="pass", helper="pass", each="accelerator.prepare(models[name])"):
    return SCRIPT.format(main=main, last=last, helper=helper, each=each)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # the wrapper's names
        (script(main="torch.save(model.state_dict(), path)"), True),
        (script(main="state = {'net': model.state_dict(), 'epoch': 1}; torch.save(state, path)"), True),
        (script(main="torch.save({name: models[name].state_dict() for name in names}, path)"), True),
        (script(last="accelerator.save(model.state_dict(), path)"), True),
        (script(main="save(accelerator, model, path)", helper="torch.save(net.state_dict(), path)"), True),
        (script(main="torch.save(accelerator.unwrap_model(model).state_dict(), path)"), False),
        (script(main="torch.save(accelerator.get_state_dict(model), path)"), False),
        (script(main="model = accelerator.unwrap_model(model)\n        torch.save(model.state_dict(), path)"), False),
        (script(main="torch.save(optimizer.state_dict(), path)"), False),
        (script(main="torch.save({name: models[name].state_dict() for name in names}, path)", each="build()"), False),
        (script(main="save(accelerator, model, path)", helper="print(net.state_dict())"), False),
        # one file of all processes
        (script(last="torch.save({'epoch': 1}, path)"), True),
        (script(last="if len(data) > 3: torch.save({'epoch': 1}, os.path.join(path, 'last.pt'))"), True),
        (script(last="save(accelerator, model, path)", helper="torch.save({'epoch': 1}, path)"), True),
        (script(main="torch.save({'epoch': 1}, path)"), False),
        (script(last="accelerator.save({'epoch': 1}, path)"), False),
        (script(last="torch.save({'epoch': 1}, f'{path}-{accelerator.process_index}.pt')"), False),
        (script(main="save(accelerator, model, path)", helper="torch.save({'epoch': 1}, path)"), False),
    ],
)
def test_what_accelerates_processes_save(text, told):
    assert bool(lines(text)) is told


TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from loading import load

def main(model, local_rank, rank):
    dist.init_process_group("nccl")
    load(model, "old.pt")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    if rank == 0:
        {save}
    dist.destroy_process_group()
"""
LOADING = """
import torch

def load(model, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict({k.replace("module.", ""): v for k, v in state.items()})
"""


@pytest.mark.parametrize(
    ("save", "told"),
    [
        ("torch.save(model.state_dict(), 'model.pt')", True),
        ("torch.save({k.replace('module.', ''): v for k, v in model.state_dict().items()}, 'model.pt')", False),
        ("torch.save(model.module.state_dict(), 'model.pt')", False),
    ],
)
def test_names_that_a_loader_elsewhere_takes_off_are_in_the_file_all_the_same(tmp_path, save, told):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "loading.py").write_text(LOADING)
    (tmp_path / "train.py").write_text(TRAIN.format(save=save))
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS014", ""))) is told


OBJECTS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank, rank):
    dist.init_process_group("nccl")
    old = torch.load("old.pt", map_location="cpu", weights_only=True)
    old = {{k.replace("module.", ""): v for k, v in old.items()}}
    model.load_state_dict(old)
    model.to(local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DDP(model, device_ids=[local_rank])
    wrapped(torch.ones(1)).sum().backward()
    optimizer.step()
    for name in os.listdir("."):
        print(name) if rank == 0 else None
    dist.barrier()
    if rank == 0:
        {save}
    dist.destroy_process_group()
"""
FILLER = "".join(f"            print({number})\n" for number in range(8))
ARMS = f"if rank < 1:\n            torch.save(wrapped.module.state_dict(), 'model.pt')\n        else:\n{FILLER}"
ARMS += "            torch.save(wrapped.state_dict(), 'model.pt')"
PLAIN = "plain = wrapped.module if hasattr(wrapped, 'module') else wrapped\n        "


@pytest.mark.parametrize(
    ("save", "told"),
    [
        # the wrapper itself
        ("torch.save(wrapped, 'model.pt')", True),
        ("state = {'net': wrapped, 'epoch': 1}\n        torch.save(state, 'model.pt')", True),
        ("torch.save({'net': wrapped}, 'model.pt')", True),
        ("torch.save(model, 'model.pt')", False),
        ("torch.save(wrapped.module, 'model.pt')", False),
        ("torch.save({'epoch': 1}, 'model.pt')", False),
        # a name for the plain model, which is not saved, and names that were taken off far above
        (PLAIN + "torch.save(wrapped.state_dict(), 'model.pt')", True),
        (PLAIN + "torch.save(plain.state_dict(), 'model.pt')", False),
        ("if not hasattr(wrapped, 'module'):\n            torch.save(wrapped.state_dict(), 'model.pt')", False),
        # both in one table, each for its purpose; and in two arms, however long they are
        ("torch.save({\n 'net': wrapped.state_dict(),\n 'best': wrapped.module.state_dict(),\n}, 'model.pt')", False),
        (ARMS, False),
        (ARMS.replace("wrapped.module", "model"), True),
    ],
)
def test_the_wrapper_itself_and_names_beside_it(save, told):
    assert bool(lines(OBJECTS.format(save=save))) is told


HOROVOD = """
import torch
import horovod.torch as hvd

def main(model, loader):
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    {save}
"""


@pytest.mark.parametrize(
    ("save", "told"),
    [
        ("torch.save(model.state_dict(), 'model.pt')", True),
        ("torch.save({'epoch': 1}, 'model.pt')", True),
        ("if len(loader): torch.save(model.state_dict(), 'model.pt')", True),
        ("if hvd.rank() == 0: torch.save(model.state_dict(), 'model.pt')", False),
        ("torch.save(model.state_dict(), f'model-{hvd.rank()}.pt')", False),
        ("print(model.state_dict())", False),
    ],
)
def test_horovods_processes_write_one_file(save, told):
    assert bool(lines(HOROVOD.format(save=save))) is told


@pytest.mark.parametrize(
    ("file", "told"), [("tempfile.NamedTemporaryFile('w+b')", False), ("open('weights.pt', 'wb')", True)]
)
def test_a_temporary_file_is_each_processs_own(file, told):
    text = TRAIN.replace("from loading import load", "import tempfile").replace('load(model, "old.pt")', "pass")
    text = text.replace(
        "    if rank == 0:\n        {save}", f"    held = {file}\n    torch.save(model.module, held.name)"
    )
    assert bool(lines(text)) is told


STATES = """
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, fast, world_size):
{lines}
"""
SHARDED = [
    "accelerator = Accelerator()",
    "model = accelerator.prepare(model)",
    "with {block}:",
    "    state = model.state_dict()",
    "if accelerator.is_main_process:",
    "    torch.save(state, 'model.pt')",
]
WRAPS = ["dist.init_process_group('nccl')", "if world_size > 1:", "    model = DDP(model)"]
LEAVES = [
    "if fast:",
    "    not dist.get_rank() and torch.save(model.{state}(), 'model.pt')",
    *["    print(model)"] * 6,
    "    return",
]
SAVES = "not dist.get_rank() and torch.save(model.state_dict(), 'model.pt')"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([line.format(block="FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)") for line in SHARDED], False),
        ([line.format(block="torch.no_grad()") for line in SHARDED], True),
        ([*WRAPS, "if world_size == 1:", f"    {SAVES}"], False),
        ([*WRAPS, "if world_size > 1:", f"    {SAVES}"], True),
        ([*WRAPS, *(line.format(state="module.state_dict") for line in LEAVES), SAVES], False),
        ([*WRAPS, *(line.format(state="eval") for line in LEAVES), SAVES], True),
    ],
)
def test_a_state_that_has_no_names_of_a_wrapper(body, told):
    text = STATES.format(lines="\n".join(f"    {line}" for line in body))
    assert bool(lines(text)) is told


HANDED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def clean(state):
    {cleans}

def old(path):
    return {{k.replace("module.", ""): v for k, v in torch.load(path, weights_only=True).items()}}

def name():
{between}

def main(model, ddp, rank):
    dist.init_process_group("nccl")
    if ddp:
        model = DDP(model)
    state = model.state_dict()
    {after}
    if rank == 0:
        torch.save({{"model": {given}}}, "model.pt")
"""


@pytest.mark.parametrize(
    ("cleans", "after", "given", "told"),
    [
        ("return {k[7:]: v for k, v in state.items()}", "pass", "clean(state)", False),
        ("return {k: v.cpu() for k, v in state.items()}", "pass", "clean(state)", True),
        ("return {k[7:]: v for k, v in state.items()}", "pass", "state", True),
        ("pass", "state = model.module.state_dict() if ddp else state", "state", False),
        ("pass", "old('model.pt')", "state", True),
    ],
)
def test_a_function_on_the_way_takes_the_names_off(cleans, after, given, told):
    between = "    print(1)\n" * 12
    assert bool(lines(HANDED.format(cleans=cleans, after=after, given=given, between=between))) is told


PASSED = """
from setting import *

def main(model, rank, path):
    dist.init_process_group("nccl")
    model = DDP(model)
    if rank == 0:
        torch.save(model.state_dict(), path)
"""


@pytest.mark.parametrize(("hidden", "told"), [("", True), ("__all__ = ['torch', 'dist']\n", False)])
def test_a_wrapper_that_a_package_passes_on(tmp_path, hidden, told):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "setting").mkdir()
    (tmp_path / "setting" / "__init__.py").write_text("import torch\nfrom .parallel import *\n")
    (tmp_path / "setting" / "parallel.py").write_text(
        f"{hidden}import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    )
    (tmp_path / "train.py").write_text(PASSED)
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS014", ""))) is told


HELPER = """
import torch

class Net:
    def save_all(self, path):
        torch.save(self.weights, path)

def save_all(net, path):
    torch.save(net.weights, {path})
"""
CALLER = """
from accelerate import Accelerator
from helper import Net, save_all

def main(path, loader):
    accelerator = Accelerator()
    model = Net()
    wrapped = accelerator.prepare(model)
    for x in loader:
        accelerator.backward(wrapped(x).mean())
        if accelerator.is_main_process:
            save_all(model, path)
    {line}

main("x", [])
"""


@pytest.mark.parametrize(
    ("line", "path", "told"),
    [
        ("save_all(model, path)", "path", True),
        ("save_all(model, path)", "f'{path}-{net.rank}'", False),
        ("model.save_all(path)", "path", False),  # an object may know its rank,
        ("if accelerator.is_main_process: save_all(model, path)", "path", False),
    ],
)
def test_a_function_of_another_file_that_all_processes_have_write(tmp_path, line, path, told):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "helper.py").write_text(HELPER.format(path=path))
    (tmp_path / "train.py").write_text(CALLER.format(line=line))
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS014", ""))) is told


HANDED_TO_TRAINER = """
import torch
from transformers import AutoModel, Trainer, TrainingArguments

model = AutoModel.from_pretrained("x")
args = TrainingArguments("out", {given})
trainer = Trainer(model=model, args=args)
trainer.train()
{line}
"""


@pytest.mark.parametrize(
    ("given", "line", "told"),
    [
        ("deepspeed='ds.json'", "model.save_pretrained('out')", True),
        ("deepspeed='ds.json'", "torch.save(model.state_dict(), 'out.pt')", True),
        ("deepspeed='ds.json'", "trainer.save_model('out')", False),
        ("deepspeed='ds.json'", "if trainer.is_world_process_zero(): model.save_pretrained('out')", False),
        ("seed=1", "model.save_pretrained('out')", False),
    ],
)
def test_a_model_that_every_process_of_a_trainer_writes(given, line, told):
    assert bool(lines(HANDED_TO_TRAINER.format(given=given, line=line))) is told


ENGINE_OR_DDP = """
import torch
import deepspeed
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, config, rank, path):
    if config:
        engine, optimizer, _, _ = deepspeed.initialize(config_params=config, model=model)
    else:
        model = DDP(model, device_ids=[rank])
    {line}
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("if rank == 0: torch.save(model.state_dict(), path)", True),
        ("engine.save_checkpoint(path)", False),
        ("if rank == 0: torch.save(engine.module.state_dict(), path)", False),
    ],
)
def test_a_wrapper_beside_deepspeed(line, told):
    assert bool(lines(ENGINE_OR_DDP.format(line=line))) is told
