import lightning as L
import torch
from digits import net, test, train
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.net, self.lr = net(), lr

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


found = {}
for lr in (1e-4, 1e-3, 1e-2):
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=3)
    trainer.fit(Digits(lr), DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64))
    found[lr] = trainer.callback_metrics["loss"].item()
print("best", min(found, key=found.get))
