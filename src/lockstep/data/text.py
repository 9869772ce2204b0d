"""A text corpus, tokenized once and read from memory-mapped files.

    corpus = prepare("builtin:stdlib", seq_len=256, eval_fraction=0.05, seed=0, cache=None, say=print)
    corpus.train[0]["input_ids"]            # int64 [256]

A prepared corpus is a folder in the cache, named after what it was made from, that is written under another name,
synced and renamed once: it is there and whole, or not there. One process of a machine prepares while others wait for a
file lock, which the system frees when its holder dies, so that no collective is needed.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from lockstep.data.alone import alone
from lockstep.data.corpus import Corpus, Windows
from lockstep.data.sources import Source, Span, find, split
from lockstep.data.tokenize import SETTINGS, ByteBPE
from lockstep.errors import ConfigError, DataError
from lockstep.files import sync
from lockstep.units import bytes_text

__all__ = ["Corpus", "Windows", "default_cache", "prepare"]

_FORMAT = 1  # of the folder; another number is another key
_SPLITS = ("train", "evaluation")


def prepare(
    name: str,
    *,
    seq_len: int,
    vocab_size: int = 4096,
    eval_fraction: float,
    seed: int,
    cache: Path | None,
    say: Callable[[str], None],
) -> Corpus:
    """Opens the corpus `name`, preparing it first where that was not yet done. Any number of processes may call it.

    Args:
        name: "builtin:stdlib", a text file, or a folder of them: see `lockstep.data.sources.find`.
        seq_len: tokens of a sample; not part of what is prepared, so another length uses the same files.
        vocab_size: most tokens to learn, at least 257.
        eval_fraction: part of the text for evaluation, 0 < f < 1; whole files where there are several.
        seed: of the split. Keep it fixed over runs that are to be compared.
        cache: folder for prepared corpora; None is `default_cache()`.
        say: gets a line about what is being done, when it takes time.

    Raises:
        DataError: nothing there, no readable text, text that changed meanwhile, or a split shorter than one window.
        ConfigError: a number out of its range, or a cache that cannot be written.
    """
    if not 0.0 < eval_fraction < 1.0:
        raise ConfigError(f"eval_fraction {eval_fraction} leaves a split empty; give a fraction between 0 and 1")
    if seq_len < 1:
        raise ConfigError(f"--seq-len {seq_len} is less than 1; give at least 1")
    settings = {**SETTINGS, "vocab_size": vocab_size, "eval_fraction": eval_fraction, "seed": seed, "format": _FORMAT}
    sources = find(name)
    key = _key(sources, settings)
    root = cache or default_cache()
    folder = root / f"text-{key}"
    if not _is_whole(folder):  # needs no lock, so a cache that is read-only serves what it has
        try:
            with alone(folder, say, name):
                if not _is_whole(folder):  # the process that held the lock may have done it
                    _prepare(name, sources, settings, folder, say)
        except OSError as error:
            raise ConfigError(
                f"cannot write the cache {root}: {error.strerror or error}; point LOCKSTEP_CACHE to a folder with room"
            ) from error
    return _checked(Corpus(folder, seq_len), name)


def default_cache() -> Path:
    """$LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "lockstep")
    try:
        return Path.home() / ".cache" / "lockstep"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to cache data in; point LOCKSTEP_CACHE to a folder") from error


def _key(sources: list[Source], settings: dict[str, Any]) -> str:
    content = [(source.name, source.digest) for source in sources]
    return xxhash.xxh3_128_hexdigest(json.dumps([settings, content], sort_keys=True).encode())


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / "corpus.json").read_bytes())["sizes"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _prepare(
    name: str, sources: list[Source], settings: dict[str, Any], folder: Path, say: Callable[[str], None]
) -> None:
    """Writes the folder. The caller holds its lock, so whatever else has its name is a dead process's."""
    # The machine is in the name for file systems whose locks do not reach from one machine to another.
    temporary = folder.with_name(f"{folder.name}.{platform.node()}.tmp")
    for dead in (temporary, folder):
        shutil.rmtree(dead, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(name, sources, settings, temporary, say)
        if _key(find(name), settings) != _key(sources, settings):
            raise DataError(f"--dataset-name {name}: its files changed while they were prepared; start again")
        try:
            temporary.rename(folder)
        except OSError:
            if not _is_whole(folder):  # unless another machine was first, with the same content
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    name: str, sources: list[Source], settings: dict[str, Any], folder: Path, say: Callable[[str], None]
) -> None:
    parts = dict(zip(_SPLITS, split(sources, settings["eval_fraction"], settings["seed"]), strict=True))
    unreadable = sum(not source.readable for source in sources)
    size = bytes_text(sum(source.size for source in sources))
    say(f"preparing {name}: {len(sources)} files ({size}), {unreadable} of them empty or not UTF-8 and left out")
    say(f"learning a vocabulary of {settings['vocab_size']} tokens")
    tokenizer = ByteBPE.train(parts["train"], settings["vocab_size"])
    tokenizer.save(folder / "tokenizer.json")
    counts = {part: _write_tokens(tokenizer, spans, folder / f"{part}.bin", part, say) for part, spans in parts.items()}
    facts = {
        "fingerprint": _key(sources, settings),
        "name": name,
        "settings": settings,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "tokens": counts,
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        sync(path)


def _write_tokens(tokenizer: ByteBPE, spans: list[Span], path: Path, part: str, say: Callable[[str], None]) -> int:
    total = max(1, sum(span.stop - span.start for span in spans))
    done, told = 0, 0

    def progress(characters: int) -> None:
        nonlocal done, told
        done += characters
        if 100 * done // total >= told + 25:
            told = min(100, 100 * done // total)
            say(f"tokenizing the {part} split: {told}%")

    with path.open("wb") as file:
        return tokenizer.write(spans, file, progress)


def _checked(corpus: Corpus, name: str) -> Corpus:
    for part, windows in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        if not len(windows):
            raise DataError(
                f"--dataset-name {name}: its {part} split has {windows.tokens} tokens, fewer than one window of "
                f"--seq-len {windows.seq_len} + 1; give more text or a smaller --seq-len"
            )
    return corpus
