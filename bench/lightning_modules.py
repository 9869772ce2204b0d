"""`python bench/lightning_modules.py FOLDER`: 30 LightningModules of other people's repositories, unedited.

bench/lightning.jsonl names each with its repository, commit, file, digest and class, the arguments that it is made with
and the data; nothing else of theirs lies here. FOLDER/OWNER+NAME holds the repository at that commit, and PYTHONPATH
what they import (docs/benchmarks.md). Each row is tried in three ways, each in processes of its own with a time limit:

- lightning: Lightning's own Trainer takes 6 steps in 2 epochs. The list was chosen by this, and by nothing else.
- lockstep: the same through `lockstep.from_lightning` on one device. Where no training step draws a random number, each
  loss and the parameters at the end are compared with Lightning's.
- verify: `lockstep.verify`, in float64, with a resume half-way: a single process against itself, and DDP on 2 ranks
  against it, every tensor of every step.

Every process is forked from one that has imported what most of them import. BENCH_OUTPUT=FILE collects what they print.
`--only 3,7` tries these rows, `--legs verify` this way alone. `--json FILE` keeps all that was found, and what is not
tried anew keeps what the file has of it, so that a row can be tried again without the others.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
LEGS = {"lightning": 1, "lockstep": 1, "verify": 2}  # and the processes of each
AIM = 27  # of the 30: verified on 1 and 2 ranks, the others refused in one line
LOADED = ("lightning.pytorch", "pytorch_lightning", "torchmetrics", "torchvision", "timm", "transformers")


def load():
    """Imports what most modules import, once: every process is forked from this one, which computes nothing."""
    sys.path[0] = str(HERE / "modules")  # the files beside this one have names that theirs may have too
    spec = importlib.util.find_spec("torchvision")
    for library in Path(spec.origin).parent.glob("_C*.so") if spec else ():
        declare_without(library)
    for name in LOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    importlib.import_module("lightning_legs")


def declare_without(library):
    """torchvision on PyPI is built for CUDA: without it its operations do not load, and importing it fails at two."""
    import torch

    try:
        ctypes.CDLL(str(library))
    except OSError:
        for operation in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operation}", schema)


def tried(folder, row, leg, limit):
    """What one way of one row found, as its processes say it."""
    begun, size = time.perf_counter(), LEGS[leg]
    with socket.socket() as free, tempfile.TemporaryDirectory() as scratch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        running = {forked(folder, row, leg, scratch, rank, size, port): rank for rank in range(size)}
        until = begun + limit
        while running and time.perf_counter() < until:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended not in running:
                time.sleep(0.1)
            elif running.pop(ended) or not said(scratch, 0).get("ok"):
                until = min(until, time.perf_counter() + 30.0)  # the other waits for one that is gone
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = [said(scratch, rank) for rank in range(size)]
    # What a rank says that lost another is not the reason where that one was ended here, or died.
    late = {"ok": False, "why": f"took longer than {limit:g} s, or its process died"}
    first = next((each for each in found if each.get("ok") is False), found[0]) if all(found) else late
    return first | {"tried": True, "seconds": round(time.perf_counter() - begun, 1)}


def said(scratch, rank):
    file = Path(scratch, f"{rank}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def forked(folder, row, leg, scratch, rank, size, port):
    """The id of a new process of its own session, which writes what it found into `scratch`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.chdir(scratch)
        output = os.open(os.environ.get("BENCH_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        sys.argv = [row["path"]]  # some modules read it
        os.environ |= {"MPLBACKEND": "agg", "WANDB_MODE": "disabled"}
        if size > 1:
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in job.items()} | {"MASTER_ADDR": "127.0.0.1"}
        from lightning_legs import result
        from lightning_row import prepare

        prepare(row, folder)
        found = json.dumps(result(row, leg))
        Path(scratch, f"{rank}.part").write_text(found, encoding="utf-8")
        Path(scratch, f"{rank}.part").rename(Path(scratch, f"{rank}.json"))
    except SystemExit as error:
        Path(scratch, f"{rank}.json").write_text(json.dumps({"ok": False, "why": str(error)}), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def cell(found):
    if not found:
        return "-"
    return found.get("text", "yes") if found["ok"] else ("refused" if found.get("refused") else "FAILED")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--legs", default=",".join(LEGS))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one way of one row")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = [json.loads(line) for line in (HERE / "lightning.jsonl").read_text(encoding="utf-8").splitlines()]
    wanted = [int(each) for each in asked.only.split(",")] if asked.only else list(range(len(rows)))
    legs = [leg for leg in LEGS if leg in asked.legs.split(",")]
    folder, results = asked.folder.resolve(), kept(asked.json, rows)
    print(f"{platform.machine()}, {os.cpu_count()} cores; torch {version('torch')}, lightning {version('lightning')}")
    print(f"{'row':>3} {'module':<68} {'lightning':<10} {'lockstep':<22} verify")
    load()
    for place in wanted:
        found = results[place]
        for leg in legs:
            found[leg] = tried(folder, rows[place], leg, asked.limit)
            if leg == "lightning" and not found[leg]["ok"]:
                break
        cells = [cell(found.get(leg)) for leg in LEGS]
        name = f"{found['repository']} {found['class']}"
        print(f"{place:>3} {name:<68} {cells[0]:<10} {cells[1]:<22} {cells[2]}", flush=True)
        for leg in legs:
            if why := found.get(leg, {}).get("why"):
                print(f"      {leg}: {why}", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    summary(results)


def kept(file, rows):
    """What is known of each row: nothing yet, or what `file` has."""
    if file and file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    return [{"row": place, "repository": row["repository"], "class": row["class"]} for place, row in enumerate(rows)]


def summary(results):
    print()
    print(f"{len(results)} modules of {len({each['repository'] for each in results})} repositories")
    legs = [leg for leg in LEGS if any(leg in each for each in results)]
    for leg in legs:
        good, tried = (sum(each.get(leg, {}).get(key, False) for each in results) for key in ("ok", "tried"))
        print(f"{leg}: {good} of {tried} tried" + (f" (aim: {AIM} of {len(results)})" if leg == "verify" else ""))
    if "lockstep" in legs:
        compared = [each["lockstep"] for each in results if "largest" in each.get("lockstep", {})]
        exact = sum(each["largest"] <= 1e-6 for each in compared)
        print(f"losses equal Lightning's to 1e-6 where nothing is drawn: {exact} of {len(compared)}")
    if "verify" in legs:
        others = [each["verify"] for each in results if not each.get("verify", {}).get("ok", True)]
        refused = sum(each.get("refused", False) for each in others)
        print(f"the others refused in one line: {refused} of {len(others)}")


if __name__ == "__main__":
    main()
