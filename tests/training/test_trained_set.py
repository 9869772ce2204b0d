"""Layers that are unfrozen and frozen while a run goes on: as plain PyTorch does it, on any number of ranks."""

import pytest
import torch
from ranks import RankError, run
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.read import open_tensors
from lockstep.config.sections import Optim
from lockstep.distributed.world import World
from lockstep.engines import registry
from lockstep.engines.registry import engine, kinds, trained_set
from lockstep.errors import LockstepError, ResumeError
from lockstep.hooks import Hooks

STEPS, MICRO, EACH = 9, 4, 3
# step (0-based) -> the layers that it trains, of 0, 2 and 4; 4 alone before the first of them
PLANS = {
    "unfreeze": {3: "24"},
    "twice": {2: "24", 5: "024"},
    "freeze": {3: "24", 6: "4"},
    "again": {2: "24", 4: "4", 7: "24"},
    "before the first step": {0: "24"},
}
OPTIMIZERS = {
    "adamw": lambda held: torch.optim.AdamW(held, lr=0.02),
    "momentum": lambda held: torch.optim.SGD(held, lr=0.05, momentum=0.9, dampening=0.1),
}
CASES = [(optimizer, plan) for optimizer in OPTIMIZERS for plan in PLANS]


def network():
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    train_alone(found, "4")
    return found


def train_alone(model, layers):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in layers)


def rows(step, micro):
    drawn = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(EACH, 4, generator=drawn, dtype=torch.float64)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def values(model):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([each.detach().reshape(-1) for each in whole])


def by_hand(optimizer, plan):
    """One graph over each step; the optimizer made over what is trained, the states of what stays kept."""
    model, kept = network(), {}
    held = OPTIMIZERS[optimizer](trained(model))
    for step in range(STEPS):
        if step in plan:
            kept |= held.state
            train_alone(model, plan[step])
            held = OPTIMIZERS[optimizer](trained(model))
            held.state.update({p: kept[p] for p in trained(model) if p in kept})
        sum(model(rows(step, m)).square().sum() for m in range(MICRO)).div(MICRO * EACH).backward()
        clip_grad_norm_(trained(model), 0.3)
        held.step()
        held.zero_grad(set_to_none=True)
    return values(model)


def step_of(made, world, step):
    slots = -(-MICRO // world.size)
    for slot in range(slots):
        micro = world.rank * slots + slot
        with made.accumulate(slot == slots - 1):
            loss = made.model(rows(step, min(micro, MICRO - 1))).square().sum()
            made.backward(loss, (micro < MICRO) / (MICRO * EACH))
    made.step()


def by_engine(world, name, optimizer, plan, exact=True, **settings):
    model = network()
    exact_micro_batches = MICRO if exact else 0
    making = lambda held: OPTIMIZERS[optimizer](trained(held))  # noqa: E731
    made = engine(name, model, making, world, clip=0.3, exact_micro_batches=exact_micro_batches, **settings)
    for step in range(STEPS):
        if step in plan:
            train_alone(model, plan[step])
        step_of(made, world, step)
    return values(model), made


@pytest.mark.parametrize(("optimizer", "plan"), CASES)
def test_what_is_trained_changes_as_in_plain_pytorch(optimizer, plan):
    found, _ = by_engine(World(), "single", optimizer, PLANS[plan])
    torch.testing.assert_close(found, by_hand(optimizer, PLANS[plan]), rtol=0, atol=1e-12)


def every(world, exact):
    names = ("ddp", "zero", "fsdp")
    return {
        (n, *case): by_engine(world, n, case[0], PLANS[case[1]], exact)[0].tolist() for n in names for case in CASES
    }


@pytest.mark.parametrize(("ranks", "exact"), [pytest.param(2, True, marks=pytest.mark.slow), (3, True), (2, False)])
def test_so_it_does_in_every_engine_on_any_number_of_ranks(ranks, exact):
    wanted = {case: by_engine(World(), "single", case[0], PLANS[case[1]], exact)[0].tolist() for case in CASES}
    for found in run(every, ranks, exact):
        for (name, *case), mine in found.items():
            if exact:
                assert mine == wanted[tuple(case)], (name, case)
            torch.testing.assert_close(mine, wanted[tuple(case)], rtol=0, atol=1e-12)


def test_averages_and_loss_scale_continue_and_new_ones_begin():
    plan = {3: "24", 6: "4"}
    _, made = by_engine(World(), "single", "momentum", plan, exact=False, ema=0.9, loss_scaling=True)
    state = made.state_dict()
    assert float(state["averaging/updates"]) == STEPS
    assert float(state["scaler/good_steps"]) == STEPS
    assert {name for name in state if name.startswith("average/")} == {
        f"average/{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")
    }
    model = network()
    frozen, averages = {}, {}
    other = engine("single", model, lambda held: OPTIMIZERS["momentum"](trained(held)), World(), clip=0.3, ema=0.9)
    for step in range(STEPS):
        if step in plan:
            train_alone(model, plan[step])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step_of(other, World(), step)
        share = 1 - min(0.9, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            if p.requires_grad or name in averages:
                averages[name] = averages.get(name, before[name]).lerp(p.detach(), share)
        frozen = {name: s.clone() for name, s in other.state_dict().items() if name.startswith("average/")}
    torch.testing.assert_close(frozen, {f"average/{name}": each for name, each in averages.items()})


def test_given_optimizer_takes_groups_and_keeps_its_scheduler():
    def train(steps_of):
        model = network()
        optimizer = OPTIMIZERS["momentum"](trained(model))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step_with = steps_of(model, optimizer)
        for step in range(6):
            if step == 3:
                train_alone(model, "24")
                optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.01, "initial_lr": 0.01})
                scheduler.base_lrs.append(0.01)
            step_with(step)
            scheduler.step()
        return values(model)

    def plain(model, optimizer):
        def step_with(step):
            sum(model(rows(step, m)).square().sum() for m in range(MICRO)).div(MICRO * EACH).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step_with

    def ours(model, optimizer):
        made = engine("single", model, optimizer, World())
        return lambda step: step_of(made, World(), step)

    torch.testing.assert_close(train(ours), train(plain), rtol=0, atol=1e-12)


def test_parameters_that_cannot_change_are_refused_by_name(monkeypatch):
    model = network()
    made = engine("single", model, OPTIMIZERS["adamw"](trained(model)), World())
    step_of(made, World(), 0)
    assert trained_set(made) is None
    train_alone(model, "24")
    with pytest.raises(LockstepError, match=r"2\.weight.*add_param_group"):
        step_of(made, World(), 1)

    monkeypatch.setitem(registry.ENGINES, "single", registry.ENGINES["single"]._replace(remade=False))
    model = network()
    made = engine("single", model, lambda held: OPTIMIZERS["adamw"](trained(held)), World())
    train_alone(model, "24")
    with pytest.raises(LockstepError, match=r"2\.weight.*--engine fsdp"):
        step_of(made, World(), 0)


def apart(world, name, layers):
    """Each rank trains layers of its own from step 1 on."""
    world.timeout = 4.0
    model = network()
    made = engine(name, model, lambda held: OPTIMIZERS["adamw"](trained(held)), world)
    for step in range(4):
        if step == 1:
            train_alone(model, layers[world.rank])
        step_of(made, world, step)


@pytest.mark.parametrize(("name", "layers"), [("ddp", ["4", "24"]), ("zero", ["24", "4"]), ("ddp", ["024", "24"])])
def test_ranks_that_change_apart_end_with_parameter_names(name, layers):
    with pytest.raises(RankError, match=r"(unfroze [02]\.weight)"):
        run(apart, 2, name, layers, timeout=40.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


class Mine(lockstep.Task):
    reduction = "sum"

    def model(self):
        return Net()

    def dataset(self, split):
        drawn = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.utils.data.TensorDataset(drawn) if split == "train" else None

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def loss(self, model, batch):
        return model(batch).square().sum()


class Own(Mine):
    """An optimizer of its own, made over what is trained."""

    def optimizer(self, model, config):
        return torch.optim.SGD(trained(model), lr=0.05, momentum=0.9)


class OwnAll(Mine):
    """One over everything."""

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Unfreezing(Hooks):
    def __init__(self, task):
        self.task = task

    def after_step(self, context, done):
        change(self.task.built, done)


class Hooked(Mine):
    def __init__(self):
        self.hooks = Unfreezing(self)

    def model(self):
        self.built = super().model()
        return self.built


def change(model, done):
    """In the body of the loop, after `done` steps."""
    if done == 3:
        model.body.requires_grad_(True)
    if done in (6, 8):
        model.head.requires_grad_(done == 8)


def go(world, folder, name, task, engine_name, stops, ema=0.0, **changes):
    """The fingerprint of all that a run keeps, which was stopped after these steps and resumed."""
    for stop in stops:
        settings = {
            "experiment_name": name,
            "save_dir": str(folder),
            "batch_size": 8,
            "micro_batch_size": 2,
            "max_steps": 11,
            "lr": 0.02,
            "exact": True,
            "precision": "float64",
            "engine": engine_name,
            "device": "cpu",
            "optim": Optim(clip=0.3, warmup_steps=2, ema=ema),
            "ckpt_freq": 1,
            "report": False,
        }
        made = task()
        with lockstep.Run(lockstep.Config(**settings | changes, stop_at=stop), made, world) as running:
            for step in running:
                if made.hooks is None:
                    change(running.model, step.global_step)
    with open_tensors(checkpoint.path_of(folder / name, 11)) as whole:
        return checkpoint.fingerprint_of({name: whole.read(name) for name in sorted(whole.contents)})


@pytest.mark.parametrize("task", [Mine, Own, OwnAll, Hooked])
def test_resume_around_a_change_is_the_undisturbed_run(tmp_path, task):
    wanted = go(World(), tmp_path, "whole", task, "single", [0], 0.9)
    for stops in ([2, 3, 4, 0], [6, 7, 0], [3, 8, 9, 0]):
        assert go(World(), tmp_path, "-".join(map(str, stops)), task, "single", stops, 0.9) == wanted, stops


def each(world, folder, cases):
    """Each saves at the first two changes too; on one rank the test above saves after every step."""
    return [go(world, folder, f"{place}", *case, ckpt_freq=3) for place, case in enumerate(cases)]


RESUMED = [3, 7, 0]  # one stop next to the first change; the other changes are between stops


@pytest.mark.parametrize(
    ("ranks", "stops"),
    [(3, RESUMED), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, RESUMED), (2, [0]), (3, [0])])],
)
def test_so_it_is_on_any_number_of_ranks(tmp_path, ranks, stops):
    cases = [(task, engine, stops, 0.9) for task in (Mine, OwnAll) for engine in ("ddp", "zero", "fsdp")]
    wanted = {task: go(World(), tmp_path, task.__name__, task, "single", [0], 0.9) for task in (Mine, OwnAll)}
    for found in run(each, ranks, tmp_path, cases, timeout=120.0):
        assert found == [wanted[case[0]] for case in cases]


class Forgetful(Mine):
    """Its optimizer holds the head alone, whatever is trained, and gets a group by hand."""

    def optimizer(self, model, config):
        self.own = torch.optim.SGD(model.head.parameters(), lr=0.05)
        return self.own


def test_a_group_that_a_resume_could_not_make_is_refused_by_name(tmp_path):
    settings = {"max_steps": 6, "batch_size": 8, "save_dir": str(tmp_path), "experiment_name": "r", "device": "cpu"}
    task = Forgetful()
    task.model = lambda: Net().double()
    for _ in range(2):
        with lockstep.Run(lockstep.Config(**settings, stop_at=4, precision="float64"), task) as running:
            for step in running:
                if step.global_step == 2:
                    running.model.body.requires_grad_(True)
                    task.own.add_param_group({"params": [*running.model.body.parameters()], "lr": 0.01})
        if running.status == "stopped":
            break
    with (
        pytest.raises(ResumeError, match=r"body\.0\.weight"),
        lockstep.Run(lockstep.Config(**settings, precision="float64"), task) as running,
    ):
        pass


def test_a_state_says_since_when_a_parameter_is_trained():
    _, made = by_engine(World(), "single", "adamw", {3: "24"})
    assert kinds(made) == {f"model/2.{kind}": f"2.{kind}, trained since step 4" for kind in ("weight", "bias")}
    assert {*trained_set(made).made, *trained_set(made).now} == {"2.weight", "2.bias", "4.weight", "4.bias"}
