"""Classify texts with a `transformers` model: `lockstep train --task classification`.

    task = make(config, say=print)    # --model-name, --dataset-name, --data.text-column, --data.label-column

An item is a text. A batch is padded to the longest text of its micro-batch, on any rank. Only this file imports
`torchmetrics`; without it the F1 score is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.schema import Config
from lockstep.errors import ConfigError, DataError
from lockstep.files import cache_folder
from lockstep.models.hf import repeated_blocks
from lockstep.models.hf_heads import TEXTS, HubClassifier, HubEncoder, text_logits
from lockstep.task import Task
from lockstep.tasks.columns import class_labels, find_column, fingerprint_of, names_of
from lockstep.tasks.images import DTYPES
from lockstep.text.hub import DataRequest, HubTable, open_table

__all__ = [
    "make",
]

_TEXT_COLUMNS = ("text", "sentence", "content", "review")
# Characters of a token, roughly; used only to balance the work.
_CHARACTERS = 5
# Padding by name of the input; input_ids get the tokenizer's pad token instead.
_FILLS = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0}

Say = Callable[[str], None]


@final
class Texts:
    """The samples of a split: (a text's model inputs, its class).

    The inputs are lists of numbers by name.

    Args:
        texts: one column of texts, or two.
        longest: maximum tokens of a sample.
    """

    # Samples draw nothing at random, so the loader need not seed them.
    draws_random = False

    def __init__(self, texts: Sequence[list[str]], labels: Tensor, encoder: HubEncoder, longest: int) -> None:
        self.texts = texts
        self.labels = labels
        self.encoder = encoder
        self.longest = longest

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, list[int]], int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[dict[str, list[int]], int]]:
        """Return the samples of a batch, in order."""
        texts, *pairs = ([column[index] for index in indices] for column in self.texts)
        inputs = self.encoder.encode(texts, pairs[0] if pairs else None, self.longest)
        return list(zip(inputs, self.labels[indices].tolist(), strict=True))


@final
class TextClassification(Task):
    """Task that predicts a class for each text.

    Args:
        train, evaluation: the splits.
        source: the model.
        dtype: of its parameters.
        pretrained: read the weights instead of initialising them.
        digest: hex; of the data.
        sources: name -> revision of everything from a hub.

    Attributes:
        classes: their names.
        sources: with the names of the classes, for the run's environment.json.
    """

    reduction = "sum"
    item_name = "texts"
    items_per_sample = 1

    def __init__(
        self,
        train: Texts,
        evaluation: Texts,
        source: HubClassifier,
        *,
        classes: tuple[str, ...],
        dtype: torch.dtype,
        pretrained: bool,
        digest: str,
        sources: Mapping[str, str],
    ) -> None:
        self._parts = {"train": train, "evaluation": evaluation}
        self.encoder = train.encoder
        self.classes = classes
        self.defaults = "fine-tuning" if pretrained else "general"
        self.fingerprint = fingerprint_of(classes, digest)
        self.sources = {**sources, "classes": names_of(classes)}
        self._source = source
        self._build = partial(source.build, dtype=dtype, pretrained=pretrained)
        self._f1 = _f1(len(classes))

    def model(self) -> nn.Module:
        """Build the model, initialised from torch's default generator or with pretrained weights."""
        return self._build()

    def untrained(self) -> tuple[str, ...]:
        """Return the last layer, if the weights are for other classes."""
        return self._source.untrained

    def dataset(self, split: str) -> Texts:
        """Return the samples of "train" or "evaluation".

        Raises:
            KeyError: any other split.
        """
        return self._parts[split]

    def collate(self, samples: list[tuple[dict[str, list[int]], int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Pad the inputs at the end: (name -> int64 [samples, longest], classes int64 [samples])."""
        fills = {**_FILLS, "input_ids": self.encoder.pad}
        inputs = {}
        for name in samples[0][0]:
            rows = [sample[name] for sample, _ in samples]
            longest = max(map(len, rows))
            inputs[name] = torch.tensor([row + [fills.get(name, 0)] * (longest - len(row)) for row in rows])
        return inputs, torch.tensor([label for _, label in samples])

    def work(self, dataset: Texts, samples: Sequence[int]) -> float:
        """Estimate the cost of a batch: its characters if padded to the longest text.

        A text counts at most about `longest` tokens.
        """
        longest = max(sum(len(column[sample]) for column in dataset.texts) for sample in samples)
        return float(len(samples) * min(max(1, longest), _CHARACTERS * dataset.longest))

    def loss(self, model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        """Return the cross entropy in nats, summed over the texts.

        It is a scalar in float32, or float64 for such logits.
        """
        inputs, labels = batch
        return F.cross_entropy(_wide(text_logits(model, inputs)), labels, reduction="sum")

    def evaluate(self, model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return (summed cross entropy, metrics).

        The metrics are "accuracy" and, with torchmetrics, "f1", the mean of the classes' F1 scores.
        """
        inputs, labels = batch
        logits = _wide(text_logits(model, inputs))
        best = logits.argmax(dim=1)
        metrics: dict[str, Any] = {"accuracy": ((best == labels).sum(), len(labels))}
        if self._f1 is not None:
            # Waits for the device in each micro-batch of an evaluation: the metric is in host memory.
            self._f1.update(best.cpu(), labels.cpu())
            metrics["f1"] = self._f1
        return F.cross_entropy(logits, labels, reduction="sum"), metrics

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of an unwrapped model from `model`."""
        return repeated_blocks(model)


def make(config: Config, say: Say) -> TextClassification:
    """Make the task of the flags.

    Raises:
        ConfigError: no such model or tokenizer, or they do not fit each other.
        DataError: no data is named, or it lacks such a column or classes.
    """
    name = config.dataset_name
    model_config = config.model
    data = config.data
    if not name:
        raise DataError("--task classification needs data; set --dataset-name (csv, json, parquet, or OWNER/NAME)")
    flag = f"--dataset-name {name}"
    cache = cache_folder(config.data.cache)
    chosen = data.subset, data.split, data.revision, data.text_column, data.encoding
    request = DataRequest(name, *chosen, skip=data.skip)
    table = open_table(request, data.evaluation, cache / "tables", say)
    columns = _text_columns(table, data.text_column, flag)
    label = find_column(table.kinds, data.label_column, "", ("label", "labels", "class"), flag, "--data.label-column")
    classes, labels = class_labels(table, label, flag)
    settings: dict[str, Any] = {"trust_remote_code": model_config.trust_remote_code, "cache": cache, "say": say}
    revision = "" if config.tokenizer else model_config.revision
    # The encoder comes first: the model pads by the encoder's padding token.
    encoder = HubEncoder(config.tokenizer or config.model_name, revision=revision, **settings)
    source = HubClassifier(
        config.model_name, TEXTS, classes=classes, revision=model_config.revision, pad=encoder.pad, **settings
    )
    if source.context and config.seq_len > source.context:
        raise ConfigError(
            f"--seq-len {config.seq_len} is longer than the context of {source.name}, {source.context}; lower it"
        )
    if encoder.vocab_size > source.vocab_size:
        sizes = f"{encoder.vocab_size} tokens and {source.name} {source.vocab_size}"
        raise ConfigError(
            f"--tokenizer {config.tokenizer} has {sizes}; drop the flag"
            if config.tokenizer
            else f"--model-name: its tokenizer has {sizes}; resize its token table "
            "(model.resize_token_embeddings(len(tokenizer))), and save both into one folder"
        )
    # A missing text counts as an empty one.
    texts = zip(*(table.values(column) for column in columns), strict=True)
    parts = []
    for split_texts, split_labels in zip(texts, labels, strict=True):
        # An empty cell is an empty text.
        column_texts = []
        for column in split_texts:
            column_texts.append([value or "" for value in column])
        parts.append(Texts(column_texts, split_labels, encoder, config.seq_len))
    train, evaluation = parts
    revisions = {config.model_name: source.revision, name: table.revision}
    return TextClassification(
        train,
        evaluation,
        source,
        classes=classes,
        dtype=DTYPES.get(config.precision, torch.float32),
        pretrained=model_config.pretrained,
        digest=xxhash.xxh3_128_hexdigest(
            repr((table.digest, columns, label, data.evaluation, config.tokenizer)).encode()
        ),
        sources={key: revision for key, revision in revisions.items() if revision},
    )


def _text_columns(table: HubTable, option: str, flag: str) -> list[str]:
    """Find the column of the texts, or the two columns of pairs."""
    names = [name.strip() for name in option.split(",")]
    if len(names) > 2:
        raise DataError(f"{flag}: --data.text-column {option} names {len(names)} columns; name one, or two for pairs")
    kinds = {}
    for name, dtype in table.kinds.items():
        # A table has string or large_string columns; both are text.
        if dtype.endswith("string"):
            kinds[name] = "string"
        else:
            kinds[name] = dtype
    columns = []
    for name in names:
        columns.append(find_column(kinds, name, "string", _TEXT_COLUMNS, flag, "--data.text-column"))
    return columns


def _f1(classes: int) -> Any:
    """Make an empty metric in host memory; None without the package."""
    try:
        from torchmetrics.classification import MulticlassF1Score
    except ImportError:
        return None
    return cast(Any, MulticlassF1Score(num_classes=classes, average="macro"))


def _wide(logits: Tensor) -> Tensor:
    """Convert to float32 at least: a loss in half precision is too coarse."""
    if logits.dtype is torch.float64:
        return logits
    return logits.float()
