"""LS003: a process group without a distributed sampler, or shuffle beside a sampler."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, dotted, has_star, idents, is_none, is_true, keyword, strings
from lockstep_lint.analysis.view import View
from lockstep_lint.events.loaders import feeds
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

# Words that say that the data is divided among the ranks in some other way.
DIVIDED = re.compile(
    r"rank|shard|partition|world|split_by|sampler|webdataset|iterable|stream|distributed", re.IGNORECASE
)
SAMPLERS = ("sampler", "batch_sampler")
SAME = "every rank reads the same samples: give this loader a DistributedSampler (and shuffle=False)"


def check(view: View) -> Iterator[Found]:
    """Find loaders that train under DDP without a sampler, and samplers next to shuffle=True."""
    fed: set[ast.Call] = set()
    for run in runs(view) if "DataLoader" in view.module.by_name else ():
        if "accelerate" not in view.analysis.frameworks(run.entry.module) and wraps(view, run):
            fed |= {call for event in run.of("backward") for call in feeds(view, event)}
    for site in view.sites("DataLoader"):
        if site.call in fed and view.ranks.every(site.stmt, site.scope) and not is_divided(view, site):
            yield Found(site.call, SAME)
    if "accelerate" in view.frameworks:
        return
    for site in view.sites("DataLoader"):
        if is_true(keyword(site.call, "shuffle")) and samples(view, site):
            yield Found(site.call, "DataLoader refuses shuffle=True beside a sampler: drop it, the sampler shuffles")


def samples(view: View, site: Site) -> bool:
    """Check whether a loader is certainly given a sampler."""
    value = keyword(site.call, "sampler")
    if value is None or isinstance(value, ast.Call):
        return value is not None
    asked = any(set(idents(guard.test)) & set(idents(value)) for guard in guards(site.stmt, site.module))
    parameter = isinstance(value, ast.Name) and value.id in site.scope.params
    made = view.origins.calls_of(value, site.scope)
    return not asked and not parameter and any("sampler" in full.lower() for _, _, full in made)


def wraps(view: View, run: Run) -> bool:
    """Check whether a program wraps its model in DDP or FSDP, or uses DeepSpeed."""
    kinds = {wrap.detail for wrap in run.of("wrap")} | view.wrappers.kinds(view.module)
    return bool(kinds & {"ddp", "fsdp", "fsdp2"}) or ("deepspeed" in view.frameworks and by_deepspeed(view))


def by_deepspeed(view: View) -> bool:
    """Check whether DeepSpeed trains the model and has no data of its own to divide."""
    made = [site for member in view.project.family(view.module) for site in member.sites("initialize")]
    engines = [site.call for site in made if view.ranks.programs.deepspeed(site)]
    apart = any(keyword(call, name) is not None for call in engines for name in ("mpu", "training_data", "mesh_device"))
    options = any(item.arg is None for call in engines for item in call.keywords)
    return bool(engines) and not (apart or options or view.effects.mentioned(view.module, "PipelineModule", "tensor_p"))


def is_divided(view: View, site: Site) -> bool:
    """Check whether the loader's arguments divide the data, or may."""
    call, data = site.call, argument(site.call, 0, "dataset")
    given = any(is_given(view, keyword(call, name), site.scope) for name in SAMPLERS)
    if given or has_star(call) or len(call.args) > 3 or data is None or DIVIDED.search(ast.unparse(data)):
        return True
    made = [(origin.node, origin.scope) for origin in view.origins.of(data, site.scope)]
    return not all(isinstance(node, ast.Call) and not divides(view, node, home) for node, home in made)


def is_given(view: View, value: ast.expr | None, scope: Scope) -> bool:
    """Check whether an argument is given and may be anything but None."""
    made = view.origins.of(value, scope) if value is not None else []
    return value is not None and not (made and all(is_none(origin.node) for origin in made))


def divides(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether the code that makes a data set knows of ranks."""
    if any(DIVIDED.search(word) for word in (*idents(call), *strings(call))):
        return True
    given = (dotted(arg) or "" for arg in (*call.args, *(item.value for item in call.keywords)))
    values = [bind.value for key in given for bind in scope.binds.get(key, []) if bind.value is not None]
    if any(DIVIDED.search(word) for value in values for word in (*idents(value), *strings(value))):
        return True  # the rank's part of a list
    owner = view.names.definition(call.func, scope)
    if owner is None:
        return False
    names = " ".join(view.names.bases_of(owner)) if owner.kind == "class" else ""
    start, end = owner.node.lineno, owner.node.end_lineno or owner.node.lineno  # type: ignore[attr-defined]
    text = names + "\n".join(owner.module.lines[start - 1 : end])
    if "__iter__" in owner.defs:
        text = text.replace("IterableDataset", "")  # in sight as it is, whatever it yields
    return bool(DIVIDED.search(text))


MOOT = TRAINERS | {"horovod", "ignite", "lightning_fabric", "ray"}
RULE = Rule("LS003", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT, placed=True)
