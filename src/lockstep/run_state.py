"""Define the state of a run: all that a checkpoint stores except tensors.

    state = RunState.from_json(json.loads(text), "step-00000500/state.json")
    state.global_step                   # typed fields, not keys
    json.dumps(state.to_json())         # the content of state.json in a checkpoint and in the run's folder

The fields and their types define the format. A field with its `absent` value, None by default, is not written. The
fields of `place`, `running` and `selection` are keys of the outermost object.
"""

import contextlib
import dataclasses
import functools
import json
import types
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from lockstep.errors import CheckpointError

__all__ = [
    "AdapterState",
    "BestEvaluation",
    "Extension",
    "LauncherState",
    "PatienceCount",
    "PlateauCount",
    "Position",
    "RunState",
    "RunningSums",
    "Selection",
    "SharesState",
    "SpikeState",
    "StreamState",
    "TrainedSet",
]

# As `absent`: the field is always written.
_ALWAYS = object()
_WRITTEN: dict[str, Any] = {"absent": _ALWAYS}
_FLAT: dict[str, Any] = {"flat": True}
# A float represents every integer below this exactly. Sizes and counts are below.
_LARGEST = 1 << 53


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its plan and its data. Epochs are counted in samples.

    Attributes:
        global_step: steps trained.
        epoch: full passes over the training data.
        epoch_step: steps in the current epoch, rounded up.
        epoch_progress: share of the current epoch that was trained on.
        num_batches_remaining: steps that the current epoch still takes, rounded up.
        position: position of the next step's first sample in the endless sample stream.
    """

    global_step: int = 0
    epoch: int | None = None
    epoch_step: int | None = None
    epoch_progress: float | None = None
    num_batches_remaining: int | None = None
    position: int = 0


@dataclass(frozen=True, slots=True)
class RunningSums:
    """Sums over the steps since the last training record.

    Attributes:
        loss: sum of the steps' finite losses.
        missed: steps without a finite loss.
        numbers: exact sums of the task's own numbers, by name.
        steps: number of steps since the record; None: those since the last multiple of `--log-freq`.
    """

    loss: float = field(default=0.0, metadata={"key": "running_loss"})
    missed: int = field(default=0, metadata={"key": "running_missed"})
    numbers: dict[str, list[float]] = field(default_factory=dict, metadata={"key": "running_numbers"})
    steps: int | None = field(default=None, metadata={"key": "running_steps"})


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The best evaluation by one metric.

    Attributes:
        step: number of steps trained before it.
        loss: its loss.
        metric: the metric of the comparison; in the oldest files always the loss.
        value: of that metric; None: the loss.
    """

    step: int
    loss: float
    metric: str = "loss"
    value: float | None = None

    @property
    def metric_value(self) -> float:
        """The value of `metric`."""
        if self.value is None:
            return self.loss
        return self.value


@dataclass(frozen=True, slots=True)
class PatienceCount:
    """The state of `--patience`.

    Attributes:
        best: the best evaluation by --patience-metric.
        since: evaluations since then.
    """

    best: BestEvaluation | None = field(default=None, metadata=_WRITTEN)
    since: int = 0


@dataclass(frozen=True, slots=True)
class PlateauCount:
    """The state of `--optim.schedule plateau`.

    Attributes:
        bad: evaluations in a row without improvement.
        fallen: drops of the rate.
        cooling: evaluations that remain until they count again, after a drop.
    """

    bad: int = 0
    fallen: int = 0
    cooling: int = 0


@dataclass(slots=True)
class Selection:
    """The best evaluation so far, and the counts of patience and plateau.

    Attributes:
        best: the best evaluation by `--best-metric`.
        since_best: evaluations since then; None before the first one.
        patience: of `--patience-metric`; None without one.
        plateau: of the plateau schedule; None without one.
    """

    best: BestEvaluation | None = field(default=None, metadata=_WRITTEN)
    since_best: int | None = None
    patience: PatienceCount | None = None
    plateau: PlateauCount | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the selection as JSON values."""
        return _encode_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; a value of a wrong type becomes its default."""
        return _read(cls, data, "", lenient=True)


@dataclass(frozen=True, slots=True)
class TrainedSet:
    """The parameters that a run trains, by their names in checkpoints.

    Attributes:
        made: names of those that the engine's state covers: trained when it was last built, or earlier.
        now: names of those that require gradients now.
        since: name -> the first step that trained it, if it was unfrozen during the run.
    """

    made: list[str]
    now: list[str]
    since: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the set as JSON values."""
        return _encode_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], file: str) -> Self:
        """Read the result of `to_json`, from `file`.

        Raises CheckpointError for a value of a wrong type.
        """
        return _read(cls, data, file)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The adapters of `--lora.rank`, and their base.

    Attributes:
        base: fingerprint of the base's weights; "" before they were read.
        base_from: checkpoint that has the base's weights; "": the task's model has them.
        modules_to_save: modules that are trained in full.
        rank, alpha, dropout: of `--lora`, with `alpha` resolved.
        targets, turned: see `models.lora.Adapters`.
        dtype: of the adapters' parameters.
    """

    base: str = ""
    base_from: str = ""
    modules_to_save: list[str] = field(default_factory=list)
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    targets: list[str] | str = ""
    turned: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension of the plan by `--extend-to`.

    Attributes:
        asked: the flag's value.
        at: step at which the run was extended.
        before: steps of the plan before it.
        max_steps, num_epochs: the new length; one of them is 0.
    """

    asked: int | str
    at: int
    before: int = field(metadata={"key": "from"})
    max_steps: int
    num_epochs: int


@dataclass(frozen=True, slots=True)
class SpikeState:
    """The state of the spike guard; see `guards.spike.Spike`.

    Attributes:
        norms: the last gradient norms.
        count: norms so far.
        limits: (first step, limit) of the current limit and the next.
        usual: limit by `norms`, as last estimated; None: infinite, or the last limit's.
        trained: hash of the trained set of the norms.
    """

    norms: list[float] = field(default_factory=list)
    count: int = 0
    limits: list[tuple[int, float]] = field(default_factory=list)
    usual: float | None = None
    trained: int | None = None


@dataclass(frozen=True, slots=True)
class SharesState:
    """The measurements of `--shares auto`.

    Attributes:
        costs: time for a unit of work, by rank.
        most: maximum number of micro-batches, by rank; []: no limit.
    """

    costs: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StreamState:
    """The place in a training set without an index; see `data/streams.py`.

    Attributes:
        epoch: of the stream.
        turn: of the epoch: the next one that may be a step.
        epoch_steps, epoch_samples, epoch_empty: steps, samples and empty micro-batches of this epoch so far.
        samples: of all epochs so far.
        last_steps: steps of the epoch before; 0 in the first one.
        cursors: lane -> a place from which it can be opened, as `data.streams.Cursor`.
    """

    epoch: int = 0
    turn: int = 0
    epoch_steps: int = 0
    epoch_samples: int = 0
    epoch_empty: int = 0
    samples: int = 0
    last_steps: int = 0
    cursors: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return _encode_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], file: str) -> Self:
        """Read the result of `to_json`, from `file`.

        Raises CheckpointError for a value of a wrong type.
        """
        return _read(cls, data, file)


@dataclass(frozen=True, slots=True)
class LauncherState:
    """The launcher's job that the last start belonged to.

    Attributes:
        id: of the job; "" without a launcher.
        restarts_before: restarts of the run before this job.
    """

    id: str
    restarts_before: int


@dataclass(slots=True)
class RunState:
    """The state of a run, except tensors.

    Attributes:
        place: position in the plan; None: nothing was trained.
        running: sums over the steps since the last training record.
        selection: the best evaluation so far, and counts since.
        evaluation_due: the checkpoint was written before its step's evaluation.
        run_id: drawn at the run's first start; its run in a tracker has it. None: of an older version.
        plan: option -> value, which must be unchanged in a resume. {}: nothing was saved.
        origin: step and sample position since which steps have their current size.
        extended: the last extension of the plan.
        world_size: ranks that wrote the checkpoint.
        compile: the model is compiled.
        reduction: "sum", "mean" or "micro-batch" as declared, or what the trial detected: "mean", "total" or "whole";
            see `lockstep.task.UNDIVIDED`.
        evaluation_graph: an evaluation needs gradients, as the trial detected.
        unsaved: names of what the task's loss changes and no checkpoint has, as the trial found.
        gpt: settings of a built-in GPT, as `models.gpt.GPTConfig` has them.
        lora: adapters and their base; None: a whole model.
        trained: the trained parameters; None: they never changed.
        groups: settings of each of the optimizer's groups that changed during the run, see `GroupSettings.changes`.
        not_finite_at_start: names of the tensors that were not finite when the run started; None: not checked yet.
        spike: of the spike guard.
        shares: of `--shares auto`.
        stream: the place in a training set without an index.
        contents: digests of a few samples of each set, by label (see `guards.contents`).
        steps_left_out: steps that a guard skipped.
        losses: ranks that were lost while the others continued.
        restarts: restarts by a launcher after a failure.
        job: the launcher's job that counts restarts.
        hooks: state of the task's hooks.
        others: keys of other versions of lockstep, stored unchanged.
    """

    place: Position | None = field(default=None, metadata=_FLAT)
    running: RunningSums = field(default_factory=RunningSums, metadata=_FLAT)
    selection: Selection = field(default_factory=Selection, metadata=_FLAT)
    evaluation_due: bool = field(default=False, metadata={"absent": False})
    run_id: str | None = None
    plan: dict[str, Any] = field(default_factory=dict, metadata={"absent": {}})
    origin: tuple[int, int] | None = None
    extended: Extension | None = None
    world_size: int | None = None
    compile: bool | None = None
    reduction: str | None = None
    evaluation_graph: bool | None = None
    unsaved: list[str] | None = None
    gpt: dict[str, Any] | None = None
    lora: AdapterState | None = None
    trained: TrainedSet | None = None
    groups: list[dict[str, Any]] | None = None
    not_finite_at_start: list[str] | None = None
    spike: SpikeState | None = None
    shares: SharesState | None = None
    stream: StreamState | None = None
    contents: dict[str, Any] | None = None
    steps_left_out: int | None = None
    losses: int | None = None
    restarts: int | None = None
    job: LauncherState | None = None
    hooks: dict[str, Any] | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def global_step(self) -> int:
        """Steps trained; 0 for a new run."""
        if self.place:
            return self.place.global_step
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values; the hooks' state is not copied."""
        return _encode_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], file: str = "state.json", *, lenient: bool = False) -> Self:
        """Read the result of `to_json`.

        Args:
            data: the JSON object.
            file: its file, for errors.
            lenient: ignore values of a wrong type, as a report of a damaged folder does.

        Raises:
            CheckpointError: a value has a wrong type.
        """
        return _read(cls, data, file, lenient=lenient)

    def copy(self) -> "RunState":
        """Return a deep copy. Raises TypeError if the hooks' state is not JSON."""
        return RunState.from_json(json.loads(json.dumps(self.to_json())))


# --- JSON

_T = TypeVar("_T")
# The field of a part that keeps unknown keys.
_OTHERS = "others"


def _encode_fields(part: Any) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, entry in _format_of(part.__class__).items():
        value = getattr(part, name)
        if name == _OTHERS:
            data |= value
        elif entry.flat:
            data |= _encode_fields(value) if value is not None else {}
        elif entry.absent is _ALWAYS or value != entry.absent:
            data[entry.key] = _encode(value)
    return data


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _encode_fields(value)
    if isinstance(value, list | tuple):
        return [_encode(element) for element in value]
    return value


class _JsonField(NamedTuple):
    """The JSON form of a field.

    Attributes:
        kind: type of the value.
        flat: the part whose keys belong to the outermost object; else None.
        absent: the value that is not written.
        required: the field has no default.
    """

    key: str
    kind: Any
    flat: Any
    absent: Any
    required: bool


@functools.cache
def _format_of(part: Hashable) -> dict[str, _JsonField]:
    """Return the JSON form of each field of a part."""
    types_by_name = get_type_hints(part)
    keys = dict[str, _JsonField]()
    # mypy takes the cached argument for any hashable object; it is always a dataclass.
    for spec in dataclasses.fields(part):  # type: ignore[arg-type]
        field_type = types_by_name[spec.name]
        metadata = spec.metadata
        # The first argument of `Position | None` is Position.
        flat = (get_args(field_type) or (field_type,))[0] if metadata.get("flat") else None
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        keys[spec.name] = _JsonField(metadata.get("key", spec.name), field_type, flat, metadata.get("absent"), required)
    return keys


class _MismatchError(Exception):
    """A JSON value whose type is not its field's."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__(key)
        self.key = key
        self.value = value


def _read(part: type[_T], data: Mapping[str, Any], file: str, *, lenient: bool = False) -> _T:
    try:
        values: _T = part(**_decode_fields(part, dict(data), lenient=lenient))
    except _MismatchError as error:
        raise CheckpointError(
            f"{file}: '{error.key}' has a value of type {type(error.value).__name__}, which this version cannot read; "
            "update lockstep, or resume from an older checkpoint"
        ) from None
    return values


def _decode_fields(part: Any, data: dict[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """Remove a part's keys from `data`, and return its values by field.

    Raises:
        _MismatchError: a value is missing or has a wrong type.
    """
    values: dict[str, Any] = {}
    for name, entry in _format_of(part).items():
        if name == _OTHERS:
            continue
        if entry.flat:
            # A part whose keys are all absent stays at its default.
            inner = _decode_fields(entry.flat, data, lenient=lenient)
            values |= {name: entry.flat(**inner)} if inner else {}
        elif entry.key in data:
            try:
                values[name] = _decode(entry.kind, data.pop(entry.key), entry.key)
            except _MismatchError:
                if not lenient:
                    raise
        elif entry.required:
            raise _MismatchError(entry.key, None)
    if _OTHERS in _format_of(part):
        values[_OTHERS] = data
    return values


def _decode(kind: Any, value: Any, key: str) -> Any:
    """Convert a JSON value to this type. Raises _MismatchError if it has another."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind is Any or (value is None and kind is types.NoneType):
        return value
    if origin is types.UnionType:
        return _decode_union(arguments, value, key)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        # mypy does not see that `kind` is a class.
        return kind(**_decode_fields(kind, dict(value)))  # type: ignore[operator]
    if origin is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], element, key) for name, element in value.items()}
    if origin is list and isinstance(value, list):
        return [_decode(arguments[0], element, key) for element in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_decode(kind, element, key) for kind, element in zip(arguments, value, strict=True))
    if _is_plain(kind, value):
        return value
    raise _MismatchError(key, value)


def _decode_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    for candidate in kinds:
        with contextlib.suppress(_MismatchError):
            return _decode(candidate, value, key)
    raise _MismatchError(key, value)


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a string, bool or number has this type.

    An integer is a float, too, if a float represents it exactly.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return kind in (int, float) and abs(value) < _LARGEST
    return kind in (str, bool, float) and type(value) is kind
