import os

import torch
from digits import net, train
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, pixels, labels):
        return {"loss": F.cross_entropy(self.net(pixels), labels)}


def collate(samples):
    return {"pixels": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


plan = {"num_train_epochs": 5, "per_device_train_batch_size": 64, "learning_rate": 1e-3, "save_steps": 20}
arguments = TrainingArguments("digits", remove_unused_columns=False, **plan)
trainer = Trainer(Digits(), arguments, collate, train)
last = get_last_checkpoint("digits") if os.path.isdir("digits") else None
trainer.train(resume_from_checkpoint=last)
save_model(trainer.model.net, "digits.safetensors")
