"""LS027: an attribute of the wrapped model without .module."""

import ast
import re
from collections.abc import Iterable, Iterator

from lockstep_lint.analysis.context import Guard, above, choices, guards, loops
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# What nn.Module and the wrappers have themselves.
OWN = {
    "T_destination", "_get_ddp_logging_data", "_set_static_graph", "add_module", "apply", "bfloat16",
    "broadcast_buffers", "bucket_bytes_cap", "buffers", "call_super_init", "children", "compile", "cpu", "cuda",
    "delay_all_reduce", "device", "device_ids", "device_type", "dim", "double", "dump_patches", "eval",
    "extra_repr", "find_unused_parameters", "float", "forward", "gather", "get_buffer", "get_extra_state",
    "get_parameter", "get_submodule", "gradient_as_bucket_view", "half", "ipu", "is_multi_device_module", "join",
    "join_device", "join_hook", "join_process_group", "load_state_dict", "logger", "mixed_precision", "module",
    "modules", "named_buffers", "named_children", "named_modules", "named_parameters", "no_sync", "output_device",
    "parallel_apply", "parameters", "parameters_to_ignore", "process_group", "reducer", "register_backward_hook",
    "register_buffer", "register_comm_hook", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
    "register_module", "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook",
    "replicate", "require_backward_grad_sync", "require_forward_param_sync", "requires_grad_", "scatter",
    "set_extra_state", "set_static_graph", "set_submodule", "share_memory", "src_device_obj", "state_dict",
    "static_graph", "to", "to_empty", "train", "training", "type", "will_sync_module_buffers", "xpu", "zero_grad",
}  # fmt: skip

# What Accelerate may put around a model that passes reads on to it.
PASSING = ("deepspeed", "DeepSpeed", "fsdp", "FSDP", "FullySharded")
# What asks what an object is before it is read.
ASKS = ("hasattr", "isinstance")
# What a test says whose program has several devices, by whatever name.
SEVERAL = Words(r"gpu|dist|ddp|parallel|rank|world|multi|wrap|device|deepspeed|fsdp|shard", re.IGNORECASE)
# Calls that give a model in another wrapper, or take it out of one.
UNCLEAR = Words(r"wrap|parallel|module|prepare|^initialize$|^setup|shard|engine|without|ddp|fsdp", re.IGNORECASE)
HOLDERS = {"self", "args", "opt", "opts", "cfg", "config", "conf", "params", "flags", "FLAGS", "len", "__name__"}


def check(view: View) -> Iterator[Found]:
    """Looks at what is read from names that certainly hold a wrapper."""
    yield from prepared(view)
    if not any(word in view.module.text for word in ("DataParallel", "DDP")):
        return
    if not view.wrappers.kinds(view.module) & {"ddp", "dp"}:
        return
    for scope in view.scopes:
        for node, stmt in scope.reads:
            if not isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node.value, ast.Subscript) and item(view, node, node.value, scope, stmt):
                name = ast.unparse(node.value)
                yield Found(node, f"the wrapper of {name} has no '{node.attr}': read it from the model inside")
            if not suspect(node) or not any(True for _ in view.wrappers.wrapped(node.value, scope)):
                continue
            if wrapped(view, node, scope, stmt):
                yield Found(node, f"the wrapper has no '{node.attr}': read {dotted(node.value)}.module.{node.attr}")
            elif perhaps(view, node, scope, stmt):
                yield Found(
                    node,
                    f"on several GPUs this is the wrapper, which has no '{node.attr}': read it from the model that "
                    "is wrapped (`.module`, where there is one)",
                )


def prepared(view: View) -> Iterator[Found]:
    """Reads from models that Accelerate prepared: DDP's wrapper, unless DeepSpeed's or FSDP's, which pass reads on."""
    if ".prepare" not in view.module.text or "accelerate" not in view.frameworks:
        return
    if view.effects.mentioned(view.module, *PASSING):
        return
    for scope in view.scopes:
        for node, stmt in scope.reads:
            if isinstance(node.ctx, ast.Load) and suspect(node) and accelerated(view, node, scope):
                name = dotted(node.value)
                if name is not None and not set_here(view, name, node.attr) and not tested(stmt, scope):
                    yield Found(
                        node,
                        f"the wrapper that Accelerate makes has no '{node.attr}': read "
                        f"accelerator.unwrap_model({name}).{node.attr}",
                    )


def accelerated(view: View, node: ast.Attribute, scope: Scope) -> bool:
    """Whether the object of a read is what `accelerator.prepare` made of a model, whatever way was taken."""
    if not view.kinds.is_model(node.value, scope):
        return False
    binds = view.origins.binds(dotted(node.value) or "", scope, node.lineno)
    return bool(binds) and all(
        isinstance(bind.value, ast.Call)
        and last(bind.value) in ("prepare", "prepare_model")
        and "accelerator" in (dotted(bind.value.func) or "").lower()
        for bind, _ in binds
    )


def suspect(node: ast.Attribute) -> bool:
    """Whether an attribute belongs to neither nn.Module nor the wrappers."""
    return not node.attr.startswith("_") and node.attr not in OWN and dotted(node.value) not in (None, "self")


def wrapped(view: View, node: ast.Attribute, scope: Scope, stmt: ast.stmt) -> bool:
    """Whether the object is a DDP or DataParallel wrapper whatever way was taken."""
    key = dotted(node.value)
    found = view.origins.of(node.value, scope)
    kinds = [kind for kind, _, _ in view.wrappers.wrapped(node.value, scope)]
    if not found or len(kinds) != len(found) or not set(kinds) <= {"ddp", "dp"}:
        return False
    if key is None or set_here(view, key, node.attr):
        return False
    if any(
        comes_first(view, call, origin.scope, scope) for _, call, origin in view.wrappers.wrapped(node.value, scope)
    ):
        return False
    if comes_later(view, node.value, stmt, scope):
        return False
    return not tested(stmt, scope) and not view.ranks.single(stmt, scope)


def perhaps(view: View, node: ast.Attribute, scope: Scope, stmt: ast.stmt) -> bool:
    """Whether the object is a wrapped model on some ways, the plain one on all others, and nothing asks which before
    the read.
    """
    key, found = dotted(node.value), view.origins.of(node.value, scope)
    wraps = {origin: (kind, call) for kind, call, origin in view.wrappers.wrapped(node.value, scope)}
    if key is None or not 0 < len(wraps) < len(found) or not {kind for kind, _ in wraps.values()} <= {"ddp", "dp"}:
        return False
    if any(origin.call is None or UNCLEAR.search(last(origin.call)) for origin in found if origin not in wraps):
        return False  # what is no new model may be the one inside the wrapper
    if set_here(view, key, node.attr) or tested(stmt, scope) or view.ranks.single(stmt, scope):
        return False
    if comes_later(view, node.value, stmt, scope):
        return False
    return all(unasked(view, call, origin.scope, stmt, scope) for origin, (_, call) in wraps.items())


def item(view: View, node: ast.Attribute, of: ast.Subscript, scope: Scope, stmt: ast.stmt) -> bool:
    """Whether the object is a model of a dictionary that some way or all wrap, where no test asks which
    (`models["net"] = DDP(models["net"])`, and then `models["net"].loss(x)`).
    """
    if not isinstance(constant(of.slice), str) or node.attr.startswith("_") or node.attr in OWN:
        return False
    given = list(put(of, scope))
    wraps = [(value, home) for value, home in given if kind_of(view, value, home) in ("ddp", "dp")]
    if not wraps or any(home is scope and value.lineno > node.lineno for value, home in wraps):
        return False
    for value, _ in given:
        made = value if isinstance(value, ast.Call) else None
        if made is None or (UNCLEAR.search(last(made)) and not any(value is wrap for wrap, _ in wraps)):
            return False
    if set_here(view, ast.unparse(of), node.attr) or tested(stmt, scope) or view.ranks.single(stmt, scope):
        return False
    return all(isinstance(value, ast.Call) and unasked(view, value, home, stmt, scope) for value, home in wraps)


def put(of: ast.Subscript, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """What is put under a key of a dictionary, here or by the other methods of the object that has it."""
    key, name = dotted(of.value), constant(of.slice)
    own = key is not None and key.startswith("self.") and scope.owner is not None
    for home in scope.owner.defs.values() if own and scope.owner is not None else [scope]:
        for stmt in home.stmts if key is not None else ():
            if not isinstance(stmt, ast.Assign):
                continue
            places = [target for target in stmt.targets if isinstance(target, ast.Subscript)]
            if any(dotted(place.value) == key and constant(place.slice) == name for place in places):
                yield stmt.value, home


def kind_of(view: View, value: ast.expr, scope: Scope) -> str:
    """The wrapper that a value certainly is."""
    return view.wrappers.of_call(value, scope) if isinstance(value, ast.Call) else ""


def unasked(view: View, call: ast.Call, home: Scope, stmt: ast.stmt, scope: Scope) -> bool:
    """Whether a statement may follow a wrapping: it stands under no test of the kind that the wrapping does, and is not
    run by what the function that wraps calls before.
    """
    site = next((site for _, site in view.wrappers.made(home.module) if site.call is call), None)
    if site is None or any(isinstance(node, ast.Try) for node, _ in above(stmt, scope.module)):
        return False
    asked, here = words([*guards(site.stmt, home.module), *choices(site)]), words(guards(stmt, scope.module))
    if asked & here or any(SEVERAL.search(name) for name in here):
        return False
    return not comes_first(view, call, home, scope)


def comes_first(view: View, call: ast.Call, home: Scope, scope: Scope) -> bool:
    """Whether the function that wraps a model runs another one, or has it run, before that."""
    before = (other for other in home.sites if other.line < call.lineno)
    return any(scope in (run, *further(view, run)) for other in before for run in view.calls.runs(other))


def comes_later(view: View, node: ast.expr, stmt: ast.stmt, scope: Scope) -> bool:
    """Whether an attribute of the method's object is wrapped only after a statement of the same method, which no loop
    brings back to that, or in the other arm of its test: what other methods give it is no wrapper.
    """
    key, end = dotted(node) or "", stmt.end_lineno or stmt.lineno
    arms: dict[ast.stmt, str] = {each: place for each, place in above(stmt, scope.module) if isinstance(each, ast.If)}
    own = [
        bind.stmt.lineno > end
        or any({place, arms.get(each)} == {"body", "orelse"} for each, place in above(bind.stmt, scope.module))
        for bind in scope.binds.get(key, [])
    ]
    if not key.startswith("self.") or not own or not all(own) or loops(stmt, scope.module):
        return False
    others = [(bind.value, home) for bind, home in view.origins.binds(key, scope, stmt.lineno) if home is not scope]
    return not any(True for value, home in others if value is not None for _ in view.wrappers.wrapped(value, home))


def further(view: View, function: Scope) -> Iterator[Scope]:
    """The functions that a function calls."""
    return (run for site in function.sites for run in view.calls.runs(site))


def words(tests: Iterable[Guard]) -> set[str]:
    """The names in tests, without those of the objects that hold all settings."""
    return {name for guard in tests for name in idents(guard.test)} - HOLDERS


def tested(stmt: ast.stmt, scope: Scope) -> bool:
    """Whether a test of the object's attributes or its class decides about a statement."""
    text = " ".join(ast.unparse(guard.test) for guard in guards(stmt, scope.module))
    if any(word in text for word in ASKS):
        return True
    header = stmt if isinstance(stmt, ast.Expr | ast.Assign | ast.Return) else getattr(stmt, "test", None)
    asked = (call for call in walk(header) if isinstance(call, ast.Call)) if header is not None else ()
    return any(getattr(call.func, "id", "") in ASKS for call in asked)


def set_here(view: View, key: str, attribute: str) -> bool:
    """Whether the program sets the attribute on the wrapper itself."""
    name = key.rsplit(".", 1)[-1]
    return any(bound.endswith(f"{name}.{attribute}") for home in view.scopes for bound in home.binds)


RULE = Rule(
    code="LS027",
    name="attribute of the wrapper",
    what=(
        "A method or attribute of the model is read from its DDP or DataParallel wrapper, or from what "
        "`accelerator.prepare` made of it, which does not have it."
    ),
    why=(
        "The wrapper passes on only the forward pass: the run stops with an AttributeError, often only when "
        "several GPUs are used, or at the first evaluation."
    ),
    bad="""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    return model.generate("hello")
""",
    good="""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    with model.no_sync():
        model.train()
    return model.module.generate("hello")
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Read it from model.module",
    note=(
        "Also told are reads of a model that only some ways wrap, as where there are several GPUs, if no test of that "
        "stands before the read."
    ),
)
