import lightning as L
import torch
from datasets import load_dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("reviews").map(
    lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns="text"
)
pad = DataCollatorWithPadding(tokenizer)


class Reviews(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.accuracy(self.model(**batch).logits, batch["labels"])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


best = ModelCheckpoint(monitor="accuracy", mode="max")
trainer = L.Trainer(max_epochs=3, callbacks=[best])
loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=pad)
trainer.fit(Reviews(), loader, DataLoader(data["test"], batch_size=16, collate_fn=pad))
print("accuracy", best.best_model_score)
