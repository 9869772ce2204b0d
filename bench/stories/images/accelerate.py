import torch
from accelerate import Accelerator
from digits import net, test, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader, test_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
for _ in range(10):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
    model.eval()
    total = 0.0
    for images, labels in test_loader:
        with torch.no_grad():
            logits, labels = accelerator.gather_for_metrics((model(images), labels))
        total += F.cross_entropy(logits, labels, reduction="sum").item()
    accelerator.print("loss", total / len(test))
save_model(accelerator.unwrap_model(model), "digits.safetensors")
