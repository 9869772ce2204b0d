"""The loss without all logits at once, and documents that stay apart: the same numbers as the plain way."""

import hub_files
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import chunk_of, summed_cross_entropy, summed_loss
from lockstep.models.gpt import GPT, GPTConfig, generate
from lockstep.models.hf import (
    HubModel,
    can_chunk,
    further_logits,
    inputs_of,
    keeps_apart,
    logits_of,
    same_head,
    takes_documents,
    with_loss,
)
from lockstep.tasks.language_model import pad_tokens

SMALL = GPTConfig(layers=2, heads=2, width=16, vocab_size=100, context=24)


def gpt(dtype=torch.float64):
    torch.manual_seed(3)
    return GPT(SMALL).to(dtype)


def hub(kind="Llama", **changed):
    """A small model of `transformers`, and its class."""
    import transformers

    sizes = {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    if kind == "GPT2":
        config = hub_files.gpt2_config(vocab_size=100, initializer_range=0.3)
    else:
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **changed})
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def documents(lengths, vocab=100, seed=0):
    """Documents of n + 1 tokens as samples that predict n."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, vocab, (length + 1,), generator=draw) for length in lengths]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def in_one_window(samples, room):
    """What `text.documents.Packed` gives for them."""
    window = {
        name: torch.zeros(1, room, dtype=torch.int64) for name in ("input_ids", "labels", "positions", "documents")
    }
    window["labels"][:] = -100
    place = 0
    for number, sample in enumerate(samples):
        span = slice(place, place := place + len(sample["labels"]))
        window["input_ids"][0, span], window["labels"][0, span] = sample["input_ids"], sample["labels"]
        window["positions"][0, span] = torch.arange(len(sample["labels"]))
        window["documents"][0, span] = number
    window["positions"][0, place:], window["documents"][0, place:] = torch.arange(room - place), len(samples)
    return window


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=25)
def test_chunks_have_the_loss_and_the_gradient_of_the_whole(chunk, batch, time):
    torch.manual_seed(batch + 10 * time)
    head = nn.Linear(6, 11, dtype=torch.float64)
    hidden = torch.randn(batch, time, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (batch, time))
    labels[0, 0] = -100
    whole = summed_cross_entropy(head(hidden), labels)
    parts = summed_loss(head, hidden, labels, chunk)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    inputs = (hidden, *head.parameters())
    expected, found = (torch.autograd.grad(loss, inputs) for loss in (3 * whole, 3 * parts))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_chunks_of_the_built_in_model_with_its_tied_head():
    model = gpt()
    ids, labels = torch.randint(0, 100, (2, 2, 20))
    marks = []
    for chunk in (0, 7, 7, 64):
        model.zero_grad()
        loss = model(ids, labels=labels, chunk=chunk) if chunk else summed_cross_entropy(model(ids), labels)
        loss.backward()
        marks.append((loss.detach(), gradients(model)))
    plain, seven, again, all_at_once = marks
    for found in (seven, all_at_once):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(seven[1][name], again[1][name]) for name in seven[1])  # bits, for a given chunk
    assert torch.equal(seven[0], again[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_compute_as_the_plain_way_does_under_autocast(dtype):
    model = gpt(torch.float32)
    ids, labels = torch.randint(0, 100, (2, 2, 20))
    found = []
    for chunk in (0, 8):
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=labels, chunk=chunk) if chunk else summed_cross_entropy(model(ids), labels)
        loss.backward()
        assert loss.dtype is torch.float32
        found.append((loss.detach(), gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    for name, expected in found[0][1].items():
        assert (found[1][1][name] - expected).norm() <= 2e-2 * expected.norm() + 1e-6, name


def test_no_more_than_a_chunk_of_logits_is_ever_there():
    model, sizes = gpt(), []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.ndim and made.shape[-1] == SMALL.padded_vocab:
                sizes.append(made.numel() // made.shape[-1])
            return made

    ids = torch.randint(0, 100, (2, 20))
    with Watch():
        model(ids, labels=ids, chunk=8).backward()
    assert sizes
    assert max(sizes) == 8


def test_a_chunk_is_chosen_where_logits_are_large():
    assert chunk_of(-1, 1024, 50304) == 0
    assert chunk_of(-1, 8192, 50304) == 512
    assert chunk_of(-1, 8192, 128256) == 256
    assert chunk_of(0, 10**6, 10**6) == 0
    assert chunk_of(7, 1, 1) == 7


def test_packed_padded_and_single_documents_have_one_loss():
    model, samples = gpt().eval(), documents([5, 9, 1, 7])
    one_by_one = sum(summed_cross_entropy(model(s["input_ids"][None]), s["labels"][None]) for s in samples)
    padded = pad_tokens(samples)
    window = in_one_window(samples, 24)
    labels = window.pop("labels")
    for found in (
        summed_cross_entropy(model(padded["input_ids"]), padded["labels"]),
        summed_cross_entropy(model(**window), labels),
        model(**window, labels=labels, chunk=5),
    ):
        torch.testing.assert_close(found, one_by_one, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("GPT2", {}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Gemma2", {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0}),
        ("GPTNeoX", {}),
    ],
)
def test_packed_padded_and_single_have_one_loss_in_hub_models(kind, changed):
    model, samples = with_loss(hub(kind, **changed)), documents([5, 9, 1, 7])
    one_by_one = sum(summed_cross_entropy(logits_of(model, s["input_ids"][None]), s["labels"][None]) for s in samples)
    padded, window = pad_tokens(samples), in_one_window(samples, 24)
    ids, labels, positions = window["input_ids"], window["labels"], window["positions"]
    assert can_chunk(model)
    for found in (
        summed_cross_entropy(logits_of(model, padded["input_ids"]), padded["labels"]),
        summed_cross_entropy(logits_of(model, ids, position_ids=positions), labels),
        model(input_ids=ids, use_cache=False, position_ids=positions, summed_labels=labels, chunk=5),
    ):
        torch.testing.assert_close(found, one_by_one, rtol=1e-8, atol=0)
    assert takes_documents(type(model))
    assert keeps_apart(model, ids, positions, window["documents"])
    assert same_head(model, ids, summed_cross_entropy)


@pytest.mark.parametrize(
    ("kind", "changed", "kernel"),
    [
        ("GPT2", {}, "sdpa"),
        ("GPT2", {}, "eager"),
        ("Llama", {}, "eager"),
        ("Mistral", {"sliding_window": 4}, "sdpa"),
        ("Gemma2", {"head_dim": 8, "sliding_window": 4}, "eager"),
    ],
)
def test_packed_documents_train_like_separate_ones(kind, changed, kernel):
    """In float32, in train mode: logits, loss and gradients; two windows a batch, of which one holds one document."""
    model = hub(kind, **changed).float().train()
    model.set_attn_implementation(kernel)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    packs = [documents([5, 9, 1, 7]), documents([22], seed=1)]
    windows = [in_one_window(samples, 24) for samples in packs]
    batch = {name: torch.cat([window[name] for window in windows]) for name in windows[0]}
    together = logits_of(model, batch["input_ids"], **inputs_of(batch))
    loss = summed_cross_entropy(together, batch["labels"])
    loss.backward()
    found, total = gradients(model), 0.0
    model.zero_grad()
    for row, samples in enumerate(packs):
        place = 0
        for sample in samples:
            alone = logits_of(model, sample["input_ids"][None])
            end = place + len(sample["labels"])
            torch.testing.assert_close(together[row, place:end], alone[0], rtol=1e-5, atol=1e-5)
            total = total + summed_cross_entropy(alone, sample["labels"][None])
            place = end
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    total.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


class Leaking(nn.Module):
    """Every token sees all before it, whatever the positions."""

    def forward(self, input_ids, position_ids=None, use_cache=False):
        class Output:
            logits = input_ids.double().cumsum(1)[..., None] * torch.ones(7)

        return Output


def test_a_model_that_looks_across_documents_is_found():
    window = in_one_window(documents([5, 9, 1, 7]), 24)
    assert not keeps_apart(Leaking(), window["input_ids"], window["positions"], window["documents"])
    alone = in_one_window(documents([24]), 24)
    assert keeps_apart(Leaking(), alone["input_ids"], alone["positions"], alone["documents"])


def test_architectures_with_state_or_no_positions_are_refused():
    import transformers

    refused = [transformers.MambaForCausalLM, transformers.BloomForCausalLM, transformers.JambaForCausalLM]
    assert not any(map(takes_documents, refused))


def test_logits_that_are_more_than_the_heads_are_found():
    assert not can_chunk(hub("Granite", logits_scaling=4.0))
    assert not can_chunk(hub("Cohere"))
    model = with_loss(hub("Granite", logits_scaling=4.0))  # as if nobody knew
    assert not same_head(model, torch.arange(8)[None], summed_cross_entropy)


def test_a_chunk_that_cannot_be_had_is_refused_by_name(tmp_path):
    import transformers

    from lockstep.config.schema import Config
    from lockstep.tasks.language_model import hub_task

    hub_files.write_tokenizer(tmp_path)
    transformers.GraniteConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        logits_scaling=4.0,
    ).save_pretrained(tmp_path)
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(20))
    base = {
        "model_name": str(tmp_path),
        "dataset_name": str(path),
        "seq_len": 32,
        "data": {"cache": str(tmp_path / "c"), "packing": "stream"},
    }
    with pytest.raises(ConfigError, match="--model.loss-chunk 8: "):
        hub_task(Config(**base, model={"loss_chunk": 8}), print).model()
    hub_task(Config(**base), print).model()


def test_documents_are_refused_of_an_architecture_with_a_state(tmp_path):
    import transformers

    from lockstep.config.schema import Config
    from lockstep.tasks.language_model import hub_task

    hub_files.write_tokenizer(tmp_path)
    transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    config = Config(model_name=str(tmp_path), dataset_name=str(tmp_path), seq_len=32, data={"packing": "documents"})
    with pytest.raises(ConfigError, match=r"--data.packing documents: .* use --data.packing padded"):
        hub_task(config, print)


def test_the_hub_model_of_a_folder_computes_its_loss_inside(weights_folder, tmp_path):
    model = HubModel(str(weights_folder), cache=tmp_path, say=print).build(
        vocab_size=300, dtype=torch.float64, pretrained=True
    )
    model.eval()  # no dropout
    ids, labels = torch.randint(0, 300, (2, 2, 20))
    plain = summed_cross_entropy(logits_of(model, ids), labels)
    plain.backward()
    expected = gradients(model)
    model.zero_grad()
    loss = with_loss(model)(input_ids=ids, use_cache=False, summed_labels=labels, chunk=6)
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["GPT2", "Mistral", "Mamba"])
def test_a_text_is_the_same_when_tokens_are_computed_once(kind):
    model = hub(kind, sliding_window=4) if kind != "Mamba" else hub_mamba()
    reach = GPTConfig(layers=1, heads=1, width=1, vocab_size=100, context=64)
    texts = [
        generate(
            model,
            torch.arange(1, 7)[None],
            20,
            config=reach,
            generator=torch.Generator().manual_seed(1),
            logits_of=logits_of,
            further=further,
        )
        for further in (None, further_logits)
    ]
    assert torch.equal(*texts)
    assert len(set(texts[0][0].tolist())) > 8


def hub_mamba():
    import transformers

    torch.manual_seed(3)
    config = transformers.MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2, initializer_range=0.5)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()
