"""Trainers of trl with tiny models, a tokenizer of whole words and data, all made here: nothing is fetched.

    trainer = KINDS["dpo"](folder, max_steps=4)

Needs trl, datasets, tokenizers and, for LoRA, peft. No kind draws anything in training: there is no dropout. All are in
float64 unless `dtype` says otherwise.
"""

import contextlib
import json
import warnings
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl
from hf_trainers import TINY, WORDS, arguments, drawn, seeded, tokens

VOCABULARY = ["[PAD]", "[END]", *(f"w{at}" for at in range(WORDS - 2))]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}[END]"
    "{% endgeneration %}{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)
NUMBERS = {
    "sft": {"entropy", "mean_token_accuracy"},
    "dpo": {
        *("entropy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected", "mean_token_accuracy"),
        *("rewards/accuracies", "rewards/chosen", "rewards/margins", "rewards/rejected"),
    },
    "reward": {"accuracy", "margin", "max_reward", "mean_reward", "min_reward"},
}


def tokenizer():
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, VOCABULARY[0])
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", eos_token="[END]")
    made.chat_template = TEMPLATE
    return made


def texts(count, seed, least=3, most=8):
    return [" ".join(VOCABULARY[at] for at in row) for row in tokens(count, drawn(seed), least, most)]


def rows(kind, count=32):
    """Samples: text, prompts with completions, conversations, or pairs (with margins for a reward)."""
    if kind == "text":
        return datasets.Dataset.from_dict({"text": texts(count, 0)})
    prompts, answers = texts(count, 1), texts(count, 2)
    if kind == "completion":
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": [f" {text}" for text in answers]})
    if kind == "chat":
        said = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return datasets.Dataset.from_dict({"messages": said})
    worse = [f" {text}" for text in texts(count, 3)]
    pairs = {"prompt": prompts, "chosen": [f" {text}" for text in answers], "rejected": worse}
    if kind == "margin":
        pairs["margin"] = [0.1 * (at % 5) for at in range(count)]
    return datasets.Dataset.from_dict(pairs)


def lora():
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def sized(**more):
    return transformers.LlamaConfig(
        **TINY,
        **more,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def model():
    return seeded(lambda: transformers.LlamaForCausalLM(sized()))


def reference():
    """Other weights than the model's, the same on every rank."""
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(sized())


def experts():
    config = transformers.MixtralConfig(**{**sized().to_dict(), "num_local_experts": 2, "model_type": "mixtral"})
    return seeded(lambda: transformers.MixtralForCausalLM(config))


def scored():
    return seeded(lambda: transformers.LlamaForSequenceClassification(sized(num_labels=1)))


def made(folder, kind, args, network, data, *, peft=False, dtype=torch.float64, callbacks=None, held=True, **more):
    given = {name: more.pop(name) for name in ("ref_model", "compute_metrics") if name in more}
    given |= {"peft_config": lora()} if peft else {}
    plain = {"bf16": False, "gradient_checkpointing": False, "max_length": 20}
    with quiet():
        return kind(
            model=network.to(dtype),
            args=args(**arguments(folder, **{**plain, **more})),
            train_dataset=data,
            eval_dataset=data.select(range(10)) if held else None,
            processing_class=tokenizer(),
            callbacks=callbacks,
            **given,
        )


@contextlib.contextmanager
def quiet():
    """Without trl's hints at what it will remove, and the progress of `datasets`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
        yield


def sft(folder, data="text", **more):
    network = experts() if more.pop("experts", False) else model()
    return made(folder, trl.SFTTrainer, trl.SFTConfig, network, rows(data, 96 if more.get("packing") else 32), **more)


def dpo(folder, **more):
    kind = more.pop("kind", trl.DPOTrainer)
    network, dtype = model(), more.get("dtype", torch.float64)
    if more.pop("adapted", False):  # a model with an adapter of its own, of which trl makes a copy as the reference
        import peft

        network = peft.get_peft_model(network, lora())
    elif not more.get("peft") and "ref_model" not in more:
        more["ref_model"] = reference().to(dtype)
    return made(folder, kind, trl.DPOConfig, network, rows("pairs"), **{"beta": 0.5, **more})


def reward(folder, **more):
    return made(folder, trl.RewardTrainer, trl.RewardConfig, scored(), rows("margin"), **more)


KINDS = {"sft": sft, "dpo": dpo, "reward": reward}


def write_script(folder, kind, **more):
    """Write a model, its tokenizer, a dataset and arguments into `folder`; return trl's script and the arguments' file.

    The run writes into `folder/out`.
    """
    folder.mkdir(exist_ok=True)
    (scored() if kind == "reward" else model()).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    data = {"sft": "completion", "dpo": "pairs", "reward": "margin"}[kind]
    rows(data).to_json(folder / "data" / "train.jsonl")
    given = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "out"}
    given = {name: str(folder / part) for name, part in given.items()}
    given |= {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1}
    given |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "bf16": False, "save_strategy": "no", **more}
    lines = [f"{name}: {json.dumps(each)}" for name, each in given.items()]
    (folder / "args.yaml").write_text("\n".join(lines) + "\n")
    return Path(trl.__file__).parent / "scripts" / f"{kind}.py", folder / "args.yaml"
