"""The door of the page: it lets in what the page needs, and nothing else.

Gradio alone would fetch addresses, relay requests, store uploads until the disk is full, and name their folder.
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote

from .gate import Gate, Message, Receive, Refusal, Send, header, refuse, without
from .uploads import Storage, is_uploaded

MOST_JSON = 2**20  # bytes of an event: names and numbers, and where the image is
EXTRA = 2**16  # bytes of an upload beside the file
MOST_PATH = 2048
MOST_READING = 256 * 2**20  # bytes of uploads that are on their way at once
MOST_STREAMS = 240  # answers that may be open at once, such as the page's own heartbeat
ALIAS = "/uploads"  # what visitors see instead of the folder of uploads
API = "/gradio_api"
PAGES = re.compile(
    r"/(config/?|theme\.css|favicon\.ico|robots\.txt|manifest\.json|pwa_icon(/\d+)?|(assets|static|svelte)/.*)?"
    rf"|{API}/(info/?|app_id/?|theme\.css|heartbeat/\w+|upload_progress|queue/(data|join)|upload|reset/?"
    r"|cancel|call/[\w/]+|run/\w+/?|api/\w+/?|file=.*)"
)
EVENTS = re.compile(rf"{API}/(queue/join|call/.+|run/.+|api/.+|reset/?|cancel)")
ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]+:|[/\\]{2})", re.IGNORECASE)
TEXTS = ("application/json", "text/html", "text/plain", "text/event-stream")
FILE, UPLOAD = f"{API}/file=", f"{API}/upload"


class Door(Gate):
    """ASGI middleware around the page; a file that an event names must be in `storage`, the folder of uploads."""

    def __init__(self, app: Any, storage: Storage, *, most_bytes: int, allowed: Collection[str] = ()):
        super().__init__(app, allowed=allowed, pages=("/",))
        self.storage, self.folder, self.most_bytes = storage, storage.folder, most_bytes
        self.reading = self.open = 0  # bytes of uploads on their way, and requests
        self._storing = asyncio.Lock()

    async def let_in(self, scope: Any, receive: Receive, send: Send) -> None:
        if self.open >= MOST_STREAMS:
            return await refuse(send, 503, "too many requests are here; try again")
        path, headers = scope["path"], without(scope["headers"], b"accept-encoding")  # to find paths in answers
        if path.startswith(FILE):
            path = FILE + self._real(path.removeprefix(FILE))
            scope = {**scope, "path": path, "raw_path": quote(path, safe="/=").encode()}
        else:
            send = hiding(send, self._hide)
        post = self._let_in_upload if path == UPLOAD else self._let_in_event
        let_in = post if scope["method"] == "POST" else self.app
        self.open += 1
        try:
            await let_in({**scope, "headers": headers}, receive, send)
        finally:
            self.open -= 1

    async def _let_in_upload(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass on a whole upload or none, so that nothing half is left on the disk."""
        length = int(header(scope, b"content-length")[0])
        if self.reading + length > max(MOST_READING, self.most_bytes + EXTRA):
            return await refuse(send, 503, "too many uploads are on their way; try again")
        self.reading += length
        try:
            parts = await body_parts(receive, length)
            if parts is None:
                return
            async with self._storing:  # one by one: none may take the room made for another
                files = sum(part.count(b"filename") for part in parts)  # one upload may bring many
                if not await asyncio.to_thread(self.storage.make_room, length, files):
                    return await refuse(send, 507, "there is no room for more uploads; try again later")
                await self.app(scope, again(parts, receive), send)
        finally:
            self.reading -= length

    async def _let_in_event(self, scope: Any, receive: Receive, send: Send) -> None:
        parts = await body_parts(receive, MOST_JSON)
        if parts is None:
            return await refuse(send, 413, "the request is too long")
        body = b"".join(parts)
        refused, body = self.read_event(body) if EVENTS.fullmatch(scope["path"]) else (None, body)
        if refused is None and not await asyncio.to_thread(self.storage.make_room):
            refused = 507, "there is no room for more answers; try again later"
        if refused:
            return await refuse(send, *refused)
        kept = without(scope["headers"], b"content-length", b"transfer-encoding")
        headers = [*kept, (b"content-length", str(len(body)).encode())]
        await self.app({**scope, "headers": headers}, again([body], receive), send)

    def refusal(self, scope: Any) -> Refusal | None:
        """Status and reason if a request is refused for what its first lines say."""
        if refused := super().refusal(scope):
            return refused
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD", "POST") or len(path) > MOST_PATH or not PAGES.fullmatch(path):
            return 404, "there is no such page"
        if path.startswith(FILE) and not is_uploaded(self._real(path.removeprefix(FILE)), self.folder):
            return 403, "only files that were uploaded or made here are served"
        if path == UPLOAD:
            length = header(scope, b"content-length")
            if not length:
                return 411, "an upload must say how long it is"
            if int(length[0]) > self.most_bytes + EXTRA:
                return 413, f"the file is too large; expected at most {self.most_bytes / 2**20:g} MB"
        return None

    def read_event(self, body: bytes) -> tuple[Refusal | None, bytes]:
        """Read an event: the refusal of a file that is no upload, and the body with the real paths of uploads."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return (400, "the request is no JSON"), b""
        waiting = [content]
        while waiting:
            found = waiting.pop()
            if isinstance(found, dict):
                if (path := found.get("path")) is not None:
                    real = self._real(path) if isinstance(path, str) else ""
                    if not real or ADDRESS.match(real) or not is_uploaded(real, self.folder):
                        return (400, "an image must be uploaded; paths and addresses are not opened"), b""
                    found["path"] = real
                waiting += found.values()
            elif isinstance(found, list):
                waiting += found
        return None, json.dumps(content).encode()  # written anew: another parser could read the original differently

    def _real(self, path: str) -> str:
        """The path of a file that visitors know under ALIAS."""
        rest = path.removeprefix(ALIAS)
        return f"{self.folder}{rest}" if rest != path and rest[:1] in ("/", "\\") else path

    def _hide(self, text: bytes) -> bytes:
        for spelling in {str(self.folder), self.folder.as_posix(), json.dumps(str(self.folder))[1:-1]}:
            for form in {spelling, quote(spelling)}:
                text = text.replace(form.encode(), ALIAS.encode())
        return text


async def body_parts(receive: Receive, most: int) -> list[bytes] | None:
    """Receive a whole body in its pieces, or None if it is longer than `most` or its client has left."""
    parts: list[bytes] = []
    while (message := await receive())["type"] != "http.disconnect":
        parts.append(message.get("body", b""))
        most -= len(parts[-1])
        if most < 0:
            break
        if not message.get("more_body"):
            return parts
    return None


def again(parts: list[bytes], rest: Receive) -> Receive:
    """Make a `receive` that gives the body that was read, and then what follows."""
    waiting: list[Message] = [dict(type="http.request", body=part, more_body=True) for part in parts]
    waiting[-1]["more_body"] = False

    async def receive() -> Message:
        return waiting.pop(0) if waiting else await rest()

    return receive


def hiding(send: Send, hide: Callable[[bytes], bytes]) -> Send:
    """Make a `send` that passes the lines of text answers through `hide`; these no longer say how long they are."""
    text, kept = False, b""

    async def hidden(message: Message) -> None:
        nonlocal text, kept
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"").decode("latin-1").partition(";")[0].strip()
            if text := kind in TEXTS:
                message = {**message, "headers": without(message["headers"], b"content-length")}
        elif message["type"] == "http.response.body" and text:
            kept += message.get("body", b"")
            cut = kept.rfind(b"\n") + 1 if message.get("more_body") else len(kept)
            message = {**message, "body": hide(kept[:cut])}
            kept = kept[cut:]
        await send(message)

    return hidden
