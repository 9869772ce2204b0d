from digits import net, test, train
from torch.nn import functional as F

import lockstep


class Digits(lockstep.Task):
    def model(self):
        return net()

    def dataset(self, split):
        return train if split == "train" else test

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


found = {}
for lr in (1e-4, 1e-3, 1e-2):
    config = lockstep.Config(experiment_name=f"lr-{lr}", num_epochs=3, batch_size=64, lr=lr)
    found[lr] = lockstep.train(config, Digits()).evaluation.loss
print("best", min(found, key=found.get))
