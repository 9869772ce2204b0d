"""The switches of the process: set by what was asked for, in a process of their own."""

import importlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from fake_cuda import FakeCuda
from ranks import run
from small_runs import config
from torch import nn
from toys import Ragged

import lockstep
from lockstep.distributed.world import World
from lockstep.engines.registry import engine
from lockstep.errors import ConfigError
from lockstep.transforms import Transforms, prepare
from lockstep.transforms.determinism import keep_fastpath_off, pin, pin_compiler

CPU = torch.device("cpu")


def test_convolutions_are_searched_for_on_a_device(monkeypatch):
    for device, wanted in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        pin(exact=False, matmul="highest", device=torch.device(device))
        assert torch.backends.cudnn.benchmark is wanted


def pinned(world, exact, matmul, loaded):
    if loaded:
        __import__("torch._inductor.config")
    torch.set_num_threads(2)
    if exact:
        torch.backends.cudnn.benchmark = True
    pin(exact=exact, matmul=matmul, device=world.device)
    inductor = sys.modules.get("torch._inductor.config")
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "compiler": (os.environ.get("TORCHINDUCTOR_DETERMINISTIC"), bool(inductor and inductor.deterministic)),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
def test_convolutions_take_the_precision_of_matrix_products(matmul):
    for exact in (False, True):
        found = run(pinned, 1, exact, matmul, False)[0]
        assert (found["products"], found["convolutions"]) == (matmul, matmul != "highest")


def test_exact_pins_what_moves_bits_and_nothing_else_does():
    found = run(pinned, 1, True, "highest", True)[0]
    assert (found["deterministic"], found["filled"], found["benchmark"]) == (True, False, False)
    assert (found["fast path"], found["compiler"], found["threads"]) == (False, ("1", True), 1)
    found = run(pinned, 1, False, "highest", False)[0]
    assert (found["deterministic"], found["filled"], found["benchmark"]) == (False, True, False)
    assert (found["fast path"], found["compiler"], found["threads"]) == (True, (None, False), 2)


DYNAMO = ("automatic_dynamic_shapes", "optimize_ddp", "recompile_limit", "fail_on_recompile_limit_hit")


def switches():
    """Every switch that an exact run turns, as this thread and as another one sees it."""
    inductor, dynamo = (sys.modules.get(f"torch.{name}.config") for name in ("_inductor", "_dynamo"))
    found = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "variable": os.environ.get("TORCHINDUCTOR_DETERMINISTIC"),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "threads": torch.get_num_threads(),
    }

    def of_compiler(who):
        found[f"inductor, {who}"] = bool(inductor and inductor.deterministic)
        found.update({f"{name}, {who}": getattr(dynamo, name) for name in DYNAMO if dynamo})

    of_compiler("here")
    other = threading.Thread(target=of_compiler, args=("in a thread",))
    other.start()
    other.join()
    return found


def set_by_hand(how):
    torch.set_num_threads(2)
    if how == "deterministic":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    elif how == "all":
        torch.backends.cudnn.benchmark = True
        torch.backends.mha.set_fastpath_enabled(False)
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "0"
        importlib.import_module("torch._dynamo.config").recompile_limit = 100


def exact_and_plain(world, how, compiles, loaded):
    """The switches before, in, and after an exact run."""
    if loaded:
        importlib.import_module("torch._inductor.config")
        importlib.import_module("torch._dynamo.config")
    set_by_hand(how)
    found = [switches()]
    for exact in (True, True, False):
        pin(exact=exact, matmul="high", device=world.device)
        if exact and compiles:
            pin_compiler()
        found.append(switches())
    return found


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("how", ["", "deterministic", "all"])
def test_a_plain_run_has_the_switches_that_an_exact_one_found(how, compiles):
    before, exact, again, after = run(exact_and_plain, 1, how, compiles, True)[0]
    assert after == before != exact == again
    assert (exact["inductor, here"], exact["inductor, in a thread"]) == (True, True)
    if compiles:
        for who in ("here", "in a thread"):
            assert [exact[f"{name}, {who}"] for name in DYNAMO] == [False, False, 100 if how == "all" else 64, True]


def test_switches_of_modules_that_are_not_loaded_come_back_too():
    before, exact, _, after = run(exact_and_plain, 1, "", False, False)[0]
    assert after == before != exact


def changed_between(world):
    pin(exact=True, matmul="high", device=world.device)
    torch.set_num_threads(3)
    torch.backends.mha.set_fastpath_enabled(True)
    pin(exact=False, matmul="high", device=world.device)
    found = [torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()]
    pin(exact=True, matmul="high", device=world.device)
    keep_fastpath_off()  # a model with adapters in its attention layers was made
    pin(exact=False, matmul="high", device=world.device)
    return [*found, torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()]


def test_what_the_caller_changed_since_is_kept():
    assert run(changed_between, 1)[0] == [3, True, 3, False]


def trained_twice(world, folder):
    """An exact run and a plain one of `lockstep.train`, both compiled; then the exact one opened and a plain one."""
    from lockstep.training.inference import InferenceRequest as Wanted
    from lockstep.training.inference import load_run
    from lockstep.transforms import precision

    precision.HOW = {"backend": "eager"}
    torch.set_num_threads(2)
    importlib.import_module("torch._dynamo.config")
    found = [switches()]
    for name, exact in (("exact", True), ("plain", False)):
        settings = config(folder, experiment_name=name, exact=exact, compile=True, max_steps=2)
        lockstep.train(settings, Ragged(), world)
        found.append(switches())
    with load_run(Wanted(f"{folder}/exact", task=f"{__file__}:Same")):
        found.append(switches())
    with load_run(Wanted(f"{folder}/plain", task=f"{__file__}:Same")):
        found.append(switches())
    return found


class Same(Ragged):
    """The same task, by name."""


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_training_after_an_exact_one_is_unaffected(tmp_path):
    before, exact, plain, opened_exact, opened_plain = run(trained_twice, 1, str(tmp_path))[0]
    assert before == plain == opened_plain
    assert exact["deterministic"]
    assert exact["fail_on_recompile_limit_hit, here"]
    assert opened_exact["deterministic"]


def shapes_after(world, exact_first):
    """Graphs that a plain run makes of one function at six widths."""
    torch._dynamo.config.recompile_limit = 8
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    twice = torch.compile(lambda x: x * 2, backend=backend)
    if exact_first:
        pin(exact=True, matmul="high", device=world.device)
        pin_compiler()
        for width in range(2, 12):
            twice(torch.ones(width))
        assert len(graphs) == 10
    pin(exact=False, matmul="high", device=world.device)
    del graphs[:]
    for width in range(20, 26):
        twice(torch.ones(width))
    return len(graphs)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_plain_run_compiles_as_if_no_exact_one_had_been():
    assert run(shapes_after, 1, True) == run(shapes_after, 1, False) == [2]  # one size, then all


# cuBLAS


def of_a_new_process(code, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("variables", "value"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")])
def test_import_sets_the_cublas_workspace_and_loads_no_torch(variables, value):
    code = "import lockstep, os, sys; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    assert of_a_new_process(code, **variables) == f"{value} False"


def tried(world, refusal, before):
    """(switches before, switches after, what was multiplied under deterministic algorithms, the error)."""
    real, seen = torch.mm, []

    def mm(*matrices):
        seen.append(torch.are_deterministic_algorithms_enabled())
        if refusal == "device" or (refusal == "workspace" and seen[-1]):
            raise RuntimeError("no")
        return real(*matrices)

    torch.mm = mm
    torch.use_deterministic_algorithms(before)
    found, error = [switches()], ""
    with FakeCuda():
        try:
            pin(exact=True, matmul="highest", device=torch.device("cuda", 0))
        except (ConfigError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return *found, switches(), seen, error


@pytest.mark.parametrize("before", [False, True])
def test_exact_tries_cublas_once_under_its_switches(before):
    found, after, seen, error = run(tried, 1, "", before)[0]
    assert (seen, error) == ([True], "")
    assert after["deterministic"]
    assert after["threads"] == found["threads"]


@pytest.mark.parametrize("before", [False, True])
def test_exact_is_refused_if_cublas_started_without_workspace(before):
    found, after, seen, error = run(tried, 1, "workspace", before)[0]
    assert error.startswith("ConfigError: ")
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in error
    assert "\n" not in error
    assert (after, seen) == (found, [True, False])


def test_a_device_that_cannot_multiply_is_not_taken_for_it():
    found, after, _, error = run(tried, 1, "device", False)[0]
    assert error == "RuntimeError: no"
    assert after == found


class Encoder(nn.Module):
    """Attention layers of torch's own, which in evaluation may take another way through its kernels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def evaluated(world, name):
    """The bits of an evaluation's forward."""
    pin(exact=True, matmul="highest", device=world.device)
    torch.manual_seed(0)
    model = Encoder()
    made = engine(name, model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), world, exact_micro_batches=2)
    made.model.eval()
    with torch.no_grad():
        return made.model(torch.randn(4, 6, 16)).flatten().tolist()


def test_an_evaluation_of_attention_has_the_same_bits_under_fsdp():
    ddp, fsdp = (run(evaluated, 2, name)[0] for name in ("ddp", "fsdp"))
    assert ddp == fsdp


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["", "_POINTWISE", "_GEMM"])
def test_exact_refuses_a_compiler_that_chooses_by_speed(name, monkeypatch):
    monkeypatch.setenv(f"TORCHINDUCTOR_MAX_AUTOTUNE{name}", "1")
    wanted = {"precision": "float32", "compile_model": True, "device": CPU}
    with pytest.raises(ConfigError, match=f"--exact with --compile .*TORCHINDUCTOR_MAX_AUTOTUNE{name}=1"):
        prepare(nn.Linear(2, 2), chosen=Transforms(exact=True), **wanted)
    assert prepare(nn.Linear(2, 2), chosen=Transforms(), **wanted)
    assert prepare(nn.Linear(2, 2), chosen=Transforms(exact=True), **wanted | {"compile_model": False})


def test_a_device_without_a_number_is_the_present_one(monkeypatch):
    assert World(device=torch.device("cuda")).device.index == (
        0 if not torch.cuda.is_available() else torch.cuda.current_device()
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert World(device=torch.device("cuda")).device == torch.device("cuda", 3)
    assert World(device=torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert World().device == torch.device("cpu")
