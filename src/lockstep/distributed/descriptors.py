"""Give a process the open files and connections that its ranks need.

Refuses in one line where the system's limit is too low.

    ensure_descriptors(descriptors_of(rank_count, hosts_store=True), "rank 0 of 1024")

In a large world gloo's groups connect on demand (`CONNECT_ON_DEMAND`): a ring and a few trees, so a rank has a few
connections to each group, whatever the number of ranks. Only an exchange of each rank with each other, as `--exact` and
the sharding of some optimizers need, connects all ranks, in one group. The process that serves the meeting point has
a few connections to each rank.
"""

import resource

from lockstep.errors import ConfigError

__all__ = ["CONNECT_ON_DEMAND", "connects_on_demand", "descriptors_of", "ensure_descriptors"]

# torch's variable; a user may set it to 0.
CONNECT_ON_DEMAND = "TORCH_GLOO_LAZY_INIT"

# Data files, logs, libraries, loader processes, and the connections of groups with rings and trees.
_BASE = 160
# Number of ranks up to which each connects to each.
_FEW = 64
# gloo's groups: the default one, control, exchange, saver.
_GROUPS = 4
# A rank's connections to the meeting point: its own, its heartbeats', and its loop's.
_STORE = 3
# Programs that close all descriptors one by one take long with a million.
_ENOUGH = 1 << 16


def connects_on_demand(ranks: int) -> bool:
    """Whether a world of this size connects on demand.

    A small one does not need it: there gloo (torch 2.13) ended a process once, whose peer closed a group while it left
    it ("state_ <= CONNECTED. 5 vs 4" in its pair.cc).
    """
    return ranks > _FEW


def descriptors_of(ranks: int, hosts_store: bool) -> int:
    """Return how many descriptors a process needs among so many ranks.

    Args:
        hosts_store: it serves the ranks' meeting point.
    """
    groups = 1 if connects_on_demand(ranks) else _GROUPS
    return _BASE + groups * ranks + _STORE * ranks * hosts_store


def ensure_descriptors(count: int, process: str) -> None:
    """Raise this process's limit of open files to the hard limit.

    Args:
        count: descriptors that it needs.
        process: its name in an error.

    Raises:
        ConfigError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        wanted = _ENOUGH
    else:
        wanted = min(hard, max(_ENOUGH, count))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            # A container may forbid it. The check below decides whether the limit suffices.
            pass
    if soft != resource.RLIM_INFINITY and soft < count:
        raise ConfigError(
            f"{process} needs {count} open files and connections, and its hard limit is {hard}: raise it on this node "
            "(ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)"
        )
