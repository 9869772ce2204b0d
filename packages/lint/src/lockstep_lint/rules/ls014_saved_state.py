"""LS014: the wrapper's state saved, saved by every rank, or read before it is written."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards, withs
from lockstep_lint.analysis.drafts import guard_save, plain_state
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, dotted, idents, last
from lockstep_lint.analysis.origins import SAME
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event, apart
from lockstep_lint.events.query import alone, given_as, shown_at, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.saves import gets_saved, one_file, own_path
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

STATE = "saves the {kind} wrapper's state, with names in 'module.': save {plain}.state_dict()"
OBJECT = "saves the {kind} wrapper itself, which only such a program can load: save model.module"
ALL = "every rank writes this file at once: save on rank 0 only"
HELPED = "every rank has this helper write one file at once: call it on rank 0 only"
EARLY = "may read the file before rank 0 has written it: put torch.distributed.barrier() between"
ACCELERATE = "Accelerate"
# What writes a model or a checkpoint, and the name of a function that is there to do so.
MODELS = ("torch.save", "torch.jit.save", "safetensors.torch.save_file", "save_pretrained")
SAVES = Words(r"^_*(save|dump|write|store)|_save$|(checkpoint|ckpt)$", re.IGNORECASE)
# What takes the wrapper's names off near a state, and what tests for the wrapper or takes the model out of it.
STRIPS = ("'module.'", '"module.', "_orig_mod", "consume_prefix_in_state_dict", "remove_prefix", "[7:]")
TESTS = re.compile(
    r"(hasattr|isinstance)\(.*(module|Parallel|DDP)|\.module (if|\.state_dict)|module else"
    r"|not (args\.)?distributed(?! or)"
)
NEAR = 10


def check(view: View) -> Iterator[Found]:
    """Find saved wrapper states, files that all ranks write, and reads before the write."""
    for run in runs(view):
        yield from of_wrappers(view, run)
        yield from by_all(view, run)
        yield from read_early(view, run)


def of_wrappers(view: View, run: Run) -> Iterator[Found]:
    """Yield the states of wrappers, and wrappers themselves, that are written to a file."""
    for event in run.of("state", "save"):
        site = event.mark.site
        if site is None or event.module is not view.module or knows_wrapper(view, site):
            continue
        if any(last(other.mark.subject) == "module" and apart(event, other) for other in run.of("state")):
            continue  # what the other arm of a test saves: this one knows of the wrapper
        if event.kind == "save" and event.detail == "torch.save":
            kind = next(filter(None, (find_wrapper(view, value, event) for value in parts(view, site))), "")
            if kind:
                yield at(site, OBJECT.format(kind=kind), severity=Severity.HINT)
        elif site.name == "state_dict" and site.receiver is not None:
            kind = find_wrapper(view, site.receiver, event)
            if kind and gets_saved(view, event):
                plain = "accelerator.unwrap_model(model)" if kind == ACCELERATE else "model.module"
                change = () if kind == ACCELERATE else plain_state(view, site)
                yield at(site, STATE.format(kind=kind, plain=plain), severity=Severity.HINT, proposal=change)


def parts(view: View, site: Site) -> Iterator[ast.expr]:
    """Yield the objects that `torch.save` is given, by themselves or in a dictionary."""
    for origin in view.origins.of(next(iter(site.call.args), None), site.scope):
        yield from origin.node.values if isinstance(origin.node, ast.Dict) else site.call.args[:1]


def find_wrapper(view: View, node: ast.expr, event: Event) -> str:
    """Return a model's wrapper, DDP, DataParallel or Accelerate; "" for a plain model."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (*SAME, "deepcopy"):
        node = node.func.value if node.func.attr in SAME or not node.args else node.args[0]
    if dotted(node) is None and not isinstance(node, ast.Subscript):
        return ""
    model, scope = given_as(event, node, event.scope)
    assert model is not None
    made = [origin.node for origin in view.origins.of(model, scope)]
    if any(isinstance(each, ast.Attribute) and each.attr == "module" for each in made):
        return ""  # taken out of its wrapper
    binds = [bind.value for bind, _ in view.origins.binds(dotted(model) or "", scope, model.lineno)]
    if "accelerate" in view.frameworks and view.kinds.is_model(model, scope) and "prepare" in map(last, binds):
        return ACCELERATE
    kinds = {kind for kind, _, _ in view.wrappers.wrapped(model, scope)}
    kinds -= {"ddp"} if alone(view, event) or view.ranks.alone(event.scope) else set()
    return "" if "fsdp" in kinds else "DDP" if "ddp" in kinds else "DataParallel" if "dp" in kinds else ""


def knows_wrapper(view: View, site: Site) -> bool:
    """Check whether the code around takes the wrapper's names off, or tests for the wrapper."""
    if any(last(item) == "state_dict_type" for item in withs(site.stmt, site.module)):
        return True
    lines, start, end = view.module.lines, site.stmt.lineno, site.stmt.end_lineno or site.stmt.lineno
    near = "\n".join(lines[max(0, start - NEAR) : end + NEAR])
    if any(word in near for word in STRIPS):
        return True
    later = (
        s for s in site.scope.sites if s.line >= start and not all(isinstance(a, ast.Constant) for a in s.call.args)
    )
    helpers = (f for s in later if (f := view.calls.target(s.call, s.scope)) is not None)
    if any(view.effects.mentioned_in(function, word) for function in helpers for word in STRIPS):
        return True
    tests = [ast.unparse(guard.test) for guard in guards(site.stmt, site.module)]
    return any(map(TESTS.search, (*tests, *lines[start - 1 : end]))) or ".module.state_dict" in "".join(
        lines[max(0, start - 6) : end + 6]
    )


def by_all(view: View, run: Run) -> Iterator[Found]:
    """Yield the model files that all ranks write, at the call without the rank test."""
    saves = [event for event in run.of("save") if event.detail in MODELS]
    guarded = {event.node for event in saves if sides(view, event)}
    for event in saves:
        call = shown_at(view, event)
        if call is None or sides(view, event) or alone(view, event) or out_of_sight(view, run, event):
            continue
        helper = event.module is not view.module
        if helper and (event.scope.owner is not None or event.scope not in view.calls.runs(call)):
            continue
        site = call if helper or event.node not in guarded else find_last_call(view, event) or call
        shared = is_replicated(view) and view.ranks.everywhere(site, view.module) and not view.ranks.chosen(site)
        if shared and not own_path(view, event):
            yield at(site, HELPED if helper else ALL, proposal=() if helper else guard_save(view, site))


def find_last_call(view: View, event: Event) -> Site | None:
    """Return the file's last call of another function on the way to an event."""
    calls = [block.site for block in event.path if isinstance(block, CallBlock) and block.site.module is view.module]
    return calls[-1] if calls else None


def out_of_sight(view: View, run: Run, event: Event) -> bool:
    """Check whether who runs a function that saves cannot be seen."""
    entry = run.entry
    if entry.kind != "function" or event.scope is not entry or view.calls.callers(entry):
        return False
    programs = view.ranks.programs
    return not (programs.direct(view.module) or programs.accelerated(view.module)) or bool(
        SAVES.search(entry.name) or entry.owner is not None
    )


def is_replicated(view: View) -> bool:
    """Check whether every rank has the whole model."""
    named = {"horovod", "transformers", "lightning_fabric"} & view.frameworks
    if named or "ddp" in view.wrappers.kinds(view.module) or view.ranks.programs.accelerated(view.module):
        return True
    reduced = (s for member in view.project.family(view.module) for s in member.sites("all_reduce"))
    return not view.wrappers.kinds(view.module) and any("grad" in set(idents(s.call)) for s in reduced)


def read_early(view: View, run: Run) -> Iterator[Found]:
    """Yield the reads of a file that rank 0 alone has written, without a wait."""
    waits = {"collective", "wrap", "backward"}
    if view.wrappers.kinds(view.module) != {"ddp"}:
        waits.add("state")  # FSDP gathers it from all ranks
    for read in run.of("read") if view.distributed else ():
        site = shown_at(view, read)
        if site is None or (read.module is not view.module and find_last_call(view, read) is None) or sides(view, read):
            continue
        saves = [e for e in run.of("save") if e.place < read.place and not apart(e, read) and one_file(view, e, read)]
        if not saves or alone(view, read) or [side for _, side in sides(view, saves[-1])] != [1]:
            continue
        between = run.events[saves[-1].place : read.place]
        if not any(e.kind in waits and not sides(view, e) for e in between):
            yield at(site, EARLY)


RULE = Rule("LS014", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS, placed=True)
