"""What runs in the one process that starts the others: with Ray, submitit, a launcher of functions or a command."""

import ast

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import last, strings

__all__ = ["driven"]

# Calls that start the processes of a program, by the packages that they come from.
LAUNCHES = {
    "ray": ("init", "TorchTrainer", "HorovodTrainer", "DistributedTrainableCreator"),
    "accelerate": ("notebook_launcher", "debug_launcher"),
    "torch": ("elastic_launch",),
    "detectron2": ("launch",),
    "fvcore": ("launch",),
    "horovod": ("RayExecutor", "ElasticRayExecutor"),
    "pyspark": ("TorchDistributor",),
    "submitit": ("AutoExecutor", "SlurmExecutor", "LocalExecutor"),
}
# Horovod's own launcher for Spark, whose last name says too little.
RUNS = {"horovod.spark.run", "horovod.spark.run_elastic"}
# Calls that run a command, and the commands that start several processes.
COMMANDS = {"run", "call", "check_call", "check_output", "Popen", "system", "execvp"}
STARTERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate launch",
    "deepspeed --",
    "mpirun",
    "horovodrun",
)
MAX_CALLERS = 20
MAX_DEPTH = 5

NAMES = tuple({name for names in LAUNCHES.values() for name in names} | COMMANDS | {"remote", "run_elastic"})


def driven(calls: Calls, stmt: ast.stmt, scope: Scope, depth: int = 0) -> bool:
    """Whether a statement runs only in the process that starts the others: it stands where they are started, under no
    fewer tests, or in a function that is called only there.
    """
    if not near(calls, scope.module):
        return False
    asked = {(guard.test, guard.when) for guard in guards(stmt, scope.module)}
    starts = launches(calls, scope.module).get(scope, [])
    if any(asked.issuperset((guard.test, guard.when) for guard in guards(s.stmt, scope.module)) for s in starts):
        return True
    if scope.kind != "function" or depth >= MAX_DEPTH:
        return False
    callers = calls.callers(scope)[:MAX_CALLERS]
    direct = (calls.target(site.call, site.scope) is scope for site in callers)
    return bool(callers) and all(direct) and all(driven(calls, s.stmt, s.scope, depth + 1) for s in callers)


@kept
def near(calls: Calls, module: Module) -> bool:
    """Whether any file of a file's programs starts processes so."""
    return any(launches(calls, member) for member in calls.project.users(module))


@kept
def launches(calls: Calls, module: Module) -> dict[Scope, list[Site]]:
    """The calls of a file that start processes, by the scopes that make them."""
    table: dict[Scope, list[Site]] = {}
    for site in module.sites(*NAMES):
        if starts_others(calls, site):
            table.setdefault(site.scope, []).append(site)
    return table


def starts_others(calls: Calls, site: Site) -> bool:
    """Whether a call starts the processes of a program, or the service that will."""
    full = calls.names.qualify(site.call.func, site.scope)
    if full in RUNS or site.name in LAUNCHES.get(full.partition(".")[0], ()):
        return True
    if site.name == "remote":
        made = calls.names.definition(site.receiver, site.scope)
        return made is not None and any(last(item) == "remote" for item in made.decorators)
    if site.name not in COMMANDS or full.partition(".")[0] not in ("subprocess", "os"):
        return False
    return any(starter in " ".join(command(calls, site)) for starter in STARTERS)


def command(calls: Calls, site: Site) -> list[str]:
    """The words of the command that a call runs, as far as they are written out."""
    given = site.call.args[0] if site.call.args else None
    if isinstance(given, ast.Name):
        values = (value for value, _ in calls.values(given.id, site.scope))
        return [text for value in values for text in strings(value)]
    return list(strings(given)) if given is not None and last(given) != "argv" else []
