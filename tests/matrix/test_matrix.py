"""Every pair of parts together: generated runs, each compared with a plain PyTorch loop, exact ones bit for bit.

The covering sets have each pair of two factors' values that a run can have, and each triple where nobody is killed
and every rank has the whole model.
`make test-full` draws more runs from all:

    MATRIX_SEED=7 MATRIX_COUNT=200 make test-full       the seed is printed, and drawn where none is given
    MATRIX_CASES="ddp-exact-2-mlp-0-spike-skip-bf16-late-after-default-closure" make matrix        these alone
"""

import itertools
import os
from pathlib import Path

import matrix_lightning
import matrix_oracle
import numpy as np
import pytest
import torch
from matrix_cases import (
    FACTORS,
    SEED,
    Case,
    everything,
    fewest,
    in_triples,
    parse,
    read,
    reference,
    refusal,
    sample,
    tuples,
    valid,
)
from matrix_lightning import manual_oracle, manual_rounding
from matrix_oracle import oracle
from matrix_run import NAME, play, refused, starts
from matrix_subject import BAD, STEPS, Own
from matrix_verdict import compared, compared_evaluations, verdict
from ranks import run

PAIRS, TRIPLES = read("pairs"), read("triples")

# Again over two launchers, as on two nodes. A few show each part that several nodes may meet.
SPREAD = [case for case in PAIRS if case.world > 1]
PARTS = {
    "exact": lambda case: case.exact,
    "shards": lambda case: case.engine == "fsdp",
    "BatchNorm": lambda case: case.model == "batchnorm",
    "a resume on other ranks": lambda case: len({start.world for start in starts(case)}) > 1,
    "a rollback": lambda case: case.leaves_out and case.policy == "rollback",
    "float16": lambda case: case.precision == "fp16",
    "loader processes": lambda case: case.workers > 0,
}
FEW = fewest([case for case in SPREAD if case.fault != "killed"], PARTS.values())

ASKED = [parse(line) for line in os.environ.get("MATRIX_CASES", "").split()]
DRAWN = ASKED or sample(int(os.environ.get("MATRIX_COUNT") or 120), SEED)

pytestmark = pytest.mark.timeout(1800)  # the first test of a session plays the cases of all


def asked_for(request, name):
    """The cases of this session's tests, and the exact runs with whose bits they are compared."""
    found = [item.callspec.params.get(name) for item in request.session.items if hasattr(item, "callspec")]
    cases = [case for case in found if isinstance(case, Case)]
    return cases + [reference(case) for case in cases if case.exact]


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """The folder in which the cases of this session's tests were played, many in each group of processes."""
    root = tmp_path_factory.mktemp("matrix")
    play(asked_for(request, "case"), root)
    return root


@pytest.fixture(scope="module")
def spread(request, tmp_path_factory):
    """The same over two launchers."""
    root = tmp_path_factory.mktemp("matrix")
    play(asked_for(request, "over_two"), root, nodes=2)
    return root


def judge(case, root, how):
    problems = verdict(case, root)
    again = f'MATRIX_CASES="{case}" make matrix'
    assert not problems, "\n".join([f"{case} ({how}); alone: {again}", *problems])


@pytest.mark.parametrize("case", [] if ASKED else PAIRS, ids=str)
def test_every_pair_of_parts(case, played):
    judge(case, played, "of the covering set")


@pytest.mark.parametrize(
    "over_two", [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in SPREAD], ids=str
)
def test_the_pairs_of_several_ranks_over_two_launchers(over_two, spread):
    judge(over_two, spread, "over two launchers")


@pytest.mark.slow
@pytest.mark.parametrize("case", [] if ASKED else TRIPLES, ids=str)
def test_every_triple_of_parts(case, played):
    judge(case, played, "of the covering set of triples")


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_a_sample_of_all_combinations(case, played):
    judge(case, played, "asked for" if ASKED else f"drawn with MATRIX_SEED={SEED}")


def test_covering_set_has_every_possible_pair():
    """After a change of the factors `python tests/matrix/matrix_cases.py` writes the sets again."""
    assert all(valid(case) for case in PAIRS)
    assert not lacking(everything(), PAIRS, 2)
    every = {frozenset(pair) for a, b in itertools.combinations(FACTORS, 2) for pair in _values(a, b)}
    assert every - {frozenset(pair) for case in PAIRS for pair in tuples(case, 2)} == {
        *(frozenset({("engine", "single"), ("world", world)}) for world in (2, 3, 4)),
        frozenset({("sums", "exact"), ("task", "own")}),
        *(frozenset({("engine", engine), ("task", "manual")}) for engine in ("zero", "fsdp")),
        frozenset({("policy", "skip"), ("task", "manual")}),
        frozenset({("precision", "fp16"), ("task", "manual")}),
        *(frozenset({("step", step), pair}) for step in FACTORS["step"][1:] for pair in _BESIDE),
        *(frozenset({("step", "closure"), pair}) for pair in (*_ZERO, ("precision", "fp16"))),
        *(frozenset({("fault", "oom"), pair}) for pair in _UNCUT),
        *(frozenset({("parallel", kind), pair}) for kind, pairs in _UNDIVIDED.items() for pair in pairs),
    }


@pytest.mark.slow
def test_covering_set_has_every_possible_triple():
    assert all(valid(case) for case in TRIPLES)
    assert not lacking([case for case in everything() if in_triples(case)], PAIRS + TRIPLES, 3)


def lacking(runs, chosen, size):
    """The factors of which some of the runs have values together that none of the chosen has."""
    possible, covered = _numbered(runs), _numbered(chosen)
    groups = itertools.combinations(range(len(FACTORS)), size)
    return [places for places in groups if (_had(possible, places) & ~_had(covered, places)).any()]


def _numbered(cases):
    """For each factor the places of the cases' values."""
    places = [{value: place for place, value in enumerate(values)} for values in FACTORS.values()]
    return [np.fromiter((known[case[n]] for case in cases), np.int16) for n, known in enumerate(places)]


def _had(values, places):
    """Which combinations of values the factors at these places have."""
    sizes = [len(each) for each in FACTORS.values()]
    found = np.zeros([sizes[place] for place in places], bool)
    found[tuple(values[place] for place in places)] = True
    return found


_ZERO = [("engine", "zero"), ("engine", "fsdp")]
# What a step does not depend on, or is of its own.
_BESIDE = [
    ("workers", 2),
    ("fault", "error"),
    ("fault", "killed"),
    ("fault", "oom"),
    ("model", "buffer"),
    ("model", "rotary"),
]
_BESIDE += [("task", task) for task in FACTORS["task"][1:]]
_UNCUT = [("world", world) for world in (2, 3, 4)] + [("sums", "exact"), ("model", "batchnorm"), ("model", "buffer")]
_UNCUT += [("task", task) for task in ("manual", "lightning", "stream", "hooked", "adapters", "trainer")]
_NEVER = [("engine", "single"), ("engine", "zero"), ("world", 1), ("world", 3), ("fault", "oom"), ("precision", "fp16")]
_NEVER += [("task", task) for task in ("muon", "adapters", "lightning", "manual", "quantized", "trainer")]
_UNDIVIDED = {
    "tensor": _NEVER,
    "pipeline": [*_NEVER, ("engine", "fsdp"), ("task", "own"), ("task", "hooked")]
    + [("model", model) for model in ("batchnorm", "buffer", "rotary")]
    + [("step", step) for step in ("counted", "whole", "rows", "closure", "unfrozen", "frozen")],
    "context": [*_NEVER, ("task", "own"), ("model", "batchnorm"), ("model", "buffer")]
    + [("step", step) for step in ("mean", "weighted", "drawn", "counted", "whole", "rows")],
}


def test_contributing_says_how_many_they_are():
    said = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    all_runs = f"sample of all {len(everything()):,} by"
    for number in (f"({len(PAIRS)} runs)", f"({len(SPREAD)})", f"({len(TRIPLES)})", all_runs):
        assert number in " ".join(said.split()), number


def _values(a, b):
    return {((a, x), (b, y)) for x in FACTORS[a] for y in FACTORS[b]}


def test_a_case_is_named_by_its_line():
    cases = PAIRS
    assert [parse(str(case)) for case in cases] == cases
    for line in ("", "ddp", str(cases[0]).replace(cases[0].sums, "rough"), f"{cases[0]}-more"):
        with pytest.raises(ValueError, match="names no case"):
            parse(line)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_no_run_is_refused_in_one_line(world, tmp_path):
    base = parse("ddp-plain-1-mlp-0-none-stop-float32-now-none-default-sum")._replace(world=world)
    cases = [base._replace(engine="single")] if world > 1 else []
    cases += [base._replace(engine=engine, sums="exact", model="buffer") for engine in ("ddp", "zero", "fsdp")]
    cases += [base._replace(sums="exact", task="own")]
    if world == 2:  # whatever the world
        own = base._replace(task="manual")
        cases += [own._replace(engine="zero"), own._replace(engine="fsdp"), own._replace(policy="skip")]
        cases += [own._replace(precision="fp16")]
        twice = base._replace(step="closure")
        cut = base._replace(fault="oom")
        cases += [cut._replace(sums="exact"), cut._replace(model="batchnorm")]
        tasks = ("manual", "lightning", "stream", "hooked", "adapters", "trainer")
        cases += [cut._replace(task=task) for task in tasks]
        cases += [base._replace(engine="fsdp", model="batchnorm", task="quantized")]  # of 8 bits
        cases += [twice._replace(engine="zero"), twice._replace(engine="fsdp"), twice._replace(precision="fp16")]
    assert_refused(cases, tmp_path)
    early = [case for case in cases if case.model != "buffer" and case.task != "own"]  # which a forward must move first
    assert not [case for case in early if (tmp_path / str(case) / NAME).exists()]


def assert_refused(cases, folder):
    assert all(refusal(case) for case in cases)
    for said in run(refused, cases[0].world, cases, folder, timeout=240.0):  # some import Lightning
        for case, line in zip(cases, said, strict=True):
            assert refusal(case) in line, case
            assert "\n" not in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", FACTORS["parallel"][1:])
def test_what_two_ranks_cannot_divide_is_refused_in_one_line(kind, tmp_path):
    base = parse("ddp-plain-2-mlp-0-none-stop-float32-now-none-default-sum")._replace(parallel=kind)
    cases = [base._replace(**{name: value}) for name, value in _UNDIVIDED[kind] if name != "world"]
    assert_refused([case for case in cases if refusal(case) and case.engine != "single"], tmp_path)


@pytest.mark.parametrize("model", FACTORS["model"])
def test_the_oracle_sees_each_part_that_it_is_to_see(model):
    """A comparison with an oracle that is blind would always pass: what a mistake changes must be beyond rounding."""
    plain, buffers, _ = oracle(model, "none", False, "float32")
    out, moved, _ = oracle(model, "spike", True, "float32")
    applied = oracle(model, "spike", False, "float32").state
    weight = "model/middle.weight" if model == "tied" else "model/last.weight"
    for other in (out, applied):
        assert float((plain[weight] - other[weight]).abs().max()) > 1e-3 * float(plain[weight].abs().max())
    assert float((applied[weight] - out[weight]).abs().max()) > 1e-3 * float(plain[weight].abs().max())
    assert float(plain[f"optimizer/{weight.removeprefix('model/')}/step"]) == STEPS
    assert all(bool(other.isfinite().all()) for other in oracle(model, "nan", True, "float32").state.values())
    names = {"batchnorm": {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}}
    names |= {"buffer": {"seen", "count"}}
    for name in names.get(model, ()):
        assert not buffers[name].equal(moved[name]), "a step that is left out moves no buffer"


OWN = parse("single-plain-1-mlp-0-none-stop-float32-now-none-own-sum")


def _after_a_resume(step, whole, own=matrix_oracle._own_factor):
    return (own if step < BAD else matrix_oracle._factor)(step, whole)


@pytest.mark.parametrize("precision", FACTORS["precision"])
@pytest.mark.parametrize(
    ("name", "mistaken"),
    [("_own_factor", matrix_oracle._factor), ("_own_factor", _after_a_resume), ("SILENT", -1), ("MOMENTUM", 0.5)],
    ids=["schedule ignored", "schedule ignored after a resume", "None taken for no schedule", "another momentum"],
)
def test_a_mistake_in_what_is_the_tasks_own_is_noticed(precision, name, mistaken, monkeypatch):
    case = OWN._replace(precision=precision)
    wanted = oracle("mlp", "none", False, precision, "own")
    monkeypatch.setattr(matrix_oracle, name, mistaken)
    other = oracle.__wrapped__("mlp", "none", False, precision, "own")
    assert compared(case, other.state, wanted.state)
    if precision == "float32":
        assert compared_evaluations(case, list(other.evaluations.items()), wanted.evaluations)


def test_missing_doubled_or_miscounted_evaluation_is_noticed():
    wanted = oracle("mlp", "none", False, "float32", "own").evaluations
    found = list(wanted.items())
    assert list(wanted) == [4, 8, STEPS]
    assert not compared_evaluations(OWN, found, wanted)
    assert all(compared_evaluations(OWN, other, wanted) for other in (found[1:], [*found, found[-1]]))
    more = {"items": found[-1][1]["items"] + 1}
    assert compared_evaluations(OWN, [*found[:-1], (STEPS, found[-1][1] | more)], wanted)


@pytest.mark.parametrize("lost", ["nothing", "all", "load_state_dict"])
def test_the_tasks_state_that_is_lost_in_a_resume_is_noticed(lost):
    """The task's own counters over all steps; before the last of them they go through a checkpoint, or do not."""
    task, model = Own("mlp", "none", "."), matrix_oracle.make("mlp")
    batch = {name: value[None] for name, value in task.dataset("train")[0].items()}
    for step in range(STEPS):
        if step == BAD:
            before, task = task.state_dict(), Own("mlp", "none", ".")
            for name, tensor in task.state_dict().items() if lost != "all" else ():
                tensor.copy_(before[name])
            if lost == "nothing":
                task.load_state_dict(task.state_dict())
        for _ in range(2):
            task.loss(model, batch | {"step": torch.tensor([step])})
    found = {f"task/{name}": tensor for name, tensor in task.state_dict().items()}
    assert bool(compared(OWN, found, matrix_oracle._seen(range(STEPS)))) == (lost != "nothing")


def test_a_mistake_in_options_beyond_the_defaults_is_noticed(monkeypatch):
    """A short step that is taken, or left out of a plan that still has it; another rate or momentum; no rule."""
    case = OWN._replace(task="options")
    wanted = oracle("mlp", "none", False, "float32", "options")
    others = [oracle("mlp", "none", False, "float32", "default", steps) for steps in (STEPS, STEPS - 1)]
    cycle, undone = matrix_oracle._cycle(STEPS - 1), oracle.__wrapped__
    for name, value in (
        ("_cycle", lambda whole, made=matrix_oracle._cycle: made(STEPS)),
        ("_cycle", lambda whole: [(share, 0.9) for share, _ in cycle]),
        ("_twice_for_biases", matrix_oracle.groups),
        ("_learn", lambda *_: None),
        ("DECAY", 0.5),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(matrix_oracle, name, value)
            others.append(undone("mlp", "none", False, "float32", "options"))
    assert all(compared(case, other.state, wanted.state) for other in others)


@pytest.mark.parametrize(
    "mistaken", [{"momentum": 0.9}, {"nesterov": False}, {"ns_steps": 4}, {"adjust_lr_fn": "original"}], ids=str
)
def test_a_mistake_in_muon_is_noticed(mistaken, monkeypatch):
    case, made = OWN._replace(task="muon"), torch.optim.Muon
    wanted = oracle("mlp", "none", False, "float32", "muon")
    monkeypatch.setattr(torch.optim, "Muon", lambda params, **settings: made(params, **settings | mistaken))
    assert compared(case, oracle.__wrapped__("mlp", "none", False, "float32", "muon").state, wanted.state)


@pytest.mark.parametrize("name", ["CLIP", "_JUDGED", "_MOMENTUM"])
def test_mistake_in_own_steps_exceeds_the_rounding_of_bf16(name, monkeypatch):
    """The judge's gradients keep few digits, those that it gives to others keep theirs."""
    case, asked = OWN._replace(model="batchnorm", task="manual", precision="bf16"), ("batchnorm", "nan", True, "bf16")
    wanted, rounding = manual_oracle(*asked, STEPS).state, manual_rounding(*asked, STEPS)
    monkeypatch.setattr(matrix_lightning, name, 1.5 * getattr(matrix_lightning, name))
    other = manual_oracle.__wrapped__(*asked, STEPS).state
    assert compared(case, other, wanted, rounding)


def test_overflow_halves_the_scale_and_a_skipped_spike_does_not():
    scales = {
        (model, fault): float(oracle(model, fault, True, "fp16").state["scaler/scale"])
        for model in ("mlp", "tied")
        for fault in ("none", "spike", "nan")
    }
    assert scales["mlp", "none"] == scales["mlp", "spike"] == 2.0**16
    assert scales["mlp", "nan"] == scales["tied", "none"] == 2.0**15, "its first step overflows"
    assert scales["tied", "spike"] == scales["tied", "nan"] == 2.0**14, "here the spike overflows float16, and is none"
    assert float(oracle("mlp", "nan", True, "fp16").state["scaler/good_steps"]) == STEPS - BAD - 1
