"""An upper bound of what a rank of a built-in language model takes on its device, from the configuration alone.

    bytes_ = memory_bound(config, micro_batch_size=16)          # None where nothing honest can be said

It is meant to be too large: where twice of it fits a device, `lockstep plan`, which builds the model and takes some ten
seconds, need not be asked. Neither the data nor the model is there yet, so the vocabulary is the largest in use. Other
models have no such bound: what their forward keeps is known when it has run.
"""

from lockstep.config.config import Config
from lockstep.engines.options import ENGINES
from lockstep.models.gpt import PRESETS
from lockstep.tasks.options import LANGUAGE, kind_of

__all__ = ["memory_bound"]

_VOCABULARY = 1 << 18  # tokens: no tokenizer in use has more
# Bytes a parameter: float32, its gradient, two moments, an average, a bucket, and a copy in half precision.
_STATES = 28
# Bytes that a block keeps of a token and an element of its width: 29 float32 tensors and 7 in half precision.
_KEPT = 160
_WEIGHTS = 12  # bytes of a score that attention keeps where it keeps scores: before and after softmax, and dropped out
_COPIES = 5  # of the logits: in half precision, float32, of softmax, their gradient, and that of the product
_LOGITS = 512 << 20  # bytes of float32 logits above which the loss makes them in chunks (see models/chunked.py)
_CONTEXT = 2 << 30  # bytes: CUDA's own, cuBLAS's workspaces, and what the allocator holds back


def memory_bound(config: Config, micro_batch_size: int) -> float | None:
    """Bound the bytes that training takes on one device.

    Returns:
        None for another model than a built-in GPT, and for engines and settings that hold more than is counted here.
    """
    shape = PRESETS.get(config.model_name)
    if shape is None or kind_of(config.task) != LANGUAGE:
        return None
    if config.exact or config.guards.audit or config.precision == "float64":
        return None  # sums of exact steps, deterministic kernels, doubles
    if config.engine in ENGINES and ENGINES[config.engine].plain:
        return None  # it keeps copies of its own
    vocabulary = max(_VOCABULARY, config.data.vocab_size)
    tokens = micro_batch_size * config.seq_len
    parameters = shape.layers * (12 * shape.width**2 + 13 * shape.width)
    parameters += shape.width * (vocabulary + max(shape.context, config.seq_len) + 2)
    kept = (shape.layers + 2) * _KEPT * shape.width * tokens  # two: the block that the backward is in
    if config.data.packing == "documents" or config.attention not in ("auto", "flash", "cudnn", "efficient"):
        kept += (shape.layers + 2) * _WEIGHTS * shape.heads * config.seq_len * tokens
    logits = 4 * tokens * vocabulary
    if config.model.loss_chunk:
        logits = min(logits, max(_LOGITS, 4 * config.model.loss_chunk * vocabulary))
    return float(_STATES * parameters + kept + _COPIES * logits + _CONTEXT)
