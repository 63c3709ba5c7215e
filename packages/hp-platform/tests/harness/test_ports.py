"""The ports of a job are nobody else's while it lives, and its own processes listen on them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from hp_platform.launch import _ports, environment
from hp_platform.launch._group import WorkerGroup
from hp_platform.launch._ports import ReservedPorts, reserve_ports

pytestmark = pytest.mark.once


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_reserved_ports_are_nobody_elses_until_they_are_released() -> None:
    with reserve_ports() as reserved:
        ports = (reserved.first, reserved.first + 1)
        assert not any(is_free(port) for port in ports)
        for port in ports:
            assert _ports._bound(port) is None
    assert all(is_free(port) for port in ports)
    reserved.release()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_server_listens_on_a_reserved_port_and_keeps_it_when_the_reservation_ends(host: str) -> None:
    with reserve_ports() as reserved, socket.create_server((host, reserved.first)) as server:
        with socket.create_connection(("127.0.0.1", reserved.first)) as client:
            served, _ = server.accept()
            with served:
                client.sendall(b"here")
                assert served.recv(4) == b"here"
        reserved.release()
        assert not is_free(reserved.first)


def test_launchers_that_start_at_the_same_moment_get_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserve_ports(9) as room:
        start = room.first
    monkeypatch.setattr(_ports, "FIRST", start)
    monkeypatch.setattr(_ports, "LAST", start + 8)
    with ThreadPoolExecutor(4) as threads:
        kept = list(threads.map(lambda _: reserve_ports(1), range(4)))
    try:
        taken = [each.first for each in kept]
        assert len(set(taken)) == 4
        assert all(start <= port < start + 8 for port in taken)
        rest = [reserve_ports(1) for _ in range(4)]
        kept.extend(rest)
        with pytest.raises(
            RuntimeError, match=f"no 1 adjacent free ports .* between {start} and {start + 8}"
        ):
            reserve_ports(1)
    finally:
        for each in kept:
            each.release()


def test_half_a_pair_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_ports(2) as pair:
        start = pair.first
    monkeypatch.setattr(_ports, "FIRST", start)
    monkeypatch.setattr(_ports, "LAST", start + 1)
    with socket.create_server(("127.0.0.1", start + 1)), pytest.raises(RuntimeError, match="no 2 adjacent"):
        reserve_ports()
    assert is_free(start)


def test_where_no_server_may_listen_beside_a_bound_socket_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ports, "share", lambda bound: None)
    with reserve_ports() as found:
        assert isinstance(found, ReservedPorts)
        assert is_free(found.first)
        assert is_free(found.first + 1)


def test_a_group_of_workers_keeps_its_ports_until_it_ends() -> None:
    group = WorkerGroup(2)
    try:
        first, second = (place.master_port for place in group.call(environment))
        assert first == second
        assert not is_free(first)
        assert not is_free(first + 1)
        group.close()
        assert is_free(first)
        assert is_free(first + 1)
    finally:
        group.kill()
        group.discard()
