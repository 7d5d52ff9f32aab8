"""A served page with two models, shared by the tests over HTTP and those in a browser."""

import asyncio
import io
import re

import pytest
import torch
from PIL import Image

from broadsight.app.answers import answer
from broadsight.app.candidates import Candidate, Candidates, untrained
from broadsight.runs.classifier import open_classifier
from tests.training.small_runs import leave_run


@pytest.fixture(scope="session")
def model():
    return untrained("cpu")


@pytest.fixture(scope="session")
def candidates(model, tmp_path_factory):
    torch.manual_seed(0)
    folder, _ = leave_run(tmp_path_factory.mktemp("runs") / "mine", num_classes=4)
    return Candidates([model, Candidate("mine", str(folder), True, open_classifier(folder))])


@pytest.fixture(scope="module")
def address(candidates):
    from broadsight.app.server import serving

    with serving(candidates, megabytes=1) as found:
        yield found


def shares(html: str) -> list[tuple[str, str]]:
    """Classes and percentages that the cards show."""
    return re.findall(r'bs-name">(.*?)</span><span class="bs-share">(.*?) %', html)


def expected(models, image) -> list[tuple[str, str]]:
    """Classes and percentages as the models say them."""
    return [(name, f"{100 * share:.1f}") for one in answer(list(models), image) for name, share in one.top]


def keeping(sent: list):
    """A `send` that keeps the messages."""

    async def send(message):
        sent.append(message)

    return send


def asked(app, path, *parts, headers=(), method="GET", address="127.0.0.1", version="1.1"):
    """Status, body and headers of an application's answer to a request, whose body comes in parts."""
    waiting = [dict(type="http.request", body=part, more_body=True) for part in parts or [b""]]
    waiting[-1]["more_body"] = False
    sent, given = [], dict(path=path, method=method, headers=headers, http_version=version, server=(address, 7860))

    async def receive():
        return waiting.pop(0)

    asyncio.run(app(dict(type="http", **given), receive, keeping(sent)))
    return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
