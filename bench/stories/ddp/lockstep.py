import torch
from digits import net, seed, test, train
from safetensors.torch import save_model
from torch.nn import functional as F

import lockstep

world = lockstep.World.join()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = lockstep.engine("auto", model, optimizer, world)
loader = lockstep.loader(train, world, batch_size=64, micro_batch_size=32, epochs=10, seed=seed)
for step in loader:
    model.train()
    for batch in step:
        with engine.accumulate(batch.last):
            engine.backward(F.cross_entropy(engine.model(batch.data[0]), batch.data[1]), batch.weight)
    engine.step()
    if (step.number + 1) % (loader.steps // 10) == 0:
        model.eval()
        for held_out in lockstep.loader(test, world, batch_size=300, micro_batch_size=150, shuffle=False):
            with torch.no_grad():
                logits, labels = lockstep.gather_for_metrics(
                    held_out, [(engine.model(each.data[0]), each.data[1]) for each in held_out]
                )
            world.print("loss", F.cross_entropy(logits, labels).item())
if world.rank == 0:
    save_model(model, "digits.safetensors")
world.leave()
