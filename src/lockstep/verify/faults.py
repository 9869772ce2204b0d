"""Make a planted fault by its name."""

from lockstep.errors import ConfigError
from lockstep.verify.fault import Fault
from lockstep.verify.faults_data import (
    DroppedOnResume,
    LocalBatchNorm,
    OverlappingShards,
    PaddedEvaluation,
    RankSeed,
    TiedDropout,
)
from lockstep.verify.faults_engine import (
    BitFlip,
    ClipBeforeUnscale,
    ExtraStep,
    OtherRate,
    RankAverage,
    RankWeights,
    SwappedState,
    UnsentGradient,
)

__all__ = ["fault"]

_FAULTS: dict[str, type[Fault]] = {
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
    """Make the fault of that name; "" is none. Raises ConfigError for an unknown one."""
    if not name:
        return Fault()
    if name not in _FAULTS:
        raise ConfigError(f"--plant '{name}': choose one of {', '.join(_FAULTS)}")
    return _FAULTS[name]()
