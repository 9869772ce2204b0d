import lightning as L
import torch
from digits import net, test, train
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.f1 = net(), MulticlassF1Score(10)

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.f1(self.net(batch[0]), batch[1])
        self.log("f1", self.f1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


best = ModelCheckpoint(monitor="f1", mode="max")
trainer = L.Trainer(max_epochs=5, callbacks=[best])
trainer.fit(Digits(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64))
save_model(Digits.load_from_checkpoint(best.best_model_path).net, "digits.safetensors")
print("F1", best.best_model_score)
