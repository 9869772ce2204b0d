"""Models cut into 2 and 4 stages against one process: gradients, weights, draws, messages, memory, refusals."""

import gc
import random
import time
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from ranks import run
from refusals import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.distributed import collectives
from lockstep.distributed.replicas import form_replicas
from lockstep.engines.blocks import repeated_layers
from lockstep.engines.mesh_norms import StageNorm
from lockstep.engines.optimizer_step import total_norm
from lockstep.errors import ConfigError, LockstepError, PeerError
from lockstep.models.chunked_loss import summed_cross_entropy
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stages import StageIndex, check_pipeline, cut_stage
from lockstep.task import Task

SHAPE = GPTConfig(layers=4, heads=2, width=16, vocab_size=60, context=12, dropout=0.1)
MICRO_BATCHES, STEPS, CLIP = 5, 3, 0.5
# Of a tensor's largest value, in float64.
ROUNDING = 1e-12


class UntiedGPT(GPT):
    """A head of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.head = nn.Linear(config.width, config.padded_vocab, bias=False)
        self.reset_parameters()

    def _head(self, x):
        return self.head(x)


def make(kind):
    torch.manual_seed(5)
    if kind == "llama":
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=64, num_hidden_layers=3, use_cache=False, attention_dropout=0.1, initializer_range=0.3, **sizes
        )
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    model = GPT if kind == "tied" else UntiedGPT
    return model(SHAPE).double()


def task_loss(model, batch):
    """Of a user's task, which knows nothing of stages, and catches what it can."""
    ids, labels = batch
    try:
        output = model(ids)
    except Exception as error:
        raise AssertionError("a stage's end must not look like an error") from error
    return summed_cross_entropy(getattr(output, "logits", output), labels)


def micro_batches():
    """Ids and labels, of several lengths."""
    draw = torch.Generator().manual_seed(3)
    batches = []
    for number in range(MICRO_BATCHES):
        ids = torch.randint(60, (2, 11 - 2 * (number % 3)), generator=draw)
        batches.append((ids[:, :-1], ids[:, 1:].clone()))
    return batches


ROOT = torch.tensor(1 / 80, dtype=torch.float64)


def alone(model, step):
    """Run a step's passes in one process; return its losses."""
    losses = []
    for number, batch in enumerate(micro_batches()):
        torch.manual_seed(100 * step + number)
        loss = task_loss(model, batch)
        loss.backward(ROOT)
        losses.append(loss.detach())
    return losses


def stage_of(world, model, index=None):
    """Cut the model; return its stage."""
    index = index or StageIndex(world.rank, world.size)
    return cut_stage(model, repeated_layers(model), task_loss, micro_batches()[0], index)


def piped(pipeline, model, step, watch=None):
    """Run a step's passes in stages; return the losses."""
    batches = micro_batches()

    def loss(number):
        torch.manual_seed(100 * step + number)
        return task_loss(model, batches[number])

    def backward(number, total):
        total.backward(ROOT)
        if watch is not None:
            watch.append(number)

    losses = pipeline.passes(len(batches), loss, backward)
    pipeline.add_tied(model)
    return losses


def train(model, passes, norm):
    """Return the first step's gradients, and all losses and norms of three clipped steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    first, losses, norms = {}, [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses += passes(step)
        if not step:
            first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(norm(gradients))
        factor = (norms[-1] + 1e-6).reciprocal().mul(CLIP).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        optimizer.step()
    return first, losses, norms


def difference(found, wanted):
    """Of two tensors, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def compare(world, kind):
    """Train as stages and in one process; return what this stage holds, and its largest differences."""
    form_replicas(world, pipeline=world.size)
    whole = make(kind)
    reference = train(whole, lambda step: alone(whole, step), total_norm)
    model = make(kind)
    stage = stage_of(world, model)
    pipeline = Pipeline(stage, world.replica)
    first, losses, norms = train(
        model, lambda step: piped(pipeline, model, step), StageNorm(stage, model, world.replica)
    )
    if world.rank == world.size - 1:
        assert all(torch.equal(*pair) for pair in zip(losses, reference[1], strict=True)) or kind == "tied"
        assert torch.stack(losses).tolist() == pytest.approx(torch.stack(reference[1]).tolist(), rel=1e-12)
    else:
        assert losses == []
    weights, wanted = dict(model.named_parameters()), dict(whole.named_parameters())
    gradients = {name: difference(first[name], reference[0][name]) for name in first}
    moved = {name: difference(weights[name].detach(), wanted[name].detach()) for name in weights}
    norm = max(map(difference, norms, reference[2]))
    names = list(wanted)
    assert list(stage.holders) == names
    assert [name for name in names if world.rank in stage.holders[name]] == list(first)
    return list(first), gradients, moved, norm


@pytest.mark.parametrize(("kind", "stages"), [("untied", 2), ("untied", 4), ("llama", 2), ("tied", 2), ("tied", 4)])
def test_stages_train_as_one_process(kind, stages):
    """Bitwise, with dropout and ragged micro-batches; a tied table adds its gradients in another order."""
    found = run(compare, stages, kind)
    names = [name for name, _ in make(kind).named_parameters()]
    held = [name for stage in found for name in stage[0]]
    assert sorted(held) == sorted([*names, *["tokens.weight"] * (kind == "tied")])
    for _, gradients, moved, norm in found:
        if kind == "tied":
            assert {name for name, value in gradients.items() if value} <= {"tokens.weight"}
            assert max(*gradients.values(), *moved.values(), norm) < ROUNDING
        else:
            assert not any(gradients.values())
            assert not any(moved.values())
            assert norm == 0.0
    if kind == "tied":
        # Both ends have the same bits.
        assert [found[0][part]["tokens.weight"] for part in (1, 2)] == [
            found[-1][part]["tokens.weight"] for part in (1, 2)
        ]


def count_messages(world):
    """Messages of hidden states and gradients, activations held at once, and parameters that are still alive."""
    form_replicas(world, pipeline=world.size)
    model = make("untied")
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    stage = stage_of(world, model)
    gc.collect()
    assert sum(each() is not None for each in alive) == len(list(model.parameters()))
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    pipeline = Pipeline(stage, world.replica)
    begun, held, most = [], [], []
    exchange = collectives.exchange
    sent = []

    def counted(sends, receives, timeout, *, group):
        sent.extend(tensor.shape for tensor, _ in sends)
        exchange(sends, receives, timeout, group=group)

    forward = stage.forward

    def follow(loss, arrival):
        begun.append(1)
        most.append(len(begun) - len(held))
        return forward(loss, arrival)

    with mock.patch.object(collectives, "exchange", counted), mock.patch.object(stage, "forward", follow):
        piped(pipeline, model, 0, held)
    assert held == list(range(MICRO_BATCHES))
    return sent, max(most), own_bytes / whole_bytes


def test_messages_memory_and_parameters():
    """A hidden state and a gradient per micro-batch and boundary; activations of at most P - stage micro-batches."""
    found = run(count_messages, 4)
    shapes = [(*ids.shape, 16) for ids, _ in micro_batches()]
    # Inner stages send in both directions.
    assert [len(sent) for sent, *_ in found] == [MICRO_BATCHES * count for count in (1, 2, 2, 1)]
    assert sorted(found[1][0]) == sorted(shapes * 2)
    assert [most for _, most, _ in found] == [4, 3, 2, 1]
    assert sum(share for *_, share in found) == pytest.approx(1.0)
    assert max(share for *_, share in found) < 0.35


def evaluate(world):
    form_replicas(world, pipeline=world.size)
    whole, model = make("untied").eval(), make("untied")
    pipeline = Pipeline(stage_of(world, model), world.part("pp"))
    model.eval()
    batches = micro_batches()
    same = []
    with torch.no_grad():
        for shares in (False, True):
            wanted = [float(task_loss(whole, batch)) for batch in batches]
            with nullcontext() if shares else pipeline.without_sharing():
                found = [pipeline.loss(lambda batch=batch: (task_loss(model, batch), {})) for batch in batches]
            # Without sharing, the last stage alone has the value.
            has_value = shares or world.rank == world.size - 1
            same.append([float(loss) for loss, _ in found] == (wanted if has_value else [0.0] * len(wanted)))
    return same


def test_an_evaluation_runs_forwards_alone():
    assert run(evaluate, 2) == [[True, True], [True, True]]


def one_loss(world):
    """Gradients of a loss that every stage has, and an error of a stage on all of them."""
    form_replicas(world, pipeline=world.size)
    whole, model = make("untied"), make("untied")
    pipeline = Pipeline(stage_of(world, model), world.part("pp"))
    batch = micro_batches()[0]
    torch.manual_seed(1)
    wanted = task_loss(whole, batch)
    (2 * wanted).backward()
    wanted = wanted.detach()
    torch.manual_seed(1)
    loss, numbers = pipeline.loss(lambda: (task_loss(model, batch), {"half": (wanted / 2, 1)}))
    (2 * loss).backward()
    reference = dict(whole.named_parameters())
    same = all(torch.equal(p.grad, reference[name].grad) for name, p in model.named_parameters())
    if world.rank == 1:
        hook = model.blocks[1].register_forward_pre_hook(fail)
    # The user's loss turns it into an error of its own.
    with refuses(*((AssertionError, "stage's end") if world.rank == 1 else (PeerError, "rank 1"))):
        pipeline.loss(lambda: (task_loss(model, batch), {}))
    if world.rank == 1:
        hook.remove()
        model.blocks[1].register_full_backward_pre_hook(fail)
    failing = pipeline.loss(lambda: (task_loss(model, batch), {}))[0]
    # The last stage has sent its gradient to the one that fails, for which the first one waits.
    errors = [(LockstepError, "a later stage"), (ValueError, "a block failed")]
    with refuses(*errors[world.rank]) if world.rank < 2 else nullcontext(), pipeline.backward():
        failing.backward()
    # The stages are at the same place afterwards.
    again = pipeline.loss(lambda: (task_loss(model, batch), {}))[0]
    return (
        float(loss.detach()) == float(wanted),
        float(numbers["half"][0]) == float(wanted) / 2,
        same,
        bool(again.isfinite()),
    )


def fail(module, args):
    raise ValueError("a block failed")


def test_a_loss_of_all_stages_has_the_gradients_of_one_process():
    assert run(one_loss, 3) == [(True, True, True, True)] * 3


def slow_stage(world):
    """A stage waits for a longer time than its groups had to form, as after the failure of a rank."""
    world._patience = 1.5
    form_replicas(world, pipeline=2)
    model = make("untied")
    pipeline = Pipeline(stage_of(world, model), world.part("pp"))
    batch = micro_batches()[0]

    def compute():
        time.sleep(2.0 * (world.rank == 0))
        return task_loss(model, batch), {}

    with torch.no_grad():
        return float(pipeline.loss(compute)[0])


def test_a_stage_may_take_longer_than_its_groups_had_to_form():
    losses = run(slow_stage, 2)
    assert losses[0] == losses[1]


class Sleeping(nn.Module):
    """A block that takes some time forward, and twice that backward."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x):
        return _Sleep.apply(x * self.weight, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        if not isinstance(x, torch._subclasses.fake_tensor.FakeTensor):
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Chain(nn.Module):
    """Blocks, between an embedding and a head."""

    def __init__(self, blocks):
        super().__init__()
        self.into = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def sum_loss(model, batch):
    return model(batch).sum()


def time_a_step(world, count, seconds):
    form_replicas(world, pipeline=world.size)
    torch.manual_seed(0)
    model = Chain([Sleeping(seconds) for _ in range(world.size)])
    batch = torch.ones(2, 3)
    stage = cut_stage(model, list(model.blocks), sum_loss, batch, StageIndex(world.rank, world.size))
    pipeline = Pipeline(stage, world.replica)
    times = []
    # The first step connects the ranks and starts torch's threads.
    for step_seconds in (0.0, seconds):
        for block in model.blocks:
            block.seconds = step_seconds
        world.barrier()
        begin = time.perf_counter()
        pipeline.passes(count, lambda number: sum_loss(model, batch), lambda number, loss: loss.backward())
        world.barrier()
        times.append(time.perf_counter() - begin)
    return times[1]


@pytest.mark.slow
def test_the_bubble_is_as_computed():
    """(P - 1) / (M + P - 1) of the time."""
    stages, count, seconds = 4, 6, 0.5
    elapsed = max(run(time_a_step, stages, count, seconds))
    idle = 1 - count * 3 * seconds / elapsed
    assert idle == pytest.approx((stages - 1) / (count + stages - 1), rel=0.1)


class Block(nn.Module):
    def __init__(self, change=lambda x: x):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.change = change

    def forward(self, x, *others):
        return self.change(self.linear(x))


def blocks_of(count=2, **how):
    return [Block(**how) for _ in range(count)]


class Between(Chain):
    def forward(self, x):
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden) * 2
        return self.out(hidden)


class WithTable(Chain):
    """Each block gets an argument that a parameter outside of the blocks gives."""

    def forward(self, x):
        hidden = self.into(x)
        bias = self.into.bias.argmax()
        for block in self.blocks:
            hidden = block(hidden, bias)
        return self.out(hidden)


class Skips(Chain):
    def forward(self, x):
        first = self.blocks[0](self.into(x))
        return self.out(self.blocks[1](first) + first)


class Backwards(Chain):
    def forward(self, x):
        return self.out(self.blocks[0](self.blocks[1](self.into(x))))


class FirstAlone(Chain):
    def forward(self, x):
        return self.out(self.blocks[0](self.into(x)))


def shared_linear():
    first, second = blocks_of()
    second.linear = first.linear
    return [first, second]


class Reading(Chain):
    def forward(self, x):
        return super().forward(x) * 2 if x.sum() > 0 else super().forward(x)


class Recomputed(Chain):
    def forward(self, x):
        return self.out(checkpoint(nn.Sequential(*self.blocks), self.into(x), use_reentrant=False))


class Reentrant(Chain):
    def forward(self, x):
        hidden = self.into(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.out(hidden)


def frozen(model, *parts):
    for name in parts:
        model.get_submodule(name).requires_grad_(False)
    return model


def refused():
    """(model, loss, the message)."""
    yield Chain(blocks_of(1)), sum_loss, "the model has 1 repeated blocks, fewer than stages; use a smaller degree, or"
    yield Chain(blocks_of(change=lambda x: (x, x))), sum_loss, "blocks.0 returns a tuple; a block of a pipeline returns"
    yield Chain(blocks_of(change=lambda x: x.sum())), sum_loss, "blocks.0 returns a tensor of torch.float32 with 0 dim"
    yield Chain(blocks_of(change=lambda x: x.long())), sum_loss, "returns a tensor of torch.int64 with 2 dimensions"
    twice = lambda model, batch: (model(batch) - model(2 * batch)).sum()  # noqa: E731
    yield Chain(blocks_of()), twice, "blocks.0 is called twice in a micro-batch's loss; call the model once"
    yield Between(blocks_of()), sum_loss, "blocks.1 does not get the output of blocks.0 unchanged as its input; compute"
    yield WithTable(blocks_of()), sum_loss, "blocks.1 has another argument that is computed from into.bias; only its"
    yield Skips(blocks_of()), sum_loss, "the loss uses the output of blocks.0, which the last stage does not have; use"
    yield (
        Backwards(blocks_of()),
        sum_loss,
        "blocks.1 is called before blocks.0; return the blocks in the order of calls",
    )
    yield FirstAlone(blocks_of()), sum_loss, "the loss does not call blocks.1; return the blocks that it calls"
    yield Chain(shared_linear()), sum_loss, "blocks.0 and blocks.1 share blocks.0.linear.weight, so they cannot be on"
    yield Reading(blocks_of()), sum_loss, "the loss decides by the values of tensors"
    decay = lambda model, batch: model(batch).sum() + model.blocks[0].linear.bias.sum()  # noqa: E731
    yield (
        Chain(blocks_of()),
        decay,
        "blocks.0.linear.bias of a block is used outside of it too, which may be on another",
    )
    outer = Chain(blocks_of())
    outer.blocks[1].change = lambda x: x + outer.into.bias
    yield outer, sum_loss, "blocks.1 uses into.bias, which is not its own; leave the flag out"
    yield Recomputed(blocks_of()), sum_loss, "the model recomputes blocks 0 and 1 together, which are on two stages"
    yield Reentrant(blocks_of()), sum_loss, "blocks.0 is called without gradients, as by torch.utils.checkpoint with"
    yield Chain(blocks_of(change=lambda x: x * random.random())), sum_loss, "blocks.0 draws numbers from Python's"
    yield frozen(Chain(blocks_of()), "into", "blocks.0"), sum_loss, "stage 0 (the first is 0) has no parameter that is"
    yield frozen(Chain(blocks_of()), "out", "blocks.1"), sum_loss, "stage 1 (the first is 0) has no parameter that is"


@pytest.mark.parametrize(
    ("model", "loss", "message"), list(refused()), ids=[f"case{number}" for number in range(len(list(refused())))]
)
def test_a_model_that_does_not_fit_is_refused(model, loss, message):
    before = list(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        cut_stage(model, list(model.blocks), loss, torch.ones(2, 3), StageIndex(1, 2))
    assert str(caught.value).startswith("--parallel.pipeline 2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(model.state_dict()) == before


class Plain(Task):
    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError


class Penalised(Plain):
    def penalty(self, model):
        return None


class Whole(Plain):
    def outputs(self, model, batch):
        return batch


def test_what_needs_the_whole_model_is_refused():
    check_pipeline(2, 2, Plain())
    for stages, count, task, how, message in (
        (
            4,
            3,
            Plain(),
            {},
            "4: a replica has 3 micro-batches a step, fewer than stages; use a degree of at most 3, or",
        ),
        (2, 2, Penalised(), {}, "2: the task's `penalty` does not work with it yet; leave one out"),
        (2, 2, Whole(), {}, "2: the task's `step_loss` does not work with it yet"),
        (2, 2, Plain(), {"hooks": True}, "2: a hook that sees each micro-batch does not work with it yet"),
        (2, 2, Plain(), {"closures": True}, "2: an optimizer that evaluates the loss several times does not work"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_pipeline(stages, count, task, **how)
    steps = Plain()
    steps.own_steps = lambda *_: None
    with pytest.raises(ConfigError, match="2: the task's `own_steps` does not work with it yet"):
        check_pipeline(2, 2, steps)
