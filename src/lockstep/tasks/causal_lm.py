"""Language modelling: predict each token from those before it.

    task = CausalLM(corpus, dataclasses.replace(PRESETS["builtin:nano"], vocab_size=corpus.vocab_size))

An item is a labelled token. Any dataset of samples with "input_ids" and "labels" fits; a label of -100 is no item.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.config.config import Config
from lockstep.errors import ConfigError
from lockstep.models.chunked import IGNORED, chunk_of, summed_cross_entropy
from lockstep.models.gpt import GPT, Further, GPTConfig, Reach, further_logits, generate, plain_logits
from lockstep.task import Task
from lockstep.text.documents import Packed, Padded
from lockstep.text.hub_corpus import Samples, TokenCorpus

__all__ = [
    "IGNORED",
    "CausalLM",
    "LanguageModel",
    "Sampling",
    "collate_tokens",
    "count_labels",
    "loss_inside",
    "pad_tokens",
]

_SAMPLE = 120  # tokens of a sample of text
_ROWS = 16  # texts that are written together


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        tokens: at most so many new ones.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: samples among the k likeliest tokens only; 0: among all.
        seed: of the draw.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def go_on(
        self,
        model: nn.Module,
        begins: Sequence[list[int]],
        device: torch.device,
        reach: Reach,
        *,
        stop: int,
        further: Further,
        logits_of: Callable[[nn.Module, Tensor], Tensor] = plain_logits,
    ) -> list[list[int]]:
        """Each of `begins` with the tokens that the model goes on with, to `stop` at most; see `generate`.

        They have the same number of tokens, at least one, and go through the model together. Each has a draw of its
        own, from the same seed.
        """
        written = generate(
            model,
            torch.tensor(begins, device=device),
            self.tokens,
            config=reach,
            temperature=self.temperature,
            top_k=self.top_k or None,
            generator=[torch.Generator(device).manual_seed(self.seed) for _ in begins],
            logits_of=logits_of,
            further=further,
            stop=stop,
        )
        length = len(begins[0])
        return [_to_stop(row, length, stop) for row in written.tolist()]


class LanguageModel(Task):
    """What the language models here have in common: a prepared corpus, batches of tokens, and text that is written.

    Args:
        corpus: see `lockstep.text.hub_corpus.prepare`.
        sources: what came from a hub: name -> revision.
        prompt: how the sample of text at a run's end begins; "": as the data does.
        loss_chunk: tokens whose logits are made together in the loss, see `models.chunked.chunk_of`.
        inside: the loss is computed in the model's forward, where a compiler sees it; its numbers are the same.

    Attributes:
        attention_mask: only documents that are packed need one; see `Task`.
        items_per_sample: labelled tokens of every sample where all have as many: in a stream the sequence length, in
            blocks one less; None where only some are learned, or documents stay apart.
    """

    reduction = "sum"
    item_name = "tokens"

    def __init__(
        self, corpus: TokenCorpus, sources: Mapping[str, str], prompt: str, loss_chunk: int, inside: bool
    ) -> None:
        self.corpus, self.sources = corpus, dict(sources)
        self.fingerprint = corpus.fingerprint
        self.items_per_sample = corpus.train.items_per_sample
        self.attention_mask = isinstance(corpus.train, Packed)
        self._prompt, self._loss_chunk, self._inside = prompt, loss_chunk, inside

    def dataset(self, split: str) -> Samples:
        """The samples of "train" or "evaluation". ValueError for any other split."""
        if split not in ("train", "evaluation"):
            raise ValueError(f"there is no split '{split}'; the splits are 'train' and 'evaluation'")
        return self.corpus.train if split == "train" else self.corpus.evaluation

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The samples as one batch: each tensor [seq_len] becomes [len(samples), seq_len], padded where they differ.

        Padding needs no mask: it stands behind the tokens, and none of them looks ahead. With one, tokens of padding
        that see nothing at all would be NaN in the kernels of some models, and NaN what multiplies them by 0.
        """
        return pad_tokens(samples) if isinstance(self.corpus.train, Padded) else collate_tokens(samples)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Labelled tokens of a batch in host memory."""
        return count_labels(batch)

    def work(self, dataset: Samples, samples: Sequence[int]) -> float | None:
        """Tokens of the batch with its padding; None where all samples have as many."""
        return float(len(samples) * dataset.longest(samples)) if isinstance(dataset, Padded) else None

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """A text that the model writes, as a document of the data begins. On every rank alike: one forward may need
        all. `model` is what an engine holds; the draw is the same each time."""
        begin = self.corpus.begun(self._prompt) if self._prompt else self.corpus.opening()
        # as many collectives as forwards, where the model is split
        return self._written(model, [begin], device, Sampling(tokens=_SAMPLE), stop=-1)[0]

    def write(
        self, model: nn.Module, prompts: Sequence[str], device: torch.device, sampling: Sampling
    ) -> Iterator[str]:
        """Each prompt, taken as the beginning of a document (in a conversation: what a user says), and what the model
        goes on with, at most to the document's end: in the prompts' order, each as soon as it is there.

        Prompts of as many tokens go through the model together, at most 16. A text is the same for the same
        `sampling`, whatever else is written.

        Raises:
            ConfigError: there is no token to begin with.
        """
        begins = [self.corpus.begun(prompt) for prompt in prompts]
        if not all(begins):
            raise ConfigError("--prompt is empty, and this model was trained without a token that begins a text")
        return self._in_order(model, begins, device, sampling)

    def _in_order(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling
    ) -> Iterator[str]:
        texts: dict[int, str] = {}
        told = 0
        for places in _together(begins):
            chosen = [begins[place] for place in places]
            written = self._written(model, chosen, device, sampling, stop=self.corpus.separator)
            texts |= zip(places, written, strict=True)
            while told in texts:
                yield texts.pop(told)
                told += 1

    @abstractmethod
    def _written(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling, stop: int
    ) -> list[str]:
        """The texts of `begins`, all of one length, and of what the model goes on with."""


@final
class CausalLM(LanguageModel):
    """The built-in GPT on a prepared corpus.

    Args:
        corpus, sources, prompt, loss_chunk, inside: see `LanguageModel`.
        config: the model's shape; its vocabulary and context hold the corpus's.

    Attributes:
        defaults: what is chosen where the configuration says nothing; see `lockstep.run.defaults`.

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
                f"--model-name: the model knows {config.vocab_size} tokens and the data has {corpus.vocab_size}; "
                "give the model the data's vocabulary"
            )
        self.config = config

    def model(self) -> nn.Module:
        """A new model on the default device, drawn from torch's default generator."""
        return GPT(self.config)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy in nats, summed over the labelled tokens: a scalar in float32, or float64 for such logits."""
        ids, labels = batch["input_ids"], batch["labels"]
        apart = {name: batch[name] for name in ("positions", "documents") if name in batch}
        chunk = chunk_of(self._loss_chunk, ids.numel(), self.config.padded_vocab)
        if chunk or self._inside:
            return cast(Tensor, model(ids, **apart, labels=labels, chunk=chunk))
        return summed_cross_entropy(model(ids, **apart), labels)

    def _written(
        self, model: nn.Module, begins: Sequence[list[int]], device: torch.device, sampling: Sampling, stop: int
    ) -> list[str]:
        further = further_logits(self.config.layers)
        written = sampling.go_on(model, begins, device, self.config, stop=stop, further=further)
        return [self.corpus.decode(tokens) for tokens in written]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a model that `model` built, not yet wrapped."""
        return list(cast(GPT, model).blocks)


def loss_inside(config: Config) -> bool:
    """Whether a run's language model computes its loss in its forward: where that is compiled.

    Not where the engine casts what a forward returns, which is meant for logits: a sum needs its float32.
    """
    return bool(config.compile) and config.engine_options.output_dtype in ("same", "float32")


def _to_stop(tokens: list[int], begin: int, stop: int) -> list[int]:
    """The tokens to the first `stop` behind the first `begin` ones, which stays."""
    return tokens[: tokens.index(stop, begin) + 1] if stop in tokens[begin:] else tokens


def _together(begins: Sequence[list[int]]) -> list[list[int]]:
    """Places whose beginnings have one length, at most `_ROWS` a part, in the order of their first places."""
    parts: list[list[int]] = []
    open_ones: dict[int, list[int]] = {}
    for place, begin in enumerate(begins):
        part = open_ones.get(len(begin))
        if part is None or len(part) == _ROWS:
            part = open_ones[len(begin)] = []
            parts.append(part)
        part.append(place)
    return parts


def collate_tokens(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor [seq_len] of the samples as one tensor [len(samples), seq_len]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def pad_tokens(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Samples of different lengths as [len(samples), longest]: the padding at the right is token 0, labelled -100."""
    ids, labels = (
        pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("labels", IGNORED))
    )
    return {"input_ids": ids, "labels": labels}


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Labelled tokens of a batch in host memory."""
    return int((batch["labels"] != IGNORED).sum())
