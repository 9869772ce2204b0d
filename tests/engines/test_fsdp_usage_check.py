"""fsdp as before torch 2.13, which sends no zeros for unused parameters: each exchange is checked before it starts."""

import pytest
import torch
from ranks import run
from support import alone, build, close
from test_engine_behaviour import Plain, Three, numbers
from test_engine_unused import alone_left_out, left_out
from torch.utils.checkpoint import checkpoint
from toys import train

from lockstep.engines.fsdp import engine as fsdp
from lockstep.engines.fsdp.apply import find_leaves
from lockstep.errors import ConfigError

SETTINGS = {
    "full": {},
    "one micro-batch": {"micro": 4},
    "shard": {"accumulate": "shard"},
    "none": {"sharding": "none"},
    "exact": {"exact": True},
}


def _refused(world, wanted, settings):
    """(the line that refused a run, or none; micro-batches begun; the state where it was not refused).

    `wanted(rank, call)`: whether a rank uses the extra layer in its call-th micro-batch.
    """
    fsdp.FILLS_UNUSED = False
    task, calls = Plain("always"), []
    made, batches = build(world, task, "fsdp", **{"size": 8, "micro": 1, "count": 3, **settings})
    module = next(m for m in made.model.modules() if isinstance(m, Three))
    module.wanted = lambda x: calls.append(0) or wanted(world.rank, len(calls) - 1)
    try:
        found = train(world, made, batches, task)
    except ConfigError as error:
        return str(error), len(calls), None
    return "", len(calls), (*found, numbers(made))


def by_rank_1_alone(rank, call):
    return rank == 1


def by_rank_1_later(rank, call):
    return rank == 1 and call == 5


def by_each_second(rank, call):
    return bool(call % 2)


def by_first_of_two(rank, call):
    """Both ranks use it in the step, in micro-batches of their own."""
    return call % 4 == rank


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_layer_used_by_one_rank_is_refused_in_step_1(settings):
    found = run(_refused, 2, by_rank_1_alone, settings)
    assert found[0] == found[1]
    line, calls, _ = found[0]
    assert calls <= 4  # the first step
    for part in ("extra.weight", "extra.bias", "by rank 1", "by rank 0", "--engine ddp", "torch 2.13"):
        assert part in line
    assert "layer1" not in line


@pytest.mark.parametrize(("kind", "begun"), [("full", 8), ("shard", 6), ("exact", 6)])
def test_layer_used_later_by_one_rank_is_refused_before_exchange(kind, begun):
    for line, calls, _ in run(_refused, 2, by_rank_1_later, SETTINGS[kind]):
        assert "extra.weight" in line
        assert calls == begun


@pytest.mark.parametrize("kind", ["shard", "exact"])
def test_micro_batches_of_a_step_must_use_the_same_layers(kind):
    for line, calls, _ in run(_refused, 2, by_each_second, SETTINGS[kind]):
        assert "extra.weight" in line
        assert calls == 2


def test_ranks_that_agree_over_a_step_train_as_one_process():
    class Alone(Plain):
        def model(self):
            made, calls = super().model(), []
            made.wanted = lambda x: calls.append(0) or (len(calls) - 1) % 8 in (0, 5)
            return made

    wanted = alone(Alone("always"), size=8, micro=1, count=3)
    for line, _, found in run(_refused, 2, by_first_of_two, {}):
        assert line == ""
        close(found, wanted, 1e-11)


def _left_out_unfilled(world, settings):
    fsdp.FILLS_UNUSED = False
    return left_out(world, "fsdp", "nobody", settings)


@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"accumulate": "shard"}])
def test_what_no_rank_uses_in_a_later_step_is_left_alone(settings):
    wanted = alone_left_out("nobody", {key: value for key, value in settings.items() if key == "exact"})
    found = run(_left_out_unfilled, 2, settings)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-9, atol=1e-9, msg=name)


def _unchecked(world):
    fsdp.FILLS_UNUSED = False
    made, _ = build(world, Plain("always"), "fsdp", find_unused_parameters="false")
    with pytest.raises(ConfigError) as caught:
        build(world, Plain("always"), "fsdp", find_unused_parameters="true")
    return made.inner._check is None, str(caught.value)


def test_declared_full_use_is_not_checked_and_search_is_refused():
    for unchecked, line in run(_unchecked, 2):
        assert unchecked
        assert "--engine.find-unused-parameters true" in line


def test_leaves_of_a_graph_are_those_that_a_backward_fills():
    model = Three()
    for branch in (False, True):
        model.wanted = lambda x, branch=branch: branch
        for call in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
            loss = call(torch.ones(2, 8)).sum()
            found = {name for name, p in model.named_parameters() if p in find_leaves(loss)}
            loss.backward()
            assert found == {name for name, p in model.named_parameters() if p.grad is not None}
            assert len(found) == (8 if branch else 6)
            model.zero_grad()
