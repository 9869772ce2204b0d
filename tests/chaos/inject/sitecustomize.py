"""Plants faults in processes of lockstep, for tests alone: Python runs this file at start where it is on PYTHONPATH.

LOCKSTEP_CHAOS='[{"rank": 1, "step": 7, "at": "lockstep.checkpoint.write:write_file", "do": "kill"}]'

rank: which process; step: the first step (0-based) in which it may happen, counted by the exchange; at: the function
that it happens at the entry of; call: the how manieth of its calls counts from then on; attempt: of the launcher's
starts; once: a file that is made when it happens, after which it does not happen again. What can be done is `_DEEDS`.
The product knows nothing of this.
"""

import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time

_BEAT = "lockstep.distributed.exchange:StepExchange.global_items"
_now = {"step": -1}


def _own(number):
    return lambda fault, args: os.kill(os.getpid(), number)


def _raise(fault, args):
    module, _, name = fault.get("error", "RuntimeError").rpartition(":")
    kind = getattr(importlib.import_module(module or "builtins"), name)
    raise kind(fault["errno"], os.strerror(fault["errno"])) if "errno" in fault else kind(fault.get("text", "planted"))


def _flip(fault, args):
    parameter = args[0].parameters[fault.get("parameter", 0)]
    parameter.data.view(-1).view(__import__("torch").int32)[3] ^= 1 << 20


def _spoil(fault, args):
    parameter = args[0].parameters[fault.get("parameter", 0)]
    parameter.data.view(-1)[3] = float("nan")


def _wait(fault, args):
    time.sleep(fault.get("seconds", 3600.0))


def _eat(fault, args):
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 16))


def _argument(fault, args):
    args[fault["position"]] = fault["value"]


def _crash(fault, args):
    __import__("ctypes").string_at(0)


def _exit(fault, args):
    sys.exit(fault.get("code", 1))


def _clock(fault, args):
    true = time.time
    time.time = lambda: true() + fault.get("seconds", 86400.0)


def _nan(fault, result):
    return result * float("nan")


def _other(fault, result):
    return {**result, **fault["value"]} if isinstance(result, dict) else fault["value"]


def _perturbed(fault, model):
    next(model.parameters()).data.add_(1e-3)
    return model


def _kill_worker(fault, args):
    children = __import__("multiprocessing").active_children()
    os.kill(children[0].pid, signal.SIGKILL)


_DEEDS = {
    "killworker": _kill_worker,
    "kill": _own(signal.SIGKILL),
    "killlauncher": lambda fault, args: os.kill(os.getppid(), signal.SIGKILL),
    "stop": _own(signal.SIGSTOP),
    "term": _own(signal.SIGTERM),
    "usr1": _own(signal.SIGUSR1),
    "usr2": _own(signal.SIGUSR2),
    "abort": lambda fault, args: os.abort(),
    "segv": _crash,
    "sysexit": _exit,
    "raise": _raise,
    "flip": _flip,
    "spoil": _spoil,
    "sleep": _wait,
    "eat": _eat,
    "exit": lambda fault, args: os._exit(fault.get("code", 9)),
    "argument": _argument,
    "clock": _clock,
    "chdir": lambda fault, args: os.chdir(fault["path"]),
    "touch": lambda fault, args: open(fault["path"], "w").close(),
}

_RESULTS = {"nan": _nan, "result": _other, "perturb": _perturbed}  # what a function returns, changed


def _mark():
    """When the fault happened, for who measures how long it takes to be noticed."""
    path = os.environ.get("LOCKSTEP_CHAOS_MARK")
    if path:
        with open(path, "a") as file:
            file.write(f"{time.time()}\n")


def _is_first(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _wrapped(function, faults, beats):
    calls = dict.fromkeys(range(len(faults)), 0)

    def call(*args, **kwargs):
        if beats:
            _now["step"] = args[1]
        args, later = [*args], []
        for number, fault in enumerate(faults):
            if _now["step"] < fault.get("step", -1):
                continue
            calls[number] += 1
            if calls[number] != fault.get("call", 1) and not fault.get("always"):
                continue
            if fault.get("once") and not _is_first(fault["once"]):
                continue
            if fault["do"] in _RESULTS:
                later.append(fault)
            else:
                _mark()
                _DEEDS[fault["do"]](fault, args)
        result = function(*args, **kwargs)
        for fault in later:
            result = _RESULTS[fault["do"]](fault, result)
        return result

    call.__name__ = getattr(function, "__name__", "call")
    return call


def _plant(module, faults):
    places = {fault["at"] for fault in faults} | {_BEAT}
    for place in places:
        name, _, path = place.partition(":")
        if name != module.__name__:
            continue
        *outer, last = path.split(".")
        owner = module
        for part in outer:
            owner = getattr(owner, part)
        mine = [fault for fault in faults if fault["at"] == place]
        original = getattr(owner, last)
        wrapped = _wrapped(original, mine, place == _BEAT)
        setattr(owner, last, wrapped)
        if owner is module:  # in a process of tests/warm.py others may have imported it already
            for other in [other for name, other in sys.modules.items() if name.partition(".")[0] == "lockstep"]:
                for key in [key for key, value in vars(other).items() if value is original]:
                    setattr(other, key, wrapped)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, faults):
        self._inner, self._faults = inner, faults

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        _plant(module, self._faults)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, faults):
        self._faults = faults
        self.names = {fault["at"].partition(":")[0] for fault in faults} | {"lockstep.distributed.exchange"}

    def find_spec(self, name, path, target=None):
        if name not in self.names:
            return None
        self.names.discard(name)
        spec = importlib.util.find_spec(name)
        spec.loader = _Loader(spec.loader, self._faults)
        return spec


def _mine(fault):
    rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    times = int(os.environ.get("LOCKSTEP_MEMBER", "").partition(".")[2] or 0)  # how often this process was replaced
    right = fault.get("rank", 0) == int(rank) and fault.get("replaced", 0) in (times, "any")
    return right and fault.get("attempt", 0) in (int(attempt), "any")


def _is_worker():
    """Not the launcher itself, which has no rank."""
    return "RANK" in os.environ or "launch" not in sys.argv


if os.environ.get("LOCKSTEP_CHAOS") and _is_worker():
    found = [fault for fault in json.loads(os.environ["LOCKSTEP_CHAOS"]) if _mine(fault)]
    if found:
        finder = _Finder(found)
        sys.meta_path.insert(0, finder)
        for name in [name for name in finder.names if name in sys.modules]:  # loaded before it could watch
            finder.names.discard(name)
            _plant(sys.modules[name], found)
