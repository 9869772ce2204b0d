"""What the stages of `make gpu` have in common: the device, the sizes, a corpus of random tokens, and their figures.

Every stage is a program of its own. It prints figures, one JSON object a line; whatever else it says is for people.
With --toy the sizes are tiny and the device is the CPU: a rehearsal, which shows that a stage runs, and no speed.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from lockstep.models.gpt import GPT, PRESETS, GPTConfig  # noqa: E402
from lockstep.tasks.causal_lm import CausalLM  # noqa: E402
from lockstep.text.hub_corpus import TokenCorpus  # noqa: E402
from lockstep.text.written import Packing  # noqa: E402

VOCABULARY = 50257
# Dense bf16 FLOP/s by NVIDIA's datasheets; a device that is not here has no MFU.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


@dataclass(frozen=True)
class Llama:
    """The shape of a Llama, which `transformers` builds; by default Llama-3.2-1B's, a tied head among it."""

    vocab_size: int = 128256
    width: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192

    def config(self, time):
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.inner,
            max_position_embeddings=time,
            tie_word_embeddings=True,
        )


@dataclass(frozen=True)
class Sizes:
    """What is trained: a model, sequences of `time` tokens, `micro` of them in a forward and `batch` in a step."""

    model: GPTConfig | Llama
    time: int
    micro: int
    batch: int


SIZES = {
    "gpt2": Sizes(PRESETS["builtin:gpt2"], 1024, 16, 32),
    "gpt2-xl": Sizes(PRESETS["builtin:gpt2-xl"], 1024, 4, 16),
    "llama-1b": Sizes(Llama(), 2048, 4, 16),
}
TOY = Sizes(GPTConfig(layers=2, heads=2, width=64, vocab_size=512, context=32), 32, 2, 4)
TOY_LLAMA = replace(TOY, model=Llama(512, 64, 2, 4, 2, 128))


def given(parser=None):
    """The arguments, the device among them, with the switches of the process set."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: a rehearsal")
    found = parser.parse_args()
    if found.toy:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; rehearse with --toy")
    found.device = torch.device("cpu") if found.toy else torch.device("cuda", 0)
    torch.set_float32_matmul_precision("high")
    return found


def sizes(name, arguments, **changed):
    toy = TOY_LLAMA if name.startswith("llama") else TOY
    return replace(toy if arguments.toy else SIZES[name], **changed)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Numbers:
    """A tokenizer whose texts are the tokens' numbers."""

    def encode_all(self, texts):
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def corpus(folder, shape, rows=1024):
    """Random tokens, as a prepared corpus lies on the disk."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = min(VOCABULARY, shape.model.vocab_size)
    generator = np.random.default_rng(0)
    for name, count in (("train", rows), ("evaluation", 4 * shape.micro)):
        tokens = generator.integers(vocabulary, size=count * shape.time + 1, dtype=np.uint16)
        (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    facts = {"fingerprint": f"random-{rows}", "vocab_size": vocabulary, "separator": -1, "masked": False}
    return TokenCorpus(folder, facts | {"chat": False, "begin": []}, Numbers(), Packing("stream", shape.time, 0.1))


def language_model(folder, shape, rows=1024):
    """The language model's task on it, as `lockstep train --compile` has it."""
    made = corpus(folder, shape, rows)
    if not isinstance(shape.model, Llama):
        return CausalLM(made, shape.model, inside=True)
    from lockstep.models.hf import HubModel
    from lockstep.tasks.hf import HubCausalLM

    place = Path(folder) / "model"
    shape.model.config(shape.time).save_pretrained(place)
    source = HubModel(str(place), cache=Path(folder), say=print)
    size = shape.model.vocab_size
    return HubCausalLM(made, source, vocab_size=size, dtype=None, pretrained=False, sources={}, inside=True)


def counted(shape):
    """(parameters, FLOPs of a token's forward and backward), as `GPT.num_flops_per_token` counts them."""
    with torch.device("meta"):
        if not isinstance(shape.model, Llama):
            model = GPT(shape.model)
            return sum(p.numel() for p in model.parameters()), model.num_flops_per_token(shape.time)
        from transformers import AutoModelForCausalLM

        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape.model.config(shape.time)).parameters())
    return count, 6 * count + 12 * shape.model.layers * shape.model.width * shape.time


def figure(name, value, unit="", aim=None, better="more", **more):
    """One figure, for the table: its aim is a least ("more") or a most ("less") value."""
    if isinstance(value, float) and not math.isfinite(value):
        value = None
    line = json.dumps({"figure": name, "value": value, "unit": unit, "aim": aim, "better": better, **more})
    print(line, file=sys.__stdout__, flush=True)  # also from within a run, whose own lines go nowhere


def failed(name, error):
    """A part that could not be had: it ends nothing, and stands in the table with its reason."""
    lines = str(error).splitlines() or [""]
    print(json.dumps({"failed": name, "why": f"{type(error).__name__}: {lines[0]}"}), file=sys.__stdout__, flush=True)


def mfu(tokens_per_second, shape, device):
    """Model FLOPs utilisation (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B); None for an unknown device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((rate for part, rate in PEAKS.items() if part in name), None)
    return None if peak is None else tokens_per_second * counted(shape)[1] / peak


def timed(work, device, *, warm=3, turns=10, each=1):
    """Median milliseconds of `work()`: by CUDA events, or by the clock on a CPU."""
    for _ in range(warm):
        work()
    synchronize(device)
    found = []
    for _ in range(turns):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(each):
                work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / each)
        else:
            began = time.perf_counter()
            for _ in range(each):
                work()
            found.append((time.perf_counter() - began) * 1e3 / each)
    return statistics.median(found)


def versions(device):
    """What the figures were measured on."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "CPU (a rehearsal)" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() or 0,
    }
    for name in ("triton", "lightning", "accelerate", "transformers"):
        try:
            from importlib.metadata import version

            found[name] = version(name)
        except ImportError:
            found[name] = ""
    return found
