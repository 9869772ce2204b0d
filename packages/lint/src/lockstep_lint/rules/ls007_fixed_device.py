"""LS007: a fixed device in a script of several processes."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import guards, parted
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, strings, walk
from lockstep_lint.analysis.origins import Origin
from lockstep_lint.analysis.rank_names import RANK
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.query import sides
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


# The rank among all processes, as launchers call it.
RANKS = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
# What the number of a machine among others is called.
NODE = Words(r"(^|_)(node(_?(rank|id|idx|index))?|nr|machine_?(rank|id)|host_?(rank|id))$", re.IGNORECASE)
# What the Trainers of transformers and trl are told, which sets the device of the process when it is made.
ARGUMENTS = re.compile(r"^transformers\.(\w+\.)*\w*TrainingArguments$|^trl\.(\w+\.)*(?!Model)\w+Config$")
# What makes them of a command line or a file.
PARSES = ("parse_args_into_dataclasses", "parse_json_file", "parse_yaml_file", "parse_dict")


def placed_before(view: View, site: Site) -> bool:
    """Whether a Trainer's arguments, which set the device of each process, are made in the programs, and not only after
    a call in its own function.
    """
    made = [s for member in view.project.family(view.module) for s in arguments_made(view, member)]
    return any(s.scope is not site.scope or s.line < site.line for s in made)


@kept
def arguments_made(view: View, module: Module) -> list[Site]:
    """The calls of a file that make a Trainer's arguments, also by a class of the project that derives from theirs."""
    if "TrainingArguments" not in module.text and "trl" not in module.text:
        return []
    parsed = [s for s in module.sites(*PARSES) if "TrainingArguments" in module.words]
    named = [s for name, sites in module.by_name.items() if name[:1].isupper() for s in sites]
    return [*parsed, *(s for s in named if any(map(ARGUMENTS.search, names_behind(view, s))))]


def names_behind(view: View, site: Site) -> list[str]:
    """The full name of what a call calls, or of what the project's class that it makes one of derives from."""
    owner = view.names.definition(site.call.func, site.scope)
    return list(view.names.bases_of(owner)) if owner is not None and owner.kind == "class" else [view.full(site)]


def numbered(device: object) -> bool:
    """Whether a device is a GPU with a number."""
    return isinstance(device, str) and device.startswith("cuda:") and device[5:].isdigit()


def plain(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a device certainly is "cuda" without a number, or the CPU where there is no GPU."""
    names = names_of(view, node, scope)
    return "cuda" in names and names <= {"cuda", "cpu"}


def same_for_all(view: View, node: ast.expr, scope: Scope) -> str:
    """The GPU that a device certainly is by a string that names its number ("cuda:0"), "" where it is none, or one of
    several, between which the rank may choose.

    An option that is set somewhere (`args.device`) may have other values that are not in sight.
    """
    if isinstance(node, ast.Attribute) and last(node.value) != "self":
        return ""
    origins = view.origins.of(node, scope)
    arms = [arm for origin in origins for arm in arms_of(origin.node)]
    found = [arm for arm in map(constant, arms) if isinstance(arm, str) and numbered(arm)]
    alike = len(set(found)) == 1 and all(numbered(arm) or arm == "cpu" for arm in map(constant, arms))
    return found[0] if alike else ""


def names_of(view: View, node: ast.expr, scope: Scope) -> set[object]:
    """What a device may be called; None stands for what is not known."""
    names: set[object] = set()
    for origin in view.origins.of(node, scope):
        value: ast.expr | None = origin.node
        if origin.call is not None and view.names.qualify(origin.call.func, origin.scope) == "torch.device":
            value = origin.call.args[0] if len(origin.call.args) == 1 else None
        arms = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        names |= {constant(arm) for arm in arms}
    return names


def is_default(view: View, site: Site) -> bool:
    """Whether a device is only a name's first value: the same function gives it another one, which is not written out
    (`device = cuda:0; if ddp: device = mine`), or nothing ever asks for it.
    """
    for bind in site.scope.bound(site.stmt):
        binds = [b for b in site.scope.binds[bind.key] if b.stmt.lineno > site.line and b.how == "assign"]
        later = (b.value for b in binds if not parted(site, b.stmt))
        if any(value is not None and None in names_of(view, value, site.scope) for value in later):
            return True
        if not bind.path and bind.how == "assign" and not asked_for(view, bind.key):
            return True
    return False


def asked_for(view: View, key: str) -> bool:
    """Whether anything in the programs reads a name, or an attribute of such a name."""
    name = key.rpartition(".")[2]
    for member in view.project.family(view.module):
        if name != "device" and member.words[name] > 1:
            return True
        for node in walk(member.source.tree) if member.source.tree is not None and name in member.words else ():
            reads = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if reads and last(node) == name and dotted(node) != "torch.device":
                return True
    return False


def arms_of(node: ast.expr) -> list[ast.expr]:
    """The two values that a choice by whether there is a GPU may give, or the value itself."""
    if isinstance(node, ast.IfExp) and any(word in ast.unparse(node.test) for word in ("is_available", "cuda")):
        return [node.body, node.orelse]
    return [node]


def after_cuda(node: ast.expr | None) -> ast.expr | None:
    """What is put behind "cuda:", in any of the ways to write a string."""
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and isinstance(node.values[1], ast.FormattedValue):
        return node.values[1].value if constant(node.values[0]) == "cuda:" else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and constant(node.left) in ("cuda:%d", "cuda:%s"):
        return node.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and constant(node.left) == "cuda:":
        return node.right.args[0] if isinstance(node.right, ast.Call) and node.right.args else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        wanted = constant(node.func.value) in ("cuda:{}", "cuda:{:d}", "cuda:{0}")
        return node.args[0] if wanted and len(node.args) == 1 else None
    return None


def is_global(view: View, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a number certainly is the rank among all processes."""
    found = [origin for origin in view.origins.of(node, scope) if not of_one_process(view, origin)]
    return bool(found) and all(global_rank(view, origin, depth) for origin in found)


def of_one_process(view: View, origin: Origin) -> bool:
    """Whether a value is what a call from a single process passes: 0, or a device."""
    call = origin.call
    made = call is not None and view.names.qualify(call.func, origin.scope) == "torch.device"
    return made or constant(origin.node) in (0, "cuda", "cuda:0", "cpu")


def global_rank(view: View, origin: Origin, depth: int) -> bool:
    """Whether a value is the rank among all processes, or that plus or minus a number."""
    if over_nodes(origin.node):
        return True
    if isinstance(origin.node, ast.BinOp) and isinstance(origin.node.op, ast.Add | ast.Sub):
        return isinstance(constant(origin.node.right), int) and is_global(view, origin.node.left, origin.scope, depth)
    number = after_cuda(origin.node)
    if number is not None:
        return is_global(view, number, origin.scope, depth)
    if isinstance(origin.node, ast.Attribute):  # of an object that is handed on (`config.rank`), wherever it is set
        binds = view.ranks.tests.numbers.set_elsewhere(dotted(origin.node) or "", origin.scope) if not depth else []
        values = [(bind.value, home) for bind, home in binds if bind.how == "assign" and not bind.path]
        rest = [(v, home) for v, home in values if constant(v) != 0]  # where there is one process
        same = (value is not None and is_global(view, value, home, depth + 1) for value, home in rest)
        return len(values) == len(binds) and bool(rest) and all(same)
    if isinstance(origin.node, ast.Subscript):
        return "environ" in idents(origin.node) and bool(RANKS & set(strings(origin.node)))
    if origin.call is None:
        return False
    asked = view.names.qualify(origin.call.func, origin.scope) or dotted(origin.call.func)
    if asked in ("torch.distributed.get_rank", "dist.get_rank"):
        return not origin.call.args and not origin.call.keywords
    reads = last(origin.call) in ("int", "getenv", "get") and {"environ", "getenv"} & set(idents(origin.node))
    return bool(reads) and bool(RANKS & set(strings(origin.node)))


def over_nodes(node: ast.expr) -> bool:
    """Whether a number counts the processes of all nodes (`node_rank * gpus + local_rank`)."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    products = (
        side for side in (node.left, node.right) if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult)
    )
    return any(NODE.search(name) for side in products for name in idents(side))


def has_single_device(view: View, site: Site) -> bool:
    """Whether a process comes here only where it sees a single GPU, which is its own (`device_count() == 1`)."""
    for guard in guards(site.stmt, site.module):
        test = guard.test
        if guard.when and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
            is_one = len(test.ops) == 1 and constant(test.comparators[0]) == 1
            counted = (origin.node for origin in view.origins.of(test.left, site.scope)) if is_one else ()
            if any("device_count" in idents(node) for node in counted):
                return True
    return False


def chosen_by_test(stmt: ast.stmt, node: ast.expr | None) -> bool:
    """Whether the device is one arm of a choice that may depend on the rank."""
    for item in ast.walk(stmt):
        if isinstance(item, ast.IfExp) and node in (item.body, item.orelse):
            return not any(word in ast.unparse(item.test) for word in ("is_available", "cuda"))
    return False


def index_of(view: View, site: Site) -> ast.expr | None:
    """What a call takes for the number of its device."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.IfExp) and constant(first.orelse) == "cpu":
        first = first.body
    if site.name in ("DistributedDataParallel", "DDP"):
        ids = keyword(site.call, "device_ids")
        return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    if site.name == "device" and view.full(site) == "torch.device" and len(site.call.args) == 2:
        return site.call.args[1]
    number = after_cuda(first)
    if number is not None:
        return number
    if site.name in ("set_device", "set_device_index"):
        return first if view.full(site).startswith("torch.cuda") else None
    moves = site.name in ("to", "cuda") and site.receiver is not None
    return first if moves and isinstance(first, ast.Name | ast.Call | ast.Attribute) else None


OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
SETTERS = ("set_device", "set_device_index", "CUDA_VISIBLE_DEVICES", "set_default_device", "cuda.device(")
# What mentions them and sets no process's own device: comments, and several GPUs that every process is shown alike.
IDLE = re.compile(r"""^[ \t]*\#[^\n]*$|CUDA_VISIBLE_DEVICES(["']\])?[ ]*=[ ]*["']?\d+([ ]?,[ ]?\d+)+""", re.MULTILINE)

# The events that may name a device.
EVENTS = ("device", "move", "batch", "place", "wrap", "collective")
PLAIN = "goes through GPU 0 on every rank: call torch.cuda.set_device(local_rank) first"
MOVES = ("device", "to", "cuda", "DistributedDataParallel", "DDP")

# A program that shows each process its own GPUs alone, by numbers that it works out: to each they begin with 0.
PICKED = re.compile(r"""environ\[["']CUDA_VISIBLE_DEVICES["']\]\s*=(?!=)[^\n]*(rank|range\()""", re.IGNORECASE)
GLOBAL = "takes the global rank for the device, which a second machine has no device for: use LOCAL_RANK"
LEFT = "torchrun passes no --local_rank, so that every rank uses GPU 0: read os.environ['LOCAL_RANK']"
# The rank, as launchers call it that may show each process a GPU of its own, and words for a place on a machine.
BOUND = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL = re.compile(r"LOCAL_?(RANK|ID)")
# What starts the processes, or chooses their devices.
STARTERS = Words(r"launch|init|setup|set_up|dist|spawn", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks at every event that names a device or moves something to one, where all ranks come to it."""
    if not view.distributed or any(map(picks, view.project.family(view.module))):
        return
    chosen = any(map(sets, view.project.family(view.module))) or view.hidden(STARTERS)
    events, done = placed(view), set[ast.AST]()
    own = one_gpu_each(view)
    for site, found in events.items():
        message = ("" if own else fixed(view, site)) or ("" if chosen else bare(view, site))
        if (
            message
            and not has_single_device(view, site)
            and (on_every_rank(view, site, found) or handed_to_all(view, site))
        ):
            place = made_at(view, site)
            if place not in done:
                yield Found(place, message)
            done |= {place, site.scope.node}
    if not chosen and view.gpu:
        yield from batches(view, events, done)
        yield from objects(view, events)
    if not view.cpu_only:
        yield from by_global_rank(view, events)
        yield from by_default(view, events)


def one_gpu_each(view: View) -> bool:
    """Whether SLURM or MPI starts the processes and may show each its own GPU alone: nothing asks for a local rank."""
    texts = [member.text for member in view.project.family(view.module)]
    started = any(word in text for word in BOUND for text in texts)
    return started and not any(LOCAL.search(text) for text in texts)


def by_default(view: View, events: dict[Site, list[Event]]) -> Iterator[Found]:
    """Yield the option of a local rank that torchrun, for which a file is written, leaves at its default."""
    text = view.module.source.text
    if "torchrun" not in text or "distributed.launch" in text or view.effects.mentioned(view.module, "LOCAL_RANK"):
        return
    used = (index_of(view, site) for site, found in events.items() if on_every_rank(view, site, found))
    chosen = any(isinstance(number, ast.Attribute) and number.attr == "local_rank" for number in used)
    for site in view.sites("add_argument") if chosen else ():
        named = {constant(value) for value in site.call.args} & {"--local_rank", "--local-rank"}
        if named and constant(keyword(site.call, "default")) == 0:
            yield at(site, LEFT)


def placed(view: View) -> dict[Site, list[Event]]:
    """The calls of a file that may name a device, with their events, in the order of the file."""
    found: dict[Site, list[Event]] = {}
    for run in runs(view):
        for event in run.of(*EVENTS):
            if event.module is view.module and event.mark.site is not None:
                found.setdefault(event.mark.site, []).append(event)
    return dict(sorted(found.items(), key=lambda pair: (pair[0].line, pair[0].call.col_offset)))


def on_every_rank(view: View, site: Site, events: list[Event]) -> bool:
    """Whether all ranks come to a call, on one of the ways that lead to it."""
    return view.ranks.every(site.stmt, site.scope) and not all(sides(view, event) for event in events)


def on_several(view: View, site: Site, events: list[Event]) -> bool:
    """Whether all ranks, or all but the main one, come to a call."""
    kept_out = all(any(side == 1 for _, side in sides(view, event)) for event in events)
    return view.ranks.several(site.stmt, site.scope) and not kept_out


def objects(view: View, events: dict[Site, list[Event]]) -> Iterator[Found]:
    """Yield the collectives of objects, which nccl sends through the process's device."""
    if view.effects.mentioned(view.module, "nccl") and not view.effects.mentioned(view.module, "device_id="):
        for site, found in events.items():
            of_torch = site.name in OBJECTS and view.full(site).startswith("torch.distributed")
            if of_torch and on_every_rank(view, site, found):
                yield at(site, PLAIN)


@kept
def picks(module: Module) -> bool:
    """Whether a file shows each process its own GPUs alone."""
    return "CUDA_VISIBLE_DEVICES" in module.text and PICKED.search(module.text) is not None


@kept
def sets(module: Module) -> bool:
    """Whether a file may set each process's own device."""
    if not any(word in module.text for word in SETTERS):
        return False
    text = IDLE.sub("", module.text)
    return any(word in text for word in SETTERS)


def handed_to_all(view: View, site: Site) -> bool:
    """Whether the device is put on an object that is handed to every spawned process (`args.device = ...; spawn(main,
    args=(args,))`), which nothing changes there.
    """
    keys = [bind.key for bind in site.scope.bound(site.stmt) if "." in bind.key]
    if site.name != "device" or not keys:
        return False
    for start in site.scope.named("spawn"):
        given = keyword(start.call, "args")
        if given is not None and keys[0].split(".")[0] in set(idents(given)):
            name = keys[0].split(".")[-1]
            return any(
                name == last(value) and view.kinds.is_model(moved.receiver, moved.scope)
                for function in view.calls.runs(start)
                for moved in function.named("to")
                for value in moved.call.args[:1]
                if not any(key.split(".")[-1] == name for key in function.binds)
            )
    return False


def made_at(view: View, site: Site) -> ast.AST:
    """Where the device of a move is made that is the same on every rank, if the file shows it; else the move."""
    given = site.call.args[0] if site.name == "to" and site.call.args else None
    if isinstance(given, ast.Name | ast.Attribute):
        wanted = "cuda" if plain(view, given, site.scope) else same_for_all(view, given, site.scope)
        for origin in view.origins.of(given, site.scope) if wanted else ():
            if origin.scope.module is view.module and wanted in strings(origin.node):
                return origin.node
    return site.call


def batches(view: View, events: dict[Site, list[Event]], done: set[ast.AST]) -> Iterator[Found]:
    """A tensor that goes to "cuda" without a number in every step, where nothing says which: the first of each function
    of which nothing is told, and each device that is made so.
    """
    for site, found in events.items():
        if site.name not in ("cuda", "to") or not goes_to_plain(view, site) or view.full(site):
            continue
        often = site.scope.name != "forward" and any(event.loops for event in found)
        if often and on_every_rank(view, site, found) and not view.on_cpu(site) and not placed_before(view, site):
            place = made_at(view, site)
            told = site.scope.node if place is site.call else place
            if told not in done:
                yield Found(place, PLAIN)
            done.add(told)


def goes_to_plain(view: View, site: Site) -> bool:
    """Whether a call moves something to "cuda" without a number, to a device that this file makes if it has a name."""
    if site.receiver is None:
        return False
    if site.name == "cuda":
        return not site.call.args and not site.call.keywords
    given = site.call.args[0] if site.call.args else None
    if isinstance(given, ast.Name | ast.Attribute):
        return plain(view, given, site.scope) and made_at(view, site) is not site.call
    return constant(given) == "cuda"


def by_global_rank(view: View, events: dict[Site, list[Event]]) -> Iterator[Found]:
    """A device chosen by the rank among all machines: where the process's device is set, else the first place of each
    function.
    """
    done: set[Scope] = set()
    own = view.ranks.programs.spawned(view.module) is not None  # which counts its processes itself: from 0 on a node

    def is_wrong(number: ast.expr, scope: Scope) -> bool:
        """Whether a number is that of all nodes' processes; where the script starts them, one that it works out."""
        counted = any(over_nodes(origin.node) for origin in view.origins.of(number, scope))
        return is_global(view, number, scope) and (counted or not own)

    for names in (("set_device", "set_device_index"), MOVES):
        told = [pair for pair in events.items() if pair[0].name in names] if not done else []
        for site, found in told:
            if site.scope in done or not on_several(view, site, found):
                continue
            number = index_of(view, site)
            if number is not None and is_wrong(number, site.scope):
                done.add(site.scope)
                yield Found(renamed(number, site) or site.call, GLOBAL)
    for scope in view.scopes if not done and "cuda:" in view.module.text else ():
        for bind in (bind for binds in scope.binds.values() for bind in binds):  # `device = f"cuda:{rank}"`, handed on
            number = after_cuda(bind.value) if bind.how == "assign" and not bind.path else None
            if (
                number is not None
                and RANK.search(last(number))
                and view.ranks.several(bind.stmt, scope)
                and is_wrong(number, scope)
            ):
                yield Found(bind.stmt, GLOBAL)


def renamed(node: ast.expr, site: Site) -> ast.stmt | None:
    """Where a function gives another name to the number of its device (`device = rank`), or makes its name of it."""
    binds = site.scope.binds.get(node.id, []) if isinstance(node, ast.Name) else []
    if len(binds) != 1 or (not isinstance(binds[0].value, ast.Name) and after_cuda(binds[0].value) is None):
        return None
    return binds[0].stmt


def fixed(view: View, site: Site) -> str:
    """What is wrong with a call that names GPU 0 (or another number)."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.IfExp) and constant(first.orelse) == "cpu":
        first = first.body
    text = certain(view, first, site.scope)
    if site.name == "device" and text == "cuda" and len(site.call.args) == 2 and view.full(site) == "torch.device":
        index = certain(view, site.call.args[1], site.scope)
        text = f"cuda:{index}" if isinstance(index, int) else text  # `torch.device("cuda", 0)`
    if site.name in ("device", "to") and numbered(text) and not chosen_by_test(site.stmt, first):
        if site.name == "device" and is_default(view, site):
            return ""
        return f"every rank uses '{text}': use the local rank, f\"cuda:{{local_rank}}\""
    if (
        site.name in ("set_device", "set_device_index")
        and isinstance(text, int)
        and "cuda" in ast.unparse(site.call.func)
    ):
        return f"every rank uses GPU {text}: pass the local rank"
    if site.name == "to" and isinstance(first, ast.Name | ast.Attribute):
        text = same_for_all(view, first, site.scope) if view.kinds.is_model(site.receiver, site.scope) else ""
        return f"every rank uses '{text}': use the local rank, f\"cuda:{{local_rank}}\"" if text else ""
    if site.name == "cuda" and isinstance(text, int) and view.kinds.is_model(site.receiver, site.scope):
        return f"every rank uses GPU {text}: pass the local rank"
    where = constant(keyword(site.call, "map_location"))
    if site.name == "load" and isinstance(where, str) and where.startswith("cuda:"):
        return f"every rank loads onto '{where}': load onto 'cpu' or the rank's own device"
    given = keyword(site.call, "device")
    if numbered(constant(given)) and not chosen_by_test(site.stmt, given):
        return f"every rank uses '{constant(given)}': use the local rank, f\"cuda:{{local_rank}}\""
    ids = keyword(site.call, "device_ids")
    number = certain(view, ids.elts[0], site.scope) if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    return f"every rank uses GPU {number}: pass device_ids=[local_rank]" if isinstance(number, int) else ""


def certain(view: View, node: ast.expr | None, scope: Scope) -> object:
    """The constant that a device or its number is: written out, behind "cuda:", or under a name that has no other."""
    number = after_cuda(node)
    if number is not None:
        found = certain(view, number, scope)
        return f"cuda:{found}" if isinstance(found, int) else None
    if not isinstance(node, ast.Name):
        return constant(node)
    binds = view.origins.binds(node.id, scope, node.lineno)  # none for a parameter, which each process gets another of
    values = {constant(bind.value) if bind.how == "assign" and not bind.path else None for bind, _ in binds}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def bare(view: View, site: Site) -> str:
    """A move to "cuda" without a number, where nothing chose the rank's device."""
    if site.name == "cuda" and not site.call.args and not site.call.keywords and site.receiver is not None:
        moved = moves_model(view, site) and not view.full(site)
    else:
        moved = site.name == "to" and bool(site.call.args) and plain(view, site.call.args[0], site.scope)
        moved = moved and moves_model(view, site)
    moved = moved and not placed_before(view, site)
    return "moves to GPU 0 on every rank: call torch.cuda.set_device(local_rank) first" if moved else ""


def moves_model(view: View, site: Site) -> bool:
    """Whether a move is of a model, or gives one its name (`model = resnet50().cuda()`)."""
    made = isinstance(site.receiver, ast.Call)
    names = [b.key for b in site.scope.bound(site.stmt) if b.value is site.call and b.how == "assign"] if made else []
    return view.kinds.is_model(site.receiver, site.scope) or any(MODEL.search(name.split(".")[-1]) for name in names)


RULE = Rule(
    code="LS007",
    name="fixed device",
    what=(
        "Code that every rank runs names a fixed GPU (`cuda:0`, `set_device(0)`), takes the global rank for the "
        "device's number, or uses plain `cuda` where nothing chose the rank's own."
    ),
    why=(
        "All processes of a machine share one GPU, which runs out of memory while the others idle; NCCL refuses "
        "two ranks on one device."
    ),
    bad="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model):
    dist.init_process_group("nccl")
    device = torch.device("cuda:0")
    model = DDP(model.to(device))
    dist.destroy_process_group()
""",
    good="""
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(model.cuda(), device_ids=[local_rank])
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Use the device of the local rank: torch.cuda.set_device(local_rank)",
    moot=frozenset(
        {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl", "horovod"}
    ),
    note=(
        "A device that has a name is told once, where the file makes it, else where it is used. It is also told of "
        "helpers that every step calls and of any call's `device=`. Silent where something sets each process's own "
        "device (a Trainer's arguments do) or shows it its own GPUs alone, and for the global rank where the script "
        "itself starts the processes."
    ),
)
