"""Which mistake is switched on in which script, and what `lockstep compare` has to say of it.

Written down before anything was compared. A case is one run of the correct script on one process, and one of the
script with the mistake on two. `check` is how cases.py sees, from the scripts' journals alone, that it does something:

    weights     the weights part from those of the correct script, first in update `step`
    ranks       the two ranks end with other weights
    report      the evaluation that the script prints is another one

Steps are updates counted from 0. `causes` are regular expressions, all of which must be found in what is said.
"""

from dataclasses import dataclass, replace
from itertools import product

from toy import MOMENT

__all__ = ["CASES", "HEALTHY", "LEFT_OUT", "SCRIPTS", "Case", "Healthy", "grid", "saved_at", "with_settings"]

SCRIPTS = ("ddp", "accelerate", "lightning", "hf")
_LAST = -1  # in place of a step: where the run is resumed
# (script, mistake): the step with an order of padding, with equal labels and with ragged ones; it hangs on the losses
_OF_LOSSES = {("lightning", "no-sync-dist"): (10, 25)}


@dataclass(frozen=True)
class Case:
    """A planted mistake.

    Attributes:
        flags: of both runs.
        stages: any of these is right; steps: any of these too.
    """

    script: str
    mistake: str
    steps: tuple[int, ...]
    stages: tuple[str, ...]
    causes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    check: str = "weights"
    resumed: bool = False
    own: bool = False  # one that these scripts alone have, not one of `lockstep verify`'s
    both: bool = False  # one process has the mistake too

    note: str = ""  # behind the name: which of the settings of `grid`

    @property
    def name(self) -> str:
        return f"{self.script}:{self.mistake}" + (f" [{self.note}]" if self.note else "")


def saved_at(script: str) -> int:
    """After how many updates the checkpoint is written from which a script is resumed; Lightning goes by epochs."""
    return 5 if script == "lightning" else 7


# name: (steps, stages, causes, flags, check, resumed)
_FOURTEEN = {
    "per-rank-weights": ((0,), ("initial weights",), ("weights", "rank"), (), "ranks", False),
    "overlapping-data": (
        *((0,), ("data",), ("same samples|twice|every rank|all ranks|both ranks|overlap|not shared|more than once",)),
        *((), "weights", False),
    ),
    "dropped-sample": ((_LAST,), ("data",), ("resum", "late|skip|left out|dropped|ahead|far"), (), "weights", True),
    "unsent-gradient": (
        *((0,), ("reduction",), ("reduc|exchang|no_sync|synchroni|averaged|all-reduce",)),
        *(("--accumulate", "2"), "ranks", False),
    ),
    "local-batchnorm": ((0,), ("buffers", "forward"), ("BatchNorm",), ("--batchnorm",), "weights", False),
    "rank-average": (
        *((0,), ("normalisation",), ("items|labels|tokens", "per rank|rank's own|own rank|each rank|average")),
        *(("--ragged",), "weights", False),
    ),
    "other-rate": ((MOMENT,), ("optimizer", "schedule"), ("learning rate|\\brate", "rank"), (), "ranks", False),
    "rank-dropout": (
        *((0,), ("randomness", "forward"), ("random|seed|generator", "rank"), ("--dropout",), "weights", False),
    ),
    "extra-step": (
        *((MOMENT, MOMENT + 1), ("optimizer",), ("twice|more|extra|additional|again", "rank"), (), "ranks", False),
    ),
    "bit-flip": (*((MOMENT,), ("weights",), ("between|outside|since|changed|apart",), (), "ranks", False),),
    "clip-before-unscale": ((0,), ("clipping",), ("clip",), ("--clip", "0.05"), "weights", False),
    "padded-evaluation": (
        *((4, 5), ("evaluation",), ("twice|duplicate|pad|repeat|more than once|gather_for_metrics",)),
        *((), "report", False),
    ),
    "swapped-state": ((_LAST,), ("optimizer state",), ("resum|state", "rank"), (), "ranks", True),
}

# "in the scripts of one framework only"
_OWN = {
    **{
        (script, "same-seed"): (
            (0,),
            ("randomness",),
            ("same random numbers", "rank"),
            ("--dropout",),
            "weights",
            False,
        )
        for script in SCRIPTS
    },
    ("ddp", "half-dropped"): ((4,), ("data",), ("left out",), (), "weights", False),
    ("ddp", "train-mode"): ((4, 5), ("evaluation",), ("training mode",), ("--dropout",), "report", False),
    ("kinds", "own-buffer"): (
        (0,),
        ("buffers",),
        ("buffer of its own", "rank"),
        ("--kind", "buffer"),
        "weights",
        False,
    ),
    ("kinds", "left-average"): (
        *((0,), ("normalisation",), ("per rank|average",), ("--kind", "left", "--ragged"), "weights", False),
    ),
    ("kinds", "absolute-positions"): (
        *((0,), ("forward",), ("padded on the left", "position"), ("--kind", "left", "--ragged"), "weights", False),
    ),
    ("ddp", "no-set-epoch"): ((5,), ("data",), ("set_epoch",), (), "weights", False),
    ("ddp", "clip-before-reduction"): (
        *((0,), ("clipping", "reduction"), ("clip",), ("--accumulate", "2", "--clip", "0.05"), "weights", False),
    ),
    ("accelerate", "scheduler-twice"): (
        *((1,), ("schedule",), ("twice|2 times|as often|as fast|num_processes|2 steps",), (), "weights", False),
    ),
    ("accelerate", "split-batches"): (
        *((0,), ("data",), ("half|fewer|smaller|4 (samples )?(instead|rather)|split_batches|4 .*8|8 .*4",)),
        *((), "weights", False),
    ),
    ("accelerate", "double-division"): (
        *((0,), ("normalisation",), ("0\\.5|half|accumul|divided",), ("--accumulate", "2"), "weights", False),
    ),
    ("ddp", "no-zero-grad"): ((1,), ("gradient",), ("zero_grad",), (), "weights", False),
    ("accelerate", "no-zero-grad"): ((1,), ("gradient",), ("zero_grad",), ("--clip", "0.3"), "weights", False),
    ("hf", "frozen"): ((0,), ("parameters",), ("frozen",), (), "weights", False),
    ("kinds", "gan-no-zero-grad"): ((2,), ("gradient",), ("zero_grad",), ("--kind", "gan"), "weights", False),
    ("kinds", "unrestored"): (
        *((5,), ("weights",), ("average of weights|other than the optimizer",), ("--kind", "ema"), "weights", False),
    ),
    ("kinds", "uneven-average"): (
        *((0,), ("normalisation",), ("per rank|average",), ("--kind", "uneven"), "weights", False),
    ),
    ("kinds", "stale-optimizer"): (
        *((0,), ("parameters",), ("other tensors than the model",), ("--kind", "fsdp2"), "weights", False),
    ),
    ("kinds", "frozen"): ((0,), ("parameters",), ("frozen",), ("--kind", "fsdp2"), "weights", False),
    ("kinds", "no-restore"): (
        *((0,), ("weights",), ("perturbation|not taken back",), ("--kind", "sam"), "weights", False),
    ),
    ("lightning", "no-set-epoch"): ((5,), ("data",), ("set_epoch",), (), "weights", False),
    ("lightning", "clip-before-reduction"): (
        *((0,), ("clipping", "reduction"), ("clip",)),
        *(("--manual", "--accumulate", "2", "--clip", "0.05"), "weights", False),
    ),
    ("lightning", "no-sync-dist"): (
        *(
            (15,),
            ("schedule", "optimizer"),
            ("learning rate|\\brate|plateau", "rank"),
            ("--plateau",),
            "ranks",
            False,
        ),
    ),
    ("hf", "tokens-per-device"): (
        *((0,), ("normalisation",), ("items|labels|tokens", "per rank|rank's own|own rank|each rank|average")),
        *(("--ragged",), "weights", False),
    ),
    ("hf", "batch-per-device"): (
        *((0,), ("data",), ("16|twice|double|larger|more samples|global batch",), (), "weights", False),
    ),
    ("hf", "ignored-data-skip"): (
        (_LAST,),
        ("data",),
        ("resum", "repeat|again|beginning|anew|skip"),
        (),
        "weights",
        True,
    ),
}

# (script, mistake) -> why it cannot be made there. On a CPU Accelerate, Lightning and the Trainer
# have no loss scaler, so there clip-before-unscale is a scale of one's own, taken back too late.
LEFT_OUT: dict[tuple[str, str], str] = {
    (script, "per-rank-seed"): "healthy where ranks draw for samples of their own: see the pairs with dropout"
    for script in SCRIPTS
}
_IN_BOTH = ("absolute-positions",)  # mistakes that one process has too, where it pads otherwise

_FLAGS = {  # where a script needs others to have the mistake
    ("hf", "unsent-gradient"): (),
    ("lightning", "unsent-gradient"): ("--manual", "--accumulate", "2"),
}


def _case(script: str, mistake: str, row: tuple, own: bool) -> Case:
    steps, stages, causes, flags, check, resumed = row
    steps = tuple(saved_at(script) if step == _LAST else step for step in steps)
    return Case(
        script,
        mistake,
        steps,
        stages,
        causes,
        _FLAGS.get((script, mistake), flags),
        check,
        resumed,
        own,
        mistake in _IN_BOTH,
    )


CASES = [
    *(_case(s, m, row, False) for s in SCRIPTS for m, row in _FOURTEEN.items() if (s, m) not in LEFT_OUT),
    *(_case(script, mistake, row, True) for (script, mistake), row in _OWN.items()),
]


@dataclass(frozen=True)
class Healthy:
    """A pair of runs of the correct script.

    Attributes:
        one, two: (processes, flags). Of a resumed pair the second run goes on from a checkpoint of two processes.
        equal: "bits": the same bits; "rounding": the same but for rounding; "random": dropout's masks cannot agree.
    """

    script: str
    name: str
    one: tuple[int, tuple[str, ...]]
    two: tuple[int, tuple[str, ...]]
    equal: str
    resumed: bool = False


def grid() -> tuple[list[Case], list[Healthy]]:
    """Return all cases in both dtypes, padded before and after the shift, with equal and with ragged labels.

    A mistake that only ragged labels show is not made with equal ones. Of a healthy pair the table has the labels.
    """
    cases, pairs = [], []
    for dtype, order in product(("float32", "bf16"), ("pad-shift", "shift-pad")):
        few, healthy = with_settings(dtype, order)
        for case, ragged in product(few, (False, True)):
            if ragged or "--ragged" not in case.flags:
                flags = tuple(dict.fromkeys((*case.flags, *("--ragged",) * ragged)))
                note = f"{case.note} {'ragged' if ragged else 'equal'}"
                cases.append(replace(case, flags=flags, note=note, steps=_steps(case, flags)))
        pairs += healthy
    return cases, pairs


def with_settings(dtype: str, order: str) -> tuple[list[Case], list[Healthy]]:
    """Return the table with each script in a dtype and with an order of padding; "" keeps the script's own."""
    more = (*("--dtype", dtype) * (dtype != ""), *("--order", order) * (order != ""))
    how = " ".join(filter(None, (dtype, order)))
    cases = [replace(case, flags=case.flags + more, note=how, steps=_steps(case, case.flags + more)) for case in CASES]
    pairs = []
    for pair in HEALTHY:
        one, two = ((world, flags + more) for world, flags in (pair.one, pair.two))
        pairs.append(replace(pair, name=f"{pair.name} [{how}]" if how else pair.name, one=one, two=two))
    return cases, pairs


def _steps(case: Case, flags: tuple[str, ...]) -> tuple[int, ...]:
    """Return the steps in which a case is right: with an order of padding the losses are others."""
    moments = _OF_LOSSES.get((case.script, case.mistake))
    return case.steps if moments is None or "--order" not in flags else (moments["--ragged" in flags],)


def _pairs(script: str) -> list[Healthy]:
    halves = ("--accumulate", "2")
    weighted = () if script == "lightning" else ("--ragged",)  # Lightning does not know a whole group's labels ahead
    return [
        Healthy(script, "plain", (1, ()), (2, ()), "rounding"),
        Healthy(script, "ragged labels", (1, ("--ragged",)), (2, ("--ragged",)), "rounding"),
        Healthy(script, "dropout", (1, ("--dropout",)), (2, ("--dropout",)), "random"),
        Healthy(script, "ragged dropout", (1, ("--ragged", "--dropout")), (2, ("--ragged", "--dropout")), "random"),
        Healthy(script, "repeated", *[(2, ("--ragged", "--dropout", "--clip", "0.3"))] * 2, "bits"),
        Healthy(script, "shake clipped", *[(n, ("--shake", "--clip", "0.3")) for n in (1, 2)], "rounding"),
        Healthy(script, "accumulated", (1, (*halves, *weighted)), (2, weighted), "rounding"),
        Healthy(script, "resumed", (2, ("--ragged",)), (2, ("--ragged",)), "bits", resumed=True),
    ]


def _kind(kind: str) -> list[Healthy]:
    flags = ("--kind", kind, *("--ragged",) * (kind == "left"))
    return [
        Healthy("kinds", kind, (1, flags), (2, flags), "rounding"),
        Healthy("kinds", f"{kind} repeated", (2, (*flags, "--ragged")), (2, (*flags, "--ragged")), "bits"),
    ]


HEALTHY = [pair for script in SCRIPTS for pair in _pairs(script)]
HEALTHY += [pair for kind in ("gan", "ema", "uneven", "fsdp2", "sam", "buffer", "left") for pair in _kind(kind)]
