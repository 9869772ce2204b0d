"""Whatever an engine cannot do is one line, before training, that names the flag and the way out."""

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from ranks import run
from support import build
from toys import Network, Ragged

from lockstep.config.config import Config
from lockstep.config.options import parse, read, to_toml
from lockstep.distributed.world import World
from lockstep.engines.make import engine, model_init, options_for
from lockstep.engines.options import ENGINES, EngineOptions, own_options
from lockstep.engines.shared.blocks import find_blocks
from lockstep.engines.shared.memory import Footprint
from lockstep.engines.shared.oom import Device, explained, out_of_memory
from lockstep.engines.shared.optimizers import REFUSED
from lockstep.errors import ConfigError, LockstepError
from lockstep.transforms.determinism import check_precision


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(world, name, settings):
    try:
        build(world, Ragged(dtype=torch.float32), name, **settings)
    except ConfigError as error:
        return str(error)
    return ""


def refusals(world, cases):
    return [refused(world, name, settings) for name, settings in cases]


CASES = [
    ("single", {}, r"--engine single with 2 processes: use --engine ddp"),
    ("warp", {}, r"--engine is 'warp': choose one of auto, single, ddp"),
    ("ddp", {"sharding": "none"}, r"--engine.sharding is no option of --engine ddp; leave it out"),
    ("fsdp", {"compression": "bf16"}, r"--engine.compression is no option of --engine fsdp"),
    ("fsdp", {"cpu_offload": True}, r"--engine.cpu-offload frees GPU memory, and this process uses none"),
    ("fsdp", {"sharding": "hybrid"}, r"--engine.sharding hybrid cannot form groups of 2 from 2 processes"),
    ("fsdp", {"sharding": "hybrid", "shard_size": 3}, r"cannot form groups of 3 from 2 processes"),
    ("fsdp", {"shard_size": 2}, r"--engine.shard-size is for --engine.sharding hybrid"),
    ("fsdp", {"exact": True, "sharding": "none"}, r"--exact with --engine fsdp cannot hold with --engine.sharding"),
    ("fsdp", {"exact": True, "param_dtype": "bf16"}, r"cannot hold with --engine.param-dtype"),
    ("fsdp", {"exact": True, "accumulate": "shard"}, r"cannot hold with --engine.accumulate shard"),
    ("ddp", {"exact": True, "compression": "fp16"}, r"--exact cannot hold with --engine.compression"),
    ("data-parallel", {}, r"--engine data-parallel needs two GPUs in one process, and here are \d; use ddp"),
    ("fsdp", {"make": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, r"give `optimizer` as a function"),
]


def test_what_a_world_cannot_form_is_one_line():
    found = run(refusals, 2, [(name, settings) for name, settings, _ in CASES])
    for lines in found:
        for (name, settings, wanted), line in zip(CASES, lines, strict=True):
            assert re.search(wanted, line), (name, settings, line)
            assert "\n" not in line


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_engines_of_several_processes_need_a_launcher(name):
    with pytest.raises(ConfigError, match=f"--engine {name} needs a launcher: torchrun --standalone"):
        build(World(), Ragged(), name)


def test_an_option_is_refused_before_the_model_is_made():
    with pytest.raises(ConfigError, match="--engine.meta-init is no option of --engine single"):
        model_init("auto", World(), EngineOptions(meta_init=True))


class Sharing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight


def test_blocks_that_share_a_parameter_are_refused_by_its_name():
    model = Sharing()
    with pytest.raises(ConfigError, match=r"the parameter blocks\.0\.weight is shared across blocks"):
        find_blocks(model, model.blocks)
    assert find_blocks(model).modules == []  # found by themselves they are left whole
    with pytest.raises(ConfigError, match="is shared across blocks"):
        find_blocks(model, [model.blocks[0], model.blocks[0]])
    tied = Network()
    with pytest.raises(ConfigError, match=r"embedding\.weight is shared"):
        find_blocks(tied, [tied.embedding])


def test_blocks_must_be_the_models():
    with pytest.raises(ConfigError, match="a module that is not in the model"):
        find_blocks(Network(), [torch.nn.Linear(2, 2)])


def test_blocks_are_found_by_size():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)), torch.nn.Linear(8, 8))
    found = find_blocks(model)
    assert found.modules == list(model)[:3]
    assert found.origin == "3 submodules by size (Linear)"


class Odd(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        others = {"scalar": torch.ones(()), "mixed": torch.ones(4, dtype=torch.float64), "turned": torch.ones(2, 3).T}
        self.other = torch.nn.Parameter(others[kind])


def _odd(world, kind):
    with pytest.raises(ConfigError) as caught:
        engine("fsdp", Odd(kind), sgd, world)
    return str(caught.value)


def test_parameters_that_cannot_be_split_are_named():
    assert run(_odd, 2, "scalar")[0] == "--engine fsdp cannot split the 0-dim parameter other; give it the shape [1]"
    assert "a block has parameters in float32 and float64" in run(_odd, 2, "mixed")[0]
    assert "cannot split other, which is not contiguous" in run(_odd, 2, "turned")[0]


def _optimizers(world):
    found = {}
    for kind in ("LBFGS", "SparseAdam", "Adafactor", "Rprop", "Muon"):
        for name in ("ddp", "zero", "fsdp"):
            matrices = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
            try:
                engine(name, matrices, lambda held, kind=kind: getattr(torch.optim, kind)(held.parameters()), world)
                found[name, kind] = ""
            except ConfigError as error:
                found[name, kind] = str(error)
    return found


def test_optimizers_that_do_not_go_with_an_engine_are_refused():
    for (name, kind), line in run(_optimizers, 2)[0].items():
        if name in REFUSED[kind][0]:
            assert line.startswith(f"--engine {name} does not go with {kind}: {REFUSED[kind][1]}")
        else:
            assert line == ""


def _fused(world):
    return refused(world, "fsdp", {"exact": True, "make": lambda m: torch.optim.AdamW(m.parameters(), fused=True)})


def test_exact_fsdp_refuses_a_fused_optimizer():
    assert run(_fused, 2)[0].startswith("--exact with --engine fsdp: the fused AdamW rounds by an element's place")


def test_the_table_in_the_docs_is_the_table_in_the_code():
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    columns = ["single", "ddp", "zero", "fsdp", "deepspeed", "data-parallel"]
    for kind, (engines, _) in REFUSED.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {kind} "))
        cells = [cell.strip() for cell in row.split("|")[2:8]]
        assert cells == ["no" if name in engines else "yes" for name in columns], kind


def test_engine_options_are_flags_and_a_table_of_the_file(tmp_path):
    config = parse(["--engine", "fsdp", "--engine.sharding", "grad-op", "--engine.prefetch", "2"])
    assert config.engine_options == EngineOptions(sharding="grad-op", prefetch=2)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert "[engine_options]" in path.read_text()
    assert read(path)["engine_options.prefetch"] == 2
    wanted = "engine_options.sharding is 'half': choose one of full, grad-op, hybrid, none"
    with pytest.raises(ConfigError, match=wanted):
        Config(engine_options=EngineOptions(sharding="half"))
    with pytest.raises(ConfigError, match="--engine.bucket-cap-mb is 0.0: it must be a number of MiB above 0"):
        parse(["--engine.bucket-cap-mb", "0"])


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch):
    check_precision("fp16", torch.device("cpu"))

    def fails(*_):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nmore")

    monkeypatch.setattr(torch, "mm", fails)
    with pytest.raises(ConfigError, match=r"--precision fp16: cpu cannot do it .*use --precision float32$"):
        check_precision("fp16", torch.device("cpu"))
    check_precision("float32", torch.device("cpu"))


def test_data_parallel_trains_where_two_gpus_are_seen(monkeypatch):
    """Without a GPU nn.DataParallel is its module, so that what stands around it can be run here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    lines = []
    made, _ = build(World(), Ragged(), "data-parallel", lines=lines)
    assert "--engine ddp is faster" in lines[0]
    made.backward(made.model(torch.zeros(2, 3, dtype=torch.int64)).sum())
    assert made.step(1.0).applied
    assert all(name.startswith(("model/blocks", "model/emb", "model/head", "optimizer/")) for name in made.state_dict())
    made.load_state_dict(made.state_dict())
    for settings, line in (({"precision": "bf16"}, "autocast or --compile"), ({"exact": True}, "--exact cannot hold")):
        with pytest.raises(ConfigError, match=line):
            build(World(), Ragged(dtype=torch.float32), "data-parallel", **settings)
    torch.use_deterministic_algorithms(False)


GIB = 2**30
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (Device(80 * GIB, 1 * GIB, 40 * GIB), "other processes hold 39 GiB of its 80 GiB; give each rank a GPU of"),
        (Device(80 * GIB, 1 * GIB, 79 * GIB), "the rest is activations: lower --micro-batch-size"),
        (Device(80 * GIB, 80 * GIB - 30000, 30000), "split it over more ranks: --engine fsdp"),
    ],
)
def test_out_of_memory_says_what_to_change(device, wanted):
    made, _ = build(World(), Ragged(dtype=torch.float32), "single")
    error = out_of_memory(ERROR, made, World(), device)
    assert str(error).startswith("rank 0 ran out of memory on cpu, asking for 2.50 GiB: ")
    assert wanted in str(error)
    assert "\n" not in str(error)


def test_out_of_memory_names_what_lies_elsewhere():
    made, _ = build(World(), Ragged(), "single")
    made.model.dropout.register_buffer("stray", torch.empty(1, device="meta"))  # any device that is not the world's
    line = str(out_of_memory(ERROR, made, World(), Device(0, 0, 0)))
    assert "dropout.stray of the model lie on another GPU than cpu; make the model on world.device" in line


def test_out_of_memory_leaves_the_loop_as_one_line():
    made, _ = build(World(), Ragged(), "single")
    with pytest.raises(LockstepError, match="rank 0 ran out of memory on cpu"), explained(made, World()):
        raise ERROR
    for other in (ValueError("other"), RuntimeError("other")):
        with pytest.raises(type(other), match="other"), explained(made, World()):
            raise other


def test_out_of_memory_of_the_host_is_one_line_with_its_bytes():
    made, _ = build(World(), Ragged(), "single")
    line = r"memory on cpu, asking for 909 TiB: everything is on the right device"
    with pytest.raises(LockstepError, match=line), explained(made, World()):
        torch.empty(10**15, dtype=torch.uint8)
    line = r"the model is not made yet .* GiB held\); --engine fsdp"
    with pytest.raises(LockstepError, match=line), explained(None, World()):
        torch.nn.Linear(10**7, 10**8)


def test_every_option_is_of_engines_that_there_are():
    for spec in fields(EngineOptions):
        assert set() < set(spec.metadata["engines"]) <= ENGINES.keys(), spec.name
        assert spec.metadata["help"].startswith(", ".join(spec.metadata["engines"])), spec.name
    assert Footprint(1, 2, 3).states == 3
    assert own_options("single") == ["find_unused_parameters"]
    assert own_options("deepspeed") == ["broadcast_buffers", "cpu_offload", "config", "zero_stage"]
    assert set(own_options("ddp")) == set(own_options("zero"))
    for name in ENGINES:
        assert options_for(name, EngineOptions()) == EngineOptions()
    given = EngineOptions(prefetch=2, bucket_cap_mb=1, zero_stage=3)
    assert options_for("fsdp", given) == EngineOptions(prefetch=2)
    assert options_for("ddp", given) == EngineOptions(bucket_cap_mb=1)


@pytest.mark.parametrize("name", ENGINES)
def test_a_backward_without_a_weight_counts_once(name):
    entry = ENGINES[name]
    kind = getattr(importlib.import_module(entry.module), entry.kind)
    assert inspect.signature(kind.backward).parameters["weight"].default == 1.0
