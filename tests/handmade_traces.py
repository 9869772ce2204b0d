"""Traces written by hand, in the form of torch.profiler's (Kineto): times in microseconds."""

import gzip
import json

MAIN, GLOO, OTHER = 1, 2, 3


class Hand:
    """One rank's trace. What is not said is a healthy run on a CPU."""

    def __init__(self, rank=0, world=1, steps=(11, 20), device="cpu", **about):
        options = {"log_freq": 10, "eval_freq": 0, "ckpt_freq": 0, "batch_size": 64, "data.workers": 0}
        options |= about.pop("options", {})
        run = {"rank": rank, "world_size": world, "steps": list(steps), "device": device, "host": "a"}
        machine = {"cores": 4, "threads": 1, "local_ranks": world, "memory_free": 8e9, "memory_used": 1e9}
        work = {"micro_batches": 8, "slots": 1, "micro_batch_size": 8, "parameters": 10**6, "gradient_bytes": 4e8}
        engine = {"shares": True, "engine_options": ["bucket_cap_mb", "compression"]}
        self.about = {**run, **machine, **work, **engine, **about, "options": options}
        self.events, self.correlation = [], 0

    @property
    def count(self):
        first, last = self.about["steps"]
        return last - first + 1

    def add(self, cat, name, begin, length, tid=MAIN, **args):
        event = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "pid": 1, "tid": tid, "args": args}
        self.events.append(event)

    def mark(self, phase, begin, length):
        self.add("user_annotation", f"lockstep:{phase}", begin, length)

    def op(self, begin, length, name="aten::mm", **args):
        self.add("cpu_op", name, begin, length, **args)

    def node(self, begin, length, again=0):
        """A node of a backward, which computes a forward of `again` microseconds before it goes on."""
        self.add("cpu_op", "autograd::engine::evaluate_function: X", begin, length, **{"Fwd thread id": 1})
        if again:
            self.op(begin, again, "aten::addmm", **{"Sequence number": 7, "Fwd thread id": 0})
        self.op(begin + again, length - again)

    def gloo(self, begin, length, kind="all_reduce", tid=GLOO):
        self.add("user_annotation", f"gloo:{kind}", begin, length, tid=tid)

    def kernel(self, asked, begin, length, name="gemm", stream=7, cat="kernel"):
        self.correlation += 1
        self.add("cuda_runtime", "cudaLaunchKernel", asked, 2, correlation=self.correlation)
        self.add(cat, name, begin, length, tid=stream, stream=stream, correlation=self.correlation)

    def nccl(self, begin, length, kind="AllReduce"):
        self.kernel(begin - 5, begin, length, f"ncclDevKernel_{kind}_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", 20)

    @property
    def json(self):
        return {"schemaVersion": 1, "lockstep": self.about, "baseTimeNanoseconds": 10**12, "traceEvents": self.events}

    def write(self, folder):
        path = folder / f"rank-{self.about['rank']}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(self.json).encode()))
        return path


def on_cpu(
    data=500, forward=3000, backward=6000, update=500, after=0, late=0, exchange=0, hidden=0, gaps=0, ops=1, **about
):
    """A rank whose steps are alike: its parts in microseconds, one after the other.

    `late` passes before the exchange begins on all ranks, within the wait; `hidden` of one lies in the backward;
    `gaps` of forward and backward each are no operation; `ops` is how many they are cut into.
    """
    hand, at = Hand(**about), 0.0
    for step in range(hand.count):
        begin = at
        for phase, length in (("data", data), ("forward", forward), ("backward", backward)):
            wait = late + exchange if phase == "backward" else 0
            hand.mark(phase, at, length + wait)
            if phase != "data":
                busy = (length - gaps) / ops
                for k in range(ops):
                    hand.op(at + k * length / ops, busy)
            if phase == "backward" and hidden:
                hand.gloo(at + length - hidden, hidden)
            at += length
            if wait:
                hand.gloo(at, wait)
                at += wait
        hand.mark("update", at, update)
        hand.op(at, update, "aten::_fused_adamw_")
        at += update + after
        hand.mark(f"step {step + hand.about['steps'][0]}", begin, at - begin)
    return hand


def on_device(data=100, kernel=50, gap=2, kernels=40, exposed=0, hidden=0, wait=0, copies=0, update=300, **about):
    """A rank whose device computes `kernels` kernels a step, with gaps, and then exchanges; the host is just ahead."""
    hand, at = Hand(device="cuda", **about), 0.0
    for step in range(hand.count):
        begin = at
        hand.mark("data", at, data)
        at += data
        if copies:
            hand.kernel(at, at + 1, copies, "Memcpy HtoD (Pageable -> Device)", cat="gpu_memcpy")
            at += copies + 1
        half = kernels // 2
        for phase in ("forward", "backward"):
            start = at
            for _ in range(half):
                hand.kernel(at, at + 1, kernel)
                at += kernel + gap + 1
            hand.mark(phase, start, at - start)
            if wait and phase == "forward":
                hand.add("cuda_runtime", "cudaStreamSynchronize", at - 20, 20)
                hand.mark("backward", at, wait)
                at += wait
        if hidden:
            hand.nccl(at - hidden - 5, hidden)
        if exposed:
            hand.nccl(at, exposed)
            at += exposed
        hand.kernel(at, at + 1, update, "multi_tensor_apply_kernel<FusedAdamMathFunctor>")
        hand.mark("update", at, 10)
        at += update + 1
        hand.mark(f"step {step + hand.about['steps'][0]}", begin, at - begin)
    return hand
