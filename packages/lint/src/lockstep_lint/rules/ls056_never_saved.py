"""LS056: a long training whose model is never saved."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, LoopBlock
from lockstep_lint.events.lengths import number
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import step_loops
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "trains {turns} and never saves the model, which is lost when the program ends: save model.state_dict()"
UNCALLED = "never saves the model, since nothing calls {name}(): it is lost when the program ends"
# So many epochs, or steps where nothing counts epochs, are no example and no measurement of speed.
MANY_EPOCHS, MANY_STEPS = 30, 1000
# Whatever may keep a model out of sight, is no training of a model, or only measures.
KEEPS = Words(
    r"save|checkpoint|ckpt|snapshot|export|serialize|dump|upload|push_to_hub|log_model|artifact|callback|register"
    r"|early_?stop|^fit$|^run$",
    re.IGNORECASE,
)
NAMES = (ast.Name, ast.Attribute)
SHOWS = Words(r"summary|watch|print|info|count|init|seed|freeze|eval|train", re.IGNORECASE)
MEASURES = re.compile(r"(?<!cudnn\.)bench|profil|\btoy|dummy|synthetic|fake|throughput|sweep", re.IGNORECASE)
EXAMPLES = re.compile(
    r"(example|demo|tutorial|test|sample|try|play)_|_(example|demo|tutorial|test|sample)", re.IGNORECASE
)
TEXTS = re.compile(r"^(json|yaml|csv|pandas|matplotlib|imageio|cv2|PIL|torchvision|logging|numpy)\.")


def check(view: View) -> Iterator[Found]:
    """Looks at the programs that train a model in several processes, and for anything that may keep it."""
    module = view.module
    if not view.distributed or not (module.is_script or not view.project.importers(module)):
        return
    if EXAMPLES.search(module.path.rsplit("/", 1)[-1]):
        return
    for run in runs(view):
        loop = outermost(run) if run.entry is module.top else None
        if loop is None or MEASURES.search(module.bare) or keeps(view, run):
            continue
        turns = duration(view, run, loop)
        saver = next(uncalled(view, run), None)
        if turns:
            yield Found(loop.node, MESSAGE.format(turns=turns))
        elif saver is not None:
            yield Found(saver.node, UNCALLED.format(name=saver.name), severity=Severity.ERROR)


def outermost(run: Run) -> LoopBlock | None:
    """The outermost loop around the steps of the one wrapped model of a program."""
    loops = step_loops(run)
    around = [step.loops[0] for found in loops for step in found.steps[:1]]
    return around[0] if around and run.of("wrap") and isinstance(around[0].node, ast.For | ast.While) else None


def keeps(view: View, run: Run) -> bool:
    """Whether anything in a program may keep the model: it writes, reads its state, or hands it on out of sight."""
    begun = min(loop.start for found in step_loops(run) for loop in found.steps[0].loops[:1])
    read = any(event.place > begun for event in run.of("state"))  # what is read before is compared with what is loaded
    if read or len(run.events) > 2500 or any(not is_text(view, event) for event in run.of("save", "hand")):
        return True
    functions = {*run.entered, run.entry}
    calls = [site for scope in functions for site in scope.sites if view.calls.target(site.call, site.scope) is None]
    return any((KEEPS.search(site.name) and not of_text(view, site)) or takes(view, site) for site in calls)


def takes(view: View, site: Site) -> bool:
    """Whether something out of sight is handed a model and gives nothing back (`on_epoch_end(model, epoch)`)."""
    sole = isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call
    if not sole or SHOWS.search(site.name) or view.names.qualify(site.call.func, site.scope).startswith("torch."):
        return False
    given = (*site.call.args, *(item.value for item in site.call.keywords))
    return any(isinstance(each, NAMES) and view.kinds.is_model(each, site.scope) for each in given)


def of_text(view: View, site: Site) -> bool:
    """Whether a call writes figures or texts: of json, yaml or a table, or a file's own `write`."""
    return site.name in ("write", "writerow") or bool(TEXTS.search(view.names.qualify(site.call.func, site.scope)))


def is_text(view: View, event: Event) -> bool:
    """Whether an event writes figures or texts alone, or runs a function of the project, whose events follow."""
    site = event.mark.site
    if event.kind == "hand":
        return site is not None and (view.calls.target(site.call, site.scope) is not None or of_text(view, site))
    return not event.detail.startswith(("torch", "save_pretrained", "safetensors", "shutil", "os."))


def uncalled(view: View, run: Run) -> Iterator[Scope]:
    """Yield the functions of a program's file that save a state and that nothing calls or names."""
    for scope in view.scopes:
        saves = any(view.names.qualify(site.call.func, scope) == "torch.save" for site in scope.named("save"))
        if saves and scope.kind == "function" and scope.owner is None and once(view.module, scope.name):
            yield scope


def once(module: Module, name: str) -> bool:
    """Whether a file names a function once, where it defines it."""
    return len(re.findall(rf"(?<![.\w]){re.escape(name)}\b", module.bare)) == 1


def duration(view: View, run: Run, loop: LoopBlock) -> str:
    """The number of a loop's turns with their unit, where it is known and large."""
    nested = any(len(step.loops) > 1 for step in run.of("step") if loop in step.loops)
    number = turns(view, loop.node, loop.scope)
    enough = number >= (MANY_EPOCHS if nested else MANY_STEPS)
    return f"{number} {'epochs' if nested else 'steps'}" if enough else ""


def turns(view: View, loop: ast.AST, scope: Scope) -> int:
    """The number of turns of a loop over a range, by literals and the defaults of options; 0 where it is not known."""
    header = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(header, ast.Call) and last(header) == "tqdm" and header.args:
        header = header.args[0]
    if not isinstance(header, ast.Call) or last(header) not in ("range", "trange") or not 0 < len(header.args) < 3:
        return 0
    values = [number(view, origin.node, origin.scope) for origin in view.origins.of(header.args[-1], scope)]
    return min(values, default=0)


RULE = Rule(
    code="LS056",
    name="model never saved",
    what="A program trains a model for many epochs in several processes, and nothing in it saves the model.",
    why="The weights are gone when the program ends, or is ended: hours of all its devices leave a log.",
    bad="""
import torch
import torch.distributed as dist
from job import parts
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    local_rank, model, loader, sampler, loss_of = parts()
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
""",
    good="""
import torch
import torch.distributed as dist
from job import parts
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    local_rank, model, loader, sampler, loss_of = parts()
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "last.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
""",
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Save the model's state on one rank, every few epochs and at the end",
    moot=frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl", "ray"}),
    note=(
        "Many are 30 epochs, or 1,000 steps where nothing counts epochs, by literals and the defaults of options. A "
        "program may do without on purpose. One with a function that saves and that nothing calls is told however long "
        "it trains, as an error: it was meant to save."
    ),
)
