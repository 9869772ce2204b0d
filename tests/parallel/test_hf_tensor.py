"""Small random models of `transformers` cut by the plan of their architecture, against one process."""

import pytest
import torch
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import summed_cross_entropy
from lockstep.models.hf import with_loss
from lockstep.models.hf_plan import tensor_plan
from lockstep.parallel.tensor import cut
from lockstep.tensors import is_dtensor

SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "use_cache": False,
}


def make(kind, **changed):
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changed})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def backward(model, inside):
    """Losses, and gradients accumulated over micro-batches of two lengths."""
    draw = torch.Generator().manual_seed(1)
    losses = []
    for time in (9, 6):
        ids = torch.randint(96, (2, time), generator=draw)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = -100
        if inside:
            loss = model(input_ids=ids, use_cache=False, summed_labels=labels, chunk=5)
        else:
            loss = summed_cross_entropy(model(input_ids=ids, use_cache=False).logits, labels)
        (loss / 26).backward()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(world, kind, inside, changed):
    losses, gradients = backward(with_loss(make(kind, **changed)), inside)
    model = make(kind, **changed)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    cut(model, mesh, tensor_plan(model, world.size), exact=True)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    found_losses, found = backward(with_loss(model), inside)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        own = found[name].full_tensor() if is_dtensor(found[name]) else found[name]
        assert (own - gradient).abs().max() < 1e-12 * gradient.abs().max(), name
    return tied


@pytest.mark.parametrize(
    ("kind", "degree", "inside", "changed"),
    [
        ("Llama", 2, True, {"attention_bias": True, "mlp_bias": True}),
        ("Llama", 4, False, {"num_key_value_heads": 4}),
        ("Qwen3", 2, True, {"tie_word_embeddings": True}),
        ("Mistral", 2, False, {"sliding_window": 4}),
    ],
)
def test_hub_models_are_cut_by_their_own_plan(kind, degree, inside, changed):
    tied = bool(changed.get("tie_word_embeddings"))
    assert run(compare, degree, kind, inside, changed) == [tied] * degree


def test_what_a_hub_models_plan_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="tensor 4: LlamaForCausalLM has num_key_value_heads 2; use a degree that"):
        tensor_plan(make("Llama"), 4)
    with pytest.raises(ConfigError, match="has a vocabulary of 97 tokens; use a degree that divides it, or --parallel"):
        tensor_plan(make("Llama", vocab_size=97), 2)
    assert "lm_head" not in tensor_plan(make("Llama", vocab_size=97), 2, vocabulary=False)
    with pytest.raises(ConfigError, match="has attention_dropout 0.1, whose draws would depend on the degree; set it"):
        tensor_plan(make("Llama", attention_dropout=0.1), 2)
    with pytest.raises(ConfigError, match=r"Phi3ForCausalLM plans layers.\*.self_attn.qkv_proj as 'colwise_g"):
        tensor_plan(make("Phi3"), 2)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no plan for tensor parallelism in transformers; use"):
        tensor_plan(make("GPT2"), 2)
