"""What tests of hub models and data train on: a small GPT-2, its tokenizer, and data like Alpaca's, all made here."""

import json
import random

WORDS = [
    "add",
    "name",
    "list",
    "three",
    "colours",
    "rivers",
    "of",
    "the",
    "world",
    "write",
    "a",
    "line",
    "short",
    "köln",
]


def rows(count, seed=0):
    draw = random.Random(seed)

    def words(number):
        return " ".join(draw.choices(WORDS, k=number))

    return [
        {"instruction": words(6), "input": words(3) if index % 2 else "", "output": words(12)} for index in range(count)
    ]


def texts(count, seed=0):
    return [" ".join(row.values()) for row in rows(count, seed)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path, records):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_tokenizer(folder, size=300):
    """A byte-level BPE tokenizer of GPT-2's kind, trained on the words above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(50), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def gpt2_config(**changed):
    from transformers import GPT2Config

    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changed})


def write_model(folder, weights=False, **changed):
    """A folder as the hub has it: config, tokenizer, and weights where asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    config = gpt2_config(**changed)
    if weights:
        torch.manual_seed(7)
        config.architectures = ["GPT2LMHeadModel"]
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
