"""Plans of models that several ranks hold between them: memory against runs, shares, messages, proposed degrees."""

import dataclasses

import pytest
import torch
from ranks import run
from test_plan_states import CPU, Deep, Stack, measured

from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.diagnose.plan.command import as_json, describe
from lockstep.diagnose.plan.estimate import Planner, step_time
from lockstep.diagnose.plan.estimate import _largest_stages as largest_stages
from lockstep.diagnose.plan.search import _divisions as divisions
from lockstep.diagnose.plan.search import find_plan
from lockstep.diagnose.plan.subject import subject_of
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.training.start.replicas import form_replicas

LENGTH = 16
SHAPE = GPTConfig(layers=2, heads=4, width=64, vocab_size=256, context=LENGTH)


class Divided(Stack):
    # Enough to be drawn from shallow ones.
    layers = 6

    def parallelize(self, model):
        return {"blocks.*.inner": "columns", "blocks.*.outer": "rows"}


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((LENGTH,), index)


class Tiny(Stack):
    """The built-in GPT, whose vocabulary is divided too."""

    reduction = "sum"
    layers = 2

    def model(self):
        return GPT(dataclasses.replace(SHAPE, layers=self.layers))

    def dataset(self, split):
        return Words()

    def collate(self, samples):
        return {"input_ids": torch.stack(samples), "labels": torch.stack(samples)}

    def sequence(self, batch):
        return {"input_ids": 1, "labels": 1, "positions": 1}

    def loss(self, model, batch):
        return model(**batch)


def words(size):
    return Tiny().collate([Words()[index] for index in range(size)])


def config_of(engine, **fields):
    base = {"engine": engine, "batch_size": 8, "micro_batch_size": 4, "precision": "float32", "lr": 1e-3}
    return Config(**base | {"parallel": Parallel(tensor=2)} | fields)


STAGES, SEQUENCES = Parallel(pipeline=2), Parallel(context=2)
HELD = {
    "tensor": [
        (config_of("ddp"), Divided()),
        (config_of("fsdp"), Divided()),
        (config_of("ddp", precision="bf16"), Tiny()),
        (config_of("fsdp", activation_checkpointing="full"), Tiny()),
    ],
    "pipeline": [
        # Four micro-batches are as the three that are traced.
        (config_of("ddp", parallel=STAGES, batch_size=16, activation_checkpointing="full"), Tiny()),
        (config_of("ddp", parallel=STAGES, exact=True, precision="bf16"), Tiny()),
    ],
    "context": [
        (config_of("ddp", parallel=SEQUENCES), Tiny()),
        (config_of("fsdp", parallel=SEQUENCES, precision="bf16"), Tiny()),
    ],
}


def measure_all(world, cases):
    form_replicas(cases[0][0], world)
    return [
        measured(world, config, task, steps=2, load=words if isinstance(task, Tiny) else None) for config, task in cases
    ]


def most(estimate, stage=None):
    """The peak of a stage, without that of the start, in which a test's Held does not count."""
    begin = "" if stage is None else f"stage {stage} "
    peaks = [size for name, size in estimate.phases.items() if name.startswith(begin) and not name.endswith("start")]
    return max(peaks) + estimate.parts.get("sums of exact mode", 0.0)


@pytest.mark.parametrize("dimension", HELD)
def test_each_rank_of_a_replica_holds_what_was_planned(dimension):
    cases = HELD[dimension]
    planners = [Planner(config, subject_of(config, task, print), 2, CPU) for config, task in cases]
    resolved = [planner.config for planner in planners]
    found = run(measure_all, 2, list(zip(resolved, [task for _, task in cases], strict=True)))
    for index, planner in enumerate(planners):
        estimate = planner.estimate(planner.config)
        # As without replicas: what FSDP has sent is let go of by another thread.
        bound = 0.05 if planner.config.engine == "fsdp" else 0.001
        if dimension == "pipeline":
            planned = [most(estimate, stage) for stage in range(2)]
            assert [rank[index] for rank in found] == pytest.approx(planned, rel=bound), planner.config
            assert estimate.stage == planned.index(max(planned))
        else:
            assert max(rank[index] for rank in found) == pytest.approx(most(estimate), rel=bound), planner.config


def planner_of(size, task=None, **fields):
    config = config_of("ddp", seq_len=LENGTH, **fields)
    return Planner(config, subject_of(config, task, print), size, CPU)


def test_a_rank_has_its_share_of_parameters_and_states():
    planner = planner_of(4, model_name="builtin:gpt2")
    # Of four bytes each: the parameters and two states. Positions and norms are whole on every rank.
    assert planner.estimate(planner.config).held == pytest.approx(12 * planner.sizes.parameters / 2, rel=0.02)
    assert planner.part_sizes(planner.config).parameters == pytest.approx(planner.sizes.parameters / 2, rel=0.02)


def test_a_stage_has_its_share_of_parameters_and_states():
    planner = planner_of(4, model_name="builtin:nano", parallel=STAGES, batch_size=16)
    # All but two of the four blocks, and the norm after them: the tied table is on both stages.
    elsewhere = 2 * (12 * 128**2 + 13 * 128) + 2 * 128
    share = planner.sizes.parameters - elsewhere
    assert planner.part_sizes(planner.config).parameters == share
    assert planner.estimate(planner.config).held == pytest.approx(12 * share, rel=0.001)


def test_divided_sequences_leave_all_parameters_on_each_rank():
    planner = planner_of(4, model_name="builtin:nano", parallel=SEQUENCES)
    assert planner.part_sizes(planner.config) == planner.sizes
    # With the gradients, which stay in the buffers of DDP.
    assert planner.estimate(planner.config).held == pytest.approx(16 * planner.sizes.parameters, rel=0.001)


@pytest.mark.parametrize(
    ("parallel", "messages", "hidden_states", "of_loss"),
    [
        # Of two ranks each sends half of a tensor twice; three numbers a token are of the loss.
        (Parallel(tensor=2), 4 * 4 + 5, 4 * 4 + 2, 3),
        # Keys and values of its half of the positions, and half of their gradients.
        (SEQUENCES, 2 * 4, 2 * 4, 0),
        # To the next stage, or a gradient to the one before.
        (STAGES, 1, 1, 0),
    ],
    ids=["tensor", "context", "pipeline"],
)
def test_messages_of_a_micro_batch_are_those_of_a_run(parallel, messages, hidden_states, of_loss):
    """As the tests in tests/parallel count them in a run."""
    model = {"loss_chunk": 0, "dropout": 0.0}
    planner = planner_of(4, model_name="builtin:nano", model=model, parallel=parallel, batch_size=16)
    for factor in (1, 3):
        config = dataclasses.replace(planner.config, micro_batch_size=factor)
        work = planner.estimate(config).work["compute"]
        assert work.messages == messages
        assert work.sent == hidden_states * 4 * factor * LENGTH * 128 + of_loss * 4 * factor * LENGTH


def test_a_deep_stage_is_drawn_from_shallow_ones():
    task = Divided()
    task.layers = 12
    planner = planner_of(2, task, parallel=STAGES, batch_size=16)
    drawn = planner.estimate(planner.config).phases
    for stage in range(2):
        whole = planner._trace_step(planner.config, None, 0, 3 - stage, stage).peaks
        for phase in ("start", "forward -1", "backward 0", "update"):
            assert drawn[f"stage {stage} {phase}"] == pytest.approx(whole[phase], rel=0.002), (stage, phase)


def test_a_stage_with_more_blocks_may_take_most():
    assert largest_stages(4, 8) == [0, 3]
    assert largest_stages(4, 9) == [0, 3]
    assert largest_stages(4, 10) == [0, 1, 3]
    assert largest_stages(4, 0) == [0, 1, 2, 3]


def test_the_bubble_and_the_stage_are_printed():
    planner = planner_of(4, Tiny(), parallel=STAGES, batch_size=24)
    answer = find_plan(planner, fast=True, open_batch=False)
    text = describe(answer)
    # (P - 1) / (M + P - 1), of three micro-batches a replica.
    assert "a stage waits for 25% of the time of the passes: 2 stages share 3 micro-batches" in text
    assert f"a rank of stage {answer.found.stage} (of 2, from 0), which takes most, uses" in text
    assert as_json(answer)["replica"]["bubble"] == 0.25
    longer = planner.estimate(dataclasses.replace(planner.config, batch_size=8 * 24))
    assert longer.bubble == 1 / 25
    assert step_time(longer, CPU, 4, (0, 0)).compute == pytest.approx(25 / 4 * answer.times.compute)


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (Tiny, {"parallel": Parallel(pipeline=4), "batch_size": 32}, "--parallel.pipeline 4: the model has 2 repeated"),
        (Tiny, {"parallel": STAGES, "batch_size": 4}, "--parallel.pipeline 2: a replica has 1 micro-batches a step"),
        (Divided, {"parallel": SEQUENCES}, "--parallel.context 2: the task Divided does not say what its sequences"),
        (Tiny, {"parallel": Parallel(pipeline=2, context=2)}, "plan does not know both together"),
        (Tiny, {"parallel": Parallel(context=16)}, "--parallel.context 16: the sequences of a batch have"),
    ],
)
def test_what_a_run_refuses_a_plan_refuses(task, fields, message):
    planner = planner_of(fields["parallel"].size, task(), **fields)
    with pytest.raises(ConfigError, match=message):
        planner.estimate(planner.config)


class Wide(Divided):
    """Blocks so large that gathering one does not fit."""

    def model(self):
        model = Deep(2)
        for block in model.blocks:
            block.inner, block.outer = torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 64)
        return model


def test_degrees_are_proposed_where_the_model_does_not_fit():
    divided = planner_of(2, Wide(), micro_batch_size=1)
    needed = divided.estimate(divided.config).peak
    device = dataclasses.replace(CPU, memory=1.03 * needed)
    config = config_of("ddp", parallel=Parallel(), micro_batch_size=1)
    answer = find_plan(Planner(config, subject_of(config, Wide(), print), 2, device), fast=False, open_batch=False)
    assert not answer.fits
    assert answer.rows
    for row in answer.rows:
        assert row.peak <= device.room
        assert row.flags[row.flags.index("--parallel.tensor") + 1] == "2"
    assert answer.advice.startswith("change first: --engine")


def test_a_degree_that_a_run_refuses_is_not_proposed():
    def degrees(size, task=None, **fields):
        return [each.tensor for each in divisions(planner_of(size, task, parallel=Parallel(), **fields))]

    assert degrees(16, model_name="builtin:nano") == [1, 2, 4]  # four heads
    assert degrees(6, model_name="builtin:nano") == [1, 2]
    assert degrees(16, Stack()) == [1]  # no plan of its layers
    assert degrees(16, Divided(), optim={"name": "muon"}) == [1]
    planner = planner_of(8, model_name="builtin:nano", parallel=Parallel())
    with pytest.raises(ConfigError, match="--parallel.tensor 8: the model has 4 attention heads"):
        planner.part_sizes(dataclasses.replace(planner.config, parallel=Parallel(tensor=8)))
