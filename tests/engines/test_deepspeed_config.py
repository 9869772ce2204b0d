"""A DeepSpeed configuration against the flags: what agrees is taken, what contradicts is named. No DeepSpeed needed."""

import json
import re

import pytest
import torch

from lockstep import cli
from lockstep.config import cli as options
from lockstep.config.deepspeed import check_settings, merge_settings
from lockstep.config.schema import Config, lookup
from lockstep.config.sections import Fp16
from lockstep.distributed.world import World
from lockstep.engines.deepspeed import engine as module
from lockstep.engines.deepspeed.config import DeepSpeedSettings, check_batches, merge, read_config
from lockstep.engines.registry import engine
from lockstep.errors import ConfigError
from lockstep.optim.optimizers import adamw, make_optimizer, sgd


def optimizer():
    return adamw(torch.nn.Linear(2, 2), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def wanted(**changed):
    return DeepSpeedSettings(
        **{
            "stage": -1,
            "offload": False,
            "clip": 1.0,
            "halved": False,
            "scaled": None,
            "optimizer": optimizer(),
            **changed,
        }
    )


def written(tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_nothing_given_is_stage_2():
    assert read_config("") == {}
    made = merge({}, wanted())
    assert made["zero_optimization"] == {"stage": 2}
    assert made["gradient_clipping"] == 1.0
    assert made["bf16"] == {"enabled": False}


def test_what_agrees_or_is_auto_is_taken(tmp_path):
    given = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "overlap_comm": "auto", "stage3_param_persistence_threshold": 10},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1},
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "steps_per_print": 100,
    }
    path = written(tmp_path, given)
    assert read_config(path) == given
    check_batches(path, batch_size=64, micro_batch_size=8, ranks=4)
    made = merge(given, wanted(stage=3))
    assert made["zero_optimization"] == {"stage": 3, "stage3_param_persistence_threshold": 10}
    assert made["steps_per_print"] == 100
    assert "optimizer" not in made


@pytest.mark.parametrize("kind", ["Adam", "adam", "ADAM", "adamw", "AdamW"])
def test_an_optimizer_is_named_in_any_case(tmp_path, kind):
    content = {"optimizer": {"type": kind, "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
    made = options.build(merge_settings({}, content, 1)).optim
    assert (made.name, made.beta1, made.beta2) == ("adamw", 0.9, 0.95)
    assert merge(content, wanted())
    with pytest.raises(ConfigError, match=rf'optimizer\.type is "{kind}".* "SGD"'):
        merge(content, wanted(optimizer=sgd(torch.nn.Linear(2, 2), lr=0.01)))


def test_optimizer_settings_equal_to_the_runs_are_accepted():
    params = {"torch_adam": True, "bias_correction": True, "amsgrad": False, "lr": 0.01}
    assert options.build(merge_settings({}, {"optimizer": {"type": "Adam", "params": params}}, 1)).lr == 0.01


def test_groups_with_their_own_rates_are_no_contradiction():
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}}
    for optim in ({"layer_decay": 0.5}, {"groups": "0.*: lr=0.1x"}, {"groups": "*: lr=3x, decay=0.2"}):
        config = Config(lr=0.01, optim={"weight_decay": 0.1, "beta2": 0.95, **optim})
        made = make_optimizer(model, config, list(model))
        assert any(group["lr"] != 0.01 for group in made.param_groups)
        assert merge(content, wanted(optimizer=made))
        for key, value in (("lr", 0.02), ("weight_decay", 0.0)):
            other = {"optimizer": {"type": "AdamW", "params": {key: value}}}
            with pytest.raises(ConfigError, match=rf"optimizer\.params\.{key} is {value}, .* 0\."):
                merge(other, wanted(optimizer=made))
    own = torch.optim.SGD([{"params": [model[0].weight], "lr": 0.1}, {"params": [model[1].weight], "lr": 0.3}])
    assert merge({"optimizer": {"type": "sgd", "params": {"lr": 0.3}}}, wanted(optimizer=own))
    with pytest.raises(ConfigError, match=r"params\.lr is 0\.2, .* 0\.1"):
        merge({"optimizer": {"type": "sgd", "params": {"lr": 0.2}}}, wanted(optimizer=own))


def test_offload():
    assert merge({}, wanted(offload=True))["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    nvme = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    assert merge(nvme, wanted(offload=True))["zero_optimization"]["offload_optimizer"] == {"device": "nvme"}
    with pytest.raises(ConfigError, match=r"--engine\.cpu-offload needs --engine\.zero-stage 1, 2 or 3"):
        merge({}, wanted(stage=0, offload=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"amp": {"enabled": True}}, "'amp'.*--precision bf16 or fp16"),
        ({"zero_optimisation": {}}, "'zero_optimisation' is unknown to this engine: did you mean 'zero_optimization'"),
        ({"curriculum_learning": {"enabled": True}}, "'curriculum_learning'"),
        ({"prescale_gradients": True}, "'prescale_gradients'"),
        ({"sparse_attention": {}}, "'sparse_attention' is unknown to this engine"),
        ("{", "is not a JSON file"),
        ("[" * 100_000, "is not a JSON file"),
        ("[]", "is not a JSON object"),
    ],
)
def test_files_that_do_not_hold(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(written(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}, "prescale_gradients": False, "gradient_predivide_factor": 1.0},
        {"amp": {"enabled": "auto", "opt_level": "auto"}, "tensorboard": {"enabled": False}, "elasticity": {}},
        {
            "amp": {},
            "bf16": {"enabled": False, "immediate_grad_update": True},
            "fp16": {"enabled": False, "loss_scale": 8},
        },
        {"zero_optimization": {"stage": 0}, "sparse_gradients": False, "curriculum_learning": {"enabled": False}},
    ],
)
def test_what_is_switched_off_may_stay_in_the_file(tmp_path, content):
    config = parsed(tmp_path, content)
    made = merge(read_config(config.engine_options.config), wanted(stage=config.engine_options.zero_stage))
    assert not made.keys() & {"amp", "tensorboard", "elasticity", "curriculum_learning", "fp16"}
    assert made["bf16"] == {"enabled": False}
    assert made["zero_optimization"]["stage"] == content.get("zero_optimization", {"stage": 2})["stage"]


def test_a_missing_file():
    with pytest.raises(ConfigError, match=r"--engine\.config nowhere\.json: No such file"):
        read_config("nowhere.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 32}, "train_batch_size is 32, .*--batch-size 64 .*64"),
        ({"train_micro_batch_size_per_gpu": 4}, "is 4, .*--micro-batch-size 8 .*8"),
        ({"gradient_accumulation_steps": 8}, "is 8, .* on 4 ranks .*2"),
    ],
)
def test_batch_sizes_are_the_flags(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        check_batches(written(tmp_path, given), batch_size=64, micro_batch_size=8, ranks=4)


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        ({"gradient_clipping": 0.5}, {}, r"gradient_clipping is 0\.5, .*--optim\.clip 1 .*1\.0"),
        ({"zero_optimization": {"stage": 1}}, {"stage": 3}, r"zero_optimization\.stage is 1, .*--engine\.zero-stage"),
        ({"zero_optimization": {"stage": 4}}, {}, "stage is 4: give 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, {}, "stage is true: give 0, 1, 2 or 3"),
        ({"zero_optimization": 2}, {}, "zero_optimization .*object"),
        ({"zero_force_ds_cpu_optimizer": True}, {}, "zero_force_ds_cpu_optimizer is true, .*--engine deepspeed, "),
        ({"zero_allow_untested_optimizer": False}, {}, "zero_allow_untested_optimizer is false, .*--engine deepsp"),
        ({"optimizer": {"params": [1]}}, {}, r"optimizer\.params .*object"),
        ({"bf16": {"enabled": True}}, {}, r"bf16\.enabled is true, and --precision is not bf16-true"),
        ({"fp16": {"enabled": True}}, {}, r"fp16\.enabled is true, and --precision is not fp16; set --precision fp16"),
        ({"fp16": {"enabled": False}}, {"scaled": Fp16()}, r"fp16\.enabled is false, and --precision is fp16"),
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            {"scaled": Fp16()},
            r"fp16\.loss_scale 128: ",
        ),
        ({"fp16": True}, {}, "fp16 .*object"),
        ({"optimizer": {"type": "SGD"}}, {}, r'optimizer\.type is "SGD".* "AdamW"'),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            {},
            r'optimizer\.type is "Adam".* "AdamW"',
        ),
        ({"fp16": {"enabled": True, "scale": 1}}, {"scaled": Fp16()}, r"fp16\.scale 1 is unknown"),
        ({"fp16": {"auto_cast": True}}, {"scaled": Fp16()}, r"fp16\.auto_cast true "),
        (
            {"fp16": {"hysteresis": 2}},
            {"scaled": Fp16()},
            r"fp16\.hysteresis is 2, .*--fp16\.hysteresis .*1;",
        ),
        ({"optimizer": {"params": {"lr": 0.1}}}, {}, r"optimizer\.params\.lr is 0\.1, .*0\.01"),
        ({"optimizer": {"params": {"momentum": 0.1}}}, {}, r"'optimizer\.params\.momentum' is unknown to AdamW"),
        ({"optimizer": {"kind": "AdamW"}}, {}, r"'optimizer\.kind' is unknown"),
        ({"optimizer": "AdamW"}, {}, "optimizer .*object"),
        ({}, {"halved": True, "stage": 1}, "stage 1 with --precision bf16-true"),
    ],
)
def test_contradictions_are_named(given, changed, message):
    with pytest.raises(ConfigError, match=message) as caught:
        merge(given, wanted(**changed))
    assert "\n" not in str(caught.value)


# the command line


def test_flags_of_the_deepspeed_launcher_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    config = options.parse(["--local_rank=1", "--deepspeed", "--deepspeed_config", "ds.json", "--lr", "0.1"])
    assert (config.engine, config.engine_options.config, config.lr) == ("deepspeed", "ds.json", 0.1)
    assert options.parse(["--local_rank", "0"]).engine == "auto"
    assert options.parse(["--deepspeed"]).engine_options.config == ""
    with pytest.raises(ConfigError, match="--deepspeed and --engine ddp contradict each other"):
        options.parse(["--deepspeed", "--engine", "ddp"])
    with pytest.raises(ConfigError, match="name two files"):
        options.parse(["--deepspeed_config", "a.json", "--engine.config", "b.json"])


def test_the_launcher_puts_its_flag_before_the_command(capsys):
    assert cli.dispatch(["--local_rank=0", "--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep ")


# what the file says becomes the run's settings

SOURCE = {  # as a lecture on DeepSpeed shows it
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000},
    "amp": {"enabled": False},
    "zero_optimization": {"stage": 2},
}


def parsed(tmp_path, content, *argv):
    return options.parse(["--deepspeed_config", written(tmp_path, content), *argv])


def test_a_whole_file_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parsed(tmp_path, SOURCE)
    assert (config.engine, config.batch_size, config.micro_batch_size) == ("deepspeed", 8, 4)
    assert (config.lr, config.precision, config.optim.name) == (1.5e-4, "fp16", "adamw")
    assert (config.optim.beta2, config.optim.weight_decay, config.optim.eps) == (0.999, 0.0, 1e-8)
    path = config.engine_options.config
    check_batches(path, batch_size=8, micro_batch_size=4, ranks=2)
    assert merge(read_config(path), wanted(scaled=config.fp16, optimizer=adamw(torch.nn.Linear(2, 2), lr=1.5e-4)))
    assert config.fp16 == Fp16(loss_scale_window=1000, hysteresis=2, min_loss_scale=1.0), "DeepSpeed's defaults"
    assert parsed(tmp_path, SOURCE, "--optim.weight-decay", "0.1").optim.weight_decay == 0.1, "the file does not say it"
    assert parsed(tmp_path, SOURCE, "--lr", "1.5e-4").lr == 1.5e-4


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 7, "warmup_type": "linear"}},
            {"lr": 0.02, "optim.schedule": "constant", "optim.warmup_steps": 7},
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_type": "linear", "warmup_min_lr": 0}},
            {"optim.schedule": "linear", "optim.floor": 0.0, "max_steps": 50, "optim.warmup_steps": 1000},
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5, "cos_min_ratio": 0.1}},
            {"optim.schedule": "cosine", "optim.floor": 0.1, "max_steps": 50, "optim.warmup_steps": 5},
        ),
        (  # what begins near 0 anyway, and where DeepSpeed's own count begins
            {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0, "last_batch_iteration": -1}},
            {"optim.schedule": "cosine", "optim.floor": 1e-4, "optim.warmup_steps": 1000},
        ),
        (  # without a warm-up it has no shape
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_type": "log"}},
            {"optim.schedule": "constant", "optim.warmup_steps": 0},
        ),
    ],
)
def test_schedulers(tmp_path, scheduler, found):
    config = parsed(tmp_path, {"scheduler": scheduler})
    assert {name: lookup(config, name) for name in found} == found


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        (SOURCE, ["--lr", "0.1"], r"optimizer\.params\.lr 0\.00015 sets --lr 0\.00015, .*0\.1;"),
        (SOURCE, ["--precision", "bf16"], r"fp16\.enabled true sets --precision fp16, .*bf16;"),
        (SOURCE, ["--batch-size", "16"], "train_batch_size 8 sets --batch-size 8, .*16;"),
        ({"optimizer": {"type": "Lamb"}}, [], r"optimizer\.type Lamb .* Adam, AdamW or SGD"),
        ({"scheduler": {"type": "OneCycle"}}, [], r"scheduler\.type OneCycle .* WarmupLR"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}},
            [],
            r"scheduler\.params\.warmup_type is log, .*\"linear\"",
        ),
        *(
            (
                {"optimizer": {"type": "Adam", "params": {key: value}}},
                [],
                rf"optimizer\.params\.{key} {json.dumps(value)} ",
            )
            for key, value in (("torch_adam", False), ("bias_correction", False), ("amsgrad", True))
        ),
        ({"scheduler": {"type": "WarmupLR"}}, [], r"scheduler\.params\.warmup_type is log, .*\"linear\""),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, [], r"scheduler\.params\.warmup is unknown"),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_type": "linear"}},
            },
            [],
            r"scheduler\.params\.warmup_max_lr is 0\.2, but optimizer\.params\.lr is 0\.1",
        ),
    ],
)
def test_what_a_flag_and_the_file_say_otherwise_is_named(tmp_path, content, argv, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(tmp_path, content, *argv)
    assert "\n" not in str(caught.value)


SCALE = {"initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4, "min_loss_scale": 2, "loss_scale": 0}


def test_the_scale_of_the_loss_is_the_files(tmp_path):
    on = parsed(tmp_path, {"fp16": {"enabled": True, "consecutive_hysteresis": True, **SCALE}})
    assert on.fp16 == Fp16(12, 500, 4, True, 2.0)
    assert parsed(tmp_path, {"fp16": {"enabled": True}}, "--fp16.hysteresis", "3").fp16 == Fp16(16, 1000, 3, False, 1.0)
    asked = {"fp16": {"enabled": "auto", **SCALE}}
    assert parsed(tmp_path, asked, "--precision", "fp16").fp16.initial_scale_power == 12
    assert parsed(tmp_path, asked, "--precision", "bf16").fp16 == Fp16(), "as a file for every precision has it"
    assert parsed(tmp_path, {"fp16": {"enabled": False, **SCALE}}).fp16 == Fp16()
    assert parsed(tmp_path, {}, "--precision", "fp16").fp16 == Fp16()
    for content, argv, line in (
        (
            asked,
            ["--precision", "fp16", "--fp16.hysteresis", "1"],
            "fp16.hysteresis 4 sets --fp16.hysteresis",
        ),
        ({"fp16": {"enabled": True, "min_loss_scale": 3}}, [], "--fp16.min-loss-scale is 3: it must be a power of two"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, [], "fp16.loss_scale 128"),
        ({}, ["--fp16.hysteresis", "2"], "--fp16.hysteresis needs --precision fp16, not auto"),
    ):
        with pytest.raises(ConfigError, match=re.escape(line)):
            parsed(tmp_path, content, *argv)


def test_a_configuration_made_in_python_is_held_too():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr 0\.00015 sets --lr 0\.00015, .* 1"):
        check_settings(SOURCE, {"lr": 1.0, "optim.name": "adamw", "batch_size": 8, "precision": "fp16"}.__getitem__, 1)


# what needs the package, or finds it missing


def test_without_a_launcher():
    with pytest.raises(ConfigError, match="--engine deepspeed needs a launcher"):
        engine("deepspeed", torch.nn.Linear(2, 2), adamw, World())


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs the package deepspeed .*the extra deepspeed of torch-lockstep"):
        module._package(World())


def test_a_package_that_cannot_start_is_one_line(monkeypatch):
    def broken(name):
        raise RuntimeError("CUDA_HOME does not exist\nand more")

    monkeypatch.setattr(module.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match="cannot start here: CUDA_HOME does not exist; use --engine fsdp"):
        module._package(World())
