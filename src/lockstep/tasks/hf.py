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
from lockstep.models.hf import HubModel, HubTokenizer, logits_of, repeated_blocks
from lockstep.task import Task
from lockstep.tasks.causal_lm import Sampling, collate_tokens, count_labels, summed_cross_entropy
from lockstep.text.corpus import Windows
from lockstep.text.hub import Wanted, open_rows, table_files
from lockstep.text.hub_cache import default_cache
from lockstep.text.hub_corpus import Blocks, Packing, TokenCorpus, Tokenizer, Trained, prepare
from lockstep.text.hub_plain import plain_rows

__all__ = ["Chosen", "HubCausalLM", "cache_of", "corpus_for", "hub_task", "trained_size"]

_DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}
_LEAST_VOCABULARY = 257  # every byte, and the separator

Say = Callable[[str], None]


class _Reach(NamedTuple):
    """See `models.gpt.Reach`."""

    context: int
    vocab_size: int


@final
class HubCausalLM(Task):
    """A causal language model of `transformers` on a prepared corpus.

    Args:
        corpus: the data, see `corpus_for`.
        source: the model's configuration, and where its weights are.
        vocab_size: rows of the token table of a model that is drawn.
        dtype: what pretrained weights are read as.
        pretrained: read the weights instead of drawing them.
        sources: what came from a hub: name -> revision.

    Attributes:
        defaults: what is chosen where the configuration says nothing; see `lockstep.run.defaults`.
        items_per_sample: labelled tokens of every sample: the sequence length, in blocks one less.

    Raises:
        ConfigError: the model's context is shorter than a sample, or its vocabulary smaller than the corpus's.
    """

    item_name = "tokens"

    def __init__(
        self,
        corpus: TokenCorpus,
        source: HubModel,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        pretrained: bool,
        sources: Mapping[str, str],
    ) -> None:
        seq_len, held = corpus.train.seq_len, source.vocab_size if pretrained else vocab_size
        if source.context and seq_len > source.context:
            raise ConfigError(
                f"--seq-len {seq_len} is longer than the context of {source.name}, {source.context}; lower it"
            )
        if corpus.vocab_size > held:
            raise ConfigError(
                f"--tokenizer knows {corpus.vocab_size} tokens and {source.name} {held}; leave out --tokenizer, or "
                "--model.pretrained"
            )
        self.defaults = "fine-tuning" if pretrained else "language-model"
        self.corpus, self.sources = corpus, dict(sources)
        self.fingerprint = corpus.fingerprint
        self.items_per_sample = getattr(corpus.train, "items_per_sample", seq_len)
        self._reach = _Reach(source.context, corpus.vocab_size)
        self._build = partial(source.build, vocab_size=vocab_size, dtype=dtype, pretrained=pretrained)

    def model(self) -> nn.Module:
        """The model, drawn from torch's default generator or with its pretrained weights."""
        return self._build()

    def dataset(self, split: str) -> Windows | Blocks:
        """The samples of "train" or "evaluation". ValueError for any other split."""
        if split not in ("train", "evaluation"):
            raise ValueError(f"there is no split '{split}'; the splits are 'train' and 'evaluation'")
        return self.corpus.train if split == "train" else self.corpus.evaluation

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The samples as one batch: each tensor [seq_len] becomes [len(samples), seq_len]."""
        return collate_tokens(samples)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Labelled tokens of a batch in host memory."""
        return count_labels(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy in nats, summed over the labelled tokens: a scalar in float32, or float64 for such logits."""
        return summed_cross_entropy(logits_of(model, batch["input_ids"]), batch["labels"])

    def write(self, model: nn.Module, prompt: str, device: torch.device, sampling: Sampling) -> str:
        """`prompt`, taken as the beginning of a document, and what the model goes on with, at most to the document's
        end. The same text for the same `sampling`, whatever was written before.

        Raises:
            ConfigError: there is no token to begin with.
        """
        corpus = self.corpus
        begun = corpus.separator >= 0 and not isinstance(corpus.train, Blocks)  # as it was trained
        begin = [*[corpus.separator] * begun, *corpus.encode(prompt)]
        if not begin:
            raise ConfigError("--prompt is empty, and this model was trained without a token that begins a text")
        written = sampling.go_on(model, begin, device, self._reach, stop=corpus.separator, logits_of=logits_of)
        return corpus.decode(written)

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
        dtype=_DTYPES.get(config.precision, torch.float32),
        pretrained=asked.pretrained,
        sources=_sources({name: source.revision, config.dataset_name: chosen.revision}),
    )


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
    cache = cache_of(config)
    tokenizer = _named_tokenizer(config, cache, say) if config.tokenizer else own()
    if is_hub_name(name) or table_files(name):
        asked = Wanted(name, data.subset, data.split, data.revision, data.text_column, data.encoding)
        rows = open_rows(asked, say)
    else:
        rows = plain_rows(name)
    packing = Packing(data.packing, config.seq_len, data.evaluation)
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
