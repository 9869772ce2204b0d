"""Tables of how `lockstep.from_trainer` treats a Trainer's arguments, callbacks and methods, and those of trl."""

from lockstep.adapters.rows import rows

__all__ = [
    "ARGUMENTS",
    "BATCH_LOSSES",
    "CALLBACKS",
    "EVALUATION",
    "GENERATING",
    "LOOP",
    "OPTIMIZERS",
    "SAMPLING",
    "SINKS",
    "TRL",
    "TRL_TRAINERS",
]


# Methods of a subclass that a run would not call.
LOOP = (
    *("training_step", "get_batch_samples", "get_train_dataloader", "create_optimizer_and_scheduler"),
    "_inner_training_loop",
)
# Methods of a subclass that a run with evaluations would not call.
EVALUATION = ("evaluate", "evaluation_loop", "get_eval_dataloader")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
SAMPLING = ("random", "sequential", "group_by_length")
SINKS = ("tensorboard", "wandb", "mlflow")
# Callbacks of transformers and trl that are supported -> what becomes of them.
CALLBACKS = {
    "EarlyStoppingCallback": "patience and min_delta of the Config",
    "TensorBoardCallback": "tensorboard of the Config",
    "WandbCallback": "wandb of the Config",
    "MLflowCallback": "mlflow of the Config",
    "DefaultFlowCallback": "done by the run",
    "PrinterCallback": "done by the run",
    "ProgressCallback": "done by the run",
    "NotebookProgressCallback": "done by the run",
    "JITCheckpointCallback": "done by the run",
    "RichProgressCallback": "done by the run",
}

ARGUMENTS = rows("""
output_dir | becomes | save_dir and experiment_name, its last part
per_device_train_batch_size | becomes | micro_batch_size; with devices and accumulation batch_size
gradient_accumulation_steps | becomes | a factor of batch_size
num_train_epochs | becomes | num_epochs; a broken number max_steps
max_steps | becomes | max_steps
learning_rate | becomes | lr
weight_decay | becomes | optim.weight_decay
adam_beta1 | becomes | optim.beta1
adam_beta2 | becomes | optim.beta2
adam_epsilon | becomes | optim.eps
max_grad_norm | becomes | optim.clip
bf16 | becomes | precision
fp16 | becomes | precision
tf32 | becomes | matmul_precision high
activation_checkpointing | becomes | activation_checkpointing
activation_checkpointing_kwargs | becomes | activation_checkpointing every:N
gradient_checkpointing | becomes | activation_checkpointing
gradient_checkpointing_kwargs | becomes | activation_checkpointing every:N
torch_compile | becomes | compile
logging_strategy | becomes | log_freq; no: 1epoch
logging_steps | becomes | log_freq
eval_strategy | becomes | eval_freq; no: one evaluation, at the end
eval_steps | becomes | eval_freq
per_device_eval_batch_size | becomes | eval_micro_batch_size
save_strategy | becomes | ckpt_freq; best: with each evaluation; no: at the end
save_steps | becomes | ckpt_freq
save_total_limit | becomes | checkpoint.keep; none: all are kept
metric_for_best_model | becomes | best_metric
greater_is_better | becomes | best_metric
seed | becomes | seed
dataloader_num_workers | becomes | data.workers
dataloader_prefetch_factor | becomes | data.prefetch
dataloader_drop_last | becomes | limit_train_batches: whole steps of each epoch
ddp_timeout | becomes | timeout
full_determinism | becomes | exact
use_cpu | becomes | device
report_to | becomes | tensorboard, wandb, mlflow
lr_scheduler_type | task | its schedule; a plateau optim.schedule
lr_scheduler_kwargs | task | its schedule
warmup_steps | task | its schedule
warmup_ratio | task | its schedule
optim | task | its optimizer
optim_args | task | its optimizer
label_smoothing_factor | task | its loss
label_names | task | its evaluation
remove_unused_columns | task | its data
data_seed | task | its order
train_sampling_strategy | task | its order: random, sequential or group_by_length
group_by_length | task | its order
prediction_loss_only | task | its evaluation
include_for_metrics | task | its evaluation
eval_do_concat_batches | task | its evaluation
average_tokens_across_devices | idle | a step's loss is over its items on all devices
load_best_model_at_end | idle | lockstep.load(result.folder, task) is the best
run_name | idle | the run is called as its folder
project | idle | wandb_project says it
logging_first_step | task | callbacks of yours get on_log; records follow log_freq
logging_nan_inf_filter | idle | guards.nonfinite decides
logging_dir | idle | records lie in the run's folder
log_level | idle | lockstep's log has its own levels
log_level_replica | idle | lockstep's log has its own levels
log_on_each_node | idle | each rank has a log file
disable_tqdm | idle | the run has its own progress
eval_accumulation_steps | idle | each micro-batch's predictions go to the host
eval_use_gather_object | idle | predictions are gathered as they are
include_num_input_tokens_seen | idle | records count items
save_only_model | idle | checkpoints resume
save_on_each_node | idle | one node writes
save_safetensors | idle | no checkpoint holds a pickle
ignore_data_skip | idle | a resume stands at its place at once
restore_callback_states_from_checkpoint | idle | a resume always does
enable_jit_checkpoint | idle | a signal is waited for, and saved at
dataloader_pin_memory | idle | batches for a GPU are pinned
dataloader_persistent_workers | idle | they stay as long as the run
dataloader_in_order | idle | batches come in their order
ddp_find_unused_parameters | idle | found out in the first step
ddp_bucket_cap_mb | idle | engine_options.bucket_mb says it
ddp_broadcast_buffers | idle | buffers are a part of the step
ddp_static_graph | idle | found out in the first step
ddp_backend | idle | chosen by the device
torch_empty_cache_steps | idle | the allocator's cache is left alone
skip_memory_metrics | idle | records have the memory
use_cache | idle | the Trainer has set it in the model
do_train | idle | read by scripts
do_eval | idle | read by scripts
do_predict | idle | read by scripts
local_rank | idle | the launcher says it
length_column_name | idle | lengths are those of the samples
hub_token | idle | nothing is pushed, see push_to_hub
hub_private_repo | idle | nothing is pushed, see push_to_hub
hub_always_push | idle | nothing is pushed, see push_to_hub
hub_strategy | idle | nothing is pushed, see push_to_hub
hub_model_id | idle | nothing is pushed, see push_to_hub
hub_revision | idle | nothing is pushed, see push_to_hub
bf16_full_eval | refused | evaluations have the run's precision: set the precision alone
fp16_full_eval | refused | evaluations have the run's precision: set the precision alone
optim_target_modules | refused | such optimizers are not served: leave it out, with optim="adamw_torch"
torch_compile_backend | refused | torch's own compiler is taken: leave it out
torch_compile_mode | refused | torch's default mode is taken: leave it out
use_liger_kernel | refused | it changes the model: apply it to the model yourself, before the Trainer is made
liger_kernel_config | refused | apply it to the model yourself, before the Trainer is made
neftune_noise_alpha | refused | add the noise in the model's forward, or leave it out
auto_find_batch_size | refused | set per_device_train_batch_size; `lockstep plan` computes what fits
eval_delay | refused | evaluations begin with the first eval_steps: leave it out
eval_on_start | refused | call trainer.evaluate() before, or leave it out
batch_eval_metrics | refused | compute_metrics gets the whole set: leave it out
push_to_hub | refused | leave it out, and push what `lockstep export` writes
resume_from_checkpoint | refused | a run resumes by its folder; a Trainer's checkpoint gives weights: load them first
accelerator_config | refused | leave its fields at their defaults: batches are cut by lockstep
parallelism_config | refused | tensor and sequence parallelism are not served: leave it out
dataloader_multiprocessing_context | refused | loader processes start as Python's default says: leave it out
fsdp | refused | leave it out, and give the config its engine: dataclasses.replace(config, engine=...)
fsdp_config | refused | leave it out: dataclasses.replace(config, engine=..., engine_options=...)
deepspeed | refused | leave it out, and give the config its engine: dataclasses.replace(config, engine=...)
debug | refused | guards.nonfinite names what is not finite: leave it out
sortish_sampler | refused | batches by length would depend on the data: leave it out
""")

# Trainers of trl that are supported.
TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
# Trainers of trl that generate samples between their steps; its others are refused without this reason.
GENERATING = (
    *("A2POTrainer", "AsyncDistillationTrainer", "AsyncGRPOTrainer", "DistillationTrainer", "GKDTrainer"),
    *("GMPOTrainer", "GOLDTrainer", "GRPOTrainer", "IWOPDTrainer", "NashMDTrainer", "OnlineDPOTrainer", "PPOTrainer"),
    *("RLOOTrainer", "SDFTTrainer", "SDPOTrainer", "ServerDistillationTrainer", "TPOTrainer", "XPOTrainer"),
)
# Losses of DPO that depend on the whole batch: sorted in it, or a mean over tokens next to one over pairs.
BATCH_LOSSES = ("aot", "aot_unpaired", "sft")

# What SFTConfig, DPOConfig and RewardConfig of trl add to TrainingArguments.
TRL = rows("""
model_init_kwargs | task | its model
trust_remote_code | task | its model
disable_dropout | task | its model
chat_template_path | task | its data
dataset_text_field | task | its data
dataset_kwargs | task | its data
dataset_num_proc | task | its data
eos_token | task | its data
pad_token | task | its data
max_length | task | its data
truncation_mode | task | its data
shuffle_dataset | task | its data
packing | task | its data
packing_strategy | task | its data
padding_free | task | its data
pad_to_multiple_of | task | its data
eval_packing | task | its data
precompute_ref_log_probs | task | its data
precompute_ref_batch_size | task | its data
completion_only_loss | task | its loss
assistant_only_loss | task | its loss
loss_type | task | its loss
loss_weights | task | its loss
router_aux_loss_coef | task | its loss
beta | task | its loss
label_smoothing | task | its loss
ld_alpha | task | its loss
f_divergence_type | task | its loss
f_alpha_divergence_coef | task | its loss
use_weighting | task | its loss
discopop_tau | task | its loss
center_rewards_coefficient | task | its loss
ref_model_mixup_alpha | idle | nothing without sync_ref_model
ref_model_sync_steps | idle | nothing without sync_ref_model
sync_ref_model | refused | the reference does not change within a run: leave it out
activation_offloading | refused | activations are not offloaded: leave it out
""")
