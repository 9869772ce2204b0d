"""Forms of training and evaluation loops: LS007, LS008, LS012, LS016, LS017, LS018, LS023 and LS027."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import functools
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy
"""


def told(text, code):
    return bool(check_text(HEAD + text, configure({}, code, "")))


ARMS = """
def train(model, loader, optimizer, criterion, count):
    model = DDP(model)
    for i, (x, y) in enumerate(loader):
        if {test}:
            with model.no_sync():
                loss = criterion(model(x), y){scale}
                loss.backward()
        else:
            loss = criterion(model(x), y){scale}
            loss.backward()
            {step}
"""
STEP = "optimizer.step(); optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"test": "(i + 1) % 8 != 0 and i + 1 < len(loader)"}, True),
        ({"test": "(i + 1) % count"}, True),
        ({"scale": " / count", "test": "(i + 1) % count != 0 and i + 1 < len(loader)"}, False),
        ({"scale": " / count"}, True),  # the last group is dropped
        ({"test": "i < count"}, False),  # nothing says that this comes again
        ({"step": "pass"}, False),
    ],
)
def test_accumulation_with_a_backward_in_each_arm(change, found):
    usual = {"test": "(i + 1) % count != 0", "scale": "", "step": STEP}
    assert told(ARMS.format(**(usual | change)), "LS012") is found


SHARDED = """
def sample(net, text):
    with torch.no_grad():
        return net(text)

def show(net):
    return str(net)

def main(model, rank, x):
    {wrap}
    for _ in range(3):
        {line}
"""


@pytest.mark.parametrize(
    ("wrap", "line", "found"),
    [
        ("model = FSDP(model)", "if rank == 0: model(x)", True),
        ("model = FSDP(model)", "if rank == 0: print(sample(model, 'a'))", True),
        ("model = torch.compile(FSDP(model))", "if rank == 0: sample(net=model, text='a')", True),
        ("fully_shard(model)", "if rank == 0: model(x)", True),
        ("model = FSDP(model)", "model(x)", False),
        ("model = FSDP(model)", "y = sample(model, 'a')\n        if rank == 0: print(y)", False),
        ("model = FSDP(model)", "if rank == 0: model(x)\n        else: model(-x)", False),
        ("model = FSDP(model)", "if rank == 0: print(show(model))", False),
        ("model = DDP(model)", "if rank == 0: model(x)", False),
        ("model = FSDP(model) if rank else model", "if rank == 0: model(x)", False),
    ],
)
def test_a_sharded_model_that_one_rank_runs(wrap, line, found):
    assert told(SHARDED.format(wrap=wrap, line=line), "LS018") is found


EVALUATED = """
def main(given, train_loader, testLoader, criterion, make):
    model = {made}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    {before}
    with {context}:
        for x, y in testLoader:
            {inside}
            total = criterion(model(x), y)
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"inside": "optimizer.zero_grad()"}, True),
        ({"made": "torch.nn.DataParallel(make())"}, True),
        ({"before": "model.eval()"}, False),
        ({"before": "model.train(False)"}, False),
        ({"inside": "optimizer.zero_grad(); criterion(model(x), y).backward()"}, False),
        (
            {"context": "open('x')", "inside": "optimizer.zero_grad()", "before": "model.eval()"},
            False,
        ),  # an attack, say
    ],
)
def test_an_evaluation_in_the_function_that_makes_the_model(change, found):
    usual = {"made": "DDP(make())", "before": "pass", "context": "torch.no_grad()", "inside": "pass"}
    assert told(EVALUATED.format(**(usual | change)), "LS017") is found


SEVERAL = """
def train(model, critic, loader, opt_g, opt_d, criterion):
    {start}
    for x in loader:
        opt_g.zero_grad()
        loss_g = criterion(critic(model(x)))
        {first}
        opt_g.step()
        {fresh}
        for _ in range(3):
            opt_d.zero_grad()
            loss_d = criterion(critic(x))
            loss_d.backward()
            opt_d.step()
            total += loss_d
        print(total.item())
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"fresh": "total = 0.0"}, False),
        ({"fresh": "total = torch.zeros(())"}, False),
        ({"start": "count = 0", "fresh": "total = 0.0; count += 1"}, False),
        ({"start": "total = 0.0"}, True),
        ({"start": "total = 0.0", "fresh": "total = 0.0 if x is None else total"}, True),
        ({"fresh": "total = 0.0", "first": "pass"}, True),  # the outer loop is one of epochs
    ],
)
def test_a_sum_over_several_trainings_of_one_batch(change, found):
    usual = {"start": "pass", "fresh": "pass", "first": "loss_g.backward()"}
    text = SEVERAL.format(**(usual | change))
    assert told(text.replace("opt_g.step()", "pass") if "first" in change else text, "LS016") is found


HALF = """
def main(model, loader, args):
    policy = {policy}
    model = FSDP(model, mixed_precision=policy)
    {scaler}
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"policy": "MixedPrecision(torch.half, buffer_dtype=torch.half)"}, True),
        ({"policy": "MixedPrecisionPolicy(param_dtype=torch.float16)"}, True),
        ({"policy": "MixedPrecision(param_dtype=torch.bfloat16)"}, False),
        ({"policy": "MixedPrecision(reduce_dtype=torch.float16)"}, False),
        ({"policy": "MixedPrecision(param_dtype=torch.bfloat16 if args.bf else torch.float16)"}, False),
        ({"scaler": "scaler = ShardedGradScaler()"}, False),
    ],
)
def test_fsdp_in_half_precision(change, found):
    usual = {"policy": "MixedPrecision(param_dtype=torch.float16)", "scaler": "pass"}
    assert told(HALF.format(**(usual | change)), "LS023") is found


UNDER = """
def main(model, loader, optimizer, kind):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast({given}):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("'cuda'", True),
        ("device_type='cuda'", True),
        ("device_type='cpu'", False),
        ("device_type=kind", False),
        ("device_type='cuda', dtype=torch.bfloat16", False),
    ],
)
def test_an_autocast_that_is_half_by_default(given, found):
    assert told(UNDER.format(given=given), "LS023") is found


NAMED_CONTEXT = """
import torch
from contextlib import nullcontext
from torch.cuda import amp
from torch.cuda.amp import autocast
from torch.cuda.amp.grad_scaler import GradScaler

def main(model, x, mixed):
    {given}
    with context():
        return model(x)
"""


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("context = torch.cuda.amp.autocast if mixed else nullcontext", [9]),
        ("context = nullcontext if not mixed else amp.autocast", [9]),
        ("context = autocast if mixed else nullcontext", [9]),
        ("context = partial(autocast, enabled=mixed)", [9]),
        ("context = autocast", [9, 10]),
        ("autocast = context = torch.cuda.amp.autocast\n    autocast()", [9, 10, 11]),
        ("context = torch.autocast if mixed else nullcontext", []),
        ("context = nullcontext", []),
        ("context = lambda: autocast(enabled=mixed)", [9]),
    ],
)
def test_an_autocast_that_is_called_by_another_name(given, lines):
    found = check_text(NAMED_CONTEXT.format(given=given), configure({}, "LS029", ""))
    assert [finding.line for finding in found] == lines


CHOSEN = """
def setup():
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
        return {first}
    return {second}

def main(model):
    several, number, size = setup()
    torch.cuda.set_device({device})
    dist.destroy_process_group()
"""
READ = "int(os.environ['LOCAL_RANK'])"


@pytest.mark.parametrize(
    ("first", "second", "device", "found"),
    [
        ("True, dist.get_rank(), 2", "False, 0, 1", "number", True),
        ("True, int(os.environ['RANK']), 2", "False, 0, 1", "number", True),
        ("True, dist.get_rank(), 2", "False, dist.get_rank(), 1", "number", True),
        (f"True, {READ}, 2", "False, 0, 1", "number", False),
        (f"True, {READ}, 2", "False, dist.get_rank(), 1", "number", False),
        ("True, dist.get_rank(), 2", "False, 0, 1", "number % torch.cuda.device_count()", False),
        ("True, dist.get_rank(), 2", f"False, {READ}, 1", "number", False),
    ],
)
def test_the_rank_that_a_function_returns(first, second, device, found):
    assert told(CHOSEN.format(first=first, second=second, device=device), "LS007") is found


SEEDED = """
def main(loader):
    {before}
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        {inside}
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    main([])
"""


@pytest.mark.parametrize(
    ("before", "inside", "found"),
    [
        ("pass", "pass", True),
        ("pass", "torch.manual_seed(i)", True),
        ("pass", "torch.cuda.manual_seed_all(i)", True),
        ("torch.manual_seed(0)", "pass", False),
        ("torch.manual_seed(0)", "torch.manual_seed(i)", False),
        ("set_seed(1)", "torch.manual_seed(i)", False),
    ],
)
def test_a_seed_in_each_step_is_none_for_the_model(before, inside, found):
    assert told(SEEDED.format(before=before, inside=inside), "LS008") is found


COMPILED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = 4

def main(args, rank):
    model = {made}
    if args.compile:
        model = torch.compile(model{more})
    print(model.{name})
"""


@pytest.mark.parametrize(
    ("made", "more", "name", "found"),
    [
        ("DDP(Net().to(rank), device_ids=[rank])", "", "size", True),
        ("DDP(torch.compile(Net()))", "", "size", True),
        ("DDP(Net())", ", mode='max-autotune'", "size", True),
        ("DDP(Net())", "", "module.size", False),
        ("DDP(Net())", "", "training", False),
        ("Net()", "", "size", False),
        ("DDP(Net()) if rank else Net()", "", "size", True),
        ("DDP(Net()) if rank else Net()", "", "module", False),
    ],
)
def test_a_compiled_wrapper_is_one_still(made, more, name, found):
    assert told(COMPILED.format(made=made, more=more, name=name), "LS027") is found


EITHER = """
def main(model, loader, optimizer, criterion, count, rank):
    model = DDP(model.to(rank), device_ids=[rank])
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        if count > 1:
            loss = loss{scale}
            loss.backward()
            if {test}:
                {step}
        else:
            loss.backward()
            {step}
"""


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"scale": "", "test": "(i + 1) % count == 0 or i + 1 == len(loader)"}, {"LS009", "LS012"}),
        ({"scale": " / count", "test": "(i + 1) % count == 0"}, {"LS009", "LS012"}),
        ({"scale": " / count", "test": "(i + 1) % count == 0 or i + 1 == len(loader)"}, {"LS009"}),
        ({"scale": "", "test": "i < count"}, set()),
        ({"scale": "", "test": "(i + 1) % count == 0", "step": "pass"}, set()),
    ],
)
def test_accumulation_in_one_arm_alone(change, codes):
    text = HEAD + EITHER.format(**({"step": STEP} | change))
    assert {finding.rule for finding in check_text(text, configure({}, "LS009,LS012", ""))} == codes


MOTOR = """
from ignite.engine import Engine

def main(model, optimizer, criterion, args):
    model = DDP(model)
    def update(engine, batch):
        loss = criterion(model(batch)){scale}
        loss.backward()
        if {test}:
            optimizer.step()
            optimizer.zero_grad()
    return {made}
"""


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({}, {"LS009"}),
        ({"scale": ""}, {"LS009", "LS012"}),
        ({"test": "engine.state.iteration > 0"}, set()),
        ({"made": "Engine(print)"}, set()),
        ({"made": "Machine(update)", "scale": ""}, set()),
    ],
)
def test_accumulation_in_an_engine_of_ignite(change, codes):
    usual = {"scale": " / args.steps", "test": "engine.state.iteration % args.steps == 0", "made": "Engine(update)"}
    text = HEAD + MOTOR.format(**(usual | change))
    assert {finding.rule for finding in check_text(text, configure({}, "LS009,LS012", ""))} == codes


SCALED = """
def main(model, loader, optimizer):
    scaler = ShardedGradScaler()
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype={dtype}):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {more}
"""


@pytest.mark.parametrize(
    ("dtype", "more", "found"),
    [
        ("torch.bfloat16", "model", True),
        ("torch.float16", "model", False),
        ("torch.bfloat16", "MixedPrecision(param_dtype=torch.float16)", False),  # FSDP itself computes in it
        ("loader.dtype", "model", False),
    ],
)
def test_the_scaler_of_fsdp_with_bfloat16(dtype, more, found):
    before = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
    assert told(before + SCALED.format(dtype=dtype, more=more), "LS023") is found
