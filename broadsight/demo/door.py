"""The door of the server: it lets in what the page needs, and nothing else.

Gradio would fetch an address that somebody puts in a picture's place, serve as a relay to other sites, and answer
whatever host name a foreign page has made up for this machine. None of that is needed here.
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any

from .uploads import is_uploaded

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_JSON = 2**20  # bytes of an event: names and numbers, and where the picture is
EXTRA = 2**16  # bytes of an upload beside the file
MOST_PATH = 2048
API = "/gradio_api"
PAGES = re.compile(
    r"/(config/?|theme\.css|favicon\.ico|robots\.txt|manifest\.json|pwa_icon(/\d+)?|(assets|static|svelte)/.*)?"
    rf"|{API}/(info/?|app_id/?|startup-events|theme\.css|heartbeat/\w+|upload_progress|queue/(data|join)|upload|reset/?"
    r"|cancel|call/[\w/]+|run/\w+/?|api/\w+/?|file=.*)"
)
EVENTS = re.compile(rf"{API}/(queue/join|call/.+|run/.+|api/.+|reset/?|cancel)")
ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]+:|[/\\]{2})", re.IGNORECASE)
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"))


class Door:
    """ASGI middleware in front of the page.

    Args:
        folder: Where uploads are put. A file that an event names must be in there.
        most_bytes: Of an upload.
        hosts: Names that this server answers to; all if None. A page elsewhere can give our address a name of its own,
            and would then be allowed to read what we answer.
    """

    def __init__(self, app: Any, *, folder: str | Path, most_bytes: int, hosts: Collection[str] | None = None):
        self.app, self.folder, self.most_bytes, self.hosts = app, Path(folder), most_bytes, hosts

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        path = scope["path"]
        if refusal is None and scope["method"] == "POST" and EVENTS.fullmatch(path):
            body = await _body(receive, MOST_JSON)
            refusal = (413, "the request is too long") if body is None else self.refusal_of_event(body)
            receive = _again(body or b"", receive)
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self.app(scope, receive, with_headers)

    def refusal(self, scope: Any) -> tuple[int, str] | None:
        """Status and reason if a request is refused for what its first lines say."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts is not None and _name(headers.get(b"host", "")) not in self.hosts:
            return 403, "this page is only served on the computer that it runs on"
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD", "POST") or len(path) > MOST_PATH or not PAGES.fullmatch(path):
            return 404, "there is no such page"
        if path.startswith(f"{API}/file=") and not is_uploaded(path.partition("=")[2], self.folder):
            return 403, "only files that were uploaded or made here are served"
        if path == f"{API}/upload":
            length = headers.get(b"content-length", "")
            if not length.isdecimal():
                return 411, "an upload must say how long it is"
            if int(length) > self.most_bytes + EXTRA:
                return 413, f"the file is too large; expected at most {self.most_bytes / 2**20:g} MB"
        return None

    def refusal_of_event(self, body: bytes) -> tuple[int, str] | None:
        """Likewise for what an event brings: files must be uploads, never addresses or other files."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return 400, "the request is no JSON"
        waiting = [content]
        while waiting:
            found = waiting.pop()
            if isinstance(found, dict):
                path = found.get("path")
                if path is not None and not (isinstance(path, str) and self._is_file(path)):
                    return 400, "a picture must be uploaded; paths and addresses are not opened"
                waiting += found.values()
            elif isinstance(found, list):
                waiting += found
        return None

    def _is_file(self, path: str) -> bool:
        return not ADDRESS.match(path) and is_uploaded(path, self.folder)


def _name(host: str) -> str:
    """A host without its port."""
    return host.rpartition(":")[0].lower() if re.search(r":\d*$", host) else host.lower()


async def _body(receive: Receive, most: int) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body"):
            return body


def _again(body: bytes, rest: Receive) -> Receive:
    """Whoever asks next receives the body that was read, and then what follows."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await rest()

    return receive


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason, "detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
