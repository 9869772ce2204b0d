"""Adapters: what is trained, what a checkpoint holds, the same bits however they are trained, and another base."""

import importlib.util
import re
import sys
import warnings

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn
from toys import Network, Ragged, Sentences

import lockstep
from lockstep import checkpoint, cli
from lockstep.errors import CheckpointError, ConfigError, LockstepError, ResumeError

pytest.importorskip("peft", reason="the extra peft is not installed")

LORA = {"rank": 2, "dropout": 0.1}


class Tuned(Ragged):
    """A network that counts as trained; its weights are those of `model_seed`."""

    defaults = "fine-tuning"
    model_seed = 5
    base = torch.bfloat16

    def model(self):
        torch.manual_seed(self.model_seed)
        return Network(0.1, dtype=self.base)

    def loss(self, model, batch):
        logits = model(batch["input"]).flatten(0, 1).double()
        return nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


class Another(Tuned):
    model_seed = 6


def lora(folder, **changes):
    return config(folder, **{"lora": LORA, "max_steps": 6, "precision": "float32"} | changes)


def held(path):
    """(what a run's newest checkpoint holds of the model, name -> dtype and bits; its state)."""
    from lockstep.checkpoint.read import open_tensors

    newest = checkpoint.newest(path, say=print)
    with open_tensors(newest) as whole:
        names = [name for name in whole.contents if name.startswith("model/")]
        return {name: whole.read(name).clone() for name in names}, checkpoint.read_state(newest)


def digest(world, folder, changes, stop, task=None):
    task = task or Tuned()
    before = {name: p.clone() for name, p in task.model().state_dict().items()}
    with lockstep.Run(lora(folder, **changes, stop_at=stop), task, world) as made:
        for _ in made:
            pass
    if type(task) is Tuned and world.size == 1:  # elsewhere the model is in shards
        after = {name.replace(".base_layer", ""): p for name, p in made.model.state_dict().items()}
        assert all(torch.equal(after[name], p) and after[name].dtype is p.dtype for name, p in before.items())
    return checkpoint.fingerprint(checkpoint.newest(made.result.folder, say=print)), made.status


def each(world, cases):
    return [digest(world, *case) for case in cases]


def test_adapters_alone_are_trained_and_kept_and_the_base_stays(tmp_path):
    run_ = lockstep.Run(lora(tmp_path), Tuned())
    run_()
    kept, state = held(tmp_path / "r")
    assert kept
    assert all(".lora_" in name and tensor.dtype is torch.float32 for name, tensor in kept.items())
    layers = [name for name in kept if ".lora_B." in name]
    assert len(layers) == 4, "each linear layer of two blocks, and not the head, which is the embedding"
    assert all(kept[name].any() for name in layers), "B began as zeros"
    base = Tuned().model().state_dict()
    after = {name.replace(".base_layer", ""): p for name, p in run_.model.state_dict().items() if ".lora_" not in name}
    assert after.keys() == base.keys()
    assert all(torch.equal(after[name], p) and p.dtype is torch.bfloat16 for name, p in base.items())
    assert state["lora"]["base"] == checkpoint.fingerprint_of(dict(base))
    assert re.fullmatch(state["lora"]["targets"], "blocks.1.3")
    assert not re.fullmatch(state["lora"]["targets"], "blocks.1"), "whose last part is that of a layer"


def test_lora_is_bitwise_on_every_engine_world_and_resume(tmp_path):
    def case(name, stop=0, **changes):
        return tmp_path, {"exact": True, "experiment_name": name, **changes}, stop

    [[(wanted, _)]] = run(each, 1, [case("one", engine="ddp")])
    names = ("ddp", "zero", "fsdp")
    firsts = [case(name, 3, engine=name) for name in names]  # a half on two ranks
    found = run(each, 2, [case(f"{name}2", engine=name) for name in names] + firsts)
    assert [bits for bits, _ in found[0][:3]] == [wanted] * 3
    rest = [case(name, engine=name) for name in names]  # the other half on four
    assert [bits for bits, _ in run(each, 4, rest, timeout=120.0)[0]] == [wanted] * 3


def test_a_step_is_what_plain_torch_makes_of_the_formula(tmp_path):
    """One layer, W x + alpha / rank * B A x, by hand and in float64."""
    torch.manual_seed(0)
    data = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)

    class Plain(lockstep.Task):
        defaults, reduction = "fine-tuning", "sum"

        def model(self):
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(4, 3).double())

        def dataset(self, split):
            return list(zip(*data, strict=True)) if split == "train" else None

        def loss(self, model, batch):
            return (model(batch[0]) - batch[1]).square().sum()

    settings = {"optim": {"name": "sgd", "momentum": 0.0, "clip": 0.0, "schedule": "constant", "warmup_steps": 0}}
    settings["optim"]["weight_decay"] = 0.0
    more = {"precision": "float64", "max_steps": 3, "micro_batch_size": 2, "lora": {"rank": 2, "alpha": 3.0}}
    run_ = lockstep.Run(config(tmp_path, **settings, **more), Plain())
    with run_:
        layer = run_.model[0]
        a, b = (getattr(layer, name)["default"].weight.detach().clone() for name in ("lora_A", "lora_B"))
        assert not b.any()
        for _ in run_:
            pass
    a.requires_grad_(), b.requires_grad_()
    weight, bias = Plain().model()[0].weight.detach(), Plain().model()[0].bias.detach()
    for _ in range(3):
        out = data[0] @ (weight + 1.5 * b @ a).T + bias
        loss = (out - data[1]).square().sum() / 8
        grads = torch.autograd.grad(loss, (a, b))
        with torch.no_grad():
            for p, g in zip((a, b), grads, strict=True):
                p -= 0.01 * g
    kept, _ = held(tmp_path / "r")
    torch.testing.assert_close(kept["model/0.lora_A.default.weight"], a.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept["model/0.lora_B.default.weight"], b.detach(), rtol=1e-12, atol=1e-12)


def test_base_stays_frozen_midway_but_adapters_may_be_frozen(tmp_path):
    run, taken = lockstep.Run(lora(tmp_path), Tuned()), []

    def unfreeze():
        for step in run:
            taken.append(step.global_step)
            named = dict(run.model.named_parameters())
            if step.global_step == 1:
                named[next(name for name in named if ".lora_A." in name)].requires_grad_(False)
            if step.global_step == 3:
                named[next(name for name in named if "base_layer.weight" in name)].requires_grad_(True)

    with pytest.raises(LockstepError, match=r"base_layer\.weight.*modules.to.save"):
        unfreeze()
    assert taken == [1, 2, 3]


def test_another_base_is_refused_wherever_the_adapters_are_taken(tmp_path):
    lockstep.train(lora(tmp_path), Tuned())
    line = "adapters are for another base: .* give the model and the revision"
    with pytest.raises(ResumeError, match=line):
        lockstep.train(lora(tmp_path, resume_anyway=True), Another())
    with pytest.raises(CheckpointError, match=line):
        lockstep.load(tmp_path / "r", Another())
    begun = lora(tmp_path, experiment_name="new", init_from=str(tmp_path / "r"))
    with pytest.raises(ResumeError, match=line):
        lockstep.train(begun, Another())
    assert not (tmp_path / "new").exists()


def test_a_run_of_adapters_does_not_go_on_without_them(tmp_path):
    lockstep.train(lora(tmp_path, stop_at=2), Tuned())
    with pytest.raises(ResumeError, match="adapters of rank 2: give --lora.rank 2"):
        lockstep.train(config(tmp_path, max_steps=6, precision="float32"), Tuned())
    with pytest.raises(ResumeError, match=r"--lora.rank 2 \(now 3\)"):
        lockstep.train(lora(tmp_path, lora={"rank": 3, "dropout": 0.1}), Tuned())
    begun = config(tmp_path, max_steps=6, precision="float32", experiment_name="new", init_from=str(tmp_path / "r"))
    with refuses(CheckpointError, "--init-from", "adapters", "--lora.rank"):
        lockstep.train(begun, Tuned())


def test_what_was_loaded_is_what_was_trained(tmp_path):
    run_ = lockstep.Run(lora(tmp_path), Tuned())
    run_()
    batch = Sentences(4)[0]["input"][None]
    model = lockstep.load(tmp_path / "r", Tuned(), which="last")
    with torch.no_grad():
        assert torch.equal(model(batch), run_.model.eval()(batch))
        assert not torch.equal(model(batch), Tuned().model().eval()(batch))


def test_a_new_run_begins_with_the_adapters_of_another(tmp_path):
    lockstep.train(lora(tmp_path), Tuned())
    begun = lora(tmp_path, experiment_name="new", init_from=str(tmp_path / "r"), lr=0.0, max_steps=1)
    lockstep.train(begun, Tuned())
    before, after = held(tmp_path / "r")[0], held(tmp_path / "new")[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_the_base_may_be_a_whole_run_also_in_another_dtype(tmp_path):
    """The base is then that checkpoint, also when the other run has gone on."""
    base = {"experiment_name": "base", "max_steps": 4, "precision": "float64", "ckpt_freq": 0}
    lockstep.train(config(tmp_path, **base, stop_at=2), Ragged())
    weights, _ = held(tmp_path / "base")
    tuned = lora(tmp_path, init_from=str(tmp_path / "base"), precision="float32", stop_at=3)
    lockstep.train(tuned, Ragged())
    lockstep.train(config(tmp_path, **base), Ragged())
    run_ = lockstep.Run(lora(tmp_path, init_from=str(tmp_path / "base"), precision="float32"), Ragged())
    assert run_().status == "finished"
    found = {name.replace(".base_layer", ""): p for name, p in run_.model.state_dict().items()}
    assert all(torch.equal(found[name.removeprefix("model/")], p) for name, p in weights.items())
    model = lockstep.load(tmp_path / "r", Ragged(), which="last")
    assert all(torch.equal(p, run_.model.state_dict()[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        ("blocks.0.l", "'blocks.0.l' matches no linear layer; did you mean blocks.0.3"),
        ("embedding", "'embedding' is embedding, a Embedding, "),
    ],
)
def test_targets_that_are_none_are_named(tmp_path, targets, line):
    with pytest.raises(ConfigError, match=line):
        lockstep.train(lora(tmp_path, lora={"rank": 2, "targets": targets}), Tuned())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("targets", "layers"), [("blocks.1.*", ["1.1", "1.3"]), ("3", ["0.3", "1.3"])])
def test_targets_by_pattern_and_by_name(tmp_path, targets, layers):
    lockstep.train(lora(tmp_path, lora={"rank": 2, "targets": targets}, max_steps=1), Tuned())
    kept, _ = held(tmp_path / "r")
    assert {name.partition(".lora_")[0] for name in kept} == {f"model/blocks.{layer}" for layer in layers}


def test_a_drawn_model_has_nothing_to_adapt(tmp_path, capsys):
    with pytest.raises(ConfigError, match="--lora.rank adapts a trained model.*--init-from RUN"):
        cli.dispatch(["train", "--lora.rank", "4", "--save-dir", str(tmp_path), "--device", "cpu"])
    assert not list(tmp_path.iterdir())
    lockstep.train(lora(tmp_path, max_steps=1), Ragged())
    assert "if its weights are random, adapters learn little" in capsys.readouterr().err


@pytest.mark.parametrize(("lr", "word"), [(1e-5, "low"), (1.0, "high"), (2e-4, "")])
def test_a_rate_that_does_not_suit_adapters_gets_a_line(tmp_path, lr, word, capsys):
    lockstep.train(lora(tmp_path, lr=lr, max_steps=1), Tuned())
    said = capsys.readouterr()
    assert (f"is {word} for adapters" in said.out + said.err) is bool(word)


def test_the_default_rate_is_that_of_adapters(tmp_path):
    run_ = lockstep.Run(lora(tmp_path, lr="auto", max_steps=1), Tuned())
    with run_:
        for step in run_:
            assert step.lr == pytest.approx(2e-4)


def test_options_of_adapters_without_a_rank(tmp_path):
    with refuses(ConfigError, "lora.alpha", "lora.rank"):
        config(tmp_path, lora={"alpha": 8.0})


class Broken(Tuned):
    """A loss that is not finite, once, in the fifth step."""

    calls = 0

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if torch.is_grad_enabled():
            type(self).calls += 1
            if type(self).calls == 18:
                return found * float("nan")
        return found


def test_a_rollback_goes_back_to_the_adapters(tmp_path):
    changes = {"guards": {"nonfinite": "rollback"}, "ckpt_freq": 2}
    run_ = lockstep.Run(lora(tmp_path, **changes), Broken())
    assert run_().status == "finished"
    assert Broken.calls > 24, "it went back"
    base = Broken().model().state_dict()
    after = {name.replace(".base_layer", ""): p for name, p in run_.model.state_dict().items()}
    assert all(torch.equal(after[name], p) for name, p in base.items())


def test_groups_know_adapters_by_name_and_frozen_ones_are_saved(tmp_path):
    lockstep.train(lora(tmp_path, optim={"groups": "*lora_A*: freeze; *lora_B*: lr=2x"}, max_steps=2), Tuned())
    kept, _ = held(tmp_path / "r")
    assert len([name for name in kept if ".lora_A." in name]) == 4


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"--lora.rank needs the package peft .*: install the extra peft of torch-lockstep"
    ):
        lockstep.train(lora(tmp_path), Tuned())
    assert not (tmp_path / "r").exists()


def test_a_base_in_another_half_than_autocasts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--precision fp16 .* base in bfloat16, .* --precision float32"):
        lockstep.train(lora(tmp_path, precision="fp16"), Tuned())
    assert not (tmp_path / "r").exists()


def test_lora_is_bitwise_under_autocast_and_one_ranks_draws(tmp_path):
    def case(name, **changes):
        return tmp_path, {"exact": True, "experiment_name": name, **changes}, 0

    meta = case("meta", engine="fsdp", engine_options={"meta_init": True})
    two = run(each, 2, [meta, case("two", engine="fsdp", precision="bf16")])
    assert two[0] == run(each, 1, [case("one", engine="ddp"), case("half", engine="ddp", precision="bf16")])[0]


def close_to(tmp_path, names, wanted):
    """Whether each run holds the tensors of another but for rounding, and has moved away from the adapters' zeros."""
    for name in names:
        found, _ = held(tmp_path / name)
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-5, atol=1e-6)
    assert all(tensor.any() for tensor in wanted.values())


class Wide(Tuned):
    base = torch.float32


def staged(world, cases):
    warnings.simplefilter("ignore")  # the package's own
    return [digest(world, *case, Wide())[1] for case in cases]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
def test_deepspeed_trains_and_saves_only_adapters_and_resumes(tmp_path):
    settings = {"lora": {"rank": 2}, "max_steps": 4}

    def case(stage, stop):
        options = {"engine": "deepspeed", "engine_options": {"zero_stage": stage}, "experiment_name": f"stage{stage}"}
        return tmp_path, {**settings, **options}, stop

    lockstep.train(lora(tmp_path, **settings), Wide())
    ran = run(staged, 2, [case(stage, stop) for stage in (1, 2) for stop in (2, 0)], timeout=120.0)
    assert ran == [["stopped", "finished"] * 2] * 2
    close_to(tmp_path, ["stage1", "stage2"], held(tmp_path / "r")[0])


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layers_have_adapters_too(tmp_path, monkeypatch):
    own, compiled, settings = nn.Module.compile, [], {"lora": {"rank": 2}, "max_steps": 4}

    def traced(module):  # without the minute that inductor takes
        compiled.append(module)
        own(module, backend="aot_eager")

    lockstep.train(lora(tmp_path, **settings), Wide())
    monkeypatch.setattr(nn.Module, "compile", traced)
    settings["experiment_name"] = "compiled"
    lockstep.train(lora(tmp_path, stop_at=2, **settings), Wide())  # a compiled run goes on with what another left
    lockstep.train(lora(tmp_path, compile=True, **settings), Wide())
    assert len(compiled) == 1
    close_to(tmp_path, ["compiled"], held(tmp_path / "r")[0])


class Topped(nn.Module):
    """A trained network below a new last layer."""

    def __init__(self, body):
        super().__init__()
        self.body, self.top = body, nn.Sequential(nn.LayerNorm(29), nn.Linear(29, 3))

    def forward(self, tokens):
        return self.top(self.body(tokens).float()).double()  # no view, of which FSDP2 warns


class Headed(Tuned):
    """Says which of it is new; that is drawn otherwise each time."""

    drawn = 0

    def untrained(self):
        return ["top"]

    def model(self):
        body = super().model()
        torch.manual_seed(100 + self.drawn)
        return Topped(body)

    def loss(self, model, batch):
        return model(batch["input"]).logsumexp(-1).square()[batch["labels"] != -100].sum()

    def metrics(self, model, batch):
        return {}


class Redrawn(Headed):
    drawn = 1


def headed(world, folder, cases):
    return [digest(world, folder, {"exact": True, **changes}, stop, Headed()) for changes, stop in cases]


def test_a_new_head_is_trained_whole_and_kept_with_the_same_bits(tmp_path):
    cases = [({"experiment_name": f"{name}1", "engine": name}, 0) for name in ("ddp", "zero", "fsdp")]
    ((wanted, _), *_), _ = found = run(headed, 2, tmp_path, cases)
    assert [bits for bits, _ in found[0]] == [wanted] * 3
    assert headed(None, tmp_path, [({"experiment_name": "half"}, 3)])[0][1] == "stopped"
    kept, state = held(tmp_path / "half")
    tops = {name for name in kept if name.startswith("model/top.")}
    assert tops == {f"model/top.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    assert all(name in tops or ".lora_" in name for name in kept)
    assert state["lora"]["modules_to_save"] == ["top"]
    ((again, _),) = headed(None, tmp_path, [({"experiment_name": "half"}, 0)])
    assert again == wanted
    after, _ = held(tmp_path / "half")
    assert all(not torch.equal(after[name], kept[name]) for name in tops)
    loaded = lockstep.load(tmp_path / "half", Redrawn(), which="last")  # another head than the one it began with
    assert all(torch.equal(loaded.state_dict()[name.removeprefix("model/")], after[name]) for name in after)
    started = lora(tmp_path, experiment_name="on", init_from=str(tmp_path / "half"), max_steps=1)
    with lockstep.Run(started, Redrawn()) as session:
        state = session.model.state_dict()
        assert all(torch.equal(state[name.removeprefix("model/")], after[name]) for name in after)


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        ("topp", "--lora.modules-to-save: 'topp' matches no module; did you mean top?"),
        ("body.head", "'body.head' shares its weight with 'body.embedding.weight'"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_named(tmp_path, modules, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        lockstep.Run(lora(tmp_path, lora={**LORA, "modules_to_save": modules}), Headed())()


def test_modules_within_others_are_trained_once(tmp_path):
    with lockstep.Run(lora(tmp_path, lora={**LORA, "modules_to_save": "1, top, blocks.0.0"}), Headed()) as session:
        trained = [name for name, p in session.model.named_parameters() if p.requires_grad and ".lora_" not in name]
    assert {name.rpartition(".")[0] for name in trained} == {
        *("body.blocks.0.0", "body.blocks.0.1"),
        *("body.blocks.1.0", "body.blocks.1.1", "body.blocks.1.3"),
        *("top.0", "top.1"),
    }
    assert len(trained) == 14
