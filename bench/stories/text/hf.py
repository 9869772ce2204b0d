from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("reviews").map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)


def compute_metrics(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean().item()}


plan = {"num_train_epochs": 3, "per_device_train_batch_size": 16, "learning_rate": 5e-5}
kept = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
arguments = TrainingArguments("reviews", metric_for_best_model="accuracy", **plan, **kept)
model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)
pad = DataCollatorWithPadding(tokenizer)
trainer = Trainer(model, arguments, pad, data["train"], data["test"], compute_metrics=compute_metrics)
trainer.train()
print("accuracy", trainer.state.best_metric)
