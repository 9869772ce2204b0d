"""Mistakes planted in a plain loop are named with step, stage and cause; what is healthy is not."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import plain_loop
import pytest
from ranks import run
from refusals import names

from lockstep.trace.compare.judge import compare_runs
from lockstep.trace.compare.reading import FOLDER_FILE, FORMAT, read, summary


def traced(world, folder, mistake, settings):
    return plain_loop.recorded(world, folder, mistake, **settings)


def plainly(world, mistake, settings):
    return plain_loop.plainly(world, mistake, **settings)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The trace of the correct loop on one process, with these settings; each is made once."""

    @functools.cache
    def made(items):
        folder = tmp_path_factory.mktemp("one") / "trace"
        run(traced, 1, folder, "", dict(items))
        return read(folder)

    return lambda **settings: made(tuple(sorted(settings.items())))


@pytest.fixture
def two(tmp_path):
    def made(mistake="", world=2, name="two", **settings):
        run(traced, world, tmp_path / name, mistake, settings)
        return read(tmp_path / name)

    return made


FOUND = {  # mistake: step, stage, cause, rank, settings
    "same-seed": (0, "randomness", "equal-draws", 1, {"dropout": 0.3}),
    "per-rank-weights": (0, "initial weights", "rank-weights", 1, {}),
    "overlapping-data": (0, "data", "overlapping", 1, {}),
    "unsent-gradient": (2, "reduction", "unreduced", 1, {}),
    "rank-average": (0, "normalisation", "rank-average", -1, {"ragged": True, "dtype": "autocast"}),
    "other-rate": (3, "optimizer", "rank-rate", 1, {}),
    "extra-step": (3, "optimizer", "extra-step", 1, {}),
    "bit-flip": (4, "weights", "changed-weights", 1, {}),
    "clip-before-unscale": (0, "clipping", "clip-before-unscale", -1, {"clip": 0.5, "scale": 16.0}),
    "padded-evaluation": (5, "evaluation", "padded-evaluation", 1, {}),
}
FOUND_TOO = {
    "same-masks": (0, "randomness", "repeated-draws", 0, {"dropout": 0.3}),
    "no-ddp": (0, "reduction", "unreduced", 1, {}),
    "bare-call": (0, "reduction", "unreduced", 1, {}),
    "world-rate": (0, "optimizer", "world-rate", -1, {}),
    "own-score": (5, "evaluation", "rank-evaluation", -1, {}),
    "schedule": (1, "schedule", "schedule-ranks", -1, {}),
    "set-epoch": (6, "data", "set-epoch", -1, {"epochs": 2}),
    "batch-size": (0, "data", "batch-size", -1, {"steps": 3}),
    "other-shuffle": (0, "data", "other-shuffle", -1, {}),
    "accumulation": (0, "normalisation", "scaled-loss", -1, {"micro": 2}),
}


@pytest.mark.parametrize("mistake", [*FOUND, *(pytest.param(name, marks=pytest.mark.slow) for name in FOUND_TOO)])
def test_a_mistake_is_named(mistake, one, two):
    step, stage, cause, rank, settings = (FOUND | FOUND_TOO)[mistake]
    found = compare_runs(one(**settings), two(mistake, **settings)).finding
    assert found is not None
    assert (found.step, found.stage, found.cause, found.rank) == (step, stage, cause, rank), str(found)


UNTRAINED = {  # mistake of one process: step, stage, cause, tensor
    "no-zero-grad": (1, "gradient", "kept-gradient", "all gradients"),
    "frozen": (0, "parameters", "frozen", "first.bias"),
    "outside": (0, "parameters", "outside-optimizer", "first.bias"),
    "other-parameters": (0, "parameters", "stale-optimizer", "first.weight"),
    "detached": (0, "gradient", "no-gradient", "first.weight"),
}


@pytest.mark.parametrize("mistake", UNTRAINED)
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_not_trained_is_named_for_what_it_is(mistake, turned, one, two):
    """Whichever of the two runs has the mistake; clipping hides how long a gradient was."""
    clip = 0.3 if mistake == "no-zero-grad" and turned else 0.0
    pair = one(clip=clip), two(mistake, world=1, clip=clip)
    found = compare_runs(*reversed(pair) if turned else pair).finding
    assert (found.step, found.stage, found.cause, found.where) == UNTRAINED[mistake], str(found)
    assert ("first" if turned else "second") in found.text


def test_reverted_perturbation_is_silent_and_a_lasting_one_named(one, two):
    """w + e - e is w but for its last places; where the restore is missing nothing begins with other weights."""
    for world in (1, 2):
        verdict = compare_runs(one(sam=0.3), two(world=world, name=f"sam{world}", sam=0.3))
        assert verdict.same, str(verdict)
        assert verdict.judged == 6
    for mistaken in (two("no-restore", world=1, name="kept", sam=0.3), two("no-restore", sam=0.3)):
        found = compare_runs(one(sam=0.3), mistaken).finding
        assert (found.step, found.stage, found.cause) == (0, "weights", "changed-weights"), str(found)


def test_processes_that_make_no_group_are_named(one, two):
    apart = two("no-ddp")
    for rank in apart.parts[0].ranks.values():
        rank.head["initialized"] = False
    found = compare_runs(one(), apart).finding
    assert (found.stage, found.cause) == ("reduction", "alone")


def test_batchnorm_of_each_rank_is_named(one, two):
    found = compare_runs(one(norm=True), two(norm=True)).finding
    assert (found.step, found.stage, found.cause, found.where) == (0, "buffers", "batchnorm", "norm")


@pytest.mark.parametrize(
    "settings",
    [
        {"shard": "fsdp2", "clip": 0.5},
        {"shard": "tensor", "clip": 0.5},
        {"shard": "2d", "world": 4},
        {"shard": "fsdp1"},
        {"ragged": True, "dtype": "autocast"},
        {"noise": True},
        pytest.param({"micro": 2}, marks=pytest.mark.slow),
        pytest.param({"epochs": 2, "clip": 0.1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_healthy_is_not_named(settings, one, two):
    alone = {key: value for key, value in settings.items() if key not in ("shard", "world")}
    verdict = compare_runs(one(**alone), two(**settings))
    assert verdict.finding is None
    assert not verdict.unproven
    assert verdict.judged == 6 * settings.get("epochs", 1)
    assert 0 < verdict.largest < (1e-2 if "dtype" in settings else 1e-5)
    text = "tensors whose gradients are rounding noise: 1, such as noise; their distance is not counted"
    assert verdict.notes == ([text] if "noise" in settings else [])


@pytest.mark.parametrize(
    ("mistake", "note"),
    [
        ("one-class", "every gradient is 0 in all 6 steps: nothing is trained; weight decay alone moves the weights"),
        ("no-rate", "the weights never change in 6 steps: nothing is trained (largest learning rate: 0)"),
        ("other-parameters", "no tensor of the optimizer has a gradient in any of the 6 steps: nothing is trained"),
    ],
)
def test_two_runs_that_train_nothing_are_said_to_be_bitwise(mistake, note, two):
    verdict = compare_runs(two(mistake, world=1, name="one"), two(mistake))
    assert (verdict.finding, verdict.unproven, verdict.bits) == (None, "", 6)
    assert verdict.notes == [note]
    assert verdict.same is (mistake != "other-parameters")  # of which no gradient can be compared


def test_ranks_sharing_samples_are_not_blamed_for_the_mistake(one, two):
    found = compare_runs(one(ragged=True), two("rank-average", world=4, shard="2d", ragged=True)).finding
    assert (found.step, found.stage, found.cause) == (0, "normalisation", "rank-average"), str(found)


def test_shards_whose_places_are_not_known_are_left_out(one, two):
    other = two(shard="tensor", mistake="bit-flip")
    assert compare_runs(one(), read(Path(other.name))).finding.where == "last.bias"
    for rank in other.parts[0].ranks.values():
        for table in rank.tables.values():
            for row, name in enumerate(table["names"]):
                table["starts"][row] = -1 if name.startswith("last") else table["starts"][row]
    verdict = compare_runs(one(), other)
    assert (verdict.word, verdict.notes) == ("NOT PROVED", [])
    assert "last.bias" in verdict.missing[0]


def test_models_own_generator_draws_differently_on_each_rank(one, two):
    assert compare_runs(one(generator="own"), two(generator="own")).word == "NOT PROVED"
    found = compare_runs(one(generator="own"), two(name="same", generator="same")).finding
    assert (found.step, found.stage, found.cause, found.rank) == (0, "randomness", "equal-draws", 1), str(found)


def test_dropout_cannot_agree_and_the_rest_is_still_compared(one, two):
    verdict = compare_runs(one(dropout=0.3), two(dropout=0.3))
    assert verdict.finding is None
    assert "draws random numbers" in verdict.unproven
    found = compare_runs(one(dropout=0.3), two("other-rate", name="rate", dropout=0.3)).finding
    assert (found.step, found.cause, found.rank) == (3, "rank-rate", 1)


def test_equal_runs_are_bitwise_and_a_recorder_changes_none(two, tmp_path):
    settings = {"dropout": 0.3, "ragged": True}
    watched = run(traced, 2, tmp_path / "watched", "", settings)
    assert run(plainly, 2, "", settings) == watched
    verdict = compare_runs(read(tmp_path / "watched"), two(**settings))
    assert (verdict.finding, verdict.bits, verdict.judged) == (None, 6, 6)


def test_two_versions_part_in_a_module(two):
    every = {"LOCKSTEP_TRACE_MODULES": "1"}
    one, other = two(world=1, name="one", variables=every), two("kernel", world=1, variables=every)
    verdict = compare_runs(one, other)
    assert (verdict.finding, verdict.bits) == (None, 3)
    assert verdict.notes == ["the bits first differ in step 4, in the output of norm"]
    seldom = compare_runs(two(world=1, name="three"), two("kernel", world=1, name="four"))
    assert names(seldom.notes[0], "step", "gradient", "first.weight", "--modules")


def test_a_run_against_its_own_resume(one, two, tmp_path):
    saved = str(tmp_path / "saved.pt")
    run(plainly, 1, "", {"steps": 3, "saved": saved})
    whole = one()
    verdict = compare_runs(whole, two(world=1, begin=3, saved=saved))
    assert (verdict.finding, verdict.bits, verdict.judged) == (None, 3, 3)
    assert names(verdict.notes[0], "step 3")
    made = compare_runs(whole, two("made-state", world=1, name="made", begin=3, saved=saved))
    assert (made.finding, made.bits, made.judged) == (None, 3, 3)
    for mistake, step, stage, cause in (
        ("late-resume", 3, "data", "late-resume"),
        ("early-resume", 3, "data", "early-resume"),
        ("no-state", 3, "optimizer state", "state"),
        ("no-schedule", 4, "schedule", "schedule-resume"),
    ):
        found = compare_runs(whole, two(mistake, world=1, name=mistake, begin=3, saved=saved)).finding
        assert (found.step, found.other, found.stage, found.cause) == (step, step - 3, stage, cause), str(found)


def test_a_start_that_begins_anew_replaces_what_was_before(one, two):
    """Of two starts that begin with the same weights the second is the run, also where the first went further."""
    for steps, starts in ((3, [3, 6]), (6, [6, 6])):
        two(name=f"anew{steps}", steps=steps)
        again = two(name=f"anew{steps}")
        assert [part.count for part in again.parts] == starts
        for pair in ((one(), again), (again, one())):
            verdict = compare_runs(*pair)
            assert (verdict.finding, verdict.judged, verdict.unproven) == (None, 6, ""), str(verdict)
    two("other-rate", name="cured")
    assert compare_runs(one(), two(name="cured")).finding is None
    found = compare_runs(one(), two("other-rate", name="cured")).finding
    assert (found.step, found.cause, found.rank) == (3, "rank-rate", 1)


def test_start_continues_after_the_step_of_its_weights(one, two, tmp_path):
    saved = str(tmp_path / "saved.pt")
    run(plainly, 1, "", {"steps": 3, "saved": saved})
    two(name="resumed", world=1, steps=5)  # two steps that the checkpoint knows nothing of
    verdict = compare_runs(one(), two(name="resumed", world=1, begin=3, saved=saved))
    assert (verdict.finding, verdict.bits, verdict.judged) == (None, 6, 6)


def test_what_a_kill_left_is_compared_as_far_as_it_goes(one, two):
    cut = two(name="cut")
    file = next(path for path in sorted(Path(cut.name).glob("rank00001*")))
    lines = file.read_bytes().splitlines(keepends=True)
    steps = [place for place, line in enumerate(lines) if json.loads(line)["t"] == "step"]
    file.write_bytes(b"".join(lines[: steps[4]]) + lines[steps[4]][:100])
    verdict = compare_runs(one(), read(Path(cut.name)))
    assert (verdict.word, verdict.judged, verdict.compared["gradients"]) == ("NOT PROVED", 4, 16)
    assert cut.name in verdict.missing[0]
    both = compare_runs(read(Path(cut.name)), read(Path(cut.name)))
    assert (both.word, both.bits, len(both.missing)) == ("NOT PROVED", 4, 2)


def test_the_files_of_two_nodes_are_put_together(two, tmp_path):
    """Each node has its own folder and its own clock: the second's is an hour behind. It is started twice."""
    nodes, shared = [tmp_path / "node0", tmp_path / "node1"], tmp_path / "first"
    for start in ("first", "second"):
        for file in Path(two(name=start).name).glob("rank*"):
            rank = int(file.name[4:9])
            head, rest = file.read_text().split("\n", 1)
            record = json.loads(head)
            node = nodes[rank]
            node.mkdir(exist_ok=True)
            (node / FOLDER_FILE).write_text(json.dumps({"format": FORMAT}))
            (node / file.name).write_text(json.dumps({**record, "time": record["time"] - 3600 * rank}) + "\n" + rest)
            if start == "second":
                shutil.copy(file, shared)
    assert summary(nodes[1]).startswith("6 and 6 steps of 1 of 2 ranks")
    half = compare_runs(read(shared), read(nodes[1]))
    assert not half.same
    assert "rank*.jsonl" in half.missing[0]
    for file in nodes[1].glob("rank*"):
        shutil.copy(file, nodes[0])
    whole = read(nodes[0])
    assert [sorted(part.ranks) for part in whole.parts] == [[0, 1], [0, 1]]
    verdict = compare_runs(read(shared), whole)
    assert (verdict.finding, verdict.bits, verdict.judged) == (None, 6, 6)  # the second start began anew


def test_a_command_that_failed_is_compared_as_far_as_it_goes(one, two):
    whole, short = one(), two(name="short", steps=3)
    failed, both = (dataclasses.replace(each, info={**each.info, "code": 1}) for each in (short, whole))
    verdict = compare_runs(whole, failed)
    assert (verdict.word, verdict.judged) == ("NOT PROVED", 3)
    assert verdict.missing == [f"{short.name} ended with exit code 1 after step 3"]
    crashed = compare_runs(both, failed)
    assert (crashed.word, len(crashed.missing)) == ("NOT PROVED", 2)
    assert compare_runs(both, both).word == "NOT PROVED"
    for one_run, other in ((whole, short), (both, short)):  # the shorter one ends as it should
        assert compare_runs(one_run, other).finding.cause == "step-count"


def test_the_limits_are_kept(one, two):
    some = two(variables={"LOCKSTEP_TRACE_STEPS": "2:4"})
    assert [record["k"] for record in some.parts[0].ranks[1].steps] == [2, 3]
    verdict = compare_runs(one(), some)
    assert (verdict.finding, verdict.judged) == (None, 2)
    small = two(name="small", variables={"LOCKSTEP_TRACE_MAX_MB": "0.02"})
    files = [path for path in Path(small.name).iterdir() if path.name != FOLDER_FILE]
    assert sum(path.stat().st_size for path in files) <= 0.02 * 2**20
    assert all(rank.full for rank in small.parts[0].ranks.values())
    assert compare_runs(one(), small).finding is None
    two(name="small", variables={"LOCKSTEP_TRACE_MAX_MB": "0.02"})  # a restart: a line of a process's own is its all
    assert sum(path.stat().st_size for path in Path(small.name).glob("rank*")) <= 0.02 * 2**20 + 2 * 1024
    assert "recording ended after step" in summary(Path(small.name))
    assert len(read(Path(small.name)).parts) == 1
