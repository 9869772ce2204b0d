"""`resolve`: pure, the same again on what it returns, and nothing is left open."""

import copy
import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import cli
from lockstep.config.fields import is_span
from lockstep.config.schema import SPANS, Config, is_auto, lookup
from lockstep.data.batches import Origin
from lockstep.run_state import Extension
from lockstep.training.start.defaults import TASK_DEFAULTS
from lockstep.training.start.resolve import CheckpointFacts, Facts, StartFacts, resolve

PLAN = {"batch_size": 16, "micro_batch_size": 4, "steps": 9, "precision": "float32", "optim.warmup_steps": 3}
EXTENSION = Extension(asked=50, at=9, before=9, max_steps=50, num_epochs=0)
LENGTHS = st.sampled_from(["5%", "1epoch", "0.5epochs", 7])
CONFIGS = st.builds(
    Config,
    num_epochs=st.integers(1, 3),
    max_steps=st.integers(0, 40),
    extend_to=st.sampled_from([0, 0, 50, "4epochs"]),
    lr=st.sampled_from(["auto", 0.1]),
    batch_size=st.sampled_from([8, 16, 64]),
    micro_batch_size=st.sampled_from(["auto", 2, 8]),
    eval_micro_batch_size=st.sampled_from(["auto", 3]),
    eval_workers=st.sampled_from(["auto", 1]),
    precision=st.sampled_from(["auto", "bf16", "float32"]),
    compile=st.sampled_from(["auto", True, False]),
    eval_freq=st.one_of(st.just("auto"), LENGTHS),
    ckpt_freq=LENGTHS,
    limit_train_batches=st.sampled_from([0, 3, "50%"]),
    optim=st.fixed_dictionaries({"warmup_steps": st.one_of(st.just("auto"), LENGTHS), "floor": st.just("auto")}),
)
CHECKPOINTS = st.builds(
    CheckpointFacts,
    step=st.just(9),
    position=st.just(144),
    plan=st.sampled_from([PLAN, PLAN | {"batch_size": 8}]),
    compiled=st.booleans(),
    origin=st.sampled_from([Origin(0, 0), Origin(3, 30)]),
    extension=st.sampled_from([None, EXTENSION]),
)
STARTS = st.builds(
    StartFacts,
    fast=st.booleans(),
    max_micro_batch=st.sampled_from([0, 2, 4]),
    checkpoint=st.none() | CHECKPOINTS,
    min_steps=st.sampled_from([0, 60]),
)
FACTS = st.builds(
    Facts,
    start=STARTS,
    kind=st.sampled_from(sorted(TASK_DEFAULTS)),
    per_micro_batch=st.booleans(),
    batchnorm=st.booleans(),
    samples=st.integers(500, 600),
    epoch=st.integers(500, 900),
    evaluation=st.sampled_from([(), (40,), (700, 300)]),
)


@given(CONFIGS, FACTS)
def test_it_is_pure_and_idempotent_and_leaves_nothing_open(config, facts):
    before = copy.deepcopy((config, facts))
    found = resolve(config, facts)
    assert resolve(config, facts) == found
    assert (config, facts) == before
    again = dataclasses.replace(facts.start, cut=found.run_plan.cut)
    assert resolve(found.config, dataclasses.replace(facts, start=again)) == found
    assert not [name for name in cli.flatten(found.config) if is_auto(found.config, name)]
    assert found.config.precision != "auto"
    assert not [name for name in SPANS - {"extend_to"} if is_span(lookup(found.config, name))]
    assert found.run_plan.step_plan.steps >= facts.start.min_steps


def test_batchnorm_stays_open_in_the_plan_but_keeps_the_runs():
    facts = Facts(StartFacts(), "general", False, True, 500, 500)
    assert resolve(Config(), facts).config.batchnorm == "auto"
    for stored, wanted in (("replay", "replay"), ("auto", "auto")):
        start = StartFacts(checkpoint=CheckpointFacts(9, 144, PLAN | {"batchnorm": stored}))
        assert resolve(Config(), Facts(start, "general", False, True, 500, 500)).config.batchnorm == wanted
        explicit = Facts(start, "general", False, True, 500, 500)
        assert resolve(Config(batchnorm="local"), explicit).config.batchnorm == "local"


@given(CONFIGS, FACTS)
def test_what_is_given_wins(config, facts):
    names = ("lr", "micro_batch_size", "eval_micro_batch_size", "eval_workers", "precision", "compile")
    found = resolve(config, facts).config
    assert [name for name in names if not is_auto(config, name) and getattr(config, name) != "auto"] == [
        name for name in names if not is_auto(config, name) and getattr(config, name) == getattr(found, name) != "auto"
    ]
