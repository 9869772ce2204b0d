from digits import net, seed, test, train
from safetensors.torch import save_model
from torch.nn import functional as F

import lockstep


class Digits(lockstep.Task):
    def model(self):
        return net()

    def dataset(self, split):
        return train if split == "train" else test

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)


config = lockstep.Config(experiment_name="images", num_epochs=10, eval_freq="1epoch", seed=seed)
result = lockstep.train(config, Digits())
save_model(lockstep.load(result.folder, Digits()), "digits.safetensors")
