"""Many planted runs in one start of processes, each compared with one single process."""

import dataclasses

from lockstep.config import Config, Optim
from lockstep.diagnose.combination import REFERENCE, Combination
from lockstep.diagnose.compare import first_difference
from lockstep.diagnose.executor import Started
from lockstep.diagnose.jobs import job, reference_jobs, traces_of
from lockstep.diagnose.plant import fault
from lockstep.diagnose.trial import read_trace
from lockstep.diagnose.wanted import Wanted

STEPS, RESUME, AT = 4, 2, 1


def settings(**changes):
    optim = Optim(warmup_steps=2, clip=0.5)
    given = {"batch_size": 8, "lr": 0.01, "timeout": 60.0, "device": "cpu", "precision": "float64", "optim": optim}
    return Config(**{**given, **changes})


def found(task, config, folder, names, engines=("ddp",), world_size=2):
    """{(fault, engine): the first difference or None}; "" is a healthy run, and "" with "single" the process again.

    A fault that the single process has too is compared with one of its own.
    """
    apart = [name for name in names if fault(name).everywhere]
    for name in apart:
        (folder / name).mkdir()
    each = [_found(task, config, folder / name, [name], engines, world_size) for name in apart]
    rest = _found(task, config, folder, [name for name in names if name not in apart], engines, world_size)
    return {place: difference for part in (*each, rest) for place, difference in part.items()}


def _found(task, config, folder, names, engines, world_size):
    wanted = Wanted(config, task, steps=STEPS, resume_at=RESUME, plant_at=AT)
    executor = Started(config)
    executor.use(folder)
    executor.run(reference_jobs(wanted, folder, fault(names[0]), compiled=False))
    reference = read_trace(folder, "reference", 1)[0]

    def planted(name, one):
        made = job(wanted, one, folder, fault(name), reference["coarsest"])
        return dataclasses.replace(made, key=f"{one.key}-{name or 'healthy'}")

    alone = planted("", REFERENCE)
    jobs = {(name, engine): planted(name, Combination(engine, world_size)) for engine in engines for name in names}
    executor.run([alone])
    executor.run(list(jobs.values()))
    differences = {}
    for place, one in {("", "single"): alone, **jobs}.items():
        traces = read_trace(folder, one.key, one.combination.world_size)
        differences[place] = first_difference(traces_of(one, reference, traces))
    return differences
