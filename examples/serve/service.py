"""An exported classifier behind HTTP.

python examples/serve/service.py model.onnx --port 8000
curl --form file=@image.jpg http://127.0.0.1:8000/classify
"""

import asyncio
import logging
import re
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import numpy as np
import uvicorn
from batching import Batcher, BatchFailed, Closed, Full
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from options import Options, parse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uploads import Bodies, Refused, open_upload, read_upload

from broadsight.app.connections import Patience, config_of
from broadsight.app.gate import Gate, allowed_names, without_paths
from broadsight.deployment.formats import open_artefact
from broadsight.deployment.images import image_to_images, top_classes
from broadsight.deployment.session import Description, Session

log = logging.getLogger("uvicorn.error")
T = TypeVar("T")
SOON = {"retry-after": "1"}  # seconds
GONE = 499  # what nobody reads: the client has left
BODIES = {
    "multipart/form-data": {
        "schema": {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}}
    },
    "image/*": {"schema": {"type": "string", "format": "binary"}},
}


class Service:
    """What the routes share: the model with its queue, once it is loaded, and what has been counted.

    Args:
        open_session: Called once, in a thread.
    """

    def __init__(self, open_session: Callable[[], Session], options: Options):
        self.open_session, self.options = open_session, options
        self.batcher: Batcher | None = None
        self.failure, self.stopping, self.started = "", False, time.time()
        self.answers: Counter[int] = Counter()  # by status
        self.decoders = ThreadPoolExecutor(options.decoders, "decoder")
        self.bodies = Bodies(int(options.max_total_megabytes * 2**20))

    @property
    def status(self) -> str:
        if self.stopping:
            return "stopping"
        if self.failure or (self.batcher is not None and not self.batcher.works):
            return "failed"
        return "loading" if self.batcher is None else "ready"

    async def load(self) -> None:
        try:
            batcher = await asyncio.get_running_loop().run_in_executor(self.decoders, self._load)
        except Exception as error:
            self.failure = (str(error).splitlines() or [type(error).__name__])[0]
            return
        batcher.start()
        self.batcher = batcher

    def _load(self) -> Batcher:
        session, options = self.open_session(), self.options
        self.description = session.description
        self.prepare = image_to_images(self.description)
        most = options.max_batch if self.description.image["any_batch"] else 1
        name = self.description.outputs[0]
        blank = np.zeros((most, *self.description.shape), np.float32)
        session(blank[:1]), session(blank)  # the first calls are slow, and nobody should wait for them
        return Batcher(
            lambda images: session(images)[name],
            max_batch=most,
            max_wait=options.max_wait_ms / 1000,
            max_waiting=options.max_waiting,
        )

    async def close(self) -> None:
        """Whoever waits is answered before."""
        self.stopping = True
        if self.batcher is not None:
            await self.batcher.close()
        self.decoders.shutdown()

    async def classify(self, request: Request, top: int) -> dict[str, Any]:
        if self.batcher is None or self.status != "ready":
            raise Refused(503, f"the service is {self.status}", SOON)
        deadline = time.monotonic() + self.options.timeout
        try:
            with self.batcher.place(), self.bodies.held() as count:
                most = int(self.options.max_megabytes * 2**20)
                slow = Refused(408, "the upload took too long", {"connection": "close"})
                data = await _until(deadline, read_upload(request, most, count), slow)
                busy = Refused(503, f"there was no answer within {self.options.timeout:g} s", SOON)
                return await _until(deadline, _while_there(request, self._answer(self.batcher, data, top)), busy)
        except Full:
            raise Refused(503, f"{self.options.max_waiting} requests are here already; try again", SOON) from None
        except Closed:
            raise Refused(503, "the service is stopping", SOON) from None
        except BatchFailed as error:
            log.error("a batch failed: %s", error)
            raise Refused(500, "the model failed on this batch; the service's log says why") from None

    async def _answer(self, batcher: Batcher, data: bytes, top: int) -> dict[str, Any]:
        image = await asyncio.get_running_loop().run_in_executor(self.decoders, self._image, data)
        answer = await batcher.ask(image)
        try:
            found = top_classes(self.description, answer.logits, top)
        except ValueError as error:
            raise BatchFailed(str(error)) from None
        milliseconds = {"waited": round(1000 * answer.waited, 3), "ran": round(1000 * answer.ran, 3)}
        return {"top": found, "batch": answer.batch, "milliseconds": milliseconds}

    def _image(self, data: bytes) -> np.ndarray:
        pixels = self.options.max_megapixels * 1e6
        return self.prepare(open_upload(data, pixels, self.description.image["channels"]))

    def metrics(self) -> dict[str, Any]:
        batcher = self.batcher
        sizes = dict(sorted(batcher.sizes.items())) if batcher else {}
        return {
            "status": self.status,
            "seconds": round(time.time() - self.started, 3),
            "cpu_seconds": round(time.process_time(), 3),
            "here": batcher.here if batcher else 0,
            "waiting": batcher.waiting if batcher else 0,
            "answers": {str(status): count for status, count in sorted(self.answers.items())},
            "images": sum(size * count for size, count in sizes.items()),
            "batches": sum(sizes.values()),
            "batch_sizes": {str(size): count for size, count in sizes.items()},
            "failed_batches": batcher.failed if batcher else 0,
            "withdrawn": batcher.withdrawn if batcher else 0,
        }


async def _until(deadline: float, work: Coroutine[Any, Any, T], late: Refused) -> T:
    try:
        return await asyncio.wait_for(work, max(0.001, deadline - time.monotonic()))
    except (TimeoutError, asyncio.TimeoutError):
        raise late from None


async def _while_there(request: Request, work: Awaitable[T]) -> T:
    """Work that is dropped when the client leaves. Its upload has been read, so nothing else can come."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def create_app(
    open_session: Callable[[], Session], options: Options, loaded: Callable[[Service], None] = lambda service: None
) -> FastAPI:
    """The service as an ASGI application, which loads its model when it is started.

    Args:
        open_session: Called once, in a thread.
        loaded: Called once, whether that went well or not.
    """
    service = Service(open_session, options)

    async def load() -> None:
        await service.load()
        loaded(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load())
        yield
        await loading
        await service.close()

    # The pages that FastAPI makes of itself load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="broadsight", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, allowed=allowed_names(options.allow_host))
    app.state.service = service

    @app.post("/classify", openapi_extra={"requestBody": {"content": BODIES, "required": True}})
    async def classify(request: Request, top: Annotated[int, Query(ge=1, le=1_000_000)] = 5) -> Response:
        name, status = request.headers.get("x-request-id", ""), 500
        try:
            if name and not re.fullmatch(r"[\x21-\x7e]{1,128}", name):
                name = ""
                raise Refused(400, "X-Request-ID is not a word of up to 128 characters")
            name = name or uuid.uuid4().hex
            answer = await service.classify(request, top)
            status = 200
            return JSONResponse({"id": name, **answer}, headers={"x-request-id": name})
        except Refused as error:
            status = error.status
            return _refusal(error, name)
        except ClientDisconnect:
            status = GONE
            return Response(status_code=GONE)
        finally:
            service.answers[status] += 1

    @app.get("/health")
    async def health() -> Response:
        status = service.status
        why = {"error": "the model could not be opened; the service's log says why"} if service.failure else {}
        said = {"status": status, **why}
        return JSONResponse(said, 200 if status == "ready" else 503)

    @app.get("/model")
    async def model() -> Response:
        if service.batcher is None:
            return _refusal(Refused(503, f"the service is {service.status}", SOON))
        limits = asdict(options) | {"max_batch": service.batcher.max_batch}
        return JSONResponse(
            public(service.description) | {"limits": {key: limits[key] for key in limits if key.startswith("max_")}}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return JSONResponse(service.metrics())

    @app.exception_handler(HTTPException)
    async def of_starlette(request: Request, error: HTTPException) -> Response:
        return _refusal(Refused(error.status_code, str(error.detail).lower(), error.headers))

    @app.exception_handler(RequestValidationError)
    async def of_fastapi(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refusal(Refused(400, f"{first['loc'][-1]}={first['input']}: {first['msg'].lower()}"))

    return app


def public(description: Description) -> dict[str, Any]:
    """What strangers may know of an artefact: no command, and of paths the last part alone."""
    found = asdict(description)
    found["provenance"].pop("command", None)
    return without_paths(found) | {"classes": found["classes"]}


def config_for(app: FastAPI, options: Options) -> uvicorn.Config:
    """Settings of the server: nobody may dawdle, and no proxy is believed."""
    patience = Patience(connections=options.max_connections, head=options.head_timeout, body=options.timeout)
    wait = int(options.timeout) + 1
    return config_of(app, patience, log_level="warning", timeout_keep_alive=30, timeout_graceful_shutdown=wait)


def _refusal(error: Refused, name: str = "") -> JSONResponse:
    said = {"error": error.reason, **({"id": name} if name else {})}
    return JSONResponse(said, error.status, {**(error.headers or {}), **({"x-request-id": name} if name else {})})


def main() -> int:
    options = parse()

    def open_session() -> Session:
        import torch

        torch.set_num_threads(options.threads)
        return open_artefact(options.model, options.threads)

    def loaded(service: Service) -> None:
        if service.failure:
            print(f"service.py: {service.failure}", file=sys.stderr, flush=True)
            server.should_exit = True
        else:
            print(f"ready: {service.description.title}", flush=True)

    app = create_app(open_session, options, loaded)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0].lower()
        print(f"service.py: --host {options.host} --port {options.port}: {reason}; take another", file=sys.stderr)
        return 2
    name = f"[{options.host}]" if ":" in options.host else options.host
    print(f"http://{name}:{listening.getsockname()[1]} loads {options.model}", flush=True)
    server = uvicorn.Server(config_for(app, options))
    server.run(sockets=[listening])
    return 2 if app.state.service.failure else 0


if __name__ == "__main__":
    sys.exit(main())
