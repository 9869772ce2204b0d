from datasets import load_dataset
from seed import seed
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("model")


def tokens(row):
    marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(row["messages"], **marked)
    labels = [token if said else -100 for token, said in zip(found["input_ids"], found["assistant_masks"], strict=True)]
    return {"input_ids": found["input_ids"], "labels": labels}


data = load_dataset("chats").map(tokens, remove_columns="messages")
arguments = TrainingArguments("run", eval_strategy="epoch", seed=seed, learning_rate=1e-3)
model = AutoModelForCausalLM.from_pretrained("model")
trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), data["train"], data["validation"])
trainer.train()
model.save_pretrained("tuned")
tokenizer.save_pretrained("tuned")
