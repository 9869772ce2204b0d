"""`python bench/hf_scripts.py EXAMPLES`: scripts of transformers' examples folder, unedited, under Trainer and here.

EXAMPLES is the folder `examples/pytorch` of a checkout of transformers that goes with the installed version; nothing of
it lies in this project. Each script is run twice with the same JSON file, by `python SCRIPT args.json` and by `lockstep
train --hf-script SCRIPT --hf-args args.json`, with a tiny model, tokenizer and data that are made here, and no network.
A line a script: the largest difference of a step's loss, as `trainer_state.json` has them, which `trainer.save_state()`
of the script writes in both. Metrics that a script loads from the hub stand beside the data, in a stand-in of ours.

Needs transformers, accelerate, datasets, evaluate, and what the scripts import besides (nltk, sentencepiece).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# A metric of the hub's form that needs nothing: which share of the first two rows agree.
METRIC = """import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        kinds = datasets.Features({"predictions": KIND, "references": KIND})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=kinds)

    def _compute(self, predictions, references, **more):
        return {NAMES}
"""

# script -> (its model, its data, whether its collator draws, arguments of its own)
SCRIPTS: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "language-modeling/run_clm.py": ("gpt2", "text.txt", False, {"block_size": 16}),
    "language-modeling/run_mlm.py": ("bert", "text.txt", True, {"max_seq_length": 16}),
    "language-modeling/run_plm.py": ("xlnet", "text.txt", True, {"max_seq_length": 16}),
    "text-classification/run_glue.py": (
        "bert",
        "classes.csv",
        False,
        {"max_seq_length": 16, "validation_file": "classes.csv"},
    ),
    "text-classification/run_classification.py": (
        *("bert", "classes.csv", False),
        {"max_seq_length": 16, "text_column_names": "sentence1", "validation_file": "classes.csv"},
    ),
    "token-classification/run_ner.py": ("bert", "tags.json", False, {"max_seq_length": 32}),
    "multiple-choice/run_swag.py": ("bert", "choices.json", False, {"max_seq_length": 32}),
    "question-answering/run_qa.py": ("bert", "questions.json", False, {"max_seq_length": 48, "doc_stride": 8}),
    "question-answering/run_seq2seq_qa.py": ("t5", "questions.json", False, {"max_seq_length": 48, "doc_stride": 8}),
    "summarization/run_summarization.py": ("t5", "summaries.json", False, {"max_source_length": 32}),
    "translation/run_translation.py": (
        *("t5", "pairs.json", False),
        {"max_source_length": 32, "source_lang": "en", "target_lang": "ro"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=Path, help="examples/pytorch of a checkout of transformers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="scripts whose path has this")
    parser.add_argument(
        "--processes", type=int, default=1, help="of lockstep; the Trainer runs on one, with as many micro-batches"
    )
    parser.add_argument("--flags", default="", help="further flags of `lockstep train`, as one word")
    asked = parser.parse_args()
    versions = ", ".join(f"{name} {__import__(name).__version__}" for name in ("torch", "transformers"))
    print(f"{versions}, {asked.steps} steps, {asked.processes} processes {asked.flags}")
    print(f"{'script':<44} {'largest difference':>18} {'last loss':>10} {'theirs':>10}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder)
        for script, (model, data, draws, more) in SCRIPTS.items():
            if asked.only in script:
                print(line(asked, folder, script, model, data, draws, more), flush=True)


def line(
    asked: argparse.Namespace, folder: Path, script: str, model: str, data: str, draws: bool, more: dict[str, Any]
) -> str:
    """What one script came to, under both."""
    path = asked.examples / script
    if not path.is_file():
        return f"{script:<44} not there"
    found = []
    for place, (who, count) in enumerate((("theirs", 1), ("ours", asked.processes))):
        out = folder / f"{who}-{path.stem}"
        given = {"model_name_or_path": str(folder / model), "train_file": str(folder / data), "output_dir": str(out)}
        given |= {
            "do_train": True,
            "max_steps": asked.steps,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "use_cpu": True,
        }
        given |= {
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            **more,
        }
        given |= {"gradient_accumulation_steps": asked.processes // count}
        arguments = folder / f"{who}-{path.stem}.json"
        arguments.write_text(json.dumps(given))
        train = ["train", "--hf-script", str(path), "--hf-args", str(arguments), *asked.flags.split()]
        ours = ["-m", "lockstep", *(["launch", "--nproc-per-node", str(count), "--"] if count > 1 else []), *train]
        command = [sys.executable, *(ours if place else [str(path), str(arguments)])]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "NLTK_DATA": str(folder),
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{script:<44} {who} failed: {(done.stderr.strip().splitlines() or [''])[-1]}"
        states = next(out.rglob("trainer_state.json"))
        found.append([entry["loss"] for entry in json.loads(states.read_text())["log_history"] if "loss" in entry])
    theirs, mine = found
    off = max(abs(a - b) for a, b in zip(theirs, mine, strict=True))
    shown = "draws its masks" if draws else f"{off:.1e}"
    return f"{script:<44} {shown:>18} {mine[-1]:>10.5f} {theirs[-1]:>10.5f}"


def make(folder: Path) -> None:
    """A tokenizer, a tiny model of each kind without dropout, data of each form, and the metrics."""
    drawn = random.Random(0)
    text = [" ".join(drawn.choices(WORDS, k=drawn.randint(6, 20))) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(text))
    (folder / "classes.csv").write_text("sentence1,label\n" + "".join(f"{row},{len(row) % 2}\n" for row in text[:100]))
    for name, rows in _rows(text).items():
        (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    for name, kind, numbers in (
        ("accuracy", 'datasets.Value("int32")', '"accuracy": 0.5'),
        (
            "seqeval",
            'datasets.Sequence(datasets.Value("string"))',
            '"overall_precision": 0.5, "overall_recall": 0.5, "overall_f1": 0.5, "overall_accuracy": 0.5',
        ),
        ("squad", 'datasets.Value("string")', '"exact_match": 0.5'),
        ("rouge", 'datasets.Value("string")', '"rouge1": 0.5'),
        ("sacrebleu", 'datasets.Value("string")', '"score": 0.5'),
    ):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC.replace("KIND", kind).replace("NAMES", numbers))
    (folder / "tokenizers" / "punkt").mkdir(parents=True)  # run_summarization looks whether it is there
    _models(folder)


def _rows(text: list[str]) -> dict[str, Iterator[dict[str, Any]]]:
    """The JSON files, row by row."""
    return {
        "tags.json": (
            {"tokens": row.split(), "ner_tags": ["O" if len(word) < 3 else "B-X" for word in row.split()]}
            for row in text[:100]
        ),
        "choices.json": (
            {"sent1": text[at], "sent2": "w1", "label": at % 4, **{f"ending{n}": text[at + n] for n in range(4)}}
            for at in range(100)
        ),
        "questions.json": iter([{"data": [_question(text, at) for at in range(100)]}]),
        "summaries.json": ({"text": row, "summary": " ".join(row.split()[:4])} for row in text[:100]),
        "pairs.json": ({"translation": {"en": text[at], "ro": text[at + 1]}} for at in range(100)),
    }


def _question(text: list[str], at: int) -> dict[str, Any]:
    answer = text[at].split()[2]
    answers = {"text": [answer], "answer_start": [text[at].index(answer)]}
    return {"id": str(at), "title": "", "context": text[at], "question": text[at + 100], "answers": answers}


def _models(folder: Path) -> None:
    import tokenizers
    import torch
    import transformers

    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, model_max_length=64, **names)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "vocab_size": 70}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    made = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, **drops, **ends)
        ),
        "bert": transformers.BertForMaskedLM(
            transformers.BertConfig(max_position_embeddings=64, vocab_size=70, **small, **none)
        ),
        "xlnet": transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0, **ends)
        ),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                **ends,
            )
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
