"""The gate: whose requests it lets in, and under which names."""

import asyncio

import pytest

from broadsight.app.gate import Gate, allowed_names, without_paths
from tests.training.small_runs import refusal

from .conftest import asked, keeping

OWN = "http://localhost:7860"


async def inner(scope, receive, send):
    allow = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-credentials", b"true")]
    seen = b",".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": allow})
    await send({"type": "http.response.body", "body": seen})


def knock(*headers, host="localhost:7860", path="/x", method="GET", version="1.1", address="127.0.0.1", allowed=()):
    """Status, body and headers of the answer to a request; `host` may be None or a list."""
    gate = Gate(inner, allowed=allowed_names(",".join(allowed)), pages=("/",))
    hosts = [host] if isinstance(host, str) else host or []
    given = [(b"host", one.encode()) for one in hosts] + [(name.encode(), value.encode()) for name, value in headers]
    return asked(gate, path, headers=given, method=method, address=address, version=version)


NAMES = ["localhost.", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "0.0.0.0", "127.1"]
NAMES += ["evil@localhost", "[::1", "::1", "[::]", "[::ffff:127.0.0.1]", "2130706433", "192.168.1.5", "localhost\t"]
HOSTS = [f"{name}:7860" for name in NAMES] + ["", "*", "localhost", "evil.example"]
HOSTS += [f"localhost:{port}" for port in ("", "80", "07860", "7860:7860", "78600", "7860/", "7860, evil")]
HOSTS += ["localhost:7860@evil.example", "http://localhost:7860", "localhost:\uff17\uff18\uff16\uff10"]


def test_host__one_name_of_this_computer_whatever_a_proxy_says():
    for host in ("localhost:7860", "127.0.0.1:7860", "[::1]:7860", "LocalHost:7860"):
        assert knock(host=host)[0] == 200
    for host in HOSTS:
        assert knock(host=host)[0] == 403, host
    assert knock(host=None)[0] == knock(host=None, version="1.0")[0] == 400
    assert knock(host=["localhost:7860"] * 2)[0] == knock(host=["localhost:7860", "evil.example"])[0] == 400
    for name in ("X-Forwarded-Host", "Forwarded", "X-Original-Host", "X-Gradio-Server"):
        assert knock((name, "localhost:7860"), host="evil.example")[0] == 403
        assert knock((name, "evil.example"))[1] == b"host"  # nobody behind the gate sees it


def test_host__the_address_that_the_connection_came_to_and_names_that_are_given():
    assert knock(host="192.168.1.5:7860", address="192.168.1.5")[0] == 200
    assert knock(host="[fe80::1]:7860", address="fe80::1")[0] == 200
    assert knock(host="192.168.1.6:7860", address="192.168.1.5")[0] == 403
    statuses = {"gpu.example": 200, "gpu.example:7860": 200, "gpu.example:81": 403, "a.gpu.example": 403}
    statuses |= {"other:9000": 200, "other": 403, "other:7860": 403}
    for host, status in statuses.items():
        assert knock(host=host, allowed=["GPU.example", "other:9000"])[0] == status
    for wrong in ("http://gpu.example", "*", "a,,b", "a b", "gpu.example:99999", "gpu.example/"):
        assert "expected a host name" in refusal(lambda wrong=wrong: allowed_names(wrong))


ORIGINS = ["http://evil.example", "null", "", "x", "file://", "https://localhost", f"{OWN}/", f"{OWN} x"]
ORIGINS += [f"{OWN}.evil.example", "http://localhost", "http://localhost:3000", "http://evil@localhost:7860"]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("origin", ORIGINS)
def test_origin__other_sites_are_refused(origin, method):
    status, _, headers = knock(("origin", origin), method=method)
    assert status == 403 and not any(name.startswith(b"access-control") for name in headers)


def test_origin__our_own_page_and_programs():
    for origin in (OWN, "http://127.0.0.1:7860", "HTTP://LOCALHOST:7860", "http://[::1]:7860"):
        status, _, headers = knock(("origin", origin), method="POST")
        assert status == 200 and headers[b"cross-origin-resource-policy"] == b"same-origin"
        assert not any(name.startswith(b"access-control") for name in headers)
    assert knock(("origin", "https://gpu.example"), host="gpu.example", allowed=["gpu.example"])[0] == 200
    assert knock(("origin", OWN), ("origin", OWN))[0] == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "x", "same-origin, cross-site"])
def test_fetch_site__only_a_link_leads_to_the_page(site):
    link = [("sec-fetch-site", site), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    assert knock(*link, path="/")[0] == 200
    assert knock(*link, path="/x")[0] == knock(*link, path="/", method="POST")[0] == 403
    assert knock(*link[:1], path="/")[0] == knock(*link[:2], ("sec-fetch-dest", "iframe"), path="/")[0] == 403
    assert knock(("sec-fetch-site", "same-origin"))[0] == knock(("sec-fetch-site", "none"))[0] == 200


LENGTH, CODING = "content-length", "transfer-encoding"
WRONG = [[(LENGTH, "5"), (CODING, "chunked")], [("Transfer-Encoding", "chunked"), ("Content-Length", "5")]]
WRONG += [[(LENGTH, "5"), (LENGTH, "5")], [(LENGTH, "5"), (LENGTH, "6")]]
WRONG += [[(LENGTH, length)] for length in ("5, 5", "-5", "+5", "0x5", "")]
UNKNOWN = [[(CODING, coding)] for coding in ("chunked, identity", "identity", "xchunked")]
UNKNOWN += [[(CODING, "chunked"), (CODING, "chunked")]]


LENGTHS = [*((headers, "1.1", 400) for headers in WRONG), *((headers, "1.1", 501) for headers in UNKNOWN)]
LENGTHS += [([(CODING, "chunked")], "1.0", 400), ([(CODING, "chunked")], "1.1", 200), ([(LENGTH, "5")], "1.1", 200)]


@pytest.mark.parametrize(("headers", "version", "status"), LENGTHS)
def test_length__said_once_and_clearly(headers, version, status):
    found, _, answered = knock(*headers, version=version, method="POST")
    assert found == status and (answered.get(b"connection") == b"close") == (status != 200)


def test_websockets__are_closed():
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(Gate(inner)({"type": "websocket", "headers": [], "path": "/"}, receive, keeping(sent)))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_paths__only_their_last_part_is_told():
    for text, said in [
        ("/home/me/my runs/best", "best"),
        ("C:\\Users\\me\\run", "run"),
        ("images of /home/me/val and ~/x/y.png", "images of val and y.png"),
        ("cannot open '/home/me/a.png': no", "cannot open 'a.png': no"),
        ("file:///etc/passwd", "passwd"),
        ("km/h, and/or 3/4; 1 / 2", "km/h, and/or 3/4; 1 / 2"),
        ("runs/mine", "runs/mine"),
    ]:
        assert without_paths(text) == said
    assert without_paths({"a": ["/x/y", 3, None], "b": {"c": ("/z",)}}) == {"a": ["y", 3, None], "b": {"c": ["z"]}}
