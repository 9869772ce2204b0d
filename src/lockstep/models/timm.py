"""Load image models of `timm`. Only this file needs the package.

    source = TimmModel("resnet18", classes=10, cache=cache, say=print)      # --model-name timm:resnet18
    model = source.build(pretrained=True)

The tests replace the package by a stub, since it needs torchvision.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from torch import nn

from lockstep.errors import ConfigError
from lockstep.extras import install_extra
from lockstep.models.hf import explain_error, once_per_node

__all__ = ["TimmModel"]


@final
class TimmModel:
    """A `timm` model by its name; `build` reads or initialises its weights.

    Args:
        name: as `timm.create_model` takes it.
        classes: of the logits.
        cache: folder for the lock that lets one process of a node download while the others wait.
        say: gets a line if something takes time.

    Attributes:
        size: height and width of the images that its weights were trained on.
        mean, std: their normalisation, for each channel.
        untrained: the layer, by name, that the last `build` initialised while it read the other weights.

    Raises:
        ConfigError: timm is not installed, or has no such model.
    """

    def __init__(self, name: str, *, classes: int, cache: Path, say: Callable[[str], None]) -> None:
        self._timm = _timm(name)
        self.name = name
        self._classes = classes
        self._cache = cache
        self._say = say
        if not self._timm.is_model(name):
            close = self._timm.list_models(f"*{name.partition('.')[0]}*")[:3]
            if close:
                hint = f"it has {', '.join(close)}"
            else:
                hint = "timm.list_models() names them"
            raise ConfigError(f"--model-name timm:{name}: timm has no such model; {hint}")
        pretrained_cfg = self._timm.get_pretrained_cfg(name)
        if pretrained_cfg is not None:
            settings = pretrained_cfg.to_dict()
        else:
            settings = {}
        # Without settings of its own a model has ImageNet's size, mean and standard deviation.
        self.size = int(settings.get("input_size", (3, 224, 224))[-1])
        self.mean: tuple[float, ...] = tuple(settings.get("mean", (0.485, 0.456, 0.406)))
        self.std: tuple[float, ...] = tuple(settings.get("std", (0.229, 0.224, 0.225)))
        classifier = settings.get("classifier") or ()
        if settings.get("num_classes") == classes:
            self._last = ()
        else:
            self._last = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        self.untrained: tuple[str, ...] = ()

    def build(self, *, pretrained: bool, dropout: float = 0.0) -> nn.Module:
        """Build a model in training mode, with a newly initialised last layer for these classes.

        Raises:
            ConfigError: the weights are unavailable.
        """
        flag = "--model-name"
        with explain_error(flag, f"timm:{self.name}"):
            settings = {"num_classes": self._classes, "drop_rate": dropout}
            if not pretrained:
                model: nn.Module = self._timm.create_model(self.name, pretrained=False, **settings)
                return model.train()
            with once_per_node(f"timm/{self.name}", self._cache, self._say):
                model = self._timm.create_model(self.name, pretrained=True, **settings)
                self.untrained = self._last
                return model.train()


def _timm(name: str) -> Any:
    try:
        # Imported late: timm is optional, so type checks run without it.
        import timm  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"--model-name timm:{name} needs the package timm: {install_extra('timm')}") from error
    return timm
