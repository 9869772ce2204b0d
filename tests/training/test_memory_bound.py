"""The bound of a built-in model's memory is above what its forward really keeps, and is given for nothing else."""

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.models.gpt import GPT, PRESETS
from lockstep.training.start import defaults as module
from lockstep.training.start.defaults import memory_bound

SHAPE = dataclasses.replace(
    PRESETS["builtin:nano"], layers=3, heads=8, width=128, vocab_size=512, context=128, dropout=0.1
)


def kept(micro_batch_size, precision, attention):
    """Bytes that the backward of SHAPE's blocks finds, parameters left out: each storage once."""
    model, found = GPT(SHAPE), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, or its address would be used again
        return tensor

    x = torch.randn(micro_batch_size, 128, SHAPE.width, requires_grad=True)
    kernel = SDPBackend.MATH if attention == "math" else SDPBackend.FLASH_ATTENTION
    half = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), half, sdpa_kernel(kernel):
        for block in model.blocks:
            if attention != "math":
                block.attention.dropout = 0.0  # which the CPU's kernel lacks; others keep no mask of it
            x = block(x)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("attention", ["math", "auto"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_the_blocks_keep_is_below_it(monkeypatch, precision, attention):
    monkeypatch.setitem(PRESETS, "builtin:nano", SHAPE)
    monkeypatch.setattr(module, "_LOGIT_COPIES", 0)  # of the logits, which would hide the blocks' part
    config = cli.build({"seq_len": 128, "precision": precision, "attention": attention, "model.dropout": 0.1})
    bounded = memory_bound(config, 8) - memory_bound(config, 4)
    really = kept(8, precision, attention) - kept(4, precision, attention)
    assert really < bounded < 8 * really


def test_states_and_logits_grow_with_what_they_are_of():
    small, large = (Config(model_name=f"builtin:{name}") for name in ("gpt2", "gpt2-xl"))
    assert memory_bound(large, 1) - memory_bound(small, 1) > 16 * 1.4e9  # bytes of AdamW's states and gradients
    chunked, whole = (cli.build({"seq_len": 1024, "model.loss_chunk": size}) for size in (-1, 0))
    assert memory_bound(whole, 16) - memory_bound(chunked, 16) > 3 * 4 * 16 * 1024 * 200_000


@pytest.mark.parametrize(
    "values",
    [
        {"exact": True},
        {"precision": "float64"},
        {"guards.audit": 0.1},
        {"engine": "deepspeed"},
        {"task": "mine.py:Task"},
        {"task": "classification", "model_name": "builtin:mlp"},
        {"model_name": "openai-community/gpt2"},
    ],
    ids=str,
)
def test_where_nothing_honest_can_be_said_there_is_none(values):
    assert memory_bound(cli.build(values), 1) is None
