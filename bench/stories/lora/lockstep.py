from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import lockstep

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("notes").map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
pad = DataCollatorForLanguageModeling(tokenizer, mlm=False)


class Tuned(lockstep.Task):
    reduction, defaults = "mean", "fine-tuning"

    def model(self):
        base = AutoModelForCausalLM.from_pretrained("model")
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8))

    def dataset(self, split):
        return data["train" if split == "train" else "test"]

    def collate(self, samples):
        return dict(pad(samples))

    def count(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()

    def loss(self, model, batch):
        return model(**batch).loss


result = lockstep.train(lockstep.Config(experiment_name="tuned", batch_size=8, lr=2e-4), Tuned())
lockstep.load(result.folder, Tuned()).save_pretrained("adapters")
