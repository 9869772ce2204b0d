"""lockstep.from_trainer with trl: the losses, numbers and weights of its trainers, and what of it is refused."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

import lockstep
from lockstep.adapters.hf_trainer.refusals import ARGUMENTS, TRL
from lockstep.data.sampler import order_of
from lockstep.errors import ConfigError

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

import trl_trainers  # noqa: E402
from trl_trainers import KINDS, NUMBERS, dpo, quiet, reward, sft  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # what trl calls of transformers, and its own hints


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(trainer, **changes):
    """The steps of the run that `trainer` becomes, as (loss, numbers), and its result."""
    config, task = lockstep.from_trainer(trainer)
    with lockstep.Run(dataclasses.replace(config, **changes), task) as run:
        steps = [(step.loss, dict(step.numbers)) for step in run]
    return steps, run.result


def whole(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


FAST = {
    "sft-completion-accumulated": ("sft", {"data": "completion", "gradient_accumulation_steps": 2}),
    "sft-packing-lora": ("sft", {"packing": True, "peft": True}),
    "dpo-accumulated": ("dpo", {"gradient_accumulation_steps": 2}),
    "dpo-lora-checkpointing": ("dpo", {"peft": True, "gradient_checkpointing": True}),
    "dpo-precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "reward-margin-centred": ("reward", {"center_rewards_coefficient": 0.1, "gradient_accumulation_steps": 2}),
}
SLOW = {
    "sft": ("sft", {}),
    "sft-assistant": ("sft", {"data": "chat", "assistant_only_loss": True, "gradient_accumulation_steps": 2}),
    "sft-wrapped": ("sft", {"packing": True, "packing_strategy": "wrapped"}),
    "sft-packing-accumulated": ("sft", {"packing": True, "gradient_accumulation_steps": 2}),
    "sft-padding-free": ("sft", {"padding_free": True, "max_length": None, "gradient_accumulation_steps": 2}),
    "sft-dft": ("sft", {"loss_type": "dft", "gradient_accumulation_steps": 2}),
    "sft-smoothed": ("sft", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    "sft-experts": ("sft", {"experts": True, "router_aux_loss_coef": 0.1, "dtype": torch.float32}),
    "dpo-adapted": ("dpo", {"adapted": True, "gradient_accumulation_steps": 2}),
    "dpo-lora-precomputed": ("dpo", {"peft": True, "precompute_ref_log_probs": True}),
    "dpo-weighted": ("dpo", {"ld_alpha": 0.5, "use_weighting": True, "gradient_accumulation_steps": 2}),
    "dpo-mixed": ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "dpo-aot": ("dpo", {"loss_type": ["aot"]}),
    "dpo-divergence": ("dpo", {"f_divergence_type": "js_divergence"}),
    "reward-lora": ("reward", {"peft": True}),
}
SLOW |= {
    f"dpo-{name}": ("dpo", {"loss_type": [name], "label_smoothing": 0.1, "gradient_accumulation_steps": 2})
    for name in (
        *("hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
        *("discopop", "sigmoid_norm"),
    )
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [pytest.param(*case, id=name) for name, case in FAST.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_losses_numbers_and_weights_are_trls(tmp_path, kind, more):
    """Step for step; the Trainer rounds the losses that it logs to float32, and some numbers too."""
    if more.get("peft") or more.get("adapted"):
        pytest.importorskip("peft")
    theirs = KINDS[kind](tmp_path / "theirs", **more)
    theirs.train()
    history = [entry for entry in theirs.state.log_history if "loss" in entry]
    ours = KINDS[kind](tmp_path / "ours", **more)
    steps, _ = trained(ours)
    np.testing.assert_allclose([loss for loss, _ in steps], [entry["loss"] for entry in history], atol=1e-6, rtol=0)
    expected, bound = whole(theirs.model), 1e-5 if "dtype" in more else 1e-7
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=bound, rtol=0, msg=name)
    names = NUMBERS[kind] | ({"aux_loss"} if more.get("experts") else set())
    accumulates = kind == "sft" and "gradient_accumulation_steps" in more  # theirs are then means of means
    for (_, numbers), entry in zip(steps, history, strict=True):
        assert numbers.keys() == names
        for name in () if accumulates else names:
            assert numbers[name] == pytest.approx(entry[name], abs=1e-6), name


def first_step(task, config):
    """The samples of the first step, each alone in a batch, as (chosen or only rows, rejected rows)."""
    data = task.dataset("train")
    places = order_of(task, len(data), config.seed).at(0, config.batch_size)[1].tolist()
    return [task.collate([data[place]]) for place in places]


def log_probs(model, batch, mask):
    """The labels' log-probabilities, with 0 where the mask is 0, by plain PyTorch. [rows, length - 1]"""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    found = F.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return found * mask[:, 1:]


def test_loss_of_accumulated_batches_is_over_all_tokens(tmp_path):
    trainer = sft(tmp_path / "a", data="completion", gradient_accumulation_steps=3)
    config, task = lockstep.from_trainer(trainer)
    total = right = labels = 0.0
    with torch.no_grad():
        for batch in first_step(task, config):
            mask = batch["labels"].ne(-100)
            total -= log_probs(trainer.model, batch, mask).sum().item()
            best = trainer.model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
            right += (best.eq(batch["input_ids"][:, 1:]) & mask[:, 1:]).sum().item()
            labels += mask[:, 1:].sum().item()
    with lockstep.Run(dataclasses.replace(config, max_steps=1), task) as run:
        (loss, numbers) = next((step.loss, dict(step.numbers)) for step in run)
    assert loss == pytest.approx(total / labels, abs=2e-6)  # trl's head is in float32
    assert numbers["mean_token_accuracy"] == pytest.approx(right / labels, abs=1e-6)


def test_loss_of_accumulated_batches_is_over_all_pairs(tmp_path):
    trainer = dpo(tmp_path / "a", gradient_accumulation_steps=3)
    config, task = lockstep.from_trainer(trainer)
    margins = []
    with torch.no_grad():
        for batch in first_step(task, config):
            sums = [
                log_probs(model, batch, batch["completion_mask"]).sum(1) for model in (trainer.model, trainer.ref_model)
            ]
            ratios = sums[0] - sums[1]
            margins.append(0.5 * (ratios[0] - ratios[1]))
    with lockstep.Run(dataclasses.replace(config, max_steps=1), task) as run:
        (loss, numbers) = next((step.loss, dict(step.numbers)) for step in run)
    assert loss == pytest.approx(float(-F.logsigmoid(torch.stack(margins)).mean()), abs=2e-6)
    assert numbers["rewards/margins"] == pytest.approx(float(torch.stack(margins).mean()), abs=5e-6)


class Seen(transformers.TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **more):
        self.logs.append(dict(logs))


def test_evaluations_best_and_callbacks_have_trls_numbers(tmp_path):
    """Batches of the evaluation are alike here; otherwise each pair counts once, and trl's is a mean of their means."""
    seen = Seen()
    more = {"per_device_eval_batch_size": 5, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}
    more |= {"metric_for_best_model": "eval_rewards/margins", "greater_is_better": True, "callbacks": [seen]}
    trainer = dpo(tmp_path / "a", **more)
    config, _ = lockstep.from_trainer(trainer)
    assert config.best_metric == "rewards/margins:max"
    _, result = trained(trainer)
    found = trainer.evaluate()
    assert result.evaluation.metrics.keys() == NUMBERS["dpo"]
    for name, number in {**result.evaluation.metrics, "loss": result.evaluation.loss}.items():
        assert number == pytest.approx(found[f"eval_{name}"], abs=1e-6), name
    assert result.best.metric == "rewards/margins"
    names = {name for logs in seen.logs for name in logs}
    assert names > NUMBERS["dpo"] | {f"eval_{name}" for name in NUMBERS["dpo"]}


def test_what_is_saved_is_loaded_by_peft(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = dpo(tmp_path / "a", peft=True, dtype=torch.float32)
    before = whole(trainer.model)
    trained(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    with quiet():
        read = peft.PeftModel.from_pretrained(trl_trainers.model(), tmp_path / "saved")
    changed = [name for name, tensor in read.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed
    assert all("lora" in name for name in changed)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name


def test_a_copy_of_the_model_computes_with_its_own_weights(tmp_path):
    """trl replaces `forward` on the object, and its function holds the object's old one."""
    trainer = sft(tmp_path / "a")
    first = trainer.model
    _, task = lockstep.from_trainer(trainer)
    assert task.model() is first
    ids = torch.arange(2, 8)[None]
    before = first(ids).logits.detach()
    copied = task.model()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(copied(ids).logits, before)
    fused = copied(ids, labels=ids, fused_lm_head=True)
    expected = F.log_softmax(before[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(fused.log_probs.double(), expected, atol=1e-6, rtol=0)


def test_a_run_resumes_with_the_same_bits(tmp_path):
    more = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    steps, _ = trained(whole_run := reward(tmp_path / "whole", **more))
    begun, _ = trained(reward(tmp_path / "parts", **more), stop_at=3)
    rest, _ = trained(parted := reward(tmp_path / "parts", dataloader_num_workers=1, **more))
    assert begun + rest == steps
    for name, tensor in whole_run.model.state_dict().items():
        assert torch.equal(tensor, parted.model.state_dict()[name]), name
    with refuses(lockstep.errors.ResumeError, "training data"):
        trained(reward(tmp_path / "parts", center_rewards_coefficient=0.5, **more))


class OwnLoss(trl.DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._metrics["train" if model.training else "eval"]["own"].append(2.0)
        return 3 * loss


class OwnStep(trl.DPOTrainer):
    def training_step(self, *args, **more):
        return super().training_step(*args, **more)


def test_subclasses_are_served_but_for_a_step_of_their_own(tmp_path):
    steps, result = trained(dpo(tmp_path / "a", max_steps=1))
    mine, other = trained(dpo(tmp_path / "b", max_steps=1, kind=OwnLoss))
    assert mine[0][0] == pytest.approx(3 * steps[0][0], abs=1e-12)
    assert mine[0][1] == {**steps[0][1], "own": 2.0}
    assert other.evaluation.loss == pytest.approx(3 * result.evaluation.loss, rel=1e-6)
    with pytest.raises(ConfigError, match="OwnStep overrides `training_step`"):
        lockstep.from_trainer(dpo(tmp_path / "c", kind=OwnStep))


def test_every_other_trainer_of_trl_is_refused_by_its_name():
    from trl.experimental.bema_for_ref_model import DPOTrainer as Experimental

    names = [name for name in dir(trl) if name.endswith("Trainer")]
    others = [getattr(trl, name) for name in names if name not in ("SFTTrainer", "DPOTrainer", "RewardTrainer")]
    assert {"GRPOTrainer", "RLOOTrainer", "KTOTrainer"} <= {kind.__name__ for kind in others}
    former = type("PPOTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.ppo_trainer"})
    derived = type("Mine", (trl.GRPOTrainer,), {})
    for kind in (*others, Experimental, former, derived):
        with pytest.raises(ConfigError) as caught:
            lockstep.from_trainer(object.__new__(kind))
        name = "GRPOTrainer" if kind is derived else kind.__name__
        assert str(caught.value).startswith(f"from_trainer: {name} of trl")
        assert "\n" not in str(caught.value)


CONFIGS = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_argument_has_a_use_or_a_refusal(tmp_path, kind):
    names = {spec.name for spec in dataclasses.fields(CONFIGS[kind])}
    known = ARGUMENTS.keys() | TRL.keys()
    assert sorted(name for name in names - known if not name.startswith("trackio")) == []
    assert TRL.keys().isdisjoint(ARGUMENTS)
    trainer = KINDS[kind](tmp_path / "a")
    for name in sorted(names & {name for name, row in TRL.items() if row.kind == "refused"}):
        setattr(trainer.args, name, True)
        with pytest.raises(ConfigError, match=rf"\({name}=True\)"):
            lockstep.from_trainer(trainer)
        setattr(trainer.args, name, False)
    trainer.args.use_liger_kernel = True
    with pytest.raises(ConfigError, match=r"\(use_liger_kernel=True\)"):
        lockstep.from_trainer(trainer)


def test_the_table_has_no_argument_that_no_config_has():
    names = {spec.name for config in CONFIGS.values() for spec in dataclasses.fields(config)}
    assert sorted(TRL.keys() - names) == []
    text = (Path(__file__).parents[2] / "docs" / "inside" / "hf-trainer.md").read_text(encoding="utf-8")
    assert [name for name in TRL if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "DPOConfig(loss_type='sft')"),
        ("dpo", {"loss_type": ["aot_unpaired"]}, "DPOConfig(loss_type='aot_unpaired')"),
        ("sft", {"experts": True, "router_aux_loss_coef": 0.1}, "SFTConfig(router_aux_loss_coef=0.1)"),
    ],
)
def test_whole_batch_loss_is_refused_with_several_micro_batches(tmp_path, kind, more, said):
    for count in (2, 1):
        trainer = KINDS[kind](tmp_path / str(count), gradient_accumulation_steps=count, **more)
        if count == 2:
            with refuses(ConfigError, said, "gradient_accumulation_steps=1"):
                lockstep.from_trainer(trainer)
    config, task = lockstep.from_trainer(trainer)
    with refuses(ConfigError, said, "3 micro-batches"):  # nor may the config be given more of them afterwards
        lockstep.train(dataclasses.replace(config, batch_size=3 * config.batch_size), task)
    assert not (tmp_path / "1" / "checkpoints").exists()


def test_the_program_of_the_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "hf-trainer.md").read_text(encoding="utf-8")
    (program,) = [part for part in text.split("```") if part.startswith("python") and "DPOTrainer(" in part]
    pairs = trl_trainers.rows("pairs")
    names = {
        "model": trl_trainers.model(),
        "reference": trl_trainers.reference(),
        "tokenizer": trl_trainers.tokenizer(),
    }
    names |= {"pairs": pairs, "held_out": pairs.select(range(8))}
    exec(program.removeprefix("python\n"), names)
    assert 0 <= names["result"].evaluation.metrics["rewards/accuracies"] <= 1
    assert transformers.LlamaForCausalLM.from_pretrained("preferences").num_parameters() > 0


def test_recomputing_a_part_of_a_block_is_refused(tmp_path):
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}
    with pytest.raises(ConfigError, match="'selective': True"):
        lockstep.from_trainer(sft(tmp_path / "a", **more))


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_loader_process_counts_pairs(tmp_path, kind):
    _, task = lockstep.from_trainer(KINDS[kind](tmp_path / "a"))
    data = task.dataset("train")
    batching = pickle.loads(pickle.dumps(task))
    assert batching.count(batching.collate([data[place] for place in range(3)])) == 3


def test_a_reference_model_is_compared_between_the_ranks(tmp_path):
    trainer = dpo(tmp_path / "a")
    _, task = lockstep.from_trainer(trainer)
    assert task.fixed_models == {"ref_model": trainer.ref_model}  # what guards/startup.py compares
