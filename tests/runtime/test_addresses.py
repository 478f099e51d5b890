"""Where processes listen, and how they wait for the coordinator: with plain sockets."""

import socket
import threading

import pytest

from collc.errors import PlanError
from collc.runtime.addresses import Endpoint, bind_address, endpoint, only_here, reach, towards

NOWHERE = "192.0.2.1"  # an address for documentation only (RFC 5737)


def listening(again=False):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("text", "read"),
    [("h0:1", Endpoint("h0", 1)), ("[::1]:65535", Endpoint("::1", 65535))],
)
def test_addresses_print_as_they_are_read(text, read):
    assert endpoint(text) == read
    assert str(read) == text


@pytest.mark.parametrize(
    "text", ["", "h0", "h0:", ":1", "::1:1234", "h0:x", "h0:0", "h0:65536", "[fe80::1%eth0]:1"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(PlanError, match=r"coordinator's (address|port)"):
        endpoint(text)


def test_the_coordinator_listens_at_its_own_number():
    assert bind_address("127.0.0.1:1234") == Endpoint("127.0.0.1", 1234)
    assert bind_address("localhost:1234").host in ("127.0.0.1", "::1")
    with pytest.raises(PlanError, match=rf"{NOWHERE} *\) is not an address of this host"):
        bind_address(f"{NOWHERE}:1234")


def test_a_port_in_use_is_refused():
    """gRPC would share it, and processes of one job would come to the coordinator of another."""
    server, at = listening()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with server, pytest.raises(PlanError, match=f"cannot listen at {at}: .*Choose a free port"):
        bind_address(at)
    assert str(bind_address(at)) == at


def test_what_an_earlier_job_left_of_its_connections_is_no_listener():
    """The side that closes first keeps the port for a minute, but nobody listens there."""
    server, at = listening(again=True)
    with server, socket.create_connection(server.getsockname()) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""
    assert str(bind_address(at)) == at


def test_a_socket_that_meets_itself_is_no_coordinator(monkeypatch):
    """Each end of such a connection has the same address, and no process is there."""

    def itself(*_, **__):
        own = socket.socket()
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        return own

    monkeypatch.setattr(socket, "create_connection", itself)
    with pytest.raises(PlanError, match="has not answered within 0 s"):
        reach("127.0.0.1:1", 0, pytest.fail)


def test_a_name_that_means_loopback_to_its_own_host_is_a_trap():
    assert only_here("localhost:1", Endpoint("127.0.0.1", 1)) is None
    assert only_here("127.0.0.1:1", Endpoint("127.0.0.1", 1)) is None
    assert only_here("h0:1", Endpoint("10.0.0.1", 1)) is None
    said = only_here("h0:1", Endpoint("127.0.1.1", 1))
    assert said and "the name h0 means 127.0.1.1" in said and "/etc/hosts" in said


def test_loopback_is_reached_from_loopback():
    assert towards("127.0.0.1:1234") == "127.0.0.1"
    server, at = listening()
    with server:
        assert reach(at, 5, pytest.fail) == "127.0.0.1"


def test_an_unknown_name_is_said(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PlanError, match=r"h9:1 .*unknown here"):
        reach("h9:1", 0, pytest.fail)
    with pytest.raises(PlanError, match=r"h9:1 .*unknown here"):
        towards("h9:1")
    with pytest.raises(PlanError, match="h9:1 is unknown on this host"):
        bind_address("h9:1")


def test_a_coordinator_that_does_not_come_is_named():
    server, at = listening()
    server.close()
    told = []
    with pytest.raises(PlanError, match=f"{at} has not answered within 0.5 s .*refused"):
        reach(at, 0.5, told.append)
    assert len(told) == 1 and at in told[0]


def test_a_coordinator_that_comes_late_is_awaited():
    server, at = listening()
    port = server.getsockname()[1]
    server.close()
    late = socket.socket()
    late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def come():
        late.bind(("127.0.0.1", port))
        late.listen()

    timer = threading.Timer(0.4, come)
    timer.start()
    try:
        assert reach(at, 30, pytest.fail) == "127.0.0.1"
    finally:
        timer.join()
        late.close()
