"""What a verification allows, compares and records, by exact numbers and without processes."""

import argparse
import copy
import dataclasses
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_comparison import record
from torch import nn
from toys import Ragged

import lockstep
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.errors import ConfigError, DifferenceError
from lockstep.training.state import run_dir
from lockstep.verify import certificate, reference, verification
from lockstep.verify import verification as command
from lockstep.verify.compare import Traces, first_difference
from lockstep.verify.faults import fault
from lockstep.verify.recorder import StepRecorder, _digests
from lockstep.verify.reference import ReferenceComparer, ReferenceWriter, TensorStore, compare
from lockstep.verify.request import (
    REFERENCE,
    Combination,
    FaultContext,
    TableRow,
    VerifyRequest,
    VerifyTable,
    combine,
    reference_specs,
    run_spec,
)
from lockstep.verify.tolerance import EXACT, Scales, Tolerance, tolerance_of
from lockstep.verify.verification import repeats

COMPILED = Combination("single", 1, compiled=True)


def test_the_step_of_a_fault_and_of_the_resume_are_apart():
    found = {
        steps: (VerifyRequest(Config(), steps=steps).resume, VerifyRequest(Config(), steps=steps).fault_step)
        for steps in range(1, 9)
    }
    assert found == {1: (0, 0), 2: (1, 0), 3: (1, 2), 4: (2, 1), 5: (2, 1), 6: (3, 2), 7: (3, 2), 8: (4, 2)}
    asked = VerifyRequest(Config(), steps=8, resume_at=7, plant_at=8)
    assert (asked.resume, asked.fault_step) == (7, 7)
    assert VerifyRequest(Config(), steps=8, resume_at=0, plant_at=1).resume == 0
    for wrong in ({"resume_at": 8}, {"resume_at": -1}, {"plant_at": 9}, {"plant_at": 0}, {"steps": 0}):
        with pytest.raises(ConfigError):
            VerifyRequest(Config(), **{"steps": 8, **wrong})


def test_what_is_not_asked_for_is_the_same_in_python_as_by_flags():
    """A request's fields are the arguments of `lockstep.verify`, which are the flags'."""
    arguments = {name: each.default for name, each in inspect.signature(lockstep.verify).parameters.items()}
    fields = {field.name: field.default for field in dataclasses.fields(VerifyRequest)}
    del arguments["config"], fields["config"]  # the one that a request must have
    assert fields == arguments


def test_precision_is_float64_if_all_engines_have_it():
    def precision(engines=(), asked="", **changes):
        return VerifyRequest(Config(**changes), engines=engines, precision=asked).resolve().config.precision

    assert (precision(), precision(["ddp"])) == ("float64", "float64")
    assert precision(["ddp", "deepspeed"]) == "float32"
    assert precision(exact=True) == "float32"
    assert (precision(asked="bf16"), precision(exact=True, asked="bf16")) == ("bf16", "bf16")
    assert set(VerifyRequest(Config()).resolve().engines) == {"single", "ddp", "fsdp", "zero"}


def test_row_has_the_largest_difference_of_any_rank_at_the_end(monkeypatch):
    monkeypatch.setattr(verification, "first_difference", lambda traces: None)
    monkeypatch.setattr(verification, "traces_of", lambda *given: None)
    made = verification.Verification(VerifyRequest(Config()), SimpleNamespace(folder=Path()))
    monkeypatch.setattr(made, "_spec", lambda one: SimpleNamespace(reference="reference", tolerance=EXACT))
    monkeypatch.setattr(made, "_reference", {"steps": []})
    monkeypatch.setattr(made, "_trace", lambda key: {"steps": [{}]})

    def trace(*differences):
        return {"steps": [{"weights": {"equal": not each[0], "largest": list(each)}} for each in differences]}

    ranks = [trace((0.0, ""), (0.9, "a"), (0.1, "b")), trace((0.7, "c"), (0.0, ""), (0.2, "d"))]
    row = made._row(Combination("ddp", 2), ranks)
    assert (row.verdict, row.largest) == ("close", (0.2, "d"))
    assert made._row(Combination("ddp", 1), [trace((0.0, ""))]).verdict == "equal"


def test_the_order_of_combinations_is_by_size_and_then_as_asked():
    found = [str(one) for one in combine(["zero", "ddp"], [3, 1, 3], compiled=False)]
    assert found == ["single x1", "zero x1", "ddp x1", "zero x3", "ddp x3"]


@pytest.mark.parametrize("exact", [False, True])
def test_what_each_run_is_compared_with_and_how_closely(tmp_path, exact):
    """The single process again: to the bit. In exact mode compiled engines: with the compiled process, to the bit."""
    request = VerifyRequest(Config(batch_size=8, micro_batch_size=2, exact=exact))
    known, everywhere, eight = fault("bit-flip"), fault("local-batchnorm"), 2.0**-8

    def spec(one, planted=known):
        return run_spec(request, one, tmp_path, planted, "bfloat16")

    rounding = EXACT if exact else Tolerance(4 + 3, 2.0**-24, eight)
    other = Tolerance(4 + 3 + 4096, 2.0**-24, eight, compiled=True)
    assert (spec(REFERENCE).reference, spec(REFERENCE).tolerance) == ("reference", EXACT)
    assert (spec(Combination("ddp", 3)).reference, spec(Combination("ddp", 3)).tolerance) == ("reference", rounding)
    third = spec(Combination("ddp", 3, compiled=True))
    assert third.reference == ("reference-compiled" if exact else "reference")
    assert third.tolerance == (EXACT if exact else other)
    assert spec(COMPILED).reference == "reference"  # compiled has other bits than eager
    assert spec(COMPILED).tolerance == Tolerance(4 + 1 + 4096, 2.0**-24, eight, compiled=True)
    assert [spec(one).fault.name for one in (REFERENCE, Combination("ddp", 3))] == ["", "bit-flip"]
    assert spec(REFERENCE, everywhere).fault is everywhere
    for compiled in (False, True):
        specs = reference_specs(request, tmp_path, known, compiled=compiled)
        assert [each.key for each in specs] == ["reference", "reference-compiled"][: 1 + (compiled and exact)]
        assert [each.combination for each in specs] == [REFERENCE, COMPILED][: len(specs)]
        assert {each.fault.name for each in specs} == {""}
        assert {each.resume for each in specs} == {0}
    assert reference_specs(request, tmp_path, everywhere, compiled=False)[0].fault is everywhere
    assert spec(REFERENCE).resume == 4


def test_tf32_and_other_kernels_widen_the_tolerance():
    plain = Config(batch_size=8, micro_batch_size=2)
    assert tolerance_of(plain, 2, "float32", other_kernels=False) == Tolerance(6, 2.0**-24, 2.0**-24)
    tf32 = dataclasses.replace(plain, matmul_precision="high", device="cuda")
    assert tolerance_of(tf32, 2, "float32", other_kernels=False).inner == 2.0**-11
    assert tolerance_of(tf32, 2, "bfloat16", other_kernels=False).inner == 2.0**-8
    for other in ({"device": "cpu"}, {"matmul_precision": "highest"}):
        assert tolerance_of(dataclasses.replace(tf32, **other), 2, "float32", other_kernels=False).inner == 2.0**-24


def test_scales_grow_with_the_largest_gradient_and_all_rates():
    steps = [
        {"rates": [0.1, 0.3], "gradient": {"square": 9.0}, "beta2": 0.9},
        {"rates": [], "gradient": {"square": 4.0}},
        {"rates": [0.2]},
    ]
    found = [dataclasses.astuple(each) for each in Scales.of(steps, Config(optim=Optim(eps=1e-6)))]
    assert found == [(3.0, 0.3, 0.9, 1e-6), (3.0, 0.3, 0.0, 1e-6), (3.0, 0.5, 0.0, 1e-6)]


def test_drift_is_of_noise_over_eps_and_two_updates_at_most():
    u, scales = 2.0**-24, Scales(norm=2.0, travel=0.1, beta2=0.9, eps=1e-3)
    assert Tolerance(10, u, u).drift(0, scales) == pytest.approx(0.1 * 2 * 4 * 10 * u * 2.0 / 1e-3)
    assert Tolerance(10, u, u).drift(1, scales) == pytest.approx(0.1 * 2 * (40 * u + u / 64) * 2.0 / 1e-3)
    assert Tolerance(10, u, u).drift(1, dataclasses.replace(scales, eps=1e-12)) == pytest.approx(0.2)
    assert EXACT.drift(1, scales) == 0.0


def allowed(folder, kind, name, mine, theirs, moment=None, step=1, tolerance=None, file=None):
    """The largest error that is allowed to a tensor that is wrong, in step 1."""
    store, tolerance = TensorStore(folder), tolerance or Tolerance(10, 2.0**-24, 2.0**-24)
    store.write(kind, step, [(name, theirs)])
    if kind != "optimizer":
        store.write("optimizer", step, [(f"optimizer/{name}/exp_avg_sq", moment)] if moment is not None else [])
    steps = [{"rates": [0.1], "gradient": {"square": 9.0}, "beta2": 0.9}] * 2
    comparer = ReferenceComparer(store, steps, tolerance, Config(optim=Optim(eps=1e-8)))
    return comparer.record(kind, step, [(name, mine)])["first"]["allowed"]


def test_what_is_allowed_to_each_kind_of_tensor(tmp_path):
    """docs/inside/verify.md: gradients and means by the gradient's norm, squares by its square, buffers alone."""
    u, scales = 2.0**-24, Scales(3.0, 0.2, 0.9, 1e-8)
    tolerance = Tolerance(10, u, u)
    relative, ones, far = tolerance.relative(1), torch.ones(4), torch.full((4,), 99.0)
    assert allowed(tmp_path, "gradient", "a", far, ones) == relative * 3.0
    assert allowed(tmp_path, "optimizer", "optimizer/a/exp_avg", far, ones) == relative * 3.0
    assert allowed(tmp_path, "optimizer", "optimizer/a/exp_avg_sq", far, ones) == 4.0 * relative * 9.0
    buffers = relative * (2.0 + 1.0) + tolerance.drift(1, scales) * 2.0
    assert allowed(tmp_path, "buffers", "a", far, ones) == pytest.approx(buffers)
    each = 4 * 3 * u + relative * 0.2
    assert allowed(tmp_path, "weights", "a", far, ones) == pytest.approx(2.0 * each)
    moments = torch.tensor([0.0, 1.0, 4.0, 9.0])
    wanted = tolerance.weights(1, ones, moments, scales)(slice(0, 4))
    assert allowed(tmp_path, "weights", "a", far, ones, moments) == pytest.approx(float(wanted.norm()))
    waves = torch.view_as_complex(moments.reshape(2, 2))
    assert allowed(tmp_path, "weights", "w", far[:2] * 1j, ones[:2] * 1j, waves) > 0
    for kind, name, one in (
        ("initial", "a", ones),
        ("optimizer", "optimizer/a/step", ones),
        ("buffers", "count", torch.ones(4, dtype=torch.int64)),
    ):
        assert allowed(tmp_path, kind, name, one * 99, one) == -1.0
    assert allowed(tmp_path, "gradient", "a", far, ones, tolerance=EXACT) == -1.0


@pytest.mark.parametrize("piece", [1, 2, 5, 2**18])
def test_tensors_are_compared_alike_in_pieces_of_any_size(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(reference, "PIECE_SIZE", piece)
    theirs = {"a": torch.tensor([3.0, 4.0, 0.0, 1.0]), "b": torch.tensor([2.0, 2.0]), "n": torch.tensor([1, 2])}
    mine = {"a": torch.tensor([3.0, 1.0, 4.0, 1.0]), "b": torch.tensor([2.0, 0.0]), "n": torch.tensor([1, 2])}
    TensorStore(tmp_path).write("weights", 0, theirs.items())
    stored = TensorStore(tmp_path).read("weights", 0)
    found = compare(mine.items(), stored, lambda *_: lambda place: torch.full((4,), 2.0, dtype=torch.float64)[place])
    assert found["first"] == {"name": "a", "values": [4.0, 0.0], "at": [2], "difference": 5.0, "allowed": 4.0}
    assert found["largest"] == [1.0, "a"]
    assert found["parts"]["a"] == [27.0, 26.0, 14.0]
    assert found["parts"]["b"] == [4.0, 8.0, 4.0]
    assert found["offsets"] == {}
    assert not found["equal"]
    whole = compare(theirs.items(), stored, lambda *_: -1.0)
    assert (whole["equal"], whole["largest"], whole["first"], whole["missing"]) == (True, [0.0, ""], None, [])
    assert reference.square(theirs["a"]) == 26.0
    assert not compare([("a", torch.zeros(3))], stored, lambda *_: 9.0)["equal"]


def differing(change, tolerance=EXACT, clip=0.0, drift=0.0):
    """The first difference where `change` has altered the trace of the one rank, its step and its evaluation."""
    evaluation = {"step": 1, "loss": 1.0, "items": 9, "metrics": {"m": 4.0}}
    trace = {"rank": 0, "steps": [record()], "evaluation": evaluation}
    other = copy.deepcopy(trace) | {"resumed": []}
    change(other["steps"][0], other["evaluation"])
    return first_difference(Traces(trace, [other], tolerance, clip, drift))


def test_unrepeatable_run_is_told_from_a_wrong_one():
    """Only up to the step where it differs from the single process, and beyond what its sums may round to."""
    run = [{"rank": rank, "steps": [record(step) for step in range(3)], "evaluation": {"loss": 1.0}} for rank in (0, 1)]
    loose = Tolerance(10, 2.0**-24, 2.0**-24)
    for step, at, key, value, same in (
        (1, 1, "norm", 1.0 + 1e-3, False),
        (1, 1, "norm", 1.0 + 1e-9, True),
        (1, 2, "norm", 9.0, True),
        (1, 0, "loss", 2.1, False),
        (2, 2, "drawn", "other", False),
    ):
        other = copy.deepcopy(run)
        place = other[1]["steps"][at]
        (place if key in place else place["slots"][0])[key] = value
        assert repeats(run, other, step, loose) is same, (step, key, value)
    other = copy.deepcopy(run)
    other[0]["evaluation"]["loss"] = 2.0
    assert [repeats(run, other, step, loose) for step in (2, 3)] == [True, False]


def test_items_share_of_the_loss_is_compared_in_any_dtype():
    """It is a quotient of whole numbers: a loss averaged by rank is 18 % off, below what bfloat16 rounds to."""
    coarse, found = Tolerance(10, 2.0**-8, 2.0**-8), []
    for share in (0.25, 0.25 * 1.18, 0.25 * (1 + 1e-15)):
        run = {"rank": 0, "steps": [record()]}
        run["steps"][0]["slots"][0]["share"] = 0.25
        other = copy.deepcopy(run) | {"resumed": []}
        other["steps"][0]["slots"][0]["share"] = share
        found.append(first_difference(Traces(run, [other], coarse)))
    assert [each and each.stage for each in found] == [None, "normalisation", None]


def test_measured_rounding_replaces_the_bound_below_it():
    measured = Tolerance(10, 2.0**-8, 2.0**-8, measured=(2e-3, 5e-3, 1e-3))
    bare = dataclasses.replace(measured, measured=())
    assert [measured.relative(step) for step in range(3)] == [8e-3, 20e-3, 20e-3]
    assert bare.relative(1) == bare.bound(1) == measured.bound(1) == 0.25
    assert dataclasses.replace(measured, measured=(0.2,)).relative(0) == 0.25
    assert dataclasses.replace(measured, measured=(0.0, 0.0)).relative(1) == 0.25  # nothing moved: it says nothing
    few = Tolerance(2, 2.0**-24, 2.0**-8, measured=(1e-7, 1e-7))  # of elements that turn over none did
    assert few.relative(0) == few.bound(0) < 1e-5
    assert few.relative(1) == pytest.approx(1e-4 + 4 * 2.0**-8)
    row = TableRow(Combination("ddp", 2), "close", (1e-3, "a"), hidden=measured.relative(1))
    assert "2.00%" in row.text
    assert "in ;" not in dataclasses.replace(row, largest=(0.0, "")).text  # gradients differ, and no weight does


def test_evaluation_may_drift_slightly_but_not_lose_items():
    for loss, metric, items, found in ((1.19, 4.0, 9, None), (1.21, 4.0, 9, "loss"), (1.0, 4.49, 9, None),
                                       (1.0, 4.51, 9, "m"), (1.0, 4.0, 9.5, "items")):  # fmt: skip
        change = lambda _, e, to=(loss, metric, items): e.update(loss=to[0], metrics={"m": to[1]}, items=to[2])  # noqa: E731
        said = differing(change, drift=0.1)
        assert (said and said.where) == found
    assert differing(lambda _, e: e.update(metrics={})).where == "m"


def test_a_norm_near_the_clipping_is_clipped_as_torch_does():
    """By clip / (norm + 1e-6), which matters to a norm as small as this."""
    small = 1e-4
    left = small * small / (small + 1e-6)
    for length, stage in ((left, None), (small, "clipping"), (small * small / (small + 2e-6), "clipping")):
        parts = {"a": [length**2, left**2, length * left]}

        def change(step, _, parts=parts):
            step.update(norm=small)
            step["gradient"].update(parts=parts)

        steps = [record(norm=small)]
        other = copy.deepcopy(steps)
        change(other[0], None)
        found = first_difference(
            Traces({"rank": 0, "steps": steps}, [{"rank": 0, "resumed": [], "steps": other}], EXACT, small)
        )
        assert (found and found.stage) == stage


def test_a_rank_without_gradients_is_compared_by_its_norm():
    def change(step, _):
        del step["gradient"]

    assert differing(change, clip=1.0) is None
    assert differing(lambda step, e: (change(step, e), step.update(norm=2.0)), clip=1.0).stage == "reduction"


def given(**changes):
    """A certificate of two steps in which one tensor has norm 3."""
    kinds = {kind: {"digests": {"a": "1"}, "norms": {"a": 3.0}, "square": 9.0} for kind in ("gradient", "weights")}
    base = {key: value for key, value in record().items() if key not in ("initial", "buffers", "optimizer")}
    steps = [copy.deepcopy({**base, **kinds, "step": step}) for step in range(2)]
    return {"trace": {"rank": 0, "resumed": [], "steps": steps}, **changes}


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_another_machines_tensors_compare_by_digest_and_norm(kind):
    loose = Tolerance(10, 2.0**-24, 2.0**-24)
    limit = loose.relative(1) * 3.0
    for norm, digest, tolerance, found in (
        (3.0, "1", EXACT, None),
        (3.0, "2", EXACT, "a"),
        (3.0 + 0.9 * limit, "2", loose, None),
        (3.0 + 1.1 * limit, "2", loose, "a"),
    ):
        mine = given()["trace"]
        mine["steps"][1][kind].update(digests={"a": digest}, norms={"a": norm})
        said = certificate.against(given(), mine, tolerance)
        assert (said and (said.step, said.where)) == (found and (1, found))
    mine = given()["trace"]
    mine["steps"][1][kind]["digests"]["b"] = "3"
    assert certificate.against(given(), mine, loose).where == "b"
    mine["steps"].pop()
    assert certificate.against(given(), mine, loose).text == "1 steps instead of 2"
    held = certificate._compare_step(given()["trace"]["steps"][1], given()["trace"]["steps"][1], loose)
    assert held[kind]["equal"]
    other = given()["trace"]["steps"][1]
    other[kind]["digests"] = {"a": "2"}
    assert not certificate._compare_step(other, given()["trace"]["steps"][1], loose)[kind]["equal"]


def test_machine_is_known_by_versions_processor_and_device(monkeypatch):
    here = {
        "versions": {"torch": "2"},
        "machine": {"cpu": "c", "hostname": "h"},
        "devices": [{"name": "d"}, {"name": "e"}],
    }
    monkeypatch.setattr(run_dir, "describe_process", lambda: here)
    assert certificate.same_machine({**here, "machine": {"cpu": "c", "hostname": "other"}}) == []
    assert certificate.same_machine({**here, "devices": [{"name": "d"}]}) == []
    assert certificate.same_machine({**here, "versions": {"torch": "1"}}) == ["torch 1 there, 2 here"]
    assert certificate.same_machine({**here, "machine": {}}) == ["cpu None there, c here"]
    assert certificate.same_machine({**here, "devices": []}) == ["devices [] there, ['d', 'e'] here"]


def test_every_leaf_of_a_batch_has_a_digest_under_its_path():
    class Encoding:  # as a tokenizer gives it: no dict, but with items
        def items(self):
            return [("x", torch.ones(2))]

    class Plain:
        def __init__(self):
            self.y = torch.zeros(2)

    batch = {"a": [torch.ones(2), (1, "t", None)], "e": Encoding(), "p": Plain()}
    found = dict(_digests(batch))
    assert list(found) == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['a'][1][2]", "['e']['x']", "['p']['y']"]
    assert found["['a'][0]"] == found["['e']['x']"] != found["['p']['y']"]
    assert len(set(found.values())) == 5
    assert dict(_digests(torch.ones(2))) == {"": found["['a'][0]"]}


class Updating:
    """An engine whose optimizer updates one group after another, and as often as it is told."""

    def __init__(self, model):
        self.model, self.times = model, 1
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}]
        self.optimizers = [torch.optim.AdamW([group], betas=(0.9, 0.8)) for group in groups]

    def state_dict(self):
        return {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}

    def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
        whole = torch.optim.AdamW([group for each in self.optimizers for group in each.param_groups], betas=(0.9, 0.8))
        for _ in range(self.times):
            whole.step()
            self.optimizers[0].step()  # one inside another, as split optimizers do: it is no update of its own
        return StepResult(torch.tensor(2.0), True)


def recorded(folder, before=None, change=None, times=1):
    """The record of one step of a small model, and its recorder."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    engine = Updating(model)
    engine.times = times
    recorder = StepRecorder(engine, model, ReferenceWriter(TensorStore(folder), 2), torch.device("cpu"), before)
    stray = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with recorder.hook():
        stray.step()  # some other optimizer of the process, before the first step
        for _ in recorder.watch([(0, [SimpleNamespace(index=3, weight=1.0, items=2, data=torch.ones(2))])]):
            recorder.seeding(lambda *_: torch.manual_seed(1))(0, 3)
            if change:
                change(model)
            recorder.begin()
            model(torch.ones(1, 2)).sum().backward()
            recorder.engine.inner.backward = lambda loss, weight: None
            recorder.engine.backward(torch.tensor(4.0), 0.5)
            recorder.engine.step(1.0)
            stray.step()
    recorder.close(SimpleNamespace(record=None, items=2, factor=1.0, losses=[torch.tensor(4.0)]))
    return recorder.steps[0], recorder


def test_a_step_is_recorded_as_it_was(tmp_path):
    step, recorder = recorded(tmp_path)
    assert (step["updates"], step["rates"], step["beta2"], step["norm"], step["applied"]) == (
        1,
        [0.1, 0.2],
        0.8,
        2.0,
        True,
    )
    assert (step["items"], step["factor"], step["changed"]) == (2, 1.0, [])
    (slot,) = step["slots"]
    assert (slot["micro"], slot["loss"], slot["scaled"]) == (3, 4.0, 2.0)
    assert slot["seeded"] == slot["drawn"]
    assert (step["gradient_dtype"], step["loss_dtype"]) == ("float32", "float32")
    assert step["gradient"]["square"] == pytest.approx(3.0)
    assert list(step["initial"]["digests"]) == list(step["weights"]["digests"]) == ["weight", "bias"]
    assert step["initial"]["digests"] != step["weights"]["digests"]
    assert recorder.ended["weights"] == step["weights"]["digests"]


def test_an_update_too_many_is_counted(tmp_path):
    assert recorded(tmp_path, times=2)[0]["updates"] == 2


def test_change_since_the_last_step_is_named_by_tensor(tmp_path):
    torch.manual_seed(0)
    fresh = recorded(tmp_path / "a")[1]
    start = {"weights": {}, "buffers": {}, "optimizer": {}, "held": {}}
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    start["weights"] = {name: reference.digest(p.detach()) for name, p in model.named_parameters()}
    start["held"] = dict(start["weights"])
    step, _ = recorded(tmp_path / "b", before=start)
    assert (step["changed"], "initial" in step) == ([], False)
    assert fresh.steps[0]["weights"] == step["weights"]

    def change(model):
        with torch.no_grad():
            model.bias += 1

    step, _ = recorded(tmp_path / "c", before=start, change=change)
    assert step["changed"] == [["weights", "bias"]] * 2  # in the engine's state, and as the update finds it


def context(rank=1, step=1, begin=0, model=None, **changes):
    return FaultContext(World(rank=rank, size=2), Config(batch_size=8, **changes), step, begin, model)


class Noting:
    """An engine that notes what it is asked for."""

    def __init__(self, model=None):
        self.model, self.heard = model, []

    def accumulate(self, last, counts=True):
        self.heard.append([parameter.tolist() for parameter in self.model.parameters()])

    def backward(self, loss, weight=1.0):
        self.heard.append(float(loss) * weight)

    def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
        self.heard.append(("step", factor))
        return StepResult(torch.tensor(2.0), True)


def test_a_fault_of_one_moment_comes_at_its_step_alone_and_once():
    inner = Noting()
    for rank, begin, unsent in ((1, 0, 2), (1, 1, 0), (0, 0, None)):
        weights = [0.0 if place == unsent else 1.0 for place in range(6)]
        inner.heard.clear()
        engine = fault("unsent-gradient").inside(inner, context(rank, begin=begin))
        for _ in range(3):
            engine.backward(torch.ones(()), 1.0)
            engine.backward(torch.ones(()), 1.0)
            engine.step(0.5)
        assert [heard for heard in inner.heard if isinstance(heard, float)] == weights
    model = nn.Linear(1, 1)
    before = [parameter.tolist() for parameter in model.parameters()]
    inner = Noting(model)
    engine = fault("bit-flip").inside(inner, context(model=model))
    for _ in range(3):
        engine.accumulate(False)
        engine.accumulate(True)
        engine.step(0.5)
    seen = [heard for heard in inner.heard if isinstance(heard, list)]
    assert seen[:2] == [before] * 2
    assert seen[2] != before
    assert seen[3:] == [seen[2]] * 3  # once, and it stays


def test_another_rate_comes_late_and_stays():
    inner = Noting()
    engine = fault("other-rate").inside(inner, context())
    for factor in (0.5, 0.5, 0.5, None):
        engine.step(factor)
    assert [factor for _, factor in inner.heard] == [0.5, 0.505, 0.505, None]


def test_planted_running_mean_has_the_models_own_dtype():
    model = fault("local-batchnorm").task(Ragged(), context()).model()
    model.double()
    assert (
        fault("local-batchnorm").task(Ragged(dtype=torch.bfloat16), context()).model().running_mean.dtype
        == torch.bfloat16
    )
    out = model(torch.zeros(1, 3, dtype=torch.int64)).detach()
    assert float(model.running_mean) == pytest.approx(0.1 * float(out.mean()))
    model.eval()
    model(torch.ones(1, 3, dtype=torch.int64))
    assert float(model.running_mean) == pytest.approx(0.1 * float(out.mean()))


def test_under_torchrun_rank_0_alone_speaks_and_writes(tmp_path, monkeypatch, capsys):
    table = VerifyTable("what was asked", certificate={"format": 1})
    monkeypatch.setattr(command, "prove", lambda asked, given: table)
    own = {"engines": ("ddp",), "world_sizes": (1,), "steps": 2, "resume_at": 0, "plant": "", "plant_at": None}
    own |= {
        "skip_unavailable": False,
        "scratch": "",
        "tensor": [],
        "context": [],
        "pipeline": [],
        "against": "",
        "out": str(tmp_path / "made.json"),
        "named": [],
    }
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(DifferenceError, match="the certificate") as caught:
            command.run(argparse.Namespace(**own))
        assert caught.value.relayed is not speaks
        assert ("what was asked" in capsys.readouterr().out) is speaks
        assert Path(own["out"]).exists() is speaks
        Path(own["out"]).unlink(missing_ok=True)
