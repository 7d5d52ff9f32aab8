"""Clients that know the right answers: what each of them is told is compared with what the model says by itself."""

import asyncio
import io
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from broadsight.data.decoding import decode
from broadsight.data.scenes import Scenes
from broadsight.data.sources.unlabelled import find_images
from broadsight.deployment.images import image_to_images, top_classes
from broadsight.deployment.session import Session

APART = 0.02  # log-probability: images whose answers are nearer than this could not be told apart
TRIES = 200  # of a request that is sent away with 503
PATIENCE = 120.0  # seconds for an answer


@dataclass(frozen=True)
class Known:
    """An image and its right answer.

    Args:
        data: The file.
        probabilities: (K,)
    """

    data: bytes
    probabilities: np.ndarray


@dataclass
class Tally:
    """What happened to the requests of one service.

    Args:
        lost: Without any answer; `failed`: with another status than 200, by status; `mixed`: with somebody else's
            answer, by its id or its numbers; `wrong`: with their own, but not to within the tolerance.
        refused: Times that a request was sent away with 503 and came again.
        seconds: Of each answered request from its (last) start to its end; `rounds`: answers per second of each round.
        error: The largest difference of a probability.
    """

    asked: int = 0
    answered: int = 0
    lost: int = 0
    mixed: int = 0
    wrong: int = 0
    refused: int = 0
    error: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    @property
    def faultless(self) -> bool:
        return self.answered == self.asked > 0 and not (self.lost or self.mixed or self.wrong or self.failed)


def known_images(session: Session, count: int, folder: str | None) -> tuple[list[Known], float]:
    """Images whose answers can be told apart, asked one by one without any service; and how many went in a second."""
    prepare, name = image_to_images(session.description), session.description.outputs[0]
    source = find_images([folder], None)[0] if folder else Scenes(4 * count, size=256, split="test")
    found: list[Known] = []
    busy, asked = 0.0, 0
    for index in range(len(source)):
        file = io.BytesIO()
        source.open(index).convert("RGB").save(file, "JPEG", quality=90)
        started = time.perf_counter()
        image = decode(file.getvalue(), session.description.image["channels"])
        logits = session(prepare(image)[None])[name][0]
        if index:  # the first call is slow
            busy, asked = busy + time.perf_counter() - started, asked + 1
        mine = Known(file.getvalue(), probabilities_of(top_classes(session.description, logits, len(logits))))
        if all(distance(mine.probabilities, other.probabilities) > APART for other in found):
            found.append(mine)
        if len(found) == count:
            break
    if len(found) < 2:
        raise ValueError(
            f"{session.description.title} gives the same answer to {len(source)} images, so nobody could tell if "
            "they were mixed up; take a trained model, or other images by --images"
        )
    return found, asked / busy


def probabilities_of(top: Sequence[dict[str, Any]]) -> np.ndarray:
    """In the order of the classes."""
    return np.array([one["probability"] for one in sorted(top, key=lambda one: one["index"])])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of log-probabilities: tells apart what is nearly certain, too."""
    return float(np.abs(np.log(one + 1e-30) - np.log(other + 1e-30)).max())


async def storm(
    url: str, known: list[Known], tally: Tally, *, clients: int, requests: int, tolerance: float, seed: int = 0
) -> None:
    """One round: all clients at once, each with a connection of its own and beginning with another image."""
    order = random.Random(seed).sample(range(len(known)), len(known))

    async def one_client(number: int, client: httpx.AsyncClient) -> None:
        for request in range(requests):
            name, own = f"{seed}-{number}-{request}", order[(number + request) % len(known)]
            tally.asked += 1
            response = await _ask(client, name, known[own], request % 2 == 1, tally)
            if response is not None:
                _judge(response, name, own, known, tolerance, tally)

    async with AsyncExitStack() as stack:
        # verify=False: certificates that nobody here needs take longer to read than an image to classify.
        ready = [
            httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, verify=False) for _ in range(clients)
        ]
        for client in ready:
            await stack.enter_async_context(client)
        before, started = tally.answered, time.perf_counter()
        await asyncio.gather(*(one_client(number, client) for number, client in enumerate(ready)))
        tally.rounds.append((tally.answered - before) / (time.perf_counter() - started))


async def _ask(client: httpx.AsyncClient, name: str, own: Known, form: bool, tally: Tally) -> httpx.Response | None:
    """One request, again and again while it is sent away; None if no answer came."""
    body: dict[str, Any] = {"files": {"file": ("image.jpg", own.data)}} if form else {"content": own.data}
    for _ in range(TRIES):
        started = time.perf_counter()
        try:
            response = await client.post(
                "/classify", params={"top": len(own.probabilities)}, headers={"X-Request-ID": name}, **body
            )
        except httpx.HTTPError as error:
            tally.lost += 1
            tally.reasons[f"{type(error).__name__} {error}"] += 1
            return None
        if response.status_code == 200:
            tally.answered += 1
            tally.seconds.append(time.perf_counter() - started)
            return response
        if response.status_code != 503:
            break
        tally.refused += 1
        await asyncio.sleep(float(response.headers.get("retry-after", 1)) * random.uniform(0.1, 1))
    tally.failed[str(response.status_code)] += 1
    tally.reasons[response.text[:200]] += 1
    return None


def _judge(response: httpx.Response, name: str, own: int, known: list[Known], tolerance: float, tally: Tally) -> None:
    """Whose answer is it, and is it right?"""
    said = response.json()
    found = probabilities_of(said["top"])
    error = float(np.abs(found - known[own].probabilities).max())
    nearest = int(np.argmin([distance(found, other.probabilities) for other in known]))
    tally.error = max(tally.error, error)
    if not said["id"] == name == response.headers.get("x-request-id") or nearest != own:
        tally.mixed += 1
    elif error > tolerance:
        tally.wrong += 1
