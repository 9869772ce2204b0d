"""Several optimizers as one, for what keeps their states: each steps by itself, when a task's own step says so.

both = Several([of_generator, of_discriminator])
both.param_groups, both.state               # of all of them, theirs and not copies
both.step()                                 # all of them, one after the other
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ConfigError

__all__ = ["Several"]


@final
class Several(Optimizer):
    """An optimizer of optimizers.

    Attributes:
        members: in their order.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        """Raises ConfigError where two of them have the same parameter."""
        self.members = list(members)
        # As of now: what takes their steps over may put something in its place.
        self._steps = [_own_step(each) for each in self.members]
        seen: set[Tensor] = set()
        for group in (group for each in self.members for group in each.param_groups):
            if any(parameter in seen for parameter in group["params"]):
                raise ConfigError(
                    "two of the optimizers have the same parameter, whose states could not be told apart: give each "
                    "parameter to one"
                )
            seen.update(group["params"])
        super().__init__([group for each in self.members for group in each.param_groups], {})
        self.state = _States(self.members)  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for place in range(len(self.members)):
            self.step_one(place)

    def step_one(self, place: int) -> None:
        """The step of one of them."""
        self._steps[place]()


def _own_step(optimizer: Optimizer) -> Callable[[], Any]:
    return optimizer.step


class _States(MutableMapping[Any, Any]):
    """The states of all members, by parameter."""

    def __init__(self, members: list[Optimizer]) -> None:
        self._members = members

    def __getitem__(self, parameter: Any) -> Any:
        for each in self._members:
            if parameter in each.state:
                return each.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Any, value: Any) -> None:
        owner = next(
            (m for m in self._members if any(parameter is p for group in m.param_groups for p in group["params"])),
            self._members[0],
        )
        owner.state[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        for each in self._members:
            each.state.pop(parameter, None)

    def __iter__(self) -> Iterator[Any]:
        return (parameter for each in self._members for parameter in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._members)
