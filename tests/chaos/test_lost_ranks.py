"""A rank is lost in a real run and the others go on: at each place where that could go wrong, to the same bits.

Most are marked slow, since each is a run of three processes or four; those that are not lose a rank in the middle of a
step and take a new one in, and lose two within each other's recovery.
"""

import dataclasses
import importlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import hub_files
import pytest
import warm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import (
    BEAT,
    Run,
    arguments,
    end,
    finish,
    forked,
    launch,
    preloaded,
    start,
    torchrun,
    until_idle,
    until_step,
    workers,
)

from lockstep import checkpoint
from lockstep.report.goodput import goodput

WRITE = "lockstep.checkpoint.write:write_file"
UPDATE = "lockstep.engines.optimizer_step:OptimizerStep.__call__"
BLOCK = "lockstep.models.gpt:Block.forward"
LOSS = "lockstep.tasks.language_model:CausalLM.loss"
PLACE = "lockstep.training.recovery.regroup:_restore"
FOUR = ("--micro-batch-size", "1", "--eval-freq", "5", "--optim.ema", "0.9")  # micro-batches a step


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The result of an undisturbed run of one process."""
    run = launch(data, tmp_path_factory.mktemp("whole"), *FOUR, processes=0, python=warm.python())
    assert run.code == 0, run.said
    return run.mark()


def survived(data, out, whole, faults, *flags, processes=3, **more):
    """A run with these faults that came to its end, and to the same bits."""
    run = launch(data, out, *FOUR, *flags, faults=faults, processes=processes, losses=8, **more)
    assert run.code == 0, run.said
    assert run.mark()[:3] == whole[:3], run.said
    return run


def test_lost_rank_is_replaced_and_others_keep_their_processes(data, tmp_path):
    """Rank 0, which holds the folder and writes the records."""
    long = [{"rank": rank, "at": LOSS, "do": "sleep", "seconds": 0.05, "always": True} for rank in range(3)]
    flags, slow = (*FOUR, "--max-steps", "150"), [*long, {**long[0], "replaced": 1}]
    process = start(arguments(data, tmp_path / "lost", *flags, processes=3, losses=1), slow)
    try:
        until_step(tmp_path / "lost", 7, process)
        before = workers(process)
        os.kill(before[0], signal.SIGKILL)
        log, deadline = tmp_path / "lost" / "default" / "logs" / "rank-00000.log", time.monotonic() + 60
        while "3 ranks continue" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        after = workers(process)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75, said
    text = log.read_text()
    assert re.search(
        r"WARNING rank 0 was the first to end, killed by SIGKILL, at step \d+.*; the others continue", text
    )
    assert re.search(r"INFO 2 ranks continue after step \d+ \(after", text)
    assert re.search(r"INFO 3 ranks continue after step \d+, 1 of them new \(after", text)
    assert (after[1], after[2]) == (before[1], before[2])
    assert after[0] != before[0]
    taken = int(re.search(r"saved after step (\d+) of 150", said)[1])
    alone = launch(data, tmp_path / "whole", *flags, "--stop-at", str(taken), processes=0, python=warm.python())
    saved = [path.name for path in sorted((tmp_path / "lost" / "default" / "checkpoints").glob("step-*"))]
    assert saved[-1] == f"step-{taken:08d}"
    lost = Run(0, said, 0.0, tmp_path / "lost" / "default")
    assert lost.mark()[:3] == alone.mark()[:3]
    assert lost.state["losses"] == 1
    spent = goodput(lost.folder / "timeline.jsonl")  # begun by the process that was killed, ended by another
    (once,) = spent.starts
    assert (once.first, once.last, once.ended, once.losses) == (0, taken, "preempted", 2)
    assert spent.seconds["recovery"] > 0
    assert 0 <= spent.seconds["unknown"] < 0.5 * spent.wall  # what the killed one had not written


@pytest.mark.slow
def test_new_process_is_forked_from_the_preloaded_one(data, tmp_path):
    long = [{"rank": rank, "at": LOSS, "do": "sleep", "seconds": 0.05, "always": True} for rank in range(2)]
    flags, slow = (*FOUR, "--max-steps", "400"), [*long, {**long[1], "replaced": 1}]
    process = start(arguments(data, tmp_path / "lost", *flags, processes=2, losses=2), slow)
    log, deadline = tmp_path / "lost" / "default" / "logs" / "rank-00000.log", time.monotonic() + 60
    try:
        until_step(tmp_path / "lost", 7, process)
        while preloaded(process) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        until_idle(preloaded(process))  # it says to the launcher alone when it has loaded
        os.kill(workers(process)[1], signal.SIGKILL)
        while "2 ranks continue" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        ranks = workers(process)
        assert forked(ranks[1])
        os.kill(preloaded(process), signal.SIGKILL)
        time.sleep(1.0)
        assert (workers(process), preloaded(process), process.poll()) == (ranks, None, None)
        process.send_signal(signal.SIGUSR2)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75, said
    taken = re.search(r"saved after step (\d+) of 400", said)[1]
    alone = launch(data, tmp_path / "whole", *flags, "--stop-at", taken, processes=0, python=warm.python())
    assert Run(0, said, 0.0, tmp_path / "lost" / "default").mark()[:3] == alone.mark()[:3]


def test_second_rank_is_lost_during_recovery_from_the_first(data, tmp_path, whole):
    faults = [
        {"rank": 1, "step": 6, "at": BEAT, "do": "kill"},
        {"rank": 2, "step": 5, "at": PLACE, "do": "kill"},
    ]
    run = survived(data, tmp_path, whole, faults, "--data.workers", "1", processes=4, python=warm.python())
    assert run.state["losses"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        ({"step": 0, "at": BEAT}, ()),
        ({"step": 7, "at": UPDATE}, ()),
        ({"step": 4, "at": "lockstep.training.evaluation:evaluate"}, ()),
        ({"step": 4, "at": WRITE}, ()),
        ({"step": 4, "at": WRITE}, ("--checkpoint.mode", "sync")),
        ({"step": 13, "at": UPDATE}, ()),  # the last step
        ({"step": 7, "at": "lockstep.engines.exact:piece_of_sum"}, ()),
        ({"step": 7, "at": LOSS}, ("--data.workers", "2")),
        ({"step": 7, "at": "lockstep.distributed.exchange:StepExchange.send"}, ()),
        ({"step": 7, "at": "lockstep.distributed.exchange:StepExchange.totals"}, ()),
    ],
)
def test_wherever_a_rank_is_lost_no_sample_is(data, tmp_path, whole, rank, fault, flags):
    survived(data, tmp_path, whole, [{**fault, "rank": rank, "do": "kill"}], *flags)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("more", [(), ("--data.workers", "1")])
def test_loss_when_only_one_rank_made_the_update(data, tmp_path, whole, behind, more):
    """Rank 3 is lost with its sum handed out; another hears of it before its update, the rest after it."""
    faults = [
        {"rank": behind, "step": 7, "at": UPDATE, "do": "raise", "error": "lockstep.errors:PeerError"},
        {"rank": 3, "step": 7, "at": UPDATE, "do": "kill"},
    ]
    run = survived(data, tmp_path, whole, faults, *more, processes=4)
    assert "continue after step 8" in run.said


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.05, 0.5])
def test_a_signal_comes_while_a_lost_rank_is_replaced(data, tmp_path, pause):
    """The others save and end; the new process, which is still at its start, is no failure."""
    process = start(arguments(data, tmp_path, *FOUR, "--max-steps", "100000", processes=3, losses=8))
    try:
        until_step(tmp_path, 5, process)
        os.kill(workers(process)[1], signal.SIGKILL)
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75, said
    assert "saved after step" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    ["lockstep.training.start.load:broadcast_state", "lockstep.training.step.components:build_components", PLACE],
)
@pytest.mark.parametrize("ranks", [(1, 2), (1, 0), (0, 1)])
def test_two_are_lost_one_after_the_other(data, tmp_path, whole, second, ranks):
    one, other = ranks
    call = 2 if ":works" in second else 1
    faults = [
        {"rank": one, "step": 7, "at": UPDATE, "do": "kill"},
        {"rank": other, "at": second, "do": "kill", "call": call},
    ]
    survived(data, tmp_path, whole, faults, processes=4)


@pytest.mark.slow
def test_two_are_lost_at_once(data, tmp_path, whole):
    survived(data, tmp_path, whole, [{"rank": r, "step": 7, "at": BEAT, "do": "kill"} for r in (0, 3)], processes=4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_within_a_rollback(data, tmp_path, rank):
    """The rollback leaves step 8 out, with the loss and without it."""
    bad = [{"rank": r, "step": 7, "at": BLOCK, "do": "nan", "call": 1} for r in range(3)]
    flags = (*FOUR, "--guards.nonfinite", "rollback")
    quiet = launch(data, tmp_path / "quiet", *flags, faults=bad, processes=3)
    assert quiet.code == 0, quiet.said
    kill = {"rank": rank, "at": "lockstep.training.start.build:build_together", "do": "kill", "call": 2}
    run = launch(data, tmp_path / "lost", *flags, faults=[*bad, kill], processes=3, losses=8)
    assert run.code == 0, run.said
    assert run.mark()[:3] == quiet.mark()[:3]


def slowly(faults, ranks=3):
    """The faults in a run whose steps are long enough for a new process to come."""
    long = {"at": LOSS, "do": "sleep", "seconds": 0.1, "always": True, "replaced": "any"}
    return [*faults, *({**long, "rank": rank} for rank in range(ranks))]


@pytest.mark.slow
def test_new_process_that_differs_is_refused_and_fails_nothing(data, tmp_path):
    faults = [
        {"rank": 1, "step": 4, "at": BEAT, "do": "kill"},
        {
            "rank": 1,
            "at": "lockstep.training.recovery.regroup:run_digest",
            "do": "result",
            "value": "other",
            "replaced": 1,
        },
    ]
    flags = (*FOUR, "--max-steps", "60")
    run = launch(data, tmp_path, *flags, faults=slowly(faults), processes=3, losses=8)
    assert run.code == 0, run.said
    assert "this process cannot join: its configuration, data or code differs" in run.said
    assert run.state["losses"] == 1


@pytest.mark.slow
def test_new_process_that_ends_at_its_start_is_replaced(data, tmp_path):
    faults = [
        {"rank": 1, "step": 4, "at": BEAT, "do": "kill"},
        {"rank": 1, "at": "lockstep.training.start.build:build_together", "do": "kill", "replaced": 1},
    ]
    flags = (*FOUR, "--max-steps", "100")
    run = launch(data, tmp_path, *flags, faults=slowly(faults), processes=3, losses=8, timeout=200.0)
    assert run.code == 0, run.said
    assert "3 ranks continue" in run.log() + run.said


@pytest.mark.slow
def test_a_stopped_rank_is_ended_and_the_others_go_on(data, tmp_path, whole):
    fault = {"rank": 1, "step": 7, "at": BEAT, "do": "stop"}
    run = survived(data, tmp_path, whole, [fault], "--timeout", "5")
    assert "rank 1 failed first at step 7" in run.said
    assert "it sent no heartbeat while the others waited for it, and was killed; the others continue" in run.said


TEXT = "SkipConnection: the socket's peer was reset, NCCL timeout"


def test_r23_first_error_is_absorbed_and_a_repeat_ends_the_run(data, tmp_path):
    """Rank 0 meets it when it computes what rank 1 left, with a text that could be of a lost connection."""
    fault = {"step": 7, "at": LOSS, "do": "raise", "text": TEXT}
    faults = [{**fault, "rank": 1}, {**fault, "rank": 0, "call": 3}]  # of two micro-batches
    run = launch(data, tmp_path, *FOUR, faults=faults, processes=2, losses=8, python=warm.python())
    assert run.code == 1, run.said
    (absorbed,) = (line for line in run.said.splitlines() if line.endswith("the others continue"))
    assert absorbed.startswith(f"warning: rank 1 failed first at step 8 (loading or computing): RuntimeError: {TEXT}")
    assert run.last.startswith(
        f"lockstep: error: rank 0 failed first at step 8 (loading or computing): RuntimeError: {TEXT}"
    )
    assert run.said.count("Traceback (most recent call last)") == 1  # the same of both
    assert run.steps == list(range(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("start_by", ["launch", "torchrun"])
def test_r23_error_names_its_rank_on_every_engine_and_launcher(data, tmp_path, engine, rank, start_by):
    fault = {"rank": rank, "step": 7, "at": LOSS, "do": "raise", "text": TEXT}
    started = torchrun if start_by == "torchrun" else arguments
    process = start(started(data, tmp_path, *FOUR, "--engine", engine), [fault])
    run = finish(process, tmp_path, time.monotonic())
    assert run.code == 1, run.said
    told = [line for line in run.said.splitlines() if f"RuntimeError: {TEXT}" in line][-1]
    assert f"rank {rank} " in told
    assert "step 8 (loading or computing)" in told
    assert (told == run.last) == (start_by == "launch")  # torchrun ends with a line of its own
    assert run.said.count("raise kind(") == 1
    assert run.said.count(f"RuntimeError: {TEXT}") == 3 - (start_by == "launch")  # torchrun's table has it too
    assert run.said.count(f"rank {1 - rank} lost the other ranks") <= 1


@pytest.mark.slow
def test_error_on_all_ranks_ends_the_run_with_its_cause(data, tmp_path):
    fault = {"step": 7, "at": LOSS, "do": "raise", "always": True, "replaced": "any"}
    faults = [{**fault, "rank": rank} for rank in range(3)]
    run = launch(data, tmp_path, *FOUR, faults=faults, processes=3, losses=8)
    assert run.code == 1, run.said
    assert "RuntimeError: planted" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_exact_the_reducers_are_left_too(data, tmp_path, rank):
    """DDP's own exchange, which is under way in the backward when the rank is lost."""
    command = [word for word in arguments(data, tmp_path, *FOUR, processes=3, losses=1) if word != "--exact"]
    process = start(command, [{"rank": rank, "step": 7, "at": UPDATE, "do": "kill"}])
    said = process.communicate(timeout=90)[0]
    end(process)
    assert process.returncode == 0, said
    assert Run(0, said, 0.0, tmp_path / "default").state["losses"] == 1


def test_at_the_defaults_a_lost_rank_leaves_the_cut_of_its_run(data, tmp_path):
    """Three ranks cut a step in three, and so do those that go on: the draws of the model are those of that cut."""
    flags = ("--batch-size", "6", "--micro-batch-size", "auto", "--log-freq", "1")
    command = [word for word in arguments(data, tmp_path / "lost", *flags, processes=3, losses=1) if word != "--exact"]
    process = start([warm.python(), *command[1:]], [{"rank": 1, "step": 7, "at": BEAT, "do": "kill"}])
    said = process.communicate(timeout=90)[0]
    end(process)
    lost = Run(process.returncode, said, 0.0, tmp_path / "lost" / "default")
    assert lost.code == 0, said
    assert lost.state["losses"] == 1
    assert lost.state["plan"]["micro_batch_size"] == 2
    flags = (*flags[:2], "--micro-batch-size", "2", *flags[4:])
    command = [word for word in arguments(data, tmp_path / "alone", *flags, processes=0) if word != "--exact"]
    process = start([warm.python(), *command[1:]])
    alone = Run(process.wait(90), process.communicate()[0], 0.0, tmp_path / "alone" / "default")
    assert alone.code == 0, alone.said
    *_, trace = lost.mark()
    *_, wanted = alone.mark()
    assert [step for step, _ in trace] == [step for step, _ in wanted]
    assert [loss for _, loss in trace] == pytest.approx([loss for _, loss in wanted], rel=1e-5)


@pytest.mark.slow
def test_loss_with_split_states_ends_all_with_the_reason(data, tmp_path):
    fault = {"rank": 1, "step": 7, "at": BEAT, "do": "kill"}
    run = launch(data, tmp_path, *FOUR, "--engine", "zero", faults=[fault], processes=2, losses=8)
    assert run.code == 1, run.said
    assert "--engine zero splits the states over the ranks" in run.last


@pytest.mark.slow
def test_with_too_few_left_the_run_ends(data, tmp_path):
    fault = {"rank": 1, "step": 7, "at": BEAT, "do": "kill"}
    command = arguments(data, tmp_path, *FOUR, processes=2, losses=8)
    at = command.index("--max-losses")
    process = start([*command[:at], "--min-ranks", "2", *command[at:]], [fault])
    said = process.communicate(timeout=90)[0]
    end(process)
    assert process.returncode == 1, said
    assert "1 of 2 processes are left, but --min-ranks is 2" in said.splitlines()[-1]


@pytest.mark.slow
def test_a_lost_rank_0_hands_the_upload_to_another(data, tmp_path, whole):
    """The new rank 0 holds the store's URL, and the store has the newest checkpoints of the run at its end."""
    url, fault = f"file://{tmp_path}/store", {"rank": 0, "step": 7, "at": UPDATE, "do": "kill"}
    flags = (*FOUR, "--checkpoint.local-dir", str(tmp_path), "--checkpoint.keep", "2")
    run = launch(data, url, *flags, faults=[fault], processes=3, losses=8)
    assert run.code == 0, run.said
    there, local = tmp_path / "store", tmp_path / "file" / str(tmp_path)[1:] / "store"
    assert Run(0, run.said, 0.0, there / "default").mark()[:3] == whole[:3], run.said
    steps = checkpoint.list_steps(local / "default")
    assert checkpoint.list_steps(there / "default") == steps
    assert not (there / "default" / "owner.json").exists()
    assert "not uploaded" not in run.said


@pytest.mark.slow
def test_lost_rank_with_a_quantized_base_is_replaced_bitwise(tmp_path):
    """The new process quantizes the base again."""
    pytest.importorskip("bitsandbytes", reason="the extra quantized is not installed")
    pytest.importorskip("peft", reason="the extra peft is not installed")
    weights = hub_files.write_model(tmp_path / "weights", weights=True)
    rows = hub_files.write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in hub_files.texts(30)])
    data = ["--dataset-name", str(rows), "--data.cache", str(tmp_path / "cache"), "--seq-len", "16"]
    base = ["--model-name", str(weights), "--model.pretrained", "--model.load-in", "4bit", "--lora.rank", "2"]
    steps = ["--batch-size", "3", "--micro-batch-size", "1", "--max-steps", "8", "--log-freq", "1", "--exact"]
    train = ["--device", "cpu", *data, *base, *steps]

    def write(out):
        return [*train, "--save-dir", str(out)]

    assert replaced(tmp_path, write, experiment="default")


@pytest.mark.slow
def test_lost_rank_of_a_trl_trainer_is_replaced_bitwise(tmp_path, monkeypatch):
    """The new process loads the reference model again."""
    pytest.importorskip("trl", reason="the extra trl is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "adapters")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    trainers = importlib.import_module("trl_trainers")

    def write(out):
        script, given = trainers.write_script(out, "dpo", max_steps=8, per_device_train_batch_size=1)
        return ["--hf-script", str(script), "--hf-args", str(given), "--batch-size", "3", "--exact"]

    assert replaced(tmp_path, write, experiment="out")


def replaced(folder, write, experiment):
    """Whether a run that loses rank 1 of three, and takes a new one in, has the bits of one process.

    `write` writes a run's files into a folder, and returns its arguments.
    """

    def trained(out, *launcher, faults=()):
        command = [warm.python(), "-m", "lockstep", *launcher, "train", *write(out)]
        run = dataclasses.replace(finish(start(command, faults), out, time.monotonic()), folder=out / experiment)
        assert run.code == 0, run.said
        return run

    alone = trained(folder / "alone")
    fault = [{"rank": 1, "step": 4, "at": BEAT, "do": "kill"}]
    launcher = ["launch", "--nproc-per-node", "3", "--max-restarts", "0", "--max-losses", "1", "--"]
    lost = trained(folder / "lost", *launcher, faults=fault)
    return lost.state["losses"] == 1 and lost.mark()[:3] == alone.mark()[:3]
