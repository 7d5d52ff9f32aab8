"""The door: what it lets in, and what it refuses before anything else sees it."""

import asyncio
import json

import pytest

from broadsight.app.door import ALIAS, API, MOST_JSON, Door, hiding
from broadsight.app.uploads import Storage

from .conftest import asked, keeping

EVENT = f"{API}/call/predict"


@pytest.fixture
def knock(tmp_path):
    """Send a request through the door; gives the status and the body that came through or the refusal."""

    async def inner(scope, receive, send):
        body = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    door = Door(inner, Storage(tmp_path, 20_000), most_bytes=1000)

    def call(path, body=b"", method=None, headers=(), host="localhost:7860", pieces=1):
        step = max(1, -(-len(body) // pieces))
        parts = [body[at : at + step] for at in range(0, len(body), step)]
        given = [(b"host", host.encode()), *headers]
        return asked(door, path, *parts, headers=given, method=method or ("POST" if body else "GET"))

    return call


PAGES = ["/", "/config", "/theme.css", "/assets/a/b.js", f"{API}/queue/data", f"{API}/info"]
# Routes of Gradio's that the page needs, and others
NEEDED = ["info", "queue/data?session_hash=a", "queue/join", "upload", "call/predict", "run/predict", "api/predict"]
NEEDED += ["heartbeat/a", "reset", "cancel", "upload_progress?upload_id=a"]
OTHERS = ["proxy=http://127.0.0.1:1/", "vibe-code", "process_recording", "component_server", "dev/reload", "login"]
OTHERS += ["startup-events", "stream/x", "deep_link", "queue/data/x", "monitoring", "mcp", "runs"]
LONG = "a" * 3000


def test_door__the_page_itself_files_of_its_folder_and_nothing_else(knock, tmp_path):
    for path in PAGES:
        status, _, headers = knock(path)
        assert status == 200 and headers[b"x-content-type-options"] == b"nosniff"
    for path in (*(f"{API}/{route}" for route in OTHERS), "/docs", f"/{LONG}", f"/static/{LONG}"):
        assert knock(path)[0] == 404, path
    assert knock("/", method="PUT")[0] == knock("/config", method="DELETE")[0] == 404
    assert knock(f"{API}/file={tmp_path}/a/b.png")[0] == 200
    outside = ["/etc/passwd", "etc/passwd", "", "//etc/passwd", "http://127.0.0.1/", f"{tmp_path}/../x"]
    for path in (*outside, f"{tmp_path}x/a"):
        assert knock(f"{API}/file={path}")[0] == 403


@pytest.mark.parametrize("path", [*PAGES, *(f"{API}/{route}" for route in (*NEEDED, *OTHERS))])
def test_door__other_sites_and_names_get_nothing(knock, path):
    for method in ("GET", "POST", "OPTIONS"):
        for header in ((b"origin", b"http://evil.example"), (b"sec-fetch-site", b"cross-site")):
            assert knock(path, method=method, headers=[header, (b"content-length", b"0")])[0] == 403
        assert knock(path, method=method, host="evil.example:7860")[0] == 403


def test_door__events_come_through_whole(knock, tmp_path):
    body = json.dumps({"data": [{"path": f"{tmp_path}/a.png", "url": "http://localhost/x"}, ["a"], 1]}).encode()
    assert knock(EVENT, body, pieces=3)[:2] == (200, body)
    assert knock(f"{API}/queue/join", body)[:2] == (200, body)
    assert knock(EVENT, b'{"data": [null]}')[0] == 200
    assert knock(EVENT, b"no json")[0] == knock(EVENT, b"[" * 100_000)[0] == 400
    assert knock(EVENT, b" " * (MOST_JSON + 1), pieces=4)[0] == 413
    twice = b'{"path": "/etc/passwd", "path": "%s/a.png"}' % str(tmp_path).encode()
    assert knock(EVENT, twice)[1] == b'{"path": "%s/a.png"}' % str(tmp_path).encode()  # nobody sees the other one


PATHS = ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:7860/config", "//example.com/a.png", "../../etc/passwd"]
PATHS += ["HTTPS://example.com/a.png", " http://example.com", "", 7, {"path": "x"}, ["/etc/passwd"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("address", ["call/predict", "queue/join", "run/predict", "call/v2/predict"])
def test_door__no_path_and_no_address_for_an_image(knock, path, address):
    for data in ([{"path": path}], [[{"deep": [{"path": path, "meta": {"_type": "gradio.FileData"}}]}]]):
        status, body, _ = knock(f"{API}/{address}", json.dumps({"data": data}).encode())
        assert status == 400 and b"must be uploaded" in body


def test_door__uploads_say_how_long_they_are(knock):
    chunked = (b"transfer-encoding", b"chunked")
    for value, status in ((b"500", 200), (b"1000000", 413), (b"-5", 400)):
        for name in (b"content-length", b"Content-Length"):
            assert knock(f"{API}/upload", b"x", headers=[(name, value)])[0] == status
    for headers, status in (([], 411), ([chunked], 411), ([(b"content-length", b"500"), chunked], 400)):
        assert knock(f"{API}/upload", b"x", headers=headers)[0] == status


async def pass_on(messages, send):
    for message in messages:
        await send(message)


def test_door__visitors_know_the_folder_by_another_name(tmp_path):
    """Paths are hidden in what goes out, whole or in a stream, and found again in what comes in."""
    door = Door(None, Storage(tmp_path, 20_000), most_bytes=1000)
    event = json.dumps({"data": [{"path": f"{ALIAS}/a/b.png"}, ALIAS]}).encode()
    assert json.loads(door.read_event(event)[1]) == {"data": [{"path": f"{tmp_path}/a/b.png"}, ALIAS]}
    for path in (f"{ALIAS}/../../etc/passwd", f"{ALIAS}x/a", ALIAS, f"{ALIAS}//../.."):
        assert door.read_event(json.dumps({"path": path}).encode())[0][0] == 400
    for kind, pieces in (("application/json", 7), ("text/html; charset=utf-8", 3), ("text/event-stream", 9)):
        sent, text = [], f'{{"path": "{tmp_path}/a.png"}}\n\n"{tmp_path}"\n'.encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(text))]
        messages = [{"type": "http.response.start", "status": 200, "headers": headers}]
        for at in range(0, len(text), pieces):
            more = at + pieces < len(text)
            messages.append({"type": "http.response.body", "body": text[at : at + pieces], "more_body": more})

        asyncio.run(pass_on(messages, hiding(keeping(sent), door._hide)))
        body = b"".join(message["body"] for message in sent[1:])
        assert body == f'{{"path": "{ALIAS}/a.png"}}\n\n"{ALIAS}"\n'.encode()
        assert sent[0]["headers"] == [(b"content-type", kind.encode())]  # the length was another


def test_door__uploads_hold_a_quota(tmp_path):
    """Also while they are on their way; a client that leaves stores nothing."""
    came = []

    async def inner(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        came.append(len(body))
        (tmp_path / f"{len(came)}").write_bytes(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = Door(inner, Storage(tmp_path, 2500), most_bytes=1000)

    async def upload(length, *messages):
        waiting, sent = list(messages), []

        async def receive():
            await asyncio.sleep(0)
            return waiting.pop(0)

        headers = [(b"host", b"localhost:7860"), (b"content-length", b"%d" % length)]
        scope = dict(type="http", path=f"{API}/upload", method="POST", headers=headers, server=("x", 7860))
        await door(scope, receive, keeping(sent))
        return sent[0]["status"] if sent else None

    def body(length):
        return {"type": "http.request", "body": bytes(length), "more_body": False}

    async def ask():
        assert [await upload(900, body(900)) for _ in range(6)] == [200] * 6
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2500 and (tmp_path / "6").exists()
        part = {"type": "http.request", "body": b"x" * 500, "more_body": True}
        assert await upload(900, part, {"type": "http.disconnect"}) is None and len(came) == 6
        found = await asyncio.gather(*(upload(900, body(900)) for _ in range(4)))
        assert found == [200] * 4 and door.reading == door.open == 0
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2500
        door.storage.lasting = {str(path) for path in tmp_path.iterdir()}  # no room is left
        assert await upload(900, body(900)) == 507 and len(came) == 10
        door.reading = 2**28
        assert await upload(900, body(900)) == 503

    asyncio.run(ask())
