import torch
from digits import net, test, train
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments, set_seed


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, pixels, labels):
        return {"loss": F.cross_entropy(self.net(pixels), labels)}


def collate(samples):
    return {"pixels": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


found = {}
for lr in (1e-4, 1e-3, 1e-2):
    set_seed(0)
    plan = {"num_train_epochs": 3, "per_device_train_batch_size": 64, "learning_rate": lr}
    arguments = TrainingArguments(f"lr-{lr}", remove_unused_columns=False, prediction_loss_only=True, **plan)
    trainer = Trainer(Digits(), arguments, collate, train, test)
    trainer.train()
    found[lr] = trainer.evaluate()["eval_loss"]
print("best", min(found, key=found.get))
