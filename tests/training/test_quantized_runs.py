"""Quantized bases: they stay as they are, their losses are transformers' and peft's, and the bits are those of any world."""

import contextlib
import dataclasses
import json

import hub_files
import pytest
import torch
from ranks import run
from refusals import refuses
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, ResumeError
from lockstep.models.quantized import bits_of, dequantized, quantized_layers
from lockstep.training.named_task import make_task

pytest.importorskip("peft", reason="the extra peft is not installed")
pytest.importorskip("bitsandbytes", reason="the extra quantized is not installed")
pytestmark = pytest.mark.usefixtures("no_network")

BITS = ("4bit", "8bit")


def quiet(line):
    pass


def settings(folder, weights, data, bits="4bit", **changes):
    optim = {"schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0}
    values = {
        "model_name": str(weights),
        "model": {"pretrained": True, "load_in": bits},
        "dataset_name": str(data),
        "data": {"cache": str(data.parent / "cache")},
        "lora": {"rank": 2},
        "device": "cpu",
        "precision": "float32",
        "save_dir": str(folder),
        "experiment_name": "r",
        "seq_len": 16,
        "batch_size": 4,
        "micro_batch_size": 1,
        "max_steps": 4,
        "log_freq": 1,
        "lr": 0.01,
        "report": False,
        "optim": optim,
    }
    return Config(**values | changes)


@pytest.fixture
def data(tmp_path):
    return hub_files.write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in hub_files.texts(30)])


def frozen_bits(model):
    """Every tensor of the base, those inside of quantized weights too, by name: dtype and bytes."""
    found = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    for name, layer in quantized_layers(model):
        if bits_of(layer) == "8bit":
            found[f"{name} scales"] = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
            continue
        inner = layer.weight.quant_state
        found |= {f"{name} scales": inner.absmax, f"{name} offset": inner.offset, f"{name} nested": inner.state2.absmax}
        found |= {f"{name} code": inner.code, f"{name} nested code": inner.state2.code}
    return {name: (t.dtype, t.contiguous().reshape(-1).view(torch.uint8).clone()) for name, t in found.items()}


def same_bits(before, after):
    return before.keys() == after.keys() and all(
        before[name][0] is after[name][0] and torch.equal(before[name][1], after[name][1]) for name in before
    )


def raw(weights, bits):
    """The same base by transformers and bitsandbytes alone."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == "4bit":
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(weights, quantization_config=how, device_map={"": "cpu"})


@pytest.mark.parametrize("bits", BITS)
def test_losses_are_those_of_transformers_and_peft_and_the_base_stays(tmp_path, weights_folder, data, bits):
    import peft

    config = settings(tmp_path, weights_folder, data, bits)
    samples = make_task(config, quiet).dataset("train")
    size = len(samples)
    config = dataclasses.replace(config, batch_size=size, micro_batch_size=size)  # every step has all samples
    run_ = lockstep.Run(config, make_task(config, quiet))
    with run_:
        before = frozen_bits(run_.model)
        adapters = {n: p.detach().clone() for n, p in run_.model.named_parameters() if p.requires_grad}
        found = [step.loss for step in run_]
    assert same_bits(before, frozen_bits(run_.model)), "after training, an evaluation and a sample of text"
    assert sum(name.endswith(" scales") for name in before) == 8, "each linear layer of two blocks"

    model = raw(weights_folder, bits)
    targets = sorted({name.partition(".base_layer")[0] for name, _ in quantized_layers(run_.model)})
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, bias="none"), model)
    trained = {name: p.requires_grad_(name in adapters) for name, p in model.named_parameters() if name in adapters}
    assert trained.keys() == adapters.keys()
    for name, p in trained.items():
        p.data.copy_(adapters[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)
    batch = {key: torch.stack([samples[k][key] for k in range(size)]) for key in samples[0]}
    for loss in found:
        logits = model.train()(input_ids=batch["input_ids"], use_cache=False).logits
        plain = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        assert loss == pytest.approx(plain.item(), rel=2e-6)
        optimizer.zero_grad()
        plain.backward()
        optimizer.step()
    assert found[-1] < found[0] - 0.05
