"""Load `transformers` models that classify images or texts, from a hub or a folder.

source = HubClassifier("google/vit-base-patch16-224", IMAGES, classes=("cat", "dog"), cache=cache, say=print)
model = source.build(dtype=torch.float32, pretrained=True)
logits = image_logits(model, images)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.config.fields import is_hub_name
from lockstep.errors import ConfigError
from lockstep.models.hf import explain_error, once_per_node, transformers_for, where

__all__ = ["IMAGES", "TEXTS", "HubClassifier", "HubEncoder", "image_logits", "text_logits"]

IMAGES = "AutoModelForImageClassification"
TEXTS = "AutoModelForSequenceClassification"

Say = Callable[[str], None]


@final
class HubClassifier:
    """A classifier by its configuration; `build` reads or initialises its weights.

    Args:
        name: OWNER/NAME on the hub, or a folder with a config.json.
        kind: IMAGES or TEXTS.
        classes: the names of the classes, which are put into its configuration.
        revision: branch, tag or commit on the hub; "" is its newest.
        trust_remote_code: run the Python code that comes with the model.
        pad: the token that pads a batch; -1 keeps the model's own.
        cache: folder for the lock that lets one process of a node download while the others wait.
        say: gets a line if something cannot be reached, and about newly initialised layers.

    Attributes:
        revision: the commit on the hub, or "" for a folder.
        size, channels: of its input images; 0 and 3 if it does not define them.
        mean, std: normalisation of its images, for each channel; 0.5 if it does not define it.
        context: longest text, in tokens; 0 if the architecture sets none.
        vocab_size: tokens that it knows; 0 for images.
        untrained: modules, by name, that the last `build` initialised while it read the other weights.

    Raises:
        ConfigError: no such name here or on the hub, no model of this kind, or code that may not run.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        classes: Sequence[str],
        revision: str = "",
        trust_remote_code: bool = False,
        pad: int = -1,
        cache: Path,
        say: Say,
    ) -> None:
        self._transformers = transformers_for("--model-name", name)
        self.name = name
        self._kind = kind
        self._trust = trust_remote_code
        self._cache = cache
        self._say = say
        self._where = where(name)
        self.untrained = tuple[str, ...]()
        with explain_error("--model-name", name), once_per_node(name, cache, say):
            self._config = self._transformers.AutoConfig.from_pretrained(
                self._where,
                revision=revision or None,
                trust_remote_code=trust_remote_code,
                num_labels=len(classes),
                id2label=dict(enumerate(classes)),
                label2id={label: number for number, label in enumerate(classes)},
            )
            file = self._transformers.utils.cached_file(self._where, "config.json", revision=revision or None)
            if is_hub_name(name):
                commit = self._transformers.utils.extract_commit_hash(file, None)
            else:
                commit = ""
            self.revision = str(commit or "")
            preprocessing = self._preprocessing() if kind == IMAGES else {}
        if pad >= 0:
            self._config.pad_token_id = pad
        size = getattr(self._config, "image_size", 0) or 0
        # Some configurations give [height, width].
        self.size = int(size if isinstance(size, int) else max(size))
        self.channels = int(getattr(self._config, "num_channels", 3))
        self.mean: tuple[float, ...] = tuple(preprocessing.get("image_mean") or [0.5] * self.channels)
        self.std: tuple[float, ...] = tuple(preprocessing.get("image_std") or [0.5] * self.channels)
        text = self._config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", None) or 0)
        self.vocab_size = int(getattr(text, "vocab_size", None) or 0)

    def build(self, *, dtype: torch.dtype, pretrained: bool) -> nn.Module:
        """Build a model in training mode on the CPU, initialised or with its pretrained weights.

        A last layer for other classes is initialised, and so is everything that the weights lack.

        Raises:
            ConfigError: the architecture is not of this kind, there are no safetensors weights, or they have another
                shape outside the last layer.
        """
        with explain_error("--model-name", self.name):
            auto = getattr(self._transformers, self._kind)
            if pretrained:
                with once_per_node(self.name, self._cache, self._say):
                    return self._read(auto, dtype).train()
            model: nn.Module = auto.from_config(self._config, dtype=torch.float32, trust_remote_code=self._trust)
            # Drawn in float32 and then rounded, so the draws do not depend on the dtype.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            return model.train()

    def _read(self, auto: Any, dtype: torch.dtype) -> nn.Module:
        model: nn.Module
        # A head for other classes is re-initialised; other mismatched sizes raise an error below.
        model, loading_info = auto.from_pretrained(
            self._where,
            config=self._config,
            revision=self.revision or None,
            trust_remote_code=self._trust,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        classes = self._config.num_labels
        initial = sorted(loading_info["missing_keys"])
        for name, stored, expected in loading_info["mismatched_keys"]:
            if tuple(stored[1:]) != tuple(expected[1:]) or expected[0] != classes:
                raise ConfigError(
                    f"--model-name {self.name}: '{name}' has shape {list(stored)} in its weights and {list(expected)} "
                    "in the model; use the config.json of these weights"
                )
        initial = sorted({*initial, *(name for name, _, _ in loading_info["mismatched_keys"])})
        if initial:
            more = f" and {len(initial) - 3} more" if len(initial) > 3 else ""
            self._say(f"{self.name}: newly initialised for {classes} classes: {', '.join(initial[:3])}{more}")
        self.untrained = tuple(dict.fromkeys(name.rpartition(".")[0] for name in initial))
        return model

    def _preprocessing(self) -> dict[str, Any]:
        """Return the content of its preprocessor_config.json; {} without one."""
        file = self._transformers.utils.cached_file(
            self._where,
            "preprocessor_config.json",
            revision=self.revision or None,
            # Private arguments of `transformers`: a missing file gives None, not an error.
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        settings: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
        return settings

    def save_config(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write the config.json of a model with tensors of these shapes, by plain name.

        Raises:
            ConfigError: they are not this architecture's.
        """
        with explain_error("--model-name", self.name), torch.device("meta"):
            model: Any = getattr(self._transformers, self._kind).from_config(
                self._config, trust_remote_code=self._trust
            )
            odd = []
            for name, tensor in model.state_dict().items():
                if shapes.get(name) != tuple(tensor.shape):
                    odd.append(name)
            if odd:
                raise ConfigError(f"--format hf: {self.name} has a tensor {odd[0]}, the checkpoint none of its shape")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if self._kind == IMAGES:
            image_settings = {
                "image_mean": self.mean,
                "image_std": self.std,
                "size": {"height": self.size, "width": self.size},
            }
            if self.size:
                settings = {**self._preprocessing(), **image_settings}
            else:
                settings = self._preprocessing()
            (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@final
class HubEncoder:
    """A tokenizer that makes inputs of a classifier.

    Args:
        name, revision, trust_remote_code, cache, say: as for `HubClassifier`.

    Attributes:
        pad: the token that pads a batch: its own, else the one that ends a text.

    Raises:
        ConfigError: as for `HubClassifier`; or it has neither of these tokens.
    """

    def __init__(
        self, name: str, *, revision: str = "", trust_remote_code: bool = False, cache: Path, say: Say
    ) -> None:
        transformers = transformers_for("--tokenizer", name)
        with explain_error("--tokenizer", name), once_per_node(name, cache, say):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                where(name), revision=revision or None, trust_remote_code=trust_remote_code
            )
        candidates = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        self.pad = int(next((token for token in candidates if token is not None), -1))
        if self.pad < 0:
            raise ConfigError(f"--tokenizer {name} has no padding token; set one, or use another tokenizer")
        self.vocab_size = len(self._tokenizer)

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int) -> list[dict[str, list[int]]]:
        """Return the inputs of each text (and its second one): input_ids, attention_mask and so on.

        Args:
            longest: maximum tokens of a text, special ones included; longer texts are truncated.
        """
        encoding = self._tokenizer(
            list(texts), *([list(pairs)] if pairs else []), truncation=True, max_length=longest, verbose=False
        )
        keys = list(encoding)
        rows = []
        for values in zip(*(encoding[key] for key in keys), strict=True):
            rows.append(dict(zip(keys, values, strict=True)))
        # A text without tokens becomes one padding token: no model takes an empty row.
        one = {"input_ids": self.pad, "attention_mask": 1}
        encoded = []
        for row in rows:
            encoded.append(row if row["input_ids"] else {key: [one.get(key, 0)] for key in keys})
        return encoded

    def save(self, folder: Path) -> None:
        """Write the files that `HubEncoder(folder)` reads."""
        self._tokenizer.save_pretrained(folder)


def image_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits [batch, classes] of images [batch, channels, height, width].

    They are in the model's dtype.
    """
    logits: Tensor = model(pixel_values=images).logits
    return logits


def text_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [batch, classes] of inputs from `HubEncoder.encode`, int64 [batch, time].

    They are in the model's dtype.
    """
    logits: Tensor = model(**inputs).logits
    return logits
