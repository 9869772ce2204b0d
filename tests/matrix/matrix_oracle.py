"""What a run must end in, from a plain PyTorch loop: one process, one micro-batch after the other, no lockstep.

    wanted = oracle(model="batchnorm", fault="nan", left_out=True, precision="fp16", task="own")

It leaves the bad step out because it is told to. The order of the samples is lockstep's, which is documented.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import torch
from matrix_subject import (
    BAD,
    BATCH,
    BOUND,
    CHANGE,
    HELD_OUT,
    HIDDEN,
    LIMITED,
    MICRO,
    SHARE,
    SILENT,
    STEPS,
    WHOLE,
    Ascending,
    Samples,
    change,
    collate,
    drawn_sum,
    evaluates,
    loss_sum,
    make,
    mixed_rows,
    places,
    quantize,
    seeded,
    seeded_collation,
    seeded_micro,
    steps_of,
    warmed,
    weights_of,
    whole_loss,
)
from torch import nn

from lockstep.seeds import derive

__all__ = [
    *("ALPHA", "BETA2", "CLIP", "DECAY", "FLOOR", "GAMMA", "HYSTERESIS", "LR", "RANK", "WARMUP", "WEIGHT_DECAY"),
    *("SHARED", "WINDOW", "Wanted", "base_rate", "cyclic", "groups", "oracle"),
]

LR, WARMUP, FLOOR, CLIP, WEIGHT_DECAY, BETA2 = 0.01, 3, 0.1, 0.02, 0.1, 0.95
MOMENTUM = 0.8  # of the own optimizer
RANK, ALPHA = 2, 3.0  # of the adapters
GAMMA = 0.5  # of the plateau, whose task has another scale under fp16 too
WINDOW, HYSTERESIS = 3, 2
SHARED = ("lightning", "trainer")  # tasks whose model is `net` of another, and whose loss is a mean over samples
DECAY = 0.3  # of the average of the weights, which the task "options" has
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def base_rate(task):
    """The rate of AdamW; adapters are warned of a higher one."""
    return LR / 2 if task in ("adapters", "quantized") else LR


class Wanted(NamedTuple):
    """What a run must end in.

    Attributes:
        state: {"model/NAME", "optimizer/NAME/KEY", "scaler/...", "kept.average/NAME", "task/NAME": tensor}.
        buffers: {NAME: buffer}.
        evaluations: {steps taken: {"loss", "items", metric: number}}.
    """

    state: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    evaluations: dict[int, dict[str, float]]


@cache
def oracle(
    model, fault, left_out, precision, task="default", steps=None, moved=BATCH // MICRO, begins=(1,) * STEPS, kind="sum"
):
    """What a run is after so many steps; None: after all.

    Args:
        left_out: the bad step's update is not made, and what its forwards did to buffers is undone.
        task: as in the case.
        moved: the first so many micro-batches of a step move the buffers of the model "buffer": those of rank 0, whose
            buffers are everybody's.
        begins: by step, what its backwards begin with and the gradient is divided by: under DDP, which averages, the
            ranks. Where these are three, bf16 rounds each gradient to another neighbour.
        kind: the factor "step" of the case.
    """
    net, data, positions = make(model), Samples(model, fault, task=task), places(task)
    if task == "quantized":
        quantize(net, model)
    if task in ("adapters", "quantized"):
        _adapt(net, WHOLE[model])
    optimizers, whole, evaluations = _optimizers(net, task, model, kind), steps_of(task), {}
    all_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in all_groups]
    steps = whole if steps is None else steps
    trained = [p for p in net.parameters() if p.requires_grad]
    if kind == "unfrozen":
        change("frozen", model, net, CHANGE)
    scale, good = (2.0**16, 0) if precision == "fp16" else (1.0, 0)
    window, most = (WINDOW, HYSTERESIS) if task == "plateau" else (2000, 1)
    spared = most - 1  # overflows that leave the scale as it is
    moving = [(name, p) for name, p in net.named_parameters() if p.is_floating_point()]  # not 8 bits, or two of 4
    average = {f"kept.average/{name}": parameter.detach().clone() for name, parameter in moving}
    averages = {f"average/{name}": p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    averages = averages | {"averaging/updates": torch.zeros((), dtype=torch.float64)} if task == "options" else {}
    taken = []  # the steps that are applied
    for step in range(steps):
        change(kind, model, net, step)
        chosen = positions[step * BATCH : (step + 1) * BATCH]
        micro = [_batch(data, chosen[k : k + MICRO], (step, k // MICRO)) for k in range(0, len(chosen), MICRO)]
        items = sum(int(batch["kept"].sum()) for batch in micro) if task not in SHARED else SHARE * len(chosen)
        before = _copies(net)

        seen = []  # the micro-batches' losses, summed over samples

        def passed(seen=seen, micro=micro, items=items, begin=begins[step] * scale, step=step):
            """Fills the gradients, clipped; their norm."""
            net.zero_grad()
            for part, index in _losses(net, micro, items, precision, kind, step):
                kept = _copies(net)
                seen.append(part(begin))
                if model == "buffer" and index >= moved:
                    _put_back(net, kept)
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad /= begin
            return nn.utils.clip_grad_norm_(trained, CLIP)

        norm = passed()
        applied = math.isfinite(norm) and not (left_out and step == BAD)
        if applied:
            taken.append(step)
            for group, rate in zip(all_groups, rates, strict=True):
                group["lr"] = rate * _share(task, step, whole)
                if task == "options":
                    group["betas"] = (_cycle(whole)[step][1], BETA2)
            if task == "trainer":
                for group, (rate, beta) in zip(all_groups, by_hand(whole)[step], strict=True):
                    group |= {"lr": rate, "betas": (beta, BETA2)}
            kept = _copies(net)
            for optimizer in optimizers:
                optimizer.step(*([passed] if kind == "closure" else []))
            _put_back(net, kept)
            _learn(averages, net, task)
        else:
            _put_back(net, before)
        if task == "hooked":
            with torch.no_grad():
                for parameter in trained:
                    parameter.clamp_(-BOUND, BOUND)
        if precision == "fp16" and (applied or not math.isfinite(norm)):  # a spike left out says nothing of the scale
            scale, good, spared = _learnt(scale, good, spared, applied, window, most)
        net.zero_grad()
        for name, parameter in moving:
            average[f"kept.average/{name}"].mul_(0.75).add_(parameter.detach(), alpha=0.25)
        if task in ("own", "plateau", *SHARED) and (step + 1 == whole or (step + 1) % evaluates(task) == 0):
            evaluations[step + 1] = _evaluation(net, Samples(model, "none"), precision, task)
            if task == "lightning":
                evaluations[step + 1]["seen_step"] = sum(seen) / len(chosen)
    state = _state(net, optimizers, precision == "fp16", scale, good) | average | averages
    if precision == "fp16" and most > 1:
        state["scaler/spared"] = torch.tensor(float(spared), dtype=torch.float64)
    if task in ("adapters", "quantized"):  # no checkpoint has the base
        state = {name: tensor for name, tensor in state.items() if name not in _base(net)}
    if task in SHARED:
        return Wanted(
            *({_inside(name): tensor for name, tensor in all.items()} for all in (state, _copies(net))), evaluations
        )
    if task == "own":
        state |= _seen(taken)
    if kind == "counted":
        state["task/updates"] = torch.tensor(steps)  # the hook runs after a step that is left out too
    return Wanted(state, _copies(net), evaluations)


def _inside(name):
    """A tensor's name where the model is the attribute `net` of another."""
    group, _, rest = name.rpartition("/") if not name.startswith("optimizer/") else ("optimizer", "/", name[10:])
    return name if group == "scaler" else f"{group}/net.{rest}" if group else f"net.{rest}"


def _learnt(scale, good, spared, applied, window, most):
    """The scale, the good steps in a row, and the overflows that are spared, after a step."""
    if not applied:
        return (scale, 0, spared - 1) if spared else (scale / 2, 0, 0)
    return (scale * 2, 0, most - 1) if good + 1 == window else (scale, good + 1, spared)


class _Low(nn.Module):
    """W x + alpha / rank * B A x."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, layer.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * (ALPHA / RANK)


def _adapt(net, whole):
    """Adapters beside all linear layers but the one that is trained whole, and a head that is an embedding."""
    net.requires_grad_(False)
    torch.manual_seed(derive(0, "lora"))
    tied = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    for name, layer in list(net.named_children()):
        if name == whole:
            layer.requires_grad_(True)
        elif isinstance(layer, nn.Linear) and id(layer.weight) not in tied:
            setattr(net, name, _Low(layer))


def _base(net):
    """The names of all that is frozen, and of what quantized layers have beside parameters."""
    named = dict(net.named_parameters(remove_duplicate=False))
    known = named.keys() | dict(net.named_buffers()).keys()
    return {
        f"model/{name}" for name in net.state_dict() if name not in known or not named.get(name, _TRAINED).requires_grad
    }


_TRAINED = nn.Parameter(torch.zeros(0))  # a buffer counts as trained


def _autocast(precision):
    return torch.autocast("cpu", _HALF.get(precision), enabled=precision in _HALF)


def _learn(averages, net, task):
    """The averages move by a share that falls while they are young."""
    if task == "options":
        updates = float(averages["averaging/updates"])
        share = 1 - min(DECAY, (1 + updates) / (10 + updates))
        averages["averaging/updates"].add_(1)
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                held = averages[f"average/{name}"]
                held.add_(share * (parameter.detach() - held))


def _losses(net, micro, items, precision, kind, step):
    """What fills the gradients of a step, by micro-batch: (begin -> None, index)."""
    found = []

    def alone(begin, batch, index):
        seeded_micro(step, index)
        with _autocast(precision):
            if kind == "weighted":
                error = net(batch["x"], batch["token"]).float() - batch["target"]
                weights = weights_of(batch)
                loss = 0.05 * (error.square() * weights).sum()
                share = 1 / sum(float(weights_of(each).sum()) for each in micro)
            elif kind == "drawn":
                loss, share = drawn_sum(net, batch, step), 1 / items
            elif kind == "counted":
                loss, share = loss_sum(net, batch) * warmed(step), 1 / items
            else:
                loss, share = loss_sum(net, batch), 1 / items
        (loss * (begin * share)).backward()
        return float(loss.detach()) / SHARE

    def together(begin, batch, index):
        with _autocast(precision):
            found.append(net(batch["x"], batch["token"]).float())
        if batch is micro[-1]:
            every = {name: torch.cat([each[name] for each in micro]) for name in batch}
            (whole_loss(torch.cat(found), every) * begin).backward()

    each = together if kind in ("whole", "rows") else alone
    return [(partial(each, batch=batch, index=index), index) for index, batch in enumerate(micro)]


def _optimizers(net, task, model, kind):
    if task == "muon":
        hidden = net.get_parameter(HIDDEN[model])
        rest = [group | {"params": [p for p in group["params"] if p is not hidden]} for group in groups(net)]
        settings = {"lr": 2 * LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
        return [torch.optim.AdamW(rest, lr=LR, betas=(0.9, BETA2)), torch.optim.Muon([hidden], **settings)]
    if task != "own":
        chosen = _twice_for_biases(net) if task == "options" else groups(net)
        made = Ascending if kind == "closure" else torch.optim.AdamW
        return [made(chosen, lr=base_rate(task), betas=(0.9, BETA2), eps=1e-8)]
    matrices = [p for p in net.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
    both = [{"params": matrices}, {"params": vectors, "lr": 200 * LR}]
    return [torch.optim.SGD(both, lr=100 * LR, momentum=MOMENTUM)]


def _seen(steps):
    """What the task's own loss notes of these steps, which are applied: of each once."""
    trace, last = 0.0, -1
    for step in steps:
        trace, last = trace * 0.5 + step + 1, step
    counts = {"task/times": torch.tensor(len(steps)), "task/last": torch.tensor(last)}
    return counts | {"task/trace": torch.tensor(trace, dtype=torch.float64)}


def _evaluation(net, data, precision, task):
    """Over all held-out samples at once."""
    batch = collate([data[sample] for sample in range(LIMITED if task == "plateau" else HELD_OUT)])
    net.eval()
    with torch.no_grad(), _autocast(precision):
        found = net(batch["x"], batch["token"]).double()[batch["kept"]]
    net.train()
    target = batch["target"].double()[batch["kept"]]
    error, spread = found - target, target - target.mean()
    r2 = 1 - float(error.square().sum() / spread.square().sum())
    loss, absolute = 0.05 * float(error.square().mean()), float(error.abs().mean())
    if task in SHARED:
        return {"loss": loss * len(error) / (SHARE * HELD_OUT), "items": HELD_OUT, "absolute": absolute}
    return {"loss": loss, "items": len(error)} | ({"absolute": absolute, "r2": r2} if task == "own" else {})


def groups(net):
    """Matrices decay; vectors and embeddings, tied heads with them, do not."""
    embeddings = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in net.parameters() if p.requires_grad]
    decays = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def _twice_for_biases(net):
    """Each parameter in a group of its own; the rate of biases is twice that of the others."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    pairs = [(p, group["weight_decay"]) for group in groups(net) for p in group["params"]]
    twice = {id(p): names[id(p)].endswith(".bias") for p, _ in pairs}
    return [{"params": [p], "weight_decay": decay, "lr": LR * (1 + twice[id(p)])} for p, decay in pairs]


def cyclic(optimizer):
    """A scheduler of torch, made by hand: it cycles momenta, and rates that are unlike by group."""
    lows, tops = [LR / 4, LR / 2], [LR, LR]
    momenta = {"base_momentum": 0.8, "max_momentum": 0.9}
    return torch.optim.lr_scheduler.CyclicLR(optimizer, lows, tops, step_size_up=3, mode="triangular2", **momenta)


@cache
def by_hand(whole):
    """[[(rate, first beta) of each group] of each step]."""
    dummy = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], betas=(0.9, BETA2))
    schedule, found = cyclic(dummy), []
    for _ in range(whole):
        found.append([(float(group["lr"]), group["betas"][0]) for group in dummy.param_groups])
        dummy.step()
        schedule.step()
    return found


@cache
def _cycle(whole):
    """[(share of the rate, momentum)] of each step, as torch's scheduler has them."""
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    shape = {"pct_start": WARMUP / whole, "final_div_factor": 1 / (25 * FLOOR)}
    schedule, found = torch.optim.lr_scheduler.OneCycleLR(dummy, 1.0, total_steps=whole, **shape), []
    for step in range(whole):
        found.append((dummy.param_groups[0]["lr"], dummy.param_groups[0]["momentum"]))
        dummy.step()
        if step + 1 < whole:
            schedule.step()
    return found


def _own_factor(step, whole):
    return _factor(step, whole) if step == SILENT else (step + 1) / whole


def _factor(step, whole):
    """Warm-up, then half a cosine down to the floor at the end of the plan."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (whole - WARMUP)))


def _share(task, step, whole):
    """What the base rates are multiplied by."""
    if task == "options":
        return _cycle(whole)[step][0]
    if task == "plateau" and step >= WARMUP:  # it falls after each evaluation but the first
        return max(FLOOR, GAMMA ** max(0, step // evaluates(task) - 1))
    return _own_factor(step, whole) if task == "own" else _factor(step, whole)


def _batch(data, samples, place=(0, 0)):
    """The micro-batch of these samples: (step, index) is its place."""
    rows = []
    for epoch, sample in samples:
        seeded(sample, epoch)
        rows.append(data[sample])
    seeded_collation(*place)
    return mixed_rows(rows) if data.mixes else collate(rows)


def _copies(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def _put_back(net, kept):
    for name, buffer in net.named_buffers():
        buffer.copy_(kept[name])


def _state(net, optimizers, scaled, scale, good):
    found = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in (pair for each in optimizers for pair in each.state.get(parameter, {}).items()):
            found[f"optimizer/{name}/{key}"] = value
    if scaled:
        found["scaler/scale"] = torch.tensor(scale, dtype=torch.float64)
        found["scaler/good_steps"] = torch.tensor(float(good), dtype=torch.float64)
    return {name: tensor.detach().clone() for name, tensor in found.items()}
