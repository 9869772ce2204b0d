"""What `lockstep scale` is asked for: the settings to measure, their order, and the flags of each run. Loads no torch.

request = Request(flags=("--task", "a.py:A"), config=config, sizes=(1, 2, 4))
request.check(4)                        # raises ConfigError where a size has nothing to compute
[Setting(1, 16), Setting(2, 16), ...] == request.settings()
request.train_flags(Setting(2, 16), folder, micro_batch_size=4)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.config.config import Config
from lockstep.config.options import option_list
from lockstep.config.shares import counts_of
from lockstep.engines.options import ENGINES, PLAIN
from lockstep.errors import ConfigError

__all__ = ["PROFILE", "STRONG", "WEAK", "WINDOWS", "Request", "Setting", "ascending", "order"]

STRONG, WEAK = "strong", "weak"
PROFILE = "profile"  # the option of train that traces steps FIRST:LAST
WINDOWS = 4  # records of a run that are counted; one more before them is its start
_ENDLESS = 1_000_000  # steps of the plan, so that neither its end nor an evaluation comes into the measurement


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One thing to measure: so many ranks, and so many samples in a step."""

    ranks: int
    batch_size: int


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        flags: of train, as they were given; `config`: what they say.
        sizes: numbers of ranks, ascending.
        modes: STRONG (the same batch), WEAK (the batch grows with the ranks), or both.
        rounds: how often each setting is run.
        steps: of each run that are counted; they are cut into WINDOWS records.
        extrapolate: numbers of ranks to which the fit is carried on.
        ranks_per_node: of runs on several nodes; 0: all on one.
    """

    flags: tuple[str, ...]
    config: Config
    sizes: tuple[int, ...]
    modes: tuple[str, ...] = (STRONG, WEAK)
    rounds: int = 3
    steps: int = 20
    extrapolate: tuple[int, ...] = ()
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        for flag, value, least in (("rounds", self.rounds, 1), ("steps", self.steps, WINDOWS)):
            if value < least:
                raise ConfigError(f"--{flag} is {value}: it must be at least {least}")
        if len(self.sizes) < 2:
            raise ConfigError(
                f"--world-sizes has {len(self.sizes)} size: scaling is a ratio, so give two at least, such as 1,2"
            )
        if ENGINES.get(self.config.engine, ENGINES[PLAIN]).one_process and self.config.engine != "auto":
            raise ConfigError(f"--engine {self.config.engine} is one process whatever the size: leave it out")
        if counts_of(self.config.shares):
            raise ConfigError(
                f"--shares {self.config.shares} fits one number of ranks alone: leave it out, or give --shares auto"
            )

    @property
    def base(self) -> int:
        """The smallest size, with which all others are compared."""
        return self.sizes[0]

    @property
    def window(self) -> int:
        """Steps a record."""
        return -(-self.steps // WINDOWS)

    def check(self, micro_batch_size: int) -> None:
        """Raises ConfigError where ranks would have nothing to compute, or the batch cannot grow with them."""
        parts = self.config.batch_size // micro_batch_size
        cut = f"a step of {self.config.batch_size} samples has {parts} micro-batch{'es' * (parts > 1)}"
        most = self.base if self.modes == (WEAK,) else self.sizes[-1]
        if most > parts:
            weak = "" if self.modes == (WEAK,) else "; or give --weak, where the batch grows"
            raise ConfigError(
                f"--world-sizes has {most}, and {cut}: the other ranks would compute nothing; raise --batch-size or "
                f"lower --micro-batch-size{weak}"
            )
        if WEAK in self.modes and parts % self.base:
            raise ConfigError(
                f"--weak: {cut}, which {self.base} ranks cannot share alike, so it cannot grow with them; choose a "
                "--batch-size that they can, or --strong"
            )

    def settings(self, mode: str = "") -> list[Setting]:
        """What is run, without repetitions, by ranks; of one mode alone where it is given."""
        whole = self.config.batch_size
        found = {
            Setting(size, whole if kind == STRONG else whole * size // self.base)
            for kind in ((mode,) if mode else self.modes)
            for size in self.sizes
        }
        return sorted(found)

    def train_flags(self, setting: Setting, folder: str, micro_batch_size: int, windows: int = WINDOWS) -> list[str]:
        """The flags of `train` for one run: the given ones, then what a measurement sets.

        Args:
            folder: where the run's folder `run` is made.
            windows: records that are counted; 0: just as many steps as a run needs to begin.
        """
        steps = (windows + 1) * self.window if windows else 2
        own: dict[str, object] = {
            "experiment-name": "run",
            "save-dir": folder,
            "batch-size": setting.batch_size,
            "max-steps": _ENDLESS,
            "stop-at": steps,
            "extend-to": 0,
            "log-freq": self.window if windows else 2,
            "ckpt-freq": 0,
            "eval-freq": _ENDLESS,
            "patience": 0,
            "patience-metric": "",
        }
        if PROFILE in option_list():
            own[PROFILE] = ""
        if micro_batch_size:
            own["micro-batch-size"] = micro_batch_size
        told = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        return [*self.flags, *told, "--no-wandb", "--no-tensorboard"]


def ascending(flag: str, text: str) -> tuple[int, ...]:
    """`1,2,4` -> (1, 2, 4). Raises ConfigError for anything but ascending numbers from 1."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"{flag} is '{text}': it must be numbers of ranks such as 1,2,4")
    found = tuple(int(word) for word in words)
    if found[0] < 1 or any(after <= before for before, after in pairwise(found)):
        raise ConfigError(f"{flag} is '{text}': it must be ascending numbers from 1, each once, such as 1,2,4")
    return found


def order(settings: Sequence[Setting], rounds: int) -> list[tuple[int, Setting]]:
    """(round, setting) of every run: forwards, backwards, forwards..., so that a drift of the machine meets all."""
    return [
        (number, setting)
        for number in range(rounds)
        for setting in (settings if number % 2 == 0 else list(reversed(settings)))
    ]
