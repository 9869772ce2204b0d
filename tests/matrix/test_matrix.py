"""Every pair of parts together: generated runs, each compared with a plain PyTorch loop, exact ones bit for bit.

The covering sets have each pair of two factors' values that a run can have, and each triple where nobody is killed.
`make test-full` draws more runs from all:

    MATRIX_SEED=7 MATRIX_COUNT=200 make test-full       the seed is printed, and drawn where none is given
    MATRIX_CASES="ddp-exact-2-mlp-0-nan-skip-fp16-late-none" make matrix        these alone
"""

import itertools
import os
from operator import itemgetter

import pytest
from matrix_cases import FACTORS, SEED, Case, covering, everything, parse, reference, refusal, sample, tuples, valid
from matrix_oracle import oracle
from matrix_run import NAME, play, settings, starts
from matrix_subject import BAD, STEPS, Subject
from matrix_verdict import verdict
from ranks import run

import lockstep
from lockstep.errors import LockstepError

RUNS = everything()
PAIRS = covering(RUNS, 2)
# A killed process costs seconds: in these nobody is.
TRIPLES = covering([case for case in RUNS if case.fault != "killed"], 3, having=PAIRS)

ASKED = [parse(line) for line in os.environ.get("MATRIX_CASES", "").split()]
DRAWN = ASKED or sample(int(os.environ.get("MATRIX_COUNT") or 120), SEED)

pytestmark = pytest.mark.timeout(1800)  # the first test of a session plays the cases of all


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """The folder in which the cases of this session's tests were played, many in each group of processes."""
    root = tmp_path_factory.mktemp("matrix")
    found = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    cases = [case for case in found if isinstance(case, Case)]
    play(cases + [reference(case) for case in cases if case.exact], root)
    return root


def judge(case, root, how):
    problems = verdict(case, root)
    again = f'MATRIX_CASES="{case}" make matrix'
    assert not problems, "\n".join([f"{case} ({how}); alone: {again}", *problems])


@pytest.mark.parametrize("case", [] if ASKED else PAIRS, ids=str)
def test_every_pair_of_parts(case, played):
    judge(case, played, "of the covering set")


@pytest.mark.slow
@pytest.mark.parametrize("case", [] if ASKED else TRIPLES, ids=str)
def test_every_triple_of_parts(case, played):
    judge(case, played, "of the covering set of triples")


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_a_sample_of_all_combinations(case, played):
    judge(case, played, "asked for" if ASKED else f"drawn with MATRIX_SEED={SEED}")


def test_the_covering_sets_have_every_pair_and_triple_that_a_run_can_have():
    covered, alive = PAIRS + TRIPLES, [case for case in RUNS if case.fault != "killed"]
    assert all(valid(case) for case in covered)
    for size, runs in ((2, RUNS), (3, alive)):
        for places in itertools.combinations(range(len(FACTORS)), size):
            values = itemgetter(*places)
            assert {*map(values, covered)} >= {*map(values, runs)}, places
    every = {frozenset(pair) for a, b in itertools.combinations(FACTORS, 2) for pair in _values(a, b)}
    assert every - {frozenset(pair) for case in covered for pair in tuples(case, 2)} == {
        *(frozenset({("engine", "single"), ("world", world)}) for world in (2, 3, 4)),
        frozenset({("sums", "exact"), ("world", 3)}),
        frozenset({("sums", "exact"), ("model", "buffer")}),
    }


def _values(a, b):
    return {((a, x), (b, y)) for x in FACTORS[a] for y in FACTORS[b]}


def test_a_case_is_named_by_its_line():
    cases = PAIRS
    assert [parse(str(case)) for case in cases] == cases
    for line in ("", "ddp", str(cases[0]).replace("plain", "rough"), f"{cases[0]}-more"):
        with pytest.raises(ValueError, match="names no case"):
            parse(line)


def refused(world, cases, root):
    said = []
    for case in cases:
        folder = root / str(case)
        folder.mkdir(exist_ok=True)
        try:
            lockstep.train(settings(starts(case)[0], folder), Subject(case.model, case.fault, folder), world)
            said.append("")
        except LockstepError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_no_run_is_refused_in_one_line(world, tmp_path):
    base = parse("ddp-plain-1-mlp-0-none-stop-float32-now-none")._replace(world=world)
    cases = [base._replace(engine="single")] if world > 1 else []
    model = "mlp" if world == 3 else "buffer"
    cases += [base._replace(engine=engine, sums="exact", model=model) for engine in ("ddp", "zero", "fsdp")]
    assert all(refusal(case) for case in cases)
    for said in run(refused, world, cases, tmp_path):
        for case, line in zip(cases, said, strict=True):
            assert refusal(case) in line, case
            assert "\n" not in line
    early = [case for case in cases if case.model != "buffer"]  # which a forward must have moved first
    assert not [case for case in early if (tmp_path / str(case) / NAME).exists()]


@pytest.mark.parametrize("model", FACTORS["model"])
def test_the_oracle_sees_each_part_that_it_is_to_see(model):
    """A comparison with an oracle that is blind would always pass: what a mistake changes must be beyond rounding."""
    plain, buffers = oracle(model, "none", False, "float32")
    out, moved = oracle(model, "spike", True, "float32")
    applied, _ = oracle(model, "spike", False, "float32")
    weight = "model/middle.weight" if model == "tied" else "model/last.weight"
    for other in (out, applied):
        assert float((plain[weight] - other[weight]).abs().max()) > 1e-3 * float(plain[weight].abs().max())
    assert float((applied[weight] - out[weight]).abs().max()) > 1e-3 * float(plain[weight].abs().max())
    assert float(plain[f"optimizer/{weight.removeprefix('model/')}/step"]) == STEPS
    assert all(bool(other.isfinite().all()) for other in oracle(model, "nan", True, "float32")[0].values())
    names = {"batchnorm": {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}}
    names |= {"buffer": {"seen", "count"}}
    for name in names.get(model, ()):
        assert not buffers[name].equal(moved[name]), "a step that is left out moves no buffer"


def test_an_overflow_halves_the_scale_and_a_spike_that_is_left_out_does_not():
    scales = {
        (model, fault): float(oracle(model, fault, True, "fp16")[0]["scaler/scale"])
        for model in ("mlp", "tied")
        for fault in ("none", "spike", "nan")
    }
    assert scales["mlp", "none"] == scales["mlp", "spike"] == 2.0**16
    assert scales["mlp", "nan"] == scales["tied", "none"] == 2.0**15, "its first step overflows"
    assert scales["tied", "spike"] == scales["tied", "nan"] == 2.0**14, "here the spike overflows float16, and is none"
    assert float(oracle("mlp", "nan", True, "fp16")[0]["scaler/good_steps"]) == STEPS - BAD - 1
