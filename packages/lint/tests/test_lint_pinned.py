"""LS022: where a script says that it pins memory, and how it moves its batches."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

SCRIPT = """
import torch
from torch.autograd import Variable
from torch.utils.data import DataLoader
from tqdm import tqdm

{above}

def loaders(data, {parameter}):
    return DataLoader(data, num_workers=2, {option})

def train(model, data, optimizer, cfg, rank, device):
    train_loader = loaders(data)
    {named}
    for images, targets in {over}:
        {move}
        optimizer.zero_grad()
        model(images, targets).backward()
        optimizer.step()
"""
USUAL = {
    "above": "",
    "parameter": "cfg=None",
    "option": "pin_memory=True",
    "named": "pass",
    "over": "train_loader",
    "move": "images = images.cuda()",
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parameter": "pin_memory=True", "option": "pin_memory=pin_memory"}, True),
        ({"parameter": "*, pin_memory=True", "option": "pin_memory=pin_memory"}, True),
        ({"parameter": "pin_memory=False", "option": "pin_memory=pin_memory"}, False),
        ({"above": "_C.DATA.PIN_MEMORY = True", "option": "pin_memory=cfg.DATA.PIN_MEMORY"}, True),
        ({"above": "_C.DATA.PIN_MEMORY = False", "option": "pin_memory=cfg.DATA.PIN_MEMORY"}, False),
        ({"option": "pin_memory=cfg.get('pin_memory', True)"}, True),
        ({"option": "pin_memory=cfg.get('pin_memory', False)"}, False),
        ({"option": "pin_memory=getattr(cfg, 'pin_memory', True)"}, True),
        ({"option": "pin_memory=getattr(cfg, 'pin_memory', False)"}, False),
        ({"option": "pin_memory=torch.cuda.is_available()"}, True),
        ({"option": "pin_memory=device.type == 'cuda'"}, True),
        ({"option": "pin_memory=device.type == 'mps'"}, False),
        ({"option": "pin_memory='cuda' in str(device)"}, True),
        ({"option": "pin_memory=str(device).startswith('cuda')"}, True),
        ({"option": "pin_memory=torch.cuda.device_count() > 0"}, True),
        ({"option": "pin_memory=torch.cuda.is_available() and cfg.use_cuda"}, True),
        ({"option": "pin_memory=torch.cuda.is_available() and cfg.pins"}, False),
        ({"above": "on_gpu = torch.cuda.is_available()", "option": "pin_memory=on_gpu"}, True),
        ({"above": "on_gpu = os.cpu_count() > 0", "option": "pin_memory=on_gpu"}, False),
        ({"parameter": "useGpu=True", "option": "pin_memory=useGpu"}, True),
        ({"above": "kwargs = EasyDict(pin_memory=True)", "option": "**kwargs"}, True),
        ({"above": "# pin_memory = True", "option": ""}, False),
    ],
)
def test_where_memory_is_pinned(change, told):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"move": "images = Variable(images).cuda()"}, True),
        ({"move": "images = Variable(images)\n        images = images.cuda()"}, True),
        ({"move": "images = data.crop(images)\n        images = images.cuda()"}, False),
        ({"move": "for image in data.crop(images): image.cuda()"}, False),
        ({"move": "images = images.to(torch.int32)"}, False),
        ({"move": "images = images.to(torch.uint8)"}, False),
        ({"move": "images = images.to(torch.bfloat16)"}, False),
        ({"move": "images = Variable(images.cuda(non_blocking=True))"}, False),
        ({"move": "images = tree_map(lambda x: x.to(device, non_blocking=True), images)"}, False),
        ({"move": "model = tree_map(lambda x: x.to(device), model)"}, False),
        ({"over": "tqdm(train_loader) if rank == 0 else train_loader"}, True),
        ({"over": "bar", "named": "bar = tqdm(train_loader) if rank == 0 else train_loader"}, True),
        ({"over": "bar", "named": "bar = tqdm(cfg.pairs) if rank == 0 else cfg.pairs"}, False),
    ],
)
def test_how_batches_are_moved(change, told):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("named", "given", "told"),
    [
        ("workers = 0", "workers", True),
        ("workers = 0 if rank else 0", "workers", True),
        ("workers = 0 if rank else 4", "workers", False),
        ("workers = cfg.workers", "workers", False),
    ],
)
def test_no_workers_by_a_name(named, given, told):
    lines = ["torch.cuda.init()", named, f"return DataLoader(data, num_workers={given})"]
    text = "import torch\nfrom torch.utils.data import DataLoader\n\ndef main(data, cfg, rank):\n"
    found = check_text(text + "".join(f"    {line}\n" for line in lines), configure({}, "LS022", ""))
    assert bool(found) is told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("options['num_workers'] = 4; loader = DataLoader(data, **options)", False),
        ("options.update(rest); loader = DataLoader(data, **options)", False),
        ("options.update({'num_workers': 4}); loader = DataLoader(data, **options)", False),
        ("options[rest] = 4; loader = DataLoader(data, **options)", False),
        ("more = {'num_workers': 4}; loader = DataLoader(data, **options, **more)", False),
        ("batch = next(iter(DataLoader(data)))", False),
        ("loader = iter(DataLoader(data))", True),
    ],
)
@pytest.mark.parametrize("options", ["{'batch_size': 8, 'num_workers': 0}", "dict(shuffle=True, num_workers=0)"])
def test_no_workers_in_options_that_are_written_out(options, line, told):
    text = "import torch\nfrom torch.utils.data import DataLoader\n\ndef main(data, rest):\n"
    text += f"    torch.cuda.init()\n    options = {options}\n    {line}\n"
    assert bool(check_text(text, configure({}, "LS022", ""))) is told


DRAWN = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

options = {{"num_workers": 2}}
{option}

class Solver:
    def __init__(self, data, device):
        self.device, self.rows = device, DataLoader(data, **options)
        self.stream = {stream}

    def step(self, model, optimizer):
        images = next(self.stream)
        {move}
        optimizer.zero_grad()
        model(images).backward()
        optimizer.step()
"""
PINNED = "options['pin_memory'] = True"
OTHER = "DataLoader(data, num_workers=2"


@pytest.mark.parametrize(
    ("option", "stream", "move", "told"),
    [
        ("pin_memory = True", f"iter({OTHER}, pin_memory=False))", "images = images.to(self.device)", False),
        ("pin_memory = True", f"iter({OTHER}))", "images = images.to(self.device)", False),
        ("options['pin_memory'] = False", "iter(self.rows)", "images = images.to(self.device)", False),
        ("options['shuffle'] = True", "iter(self.rows)", "images = images.to(self.device)", False),
        (PINNED, "iter(data)", "images = images.to(self.device)", False),
        (PINNED, "iter(self.rows)", "images = images.to(self.device, non_blocking=True)", False),
    ],
)
def test_an_iterator_of_a_loader(option, stream, move, told):
    text = DRAWN.format(option=option, stream=stream, move=move).replace("from accelerate import Accelerator\n", "")
    assert bool(check_text(text, configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("move", "told"),
    [
        ("images = images if self.use_accelerate else images.to(self.device)", False),
        ("images = images.to(self.device)", False),
        ("if use_accelerate: images = images.to(self.device)", False),
        ("if not slow: images = images.to(self.device)", False),
    ],
)
def test_a_program_that_may_leave_accelerate_out(move, told):
    text = DRAWN.format(option=PINNED, stream="iter(self.rows)", move=move) + "\naccelerator = Accelerator()\n"
    assert bool(check_text(text, configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ("from torch.utils.data import DataLoader", True),
        ("from torch_geometric.loader import DataLoader", False),
        ("class DataLoader:\n    pass", False),
    ],
)
def test_a_loader_that_another_file_of_the_project_passes_on(tmp_path, brought, told):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "images.py").write_text(f"{brought}\n")
    (tmp_path / "run.py").write_text(
        "import torch\nfrom images import DataLoader\n\nDataLoader(torch.ones(3).cuda())\n"
    )
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS022", ""))) is told


SEARCH = """
import torch
from torch.utils.data import DataLoader

def search(model, optimizer, criterion, data, valid_data):
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    valid_queue = DataLoader(valid_data, num_workers=2, pin_memory=True)
    valid_iter = iter(valid_queue)
    for x, y in loader:
        {inner}
        criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
        optimizer.step()
    {after}
"""
MOVE = "a, b = next(valid_iter); model(a.cuda(), b.cuda())"
CROPPED = "c = next(valid_iter)\n        c = data.crop(c)\n        model(c.cuda())"


@pytest.mark.parametrize(("inner", "after", "number"), [(MOVE, "pass", 1), ("pass", MOVE, 0), (CROPPED, "pass", 0)])
def test_held_out_batches_that_a_loop_trains_with(inner, after, number):
    assert len(check_text(SEARCH.format(inner=inner, after=after), configure({}, "LS022", ""))) == number


PREPARED = """
import torch
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, data, args):
        self.args, self.loader = args, DataLoader(data, num_workers=2, pin_memory={pins})

    def prepare(self, *args):
        device = torch.device("cuda")

        def move(tensor):
            return tensor.to(device)

        return [move(part) for part in args]

    def train(self, model, optimizer, {given}):
        for images, targets in self.loader:
            images, targets = self.prepare({given})
            optimizer.zero_grad()
            model(images, targets).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("pins", "given", "told"),
    [
        ("not args.deterministic", "images, targets", False),
        ("True", "noise, labels", False),
    ],
)
def test_a_helper_that_moves_all_that_it_is_given(pins, given, told):
    text = PREPARED.format(pins=pins, given=given)
    assert bool(check_text(text, configure({}, "LS022", ""))) is told


LOOKED = """
import torch
from torch.utils.data import DataLoader

train_loader = DataLoader(data, num_workers=2, pin_memory=True)
val_loader = DataLoader(held_out, num_workers=2, pin_memory=True)

{above}
def {name}(model):
    stream = iter({shown})
    batch = next(stream)
    {move}

def train(model, optimizer):
    for epoch in range(10):
        for x in train_loader:
            model(x.cuda(non_blocking=True)).backward()
            optimizer.step()
            {each}
        {name}(model)
"""
SHOWN = {"above": "", "name": "show", "shown": "train_loader", "move": "model(batch.cuda())", "each": "pass"}
SEVERAL_SHOWN = "for _ in range(9): batch = next(stream); model(batch.cuda())"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"shown": "val_loader"}, 0),
        ({}, 0),
        ({"move": SEVERAL_SHOWN}, 1),
        ({"move": SEVERAL_SHOWN, "shown": "val_loader"}, 0),
        ({"move": SEVERAL_SHOWN, "name": "evaluate"}, 0),
        ({"move": SEVERAL_SHOWN, "above": "@torch.no_grad()"}, 0),
        ({"each": "show(model)"}, 1),
    ],
)
def test_a_batch_that_is_drawn_once_for_a_look(change, number):
    text = LOOKED.format(**SHOWN | change)
    assert len(check_text(text, configure({}, "LS022", ""))) == number


SEVERAL = """
import torch
from torch.utils.data import DataLoader

def train(model, loader, optimizer):
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        model(x, y).backward()
        optimizer.step()

def pinned(data, options):
    return DataLoader(data, num_workers=2, pin_memory=True)

def main(model, data, optimizer, options):
    {line}
    train(model, loader, optimizer)
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("loader = pinned(data, options)", True),
        ("loader = DataLoader(data, num_workers=2)", False),
        ("loader = DataLoader(data, num_workers=2, pin_memory=False)", False),
        ("loader = DataLoader(data, num_workers=2, **options)", True),
        ("loader = DataLoader(data, 8, True, None, None, 2, None, True)", True),
        ("loader = pinned(data, options) if options else DataLoader(data, num_workers=2)", True),
    ],
)
def test_a_loader_that_pins_nothing_beside_one_that_does(line, told):
    assert bool(check_text(SEVERAL.format(line=line), configure({}, "LS022", ""))) is told


CHUNKED = """
import torch
from torch.utils.data import DataLoader

def step(model, optimizer, inputs, targets):
    for x, y in zip(inputs.chunk(4), {other}):
        model(x.cuda(non_blocking=True), y.cuda()).backward()
    optimizer.step()

def train(model, data, optimizer, noise):
    for inputs, targets in DataLoader(data, num_workers=2, pin_memory=True):
        step(model, optimizer, inputs, targets)
"""
