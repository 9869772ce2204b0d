"""The promise: the same training at every world size, and bitwise the same with `exact`."""

import pytest
import torch
from ranks import run
from toys import Ragged, fit, parts, train

import lockstep
from lockstep.config.schema import Config
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError


def close(found, wanted, tolerance):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "micro"), [(8, 1), (10, 2), (12, 3)])
def test_losses_and_norms_are_the_same_at_every_world_size(size, micro):
    task = Ragged(dropout=0.1)
    losses, norms, _ = fit(World(), task, size=size, micro=micro)
    assert losses[-1] < losses[0]
    for world_size in (1, 2, 3, 4):
        for found in run(_fit, world_size, task, size, micro):
            close(found[0], losses, 1e-12)
            close(found[1], norms, 1e-12)


def _fit(world, task, size, micro, exact=False):
    return fit(world, task, size=size, micro=micro, exact=exact)


def test_float32_agrees_to_its_own_precision():
    task = Ragged(dropout=0.1, dtype=torch.float32)
    losses, _, _ = fit(World(), task)
    for world_size in (2, 3):
        for found in run(_fit, world_size, task, 8, 1):
            close(found[0], losses, 1e-5)


@pytest.mark.parametrize(
    ("size", "micro", "worlds"), [(8, 1, (1, 2, 3)), (7, 1, (3, 4)), (24, 2, (3,))], ids=["M=8", "M=7", "M=12"]
)
def test_exact_is_bitwise_the_same(size, micro, worlds):
    task = Ragged(samples=100, dropout=0.2, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        alone = fit(World(), task, size=size, micro=micro, exact=True)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    for world_size in worlds:
        assert run(_fit, world_size, task, size, micro, True) == [alone] * world_size


def test_exact_is_needed():
    """Plain ddp does not have these bits: were it so, the test above would prove nothing."""
    task = Ragged(samples=100, dropout=0.2, dtype=torch.float32)
    alone = fit(World(), task)
    assert run(_fit, 4, task, 8, 1)[0][2] != alone[2]


@pytest.mark.parametrize(("world_size", "micro_batches", "fit"), [(9, 8, 8), (8, 4, 4), (2, 1, 1)])
def test_exact_refuses_more_ranks_than_micro_batches(world_size, micro_batches, fit):
    from lockstep.engines.exact import check_servable

    with pytest.raises(ConfigError, match=rf"--exact .* {world_size} processes.* {fit} processes, or"):
        check_servable(micro_batches, world_size)


class Partly(torch.nn.Module):
    """Its second layer is used by some micro-batches only."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.third = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


class Branching(lockstep.Task):
    def model(self):
        return Partly()

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).square().sum()


def test_exact_serves_parameters_unused_by_some_micro_batches():
    alone = fit(World(), Branching(), exact=True)
    torch.use_deterministic_algorithms(False)
    assert run(_fit, 2, Branching(), 8, 1, True) == [alone] * 2


def _resumed(world, task, stop):
    made, batches = parts(world, task, count=6, size=10, micro=2)
    before = train(world, made, batches, task, stop=stop)[0]
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    again, batches = parts(world, task, count=6, size=10, micro=2)
    again.load_state_dict(state)
    return before + train(world, again, batches, task, start=stop)[0]


def test_a_restored_engine_goes_on_as_if_never_stopped():
    task = Ragged(dropout=0.1)
    whole = fit(World(), task, size=10, micro=2)[0]
    assert _resumed(World(), task, 3) == whole
    for found in run(_resumed, 2, task, 3):
        close(found, whole, 1e-12)


def test_fresh_engine_has_all_state_names_and_stays_unchanged():
    made, _ = parts(World(), Ragged())
    weights = [p.detach().clone() for p in made.model.parameters()]
    state = made.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    assert {name.rpartition("/")[2] for name in state if name.startswith("optimizer/")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert all(not tensor.any() for name, tensor in state.items() if name.startswith("optimizer/"))


def _joined_again(world, errors):
    world.leave()
    found = []
    for number in range(3):
        again = World.join(device="cpu", timeout=30.0)
        found.append((again.gather(10 * number + again.rank), again.name("watch"), again.name("watch")))
        again.abandon() if errors else again.leave()
    World.join(device="cpu", timeout=30.0).leave()
    return found


@pytest.mark.parametrize("errors", [False, True])
def test_a_process_joins_as_often_as_it_likes(errors):
    one, other = run(_joined_again, 2, errors)
    assert one == other
    assert [gathered for gathered, _, _ in one] == [[0, 1], [10, 11], [20, 21]]
    assert len({name for _, *names in one for name in names}) == 6  # nothing of an earlier join is found


class Failing(Ragged):
    def loss(self, model, batch):
        if model.training:  # what is tried before step 1 is not
            raise ValueError("from inside")
        return super().loss(model, batch)


def _several_runs(world, folder, engine):
    """What the steps of whole runs said that came before, between and after others that were left in every way."""
    world.leave()

    def config(name):
        return Config(
            save_dir=folder,
            experiment_name=name,
            batch_size=8,
            micro_batch_size=2,
            max_steps=4,
            ckpt_freq=2,
            log_freq=1,
            engine=engine,
            device="cpu",
            timeout=30.0,
        )

    def whole(name, task):
        return [step.norm for step in lockstep.Run(config(name), task)]

    task = Ragged(dropout=0.1, dtype=torch.float32)
    first = whole("a", task)
    for step in lockstep.Run(config("b"), task):
        if step.global_step == 1:
            break
    kept = []  # as a notebook keeps the last error, and with it whatever its frames hold
    try:
        whole("c", Failing(dtype=torch.float32))
    except ValueError as error:
        kept.append(error)
    left = iter(lockstep.Run(config("b"), task))  # goes on from where it was left, and is left in the middle
    assert next(left).global_step == 2
    try:
        next(iter(lockstep.Run(Config(save_dir=folder, experiment_name="b", batch_size=0), task)))
    except UsageError as error:
        kept.append(error)
    rest = whole("b", task)  # of the folder that `left` held
    assert list(left) == []
    return first, rest, whole("d", task), len(kept)


@pytest.mark.parametrize("engine", ["ddp", "zero"])
def test_a_process_trains_one_run_after_the_other(tmp_path, engine):
    for first, rest, last, kept in run(_several_runs, 2, str(tmp_path), engine):
        assert kept == 2
        assert last == first
        assert rest == first[2:]


def test_a_process_of_its_own_trains_one_run_after_the_other(tmp_path, capsys):
    first, rest, last, _ = _several_runs(World(), str(tmp_path), "auto")
    assert last == first
    assert rest == first[2:]
    assert "left in the middle" in capsys.readouterr().err


def test_a_run_inside_a_run_is_refused(tmp_path):
    class Nested(Ragged):
        def loss(self, model, batch):
            return next(iter(lockstep.Run(Config(save_dir=str(tmp_path)), self)))

    config = Config(save_dir=str(tmp_path), batch_size=8, micro_batch_size=2, max_steps=2, device="cpu")
    with pytest.raises(UsageError, match="one run at a time"):
        list(lockstep.Run(config, Nested(dtype=torch.float32)))


def _together(world, fault):
    """What a rank raises, and what it did before: agreements of one phase with a fault of rank 1."""
    done = []

    def act(where):
        if fault == where and world.rank == 1:
            raise ConfigError(f"fault {where}")
        done.append(where)

    try:
        with world.together():
            on_all_ranks(world, lambda: act("first"))
            world.check_same("plan", {"steps": 3 + (fault == "plan" and world.rank)})
            on_all_ranks(world, lambda: act("second"))
            assert world.gather(world.rank) == list(range(world.size))
            done.append("gathered")
            if fault == "both":
                world.check_same("order", {"first": world.rank})
                act("both")
            on_all_ranks(world, lambda: act("third"))
    except UsageError as error:
        return type(error).__name__, str(error), done
    except LockstepError as error:
        return type(error).__name__, str(error), done
    return "", "", done + world.gather(world.rank)


def test_deferred_agreements_raise_on_all_ranks_in_order():
    assert run(_together, 3, "") == [("", "", ["first", "second", "gathered", "third", 0, 1, 2])] * 3
    for fault, last in (("first", "second"), ("second", "second"), ("third", "third")):
        for rank, (kind, text, done) in enumerate(run(_together, 3, fault)):
            assert kind == ("ConfigError" if rank == 1 else "PeerError")
            assert f"fault {fault}" in text
            assert "rank 1" in text or rank == 1
            assert rank == 1 or done[-1] == last  # nobody went past the gather
    for fault, key in (("plan", "steps"), ("both", "first")):  # a difference comes before the error that follows it
        for kind, text, _ in run(_together, 3, fault):
            assert kind == "LockstepError"
            assert key in text
            assert "rank 1" in text
