"""lockstep beside the other frameworks: python bench/loop.py --others [--rounds 20] [--only mlp] [--contestant hf]

Needs the extra `bench`. Every contestant trains the same model from the same weights on the same samples in each step,
with AdamW (fused, the same groups), the same clipping and the same rate, and is set up as its documentation advises for
speed: no logger, no progress bar, no checkpoints. Each runs its own loop, whole, in processes of its own; a hook after
each optimizer step counts, and waits where its turn is over, so that all of them live at once and take turns of a few
steps on one machine. "bare fused again" is the A/A control. At the end each one's model is evaluated on the same
samples: losses that differ by more than 0.5% mean that someone trained something else, and the table says so.

Reported: a step's median time, its median ratio to "bare fused" over the rounds, seconds from the start of the process
until the loop begins and until its first step is done, and the peak memory of rank 0. lockstep puts its parts together
in its first step, so only the second of these compares.
"""

import contextlib
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from contest import machine, show
from loop import STEPS, TASKS, hand_written, lockstep_stepper, rate
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.sampler import Shuffled
from lockstep.optim.groups import groups


class Turns:
    """What a contestant calls: `ready(model)` before its first step, `step()` after each."""

    def __init__(self, pipe, began):
        self.pipe, self.began, self.left, self.loop_began = pipe, began, 1, None

    def ready(self, model):
        self.model, self.loop_began = model, time.time()

    def step(self):
        self.left -= 1
        if self.left:
            return
        now = time.time() if self.loop_began else time.perf_counter()
        if self.loop_began:  # the first step of all
            self.pipe.send({"start": self.loop_began - self.began, "first": now - self.began})
            self.loop_began = None
        else:
            self.pipe.send(now - self.turn_began)
        self.left = self.pipe.recv()
        if not self.left:
            self.pipe.send({"loss": self.final_loss(), "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
            self.pipe.recv()
            os._exit(0)  # without a teardown that a benchmark need not wait for
        self.turn_began = time.perf_counter()

    def final_loss(self):
        """The mean loss over the first samples; set by `contestant`."""
        with torch.no_grad():
            return self.evaluate(self.model)


class Setting:
    """One task at one world size and accumulation, as one rank sees it."""

    def __init__(self, name, accumulation, rank, world):
        kind, self.size, _ = TASKS[name]
        self.task, self.accumulation, self.rank, self.world = kind(), accumulation, rank, world
        self.micro = self.size // accumulation // world
        torch.manual_seed(self.weights_seed())
        self.model = self.task.model()
        self.table = self.task.table

    @staticmethod
    def weights_seed():
        return 0  # what `lockstep.train` draws the weights under

    def optimizer(self):
        return torch.optim.AdamW(groups(self.model, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def loss(self, model, batch):
        """The mean over the micro-batch: all have as many items."""
        return self.task.loss(model, batch) / (self.micro * self.task.items_per_sample)

    def loader(self, whole=False):
        """A DataLoader of this rank's micro-batches; `whole`: of all ranks', for frameworks that deal them out."""
        data = torch.utils.data.TensorDataset(self.table.x, self.table.y)
        return torch.utils.data.DataLoader(data, batch_sampler=Micro(self, whole))


class Micro(torch.utils.data.Sampler):
    """The samples of each micro-batch of the run, in lockstep's order."""

    def __init__(self, setting, whole):
        self.setting, self.whole = setting, whole
        self.batch_size, self.drop_last = setting.micro, True  # which some frameworks ask for

    def __len__(self):
        return 1_000_000

    def __iter__(self):
        s, order = self.setting, Shuffled(len(self.setting.table), 0)
        per_step = s.accumulation * s.world
        mine = range(per_step) if self.whole else range(s.rank * s.accumulation, (s.rank + 1) * s.accumulation)
        for step in range(STEPS):
            samples = order.at(step * s.size, (step + 1) * s.size)[1].tolist()
            for slot in mine:
                yield samples[slot * s.micro : (slot + 1) * s.micro]


def bare(setting, turns):
    s = setting
    wrapped = DistributedDataParallel(s.model, gradient_as_bucket_view=True) if s.world > 1 else s.model
    order, samples = Shuffled(len(s.task.table), 0), len(s.task.table)

    def draw(epoch):
        return torch.from_numpy(order.at(epoch * samples, (epoch + 1) * samples)[1])  # as the others, see `Micro`

    step = hand_written(s.task, wrapped, s.optimizer(), s.size, s.micro, s.accumulation, s.rank, s.world, draw)
    turns.ready(s.model)
    while True:
        step(1)
        turns.step()


def lockstep_itself(setting, turns):
    """`lockstep.train`, with its records, heartbeat, seeds, guards and timers."""
    s = setting
    s.task.model = lambda: s.model
    folder = os.environ["BENCH_FOLDER"]
    step = lockstep_stepper(s.task, s.size, s.micro, folder)
    turns.ready(s.model)
    while True:
        step(1)
        turns.step()


def lightning(setting, turns):
    """Trainer.fit, lean: no logger, bar, checkpoint, summary or validation; its own loop and automatic optimization."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = setting.model

        def training_step(self, batch, index):
            return setting.loss(self.inner, batch)

        def configure_optimizers(self):
            optimizer = setting.optimizer()
            return [optimizer], [{"scheduler": setting.schedule(optimizer), "interval": "step"}]

        def on_train_start(self):
            turns.ready(setting.model)

        def on_train_batch_end(self, outputs, batch, index):
            if (index + 1) % setting.accumulation == 0:
                turns.step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=setting.world,
        strategy="ddp" if setting.world > 1 else "auto",
        max_steps=STEPS,
        accumulate_grad_batches=setting.accumulation,
        gradient_clip_val=setting.task.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # else it shuffles: the sampler's order is ours
    )
    trainer.fit(Module(), setting.loader())


def fabric(setting, turns):
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=setting.world, strategy="ddp" if setting.world > 1 else "auto")
    made.launch()
    plain, schedule = setting.optimizer(), None
    model, optimizer = made.setup(setting.model, plain)
    schedule = setting.schedule(plain)
    loader = made.setup_dataloaders(setting.loader(), use_distributed_sampler=False)
    turns.ready(setting.model)
    for index, batch in enumerate(loader):
        waiting = (index + 1) % setting.accumulation != 0
        with made.no_backward_sync(model, enabled=waiting and setting.world > 1):
            made.backward(setting.loss(model, batch) / setting.accumulation)
        if not waiting:
            made.clip_gradients(model, optimizer, max_norm=setting.task.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            turns.step()


def accelerate(setting, turns):
    from accelerate import Accelerator

    made = Accelerator(cpu=True, gradient_accumulation_steps=setting.accumulation)
    plain = setting.optimizer()
    model, optimizer, loader = made.prepare(setting.model, plain, setting.loader(whole=True))
    schedule = setting.schedule(plain)  # a prepared one would step once for each process
    turns.ready(setting.model)
    for batch in loader:
        with made.accumulate(model):
            made.backward(setting.loss(model, batch))
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), setting.task.clip)
            optimizer.step()
            if made.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if made.sync_gradients:
            turns.step()


def hf(setting, turns):
    """The Trainer of `transformers`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Hook(TrainerCallback):
        def on_train_begin(self, *_, **__):
            turns.ready(setting.model)

        def on_step_end(self, *_, **__):
            turns.step()

    class Plain(torch.nn.Module):
        """The model without its `config`, which the Trainer would write to."""

        def __init__(self):
            super().__init__()
            self.inner = setting.model

        def forward(self, x):
            return self.inner(x)

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return setting.loss(model, (inputs["x"], inputs["y"]))

        def get_train_dataloader(self):
            loader = setting.loader(whole=True)
            loader.collate_fn = lambda rows: dict(zip("xy", map(torch.stack, zip(*rows, strict=True)), strict=True))
            return self.accelerator.prepare(loader)

    arguments = TrainingArguments(
        output_dir=os.environ["BENCH_FOLDER"],
        use_cpu=True,
        ddp_backend="gloo" if setting.world > 1 else None,
        ddp_find_unused_parameters=False if setting.world > 1 else None,
        per_device_train_batch_size=setting.micro,
        gradient_accumulation_steps=setting.accumulation,
        max_grad_norm=setting.task.clip,
        max_steps=STEPS,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    optimizer = setting.optimizer()
    data = torch.utils.data.TensorDataset(setting.table.x, setting.table.y)
    pair = (optimizer, setting.schedule(optimizer))
    Own(Plain(), arguments, train_dataset=data, optimizers=pair, callbacks=[Hook()]).train()


def deepspeed(setting, turns):
    """ZeRO-1 in float32 with the same AdamW. Needs g++ and ninja; its first start compiles for a minute or two."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    plain = setting.optimizer()
    engine, _, _, _ = deepspeed.initialize(
        model=setting.model,
        optimizer=plain,
        lr_scheduler=setting.schedule(plain),
        config={
            "train_micro_batch_size_per_gpu": setting.micro,
            "gradient_accumulation_steps": setting.accumulation,
            "gradient_clipping": setting.task.clip,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": STEPS,
        },
    )
    turns.ready(setting.model)
    for index, batch in enumerate(setting.loader()):
        engine.backward(setting.loss(engine, batch))
        engine.step()
        if (index + 1) % setting.accumulation == 0:
            turns.step()


CONTESTANTS = {
    "bare fused": bare,
    "lockstep": lockstep_itself,
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "hf": hf,
    "deepspeed": deepspeed,
    "bare fused again": bare,
}


def contestant(pipe, began, who, name, accumulation, rank, world, port, folder, log):
    """The life of one process."""
    with open(log, "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        os.environ |= {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        alone = world == 1 and who != "deepspeed"  # which wants a group of one
        os.environ |= {} if alone else {key: str(value) for key, value in places.items()}
        if who in ("lightning", "fabric") and world > 1:
            os.environ |= {"TORCHELASTIC_RUN_ID": "bench", "GROUP_RANK": "0"}  # "these are torchrun's processes"
        torch.set_num_threads(1)
        if who.startswith("bare") and world > 1:
            dist.init_process_group("gloo")
        setting = Setting(name, accumulation, rank, world)
        turns = Turns(pipe, began)
        part = slice(0, 256)
        batch = (setting.table.x[part], setting.table.y[part])
        items = len(batch[0]) * setting.task.items_per_sample
        turns.evaluate = lambda model: float(setting.task.loss(model, batch)) / items
        try:
            CONTESTANTS[who](setting, turns)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise


class Group:
    """The processes of one contestant."""

    def __init__(self, who, name, accumulation, world, folder, target=contestant, daemon=True):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.who, self.pipes, self.processes, self.times = who, [], [], []
        self.alive = True  # until a turn fails
        own = tempfile.mkdtemp(dir=folder)
        for rank in range(world):
            mine, theirs = context.Pipe()
            given = (theirs, time.time(), who, name, accumulation, rank, world, port, own, f"{own}/log-{rank}")
            process = context.Process(target=target, args=given, daemon=daemon)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        try:
            self.began = self.hear()
        except RuntimeError:
            self.end()
            raise

    def hear(self):
        """What rank 0 says, once all ranks have said something."""
        found = []
        for pipe in self.pipes:
            if not pipe.poll(300):
                raise RuntimeError(f"{self.who} did not answer")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"{self.who} died") from None
        for answer in found:
            if isinstance(answer, str):
                raise RuntimeError(f"{self.who}: {answer.splitlines()[0]}")
        return found[0]

    def turn(self, steps):
        for pipe in self.pipes:
            pipe.send(steps)
        return self.hear()

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def compete(name, world, accumulation, rounds, wanted, folder):
    """All contestants at one setting, by turns."""
    steps, found = TASKS[name][2], {}
    running = []
    try:
        for who in wanted:  # one after the other, so that the start of one does not slow another's
            try:
                running.append(Group(who, name, accumulation, world, folder))
            except RuntimeError as problem:
                print(f"  left out: {problem}")
        for turn in range(rounds + 1):
            for place in range(len(running)):
                group = running[(place + turn) % len(running)]
                took = group.turn(steps) / steps * 1e6
                if turn:  # the first turn is not measured
                    group.times.append(took)
        for group in running:
            found[group.who] = measured(group, running[0])
    finally:
        for group in running:
            group.end()
    report(name, world, accumulation, found)


def measured(group, first):
    last = group.turn(0)
    ratios = [mine / theirs for mine, theirs in zip(group.times, first.times, strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [0, 0, 0]
    return {
        "microseconds": statistics.median(group.times),
        "ratio": statistics.median(ratios),
        "spread": quarters[2] - quarters[0],
        "start": group.began["start"],
        "first_step": group.began["first"],
        "peak_mib": last["memory"] / 1024,
        "loss": last["loss"],
    }


def report(name, world, accumulation, found):
    title = f"{name}, {world} process{'es' * (world > 1)}, accumulation {accumulation}"
    show(title, found, model=name, processes=world, accumulation=accumulation)
    losses = {who: result["loss"] for who, result in found.items()}
    base = next(iter(losses.values()), 0.0)
    apart = [f"{who} {loss:.5f}" for who, loss in losses.items() if abs(loss - base) > 0.005 * abs(base)]
    print(f"  final loss {base:.5f}: " + (f"ANOTHER for {', '.join(apart)}" if apart else "the same for all"))
    for who, result in found.items():
        print(f"  {who:<24} loop after {result['start']:.1f} s, first step after {result['first_step']:.1f} s,", end="")
        print(f" peak {result['peak_mib']:.0f} MiB")


def run(only=None, processes=None, accumulation=None, rounds=20, contestants=None):
    """Every setting. `contestants` are names of CONTESTANTS; the bare loop and its control are always there."""
    kept = {"bare fused", "bare fused again", *(contestants or CONTESTANTS)}
    wanted = [who for who in CONTESTANTS if who in kept]
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-", ignore_cleanup_errors=True) as folder:
        for name in only or TASKS:
            for world in processes or (1, 2):
                for each in accumulation or (1, 4):
                    compete(name, world, each, rounds, wanted, folder)
