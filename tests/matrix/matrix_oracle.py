"""What a run must end in, from a plain PyTorch loop: one process, one micro-batch after the other, no lockstep.

    state = oracle(model="batchnorm", fault="nan", left_out=True, precision="fp16", steps=10)

It leaves the bad step out because it is told to. The order of the samples is lockstep's, which is documented.
"""

import math
from functools import cache

import torch
from matrix_subject import BAD, BATCH, MICRO, STEPS, Samples, collate, loss_sum, make, order, seeded
from torch import nn

__all__ = ["CLIP", "FLOOR", "LR", "WARMUP", "WEIGHT_DECAY", "oracle"]

LR, WARMUP, FLOOR, CLIP, WEIGHT_DECAY, BETA2 = 0.01, 3, 0.1, 0.02, 0.1, 0.95
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def oracle(model, fault, left_out, precision, steps=STEPS, moved=BATCH // MICRO):
    """{"model/NAME", "optimizer/NAME/KEY", "scaler/...", "kept.average/NAME": tensor} and {NAME: buffer} then.

    Args:
        left_out: the bad step's update is not made, and what its forwards did to buffers is undone.
        moved: the first so many micro-batches of a step move the buffers of the model "buffer": those of rank 0, whose
            buffers are everybody's.
    """
    net, data, places = make(model), Samples(model, fault), order()
    optimizer = torch.optim.AdamW(_groups(net), lr=LR, betas=(0.9, BETA2), eps=1e-8)
    trained = [p for p in net.parameters() if p.requires_grad]
    scale, good = (2.0**16, 0) if precision == "fp16" else (1.0, 0)
    average = {f"kept.average/{name}": parameter.detach().clone() for name, parameter in net.named_parameters()}
    for step in range(steps):
        chosen = places[step * BATCH : (step + 1) * BATCH]
        micro = [_batch(data, chosen[k : k + MICRO]) for k in range(0, len(chosen), MICRO)]
        items = sum(int(batch["kept"].sum()) for batch in micro)
        before = _copies(net)
        for index, batch in enumerate(micro):
            kept = _copies(net)
            with torch.autocast("cpu", _HALF.get(precision), enabled=precision in _HALF):
                loss = loss_sum(net, batch)
            (loss * (scale / items)).backward()
            if model == "buffer" and index >= moved:
                _put_back(net, kept)
        for parameter in trained:
            parameter.grad /= scale
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        applied = math.isfinite(norm) and not (left_out and step == BAD)
        if applied:
            for group in optimizer.param_groups:
                group["lr"] = LR * _factor(step)
            optimizer.step()
        else:
            _put_back(net, before)
        if precision == "fp16" and (applied or not math.isfinite(norm)):  # a spike left out says nothing of the scale
            scale, good = (scale, good + 1) if applied else (scale / 2, 0)
        optimizer.zero_grad()
        for name, parameter in net.named_parameters():
            average[f"kept.average/{name}"].mul_(0.75).add_(parameter.detach(), alpha=0.25)
    return _state(net, optimizer, precision == "fp16", scale, good) | average, _copies(net)


def _groups(net):
    """Matrices decay; vectors and embeddings, tied heads with them, do not."""
    embeddings = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in net.parameters() if p.requires_grad]
    decays = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def _factor(step):
    """Warm-up, then half a cosine down to the floor at the end of the plan."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def _batch(data, samples):
    rows = []
    for sample in samples:
        seeded(sample)
        rows.append(data[sample])
    return collate(rows)


def _copies(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def _put_back(net, kept):
    for name, buffer in net.named_buffers():
        buffer.copy_(kept[name])


def _state(net, optimizer, scaled, scale, good):
    found = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{name}/{key}"] = value
    if scaled:
        found["scaler/scale"] = torch.tensor(scale, dtype=torch.float64)
        found["scaler/good_steps"] = torch.tensor(float(good), dtype=torch.float64)
    return {name: tensor.detach().clone() for name, tensor in found.items()}
