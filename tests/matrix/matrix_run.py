"""Runs the cases of the matrix on real processes: many cases in one group of processes for each world size.

    play([parse("..."), ...], folder)       # what each start said, and what it trained, lies in folder
    play(cases, folder, nodes=2)            # the same, where each node's ranks have a launcher of their own

A case is one to three starts of `lockstep.train`: up to where it is stopped or killed, and on to its end.
"""

import gc
import importlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import warm
from matrix_cases import UNDECLARED, Case, rounds_otherwise
from matrix_lightning import LIGHTNING, lightning_task
from matrix_oracle import (
    ALPHA,
    BETA2,
    CLIP,
    DECAY,
    FLOOR,
    GAMMA,
    HYSTERESIS,
    LR,
    RANK,
    SHARED,
    WARMUP,
    WEIGHT_DECAY,
    WINDOW,
    base_rate,
)
from matrix_subject import (
    BAD,
    BATCH,
    BITS,
    CHANGE,
    GROUP,
    HIDDEN,
    LIMITED,
    MICRO,
    STEPS,
    change,
    evaluates,
    steps_of,
    subject,
)
from matrix_trainer import trainer_task
from ranks import RankError, run
from shaken import shaken
from shell import environment, free_port

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.format import MANIFEST, read_manifest
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.config.sections import Checkpoint, Data, Fp16, Guards, Lora, Optim
from lockstep.distributed.world import World
from lockstep.engines.exact import Exchange
from lockstep.engines.optimizer_step import OptimizerStep
from lockstep.errors import LockstepError
from lockstep.guards import spike
from lockstep.guards.nonfinite import DeferredReader
from lockstep.transforms import precision

__all__ = [
    "BEST",
    "NAME",
    "RANK_SECONDS",
    "Start",
    "begins",
    "folder_of",
    "play",
    "play_all",
    "refused",
    "resumes_at",
    "shares",
    "starts",
    "task_of",
]

NAME = "run"
_STOPS = {"before": 5, "after": BAD + 1}
_BEFORE = {1: 1, 2: 1, 3: 2, 4: 2}  # where a run that changes its world and its engine begins
_ANOTHER = {"single": "ddp", "ddp": "fsdp", "fsdp": "zero", "zero": "ddp"}
_EVAL_MICRO = 3
_SAVES = 3  # steps from one save to the next
RANK_SECONDS = 20.0  # that a rank may be without progress
BEST = {"own": "r2:max", "trainer": "absolute:max", "lightning": "seen_step:max"}  # the last is of the training
_SPIKE = {"stop": "warn", "skip": "skip", "rollback": "rollback"}


class Start(NamedTuple):
    """One start of a case's run.

    Attributes:
        number: 0 for the first of its case.
        world, engine: the number of ranks, and what splits the model among them.
        parallel: what two of them divide; "none".
        stop_at: 0: to the end.
        kills: the last rank is killed after the step BAD.
    """

    case: Case
    number: int
    world: int
    engine: str
    stop_at: int
    kills: bool
    parallel: str

    @property
    def replicas(self) -> int:
        """The ranks or pairs of ranks that share a step."""
        return self.world if self.parallel == "none" else self.world // 2

    @property
    def meets_the_fault(self) -> bool:
        return not self.stop_at or self.stop_at > BAD


def starts(case: Case) -> list[Start]:
    """The starts of a case, in order. Half of those that are stopped began on other ranks, under another engine."""
    moves = zlib.crc32(str(case).encode()) % 2 and case.model != "buffer" and case.fault != "killed"
    here = (case.world, case.engine)
    whole = case.task == "quantized" and BITS[case.model] == "8bit"
    other = "ddp" if case.task == "manual" or case.step == "closure" or whole else _ANOTHER[case.engine]
    if other == "fsdp" and case.exact and case.step in UNDECLARED:
        other = "zero"
    there, there_parallel = here, case.parallel
    if moves and case.exact and rounds_otherwise(case):
        there = (2, "ddp")  # of one replica
    elif moves:
        there, there_parallel = (_BEFORE[case.world], other), "none"
    found = [(*here, 0, False, case.parallel)]
    if case.resume == "after":
        found.insert(0, (*there, _STOPS["after"], False, there_parallel))
    if case.fault == "killed":
        found.insert(0, (*here, 0, True, case.parallel))
    if case.resume == "before":
        found.insert(0, (*there, _STOPS["before"], False, there_parallel))
    return [Start(case, number, *each) for number, each in enumerate(found)]


def marks(case: Case) -> bool:
    """Whether the checkpoint of the stop says of itself that it is not finite: half of those that are stopped."""
    return case.resume != "none" and case.fault != "killed" and bool(zlib.crc32(str(case).encode()) & 2)


def resumes_at(case: Case) -> int:
    """The step from which the start after the stop goes on: a marked checkpoint is passed over."""
    stop = _STOPS.get(case.resume, 0)
    if not marks(case):
        return stop
    # An evaluation that is the best so far is saved too.
    every = (_SAVES, evaluates(case.task)) if case.task in BEST else (_SAVES,)
    # A step that runs out of memory is saved before, unless its forwards may have changed the task's state.
    before = BAD if case.fault == "oom" and stop > BAD and case.task != "own" else 0
    return max(before, *((stop - 1) // steps * steps for steps in every))


def _mark(folder: Path) -> None:
    path = checkpoint.newest(folder / NAME, say=print)
    assert path is not None
    spoilt = replace(read_manifest(path), not_finite=["model/spoilt"])
    (path / MANIFEST).write_bytes(spoilt.dump())


def begins(case: Case) -> tuple[int, ...]:
    """By step, what its backwards begin with: under DDP the ranks, among which it averages, but not in a start's first
    step, which is exchanged by hand, nor in float16, which would overflow sooner.

    A kill may lose the save of step 6 too: that its run then begins again earlier is left to the tolerance.
    """
    returns = case.fault == "killed" or (case.leaves_out and case.policy == "rollback")  # to that of step 6
    firsts = {0, resumes_at(case), BAD - 1 if returns else 0}
    if case.step in ("unfrozen", "frozen"):
        firsts.add(CHANGE)  # of an engine that is made again
    found = [1] * STEPS
    for start in reversed(starts(case)):  # the earlier ones took the first steps
        averages = start.engine in ("ddp", "zero") and case.precision != "fp16" and not case.exact
        for step in range(resumes_at(case) if start.stop_at else STEPS):
            found[step] = start.replicas if averages and step not in firsts else 1
    return tuple(found)


def folder_of(root: Path, case: Case) -> Path:
    return root / str(case)


def play(cases: list[Case], root: Path, nodes: int = 1) -> None:
    """Runs the cases; what each start said lies then in its case's folder, as START-RANK.json.

    With several nodes each start has as many launchers on loopback, or as many as it has ranks.
    """
    cases = list(dict.fromkeys(cases))
    for library in (
        "lightning.pytorch",
        "torchmetrics",
        "peft",
        "transformers",
        "bitsandbytes",
    ):  # which the ranks are forked with
        with suppress(ImportError):
            importlib.import_module(library)
    alive = [start for case in cases if case.fault != "killed" for start in starts(case)]
    with ThreadPoolExecutor(2) as pool:
        # Who waits for the end of the killed leaves a core free.
        for each in [pool.submit(_in_turn, groups, root, nodes) for groups in (_by_world(alive), _killed(cases))]:
            each.result()


def _by_world(found: list[Start]) -> list[list[Start]]:
    """The starts in one group of processes for each world size, and what its ranks divide.

    In the order in which a case may move from one to the next.
    """
    kinds = sorted({(start.world, start.parallel != "none", start.parallel) for start in found})
    return [[start for start in found if (start.world, start.parallel) == (world, kind)] for world, _, kind in kinds]


def _killed(cases: list[Case]) -> list[list[Start]]:
    """A group up to each kill; then the starts that go on."""
    kills, after = [], []
    for case in cases:
        if case.fault == "killed":
            mine = starts(case)
            kill = 1 + next(place for place, start in enumerate(mine) if start.kills)
            kills.append(mine[:kill])
            after += mine[kill:]
    return kills + _by_world(after)


def _in_turn(groups: list[list[Start]], root: Path, nodes: int) -> None:
    for todo in groups:
        _group(todo[0].world, [start for start in todo if not _broken(root, start.case)], root, nodes)


def _group(world: int, todo: list[Start], root: Path, nodes: int) -> None:
    """These starts, one after the other in the same processes; in new ones after a start that broke them."""
    while todo:
        seconds = 60.0 + 10.0 * len(todo)
        try:
            if nodes == 1 or world == 1:
                run(play_all, world, todo, root, timeout=seconds)
            else:
                _launch(min(nodes, world), world, todo, root, seconds)
            return
        except RankError as error:
            done = [start for start in todo if all(_said(root, start, rank).exists() for rank in range(world))]
            broken = next((start for start in todo if start not in done), todo[-1])  # or they could not take leave
            if not broken.kills:
                folder_of(root, broken.case).mkdir(parents=True, exist_ok=True)
                (folder_of(root, broken.case) / f"{broken.number}-broken.txt").write_text(str(error))
            todo = [start for start in todo[todo.index(broken) + 1 :] if start.case != broken.case]


def _launch(nodes: int, world: int, todo: list[Start], root: Path, seconds: float) -> None:
    """`run` of `play_all`, with a launcher for each of the nodes, on loopback. Raises RankError as that does."""
    port, handle, launchers = free_port(), root / f"todo-{time.monotonic_ns()}.pickle", []
    handle.write_bytes(pickle.dumps(todo))
    paths = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1], *filter(None, sys.path)]))
    for node in range(nodes):
        ranks = world // nodes + (node < world % nodes)
        own = [f"--nproc-per-node={ranks}", f"--node-rank={node}", f"--nnodes={nodes}", "--max-losses=0"]
        own += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        words = [warm.python(), "-m", "lockstep", "launch", *own, "--", _RANK, str(handle), str(root)]
        with (root / f"launcher-{node}.txt").open("w") as output:
            launchers.append(
                subprocess.Popen(words, env=environment(PYTHONPATH=paths), stdout=output, stderr=subprocess.STDOUT)
            )
    until = time.monotonic() + seconds
    for launcher in launchers:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(max(0.1, until - time.monotonic()))
    codes = [launcher.poll() for launcher in launchers]
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    if any(codes) or None in codes:
        said = "\n".join((root / f"launcher-{node}.txt").read_text() for node in range(nodes))
        raise RankError(-1, f"the launchers ended with {codes}\n{said}")


_RANK = str(Path(__file__).with_name("matrix_rank.py"))


def _broken(root: Path, case: Case) -> bool:
    return any(folder_of(root, case).glob("*-broken.txt"))


def _said(root: Path, start: Start, rank: int) -> Path:
    return folder_of(root, start.case) / f"{start.number}-{rank}.json"


def play_all(world, todo, root):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    world.timeout = RANK_SECONDS
    # A few norms are enough to judge a spike: the runs are short.
    spike._WINDOW, spike._LEAST, spike._EVERY = 16, 4, 1
    shaken()
    for start in todo:
        folder = folder_of(root, start.case)
        if world.is_main:
            _lay_out(start, folder)
        world.barrier()
        found = _one(world, start, folder)
        _said(root, start, world.rank).write_text(json.dumps(found))
        gc.collect()
        gc.freeze()  # each run ends with collections, which need not look at all that was imported


def _uploads(case: Case) -> bool:
    """With the task "options", which meets each other part: the run is in a store, and its folder there is judged."""
    return case.task == "options"


def _lay_out(start: Start, folder: Path) -> None:
    """Make the folder of a case. A run in a store goes on as on another machine, unless a kill interrupted uploads."""
    folder.mkdir(parents=True, exist_ok=True)
    if not _uploads(start.case):
        return
    if not start.number:
        (folder / NAME).symlink_to(folder / "store" / NAME)
    elif start.case.fault != "killed":
        shutil.rmtree(folder / "local")


def _one(world, start, folder):
    """One start: {"taken": steps, "error": line}; the model's buffers after the last step in buffers-RANK.pt."""
    case, taken, error, began = start.case, [], "", time.monotonic()
    torch.use_deterministic_algorithms(False)
    task = task_of(case, folder, start.parallel)
    DeferredReader.lag = int(
        case.reader == "late"
    )  # as from a device, which tells a step's norm after the next has begun
    Exchange.late = case.reader == "late"
    OptimizerStep.on_device = True if case.reader == "late" else None  # which decides there what becomes of a step
    precision.HOW = {"backend": "eager"}  # traced and guarded as for a device, without a C++ compiler's seconds
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with lockstep.Run(settings(start, folder), task, world) as session:
            average = Average(session.model)
            session.keep("average", average)
            for step in session:
                taken.append(step.record.step)
                if start.kills and step.record.step == BAD and world.rank == world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                average.update(session.model)
                change(case.step, case.model, task.made(), step.global_step)
                if step.record.step == steps_of(case.task) - 1:
                    buffers = {name: buffer.clone() for name, buffer in task.made().named_buffers()}
                    torch.save(buffers, folder / f"buffers-{world.rank}.pt")
        if start.stop_at and marks(case) and world.is_main:
            _mark(folder)
    except LockstepError as problem:
        error = f"{type(problem).__name__}: {problem}"
    if taken and _compiles(case) and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        error = error or "nothing was compiled"
    return {"taken": taken, "error": error, "seconds": time.monotonic() - began}


def task_of(case: Case, folder: Path, parallel: str) -> lockstep.Task:
    if case.task in LIGHTNING:
        return lightning_task(case.task, case.model, case.fault, folder)
    if case.task == "trainer":
        return trainer_task(case.model, case.fault, folder)
    return subject(case.task, case.model, case.fault, folder, case.step, parallel)


def refused(world: World, cases: list[Case], root: Path) -> list[str]:
    """What a start of each case says, on this rank; "" for one that is a run."""
    said = []
    for case in cases:
        folder = root / str(case)
        folder.mkdir(exist_ok=True)
        try:
            task = task_of(case, folder, case.parallel)
            lockstep.train(settings(starts(case)[0], folder), task, world)
            said.append("")
        except LockstepError as error:
            said.append(str(error))
    return said


class Average:
    """A user's own average of the weights, of which checkpoints know by `run.keep`."""

    def __init__(self, model):
        self.held = {name: parameter.detach().clone() for name, parameter in self.moving(model)}

    def moving(self, model):
        """All parameters but those of 8 bits, or two of 4."""
        return ((name, parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point())

    @torch.no_grad()
    def update(self, model):
        for name, parameter in self.moving(model):
            self.held[name].mul_(0.75).add_(parameter, alpha=0.25)

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        assert all(state[name] is tensor for name, tensor in self.held.items())  # filled in place


def _optim(case: Case) -> dict[str, object]:
    if case.task == "options":
        return {"schedule": "one-cycle", "groups": "*.bias: lr=2x", "ema": DECAY}
    if case.task == "muon":
        return {"name": "muon", "groups": f"{HIDDEN[case.model]}: muon", "muon_lr": 2 * LR}
    if case.task == "plateau":
        return {"schedule": "plateau", "gamma": GAMMA, "plateau_patience": 0}
    return {}


def shares(case: Case, engine: str, world: int) -> tuple[int, ...]:
    """Unequal ones, which the task "options" has where an engine can; () for equal ones."""
    able = engine in ("ddp", "zero") and case.parallel == "none"
    return {2: (3, 1), 3: (1, 2, 1)}.get(world, ()) if case.task == "options" and able else ()


def by_speed(case: Case, engine: str, world: int) -> bool:
    """Whether the shares change with every exchange.

    With the tasks "muon" and "stream", where an engine can and nothing follows from who computed what.
    """
    able = engine in ("ddp", "zero") and world in (2, 3) and case.parallel == "none"
    return case.task in ("muon", "stream") and able and case.model != "buffer"


def _audit(start: Start) -> float:
    """The share of micro-batches that are computed twice: with the tasks "options" and "muon", where an engine can."""
    able = start.engine in ("single", "ddp", "zero") and start.parallel == "none"
    return 0.2 if start.case.task in ("options", "muon") and able else 0.0


def _compiles(case: Case) -> bool:
    """With the task "plateau", so that a compiled model meets each other part that it works with."""
    return case.task == "plateau" and case.parallel == "none"


def _copies(case: Case) -> str:
    """Copies of the weights, where every start can have them: eager with "default", compiled with "plateau"."""
    alone = all(start.engine == "single" for start in starts(case))  # a run keeps them, on whatever engine it resumes
    have = case.precision == "bf16" and case.task in ("default", "plateau") and case.step != "closure"
    return "step" if alone and have else "forward"


def _more(case: Case) -> dict[str, object]:
    if case.task in ("adapters", "quantized"):
        return {"lora": Lora(rank=RANK, alpha=ALPHA)}
    if case.task == "own":  # the error falls, so that it counts on: only a resume could begin anew
        return {"patience": 99, "patience_metric": "absolute:max", "best_metric": BEST[case.task]}
    if case.task in SHARED:
        return {"best_metric": BEST[case.task]}
    if case.task == "plateau":
        limited = {"limit_eval_batches": LIMITED // _EVAL_MICRO, "eval_micro_batch_size": _EVAL_MICRO}
        scale = Fp16(loss_scale_window=WINDOW, hysteresis=HYSTERESIS) if case.precision == "fp16" else Fp16()
        limited |= {"fp16": scale, "min_delta": 10.0}  # so no evaluation but the first is better
        return limited | {"eval_workers": case.workers // 2}
    return {}


def _sizes(case: Case) -> dict[str, object]:
    """The size of a step: in samples, or with "hooked" in lists of a batch sampler, with "adapters" in tokens."""
    if case.task == "adapters":
        return {"batch_tokens": BATCH, "micro_batch_tokens": MICRO}
    if case.task == "hooked":
        return {"batch_size": BATCH // MICRO}
    return {"batch_size": BATCH, "micro_batch_size": MICRO}


def settings(start: Start, folder: Path) -> Config:
    case = start.case
    return Config(
        experiment_name=NAME,
        save_dir=f"file://{folder}/store" if _uploads(case) else str(folder),
        max_steps=STEPS if case.task == "stream" else 0,  # whose epoch has as many
        stop_at=start.stop_at,
        lr=base_rate(case.task),
        **_sizes(case),
        on_oom="smaller" if case.fault == "oom" else "stop",
        log_freq=4,
        ckpt_freq=_SAVES,
        eval_freq=evaluates(case.task),
        engine=start.engine,
        parallel=Parallel(**({} if start.parallel == "none" else {start.parallel: 2})),
        precision=case.precision,
        weight_copies=_copies(case),
        exact=case.exact,
        compile=_compiles(case),
        profile="8:9" if case.task == "adapters" else "",
        report=case.task == "default",
        csv=True,
        timeout=RANK_SECONDS,
        data=Data(
            workers=case.workers,
            drop_last=case.task == "options",
            shuffle_shards=GROUP if case.task == "muon" else 0,
        ),
        optim=Optim(
            clip=0.0 if case.task == "manual" else CLIP,  # which clips itself
            warmup_steps=WARMUP,
            floor=FLOOR,
            weight_decay=WEIGHT_DECAY,
            beta2=BETA2,
            **_optim(case),
        ),
        checkpoint=Checkpoint(keep=10, local_dir=str(folder / "local")),
        guards=Guards(
            nonfinite=case.policy,
            spike=_SPIKE[case.policy],
            straggler=0.0,
            audit=_audit(start),
            loss_check=3,  # leaves no trace: each run is compared with a plain loop
        ),
        shares="auto"
        if by_speed(case, start.engine, start.world)
        else ",".join(map(str, shares(case, start.engine, start.world))) or "equal",
        **_more(case),
    )
