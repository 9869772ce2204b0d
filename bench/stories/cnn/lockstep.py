from digits import net, seed, test, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torchmetrics.classification import MulticlassF1Score

import lockstep


class Digits(lockstep.Task):
    f1 = MulticlassF1Score(10)

    def model(self):
        return net()

    def dataset(self, split):
        return train if split == "train" else test

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def metrics(self, model, batch):
        self.f1.update(model(batch[0]).cpu(), batch[1].cpu())
        return {"f1": self.f1}


plan = {"num_epochs": 5, "batch_size": 64, "micro_batch_size": 64, "lr": 0.01, "eval_freq": "1epoch", "seed": seed}
config = lockstep.Config(
    experiment_name="cnn", optim={"schedule": "one-cycle", "clip": 0}, best_metric="f1:max", **plan
)
result = lockstep.train(config, Digits())
save_model(lockstep.load(result.folder, Digits()), "digits.safetensors")
print("F1", result.best.value)
