"""Trainers of the kinds in transformers' examples folder, with tiny models and data made here: nothing is fetched.

    trainer = KINDS["causal"](folder, max_steps=4)

None of them draws anything: there is no dropout, and no collator masks at random. All have the seed, the rates and the
optimizer that a script would give them.
"""

import os

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = 50


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(count, generator, least=6, most=12):
    """Rows of tokens of different lengths."""
    lengths = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, WORDS, (length,), generator=generator).tolist() for length in lengths]


def arguments(folder, **more):
    given = {
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    given |= {"logging_steps": 1, "max_steps": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return {"output_dir": str(folder), "save_strategy": "no", **given, **more}


def padded(rows):
    """A collator: rows padded with 0, their labels with -100."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": [row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows],
        "attention_mask": [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows],
    }
    for name in rows[0].keys() - batch.keys():
        values = [row[name] for row in rows]
        spread = name == "labels" and isinstance(values[0], list)
        batch[name] = [value + [-100] * (length - len(value)) for value in values] if spread else values
    return {name: torch.tensor(values) for name, values in batch.items()}


def made(folder, model, rows, collator=padded, kind=Trainer, args=TrainingArguments, keep=(), **more):
    given = {name: more.pop(name) for name in list(more) if name in keep or name in _OF_TRAINER}
    return kind(model, args(**arguments(folder, **more)), collator, rows, given.pop("eval_dataset", rows[:10]), **given)


_OF_TRAINER = ("compute_metrics", "eval_dataset", "callbacks", "optimizers", "compute_loss_func")
_OF_TRAINER += ("preprocess_logits_for_metrics", "optimizer_cls_and_kwargs")


def seeded(build):
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))  # rank 0's values count
    return build()


def causal_model(dropout=0.0):
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=WORDS,
        n_positions=16,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        bos_token_id=0,
        eos_token_id=0,
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config))


def causal_rows(count=40):
    return [
        {"input_ids": row, "labels": [-100] * (at % 4) + row[at % 4 :]} for at, row in enumerate(tokens(count, drawn()))
    ]


def causal(folder, dropout=0.0, **more):
    return made(folder, causal_model(dropout), causal_rows(), **more)


def bert(kind, **more):
    config = transformers.BertConfig(**TINY, **NO_DROPOUT, vocab_size=WORDS, max_position_embeddings=16, **more)
    return seeded(lambda: kind(config))


def masked(folder, **more):
    rows = []
    for at, row in enumerate(tokens(40, drawn())):
        labels = [token if (place + at) % 4 == 0 else -100 for place, token in enumerate(row)]
        rows.append(
            {"input_ids": [2 if label >= 0 else t for label, t in zip(labels, row, strict=True)], "labels": labels}
        )
    return made(folder, bert(transformers.BertForMaskedLM), rows, **more)


def seq2seq(folder, **more):
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        vocab_size=WORDS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    rows = [{"input_ids": row, "labels": row[: len(row) // 2]} for row in tokens(40, drawn())]
    kind = {"kind": transformers.Seq2SeqTrainer, "args": transformers.Seq2SeqTrainingArguments}
    model = seeded(lambda: transformers.T5ForConditionalGeneration(config))
    return made(folder, model, rows, **kind, **more)


def token_classes(folder, **more):
    rows = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in tokens(40, drawn())]
    return made(folder, bert(transformers.BertForTokenClassification, num_labels=3), rows, **more)


def text_classes(folder, **more):
    rows = [{"input_ids": row, "labels": row[0] % 3} for row in tokens(40, drawn())]
    return made(folder, bert(transformers.BertForSequenceClassification, num_labels=3), rows, **more)


def questions(folder, **more):
    rows = [{"input_ids": row, "start_positions": 1, "end_positions": 3 + row[0] % 3} for row in tokens(40, drawn())]
    return made(folder, bert(transformers.BertForQuestionAnswering), rows, **more)


def images(folder, **more):
    config = transformers.ViTConfig(**TINY, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=4)
    generator = drawn()
    rows = [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": at % 4} for at in range(40)]
    model = seeded(lambda: transformers.ViTForImageClassification(config))
    return made(folder, model, rows, transformers.default_data_collator, **more)


def heard(rows):
    values = nn.utils.rnn.pad_sequence([row["input_values"] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_values": values, "labels": labels}


def speech(folder, **more):
    config = transformers.Wav2Vec2Config(
        **TINY,
        vocab_size=12,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        pad_token_id=0,
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
    )
    generator = drawn()
    rows = [
        {
            "input_values": torch.randn(400, generator=generator),
            "labels": torch.randint(1, 12, (2 + at % 4,), generator=generator),
        }
        for at in range(24)
    ]
    return made(folder, seeded(lambda: transformers.Wav2Vec2ForCTC(config)), rows, heard, **more)


def choices(folder, **more):
    generator = drawn()
    ids = torch.randint(3, WORDS, (40, 3, 8), generator=generator)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": at % 3} for at, row in enumerate(ids)]
    model = bert(transformers.BertForMultipleChoice)
    return made(folder, model, rows, transformers.default_data_collator, **more)


def pairs(rows):
    batch = transformers.default_data_collator(rows)
    return {**batch, "return_loss": True}


def contrastive(folder, **more):
    text = {**TINY, "vocab_size": WORDS, "max_position_embeddings": 16, "attention_dropout": 0.0, "eos_token_id": 2}
    vision = {**TINY, "image_size": 8, "patch_size": 4, "attention_dropout": 0.0}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    generator = drawn()
    rows = [
        {
            "input_ids": torch.randint(3, WORDS, (8,), generator=generator),
            "pixel_values": torch.randn(3, 8, 8, generator=generator),
        }
        for _ in range(40)
    ]
    return made(folder, seeded(lambda: transformers.CLIPModel(config)), rows, pairs, **more)


def sft(folder, **more):
    """trl's, with a tokenizer of whole words; needs trl and datasets, which are imported here alone."""
    import datasets
    import tokenizers
    import trl

    words = ["[PAD]", "[END]", *(f"w{at}" for at in range(WORDS - 2))]
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, words[0]))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token=words[0], eos_token=words[1])
    rows = datasets.Dataset.from_dict({"text": [" ".join(words[at] for at in row) for row in tokens(40, drawn())]})
    args = trl.SFTConfig(
        **arguments(folder, **{"max_length": 16, "bf16": False, "activation_checkpointing": True, **more})
    )
    held_out = rows.select(range(10))
    return trl.SFTTrainer(causal_model(), args, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer)


KINDS = {
    "causal": causal,
    "masked": masked,
    "seq2seq": seq2seq,
    "token classification": token_classes,
    "text classification": text_classes,
    "question answering": questions,
    "image classification": images,
    "speech": speech,
    "multiple choice": choices,
    "contrastive": contrastive,
}


def their_losses(trainer):
    """The loss of each step that the Trainer itself takes."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
