"""What a launcher is to start."""

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started on this node.

    Attributes:
        command: of each process; `sys.executable` runs it.
        processes: on this node.
        nodes: fewest and most.
        backend, endpoint, options, run_id: of the rendezvous; `endpoint` is host:port.
        is_host: whether this node holds the meeting point.
        restarts: how often the processes are started again after a failure.
        least, losses: with fewer processes, or after more losses within an hour, a lost one ends the others too.
        environment: set for the processes where the user has not set it.
    """

    command: list[str]
    processes: int
    nodes: tuple[int, int]
    backend: str
    endpoint: str
    options: dict[str, str]
    run_id: str
    is_host: bool
    restarts: int
    environment: dict[str, str]
    least: int = 1
    losses: int = 0
