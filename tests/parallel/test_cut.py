"""Layers of a user's own model, cut by a plan: the numbers of the whole model, and what is refused before a cut."""

import copy

import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.errors import ConfigError
from lockstep.parallel.activations import enter, gather_columns, leave
from lockstep.parallel.tensor import cut
from lockstep.tensors import is_dtensor

WIDTH, SIZE, TOKENS = 8, 4, 16


class Mixer(nn.Module):
    """Heads of joined queries and keys with a norm each, then a perceptron with dropout, between a tied vocabulary."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, padding_idx=9)
        self.both = nn.Linear(WIDTH, 2 * WIDTH)
        self.query_norm = nn.RMSNorm(SIZE)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        query, key = self.both(x).unflatten(-1, (2, -1, SIZE)).unbind(-3)
        x = x + self.mixed((self.query_norm(query) * key.tanh()).flatten(-2))
        return self.head(x + self.down(self.drop(self.up(x).relu())))


PLAN = {
    "tokens": "vocabulary",
    "head": "vocabulary",
    "both": "packed:2",
    "*_norm": "replicated",
    "mixed": "rows",
    "up": "columns",
    "drop": "columns",
    "down": "rows",
}


def make():
    torch.manual_seed(2)
    return Mixer().double()


def tp_mesh(world):
    return init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))


def backward(model, micro_batches=2):
    """Outputs, and gradients that accumulate over micro-batches."""
    outputs = []
    for number in range(micro_batches):
        torch.manual_seed(number)
        # The padding token 9 is in it.
        ids = torch.randint(TOKENS, (5, 7))
        outputs.append(model(ids))
        (outputs[-1].log_softmax(-1)[..., 3].square().sum()).backward()
    return torch.stack(outputs).detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor):
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def compare(world, exact):
    outputs, gradients = backward(make())
    model = make()
    cut(model, tp_mesh(world), PLAN, exact=exact)
    assert model.head.weight is model.tokens.weight
    found, found_gradients = backward(copy.deepcopy(model))
    assert found_gradients.keys() == gradients.keys()
    torch.testing.assert_close(found, outputs, rtol=1e-13, atol=1e-13)
    for name, gradient in gradients.items():
        difference = (whole(found_gradients[name]) - gradient).abs().max()
        assert difference < 1e-12 * gradient.abs().max(), (name, difference)
    cuts = {name: [str(each) for each in p.placements] for name, p in model.named_parameters() if is_dtensor(p)}
    # An evaluation drops nothing, and needs no gradients.
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(torch.arange(9)), make().eval()(torch.arange(9)))
    return cuts


@pytest.mark.parametrize(("degree", "exact"), [(2, False), (2, True)])
def test_own_layers_give_the_numbers_of_the_whole(degree, exact):
    for cuts in run(compare, degree, exact):
        assert cuts == {
            "tokens.weight": ["S(0)"],
            "both.weight": ["_S(0, 2)"],
            "both.bias": ["_S(0, 2)"],
            "mixed.weight": ["S(1)"],
            "up.weight": ["S(0)"],
            "up.bias": ["S(0)"],
            "down.weight": ["S(1)"],
            "head.bias": ["S(0)"],
        }


def with_styles_of_torch(world):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    wanted = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with pytest.raises(ConfigError, match="0 is planned as torch's ColwiseParallel, which adds in no fixed order"):
        cut(model, tp_mesh(world), plan, exact=True)
    cut(model, tp_mesh(world), plan)
    x = torch.randn(3, 4, dtype=torch.float64)
    for each in (model, wanted):
        each(x).square().sum().backward()
    for own, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(whole(own.grad), other.grad, rtol=1e-12, atol=1e-12)
    return isinstance(model[0].weight, DTensor)


def test_styles_of_torch_are_applied():
    assert run(with_styles_of_torch, 2) == [True, True]


def gradients_of_gradients(world):
    """`enter` and `leave` are each other's backward, so a penalty on gradients is right."""
    group = cut(make(), tp_mesh(world), PLAN)
    whole_weight = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=True)
    x = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def penalty(weight, join, part):
        y = join((part(x) * weight).pow(3).sum())
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient.square()

    wanted = torch.autograd.grad(penalty(whole_weight, lambda y: y, lambda x: x), (x, whole_weight))
    own = whole_weight[group.own(4)].detach().requires_grad_()
    found = torch.autograd.grad(penalty(own, lambda y: leave(y, group), lambda x: enter(x, group)), (x, own))
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1][group.own(4)])

    def through_columns(weight, join, add):
        (gradient,) = torch.autograd.grad(join(weight).pow(3).prod(), weight, create_graph=True)
        return torch.autograd.grad(add(gradient.square().sum()), weight)[0]

    wanted = through_columns(whole_weight, lambda y: y, lambda y: y)
    found = through_columns(own, lambda y: gather_columns(y, group), lambda y: leave(y, group))
    torch.testing.assert_close(found, wanted[group.own(4)])
    return True


def test_a_penalty_on_gradients_is_right():
    assert run(gradients_of_gradients, 2) == [True, True]


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def refused():
    """(a change of the model, a plan, the message)."""
    yield None, {"blocks.*.up": "columns"}, "--parallel.tensor 2: 'blocks.*.up' in the plan matches no module; correct"
    yield (
        None,
        {"up": "colums"},
        "'up' is planned as 'colums'; use columns, rows, packed:n, vocabulary, replicated or a Par",
    )
    yield None, {"both": "packed"}, "'both' is planned as 'packed'; use columns"
    yield None, {"both": "packed:0"}, "'both' is planned as 'packed:0'; use columns"
    yield None, {"both": "packed:n"}, "'both' is planned as 'packed:n'; use columns"
    yield None, {"tokens": "rows"}, "tokens is planned as 'rows' but is Embedding; that needs a plain nn.Linear"
    yield None, {"query_norm": "vocabulary"}, "but is RMSNorm; that needs a plain nn.Linear or nn.Embedding"
    yield (
        None,
        {"drop": "replicated"},
        "drop is planned as 'replicated' but is not a single layer with parameters; name the layer",
    )
    yield ("up", Scaled(8, 8)), {"up": "columns"}, "up is planned as 'columns' but is Scaled; that needs a plain nn.Li"
    yield ("up", nn.Linear(8, 9)), {"up": "columns"}, "up has 9 outputs, not a multiple of 2; use a degree that divides"
    yield ("down", nn.Linear(7, 8)), {"down": "rows"}, "down has 7 inputs, not a multiple of 2"
    yield ("both", nn.Linear(8, 10)), {"both": "packed:2"}, "both has 10 outputs, not a multiple of 4"
    yield ("tokens", nn.Embedding(9, 8)), {"tokens": "vocabulary"}, "tokens has 9 rows, not a multiple of 2"
    yield ("tokens", nn.Embedding(8, 8, max_norm=1.0)), {"tokens": "vocabulary"}, "an embedding with max_norm, which"
    yield None, {"up": "columns", "u*": "rows"}, "up is planned as 'columns' by 'up' and as 'rows' by 'u*'; make one"
    yield None, {"tokens": RowwiseParallel()}, "head.weight is tied to a parameter that the plan cuts in another way"
    yield None, {"tokens": "vocabulary"}, "head.weight is tied to a parameter that the plan cuts in another way; plan"


def refuse_all(world):
    mesh = tp_mesh(world)
    for change, plan, message in refused():
        model = make()
        if change:
            setattr(model, *change)
        # A part that would fit is not cut either.
        with pytest.raises(ConfigError) as caught:
            cut(model, mesh, {"mixed": "rows", **plan})
        assert message in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)
        assert not any(map(is_dtensor, model.parameters()))
        assert type(model.mixed) is nn.Linear
    model = make()
    cut(model, mesh, {"down": "rows"})
    with pytest.raises(ConfigError, match="a layer planned as 'rows' got 16 columns, but this rank has 8 of 16; plan"):
        model(torch.arange(3))
    return True


def test_a_plan_that_does_not_fit_is_refused():
    assert run(refuse_all, 2) == [True, True]
