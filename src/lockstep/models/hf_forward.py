"""How a model of `transformers` is called: on batches of every packing, with its loss inside where that saves memory.

logits = logits_of(model, ids)
loss = model(input_ids=ids, use_cache=False, summed_labels=labels, chunk=512)       # after with_loss(model)
"""

import inspect
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.models.chunked import summed_cross_entropy, summed_loss

__all__ = [
    "can_chunk",
    "further_logits",
    "inputs_of",
    "keeps_apart",
    "logits_of",
    "same_head",
    "takes_documents",
    "with_loss",
]

# What some architectures do with the logits that their head gives, by the name in their configuration.
_CAP = "final_logit_softcapping"
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
_BEFORE, _AFTER = 32, 16  # tokens around the end of a document that are looked at


def logits_of(model: nn.Module, input_ids: Tensor, **inputs: Tensor) -> Tensor:
    """Logits [batch, time, vocab] of `input_ids` (int64 [batch, time]), in the model's dtype."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return logits


def further_logits(model: nn.Module, input_ids: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Logits of tokens that follow those whose keys and values are in `past` (None: of the first), and all of these.

    An architecture that keeps something else gives None, and is then asked for all tokens again.
    """
    kept = {} if past is None else {"past_key_values": past}
    made = model(input_ids=input_ids, use_cache=True, **kept)
    return made.logits, getattr(made, "past_key_values", None)


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """What the model gets beside the tokens: positions that begin anew in each document, where some are packed.

    From such positions, and no mask, the package makes the attention masks of packed documents itself, one for each
    kind of layer; a mask of ours would take the place of those of sliding windows too.
    """
    return {"position_ids": batch["positions"]} if "positions" in batch else {}


def takes_documents(architecture: type[nn.Module]) -> bool:
    """Whether a model class has positions, and no state that runs on from one document into the next."""
    known = inspect.signature(architecture.forward).parameters
    return "position_ids" in known and not getattr(architecture, "_is_stateful", False)


def can_chunk(model: Any) -> bool:
    """Whether the logits are known to be those of its head, of what its inner model gives."""
    config = model.config.get_text_config()
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALES) or hasattr(model, "logit_scale")
    return model.get_output_embeddings() is not None and model.base_model is not model and not scaled


def with_loss(model: Any, *, of_logits: bool = False) -> nn.Module:
    """The model, changed in place: called with `summed_labels` (int64 [batch, time]) and `chunk` it returns the loss,
    see `models.chunked.summed_loss`.

    Args:
        of_logits: the loss of the logits that the model itself gives, whatever makes them; then `chunk` is 0.
    """
    model.forward = MethodType(_forward_of_logits if of_logits else _forward, model)
    model.ending = _ended_of_logits if of_logits else _ended
    return cast(nn.Module, model)


def _forward(self: Any, *inputs: Any, summed_labels: Tensor | None = None, chunk: int = 0, **named: Any) -> Any:
    if summed_labels is None:
        return type(self).forward(self, *inputs, **named)
    asked = {name: value for name, value in named.items() if value is not None}  # adapters pass on whatever there is
    hidden = self.base_model(*inputs, **asked).last_hidden_state
    loss: Tensor = self.ending(self, hidden, summed_labels, chunk)
    return loss


def _forward_of_logits(
    self: Any, *inputs: Any, summed_labels: Tensor | None = None, chunk: int = 0, **named: Any
) -> Any:
    made = type(self).forward(self, *inputs, **named)
    return made if summed_labels is None else self.ending(self, made.logits, summed_labels, chunk)


def _ended(model: Any, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    return summed_loss(partial(_head, model), hidden, labels, chunk)


def _ended_of_logits(model: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
    assert not chunk
    return summed_cross_entropy(logits, labels)


def _head(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model.get_output_embeddings()(hidden)
    cap = getattr(model.config.get_text_config(), _CAP, None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def same_head(model: nn.Module, ids: Tensor, loss: Any) -> bool:
    """Whether the loss inside the model is the one of its logits, on a few tokens. Two forwards, on every rank alike.

    Args:
        loss: (logits, labels) -> the summed loss.
    """
    few = ids[:1, :8]
    plain = loss(logits_of(model, few), few)
    inside = model(input_ids=few, use_cache=False, summed_labels=few, chunk=3)
    return bool((plain - inside).abs() <= _close(plain) * plain.abs())  # waits for the device


@torch.no_grad()
def keeps_apart(model: nn.Module, ids: Tensor, positions: Tensor, documents: Tensor) -> bool:
    """Whether what one document says leaves the logits of the next one alone. Two forwards, on every rank alike.

    Looked at are a few tokens around the end of the first document of a sample that has two.

    Args:
        ids, positions, documents: a batch, int64 [batch, time] each.
    """
    row = int(documents.amax(dim=1).argmax())  # waits for the device
    first = documents[row] == 0
    end = int(first.sum())  # waits for the device
    after = end + int((documents[row] == 1)[end : end + _AFTER].sum())  # waits for the device
    span = slice(max(0, end - _BEFORE), after)
    few, places = ids[row : row + 1, span], positions[row : row + 1, span]
    other = torch.where(first[span], (few + 1) % (int(ids.max()) + 1), few)  # waits for the device
    one, two = (logits_of(model, each, position_ids=places)[:, end - span.start :] for each in (few, other))
    if not one.numel():
        return True
    exact = one.dtype in (torch.float32, torch.float64)
    return bool((one - two).abs().max() <= (1e-5 if exact else 1e-2) * one.abs().max())  # waits for the device


def _close(loss: Tensor) -> float:
    return 1e-9 if loss.dtype is torch.float64 else 2e-3
