import lightning as L
import torch
from digits import net, train
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module = Digits()
kept = ModelCheckpoint(dirpath="digits", every_n_train_steps=20, save_last=True)
trainer = L.Trainer(max_epochs=5, callbacks=[kept])
trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), ckpt_path="last")
save_model(module.net, "digits.safetensors")
