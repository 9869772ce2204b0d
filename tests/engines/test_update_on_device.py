"""The step where the device decides: no wait, and the values of the host's path. On a CPU, by setting the branch."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from support import digest
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Ragged

from lockstep import checkpoint
from lockstep.config.sections import Fp16
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.engines.optimizer_step import DeviceLossScale, LossScale, OptimizerStep
from lockstep.engines.registry import engine
from lockstep.errors import LockstepError
from lockstep.optim.optimizers import adamw, sgd
from lockstep.transforms import autocast

WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}


class Calls(TorchDispatchMode):
    """The operations that are called within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.overloadpacket.__name__.startswith("_record_function"):  # the profiler's
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def decides(monkeypatch):
    """The device decides."""
    monkeypatch.setattr(OptimizerStep, "on_device", True)


NORMS = {"good": (1.0, True), "overflow": (math.inf, False), "nan": (math.nan, False), "left out": (9.0, False)}


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([*NORMS, "good", "overflow"]), max_size=40),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    stop=st.integers(0, 40),
)
def test_the_scale_on_the_device_is_the_hosts_over_a_resume_too(kinds, window, hysteresis, consecutive, stop):
    how = Fp16(3, window, hysteresis, consecutive, 0.25)
    wanted, found, failed = LossScale(how), DeviceLossScale(how, torch.device("cpu")), False
    for step, kind in enumerate(kinds):
        if step == stop:  # each goes on with what the other one kept
            kept = wanted.state_dict(), found.state_dict()
            assert kept[0] == kept[1]
            wanted, found = LossScale(how), DeviceLossScale(how, torch.device("cpu"))
            wanted.load_state_dict(kept[1])
            found.load_state_dict(kept[0])
        norm, applied = torch.tensor(NORMS[kind][0]), NORMS[kind][1]
        try:
            wanted.learn(norm, applied)
        except LockstepError as error:
            failed = True
            found.learn(norm, torch.tensor(applied))
            with pytest.raises(LockstepError, match="scale 0.25 ") as late:
                found.state_dict()
            assert str(late.value) == str(error)
            break
        found.learn(norm, torch.tensor(applied))
        assert float(found.scale) == wanted.scale
    if not failed:
        assert found.state_dict() == wanted.state_dict()


def test_an_overflow_at_the_least_scale_is_said_one_step_late(decides):
    model = torch.nn.Linear(1, 1, bias=False)
    made = engine("single", model, adamw(model, lr=0.1), World(), loss_scaling=Fp16(1, 5, 1, False, 2.0))
    for step in range(2):
        made.backward(model(torch.ones(1, 1)).sum() * math.inf)
        if step:
            with pytest.raises(LockstepError, match=r"scale 2 \(--fp16\.min-loss-scale\)"):
                made.step()
        else:
            assert made.step().applied is None


def built(world, name, how, clip=0.0, dtype=torch.float32, make=adamw):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    torch.manual_seed(0)
    task = Ragged(dtype=dtype)
    model = task.model()
    if how:
        model = autocast(model, torch.float16, "cpu")
    blocks = list(model.blocks) if name == "fsdp" else ()
    return task, engine(
        name, model, lambda held: make(held, lr=0.01), world, clip=clip, loss_scaling=how or False, blocks=blocks
    )


def trained(world, name, how, folder, *, on_device, clip=0.0, count=10, limits=None, **kind):
    """(norms as text, digest of the end): `count` steps, with a resume from a checkpoint in the middle."""
    OptimizerStep.on_device = on_device or None
    task, made = built(world, name, how, clip, **kind)
    dataset = task.dataset("train")
    batches = Batches(task, dataset, Shuffled(len(dataset), 0), StepPlan(8, 2, count * 8), world, seed=0)
    norms, decided = [], set()
    for step, micro in batches.from_step(0):
        if folder and step == count // 2:
            folder_of = folder / f"{name}-{on_device}"
            path = checkpoint.save(folder_of, step, made.state_dict(), {}, world, engine=name)
            task, made = built(world, name, how, clip, **kind)
            state = made.state_dict()
            checkpoint.load(path, state, world)
            made.load_state_dict(state)
        for batch in micro:
            with made.accumulate(batch is micro[-1]):
                loss = task.loss(made.model, batch.data)
                made.backward(loss * 1e38 * 1e38 if step == 7 else loss, batch.weight / 50)
        result = made.step(1.0 / (step + 1), (limits or {}).get(step, math.inf))
        decided.add(result.applied is None)
        norms.append(str(float(result.norm)))
    assert decided == {on_device}
    OptimizerStep.on_device = None
    return norms, digest(made, world)


def both(world, folder, names, clip):
    return [
        [trained(world, name, Fp16(22, 2, 2), folder, on_device=on_device, clip=clip) for on_device in (False, True)]
        for name in names
    ]


def test_a_run_that_overflows_has_the_hosts_bits(tmp_path):
    [(wanted, found)] = both(World(), tmp_path, ["single"], 1e6)
    assert wanted == found
    assert {"inf", "nan"} & set(wanted[0])
    assert len(set(wanted[0])) > 4, "and steps that are applied"


def test_so_it_has_on_two_ranks_in_every_engine(tmp_path):
    for found in run(both, 2, tmp_path, ["ddp", "zero", "fsdp"], 0.0):
        for on_host, on_device in found:
            assert on_host == on_device
            assert {"inf", "nan"} & set(on_host[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_that_bites_is_the_kernels_division(dtype):
    limits = {2: -math.inf, 4: 1e-3}
    kind = {"clip": 0.01, "dtype": dtype, "limits": limits}
    host, device = (trained(World(), "single", None, None, on_device=on, **kind) for on in (False, True))
    if dtype is torch.float64:  # the kernel's divisor is float32, so they are multiplied as on the host
        assert host == device
    assert [float(norm) for norm in device[0]] == pytest.approx(
        [float(norm) for norm in host[0]], rel=1e-5, nan_ok=True
    )


@pytest.mark.parametrize("how", [None, Fp16(4)])
def test_a_step_waits_for_nothing_and_takes_few_operations(decides, how):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    made = engine("single", model, adamw(model, lr=0.1), World(), clip=1.0, loss_scaling=how or False)
    for _ in range(3):
        made.backward(model(torch.ones(1, 4)).sum())
        with Calls() as calls:
            made.step(1.0)
    assert not WAITS & set(calls.names)
    assert len(calls.names) <= (28 if how else 16), calls.names
    assert "_foreach_mul_" not in calls.names, "the kernel clips"


def test_on_the_host_nothing_is_handed_to_the_kernel():
    model = torch.nn.Linear(2, 1)
    optimizer = adamw(model, lr=0.1)
    made = engine("single", model, optimizer, World(), clip=1.0)
    made.backward(model(torch.ones(1, 2)).sum())
    assert made.step().applied is True
    assert not hasattr(optimizer, "found_inf")


def test_momentum_is_there_though_the_first_step_is_left_out(decides):
    """torch's fused kernel leaves it unset."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=fused)
        made = engine("single", model, optimizer, World(), clip=0.5)
        for step in range(4):
            made.backward(model(torch.arange(6.0).reshape(2, 3)).square().sum())
            assert made.step(limit=-math.inf if not step else math.inf).applied is (None if fused else step > 0)
            if fused and not step:
                assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


class Deaf(torch.optim.SGD):
    """Says that it is fused, and knows of no step that is left out."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["fused"] = True
        self.stepped = 0

    def step(self, closure=None):
        self.stepped += 1


@pytest.mark.parametrize(
    "make",
    [
        Deaf,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=False),
    ],
)
def test_an_optimizer_that_cannot_leave_a_step_out_waits(decides, make):
    model = torch.nn.Linear(2, 1)
    made = engine("single", model, make(model.parameters()), World())
    before = [p.detach().clone() for p in model.parameters()]
    made.backward(model(torch.ones(1, 2)).sum() * math.nan)
    assert made.step().applied is False
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_unfused_group_added_later_makes_the_host_decide(decides):
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, fused=True)
    model = torch.nn.Sequential(one, two)
    made, seen = engine("single", model, optimizer, World(), clip=1.0), []
    for step in range(2):
        if step:
            optimizer.add_param_group({"params": list(two.parameters()), "fused": False})
        made.backward(model(torch.ones(1, 2)).sum())
        seen.append(made.step().applied)
    assert seen == [None, True]


def test_sgd_is_fused_where_its_parameters_are_on_a_device_alone():
    assert not sgd(torch.nn.Linear(2, 2), lr=0.1).defaults["fused"]
