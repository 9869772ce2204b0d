"""Choose the device and the sizes, draw a corpus of random tokens, and print figures, for all stages of `make gpu`.

Every stage is a program of its own. It prints figures, one JSON object a line; whatever else it prints is for people.
--toy is a rehearsal at tiny size on the CPU, --tiny one on the CUDA device: they show that a stage runs, and no speed.
"""

import argparse
import contextlib
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
from lockstep.tasks.language_model import CausalLM  # noqa: E402
from lockstep.text.token_store import Packing, TokenCorpus  # noqa: E402

VOCABULARY = 50257
# Dense bf16 FLOP/s by NVIDIA's data sheets, the most special name first. A device that is not here has no MFU.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


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
    "gpt2": Sizes(PRESETS["builtin:gpt2"], 1024, 64, 128),
    "gpt2-xl": Sizes(PRESETS["builtin:gpt2-xl"], 1024, 12, 48),
    "llama-1b": Sizes(Llama(), 2048, 4, 16),
}
# MFU of llm.c on an H100 SXM by the definition of `mfu`: 524,288 tokens in 140 ms on 8 GPUs (modded-nanogpt,
# records/track_1_short/2024-10-13_llmc), 1,048,576 in 2.80 s (llm.c, scripts/run_gpt2_1558M.sh).
LLM_C = {"gpt2": 0.405, "gpt2-xl": 0.487}
STRETCH = {"gpt2": 0.45, "gpt2-xl": 0.50}
TOY = Sizes(GPTConfig(layers=2, heads=2, width=64, vocab_size=512, context=32), 32, 2, 4)
TOY_LLAMA = replace(TOY, model=Llama(512, 64, 2, 4, 2, 128))


def read_arguments(parser=None):
    """Reads the arguments, chooses the device, and sets the switches of the process."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CUDA device: a rehearsal there")
    found = parser.parse_args()
    found.small = found.toy or found.tiny
    if found.toy:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print("torch sees no CUDA device; rehearse with --toy")
        raise SystemExit(2)
    found.device = torch.device("cpu") if found.toy else torch.device("cuda", 0)
    torch.set_float32_matmul_precision("high")
    return found


def sizes(name, arguments, **changed):
    """The sizes of a model by name; tiny ones in a rehearsal. `changed` fields that are 0 stay as they are."""
    if arguments.small:
        return TOY_LLAMA if name.startswith("llama") else TOY
    return replace(SIZES[name], **{field: value for field, value in changed.items() if value})


def option(text):
    """("optim.clip", 0.5) from `optim.clip=0.5`: a value is JSON, or else a word."""
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


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
    counts = {name: {"train": rows * shape.time} for name in ("tokens", "labels")} | {"documents": {"train": 1}}
    facts |= {"chat": False, "prompts": False, "begin": [], **counts}
    return TokenCorpus(folder, facts, Numbers(), Packing("stream", shape.time, 0.1))


def language_model(folder, shape, rows=1024, loss_chunk=0):
    """The language model's task on it, as `lockstep train --compile --model.loss-chunk 0` has it."""
    made = corpus(folder, shape, rows)
    if not isinstance(shape.model, Llama):
        return CausalLM(made, shape.model, inside=True, loss_chunk=loss_chunk)
    from lockstep.models.hf import HubModel
    from lockstep.tasks.language_model import HubCausalLM

    place = Path(folder) / "model"
    shape.model.config(shape.time).save_pretrained(place)
    source = HubModel(str(place), cache=Path(folder), say=print)
    size = shape.model.vocab_size
    more = {"dtype": None, "pretrained": False, "sources": {}, "inside": True, "loss_chunk": loss_chunk}
    return HubCausalLM(made, source, vocab_size=size, **more)


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
    """Prints that a part failed, with its reason: the stage goes on without it."""
    lines = str(error).splitlines() or [""]
    print(json.dumps({"failed": name, "why": f"{type(error).__name__}: {lines[0]}"}), file=sys.__stdout__, flush=True)


def mfu(tokens_per_second, shape, device):
    """Model FLOPs utilisation (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B); None for an unknown device."""
    if device.type != "cuda":
        return None
    peak = peak_of(torch.cuda.get_device_name(device))
    return None if peak is None else tokens_per_second * counted(shape)[1] / peak


def peak_of(name):
    """Dense bf16 FLOP/s of a device by its name; None for an unknown one."""
    return next((rate for part, rate in PEAKS.items() if part in name), None)


def product_rate(device, size=8192):
    """FLOP/s of a bf16 product of two random square matrices: what this card gives, beside its data sheet."""
    size = size if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (timed(lambda: a @ b, device) * 1e-3)


def throughput(title, seconds, shape, device, *, aim=None, **more):
    """Prints a step's MFU with what it comes from; `seconds` is the time of a step."""
    tokens = shape.batch * shape.time / seconds
    used = mfu(tokens, shape, device)
    if device.type == "cuda":
        rate = product_rate(device)
        more |= {"of_measured_product": tokens * counted(shape)[1] / rate, "product_tflops": rate / 1e12}
    more |= {"tokens_per_second": tokens, "ms_16_rows": 16e3 * seconds / shape.batch}
    figure(title, used, "MFU", aim=aim, micro=shape.micro, batch=shape.batch, **more)


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
