"""What a training loop of one's own takes besides an engine: each a function of its own, and none needs another.

world = lockstep.World.join()
engine = lockstep.engine("auto", model, optimizer, world, clip=1.0)
loader = lockstep.loader(data, world, batch_size=64, micro_batch_size=16, epochs=3)
done = lockstep.load_state("out", world, engine=engine, scheduler=scheduler, loader=loader)
for step in loader:
    for batch in step:
        with engine.accumulate(batch.last):
            engine.backward(loss_of(engine.model, batch.data), batch.weight)
    engine.step()
    scheduler.step()
    if (step.number + 1) % 100 == 0:
        lockstep.save_state("out", world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)
"""
