"""LS019: no destroy_process_group."""

import re
from collections.abc import Iterator

from lockstep.lint.analysis.nodes import Words
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

ENDS = Words(
    r"dist|ddp|clean|destroy|teardown|tear_down|shut_?down|finali[sz]e|finish|exit|launch|^init|^setup|^main|^run|worker",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Looks for the end of the process group in the programs that start one."""
    if view.effects.mentioned(view.module, "destroy_process_group", "cleanup_dist", "dist_cleanup"):
        return
    if view.hidden(ENDS):
        return  # what a file that is not here does may end it
    runnable = any(member.is_script for member in view.project.users(view.module))
    for site in view.sites("init_process_group"):
        if runnable or view.training:
            yield at(
                site, "the process group is never ended: call torch.distributed.destroy_process_group() at the end"
            )


RULE = Rule(
    code="LS019",
    name="no destroy_process_group",
    what="A program starts a process group and never calls `destroy_process_group`.",
    why=(
        "NCCL's threads and sockets are torn down in any order at exit: hangs, warnings, and leaked GPU memory; "
        "torch warns of it at every exit."
    ),
    bad=(
        """
import torch.distributed as dist

def main():
    dist.init_process_group("nccl")

if __name__ == "__main__":
    main()
""",
        """
import torch.distributed as dist
from helpers.meters import AverageMeter

def main():
    dist.init_process_group("nccl")
    return AverageMeter()

if __name__ == "__main__":
    main()
""",
    ),
    good=(
        """
import torch.distributed as dist

def main():
    dist.init_process_group("nccl")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
""",
        """
import torch.distributed as dist
from helpers.comm import cleanup

def main():
    dist.init_process_group("nccl")
    cleanup()

if __name__ == "__main__":
    main()
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call torch.distributed.destroy_process_group() when training has ended",
    moot=frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl"}),
    note=(
        "It is told at `init_process_group`, in the file that calls it, be it the script or its helper. A "
        "`destroy_process_group` anywhere in the programs silences it."
    ),
)
