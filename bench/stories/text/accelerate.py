import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("reviews").map(
    lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns="text"
)
pad = DataCollatorWithPadding(tokenizer)
loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=pad)
test_loader = DataLoader(data["test"], batch_size=16, collate_fn=pad)
model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
schedule = accelerator.prepare(get_scheduler("linear", optimizer, 0, 3 * len(loader)))
best = 0.0
for _ in range(3):
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in test_loader:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        right += (predicted == labels).sum().item()
    if right / len(data["test"]) > best:
        best = right / len(data["test"])
        accelerator.save_model(model, "reviews")
accelerator.print("accuracy", best)
