"""Loops of one's own: the bits of lockstep.train at any world size and after a resume, exact sums, every row once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from refusals import refuses
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep import checkpoint
from lockstep.config.sections import Guards, Optim
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.own_loop import _from_json, _to_json

SIZE, BATCH, MICRO = 61, 12, 3


def samples(ragged=False):
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, 6, generator=drawn, dtype=torch.float32)
    y = torch.randint(4, (SIZE,), generator=drawn)
    if ragged:
        y[torch.rand(SIZE, generator=drawn, dtype=torch.float32) < 0.4] = -100
    return TensorDataset(x, y)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Dropout(0.2), nn.GELU(), nn.Linear(10, 4))


def normed():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.2), nn.GELU(), nn.Linear(10, 4))


def labelled(batch):
    return int((batch[1] != -100).sum())


def trained(world, folder, *, stop=0, name="auto", exact=True, ragged=False, workers=0, how="mean", make=net):
    """A whole training, or up to a step; its parameters, and the epochs' samples in the order they came."""
    model = make()
    made = []

    def optimizer(held):
        made.append(torch.optim.AdamW(held.parameters(), lr=1e-2))
        return made[-1]

    loader = lockstep.loader(
        samples(ragged),
        world,
        batch_size=BATCH,
        micro_batch_size=MICRO,
        epochs=2,
        seed=5,
        count=labelled if ragged else None,
        reduction=how,
        workers=workers,
    )
    micro_batches = loader.micro_batches * exact
    engine = lockstep.engine(
        *(name, model, optimizer, world), clip=1.0, exact_micro_batches=micro_batches, batchnorm="replay"
    )
    scheduler = torch.optim.lr_scheduler.StepLR(made[0], 4, gamma=0.5)
    done = lockstep.load_state(folder, world, engine=engine, scheduler=scheduler, loader=loader)
    assert done == loader.steps - len(loader)
    for step in loader:
        for batch in step:
            x, y = batch.data
            with engine.accumulate(batch.last):
                engine.backward(F.cross_entropy(engine.model(x), y, reduction=how), batch.weight)
        engine.step()
        scheduler.step()
        if step.number + 1 in (3, stop):
            lockstep.save_state(folder, world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)
        if step.number + 1 == stop:
            break
    found = {name: full(tensor).tolist() for name, tensor in engine.state_dict().items() if name[:6] == "model/"}
    del engine
    return found, made[0].param_groups[0]["lr"]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_runs_are_bitwise_on_any_world_and_after_a_resume(tmp_path):
    torch.set_num_threads(1)
    alone = trained(World(), tmp_path / "1")
    assert run(trained, 2, tmp_path / "2") == [alone, alone]
    trained(World(), tmp_path / "3", stop=7, workers=1)
    assert run(trained, 2, tmp_path / "3") == [alone, alone]
    assert checkpoint.list_steps(tmp_path / "3") == [3, 7]


def normed_ones(world, folder, name):
    return trained(world, folder, name=name, make=normed)


@pytest.mark.parametrize(("size", "name"), [(2, "fsdp"), (3, "ddp")])
def test_batchnorm_has_the_bits_of_one_rank(tmp_path, size, name):
    """Three ranks do not divide the four micro-batches: there are empty slots."""
    torch.set_num_threads(1)
    alone = trained(World(), tmp_path / "1", make=normed)
    assert alone[0]["model/1.num_batches_tracked"] == 41  # micro-batches that are none of an empty slot
    assert run(normed_ones, size, tmp_path / "2", name) == [alone] * size


def without_accumulate(world):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    engine = lockstep.engine("auto", model, torch.optim.SGD(model.parameters(), lr=0.1), world, batchnorm="replay")
    for rows in torch.randn(3, 4, 2, dtype=torch.float32):
        engine.backward(engine.model(rows).square().mean())
        engine.step()
    return model.running_mean.tolist(), int(model.num_batches_tracked)


def test_a_loop_without_accumulate_counts_each_batch_once():
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(2)
    for rows in torch.randn(3, 4, 2, dtype=torch.float32):
        plain(rows)
    mean, count = without_accumulate(World())
    assert (count, mean) == (3, pytest.approx(plain.running_mean.tolist(), rel=1e-6))
    model = nn.Linear(1, 1)
    with refuses(ConfigError, "batchnorm", "'sync'", "'replay'"):
        lockstep.engine("single", model, torch.optim.SGD(model.parameters()), World(), batchnorm="sync")


@pytest.mark.parametrize(("before", "after"), [("zero", "fsdp"), ("fsdp", "zero")])
def test_any_engine_goes_on_where_another_stopped(tmp_path, before, after):
    torch.set_num_threads(1)
    alone = trained(World(), tmp_path / "alone", ragged=True)
    assert run(stopped_and_resumed, 2, tmp_path / "both", before, after) == [alone, alone]


def stopped_and_resumed(world, folder, before, after):
    trained(world, folder, name=before, stop=7, ragged=True)
    return trained(world, folder, name=after, ragged=True)


class _Same(lockstep.Task):
    reduction = "sum"
    make = staticmethod(net)

    def model(self):
        return self.make()

    def dataset(self, split):
        return samples() if split == "train" else None

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def schedule(self, step, steps):
        return 0.5 ** (step // 4)


class _SameNormed(_Same):
    make = staticmethod(normed)


@pytest.mark.parametrize("task", [_Same, _SameNormed])
def test_a_loop_of_ones_own_has_the_bits_of_the_built_in_one(tmp_path, task):
    torch.set_num_threads(1)
    mine, _ = trained(World(), tmp_path / "mine", how="sum", make=task.make)
    config = lockstep.Config(
        experiment_name="theirs",
        save_dir=str(tmp_path),
        batch_size=BATCH,
        micro_batch_size=MICRO,
        num_epochs=2,
        seed=5,
        exact=True,
        optim=Optim(clip=1.0),
        guards=Guards(straggler=0.0),
    )
    with lockstep.Run(config, task(), World()) as going:
        for _ in going:
            pass
        theirs = {f"model/{name}": tensor.tolist() for name, tensor in going.model.state_dict().items()}
    assert mine == theirs


def one_step(world, ragged):
    """The gradient of a first step, and what the mean over all of the step's items gives."""
    torch.set_default_dtype(torch.float64)
    data = samples(ragged)
    data.tensors = (data.tensors[0].double(), data.tensors[1])
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    engine = lockstep.engine("auto", model, torch.optim.SGD(model.parameters(), lr=1.0), world)
    before = model.weight.detach().clone()
    loader = lockstep.loader(data, world, batch_size=BATCH, micro_batch_size=4, steps=1, count=labelled)
    for step in loader:
        for batch in step:
            x, y = batch.data
            with engine.accumulate(batch.last):
                engine.backward(F.cross_entropy(engine.model(x), y, reduction="mean"), batch.weight)
        engine.step()
    torch.set_default_dtype(torch.float32)
    return (before - model.weight.detach()).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_gradient_is_that_of_the_mean_over_all_items(world_size):
    found = run(one_step, world_size, True)
    data, order = samples(True), Shuffled(SIZE, 0).at(0, BATCH)[1]
    x, y = data.tensors[0][order].double(), data.tensors[1][order]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(6, 4)
    torch.set_default_dtype(torch.float32)
    F.cross_entropy(model(x), y).backward()
    for each in found:
        torch.testing.assert_close(torch.tensor(each, dtype=torch.float64), model.weight.grad, rtol=1e-12, atol=1e-14)


def evaluated(world):
    data = TensorDataset(torch.arange(SIZE), torch.arange(SIZE).double().exp())
    rows, wide = [], []
    for step in lockstep.loader(data, world, batch_size=12, micro_batch_size=3, shuffle=False, workers=0):
        found = [
            {"index": batch.data[0], "wide": (batch.data[1][:, None].expand(-1, 2).to(torch.complex128),)}
            for batch in step
        ]
        both = lockstep.gather_for_metrics(step, found)
        rows += both["index"].tolist()
        wide += both["wide"][0][:, 1].real.log().tolist()
    return rows, wide


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_row_comes_once_in_the_order_of_the_data(world_size):
    for rows, wide in run(evaluated, world_size):
        assert rows == list(range(SIZE))
        assert wide == pytest.approx(list(range(SIZE)))


def refused(world):
    data = TensorDataset(torch.zeros(4, 1))
    found = []
    for what in (
        lambda: lockstep.loader(data, world, batch_size=0, micro_batch_size=1),
        lambda: lockstep.loader(data, world, batch_size=4, micro_batch_size=4),
        lambda: lockstep.loader(data, world, batch_size=4, micro_batch_size=3),
        lambda: lockstep.loader(data, world, batch_size=4, micro_batch_size=1, reduction="max"),
        lambda: lockstep.loader(data, world, batch_size=4, micro_batch_size=1, steps=-1),
        lambda: lockstep.loader(iter([]), world, batch_size=4, micro_batch_size=1),
        lambda: lockstep.autocast(world, "fp8"),
    ):
        with pytest.raises(lockstep.errors.LockstepError) as error:
            what()
        found.append(str(error.value))
    return found


def test_bad_input_is_one_line():
    found = run(refused, 2)[0]
    assert all("\n" not in line for line in found)
    for line, part in zip(
        found,
        (
            "batch_size is 0",
            "fewer than the 2 ranks",
            "not a multiple",
            "'mean' or 'sum'",
            "cannot be negative",
            "has no __len__",
            "float32",
        ),
        strict=True,
    ):
        assert part in line


def test_what_does_not_fit_is_refused(tmp_path):
    world = World()
    make = lambda **more: lockstep.loader(samples(), world, **{"batch_size": 12, "micro_batch_size": 3, **more})  # noqa: E731
    lockstep.save_state(tmp_path, world, 1, loader=make())
    with pytest.raises(ConfigError, match=r"batch_size \(12 before, 6 now\)"):
        lockstep.load_state(tmp_path, world, loader=make(batch_size=6))
    with refuses(CheckpointError, "loader, metric"):
        lockstep.load_state(tmp_path, world, loader=make(), metric=net())
    with pytest.raises(UsageError, match="loader/what is a object"):
        lockstep.save_state(tmp_path, world, 2, loader=_Odd())
    for step in make():
        with refuses(UsageError, "1", "4 micro-batches"):
            lockstep.gather_for_metrics(step, [torch.zeros(1)])
        with refuses(UsageError, "gather_for_metrics", "structure"):
            lockstep.gather_for_metrics(step, [torch.zeros(1), (torch.zeros(1),)] * 2)
        with pytest.raises(UsageError, match="no rows"):
            lockstep.gather_for_metrics(step, [torch.zeros(())] * 4)
        break
    assert lockstep.load_state(tmp_path / "nothing", world, loader=make()) == 0


class _Odd:
    def state_dict(self):
        return {"what": object()}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(-3, 3) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
@settings(deadline=None)
def test_any_plain_state_comes_back_as_it_was(value):
    tensors = {}
    kept = _to_json([value, torch.arange(3), math.inf], "name/", tensors)
    back, tensor, most = _from_json(kept, tensors)
    assert (back, type(back), most) == (value, type(value), math.inf)
    assert tensor is tensors["name/1"]


def test_a_torch_optimizer_and_a_metric_without_an_engine(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    lockstep.save_state(tmp_path, World(), 1, optimizer=optimizer, model=model)
    other = net()
    fresh = torch.optim.Adam(other.parameters(), lr=1.0)
    assert lockstep.load_state(tmp_path, World(), optimizer=fresh, model=other) == 1
    assert fresh.param_groups[0]["lr"] == 1e-2
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


def test_leaving_the_loop_and_going_on_takes_no_sample_twice():
    loader = lockstep.loader(samples(), World(), batch_size=12, micro_batch_size=3, shuffle=False)
    seen = []
    for step in loader:
        seen += [row for batch in step if batch.weight for row in batch.data[0].tolist()]
        if step.number == 2:
            break
    assert len(loader) == 3
    for step in loader:
        seen += [row for batch in step if batch.weight for row in batch.data[0].tolist()]
    assert seen == samples().tensors[0].tolist()
    assert len(loader) == 0


def test_a_url_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: lockstep.save_state("s3://bucket/a", World(), 1),
        lambda: lockstep.load_state("s3://b/a", World()),
    ):
        with refuses(ConfigError, "save_state", "load_state"):
            call()
    assert not list(tmp_path.iterdir())


ROLLOUTS = 24


def read_through(loader, seen):
    """Add what each step of a loader has: its samples, and what its forwards would draw."""
    for step in loader:
        parts = [[batch.data[0].tolist(), torch.rand(2).tolist()] for batch in step]
        rows = [part for part, counts in zip(parts, step.counted, strict=True) if counts]
        seen.append([part for rank in step.world.gather(rows) for part in rank])


def iterated(world, folder, begin=0, end=3, evaluates=True):
    """Iterations of a training by reinforcement: new data and a new loader in each, and an evaluation in between."""
    seen = []
    metric = nn.Linear(1, 1)
    done = lockstep.load_state(folder, world, metric=metric)
    assert done == begin
    for iteration in range(done, end):
        rollouts = TensorDataset(torch.arange(ROLLOUTS) + 100 * iteration)
        read_through(lockstep.loader(rollouts, world, batch_size=8, micro_batch_size=4, epochs=2), seen)
        lockstep.save_state(folder, world, iteration + 1, metric=metric)
        if evaluates:
            for _ in lockstep.loader(rollouts, world, batch_size=8, micro_batch_size=4, shuffle=False):
                pass
    return seen


def test_a_further_loader_continues_where_the_last_one_ended(tmp_path):
    alone = iterated(World(), tmp_path / "1")
    one = []
    read_through(
        lockstep.loader(TensorDataset(torch.arange(ROLLOUTS)), World(), batch_size=8, micro_batch_size=4, epochs=6), one
    )
    for place, (step, same) in enumerate(zip(alone, one, strict=True)):  # as one loader over all epochs
        assert [[[row % 100 for row in rows], drawn] for rows, drawn in step] == same
        assert {row // 100 for rows, _ in step for row in rows} == {place // 6}
    assert len({str([drawn for _, drawn in step]) for step in alone}) == len(alone)
    assert run(iterated, 2, tmp_path / "2") == [alone, alone]
    begun = iterated(World(), tmp_path / "3", end=2, evaluates=False)
    assert begun + run(iterated, 2, tmp_path / "3", 2)[0] == alone


def stopped_within(world, folder):
    """A second loader that is left in its middle, and continued by another start."""
    seen = []
    data = TensorDataset(torch.arange(ROLLOUTS))
    make = lambda: lockstep.loader(data, world, batch_size=8, micro_batch_size=4, epochs=2)  # noqa: E731
    read_through(make(), seen)
    second = make()
    for step in second:
        for _ in step:
            pass
        if step.number == 2:
            lockstep.save_state(folder, world, 3, loader=second)
            break
    del seen[:]
    read_through(second, seen)
    read_through(make(), seen)
    fresh = World(world.rank, world.local_rank, world.size, world.device, world.timeout, world.control)
    again, resumed = lockstep.loader(data, fresh, batch_size=8, micro_batch_size=4, epochs=2), []
    lockstep.load_state(folder, fresh, loader=again)
    read_through(again, resumed)
    read_through(lockstep.loader(data, fresh, batch_size=8, micro_batch_size=4, epochs=2), resumed)
    return seen, resumed


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_within_a_later_loader_has_its_order_and_draws(tmp_path, world_size):
    for seen, resumed in run(stopped_within, world_size, tmp_path):
        assert len(seen) == 3 + 6
        assert resumed == seen


def scheduled(world, folder, make, by_epochs, stop=0):
    """The rates and momenta of each step, and the weights, with the scheduler that the guide advises."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = lockstep.loader(doubled(), world, batch_size=BATCH, micro_batch_size=MICRO, epochs=3)
    engine = lockstep.engine("auto", model, optimizer, world)
    scheduler = make(optimizer, loader.steps)
    state = {"engine": engine, "scheduler": scheduler, "loader": loader}
    lockstep.load_state(folder, world, **state)
    used = []
    for step in loader:
        used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        for batch in step:
            x, y = batch.data
            with engine.accumulate(batch.last):
                engine.backward(F.cross_entropy(engine.model(x), y), batch.weight)
        engine.step()
        if step.ends_epoch or not by_epochs:
            scheduler.step()
        if step.number + 1 == stop:
            lockstep.save_state(folder, world, stop, **state)
            break
    torch.set_default_dtype(torch.float32)
    return used, model.weight.tolist()


def doubled():
    data = samples()
    data.tensors = (data.tensors[0].double(), data.tensors[1])
    return data


def plainly(make, by_epochs):
    """The same by hand: plain PyTorch on one device, in three epochs."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order, (x, y) = Shuffled(SIZE, 0).at(0, 3 * SIZE)[1], doubled().tensors
    starts = range(0, 3 * SIZE, BATCH)
    scheduler = make(optimizer, len(starts))
    used = []
    for start in starts:
        rows = order[start : start + BATCH]
        used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if not by_epochs or (start + BATCH) // SIZE > start // SIZE:
            scheduler.step()
    torch.set_default_dtype(torch.float32)
    return used, model.weight.tolist()


def one_cycle(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps + 1)


def halved(optimizer, steps):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(("make", "by_epochs"), [(halved, True), (one_cycle, False)])
def test_schedulers_by_epoch_and_step_match_plain_pytorch(tmp_path, make, by_epochs):
    rates, weights = plainly(make, by_epochs)
    assert len(set(rates)) == (3 if by_epochs else len(rates))
    runs = run(scheduled, 2, tmp_path / "2", make, by_epochs)
    first, _ = scheduled(World(), tmp_path / "1", make, by_epochs, stop=7)
    runs += [(first + used, found) for used, found in run(scheduled, 2, tmp_path / "1", make, by_epochs)]
    for used, found in runs:
        torch.testing.assert_close(torch.tensor(used), torch.tensor(rates), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), rtol=1e-12, atol=1e-14)
