"""Connections of a local server: a limited number at once, each within time limits, which uvicorn does not set."""

import asyncio
import re
import socket
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = re.compile(rb"\r?\n\r?\n")
LENGTH = re.compile(rb"^content-length[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Patience:
    """Limits of a server: how many connections, and how many seconds it waits for what."""

    connections: int = 256  # open at once; more are answered with 503
    head: float = 10.0  # from the connection, or from the first byte of a later request, to the end of its headers
    body: float = 20.0  # that a body may take, beside those that its bytes take at `rate`
    rate: float = 16 * 1024  # bytes a second that a client must manage
    linger: float = 5.0  # that the rest of a refused body is still read, so that the client sees the reason
    write: float = 60.0  # that a client may leave an answer unread
    head_bytes: int = 32 * 1024  # of all headers together


class _Protocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, with a clock beside it."""

    patience = Patience()

    def __init__(self, config: Any, *args: Any, **named: Any):
        super().__init__(config, *args, **named)
        self._clock: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._phase, self._came, self._began, self._head = "", 0, 0.0, b""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does so only for sockets that were made with the protocol's number; else an answer takes 40 ms more
        if (one := transport.get_extra_info("socket")) is not None and one.family in (socket.AF_INET, socket.AF_INET6):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.patience.connections:
            self._answer(503, b"too many connections are open; try again")
        else:
            self._turn("head")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and (problem := self._problem_of_head(data)):
            self._answer(400, problem)
            return
        self._came += len(data)
        if self._phase == "idle":
            self._turn("head")
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        for clock in filter(None, (self._clock, self._writing)):
            clock.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._writing or self.loop.call_later(self.patience.write, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _look(self) -> None:
        """Find out what is waited for now, and start its clock."""
        if self.transport.is_closing():
            return
        phase = "answer"
        if self.conn.their_state is h11.SEND_BODY:
            phase = "rest" if self.cycle is not None and self.cycle.response_complete else "body"
        elif self.conn.their_state is h11.IDLE:
            phase = "head" if self._head or self.cycle is None else "idle"
        self._head = self._head if phase == "head" else b""
        if phase != self._phase:
            self._turn(phase)

    def _turn(self, phase: str) -> None:
        """Start the clock of another phase. None runs during an answer, nor between requests, where uvicorn's does."""
        if self._clock is not None:
            self._clock.cancel()
        self._phase, self._came, self._began, self._clock = phase, 0, self.loop.time(), None
        waits = {"head": self.patience.head, "body": self.patience.body, "rest": self.patience.linger}
        if (seconds := waits.get(phase)) is not None:
            self._clock = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        left = self.patience.body + self._came / self.patience.rate - (self.loop.time() - self._began)
        if self._phase == "rest":
            self.transport.close()
        elif self._phase == "head" or (not self.flow.read_paused and left <= 0):
            self._answer(408, b"the request took too long")
        else:  # a body comes fast enough, or it is we who do not read
            self._clock = self.loop.call_later(max(left, 1.0), self._late)

    def _problem_of_head(self, data: bytes) -> bytes:
        """What is wrong with the headers so far that h11 would take: too long, or the body's length is there twice."""
        self._head += data
        head, *rest = HEAD.split(self._head, maxsplit=1)
        said = LENGTH.findall(head)
        if rest:
            self._head = b""
        if len(head) > self.patience.head_bytes:
            return b"the headers are too long"
        return b"Content-Length must be one number" if len(said) > 1 or b"," in b"".join(said) else b""

    def _answer(self, status: int, reason: bytes) -> None:
        """Say why, if nothing was said yet, and hang up."""
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE or (self.cycle is not None and not self.cycle.response_started):
            body = b'{"error": "%s"}' % reason
            line = b"HTTP/1.1 %d %s\r\nconnection: close\r\n" % (status, HTTPStatus(status).phrase.encode())
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(line + kind + body)
        self.transport.close()


def config_of(app: Any, patience: Patience, **options: Any) -> uvicorn.Config:
    """Settings of a server that keeps to these limits, believes no proxy and says nothing of itself."""
    options |= dict(ws="none", proxy_headers=False, server_header=False, access_log=False)
    protocol = type("PatientProtocol", (_Protocol,), {"patience": patience})
    return uvicorn.Config(app, http=protocol, h11_max_incomplete_event_size=patience.head_bytes, **options)


class ThreadServer(uvicorn.Server):
    """A server in a thread of its own, which leaves signals to the main thread."""

    def start(self, sockets: list[Any]) -> None:
        """Serve; returns once it listens, or raises RuntimeError if it did not start within a minute."""
        self.thread = threading.Thread(target=self.run, args=(sockets,), daemon=True, name="broadsight-app")
        self.thread.start()
        end = time.monotonic() + 60
        while not self.started:
            if not self.thread.is_alive() or time.monotonic() > end:
                raise RuntimeError("the server did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Hang up and wait for the thread."""
        self.should_exit = True
        self.thread.join(5.0)
