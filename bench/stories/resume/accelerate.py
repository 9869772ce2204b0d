import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from digits import net, train
from safetensors.torch import save_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

project = ProjectConfiguration(project_dir="digits", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(train, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
if os.path.isdir("digits/checkpoints"):
    accelerator.load_state()
    project.iteration = len(os.listdir("digits/checkpoints"))
    steps = 20 * project.iteration
for epoch in range(steps // len(loader), 5):
    loader.set_epoch(epoch)
    done = steps % len(loader)
    for x, y in accelerator.skip_first_batches(loader, done) if done else loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            accelerator.save_state()
if accelerator.is_main_process:
    save_model(accelerator.unwrap_model(model), "digits.safetensors")
