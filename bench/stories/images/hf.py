import torch
from digits import net, seed, test, train
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    return {"pixels": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


plan = {"num_train_epochs": 10, "eval_strategy": "epoch", "seed": seed}
arguments = TrainingArguments("images", remove_unused_columns=False, **plan)
trainer = Trainer(Digits(), arguments, collate, train, test)
trainer.train()
save_model(trainer.model.net, "digits.safetensors")
