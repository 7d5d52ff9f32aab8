"""The door: what it lets in, and what it refuses before anything else sees it."""

import asyncio
import json

import pytest

from broadsight.demo.door import MOST_JSON, Door

EVENT = "/gradio_api/call/predict"


@pytest.fixture
def knock(tmp_path):
    """Send a request through the door; gives the status and the body that came through or the refusal."""

    async def inner(scope, receive, send):
        body = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    door = Door(inner, folder=tmp_path, most_bytes=1000, hosts={"localhost", "127.0.0.1"})

    def call(path, body=b"", method=None, headers=(), host="localhost:7860", pieces=1):
        method = method or ("POST" if body else "GET")
        sent, step = [], max(1, -(-len(body) // pieces))
        parts = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
        waiting = [
            {"type": "http.request", "body": part, "more_body": place < len(parts) - 1}
            for place, part in enumerate(parts)
        ]

        async def receive():
            return waiting.pop(0)

        async def send(message):
            sent.append(message)

        scope = dict(type="http", path=path, method=method, headers=[(b"host", host.encode()), *headers])
        asyncio.run(door(scope, receive, send))
        return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])

    return call


@pytest.mark.parametrize(
    "path", ["/", "/config", "/theme.css", "/assets/a/b.js", "/gradio_api/queue/data", "/gradio_api/info"]
)
def test_door__the_page_itself(knock, path):
    status, _, headers = knock(path)
    assert status == 200
    assert headers[b"x-content-type-options"] == b"nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://127.0.0.1:22/",
        "/gradio_api/vibe-code",
        "/gradio_api/process_recording",
        "/gradio_api/component_server",
        "/gradio_api/deep_link",
        "/gradio_api/dev/reload",
        "/docs",
        "/monitoring",
        "/gradio_api/queue/data/x",
        "/" + "a" * 3000,
        "/static/" + "a" * 3000,
    ],
)
def test_door__nothing_else(knock, path):
    assert knock(path)[0] == 404


def test_door__other_methods(knock):
    assert knock("/", method="PUT")[0] == knock("/config", method="DELETE")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "localhost.evil.example", "", "127.0.0.1.nip.io:7860"]
)
def test_door__other_names_of_this_computer(knock, host):
    assert knock("/", host=host)[0] == 403


def test_door__files_of_its_folder_alone(knock, tmp_path):
    assert knock(f"/gradio_api/file={tmp_path}/a/b.png")[0] == 200
    for path in (
        "/etc/passwd",
        "etc/passwd",
        f"{tmp_path}/../x",
        "http://127.0.0.1/",
        "",
        "//etc/passwd",
        f"{tmp_path}x/a",
    ):
        assert knock(f"/gradio_api/file={path}")[0] == 403


def test_door__events_come_through_whole(knock, tmp_path):
    body = json.dumps({"data": [{"path": f"{tmp_path}/a.png", "url": "http://localhost/x"}, ["a"], 1]}).encode()
    assert knock(EVENT, body, pieces=3)[:2] == (200, body)
    assert knock("/gradio_api/queue/join", body)[:2] == (200, body)
    assert knock(EVENT, b'{"data": [null]}')[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:7860/config",
        "HTTPS://example.com/a.png",
        " http://example.com",
        "//example.com/a.png",
        "../../etc/passwd",
        "",
        7,
        {"path": "x"},
        ["/etc/passwd"],
    ],
)
@pytest.mark.parametrize(
    "address", [EVENT, "/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/call/v2/predict"]
)
def test_door__no_path_and_no_address_for_a_picture(knock, path, address):
    for data in ([{"path": path}], [[{"deep": [{"path": path, "meta": {"_type": "gradio.FileData"}}]}]]):
        status, body, _ = knock(address, json.dumps({"data": data}).encode())
        assert status == 400
        assert b"must be uploaded" in body


def test_door__what_is_no_event(knock):
    assert knock(EVENT, b"no json")[0] == 400
    assert knock(EVENT, b"[" * 100_000)[0] == 400
    assert knock(EVENT, b" " * (MOST_JSON + 1), pieces=4)[0] == 413


def test_door__uploads_say_how_long_they_are(knock):
    def upload(*headers):
        return knock("/gradio_api/upload", b"x", headers=headers)[0]

    assert upload((b"content-length", b"500")) == 200
    assert upload((b"Content-Length", b"500")) == 200
    assert upload((b"content-length", b"1000000")) == 413
    assert upload() == upload((b"content-length", b"-5")) == 411
