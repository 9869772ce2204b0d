"""LS025: a download on every rank."""

from collections.abc import Iterator

from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import is_true, keyword
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def check(view: View) -> Iterator[Found]:
    """Looks for `download=True` and fetching calls in the code that all ranks run."""
    if not view.distributed:
        return
    for site in view.sites():
        if fetches(view, site) and view.ranks.every(site.stmt, site.scope) and not in_turn(view, site):
            yield at(
                site,
                "every rank downloads into the same place at once: let one rank do it, with a barrier for the others",
            )


def fetches(view: View, site: Site) -> bool:
    """Whether a call fetches files without a lock."""
    if is_true(keyword(site.call, "download")):
        return True
    return view.full(site) in (
        "nltk.download",
        "urllib.request.urlretrieve",
        "wget.download",
        "gdown.download",
        "torchvision.datasets.utils.download_url",
    )


def in_turn(view: View, site: Site) -> bool:
    """Whether a barrier that some ranks wait at lets one rank go first."""
    return any(
        s.name in ("barrier", "wait_for_everyone") and view.ranks.side(s.stmt, site.scope) for s in site.scope.sites
    )


RULE = Rule(
    code="LS025",
    name="download on every rank",
    what="All ranks download a dataset to the same place, without one going first.",
    why=(
        "The processes write the same files at the same time: some read a half-written archive and fail, or train"
        " on broken data."
    ),
    bad=(
        """
import torch.distributed as dist
from torchvision.datasets import MNIST

def main():
    dist.init_process_group("nccl")
    data = MNIST("data", download=True)
    dist.destroy_process_group()
    return data
""",
    ),
    good=(
        """
import torch.distributed as dist
from torchvision.datasets import MNIST

def main(rank):
    dist.init_process_group("nccl")
    if rank == 0:
        MNIST("data", download=True)
    dist.barrier()
    data = MNIST("data")
    dist.destroy_process_group()
    return data
""",
        """
import torch.multiprocessing as mp
import torch.distributed as dist
from torchvision.datasets import MNIST

def worker(rank):
    dist.init_process_group("nccl", rank=rank)
    data = MNIST("data")
    dist.destroy_process_group()

def main():
    MNIST("data", download=True)
    mp.spawn(worker, nprocs=2)
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Download on rank 0, then a barrier, then open it on all ranks",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep"}),
)
