"""Find calls that run or evaluate a model, loops over held-out data, and `no_grad` blocks."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed, turns_off_gradients
from lockstep_lint.analysis.context import Loop, guards, inside, loops, withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, OPTIMIZER
from lockstep_lint.analysis.nodes import Words, dotted, element_of, idents, last, strings, walk
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import View

__all__ = [
    "MODELS",
    "RUNS",
    "evaluations",
    "foreign",
    "forward_of_phases",
    "is_forward",
    "phased",
    "run_model",
    "shields",
    "without_graph",
]


MODELS = Words(
    r"^(model|net|netG|generator|encoder|classifier|ddp_model|network|unet|vae|detector|segmenter|student)$"
    r"|^(?!(get|load|build|create|make|save|init|setup|wrap|prepare|convert|export|print|log|reset"
    r"|unwrap|initiali[sz]e|instantiate|construct|define|restore|fetch|copy|clone|freeze|unfreeze|compile|summari[sz]e"
    r"|count|register|quantize|fuse|shard|parallelize|sync)_).*_(model|net)$"
)
# Methods of a model that run it.
RUNS = Words(r"^forward|(^|_)loss(es)?$")
# Methods of a model that do more than run it, which its name at their end does not make a model of.
DOES = Words(r"^(eval|evaluate|val|validate|test|train|fit|run|predict|update|sample|score|check|set|apply|reset)_")

# What held-out data is called that a model is given as a whole, without a loop.
HELD_OUT = Words(
    r"^([xX]|inputs?|data|features?|images?)_(val|valid|validation|test|eval|dev)(_tensor|_t|_torch)?$"
    r"|^(val|valid|validation|test|eval|dev)_(x|X|inputs?|data|features?|images?)(_tensor|_t|_torch)?$"
    r"|^[xX](val|valid|test)$"
)


def is_forward(view: View, site: Site) -> bool:
    """Whether a call is a model called with data, or a method of it that runs it (`model.module.get_loss(x)`)."""
    func = site.call.func
    if not isinstance(func, ast.Name | ast.Attribute) or not (site.call.args or site.call.keywords):
        return False
    if isinstance(func, ast.Attribute) and RUNS.search(func.attr):
        return runs_model(view, func.value, site.scope)
    if view.full(site) or view.names.definition(func, site.scope) is not None:
        return False
    if isinstance(func, ast.Attribute) and DOES.search(func.attr) and dotted(func.value) != "self":
        return False  # `model.eval_model(batch)`
    if MODELS.search(last(func)):
        return True
    modules = [*site.scope.named("eval"), *(s for s in site.scope.named("parameters") if optimized(s))]
    name = dotted(func)
    if name is not None and any(dotted(s.receiver) == name for s in modules):
        return True
    return view.kinds.module_class(func, site.scope) is not None


def runs_model(view: View, receiver: ast.expr, scope: Scope) -> bool:
    """Whether the object of a method that runs a model is one, and no module of functions."""
    if isinstance(receiver, ast.Attribute) and receiver.attr == "module":
        receiver = receiver.value
    if dotted(receiver) in (None, "self") or view.names.qualify(receiver, scope):
        return False
    return MODELS.search(last(receiver)) or view.kinds.module_class(receiver, scope) is not None


def optimized(site: Site) -> bool:
    """Whether the parameters that a call gives go to an optimizer."""
    return any(OPTIMIZER.search(bind.key) for bind in site.scope.bound(site.stmt))


@kept
def forward_in(view: View, function: Scope) -> Site | None:
    """The call of the model, for one batch, in a function that several loops may share (`self.process(batch)`)."""
    if function.kind != "function" or function.name in ("__init__", "__call__", "forward"):
        return None
    found = next((site for site in function.sites if is_forward(view, site)), None)
    return found if found is not None and not loops(found.stmt, found.module) else None


def run_model(site: Site) -> str | None:
    """The name of the model that a call runs, itself or by a method (`model(x)`, `model.forward(x)`)."""
    func = site.call.func
    by_method = isinstance(func, ast.Attribute) and RUNS.search(func.attr)
    return dotted(func.value if by_method else func)  # type: ignore[attr-defined]


def run_by(view: View, site: Site) -> Site | None:
    """The call of a model in the function that a call runs."""
    function = view.calls.target(site.call, site.scope)
    return forward_in(view, function) if function is not None else None


def model_of(site: Site, inner: Site) -> str | None:
    """The name, where `site` stands, of the model that the function which it calls runs by `inner`."""
    name, function = dotted(inner.call.func), inner.scope
    if name in function.params:
        return dotted(passed(site, function, name))
    return None if name in function.binds else name


def shields(site: Site) -> bool:
    """Whether a call keeps no graph by the `with` around it or its function's decorators."""
    return any(map(turns_off_gradients, (*withs(site.stmt, site.module), *site.scope.decorators)))


def given_held_out(site: Site) -> bool:
    """Whether all that a call is given is held-out data by its name (`model(X_test)`)."""
    names = [last(value) for value in site.call.args]
    return bool(names) and not site.call.keywords and all(HELD_OUT.search(name) for name in names)


# What is counted beside held-out data, says which of its rows count, or may be something else.
BESIDE = Words(
    r"loss|acc|score|metric|hist|best|result|curve|perf|auc|f1|time|name|path|file|dir|mode|iou|psnr|log|every|freq"
    r"|interval|step|mask|len|num|count|size|valid(?!ation|_(set|data|x|y|im|in|lab))|^(val|dev|eval|infer(ence)?)$",
    re.IGNORECASE,
)
COUNTS = {"range", "trange"}


def over_rows(site: Site, nest: list[Loop]) -> bool:
    """Whether a model is given rows of held-out data in a loop that counts, or a loss compares its output with some."""
    loop = nest[0] if nest else None
    if loop is None or not counts_turns(loop):
        return False
    rows = rows_in(loop, site.scope)
    if any(holds(value, rows) for value in (*site.call.args, *(item.value for item in site.call.keywords))):
        return True
    outputs = {bind.key for bind in site.scope.bound(site.stmt)}
    return any(line > site.line and outputs & names for line, names in (compared(loop, site.scope) if outputs else ()))


def counts_turns(loop: Loop) -> bool:
    """Whether a loop counts (`while i < n`, `for i in tqdm(range(n))`)."""
    if isinstance(loop, ast.While):
        return True
    return any(isinstance(part, ast.Call) and last(part) in COUNTS for part in walk(loop.iter))


@kept
def compared(loop: Loop, scope: Scope) -> list[tuple[int, set[str]]]:
    """The losses of a loop that are given rows of held-out data: their lines, with the names that they compare."""
    rows = rows_in(loop, scope)
    losses = (site for name, sites in scope.by_name.items() if LOSSES.search(name) for site in sites)
    held = (site for site in losses if inside(site.stmt, loop, scope.module) and holds(site.call, rows))
    return [(site.line, set(idents(site.call))) for site in held]


@kept
def rows_in(loop: Loop, scope: Scope) -> frozenset[str]:
    """The names in a loop that hold rows of held-out data, or what is made of them, and nothing else."""
    rows: set[str] = set()
    other: set[str] = set()
    for stmt in (node for part in loop.body for node in walk(part)):
        if isinstance(stmt, ast.Assign | ast.AnnAssign):
            for bind in scope.bound(stmt) if stmt.value is not None else ():
                (rows if bind.value is not None and holds(bind.value, rows) else other).add(bind.key)
    return frozenset(rows - other)


def holds(node: ast.AST, rows: set[str] | frozenset[str]) -> bool:
    """Whether an expression takes rows of held-out data, by a number that is worked out, or holds some already."""
    return any(
        (isinstance(item, ast.Name) and item.id in rows) or (isinstance(item, ast.Subscript) and takes(item))
        for item in walk(node)
    )


def takes(item: ast.Subscript) -> bool:
    """Whether an expression takes a part of what is called held-out data (`x_test[i:i + 32]`)."""
    name = last(item.value) if isinstance(item.value, ast.Name | ast.Attribute) else ""
    counted = any(isinstance(part, ast.Name) for part in walk(item.slice))
    return counted and EVALUATION.search(name) and not BESIDE.search(name)


# What keeps graphs away.
SHIELDS = ("no_grad", "inference_mode", "grad_enabled", "enable_grad")
# What says that a program without a training needs no gradients at all.
FROZEN = ("requires_grad = False", "requires_grad_(False)")


def alone(view: View, scope: Scope) -> bool:
    """Whether nothing in sight that runs a function keeps the graph away: nothing names it, or, of a method of a class
    of the project's own, what calls something of its name.
    """
    if scope.decorators or scope.name.startswith("test_"):
        return False
    if scope.parent is scope.module.top:
        return sum(member.words[scope.name] for member in view.project.family(scope.module)) == 1
    owner = scope.owner
    if owner is None or scope.parent is not owner or any(name != "object" for name in foreign(view, owner)):
        return False
    return not any(map(shields, view.calls.namesakes(scope)))


@kept
def handed_on(view: View, scope: Scope) -> bool:
    """Whether a function is only ever handed to functions of the project, all of which are in sight."""
    members = view.project.family(scope.module)
    given = sum(
        isinstance(value, ast.Name) and value.id == scope.name and view.calls.target(site.call, site.scope) is not None
        for member in members
        for site in member.sites()
        for value in site.call.args
    )
    return scope.parent is scope.module.top and sum(member.words[scope.name] for member in members) == given + 1


@kept
def keeps_all(view: View) -> bool:
    """Whether nothing in the programs of a file, all of which are in sight, ever keeps a graph away."""
    members = view.project.family(view.module)
    return not view.effects.mentioned(view.module, *SHIELDS) and not any(map(view.project.unseen, members))


def foreign(view: View, owner: Scope) -> Iterator[str]:
    """Yield a class's bases outside the project."""
    known = {parent.name for parent in view.names.parents(owner)}
    yield from (name for name in view.names.bases_of(owner) if name.split(".")[-1] not in known)


def switched_by(view: View, caller: Site) -> bool:
    """Whether the function of a call puts a model into eval mode before it, itself or by what it calls."""
    before = [s for s in caller.scope.sites if s.line < caller.line]
    return view.effects.find(before, lambda s: s.name == "eval" and s.receiver is not None) is not None


def without_graph(view: View, site: Site) -> bool | None:
    """Whether no graph is kept: by a `with`, a decorator, a global switch, or the callers."""
    inner = None if is_forward(view, site) else run_by(view, site)
    if inner is not None and shields(inner):
        return True
    switched = any(s.receiver is not None and s.line < site.line for s in site.scope.named("eval"))
    if not view.calls.callers(site.scope):
        switched = switched or any(map(functools.partial(switched_by, view), view.calls.by_base(site.scope)))
    found = shielded(view, site.stmt, site.scope, site.line, 0, switched)
    if found is None and ((switched and EVALUATION.search(site.scope.name)) or given_held_out(site)):
        callers = view.calls.callers(site.scope)
        return False if any(view.trainings.trains(c.scope.sites) for c in callers) else None  # what trains keeps graphs
    return found


def shielded(view: View, stmt: ast.stmt, scope: Scope, line: int, depth: int, switched: bool) -> bool | None:
    if any(map(turns_off_gradients, (*withs(stmt, scope.module), *scope.decorators))):
        return True
    if any(s.name in ("set_grad_enabled", "enter_context") and s.line < line for s in scope.sites):
        return True
    if view.effects.mentioned(view.module, *FROZEN) and not trains(view):
        return True
    if "volatile=True" in view.module.text:  # of a torch before no_grad
        return True
    if scope.kind != "function":
        return False
    callers = view.calls.callers(scope) or view.calls.by_base(scope)
    if not callers:
        sure = (depth > 0 or loops(stmt, scope.module)) and switched
        if sure and (alone(view, scope) or (handed_on(view, scope) and keeps_all(view))):
            return False
        return None
    if depth > 4:
        return None if scope.decorators or scope.owner is not None else False
    answers = [shielded(view, c.stmt, c.scope, c.line, depth + 1, switched) for c in callers[:6]]
    if depth == 0 and switched and False in answers:
        return False  # called with a shield too, but not everywhere
    if any(answer is True for answer in answers):
        return True
    return None if None in answers else False


@kept
def trains(view: View) -> bool:
    """Whether the programs of a file train: by a loop in sight, or by an optimizer's step."""
    return bool(view.trainings.near(view.module)) or any(
        view.steps.steps_optimizer(site) for member in view.project.family(view.module) for site in member.sites("step")
    )


@kept
def evaluations(view: View) -> tuple[Site, ...]:
    """The calls that evaluate, those of a helper after those of a model."""
    found = [site for site in view.sites() if evaluates(view, site)]
    return tuple(sorted(found, key=lambda site: not is_forward(view, site)))


def evaluates(view: View, site: Site) -> bool:  # noqa: C901
    """Whether a call runs a model over held-out data, or in a function that says it tests."""
    scope = site.scope
    if scope.name == "forward":
        return False
    nest = loops(site.stmt, scope.module)
    held_out = any(isinstance(loop, ast.For) and holds_out(view, loop.iter, scope) for loop in nest)
    if not held_out and tests_by_name(view, scope, bool(nest)):
        held_out = not any(view.steps.backwards(s) for s in scope.sites)  # it may test the gradients of what it runs
    held_out = held_out or (over_rows(site, nest) and is_forward(view, site))
    by_data = not held_out and given_held_out(site) and (is_forward(view, site) or run_by(view, site) is not None)
    if not held_out and not by_data and not scope.named("eval"):
        return False  # the cheap questions first: most calls are neither
    if view.steps.backwards(site):
        return False
    if not nest and isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call and is_forward(view, site):
        return False  # nothing is done with what the model gives: its layers are shown or measured
    if by_data and not set_to_eval(site, run_model(site), nest):
        return without_graph(view, site) is False and not trained_on(view, site)
    if runs_part(view, site):
        if not held_out and not set_to_eval(site, switched_model(site), nest):
            return False
    elif not is_forward(view, site):
        inner = run_by(view, site) if nest else None
        if inner is None or not (held_out or set_to_eval(site, model_of(site, inner), nest)):
            return False
        if tests_by_name(view, inner.scope, False):  # told there
            return False
    elif not held_out and not set_to_eval(site, run_model(site), nest) and not after_training(view, site, nest):
        return False
    region = view.effects.block(nest[0], scope) if nest else until_next_switch(site)
    if nest and view.trainings.trains(region):
        region = until_next_switch(site, nest[0])  # between two steps of the training
    if view.trainings.trains(region) or any(last(item) == "enable_grad" for item in withs(site.stmt, scope.module)):
        return False  # an attack on the model, say
    return without_graph(view, site) is True or not any(differentiates(view, s) for s in region)


def trained_on(view: View, site: Site) -> bool:
    """Whether what a call gives may be trained on: a gradient is computed of it, or its function gives it back."""
    scope = site.scope
    made = {bind.key for bind in scope.bound(site.stmt)}
    if not made and not isinstance(site.stmt, ast.Expr):
        return True
    for stmt in sorted(scope.stmts, key=lambda each: each.lineno):
        if stmt.lineno > site.line and not isinstance(stmt, Loop | ast.If | ast.With | ast.Try):
            used = made & set(idents(stmt))
            if used and (isinstance(stmt, ast.Return) or "grad_fn" in idents(stmt)):  # given back, or its graph shown
                return True
            made |= {bind.key for bind in scope.bound(stmt)} if used else set()
    sites = (s for s in scope.sites if s.line >= site.line)
    return any((view.steps.backwards(s) or s.name == "grad") and bool(made & set(idents(s.call))) for s in sites)


def differentiates(view: View, site: Site) -> bool:
    """Whether a call is of those that need a graph; to clear a model's gradients alone needs none."""
    if site.name == "zero_grad":
        return not view.kinds.is_model(site.receiver, site.scope)
    return site.name == "grad"


@kept
def holds_out(view: View, header: ast.expr, scope: Scope) -> bool:
    """Whether a loop's header says that it runs over held-out data, or all callers that give it do."""
    over = view.kinds.iterated(header, scope)
    key = dotted(over)
    if any(map(EVALUATION.search, idents(over))):
        return True
    if key is not None and key.startswith("self."):
        return kept_held_out(view, key, scope)
    given = [passed(site, scope, key) for site in view.calls.callers(scope)] if key in scope.params else []
    return bool(given) and all(value is not None and any(map(EVALUATION.search, idents(value))) for value in given)


def kept_held_out(view: View, key: str, scope: Scope) -> bool:
    """Whether all who make an object give it held-out data for an attribute (`self.loader = loader`)."""
    found: list[ast.expr | None] = []
    for bind, home in view.origins.binds(key, scope, 10**9):
        name = dotted(next(element_of(bind.value, bind.path), None))
        if home.name != "__init__" or name not in home.params:
            return False
        found += [passed(site, home, name) for site in view.calls.callers(home)]
    return bool(found) and all(value is not None and any(map(EVALUATION.search, idents(value))) for value in found)


@kept
def tests_by_name(view: View, scope: Scope, loops_here: bool) -> bool:
    """Whether a function, or all that call it in a loop, say by their names that they evaluate."""
    if loops_here:
        return EVALUATION.search(scope.name)
    callers = view.calls.callers(scope)
    return bool(callers) and all(EVALUATION.search(c.scope.name) and loops(c.stmt, c.module) for c in callers)


def set_to_eval(site: Site, name: str | None, nest: list[Loop]) -> bool:
    """Whether the function switched the model of this name to eval mode before, and not back."""
    if name is None or (site.scope.kind != "function" and not nest):
        return False
    return site.scope.kind != "class" and in_eval(site, name)


def in_eval(site: Site, name: str) -> bool:
    """Whether the last switch of a model before a call, where that stands, is to eval mode."""
    switched = [s for s in switches(site.scope, name) if s.line < site.line]
    return bool(switched) and switched[-1].name == "eval"


def switches(scope: Scope, name: str) -> list[Site]:
    """The calls that switch the model of a name in a function or a file, in their order."""
    modes = (*scope.named("eval"), *scope.named("train"))
    return sorted((s for s in modes if dotted(s.receiver) == name), key=lambda s: s.line)


def after_training(view: View, site: Site, nest: list[Loop]) -> bool:
    """Whether a file that trains what it runs by itself (a notebook, say) then predicts with the model in eval mode."""
    scope, name = site.scope, run_model(site)
    if scope.kind != "module" or nest or name is None or not in_eval(site, name):
        return False
    return view.trainings.trains([s for s in scope.sites if s.line < site.line])


def until_next_switch(site: Site, loop: Loop | None = None) -> list[Site]:
    """The calls beside one of a file's own, or in a loop that trains: those between two switches of the model, where
    the first stands in the loop.
    """
    if site.scope.kind != "module" and loop is None:
        return site.scope.sites
    first, end = (loop.lineno, loop.end_lineno or loop.lineno) if loop is not None else (0, len(site.module.lines))
    modes = [s.line for s in switches(site.scope, switched_model(site) or "") if first <= s.line <= end]
    start = max((line for line in modes if line < site.line), default=first)
    end = min((line for line in modes if line > site.line), default=end + 1)
    return [s for s in site.scope.sites if start <= s.line < end]


def runs_part(view: View, site: Site) -> bool:
    """Whether a call runs a part of a model that is switched here (`self.model.encoder(x)`), or a method of its that
    runs its layers.
    """
    receiver = site.receiver
    if receiver is None or dotted(receiver) != switched_model(site):
        return False
    if is_forward(view, site):
        return True
    owner = view.kinds.module_class(receiver, site.scope)
    method = owner.defs.get(site.name) if owner is not None else None
    return method is not None and any(layer(s) and not shields(s) for s in method.sites)


def layer(site: Site) -> bool:
    """Whether a call is of a layer of the object, by its name or out of a list (`self.convs[i](x)`)."""
    func, owner = site.call.func, site.scope.owner
    name = dotted(func.value if isinstance(func, ast.Subscript) else func) or ""
    return name.startswith("self.") and owner is not None and last(func) not in owner.defs


def switched_model(site: Site) -> str | None:
    """The name of the model whose mode decides about a call: of one that the function switches, if it calls a part."""
    name = dotted(site.receiver)
    if name not in (None, "self") and any(dotted(s.receiver) == name for s in site.scope.named("eval")):
        return name
    return run_model(site)


# What keeps a graph away, or says where one is needed.
PHASES_SHIELDS = ("grad_enabled", "no_grad", "inference_mode", "enable_grad", "volatile")


def phases(stmt: ast.stmt, scope: Scope) -> set[str]:
    """The names of the phases that the loops around a statement run through, one of which evaluates."""
    found = {
        dotted(outer.target)
        for outer in loops(stmt, scope.module)
        if isinstance(outer, ast.For) and any(map(EVALUATION.search, strings(outer.iter)))
    }
    return {name for name in found if name is not None}


def phased(loop: ast.For, scope: Scope) -> bool:
    """Whether a loop runs over the loader of a phase (`for x, y in loaders[phase]`)."""
    names = phases(loop, scope)
    chosen = (item.slice for item in walk(loop.iter) if isinstance(item, ast.Subscript))
    return bool(names) and any(names & set(idents(item)) for item in chosen)


def forward_of_phases(view: View, backward: Site) -> Site | None:
    """The call of the model that also evaluates, where backward is made in the phase that trains alone, and nothing in
    the function ever keeps the graph away.
    """
    scope = backward.scope
    names = phases(backward.stmt, scope)
    asked = any(
        isinstance(guard.test, ast.Compare)
        and names & set(idents(guard.test))
        and "train" in strings(guard.test)
        and guard.when is isinstance(guard.test.ops[0], ast.Eq)
        for guard in guards(backward.stmt, scope.module)
    )
    if not asked or any(view.effects.mentioned_in(scope, word) for word in PHASES_SHIELDS):
        return None
    nest = loops(backward.stmt, scope.module)
    return next((s for s in scope.sites if is_forward(view, s) and loops(s.stmt, scope.module) == nest), None)
