"""Language modelling with a Hugging Face model, or on data from the hub or from tables, by the flags of `train`.

task = hub_task(config, say)                    # --model-name OWNER/NAME or a folder
corpus = corpus_for(config, own, say).corpus    # --dataset-name, --tokenizer and the section `data`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lockstep.config.config import Config
from lockstep.config.hub_name import is_hub_name
from lockstep.errors import ConfigError
from lockstep.models.chunked import chunk_of, summed_cross_entropy
from lockstep.models.hf import HubModel, HubTokenizer, repeated_blocks
from lockstep.models.hf_forward import (
    can_chunk,
    further_logits,
    inputs_of,
    keeps_apart,
    logits_of,
    same_head,
    with_loss,
)
from lockstep.tasks.causal_lm import LanguageModel, Sampling, loss_inside
from lockstep.text.corpus import Blocks, Windows
from lockstep.text.documents import Packed
from lockstep.text.examples import Tokenizer
from lockstep.text.hub import Wanted, open_rows, table_files
from lockstep.text.hub_cache import default_cache
from lockstep.text.hub_corpus import TokenCorpus, Trained, prepare
from lockstep.text.hub_plain import plain_rows
from lockstep.text.written import Packing

__all__ = ["Chosen", "HubCausalLM", "cache_of", "corpus_for", "hub_task", "trained_size"]

_DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}
_LEAST_VOCABULARY = 257  # every byte, and the separator

Say = Callable[[str], None]


class _Reach(NamedTuple):
    """See `models.gpt.Reach`."""

    context: int
    vocab_size: int


@final
class HubCausalLM(LanguageModel):
    """A causal language model of `transformers` on a prepared corpus.

    Args:
        corpus, sources, prompt, loss_chunk, inside: see `LanguageModel`.
        source: the model's configuration, and where its weights are.
        vocab_size: rows of the token table of a model that is drawn.
        dtype: what pretrained weights are read as; None: as they are stored.
        pretrained: read the weights instead of drawing them.
        other_tokenizer: the corpus's tokenizer is not the model's own.
        whole: the model is compiled as a whole, see `_has_mask`.

    Attributes:
        defaults: what is chosen where the configuration says nothing; see `lockstep.run.defaults`.

    Raises:
        ConfigError: the model's context is shorter than a sample, its vocabulary smaller than the corpus's, or it
            cannot keep documents apart that are packed.
    """

    def __init__(
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
        whole: bool = False,
    ) -> None:
        super().__init__(corpus, sources, prompt, loss_chunk, inside)
        self.attention_mask = _has_mask(corpus, source, whole)
        seq_len, held = corpus.train.seq_len, source.vocab_size if pretrained else vocab_size
        if source.context and seq_len > source.context:
            raise ConfigError(
                f"--seq-len {seq_len} is longer than the context of {source.name}, {source.context}; lower it"
            )
        if corpus.vocab_size > held:
            known = f"{corpus.vocab_size} tokens and {source.name} {held}"
            raise ConfigError(
                f"--tokenizer knows {known}; leave out --tokenizer, or --model.pretrained"
                if other_tokenizer
                else f"--model-name: its tokenizer knows {known}, and some have no row in its token table: widen it "
                "(model.resize_token_embeddings(len(tokenizer))), save both into one folder, and name that"
            )
        self.defaults = "fine-tuning" if pretrained else "language-model"
        self._name, self._tried = source.name, False
        self._reach = _Reach(source.context, corpus.vocab_size)
        self._vocab_size = held
        self._build = partial(source.build, vocab_size=vocab_size, dtype=dtype, pretrained=pretrained)

    def model(self) -> nn.Module:
        """The model, drawn from torch's default generator or with its pretrained weights.

        Raises:
            ConfigError: a loss in chunks was asked for, of an architecture whose logits are more than its head's.
        """
        made = self._build()
        if can_chunk(made) and self._loss_chunk:
            return with_loss(made)
        if self._loss_chunk > 0:
            raise ConfigError(
                f"--model.loss-chunk {self._loss_chunk}: the logits of {self._name} are not its head's alone; leave it "
                "out"
            )
        self._loss_chunk = 0
        return with_loss(made, of_logits=True) if self._inside else made

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy in nats, summed over the labelled tokens: a scalar in float32, or float64 for such logits."""
        ids, labels, more = batch["input_ids"], batch["labels"], inputs_of(batch)
        if not (self._tried or torch.is_grad_enabled()):  # before step 1, and in the first evaluation after a resume
            self._try(model, batch)
            self._tried = True
        chunk = chunk_of(self._loss_chunk, ids.numel(), self._vocab_size)
        if chunk or self._inside:
            inside: Tensor = model(input_ids=ids, use_cache=False, **more, summed_labels=labels, chunk=chunk)
            return inside
        return summed_cross_entropy(logits_of(model, ids, **more), labels)

    def _try(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Whether the architecture does what its packing and its loss need; as many forwards on every rank."""
        ids = batch["input_ids"]
        if "documents" in batch and not keeps_apart(model, ids, batch["positions"], batch["documents"]):
            raise ConfigError(
                f"--data.packing documents: {self._name} looks from one document into the next whatever its positions "
                "say; use --data.packing padded"
            )
        if self._loss_chunk and not same_head(model, ids, summed_cross_entropy):
            raise ConfigError(
                f"--model.loss-chunk: the logits of {self._name} are not its head's alone; give --model.loss-chunk 0"
            )

    def _written(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling, stop: int
    ) -> list[str]:
        reach = self._reach
        written = sampling.go_on(model, begins, device, reach, stop=stop, logits_of=logits_of, further=further_logits)
        return [self.corpus.decode(tokens) for tokens in written]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a model that `model` built, not yet wrapped."""
        return repeated_blocks(model)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A corpus, the revision of its data ("" for files), and whether its tokenizer is another than the model's own."""

    corpus: TokenCorpus
    revision: str
    other_tokenizer: bool


def hub_task(config: Config, say: Say) -> HubCausalLM:
    """The task for a `--model-name` that is on the hub or a folder.

    Raises:
        ConfigError: the model or the tokenizer is not to be had, needs code of its own, or does not fit the data.
        DataError: see `lockstep.text.hub_corpus.prepare`.
    """
    name, asked = config.model_name, config.model
    cache = cache_of(config)
    get = partial(HubModel, trust_remote_code=asked.trust_remote_code, cache=cache, say=say)
    source = get(name, revision=asked.revision)
    if source.context and config.seq_len > source.context:  # before the data is prepared at that length
        raise ConfigError(
            f"--seq-len {config.seq_len} is longer than the context of {name}, {source.context}; lower it"
        )
    if config.data.packing == "documents" and not source.takes_documents:
        raise ConfigError(
            f"--data.packing documents: {name} cannot keep its state or its positions inside a document; use "
            "--data.packing padded"
        )
    own = partial(
        HubTokenizer,
        name,
        revision=source.revision,
        trust_remote_code=asked.trust_remote_code,
        cache=cache,
        say=say,
    )
    chosen = corpus_for(config, own, say)
    corpus = chosen.corpus
    return HubCausalLM(
        corpus,
        source,
        vocab_size=corpus.vocab_size if chosen.other_tokenizer else max(source.vocab_size, corpus.vocab_size),
        dtype=None if config.lora.rank else _DTYPES.get(config.precision, torch.float32),
        pretrained=asked.pretrained,
        sources=_sources({name: source.revision, config.dataset_name: chosen.revision}),
        prompt=config.data.prompt,
        loss_chunk=asked.loss_chunk,
        inside=loss_inside(config),
        other_tokenizer=chosen.other_tokenizer,
        whole=bool(config.compile) and config.compile_scope == "whole",
    )


def _has_mask(corpus: TokenCorpus, source: HubModel, whole: bool) -> bool | None:
    """Tell whether the model's attention gets a mask; None where that is not known.

    Args:
        whole: the model is compiled as a whole: `transformers` cannot look at positions then, and makes a mask in case
            documents are packed.
    """
    if isinstance(corpus.train, Packed):
        return True
    plain = isinstance(corpus.train, Windows | Blocks) and source.full_attention
    return False if plain and not whole else None


def corpus_for(config: Config, own: Callable[[], Tokenizer | Trained], say: Say) -> Chosen:
    """The corpus that `--dataset-name`, `--tokenizer` and the section `data` ask for, prepared where it is not yet.

    Args:
        own: the tokenizer where none is named: the model's, or one to train.

    Raises:
        ConfigError: a tokenizer that is not to be had, or a sequence length that leaves nothing to predict.
        DataError: see `lockstep.text.hub_corpus.prepare`.
    """
    data, name = config.data, config.dataset_name
    if data.packing == "blocks" and config.seq_len < 2:
        raise ConfigError("--seq-len 1 leaves a block nothing to predict; give 2 or more, or --data.packing stream")
    if data.packing == "documents" and config.attention == "flash":
        raise ConfigError("--attention flash takes no mask, which --data.packing documents needs; leave it out")
    cache = cache_of(config)
    tokenizer = _named_tokenizer(config, cache, say) if config.tokenizer else own()
    packing = Packing(data.packing, config.seq_len, data.evaluation, data.labels)
    if is_hub_name(name) or table_files(name):
        columns = data.text_column, data.encoding, packing.answers
        asked = Wanted(name, data.subset, data.split, data.revision, *columns)
        rows = open_rows(asked, say)
    else:
        rows = plain_rows(name)
    corpus = prepare(name, rows.digest, rows.documents, tokenizer, packing, cache=cache, say=say)
    return Chosen(corpus, rows.revision, bool(config.tokenizer))


def cache_of(config: Config) -> Path:
    """Where prepared data lies."""
    return Path(config.data.cache).expanduser() if config.data.cache else default_cache()


def trained_size(tokenizer: str) -> int:
    """VOCAB of "train:VOCAB"; 0 for any other text. Raises ConfigError for a VOCAB that does not hold."""
    kind, colon, size = tokenizer.partition(":")
    if kind != "train" or not colon:
        return 0
    if not size.isascii() or not size.isdigit() or int(size) < _LEAST_VOCABULARY:
        raise ConfigError(
            f"--tokenizer {tokenizer}: give a number of tokens from {_LEAST_VOCABULARY}, as in train:8192"
        )
    return int(size)


def _named_tokenizer(config: Config, cache: Path, say: Say) -> Tokenizer | Trained:
    name = config.tokenizer
    if size := trained_size(name):
        return Trained(size)
    if not is_hub_name(name) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"--tokenizer {name}: no such folder; give one, a hub name (OWNER/NAME), or train:VOCAB")
    return HubTokenizer(name, trust_remote_code=config.model.trust_remote_code, cache=cache, say=say)


def _sources(revisions: Mapping[str, str]) -> dict[str, str]:
    return {name: revision for name, revision in revisions.items() if revision}
