"""lockstep.from_trainer: the losses of a Hugging Face Trainer, and what of it is refused."""

import copy
import dataclasses
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

import lockstep
from lockstep.adapters.hf_trainer.data import Batching, EpochShuffled, count_labels
from lockstep.adapters.hf_trainer.refusals import ARGUMENTS as TABLE
from lockstep.data.sampler import Shuffled, order_of
from lockstep.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hf_trainers import KINDS, arguments, causal, causal_model, causal_rows, padded, sft, text_classes, their_losses  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(trainer, **changes):
    """The losses and rates of the steps of the run that `trainer` becomes, and the run."""
    config, task = lockstep.from_trainer(trainer)
    with lockstep.Run(dataclasses.replace(config, **changes), task) as run:
        found = [(step.loss, step.lr) for step in run]
    return *map(list, zip(*found, strict=True)), run


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Without accumulation every kind has the Trainer's losses; with it those whose model minds the number of labels.
@pytest.mark.parametrize(
    ("kind", "accumulated"),
    [("causal", 2), ("question answering", 2), ("text classification", 1), ("contrastive", 1)],
)
def test_losses_are_the_trainers(tmp_path, kind, accumulated):
    more = {"gradient_accumulation_steps": accumulated, "max_steps": 6}
    theirs = their_losses(KINDS[kind](tmp_path / "theirs", **more))
    ours, _, run = trained(KINDS[kind](tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert run.result.global_step == 6
    assert run.result.folder == tmp_path / "ours"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sorted(KINDS.keys() - {"causal", "question answering", "text classification", "contrastive"})
)
def test_losses_of_the_other_kinds_are_the_trainers(tmp_path, kind):
    theirs = their_losses(KINDS[kind](tmp_path / "theirs"))
    ours, _, _ = trained(KINDS[kind](tmp_path / "ours"))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        {"packing": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "dft"}, marks=pytest.mark.slow),
    ],
)
def test_losses_of_trls_trainer_are_its_own(tmp_path, more):
    pytest.importorskip("trl")
    theirs = their_losses(sft(tmp_path / "theirs", **more))
    ours, _, _ = trained(sft(tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    offloading = sft(tmp_path / "other", **more)
    offloading.args.activation_offloading = True  # trl itself wants a GPU for it
    with pytest.raises(ConfigError, match=r"activation_offloading=True\)"):
        lockstep.from_trainer(offloading)


@pytest.mark.parametrize("kind", ["causal", "text classification"])
def test_losses_and_weights_under_bf16_are_the_trainers(tmp_path, kind):
    trainer = KINDS[kind](tmp_path / "theirs", bf16=True)
    theirs = their_losses(trainer)
    ours, _, run = trained(KINDS[kind](tmp_path / "ours", bf16=True))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in weights(trainer.model).items())


def test_a_loss_function_gets_what_the_trainer_hands_it(tmp_path):
    """Under bf16 outputs in float32, outside autocast: Accelerate prepares the model so."""
    found = {}

    def losses_of(name):
        def loss(outputs, labels, num_items_in_batch=None):
            logits = outputs["logits"]
            forms = (type(outputs), list(outputs), logits.dtype, logits.shape)
            items = (num_items_in_batch.item(), num_items_in_batch.dtype, num_items_in_batch.shape)
            in_autocast = torch.is_autocast_enabled("cpu")
            found.setdefault(name, []).append((forms, labels.tolist(), items, in_autocast, outputs.get("loss")))
            rows = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            return torch.nn.functional.cross_entropy(*rows, reduction="sum") / num_items_in_batch

        return loss

    trainer = causal(tmp_path / "theirs", bf16=True, compute_loss_func=losses_of("theirs"))
    theirs = their_losses(trainer)
    ours, _, run = trained(causal(tmp_path / "ours", bf16=True, compute_loss_func=losses_of("ours")))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in weights(trainer.model).items())
    assert all(each in found["ours"] for each in found["theirs"])  # ours has those of the trial and an evaluation too
    assert all(each[0][2] is torch.float32 and not each[3] for each in found["ours"][-4:])


def test_epochs_follow_the_trainers_order_and_its_schedule(tmp_path):
    """Two and a half epochs of whole steps, where an epoch of the Trainer's has no seam either."""
    more = {"max_steps": -1, "num_train_epochs": 2.5, "lr_scheduler_type": "cosine", "data_seed": 7}
    trainer = causal(tmp_path / "theirs", **more)
    theirs = their_losses(trainer)
    ours, rates, _ = trained(causal(tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rates, [e["learning_rate"] for e in trainer.state.log_history if "loss" in e], rtol=1e-9)
    assert len(ours) == 25


class Halves(transformers.Trainer):
    """A sampler of its own, without random draws."""

    def _get_train_sampler(self, train_dataset=None):
        return [*range(0, len(self.train_dataset), 2), *range(1, len(self.train_dataset), 2)]


def test_a_sampler_of_ones_own_is_taken(tmp_path):
    theirs = their_losses(causal(tmp_path / "theirs", kind=Halves, max_steps=12))
    ours, _, _ = trained(causal(tmp_path / "ours", kind=Halves, max_steps=12))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_samples_are_grouped_by_length_as_the_trainer_does(tmp_path):
    _, task = lockstep.from_trainer(causal(tmp_path, train_sampling_strategy="group_by_length"))
    data, padding = task.dataset("train"), []
    for order in (order_of(task, len(data), 3), Shuffled(len(data), 3)):
        lengths = np.array([len(data[place]["input_ids"]) for place in order.at(0, len(data))[1].tolist()])
        groups = [lengths[at : at + 4] for at in range(0, len(lengths), 4)]
        padding.append(sum(int(each.max()) * len(each) - int(each.sum()) for each in groups))
    assert padding[0] < 0.7 * padding[1]


@pytest.mark.parametrize(
    "more",
    [
        {"label_smoothing_factor": 0.1},
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "polynomial", "warmup_steps": 0.5},
        {"optim": "adafactor", "lr_scheduler_type": "inverse_sqrt", "max_grad_norm": 0.0, "weight_decay": 0.1},
        {
            "train_sampling_strategy": "sequential",
            "weight_decay": 0.5,
            "adam_beta2": 0.9,
            "lr_scheduler_type": "constant",
        },
    ],
    ids=lambda more: next(iter(more)),
)
def test_arguments_have_the_trainers_meaning(tmp_path, more):
    trainer = causal(tmp_path / "theirs", **more)
    theirs = their_losses(trainer)
    ours, rates, _ = trained(causal(tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rates, [e["learning_rate"] for e in trainer.state.log_history if "loss" in e], rtol=1e-9)


def test_whole_steps_are_left_of_an_epoch_with_drop_last(tmp_path):
    more = {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2}
    build = lambda name: transformers.Trainer(  # noqa: E731
        causal_model(), transformers.TrainingArguments(**arguments(tmp_path / name, **more)), padded, causal_rows(30)
    )
    theirs = their_losses(build("theirs"))
    ours, _, _ = trained(build("ours"))
    assert len(ours) == 14
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


class Summed(transformers.Trainer):
    """Its own loss, over the labels of the whole step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        found = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        ) / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].ne(-100).sum())
        return (found, outputs) if return_outputs else found


class Mean(transformers.Trainer):
    """Its own loss, which takes no number of items."""

    def compute_loss(self, model, inputs, return_outputs=False, **ignored):
        outputs = model(**inputs)
        found = 2 * outputs.loss
        return (found, outputs) if return_outputs else found


@pytest.mark.parametrize("kind", [Summed, Mean])
def test_a_loss_of_ones_own_is_taken(tmp_path, kind):
    accumulated = 2 if kind is Summed else 1
    more = {"kind": kind, "gradient_accumulation_steps": accumulated}
    theirs = their_losses(causal(tmp_path / "theirs", **more))
    ours, _, _ = trained(causal(tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_a_loss_function_is_taken(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        summed = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return summed / (num_items_in_batch if num_items_in_batch is not None else labels.ne(-100).sum())

    more = {"compute_loss_func": loss, "gradient_accumulation_steps": 2}
    theirs = their_losses(causal(tmp_path / "theirs", **more))
    ours, _, _ = trained(causal(tmp_path / "ours", **more))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_given_optimizer_and_schedule_are_recreated_by_name(tmp_path):
    def build(folder):
        model = causal_model()
        head = [p for name, p in model.named_parameters() if "wte" in name]
        rest = [p for name, p in model.named_parameters() if "wte" not in name]
        optimizer = torch.optim.SGD([{"params": head, "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        args = transformers.TrainingArguments(**arguments(folder))
        return transformers.Trainer(model, args, padded, causal_rows(), optimizers=(optimizer, schedule))

    theirs = their_losses(build(tmp_path / "theirs"))
    ours, rates, _ = trained(build(tmp_path / "ours"))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rates, [0.5 / (1 + step) for step in range(4)])


def test_model_init_begins_as_the_trainers(tmp_path):
    config = copy.deepcopy(causal_model().config)

    def build(folder):
        args = transformers.TrainingArguments(**arguments(folder, seed=3))
        model_init = lambda: transformers.GPT2LMHeadModel(config)  # noqa: E731
        return transformers.Trainer(None, args, padded, causal_rows(), model_init=model_init)

    theirs = their_losses(build(tmp_path / "theirs"))
    ours, _, _ = trained(build(tmp_path / "ours"))
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_the_models_of_a_task_are_the_first_one_and_copies_of_it(tmp_path):
    trainer = causal(tmp_path / "a")
    own, before = trainer.model, weights(trainer.model)
    _, task = lockstep.from_trainer(trainer)
    first = task.model()
    assert first is own
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    second = task.model()
    assert second is not own
    assert trainer.model is second
    assert second.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in second.state_dict().items())


def test_after_the_run_the_trainer_holds_the_trained_model(tmp_path):
    trainer = causal(tmp_path / "a")
    own, before = trainer.model, weights(trainer.model)
    _, _, run = trained(trainer)
    assert trainer.model is own is run.model
    assert not torch.equal(before["transformer.wte.weight"], own.transformer.wte.weight)
    trainer.save_model(str(tmp_path / "saved"))
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(read.transformer.wte.weight, own.transformer.wte.weight)


def counted(prediction):
    kept = prediction.label_ids[:, 1:] != -100
    right = (prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]) & kept
    return {"accuracy": np.float64(right.sum() / kept.sum()), "rows": len(kept), "shape": list(kept.shape)}


def test_metrics_are_those_of_all_predictions(tmp_path):
    """Rows of several lengths, padded; a last batch that is short; what is no number is left out."""
    more = {"compute_metrics": counted, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = causal(tmp_path / "a", **more)
    config, task = lockstep.from_trainer(trainer)
    result = lockstep.train(config, task)
    theirs = trainer.evaluate()
    assert result.evaluation.metrics == {"accuracy": theirs["eval_accuracy"], "rows": 10.0}


def test_losses_and_inputs_reach_the_metrics_on_request(tmp_path):
    def seen(prediction):
        assert prediction.inputs.shape[0] == prediction.losses.shape[0] == 10
        return {"eval_longest": float(prediction.inputs.shape[1]), "mean": prediction.losses.mean()}

    trainer = causal(tmp_path / "a", compute_metrics=seen, include_for_metrics=["inputs", "loss"])
    metrics = lockstep.train(*lockstep.from_trainer(trainer)).evaluation.metrics
    assert metrics["longest"] == trainer.evaluate()["eval_longest"]
    assert metrics["mean"] == pytest.approx(trainer.evaluate()["eval_mean"], rel=1e-6)


def test_several_sets_and_the_best_by_one_of_their_metrics(tmp_path):
    rows = causal_rows(12)
    more = {"eval_dataset": {"near": rows[:5], "far": rows[5:]}, "compute_metrics": counted}
    more |= {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    more |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_far_accuracy"}
    more |= {"callbacks": [transformers.EarlyStoppingCallback(3, 0.5)]}
    trainer = causal(tmp_path / "a", **more)
    config, task = lockstep.from_trainer(trainer)
    assert (config.best_metric, config.patience, config.min_delta) == ("far/accuracy:max", 3, 0.5)
    result = lockstep.train(config, task)
    assert {"near/loss", "near/accuracy", "far/accuracy", "far/rows"} <= result.evaluation.metrics.keys()
    assert result.best.metric == "far/accuracy"
    best = lockstep.load(result.folder, task)
    assert trainer.model is best  # which the script goes on with


def test_missing_metric_is_refused_before_writing(tmp_path):
    more = {"compute_metrics": counted, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "acuracy"}
    more |= {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    config, task = lockstep.from_trainer(causal(tmp_path / "a", **more))
    with pytest.raises(ConfigError, match="did you mean accuracy"):
        lockstep.train(config, task)
    assert list((tmp_path / "a").iterdir()) == []


def test_metrics_that_a_single_batch_is_too_few_for_are_healthy(tmp_path):
    def of_ten(prediction):
        if len(prediction.label_ids) < 10:
            raise ValueError("too few")
        return {"f1": 0.5}

    more = {"compute_metrics": of_ten, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "f1"}
    result = lockstep.train(*lockstep.from_trainer(causal(tmp_path / "a", **more)))
    assert result.evaluation.metrics == {"f1": 0.5}


def test_resume_is_bitwise_also_with_loader_processes(tmp_path):
    """Dropout is drawn in it; the second start has two loader processes."""
    more = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    _, _, whole = trained(causal(tmp_path / "whole", dropout=0.2, **more))
    trained(causal(tmp_path / "parts", dropout=0.2, **more), stop_at=3)
    parted = causal(tmp_path / "parts", dropout=0.2, dataloader_num_workers=1, **more)
    losses, _, run = trained(parted)
    assert len(losses) == 2
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name]), name


def test_a_resume_with_another_schedule_is_refused(tmp_path):
    trained(causal(tmp_path / "a", save_strategy="steps", save_steps=2), stop_at=2)
    with refuses(lockstep.errors.ResumeError, "training data"):
        trained(causal(tmp_path / "a", lr_scheduler_type="cosine"))


def test_batches_are_cut_for_the_devices_that_are_named(tmp_path):
    trainer = causal(tmp_path / "a", gradient_accumulation_steps=3)
    assert lockstep.from_trainer(trainer)[0].batch_size == 12
    config, _ = lockstep.from_trainer(trainer, devices=4)
    assert (config.batch_size, config.micro_batch_size) == (48, 4)


@pytest.fixture
def as_before():
    """What `full_determinism` sets for the whole process is taken back."""
    variables, pinned = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    os.environ.clear()
    os.environ.update(variables)
    torch.use_deterministic_algorithms(pinned)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.mark.usefixtures("as_before")
def test_what_the_arguments_become(tmp_path):
    more = {"max_steps": -1, "num_train_epochs": 2, "seed": 9, "logging_steps": 0.25, "eval_strategy": "epoch"}
    more |= {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 2, "bf16": False}
    more |= {"per_device_eval_batch_size": 5, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}
    more |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    more |= {"ddp_timeout": 50, "full_determinism": True, "max_grad_norm": 0.5, "torch_compile": True}
    config, _ = lockstep.from_trainer(causal(tmp_path / "a", **more))
    assert (config.save_dir, config.experiment_name) == (str(tmp_path), "a")
    assert (config.num_epochs, config.max_steps, config.seed, config.log_freq) == (2, 0, 9, "25%")
    assert (config.eval_freq, config.ckpt_freq, config.checkpoint.keep) == ("1epoch", "1epoch", 2)
    assert (config.eval_micro_batch_size, config.data.workers, config.data.prefetch) == (5, 2, 3)
    assert (config.activation_checkpointing, config.timeout, config.exact) == ("every:2", 50.0, True)
    assert (config.optim.clip, config.compile, config.precision, config.device) == (0.5, True, "float32", "cpu")


def test_a_plateau_is_ours(tmp_path):
    more = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "warmup_steps": 0}
    kwargs = {"threshold": 0, "patience": 0, "factor": 0.5}
    more |= {"compute_metrics": lambda prediction: {"same": 1.0}, "metric_for_best_model": "same"}
    _, rates, _ = trained(causal(tmp_path / "a", **more, lr_scheduler_kwargs=kwargs))
    assert rates == [0.01, 0.01, 0.005, 0.0025]
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs="):
        lockstep.from_trainer(causal(tmp_path / "b", **more, lr_scheduler_kwargs={"patience": 2}))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"optim": "galore_adamw", "optim_target_modules": ["attn"]}, "optim_target_modules"),
        ({"optim": "adamw_8bit"}, "optim='adamw"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"eval_on_start": True}, "eval_on_start"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode"),
        ({"output_dir": "."}, "output_dir"),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, "greater_is_better"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "resume_from_checkpoint"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "lr_scheduler_type='greedy'"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_is_not_served_is_refused_by_its_name(tmp_path, more, said):
    trainer = text_classes(more.pop("output_dir", tmp_path / "a"), **more)
    with pytest.raises(ConfigError) as caught:
        lockstep.from_trainer(trainer)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_argument_unknown_to_the_table_is_refused(tmp_path):
    @dataclasses.dataclass
    class TrainingArguments(transformers.TrainingArguments):
        turbo: int = 0

    given = TrainingArguments(**arguments(tmp_path / "a"))
    build = lambda args: transformers.Trainer(causal_model(), args, padded, causal_rows())  # noqa: E731
    assert lockstep.from_trainer(build(given))
    given.turbo = 2
    with pytest.raises(ConfigError, match=r"turbo=2\)"):
        lockstep.from_trainer(build(given))


def test_the_table_knows_every_argument_of_this_version():
    names = {spec.name for spec in dataclasses.fields(transformers.TrainingArguments)}
    assert sorted(name for name in names - TABLE.keys() if not name.startswith("trackio")) == []
    assert len([name for name in names & TABLE.keys() if TABLE[name].kind in ("becomes", "task", "idle")]) >= 60
    assert [name for name, row in TABLE.items() if not row.what] == []
    assert {row.kind for row in TABLE.values()} == {"becomes", "task", "idle", "refused"}


class Noted(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        pass


class OwnStep(transformers.Trainer):
    def training_step(self, *args, **more):
        return super().training_step(*args, **more)


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnEvaluation(transformers.Trainer):
    def evaluate(self, *args, **more):
        return super().evaluate(*args, **more)


def iterable(rows):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    return Stream()


def test_trainers_that_cannot_be_served_are_refused(tmp_path):
    def refused(trainer, said):
        with pytest.raises(ConfigError, match=said):
            lockstep.from_trainer(trainer)

    foreign = type("CometCallback", (transformers.TrainerCallback,), {"__module__": "transformers.integrations"})
    refused(causal(tmp_path / "a", callbacks=[foreign()]), r"callback CometCallback .*trainer.remove_callback\(Com")
    refused(causal(tmp_path / "a", kind=OwnStep), "OwnStep .*`training_step`")
    refused(causal(tmp_path / "a", kind=OwnLoader), "`get_train_dataloader`.*_get_train_sampler")
    refused(causal(tmp_path / "a", kind=OwnEvaluation, eval_strategy="epoch"), "`evaluate`.*eval_strategy='no'")
    refused(object(), "transformers.Trainer .*object")
    refused(causal(tmp_path / "a", callbacks=[transformers.EarlyStoppingCallback(2)]), "needs evaluations")
    streamed = causal(tmp_path / "a")
    streamed.train_dataset = iterable(causal_rows())
    refused(streamed, "train_dataset is iterable")
    streamed.train_dataset = None
    refused(streamed, "no train_dataset")
    done = causal(tmp_path / "a", max_steps=1)
    done.train()
    refused(done, "already trained")
    model = causal_model()
    optimizer = torch.optim.SGD(causal_model().parameters(), lr=0.1)
    args = transformers.TrainingArguments(**arguments(tmp_path / "a"))
    refused(
        transformers.Trainer(model, args, padded, causal_rows(), optimizers=(optimizer, None)), r"model\.parameters\(\)"
    )


def test_an_evaluation_of_ones_own_is_left_to_the_script(tmp_path):
    trainer = causal(tmp_path / "a", kind=OwnEvaluation)
    result = lockstep.train(*lockstep.from_trainer(trainer))
    assert result.evaluation is None
    assert trainer.evaluate()["eval_loss"] > 0


def test_evaluation_set_without_labels_is_refused_before_writing(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in causal_rows(8)]
    config, task = lockstep.from_trainer(causal(tmp_path / "a", eval_dataset=rows))
    with pytest.raises(ConfigError, match="eval_dataset has no labels"):
        lockstep.train(config, task)
    assert list((tmp_path / "a").iterdir()) == []


def test_columns_that_the_model_does_not_take_are_dropped(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "text": "no tensor"} for _ in range(8)]
    args = transformers.TrainingArguments(**arguments(tmp_path / "a"))
    for held in (datasets.Dataset.from_list(rows), rows):
        trainer = transformers.Trainer(causal_model(), args, transformers.default_data_collator, held)
        _, task = lockstep.from_trainer(trainer)
        batch = task.collate([task.dataset("train")[place] for place in range(2)])
        assert sorted(batch) == ["input_ids", "labels"]
        assert task.count(batch) == trainer._get_num_items_in_batch([batch], torch.device("cpu")) > 0


def test_a_loader_process_gets_no_trainer(tmp_path):
    _, task = lockstep.from_trainer(causal(tmp_path / "a"))
    task._batching.collate = padded
    made = pickle.loads(pickle.dumps(task))
    assert type(made) is Batching
    rows = causal_rows(3)
    assert made.count(made.collate(rows)) == task.count(task.collate(rows)) > 0


def test_labels_that_count():
    labels = torch.tensor([[5, -100, 7], [-100, -100, 1]])
    assert int(count_labels({"labels": labels}, shifts=False)) == 3
    assert int(count_labels({"labels": labels}, shifts=True)) == 2
    assert int(count_labels({"labels": labels, "shift_labels": labels[:1]}, shifts=True)) == 2
    assert count_labels({"labels": [labels]}, shifts=False) is None
    assert count_labels({"x": labels}, shifts=False) is None


@given(st.integers(1, 60), st.integers(0, 2**31), st.integers(0, 200), st.integers(0, 100))
def test_the_order_is_that_of_accelerates_sampler(size, seed, start, count):
    sampling = pytest.importorskip("accelerate.data_loader")
    sampler = sampling.SeedableRandomSampler(range(size), data_seed=seed)
    stream = []
    while len(stream) < start + count:
        stream += list(sampler)
    epochs, samples = EpochShuffled(size, seed).at(start, start + count)
    assert samples.tolist() == stream[start : start + count]
    assert epochs.tolist() == [place // size for place in range(start, start + count)]


def test_the_document_names_every_argument():
    text = (Path(__file__).parents[2] / "docs" / "inside" / "hf-trainer.md").read_text(encoding="utf-8")
    assert [name for name in TABLE if f"`{name}`" not in text] == []


def test_reports_go_to_the_sinks_that_there_are(tmp_path):
    made = causal(tmp_path, report_to=["mlflow", "tensorboard"])
    config, _ = lockstep.from_trainer(made)
    assert (config.mlflow, config.tensorboard, config.wandb) == (True, True, False)
    made.args.report_to = ["comet_ml"]
    with refuses(ConfigError, "report_to", "comet_ml"):
        lockstep.from_trainer(made)
