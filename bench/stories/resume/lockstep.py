from digits import net, train
from safetensors.torch import save_model
from torch.nn import functional as F

import lockstep


class Digits(lockstep.Task):
    def model(self):
        return net()

    def dataset(self, split):
        return train if split == "train" else None

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


result = lockstep.train(lockstep.Config(experiment_name="digits", num_epochs=5, batch_size=64, ckpt_freq=20), Digits())
save_model(lockstep.load(result.folder, Digits()), "digits.safetensors")
