"""Copy a run's checkpoints and records to its object store.

A thread does so, and the training never waits for it.

    uploader = Uploader(remote, folder, keep=3, every=0)
    uploader.claim(owner, is_dead, say)     # one run at a time uploads to a URL
    uploader.submit(best=400)               # after each save
    uploader.settle()                       # waits; "" or what is not uploaded
    uploader.close()                        # uploads the last records, and releases the URL

The thread uploads the newest checkpoint first, then older ones that the retention keeps, then records; it removes from
the store what the retention does not keep. After an error it continues at the next save. At its end a run waits while
the store takes what is uploaded, and gives up on a store that takes nothing for `wait` seconds.

The owner's file names the run that uploads to a URL, and the thread changes it every half minute. A store has no
locks: a new run watches the file for longer than that, and is refused if it changes. A run that finds another's name in
the file uploads nothing more. So of two runs that start at the same moment only the last to write the file
uploads; both train.

Where nodes have local folders of their own, each has an uploader for what its ranks wrote. Rank 0's alone owns the URL,
uploads the manifest of a checkpoint once all nodes have uploaded their files, and removes old ones. They exchange
nothing but small files in the store, so no rank waits for another.
"""

import contextlib
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from lockstep.checkpoint.format import MANIFEST
from lockstep.checkpoint.remote import RECORDS, RemoteRun, Say
from lockstep.checkpoint.store import is_marked, kept_steps, list_steps, path_of
from lockstep.errors import CheckpointError, ConfigError, LockstepError, StorageError, error_line
from lockstep.files import bytes_text

__all__ = ["Uploader"]

_LOG = logging.getLogger("lockstep")

OWNER = "owner.json"
# Seconds between two changes of the owner's file.
_BEAT = 30.0
# Seconds to watch another run's file for a change: two beats, and the time of a slow request.
_WATCH = 75.0
# Seconds between two reads of it.
_POLL = 5.0
# Seconds to end an upload in a run that has failed.
_END_SECONDS = 30.0
# Seconds of the wait at the end after which a line reports it.
_QUIET_SECONDS = 10.0


class Uploader:
    """A thread that keeps a run's object store up to date.

    Args:
        remote: the run's folder in the store.
        folder: the run's local folder.
        keep: newest checkpoints to keep there.
        every: also keep steps that are multiples of it; 0: none.
        beat: seconds between two changes of the owner's file.
        wait: seconds that `settle` waits for a store that takes nothing (`--checkpoint.upload-wait`).

    Attributes:
        sending: step of the checkpoint that is being uploaded, which must stay; None: none.
        part: name of this node, if others upload too; "": it uploads all.
        token: of the run that owns the URL, which the other nodes get from rank 0's.
    """

    def __init__(
        self, remote: RemoteRun, folder: Path, *, keep: int, every: int, beat: float = _BEAT, wait: float = math.inf
    ) -> None:
        self._remote = remote
        self._folder = folder
        self._keep = keep
        self._every = every
        self._beat = beat
        self._wait = wait
        self.token = secrets.token_hex(8)
        self._count = 0
        self._owner = ""
        self._is_main = False
        self.part = ""
        # A checkpoint waits for another node.
        self._pending = False
        self._best: int | None = None
        self._marked: dict[int, bool] = {}
        # Step -> checksum of its manifest, because a rollback writes a step again.
        self._uploaded: dict[int, str] = {}
        # All complete checkpoints in the store.
        self._there: set[int] = set()
        self._has_records = True
        self._warned: set[int] = set()
        # Record -> modification time and size when it was uploaded
        self._sent: dict[str, tuple[int, int]] = {}
        self._lost = False
        # The store did not answer in the last round.
        self._is_silent = False
        # `settle` has given up, so the thread makes no more requests.
        self._has_given_up = False
        # What `settle` has reported as missing.
        self._last_report = ""
        # Rounds requested, and rounds made.
        self._requests = 0
        self._done = 0
        self._change = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._beats = threading.Thread()
        self.sending: int | None = None

    # --- ownership

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, for a URL that this run owns or follows."""
        return self._thread is not None

    def claim(self, owner: str, is_dead: Callable[[str], bool], say: Say, *, force: bool = False) -> None:
        """Become the run that uploads to the URL, and start the thread.

        Args:
            owner: describes this process.
            is_dead: whether the process of such a description has certainly ended.
            say: called with a line if another owner must be watched.
            force: this process continues for an owner that was lost: look for no other, and warn in place of an error.

        Raises:
            ConfigError: another run uploads there.
            StorageError: the store does not answer.
        """
        self.own(owner, is_dead, say, force=force)
        self._start()

    def own(self, owner: str, is_dead: Callable[[str], bool], say: Say, *, force: bool = False) -> None:
        """Become the owner of the URL, as `claim`, without the thread.

        Without the thread's beats it lasts for the time of one at most.
        """
        self._owner = owner
        self._is_main = True
        self.token = secrets.token_hex(8)
        try:
            before = None if force else self._remote.read(OWNER)
            other = _owner_of(before)
            if before is not None and other and not is_dead(other):
                seconds = self._beat * _WATCH / _BEAT
                say(f"{self._remote.url} belongs to {other}; watching for {seconds:.0f} s whether it is still running")
                self._watch(before, seconds, other)
            self._beat_once()
            if not self._is_owner():
                raise self._in_use(_owner_of(self._remote.read(OWNER)))
        except LockstepError as error:
            if not force:
                raise
            # The ranks continue, and the thread tries again.
            _LOG.warning("%s", error)

    def follow(self, token: str) -> None:
        """Upload this node's files under the owner's `token`, and start the thread."""
        self.token = token
        self._is_main = False
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-upload", daemon=True)
            self._thread.start()
            self._beats = threading.Thread(target=self._beat_on, name="lockstep-beat", daemon=True)
            self._beats.start()

    def _watch(self, before: bytes, seconds: float, other: str) -> None:
        # A living owner changes its file within this time.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(_POLL, seconds / 10))
            content = self._remote.read(OWNER)
            # The other run has ended.
            if content is None:
                return
            if content != before:
                raise self._in_use(_owner_of(content) or other)

    def _in_use(self, other: str) -> ConfigError:
        return ConfigError(
            f"--save-dir {self._remote.url} is in use by {other}; wait for it, or choose another --experiment-name"
        )

    def _beat_once(self) -> None:
        self._count += 1
        fields = {"owner": self._owner, "token": self.token, "count": self._count}
        self._remote.write(OWNER, json.dumps(fields).encode())

    def _is_owner(self) -> bool:
        return _token_of(self._remote.read(OWNER)) == self.token

    # --- from the run

    def submit(self, best: int | None) -> None:
        """Upload what is new in the folder. Returns at once.

        Args:
            best: step of the best checkpoint; None: there is none.
        """
        with self._change:
            self._best = best
            self._requests += 1
            self._change.notify_all()

    def settle(self, seconds: float = math.inf) -> str:
        """Wait until everything was uploaded or tried; describe the rest, "" for nothing.

        Args:
            seconds: to wait at most, whatever the store takes.
        """
        start = time.monotonic()
        is_said = False
        with self._change:
            self._requests += 1
            target = self._requests
            self._change.notify_all()
            while not (self._done >= target or self._lost or self._has_given_up):
                waited = time.monotonic() - start
                silent = time.monotonic() - max(start, self._remote.heard)
                if silent >= self._wait or waited >= seconds:
                    self._give_up()
                    break
                if waited >= _QUIET_SECONDS and not is_said:
                    is_said = True
                    line = "waiting for uploads to %s; ends after %g s in which it takes nothing (%s)"
                    _LOG.info(line, self._remote.url, min(self._wait, seconds), "--checkpoint.upload-wait")
                self._change.wait(min(1.0, self._wait - silent, seconds - waited))
        self._last_report = self._missing()
        return self._last_report

    def _give_up(self) -> None:
        self._has_given_up = True
        self._remote.abandon()

    def close(self, *, failed: bool = False) -> None:
        """Upload the last records, release the URL and end the thread. Repeatable.

        Args:
            failed: the run has failed: wait only for some seconds.
        """
        if self._thread is None:
            return
        told = "" if failed else self._last_report
        if self._is_silent:
            missing = self._missing()
        else:
            missing = self.settle(_END_SECONDS if failed else math.inf)
        if missing and missing != told:
            _LOG.warning("%s", missing)
        with self._change:
            self._ends = True
            self._change.notify_all()
        self._thread.join(0.0 if self._is_silent or self._has_given_up else _END_SECONDS)
        self._thread = None

    def release(self) -> None:
        """Remove the owner's file, if it has this run's name."""
        if self._is_owner():
            self._remote.discard_files([OWNER])

    def _missing(self) -> str:
        local = set(list_steps(self._folder))
        there = self._there | self._uploaded.keys()
        kept = self._select_kept(local | there, self._is_marked_here)
        steps = sorted(step for step in local & kept if not self._is_uploaded(step))
        if not steps and not self._lost and self._has_records:
            return ""
        if there:
            newest = f"the newest there is of step {max(there)}"
        else:
            newest = "there is none"
        what = ", ".join(path_of(self._folder, step).name for step in steps[-3:]) or "the last records"
        more = f" and {len(steps) - 3} more" if len(steps) > 3 else ""
        if self._has_given_up:
            why = f", which took nothing for {self._wait:g} s (--checkpoint.upload-wait)"
        else:
            why = ""
        return (
            f"not uploaded to {self._remote.url}{why}: {what}{more} ({newest}); they are in {self._folder}: to upload "
            "them, run the same command there"
        )

    # --- the threads

    def _beat_on(self) -> None:
        """Change the owner's file while the other thread uploads.

        An upload may take longer than other runs watch the file.
        """
        while True:
            with self._change:
                if self._change.wait_for(lambda: self._ends or self._lost, self._beat):
                    return
            if self._is_main:
                with contextlib.suppress(StorageError):
                    self._keep_ownership()

    def _run(self) -> None:
        while True:
            with self._change:
                pause = min(_POLL, self._beat) if self._pending else None
                self._change.wait_for(lambda: self._requests > self._done or self._ends, pause)
                target = self._requests
                ends = self._ends
            if ends:
                self._release_at_end()
                return
            try:
                self._round()
            except Exception as error:
                # A bug must not leave the run waiting for its end.
                self._warn(
                    -1, f"uploads to {self._remote.url} failed: {error_line(error)}; tried again at the next save"
                )
            with self._change:
                self._done = target
                self._change.notify_all()

    def _release_at_end(self) -> None:
        """Release the URL, here and not in the run's thread: a store may hang."""
        # It would write the owner's file again.
        self._beats.join()
        if not self._is_main or self._lost or self._is_silent or self._has_given_up:
            return
        try:
            self.release()
        except LockstepError as error:
            _LOG.warning("%s; the next start waits to see that this run has ended", error)

    def _keep_ownership(self) -> bool:
        """Change the owner's file; False if it has another's name now. Raises StorageError."""
        if self._lost:
            return False
        try:
            if not self._is_main:
                return self._is_owner()
            if self._is_owner():
                self._beat_once()
                return True
            other = _owner_of(self._remote.read(OWNER)) or "another run"
        except ConfigError:
            # The store refuses. An upload reports that, with what it could not upload.
            return True
        self._lost = True
        _LOG.warning("%s was taken over by %s; this run uploads nothing more", self._remote.url, other)
        return False

    def _round(self) -> None:
        """Upload checkpoints and records, and remove what the retention does not keep."""
        self._has_records = self._pending = self._is_silent = False
        try:
            if not self._keep_ownership():
                return
            there = self._there = set(self._remote.steps())
            self._uploaded = {step: checksum for step, checksum in self._uploaded.items() if step in there}
            kept = self._select_kept({*list_steps(self._folder), *there}, self._is_marked)
            for step in sorted(kept, reverse=True):
                if not self._upload(step):
                    return
            if self._is_main:
                self._clear(there | self._uploaded.keys())
            self._send_records()
            self._has_records = True
        except (LockstepError, OSError) as error:
            self._is_silent = isinstance(error, StorageError)
            self._warn(-1, f"{error}; tried again at the next save")

    def _clear(self, there: set[int]) -> None:
        """Remove from the store what the retention drops, and unfinished uploads."""
        self._there = there
        # The retention chooses among stored checkpoints only, so a missing one replaces none of them.
        stay = self._select_kept(there, self._is_marked)
        gone = sorted(there - stay)
        leftovers = self._remote.leftovers()
        # Read last, because another node uploads only what rank 0 has published.
        local = set(list_steps(self._folder))
        begun = local if self.part else set()
        self._remote.discard([*gone, *(step for step in leftovers if step not in stay | begun)])
        for step in gone:
            self._uploaded.pop(step, None)

    def _select_kept(self, steps: set[int], marked: Callable[[int], bool]) -> set[int]:
        return kept_steps(sorted(steps), marked, last=self._keep, best=self._best, every=self._every)

    def _is_marked(self, step: int) -> bool:
        if step not in self._marked:
            path = path_of(self._folder, step)
            try:
                self._marked[step] = is_marked(path) if path.is_dir() else bool(self._remote.manifest(step).not_finite)
            except CheckpointError:
                return False
        return self._marked[step]

    def _is_marked_here(self, step: int) -> bool:
        """Return `_is_marked` without the store, which may hang."""
        path = path_of(self._folder, step)
        if path.is_dir():
            return self._is_marked(step)
        return self._marked.get(step, False)

    def _checksum(self, step: int) -> str:
        """Return the checksum of a local checkpoint's manifest; "" without one."""
        try:
            return xxhash.xxh3_64_hexdigest((path_of(self._folder, step) / MANIFEST).read_bytes())
        except OSError:
            return ""

    def _is_uploaded(self, step: int) -> bool:
        return step in self._uploaded and self._checksum(step) in ("", self._uploaded[step])

    def _upload(self, step: int) -> bool:
        """Upload a checkpoint, unless it is there; False if the store does not answer."""
        checksum = self._checksum(step)
        if not checksum or self._uploaded.get(step) == checksum:
            return True
        self.sending = step
        start = time.perf_counter()
        name = path_of(self._folder, step).name
        try:
            size = self._send(step)
        except (LockstepError, OSError) as error:
            # The retention has removed the checkpoint meanwhile.
            if not path_of(self._folder, step).is_dir():
                return True
            self._warn(
                step, f"{name} was not uploaded: {error}; it is in {self._folder}, and is tried again at the next save"
            )
            self._is_silent = isinstance(error, StorageError)
            return not self._is_silent
        finally:
            self.sending = None
        if size is None:
            self._pending = True
            return True
        self._uploaded[step] = checksum
        self._warned -= {step, -1}
        seconds = time.perf_counter() - start
        line = "uploaded %s to %s: %s in %.1f s"
        _LOG.info(line, name, self._remote.url, bytes_text(size), seconds, extra={"only_file": True})
        return True

    def _send(self, step: int) -> int | None:
        """Upload this node's files of a checkpoint; None if it waits for another node's."""
        if self.part:
            return self._remote.upload_part(self._folder, step, self.part, last=self._is_main)
        return self._remote.upload(self._folder, step)

    def _send_records(self) -> None:
        logs = sorted((self._folder / "logs").glob("*.log"))
        records = (*RECORDS, "ended.json", "report.html") if self._is_main else ()
        for name in (*records, *(f"logs/{path.name}" for path in logs)):
            path = self._folder / name
            try:
                status = path.lstat()
                if self._sent.get(name) != (status.st_mtime_ns, status.st_size):
                    self._remote.put(path, name)
                    self._sent[name] = (status.st_mtime_ns, status.st_size)
            except FileNotFoundError:
                continue

    def _warn(self, step: int, line: str) -> None:
        """Warn once about a step, until an upload succeeds, unless `settle` gave up."""
        if self._has_given_up:
            return
        _LOG.warning("%s", line, extra={"only_file": step in self._warned})
        self._warned.add(step)


def _fields_of(data: bytes | None) -> dict[str, object]:
    try:
        fields = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    if isinstance(fields, dict):
        return fields
    return {}


def _owner_of(data: bytes | None) -> str:
    return "".join(character for character in str(_fields_of(data).get("owner", ""))[:300] if character.isprintable())


def _token_of(data: bytes | None) -> str:
    return str(_fields_of(data).get("token", ""))
