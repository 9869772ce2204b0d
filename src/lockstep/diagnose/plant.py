"""The faults that `lockstep verify --plant NAME` plants, and that the tests find again.

Each changes one part of a run on some rank, as the mistakes do that people make. The comparison knows nothing of them.
"""

from lockstep.diagnose.fault import Fault
from lockstep.diagnose.plant_data import (
    DroppedOnResume,
    OverlappingShards,
    PaddedEvaluation,
    RankSeed,
    TiedDropout,
)
from lockstep.diagnose.plant_engine import (
    BitFlip,
    ClipBeforeUnscale,
    ExtraStep,
    OtherRate,
    RankAverage,
    RankWeights,
    SwappedState,
    UnsentGradient,
)
from lockstep.diagnose.plant_model import LocalBatchNorm
from lockstep.errors import ConfigError

__all__ = ["FAULTS", "fault"]

FAULTS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        RankSeed,
        RankWeights,
        OverlappingShards,
        DroppedOnResume,
        UnsentGradient,
        LocalBatchNorm,
        RankAverage,
        OtherRate,
        TiedDropout,
        ExtraStep,
        BitFlip,
        ClipBeforeUnscale,
        PaddedEvaluation,
        SwappedState,
    )
}


def fault(name: str) -> Fault:
    """The fault of that name; "" is none. Raises ConfigError for an unknown one."""
    if not name:
        return Fault()
    if name not in FAULTS:
        raise ConfigError(f"--plant '{name}': choose one of {', '.join(FAULTS)}")
    return FAULTS[name]()
