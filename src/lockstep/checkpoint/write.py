"""Write checkpoints: all ranks write their share at once, into a temporary folder.

    path = save(run_folder, 500, {"model/weight": tensor, ...}, {"epoch": 1}, world, engine="ddp")

The folder gets its name only when everything is on the disk. The safetensors package's own writer is not used: here one
tensor at a time is in host memory, the checksum is computed on the way, and a full disk is an error, not a bus error.
The pinned host buffers of background saves are here too.
"""

import contextlib
import ctypes
import json
import logging
import math
import mmap
import os
import platform
import secrets
import shutil
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.check import not_finite_line, verify
from lockstep.checkpoint.files import remove, write_file
from lockstep.checkpoint.format import FORMAT, INDEX, MANIFEST, STATE, Manifest, dtype_name, dump, step_name, stored_as
from lockstep.checkpoint.layout import Share, TensorPiece, data_name, gather_stages, in_file_order, share_out
from lockstep.distributed.agreement import LONG, Signs, gather_results, on_all_ranks
from lockstep.distributed.outcomes import compare
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import bytes_text, retry_io, sync
from lockstep.tensors import host_bytes, not_finite

__all__ = [
    "HostBuffer",
    "bytes_of",
    "contiguous_runs",
    "save",
    "span",
    "write_share",
]


# --- host buffers

_LOG = logging.getLogger("lockstep")
# cudaHostRegisterPortable: locked for every device of the process.
_PORTABLE = 1
# Bytes per lock: kernel launches wait for the driver meanwhile.
_SEGMENT = 512 * 2**20
# Threads that touch pages: one alone reaches a fraction of the memory's bandwidth.
_THREADS = 4
# Seconds of a save after which it is reported.
_SLOW = 60.0

# dtype, shape, whether it comes from a CUDA device.
_BufferForm = list[tuple[torch.dtype, torch.Size, bool]]


class HostBuffer:
    """A host buffer that is reused as long as shapes and dtypes stay the same.

    It is page-locked if one of the tensors is on a CUDA device. If the driver refuses, it is used unlocked, and copies
    from a device block their caller.

    Attributes:
        nbytes: of the buffer.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._form: _BufferForm = []
        self._places: list[Tensor] | None = []
        self._release: Any = None
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Allocate the buffer for such tensors in a thread; `places` waits for it.

        Args:
            tensors: of the shapes, dtypes and devices to be saved.
            device: the CUDA device of this process, which a new thread does not have.
        """
        form = _form_of(tensors)
        if self._thread or form == self._form:
            return
        self._drop(form)

        def make() -> None:
            # `places` tries again, and raises the error in the caller.
            with contextlib.suppress(Exception):
                torch.cuda.set_device(device)
                self._make()

        self._thread = threading.Thread(target=make, name="lockstep-pin", daemon=True)
        self._thread.start()

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a host tensor for each of `tensors`.

        If shapes have changed, no copy into earlier ones may be running.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        form = _form_of(tensors)
        if form != self._form or self._places is None:
            self._drop(form)
            self._make()
        assert self._places is not None
        return self._places

    def _drop(self, form: _BufferForm) -> None:
        """Free the buffer before the next one is allocated: never two."""
        self._form = form
        self._places = None
        if self._release:
            self._release()
            self._release = None

    def _make(self) -> None:
        starts = []
        segments = [0]
        end = 0
        for dtype, shape, _ in self._form:
            end = _up(end, dtype.itemsize)
            # A gap, since neither a copy nor a run may span two segments.
            if end - segments[-1] >= _SEGMENT:
                end = _up(end + 1, mmap.PAGESIZE)
                segments.append(end)
            starts.append(end)
            end += _size(dtype, shape)
        lock = any(on_device for _, _, on_device in self._form)
        flat = _memory(end) if lock else torch.empty(end, dtype=torch.uint8)
        parts = []
        for start, stop in zip(segments, [*segments[1:], end], strict=True):
            parts.append(flat[start:stop])
        locked: list[Tensor] = []
        # torch has no annotations for the CUDA runtime.
        runtime: Any = torch.cuda.cudart() if lock else None  # type: ignore[no-untyped-call]
        self._release = weakref.finalize(self, _unlock, runtime, locked)
        # At exit the driver has ended, or frees the memory itself.
        self._release.atexit = False
        for segment in (segment for segment in parts if segment.nbytes and lock):
            _touch(segment)
            if not _lock(runtime, segment):
                break
            locked.append(segment)
        self.nbytes = end
        self._places = [
            flat[start : start + _size(dtype, shape)].view(dtype).view(shape)
            for start, (dtype, shape, _) in zip(starts, self._form, strict=True)
        ]


def contiguous_runs(tensors: Sequence[Tensor], most: int = sys.maxsize) -> list[range]:
    """Group host tensors that follow each other in memory without a gap.

    Args:
        most: maximum bytes of a run of more than one tensor.

    Returns:
        Ranges of indices of `tensors`, all of them in order. One that is not dense host memory is a run by itself.
    """
    begins = list[int]()
    size = 0
    # Where the run would continue: the storage, and the byte in it.
    after: tuple[int, int] | None = None
    for index, tensor in enumerate(tensors):
        storage = tensor.untyped_storage().data_ptr()
        start = int(tensor.storage_offset()) * tensor.itemsize
        dense = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not dense or after != (storage, start) or size + tensor.nbytes > most:
            begins.append(index)
            size = 0
        after = (storage, start + tensor.nbytes) if dense else None
        size = size + tensor.nbytes
    return [range(begin, stop) for begin, stop in pairwise([*begins, len(tensors)])]


def span(run: Sequence[Tensor]) -> Tensor:
    """Return the memory of a run as one tensor of bytes."""
    head = run[0]
    start = head.storage_offset() * head.itemsize
    size = sum(tensor.nbytes for tensor in run)
    return torch.empty(0, dtype=torch.uint8).set_(head.untyped_storage(), start, (size,), (1,))


def _form_of(tensors: Sequence[Tensor]) -> _BufferForm:
    return [(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in tensors]


def _size(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * math.prod(shape)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _memory(nbytes: int) -> Tensor:
    """Map anonymous memory, in huge pages if possible, that forked processes do not inherit.

    A fork would copy its page tables, and before Linux 5.11 its pages too, while the device writes into them.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # The system may lack this advice, which only saves time and memory.
        with contextlib.suppress(AttributeError, OSError):
            mapped.madvise(getattr(mmap, advice))
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _touch(part: Tensor) -> None:
    """Fault in the memory's pages, in several threads without the GIL."""
    step = _up(math.ceil(part.nbytes / _THREADS), 2**21)
    begin = part.data_ptr()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, part.nbytes, step):
            pool.submit(ctypes.memset, begin + start, 0, min(step, part.nbytes - start))


def _lock(runtime: Any, part: Tensor) -> bool:
    """Lock the memory's pages; whether the driver did so."""
    code = int(runtime.cudaHostRegister(part.data_ptr(), part.nbytes, _PORTABLE))
    if not code:
        return True
    with contextlib.suppress(RuntimeError, AssertionError):
        # This clears the error, which the next kernel would raise instead.
        torch.zeros(1, device="cuda")
    _LOG.warning(
        "the driver did not page-lock %d bytes of memory (error %d): a save blocks the loop", part.nbytes, code
    )
    return False


def _unlock(runtime: Any, locked: list[Tensor]) -> None:
    for memory in locked:
        runtime.cudaHostUnregister(memory.data_ptr())
    locked.clear()


# --- checkpoint


def save(
    folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
    world: World,
    *,
    engine: str,
    exempt: Collection[str] = (),
) -> Path:
    """Write the checkpoint of `step` to `folder`/checkpoints. Collective.

    A complete checkpoint of this step is left as it is; a damaged one is replaced.

    Args:
        folder: the run's folder, on a file system that all ranks share; or, by `world.leads`, one on each node, which
            gets the files of its own ranks and the manifest of all.
        step: number of optimizer steps done, >= 0.
        tensors: by global name ("model/blocks.0.weight"), the same names on every rank; plain tensors, equal on all
            ranks, or DTensors; any shape, also (); on the CPU or a device. Those that share their memory are stored
            once.
        state: JSON values (numbers, strings, lists, dicts); rank 0's are stored.
        engine: its name, recorded in the manifest.
        exempt: names of tensors that may have values that are not finite.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a tensor or state that cannot be stored, or the file system refused. On every rank; its files
            are removed and the older checkpoints are unchanged. Or a tensor is not finite: the checkpoint stays for
            inspection, and its manifest marks it as unusable for a resume.
        PeerError: the same, on a rank other than this one.
    """
    stages = gather_stages(tensors, world)  # collective
    share = on_all_ranks(world, lambda: share_out(tensors, world, stages), signs=LONG)  # collective
    return write_share(folder, step, share, state, world, engine=engine, exempt=exempt)


def write_share(
    folder: Path,
    step: int,
    share: Share,
    state: dict[str, Any],
    world: World,
    *,
    engine: str,
    exempt: Collection[str] = (),
) -> Path:
    """Write a checkpoint of these shares, as `save`. Collective."""
    final = folder / "checkpoints" / step_name(step)
    size = sum(piece.local.nbytes for piece in share.pieces)
    tensors = {}
    # A packed tensor has several pieces.
    names_by_key = {}
    for piece in share.pieces:
        if piece.name not in exempt:
            tensors[piece.key] = piece.local
            names_by_key[piece.key] = piece.name
    found = [names_by_key[key] for key in not_finite(tensors)]
    facts = [{**share.summary, "step": step}, size, found, platform.node()]
    # All ranks must save the same tensors, and each folder needs room for its ranks.
    shares = world.gather(facts)
    compare("set of tensors to save", [summary for summary, *_ in shares])
    leads = world.leads or (0,) * world.size
    total = sum(size for (_, size, *_), lead in zip(shares, leads, strict=True) if lead == leads[world.rank])
    bad = sorted({name for _, _, names, _ in shares for name in names})
    watch = _SaveWatch(final, step, [host for *_, host in shares], world)
    begin = partial(_begin, final, state, total, replace=bool(world.leads))
    names = gather_results(  # collective
        world, lambda: begin() if world.leads_folder else None, signs=Signs(on_wait=watch.report)
    )
    temporary = names[leads[world.rank]]
    if temporary is not None:
        _write_new(watch, temporary, share, state, world, engine, bad)  # collective
    # The same on every rank.
    if bad:
        error = CheckpointError(
            f"{not_finite_line(bad)}: a resume will skip this checkpoint; lower --lr, or check what updates that tensor"
        )
        # Rank 0 has the message; every rank raises it.
        world.check(error if world.is_main else None)
    return final


def _write_new(
    watch: "_SaveWatch",
    name: str,
    share: Share,
    state: dict[str, Any],
    world: World,
    engine: str,
    bad: list[str],
) -> None:
    """Write to the temporary folder `name`, and rename it. Collective."""
    final = watch.final
    temporary = final.parent / name
    try:
        shares = gather_results(  # collective
            world,
            lambda: [_write_share(temporary, share, world.rank), len(share.pieces), share.aliases],
            signs=Signs(on_wait=watch.report),
        )
        files = {}
        for mapping, _, _ in shares:
            for file, entry in mapping.items():
                files[file] = entry
        manifest = Manifest(watch.step, world.size, engine, int(time.time()), files, not_finite=bad)
        leads = world.leads or (0,) * world.size
        visible = [name for (mapping, _, _), lead in zip(shares, leads, strict=True) if lead == 0 for name in mapping]

        def finish() -> dict[str, str]:
            aliases = {}
            for _, _, mapping in shares:
                for alias, name in mapping.items():
                    aliases[alias] = name
            index = _index(share, aliases, [count for _, count, _ in shares])
            return _finish(temporary, final, manifest, {STATE: dump(state), INDEX: index}, visible)

        documents = on_all_ranks(  # collective
            world, lambda: finish() if world.is_main else {}, signs=Signs(on_wait=watch.report)
        )
        if world.leads:
            # Each node's folder gets the same documents.
            documents = world.broadcast(documents)
            copies = world.leads_folder and not world.is_main
            copy = partial(_finish_copy, temporary, final, documents)
            on_all_ranks(world, lambda: copy() if copies else None, signs=Signs(on_wait=watch.report))  # collective
    except BaseException:
        # Also after Ctrl-C: half a checkpoint is useless.
        if world.leads_folder:
            remove(temporary)
        raise


class _SaveWatch:
    """Report a save that takes long, once, on rank 0.

    The other ranks wait for its writers without a limit.

    Args:
        hosts: names by rank.

    Attributes:
        final: the checkpoint's folder.
        step: of the checkpoint.
    """

    def __init__(self, final: Path, step: int, hosts: list[str], world: World) -> None:
        self.final = final
        self.step = step
        self._hosts = hosts
        self._is_main = world.is_main
        self._began = time.monotonic()
        self._is_reported = False

    def report(self, ranks: list[int]) -> None:
        """Report the ranks that are still writing, if it is time."""
        seconds = time.monotonic() - self._began
        if not self._is_main or self._is_reported or seconds < _SLOW:
            return
        self._is_reported = True
        writers = " and ".join(f"{rank_label(rank)} on {self._hosts[rank]}" for rank in ranks[:8])
        message = f"the save after step {self.step} has been writing to {self.final.absolute()} for {seconds:.0f} s"
        _LOG.warning(
            "%s and waits for %s; the next save, or the end of the run, waits for it: check the storage there",
            message,
            writers,
        )


def _begin(final: Path, state: dict[str, Any], size: int, *, replace: bool) -> str | None:
    """Create the temporary folder, and return its name.

    Args:
        size: bytes that the ranks of this folder write.
        replace: also if a complete checkpoint exists; False: return None then.
    """
    try:
        dump(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state to save has values other than plain numbers and strings: {error}") from error
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        sync(final.parent.parent)
    if not replace and final.is_dir() and not verify(final):
        return None
    free = shutil.disk_usage(final.parent).free
    if free < size:
        raise CheckpointError(
            f"{final.parent.parent} has {bytes_text(free)} free and a checkpoint takes {bytes_text(size)}; make room"
        )
    name = f".{final.name}.tmp-{secrets.token_hex(8)}"
    # Exclusive: it fails on anything that exists, even a planted link.
    (final.parent / name).mkdir(mode=0o700)
    return name


def _write_share(temporary: Path, share: Share, rank: int) -> dict[str, dict[str, Any]]:
    """Write this rank's data file.

    Returns:
        {file name: {size, xxh3_64}}, {} if there is nothing.
    """
    if not share.pieces:
        return {}
    pieces = in_file_order(share.pieces)
    data = data_name(rank)
    return {data: retry_io(lambda: write_file(temporary / data, _safetensors(pieces)))}


def _index(share: Share, aliases: dict[str, str], counts: list[int]) -> bytes:
    """Return the index of all ranks' shares, from rank 0's.

    Args:
        aliases: of all ranks.
        counts: number of slices that each rank wrote.

    Raises:
        CheckpointError: it has other numbers: a tensor is cut in a way that only its ranks know.
    """
    tensors = {}
    for name, entry in share.index.items():
        if name not in aliases:
            tensors[name] = entry
    # Most tensors are cut in the same way, and share their grid.
    numbers = Counter(id(grid) for _, grid in tensors.values())
    grids = {id(grid): grid for _, grid in tensors.values()}
    fields = {key: grid.to_json() for key, grid in grids.items()}
    expected = Counter[int]()
    for key, count in numbers.items():
        for file, parts in Counter(grids[key].files).items():
            expected[file] += parts * count
    for rank, count in enumerate(counts):
        if count != expected[rank]:
            raise CheckpointError(
                f"{rank_label(rank)} wrote {count} slices of tensors, and by their meshes it has {expected[rank]}; "
                "report this as a bug, with the engine and its options"
            )
    rows = []
    for name, (dtype, grid) in tensors.items():
        rows.append({"name": name, "dtype": dtype, **fields[id(grid)]})
    return dump({"format": FORMAT, "tensors": rows, "aliases": aliases}, indent=None)


def _safetensors(pieces: list[TensorPiece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file: header length (8 bytes, little-endian), header (JSON), tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin = end
        end = end + piece.local.numel() * piece.local.itemsize
        code, shape = stored_as(dtype_name(piece.local.dtype), tuple(piece.local.shape))
        header[piece.key] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The format wants the tensors aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    tensors = [piece.local for piece in pieces]
    # The buffers of a Saver form few runs: single pieces would take the GIL many times.
    for run in contiguous_runs(tensors):
        group = tensors[run.start : run.stop]
        yield bytes_of(group[0] if len(group) == 1 else span(group))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a plain tensor in row-major order, little-endian; copied only if needed."""
    # Waits for the device if the tensor is there.
    return host_bytes(tensor.detach().cpu())


def _write_document(path: Path, data: bytes) -> dict[str, Any]:
    return retry_io(lambda: write_file(path, [data]))


def _finish(
    temporary: Path, final: Path, manifest: Manifest, documents: dict[str, bytes], visible: list[str]
) -> dict[str, str]:
    """Write rank 0's documents, give the folder its final name, and return them.

    Args:
        visible: the data files that are in this folder.
    """
    for name in visible:
        if (temporary / name).stat().st_size != manifest.files[name]["size"]:
            raise CheckpointError(
                f"{name}: rank 0 sees another size than its writer; use a --save-dir that all nodes share"
            )
    for name, data in documents.items():
        manifest.files[name] = _write_document(temporary / name, data)
    _write_document(temporary / MANIFEST, content := manifest.dump())
    _publish(temporary, final)
    return {name: data.decode() for name, data in {**documents, MANIFEST: content}.items()}


def _finish_copy(temporary: Path, final: Path, documents: dict[str, str]) -> None:
    """Write rank 0's documents to another node's folder, and give it its final name."""
    for name, text in sorted(documents.items(), key=lambda each: each[0] == MANIFEST):
        _write_document(temporary / name, text.encode())
    _publish(temporary, final)


def _publish(temporary: Path, final: Path) -> None:
    """Give the folder its final name; a checkpoint that has it is removed."""
    # Others may read the folder only from now on.
    os.chmod(temporary, final.parent.stat().st_mode & 0o2777)
    sync(temporary)
    aside = None
    # A damaged checkpoint of this name.
    if final.is_symlink() or final.exists():
        aside = final.with_name(f".{final.name}.old-{secrets.token_hex(8)}")
        os.rename(final, aside)
    os.rename(temporary, final)
    sync(final.parent)
    if aside:
        remove(aside)
