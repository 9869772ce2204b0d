"""The built-in GPT against plain formulas, its published sizes, and its task."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, PRESETS, GPTConfig, further_logits, generate
from lockstep.tasks.language_model import CausalLM

TINY = GPTConfig(layers=2, heads=2, width=16, vocab_size=50, context=12)


def build(config=TINY, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


class Draws(TorchDispatchMode):
    """Counts the numbers that are drawn into memory."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags and args[0].device.type != "meta":
            self.count += args[0].numel()
        return function(*args, **(kwargs or {}))


def test_each_weight_is_drawn_once():
    with Draws() as draws:
        model = build()
    assert draws.count == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(  # the first draws are the token table's
        model.tokens.weight.detach(),
        torch.empty(64, 16).normal_(0.0, 0.02, generator=generator),
        rtol=0,
        atol=0,
    )


def test_a_device_around_it_is_its_device():
    with torch.device("meta"), Draws() as draws:
        model = build()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert draws.count == 0
    assert list(model.state_dict()) == list(build().state_dict())


def test_it_can_be_built_of_fake_tensors():
    with FakeTensorMode():
        model = build()
    assert {type(p) for p in model.parameters()} == {FakeTensor}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def plain_forward(model, ids):
    """GPT-2 written out: explicit scores, mask and softmax, no fused kernel, no module called."""
    p, config = dict(model.named_parameters()), model.config
    time = ids.shape[1]
    x = p["tokens.weight"][ids] + p["positions.weight"][:time]
    for index in range(config.layers):
        at = f"blocks.{index}."
        x = x + plain_attention(p, at, norm(x, p, at + "attention_norm"), config.heads)
        hidden = norm(x, p, at + "mlp_norm") @ p[at + "expand.weight"].T + p[at + "expand.bias"]
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + hidden @ p[at + "output.weight"].T + p[at + "output.bias"]
    return norm(x, p, "norm") @ p["tokens.weight"].T


def plain_attention(p, at, x, heads):
    width, time = x.shape[-1], x.shape[1]
    size = width // heads
    q, k, v = (x @ p[at + "attention.inputs.weight"].T + p[at + "attention.inputs.bias"]).split(width, dim=-1)
    mixed = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(size)
        scores = scores + torch.full((time, time), -math.inf).triu(1)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        mixed.append(weights @ v[..., part])
    return torch.cat(mixed, -1) @ p[at + "attention.output.weight"].T + p[at + "attention.output.bias"]


def norm(x, p, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * p[name + ".weight"] + p[name + ".bias"]


def test_logits_and_gradients_match_the_written_formulas():
    model = build().double()
    for parameter in model.parameters():  # away from ones and zeros, so that every parameter counts
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(0, 50, (3, 12))
    ours, plain = model(ids), plain_forward(model, ids)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    mine = torch.autograd.grad(ours.tanh().sum(), list(model.parameters()))
    theirs = torch.autograd.grad(plain.tanh().sum(), list(model.parameters()))
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def test_a_token_sees_none_that_follow():
    model = build().eval()
    ids = torch.randint(0, 50, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 50
    torch.testing.assert_close(model(ids)[:, :8], model(changed)[:, :8])
    assert not torch.allclose(model(ids)[:, 8:], model(changed)[:, 8:])


# Tied parameters of the published checkpoints, vocabulary 50257.
PUBLISHED = {
    "builtin:gpt2": 124_439_808,
    "builtin:gpt2-medium": 354_823_168,
    "builtin:gpt2-large": 774_030_080,
    "builtin:gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_size_and_47_rows_of_padding(name):
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    padding = (50304 - 50257) * model.config.width
    assert model.config.padded_vocab == 50304
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name] + padding


def test_initial_parameters_are_gpt2s_and_depend_on_the_seed():
    config = dataclasses.replace(TINY, width=128, vocab_size=512)
    first, again, other = build(config), build(config), build(config, seed=1)
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(first.tokens.weight, other.tokens.weight)
    assert first.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (first.blocks[1].attention.output.weight, first.blocks[1].output.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.05)
    assert first.blocks[0].expand.bias.eq(0).all()
    assert first.norm.weight.eq(1).all()


def test_dropout_acts_in_training_only():
    model = build(dataclasses.replace(TINY, dropout=0.5))
    ids = torch.randint(0, 50, (1, 12))
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_flops_per_token_of_gpt2():
    with torch.device("meta"):
        model = GPT(dataclasses.replace(PRESETS["builtin:gpt2"], vocab_size=50304))
    multiplied = 124_439_808 + 47 * 768 - 1024 * 768
    assert model.num_flops_per_token(1024) == 6 * multiplied + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "not a multiple"),
        ({"layers": 0}, "GPTConfig: layers is 0; give at least 1"),
        ({"dropout": 1.0}, "--model.dropout"),
        ({"dropout": math.nan}, "--model.dropout"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **change)


def test_greedy_generation_takes_the_likeliest_token_each_time():
    model = build()
    ids = torch.randint(0, 50, (2, 3))
    longer = generate(model, ids, 5, config=model.config, temperature=0.0)
    assert longer.shape == (2, 8)
    for end in range(3, 8):
        likeliest = model.eval()(longer[:, :end])[:, -1, :50].argmax(-1)
        assert torch.equal(longer[:, end], likeliest)


def test_generation_repeats_ignores_padding_and_exceeds_context():
    model = build().train()
    model.tokens.weight.data[50:] = 100.0  # would win every draw
    ids = torch.zeros(1, 1, dtype=torch.int64)
    first, second = (
        generate(model, ids, 30, config=model.config, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.shape == (1, 31)
    assert first.max() < 50
    assert model.training


def test_nothing_is_written_after_the_token_that_stops():
    model, ids = build(), torch.tensor([[1, 2, 3]])
    longer = generate(model, ids, 6, config=model.config, temperature=0.0)
    token = int(longer[0, 4])
    end = 1 + longer[0].tolist().index(token, 3)
    assert torch.equal(generate(model, ids, 6, config=model.config, temperature=0.0, stop=[token]), longer[:, :end])


def test_rows_with_own_draws_match_single_rows_and_all_must_end():
    model, ids = build().double(), torch.randint(0, 50, (3, 4))
    settings = {"config": model.config, "temperature": 1.5, "further": further_logits(model.config.layers)}

    def seeded(count):
        return [torch.Generator().manual_seed(7) for _ in range(count)]

    together = generate(model, ids, 12, generator=seeded(3), **settings)
    for row, one in zip(ids, together, strict=True):
        assert torch.equal(generate(model, row[None], 12, generator=seeded(1), **settings)[0], one)
    assert not torch.equal(generate(model, ids, 12, generator=seeded(1)[0], **settings), together)
    token = int(together[0, 6])
    stopped = generate(model, ids, 12, generator=seeded(3), stop=[token], **settings)
    last = max([*(row.tolist().index(token, 4) if token in row[4:] else 15 for row in together)])
    assert torch.equal(stopped, together[:, : last + 1])


def test_top_k_of_one_is_greedy():
    model, ids = build(), torch.tensor([[1, 2, 3]])
    assert torch.equal(
        generate(model, ids, 6, config=model.config, top_k=1),
        generate(model, ids, 6, config=model.config, temperature=0.0),
    )


class FakeWindows:
    seq_len = items_per_sample = 8


class FakeCorpus:
    train, evaluation, vocab_size, fingerprint, packing = FakeWindows(), FakeWindows(), 50, "made up", "stream"
    chat, prompts, learned = False, False, (1, 8, 8)


def batch_of(masked):
    labels = torch.randint(0, 50, (2, 8))
    labels[:, :masked] = -100
    return {"input_ids": torch.randint(0, 50, (2, 8)), "labels": labels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_the_sum_over_labelled_tokens(dtype):
    task = CausalLM(FakeCorpus(), TINY)
    torch.manual_seed(0)
    model, batch = task.model().to(dtype), batch_of(masked=3)
    chosen = F.log_softmax(model(batch["input_ids"])[:, 3:], -1).gather(-1, batch["labels"][:, 3:, None])
    loss = task.loss(model, batch)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, -chosen.sum())
    assert task.count(batch) == 10


def test_the_loss_of_a_bf16_model_is_summed_in_float32():
    task = CausalLM(FakeCorpus(), TINY)
    assert task.loss(task.model().bfloat16(), batch_of(masked=0)).dtype == torch.float32


def test_an_untrained_model_guesses_evenly():
    task = CausalLM(FakeCorpus(), TINY)
    torch.manual_seed(0)
    batch = batch_of(masked=0)
    loss = task.loss(task.model(), batch).item() / task.count(batch)
    assert loss == pytest.approx(math.log(TINY.padded_vocab), rel=0.02)


def test_the_task_collates_and_names_its_parts():
    task = CausalLM(FakeCorpus(), TINY)
    samples = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i + 1)} for i in range(3)]
    batch = task.collate(samples)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {"input_ids": (3, 8), "labels": (3, 8)}
    assert batch["labels"][:, 0].tolist() == [1, 2, 3]
    assert task.items_per_sample == 8
    assert task.dataset("train") is FakeCorpus.train
    assert task.dataset("evaluation") is FakeCorpus.evaluation
    model = task.model()
    assert task.blocks(model) == list(model.blocks)
    with pytest.raises(ValueError, match="no split 'test'"):
        task.dataset("test")


@pytest.mark.parametrize(
    ("change", "message"), [({"context": 7}, "--seq-len 8 is longer"), ({"vocab_size": 49}, "49 tokens")]
)
def test_a_model_too_small_for_the_data_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        CausalLM(FakeCorpus(), dataclasses.replace(TINY, **change))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loss_on_a_gpu_is_that_of_the_cpu():
    task = CausalLM(FakeCorpus(), TINY)
    model, batch = task.model().double(), batch_of(masked=1)
    here = task.loss(model, batch)
    there = task.loss(model.cuda(), {name: tensor.cuda() for name, tensor in batch.items()})
    torch.testing.assert_close(here, there.cpu(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_the_same_when_tokens_are_computed_once(temperature):
    torch.manual_seed(5)
    model = GPT(GPTConfig(layers=2, heads=2, width=16, vocab_size=50, context=20)).double()
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    ids, texts = torch.arange(6).reshape(2, 3), []
    for further in (None, further_logits(2)):
        seen.clear()
        generator = torch.Generator().manual_seed(1)
        settings = {"config": model.config, "temperature": temperature, "generator": generator, "further": further}
        texts.append(generate(model, ids, 30, **settings))
    assert torch.equal(*texts)
    assert seen == [3, *[1] * 17, *[20] * 12]  # past the context the window moves, and positions with it
