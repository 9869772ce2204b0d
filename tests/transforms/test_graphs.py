"""What is compiled: the loss with the model, one graph for a whole training, none for what is computed once."""

import copy
import warnings

import counting
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.data.batches import StepPlan
from lockstep.models.chunked_loss import IGNORED
from lockstep.models.gpt import GPT, GPTConfig, generate
from lockstep.tasks.language_model import CausalLM
from lockstep.training.trial.compilation import choose_kernels
from lockstep.transforms import Transforms, precision, prepare
from lockstep.verify.wrappers import TaskWrapper

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own

CPU = torch.device("cpu")
SHAPE = GPTConfig(layers=3, heads=2, width=16, vocab_size=50, context=16)
CROSS_ENTROPY = {"aten._log_softmax.default", "aten.nll_loss_forward.default"}


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, some of them not labelled, so that the items differ from step to step."""

    seq_len, items_per_sample, draws_random = 12, None, False

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(50, (count, 13), generator=generator)
        self.kept = torch.randint(1, 12, (count,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        labels = self.rows[index, 1:].clone()
        labels[self.kept[index] :] = IGNORED
        return {"input_ids": self.rows[index, :-1], "labels": labels}


class Corpus:
    vocab_size, fingerprint, separator, packing = 50, "made up", 0, "stream"
    learned, prompts, chat, ends = (0, 0, 0), False, False, ()

    def __init__(self, samples):
        self.train, self.evaluation = Rows(samples), Rows(7)

    def opening(self):
        return [1, 2, 3]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def language(samples=29, dropout=0.0, inside=True, loss_chunk=-1):
    """The last step of an epoch is short, and so is its last micro-batch."""
    shape = GPTConfig(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"dropout": dropout})
    return CausalLM(Corpus(samples), shape, inside=inside, loss_chunk=loss_chunk)


def settings(folder, name, **changes):
    given = {"experiment_name": name, "max_steps": 0, "num_epochs": 1, "eval_freq": 2, "micro_batch_size": 2}
    return config(folder, **given | {"guards": {"straggler": 0.0}} | changes)


def trained(folder, task, name, world=None, **changes):
    """The weights that a whole run came to, and its last evaluation."""
    run_ = lockstep.Run(settings(folder, name, **changes), task, world)
    for _ in run_:
        pass
    assert run_.result.status == "finished"
    found = {key: value.detach().clone() for key, value in run_.model.state_dict().items()}
    return found, run_.result.evaluation.loss


def counted_run(folder, task, name="compiled", world=None, **changes):
    """The same by compiled code, and the graphs that were made."""
    with counting.counted() as seen:
        found = trained(folder, task, name, world, compile=True, **changes)
    return *found, seen


def alike(found, wanted, close):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=close, atol=close)


# the loss is inside, and the numbers are those of eager code


CHANGES = {
    "plain": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"attention": "math", "activation_checkpointing": "selective"},
    "exact": {"exact": True},
    "bf16": {"precision": "bf16"},
}
# Of `make test-full` alone.
MORE_WHOLE = ("plain", "selective", "exact", "bf16")
MORE_BLOCKS = ("plain", "recomputed", "selective", "bf16")


@pytest.mark.parametrize(
    ("scope", "graphs", "changes"),
    [
        pytest.param("whole", 1, CHANGES["recomputed"], id="recomputed-whole"),
        pytest.param("blocks", 2, CHANGES["exact"], id="exact-blocks"),
        *(pytest.param("whole", 1, CHANGES[name], id=f"{name}-whole", marks=pytest.mark.slow) for name in MORE_WHOLE),
        *(
            pytest.param("blocks", 2, CHANGES[name], id=f"{name}-blocks", marks=pytest.mark.slow)
            for name in MORE_BLOCKS
        ),
        pytest.param("auto", 2, {}, id="plain-auto", marks=pytest.mark.slow),
    ],
)
def test_training_compiles_once_with_its_loss_in_a_graph(tmp_path, scope, graphs, changes):
    """Over changing items, accumulation, a short micro-batch, evaluations and a sample of text."""
    wanted, loss = trained(tmp_path, language(), "eager", **changes)
    found, own, seen = counted_run(tmp_path, language(), compile_scope=scope, **changes)
    assert (seen.captured, seen.breaks) == (graphs, 0)
    assert [set(seen.operations(which)) >= CROSS_ENTROPY for which in range(len(seen.forwards))].count(True) == 1
    assert len(seen.backwards) == graphs
    assert list(found) == list(wanted)
    close = 2e-2 if "precision" in changes else 1e-12
    alike(found, wanted, close)
    assert own == pytest.approx(loss, rel=close)


@pytest.mark.parametrize("scope", ["whole", pytest.param("blocks", marks=pytest.mark.slow)])
def test_chunks_of_the_loss_are_compiled_too(tmp_path, scope):
    wanted, loss = trained(tmp_path, language(loss_chunk=5), "eager")
    found, own, seen = counted_run(tmp_path, language(loss_chunk=5), compile_scope=scope)
    assert (seen.captured, seen.breaks) == (1 if scope == "whole" else 2, 0)
    alike(found, wanted, 1e-12)
    assert own == pytest.approx(loss, rel=1e-12)


def test_dropout_seeded_by_micro_batch_adds_no_graph(tmp_path):
    _, _, seen = counted_run(tmp_path, language(dropout=0.2), compile_scope="whole", attention="math")
    assert (seen.captured, seen.breaks) == (1, 0)


def test_adapters_beside_a_compiled_loss(tmp_path):
    lockstep.train(settings(tmp_path, "base"), language())
    given = {"lora": {"rank": 2}, "init_from": str(tmp_path / "base"), "precision": "float32"}
    wanted, _ = trained(tmp_path, language(), "eager", **given)
    found, _, seen = counted_run(tmp_path, language(), compile_scope="whole", **given)
    assert (seen.captured, seen.breaks) == (1, 0)
    alike(found, wanted, 1e-5)


def test_model_that_computes_its_loss_has_it_in_its_graph(tmp_path):
    _, _, seen = counted_run(tmp_path, Inside(), compile_scope="whole")
    assert (seen.captured, seen.breaks) == (1, 0)
    assert set(seen.operations(0)) >= CROSS_ENTROPY


class WithLoss(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, labels):
        logits = self.network(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


class Inside(Ragged):
    def model(self):
        return WithLoss(super().model())

    def loss(self, model, batch):
        return model(batch["input"], batch["labels"])

    def metrics(self, model, batch):
        return {}


def test_nothing_inside_eager_code_changes_a_bit(tmp_path):
    """The loss in the forward or beside it: the same operations, so the same bits."""
    one, two = (
        trained(tmp_path, language(inside=inside), f"{inside}", precision="float32") for inside in (True, False)
    )
    assert one[1] == two[1]
    assert all(torch.equal(one[0][name], two[0][name]) for name in two[0])


# on several ranks


def on_ranks(world, folder, cases):
    warnings.simplefilter("ignore")  # the compiler's own
    found = []
    for name, changes in cases:
        _, loss, seen = counted_run(folder, language(), name, world, **changes)
        found.append(
            (loss, seen.captured, seen.breaks, checkpoint.fingerprint(checkpoint.newest(folder / name, say=print)))
        )
    return found


ON_RANKS = [("ddp", "whole", False), ("ddp", "blocks", True), ("zero", "whole", False), ("zero", "whole", True)]
ON_RANKS += [("fsdp", "blocks", False), ("fsdp", "blocks", True)]


@pytest.mark.parametrize(
    "chosen", [[ON_RANKS[0], ON_RANKS[-1]], pytest.param(ON_RANKS[1:-1], marks=pytest.mark.slow)], ids=["two", "others"]
)
def test_ranks_compile_as_often_as_one_process_and_train_alike(tmp_path, chosen):
    cases = [
        (f"{engine}-{scope}-{exact}", {"engine": engine, "compile_scope": scope, "exact": exact})
        for engine, scope, exact in chosen
    ]
    first, second = run(on_ranks, 2, tmp_path, cases, timeout=300.0)
    _, wanted = trained(tmp_path, language(), "eager")
    _, _, _ = alone = counted_run(tmp_path, language(), "alone", compile_scope="blocks", exact=True)
    bits = checkpoint.fingerprint(checkpoint.newest(tmp_path / "alone", say=print))
    for (name, changes), one, two in zip(cases, first, second, strict=True):
        assert one[0] == pytest.approx(wanted, rel=1e-12), name
        graphs = 1 if changes["compile_scope"] == "whole" else 2
        assert [each[1:3] for each in (one, two)] == [(graphs, 0)] * 2, name
        if changes["exact"]:
            assert one[3] == bits, name
    assert alone[2].captured == 2


# what is computed once


class Broken(TaskWrapper):
    """A loss that is not finite for one sample."""

    def loss(self, model, batch):
        loss = self.inner.loss(model, batch)
        return loss * float("nan") if bool((batch["input_ids"][:, 0] == self.marked).any()) else loss


def test_the_search_for_a_bad_batch_makes_no_graph(tmp_path):
    task = Broken(language())
    task.marked = int(task.inner.corpus.train.rows[5, 0])
    _, _, seen = counted_run(tmp_path, task, compile_scope="whole", guards={"nonfinite": "skip", "straggler": 0.0})
    assert (seen.captured, seen.breaks) == (1, 0)
    log = next((tmp_path / "compiled" / "logs").glob("*.log")).read_text(encoding="utf-8")
    assert "every module's output is finite, its loss is not" in log


def test_a_text_is_written_by_eager_code():
    with counting.counted() as seen:
        model = prepare(GPT(SHAPE), precision="float32", compile_model=True, device=CPU)
        generate(model, torch.tensor([[1, 2]]), 4, config=SHAPE)
        assert seen.captured == 0
        model(torch.zeros(1, 4, dtype=torch.int64))
        assert seen.captured == 1


def test_only_a_short_micro_batch_stays_eager():
    """Whatever came before it, on every rank and after a resume: the plan alone says so."""
    plan = StepPlan(8, 2, 29)
    places = [(step, index) for step in range(plan.steps) for index in range(plan.present(step))]
    with counting.counted() as seen:
        model = prepare(GPT(SHAPE), precision="float32", compile_model=True, device=CPU)
        for compiled in (True, False):
            for step, index in reversed(places):
                start, stop = plan.positions(step, index)
                with choose_kernels(compiled, plan)(step, index):
                    model(torch.zeros(stop - start, 4, dtype=torch.int64))
                assert seen.captured == (0 if (step, index) == (3, 2) else 1) or not compiled
    assert seen.captured == 2  # the second without the rule


def test_padded_batches_of_many_lengths_are_compiled(tmp_path):
    """Each as torch sees fit; with --exact each shape by itself, whatever was seen before."""

    class Lengths(Ragged):
        def collate(self, samples):
            longest = max(int((sample["labels"] != -100).sum()) for sample in samples)
            return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in samples[0]}

    wanted, _ = trained(tmp_path, Lengths(), "eager")
    found, _, seen = counted_run(tmp_path, Lengths(), compile_scope="whole")
    assert 1 < seen.captured < 4
    alike(found, wanted, 1e-12)
    _, _, seen = counted_run(tmp_path, Lengths(), "exact", compile_scope="whole", exact=True)
    assert 4 < seen.captured <= 12


def test_a_resume_goes_on_with_the_same_bits(tmp_path):
    """Also where it begins with the short micro-batch, or with an evaluation of other shapes."""
    with counting.counted():
        lockstep.train(settings(tmp_path, "whole", compile=True, exact=True), language())
    for stop in (1, 2, 3):
        with counting.counted():
            lockstep.train(settings(tmp_path, "parted", compile=True, exact=True, stop_at=stop), language())
    with counting.counted():
        lockstep.train(settings(tmp_path, "parted", compile=True, exact=True), language())
    prints = [checkpoint.fingerprint(checkpoint.newest(tmp_path / name, say=print)) for name in ("whole", "parted")]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_modules_of_torch_itself_are_compiled_too(scope):
    """An nn.Sequential, which has no frame of its own to begin with; two alike share their graph."""
    with counting.counted() as seen:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
        plain, names = copy.deepcopy(model), list(model.state_dict())
        chosen = Transforms(compile_scope=scope)
        prepare(model, precision="float32", compile_model=True, device=CPU, chosen=chosen, blocks=list(model))
        x = torch.ones(2, 4, requires_grad=True)
        torch.testing.assert_close(model(x), plain(x))
        assert (seen.captured, seen.breaks, list(model.state_dict())) == (1, 0, names)


def test_blocks_and_the_loss_are_what_is_taken_back():
    with counting.counted() as seen:
        model = GPT(SHAPE)
        prepare(
            model, precision="float32", compile_model=True, device=CPU, chosen=Transforms(), blocks=list(model.blocks)
        )
        precision.undo_compile(model)
        ids = torch.zeros(1, 4, dtype=torch.int64)
        model(ids, labels=ids).backward()
    assert seen.captured == 0
    assert model.ending is GPT(SHAPE).ending
