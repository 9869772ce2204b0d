"""The average of the weights under DeepSpeed's ZeRO: of the float32 copies, in parts. Skipped without the package."""

import importlib.util
import warnings

import pytest
import torch
from ranks import run
from small_runs import config
from support import build, digest, whole
from toys import Ragged, train

import lockstep
from lockstep import checkpoint
from lockstep.engines.ema import EMAEngine, use_average
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"
)
TASK = Ragged(dtype=torch.float32)
DECAY = 0.9


def states(made, world, *groups):
    return {name: whole(t, world) for name, t in made.state_dict().items() if name.startswith(groups)}


def _answer(model, task):
    """What the model says, with the parameters that its forward reads."""
    batch = task.collate([task.dataset("train")[place] for place in range(3)])
    with torch.no_grad():
        return task.loss(model, batch)


def _averaged(world, stage, offload, dtype):
    """Whether the average is the formula over the applied steps, and what the model computes with within."""
    warnings.simplefilter("ignore")  # the package's own
    task = Ragged(dtype=dtype)
    made, batches = build(world, task, "deepspeed", ema=DECAY, zero_stage=stage, cpu_offload=offload)
    plain, same_batches = build(world, task, "deepspeed", zero_stage=stage, cpu_offload=offload)
    wanted = {n.replace("model/", "average/"): t.double() for n, t in states(made, world, "model/").items()}
    updates, found = 0, []
    for engine, loader, limits in ((plain, same_batches, None), (made, batches, [1e9, 1e9, -1.0, 1e9])):
        for step, micro in loader.from_step(0):
            for batch in micro:
                with engine.accumulate(batch is micro[-1]):
                    engine.backward(task.loss(engine.model, batch.data), batch.weight / 50)
            result = engine.step(1.0, limits[step] if limits else -1.0 if step == 2 else 1e9)
            if engine is plain or not result.applied:
                continue
            before, share = states(made, world, "model/"), 1 - min(DECAY, (1 + updates) / (10 + updates))
            updates += 1
            for name, average in wanted.items():
                if name.replace("average/", "model/") in before:
                    average += share * (before[name.replace("average/", "model/")].double() - average)
            with use_average(made):  # an evaluation after each step: training must not notice
                inside, answer = states(made, world, "model/"), _answer(made.model, task)
            after = states(made, world, "model/")
            found.append(all(torch.equal(after[name], tensor) for name, tensor in before.items()))
    averages = states(made, world, "average/")
    for name, tensor in averages.items():
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-6)
        found.append(torch.equal(tensor, inside[name.replace("average/", "model/")]))
    by_hand = task.model()
    by_hand.load_state_dict({n.removeprefix("average/"): t for n, t in averages.items()}, strict=False)
    torch.testing.assert_close(answer, _answer(by_hand, task))
    trained, other = states(made, world, "model/", "optimizer/"), states(plain, world, "model/", "optimizer/")
    found += [torch.equal(trained[name], other[name]) for name in other]
    return updates, len(averages), all(found)


CASES = [(2, True, "bfloat16")]  # `test_a_whole_run_evaluates_it_keeps_it_and_loads_it` has stage 3
CASES += [pytest.param(stage, False, "float32", marks=pytest.mark.slow) for stage in (0, 1, 3)]


@pytest.mark.parametrize(("stage", "offload", "dtype"), CASES)
def test_it_is_the_formula_and_the_weights_train_as_without_it(stage, offload, dtype):
    """With bfloat16 it is the average of the float32 weights, of which the model computes with the rounded ones."""
    count = len(dict(TASK.model().named_parameters()))
    assert run(_averaged, 2, stage, offload, getattr(torch, dtype)) == [(3, count, True)] * 2


def _crossed(world, folder, stages):
    """Runs of six steps, saved after three and gone on with; and the state in engines that did not write it."""
    warnings.simplefilter("ignore")
    found = []
    for stage in stages:
        made, batches = build(world, TASK, "deepspeed", ema=DECAY, zero_stage=stage, count=6)
        train(world, made, batches, TASK, stop=3)
        checkpoint.save(folder, stage + 1, made.state_dict(), {}, world, engine="deepspeed")
        path = checkpoint.path_of(folder, stage + 1)
        saved = digest(made, world)
        train(world, made, batches, TASK, start=3)
        wanted = digest(made, world)
        for name, options in (("deepspeed", {"zero_stage": stage}), ("deepspeed", {"zero_stage": 1}), ("fsdp", {})):
            again, batches = build(world, TASK, name, ema=DECAY, count=6, **options)
            state = again.state_dict()
            checkpoint.load(path, state, world)
            again.load_state_dict(state)
            found.append(digest(again, world) == saved)
            if options == {"zero_stage": stage}:
                train(world, again, batches, TASK, start=3)
                found.append(digest(again, world) == wanted)
    return found


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 2), marks=pytest.mark.slow)])
def test_checkpoints_hold_it_under_the_names_of_every_engine(tmp_path, stages):
    assert run(_crossed, 2, tmp_path, stages, timeout=150) == [[True] * (4 * len(stages))] * 2


def _begun(world):
    """A state without an average begins one at the weights; what is not in memory is refused."""
    warnings.simplefilter("ignore")
    plain, batches = build(world, TASK, "deepspeed", zero_stage=3)
    train(world, plain, batches, TASK, stop=2)
    made, _ = build(world, TASK, "deepspeed", ema=DECAY, zero_stage=3)
    made.load_state_dict(plain.state_dict())
    state = states(made, world, "model/", "average/")
    same = [torch.equal(t, state[n.replace("average/", "model/")]) for n, t in state.items() if n[:3] == "ave"]
    masters = plain.inner.masters
    masters._flat._zero.swap_optimizer = True
    try:
        EMAEngine(plain, TASK.model(), DECAY, masters)
    except ConfigError as error:
        return all(same), str(error)
    return all(same), ""


def test_average_begins_at_the_weights_and_refuses_a_disk():
    line = "--optim.ema: zero_optimization.offload_optimizer keeps the weights on nvme; offload them to cpu"
    assert run(_begun, 2) == [(True, line)] * 2


def _whole_run(world, folder, name, options):
    """The evaluations of a run of twelve steps."""
    warnings.simplefilter("ignore")
    given = config(folder, engine=name, engine_options=options, eval_freq=4, optim={"ema": 0.8}, precision="float32")
    folder_of = lockstep.train(given, Ragged(dtype=torch.float32), world).folder
    return [record["evaluation/loss"] for record in read(folder_of / "metrics.jsonl") if "evaluation/loss" in record]


def test_a_whole_run_evaluates_it_keeps_it_and_loads_it(tmp_path):
    wanted = run(_whole_run, 2, tmp_path / "ddp", "ddp", {})[0]
    found = run(_whole_run, 2, tmp_path / "ds", "deepspeed", {"zero_stage": 3})
    assert found[0] == found[1]
    assert found[0] == pytest.approx(wanted, rel=1e-4)
    models = [lockstep.load(tmp_path / name / "r", TASK, "last", ema=True) for name in ("ddp", "ds")]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
