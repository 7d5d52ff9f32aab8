"""The gate of a local server: checks who asks, under which host name, and how long a request claims to be.

A web page elsewhere can make a visitor's browser ask this computer, even under a name of its own (DNS rebinding), and
read our answers. So the name in `Host`, and the page in `Origin`, must be ours.
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Refusal = tuple[int, str]
Header = tuple[bytes, bytes]

LOOPBACK = frozenset(("127.0.0.1", "localhost", "[::1]"))
AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::([1-9][0-9]{0,4}))?")
ORIGIN = re.compile(r"(https?)://([^/?#@\\\s]+)")
# Headers of proxies. No proxy is expected here, so they are dropped.
PROXY_HEADERS = re.compile(rb"(x-)?forwarded(-.*)?|x-real-ip|x-original-.*|x-gradio-.*|x-direct-url|x-http-method.*")
# /a/b, ~/a, C:\\a, \\\\host\\a or file:///a, up to where a path surely ends
PATH = re.compile(r"""(?<![\w.:/\\~])(?:file://+|~|[a-z]:)?[/\\][^\s'"<>|,;()]*[^\s'"<>|,;().:]""", re.IGNORECASE)
WHOLE_PATH = re.compile(r"(?:file://+|~|[a-z]:)?[/\\]", re.IGNORECASE)
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
HEADERS += ((b"x-frame-options", b"DENY"), (b"cross-origin-resource-policy", b"same-origin"))


class Gate:
    """ASGI middleware: refuses requests under other names, of other sites, and of unclear length.

    `allowed` are names beside those of this computer; `pages` are paths that a link on another site may lead to.
    """

    def __init__(self, app: Any, *, allowed: Collection[str] = (), pages: Collection[str] = ()):
        self.app, self.allowed, self.pages = app, frozenset(allowed), frozenset(pages)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            if refused := self.refusal(scope):
                return await refuse(send, *refused)
            kept = [pair for pair in scope["headers"] if not PROXY_HEADERS.fullmatch(pair[0].lower())]
            await self.let_in({**scope, "headers": kept}, receive, _with_headers(send))

    def refusal(self, scope: Any) -> Refusal | None:
        """Status and reason if a request is refused for what its first lines say."""
        lengths, codings = header(scope, b"content-length"), header(scope, b"transfer-encoding")
        if lengths and codings:
            return 400, "Content-Length together with Transfer-Encoding; send one of them"
        if len(lengths) > 1 or any(not re.fullmatch(r"[0-9]{1,18}", length) for length in lengths):
            return 400, "Content-Length must be one number"
        if codings and codings != ["chunked"]:
            return 501, "Transfer-Encoding must be chunked"
        if codings and scope.get("http_version", "1.1") == "1.0":
            return 400, "HTTP/1.0 has no Transfer-Encoding"
        hosts = header(scope, b"host")
        if len(hosts) != 1:
            return 400, "a request must have one Host"
        if not self._is_allowed(hosts[0], scope):
            return 403, "this server does not answer to that host name; --allow-host NAME lets it"
        return self._refusal_of_site(scope)

    def _refusal_of_site(self, scope: Any) -> Refusal | None:
        """Refuse another site's page: `Origin` says so, or its browser does in `Sec-Fetch-Site`."""
        origins, sites = header(scope, b"origin"), header(scope, b"sec-fetch-site")
        found = [ORIGIN.fullmatch(origin.lower()) for origin in origins]
        ours = [one and self._is_allowed(one[2], scope, 80 if one[1] == "http" else 443) for one in found]
        if len(ours) <= 1 and all(ours):
            if not sites or sites in (["same-origin"], ["none"]):
                return None
            link = header(scope, b"sec-fetch-mode") == ["navigate"] and header(scope, b"sec-fetch-dest") == ["document"]
            if link and not origins and scope["method"] in ("GET", "HEAD") and scope["path"] in self.pages:
                return None
        return 403, "another site's page may not ask this server"

    def _is_allowed(self, authority: str, scope: Any, usual_port: int = 80) -> bool:
        """Tell whether `name` or `name:port` is this server's: loopback, the address that was asked, or one allowed."""
        found = AUTHORITY.fullmatch(authority.lower())
        if found is None:
            return False
        name, port = found[1], int(found[2] or usual_port)
        address, served = (scope.get("server") or (None, None))[:2]
        own = {f"[{address}]" if ":" in str(address) else str(address)} - {"None", "0.0.0.0", "[::]"}
        if name in LOOPBACK | own and port == served:
            return True
        return f"{name}:{port}" in self.allowed or (name in self.allowed and (found[2] is None or port == served))

    async def let_in(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass on a request that is not refused."""
        await self.app(scope, receive, send)


def allowed_names(given: str) -> frozenset[str]:
    """Host names that a user lists, with commas, as `name` or `name:port`; in lower case. No http://, no wildcard."""
    names = [name.strip().lower() for name in given.split(",")] if given.strip() else []
    for name in names:
        found = AUTHORITY.fullmatch(name)
        if found is None or (found[2] and int(found[2]) > 65535):
            raise ValueError(f"--allow-host {name!r}; expected a host name such as gpu.example or gpu.example:8080")
    return frozenset(names)


def header(scope: Any, name: bytes) -> list[str]:
    """All values that a request has under a name."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def without(headers: Iterable[Header], *names: bytes) -> list[Header]:
    """Headers but those of some names."""
    return [pair for pair in headers if pair[0].lower() not in names]


def without_paths(value: Any) -> Any:
    """Shorten every absolute path in all texts of a value to its last part: visitors need not know the folders here."""
    if isinstance(value, str):
        return _last_part(value) if WHOLE_PATH.match(value) else PATH.sub(lambda path: _last_part(path[0]), value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(one) for key, one in value.items()}
    return [without_paths(one) for one in value] if isinstance(value, list | tuple) else value


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


async def refuse(send: Send, status: int, reason: str) -> None:
    """Answer with a reason in one line. The connection is closed if the end of the request is not clear."""
    body = json.dumps({"error": reason, "detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if status in (400, 501) else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *HEADERS]})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    """Make a `send` that adds our headers to answers, and drops those that let another site read them."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if not pair[0].lower().startswith(b"access-control-")]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    return with_headers
