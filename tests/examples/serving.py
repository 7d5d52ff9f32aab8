"""Stand-ins for the service's tests: a model whose answers can be computed by hand, and the service around it."""

import asyncio
import io
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from options import Options
from PIL import Image
from service import Service, config_for, create_app

from broadsight.deployment.session import Description, Session

SIDE, CLASSES = 8, ("red", "green", "blue")
POISON = (255, 0, 255)
COLOURS = [(37 * k % 256, 91 * k % 256, 151 * k % 256) for k in range(1, 65)]


class Colours:
    """Logits are the mean colours of an image times ten, or those of the next. Notes who calls, with how many.

    Black has no answer, and a batch with POISON fails. While `gate` is not set, a batch does not end.
    """

    def __init__(self, shifted: bool = False):
        self.shifted, self.gate = shifted, threading.Event()
        self.gate.set()
        self.batches, self.threads, self.inside, self.most_inside = [], set(), 0, 0

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.threads.add(threading.get_ident())
        self.gate.wait(60)
        self.batches.append(len(images))
        self.inside -= 1
        means = images.mean((2, 3))
        if (means == [1, 0, 1]).all(1).any():
            raise RuntimeError("poison\nand more lines")
        means[(means == 0).all(1)] = np.nan
        return [10 * (np.roll(means, 1, 0) if self.shifted else means)]


def session_of(run: Any, any_batch: bool = True) -> Session:
    """Images are colours between 0 and 1."""
    image = dict(channels=3, height=SIDE, width=SIDE, any_batch=any_batch, any_size=False)
    preprocessing = dict(crop=SIDE, crop_pct=1.0, interpolation="bicubic", mean=[0.0] * 3, std=[1.0] * 3)
    about = Description("classify", "colours", "colours", CLASSES, ("logits",), image, preprocessing)
    return Session(about, run)


def expected(colour: tuple[int, ...]) -> dict[str, float]:
    raised = np.exp(10 * np.array(colour) / 255)
    return dict(zip(CLASSES, raised / raised.sum(), strict=True))


def image(*colour: int, size: tuple[int, int] = (12, 9), form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be so large, and has one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\1\2\3")) + chunk(b"IEND", b"")


def check(response: httpx.Response, colour: tuple[int, ...]) -> None:
    assert response.status_code == 200, response.text
    found = {one["class"]: one["probability"] for one in response.json()["top"]}
    assert found == pytest.approx(expected(colour), abs=1e-5)


def send(client: httpx.AsyncClient, *colour: int, **given: Any) -> Coroutine[Any, Any, httpx.Response]:
    """Ask for an image of one colour."""
    return client.post("/classify", content=image(*colour), **given)


def sending(client: httpx.AsyncClient, colours: Iterable[tuple[int, ...]]) -> list[asyncio.Task[httpx.Response]]:
    """Ask for images of these colours at once."""
    return [asyncio.create_task(send(client, *colour)) for colour in colours]


def connected(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=30)


@asynccontextmanager
async def inside(run: Any, any_batch: bool = True, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """The service without a socket between: client and service in one process, ready."""
    app = create_app(lambda: session_of(run, any_batch), Options("colours", **options))
    async with beside(app) as client:
        await until_ready(client)
        run.batches.clear()
        yield client, app.state.service


@asynccontextmanager
async def beside(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client in the process of the service, while that lives."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=None) as client:
            yield client


@asynccontextmanager
async def listening(run: Any, **options: Any) -> AsyncIterator[tuple[str, uvicorn.Server, Service]]:
    """The service on a port of this computer, ready."""
    app = create_app(lambda: session_of(run), Options("colours", **options))
    config = config_for(app, app.state.service.options)
    config.port, config.log_level = 0, "error"
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.002)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with connected(url) as client:
        await until_ready(client)
    run.batches.clear()
    try:
        yield url, server, app.state.service
    finally:
        server.should_exit = True
        await serving


async def until_ready(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).status_code != 200:
        await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; it has to be soon."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.003)
    raise AssertionError("it is not so")
