"""Connections, over real sockets: what is malformed, slow or too much is answered and ended."""

import json
import socket
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.skipif(find_spec("uvicorn") is None, reason="the page needs gradio, the service uvicorn")

SOON = dict(head=0.3, body=0.3, linger=0.3, rate=1e6, write=0.3)


async def echo(scope, receive, send):
    """How many bytes came; `/large` is a long answer."""
    if scope["type"] != "http":
        return
    length, more = 0, True
    while more and scope["path"] != "/early":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(400 if scope["path"] == "/large" else 0):
        await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
    await send({"type": "http.response.body", "body": json.dumps({"bytes": length}).encode()})


@contextmanager
def listening(app=echo, **limits):
    """A server on a free port of this computer; gives the port and the server."""
    from broadsight.app.connections import Patience, ThreadServer, config_of
    from broadsight.app.gate import Gate

    config = config_of(Gate(app), Patience(**limits), log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
    server, bound = ThreadServer(config), socket.create_server(("127.0.0.1", 0))
    server.start([bound])
    try:
        yield bound.getsockname()[1], server
    finally:
        server.stop()


def talk(port, text, pause=0.0):
    """Send a request as it is, with the port in place of PORT; all that comes back until the server hangs up."""
    with connected(port) as one:
        data = text.replace(b"PORT", b"%d" % port)
        with suppress(OSError):
            for part in [data] if not pause else [data[at : at + 1] for at in range(len(data))]:
                one.sendall(part)
                time.sleep(pause)
        return rest(one)


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def rest(one):
    found = b""
    with suppress(ConnectionResetError):
        while part := one.recv(65536):
            found += part
    return found


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it is not so")


@pytest.fixture(scope="module")
def port():
    with listening() as (number, _):
        yield number


HOST = b"Host: localhost:PORT\r\nConnection: close\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST


def test_requests__that_are_well_formed(port):
    assert b'{"bytes": 5}' in talk(port, POST + b"Content-Length: 5\r\n\r\n12345")
    assert b'{"bytes": 5}' in talk(port, POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n")
    assert b"uvicorn" not in talk(port, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    both = b"GET / HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n" + POST + b"Content-Length: 2\r\n\r\n12"
    answer = talk(port, both)  # in turn
    assert [answer.count(b'{"bytes": %d}' % number) for number in (0, 2)] == [1, 1]
    upgrade = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    with connected(port) as one:  # an ordinary answer
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n" % port + upgrade + b"\r\n")
        assert one.recv(1000).startswith(b"HTTP/1.1 200 ")


LONG = ["GET / HTTP/1.1\r\n{host}X: " + "x" * 70_000 + "\r\n\r\n", 400]
MALFORMED = [LONG, *yaml.safe_load(Path(__file__).with_name("malformed.yaml").read_text("utf-8"))]


@pytest.mark.parametrize(("text", "status"), MALFORMED, ids=range(len(MALFORMED)))
def test_requests__that_are_not(port, text, status):
    answer = talk(port, text.format(post=POST.decode(), host=HOST.decode()).encode("latin-1"))
    assert answer.startswith(b"HTTP/1.1 %d " % status) and b"bytes" not in answer


def test_slow__headers_and_bodies_are_ended_also_of_a_second_request():
    with listening(**SOON) as (port, _):
        assert talk(port, b"").startswith(b"HTTP/1.1 408 ")  # says nothing
        assert talk(port, b"GET / HTTP/1.1\r\nHost: loc").startswith(b"HTTP/1.1 408 ")
        assert talk(port, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 40, pause=0.01).startswith(b"HTTP/1.1 408 ")
        body = b"Content-Length: 500\r\n\r\n"
        assert talk(port, POST + body + b"123").startswith(b"HTTP/1.1 408 ")
        assert b"HTTP/1.1 200 " in talk(port, POST.replace(b"/ ", b"/early ") + body)  # and is not waited for
        with connected(port) as one:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n\r\n" % port)
            assert b"200 OK" in one.recv(1000)
            time.sleep(0.5)  # between requests nothing presses: that is keep-alive's business
            one.sendall(b"GET / HT")
            assert b" 408 " in rest(one)
    with listening(**{**SOON, "head": 30, "rate": 10}) as (port, _):  # one that comes fast enough may be long
        assert b'{"bytes": 60}' in talk(port, POST + b"Content-Length: 60\r\n\r\n" + b"x" * 60, pause=0.003)


def test_slow__answers_that_nobody_reads_are_dropped():
    with listening(**SOON) as (port, server), connected(port) as one:
        one.sendall(b"GET /large HTTP/1.1\r\nHost: localhost:%d\r\n\r\n" % port)
        until(lambda: server.server_state.connections)
        until(lambda: not server.server_state.connections)
        assert len(rest(one)) < 400 * 2**16


def test_connections__so_many_at_once():
    with listening(connections=3) as (port, server):
        held = [connected(port) for _ in range(3)]
        until(lambda: len(server.server_state.connections) == 3)
        assert talk(port, b"").startswith(b"HTTP/1.1 503 ")
        held.pop().close()
        until(lambda: len(server.server_state.connections) == 2)
        assert b'{"bytes": 0}' in talk(port, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        for one in held:
            one.close()
