"""`save`: all ranks write their share at once, into a folder that gets its name only when everything is on the disk.

    path = save(run_folder, 500, {"model/weight": tensor, ...}, {"epoch": 1}, world, engine="ddp")

The safetensors files are written here, not by that package's writer: tensor by tensor (one of them in host memory at a
time), with the checksum taken on the way, and with an error, not a bus error, when the disk is full.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.check import not_finite_line, verify
from lockstep.checkpoint.dtypes import dtype_name, stored_as
from lockstep.checkpoint.files import remove, write_file
from lockstep.checkpoint.format import FORMAT, MANIFEST, STATE, Manifest, dump, step_name
from lockstep.checkpoint.layout import Piece, Share, in_file_order, share_out
from lockstep.checkpoint.on_all_ranks import on_all_ranks
from lockstep.checkpoint.pinned import runs, span
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import retry_io, sync
from lockstep.tensors import not_finite
from lockstep.units import bytes_text

__all__ = ["bytes_of", "save", "write_share"]


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
    """Writes the checkpoint of `step` into `folder`/checkpoints and returns its folder. Collective over all ranks.

    A whole checkpoint of this step that is already there is left as it is; a damaged one is replaced.

    Args:
        folder: the run's folder, on a file system that all ranks share.
        step: number of optimizer steps done, >= 0.
        tensors: by global name ("model/blocks.0.weight"), the same names on every rank; plain tensors, equal on all
            ranks, or DTensors; any shape, also (); on the CPU or a device. Those that share their memory are kept once.
        state: JSON values (numbers, strings, lists, dicts); rank 0's are kept.
        engine: its name, for the reader of the manifest.
        exempt: names of tensors that may have values that are not finite.

    Raises:
        CheckpointError: a tensor or state that cannot be kept, or the file system refused. On every rank; what was
            written is gone and the older checkpoints are as they were. Or a tensor is not finite: the checkpoint is
            there to be looked at, and its manifest says that it is no use to a resume.
        PeerError: the same, on a rank other than this one.
    """
    share = on_all_ranks(world, lambda: share_out(tensors, world))  # collective
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
    """`save` of what was shared out already; each rank gives its own part. See `save`. Collective."""
    world.check_same("set of tensors to save", {**share.summary, "step": step})  # collective
    final = folder / "checkpoints" / step_name(step)
    size = sum(piece.local.nbytes for piece in share.pieces)
    tensors = {piece.name: piece.local for piece in share.pieces if piece.name not in exempt}
    shares = world.gather([size, not_finite(tensors)])  # collective
    whole, bad = sum(size for size, _ in shares), sorted({name for _, names in shares for name in names})
    begun = on_all_ranks(world, lambda: _begin(final, state, whole) if world.is_main else None)  # collective
    begun = world.gather(begun)[0]  # collective
    if begun is not None:
        _write_anew(final, begun, step, share, state, world, engine, bad)  # collective
    if bad:  # on every rank
        error = CheckpointError(
            f"{not_finite_line(bad)}: a resume passes over this checkpoint; lower --lr, or look at what updates it"
        )
        world.check(error if world.is_main else None)  # collective
    return final


def _write_anew(
    final: Path,
    begun: str,
    step: int,
    share: Share,
    state: dict[str, Any],
    world: World,
    engine: str,
    bad: list[str],
) -> None:
    """Write the temporary folder `begun` and give it its name. Collective."""
    temporary = final.parent / begun
    try:
        mine = on_all_ranks(world, lambda: _write_share(temporary, share, world.rank))  # collective
        files = {name: entry for each in world.gather(mine) for name, entry in each.items()}  # collective
        manifest = Manifest(step, world.size, engine, int(time.time()), files, not_finite=bad)
        on_all_ranks(world, lambda: _finish(temporary, final, manifest, state) if world.is_main else None)  # collective
    except BaseException:  # also Ctrl-C: half a checkpoint is of no use to anybody
        if world.is_main:
            remove(temporary)
        raise


def _begin(final: Path, state: dict[str, Any], size: int) -> str | None:
    """The name of the temporary folder, made; None when the checkpoint is there and whole."""
    try:
        dump(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state to save is not made of plain numbers and strings: {error}") from error
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        sync(final.parent.parent)
    if final.is_dir() and not verify(final):
        return None
    free = shutil.disk_usage(final.parent).free
    if free < size:
        raise CheckpointError(
            f"{final.parent.parent} has {bytes_text(free)} free and a checkpoint takes {bytes_text(size)}; make room"
        )
    name = f".{final.name}.tmp-{secrets.token_hex(8)}"
    (final.parent / name).mkdir(mode=0o700)  # exclusive: fails on anything that is there, also on a planted link
    return name


def _write_share(temporary: Path, share: Share, rank: int) -> dict[str, dict[str, Any]]:
    """Writes this rank's data and index files. Returns {file name: {size, xxh3_64}}, {} when there is nothing."""
    if not share.pieces:
        return {}
    pieces = in_file_order(share.pieces)
    data, index = f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"
    content = {"format": FORMAT, "tensors": [_entry(piece, data) for piece in pieces], "aliases": share.aliases}
    return {
        data: retry_io(lambda: write_file(temporary / data, _safetensors(pieces))),
        index: retry_io(lambda: write_file(temporary / index, [dump(content, indent=None)])),
    }


def _entry(piece: Piece, file: str) -> dict[str, Any]:
    return {
        "name": piece.name,
        "dtype": dtype_name(piece.local.dtype),
        "shape": piece.shape,
        "offsets": piece.offsets,
        "local": list(piece.local.shape),
        "file": file,
        "key": piece.name,
    }


def _safetensors(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """The bytes of the file: the header's length (8 bytes, little-endian), the header (JSON), the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.local.numel() * piece.local.itemsize
        code, shape = stored_as(dtype_name(piece.local.dtype), tuple(piece.local.shape))
        header[piece.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    tensors = [piece.local for piece in pieces]
    for run in runs(tensors):  # a Saver's are a few: each piece by itself would take the interpreter's lock many times
        part = tensors[run.start : run.stop]
        yield bytes_of(part[0] if len(part) == 1 else span(part))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a plain tensor in row-major order, little-endian; copied only from a device or out of strides."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.cpu().contiguous().reshape(-1)  # waits for the device
    return flat.view(torch.uint8).numpy().data


def _finish(temporary: Path, final: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Rank 0: state and manifest, then the name. Once renamed, the checkpoint is never changed again."""
    manifest.files[STATE] = retry_io(lambda: write_file(temporary / STATE, [dump(state)]))
    for name, file in manifest.files.items():
        if (temporary / name).stat().st_size != file["size"]:
            raise CheckpointError(f"{name}: rank 0 sees another size than its writer; all nodes must share --save-dir")
    retry_io(lambda: write_file(temporary / MANIFEST, [manifest.dump()]))
    os.chmod(temporary, final.parent.stat().st_mode & 0o2777)  # until here nobody else could look in
    sync(temporary)
    aside = None
    if final.is_symlink() or final.exists():  # a damaged one
        aside = final.with_name(f".{final.name}.old-{secrets.token_hex(8)}")
        os.rename(final, aside)
    os.rename(temporary, final)
    sync(final.parent)
    if aside:
        remove(aside)
