import torch
from digits import net, test, train
from lightning.fabric import Fabric
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
model = net()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loaders = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
loader, test_loader = fabric.setup_dataloaders(*loaders)
for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        total = sum(F.cross_entropy(model(images), labels, reduction="sum") for images, labels in test_loader)
    total = fabric.all_reduce(total, reduce_op="sum")
    fabric.print("loss", total.item() / len(test))
if fabric.is_global_zero:
    save_model(model.module, "digits.safetensors")
