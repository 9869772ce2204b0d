"""Quantized bases: they stay, their losses are those of transformers and peft, and the bits those of any world."""

import dataclasses
import importlib.util
import warnings

import hub_files
import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config as small
from torch import nn
from toys import Network, Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.read import open_tensors
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, ResumeError
from lockstep.models import quantized
from lockstep.models.hf import HubModel
from lockstep.models.quantized import PlaceholderLinear, Quantization, bits_of, keep_unchanged, quantized_layers
from lockstep.training.inference import ExportRequest, export_run
from lockstep.training.start.named_task import make_task

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


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A trained GPT-2 without dropout: its layers have biases, and weights the other way round."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hub_files.write_model(tmp_path_factory.mktemp("weights"), weights=True, **dropout)


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
def test_losses_match_transformers_and_peft_and_the_base_stays(tmp_path, weights, data, bits):
    import peft

    config = settings(tmp_path, weights, data, bits)
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

    model = raw(weights, bits)
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


def trained(world, folder, weights, data, cases):
    """For each (bits, name, changes): the fingerprint of its newest checkpoint, and whether the base stayed."""
    found = []
    for bits, name, changes in cases:
        config = settings(folder, weights, data, bits, exact=True, experiment_name=name, **changes)
        run_ = lockstep.Run(config, make_task(config, quiet), world)
        with run_:
            before = frozen_bits(run_.model) if config.engine != "fsdp" else {}
            for _ in run_:
                pass
        stayed = not before or same_bits(before, frozen_bits(run_.model))
        found.append((checkpoint.fingerprint(checkpoint.newest(run_.result.folder, say=quiet)), stayed, run_.status))
    return found


def test_the_same_bits_in_any_world_and_after_a_resume(tmp_path, weights, data):
    """Audited too: another rank computes micro-batches again, and finds the same."""
    make_task(settings(tmp_path, weights, data), quiet)  # prepares the data
    wholes = [(bits, f"{bits}-one", {"engine": "ddp"}) for bits in BITS]
    ((four, eight),) = run(trained, 1, tmp_path, weights, data, wholes)
    assert four[1:] == eight[1:] == (True, "finished")
    assert four[0] != eight[0]
    halves = [(bits, f"{bits}-half", {"engine": "ddp", "stop_at": 2}) for bits in BITS]
    audited = ("8bit", "audited", {"engine": "ddp", "guards": {"audit": 1.0, "desync_freq": 1}})
    two = [audited, ("4bit", "zero", {"engine": "zero"}), ("4bit", "fsdp", {"engine": "fsdp"}), *halves]
    (found, other) = run(trained, 2, tmp_path, weights, data, two)
    assert found == other
    assert found[:3] == [eight, four, four]
    rest = [(bits, f"{bits}-half", {"engine": "ddp"}) for bits in BITS]
    assert run(trained, 1, tmp_path, weights, data, rest) == [[four, eight]]


def test_a_checkpoint_has_the_adapters_alone_and_knows_its_base(tmp_path, weights, data):
    config = settings(tmp_path, weights, data, max_steps=2)
    lockstep.train(config, make_task(config, quiet))
    newest = checkpoint.newest(tmp_path / "r", say=quiet)
    with open_tensors(newest) as tensors:
        assert all(".lora_" in name for name in tensors.contents if name.startswith("model/"))
    longer = dataclasses.replace(config, max_steps=3, resume_anyway=False)
    for bits in ("8bit", "full"):
        changed = dataclasses.replace(longer, model=dataclasses.replace(config.model, load_in=bits))
        with refuses(ResumeError, "--model.load-in", "4bit", bits):
            lockstep.train(changed, make_task(changed, quiet))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {}}, ["lora.rank"]),
        ({"model": {"load_in": "8bit"}}, ["model.pretrained"]),
        ({"precision": "float64"}, ["precision", "float64"]),
        ({"engine": "fsdp"}, ["engine", "fsdp", "single, ddp, zero"]),
        ({"engine": "deepspeed"}, ["engine", "deepspeed"]),
        ({"engine_options": {"meta_init": True}}, ["engine_options.meta_init"]),
    ],
)
def test_what_quantized_weights_cannot_is_named(tmp_path, changes, words):
    with refuses(ConfigError, "model.load_in", "8bit", *words):
        settings(tmp_path, "x", tmp_path / "y", "8bit", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["bitsandbytes", "accelerate"])
def test_without_a_package(tmp_path, weights, data, package, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(quantized, "find_spec", lambda name: None if name == package else real(name))
    config = settings(tmp_path, weights, data)
    with refuses(ConfigError, "--model.load-in", "4bit", package, "the extra quantized of torch-lockstep"):
        make_task(config, quiet)
    assert not (tmp_path / "cache").exists()


def test_the_flag_is_not_ignored_by_a_task_of_ones_own(tmp_path):
    changes = {"model": {"load_in": "4bit", "pretrained": True}, "lora": {"rank": 2}, "precision": "float32"}
    with refuses(ConfigError, "--model.load-in", "4bit", "--model-name"):
        lockstep.train(small(tmp_path, **changes), Ragged())
    assert not (tmp_path / "r").exists()


class Own(Ragged):
    """A task that quantizes its model itself, by bitsandbytes."""

    defaults = "fine-tuning"

    def model(self):
        import bitsandbytes

        torch.manual_seed(5)
        model = Network(0.1, dtype=torch.float32)
        for block in model.blocks:
            plain = block[1]
            block[1] = bitsandbytes.nn.LinearNF4(plain.in_features, plain.out_features)
            block[1].load_state_dict(plain.state_dict())
        return model.to("cpu")


def test_a_model_that_the_task_quantized(tmp_path):
    """Refused without adapters, and with an engine that would cut it up; otherwise trained."""
    with refuses(ConfigError, "blocks.0.1", "--lora.rank"):
        lockstep.train(small(tmp_path, precision="float32"), Own())
    changes = {"lora": {"rank": 2}, "precision": "float32", "max_steps": 6}
    with refuses(ConfigError, "blocks.0.1", "--engine", "deepspeed", "single, ddp, fsdp, zero"):
        lockstep.train(small(tmp_path, **changes, engine="deepspeed"), Own())
    assert not list(tmp_path.iterdir())
    lockstep.train(small(tmp_path, **changes, experiment_name="whole"), Own())
    lockstep.train(small(tmp_path, **changes, stop_at=3), Own())
    run_ = lockstep.Run(small(tmp_path, **changes), Own())
    with run_:
        before = frozen_bits(run_.model)
        for _ in run_:
            pass
    assert same_bits(before, frozen_bits(run_.model))
    whole, parted = (checkpoint.fingerprint(checkpoint.newest(tmp_path / name, say=quiet)) for name in ("whole", "r"))
    assert whole == parted


@pytest.mark.parametrize("bits", BITS)
def test_exported_adapters_and_merged_model_match_the_run(tmp_path, weights, data, bits):
    import peft
    from transformers import AutoModelForCausalLM

    config = settings(tmp_path, weights, data, bits, max_steps=3)
    task = make_task(config, quiet)
    lockstep.train(config, task)
    model = lockstep.load(tmp_path / "r", task, which="last")
    export_run(ExportRequest(str(tmp_path / "r"), str(tmp_path / "adapters"), "peft"), quiet)
    export_run(ExportRequest(str(tmp_path / "r"), str(tmp_path / "merged"), "hf", merge=True), quiet)
    ids = torch.arange(24)[None] % 300
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # of peft beside the newest transformers
        own = model(input_ids=ids).logits
        base = keep_unchanged(
            raw(weights, bits)
        )  # bitsandbytes' kernel of an evaluation takes whole blocks of 64 inputs
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert type(merged.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
        torch.testing.assert_close(adapted(input_ids=ids).logits, own, rtol=1e-5, atol=2e-5)
        if bits == "8bit":  # whose evaluation rounds inputs to 8 bits too, and whose training does not
            model.train()
            own = model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, own, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("bits", BITS)
def test_a_trainer_whose_script_quantized_the_model(tmp_path, weights, bits):
    """Its losses are the Trainer's own, the base stays, and a resume has the bits of the whole run."""
    import peft
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(320).remainder(300).view(20, 16).tolist()]

    def trainer(name):
        torch.manual_seed(0)
        given = {"output_dir": str(tmp_path / name), "max_steps": 4, "learning_rate": 0.01, "logging_steps": 1}
        given |= {"per_device_train_batch_size": 5, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft beside the newest transformers
            setting = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
            model = peft.get_peft_model(keep_unchanged(raw(weights, bits)), setting)
        return Trainer(model, TrainingArguments(**given, disable_tqdm=True), train_dataset=rows)

    def losses(name, stop):
        config, task = lockstep.from_trainer(trainer(name))
        run_ = lockstep.Run(dataclasses.replace(config, stop_at=stop, experiment_name=name), task)
        with run_:
            before = frozen_bits(run_.model)
            found = [step.loss for step in run_]
        assert same_bits(before, frozen_bits(run_.model))
        return found, checkpoint.fingerprint(checkpoint.newest(run_.result.folder, say=quiet))

    whole, wanted = losses("whole", 0)
    first, _ = losses("parted", 2)
    rest, found = losses("parted", 0)
    assert (first + rest, found) == (whole, wanted)
    theirs = trainer("theirs")
    theirs.train()
    logged = [float(entry["loss"]) for entry in theirs.state.log_history if "loss" in entry]
    assert whole == pytest.approx(logged, rel=2e-4), "the log of transformers rounds"


@pytest.mark.parametrize(("bits", "least", "most"), [("4bit", 0.125, 0.16), ("8bit", 0.25, 0.29)])
def test_a_plan_has_the_memory_of_quantized_weights(tmp_path, weights, bits, least, most):
    source = HubModel(str(weights), cache=tmp_path, say=quiet)
    plain = source.build(vocab_size=300, dtype=torch.float32)
    small_ = source.build(vocab_size=300, dtype=torch.float32, quantization=Quantization(bits, None))
    real = source.build(vocab_size=300, dtype=None, pretrained=True, quantization=Quantization(bits, None))
    layers = [name for name, module in small_.named_modules() if isinstance(module, PlaceholderLinear)]
    assert layers == [name for name, _ in quantized_layers(real)]
    stored = {name: tensor for name, tensor in real.state_dict().items() if not name.endswith("quant_map")}
    for name in layers:
        part = small_.get_submodule(name)
        size = part.weight.nbytes + part.scales.nbytes
        own = sum(t.nbytes for key, t in stored.items() if key.startswith(f"{name}.") and not key.endswith("bias"))
        assert least <= size / plain.get_submodule(name).weight.nbytes <= most
        assert size == pytest.approx(own, abs=256), "but for how they are stored, which is no tensor in training"
    ids = torch.zeros(1, 8, dtype=torch.int64)
    assert small_(input_ids=ids).logits.shape == plain(input_ids=ids).logits.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_has_the_base_of_the_host(tmp_path, weights, data, bits):
    config = settings(tmp_path, weights, data, bits, device="cuda", precision="bf16")
    run_ = lockstep.Run(config, make_task(config, quiet))
    with run_:
        before = frozen_bits(run_.model)
        assert all(step.loss > 0 for step in run_)
    assert same_bits(before, frozen_bits(run_.model))
    source = HubModel(str(weights), cache=tmp_path, say=quiet)
    host = source.build(vocab_size=300, dtype=None, pretrained=True, quantization=Quantization(bits, torch.bfloat16))
    own = {name.replace(".base_layer", ""): bits_ for name, bits_ in before.items()}
    assert all(
        torch.equal(own[name][1].cpu(), bits_[1]) for name, bits_ in frozen_bits(host).items() if "scales" in name
    )
