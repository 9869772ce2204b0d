from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import lockstep

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("reviews").map(
    lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns="text"
)
pad = DataCollatorWithPadding(tokenizer)


class Reviews(lockstep.Task):
    reduction, defaults = "mean", "fine-tuning"

    def model(self):
        return AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)

    def dataset(self, split):
        return data["train" if split == "train" else "test"]

    def collate(self, samples):
        return dict(pad(samples))

    def evaluate(self, model, batch):
        out = model(**batch)
        return out.loss, {"accuracy": ((out.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"]))}

    def loss(self, model, batch):
        return model(**batch).loss


config = {"experiment_name": "reviews", "num_epochs": 3, "batch_size": 16, "eval_freq": "1epoch"}
print("accuracy", lockstep.train(lockstep.Config(best_metric="accuracy:max", **config), Reviews()).best.value)
