"""How ranks, main processes and numbers of processes are called, and what a comparison of a rank comes to."""

import ast
import re

from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, strings

__all__ = [
    "COUNT",
    "DEVICE",
    "FLIPPED",
    "LAUNCHER",
    "MAIN",
    "MAIN_EXACT",
    "MAIN_NUMBER",
    "MAIN_OF_ARGUMENTS",
    "MULTI",
    "PACKAGES",
    "RANK",
    "RANKED",
    "SINGLE",
    "beside_zero",
    "counts_batches",
    "first_device",
    "gives_rank",
    "is_empty",
    "is_first_of",
    "is_number_of_device",
    "says_rank",
]

RANK = Words(
    r"(^|_)((?<!lora_)(?<!low_)(?<!num_)(?<!per_)(local|global|world|my|node|dist|proc)?ranks?|"
    r"(?<!single_)(?<!multi_)(?<!use_)(?<!no_)(?<!n_)(?<!num_)(?<!per_)gpu|gpu_id|gpuid|gpu_?(?:index|idx)|proc_id|procid|process_index|process_idx|"
    r"proc_idx|device_id|rank_?id|process_id|node_id|current_device|ordinal)$",
    re.IGNORECASE,
)
# The rank anywhere in the name of a place: not that of a matrix, nor what ranks something.
RANKED = r"(?<!lora_)(?<!low_)(?<!re)rank(?!ing|er|net)"
MAIN = Words(
    r"is_?((local|world|global)_)?(main|master|primary|rank_?0|rank_?zero|root|chief|leader|coordinator)|is_?global_zero|^is_(local|world)_process_zero$|"
    r"^master_?proc",
    re.IGNORECASE,
)
DEVICE = Words(r"^(local_|my_)?(device|dev)(_num|_number|_index|_idx)?$")
# What the number of the main rank is called.
MAIN_NUMBER = Words(
    r"^_?(main|master|root|chief|leader|primary|writer|zero|sav(e|ing)|log(ging)?)_?(rank|gpu|process|proc|device|id)$|^root$",
    re.IGNORECASE,
)
# What a launcher of several processes puts into the environment.
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
MAIN_EXACT = {
    "main_process",
    "master",
    "primary",
    "rank0",
    "rank_0",
    "rank_zero",
    "on_master",
    "log_master",
    "is_logger",
    "is_log",
}
# What asks whether this torch has processes at all.
PACKAGES = ("dist.is_available", "distributed.is_available")
# Attributes of transformers' training arguments that hold on the main process alone.
MAIN_OF_ARGUMENTS = ("args.should_save", "args.should_log")
MULTI = Words(
    r"^(use_|is_|in_|args_|enable_)?(ddp|dist|distributed|distribution|multi_?gpu|fsdp|parallel|multiprocessing_distributed|distributed_run)(_run|_mode|_train|_training)?$",
    re.IGNORECASE,
)
SINGLE = Words(
    r"^(use_|is_)?single_?(gpu|process|device|node_gpu)$|^(no|disable)_?(ddp|dist|distributed)$", re.IGNORECASE
)
COUNT = Words(
    r"(world_?size|n_?gpus?|num_?gpus?|nprocs|n_?procs|ngpus_per_node|device_count|num_replicas|get_world_size|num_processes)$",
    re.IGNORECASE,
)
# What a comparison is with its sides changed (`0 < rank`).
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def beside_zero(op: ast.cmpop, value: object) -> int:
    """1 if a comparison of a rank holds for every rank (`rank >= 0`), -1 if for none (`rank < 0`), else 0."""
    if (isinstance(op, ast.GtE) and value == 0) or (isinstance(op, ast.Gt) and value == -1):
        return 1
    return -1 if (isinstance(op, ast.Lt) and value == 0) or (isinstance(op, ast.LtE) and value == -1) else 0


def says_rank(node: ast.AST | None) -> bool:
    """Whether an expression is a rank by the names and words in it."""
    if node is None:
        return False
    table = isinstance(node, ast.Subscript) and dotted(node.value) is not None
    if table or (isinstance(node, ast.Call) and last(node) in ("int", "str", "getenv", "get", "getattr")):
        return any(RANK.search(text) for text in strings(node)) or any(map(RANK.search, idents(node)))
    return RANK.search(last(node))


def is_number_of_device(node: ast.expr, other: ast.expr) -> bool:
    """Whether what a process calls its device is compared with a number (`if device == 0:`), so that it is its rank."""
    return DEVICE.search(last(node)) and type(constant(other)) is int


def gives_rank(node: ast.expr) -> bool:
    """Whether an expression asks the process group or the environment for the rank, or is a name for it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return gives_rank(node.left)
    if isinstance(node, ast.IfExp):  # `get_rank() if is_initialized() else 0`
        arms = [arm for arm in (node.body, node.orelse) if constant(arm) not in (0, -1)]
        return bool(arms) and all(map(gives_rank, arms))
    if isinstance(node, ast.Name | ast.Attribute):
        return "rank" in last(node).lower() and says_rank(node)
    return isinstance(node, ast.Call | ast.Subscript) and says_rank(node)


def first_device(node: ast.expr, other: ast.expr) -> bool:
    """Whether a device is compared with the first GPU (`device == "cuda:0"`, `device.index == 0`)."""
    if isinstance(node, ast.Attribute) and node.attr == "index":
        return "device" in last(node.value) and constant(other) == 0
    named = isinstance(other, ast.Call) and last(other) == "device" and len(other.args) == 1
    return constant(other.args[0] if named and isinstance(other, ast.Call) else other) == "cuda:0"


def is_first_of(node: ast.expr) -> bool:
    """Whether a rank is compared with the first of some (`gpu == args.gpus[0]`)."""
    return isinstance(node, ast.Subscript) and constant(node.slice) == 0


def is_empty(node: ast.AST) -> bool:
    """Whether an expression is the literal None or False."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def counts_batches(node: ast.expr) -> bool:
    """Whether a test compares with the length of something, as the last batch of a loop is told."""
    return isinstance(node, ast.Compare) and any(
        isinstance(item, ast.Call) and last(item) == "len" for item in (node.left, *node.comparators)
    )
