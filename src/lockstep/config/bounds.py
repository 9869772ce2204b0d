"""What the numbers of a configuration may be.

BOUNDS["optim.clip"]        # (least, most, what it must be)
"""

from lockstep.engines.options import BOUNDS as ENGINE_BOUNDS

__all__ = ["BOUNDS"]

BOUNDS: dict[str, tuple[float, float, str]] = {
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2**63 - 1"),
    "num_epochs": (1, 10**9, "at least 1"),
    "max_steps": (0, 10**12, "a number of steps, or 0 for as many as --num-epochs makes"),
    "extend_to": (0, 10**12, "a number of steps, or of epochs as in 3epochs"),
    "stop_at": (0, 10**12, "a step, or 0"),
    "lr": (0, 1e6, "a finite number, not negative"),
    "batch_size": (1, 10**9, "at least 1"),
    "micro_batch_size": (1, 10**9, "at least 1, or auto"),
    "seq_len": (1, 10**7, "at least 1"),
    "log_freq": (1, 10**9, "at least 1"),
    "ckpt_freq": (0, 10**12, "a number of steps, or 0 for the end alone"),
    "eval_freq": (0, 10**12, "a number of steps, or 0 for the end alone"),
    "patience": (0, 10**9, "a number of evaluations, or 0 for never"),
    "min_delta": (0, 1e12, "a number from 0"),
    "timeout": (0.1, 10**7, "a number of seconds from 0.1"),
    "data.workers": (0, 1024, "a number of processes from 0 to 1024"),
    "data.prefetch": (1, 10**4, "at least 1"),
    "data.evaluation": (0.0001, 0.5, "a share from 0.0001 to 0.5"),
    "data.vocab_size": (257, 10**7, "at least 257 (256 bytes and the separator)"),
    "model.dropout": (0, 0.99, "a probability from 0 to 0.99"),
    "model.loss_chunk": (-1, 10**9, "a number of tokens, 0 for all at once, or -1 for what their size suggests"),
    "lora.rank": (0, 10**5, "a number of rows, or 0 for no adapters"),
    "lora.alpha": (0, 1e6, "a number above 0, or 0 for twice the rank"),
    "lora.dropout": (0, 0.99, "a probability from 0 to 0.99"),
    "optim.beta1": (0, 0.999999, "from 0 to below 1"),
    "optim.beta2": (0, 0.9999999, "from 0 to below 1"),
    "optim.eps": (0, 1, "from 0 to 1"),
    "optim.momentum": (0, 0.999999, "from 0 to below 1"),
    "optim.muon_lr": (0, 1e6, "a rate, or 0 for that of --lr"),
    "optim.muon_momentum": (0, 0.999999, "from 0 to below 1"),
    "optim.ns_steps": (1, 99, "a number of iterations from 1 to 99"),
    "optim.weight_decay": (0, 1e6, "a finite number, not negative"),
    "optim.layer_decay": (0.01, 1, "a share from 0.01 to 1"),
    "optim.clip": (0, 1e12, "a norm above 0, or 0 for no clipping"),
    "optim.warmup_steps": (0, 10**12, "a number of steps, or auto"),
    "optim.period": (0, 10**12, "a number of steps, or 0 for the whole plan"),
    "optim.cooldown": (0, 1, "a share from 0 to 1"),
    "optim.power": (0.001, 100, "a number from 0.001 to 100"),
    "optim.gamma": (0, 1, "a share from 0 to 1"),
    "optim.floor": (0, 1, "a share from 0 to 1"),
    "checkpoint.keep": (1, 10**6, "at least 1"),
    "checkpoint.every": (0, 10**12, "a number of steps, or 0"),
    "guards.limit": (0, 10**6, "a number of steps"),
    "guards.desync_freq": (0, 10**12, "a number of steps, or 0 for none"),
    "guards.straggler": (0, 1000, "a ratio, or 0 for never"),
    "guards.retries": (0, 1000, "a number from 0 to 1000"),
    "guards.bad_samples": (0, 10**9, "a number of samples"),
    **{f"engine_options.{name}": bounds for name, bounds in ENGINE_BOUNDS.items()},
}
