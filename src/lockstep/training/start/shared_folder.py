"""Find which ranks see the same local folder of a run.

check_shared_folder(folder, world, token)       # all ranks share one
find_folders(folder, world)                     # each node may have its own: sets `world.leads`
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.distributed.agreement import gather_results, on_all_ranks
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.files import create_file
from lockstep.training.state.run_dir import RunFolder

__all__ = [
    "check_shared_folder",
    "find_folders",
    "write_token",
]

# Seconds. A network file system may show a new file late.
_READ_DELAYS = (0.0, 0.1, 0.2, 0.5, 1.2)


class Token(NamedTuple):
    """A temporary file of rank 0 in the run's folder, or in its nearest parent.

    Attributes:
        above: how many levels above the folder it is.
    """

    name: str
    above: int


def check_shared_folder(folder: RunFolder, world: World, token: Token | None) -> None:
    """Check that every rank sees rank 0's run folder, and may write. Collective.

    Rank 0 has written a token into the folder.

    Device and inode numbers would not do: two nodes may see different numbers for a shared folder, and equal ones for
    two folders.

    Raises:
        ConfigError: on every rank, if a rank does not see the token, or has the folder read-only.
    """
    if world.size == 1:
        return
    path = folder.path.absolute()
    visible = world.is_main or (token is not None and _sees_token(path, *token))
    writable = os.access(folder.nearest_existing(), os.W_OK | os.X_OK)

    def check(ranks: list[Any]) -> None:
        blind = [rank for rank, (_, _, visible, _) in enumerate(ranks) if not visible]
        if blind:
            host, own_path, *_ = ranks[blind[0]]
            more = f" (and {len(blind) - 1} more ranks)" if len(blind) > 1 else ""
            raise ConfigError(
                f"rank {blind[0]} on {host}{more} does not see the run's folder: its {own_path} is not {ranks[0][1]} "
                f"of rank 0 on {ranks[0][0]}; set --save-dir to the absolute path of a folder that all nodes share, or "
                "to the URL of an object store"
            )

        for rank, (host, own_path, _, writable) in enumerate(ranks):
            if not writable:
                raise ConfigError(
                    f"{rank_label(rank)} on {host} cannot write to {own_path}, into which every rank writes; mount it "
                    "writable there, or set --save-dir to a folder that is writable on all nodes"
                )

    # An unseen or read-only folder on one rank ends all of them before anything is written.
    world.defer([socket.gethostname(), str(path), visible, writable], check)


def find_folders(folder: RunFolder, world: World) -> None:
    """Find which ranks see the same local folder of a run, and set `world.leads`. Collective.

    Each rank tries to create the same file, which one rank of each file system can; the others read who it was.

    Raises:
        ConfigError: on every rank, if one cannot write there.
    """
    world.leads = ()
    if world.size == 1:
        return
    parent = folder.nearest_existing().absolute()
    # Rank 0 names the file, so that all ranks try to create the same one.
    path = parent / f".lockstep.tmp-{world.broadcast(secrets.token_hex(8))}"

    def create() -> bool:
        try:
            with create_file(path) as file:
                file.write(str(world.rank).encode())
        except FileExistsError:
            return False
        except OSError as error:
            raise folder.write_error(parent, error) from error
        return True

    try:
        on_all_ranks(world, create)
        # Collective. After it, whoever created the file has written it.
        world.agree()
        creators = gather_results(world, lambda: int(path.read_text()))  # collective
    finally:
        with suppress(OSError):
            # Another rank of the same node may have removed it.
            path.unlink()
    leads = {creator: creators.index(creator) for creator in creators}
    if len(leads) > 1:
        world.leads = tuple(leads[creator] for creator in creators)


@contextmanager
def write_token(folder: RunFolder) -> Iterator[Token]:
    """Write a temporary file into the folder, or its nearest parent."""
    token = f".lockstep.tmp-{secrets.token_hex(8)}"
    parent = folder.nearest_existing().absolute()
    path = parent / token
    try:
        try:
            with create_file(path) as file:
                file.write(token.encode())
        except OSError as error:
            raise folder.write_error(parent, error) from error
        yield Token(token, len(folder.path.absolute().parts) - len(parent.parts))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sees_token(path: Path, token: str, above: int) -> bool:
    """Whether the token is visible here, `above` levels above `path`."""
    if above > len(path.parents):
        return False
    file = (path / "x").parents[above] / token
    for pause in _READ_DELAYS:
        time.sleep(pause)
        with suppress(OSError):
            if file.read_bytes() == token.encode():
                return True
    return False
