"""The engine `deepspeed` on two processes against a single one. Skipped where the package is not installed."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import toys
from ranks import run
from refusals import names
from toys import Ragged, fit, parts, train

import lockstep
from lockstep import checkpoint
from lockstep.config.engine_options import EngineOptions
from lockstep.distributed.world import World
from lockstep.engines.deepspeed.engine import _initialize
from lockstep.engines.memory import footprint
from lockstep.engines.registry import engine
from lockstep.errors import ConfigError
from lockstep.transforms import autocast

installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"
)
pytestmark = installed
TASK = Ragged(dtype=torch.float32)


def build(world, task=TASK, name="deepspeed", precision="float32", said=None, **given):
    """(engine, batches), as toys.parts makes them, with the engine's options."""
    warnings.simplefilter("ignore")  # the package's own
    settings = {key: given.pop(key) for key in ("size", "micro", "clip", "count", "exact") if key in given}

    def made(name, model, optimizer, world, **others):
        if precision in ("bf16", "fp16"):
            model = autocast(model, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision], "cpu")
        return engine(
            name,
            model,
            optimizer,
            world,
            options=EngineOptions(**given),
            loss_scaling=precision == "fp16",
            say=(said if said is not None else []).append,
            **others,
        )

    kept, toys.engine = toys.engine, made
    try:
        return parts(world, task, name=name, **settings)
    finally:
        toys.engine = kept


def test_a_refusal_names_a_scalar_parameter_and_the_way_out():
    def initialize(**given):
        raise TypeError("iteration over a 0-d tensor")

    model = torch.nn.Linear(2, 2)
    model.temperature = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ConfigError) as caught:
        _initialize(SimpleNamespace(initialize=initialize), model, None, {})
    assert names(str(caught.value), "--engine deepspeed", "temperature", "(1,)", "--engine fsdp")


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=tolerance)


def _resumed(world, cases):
    """Losses and norms of each case; half-way, the state goes into a new engine."""
    found = []
    for case in cases:
        made, batches = build(world, **case)
        first = train(world, made, batches, TASK, stop=3)
        again, batches = build(world, **case)
        again.load_state_dict(made.state_dict())
        second = train(world, again, batches, TASK, start=3)
        found.append((first[0] + second[0], first[1] + second[1]))
    return found


def test_stages_train_what_a_single_process_does_and_resume():
    losses, norms, _ = fit(World(), TASK)
    for ranks in run(_resumed, 2, [{"zero_stage": 1}, {"zero_stage": 3}]):
        for found in ranks:
            close(found[0], losses)
            close(found[1], norms)


def _held(world):
    """Bytes of parameters, gradients and optimizer states at each stage of ZeRO."""
    warnings.simplefilter("ignore")  # the package's own
    adamw = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    found = []
    for stage in range(4):
        options = EngineOptions(zero_stage=stage)
        made = engine("deepspeed", torch.nn.Linear(400, 400), adamw, world, options=options, ema=0.5)
        with made.accumulate(last=True):
            made.backward(made.model(torch.ones(1, 400)).square().sum())
        made.step()
        found.append(tuple(footprint(made)))
    return found


def test_each_stage_counts_what_a_rank_holds():
    """Stage 1 splits the optimizer's states, 2 gradients too, 3 parameters too. Float32 copies are states."""
    whole = 4 * (400 * 400 + 400)
    for held in run(_held, 2):
        shares = [[size / whole for size in sizes] for sizes in held]
        for found, wanted in zip(shares, [(1, 1, 3), (1, 1, 2), (1, 0.5, 2), (0.5, 0.5, 2)], strict=True):
            assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_precision_and_offload(world_size):
    sizes = {"size": 10, "micro": 2}
    cases = [{"zero_stage": stage, **sizes} for stage in range(4)]
    cases += [{"zero_stage": stage, "cpu_offload": True, **sizes} for stage in (1, 2, 3)]
    losses, norms, _ = fit(World(), TASK, **sizes)
    halves = [
        {"zero_stage": stage, "precision": precision, **sizes} for stage in range(4) for precision in ("bf16", "fp16")
    ]
    for ranks in run(_resumed, world_size, cases + halves, timeout=280):
        for found in ranks[: len(cases)]:
            close(found[0], losses)
            close(found[1], norms)
        for found in ranks[len(cases) :]:
            close(found[0], losses, 0.05)
            assert found[1] != norms


def _saved_and_crossed(world, folder):
    """What each engine saves, every other loads with the same bits."""
    marks = []
    for stage in (0, 2, 3):
        made, batches = build(world, zero_stage=stage)
        train(world, made, batches, TASK, stop=2)
        checkpoint.save(folder, stage, made.state_dict(), {}, world, engine="deepspeed")
        path = checkpoint.path_of(folder, stage)
        others = [build(world, zero_stage=other)[0] for other in (0, 1, 3)] + [build(world, name="ddp")[0]]
        for other in others:
            state = other.state_dict()
            checkpoint.load(path, state, world)
            other.load_state_dict(state)
            again = folder / f"again-{len(marks)}"
            checkpoint.save(again, 1, other.state_dict(), {}, world, engine="other")
            path_again = checkpoint.path_of(again, 1)
            marks.append(
                checkpoint.fingerprint(path, prefix) == checkpoint.fingerprint(path_again, prefix)
                for prefix in ("model/", "optimizer/")
            )
    return [list(mark) for mark in marks]


@pytest.mark.slow
def test_checkpoints_cross_engines_and_stages_bitwise(tmp_path):
    for marks in run(_saved_and_crossed, 2, tmp_path, timeout=150):
        assert marks == [[True, True]] * 12


def _overflow(world):
    """Per engine: which steps were applied, the norms, the scale at the end. Rank 1 overflows in the third step."""
    found = []
    for case in ({"name": "ddp"}, {"zero_stage": 0}, {"zero_stage": 2}):
        made, batches = build(world, precision="fp16", **case)
        results = []
        for step, micro in batches.from_step(0):
            for batch in micro:
                with made.accumulate(batch is micro[-1]):
                    loss = TASK.loss(made.model, batch.data) / 2000
                    made.backward(loss * (float("inf") if step == 2 and world.rank == 1 else 1.0))
            results.append(made.step(1.0))
        norms = [float(result.norm) for result in results if result.applied]
        found.append(([result.applied for result in results], norms, float(made.state_dict()["scaler/scale"])))
    return found


@pytest.mark.slow
def test_fp16_skips_an_overflow_on_all_ranks_as_ddp_does():
    for wanted, *others in run(_overflow, 2):
        # The first scale, 2**16, is no number in float16, in which this task adds its loss.
        assert wanted[0] == [False, True, False, True, True, True]
        for found in others:
            assert found[0] == wanted[0]
            close(found[1], wanted[1], 1e-3)
            assert found[2] == wanted[2] == 2.0**14


@pytest.mark.slow
def test_parameters_in_bfloat16_keep_a_float32_copy(tmp_path):
    for results in run(_bfloat16, 2, timeout=120):
        for losses, dtypes, same in results:
            assert losses[-1] < losses[0]
            assert dtypes == ["torch.float32"]
            assert same


def _bfloat16(world):
    task, found = Ragged(dtype=torch.bfloat16), []
    for stage in (2, 3):
        made, batches = build(world, task, zero_stage=stage, count=10)
        losses = train(world, made, batches, task)[0]
        state = made.state_dict()
        again, _ = build(world, task, zero_stage=stage, count=10)
        again.load_state_dict(state)
        held = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in state.items()}
        others = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in again.state_dict().items()}
        same = all(torch.equal(held[name], others[name]) for name in held)
        found.append((losses, sorted({str(t.dtype) for n, t in state.items() if n.startswith("model/")}), same))
    return found


def _refused(world, cases):
    lines = []
    for case in cases:
        try:
            build(world, **case)
        except ConfigError as error:
            lines.append(str(error))
    return lines


def test_what_it_cannot_is_refused_in_one_line(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "no_such_key": 1}}))
    cases = [
        {"exact": True},
        {"task": Ragged(dtype=torch.float64)},
        {"config": str(path)},
        {"sharding": "none"},
    ]
    for lines in run(_refused, 2, cases):
        assert len(lines) == len(cases), lines
        assert not any("\n" in line for line in lines)
        assert names(lines[0], "--exact", "--engine deepspeed")
        assert "updates in float32, not --precision float64" in lines[1]
        assert "DeepSpeed refuses: " in lines[2]
        assert "no_such_key" in lines[2]
        assert names(lines[3], "--engine.sharding", "--engine deepspeed")


def _torchrun(module, *flags, cwd):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", *module, *flags], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lockstep", "train"],
        [
            "deepspeed.launcher.runner",
            "--num_gpus",
            "2",
            "--no_ssh_check",
            "--module",
            "lockstep",
            "train",
        ],
    ],
    ids=["torchrun", "deepspeed"],
)
def test_both_launchers_start_the_command(tmp_path, launcher):
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text("one two three four five six seven\n" * 60)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    flags = ["--experiment-name", "r", "--dataset-name", "text", "--seq-len", "16", "--batch-size", "8"]
    flags += ["--max-steps", "3", "--data.vocab-size", "300", "--device", "cpu", "--data.cache", "cache"]
    done = _torchrun(launcher, *flags, "--deepspeed", "--deepspeed_config", "ds.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    path = checkpoint.newest(tmp_path / "outputs" / "r", say=print)
    assert path is not None
    assert '"engine": "deepspeed"' in (path / "manifest.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_verify_finds_it_healthy_and_its_faults(stage):
    """Its gradients lie elsewhere, it updates group by group, and its state has parts of what the model holds whole."""
    options = EngineOptions(zero_stage=stage)
    config = lockstep.Config(batch_size=8, lr=0.01, device="cpu", timeout=60.0, engine_options=options)
    asked = {"engines": ("deepspeed",), "world_sizes": (2,), "steps": 3, "resume_at": 1, "precision": "float32"}
    table = lockstep.verify(Ragged(samples=60, dropout=0.1), config, **asked)
    assert table.ok, str(table)
    for plant, stage in (("extra-step", "optimizer"), ("unsent-gradient", "reduction")):
        difference = lockstep.verify(Ragged(samples=60), config, plant=plant, plant_at=3, **asked).rows[1].difference
        assert (difference.step, difference.stage) == (2, stage)


def _infinite(world):
    """Per stage: which steps were applied. Rank 1's second loss is infinite, though its gradient is not."""
    found = []
    for stage in (0, 2, 3):
        made, batches = build(world, zero_stage=stage, precision="float32")
        applied = []
        for step, micro in batches.from_step(0):
            for batch in micro:
                with made.accumulate(batch is micro[-1]):
                    loss = TASK.loss(made.model, batch.data)
                    made.backward(loss + float("inf") if step == 1 and world.rank == 1 else loss, 1 / 2000)
            applied.append(made.step(1.0).applied)
        found.append(applied[:3])
    return found


def test_an_infinite_loss_on_one_rank_is_left_out_on_all():
    assert run(_infinite, 2) == [[[True, False, True]] * 3] * 2


def _limited(world, stage):
    """(applied, norm) of five steps, the second over the limit, the fourth left out."""
    name = "deepspeed" if world.size > 1 else "single"
    options = {"zero_stage": stage} if world.size > 1 else {}
    made, batches = build(world, name=name, count=5, **options)
    found, limits = [], [math.inf, 1e-3, math.inf, -math.inf, math.inf]
    for step, micro in batches.from_step(0):
        for batch in micro:
            with made.accumulate(batch is micro[-1]):
                made.backward(TASK.loss(made.model, batch.data), batch.weight / 50)
        result = made.step(1.0, limits[step])
        found.append((result.applied, float(result.norm)))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_over_the_limit_is_left_out_on_all_ranks(stage):
    one, two = run(_limited, 2, stage)
    assert one == two
    assert [applied for applied, _ in one] == [True, False, True, False, True]
    wanted = _limited(World(), 0)
    close([norm for _, norm in one], [norm for _, norm in wanted])


class Line(torch.nn.Module):
    """y = 0.5 a - 0.25 b: numbers that float16 holds exactly, so that its results can be written down."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.line.weight.copy_(torch.tensor([[0.5, -0.25]]))

    def forward(self, x):
        return self.line(x)


def _halves(world, cases):
    """(norms, weight) of two steps under float16 and SGD for each (stage, clip)."""
    warnings.simplefilter("ignore")  # the package's own
    found = []
    for stage, clip in cases:
        made = engine(
            "deepspeed",
            autocast(Line(), torch.float16, "cpu"),
            lambda held: torch.optim.SGD(held.parameters(), lr=0.5),
            world,
            clip=clip,
            loss_scaling=True,
            options=EngineOptions(zero_stage=stage),
        )
        data, norms = torch.tensor([[0.25, 0.5], [0.75, 0.0], [1.25, 1.0], [0.75, 2.5]]), []
        for _ in range(2):
            rows = data.chunk(world.size)[world.rank].split(1)
            for number, row in enumerate(rows):
                with made.accumulate(number == len(rows) - 1):
                    made.backward(made.model(row).float().sum(), 0.25)
            norms.append(float(made.step(1.0).norm))
        with torch.no_grad():  # each rank may hold a part: what the model answers shows the whole
            found.append((norms, [made.model(torch.tensor([row])).item() for row in ([1.0, 0.0], [0.0, 1.0])]))
    return found


def test_float16_in_numbers():
    """The gradient is (0.75, 1), its norm 1.25; two steps at a rate of 0.5, clipped to half of it or not.

    Under AdamW a gradient that is wrong by a constant factor trains the same.
    """
    cases = [(0, 0.0), (1, 0.0), (2, 0.625), (3, 0.625)]
    for found in run(_halves, 2, cases):
        for (_, clip), (norms, weight) in zip(cases, found, strict=True):
            part = 0.5 if clip else 1.0
            assert norms == pytest.approx([1.25, 1.25], rel=1e-5)
            assert weight == pytest.approx([0.5 - 0.75 * part, -0.25 - part], rel=1e-3)
