"""Images that arrive one by one go through the model together: whoever waits a moment is not alone."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Full(Exception):
    """As many requests are here as fit; try again."""


class Closed(Exception):
    """Nothing new is taken: the service is stopping."""


class BatchFailed(Exception):
    """The model failed on the batch that an image was in."""


class Answer(NamedTuple):
    """What came out for one image.

    Args:
        logits: (K,)
        batch: Images that went through the model together.
        waited, ran: Seconds before and in the model.
    """

    logits: np.ndarray
    batch: int
    waited: float
    ran: float


@dataclass(eq=False)  # two that wait are never the same one
class _Waiting:
    image: np.ndarray
    answer: "asyncio.Future[Answer]"
    since: float


class Batcher:
    """A queue before one worker thread, the only one that runs the model.

    All bookkeeping is done on the event loop, so nothing is locked: an image and the future of its answer stay side by
    side in one object from `ask` to the answer. While a batch runs the next one gathers; it leaves when it is full, or
    when its first image has waited for `max_wait`. Call `start` and `close` on the loop.

    Args:
        run: (B, C, H, W) -> logits (B, K).
        max_batch: The most images of a batch.
        max_wait: Seconds.
        max_waiting: The most requests that are here at once, from their upload to their answer.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], np.ndarray],
        *,
        max_batch: int = 16,
        max_wait: float = 0.005,
        max_waiting: int = 128,
    ):
        self.run, self.max_batch, self.max_wait, self.max_waiting = run, max_batch, max_wait, max_waiting
        self.here = 0
        self.sizes: Counter[int] = Counter()  # batches by their number of images
        self.failed = 0  # batches
        self.withdrawn = 0  # images that nobody waits for any more
        self._waiting: deque[_Waiting] = deque()
        self._worker = ThreadPoolExecutor(1, "model")
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._work())

    @property
    def works(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def waiting(self) -> int:
        """Images before the model."""
        return len(self._waiting)

    @contextmanager
    def place(self) -> Generator[None, None, None]:
        """A place for a request, taken before its upload is read: what waits here takes memory.

        Raises:
            Full: There is none.
            Closed: There will be none.
        """
        if self._closed:
            raise Closed
        if self.here >= self.max_waiting:
            raise Full
        self.here += 1
        try:
            yield
        finally:
            self.here -= 1

    async def ask(self, image: np.ndarray) -> Answer:
        """The answer for one image (C, H, W). To be cancelled at any time; others do not notice.

        Raises:
            BatchFailed: With the reason.
            Closed: The service stopped before.
        """
        if self._closed:
            raise Closed
        loop = asyncio.get_running_loop()
        mine = _Waiting(image, loop.create_future(), loop.time())
        self._waiting.append(mine)
        self._changed.set()
        try:
            return await mine.answer
        except asyncio.CancelledError:
            self.withdrawn += 1
            with suppress(ValueError):  # it may be in the model already; then its answer is dropped
                self._waiting.remove(mine)
            raise

    async def close(self) -> None:
        """Take no more, answer all that wait, end the thread."""
        self._closed = True
        if self._task is not None:
            self._changed.set()
            await self._task
        self._worker.shutdown()

    async def _work(self) -> None:
        while batch := await self._next():
            await self._answer(batch)

    async def _next(self) -> list[_Waiting]:
        """The next batch; empty at the end."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            if self._waiting:
                left = self._waiting[0].since + self.max_wait - loop.time()
                if len(self._waiting) >= self.max_batch or left <= 0 or self._closed:
                    return [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]
                alarm = loop.call_later(left, self._changed.set)
                await self._changed.wait()
                alarm.cancel()
            elif self._closed:
                return []
            else:
                await self._changed.wait()

    async def _answer(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.sizes[len(batch)] += 1
        try:
            logits = await loop.run_in_executor(self._worker, self._run, [one.image for one in batch])
        except Exception as error:
            self.failed += 1
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(BatchFailed(reason))
            return
        ran = loop.time() - started
        for one, row in zip(batch, logits, strict=True):
            if not one.answer.done():
                one.answer.set_result(Answer(row, len(batch), started - one.since, ran))

    def _run(self, images: list[np.ndarray]) -> np.ndarray:
        logits = self.run(np.stack(images))
        if len(logits) != len(images):  # whose are they?
            raise RuntimeError(f"{len(logits)} answers came for {len(images)} images")
        return logits
