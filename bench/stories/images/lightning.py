import lightning as L
import torch
from digits import net, test, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("loss", F.cross_entropy(self.net(images), labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


module = Digits()
trainer = L.Trainer(max_epochs=10)
trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32))
save_model(module.net, "digits.safetensors")
