"""Keep the state of torch's rendezvous as signed JSON.

torch's own backend stores a pickle: every launcher that reads it runs the code of its writer.
"""

import pickle
from datetime import datetime
from typing import Any, final

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

# Private names of torch, the same since torch 2.11: the state has no public form but its pickle.
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from lockstep.launch.secret import Secret, SignatureError

__all__ = ["SignedBackend"]

_PURPOSE = "state"


@final
class SignedBackend(RendezvousBackend):
    """torch's c10d backend, read only if a launcher of this run has signed the state.

    Args:
        store: stores the bytes.
        run_id: --rdzv-id.
        secret: signs them.
    """

    def __init__(self, store: Store, run_id: str, secret: Secret) -> None:
        self._backend = C10dRendezvousBackend(store, run_id)
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._secret = secret

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state as torch expects it, and its token."""
        self._check()
        result = self._backend.get_state()
        return result and (self._read(result[0]), result[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Store this process's state, unless another launcher was faster; return the newest."""
        # torch has just pickled the state in this process, so unpickling it runs no foreign code.
        values = _to_json(pickle.loads(state))
        result = self._backend.set_state(self._secret.sign(_PURPOSE, values), token)
        return result and (self._read(result[0]), result[1], result[2])

    def _check(self) -> None:
        """Raise if the state is gone.

        torch never deletes it, and would wait for it while no process is watched.
        """
        try:
            is_there = self._store.check([self._key])
        except RuntimeError as error:
            raise RendezvousConnectionError("the store is gone") from error
        if not is_there:
            raise RendezvousStateError("the state was deleted")

    def _read(self, data: bytes) -> bytes:
        try:
            return pickle.dumps(_from_json(self._secret.read(_PURPOSE, data)))
        except (SignatureError, ValueError, TypeError, KeyError) as error:
            raise RendezvousStateError("a state that no launcher of this run has signed") from error


def _to_json(state: _RendezvousState) -> dict[str, Any]:
    """Return a state as JSON values.

    Equal states must have equal bytes, so sets are sorted.
    """
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline and state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*_values(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(map(_values, state.wait_list)),
        "redundancy_list": sorted(map(_values, state.redundancy_list)),
        "last_heartbeats": [[*_values(node), when.isoformat()] for node, when in state.last_heartbeats.items()],
    }


def _from_json(values: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round = int(values["round"])
    state.complete = bool(values["complete"])
    state.closed = bool(values["closed"])
    deadline = values["deadline"]
    if deadline is None:
        state.deadline = None
    else:
        state.deadline = datetime.fromisoformat(deadline)
    state.participants = {_NodeDesc(*node): int(rank) for *node, rank in values["participants"]}
    state.wait_list = {_NodeDesc(*node) for node in values["wait_list"]}
    state.redundancy_list = {_NodeDesc(*node) for node in values["redundancy_list"]}
    heartbeats = values["last_heartbeats"]
    state.last_heartbeats = {_NodeDesc(*node): datetime.fromisoformat(when) for *node, when in heartbeats}
    return state


def _values(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]
