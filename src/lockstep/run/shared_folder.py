"""Whether all ranks see one folder, before anything is read from it or written into it.

check_shared(RunFolder("outputs", "a"), world)          # ConfigError: the rank, its host and its path
"""

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError
from lockstep.files import created
from lockstep.run.folder import RunFolder

__all__ = ["check_shared"]

_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.2)  # seconds; a network file system may show a new file late


def check_shared(folder: RunFolder, world: World) -> None:
    """Have rank 0 write a token into the run's folder, and every rank read it. Collective.

    Device and inode are not compared: a folder that two nodes share may have another of each, and one that they do not
    share the same. The token is there for a moment only, above the folder where that is not made yet.

    Raises:
        ConfigError: on every rank, where rank 0 cannot write there or a rank does not see what it wrote.
    """
    if world.size == 1:
        return
    path = folder.path.absolute()
    with ExitStack() as stack:
        write = lambda: stack.enter_context(_token(folder)) if world.is_main else ("", 0)  # noqa: E731
        token, above = world.gather(on_all_ranks(world, write))[0]  # collective
        seen = world.is_main or _sees(path, token, above)
        ranks = world.gather([socket.gethostname(), str(path), seen])  # collective
    odd = [rank for rank, (_, _, seen) in enumerate(ranks) if not seen]
    if odd:
        (host, theirs, _), more = ranks[odd[0]], f" (and {len(odd) - 1} more ranks)" if len(odd) > 1 else ""
        raise ConfigError(
            f"rank {odd[0]} on {host}{more} does not see the run's folder: its {theirs} is not {ranks[0][1]} of rank 0 "
            f"on {ranks[0][0]}; give --save-dir a folder that all nodes share, by its absolute path"
        )


@contextmanager
def _token(folder: RunFolder) -> Iterator[tuple[str, int]]:
    """Write a file into the folder, or above it, and remove it at the end: its name, and how many levels above."""
    token, where = f".lockstep.tmp-{secrets.token_hex(8)}", folder.nearest().absolute()
    path = where / token
    try:
        try:
            with created(path) as file:
                file.write(token.encode())
        except OSError as error:
            raise folder.unwritable(where, error) from error
        yield token, len(folder.path.absolute().parts) - len(where.parts)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sees(path: Path, token: str, above: int) -> bool:
    """Whether the token lies so many levels above `path` here too."""
    if above > len(path.parents):
        return False
    file = (path / "x").parents[above] / token
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(OSError):
            if file.read_bytes() == token.encode():
                return True
    return False
