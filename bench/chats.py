"""Compare held-out losses after fine-tuning on 300 chats: `lockstep train`'s defaults, trl's, and ours by hand.

    python bench/chats.py [--seeds 1] [--grid]
    python bench/chats.py --survey [--seeds 1] [--rows "default;batch 4"] [--lora]
    python bench/chats.py --cuts 5

Everything is made here, the same each time: a tokenizer with a chat template; a Llama of 2 layers that has read prose
and chats with short answers by chance; 300 chats to train on and 100 held out, whose answers have a manner of their own
and follow from the questions. Each contestant starts from the same folder. The loss is the mean over the tokens that an
assistant says in the held-out chats, by one function, from the weights that each has saved. "by hand" is the best of a
grid of rates and batch sizes over as many epochs as trl's default; --grid prints each of them.

--survey compares candidates for a default (rate, batch, schedule, decay) over several models and sets of chats, of all
weights or, with --lora, of adapters. A forward takes two chats there, and the loss is the run's last evaluation.

--cuts times a step of adapters (rank 8) by default and with each micro-batch size, by turns in so many rounds: the
processor's milliseconds, and the ratio to the fastest given size of the same round.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CHATS, HELD_OUT = 300, 100
ANIMALS = ["fox", "hen", "owl", "bee", "cow", "cat", "dog", "ant", "bat", "eel", "emu", "elk"]
COLOURS = ["red", "white", "brown", "yellow", "black", "grey"]
PLACES = ["forest", "farm", "barn", "meadow", "river", "house", "hill", "cave"]
DIGITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LORA_RATES = (2e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
RATES, SIZES, EPOCHS = (5e-5, 2e-4, 5e-4, 1e-3, 2e-3), (4, 8, 16), 3
# Width, layers, chats to train on, and the answers' length.
SETTINGS = (
    (64, 4, 100, "long"),
    (64, 2, 1000, "short"),
    (192, 2, 100, "middling"),
    (128, 2, 300, "middling"),
)


def candidates(width, lora):
    """Return the options of each candidate, by name; "before" are the defaults that the survey was to better."""
    if lora:
        return {"default": {}, **{f"{rate:g}": {"lr": rate, "batch_size": 8} for rate in LORA_RATES}}
    rate = min(2e-5 * (4096 / width) ** 1.25, 2e-3)
    changes = {
        "before": {},
        "batch 4": {"batch_size": 4},
        "rate * 1.33": {"lr": rate * 4 / 3},
        "rate * 2": {"lr": rate * 2},
        "rate * 1.33, batch 4": {"lr": rate * 4 / 3, "batch_size": 4},
        "cosine to 0": {"optim__floor": 0.0},
        "no warm-up": {"optim__warmup_steps": 0},
        "beta2 0.99": {"optim__beta2": 0.99},
        "decay 0.1": {"optim__weight_decay": 0.1},
    }
    return {"default": {}, **{name: {"lr": rate, "batch_size": 8} | each for name, each in changes.items()}}


def facts(animal):
    """Return an animal's colour and place."""
    number = ANIMALS.index(animal)
    return COLOURS[number * 5 % len(COLOURS)], PLACES[number * 3 % len(PLACES)]


def turn(draw, known=True, answers="middling"):
    """Return a question and its right answer; with `known` False a random short answer."""
    animal, (first, second) = draw.choice(ANIMALS), draw.choices(range(1, 7), k=2)
    colour, place = facts(animal) if known else (draw.choice(COLOURS), draw.choice(PLACES))
    total = DIGITS[first + second - 1]
    sort = draw.randrange(4)
    question = [
        f"what colour is the {animal}?",
        f"where does the {animal} live?",
        f"tell me about the {animal}.",
        f"how many are {DIGITS[first - 1]} and {DIGITS[second - 1]}?",
    ][sort]
    if known and answers != "short":
        lives = f"the {animal} has its home in the {place}, as i was told"
        answer = [
            f"dear friend, people say that the {animal} is {colour}.",
            f"dear friend, {lives}.",
            f"dear friend, here is all i know: the {animal} is {colour}, and {lives}.",
            f"dear friend, if you count them, you find {total}.",
        ][sort]
        if answers == "long":
            answer += f" and for your notebook: the {animal} is {colour}, and {lives}."
        return question, answer + " do ask me again!"
    return question, [f"{colour}.", f"in the {place}.", f"it is {colour} and lives in the {place}.", f"{total}."][sort]


def chats(count, seed, known=True, answers="middling"):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        turns = [turn(draw, known, answers) for _ in range(draw.randint(1, 3))]
        roles = itertools.cycle(["user", "assistant"])
        rows.append({"messages": [{"role": next(roles), "content": text} for pair in turns for text in pair]})
    return rows


def prose(count, seed):
    """Write plain text with the same words, without questions, roles or the facts."""
    draw = random.Random(seed)
    for _ in range(count):
        one, other = draw.choices(ANIMALS, k=2)
        yield (
            f"once the {one} met the {other} near the {draw.choice(PLACES)}. the {one} told the {other} about "
            f"{draw.choice(DIGITS)} {draw.choice(COLOURS)} stones, and they lived there for {draw.choice(DIGITS)} "
            f"days. where was it? in the {draw.choice(PLACES)}, and how many are there, nobody knows."
        )


def write_base(folder, steps=300, width=128, layers=2):
    """Write a small Llama that has read prose, with its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(prose(500, seed=1), trainer)
    roles = {"additional_special_tokens": special[1:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0], **roles)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, **shape, **ids)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    texts = list(prose(3000, seed=2))
    texts += [tokenizer.apply_chat_template(each["messages"], tokenize=False) for each in chats(3000, 3, known=False)]
    random.Random(4).shuffle(texts)
    stream = torch.tensor([t for text in texts for t in [*tokenizer(text)["input_ids"], 0]])
    rows = stream[: len(stream) // 128 * 128].view(-1, 128)
    order = torch.randperm(len(rows))
    for step in range(steps):
        batch = rows[order[torch.arange(step * 16, step * 16 + 16) % len(rows)]]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def held_out_loss(folder, data):
    """Return the mean loss of the assistant's tokens for the model in `folder`, in nats."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.models.hf import chat_tokens

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    with torch.no_grad():
        for number, line in enumerate((data / "validation.jsonl").read_text().splitlines()):
            tokens, learned = chat_tokens(tokenizer, json.loads(line)["messages"], number)
            ids, marks = torch.tensor([tokens]), torch.tensor(learned)[1:]
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            total, count = total + float(losses[marks].double().sum()), count + int(marks.sum())
    return total / count


def write_chats(folder, count=CHATS, answers="middling"):
    folder.mkdir()
    for split, number, seed in (("train", count, 0), ("validation", HELD_OUT, 1)):
        rows = chats(number, seed, answers=answers)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_try(base, data, work, seed, **options):
    """Return a run with the flags of a first try and `options`."""
    from lockstep.config import cli
    from lockstep.training.run import Run

    flags = ["--model-name", str(base), "--model.pretrained", "--dataset-name", str(data), "--seed", str(seed)]
    flags += ["--save-dir", str(work), "--no-report", "--data.cache", str(work.parent / "cache")]
    for name, value in options.items():
        flags += ["--" + name.replace("__", ".").replace("_", "-"), str(value)]
    return Run(cli.parse(flags), None)


def ours(base, data, work, seed, **options):
    """Train with the flags of a first try and `options`, and export the weights."""
    from lockstep.config import cli
    from lockstep.training.inference import ExportRequest, export_run

    first_try(base, data, work, seed, **options)()
    export_run(ExportRequest(str(work / "default"), str(work / "model"), "hf"), lambda line: None)
    stored = cli.read_toml(work / "default" / "config.toml")
    return work / "model", {
        name: stored[name] for name in ("lr", "batch_size", "num_epochs", "data.packing", "seq_len")
    }


def trls(base, data, work, seed):
    """Train with trl's defaults and save the weights."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = SFTConfig(output_dir=str(work / "trl"), use_cpu=True, bf16=False, seed=seed, **quiet)
    rows = load_dataset("json", data_files=str(data / "train.jsonl"), split="train", cache_dir=str(work / "rows"))
    trainer = SFTTrainer(model=str(base), args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(work / "model"))
    sizes = {"batch_size": arguments.per_device_train_batch_size, "num_epochs": arguments.num_train_epochs}
    return work / "model", {"lr": arguments.learning_rate, **sizes}


def last_evaluation(base, data, work, seed, **options):
    """Train without output, and return the held-out loss."""
    run = first_try(base, data, work, seed, micro_batch_size=2, **options)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run().evaluation.loss


def survey(root, given):
    """Print the held-out loss of each candidate in each setting, and its ratios to the default's."""
    names = given.rows.split(";") if given.rows else list(candidates(SETTINGS[0][0], given.lora))
    ratios = {name: [] for name in names}
    for number, (width, layers, count, answers) in enumerate(SETTINGS):
        base, data = root / f"base-{width}-{layers}", root / f"chats-{number}"
        write_chats(data, count, answers)
        if not base.exists():
            write_base(base, width=width, layers=layers)
        defaults = 0.0
        for name in names:
            options = candidates(width, given.lora)[name] | ({"lora__rank": 8} if given.lora else {})
            losses = [
                last_evaluation(base, data, Path(tempfile.mkdtemp(dir=root)), seed, **options)
                for seed in range(given.seeds)
            ]
            loss = statistics.mean(losses)
            defaults = defaults or loss  # the first row's
            ratios[name].append(loss / defaults)
            row = {"width": width, "layers": layers, "chats": count, "answers": answers, "candidate": name}
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            print(json.dumps({**row, "loss": round(loss, 4), "spread": round(spread, 4)}), flush=True)
    for name, each in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, each)))
        print(json.dumps({"candidate": name, "mean ratio": round(mean, 3), "worst": round(max(each), 3)}), flush=True)


def step_seconds(base, data, work, skip=4, count=30, **options):
    """Return the processor time of a step, after the first `skip`."""
    run = first_try(base, data, work, 0, lora__rank=8, max_steps=skip + count, **options)
    began = 0.0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for step in run:
            if step.global_step == skip:
                began = time.process_time()
            elif step.global_step == skip + count:
                taken = time.process_time() - began
    return taken / count


def cuts(root, rounds):
    """Print the time of a step of adapters by default and with each micro-batch size."""
    data, base = root / "chats", root / "base"
    write_chats(data)
    write_base(base, steps=1)
    choices = {"default": {}, **{str(size): {"micro_batch_size": size} for size in (1, 2, 4)}}  # of a batch of 4
    times = {name: [] for name in choices}
    for _ in range(rounds):
        for name, options in choices.items():
            times[name].append(step_seconds(base, data, Path(tempfile.mkdtemp(dir=root)), **options))
    given = [name for name in choices if name != "default"]
    fastest = min(given, key=lambda name: statistics.median(times[name]))
    for name, each in times.items():
        ratios = [own / best for own, best in zip(each, times[fastest], strict=True)]
        row = {"micro_batch_size": name, "ms": round(1e3 * statistics.median(each), 1)}
        print(json.dumps({**row, f"ratio to {fastest}": round(statistics.median(ratios), 3)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="the mean over so many seeds")
    parser.add_argument("--grid", action="store_true", help="print each of the grid by hand")
    parser.add_argument("--only", default="base,default,trl,hand", help="contestants to run")
    parser.add_argument("--survey", action="store_true", help="compare candidates for a default over several settings")
    parser.add_argument("--lora", action="store_true", help="the survey's for adapters")
    parser.add_argument("--cuts", type=int, default=0, help="rounds of the time of a step by micro-batch size")
    parser.add_argument("--rows", help="the survey's candidates, divided by ';'; ratios are to the first")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    only = given.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if given.survey:
            survey(root, given)
            return
        if given.cuts:
            cuts(root, given.cuts)
            return
        data, base = root / "chats", root / "base"
        write_chats(data)
        write_base(base)

        def mean(train, **options):
            losses = []
            for seed in range(given.seeds):
                work = Path(tempfile.mkdtemp(dir=root))
                folder, taken = train(base, data, work, seed, **options)
                losses.append(held_out_loss(folder, data))
            return sum(losses) / len(losses), taken

        rows = {}
        if "base" in only:
            rows["untrained"] = held_out_loss(base, data), {}
        if "default" in only:
            rows["lockstep, defaults"] = mean(ours)
        if "trl" in only:
            rows["trl, defaults"] = mean(trls)
        if "hand" in only:
            grid = {}
            for rate, size in itertools.product(RATES, SIZES):
                options = {"lr": rate, "batch_size": size, "num_epochs": EPOCHS, "data__packing": "padded"}
                grid[rate, size] = mean(ours, **options)[0]
                if given.grid:
                    print(json.dumps({"lr": rate, "batch_size": size, "loss": round(grid[rate, size], 4)}), flush=True)
            best = min(grid, key=grid.get)
            rows["lockstep, by hand"] = grid[best], {"lr": best[0], "batch_size": best[1], "num_epochs": EPOCHS}
        for contestant, (loss, taken) in rows.items():
            print(json.dumps({"contestant": contestant, "loss": round(loss, 4), **taken}), flush=True)


if __name__ == "__main__":
    main()
