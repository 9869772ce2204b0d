"""The built-in GPT cut over 2 and 4 ranks against one process: gradients, weights, draws, messages, refusals."""

import dataclasses
from unittest import mock

import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.distributed import collectives
from lockstep.engines.mesh_norms import MeshNorm
from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import summed_cross_entropy, summed_loss, summed_loss_of_part
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.parallel.activations import TensorGroup
from lockstep.parallel.layers import VocabularyLinear, vocabulary_cross_entropy
from lockstep.parallel.tensor import cut
from lockstep.tensors import is_dtensor, local_of

SMALL = GPTConfig(layers=2, heads=4, width=16, vocab_size=100, context=12)
MICRO_BATCHES, STEPS, CLIP = 3, 3, 0.5
# Of each tensor's largest value, in float64.
ROUNDING = 1e-12


class UntiedGPT(GPT):
    """A head of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.head = nn.Linear(config.width, config.padded_vocab)
        self.ending = _untied_ending
        self.reset_parameters()

    def _head(self, x):
        return self.head(x)

    def tensor_plan(self, degree, *, vocabulary=True):
        plan = super().tensor_plan(degree, vocabulary=vocabulary)
        return plan | {"head": "vocabulary"} if vocabulary else plan


def _untied_ending(model, x, labels, chunk):
    head = model.head
    if isinstance(head, VocabularyLinear):
        return summed_loss_of_part(head.own_logits, head.tensor_group, model.norm(x), labels, chunk)
    return summed_loss(head, model.norm(x), labels, chunk)


def make(dropout=0.0, tied=True):
    torch.manual_seed(5)
    return (GPT if tied else UntiedGPT)(dataclasses.replace(SMALL, dropout=dropout)).double()


def cut_gpt(model, world, exact=False, vocabulary=True):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    cut(model, mesh, model.tensor_plan(world.size, vocabulary=vocabulary), exact=exact)
    return model


def micro_batches():
    """Ids and labels; some labels are ignored."""
    draw = torch.Generator().manual_seed(3)
    for number in range(MICRO_BATCHES):
        ids = torch.randint(100, (2, 13), generator=draw)
        labels = ids[:, 1:].clone()
        labels[:, : 2 * number] = -100
        yield ids[:, :-1], labels


def backward(model, step, *, chunk=0, inside=True, clear=False):
    """Backward of each micro-batch of a step; return the gradients' local parts and the losses."""
    sums, losses = {}, []
    for number, (ids, labels) in enumerate(micro_batches()):
        torch.manual_seed(100 * step + number)
        if inside:
            loss = model(ids, labels=labels, chunk=chunk)
        else:
            loss = summed_cross_entropy(model(ids), labels)
        (loss / 60).backward()
        losses.append(float(loss.detach()))
        if clear:
            for name, parameter in model.named_parameters():
                gradient = local_of(parameter.grad).clone()
                sums[name] = sums[name] + gradient if name in sums else gradient
            model.zero_grad()
    if not clear:
        sums = {name: local_of(parameter.grad).clone() for name, parameter in model.named_parameters()}
    return sums, losses


def whole_of(tensors):
    """As arrays, which can travel between processes."""
    return {name: as_array(tensor.full_tensor() if is_dtensor(tensor) else tensor) for name, tensor in tensors}


def as_array(tensor):
    return tensor.detach().clone().numpy()


def train(model, *, exact=False, **how):
    """First step's gradients, the weights after three clipped steps of AdamW, and the norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    norm = MeshNorm(exact=exact)
    first, losses, norms = None, [], []
    for step in range(STEPS):
        losses += backward(model, step, **how)[1]
        first = first or whole_of((name, parameter.grad) for name, parameter in model.named_parameters())
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(float(norm(gradients)))
        for gradient in gradients:
            local_of(gradient).mul_(min(1.0, CLIP / (norms[-1] + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return first, whole_of(model.named_parameters()), norms, losses


def train_cut(world, dropout, tied, how):
    return train(cut_gpt(make(dropout, tied), world, how.get("exact", False)), **how)


def far(found, wanted):
    """The largest difference of any tensor, relative to its largest value."""
    assert found.keys() == wanted.keys()
    return max(abs(found[name] - wanted[name]).max() / abs(wanted[name]).max() for name in wanted)


@pytest.mark.parametrize(
    ("degree", "dropout", "tied", "how"),
    [
        (2, 0.0, True, {}),
        (2, 0.1, True, {"chunk": 5}),
        (2, 0.1, False, {"exact": True}),
        (4, 0.1, True, {"exact": True, "inside": False}),
        (4, 0.0, False, {"chunk": 7}),
    ],
)
def test_the_cut_gpt_trains_as_one_process(degree, dropout, tied, how):
    first, weights, norms, losses = train(make(dropout, tied), **{**how, "exact": False})
    results = run(train_cut, degree, dropout, tied, how)
    for found, found_weights, found_norms, found_losses in results:
        assert far(found, first) < ROUNDING
        assert far(found_weights, weights) < ROUNDING
        assert found_norms == pytest.approx(norms, rel=1e-13)
        assert found_losses == pytest.approx(losses, rel=1e-13)
    # Every rank has the same losses and norms, bit for bit.
    assert all(result[2:] == results[0][2:] for result in results)


def accumulate_both_ways(world):
    model = cut_gpt(make(), world)
    cleared, _ = backward(model, 0, clear=True)
    accumulated, _ = backward(model, 0)
    is_same = all(torch.equal(cleared[name], accumulated[name]) for name in cleared)
    cuts = sum(is_dtensor(parameter) for parameter in model.parameters())
    return is_same, cuts, as_array(local_of(model.blocks[1].attention.inputs.weight))


def test_micro_batches_may_accumulate_in_grad():
    whole = make().blocks[1].attention.inputs.weight.detach()
    for rank, (is_same, cuts, packed) in enumerate(run(accumulate_both_ways, 2)):
        assert is_same
        assert cuts == 1 + 6 * SMALL.layers
        # Own rows of queries, keys and values.
        assert (packed == whole.view(3, 16, 16)[:, 8 * rank : 8 * rank + 8].reshape(24, 16).numpy()).all()


def count_messages(world, chunk):
    model = cut_gpt(make(), world, vocabulary=chunk >= 0)
    ids, labels = next(micro_batches())
    with mock.patch.object(collectives, "_issue", wraps=collectives._issue) as issue:
        if chunk >= 0:
            model(ids, labels=labels, chunk=chunk).backward()
        else:
            model(ids).sum().backward()
    return issue.call_count


def test_messages_of_a_block_and_of_the_vocabulary():
    blocks = 4 * SMALL.layers
    assert run(count_messages, 2, -1) == [blocks] * 2
    # The look-up, the gradient of the hidden states, and three numbers a token in the loss.
    assert run(count_messages, 2, 0) == [blocks + 5] * 2
    # 24 tokens in two chunks: six small messages, and the forwards of the loss again in the backward.
    assert run(count_messages, 2, 12) == [blocks + 2 + 6 + 6] * 2


def refuse(world, labels):
    model = cut_gpt(make(), world)
    ids, wrong = next(micro_batches())
    wrong[0, 0] = labels
    with pytest.raises((IndexError, RuntimeError)):
        model(ids, labels=wrong)
    with pytest.raises((IndexError, RuntimeError)):
        model(wrong)
    return True


@pytest.mark.parametrize("token", [128, -1])
def test_tokens_outside_the_vocabulary_are_refused(token):
    assert run(refuse, 2, token) == [True, True]


def test_degrees_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="--parallel.tensor 3: the model has 4 attention heads; use a degree that"):
        make().tensor_plan(3)
    five = GPT(dataclasses.replace(SMALL, heads=5, width=20))
    with pytest.raises(ConfigError, match="--parallel.tensor 5: the vocabulary is padded to 128 tokens; use"):
        five.tensor_plan(5)
    assert "tokens" not in five.tensor_plan(5, vocabulary=False)


def losses_of_labels(world):
    """The loss of a rank's columns against torch's, with and without ignored labels."""
    group = TensorGroup(init_device_mesh("cpu", (world.size,)))
    torch.manual_seed(0)
    logits = 40 * torch.randn(3, 5, 8, dtype=torch.float64)
    labels = torch.randint(8, (3, 5))
    labels[1] = -100
    whole = logits.clone().requires_grad_()
    summed_cross_entropy(whole, labels).backward()
    part = logits[..., group.own(8)].clone().requires_grad_()
    loss = vocabulary_cross_entropy(part, labels, group)
    loss.backward()
    torch.testing.assert_close(loss, summed_cross_entropy(logits, labels), rtol=1e-14, atol=0)
    torch.testing.assert_close(part.grad, whole.grad[..., group.own(8)], rtol=1e-12, atol=1e-15)
    half = vocabulary_cross_entropy(part.detach().bfloat16(), labels, group)
    assert half.dtype is torch.float32
    assert vocabulary_cross_entropy(part, torch.full((3, 5), -100), group) == 0.0
    return True


def test_the_cross_entropy_of_cut_logits():
    assert run(losses_of_labels, 2) == [True, True]
