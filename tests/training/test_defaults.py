"""What "auto" becomes: by the kind of work, the model and the plan alone, seen in the run's folder, and said."""

import copy
import json
import tomllib
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from refusals import names, refuses
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.config.cli import flatten, parse, read_toml, to_toml
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config, default_micro_batch_size, is_auto
from lockstep.config.sections import Data, Lora, Optim
from lockstep.data.batches import Origin
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError
from lockstep.optim.schedule import NONE, SHAPES
from lockstep.run_state import Position
from lockstep.task import DataFacts
from lockstep.tasks.language_model import CausalLM
from lockstep.training.start.defaults import (
    LORA_DEFAULTS,
    SGD_DEFAULTS,
    TASK_DEFAULTS,
    default_warmup,
    describe_data,
    describe_optimizer,
    describe_run,
    fine_tuning_rate,
    plan_warnings,
)
from lockstep.training.start.resolve import CheckpointFacts, Facts, StartFacts, resolve
from lockstep.training.start.sharing import check_division
from lockstep.training.state.parts import notify
from lockstep.training.state.plan import RunPlan
from lockstep.transforms.batchnorm import synchronise

PLAIN = nn.Linear(2, 2)
RAGGED = Ragged()
NORMED = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))


class Language(Ragged):
    defaults = "language-model"


class Tuned(Ragged):
    defaults = "fine-tuning"


def chosen(config, task=RAGGED, model=PLAIN, samples=1000, ranks=1):
    return resolve(config, Facts.of(task, model, samples, start=StartFacts(ranks=ranks))).run_plan


class Chats(Tuned):
    """Prompts for a pretrained model of width 2048."""

    data_facts = DataFacts({"data.packing": "padded", "seq_len": 512}, True, "300 conversations", 2048)


def test_prompts_have_their_own_batch_epochs_and_rate_by_default():
    found = chosen(Config(), Chats(), samples=300)
    config = found.config
    assert (config.batch_size, config.num_epochs, config.seq_len, config.data.packing) == (4, 3, 512, "padded")
    assert (config.lr, config.micro_batch_size, found.step_plan.steps) == (5e-5, 4, 225)  # 2e-5 * 2 ** (4 / 3)
    assert describe_data(found, Chats.data_facts) == "300 conversations; 75 steps an epoch, 225 in the run"
    assert not plan_warnings(found, PLAIN, Chats.data_facts)
    given = chosen(Config(batch_size=16, num_epochs=1, lr=1e-5, seq_len=64), Chats(), samples=300).config
    assert (given.batch_size, given.num_epochs, given.lr, given.seq_len) == (16, 1, 1e-5, 64)
    assert [chosen(Config(), Chats(), samples=count).config.batch_size for count in (499, 500)] == [4, 8]
    assert chosen(Config(micro_batch_size=16), Chats()).config.batch_size == 16  # of which 8 is no multiple
    adapters = Config(lora=Lora(rank=2))
    assert chosen(adapters, Chats()).config.lr == 5e-4  # ten times as much
    assert chosen(adapters, Tuned()).config.lr == LORA_DEFAULTS["lr"]
    assert [fine_tuning_rate(width) for width in (0, 64, 128, 4096)] == [5e-5, 2e-3, 2e-3, 2e-5]
    assert [fine_tuning_rate(width, lora=True) for width in (0, 64, 4096, 8192)] == [2e-4, 5e-3, 2e-4, 2e-4]
    assert chosen(Config(), Tuned()).config.lr == 5e-5
    device = StartFacts(max_micro_batch=16)
    assert resolve(Config(), Facts.of(Chats(), PLAIN, 300, start=device)).config.micro_batch_size == 4
    before = StartFacts(checkpoint=CheckpointFacts(1, 32, {"batch_size": 32, "micro_batch_size": 4, "steps": 9}))
    resumed = resolve(Config(), Facts.of(Chats(), PLAIN, 300, start=before)).config
    assert (resumed.batch_size, resumed.micro_batch_size) == (32, 4)  # as it was begun


@pytest.mark.parametrize(("config", "advice"), [({}, "--num-epochs 4"), ({"max_steps": 20}, "--max-steps 50")])
def test_few_steps_over_prompts_are_warned_of(config, advice):
    found = chosen(Config(**config), Chats(), samples=60)
    (line,) = plan_warnings(found, PLAIN, Chats.data_facts)
    assert names(line, f"{found.step_plan.steps} steps", advice)
    assert plan_warnings(found, PLAIN) == []


@pytest.mark.parametrize(
    ("task", "kind"), [(Language(), "language-model"), (Tuned(), "fine-tuning"), (Ragged(), "general")]
)
def test_the_values_are_those_of_the_tasks_kind(task, kind):
    values = flatten(chosen(Config(max_steps=700), task).config)
    assert TASK_DEFAULTS[kind].items() <= values.items()
    assert (values["optim.warmup_steps"], values["batch_size"], values["micro_batch_size"]) == (35, 16, 16)
    evaluation = 16 if kind == "general" else 2  # the logits of a whole step of a language model may not fit
    assert values["eval_micro_batch_size"] == evaluation
    assert [name for name in TASK_DEFAULTS[kind] if not is_auto(Config(), name)] == []
    assert [name for name in values if is_auto(chosen(Config(), task).config, name)] == []


def test_a_language_models_are_what_they_were():
    assert CausalLM.defaults == "language-model"
    optim = chosen(Config(max_steps=10_000), Language()).config
    assert (optim.lr, optim.optim.beta1, optim.optim.beta2, optim.optim.weight_decay) == (2e-3, 0.9, 0.95, 0.1)
    assert (optim.optim.clip, optim.optim.floor, optim.optim.warmup_steps) == (1.0, 0.1, 50)


def test_what_is_given_is_kept_and_auto_may_be_written(tmp_path):
    given = Config(
        lr=0.5,
        micro_batch_size=8,
        eval_freq=50,
        eval_micro_batch_size=4,
        eval_workers=1,
        optim=Optim(beta2=0.9, warmup_steps=0, weight_decay=0.0, floor=0.2),
        max_steps=100,
        precision="float32",
        compile=False,
        batch_size=16,
        num_epochs=1,
        seq_len=128,
        data={"packing": "stream"},
    )
    assert chosen(given, Language(), NORMED).config == given
    (tmp_path / "a.toml").write_text('lr = "auto"\nmicro_batch_size = 8\n[optim]\nwarmup_steps = "auto"\nbeta2 = 0.5\n')
    config = parse(["--config", str(tmp_path / "a.toml"), "--micro-batch-size", "auto", "--max-steps", "40"])
    assert config == Config(max_steps=40, optim=Optim(beta2=0.5))
    found = chosen(config, Language()).config
    assert (found.lr, found.micro_batch_size, found.optim.warmup_steps, found.optim.beta2) == (2e-3, 16, 2, 0.5)
    assert (found.eval_micro_batch_size, found.eval_workers) == (2, 0)
    (tmp_path / "b.toml").write_text(to_toml(found))
    assert parse(["--config", str(tmp_path / "b.toml")]) == found
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert parse(["--config", str(tmp_path / "c.toml")]) == config
    with pytest.raises(ConfigError, match="--seed: 'auto' is not a whole number"):
        parse(["--seed", "auto"])
    with pytest.raises(ConfigError, match="optim.eps is 'auto': it must be a number"):
        Config(optim=Optim(eps="auto"))


def test_the_help_names_the_values(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    by_width = "(both by the model's width for prompts and conversations)"
    rates = f"2e-3 for a language model, 5e-5 if pretrained, 2e-4 for adapters {by_width}, else 1e-3; sgd 1e-2"
    assert f"{rates} (default: auto)" in shown
    assert [TASK_DEFAULTS[kind]["lr"] for kind in ("language-model", "fine-tuning", "general")] == [2e-3, 5e-5, 1e-3]
    decay = "0.1 for a language model from scratch, 0 if pretrained, else 0.01; sgd 1e-4, adam 0"
    assert f"{decay} (default: auto)" in shown
    decays = [TASK_DEFAULTS[kind]["optim.weight_decay"] for kind in ("language-model", "fine-tuning", "general")]
    assert ([*decays, SGD_DEFAULTS["optim.weight_decay"]], SGD_DEFAULTS["lr"]) == ([0.1, 0.0, 0.01, 1e-4], 1e-2)


def test_sgd_has_its_own_defaults_and_refuses_adams_numbers():
    config = chosen(Config(optim=Optim(name="sgd"), max_steps=100), Language()).config
    assert (config.lr, config.optim.weight_decay, config.optim.momentum) == (1e-2, 1e-4, 0.9)
    assert flatten(config)["optim.beta2"] == "auto"  # sgd has none
    with refuses(ConfigError, "optim.momentum", "optim.name adamw", "sgd"):
        Config(optim=Optim(momentum=0.5))
    with refuses(ConfigError, "optim.beta2", "optim.name sgd"):
        Config(optim=Optim(name="sgd", beta2=0.9))


def test_an_unknown_kind_is_refused():
    class Wrong(Ragged):
        defaults = "vision"

    with pytest.raises(ConfigError, match="defaults = 'vision' .*language-model, fine-tuning"):
        chosen(Config(), Wrong())


@given(st.integers(1, 10**6))
def test_the_warm_up_is_at_most_a_twentieth_and_at_most_50(steps):
    assert 0 <= default_warmup(steps) <= min(50, steps / 20)
    assert default_warmup(steps) == 0 or default_warmup(steps) > min(50, steps / 20) - 1


def test_each_schedule_has_a_warm_up_and_an_end_that_suit_it():
    assert {*SHAPES, NONE} == set(next(spec for spec in fields(Optim) if spec.name == "schedule").metadata["choices"])
    found = {}
    for shape in SHAPES:
        optim = chosen(Config(max_steps=100, eval_freq=10, optim=Optim(schedule=shape))).config.optim
        found[shape] = (optim.warmup_steps, optim.floor)
    special = {"one-cycle": (30, 4e-6), "inverse-sqrt": (5, 0.0), "step": (5, 0.0), "plateau": (5, 0.0)}
    assert found == dict.fromkeys(SHAPES, (5, 0.1)) | special
    given = chosen(Config(max_steps=100, optim=Optim(schedule="one-cycle", warmup_steps=7, floor=0.5))).config.optim
    assert (given.warmup_steps, given.floor) == (7, 0.5)
    for optim, meant in (
        ({"gamma": 0.5}, "step or plateau"),
        ({"power": 2.0}, "polynomial"),
        ({"plateau_patience": 2}, "plateau"),
        ({"plateau_cooldown": 2}, "plateau"),
    ):
        with refuses(ConfigError, "optim.schedule cosine", meant):
            Config(optim=optim)


@given(st.integers(1, 5000), st.integers(1, 9), st.booleans())
def test_a_step_has_one_forward_for_each_rank(batch_size, ranks, normed):
    found = chosen(Config(batch_size=batch_size, max_steps=1), model=NORMED if normed else PLAIN, ranks=ranks)
    assert found.config.micro_batch_size == -(-batch_size // ranks)
    assert found.config.eval_micro_batch_size == batch_size  # numbers of an evaluation do not depend on the ranks
    assert found.config.micro_batches <= ranks
    step_plan = found.step_plan
    places = [step_plan.positions(0, index) for index in range(step_plan.present(0))]
    assert [start for start, _ in places] + [batch_size] == [0] + [stop for _, stop in places]


@given(st.integers(1, 5000))
def test_exact_batchnorm_forward_takes_16_or_the_whole_batch(batch_size):
    config = Config(batch_size=batch_size, max_steps=1, exact=True)
    size = chosen(config, Ragged(), NORMED).config.micro_batch_size
    plain = chosen(config).config.micro_batch_size
    assert batch_size % size == 0
    assert size >= min(16, batch_size)
    assert size >= plain == default_micro_batch_size(batch_size)
    assert size == plain or not any(batch_size % other == 0 for other in range(min(16, batch_size), size))


def test_batchnorm_that_is_not_trained_does_not_count():
    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    horizon = chosen(Config(batch_size=64, exact=True), Ragged(), frozen, samples=65)
    assert (horizon.config.micro_batch_size, horizon.min_samples, horizon.step_plan.total) == (8, 1, 65)
    assert plan_warnings(horizon, frozen) == []


def test_a_short_run_records_every_step():
    assert [chosen(Config(max_steps=steps)).config.log_freq for steps in (5, 20, 21)] == [1, 1, 10]
    assert chosen(Config(max_steps=5, log_freq=3)).config.log_freq == 3


def test_what_is_said_at_the_start():
    horizon = chosen(Config(batch_size=64, max_steps=60))
    assert describe_run(horizon, 1) == "60 steps of 64 samples; adamw, lr 0.001"
    assert describe_run(horizon, 1, own_optimizer=True) == "60 steps of 64 samples"
    two, three = (chosen(Config(batch_size=64, max_steps=60), ranks=ranks) for ranks in (2, 3))
    assert describe_run(two, 2).startswith("60 steps of 64 samples in 2 micro-batches of 32, over 2 ranks; ")
    assert describe_run(three, 3).startswith("60 steps of 64 samples in 3 micro-batches of at most 22, over 3 ranks; ")
    exact = chosen(Config(batch_size=64, max_steps=60, exact=True), ranks=2)
    assert describe_run(exact, 2).startswith("60 steps of 64 samples in 8 micro-batches of 8, over 2 ranks; ")
    assert describe_run(chosen(Config(batch_size=1, max_steps=1)), 1).startswith("1 step of 1 sample; ")
    divided = chosen(Config(batch_size=64, max_steps=60, parallel=Parallel(tensor=2)), ranks=2)
    assert "of 32, over 4 ranks (2 replicas of 2 ranks); " in describe_run(divided, 4)
    assert describe_optimizer(horizon) == (
        "adamw: lr 0.001, cosine to 0.1 after 3 of 60 steps of warm-up, weight decay 0.01, betas 0.9 and 0.999"
    )
    sgd = chosen(Config(max_steps=9, optim=Optim(name="sgd", schedule="constant")))
    assert describe_optimizer(sgd) == (
        "sgd: lr 0.01, constant after 0 of 9 steps of warm-up, weight decay 0.0001, momentum 0.9"
    )
    assert plan_warnings(horizon, PLAIN) == []


def test_what_is_warned_of():
    short = chosen(Config(max_steps=6, optim=Optim(warmup_steps=50)))
    (line,) = plan_warnings(short, PLAIN)
    assert names(line, "--optim.warmup-steps 50", "6 steps", "--lr 0.001", 0)
    few = chosen(Config(max_steps=60, batch_size=64, micro_batch_size=8), Ragged(), NORMED)
    (line,) = plan_warnings(few, NORMED)
    assert names(line, "BatchNorm (1 and 1 more)", "8 samples", "--micro-batch-size 16")
    assert "--batch-size" not in line
    small = chosen(Config(max_steps=60, batch_size=4), Ragged(), NORMED)
    assert names(plan_warnings(small, NORMED)[0], "4 samples", "--batch-size 16", "--micro-batch-size 16")
    assert plan_warnings(chosen(Config(max_steps=60, batch_size=64), Ragged(), NORMED), NORMED) == []


def test_few_samples_of_all_ranks_together_are_warned_of():
    together = synchronise(copy.deepcopy(NORMED), pytest.fail)
    few = chosen(Config(max_steps=60, batch_size=64, micro_batch_size=4), Ragged(), NORMED)
    assert plan_warnings(few, together, ranks=4) == []
    (line,) = plan_warnings(few, together, ranks=2)
    assert names(line, "8 samples of all ranks", "--micro-batch-size 8")
    small = chosen(Config(max_steps=60, batch_size=4, micro_batch_size=2), Ragged(), NORMED)
    (line,) = plan_warnings(small, together, ranks=2)
    assert names(line, "4 samples of all ranks", "--batch-size 16")
    assert "--micro-batch-size" not in line


@pytest.mark.parametrize(
    ("changes", "origin", "places"),  # after so many steps: epoch, steps and share of it, steps to its end, position
    [
        (
            {"num_epochs": 2},
            Origin(0, 0),
            {0: (0, 0, 0.0, 3, 0), 2: (0, 2, 0.8, 1, 16), 3: (1, 1, 0.2, 2, 24), 5: (1, 3, 1.0, 0, 40)},
        ),
        ({"num_epochs": 1, "data": Data(drop_last=True)}, Origin(0, 0), {0: (0, 0, 0.0, 2, 0), 2: (0, 2, 0.8, 0, 16)}),
        ({"max_steps": 3}, Origin(0, 0), {0: (0, 0, 0.0, 3, 0), 3: (1, 1, 0.2, 2, 24)}),
        ({"max_steps": 5}, Origin(0, 0), {5: (1, 3, 1.0, 0, 40)}),
        ({"max_steps": 4}, Origin(2, 4), {3: (0, 2, 0.6, 1, 12), 4: (0, 3, 1.0, 0, 20)}),  # steps of 2 before
        ({"num_epochs": 2}, Origin(2, 4), {4: (1, 0, 0.0, 3, 20)}),
    ],
)
def test_where_a_run_stands(changes, origin, places):
    """Of 20 samples, in steps of 8."""
    plan = RunPlan(20, Config(batch_size=8, micro_batch_size=2, **changes), origin, 1, 20)
    for done, wanted in places.items():
        found = plan.place(done)
        assert found == Position(done, *wanted)


def test_a_plan_of_no_steps_stands_at_its_begin():
    plan = RunPlan(20, Config(batch_size=32, micro_batch_size=2, data=Data(drop_last=True)), Origin(0, 0), 1, 20)
    assert plan.step_plan.steps == 0
    assert (plan.place(0).epoch, plan.place(0).epoch_progress) == (0, 0.0)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 3), st.booleans(), st.booleans())
def test_where_a_run_with_a_fixed_cut_ends(samples, batch_size, epochs, drop_last, normed):
    """With drop-last every step is full; with BatchNorm no forward has a single sample; nothing else is left out."""
    config = Config(batch_size=batch_size, num_epochs=epochs, data=Data(drop_last=drop_last), exact=True)
    model = NORMED if normed else PLAIN
    try:
        horizon = chosen(config, Ragged(), model, samples)
    except DataError:
        assert samples * epochs < batch_size if drop_last else samples * epochs == 1
        return
    cut, whole = horizon.step_plan, samples * epochs
    sizes = [cut.samples(step) for step in range(cut.steps)]
    alone = normed and horizon.config.micro_batch_size > 1 and whole % horizon.config.micro_batch_size == 1
    assert sum(sizes) == whole - (whole % batch_size if drop_last else alone)
    assert set(sizes[:-1]) <= {batch_size}
    last = cut.steps - 1
    ends = [cut.positions(last, index) for index in range(cut.present(last))]
    if normed and horizon.config.micro_batch_size > 1:
        assert min(stop - start for start, stop in ends) >= 2
    place = horizon.place(cut.steps)
    assert (place.num_batches_remaining, place.position) == (0, cut.total)


@given(st.integers(2, 300), st.integers(2, 40), st.integers(1, 3), st.booleans(), st.booleans())
def test_where_a_run_ends_does_not_depend_on_the_ranks(samples, batch_size, epochs, drop_last, normed):
    """With BatchNorm no step has a single sample, as on one rank."""
    config = Config(batch_size=batch_size, num_epochs=epochs, data=Data(drop_last=drop_last))
    whole = samples * epochs
    if drop_last and whole < batch_size:
        return
    alone = normed and whole % batch_size == 1
    left = whole % batch_size if drop_last else int(alone)
    for ranks in (1, 2, 3, 7):
        cut = chosen(config, Ragged(), NORMED if normed else PLAIN, samples, ranks).step_plan
        assert (cut.total, cut.steps) == (whole - left, -(-(whole - left) // batch_size))
        for step in range(cut.steps):
            places = [cut.positions(step, index) for index in range(cut.present(step))]
            ends = [cut.start(step), *(stop for _, stop in places)]
            assert [start for start, _ in places] == ends[:-1]  # each sample once
            assert ends[-1] == min(cut.start(step) + batch_size, cut.total)
            assert all(start < stop for start, stop in places)


def test_nothing_left_is_refused():
    with pytest.raises(
        DataError, match="has 5 samples, less than one step, and --data.drop-last leaves short ones out"
    ):
        chosen(Config(batch_size=8, data=Data(drop_last=True)), samples=5)
    with pytest.raises(DataError, match="one sample, which BatchNorm cannot learn from alone"):
        chosen(Config(batch_size=8), Ragged(), NORMED, samples=1)


def test_the_end_counts_from_where_the_present_cut_began():
    config = Config(batch_size=8, micro_batch_size=2, data=Data(drop_last=True))
    start = StartFacts(checkpoint=CheckpointFacts(origin=Origin(3, 30)))
    cut = resolve(config, Facts.of(Ragged(), PLAIN, 41, start=start)).run_plan.step_plan
    assert (cut.steps, cut.total) == (4, 38)
    over = resolve(
        config, Facts.of(Ragged(), PLAIN, 20, start=start)
    ).run_plan.step_plan  # fewer epochs than were taken already
    assert (over.steps, over.total) == (3, 30)


class Normed(Ragged):
    """Vectors with two classes and a BatchNorm that sees one value a channel and sample."""

    items_per_sample = 1

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(self.dtype)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(5)
        count = self.samples if split == "train" else 9
        x = torch.randn(count, 4, generator=generator, dtype=self.dtype)
        return [{"x": row, "y": (row.sum() > 0).long()} for row in x]

    def count(self, batch):
        return len(batch["y"])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"]).argmax(-1) == batch["y"]).sum(), len(batch["y"]))}


def go(world, settings, task):
    for _ in lockstep.Run(settings, task, world):
        pass


def settings(folder, name, **changes):
    common = {"batch_size": 8, "micro_batch_size": 2, "ckpt_freq": 2, "precision": "float64", "log_freq": 1}
    return Config(experiment_name=name, save_dir=str(folder), **common | changes)


def mark(folder, name):
    newest = checkpoint.newest(folder / name, say=print)
    state = checkpoint.read_state(newest)
    return checkpoint.fingerprint(newest), state["global_step"], state["position"]


def log_of(folder, name):
    return (folder / name / "logs" / "rank-00000.log").read_text()


@pytest.mark.parametrize("size", [1, 2])
def test_a_last_sample_alone_does_not_stop_batchnorm(tmp_path, size):
    """41 samples in steps of 8: the last step would have one sample, and torch refuses to normalise that."""
    task = Normed(samples=41)
    run(go, size, settings(tmp_path, "r", exact=True), task)
    assert mark(tmp_path, "r")[1:] == (5, 40)
    assert "the last sample of the last epoch is left out" in log_of(tmp_path, "r")
    go(None, settings(tmp_path, "longer", exact=True, max_steps=5), task)
    assert mark(tmp_path, "longer") == mark(tmp_path, "r")  # what is left out has no other effect


@pytest.mark.parametrize("size", [1, 2])
def test_one_sample_over_a_micro_batch_is_left_out_and_no_more(tmp_path, size):
    run(go, size, settings(tmp_path, "r"), Normed(samples=43))
    assert mark(tmp_path, "r")[1:] == (6, 42)


def test_drop_last_resumes_exactly_at_another_world_size(tmp_path):
    """54 samples, twice, in steps of 8: 13 whole steps, the seventh across the epochs; then 4 samples are left out."""
    common = {"num_epochs": 2, "exact": True, "data": Data(drop_last=True)}
    go(None, settings(tmp_path, "whole", **common), Ragged(54, dropout=0.1))
    run(go, 2, settings(tmp_path, "r", stop_at=5, **common), Ragged(54, dropout=0.1))
    assert mark(tmp_path, "r")[1] == 5
    go(None, settings(tmp_path, "r", **common), Ragged(54, dropout=0.1))
    assert mark(tmp_path, "r") == mark(tmp_path, "whole")
    assert mark(tmp_path, "r")[1:] == (13, 104)
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    assert (state["epoch"], state["num_batches_remaining"]) == (1, 0)


def test_the_folder_and_the_log_show_what_was_chosen(tmp_path):
    task = Normed(samples=400)
    config = settings(tmp_path, "r", batch_size=40, micro_batch_size=0, num_epochs=5, log_freq=10)
    run(go, 2, config, task)
    found = tomllib.loads((tmp_path / "r" / "config.toml").read_text())
    assert (found["lr"], found["micro_batch_size"]) == (1e-3, 20)
    assert (found["optim"]["beta2"], found["optim"]["weight_decay"], found["optim"]["warmup_steps"]) == (0.999, 0.01, 2)
    chosen_config = chosen(config, task, task.model(), 400, ranks=2).config
    assert flatten(chosen_config, own_task=True) == read_toml(tmp_path / "r" / "config.toml")
    log = log_of(tmp_path, "r")
    assert "50 steps of 40 samples in 2 micro-batches of 20, over 2 ranks; adamw, lr 0.001" in log
    assert "adamw: lr 0.001, cosine to 0.1 after 2 of 50 steps of warm-up" in log
    assert '"lr": 0.001' in log
    assert "BatchNorm (" not in log
    plan = checkpoint.read_state(checkpoint.newest(tmp_path / "r", say=print))["plan"]
    assert (plan["lr"], plan["micro_batch_size"], plan["optim.warmup_steps"]) == (1e-3, 20, 2)


def test_few_samples_for_batchnorm_are_said_by_name(tmp_path):
    go(None, settings(tmp_path, "r", max_steps=2), Normed(samples=40))
    assert "BatchNorm (1) normalises over the 2 samples of a forward" in log_of(tmp_path, "r")


class InLists(Normed):
    """Its order is a batch sampler with four samples a list."""

    def order(self, samples, seed):
        return BatchSampler(range(samples), 4, drop_last=False)


def test_batchnorm_counts_the_samples_of_lists(tmp_path):
    sizes = {"batch_size": 2, "micro_batch_size": Config().micro_batch_size, "max_steps": 2}
    go(None, settings(tmp_path, "r", **sizes), InLists(samples=40))
    (line,) = [line for line in log_of(tmp_path, "r").splitlines() if "BatchNorm" in line]
    assert "normalises over the 4 samples of a forward" in line
    assert line.endswith("put more samples into each list of `order`")


def test_sgd_has_the_same_bits_on_two_ranks_and_after_a_resume(tmp_path):
    common = {"optim": Optim(name="sgd", nesterov=True), "exact": True, "lr": 0.1}
    go(None, settings(tmp_path, "one", **common), Normed(samples=40))
    run(go, 2, settings(tmp_path, "r", stop_at=3, **common), Normed(samples=40))
    go(None, settings(tmp_path, "r", **common), Normed(samples=40))
    assert mark(tmp_path, "r") == mark(tmp_path, "one")
    assert "sgd: lr 0.1, cosine to 0.1 after 0 of 5 steps of warm-up" in log_of(tmp_path, "r")


@pytest.mark.parametrize(("ranks", "idle"), [(3, 0), (4, 0), (5, 1), (7, 3)])
def test_ranks_without_work_are_told_of_and_no_others(ranks, idle, capsys):
    check_division(Config(batch_size=8, micro_batch_size=2), World(size=ranks), notify(World(size=ranks)))
    line = capsys.readouterr().err
    assert bool(line) == bool(idle)
    if idle:
        assert names(line, "--batch-size 8", f"{ranks} ranks", f"{idle} of them")
