"""LS027: an attribute of the model, read from its wrapper."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

# The attributes of nn.Module, DistributedDataParallel and DataParallel.
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
# Tests that ask what an object is before it is read.
ASKS = ("hasattr", "isinstance")


def check(view: View) -> Iterator[Found]:
    """Find reads from names that certainly hold a DDP or DataParallel wrapper."""
    if not view.wrappers.kinds(view.module) & {"ddp", "dp"}:
        return
    for scope in view.scopes:
        for node, stmt in scope.reads:
            foreign = not node.attr.startswith("_") and node.attr not in OWN and isinstance(node.ctx, ast.Load)
            if foreign and dotted(node.value) not in (None, "self") and is_wrapped(view, node, scope, stmt):
                yield Found(node, f"the wrapper has no '{node.attr}': read {dotted(node.value)}.module.{node.attr}")


def is_wrapped(view: View, node: ast.Attribute, scope: Scope, stmt: ast.stmt) -> bool:
    """Check whether every value of an object is a wrapper made before the read."""
    found = view.origins.of(node.value, scope)
    wraps = list(view.wrappers.wrapped(node.value, scope))
    if not found or len(wraps) != len(found) or not {kind for kind, _, _ in wraps} <= {"ddp", "dp"}:
        return False
    if dotted(node.value) not in scope.binds and not all(origin.scope.kind == "module" for _, _, origin in wraps):
        return False  # another function wraps it, perhaps later
    if any(bind.stmt.lineno > node.lineno for bind in scope.binds.get(dotted(node.value) or "", [])):
        return False  # the wrapper may come after the read
    name = f"{(dotted(node.value) or '').rpartition('.')[2]}.{node.attr}"
    if any(key.endswith(name) for home in view.scopes for key in home.binds):
        return False  # the program sets the attribute on the wrapper itself
    tests = " ".join(ast.unparse(guard.test) for guard in guards(stmt, scope.module))
    text = tests + (ast.unparse(stmt) if isinstance(stmt, ast.Expr | ast.Assign | ast.Return) else "")
    return not any(word in text for word in ASKS) and not view.ranks.single(stmt, scope)


RULE = Rule("LS027", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
