"""A foreign service in the place of the ranks' meeting point is one line, and a store of torch's is none."""

import contextlib
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from lockstep.distributed import membership
from lockstep.distributed.membership import check_store
from lockstep.distributed.progress import MEETING_VARIABLE
from lockstep.distributed.world import World, meeting_store
from lockstep.errors import ConfigError
from lockstep.launch.rendezvous import open_rendezvous


def http(connection):
    connection.recv(100)
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


def banner(connection):
    connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
    connection.recv(100)


def silent(connection):
    while connection.recv(100):
        pass


def closing(connection):
    connection.recv(100)


def in_pieces(connection):
    """Answer as torch's store does, two bytes at a time, and go on."""
    greeting = connection.recv(100)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in (greeting[-4:-2], greeting[-2:] + b"more"):
        connection.sendall(piece)
        time.sleep(0.02)


@pytest.fixture
def service(request):
    """A port where this answers each connection, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    request.param(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("service", [http, banner, silent, closing], indirect=True)
def test_another_service_is_refused_with_its_port(service, monkeypatch):
    monkeypatch.setattr(membership, "_PAUSE", 0.01)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="MASTER_PORT 7") as refused:
        check_store("127.0.0.1", service, 0.5, "MASTER_PORT 7")
    assert time.monotonic() - began < 5
    assert "\n" not in str(refused.value)


def late():
    """A service that closes its first connection and is a store from then on; it counts its connections in `asked`."""

    def answer(connection):
        answer.asked += 1
        (closing if answer.asked == 1 else in_pieces)(connection)

    answer.asked = 0
    return answer


@pytest.mark.parametrize("service", [in_pieces], indirect=True)
def test_an_answer_in_pieces_is_read_whole_and_no_further(service):
    check_store("127.0.0.1", service, 5.0, "MASTER_PORT 7")


LATE = late()


@pytest.mark.parametrize("service", [LATE], indirect=True)
def test_store_that_is_starting_is_asked_until_it_answers(service, monkeypatch):
    monkeypatch.setattr(membership, "_PAUSE", 0.01)
    check_store("127.0.0.1", service, 5.0, "MASTER_PORT 7")
    assert LATE.asked == 2


@pytest.mark.parametrize("service", [banner], indirect=True)
def test_ranks_and_launchers_ask(service, monkeypatch):
    monkeypatch.delenv(MEETING_VARIABLE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(service))
    with pytest.raises(ConfigError, match=f"MASTER_PORT {service}"):
        meeting_store(1, 2, timedelta(seconds=5))
    endpoint = f"127.0.0.1:{service}"
    job = SimpleNamespace(endpoint=endpoint, backend="c10d", run_id="r", nodes=(2, 2), options={}, is_host=False)
    with pytest.raises(ConfigError, match=f"--master-port {service}"):
        open_rendezvous(job, print)


@pytest.mark.parametrize("service", [http], indirect=True)
def test_a_torch_that_greets_otherwise_is_not_refused(service, monkeypatch):
    monkeypatch.setattr(membership, "_PING", 99)
    membership._knows_protocol.cache_clear()
    check_store("127.0.0.1", service, 0.5, "MASTER_PORT 7")
    membership._knows_protocol.cache_clear()


def test_torchs_store_and_an_unused_port_are_let_pass(capfd):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    check_store("127.0.0.1", store.port, 5.0, "MASTER_PORT 7")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    check_store("127.0.0.1", port, 5.0, "MASTER_PORT 7")
    client = TCPStore("127.0.0.1", store.port, None, False)
    client.set("still", "there")
    assert store.get("still") == b"there"
    assert capfd.readouterr().err == ""


def test_ranks_agree_on_a_scope_in_a_store_of_earlier_starts():
    store = dist.HashStore()
    stale = "lockstep/start/dead"  # of processes that were killed while they met
    store.set("lockstep/start/scope", stale)
    for key in ("here-0", "here-1", "welcome-other"):
        store.set(f"{stale}/{key}", "other")
    scopes = []
    for _ in range(3):
        worlds = [World(rank, size=3) for rank in range(3)]
        threads = [
            threading.Thread(target=world._agree_on_scope, args=(store, timedelta(seconds=20)))
            for world in worlds[::-1]
        ]
        for thread in threads:  # rank 0 comes last
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert len({world._scope for world in worlds}) == 1
        scopes.append(worlds[0]._scope)
    assert len({stale, *scopes}) == 4


def test_who_is_missing_from_a_join_is_known_on_both_sides():
    store = dist.HashStore()
    later = World(1, size=3, timeout=0.3)
    with pytest.raises(dist.DistError):
        later._agree_on_scope(store, timedelta(seconds=0.3))
    assert later._why_apart(store)[0].startswith("rank 0 did not arrive")
    first = World(0, size=3, timeout=0.5)
    thread = threading.Thread(target=lambda: suppressed(later._agree_on_scope, store))
    thread.start()
    with pytest.raises(RuntimeError):
        first._agree_on_scope(store, timedelta(seconds=0.5))
    thread.join()
    assert first._why_apart(store)[0].startswith("rank 2 did not arrive")


def suppressed(call, store):
    with contextlib.suppress(RuntimeError):
        call(store, timedelta(seconds=2))
