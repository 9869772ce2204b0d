"""An update is rehearsed on copied state before step 1: it leaves no bit, and what fails is one line.

Beside it what engines refuse: a pass that cannot be repeated, sparse gradients, a penalty.
"""

import warnings

import pytest
import torch
from closure_tasks import OPTIMIZERS, Polite, Sam, lbfgs
from ranks import run
from support import build, digest
from torch import nn
from toys import Ragged

import lockstep
from lockstep.distributed.world import World
from lockstep.engines.registry import check_embeddings
from lockstep.errors import ConfigError, DataError

TASK = Ragged()
KINDS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, initial_accumulator_value=0.1),
    "Polite": lambda m: Polite(m.parameters(), lr=0.05, momentum=0.9),
}


class Pass:
    """What the loop gives an engine: a step's micro-batches, repeated when it is asked for."""

    def __init__(self, made, group):
        self.made, self.group, self.value = made, group, torch.zeros(())

    def again(self):
        self.value = torch.zeros(())
        for batch in self.group:
            with self.made.accumulate(batch is self.group[-1]):
                loss = TASK.loss(self.made.model, batch.data) / 50
                self.made.backward(loss, batch.weight)
                self.value = self.value + loss.detach()
        return self.value

    def loss(self):
        return self.value


def _digest(world, name, make, rehearsed, exact=False, **options):
    made, batches = build(world, TASK, name, make=make, exact=exact, **options)
    for step, group in batches.from_step(0):
        often = 1 if options.get("static_graph") else 2  # which begins anew, and so exchanges another way
        if rehearsed and step < often:  # before the first step, and with states that there are
            made.rehearse(lambda group=group: TASK.loss(made.model, group[0].data))
            assert all(parameter.grad is None for parameter in made.model.parameters())
        evaluate = Pass(made, group)
        evaluate.again()
        made.step(1.0, evaluate=evaluate)
    return digest(made, world)


def _pairs(world, cases):
    """For each case (engine, optimizer, exact, options): the state without a rehearsal, and with it."""
    every = KINDS | {name: lambda m, make=make: make(m.parameters()) for name, make in OPTIMIZERS.items()}
    return [
        [_digest(world, name, every[kind], rehearsed, exact, **options) for rehearsed in (False, True)]
        for name, kind, exact, options in cases
    ]


def test_a_rehearsal_leaves_no_bit_on_one_process():
    kinds = [*KINDS, "sam", "sam-quiet", "lbfgs"]
    for plain, rehearsed in _pairs(World(), [("single", kind, exact, {}) for kind in kinds for exact in (False, True)]):
        assert rehearsed == plain


def test_a_rehearsal_leaves_no_bit_on_two():
    cases = [(name, kind, exact, {}) for name in ("ddp", "zero", "fsdp") for kind in KINDS for exact in (False, True)]
    cases += [("ddp", kind, exact, {}) for kind in ("sam", "lbfgs") for exact in (False, True)]
    cases += [("ddp", "SGD", False, {"static_graph": True}), ("ddp", "SGD", False, {"find_unused_parameters": "true"})]
    cases += [("single" if name == "" else "fsdp", "SGD", False, {"sharding": name}) for name in ("grad-op", "none")]
    for case, (plain, rehearsed) in zip(cases, run(_pairs, 2, cases)[0], strict=True):
        assert rehearsed == plain, case


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        self.calls = 1
        raise IndexError("no such group\nand more")


def test_an_optimizer_that_fails_is_one_line_and_leaves_no_trace():
    model = nn.Linear(2, 1)
    optimizer, before = Broken(model.parameters(), lr=0.1), model.weight.detach().clone()
    made = lockstep.engine("single", model, optimizer, World())
    line = r"Broken.*IndexError: no such group \(test_engine_rehearsal\.py:\d+\)"
    with pytest.raises(DataError, match=line) as caught:
        made.rehearse(lambda: made.model(torch.ones(3, 2)).sum())
    assert "\n" not in str(caught.value)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert not hasattr(optimizer, "calls")


def test_torchs_own_refusals_are_one_line():
    """AdamW takes no sparse gradients, SparseAdam no others."""
    for make, sparse in ((torch.optim.AdamW, True), (torch.optim.SparseAdam, False)):
        model = nn.Embedding(4, 2, sparse=sparse)
        made = lockstep.engine("single", model, make(model.parameters()), World())
        with pytest.raises(DataError, match=make.__name__) as caught:
            made.rehearse(lambda made=made: made.model(torch.tensor([1])).sum())
        assert "\n" not in str(caught.value)


def _slopes(world, name, exact=False):
    """(norm of three steps) of a loss that takes the gradient of the model's output."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    made = lockstep.engine(
        name, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), world, exact_micro_batches=2 * exact
    )
    rows = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(place):
        x = rows[place].clone().requires_grad_()
        found = made.model(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return (found.square() + slope.square().sum(1, keepdim=True)).mean()

    made.rehearse(lambda: loss(0))
    norms, mine = [], range(2) if world.size == 1 else [world.rank]
    for _ in range(3):
        for place in mine:
            with made.accumulate(place == mine[-1]):
                made.backward(loss(place), 0.5)
        norms.append(float(made.step(1.0).norm))
    return norms


def _slopes_refused(world):
    for exact in (False, True):
        with pytest.raises(ConfigError, match="--engine fsdp .*torch.autograd.grad"):
            _slopes(world, "fsdp", exact)


def test_gradient_penalties_work_or_are_refused_by_name():
    wanted = _slopes(World(), "single")
    assert _slopes(World(), "single", True) == wanted
    for name in ("ddp", "zero"):
        assert run(_slopes, 2, name, True)[0] == wanted
        assert run(_slopes, 2, name)[0] == pytest.approx(wanted, rel=1e-12)
    run(_slopes_refused, 2)


def _refusals(world):
    """(engine, what) -> the line of the rehearsal."""
    found = {}
    for name in ("zero", "fsdp"):
        for exact in (False, True):
            made, batches = build(world, TASK, name, make=lambda m: Sam(m.parameters()), exact=exact)
            _, group = next(iter(batches.from_step(0)))
            try:
                made.rehearse(lambda made=made, group=group: TASK.loss(made.model, group[0].data))
            except ConfigError as error:
                found[name, exact] = str(error)
    return found


def test_engines_that_cannot_repeat_a_pass_say_so():
    found = run(_refusals, 2)[0]
    assert len(found) == 4
    for (name, _), line in found.items():
        assert "Sam" in line
        assert f"--engine {name}" in line


def test_float16_repeats_no_pass():
    model = nn.Linear(2, 1)
    made = lockstep.engine("single", model, Sam(model.parameters()), World(), loss_scaling=True)
    with pytest.raises(ConfigError, match="--precision fp16"):
        made.rehearse(lambda: made.model(torch.ones(3, 2)).sum())


def test_without_a_way_to_evaluate_an_optimizer_gets_no_closure():
    model = nn.Linear(2, 1)
    made = lockstep.engine("single", model, optimizer := Polite(model.parameters(), lr=0.1), World())
    made.backward(made.model(torch.ones(3, 2)).sum())
    made.step(1.0)
    assert optimizer.seen == (None,)


def test_pass_that_fails_midway_leaves_the_state_unchanged():
    found = run(_interrupted, 2)
    assert found[0] == found[1]
    assert all(same for same in found[0].values())


def _interrupted(world):
    found = {}
    for kind in ("sam", "sam-quiet", "lbfgs"):
        made, batches = build(world, TASK, "ddp", make=lambda m, kind=kind: OPTIMIZERS[kind](m.parameters()))
        for step, group in batches.from_step(0):
            evaluate = Pass(made, group)
            evaluate.again()
            if step < 2:
                made.step(1.0, evaluate=evaluate)
                continue
            before = digest(made, world)
            evaluate.again = _fail
            with pytest.raises(InterruptedError):
                made.step(1.0, evaluate=evaluate)
            found[kind] = digest(made, world) == before
            break
    return found


def _fail():
    raise InterruptedError


def test_the_state_of_lbfgs_has_one_shape_from_the_start():
    model = nn.Linear(3, 2).double()
    made = lockstep.engine("single", model, lbfgs(model.parameters()), World())
    shapes = [{name: tensor.shape for name, tensor in made.state_dict().items()}]
    x = torch.randn(5, 3, dtype=torch.float64)

    class Whole:
        def again(self):
            loss = made.model(x).square().mean()
            made.backward(loss)
            return loss.detach()

        def loss(self):
            return made.model(x).square().mean().detach()

    for _ in range(6):
        Whole().again()
        made.step(1.0, evaluate=Whole())
        shapes.append({name: tensor.shape for name, tensor in made.state_dict().items()})
    assert shapes == shapes[:1] * 7


# Sparse gradients.


def _sparse(clip):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(9, 3, sparse=True, mode="sum").double()
    batches = [torch.randint(9, (4, 5)) for _ in range(6)]
    return model, torch.optim.SparseAdam(model.parameters(), lr=0.1), batches


def test_sparse_adam_is_plain_torch():
    model, optimizer, batches = _sparse(0.5)
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        grad = model.weight.grad.coalesce()
        norms.append(float(grad.values().norm()))
        model.weight.grad = grad * min(1.0, 0.5 / (norms[-1] + 1e-6))
        optimizer.step()
    wanted = model.weight.detach().clone()
    for resumed in (False, True):
        model, optimizer, batches = _sparse(0.5)
        made = lockstep.engine("single", model, optimizer, World(), clip=0.5)
        made.rehearse(lambda made=made, first=batches[0]: made.model(first).square().mean())
        found = []
        for step, batch in enumerate(batches):
            if resumed and step == 3:
                state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
                model, optimizer, _ = _sparse(0.5)
                made = lockstep.engine("single", model, optimizer, World(), clip=0.5)
                made.load_state_dict(state)
            for rows in batch.split(2):  # two micro-batches
                made.backward(made.model(rows).square().mean(), 0.5)
            found.append(float(made.step(1.0).norm))
        assert found == pytest.approx(norms, rel=1e-12)
        torch.testing.assert_close(model.weight.detach(), wanted, rtol=1e-12, atol=1e-14)


def _refused_embeddings(world):
    found = {}
    for name in ("ddp", "zero", "fsdp"):
        with pytest.raises(ConfigError) as caught:
            lockstep.engine(name, nn.Sequential(nn.Embedding(9, 3, sparse=True)), torch.optim.SGD, world)
        found[name] = str(caught.value)
    return found


def test_sparse_embeddings_are_refused_by_dense_engines():
    for name, line in run(_refused_embeddings, 2)[0].items():
        assert "0.weight" in line
        assert f"--engine {name}" in line
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True))
    with pytest.raises(ConfigError, match=r"0\.weight.*--exact"):
        lockstep.engine("single", model, torch.optim.SGD, World(), exact_micro_batches=4)


def test_functional_sparse_gradient_is_refused_in_the_rehearsal():
    model = nn.ParameterDict({"table": nn.Parameter(torch.ones(9, 3))})
    made = lockstep.engine(
        "single", model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), World(), exact_micro_batches=4
    )
    with pytest.raises(ConfigError, match="table.*--exact"):
        made.rehearse(lambda: nn.functional.embedding(torch.tensor([1]), made.model["table"], sparse=True).sum())


def test_a_sparse_embedding_that_is_the_whole_model_is_named():
    with pytest.raises(ConfigError, match=r" weight is sparse"):
        check_embeddings("ddp", nn.EmbeddingBag(2, 2, sparse=True), exact=False, once="")
