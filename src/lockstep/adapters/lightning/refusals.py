"""Tables of how `lockstep.from_lightning` treats a Trainer's arguments, callbacks and a module's hooks."""

from lockstep.adapters.rows import rows

__all__ = [
    "ARGUMENTS",
    "CALLBACKS",
    "CALLBACK_HOOKS",
    "HOOKS",
    "LOGGING",
    "PRECISIONS",
    "WAYS",
]


# Hooks of a module that a run would not call, or could not serve faithfully -> the way out.
HOOKS = {
    "optimizer_step": "the engine takes the step: write the rates as a scheduler of configure_optimizers",
    "backward": "the engine runs the backward: scale or change the loss in training_step",
    "configure_gradient_clipping": "the engine clips by the norm: set gradient_clip_val, or optim.clip",
    "configure_sharded_model": "the engine splits the model: use configure_model",
    "on_validation_model_zero_grad": "the engine clears gradients: leave it out",
    "tbptt_split_batch": "Lightning 2 removed it: cut the sequence in training_step",
    "training_epoch_end": "Lightning 2 removed it: write on_train_epoch_end",
    "validation_epoch_end": "Lightning 2 removed it: write on_validation_epoch_end",
    "test_epoch_end": "Lightning 2 removed it: write on_test_epoch_end",
    "training_step_end": "Lightning 2 removed it: do it in training_step",
    "validation_step_end": "Lightning 2 removed it: do it in validation_step",
}

# Hooks of a callback that a run would not call, unless num_sanity_val_steps is 0 -> the way out.
CALLBACK_HOOKS = {
    "on_sanity_check_start": "steps are tried without callbacks: set num_sanity_val_steps=0, or use on_train_start",
    "on_sanity_check_end": "steps are tried without callbacks: set num_sanity_val_steps=0, or use on_train_start",
}

PRECISIONS = ("32-true", "32", "16-mixed", "bf16-mixed", "bf16-true", "64-true", "64")

# Callbacks of Lightning that are served -> what becomes of them.
CALLBACKS = {
    "EarlyStopping": "patience, patience_metric and min_delta of the Config",
    "ModelCheckpoint": "best_metric, ckpt_freq and checkpoint.keep of the Config",
    "EMAWeightAveraging": "optim.ema of the Config",
    "LambdaCallback": "its functions are called as hooks",
    "ModelSummary": "done by the run",
    "RichModelSummary": "done by the run",
    "ProgressBar": "done by the run",
    "TQDMProgressBar": "done by the run",
    "RichProgressBar": "done by the run",
    "DeviceStatsMonitor": "done by the run",
    "ThroughputMonitor": "done by the run",
    "LearningRateMonitor": "done by the run",
    "OnExceptionCheckpoint": "done by the run",
}
# Callbacks of Lightning that are refused -> the way out.
WAYS = {
    "StochasticWeightAveraging": "dataclasses.replace(config, optim=...) with an ema averages the weights",
    "WeightAveraging": "EMAWeightAveraging is served, and so is the config's optim.ema",
    "GradientAccumulationScheduler": "a step has one size: set accumulate_grad_batches",
    "LearningRateFinder": "examples/find_lr.py shows how to try rates",
    "BatchSizeFinder": "`lockstep plan` computes the largest micro-batch that fits",
    "SpikeDetection": "the config's guards.spike does it",
    "Timer": "send the run a signal, or let the queue do it: it saves and resumes later",
}

# Arguments of `self.log` and `self.log_dict`.
LOGGING = rows("""
name | task | the name, in the run's records and for monitors
value | task | what is reduced
dictionary | task | the names and what is reduced
prog_bar | task | the value is in trainer.progress_bar_metrics
logger | task | False: the Trainer's loggers and trainer.logged_metrics lack it
on_step | task | a record every log_every_n_steps
on_epoch | task | a record at the end of the epoch
reduce_fx | task | mean, sum, min or max
add_dataloader_idx | task | False: the name alone, without the index of the set
batch_size | task | the weight of the value in a mean
metric_attribute | task | the metric to compute at the end of the epoch
enable_graph | idle | values are detached: the loss is what training_step returns
sync_dist | idle | values are reduced over all ranks
rank_zero_only | idle | values are reduced over the ranks that log them
sync_dist_group | refused | values are reduced over all ranks: leave it out
""")

ARGUMENTS = rows("""
accelerator | becomes | device
strategy | becomes | engine, where a launcher started the run; "ddp" and "auto" are auto
devices | becomes | a factor of batch_size, whatever there is when it runs
num_nodes | becomes | a factor of batch_size
precision | becomes | precision
logger | task | it gets what is logged, beside the run's own sinks
callbacks | becomes | see Callbacks
fast_dev_run | becomes | max_steps, limit_eval_batches
max_epochs | becomes | num_epochs
max_steps | becomes | max_steps
limit_train_batches | becomes | limit_train_batches
limit_val_batches | becomes | limit_eval_batches; 0: no evaluation
limit_test_batches | task | task.test()
limit_predict_batches | task | task.predict()
val_check_interval | becomes | eval_freq; 1 is each step, 1.0 each epoch
check_val_every_n_epoch | becomes | eval_freq; not beside a val_check_interval below an epoch
log_every_n_steps | becomes | log_freq
enable_checkpointing | becomes | ckpt_freq; False: at the end alone
accumulate_grad_batches | becomes | a factor of batch_size
gradient_clip_val | becomes | optim.clip
deterministic | becomes | exact
sync_batchnorm | becomes | batchnorm
default_root_dir | becomes | save_dir
num_sanity_val_steps | idle | one micro-batch of each set is tried before step 1
enable_progress_bar | idle | the run has its own
enable_model_summary | idle | lockstep plan shows the model
benchmark | idle | it is torch's own setting, and stays
inference_mode | idle | evaluations have no gradients
use_distributed_sampler | idle | samples are shared out by lockstep
barebones | idle | what is logged costs little here
enable_autolog_hparams | task | False: the loggers get no hyperparameters
min_epochs | refused | nothing ends a run early but EarlyStopping: leave it out
min_steps | refused | nothing ends a run early but EarlyStopping: leave it out
max_time | refused | send the run a signal, or let the queue do it: it saves and resumes later
overfit_batches | refused | set limit_train_batches, and a loader without shuffle
gradient_clip_algorithm | refused | gradients are clipped by their norm: leave it out
profiler | refused | dataclasses.replace(config, profile="10:20"), see docs/profile.md
detect_anomaly | refused | guards.nonfinite names what is not finite: leave it out
plugins | refused | precision, ranks and checkpoints are lockstep's: leave them out
reload_dataloaders_every_n_epochs | refused | the samples of a run are fixed: change them in the dataset by epoch
model_registry | refused | checkpoints lie in the run's folder: leave it out
""")
