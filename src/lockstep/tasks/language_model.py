"""Train language models: the built-in GPT, or a Hugging Face model.

task = hub_task(config, say)                    # --model-name OWNER/NAME or a folder
corpus = corpus_for(config, own, say).corpus    # --dataset-name, --tokenizer and the section `data`

`LanguageModel` is the common base: corpus, collation, samples of text. `CausalLM` is the task of the built-in GPT,
`HubCausalLM` that of a `transformers` model. The data is from the hub or from files.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from lockstep.config.fields import is_hub_name
from lockstep.config.schema import SOURCE_SEQ_LEN, Config, is_auto, requested_seq_len
from lockstep.errors import ConfigError
from lockstep.files import cache_folder
from lockstep.models.chunked_loss import IGNORED, chunk_of, summed_cross_entropy
from lockstep.models.gpt import GPT, ContextReach, Further, GPTConfig, further_logits, generate, plain_logits
from lockstep.models.hf import (
    HubModel,
    HubTokenizer,
    can_chunk,
    inputs_of,
    keeps_apart,
    logits_of,
    repeated_blocks,
    same_head,
    with_loss,
)
from lockstep.models.hf import further_logits as hf_further_logits
from lockstep.models.quantized import Quantization
from lockstep.task import DataFacts, Task
from lockstep.tasks.prepare import is_prepared, named_tokenizer, open_shards, read_index
from lockstep.text.documents import PaddedDocuments, Tokenizer
from lockstep.text.hub import DataRequest, open_rows, plain_rows, table_files
from lockstep.text.token_store import Packing, Samples, TokenCorpus, TokenFiles, TokenizerToTrain, prepare
from lockstep.transforms.precision import AUTOCAST

__all__ = [
    "IGNORED",
    "CausalLM",
    "HubCausalLM",
    "Sampling",
    "corpus_for",
    "hub_task",
    "loss_inside",
    "quantization_of",
]


# Tokens of the text that a run samples at its end.
_SAMPLE_TOKENS = 120
# Maximum tokens of a prompt with its answer; the default max_length of trl.
_PROMPT_TOKENS = 1024
# Texts that are generated together, at most.
_GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of text generation.

    Attributes:
        tokens: maximum number of new ones.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: samples among the k likeliest tokens only; 0: among all.
        seed: of the draw.
        ends_early: end once each text has an end; False: always generate `tokens`, with as many forwards.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    ends_early: bool = True

    def go_on(
        self,
        model: nn.Module,
        begins: Sequence[list[int]],
        device: torch.device,
        reach: ContextReach,
        *,
        stop: Sequence[int],
        further: Further,
        logits_of: Callable[[nn.Module, Tensor], Tensor] = plain_logits,
    ) -> list[list[int]]:
        """Continue each of `begins` by generated tokens, up to the first of `stop`; see `generate`.

        All have the same number of tokens, at least one, and go through the model together. Each has its own generator,
        all with the same seed.
        """
        tokens = generate(
            model,
            torch.tensor(begins, device=device),
            self.tokens,
            config=reach,
            temperature=self.temperature,
            top_k=self.top_k or None,
            generator=[torch.Generator(device).manual_seed(self.seed) for _ in begins],
            logits_of=logits_of,
            further=further,
            stop=stop if self.ends_early else (),
        )
        length = len(begins[0])
        # Waits for the device, once a group of texts.
        return [_to_stop(row, length, stop) for row in tokens.tolist()]


class LanguageModel(Task):
    """Base of the language models: a prepared corpus, batches of tokens, generated text.

    Args:
        corpus: see `lockstep.text.token_store.prepare`.
        sources: name -> revision of everything from a hub.
        prompt: beginning of the sample of text at a run's end; "": as the data begins.
        loss_chunk: tokens whose logits are computed together in the loss, see `models.chunked_loss.chunk_of`.
        inside: compute the loss in the model's forward, where a compiler sees it; its numbers are the same.

    Attributes:
        attention_mask: only packed documents need one; see `Task`.
        items_per_sample: labelled tokens of every sample if all have equally many: in a stream the sequence length, in
            blocks one less; None if only some are learned, or documents are kept separate.
    """

    reduction = "sum"
    item_name = "tokens"

    def __init__(
        self, corpus: TokenCorpus, sources: Mapping[str, str], prompt: str, loss_chunk: int, inside: bool
    ) -> None:
        self.corpus = corpus
        self.sources = dict(sources)
        self.fingerprint = corpus.fingerprint
        self.items_per_sample = corpus.train.items_per_sample
        self.attention_mask = corpus.packing == "documents"
        self.data_facts = data_facts(corpus)
        # Padded batches have a multiple of so many positions.
        self._multiple = 1
        self._prompt = prompt
        self._loss_chunk = loss_chunk
        self._inside = inside

    def dataset(self, split: str) -> Samples:
        """Return the samples of "train" or "evaluation".

        Raises:
            ValueError: any other split.
        """
        if split not in ("train", "evaluation"):
            raise ValueError(f"there is no split '{split}'; the splits are 'train' and 'evaluation'")
        if split == "train":
            return self.corpus.train
        return self.corpus.evaluation

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the samples: each tensor [seq_len] becomes [len(samples), seq_len], padded if needed.

        Padding needs no mask: it is after the tokens, and none of them attends to later ones. With a mask, padding
        tokens that attend to nothing would be NaN in the kernels of some models, and so would NaN * 0.
        """
        if self.corpus.packing == "padded":
            return pad_tokens(samples, self._multiple)
        return _collate_tokens(samples)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Count the labelled tokens of a batch in host memory."""
        return count_labels(batch)

    def sequence(self, batch: Mapping[str, Tensor]) -> Mapping[str, int] | None:
        """Return the dimensions that --parallel.context divides; None for packed documents, which need a mask."""
        if self.corpus.packing == "documents":
            return None
        return {"input_ids": 1, "labels": 1, "positions": 1}

    def fit_chunks(self, chunks: int, flag: str) -> None:
        """Make the positions of every batch a multiple of `chunks`, for `flag`.

        Raises:
            ConfigError: the longest samples have another number of positions.
        """
        seq_len = self.corpus.train.seq_len
        if seq_len % chunks:
            raise ConfigError(f"{flag} needs a --seq-len that is a multiple of {chunks}, not {seq_len}; change it")
        self._multiple = chunks

    def work(self, dataset: Samples, samples: Sequence[int]) -> float | None:
        """Return the tokens of the batch with padding; None if all samples have equally many."""
        if isinstance(dataset, PaddedDocuments | TokenFiles) and dataset.padded:
            return float(len(samples) * dataset.longest(samples))
        return None

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Generate a text that begins like a document of the data.

        The text is the same on each call: an answer to a prompt takes the likeliest tokens, up to the one that ends
        it. Every rank must call it: a forward may be collective. `model` is the engine's.
        """
        corpus = self.corpus
        begin = corpus.encode_prompt(self._prompt) if self._prompt else corpus.opening()
        temperature = 0.0 if corpus.prompts else Sampling().temperature
        # A forward of a split model is a collective, so every rank must generate equally many tokens.
        sampling = Sampling(tokens=_SAMPLE_TOKENS, temperature=temperature, ends_early=False)
        return self._text(begin, self._continue(model, [begin], device, sampling)[0])

    def _text(self, prompt: list[int], tokens: list[int]) -> str:
        """Return the text of a prompt with its continuation.

        An answer in a conversation begins on its own line.

        Args:
            prompt: tokens of the prompt.
            tokens: those, and the generated ones.
        """
        if not self.corpus.chat:
            return self.corpus.decode(tokens)
        question = self.corpus.decode(prompt)
        answer = self.corpus.decode(tokens[len(prompt) :])
        # Decoding drops the template's marks, so a line break parts question and answer.
        return f"{question.rstrip()}\n{answer.lstrip()}"

    def write(
        self, model: nn.Module, prompts: Sequence[str], device: torch.device, sampling: Sampling
    ) -> Iterator[str]:
        """Yield each prompt with its continuation, at most to the end of the document.

        A prompt is the beginning of a document, or in a conversation the user's message. The texts are in the prompts'
        order, each as soon as it is ready. Prompts of equal length go through the model together, at most 16. A text is
        the same for the same `sampling`, whichever prompts are next to it.

        Raises:
            ConfigError: there is no token to begin with.
        """
        begins = [self.corpus.encode_prompt(prompt) for prompt in prompts]
        if not all(begins):
            raise ConfigError("--prompt is empty, but this model has no token that begins a text; set --prompt")
        return self._in_order(model, begins, device, sampling)

    def _in_order(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling
    ) -> Iterator[str]:
        texts: dict[int, str] = {}
        position = 0
        for indices in _by_length(begins):
            chosen = [begins[index] for index in indices]
            continued = self._continue(model, chosen, device, sampling)
            texts |= zip(indices, map(self._text, chosen, continued), strict=True)
            while position in texts:
                yield texts.pop(position)
                position += 1

    @abstractmethod
    def _continue(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling
    ) -> list[list[int]]:
        """Return the tokens of `begins` with their continuations, up to one of `corpus.ends`.

        All begins have the same length.
        """


@final
class CausalLM(LanguageModel):
    """The built-in GPT on a prepared corpus.

    Args:
        corpus, sources, prompt, loss_chunk, inside: see `LanguageModel`.
        config: the model's shape; its vocabulary and context must cover the corpus's.

    Attributes:
        defaults: set of defaults for the configuration; see `lockstep.training.start.defaults`.

    Raises:
        ConfigError: the model's context is shorter than the windows, or its vocabulary smaller than the corpus's.
    """

    defaults = "language-model"

    def __init__(
        self,
        corpus: TokenCorpus,
        config: GPTConfig,
        sources: Mapping[str, str] | None = None,
        *,
        prompt: str = "",
        loss_chunk: int = -1,
        inside: bool = False,
    ) -> None:
        super().__init__(corpus, sources or {}, prompt, loss_chunk, inside)
        seq_len = corpus.train.seq_len
        if seq_len > config.context:
            raise ConfigError(f"--seq-len {seq_len} is longer than the model's context of {config.context}; lower it")
        if corpus.vocab_size > config.vocab_size:
            raise ConfigError(
                f"--model-name: the model has {config.vocab_size} tokens but the data {corpus.vocab_size}; build the "
                "model with the data's vocabulary"
            )
        self.config = config

    def model(self) -> nn.Module:
        """Build a model on the default device, initialised from torch's default generator."""
        return GPT(self.config)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy in nats, summed over the labelled tokens, in float32 or float64."""
        ids = batch["input_ids"]
        labels = batch["labels"]
        layout = {}
        for name in ("positions", "documents"):
            if name in batch:
                layout[name] = batch[name]
        chunk = chunk_of(self._loss_chunk, ids.numel(), self.config.padded_vocab)
        if chunk or self._inside:
            return cast(Tensor, model(ids, **layout, labels=labels, chunk=chunk))
        return summed_cross_entropy(model(ids, **layout), labels)

    def _continue(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling
    ) -> list[list[int]]:
        further = further_logits(self.config.layers)
        return sampling.go_on(model, begins, device, self.config, stop=self.corpus.ends, further=further)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of an unwrapped model from `model`."""
        return list(cast(GPT, model).blocks)


def data_facts(corpus: TokenCorpus, width: int = 0) -> DataFacts:
    """Return a corpus's facts that decide defaults, for a pretrained model of this width."""
    documents, tokens, labels = corpus.learned
    options = {"data.packing": corpus.packing, "seq_len": corpus.train.seq_len}
    noun = "conversation" if corpus.chat else "prompt"
    summary = f"{documents:,} {noun}{'s' * (documents != 1)}, {labels:,} of {tokens:,} tokens learned"
    return DataFacts(options, corpus.prompts, summary, width)


def loss_inside(config: Config) -> bool:
    """Whether a run's language model computes its loss in its forward: if that is compiled, or divided over ranks.

    A divided model would otherwise gather the logits of all tokens. It does not if the engine casts the outputs of a
    forward: that is meant for logits, and a sum needs its float32.
    """
    is_wanted = bool(config.compile) or config.parallel.tensor > 1
    return is_wanted and config.engine_options.output_dtype in ("same", "float32")


def _to_stop(tokens: list[int], begin: int, stop: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first of `stop` from index `begin` on."""
    end = len(tokens)
    for index in range(begin, len(tokens)):
        if tokens[index] in stop:
            end = index
            break
    return tokens[: end + 1]


def _by_length(begins: Sequence[list[int]]) -> list[list[int]]:
    """Group indices of prompts of equal length, at most `_GROUP_SIZE` a group.

    The groups are in the order of their first indices.
    """
    groups: list[list[int]] = []
    open_ones: dict[int, list[int]] = {}
    for index, begin in enumerate(begins):
        group = open_ones.get(len(begin))
        if group is None or len(group) == _GROUP_SIZE:
            group = open_ones[len(begin)] = []
            groups.append(group)
        group.append(index)
    return groups


def _collate_tokens(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack each tensor [seq_len] of the samples to [len(samples), seq_len]."""
    batch = {}
    for name in samples[0]:
        batch[name] = torch.stack([sample[name] for sample in samples])
    return batch


def pad_tokens(samples: Sequence[Mapping[str, Tensor]], multiple: int = 1) -> dict[str, Tensor]:
    """Pad samples to [len(samples), longest], at the right, with token 0 and label -100.

    Args:
        multiple: the longest is rounded up to one of this number.
    """
    padded = {}
    for name, value in (("input_ids", 0), ("labels", IGNORED)):
        rows = pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        padded[name] = pad(rows, (0, -rows.shape[1] % multiple), value=value)
    return padded


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Count the labelled tokens of a batch in host memory."""
    return int((batch["labels"] != IGNORED).sum())


# Dtypes of pretrained weights by --precision; float32 for the others.
_DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}

Say = Callable[[str], None]


class _HubReach(NamedTuple):
    """Context and vocabulary of a hub model; see `models.gpt.ContextReach`."""

    context: int
    vocab_size: int


@final
class HubCausalLM(LanguageModel):
    """A causal language model of `transformers` on a prepared corpus.

    Args:
        corpus, sources, prompt, loss_chunk, inside: see `LanguageModel`.
        source: the model's configuration, and the location of its weights.
        vocab_size: rows of the token table of a newly initialised model.
        dtype: of pretrained weights in memory; None: as they are stored.
        pretrained: read the weights instead of initialising them.
        other_tokenizer: the corpus's tokenizer is not the model's own.
        full: the model is compiled as a whole, see `_has_mask`.
        quantization: of the model's linear layers; None: none.

    Attributes:
        defaults: set of defaults for the configuration; see `lockstep.training.start.defaults`.

    Raises:
        ConfigError: the model's context is shorter than a sample, its vocabulary smaller than the corpus's, or it
            cannot keep packed documents separate.
    """

    # Each option is a keyword.
    def __init__(  # noqa: PLR0913
        self,
        corpus: TokenCorpus,
        source: HubModel,
        *,
        vocab_size: int,
        dtype: torch.dtype | None,
        pretrained: bool,
        sources: Mapping[str, str],
        prompt: str = "",
        loss_chunk: int = -1,
        inside: bool = False,
        other_tokenizer: bool = False,
        full: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(corpus, sources, prompt, loss_chunk, inside)
        self.attention_mask = _has_mask(corpus, source, full)
        seq_len = corpus.train.seq_len
        model_vocab = source.vocab_size if pretrained else vocab_size
        if source.context and seq_len > source.context:
            raise ConfigError(
                f"--seq-len {seq_len} is longer than the context of {source.name}, {source.context}; lower it"
            )
        if corpus.vocab_size > model_vocab:
            sizes = f"{corpus.vocab_size} tokens and {source.name} {model_vocab}"
            raise ConfigError(
                f"--tokenizer has {sizes}; drop --tokenizer or --model.pretrained"
                if other_tokenizer
                else f"--model-name: its tokenizer has {sizes}, too few rows in its token table; resize it "
                "(model.resize_token_embeddings(len(tokenizer))), and save both into one folder"
            )
        self.defaults = "fine-tuning" if pretrained else "language-model"
        self.data_facts = data_facts(corpus, source.width if pretrained else 0)
        self._name = source.name
        self._tried = False
        self._reach = _HubReach(source.context, corpus.vocab_size)
        self._vocab_size = model_vocab
        self._build = partial(
            source.build, vocab_size=vocab_size, dtype=dtype, pretrained=pretrained, quantization=quantization
        )

    def model(self) -> nn.Module:
        """Build the model, initialised from torch's default generator or with pretrained weights.

        Raises:
            ConfigError: a loss in chunks was requested, for an architecture with logits that are not its head's alone.
        """
        model = self._build()
        if can_chunk(model) and self._loss_chunk:
            return with_loss(model)
        if self._loss_chunk > 0:
            raise ConfigError(
                f"--model.loss-chunk {self._loss_chunk}: {self._name} changes the logits after its head; set "
                "--model.loss-chunk 0"
            )
        self._loss_chunk = 0
        if self._inside:
            return with_loss(model, of_logits=True)
        return model

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy in nats, summed over the labelled tokens, in float32 or float64."""
        ids = batch["input_ids"]
        labels = batch["labels"]
        more = inputs_of(batch)
        # The check needs no gradients: it runs before step 1, or in the first evaluation after a resume.
        if not (self._tried or torch.is_grad_enabled()):
            self._try(model, batch)
            self._tried = True
        chunk = chunk_of(self._loss_chunk, ids.numel(), self._vocab_size)
        if chunk or self._inside:
            inside: Tensor = model(input_ids=ids, use_cache=False, **more, summed_labels=labels, chunk=chunk)
            return inside
        return summed_cross_entropy(logits_of(model, ids, **more), labels)

    def _try(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Check that the architecture supports its packing and its loss.

        Every rank takes the same forwards.

        Raises:
            ConfigError: it does not.
        """
        ids = batch["input_ids"]
        if "documents" in batch and not keeps_apart(model, ids, batch["positions"], batch["documents"]):
            raise ConfigError(
                f"--data.packing documents: {self._name} attends across documents despite their positions; use "
                "--data.packing padded"
            )
        if self._loss_chunk and not same_head(model, ids, summed_cross_entropy):
            raise ConfigError(
                f"--model.loss-chunk: {self._name} changes the logits after its head; set --model.loss-chunk 0"
            )

    def _continue(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling
    ) -> list[list[int]]:
        reach = self._reach
        ends = self.corpus.ends
        return sampling.go_on(model, begins, device, reach, stop=ends, logits_of=logits_of, further=hf_further_logits)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of an unwrapped model from `model`."""
        return repeated_blocks(model)


@dataclass(frozen=True, slots=True)
class CorpusChoice:
    """A prepared corpus with the facts of its choice.

    Attributes:
        revision: of its data; "" for files.
        other_tokenizer: its tokenizer is not the model's own.
    """

    corpus: TokenCorpus
    revision: str
    other_tokenizer: bool


def hub_task(config: Config, say: Say) -> HubCausalLM:
    """Make the task for a `--model-name` on the hub or in a folder.

    Raises:
        ConfigError: the model or the tokenizer is unavailable, needs code of its own, or does not fit the data.
        DataError: see `lockstep.text.token_store.prepare`.
    """
    name = config.model_name
    model_config = config.model
    cache = cache_folder(config.data.cache)
    quantization = quantization_of(config)
    if quantization:
        quantization.check()
    get = partial(HubModel, trust_remote_code=model_config.trust_remote_code, cache=cache, say=say)
    source = get(name, revision=model_config.revision)
    too_long = source.context and config.seq_len > source.context
    # Checked before the data is prepared at that length, which may take hours.
    if too_long and not is_auto(config, "seq_len"):
        raise ConfigError(
            f"--seq-len {config.seq_len} is longer than the context of {name}, {source.context}; lower it"
        )
    if config.data.packing == "documents" and not source.takes_documents:
        raise ConfigError(
            f"--data.packing documents: {name} cannot keep its state or its positions inside a document; use "
            "--data.packing padded"
        )
    own_tokenizer = partial(
        HubTokenizer,
        name,
        revision=source.revision,
        trust_remote_code=model_config.trust_remote_code,
        cache=cache,
        say=say,
    )
    chosen = corpus_for(config, own_tokenizer, say, source.context)
    corpus = chosen.corpus
    return HubCausalLM(
        corpus,
        source,
        vocab_size=corpus.vocab_size if chosen.other_tokenizer else max(source.vocab_size, corpus.vocab_size),
        # LoRA keeps the base's weights in the dtype in which they are stored.
        dtype=None if config.lora.rank else _DTYPES.get(config.precision, torch.float32),
        pretrained=model_config.pretrained,
        sources=_sources({name: source.revision, config.dataset_name: chosen.revision}),
        prompt=config.data.prompt,
        loss_chunk=model_config.loss_chunk,
        inside=loss_inside(config),
        other_tokenizer=chosen.other_tokenizer,
        full=bool(config.compile) and config.compile_scope == "whole",
        quantization=quantization,
    )


def quantization_of(config: Config) -> Quantization | None:
    """Return how --model.load-in loads the model; None: as it is stored."""
    bits = config.model.load_in
    if bits == "full":
        return None
    return Quantization(bits, AUTOCAST.get(config.precision))


def _has_mask(corpus: TokenCorpus, source: HubModel, full: bool) -> bool | None:
    """Whether the model's attention receives a mask; None if unknown.

    Args:
        full: the model is compiled as a whole: `transformers` cannot inspect positions then, and makes a mask in case
            documents are packed.
    """
    if corpus.packing == "documents":
        return True
    plain = corpus.packing in ("stream", "blocks") and source.full_attention
    if plain and not full:
        return False
    return None


def corpus_for(
    config: Config, own: Callable[[], Tokenizer | TokenizerToTrain], say: Say, context: int = 0
) -> CorpusChoice:
    """Open the corpus of `--dataset-name`, `--tokenizer` and the section `data`; prepare it if needed.

    Args:
        own: makes the default tokenizer: the model's, or one to train.
        context: of the model, in tokens; 0: without a limit.

    Raises:
        ConfigError: an unavailable tokenizer, or a sequence length that leaves nothing to predict.
        DataError: see `lockstep.text.token_store.prepare`.
    """
    data = config.data
    name = config.dataset_name
    if data.packing == "blocks" and config.seq_len < 2:
        raise ConfigError("--seq-len 1 leaves a block nothing to predict; use 2 or more, or --data.packing stream")
    if data.packing == "documents" and config.attention == "flash":
        raise ConfigError("--attention flash takes no mask, which --data.packing documents needs; use auto")
    cache = cache_folder(config.data.cache)
    trusts = config.model.trust_remote_code
    if config.tokenizer:
        tokenizer = named_tokenizer(config.tokenizer, trusts, cache, say)
    else:
        tokenizer = own()
    # The guide's script also looks at the tokenizer's own limit.
    if config.preset == "source" and is_auto(config, "seq_len"):
        context = context or getattr(tokenizer, "context", 0)
        if 0 < context < SOURCE_SEQ_LEN:
            say(
                f"preset source: blocks of {context} tokens, the context of {config.model_name}; --seq-len overrides it"
            )
    packing, prompt_packing = _packings(config, context)
    # Prepared shards are read as they are; a --tokenizer must be the one that they were prepared with.
    if is_prepared(name):
        corpus, index = open_shards(name, packing)
        trains = isinstance(tokenizer, TokenizerToTrain)
        other = not trains and getattr(tokenizer, "fingerprint", "") != index["tokenizer"]
        if config.tokenizer and (other or (trains and config.tokenizer != index["named"])):
            raise ConfigError(
                f"--tokenizer {config.tokenizer}: --dataset-name {name} was prepared with {index['named']}; drop the "
                "flag, or prepare the data again"
            )
        return CorpusChoice(corpus, index["revision"], other)
    if is_hub_name(name) or table_files(name):
        columns = data.text_column, data.encoding, packing.answers
        request = DataRequest(name, data.subset, data.split, data.revision, *columns, data.skip)
        rows = open_rows(request, say)
    else:
        # Plain text has no prompts or conversations.
        rows = plain_rows(name, data.skip, say)
        prompt_packing = None
    options: dict[str, Any] = {"cache": cache, "say": say, "prompt_packing": prompt_packing}
    corpus = prepare(name, rows.digest, rows.documents, tokenizer, packing, **options)
    return CorpusChoice(corpus, rows.revision, bool(config.tokenizer))


def _packings(config: Config, context: int) -> tuple[Packing, Packing | None]:
    """Return the packing of texts, and that of prompts and conversations if it differs.

    Prepared shards decide what is "auto".
    """
    data = config.data
    scheme = config.data.packing
    length = requested_seq_len(config)
    rest = data.evaluation, data.labels
    is_open = scheme == "auto", is_auto(config, "seq_len")
    length = min(length, context or length) if is_open[1] else length
    if is_prepared(config.dataset_name) and any(is_open):
        stored = Packing(**read_index(Path(config.dataset_name).expanduser())["packing"])
        scheme = stored.kind if is_open[0] else scheme
        return Packing(scheme, stored.seq_len if is_open[1] and scheme != "stream" else length, *rest), None
    if is_open[1]:
        prompt_length = min(_PROMPT_TOKENS, context or _PROMPT_TOKENS)
    else:
        prompt_length = length
    prompt_scheme = "padded" if is_open[0] else scheme
    packing = Packing("stream" if is_open[0] else scheme, length, *rest)
    other = Packing(prompt_scheme, prompt_length if prompt_scheme in ("padded", "documents") else length, *rest)
    return packing, None if other == packing else other


def _sources(revisions: Mapping[str, str]) -> dict[str, str]:
    pinned = {}
    for name, revision in revisions.items():
        if revision:
            pinned[name] = revision
    return pinned
