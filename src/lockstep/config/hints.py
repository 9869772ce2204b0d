"""Suggest an option for a misspelt name, or for the name of another library.

    hint("lrr", option_list())                      # ": did you mean lr?"
    hint("learning_rate", option_list())            # ": here it is lr"
    hint("bf16", option_list())                     # ": here it is precision bf16"

Names are dotted fields of the configuration; `spell` converts them to flags.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

__all__ = ["FOREIGN", "hint"]

_MICRO_BATCHES = "{micro_batch_size}, which cuts {batch_size}, the samples of a step over all ranks"
_PROCESSES = "processes are started by `lockstep launch --nproc-per-node N -- train ...`"

_OTHER_NAME = "a run is never overwritten; use another {experiment_name}"

# Option of another library -> the hint; braces mark an option of lockstep.
FOREIGN: dict[str, str] = {
    # the model, the data and the folder
    "model": "{model_name}",
    "model_name_or_path": "{model_name}",
    "dataset": "{dataset_name}",
    "data_path": "{dataset_name}",
    "tokenizer_name": "{tokenizer}",
    "tokenizer_name_or_path": "{tokenizer}",
    "dataset_path": "{dataset_name}",
    "data_dir": "{dataset_name}",
    "train_file": "{dataset_name}",
    "dataset_config_name": "{data.subset}",
    "name": "{experiment_name}",
    "run_name": "{experiment_name}",
    "project": "{wandb_project}",
    "output_dir": "{save_dir}",
    "out_dir": "{save_dir}",
    "default_root_dir": "{save_dir}",
    "logging_dir": "{save_dir}",
    "checkpoint_dir": "{save_dir}",
    "overwrite_output_dir": _OTHER_NAME,
    "resume": "the same {experiment_name} resumes automatically",
    "resume_from_checkpoint": "the same {experiment_name} resumes automatically",
    "ckpt_path": "the same {experiment_name} resumes automatically",
    "pretrained_path": "{init_from}",
    "init_checkpoint": "{init_from}",
    "load_from_checkpoint": "{init_from}",
    "ignore_mismatched_sizes": "{init_drop}",
    # length and batch size
    "epochs": "{num_epochs}",
    "num_train_epochs": "{num_epochs}",
    "max_epochs": "{num_epochs}",
    "steps": "{max_steps}",
    "num_steps": "{max_steps}",
    "max_iters": "{max_steps}",
    "max_train_steps": "{max_steps}",
    "total_steps": "{max_steps}",
    "train_batch_size": "{batch_size}",
    "global_batch_size": "{batch_size}",
    "per_device_train_batch_size": "{micro_batch_size}",
    "per_device_eval_batch_size": "{eval_micro_batch_size}",
    "eval_batch_size": "{eval_micro_batch_size}",
    "limit_val_batches": "{limit_eval_batches}",
    "limit_test_batches": "{limit_eval_batches}",
    "max_eval_batches": "{limit_eval_batches}",
    "device_batch_size": "{micro_batch_size}",
    "train_micro_batch_size_per_gpu": "{micro_batch_size}",
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "accumulate_grad_batches": _MICRO_BATCHES,
    "max_seq_length": "{seq_len}",
    "max_seq_len": "{seq_len}",
    "max_length": "{seq_len}",
    "block_size": "{seq_len}",
    "context_length": "{seq_len}",
    "model_max_length": "{seq_len}",
    "max_len": "{seq_len}",
    "num_workers": "{data.workers}",
    "dataloader_num_workers": "{data.workers}",
    "workers": "{data.workers}",
    "dataloader_drop_last": "{data.drop_last}",
    # the optimizer
    "learning_rate": "{lr}",
    "optimizer": "{optim.name}",
    "optim": "{optim.name}",
    "opt": "{optim.name}",
    "wd": "{optim.weight_decay}",
    "max_grad_norm": "{optim.clip}",
    "grad_clip": "{optim.clip}",
    "gradient_clip_val": "{optim.clip}",
    "clip_grad": "{optim.clip}",
    "clip_grad_norm": "{optim.clip}",
    "gradient_clipping": "{optim.clip}",
    "adam_beta1": "{optim.beta1}",
    "adam_beta2": "{optim.beta2}",
    "adam_epsilon": "{optim.eps}",
    "num_warmup_steps": "{optim.warmup_steps}",
    "warmup_ratio": "{optim.warmup_steps}, which takes a share of the plan too: 5%",
    "warmup_epochs": "{optim.warmup_steps}, which takes a number of epochs too: 1epoch",
    "lr_scheduler_type": "{optim.schedule}",
    "lr_scheduler": "{optim.schedule}",
    "sched": "{optim.schedule}",
    "use_ema": "{optim.ema}, the decay",
    "ema_decay": "{optim.ema}",
    "find_lr": "examples/find_lr.py tries rates and suggests one for {lr}",
    "auto_lr_find": "examples/find_lr.py tries rates and suggests one for {lr}",
    "lr_find": "examples/find_lr.py tries rates and suggests one for {lr}",
    "scheduler": "{optim.schedule}",
    # adapters
    "use_lora": "{lora.rank}, above 0",
    "use_peft": "{lora.rank}, above 0",
    "lora_r": "{lora.rank}",
    "lora_rank": "{lora.rank}",
    "lora_alpha": "{lora.alpha}",
    "lora_dropout": "{lora.dropout}",
    "lora_target_modules": "{lora.targets}",
    "target_modules": "{lora.targets}",
    "modules_to_save": "{lora.modules_to_save}",
    # precision, kernels and engines
    "bf16": "{precision} bf16",
    "fp16": "{precision} fp16",
    "fp32": "{precision} float32",
    "amp": "{precision} bf16",
    "mixed_precision": "{precision}",
    "dtype": "{precision}",
    "torch_dtype": "{precision}",
    "tf32": "{matmul_precision} high",
    "deterministic": "{exact}",
    "full_determinism": "{exact}",
    "seed_everything": "{seed}",
    "torch_compile": "{compile}",
    "gradient_checkpointing": "{activation_checkpointing} full",
    "attn_implementation": "{attention}",
    "flash_attn": "{attention} flash",
    "use_flash_attention": "{attention} flash",
    "sync_batchnorm": "{batchnorm} sync",
    "cpu": "{device} cpu",
    "accelerator": "{device}",
    "use_cpu": "{device} cpu",
    "no_cuda": "{device} cpu",
    "cuda": "{device} cuda",
    "strategy": "{engine}",
    "ddp": "{engine} ddp",
    "fsdp": "{engine} fsdp",
    "fsdp_config": "{engine} fsdp",
    "ddp_find_unused_parameters": "{engine_options.find_unused_parameters}",
    # output and evaluation
    "logging_steps": "{log_freq}",
    "log_every_n_steps": "{log_freq}",
    "log_interval": "{log_freq}",
    "max_eval_samples": "{limit_eval_batches}, in micro-batches",
    "print_freq": "{log_freq}",
    "logging_strategy": "{log_freq}",
    "save_steps": "{ckpt_freq}",
    "save_interval": "{ckpt_freq}",
    "save_every": "{ckpt_freq}",
    "save_freq": "{ckpt_freq}",
    "save_every_n_steps": "{ckpt_freq}",
    "save_strategy": "{ckpt_freq}, which takes 1epoch too",
    "every_n_train_steps": "{ckpt_freq}",
    "eval_steps": "{eval_freq}",
    "eval_interval": "{eval_freq}",
    "val_check_interval": "{eval_freq}",
    "eval_every": "{eval_freq}",
    "eval_every_n_steps": "{eval_freq}",
    "eval_strategy": "{eval_freq}, which takes 1epoch too",
    "evaluation_strategy": "{eval_freq}, which takes 1epoch too",
    "val_freq": "{eval_freq}",
    "check_val_every_n_epoch": "{eval_freq}, which takes 1epoch too",
    "save_total_limit": "{checkpoint.keep}",
    "metric_for_best_model": "{best_metric}",
    "monitor": "{best_metric}",
    "greater_is_better": "{best_metric} NAME:max or NAME:min",
    "load_best_model_at_end": "the best checkpoint by {best_metric} is always kept; lockstep.load loads it",
    "early_stopping_patience": "{patience}",
    "early_stopping": "{patience}",
    "early_stop": "{patience}",
    "early_stopping_threshold": "{min_delta}",
    "report_to": "{wandb}, {tensorboard} or {mlflow}",
    "with_tracking": "{wandb} or {tensorboard}",
    "logger": "{wandb} or {tensorboard}",
    "wandb_run_name": "{experiment_name}",
    "wandb_name": "{experiment_name}",
    # the processes
    "nproc_per_node": _PROCESSES,
    "num_processes": _PROCESSES,
    "devices": _PROCESSES,
    "gpus": _PROCESSES,
    "gpu": _PROCESSES,
    "world_size": _PROCESSES,
    "master_port": _PROCESSES,
    "master_addr": _PROCESSES,
    "nnodes": _PROCESSES,
    "num_nodes": _PROCESSES,
}


def hint(
    name: str, known: Iterable[str], spell: Callable[[str], str] = str, foreign: Mapping[str, str] = FOREIGN
) -> str:
    """Return the rest of "unknown NAME": the option that is probably meant, or "".

    Args:
        name: with underscores and without dashes; dotted in a section.
        known: the valid names.
        spell: converts a name for the message, for example to a flag.
        foreign: a name of other libraries -> the hint for it.
    """
    names = list(known)
    section, _, key = name.rpartition(".")
    if key in foreign:
        return _hint_text(foreign[key], spell)
    parts = []
    for other in names:
        if other.rpartition(".")[2] == key:
            parts.append(other)
    begun = []
    for other in names:
        if other.rpartition(".")[2].startswith(key) and len(key) > 2:
            begun.append(other)
    # Options of the same section come first.
    parts += sorted(begun, key=lambda other: other.rpartition(".")[0] != section)
    close = parts or difflib.get_close_matches(name, names, n=1)
    if not close and (alike := difflib.get_close_matches(key, foreign, n=1, cutoff=0.85)):
        return _hint_text(foreign[alike[0]], spell)
    if close:
        return f": did you mean {spell(close[0])}?"
    return ""


def _hint_text(text: str, spell: Callable[[str], str]) -> str:
    message = re.sub(r"{([\w.]+)}", lambda match: spell(match[1]), text)
    if text.startswith("{"):
        return f": here it is {message}"
    return f": {message}"
