import torch
from digits import net, seed, test, train
from safetensors.torch import save_model
from sklearn.metrics import f1_score
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


def compute_metrics(predicted):
    return {"f1": f1_score(predicted.label_ids, predicted.predictions.argmax(-1), average="macro")}


model = Digits()
plan = {"num_train_epochs": 5, "per_device_train_batch_size": 64, "max_grad_norm": 0, "seed": seed}
kept = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
arguments = TrainingArguments("cnn", remove_unused_columns=False, metric_for_best_model="f1", **plan, **kept)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
steps = 5 * -(-len(train) // 64)
both = (optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps))
trainer = Trainer(model, arguments, collate, train, test, compute_metrics=compute_metrics, optimizers=both)
trainer.train()
save_model(trainer.model.net, "digits.safetensors")
print("F1", trainer.state.best_metric)
