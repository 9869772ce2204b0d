"""Sequences divided over ranks: gradients and losses of GPT and Llama against one process, messages, and refusals."""

import pytest
import torch
from ranks import run
from refusals import refuses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed import collectives
from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import summed_cross_entropy
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.models.hf_context import attend_over_ranks
from lockstep.parallel.context import ContextGroup, attention, divide_dropout
from lockstep.parallel.context_task import divide_task, whole_task

TIME = 16
VOCABULARY = 64
# Of each gradient's largest value, in float64.
ROUNDING = 1e-12


class Tokens(lockstep.Task):
    """A language model and its summed loss, on batches of equal lengths."""

    reduction = "sum"

    def __init__(self, name, dropout=0.0):
        self.name = name
        self.dropout = dropout

    def model(self):
        torch.manual_seed(0)
        if self.name == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=TIME,
            )
            return LlamaForCausalLM(config).double()
        config = GPTConfig(layers=2, heads=4, width=32, vocab_size=VOCABULARY, context=TIME, dropout=self.dropout)
        return GPT(config).double()

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        if self.name == "llama":
            logits = model(input_ids=batch["ids"], position_ids=batch.get("positions"), use_cache=False).logits
        else:
            logits = model(batch["ids"], positions=batch.get("positions"))
        return summed_cross_entropy(logits, batch["labels"])

    def metrics(self, model, batch):
        kept = batch["labels"] != -100
        return {"odd": ((batch["labels"] % 2 * kept).sum(), kept.sum())}

    def sequence(self, batch):
        return {"ids": 1, "labels": 1, "positions": 1}


def batches(count=2):
    """Micro-batches with labels that are shifted and partly ignored."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        rows = torch.randint(VOCABULARY, (2, TIME + 1), generator=generator)
        labels = rows[:, 1:].clone()
        labels[0, TIME - 3 :] = -100
        made.append({"ids": rows[:, :-1], "labels": labels})
    return made


def gradients(task, model):
    """(the losses, the gradients by name) of all micro-batches."""
    losses = []
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)
        loss = task.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters()}


def group_of(world):
    return ContextGroup(init_device_mesh("cpu", (world.size,)), exact=True)


def divided(world, task):
    """The same as `gradients`, summed over the ranks, with the messages of keys and values."""
    group = group_of(world)
    model = task.model()
    divide_dropout(model)
    if task.name == "llama":
        attend_over_ranks(model, world.size)
    counted = []
    for name in ("all_gather", "all_to_all_single"):
        _count_calls(name, counted)
    losses, found = gradients(divide_task(task, group), model)
    messages = len(counted)
    found = {name: group.sum(gradient).tolist() for name, gradient in found.items()}
    model.eval()
    with torch.no_grad():
        batch = batches(1)[0]
        total, metrics = divide_task(task, group).evaluate(model, batch)
        whole = whole_task(divide_task(task, group)).loss(model, batch)
    return losses, found, messages, (float(total), float(whole), *map(float, metrics["odd"]))


def _count_calls(name, calls):
    original = getattr(collectives, name)

    def counting(*args, **options):
        calls.append(name)
        return original(*args, **options)

    setattr(collectives, name, counting)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "dropout"), [("gpt", 0.0), ("gpt", 0.1), ("llama", 0.0)])
def test_gradients_are_those_of_one_process(name, dropout, size):
    task = Tokens(name, dropout)
    model = task.model()
    wanted_losses, wanted = gradients(task, model)
    pair = task.metrics(model, batches(1)[0])["odd"]
    parts = run(divided, size, task)
    total = [sum(losses) for losses in zip(*(part[0] for part in parts), strict=True)]
    assert total == pytest.approx(wanted_losses, rel=1e-13)
    for _, found, messages, (loss, whole, *odd) in parts:
        for name, gradient in wanted.items():
            worst = (torch.tensor(found[name], dtype=torch.float64) - gradient).abs().max() / gradient.abs().max()
            assert worst < ROUNDING, name
        # One in the forward and one in the backward, for each of two blocks and two micro-batches.
        assert messages == 2 * 2 * 2
        assert loss == pytest.approx(whole, rel=1e-13)
        assert odd == [float(value) for value in pair]


class Recomputed(nn.Module):
    """A block that a reentrant or other checkpoint computes again in the backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inputs = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.3)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self._mix, x, use_reentrant=self.reentrant).square().sum()

    def _mix(self, x):
        query, key, value = self.inputs(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.drop(attention(query, key, value).transpose(1, 2).flatten(2))


class Block(lockstep.Task):
    def __init__(self, reentrant):
        self.reentrant = reentrant

    def model(self):
        torch.manual_seed(0)
        return Recomputed(self.reentrant).double()

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        return model(batch["x"])

    def sequence(self, batch):
        return {"x": 1}


def recomputed(world, reentrant):
    task = Block(reentrant)
    model = task.model()
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(1)
    task.loss(model, {"x": x}).backward()
    wanted = model.inputs.weight.grad
    model.zero_grad()
    divide_dropout(model)
    group = group_of(world)
    torch.manual_seed(1)
    divide_task(task, group).loss(model, {"x": x}).backward()
    return float((group.sum(model.inputs.weight.grad) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_attends_to_all_positions(reentrant):
    assert max(run(recomputed, 2, reentrant)) < ROUNDING


class Named(Tokens):
    """Names other tensors than the batch has."""

    def __init__(self, names):
        super().__init__("gpt")
        self.names = names

    def sequence(self, batch):
        return self.names


class WithNumbers(Tokens):
    def loss(self, model, batch):
        return super().loss(model, batch), {"seen": 1}


class WideDropout(Tokens):
    """Dropout on a tensor whose second dimension is none of positions."""

    def model(self):
        return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), nn.Dropout(0.5)).double()

    def loss(self, model, batch):
        return summed_cross_entropy(model(batch["ids"].T).transpose(0, 1), batch["labels"])


def refused(world):
    group = group_of(world)
    for task, words in (
        (Named({"tokens": 1}), ("'tokens'", "dimension 1")),
        (Named({"ids": 2}), ("'ids'", "dimension 2")),
        (Named({"positions": 1}), ("{}", "multiple of 4")),
        (WithNumbers("gpt"), ("loss alone", "`metrics`")),
        (WideDropout("gpt"), ("Dropout", "(8, 2, 64)", "p to 0")),
    ):
        with refuses(ConfigError, "--parallel.context 2", *words):
            divided_task = divide_task(task, group)
            model = task.model()
            divide_dropout(model)
            divided_task.loss(model, batches(1)[0])
    cut = {name: leaf[:, :10] for name, leaf in batches(1)[0].items()}
    with refuses(ConfigError, "--parallel.context 2", "10", "multiple of 4", "pad"):
        divide_task(Tokens("gpt"), group).loss(Tokens("gpt").model(), cut)


def test_what_cannot_be_divided_is_refused():
    run(refused, 2)


def test_attention_without_a_division_is_that_of_torch():
    query = torch.randn(2, 4, 6, 8)
    key, value = torch.randn(2, 2, 2, 6, 8)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, value, scale=0.3), wanted)
