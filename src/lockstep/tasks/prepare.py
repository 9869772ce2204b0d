"""Tokenize a dataset into shards of memory-mapped tokens, in parallel processes.

    prepare_shards(job, tokenizer, processes=8, say=print)      # lockstep data prepare wiki/ ... --out wiki-tokens
    corpus, index = open_shards("wiki-tokens", packing)         # lockstep train --dataset-name wiki-tokens

A shard holds the samples of a range of the data, in the files of `token_store`. Data, tokenizer and flags alone decide
its content, never the number of processes. `NAME.json` of a shard is written last and has its counts and checksums:
a second call writes only what is missing. `tokens.json` is written when all shards are there.
"""

import concurrent.futures
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from lockstep.config.fields import is_hub_name
from lockstep.errors import ConfigError, DataError
from lockstep.files import bytes_text, storage_error, sync, write_whole
from lockstep.models.hf import HubTokenizer
from lockstep.text.cache import alone
from lockstep.text.corpus import ByteBPE
from lockstep.text.documents import Tokenizer
from lockstep.text.hub import DataRequest, DocumentRanges, file_digest, open_ranges
from lockstep.text.token_store import (
    Packing,
    TokenCorpus,
    TokenizerToTrain,
    begin_corpus,
    check_split,
    write_split,
)

__all__ = [
    "INDEX",
    "PrepareJob",
    "check_shards",
    "describe_index",
    "is_prepared",
    "named_tokenizer",
    "open_shards",
    "prepare_shards",
    "read_index",
    "sample_text",
    "trained_size",
]


INDEX = "tokens.json"
# A lockstep that reads another format refuses the shards.
_FORMAT = "lockstep tokens 2"
_JOB = "job.json"
# Folder of the tokenizer's files.
_TOKENIZER = "tokenizer"
# One token for every byte, and the separator.
_MIN_VOCABULARY = 257
_SPLITS = ("train", "evaluation")
# Seconds between two lines of progress.
_LINE_SECONDS = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """Settings of `lockstep data prepare`.

    Attributes:
        request: the data.
        packing: how documents become samples; not "blocks", whose remainders depend on the ranges.
        shard_size: bytes of data in a shard.
        tokenizer: a tokenizer's name or folder on the hub, or "train:VOCAB".
        trust_remote_code: run the Python code that comes with it.
        folder: to write.
        cache: folder for the rows of data files as memory-mapped tables.
    """

    request: DataRequest
    packing: Packing
    shard_size: int
    tokenizer: str
    trust_remote_code: bool
    folder: Path
    cache: Path


class _Shard(NamedTuple):
    """A shard to write: range `number` of a split."""

    split: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


def is_prepared(name: str) -> bool:
    """Whether a path is a folder that `prepare_shards` wrote or has begun to write."""
    folder = Path(name).expanduser()
    return (folder / INDEX).is_file() or (folder / _JOB).is_file()


def prepare_shards(
    job: PrepareJob, tokenizer: Tokenizer | TokenizerToTrain, *, processes: int, say: Say
) -> dict[str, Any]:
    """Write the shards that are missing, then the index.

    Args:
        tokenizer: the one that `job` names, or the size of one to train on the training split.
        processes: that tokenize; 1: only this one.
        say: gets lines about the progress.

    Returns:
        The index.

    Raises:
        ConfigError: the folder has shards of other settings, or cannot be written.
        DataError: no such data, or data that cannot be tokenized; a process was killed.
    """
    folder = job.folder
    with _explain_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, say, str(folder)):
            return _prepare(job, tokenizer, processes, say)


def _prepare(job: PrepareJob, tokenizer: Tokenizer | TokenizerToTrain, processes: int, say: Say) -> dict[str, Any]:
    folder = job.folder
    ranges = _open_data(job, say)
    if ranges.note:
        say(ranges.note)
    key = _key(job, ranges, tokenizer)
    _check_folder(folder, key)
    if (folder / INDEX).is_file():
        say(f"{folder} is complete: nothing to do")
        return read_index(folder)
    facts = _begin(job, ranges, tokenizer, key, say)
    shards = []
    for split in _SPLITS:
        for number in range(len(getattr(ranges, split))):
            shards.append(_Shard(split, number))
    # A restart keeps the shards that an earlier call finished.
    written = {}
    for shard in shards:
        if facts_of_shard := _read_facts(folder, shard):
            written[shard] = facts_of_shard
    missing = []
    for shard in shards:
        if shard not in written:
            missing.append(shard)
    if written:
        say(f"{len(written)} of {len(shards)} shards are there already")
    progress = _ProgressLines(len(shards), len(missing), say)
    for shard, counts in _write_all(job, facts, missing, processes):
        written[shard] = counts
        progress.add(counts)
    return _finish(job, ranges, facts, written)


def _open_data(job: PrepareJob, say: Say) -> DocumentRanges:
    return open_ranges(job.request, job.packing.fraction, job.shard_size, job.cache, say)


@lru_cache(maxsize=1)
def _open(job: PrepareJob) -> tuple[DocumentRanges, Tokenizer]:
    """Open data and tokenizer once in a process."""
    return _open_data(job, lambda line: None), _stored_tokenizer(job.folder, job.trust_remote_code)


def _stored_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """Open the tokenizer that is stored with the shards."""
    tokenizer_folder = folder / _TOKENIZER
    if (tokenizer_folder / "tokenizer.json").is_file() and not (tokenizer_folder / "tokenizer_config.json").is_file():
        return ByteBPE.load(tokenizer_folder / "tokenizer.json")
    return HubTokenizer(str(tokenizer_folder), trust_remote_code=trust_remote_code, cache=folder, say=lambda line: None)


def trained_size(tokenizer: str) -> int:
    """Return VOCAB of "train:VOCAB"; 0 for any other text.

    Raises:
        ConfigError: VOCAB is no number, or too small.
    """
    prefix, colon, size = tokenizer.partition(":")
    if prefix != "train" or not colon:
        return 0
    if not size.isascii() or not size.isdigit() or int(size) < _MIN_VOCABULARY:
        raise ConfigError(
            f"--tokenizer {tokenizer}: the number of tokens must be at least {_MIN_VOCABULARY}, as in train:8192"
        )
    return int(size)


def named_tokenizer(name: str, trust_remote_code: bool, cache: Path, say: Say) -> Tokenizer | TokenizerToTrain:
    """Open the tokenizer of --tokenizer.

    Raises:
        ConfigError: there is none, or "train:VOCAB" is too small.
    """
    if size := trained_size(name):
        return TokenizerToTrain(size)
    if not is_hub_name(name) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"--tokenizer {name}: no such folder; use a folder, OWNER/NAME on the hub, or train:VOCAB")
    return HubTokenizer(name, trust_remote_code=trust_remote_code, cache=cache, say=say)


def _key(job: PrepareJob, ranges: DocumentRanges, tokenizer: Tokenizer | TokenizerToTrain) -> dict[str, Any]:
    """Return everything that decides the content of the shards."""
    packing = asdict(job.packing)
    # Windows of any length share the files.
    if job.packing.kind == "stream":
        del packing["seq_len"]
    trained = isinstance(tokenizer, TokenizerToTrain)
    return {
        "format": _FORMAT,
        "data": ranges.digest,
        "tokenizer": job.tokenizer if trained else getattr(tokenizer, "fingerprint", ""),
        "packing": packing,
        "shard_size": job.shard_size,
    }


# The flags to name in a message, for each entry of a job's key.
_LABELS = {
    "format": "format",
    "data": "data",
    "tokenizer": "--tokenizer",
    "packing": "--packing, --seq-len, --evaluation or --labels",
    "shard_size": "--shard-mib",
}


def _check_folder(folder: Path, key: dict[str, Any]) -> None:
    """Raise ConfigError unless the folder is new, or has shards of the same job."""
    try:
        other = json.loads((folder / _JOB).read_bytes())["key"]
    except FileNotFoundError:
        names = sorted(path.name for path in folder.iterdir())
        if names:
            raise ConfigError(f"--out {folder}: the folder is not empty (it has {names[0]}); give a new one") from None
        return
    except (ValueError, KeyError):
        raise ConfigError(f"--out {folder}: its {_JOB} is damaged; remove the folder") from None
    differing = []
    for name, label in _LABELS.items():
        if other.get(name) != key[name]:
            differing.append(label)
    if differing:
        raise ConfigError(
            f"--out {folder}: it has shards of another job (different: {', '.join(differing)}); give a new folder, or "
            "remove this one"
        )


def _begin(
    job: PrepareJob, ranges: DocumentRanges, tokenizer: Tokenizer | TokenizerToTrain, key: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Store the tokenizer and the facts that all shards share, and return these."""
    folder = job.folder
    if (folder / _JOB).is_file():
        facts: dict[str, Any] = json.loads((folder / _JOB).read_bytes())["facts"]
        return facts
    tokenizer_folder = folder / _TOKENIZER
    tokenizer_folder.mkdir(exist_ok=True)
    known, facts = begin_corpus(ranges.train, ranges.prompts, tokenizer, job.packing, tokenizer_folder, say)
    if isinstance(known, HubTokenizer):
        known.save(tokenizer_folder)
    facts |= {"tokenizer": getattr(known, "fingerprint", ""), "named": job.tokenizer}
    write_whole(folder / _JOB, json.dumps({"key": key, "facts": facts}, indent=2) + "\n")
    return facts


def _write_all(
    job: PrepareJob, facts: dict[str, Any], shards: list[_Shard], processes: int
) -> Iterator[tuple[_Shard, dict[str, Any]]]:
    """Write the shards, and yield each with its counts when it is on disk."""
    if processes == 1 or len(shards) < 2:
        for shard in shards:
            yield shard, _write_shard(job, facts, shard)
        return
    # Spawned, not forked: the tokenizers' threads and the open tables do not survive a fork.
    context = multiprocessing.get_context("spawn")
    count = min(processes, len(shards))
    # One thread for each process, which inherits the variable: the processes share the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(count, mp_context=context, initializer=_init_process) as pool:
        try:
            with _hold_interrupts():
                futures = {}
                for shard in shards:
                    futures[pool.submit(_write_shard, job, facts, shard)] = shard
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that tokenizes was killed, perhaps for memory; start again with fewer --processes than "
                f"{count}: finished shards are kept"
            ) from error
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        finally:
            # Waits for the pool's thread: one that still ends while Python exits prints an error of its own.
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Block Ctrl-C in a context, here and in the processes that start in it.

    It takes effect at the end.
    """
    # Started first: `multiprocessing` unblocks SIGINT when it starts the resource tracker.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_process() -> None:
    """Set up a process that tokenizes, so that Ctrl-C ends it without a message.

    The command itself reports the interruption.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The parent blocks SIGINT while it starts processes, and they inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _write_shard(job: PrepareJob, facts: dict[str, Any], shard: _Shard) -> dict[str, Any]:
    """Write a shard's files, then its facts, and return these."""
    ranges, tokenizer = _open(job)
    documents = getattr(ranges, shard.split)[shard.number]
    # Files get their names when they are complete on disk; the facts follow, and mark the shard as finished.
    work = job.folder / f".{shard.name}.{os.getpid()}"
    work.mkdir(exist_ok=True)
    began = time.perf_counter()
    flags = {"masked": facts["masked"], "prompts": facts["prompts"]}
    try:
        counts = write_split(
            tokenizer, documents, job.packing, work / f"{shard.name}.bin", **flags, progress=lambda _: None
        )
        files = {}
        for path in sorted(work.iterdir()):
            sync(path)
            files[path.name] = {"size": path.stat().st_size, "xxh3_128": file_digest(path)}
            path.replace(job.folder / path.name)
    finally:
        for path in work.iterdir():
            path.unlink()
        work.rmdir()
    sync(job.folder)
    result = {**asdict(counts), "files": files, "seconds": round(time.perf_counter() - began, 3)}
    write_whole(_facts_path(job.folder, shard), json.dumps(result) + "\n")
    return result


def _facts_path(folder: Path, shard: _Shard) -> Path:
    return folder / f"{shard.name}.json"


def _read_facts(folder: Path, shard: _Shard) -> dict[str, Any] | None:
    """Return the facts of a shard whose files are there in full length; else None."""
    try:
        facts: dict[str, Any] = json.loads(_facts_path(folder, shard).read_bytes())
        complete = all((folder / name).stat().st_size == file["size"] for name, file in facts["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    if complete:
        return facts
    return None


class _ProgressLines:
    """Progress lines: shards, tokens, rate and the time that is left."""

    def __init__(self, total: int, missing: int, say: Say) -> None:
        self._total = total
        self._missing = missing
        self._say = say
        self._done = 0
        self._tokens = 0
        self._began = self._last = time.perf_counter()

    def add(self, counts: dict[str, Any]) -> None:
        self._done = self._done + 1
        self._tokens = self._tokens + counts["tokens"]
        current_time = time.perf_counter()
        if current_time - self._last < _LINE_SECONDS and self._done < self._missing:
            return
        self._last = current_time
        seconds = max(current_time - self._began, 1e-9)
        remaining = seconds / self._done * (self._missing - self._done)
        shards = self._total - self._missing + self._done
        if self._done < self._missing:
            rest = f", about {_duration(remaining)} left"
        else:
            rest = ""
        self._say(f"{shards} of {self._total} shards, {self._tokens / seconds:,.0f} tokens/s{rest}")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h"


def _finish(
    job: PrepareJob, ranges: DocumentRanges, facts: dict[str, Any], written: dict[_Shard, dict[str, Any]]
) -> dict[str, Any]:
    """Write the index, and return it."""
    notes = list(facts["notes"])
    index = {"format": _FORMAT, "name": job.request.name, "revision": ranges.revision, **facts}
    index |= {"packing": asdict(job.packing), "shards": {}, "files": {}}
    for split in _SPLITS:
        split_shards = []
        for shard in sorted(written):
            if shard.split == split:
                split_shards.append((shard, written[shard]))
        index["shards"][split] = [shard.name for shard, _ in split_shards]
        for name in ("documents", "tokens", "labels"):
            index[name][split] = sum(counts[name] for _, counts in split_shards)
        for _, counts in split_shards:
            index["files"] |= counts["files"]
        truncated, skipped = (sum(counts[name] for _, counts in split_shards) for name in ("truncated", "skipped"))
        notes += [f"{truncated} examples of the {split} split truncated to --seq-len {job.packing.seq_len}"] * (
            truncated > 0
        )
        notes += [f"{skipped} examples of the {split} split skipped: no label within --seq-len"] * (skipped > 0)
    index["notes"] = notes
    index["fingerprint"] = xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())
    # A stream's windows may have any length: a run checks its own.
    if job.packing.kind == "stream":
        packing = replace(job.packing, seq_len=1)
    else:
        packing = job.packing
    corpus = _corpus(job.folder, index, packing, None)
    for split in _SPLITS:
        check_split(job.request.name, split, len(getattr(corpus, split)), index, packing)
    # The index is written last: a folder without it is incomplete.
    write_whole(job.folder / INDEX, json.dumps(index, indent=1) + "\n")
    for shard in written:
        _facts_path(job.folder, shard).unlink()
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of prepared shards.

    Raises:
        DataError: there is none, its format is another version's, or it is damaged.
    """
    label = f"--dataset-name {folder}"
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{label}: its shards are incomplete; finish them with the same `lockstep data prepare ... --out {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{label}: cannot read {INDEX}: {error}; prepare the data again") from error
    if index.get("format") != _FORMAT:
        raise DataError(
            f"{label}: {INDEX} has the format {index.get('format')!r}, not {_FORMAT!r}; use the lockstep that wrote it"
        )
    return index


def open_shards(name: str, packing: Packing) -> tuple[TokenCorpus, dict[str, Any]]:
    """Open prepared shards.

    Args:
        name: the value of --dataset-name, a folder.
        packing: as the run's flags have it.

    Returns:
        The corpus, and the index.

    Raises:
        DataError: the shards are incomplete or damaged, or were prepared with other flags.
    """
    folder = Path(name).expanduser()
    index = read_index(folder)
    stored = Packing(**index["packing"])
    if stored.kind == "stream":
        stored = replace(stored, seq_len=packing.seq_len)
    if (stored.kind, stored.seq_len) != (packing.kind, packing.seq_len):
        raise DataError(
            f"--dataset-name {name}: prepared for --data.packing {stored.kind} --seq-len {stored.seq_len}; "
            "give these flags, or prepare the data again"
        )
    if problem := next(iter(check_shards(folder, index, contents=False)), ""):
        raise DataError(f"--dataset-name {name}: {problem}")
    corpus = _corpus(folder, index, stored, _stored_tokenizer(folder))
    for split in _SPLITS:
        check_split(name, split, len(getattr(corpus, split)), index, stored)
    return corpus, index


def _corpus(folder: Path, index: dict[str, Any], packing: Packing, tokenizer: Tokenizer | None) -> TokenCorpus:
    return TokenCorpus(folder, index, tokenizer, packing)


def check_shards(folder: Path, index: dict[str, Any], *, contents: bool) -> Iterator[str]:
    """Yield a line for each damaged file.

    Args:
        contents: compare checksums too, which reads everything.
    """
    for name, file in index["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            yield f"{name}: {error.strerror}; copy it again, or prepare the data again"
            continue
        if size != file["size"]:
            yield f"{name} has {size:,} bytes instead of {file['size']:,}; copy it again, or prepare the data again"
        elif contents and file_digest(path) != file["xxh3_128"]:
            yield f"{name} was changed: its checksum differs; copy it again, or prepare the data again"


@contextmanager
def _explain_error(folder: Path) -> Iterator[None]:
    """Turn an error of the storage into one line, in a context."""
    try:
        yield
    except OSError as error:
        if known := storage_error(error):
            raise known from error
        raise ConfigError(
            f"--out {folder}: {error.strerror or error}; make room or fix its permissions, then start again: finished "
            "shards are kept"
        ) from error


def describe_index(index: dict[str, Any]) -> list[str]:
    """Return lines about prepared shards."""
    packing = index["packing"]
    if packing["kind"] == "stream":
        length = ""
    else:
        length = f", --seq-len {packing['seq_len']}"
    lines = [
        f"from {index['name']}" + (f" at {index['revision'][:12]}" if index["revision"] else ""),
        f"vocabulary {index['vocab_size']:,}, packing {packing['kind']}{length}",
    ]
    for split in _SPLITS:
        names = index["shards"][split]
        size = 0
        for name, file in index["files"].items():
            if name.partition(".")[0] in names:
                size += file["size"]
        tokens = index["tokens"][split]
        labels = index["labels"][split]
        if index["masked"]:
            share = f", {100 * labels / max(1, tokens):.0f}% of them learned"
        else:
            share = ""
        plural = "s" * (len(names) != 1)
        lines.append(f"{split}: {tokens:,} tokens{share} in {len(names)} shard{plural} ({bytes_text(size)})")
    return [*lines, *index["notes"]]


def sample_text(folder: Path, index: dict[str, Any], number: int) -> str:
    """Return the text of a training sample; of a stream, a window of 128 tokens.

    Raises:
        ConfigError: there is no such sample.
    """
    packing = Packing(**index["packing"])
    if packing.kind == "stream":
        packing = replace(packing, seq_len=128)
    corpus = _corpus(folder, index, packing, _stored_tokenizer(folder))
    if not 0 <= number < len(corpus.train):
        raise ConfigError(f"--sample {number}: the training split has the samples 0 to {len(corpus.train) - 1}")
    return corpus.decode(corpus.train[number]["input_ids"].tolist())
