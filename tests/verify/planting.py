"""Many planted runs in one start of processes, each compared with one single process."""

import dataclasses

from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.verify.compare import first_difference, traces_of
from lockstep.verify.faults import fault
from lockstep.verify.request import REFERENCE, Combination, VerifyRequest, reference_specs, run_spec
from lockstep.verify.verification import LocalExecutor, measured_rounding
from lockstep.verify.worker import read_trace

STEPS, RESUME, AT = 4, 2, 1


def settings(**changes):
    optim = Optim(warmup_steps=2, clip=0.5)
    given = {"batch_size": 8, "lr": 0.01, "timeout": 60.0, "device": "cpu", "precision": "float64", "optim": optim}
    return Config(**{**given, **changes})


def first_differences(task, config, folder, names, engines=("ddp",), world_size=2, **degrees):
    """Return {(fault, engine): the first difference or None}.

    The fault "" is a healthy run, and "" with "single" the process again. A fault that the single process has too is
    compared with one of its own.
    """
    apart = [name for name in names if fault(name).everywhere]
    others = [name for name in names if name not in apart]
    for name in apart:
        (folder / name).mkdir()
    each = [_run_and_compare(task, config, folder / name, [name], engines, world_size, degrees) for name in apart]
    rest = _run_and_compare(task, config, folder, others, engines, world_size, degrees)
    return {place: difference for part in (*each, rest) for place, difference in part.items()}


def _run_and_compare(task, config, folder, names, engines, world_size, degrees):
    lists = {name: (degree,) for name, degree in degrees.items()}
    request = VerifyRequest(config, task, steps=STEPS, resume_at=RESUME, plant_at=AT + 1, **lists)
    executor = LocalExecutor(config, folder)
    executor.run(reference_specs(request, folder, fault(names[0]), compiled=False))
    reference = read_trace(folder, "reference", 1)[0]
    measured = measured_rounding(request, executor, fault(names[0]), reference)

    def planted(name, one):
        made = run_spec(request, one, folder, fault(name), reference["coarsest"], measured)
        return dataclasses.replace(made, key=f"{one.key}-{name or 'healthy'}")

    again = planted("", REFERENCE)
    rows = [Combination(engine, world_size, parallel=Parallel(**degrees)) for engine in engines]
    specs = {(name, row.engine): planted(name, row) for row in rows for name in names}
    executor.run([again])
    executor.run(list(specs.values()))
    differences = {}
    for place, spec in {("", "single"): again, **specs}.items():
        traces = read_trace(folder, spec.key, spec.combination.world_size)
        differences[place] = first_difference(traces_of(spec, reference, traces))
    return differences
