"""Would the tests notice? Puts plausible mistakes into the core, one at a time, and runs the tests that matter.

    make mutants
    PYTHONPATH=src:tests python -m mutants.run --only engines --count 3 --seed 7

Mistakes are drawn evenly over the areas, the same for the same seed and sources, and are put into copies of the tree,
--jobs at a time. A mistake is found where a test fails, or hangs, that passes without it; it survives where none does
so within --limit seconds. The files that name its module, or one that imports it, run first, and of them those tests
that tell most in the least time (telling.py). One that does not import is not counted, nor one that stands in equal.txt
with the reason why nobody could notice. Ends with 1 where fewer than 85 % were found.
"""

import argparse
import difflib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mutants.kinds import Mutant, mutants
from mutants.telling import names

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.85  # of the mistakes that count
NOT_COPIED = (".git", ".venv", "outputs", "build", "__pycache__", ".*_cache", "*.egg-info", ".hypothesis")

WHOLE = "test_loop*.py training/test_*.py"
GUARDS = "guards/test_*.py"
# (area, its modules under src/lockstep, the tests that matter to them; patterns of files)
TABLE = [
    ("loop", "lockstep/loop.py training/evaluation.py seeds.py", f"test_parity.py test_world_sizes.py {WHOLE}"),
    ("data", "data/*.py", f"data/*.py test_parity.py {WHOLE} {GUARDS}"),
    ("data", "text/*.py", "text/*.py training/test_hf_run.py"),
    ("engines", "engines/deepspeed/*.py", "engines/test_deepspeed*.py"),
    ("batchnorm", "engines/buffers.py", f"test_batchnorm*.py {WHOLE}"),
    ("parallel", "parallel/*.py engines/mesh_norms.py models/hf_plan.py", "parallel/*.py"),
    ("engines", "engines/*.py engines/*/*.py", f"engines/test_*.py optim/*.py {WHOLE} {GUARDS}"),
    ("checkpoint", "checkpoint/export.py", "test_export.py"),
    ("checkpoint", "checkpoint/*.py", f"checkpoint/*.py engines/test_engine_checkpoints.py {WHOLE} {GUARDS}"),
    (
        "guards",
        "guards/*.py training/step/guards.py training/state/finite.py training/start/resume.py "
        "training/start/consistency.py training/start/datasets.py training/start/shared_folder.py",
        f"{GUARDS} checkpoint/test_checkpoint_finite.py {WHOLE}",
    ),
    (
        "launch",
        "launch/*.py distributed/membership.py distributed/launcher.py distributed/failures.py",
        "launch/*.py test_membership.py test_launcher.py test_lost_peers.py test_handshake.py test_guards_edges.py "
        "test_environment.py test_command.py chaos/*.py",
    ),
    # Those that run traced programs come last: they take seconds each.
    ("trace", "trace/*/*.py", "test_trace_sums.py test_trace_states.py test_trace_normalisation.py trace/*.py"),
    (
        "verify",
        "verify/*.py distributed/spawn.py",
        "verify/*.py test_world_sizes.py test_distributed_helper.py",
    ),
    (
        "exchange",
        "distributed/exchange.py distributed/rows.py distributed/agreement.py distributed/outcomes.py",
        f"distributed/*.py checkpoint/*.py test_muon.py test_engine_muon.py {GUARDS} {WHOLE}",
    ),
    ("recorder", "training/step/recorder.py", WHOLE),
    (
        "run",
        "training/run.py training/state/status.py training/trainer.py training/step/components.py "
        "training/recovery/regroup.py training/start/open_run.py training/state/outputs.py training/inference.py "
        "training/start/consistency.py training/start/datasets.py lockstep/task.py",
        f"{WHOLE} test_task*.py commands/*.py {GUARDS} adapters/test_trainer.py chaos/test_lost_ranks.py",
    ),
    (
        "build",
        "training/start/build.py training/state/parts.py training/state/plan.py training/start/resume.py "
        "training/start/weights.py training/start/load.py",
        f"{WHOLE} commands/*.py test_parity.py engines/test_engine_refusals.py logging/test_sinks_remote.py",
    ),
]


class Site(NamedTuple):
    """A mistake in a file, and the tests that are to notice it."""

    area: str
    path: Path  # from the tree's root
    mutant: Mutant
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """found, survived, uncounted or unsure, and by which test or why."""

    verdict: str
    detail: str


def sites(root: Path, table: list[tuple[str, str, str]]) -> dict[str, list[Site]]:
    """area -> every mistake that can be put into its modules; a module counts in the first row that has it."""
    found, seen = defaultdict(list), set()
    for area, modules, tests in table:
        chosen = [p for pattern in tests.split() for p in sorted((root / "tests").rglob(pattern))]
        names = tuple(dict.fromkeys(str(p.relative_to(root)) for p in chosen if p.name.startswith("test_")))
        for path in (p for pattern in modules.split() for p in sorted((root / "src").rglob(pattern))):
            if path not in seen:
                seen.add(path)
                made = mutants(path.read_text(encoding="utf-8"))
                found[area] += [Site(area, path.relative_to(root), mutant, names) for mutant in made]
    return found


def drawn(found: dict[str, list[Site]], seed: int) -> Iterator[Site]:
    """All mistakes, area after area in turn; in an area a kind is drawn, then one of it. One a line."""
    queues = [_queue(found[area], random.Random(f"{seed} {area}")) for area in found]
    while queues:
        for queue in list(queues):
            site = next(queue, None)
            if site is None:
                queues.remove(queue)
            else:
                yield site


def _queue(all_of_it: list[Site], draw: random.Random) -> Iterator[Site]:
    kinds, lines = defaultdict(list), set()
    for site in all_of_it:
        kinds[site.mutant.kind].append(site)
    for group in kinds.values():
        draw.shuffle(group)
    while kinds:
        kind = draw.choice(sorted(kinds))
        site = kinds[kind].pop()
        if not kinds[kind]:
            del kinds[kind]
        if (site.path, site.mutant.line) not in lines:
            lines.add((site.path, site.mutant.line))
            yield site


def copied(root: Path, folder: Path) -> Path:
    """A copy of the tree, as `folder`/tree."""
    shutil.copytree(root, folder / "tree", ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    return folder / "tree"


class Copy:
    """A copy of the tree, in which tests run with one mistake at a time.

    Args:
        root: of the tree.
        memory: what its tests took and found, for their order; None: what is remembered in the tree.
        hang: seconds after which a test counts as hung.
        limit: seconds after which no further test of a mistake begins: what was not found by then survives.
    """

    def __init__(
        self, root: Path, folder: Path, hang: float = 60.0, limit: float = 300.0, memory: "Memory | None" = None
    ) -> None:
        self.root, self._folder, self._hang, self._limit = copied(root, folder), folder, hang, limit
        shutil.copy(Path(__file__).with_name("telling.py"), folder)  # apart: the tests come from the copy
        self._now = time.time()
        self._healthy: set[str] = set()
        self._broken: list[str] = []
        self._memory = memory or Memory(root)
        files = sorted((self.root / "src").rglob("*.py"))
        self._modules = {path: _module(path.relative_to(self.root)) for path in files}

    def tried(self, site: Site) -> Outcome:
        """What becomes of one mistake."""
        path = self.root / site.path
        before = path.read_text(encoding="utf-8")
        module = _module(site.path)
        self._write(path, site.mutant.put_into(before))
        try:
            code, seen = self._searched(module, site.tests)
        finally:
            self._write(path, before)
        if not seen.get("imports", True):
            return Outcome("uncounted", "does not import")
        if code in (0, 5):
            return Outcome("survived", "" if seen.get("in_time", True) else "its time was up before every test had run")
        test = seen.get("failed")
        if not test:
            return Outcome("unsure", "took too long") if code is None else Outcome("found", f"pytest ended with {code}")
        if test in self._broken:  # a whole file, which cannot be left out
            return Outcome("unsure", test)
        if test not in self._healthy and self._pytest(module, test)[0] != 0:
            self._broken.append(test)  # it fails anyway, and tells nothing
            return self.tried(site)
        self._healthy.add(test)
        self._memory.count(module, test)
        return Outcome("found", test)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._now += 2  # compiled files are told apart by whole seconds
        os.utime(path, (self._now, self._now))

    def _searched(self, module: str, tests: tuple[str, ...]) -> tuple[int | None, dict[str, Any]]:
        """What `_pytest` gives of the files that name the module or one that imports it, or that told of it before, and
        of the others only then."""
        began, telling = time.monotonic(), self._memory.told(module)
        close = [module, *self._near(module)]
        likely = [test for test in tests if test in telling or any(names(self.root / test, each) for each in close)]
        others = [test for test in tests if test not in likely]
        code, seen = self._pytest(module, *likely) if likely else (0, {})
        if code in (0, 5) and others and seen.get("imports", True) and seen.get("in_time", True):
            code, seen = self._pytest(module, *others, spent=time.monotonic() - began)
        return code, seen

    def _near(self, module: str) -> list[str]:
        """The modules that import this one."""
        return [other for path, other in self._modules.items() if other != module and names(path, module)]

    def _pytest(self, module: str, *tests: str, spent: float = 0.0) -> tuple[int | None, dict[str, Any]]:
        """(exit code, None where it took too long; what telling.py saw). `spent`: seconds of the limit."""
        answer = self._folder / "answer.json"
        answer.unlink(missing_ok=True)
        asked = {"module": module, "near": self._near(module), "limit": self._limit - spent, "answer": str(answer)}
        asked["memory"] = self._memory.known
        (self._folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        options = ("-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "telling", f"--timeout={self._hang}")
        broken = [f"--deselect={test}" for test in self._broken]
        kept = ("-m", "not slow and not gpu", f"--basetemp={self._folder / 'tmp'}", *broken)
        code = self._python("-m", "pytest", *options, *kept, *tests)
        seen = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
        self._memory.keep(seen.get("seconds", {}))
        return code, seen

    def _python(self, *command: str) -> int | None:
        """The exit code, None where it took too long."""
        paths = os.pathsep.join([str(self.root / "src"), str(self._folder)])
        environment = os.environ | {"PYTHONPATH": paths, "MUTANTS_ASKED": str(self._folder / "asked.json")}
        with subprocess.Popen(
            [sys.executable, *command], cwd=self.root, env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.wait(self._limit + 2 * self._hang)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest ends what its tests started
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return None


def _module(path: Path) -> str:
    """lockstep.data.sampler of src/lockstep/data/sampler.py"""
    return ".".join(path.with_suffix("").parts[1:])


class Memory:
    """What tests took, and which of them found a mistake in a module: a file, so that the next run is quick at once."""

    def __init__(self, root: Path) -> None:
        self._path, self._lock = root / ".pytest_cache" / "mutants.json", threading.Lock()
        self.known: dict[str, Any] = {"seconds": {}, "found": {}}
        with suppress(OSError, ValueError):
            self.known |= json.loads(self._path.read_text(encoding="utf-8"))

    def keep(self, seconds: dict[str, float]) -> None:
        """The least that each test took: a mistake may make it longer."""
        with self._lock:
            known = dict(self.known["seconds"])
            known |= {test: round(min(took, known.get(test, took)), 2) for test, took in seconds.items()}
            self.known = {**self.known, "seconds": known}
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self.known), encoding="utf-8")

    def told(self, module: str) -> set[str]:
        """The files whose tests found a mistake in the module."""
        return {test.partition("::")[0] for test in self.known["found"].get(module, {})}

    def count(self, module: str, test: str) -> None:
        """A test has found a mistake in a module."""
        with self._lock:
            found = self.known["found"].get(module, {})
            found = {**found, test: found.get(test, 0) + 1}
            self.known = {**self.known, "found": {**self.known["found"], module: found}}


def tried(
    coming: Iterator[Site], copies: list[Copy], count: int, *, listed: bool = False
) -> Iterator[tuple[Site, Outcome]]:
    """The mistakes and what became of them, until `count` of them count; each copy tries one at a time."""
    if listed:
        yield from ((site, Outcome("listed", "")) for site in itertools.islice(coming, count))
        return
    free, running = list(copies), dict[Future[Outcome], tuple[Site, Copy]]()
    with ThreadPoolExecutor(len(copies)) as pool:
        while True:
            while free and len(running) < count and (site := next(coming, None)):
                copy = free.pop()
                running[pool.submit(copy.tried, site)] = site, copy
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                site, copy = running.pop(done)
                free.append(copy)
                count -= done.result().verdict not in ("uncounted", "unsure")
                yield site, done.result()


def difference(root: Path, site: Site) -> str:
    """The lines that the mistake changes."""
    before = (root / site.path).read_text(encoding="utf-8")
    lines = difflib.unified_diff(before.splitlines(), site.mutant.put_into(before).splitlines(), n=0, lineterm="")
    return "\n".join(f"    {line}" for line in lines if line[:2] not in ("--", "++", "@@"))


def key(root: Path, site: Site) -> str:
    """How a mistake is named in equal.txt: `the line as it is -> as the mistake makes it`, in whatever module."""
    changed = [line.strip() for line in difference(root, site).splitlines()]
    old, new = ([line[1:].strip() for line in changed if line[0] == sign] for sign in "-+")
    return f"{' '.join(old)} -> {' '.join(new)}"


def equal(path: Path) -> set[str]:
    """Lines of equal.txt: a mistake, or all of a source's line, or all of a module. The reason stands above (#)."""
    return {line for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"}


def is_known(name: str, module: str, known: set[str]) -> bool:
    """Whether a mistake, as `key` names it, its line or its module (a file's name) cannot be noticed."""
    return not known.isdisjoint((name, name.partition(" -> ")[0], module))


def report(results: list[tuple[Site, Outcome]], seconds: float) -> float:
    """Prints the share by area, and returns the whole."""
    counted = [(site.area, outcome.verdict) for site, outcome in results if outcome.verdict in ("found", "survived")]
    print(f"\n{'area':<12}{'mistakes':>9}{'found':>7}{'share':>7}")
    for area in (*dict.fromkeys(area for area, _ in counted), "all"):
        mine = [verdict for each, verdict in counted if area in (each, "all")]
        share = mine.count("found") / max(len(mine), 1)
        print(f"{area:<12}{len(mine):>9}{mine.count('found'):>7}{share:>7.0%}")
    print(f"in {seconds:.0f} s")
    return share


def main(arguments: list[str] | None = None, root: Path = ROOT, table: list[tuple[str, str, str]] = TABLE) -> int:
    parser = argparse.ArgumentParser(description="Puts plausible mistakes into a copy of the core; do tests notice?")
    parser.add_argument("--count", type=int, default=48, help="mistakes that count (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--only", default="", help="an area, or a module's path: engines, data/sampler.py")
    parser.add_argument("--hang", type=float, default=60.0, help="seconds a test may take (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a mistake (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mistakes tried at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="show what would be tried, and try nothing")
    asked = parser.parse_args(arguments)
    known = equal(Path(__file__).with_name("equal.txt"))
    results, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, memory = copied(root, Path(folder)), Memory(root)  # the tree itself may change meanwhile
        folders = [Path(folder) / str(job) for job in range(asked.jobs)]
        copies = [Copy(root, each, asked.hang, asked.limit, memory) for each in folders]
        areas = {
            area: [s for s in chosen if asked.only in ("", area) or str(s.path).endswith(f"/{asked.only}")]
            for area, chosen in sites(tree, table).items()
        }
        print(f"seed {asked.seed}, {sum(map(len, areas.values()))} possible mistakes", flush=True)
        queue = drawn({a: s for a, s in areas.items() if s}, asked.seed)
        coming = (s for s in queue if not is_known(key(tree, s), s.path.name, known))
        for site, outcome in tried(coming, copies, asked.count, listed=asked.list):
            results.append((site, outcome))
            where = f"{site.path}:{site.mutant.line}"
            print(f"{outcome.verdict:<10}{where}  {site.mutant.kind}  {outcome.detail}", flush=True)
            if outcome.verdict != "found":
                print(difference(tree, site), flush=True)
    if asked.list:
        return 0
    return int(report(results, time.monotonic() - began) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
