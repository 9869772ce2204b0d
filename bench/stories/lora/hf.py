from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("notes").map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("model"), LoraConfig(task_type="CAUSAL_LM", r=8))
plan = {"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 2e-4, "eval_strategy": "epoch"}
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, TrainingArguments("tuned", **plan), collate, data["train"], data["test"])
trainer.train()
model.save_pretrained("adapters")
