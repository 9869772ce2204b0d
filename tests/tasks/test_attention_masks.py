"""What the language models say of their attention's masks is what it gets."""

import hub_files
import pytest
import torch
from small_runs import config

from lockstep.config.sections import Data
from lockstep.training.start.named_task import make_task
from lockstep.transforms import compile_blocks, precision

pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


def sliding(folder):
    """A model whose layers see the last eight tokens."""
    from transformers import MistralConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64, "sliding_window": 8}
    MistralConfig(**sizes, **more, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    hub_files.write_tokenizer(folder)
    return folder


def masks_of(task, scope):
    """Whether attention gets a mask, at each place of the graphs that a micro-batch leads to."""
    found = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "scaled_dot_product_attention" in str(node.target):
                mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
                found.append(mask is not None)
        return graph.forward

    torch._dynamo.reset()
    before, precision.HOW = precision.HOW, {"backend": backend}
    try:
        model = task.model()
        compile_blocks(model, task.blocks(model) if scope == "blocks" else ())
        samples = task.dataset("train")
        task.loss(model, task.collate([samples[0], samples[1]])).backward()
    finally:
        precision.HOW = before
        torch._dynamo.reset()
    return set(found)


@pytest.mark.parametrize(
    ("model", "packing", "scope", "said"),
    [
        ("builtin", "stream", "whole", False),
        ("builtin", "padded", "blocks", False),
        ("builtin", "documents", "blocks", True),
        ("hub", "stream", "blocks", False),
        ("hub", "blocks", "blocks", False),
        ("hub", "stream", "whole", None),  # which makes a mask in case documents are packed
        ("hub", "padded", "blocks", None),
        ("hub", "documents", "blocks", True),
        ("sliding", "stream", "blocks", None),
    ],
)
def test_a_language_model_says_whether_its_attention_gets_a_mask(tmp_path, model_folder, model, packing, scope, said):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, row in enumerate(hub_files.rows(120)):  # short ones: several documents in a sample
        (folder / f"{number}.txt").write_text(row["instruction"], encoding="utf-8")
    named = {"hub": {"model_name": str(model_folder)}, "sliding": {"model_name": str(sliding(tmp_path / "sliding"))}}
    chosen = named.get(model, {"tokenizer": str(model_folder)})
    settings = config(
        tmp_path,
        dataset_name=str(folder),
        seq_len=48,
        precision="float32",
        compile=True,
        compile_scope=scope,
        data=Data(packing=packing, labels="all", evaluation=0.3),
        **chosen,
    )
    task = make_task(settings, lambda line: None)
    assert task.attention_mask is said
    found = masks_of(task, scope)
    assert found
    assert said is None or found == {said}, found
    if (model, scope) in (("hub", "whole"), ("sliding", "blocks")):
        assert found == {True}
