"""The parts of a comparison, without processes: tensors, tolerances, the order of stages, operations, tasks."""

import copy
import inspect
import json
import math

import pytest
import torch
from torch import nn

from lockstep.checkpoint.layout import TensorBox
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.task import Task
from lockstep.verify import certificate
from lockstep.verify.compare import Traces, first_difference, join_replicas
from lockstep.verify.operations import DtypeTracker, OperationLog, digest, first_unequal
from lockstep.verify.reference import TensorStore, compare, cut
from lockstep.verify.request import REFERENCE, STAGES, Combination, Difference, TableRow, VerifyTable, combine, refusal
from lockstep.verify.tolerance import EXACT, Scales, Tolerance, unit_roundoff
from lockstep.verify.verification import nonfinite_values
from lockstep.verify.wrappers import PreparedTask, TaskWrapper


def part(**changes):
    same = {"digests": {"a": "1"}, "first": None, "missing": [], "equal": True, "parts": {"a": [1.0, 1.0, 1.0]}}
    return {**same, **changes}


def record(step=0, **changes):
    slot = {"micro": 0, "weight": 1.0, "items": 4, "data": {"": "d"}, "seeded": "s", "drawn": "t"}
    own = {
        "step": step,
        "slots": [{**slot, "loss": 2.0, "scaled": 0.5}],
        "changed": [],
        "updates": 1,
        "rates": [0.1],
        "items": 4,
        "factor": 1.0,
        "norm": 1.0,
        "gradient_dtype": "float64",
    }
    kinds = {kind: part() for kind in ("initial", "weights", "buffers", "optimizer", "gradient")}
    return {**own, **kinds, **changes}


WRONG = {"name": "a", "values": [1.0, 2.0], "at": [3], "difference": 1.0, "allowed": 0.0}


def traced(change, tolerance=EXACT, clip=0.0):
    """The first difference of one rank whose third step `change` has altered."""
    steps = [record(step) for step in range(4)]
    reference = {"rank": 0, "steps": steps, "evaluation": {"step": 4, "loss": 1.0, "items": 9, "metrics": {"m": 0.5}}}
    other = copy.deepcopy(reference) | {"resumed": []}
    change(other["steps"][2])
    return first_difference(Traces(reference, [other], tolerance, clip))


def test_equal_traces_have_no_difference():
    assert traced(lambda step: None) is None


# what is altered -> the stage that must be named; in the order of the stages
ALTERED = {
    "initial weights": lambda step: step["initial"].update(first=WRONG),
    "weights": lambda step: step["changed"].append(["weights", "a"]),
    "data": lambda step: step["slots"][0].update(data={"": "other"}),
    "randomness": lambda step: step["slots"][0].update(drawn="other"),
    "forward": lambda step: step["slots"][0].update(loss=2.1),
    "normalisation": lambda step: step["slots"][0].update(scaled=0.6),
    "buffers": lambda step: step["buffers"].update(first=WRONG),
    "reduction": lambda step: step["gradient"].update(first=WRONG),
    "clipping": lambda step: step.update(norm=2.0),
    "optimizer": lambda step: step["weights"].update(first=WRONG),
    "schedule": lambda step: step.update(factor=0.9, rates=[0.09]),
    "optimizer state": lambda step: step["optimizer"].update(first=WRONG),
}


@pytest.mark.parametrize("stage", ALTERED)
def test_each_stage_is_named(stage):
    found = traced(ALTERED[stage])
    assert (found.step, found.stage, found.rank) == (2, stage, 0)


@pytest.mark.parametrize(
    ("items", "loss", "metric", "stage", "where"),
    [
        (9, 1.0 + 9e-6, 0.5, "evaluation kernels", "loss"),
        (9, 1.0 + 1e-15, 0.5, "evaluation kernels", "loss"),
        (9, 1.0 + 1.1e-5, 0.5, "evaluation", "loss"),
        (10, 1.0 + 1e-15, 0.5, "evaluation", "items"),
        (9, 1.0, 0.5 + 1e-15, "evaluation", "m"),
        (9, math.nan, 0.5, "evaluation", "loss"),
    ],
)
def test_other_kernels_in_an_evaluation_are_no_lost_samples(items, loss, metric, stage, where):
    evaluation = {"step": 4, "loss": 1.0, "items": 9, "metrics": {"m": 0.5}}
    reference = {"rank": 0, "steps": [], "evaluation": evaluation}
    other = {"rank": 1, "resumed": [], "steps": [], "evaluation": {**evaluation, "items": items, "loss": loss}}
    other["evaluation"]["metrics"] = {"m": metric}
    found = first_difference(Traces(reference, [other], EXACT, 1.0))
    assert (found.stage, found.where, found.rank) == (stage, where, 1)
    assert ("other kernels" in STAGES[stage]) is (stage == "evaluation kernels")


def test_of_several_differences_the_earliest_stage_is_named():
    names = [name for name in ALTERED if name not in ("schedule", "clipping")]
    for place in range(len(names)):

        def alter(step, place=place):
            for name in names[place:]:
                ALTERED[name](step)

        assert traced(alter).stage == names[place]


def test_wrong_rate_by_the_schedule_is_not_the_optimizers():
    def alter(step):
        ALTERED["schedule"](step)
        ALTERED["optimizer"](step)

    assert traced(alter).stage == "schedule"


def test_one_wrong_gradient_is_named_though_clipping_moves_all():
    true, wrong = {"a": 3.0, "b": 4.0, "c": 1.0}, {"a": 3.0, "b": 8.0, "c": 1.0}
    norms = [math.hypot(*gradients.values()) for gradients in (true, wrong)]
    clipped = {name: (wrong[name] / norms[1], true[name] / norms[0]) for name in true}
    parts = {name: [mine**2, wanted**2, mine * wanted] for name, (mine, wanted) in clipped.items()}

    def change(step):
        step.update(norm=norms[1] / norms[0])  # the reference's is 1
        step["gradient"].update(first=WRONG, parts=parts)

    found = traced(change, clip=1.0)
    assert (found.stage, found.where) == ("reduction", "b")
    assert "before clipping it is off by 1 of its norm" in found.text


def test_short_gradient_is_clipping_or_reduction_by_its_norm():
    def half(step):
        step["gradient"].update(first=WRONG, parts={"a": [0.25, 1.0, 0.5]})

    assert traced(half, clip=1.0).stage == "clipping"
    assert traced(lambda step: (half(step), step.update(norm=0.5)), clip=1.0).stage == "reduction"


def test_a_shard_counts_once_however_many_ranks_hold_it():
    """Two copies of a model on two shards each, and a scale that every rank has whole."""
    places, shards = ([0], [2], [0], [2]), ([9.0, 9.0, 9.0], [16.0, 16.0, 16.0])
    gradients = [
        part(parts={"a": shards[place[0] // 2], "scale": [11.0, 11.0, 11.0]}, offsets={"a": place}) for place in places
    ]
    whole = record(norm=6.0, gradient=part())
    steps = [{**whole, "gradient": gradient, "slots": whole["slots"][rank:]} for rank, gradient in enumerate(gradients)]
    ranks = [{"rank": rank, "resumed": [], "steps": [step]} for rank, step in enumerate(steps)]
    assert first_difference(Traces({"rank": 0, "steps": [whole]}, ranks, EXACT)) is None


def test_traces_of_a_replica_are_joined_by_their_coordinates():
    """Of 2 stages x 2 parts of sequences x 2 parts of layers, the tensor ranks closest."""
    ranks = []
    for rank in range(8):
        slot = {"loss": float(2**rank), "scaled": None, "drawn": f"{rank}"}
        part_of = {"digests": {}, "parts": {f"stage {rank // 4}": []}, "missing": ["stage 0", "stage 1", "nowhere"]}
        ranks.append({"rank": rank, "steps": [{"slots": [slot], "loss_dtype": "", "weights": part_of}]})
    for rank, trace in enumerate(join_replicas(ranks, Parallel(tensor=2, context=2, pipeline=2))):
        (step,) = trace["steps"]
        # The sum over the context ranks of the last stage.
        assert step["slots"][0]["loss"] == (2**5 + 2**7 if rank % 2 else 2**4 + 2**6)
        assert step["slots"][0]["drawn"] == f"{4 + rank % 4}"
        assert step["weights"]["missing"] == ["nowhere"]


def test_missing_or_doubled_micro_batch_is_a_data_difference():
    found = traced(lambda step: step["slots"].append(dict(step["slots"][0])))
    assert (found.stage, found.where) == ("data", "micro-batches")


def test_the_evaluation_comes_last():
    reference = {"rank": 0, "steps": [], "evaluation": {"step": 4, "loss": 1.0, "items": 9, "metrics": {"m": 0.5}}}
    other = copy.deepcopy(reference)
    other["evaluation"]["metrics"]["m"] = 0.6
    found = first_difference(Traces(reference, [other], EXACT))
    assert (found.step, found.stage, found.where) == (4, "evaluation", "m")


def test_ranks_that_should_be_bitwise_equal_are_compared():
    reference = {"rank": 0, "steps": [record()]}
    ranks = [copy.deepcopy(reference) | {"rank": rank, "resumed": []} for rank in (0, 1)]
    for rank in ranks:  # two ranks share the step; the micro-batch is the first one's
        rank["steps"][0]["slots"] = rank["steps"][0]["slots"][rank["rank"] :]
    ranks[1]["steps"][0]["weights"]["digests"] = {"a": "2"}
    found = first_difference(Traces(reference, ranks, Tolerance(10, 2.0**-53, 2.0**-53)))
    assert (found.stage, found.rank, found.where) == ("optimizer", 1, "a")
    assert "rank 0" in found.text


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (4, 3)])
def test_the_store_gives_back_what_was_written(tmp_path, dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    TensorStore(tmp_path).write("weights", 3, [("one", tensor), ("two", tensor.t() if tensor.ndim == 2 else tensor)])
    stored = TensorStore(tmp_path).read("weights", 3)
    assert stored.names == ["one", "two"]
    assert stored["one"].dtype == dtype
    assert torch.equal(stored["one"], tensor)
    assert torch.equal(stored["two"], tensor.t() if tensor.ndim == 2 else tensor)
    assert TensorStore(tmp_path).read("weights", 4).names == []


def held(tmp_path, mine, theirs, allowed=-1.0):
    TensorStore(tmp_path).write("weights", 0, theirs.items())
    return compare(mine.items(), TensorStore(tmp_path).read("weights", 0), lambda *_: allowed)


def test_tensors_are_compared_by_bits_or_by_norm(tmp_path):
    wanted = {"a": torch.ones(2, 3), "b": torch.zeros(2)}
    assert held(tmp_path, wanted, wanted)["equal"]
    off = {"a": torch.ones(2, 3), "b": torch.zeros(2)}
    off["a"][1, 2] += 0.25
    found = held(tmp_path, off, wanted)
    assert not found["equal"]
    assert found["first"] == {"name": "a", "values": [1.25, 1.0], "at": [1, 2], "difference": 0.25, "allowed": -1.0}
    assert found["largest"] == [0.25, "a"]
    assert held(tmp_path, off, wanted, 0.3)["first"] is None
    assert held(tmp_path, off, wanted, lambda place: torch.full((6,), 0.05, dtype=torch.float64)[place])["first"]


def test_of_a_complex_tensor_both_parts_are_compared(tmp_path):
    wanted = {"a": torch.full((2, 3), 3 + 4j)}
    off = {"a": wanted["a"].clone()}
    off["a"][1, 2] += 0.25j
    found = held(tmp_path, off, wanted)
    assert found["first"] == {"name": "a", "values": [4.25, 4.0], "at": [1, 2, 1], "difference": 0.25, "allowed": -1.0}
    assert found["parts"]["a"][1] == 6 * 25.0
    assert held(tmp_path, off, wanted, 0.3)["first"] is None
    assert held(tmp_path, off, wanted, 0.2)["first"]
    assert held(tmp_path, wanted, wanted)["equal"]


@pytest.mark.parametrize("value", [-0.0, math.nan, math.inf])
def test_sign_of_zero_and_not_finite_numbers_count_as_bits(tmp_path, value):
    wanted = {"a": torch.zeros(2)}
    mine = {"a": torch.tensor([0.0, value])}
    assert held(tmp_path, mine, wanted)["first"]
    assert bool(held(tmp_path, mine, wanted, 1.0)["first"]) == (value != 0)
    assert held(tmp_path, mine, mine)["equal"]


def test_names_shapes_and_dtypes_must_agree(tmp_path):
    wanted = {"a": torch.zeros(2)}
    assert held(tmp_path, {"b": torch.zeros(2)}, wanted)["missing"] == ["b", "a"]
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        assert held(tmp_path, {"a": other}, wanted, 1.0)["first"]["difference"] == math.inf


def test_a_part_of_a_tensor_is_compared_with_its_place():
    whole = torch.arange(12).reshape(4, 3)
    assert torch.equal(cut(whole, TensorBox((2, 0), (1, 3))), whole[2:3])
    assert cut(whole, TensorBox((4, 0), (0, 3))).numel() == 0


def test_the_tolerance_grows_with_terms_and_steps_and_is_cut():
    fine = Tolerance(10, unit_roundoff("float64"), unit_roundoff("float64"))
    assert fine.relative(0) == 32 * 10 * 2.0**-53
    assert fine.relative(0) < fine.relative(1) < fine.relative(7) < 1e-12
    assert Tolerance(20, 2.0**-53).relative(0) == 2 * Tolerance(10, 2.0**-53).relative(0)
    assert Tolerance(10**9, 2.0**-8).relative(0) == 0.25
    assert EXACT.relative(5) == 0.0
    assert EXACT.close(3, math.nan, math.nan)
    assert not EXACT.close(3, 1.0, 1.0 + 2.0**-52)


def test_cancelled_gradient_may_move_a_weight_by_its_rate():
    scales = Scales(norm=1.0, travel=0.1, beta2=0.95, eps=1e-8)
    tolerance = Tolerance(10, unit_roundoff("float32"), unit_roundoff("float32"))
    second = torch.tensor([1e-18, 1e-4]) * 0.05
    allowed = tolerance.weights(0, torch.zeros(2), second, scales)(slice(0, 2))
    assert allowed[0] == pytest.approx(0.2)
    assert allowed[1] < 1e-4


def test_what_a_weight_may_be_off_is_the_formula_of_the_document():
    """docs/inside/verify.md, with n = 10 terms, u = v = 2^-24, L = 0.1, and a step that is not the first."""
    k, u, norm, travel, beta2, eps = 3, 2.0**-24, 2.0, 0.1, 0.95, 1e-8
    weights, second = [3.0, -0.5], [1e-4, 4e-4]
    unbiased = [value / (1 - beta2 ** (k + 1)) for value in second]
    relative = 32 * 10 * u * (k + 1) + 16 * u
    error = relative * math.sqrt(sum(unbiased) / 2) + (4 * 10 * u + u / 64) * norm
    wanted = [
        travel * min(2, 2 * error / (math.sqrt(v) + eps)) + 4 * (k + 2) * u * abs(w)
        for w, v in zip(weights, unbiased, strict=True)
    ]
    found = Tolerance(10, u, u).weights(
        k, torch.tensor(weights), torch.tensor(second, dtype=torch.float64), Scales(norm, travel, beta2, eps)
    )
    assert found(slice(0, 2)).tolist() == pytest.approx(wanted, rel=1e-9)


def test_sums_in_another_order_stay_within_the_tolerance():
    """The bound on one sum, held against many: n terms, added forwards and backwards."""
    generator = torch.Generator().manual_seed(0)
    for terms in (2, 8, 64):
        parts = torch.randn(terms, 1000, generator=generator)
        forwards, backwards = parts[0].clone(), parts[-1].clone()
        for k in range(1, terms):
            forwards += parts[k]
            backwards += parts[-1 - k]
        error = torch.linalg.vector_norm((forwards - backwards).double())
        assert error <= Tolerance(terms, unit_roundoff("float32")).relative(0) * torch.linalg.vector_norm(forwards)


def test_the_coarsest_dtype_is_seen():
    layer = nn.Linear(4, 4, dtype=torch.float64)
    with DtypeTracker() as seen:
        layer(torch.zeros(2, 4, dtype=torch.float64)).sum().backward()
    assert seen.name == "float64"
    with seen, torch.autocast("cpu", torch.bfloat16):
        nn.Linear(4, 4)(torch.zeros(2, 4))
    assert seen.name == "bfloat16"


def test_operation_log_names_the_module_that_differs_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    lines = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with OperationLog(model) as log:
            model(torch.ones(2, 4)).sum().backward()
        lines.append(log.lines)
    place, (module, operation, _), _ = first_unequal(*lines)
    assert module == "1 (Dropout)"
    assert "dropout" in operation or "bernoulli" in operation
    assert first_unequal(lines[0], lines[0]) is None
    assert first_unequal(lines[0], lines[0][:3])[0] == 3
    assert place > 0
    assert not model._forward_hooks


def test_combinations():
    found = combine(["single", "ddp"], [2, 1], compiled=False)
    assert [str(one) for one in found] == ["single x1", "ddp x1", "ddp x2"]
    assert [str(one) for one in combine(["ddp"], [2], compiled=True)] == [
        "single x1",
        "single x1 compiled",
        "ddp x2",
        "ddp x2 compiled",
    ]
    assert refusal(Combination("ddp", 3), Config(exact=True, batch_size=4, micro_batch_size=2)).startswith(
        "--exact needs a micro-batch for each of 3 processes"
    )
    assert refusal(Combination("ddp", 3), Config(exact=True)) is None  # the model may decide
    assert refusal(Combination("ddp", 3), Config()) is None


def test_a_table_says_everything_in_words():
    difference = Difference(3, "reduction", "head.weight", 1, "[0] is 1.0 instead of 2.0", [1, 2])
    rows = [TableRow(REFERENCE, "equal"), TableRow(Combination("ddp", 4), "different", difference=difference)]
    table = VerifyTable("title", rows)
    assert not table.ok
    assert "DIFFERENT from step 4, rank 1 (and 2), head.weight: [0] is 1.0 instead of 2.0. Cause: reduction" in str(
        table
    )
    assert all(STAGES.values())
    assert not VerifyTable("title", [TableRow(REFERENCE, "unavailable", reason="no")]).ok
    assert not VerifyTable("title", [TableRow(REFERENCE, "not proved", reason="no")]).ok


@pytest.mark.parametrize(
    ("losses", "skips", "proved"),
    [
        ([1.0, 0.5], False, True),
        ([1.0, math.nan], False, False),
        ([1.0, math.inf], False, False),
        ([1.0, math.nan], True, True),
        ([math.nan, math.nan], True, False),
    ],
)
def test_losses_that_are_not_finite_prove_nothing(losses, skips, proved):
    reference = {"steps": [{"slots": [{"loss": loss}, {"loss": None}], "norm": 1.0} for loss in losses]}
    assert (nonfinite_values(reference, skips=skips) == "") is proved
    gradients = {"steps": [{"slots": [{"loss": 1.0}], "norm": loss} for loss in losses]}
    assert (nonfinite_values(gradients, skips=skips) == "") is proved


def test_floating_point_data_follows_the_model_into_float64():
    class Nested(Task):
        reduction = "mean"

        def model(self):
            return nn.Linear(1, 1)

        def loss(self, model, batch):
            return model(batch["x"]).mean()

        def collate(self, samples):
            return {"x": torch.ones(2), "y": (torch.ones(2, dtype=torch.int64), [torch.ones(1)]), "z": "text"}

        def dataset(self, split):
            return list(range(100)) if split == "train" else [7, 8, 9]

    task = PreparedTask(Nested(), wide=True, samples=2)
    batch = task.collate([])
    assert batch["x"].dtype == batch["y"][1][0].dtype == torch.float64
    assert batch["y"][0].dtype == torch.int64
    assert (len(task.dataset("train")), list(task.dataset("evaluation"))) == (100, [7, 8])
    assert PreparedTask(Nested(), wide=False, samples=2).collate([])["x"].dtype == torch.float32


def test_a_wrapped_task_passes_on_every_method_and_value():
    class Answering:
        """Each method says which it is, each value which it is."""

        def __getattribute__(self, name):
            return name if name in Task.__annotations__ else lambda *_: name

    answering = Answering()
    wrapper = TaskWrapper(answering)
    for name, value in vars(Task).items():
        if callable(value) and not name.startswith("_"):
            arguments = [None] * (len(inspect.signature(value).parameters) - 1)
            assert getattr(wrapper, name)(*arguments) == name
    assert all(getattr(wrapper, name) == name for name in Task.__annotations__)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a certificate"),
        ("[]", "is not a certificate"),
        ('{"format": 1}', "is an incomplete certificate"),
        (json.dumps({"format": 9, "trace": {"steps": [1]}}), "has format 9"),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path, text, words):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        certificate.read(tmp_path / "c.json")


def test_a_digest_is_of_the_bits():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([[1, 2], [3, 4]]).t()) == digest(torch.tensor([[1, 3], [2, 4]]))
