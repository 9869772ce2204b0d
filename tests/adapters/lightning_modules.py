"""LightningModules for the tests: small, with data made here. Each is made from the package that it derives from.

module = seeded(autoencoder(L))             # L: lightning.pytorch, or pytorch_lightning
losses, trainer = their_losses(L, module, loaders())
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


def rows(count=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def loaders(train=64, held_out=20, size=8, **more):
    return DataLoader(rows(train), size, **more), DataLoader(rows(held_out, 1), size)


class Uneven(Sampler):
    """Lists of 2 to 8 samples, by a generator of its own, which goes on from epoch to epoch."""

    sizes = (8, 3, 5, 2, 7, 8, 4, 3)

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        order = torch.randperm(sum(self.sizes), generator=self.generator)
        return iter([part.tolist() for part in order.split(self.sizes)])


def uneven():
    return DataLoader(rows(40), batch_sampler=Uneven()), DataLoader(rows(20, 1), 8)


def seeded(kind, *given, **named):
    torch.manual_seed(1)
    return kind(*given, **named)


def trainer(L, **more):
    given = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(**(given | more))


def their_losses(L, module, data, **more):
    """The loss of each step that Lightning's own Trainer takes, and the Trainer."""

    class Losses(L.Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.found.append(float(outputs["loss"]))

    seen = Losses()
    made = trainer(L, callbacks=[seen, *more.pop("callbacks", [])], **more)
    made.fit(module, *data)
    return seen.found, made


def autoencoder(L):
    """The one of the guide that began this project, as it stands there but for its size."""

    class LitAutoEncoder(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

        def training_step(self, batch, batch_idx):
            x, _ = batch
            x = x.view(x.size(0), -1)
            z = self.encoder(x)
            x_hat = self.decoder(z)
            loss = F.mse_loss(x_hat, x)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return LitAutoEncoder


def classifier(L, dropout=0.0, configure=None):
    """One with BatchNorm, a validation, metrics, lists that its steps fill, and the rates that its optimizer had."""

    class Classifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
            self.head = nn.Linear(16, 3)
            self.rates, self.means = [], []
            self.trained, self.held_out = [], []

        def forward(self, x):
            return self.head(self.net(x))

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.trained.append(loss.detach())
            return {"loss": loss, "more": 1}

        def on_before_optimizer_step(self, optimizer):
            self.rates.append([group["lr"] for group in optimizer.param_groups])

        def on_train_epoch_end(self):
            self.log("mean_loss", torch.stack(self.trained).mean())
            self.trained.clear()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            self.log("val_loss", F.cross_entropy(out, y))
            self.log_dict({"largest": out.max(), "rows": float(len(x))}, reduce_fx="max")
            self.log("all", float(len(x)), reduce_fx="sum")
            self.held_out.append({"right": out.argmax(-1) == y})

        def on_validation_epoch_end(self):
            right = torch.cat([each["right"] for each in self.held_out])
            self.log("accuracy", right.float().mean())
            self.log("seen", float(len(right)))
            self.held_out.clear()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(
                [{"params": self.net.parameters()}, {"params": self.head.parameters(), "lr": 2e-2}], lr=1e-2
            )
            return optimizer if configure is None else configure(self, optimizer)

    return Classifier


def gan(L, draws=False):
    """Two optimizers that training_step steps itself, with toggling, clipping, schedulers, BatchNorm, spectral norm."""

    class GAN(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            self.judge = nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 1)
            )
            self.steps = 0

        def training_step(self, batch, batch_idx):
            x, _ = batch
            make, judge = self.optimizers()
            ones = torch.ones(len(x), 1, dtype=x.dtype)
            z = torch.randn(len(x), 4) if draws else x[:, :4]
            self.steps += 1
            self.toggle_optimizer(make)
            made = F.binary_cross_entropy_with_logits(self.judge(self.generator(z)), ones)
            make.zero_grad()
            self.manual_backward(made)
            self.clip_gradients(make, 0.5, "norm")
            make.step()
            self.untoggle_optimizer(make)
            self.toggle_optimizer(judge)
            self.fake = self.generator(z).detach()
            judged = F.binary_cross_entropy_with_logits(self.judge(x), ones)
            judged = judged + F.binary_cross_entropy_with_logits(self.judge(self.fake), 0 * ones)
            judge.zero_grad()
            self.manual_backward(judged)
            judge.step()
            self.untoggle_optimizer(judge)
            self.log_dict({"made": made, "judged": judged}, prog_bar=True)
            for scheduler in self.lr_schedulers():
                scheduler.step()
            return made.detach() + judged.detach()

        def configure_optimizers(self):
            make = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
            judge = torch.optim.Adam(self.judge.parameters(), lr=1e-2)
            rates = torch.optim.lr_scheduler
            return [make, judge], [rates.ExponentialLR(make, 0.9), rates.ExponentialLR(judge, 0.8)]

    return GAN
