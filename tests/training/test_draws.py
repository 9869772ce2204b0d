"""The random numbers of a part are those that its samples had in the whole batch."""

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Gumbel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lockstep.training.trial.draws import CONTIGUOUS, DrawBook, Layout, RowDraws

SAMPLES = 8
OWN = torch.Generator()


def drawn(function, book, start=0, count=None, layout=CONTIGUOUS):
    """What a function of the number of samples draws, and what could not be cut."""
    torch.manual_seed(3)
    with RowDraws(book, SAMPLES, start, count, layout) as mode:
        result = function(SAMPLES if count is None else count)
    book.restore()
    return result, mode.uncut


def parts(function, layout=CONTIGUOUS):
    book = DrawBook()
    whole, _ = drawn(function, book)
    halves = [drawn(function, book, start, count, layout) for start, count in ((0, 3), (3, 5))]
    return whole, [half for half, _ in halves], [name for _, names in halves for name in names], book


def filled(name, *values, dtype=torch.float32):
    return lambda n: getattr(torch.empty(n, 3, dtype=dtype), name)(*values)


BY_ROWS = {
    "rand": lambda n: torch.rand(n, 3),
    "rand of a dtype": lambda n: torch.rand(n, dtype=torch.float64),
    "randn": lambda n: torch.randn(n),
    "complex": lambda n: torch.randn(n, 2, dtype=torch.complex64),
    "randint": lambda n: torch.randint(0, 10, (n, 2)),
    "randint to": lambda n: torch.randint(10, (n,)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 2)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 2)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n, 2), 5),
    "normal": lambda n: torch.normal(torch.zeros(n, 2), torch.full((2,), 3.0)),
    "normal of numbers": lambda n: torch.normal(1.0, 2.0, (n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.4)),
    "bernoulli_": filled("bernoulli_", 0.3),
    "bernoulli_ of a tensor": lambda n: torch.empty(n, 3).bernoulli_(torch.full((n, 3), 0.3)),
    "uniform_": filled("uniform_", 1, 2),
    "normal_": filled("normal_", 1, 2),
    "exponential_": filled("exponential_", 2.0),
    "random_": filled("random_", dtype=torch.int64),
    "random_ to": filled("random_", 5),
    "random_ from": filled("random_", 3, 9),
    "log_normal_": filled("log_normal_"),
    "geometric_": filled("geometric_", 0.3),
    "cauchy_": filled("cauchy_"),
    "dropout": lambda n: F.dropout(torch.ones(n, 9), 0.4),
    "native dropout": lambda n: torch.native_dropout(torch.ones(n, 9), 0.4, True)[0],
    "dropout of channels": lambda n: F.dropout2d(torch.ones(n, 3, 4, 4)),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n, 3), 0.5, True),
    "gumbel": lambda n: F.gumbel_softmax(torch.zeros(n, 3)),
    "a distribution": lambda n: Gumbel(torch.zeros(n), 1.0).sample(),
    "categories": lambda n: Categorical(logits=torch.zeros(n, 4)).sample(),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 6), 4),
    "multinomial with replacement": lambda n: torch.multinomial(torch.ones(n, 6), 8, replacement=True),
    "steps with replacement": lambda n: torch.multinomial(torch.ones(6), n, replacement=True),
    "tokens": lambda n: torch.rand(n * 5, 2),
    "a generator of the task's own": lambda n: torch.rand(n, 2, generator=OWN) + torch.rand(n, 1, generator=OWN),
    "two draws": lambda n: torch.rand(n, 2) + torch.rand(4, 2)[:1],
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_part_gets_its_rows(name):
    whole, halves, uncut, _ = parts(BY_ROWS[name])
    assert torch.equal(torch.cat(halves), whole)
    assert uncut == []


@pytest.mark.parametrize("name", BY_ROWS)
def test_the_numbers_have_the_dtype_and_the_law_of_torchs(name):
    torch.manual_seed(0)
    plain = BY_ROWS[name](4000)
    with RowDraws(DrawBook(), 4000):
        found = BY_ROWS[name](4000)
    assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
    if not plain.is_complex() and name not in ("cauchy_", "random_"):  # these have no mean to compare
        torch.testing.assert_close(found.double().mean(), plain.double().mean(), rtol=0.15, atol=0.05)


def test_a_draw_that_is_not_of_samples_is_the_same_everywhere():
    for function in (lambda n: torch.rand(3), lambda n: torch.randperm(5), lambda n: torch.rand(())):
        whole, halves, uncut, _ = parts(function)
        assert uncut == []
        assert all(torch.equal(half, whole) for half in halves)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.randperm, "randperm"),
        (lambda n: torch.multinomial(torch.ones(8), n), "multinomial"),
        (lambda n: torch.poisson(torch.ones(n)), "poisson"),
        (lambda n: torch._standard_gamma(torch.ones(n)), "_standard_gamma"),
        (lambda n: torch.rand(n + 3), "rand"),
        (lambda n: torch.rand(2**n), "rand"),
    ],
)
def test_what_cannot_be_cut_is_named(function, name):
    _, _, uncut, _ = parts(function)
    assert name in " ".join(uncut)


def test_the_dimension_of_the_samples_may_be_any():
    whole, halves, uncut, _ = parts(lambda n: torch.rand(7, n, 2))
    assert torch.equal(torch.cat(halves, 1), whole)
    assert uncut == []


def test_rows_of_several_views_belong_to_samples_in_any_layout():
    whole, halves, _, book = parts(lambda n: torch.rand(2 * n, 3), Layout(views=True))
    assert torch.equal(torch.cat([half.view(2, -1, 3) for half in halves], 1), whole.view(2, SAMPLES, 3))
    assert book.has_views


@pytest.mark.parametrize("last", [False, True])
def test_part_padded_to_a_shorter_length_gets_its_own_places(last):
    whole, halves, uncut, book = parts(lambda n: torch.rand(n, 9 if n == SAMPLES else 4), Layout(last=last))
    assert torch.equal(torch.cat(halves), whole[:, -4:] if last else whole[:, :4])
    assert book.has_lengths
    assert uncut == []


def test_layers_of_torch_get_the_rows_of_their_samples():
    x = torch.randn(1, 5, 8).expand(SAMPLES, 5, 8).contiguous()
    layers = [
        (nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), False),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.3), True),
        (nn.LSTM(8, 4, 2, dropout=0.5, batch_first=True), False),
    ]
    with sdpa_kernel(SDPBackend.MATH):
        for layer, is_second in layers:

            def forward(n, layer=layer, is_second=is_second):
                result = layer(x[:n].transpose(0, 1) if is_second else x[:n])
                return (result[0] if isinstance(result, tuple) else result).detach()

            whole, halves, uncut, _ = parts(forward)
            torch.testing.assert_close(torch.cat(halves, int(is_second)), whole)
            assert uncut == []
            assert not torch.allclose(whole.select(int(is_second), 0), whole.select(int(is_second), 1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_gets_the_same_numbers(reentrant):
    weight = torch.ones(SAMPLES, 6, requires_grad=True)

    def gradient(n):
        weight.grad = None
        part = weight[SAMPLES - n :] if n < SAMPLES else weight
        checkpoint(lambda x: F.dropout(x, 0.5), part, use_reentrant=reentrant).sum().backward()
        return weight.grad.clone()

    book = DrawBook()
    whole, _ = drawn(gradient, book)
    half, uncut = drawn(gradient, book, 4, 4)
    assert torch.equal(half[4:], whole[4:])
    assert uncut == []
    assert 0 < int((whole == 0).sum()) < whole.numel()


def test_an_own_generator_is_as_before():
    state = OWN.manual_seed(7).get_state()
    parts(lambda n: torch.rand(n, generator=OWN))
    assert torch.equal(OWN.get_state(), state)
