import torch
import torch.distributed as dist
from digits import net, seed, test, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(train, seed=seed)
loader, test_loader = DataLoader(train, batch_size=32, sampler=sampler), DataLoader(test, batch_size=64)
for epoch in range(10):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            total = sum(F.cross_entropy(model.module(x), y, reduction="sum").item() for x, y in test_loader)
        print("loss", total / len(test))
if dist.get_rank() == 0:
    save_model(model.module, "digits.safetensors")
dist.destroy_process_group()
