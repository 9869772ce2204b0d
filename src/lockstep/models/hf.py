"""Load Hugging Face causal language models and tokenizers, from a hub or a folder.

    source = HubModel("openai-community/gpt2", cache=cache, say=print)     # the configuration, downloaded once per node
    model = source.build(vocab_size=source.vocab_size, dtype=torch.float32)
    tokenizer = HubTokenizer("openai-community/gpt2", cache=cache, say=print)

Models are built without a key-value cache, which training does not use, and with torch's own attention kernels (SDPA)
if the architecture supports them. Code that comes with a model runs only on request, and weights are read from
safetensors alone, which cannot contain code. The module also renders conversations by chat templates, and computes a
model's loss inside its forward. `transformers` is imported only through `transformers_for` and `as_it_is`.
"""

import copy
import hashlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast, final

import torch
from filelock import FileLock
from torch import Tensor, nn

from lockstep.config.fields import is_hub_name
from lockstep.errors import ConfigError, DataError
from lockstep.extras import install_extra
from lockstep.models.chunked_loss import summed_cross_entropy, summed_loss, summed_loss_of_part
from lockstep.models.quantized import Quantization
from lockstep.parallel.layers import VocabularyLinear
from lockstep.text.cache import reach, way_out
from lockstep.text.documents import alike

__all__ = [
    "HubModel",
    "HubTokenizer",
    "as_it_is",
    "can_chunk",
    "explain_error",
    "further_logits",
    "inputs_of",
    "is_full",
    "keeps_apart",
    "logits_of",
    "once_per_node",
    "repeated_blocks",
    "same_head",
    "save_trained",
    "transformers_for",
    "where",
    "with_loss",
]


_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_LIMIT = 10**9
# The roles of common chat templates; a template may name more.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_NO_TEMPLATE = (
    "the tokenizer has no chat template; set --tokenizer to the model's chat version (its tokenizer_config.json or "
    "chat_template.jinja has one), or use rows with the columns prompt and completion"
)


def _chat_template(tokenizer: Any) -> str:
    """Return the chat template of a `transformers` tokenizer; "" if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return template or ""


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    row: int,
    masked: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether each is learned.

    Args:
        tokenizer: of `transformers`.
        messages: the turns, each with "role" and "content".
        row: for messages.
        masked: learn only the assistant's turns; else everything.
        tools: that the assistant may call, for the template.

    Raises:
        DataError: no template, one that rejects these turns, one in which a turn changes earlier text, or a role that
            no template knows.
    """
    if not _chat_template(tokenizer):
        raise DataError(f"--dataset-name: row {row} is a conversation, but {_NO_TEMPLATE}")
    _check_roles(tokenizer, messages, row)
    try:
        if not masked:
            tokens = _encode(tokenizer, _render(tokenizer, list(messages), tools=tools))
            return tokens, [True] * len(tokens)
        # The template itself marks the assistant's tokens.
        if _GENERATION_MARK.search(_chat_template(tokenizer)):
            options = {"tools": list(tools)} if tools else {}
            encoding = tokenizer.apply_chat_template(
                list(messages), **options, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(encoding["input_ids"]), [bool(mark) for mark in encoding["assistant_masks"]]
        return _by_turns(tokenizer, list(messages), row, tools)
    except DataError:
        raise
    except Exception as error:
        message_text = " ".join(str(error).split())[:200]
        raise DataError(
            f"--dataset-name, row {row}: the tokenizer's chat template rejects its messages ({message_text}); fix or "
            "remove the row"
        ) from error


def _check_roles(tokenizer: Any, messages: Sequence[Mapping[str, Any]], row: int) -> None:
    """Raise DataError for a role that is neither common nor named by the template.

    Many templates render any name, so nothing of a turn of "bot" would be learned.
    """
    for message in messages:
        role = message.get("role")
        if role in _ROLES or re.search(rf"""['"]{re.escape(str(role))}['"]""", _chat_template(tokenizer)):
            continue
        raise DataError(
            f"--dataset-name, row {row}: the role '{role}' is unknown; the known ones are {', '.join(_ROLES)}, "
            "those of the tokenizer's chat template, and in ShareGPT's turns (from, value) human and gpt; rename it"
        )


def _chat_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a user's message, up to the start of the answer."""
    text = _render(tokenizer, [{"role": "user", "content": prompt}], answer=True)
    return _encode(tokenizer, text)


def _by_turns(
    tokenizer: Any, messages: list[Mapping[str, Any]], row: int, tools: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[bool]]:
    text = _render(tokenizer, messages, tools=tools)
    tokens = _encode(tokenizer, text)
    labelled = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], answer=True, tools=tools)
        after = _render(tokenizer, messages[: turn + 1], tools=tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"--dataset-name, row {row}: the tokenizer's chat template renders message {turn} differently when "
                "others follow, so the assistant's tokens cannot be located; use a template that marks them with "
                "{% generation %}, or set --data.labels all"
            )
        # A token may span two turns, so the boundary is where the tokens stop agreeing.
        begin = alike(tokens, _encode(tokenizer, before))
        if len(after) == len(text):
            end = len(tokens)
        else:
            end = alike(tokens, _encode(tokenizer, after))
        labelled[begin:end] = [True] * (end - begin)
    return tokens, labelled


def _render(
    tokenizer: Any,
    messages: list[Mapping[str, Any]],
    answer: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    # The assistant may speak first, and few templates render an empty conversation.
    if not messages:
        return ""
    options = {"tools": list(tools)} if tools else {}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer, **options))


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return tokens


# Fields of a configuration by which some architectures cap or scale the head's logits.
_CAP = "final_logit_softcapping"
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
# Tokens before and after the end of a document that `keeps_apart` compares.
_BEFORE = 32
_AFTER = 16


def logits_of(model: nn.Module, input_ids: Tensor, **inputs: Tensor) -> Tensor:
    """Return the logits [batch, time, vocab] of `input_ids` (int64 [batch, time]), in the model's dtype."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return logits


def further_logits(model: nn.Module, input_ids: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Return the logits of new tokens and the updated cache `past` (None: no tokens yet).

    An architecture without a key-value cache returns None for it, and gets all tokens again.
    """
    options = {} if past is None else {"past_key_values": past}
    output = model(input_ids=input_ids, use_cache=True, **options)
    return output.logits, getattr(output, "past_key_values", None)


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """Return the model's inputs other than tokens: positions from 0 in each packed document.

    From such positions, without a mask, `transformers` makes the attention masks of packed documents itself, one for
    each kind of layer; a mask of ours would also replace those of sliding windows.
    """
    if "positions" in batch:
        return {"position_ids": batch["positions"]}
    return {}


def takes_documents(architecture: type[nn.Module]) -> bool:
    """Whether a model class takes positions, and has no state that runs across documents."""
    parameters = inspect.signature(architecture.forward).parameters
    # `_is_stateful` is the mark of recurrent models in `transformers`.
    return "position_ids" in parameters and not getattr(architecture, "_is_stateful", False)


def can_chunk(model: Any) -> bool:
    """Whether the logits are known to be the head's output for the inner model's."""
    config = model.config.get_text_config()
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALES) or hasattr(model, "logit_scale")
    return model.get_output_embeddings() is not None and model.base_model is not model and not scaled


def with_loss(model: Any, *, of_logits: bool = False) -> nn.Module:
    """Change the model in place to return the loss if it gets `summed_labels` and `chunk`.

    `summed_labels` are int64 [batch, time]; see `models.chunked_loss.summed_loss`.

    Args:
        of_logits: take the loss of the model's own logits, however computed; then `chunk` is 0.
    """
    model.forward = MethodType(_forward_of_logits if of_logits else _forward, model)
    model.ending = _logits_ending if of_logits else _summed_ending
    return cast(nn.Module, model)


def _forward(self: Any, *inputs: Any, summed_labels: Tensor | None = None, chunk: int = 0, **kwargs: Any) -> Any:
    if summed_labels is None:
        # The instance's `forward` is this function, so the class's own is called.
        return type(self).forward(self, *inputs, **kwargs)
    # The inner model need not accept every argument of the whole, so those that are None are left out.
    options = {}
    for name, value in kwargs.items():
        if value is not None:
            options[name] = value
    hidden = self.base_model(*inputs, **options).last_hidden_state
    loss: Tensor = self.ending(self, hidden, summed_labels, chunk)
    return loss


def _forward_of_logits(
    self: Any, *inputs: Any, summed_labels: Tensor | None = None, chunk: int = 0, **kwargs: Any
) -> Any:
    output = type(self).forward(self, *inputs, **kwargs)
    if summed_labels is None:
        return output
    return self.ending(self, output.logits, summed_labels, chunk)


def _summed_ending(model: Any, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    head = model.get_output_embeddings()
    if not isinstance(head, VocabularyLinear):
        return summed_loss(partial(_head, model), hidden, labels, chunk)

    def own_logits(entered: Tensor) -> Tensor:
        return _cap_logits(model, head.own_logits(entered))

    return summed_loss_of_part(own_logits, head.tensor_group, hidden, labels, chunk)


def _logits_ending(model: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
    assert not chunk
    return summed_cross_entropy(logits, labels)


def _head(model: Any, hidden: Tensor) -> Tensor:
    return _cap_logits(model, model.get_output_embeddings()(hidden))


def _cap_logits(model: Any, logits: Tensor) -> Tensor:
    cap = getattr(model.config.get_text_config(), _CAP, None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def same_head(model: nn.Module, ids: Tensor, loss: Any) -> bool:
    """Whether the model's inner loss is that of its logits, on a few tokens.

    Takes two forwards, the same on every rank. Waits for the device.

    Args:
        loss: (logits, labels) -> the summed loss.
    """
    few = ids[:1, :8]
    plain = loss(logits_of(model, few), few)
    inside = model(input_ids=few, use_cache=False, summed_labels=few, chunk=3)
    # Waits for the device.
    return bool((plain - inside).abs() <= _close(plain) * plain.abs())


@torch.no_grad()
def keeps_apart(model: nn.Module, ids: Tensor, positions: Tensor, documents: Tensor) -> bool:
    """Whether a document's content leaves the next document's logits unchanged.

    Takes two forwards, the same on every rank, of a few tokens around a sample's first document end. Waits for the
    device.

    Args:
        ids, positions, documents: a batch, int64 [batch, time] each.
    """
    # Waits for the device, as the reads below do: once, before step 1.
    row = int(documents.amax(dim=1).argmax())
    in_first = documents[row] == 0
    # Waits for the device.
    end = int(in_first.sum())
    # Waits for the device.
    after = end + int((documents[row] == 1)[end : end + _AFTER].sum())
    span = slice(max(0, end - _BEFORE), after)
    few = ids[row : row + 1, span]
    places = positions[row : row + 1, span]
    # Waits for the device.
    changed = torch.where(in_first[span], (few + 1) % (int(ids.max()) + 1), few)
    logits, changed_logits = (
        logits_of(model, tokens, position_ids=places)[:, end - span.start :] for tokens in (few, changed)
    )
    if not logits.numel():
        return True
    exact = logits.dtype in (torch.float32, torch.float64)
    # Waits for the device
    # The bounds allow for rounding in float32, and in half precision.
    return bool((logits - changed_logits).abs().max() <= (1e-5 if exact else 1e-2) * logits.abs().max())


def _close(loss: Tensor) -> float:
    if loss.dtype is torch.float64:
        # Relative bounds for rounding in float64, and in float32 or half precision.
        return 1e-9
    return 2e-3


Say = Callable[[str], None]


# Fields of a configuration that limit how far attention reaches, or bias it by distance.
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size", "alibi")


def is_full(text: Any) -> bool:
    """Whether each token attends to all before it, by a text model's configuration."""
    kinds = getattr(text, "layer_types", None) or ()
    narrowed = any(getattr(text, name, None) for name in _WINDOW_SETTINGS)
    return not narrowed and all(layer_type == "full_attention" for layer_type in kinds)


@final
class HubModel:
    """A model by its configuration; `build` reads or initialises its weights.

    Args:
        name: OWNER/NAME on the hub, or a folder with a config.json.
        revision: branch, tag or commit on the hub; "" is its newest.
        trust_remote_code: run the Python code that comes with the model.
        cache: folder for the lock that lets one process of a node download while the others wait.
        say: gets a line if something takes time or cannot be reached.

    Attributes:
        revision: the commit on the hub, or "" for a folder.
        vocab_size: tokens that the model knows.
        context: longest sequence, in tokens; 0 if the architecture sets none.
        width: of the hidden states; 0 if unknown.
        takes_documents: see `takes_documents`; assumed for code that came with the model.
        full_attention: each token attends to all before it, in every layer; False if unknown.

    Raises:
        ConfigError: no such name here or on the hub, no causal language model, or code that may not run.
    """

    def __init__(
        self, name: str, *, revision: str = "", trust_remote_code: bool = False, cache: Path, say: Say
    ) -> None:
        transformers = transformers_for("--model-name", name)
        self.name = name
        self._trust = trust_remote_code
        self._cache = cache
        self._say = say
        self._where = where(name)
        with explain_error("--model-name", name), once_per_node(name, cache, say):
            self._config = transformers.AutoConfig.from_pretrained(
                self._where, use_cache=False, revision=revision or None, trust_remote_code=trust_remote_code
            )
            self.revision = self._commit(transformers, revision)
        text = self._config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.context = int(getattr(text, "max_position_embeddings", None) or 0)
        self.width = int(getattr(text, "hidden_size", None) or 0)
        architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self._config), None)
        self.takes_documents = architecture is None or takes_documents(architecture)
        self.full_attention = architecture is not None and is_full(text)

    @property
    def settings(self) -> Any:
        """The configuration object of `transformers`."""
        return self._config

    def with_layers(self, layers: int) -> "HubModel":
        """Return the same architecture with `layers` layers."""
        model = copy.copy(self)
        fields = self._config.to_dict()
        fields |= {name: value[:layers] for name, value in fields.items() if name == "layer_types" and value}
        model._config = type(self._config).from_dict({**fields, "use_cache": False})
        model._config.get_text_config().num_hidden_layers = layers
        return model

    def build(
        self,
        *,
        vocab_size: int,
        dtype: torch.dtype | None,
        pretrained: bool = False,
        quantization: Quantization | None = None,
    ) -> nn.Module:
        """Build a model in training mode on the CPU, initialised or with its pretrained weights.

        Parameters are initialised in float32 from torch's default generator, and then take `dtype`. Weights are read
        tensor by tensor from memory-mapped files into `dtype`: the process has the parameters once, and the pages of
        the files belong to the node, not to the rank.

        Args:
            vocab_size: rows of the token table of a newly initialised model; a pretrained one keeps its own.
            dtype: of the parameters; None: as the weights are stored, float32 for new ones.
            quantization: of the linear layers; None: none. New ones get weights of its size, without values.

        Raises:
            ConfigError: the architecture is no causal language model, or there are no safetensors weights.
        """
        with explain_error("--model-name", self.name):
            if pretrained:
                with once_per_node(self.name, self._cache, self._say):
                    return self._read(dtype, quantization).train()
            if quantization:
                with torch.device("meta"):
                    model = self._initialise(vocab_size)
                return quantization.use_placeholders(model, _quantizable(model), dtype or torch.float32).train()
            model = self._initialise(vocab_size)
            # Buffers stay in float32: bfloat16 would round rotary frequencies.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype or torch.float32)
            return model.train()

    def _commit(self, transformers: Any, revision: str) -> str:
        """Return the commit of the files, the name of their folder in the cache."""
        if not is_hub_name(self.name):
            return ""
        file = transformers.utils.cached_file(self._where, "config.json", revision=revision or None)
        return str(transformers.utils.extract_commit_hash(file, None) or "")

    def _read(self, dtype: torch.dtype | None, quantization: Quantization | None) -> nn.Module:
        transformers = transformers_for("--model-name", self.name)
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            self._where,
            config=self._config,
            revision=self.revision or None,
            trust_remote_code=self._trust,
            dtype=dtype or "auto",
            use_safetensors=True,
            low_cpu_mem_usage=True,
            **(quantization.arguments(transformers) if quantization else {}),
        )
        if quantization:
            return quantization.prepare(model)
        return model

    def _initialise(self, vocab_size: int) -> nn.Module:
        config = self._config
        # Another tokenizer gives other numbers to the special tokens.
        if vocab_size != self.vocab_size:
            config = type(config).from_dict({**config.to_dict(), "vocab_size": vocab_size})
            config.use_cache = False
            config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        model: nn.Module = transformers_for("--model-name", self.name).AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=self._trust
        )
        return model

    def save_config(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write the config.json of a model with tensors of these shapes, by plain name.

        The vocabulary is theirs.

        Raises:
            ConfigError: they are not this architecture's.
        """
        with explain_error("--model-name", self.name), torch.device("meta"):
            model: Any = self._initialise(self.vocab_size)
            table = model.get_input_embeddings().weight
            name = next(name for name, parameter in model.named_parameters() if parameter is table)
            if name not in shapes:
                raise ConfigError(f"--format hf: {self.name} has a tensor {name} that the checkpoint lacks")
            model = self._initialise(shapes[name][0])
        model.config.use_cache = True
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)


@final
class HubTokenizer:
    """A tokenizer from the hub or a folder.

    Args:
        name, revision, trust_remote_code, cache, say: as for `HubModel`.

    Attributes:
        vocab_size: tokens that it knows.
        separator: the token that ends a document (end of sequence, else of a sentence pair); -1 if it has none.
        context: the longest sequence of its model, in tokens; 0 if it does not know.
        fingerprint: hex; equal for tokenizers that give the same tokens.

    Raises:
        ConfigError: as for `HubModel`.
    """

    def __init__(
        self, name: str, *, revision: str = "", trust_remote_code: bool = False, cache: Path, say: Say
    ) -> None:
        transformers = transformers_for("--tokenizer", name)
        self._name = name
        self._where = where(name)
        self._revision = revision
        with explain_error("--tokenizer", name), once_per_node(name, cache, say):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                self._where, revision=revision or None, trust_remote_code=trust_remote_code
            )
        candidates = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        self.vocab_size = len(self._tokenizer)
        self.separator = int(next((token for token in candidates if token is not None), -1))
        longest = int(self._tokenizer.model_max_length)
        # An unset length is a very large number.
        self.context = longest if longest < _NO_LIMIT else 0
        self.fingerprint = self._fingerprint()

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Return the tokens of each text; `special` adds the tokenizer's own special tokens."""
        encoded: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        row: int,
        masked: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[int], list[bool]]:
        """See `chat_tokens`."""
        return chat_tokens(self._tokenizer, messages, row, masked, tools)

    def chat_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a user's message, up to the start of the assistant's answer."""
        return _chat_prompt(self._tokenizer, prompt)

    def chat_ends(self) -> list[int]:
        """Return the special tokens that end an assistant's turn; [] if unknown."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            tokens, learned = chat_tokens(self._tokenizer, turns, 0)
        except DataError:
            # The template takes other roles, or changes earlier text when turns follow.
            return []
        special = set()
        for number, token in self._tokenizer.added_tokens_decoder.items():
            if token.special:
                special.add(number)
        return sorted({token for token, mark in zip(tokens, learned, strict=True) if mark and token in special})

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens, without special ones."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the files that `HubTokenizer(folder)` reads."""
        self._tokenizer.save_pretrained(folder)

    def save_generation(self, folder: Path) -> None:
        """Write the tokenizer's own generation_config.json, or a new one with its special tokens."""
        transformers = transformers_for("--tokenizer", self._name)
        try:
            settings = transformers.GenerationConfig.from_pretrained(self._where, revision=self._revision or None)
        except OSError:
            tokenizer = self._tokenizer
            settings = transformers.GenerationConfig(
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
            )
        settings.save_pretrained(folder)

    def _fingerprint(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            text = backend.to_str()
        else:
            text = repr(sorted(self._tokenizer.get_vocab().items()))
        template = _chat_template(self._tokenizer)
        return hashlib.sha256(f"{text} {self.separator} {template}".encode()).hexdigest()[:32]


def save_trained(folder: Path, separator: int, *, temperature: float, top_k: int) -> None:
    """Make `AutoTokenizer` able to open the tokenizer.json of a `ByteBPE`, and write generation settings.

    Args:
        folder: of tokenizer.json.
        separator: the token that ends and begins a document; it is the tokenizer's next one, and gets a name.
        temperature, top_k: of `GenerationConfig`, as `lockstep generate` has them.
    """
    transformers = transformers_for("--format hf", str(folder))
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=end,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    if tokenizer.convert_tokens_to_ids(end) != separator:
        raise ConfigError(f"--format hf: the data's own text has the token {end}; use --format safetensors")
    tokenizer.save_pretrained(folder)
    settings = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    transformers.GenerationConfig(bos_token_id=separator, eos_token_id=separator, **settings).save_pretrained(folder)


def _quantizable(model: nn.Module) -> list[str]:
    """Return the linear layers that `transformers` would quantize.

    These are all but the head and the layers that share its weight.
    """
    # `from_pretrained` chooses its layers by these functions.
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = get_keys_to_not_convert(model)
    names = []
    for name, module in model.named_modules():
        if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and should_convert_module(name, kept):
            names.append(name)
    return names


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the module list with the most parameters."""
    stacks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            stacks.append(module)
    if stacks:
        return list(max(stacks, key=_size).children())
    return []


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def transformers_for(flag: str, name: str) -> Any:
    """Import `transformers`, silenced, for `flag`.

    Raises:
        ConfigError: it is not installed.
    """
    transformers = as_it_is(flag, name)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def as_it_is(flag: str, name: str) -> Any:
    """Import `transformers` with its messages on.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # The package's own imports warn of things that a user cannot change.
            warnings.simplefilter("ignore")
            import transformers
    except ImportError as error:
        raise ConfigError(
            f"{flag} {name} needs the package transformers ({error.name} is missing): {install_extra('hf')}"
        ) from error
    return transformers


def where(name: str) -> str:
    """Return a name as `transformers` takes it: OWNER/NAME, or a folder's path."""
    if is_hub_name(name):
        return name
    return str(Path(name).expanduser())


@contextmanager
def once_per_node(name: str, cache: Path, say: Say) -> Iterator[None]:
    """Let one process of a node download at a time, in a context.

    The others wait, and then find the files in HF_HOME.

    It is a lock of the file system, and no collective: it works for any ranks, and is freed when its holder dies.
    """
    if not is_hub_name(name):
        yield
        return
    reach(say)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"hub-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"):
        yield


@contextmanager
def explain_error(flag: str, name: str) -> Iterator[None]:
    """Turn the package's errors into a ConfigError of one line, in a context.

    Its own messages have several lines, and name functions instead of flags.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{flag} {name}: {_reason(flag, name, error)}") from error


def _reason(flag: str, name: str, error: Exception) -> str:
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:
        return (
            "it comes with Python code, which lockstep does not run by default; read that code, then set "
            "--model.trust-remote-code and pin the version with --model.revision"
        )
    if "safetensors" in message:
        return "it has no safetensors weights; save them with `model.save_pretrained(FOLDER)` and use that folder"
    if is_hub_name(name) and isinstance(error, OSError):
        if "not a valid model identifier" in message or "401" in message or "404" in message:
            return "the hub has no such model, or it is private or gated; check the name, or set HF_TOKEN"
        return f"no such folder, not in HF_HOME, and the hub is unreachable; {way_out(name, 'model', flag)}"
    return f"{message[:200]}; check its files"
