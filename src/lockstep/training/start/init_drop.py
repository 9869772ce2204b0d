"""Choose the tensors that --init-from leaves as the model initialises them, such as another head.

drop = init_drop(config, task)              # --init-drop, else what the task's untrained() names
drop.check(model_names, file_names)
weights = {name: tensor for name, tensor in state.items() if not drop.matches(name)}
"""

from collections.abc import Collection
from dataclasses import dataclass

from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline import Pipeline
from lockstep.task import Task, user_task
from lockstep.tensors import reaches

__all__ = ["InitDrop", "init_drop"]


@dataclass(frozen=True, slots=True)
class InitDrop:
    """Patterns of tensors and modules that keep their initial values.

    Attributes:
        patterns: as `reaches` takes them.
        origin: the flag or method that defines them.
        elsewhere: names of tensors that other stages of a pipeline have.
    """

    patterns: tuple[str, ...]
    origin: str
    elsewhere: Collection[str] = ()

    def matches(self, name: str) -> bool:
        """Whether a pattern means the tensor or a module around it, or this rank does not have it."""
        return name in self.elsewhere or any(_means(pattern, name) for pattern in self.patterns)

    def check(self, *names: Collection[str]) -> None:
        """Raise ConfigError if a pattern matches none of these tensors."""
        for pattern in self.patterns:
            if not any(_means(pattern, name) for group in (*names, self.elsewhere) for name in group):
                raise ConfigError(
                    f"{self.origin}: '{pattern}' matches no tensor of the model or of --init-from; correct or remove it"
                )


def _means(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(reaches(pattern, ".".join(parts[:count])) for count in range(len(parts), 0, -1))


def init_drop(config: Config, task: Task, pipeline: Pipeline | None = None) -> InitDrop:
    """Return the patterns of --init-drop; without the flag those of the user's `untrained`.

    A built-in task names the modules that the hub's weights lack, which --init-from may have.

    Args:
        config, task: of the run.
        pipeline: of which this rank has a stage; None: it has the whole model.
    """
    elsewhere = pipeline.stage.elsewhere if pipeline else ()
    if config.init_drop:
        return InitDrop(tuple(split_patterns(config.init_drop)), "--init-drop", elsewhere)
    method = getattr(type(user_task(task)), "untrained", None)
    is_own = method is not None and not method.__module__.startswith("lockstep.")
    # With adapters `untrained` names modules that an earlier run has trained already.
    if is_own and not config.lora.rank:
        names = tuple(task.untrained())
    else:
        names = ()
    return InitDrop(names, "the task's `untrained`", elsewhere)


def split_patterns(patterns: str) -> list[str]:
    """Split comma-separated patterns."""
    return [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
