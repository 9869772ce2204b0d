import torch
from accelerate import Accelerator
from digits import net, test, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

accelerator = Accelerator()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=5 * len(loader))
model, optimizer, loader, test_loader, schedule = accelerator.prepare(model, optimizer, loader, test_loader, schedule)
best = 0.0
for _ in range(5):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
    model.eval()
    f1 = MulticlassF1Score(10).to(accelerator.device)
    for x, y in test_loader:
        with torch.no_grad():
            logits, labels = accelerator.gather_for_metrics((model(x), y))
        f1.update(logits, labels)
    if f1.compute() > best:
        best = f1.compute().item()
        save_model(accelerator.unwrap_model(model), "digits.safetensors")
accelerator.print("F1", best)
