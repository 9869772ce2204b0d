"""The lines that say which rank computes where."""

from lockstep.training.start.consistency import rank_lines


def test_few_ranks_have_a_line_each():
    assert list(rank_lines([["a", "cpu"]])) == ["rank 0: a, cpu"]
    assert list(rank_lines([["a", "cuda:0"], ["b", "cuda:0"]])) == ["rank 0: a, cuda:0", "rank 1: b, cuda:0"]


def test_many_ranks_have_a_line_a_host():
    places = [[f"node-{rank // 8}", f"cuda:{rank % 8}"] for rank in range(24)]
    assert list(rank_lines(places)) == [
        "ranks 0 to 7: node-0, cuda:0 to cuda:7",
        "ranks 8 to 15: node-1, cuda:0 to cuda:7",
        "ranks 16 to 23: node-2, cuda:0 to cuda:7",
    ]
    places = [["a", "cpu"]] * 15 + [["b", "cuda:1"], ["b", "cuda:0"], ["c", "cuda:3"]]
    assert list(rank_lines(places)) == [
        "ranks 0 to 14: a, cpu",
        "ranks 15 to 16: b, cuda:1, cuda:0",
        "rank 17: c, cuda:3",
    ]
