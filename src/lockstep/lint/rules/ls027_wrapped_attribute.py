"""LS027: an attribute of the wrapped model without .module."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.context import guards
from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.nodes import dotted, last, walk
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule

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


def check(view: View) -> Iterator[Found]:
    """Looks at what is read from names that certainly hold a wrapper."""
    yield from prepared(view)
    if not any(word in view.module.text for word in ("DataParallel", "DDP")):
        return
    if not view.wrappers.kinds(view.module) & {"ddp", "dp"}:
        return
    for scope in view.scopes:
        for node, stmt in scope.reads:
            if isinstance(node.ctx, ast.Load) and suspect(node) and wrapped(view, node, scope, stmt):
                yield Found(node, f"the wrapper has no '{node.attr}': read {dotted(node.value)}.module.{node.attr}")


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
    return not tested(stmt, scope) and not view.ranks.single(stmt, scope)


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
    bad=(
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    return model.generate("hello")
""",
        """
import torch
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model.loss(x))
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    good=(
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    with model.no_sync():
        model.train()
    return model.module.generate("hello")
""",
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank, distributed):
    if distributed:
        model = DDP(model.to(local_rank), device_ids=[local_rank])
        model = model.module
    return model.generate("hello")
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Read it from model.module",
)
