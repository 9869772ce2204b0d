"""Language modelling: predict each token from those before it.

    task = CausalLM(corpus, dataclasses.replace(PRESETS["builtin:nano"], vocab_size=corpus.vocab_size))

An item is a labelled token. Any dataset of samples with "input_ids" and "labels" fits; a label of -100 is no item.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig, Reach, generate, plain_logits
from lockstep.task import Task
from lockstep.text.corpus import Windows
from lockstep.text.hub_corpus import Blocks, TokenCorpus

__all__ = ["IGNORED", "CausalLM", "Sampling", "collate_tokens", "count_labels", "summed_cross_entropy"]

_BEGIN, _SAMPLE = "import ", 120  # what a sample begins with, and the tokens that follow

IGNORED = -100  # the label of a token that is not predicted


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
        begin: list[int],
        device: torch.device,
        reach: Reach,
        *,
        stop: int,
        logits_of: Callable[[nn.Module, Tensor], Tensor] = plain_logits,
    ) -> list[int]:
        """`begin`, not empty, and the tokens that the model goes on with, to `stop` at most; see `generate`."""
        written = generate(
            model,
            torch.tensor([begin], device=device),
            self.tokens,
            config=reach,
            temperature=self.temperature,
            top_k=self.top_k or None,
            generator=torch.Generator(device).manual_seed(self.seed),
            logits_of=logits_of,
            stop=stop,
        )
        tokens: list[int] = written[0].tolist()
        return tokens


@final
class CausalLM(Task):
    """The built-in GPT on a prepared corpus.

    Args:
        corpus: see `lockstep.text.hub_corpus.prepare`.
        config: the model's shape; its vocabulary and context hold the corpus's.

    Attributes:
        defaults: what is chosen where the configuration says nothing; see `lockstep.run.defaults`.
        item_name: what a rate is shown in.
        items_per_sample: labelled tokens of every sample, the same for all: the sequence length, in blocks one less.
        sources: what came from a hub: name -> revision.

    Raises:
        ConfigError: the model's context is shorter than the windows, or its vocabulary smaller than the corpus's.
    """

    defaults = "language-model"
    item_name = "tokens"

    def __init__(self, corpus: TokenCorpus, config: GPTConfig, sources: Mapping[str, str] | None = None) -> None:
        seq_len = corpus.train.seq_len
        if seq_len > config.context:
            raise ConfigError(f"--seq-len {seq_len} is longer than the model's context of {config.context}; lower it")
        if corpus.vocab_size > config.vocab_size:
            raise ConfigError(
                f"--model-name: the model knows {config.vocab_size} tokens and the data has {corpus.vocab_size}; "
                "give the model the data's vocabulary"
            )
        self.corpus = corpus
        self.config = config
        self.sources = dict(sources or {})
        self.fingerprint = corpus.fingerprint
        self.items_per_sample = getattr(corpus.train, "items_per_sample", seq_len)

    def model(self) -> nn.Module:
        """A new model on the default device, drawn from torch's default generator."""
        return GPT(self.config)

    def dataset(self, split: str) -> Windows | Blocks:
        """The windows of "train" or "evaluation". ValueError for any other split."""
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
        return summed_cross_entropy(model(batch["input_ids"]), batch["labels"])

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """A text that the model writes from the beginning of a document. On every rank alike: one forward may need all.

        `model` is what an engine holds; the draw is the same each time.
        """
        # as many collectives as forwards, where the model is split
        return self._written(model, _BEGIN, device, Sampling(tokens=_SAMPLE), stop=-1)

    def write(self, model: nn.Module, prompt: str, device: torch.device, sampling: Sampling) -> str:
        """`prompt`, taken as the beginning of a document, and what the model goes on with, at most to the document's
        end. The same text for the same `sampling`, whatever was written before."""
        return self._written(model, prompt, device, sampling, stop=self.corpus.separator)

    def _written(self, model: nn.Module, prompt: str, device: torch.device, sampling: Sampling, stop: int) -> str:
        begin = [self.corpus.separator, *self.corpus.encode(prompt)]
        return self.corpus.decode(sampling.go_on(model, begin, device, self.config, stop=stop))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a model that `model` built, not yet wrapped."""
        return list(cast(GPT, model).blocks)


def collate_tokens(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor [seq_len] of the samples as one tensor [len(samples), seq_len]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Labelled tokens of a batch in host memory."""
    return int((batch["labels"] != IGNORED).sum())


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats of logits [batch, time, vocab], summed over the labels (int64 [batch, time]) not -100.

    A scalar in float32, or float64 for such logits.
    """
    logits = logits.flatten(0, 1)
    if logits.dtype is not torch.float64:
        logits = logits.float()  # a sum over a large vocabulary is too coarse in half precision
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
