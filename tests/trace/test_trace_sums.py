"""Digests, squares and sketches add up over shards; a sample's digest knows nothing of its batch's padding."""

from itertools import pairwise

import pytest
import torch

from lockstep.trace.record.names import WHOLE
from lockstep.trace.record.samples import Batch, digest_batch, outcomes, outputs
from lockstep.trace.record.sums import SKETCH, WIDTH, ElementPlaces, sum_pieces


def digested(data):
    return digest_batch(Batch(data))


def numbers(rows):
    return rows[:, 0], rows[:, 1:].contiguous().view(torch.float64)


@pytest.mark.parametrize("count", [1, 255, 700, 5000, 100_003])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_shards_add_up_to_the_whole(count, kind):
    make = torch.Generator().manual_seed(count)
    tensor = torch.randn(count, generator=make, dtype=kind)
    cuts = sorted({0, count, *torch.randint(0, count + 1, (4,), generator=make).tolist()})
    pieces = [(tensor[begin:end], ElementPlaces(begin)) for begin, end in pairwise(cuts)]
    digests, sums = numbers(sum_pieces(pieces))
    whole, (expected,) = numbers(sum_pieces([(tensor, WHOLE)]))
    assert expected.shape == (WIDTH - 1,) == (1 + SKETCH,)
    assert int(digests.sum()) & 0xFFFFFFFF == int(whole)
    torch.testing.assert_close(sums.sum(0), expected, rtol=1e-5, atol=1e-3)
    assert float(expected[0]) == pytest.approx(float(tensor.double().square().sum()), rel=1e-5)


@pytest.mark.parametrize(("rows", "columns", "each"), [(7, 12, 5), (3, 768, 256), (300, 512, 256), (40, 600, 256)])
def test_shards_of_columns_add_up_to_the_whole(rows, columns, each):
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    half = rows // 2
    pieces = [
        (tensor[top:end, at : at + each], ElementPlaces(top * columns + at, min(each, columns - at), columns))
        for at in range(0, columns, each)
        for top, end in ((0, half), (half, rows))
    ]
    digests, sums = numbers(sum_pieces(pieces))
    whole, (expected,) = numbers(sum_pieces([(tensor, WHOLE)]))
    assert int(digests.sum()) & 0xFFFFFFFF == int(whole)
    torch.testing.assert_close(sums.sum(0), expected, rtol=1e-5, atol=1e-3)


def test_a_digest_knows_every_bit_and_place():
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    (before,), _ = numbers(sum_pieces([(tensor, WHOLE)]))
    for place in (0, 255, 256, 2999):
        for bit in (1, 1 << 22, -(1 << 31)):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= bit
            assert numbers(sum_pieces([(other, WHOLE)]))[0][0] != before
    assert numbers(sum_pieces([(tensor.flip(0), WHOLE)]))[0][0] != before
    half = tensor.bfloat16()
    assert torch.equal(sum_pieces([(half, WHOLE)]), sum_pieces([(half.float(), WHOLE)]))


def test_sketches_tell_how_far_two_tensors_are_apart():
    make = torch.Generator().manual_seed(2)
    shares = []
    for far in (1e-3, 1.0):
        for _ in range(20):
            tensor, step = (torch.randn(2000, generator=make, dtype=torch.float64) for _ in range(2))
            _, rows = numbers(sum_pieces([(tensor, WHOLE), (tensor + far * step, WHOLE)]))
            shares.append(float((rows[1, 1:] - rows[0, 1:]).square().mean().sqrt() / (far * step.norm())))
    assert 0.3 < min(shares) < 1.0 < max(shares) < 2.0
    assert sum(shares) / len(shares) == pytest.approx(1.0, abs=0.15)


def test_a_sample_has_its_digest_in_any_batch():
    make = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 90, (4, 7), generator=make)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 4:] = 0
    wide = {
        "input_ids": torch.where(mask > 0, ids, 90),
        "attention_mask": mask,
        "labels": torch.where(mask > 0, ids, -100),
    }
    left = {name: value[1:2].roll(3, 1) for name, value in wide.items()}
    alone = {name: value[1:2, :4] for name, value in wide.items()}
    every = digested(wide).samples
    assert len(every) == 4
    assert len(set(every.tolist())) == 4
    assert digested(alone).samples == every[1]
    assert digested(left).samples == every[1]
    assert digested({**alone, "labels": alone["labels"] + 1}).samples != every[1]
    # input_ids, attention_mask, labels: all, and without each sample's first
    assert digested(wide).counts[2].tolist() == [25, 21]


@pytest.mark.parametrize("vectors", [False, True])
def test_a_sample_is_the_same_padded_before_and_behind_the_shift(vectors):
    """Padded before it, all but the longest have one input more, of which no label comes."""
    make = torch.Generator().manual_seed(5)
    labels = [torch.randint(1, 90, (length,), generator=make) for length in (8, 5, 3)]
    inputs = [torch.randn(len(each), 4, generator=make) for each in labels] if vectors else labels

    def padded(rows, value):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    before = {"x": padded(inputs, 7)[:, :-1], "y": padded(labels, -100)[:, 1:]}
    behind = {"x": padded([each[:-1] for each in inputs], 7), "y": padded([each[1:] for each in labels], -100)}
    fewer = {"x": padded(inputs[1:], 7)[:, :-1], "y": padded(labels[1:], -100)[:, 1:]}
    every = digested(before).samples.tolist()
    assert len(set(every)) == 3
    assert every == digested(behind).samples.tolist()
    assert every[1:] == digested(fewer).samples.tolist()
    assert digested(before).leaves[0] != digested(behind).leaves[0]  # by which forwards find their batches
    behind["x"][2, 1] += 1
    assert digested(behind).samples.tolist()[:2] == every[:2]
    assert digested(behind).samples[2] != every[2]


def test_batches_of_many_kinds_are_cut():
    pictures = torch.rand(3, 3, 90, 90)
    batch = Batch((pictures, torch.arange(3), ["a", "b", "c"]))
    assert batch.size == 3
    samples = digest_batch(batch).samples
    assert len(set(samples.tolist())) == 3
    assert digested((pictures[1:2], torch.tensor([1]), ["b"])).samples == samples[1]
    assert digested((pictures[1:2], torch.tensor([1]), ["x"])).samples != samples[1]
    assert digested({"n": 3}).samples.shape == (1,)
    assert digested({"n": 3}).samples != digested({"n": 4}).samples
    assert Batch(None).size == 0
    empty = digested((torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)))
    assert (empty.samples.shape, empty.counts.tolist()) == ((0,), [[0, 0]])
    rows = outputs({"loss": torch.tensor(1.0), "logits": torch.ones(3, 2)}, 3)
    assert [row.shape for row in rows] == [(3, 2)]
    assert outcomes(rows).shape == (3, 2)
    assert outputs(torch.tensor(1.0), 3) == []


@pytest.mark.parametrize("width", [2 * 4096 + 1, 3 * 4096])
def test_of_a_long_output_every_third_element_counts(width):
    wide = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(outcomes([wide]), outcomes([wide[:, ::3]]))
    assert not torch.equal(outcomes([wide]), outcomes([wide[:, :4096]]))
