"""Whatever an engine cannot do is one line, before training, that names the flag and the way out."""

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from refusals import names, refuses
from support import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from toys import Network, Ragged

from lockstep.config.cli import parse, read_toml, to_toml
from lockstep.config.engine_options import ENGINES, EngineOptions, own_options
from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.engines.blocks import find_blocks
from lockstep.engines.fsdp import apply
from lockstep.engines.memory import DeviceMemory, Footprint, explain_out_of_memory, out_of_memory
from lockstep.engines.registry import engine, engine_class, model_init, options_for
from lockstep.engines.request import EngineRequest
from lockstep.errors import ConfigError, LockstepError
from lockstep.files import bytes_text
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
    ("ddp", {"sharding": "none"}, r"--engine.sharding .*--engine ddp"),
    ("fsdp", {"compression": "bf16"}, r"--engine.compression .*--engine fsdp"),
    ("fsdp", {"cpu_offload": True}, r"--engine.cpu-offload frees GPU memory, and this process uses none"),
    ("fsdp", {"sharding": "hybrid"}, r"--engine.sharding hybrid cannot form groups of 2 from 2 processes"),
    ("fsdp", {"sharding": "hybrid", "shard_size": 3}, r"cannot form groups of 3 from 2 processes"),
    ("fsdp", {"shard_size": 2}, r"--engine.shard-size is for --engine.sharding hybrid"),
    ("fsdp", {"exact": True, "sharding": "none"}, r"--exact with --engine fsdp .*--engine.sharding"),
    ("fsdp", {"exact": True, "param_dtype": "bf16"}, r"--exact.* --engine.param-dtype"),
    ("fsdp", {"exact": True, "accumulate": "shard"}, r"--exact.* --engine.accumulate shard"),
    ("ddp", {"exact": True, "compression": "fp16"}, r"--exact .*--engine.compression"),
    ("data-parallel", {}, r"--engine data-parallel .*two GPUs .*\d; use --engine ddp"),
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
    with pytest.raises(ConfigError, match="--engine.meta-init .*--engine single"):
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


def linears(count, width=1024):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def test_blocks_by_size_are_searched_within_the_largest_child():
    first, inner, last = torch.nn.Linear(1024, 1024), linears(4), torch.nn.Linear(1024, 1024)
    model = torch.nn.Sequential(first, inner, last, torch.nn.Linear(512, 512))
    assert find_blocks(model).modules == [first, *inner, last]


def test_repeated_layers_are_all_lists_of_equal_weighted_entries():
    small = [torch.nn.Linear(2, 2) for _ in range(4)]
    one, two = torch.nn.ModuleList(small[:2]), torch.nn.ModuleList(small[2:])
    mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)])
    bare = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.ReLU()])
    lone = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    found = find_blocks(torch.nn.ModuleList([one, bare, mixed, lone, two]))
    assert found == (small, "4 repeated layers (Linear)")
    for other in (bare, mixed, lone):
        assert find_blocks(torch.nn.Sequential(other)) == ([], "the model as one unit")


def sharded(monkeypatch, world, lines=None, **options):
    """(each unit with how it is split, the mesh) of a model of two blocks; without ranks nothing is exchanged."""
    units, model = [], torch.nn.Sequential(torch.nn.ModuleList(linears(2, 2)), torch.nn.Linear(2, 1))
    monkeypatch.setattr(apply, "fully_shard", lambda module, **given: units.append((module, given)))
    monkeypatch.setattr(apply, "init_device_mesh", lambda kind, shape, **_: SimpleNamespace(shape=shape))
    say = (lines if lines is not None else []).append
    request = EngineRequest(options=EngineOptions(prefetch=0, **options), say=say)
    mesh = apply.shard(model, world, request)
    assert [module for module, _ in units] == [*model[0], model]
    assert all(given["mesh"] is mesh for _, given in units)
    return [given for _, given in units], mesh.shape


@pytest.mark.parametrize(
    ("sharding", "shard_size", "local", "shape"),
    [
        ("full", 0, "2", (4,)),
        ("grad-op", 0, "2", (4,)),
        ("none", 0, "2", (4, 1)),
        ("hybrid", 2, "4", (2, 2)),
        ("hybrid", 0, "2", (2, 2)),
        ("hybrid", 1, "2", None),
        ("hybrid", 3, "2", None),
        ("hybrid", 4, "2", None),
        ("hybrid", 0, "4", None),
    ],
)
def test_the_mesh_is_formed_as_the_options_say_or_refused(monkeypatch, sharding, shard_size, local, shape):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    how, lines = {"sharding": sharding, "shard_size": shard_size}, []
    if shape is None:
        with pytest.raises(ConfigError, match="hybrid cannot form groups of . from 4 processes"):
            sharded(monkeypatch, World(size=4), **how)
    else:
        units, found = sharded(monkeypatch, World(size=4), lines, **how)
        assert found == shape
        after = False if sharding == "grad-op" else None
        assert [given["reshard_after_forward"] for given in units] == [after] * 3
        assert lines == [
            f"--engine fsdp, sharding {sharding} over {list(shape)} ranks: 2 repeated layers (Linear) and the rest"
        ]


def test_between_blocks_nothing_is_cast(monkeypatch):
    units, _ = sharded(
        monkeypatch, World(size=2), param_dtype="bf16", reduce_dtype="float32", output_dtype="fp16"
    )  # fmt: skip
    found = [(how.param_dtype, how.reduce_dtype, how.output_dtype) for how in (given["mp_policy"] for given in units)]
    inner = (torch.bfloat16, torch.float32, None)
    assert found == [inner, inner, (*inner[:2], torch.float16)]


class Odd(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        others = {"mixed": torch.ones(4, dtype=torch.float64), "turned": torch.ones(2, 3).T}
        self.other = torch.nn.Parameter(others[kind])


def _odd(world, kind):
    with pytest.raises(ConfigError) as caught:
        engine("fsdp", Odd(kind), sgd, world)
    return str(caught.value)


def test_parameters_that_cannot_be_split_are_named():
    assert "a block has parameters in float32 and float64" in run(_odd, 2, "mixed")[0]
    assert "cannot split other, which is not contiguous" in run(_odd, 2, "turned")[0]


def _split_by_hand(world):
    model = torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (world.size,))
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    for name in ("ddp", "zero", "fsdp"):
        with refuses(ConfigError, f"--engine {name}", "weight", "DTensor"):
            engine(name, model, sgd, world)


def test_a_model_of_dtensors_is_refused_by_name():
    run(_split_by_hand, 2)


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
        if reason := ENGINES[name].refused.get(kind):
            assert names(line, f"--engine {name}", kind, reason)
        else:
            assert line == ""


def _fused(world):
    return refused(world, "fsdp", {"exact": True, "make": lambda m: torch.optim.AdamW(m.parameters(), fused=True)})


def test_exact_fsdp_refuses_a_fused_optimizer():
    assert run(_fused, 2)[0].startswith("--exact with --engine fsdp: the fused AdamW rounds by an element's place")


def test_the_table_in_the_docs_is_the_table_in_the_code():
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    columns = next(row[1:] for row in table if row[0] == "optimizer")
    assert set(columns) == ENGINES.keys()
    kinds = {kind for entry in ENGINES.values() for kind in entry.refused}
    assert kinds
    for kind in kinds:
        cells = next(row[1:] for row in table if row[0].split(" ")[0] == kind)
        assert cells == ["no" if kind in ENGINES[name].refused else "yes" for name in columns], kind


def test_engine_options_are_flags_and_a_table_of_the_file(tmp_path):
    config = parse(["--engine", "fsdp", "--engine.sharding", "grad-op", "--engine.prefetch", "2"])
    assert config.engine_options == EngineOptions(sharding="grad-op", prefetch=2)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert "[engine_options]" in path.read_text()
    assert read_toml(path)["engine_options.prefetch"] == 2
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
    with pytest.raises(ConfigError, match=r"--precision fp16: cpu .*use --precision float32$"):
        check_precision("fp16", torch.device("cpu"))
    check_precision("float32", torch.device("cpu"))


def test_data_parallel_trains_where_two_gpus_are_seen(monkeypatch):
    """Without a GPU nn.DataParallel is its module, so that what stands around it can be run here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else a CUDA build asks for them
    lines = []
    made, _ = build(World(), Ragged(), "data-parallel", lines=lines)
    assert "--engine ddp is faster" in lines[0]
    made.backward(made.model(torch.zeros(2, 3, dtype=torch.int64)).sum())
    assert made.step(1.0).applied
    assert all(name.startswith(("model/blocks", "model/emb", "model/head", "optimizer/")) for name in made.state_dict())
    made.load_state_dict(made.state_dict())
    for settings, line in (({"precision": "bf16"}, "autocast or --compile"), ({"exact": True}, "--exact")):
        with pytest.raises(ConfigError, match=line):
            build(World(), Ragged(dtype=torch.float32), "data-parallel", **settings)
    torch.use_deterministic_algorithms(False)


GIB = 2**30
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (
            DeviceMemory(80 * GIB, 1 * GIB, 40 * GIB),
            "other processes hold 39 GiB of its 80 GiB; give each rank its own GPU",
        ),
        (DeviceMemory(80 * GIB, 1 * GIB, 79 * GIB), "the rest is activations: lower --micro-batch-size"),
        (DeviceMemory(80 * GIB, 80 * GIB - 30000, 30000), "over more ranks: --engine fsdp"),
    ],
)
def test_out_of_memory_says_what_to_change(device, wanted):
    made, _ = build(World(), Ragged(dtype=torch.float32), "single")
    error = out_of_memory(ERROR, made, World(), device)
    assert str(error).startswith("rank 0 ran out of memory on cpu, asking for 2.50 GiB: ")
    assert wanted in str(error)
    assert "\n" not in str(error)
    if "other processes" not in wanted:  # AdamW keeps two numbers for each that is trained
        size = sum(p.nbytes for p in made.model.parameters())
        frozen = made.model.embedding.weight.requires_grad_(False).nbytes
        line = str(out_of_memory(ERROR, made, World(), device))
        held = [bytes_text(each) for each in (size, size - frozen, 2 * (size - frozen))]
        assert "parameters {}, gradients {}, optimizer {})".format(*held) in line


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_hosts_memory_is_counted_in_bytes():
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    own = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    device = DeviceMemory.of(torch.device("cpu"))
    assert device.total == 1024 * int(told["MemTotal"].split()[0])
    assert device.own == pytest.approx(1024 * int(own["VmHWM"].split()[0]), rel=0.2)
    assert device.free == device.total - device.own


def test_out_of_memory_names_what_lies_elsewhere():
    made, _ = build(World(), Ragged(), "single")
    made.model.dropout.register_buffer("stray", torch.empty(1, device="meta"))  # any device that is not the world's
    line = str(out_of_memory(ERROR, made, World(), DeviceMemory(0, 0, 0)))
    assert names(line, "dropout.stray", "cpu", "world.device")


def test_out_of_memory_leaves_the_loop_as_one_line():
    made, _ = build(World(), Ragged(), "single")
    with pytest.raises(LockstepError, match="rank 0 ran out of memory on cpu"), explain_out_of_memory(made, World()):
        raise ERROR
    for other in (ValueError("other"), RuntimeError("other")):
        with pytest.raises(type(other), match="other"), explain_out_of_memory(made, World()):
            raise other


def test_out_of_memory_of_the_host_is_one_line_with_its_bytes():
    made, _ = build(World(), Ragged(), "single")
    line = r"memory on cpu, asking for 909 TiB: everything is on the right device"
    with pytest.raises(LockstepError, match=line), explain_out_of_memory(made, World()):
        torch.empty(10**15, dtype=torch.uint8)
    line = r"the model is not built yet .* GiB held\); --engine fsdp"
    with pytest.raises(LockstepError, match=line), explain_out_of_memory(None, World()):
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
    assert inspect.signature(engine_class(name).backward).parameters["weight"].default == 1.0
