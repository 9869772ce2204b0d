"""Recognise names of ranks, and evaluate comparisons of a rank."""

import ast
import re

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.index import Bind, Module, Scope
from lockstep_lint.analysis.nodes import REFERENCES, Words, constant, dotted, idents, last, strings

__all__ = [
    "COUNT",
    "LAUNCHER",
    "MAIN",
    "MAIN_EXACT",
    "MAIN_OF_ARGUMENTS",
    "MULTI",
    "PACKAGES",
    "RANK",
    "RANKED",
    "SINGLE",
    "RankNumbers",
    "attributes",
    "beside_zero",
    "counts_batches",
    "is_empty",
]


RANK = Words(
    r"(^|_)((?<!lora_)(?<!low_)(?<!num_)(?<!per_)(?<!all_)(local|global|world|my|node|dist|proc)?ranks?|"
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
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def beside_zero(op: ast.cmpop, value: object) -> int:
    """Return 1 if a comparison holds for every rank (`rank >= 0`), -1 for none."""
    if (isinstance(op, ast.GtE) and value == 0) or (isinstance(op, ast.Gt) and value == -1):
        return 1
    return -1 if (isinstance(op, ast.Lt) and value == 0) or (isinstance(op, ast.LtE) and value == -1) else 0


def says_rank(node: ast.AST | None) -> bool:
    """Check whether an expression is a rank by the names and words in it."""
    if node is None:
        return False
    table = isinstance(node, ast.Subscript) and dotted(node.value) is not None
    if table or (isinstance(node, ast.Call) and last(node) in ("int", "str", "getenv", "get", "getattr")):
        return any(RANK.search(text) for text in strings(node)) or any(map(RANK.search, idents(node)))
    return RANK.search(last(node))


def is_number_of_device(node: ast.expr, other: ast.expr) -> bool:
    """Check whether a process's device is compared with a number (`if device == 0:`)."""
    return DEVICE.search(last(node)) and type(constant(other)) is int


def gives_rank(node: ast.expr) -> bool:
    """Check whether an expression reads the rank from the group or the environment."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return gives_rank(node.left)
    if isinstance(node, ast.IfExp):  # `get_rank() if is_initialized() else 0`
        arms = [arm for arm in (node.body, node.orelse) if constant(arm) not in (0, -1)]
        return bool(arms) and all(map(gives_rank, arms))
    if isinstance(node, REFERENCES):
        return "rank" in last(node).lower() and says_rank(node)
    return isinstance(node, ast.Call | ast.Subscript) and says_rank(node)


def is_empty(node: ast.AST) -> bool:
    """Check whether an expression is the literal None or False."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def counts_batches(node: ast.expr) -> bool:
    """Check whether a test compares with a length, as for the last batch."""
    return isinstance(node, ast.Compare) and any(
        isinstance(item, ast.Call) and last(item) == "len" for item in (node.left, *node.comparators)
    )


MAX_CALLERS = 20
# What starts processes, and gives each its number as the first argument.
NUMBERED = {"spawn", "start_processes"}


class RankNumbers:
    """Follows the ranks of a program through names, parameters, objects and functions."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    @cache_answers
    def is_rank(self, node: ast.expr, scope: Scope) -> bool:
        """Check whether an expression is a rank, by its name or origins."""
        if isinstance(node, ast.BinOp):
            return self.is_rank(node.left, scope)
        if isinstance(node, ast.NamedExpr):
            return self.is_rank(node.value, scope)
        key = dotted(node)
        if says_rank(node) or not isinstance(node, REFERENCES) or key is None:
            return says_rank(node)
        values = [value for value, _ in self.calls.values(key, scope)]
        if not values and "." in key:  # `config.device = int(os.environ["LOCAL_RANK"])`, where the object is made
            values = [bind.value for bind, _ in self.set_elsewhere(key, scope) if bind.value is not None]
        values = [value for value in values if constant(value) != 0]  # what it is in one process
        return (bool(values) and all(map(gives_rank, values))) or self.numbered(key, scope)

    def numbered(self, key: str, scope: Scope) -> bool:
        """Check whether a name is the process number that `spawn` passes first."""
        first = [name for name in scope.params if name != "self"][:1]
        if first != [key] or key in scope.binds:
            return False
        callers = self.calls.callers(scope)[:MAX_CALLERS]
        return bool(callers) and all(site.name in NUMBERED for site in callers)

    def bound(self, key: str, scope: Scope) -> list[tuple[Bind, Scope]]:
        """Return a name's bindings in the nearest scope; for `self.x`, in all methods and bases."""
        if key.startswith("self.") and scope.owner is not None:
            owners = (scope.owner, *self.calls.names.parents(scope.owner))
            return [
                (b, method) for owner in owners for method in owner.defs.values() for b in method.binds.get(key, [])
            ]
        current: Scope | None = scope
        while current is not None:
            if key in current.params:
                return []
            if key in current.binds:
                return [(bind, current) for bind in current.binds[key]]
            current = current.parent
        return []

    def set_elsewhere(self, key: str, scope: Scope) -> list[tuple[Bind, Scope]]:
        """Return the bindings of an attribute on any object, if the scope gets the object."""
        root, _, name = key.rpartition(".")
        if not root or root in ("self", "cls") or root.split(".")[0] in scope.module.imports:
            return []
        members = self.calls.project.family(scope.module)
        return [found for member in members for found in attributes(member).get(name, ())]

    def compare(self, node: ast.Compare, scope: Scope) -> int:
        """Return 1 if a comparison holds on rank 0 only, -1 on others, else 0."""
        left, op, right = node.left, node.ops[0], node.comparators[0]
        if not self.is_rank(left, scope) and not is_number_of_device(left, right):
            left, right, op = right, left, FLIPPED.get(type(op), type(op))()
        if not self.is_rank(left, scope) and not is_number_of_device(left, right):
            return 0
        value = constant(right)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List | ast.Set):
            return 1 if isinstance(op, ast.In) else -1
        given = {constant(number) for number, _ in self.calls.values(dotted(right) or "", scope)}
        main = value in (0, "0") or (given == {0} if given else MAIN_NUMBER.search(last(right)))
        if isinstance(op, ast.Eq | ast.Is):
            return 1 if main else 0
        if isinstance(op, ast.NotEq | ast.IsNot | ast.Gt):
            return -1 if main else 0
        # No rank is below 0: that asks whether the processes have numbers at all.
        if isinstance(op, ast.LtE | ast.Lt):
            return 1 if value == 1 or (value == 0 and isinstance(op, ast.LtE)) else 0
        return -1 if isinstance(op, ast.GtE) and value == 1 else 0

    def one_rank(self, node: ast.Compare, scope: Scope) -> bool:
        """Check whether a test holds on one rank other than the first (`rank == 1`)."""
        left, right = node.left, node.comparators[0]
        if not isinstance(node.ops[0], ast.Eq) or not self.is_rank(left, scope) or isinstance(left, ast.BinOp):
            return False
        value = constant(right)
        return (isinstance(value, int) and value > 0) or any(COUNT.search(name) for name in idents(right))


@cache_answers
def attributes(module: Module) -> dict[str, list[tuple[Bind, Scope]]]:
    """Return a file's assignments to attributes, by attribute name."""
    table: dict[str, list[tuple[Bind, Scope]]] = {}
    for scope in module.scopes:
        for key, binds in scope.binds.items():
            if "." in key:
                table.setdefault(key.rpartition(".")[2], []).extend((bind, scope) for bind in binds)
    return table
