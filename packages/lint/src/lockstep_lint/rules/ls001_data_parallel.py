"""LS001: nn.DataParallel."""

import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import constant, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

MESSAGE = "DataParallel runs all GPUs from one process: use DistributedDataParallel, one process a GPU"
NAMES = ("DataParallel", "data_parallel")
# Where one of them is given another name, by an import or by an assignment.
ALIASED = re.compile(r"\b(?:DataParallel|data_parallel) +as\b|=\s*[\w.]*\b(?:DataParallel|data_parallel)\b(?!\s*[(.])")
# Where a Trainer of Lightning is told how to run on several devices, and what makes it DataParallel.
TOLD = ("strategy", "accelerator", "distributed_backend", "plugins")
STRATEGIES = ("DataParallelStrategy", "DataParallelPlugin")


def check(view: View) -> Iterator[Found]:
    """Find calls of DataParallel, and Trainers of Lightning that are set to use it."""
    others = view.module.text.replace("DistributedDataParallel", "")
    aliased = any(name in others for name in NAMES) and ALIASED.search(
        others
    )  # else only calls of these names are asked
    for site in view.sites() if aliased else view.sites(*NAMES):
        full = view.full(site)
        torchs = full.startswith(("torch.nn.", "torch_geometric.nn.")) and full.rpartition(".")[2] in NAMES
        unknown = not full and site.name == "DataParallel" and view.names.definition(site.call.func, site.scope) is None
        if torchs or unknown:
            yield at(site, MESSAGE)
    for site in view.sites("Trainer", "from_argparse_args"):
        full = view.full(site)
        if full.startswith(("pytorch_lightning.", "lightning.")) and "Trainer" in full and is_told(view, site):
            yield at(site, MESSAGE)
    for site in view.module.sites() if "Parallel" in view.module.text else ():
        owner = view.names.definition(site.call.func, site.scope) if "Parallel" in site.name else None
        if owner is not None and owner.kind == "class" and any(map(is_torchs, view.names.bases_of(owner))):
            yield at(site, MESSAGE)


def is_told(view: View, site: Site) -> bool:
    """Check whether a Trainer of Lightning runs a model by DataParallel (`strategy="dp"`)."""
    values = (value for name in TOLD if (value := keyword(site.call, name)) is not None)
    return any(
        constant(origin.node) == "dp" or (origin.call is not None and last(origin.call) in STRATEGIES)
        for value in values
        for origin in view.origins.of(value, site.scope)
    )


def is_torchs(name: str) -> bool:
    """Check whether a class is torch's DataParallel, or PyG's subclass of it."""
    return name.startswith(("torch.nn.", "torch_geometric.nn.")) and name.endswith(".DataParallel")


RULE = Rule("LS001", Severity.HINT, Confidence.HIGH, check, fix="unsafe")
