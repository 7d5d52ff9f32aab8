"""Images that strangers send: bytes are counted as they come, pixels before they are unpacked."""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from broadsight.app.gate import without_paths
from broadsight.data.decoding import KINDS, UnreadableImage, decode, open_image

ENVELOPE = 16 * 2**10  # bytes around the file in a form

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # pixels are counted here


class Refused(Exception):
    """A request that gets no answer: status and reason in one line."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None):
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


class Bodies:
    """Bytes of all uploads that are here at once, under a limit."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.here = most_bytes, 0

    @contextmanager
    def held(self) -> Generator[Callable[[int], None], None, None]:
        """Gives a function that counts bytes as they come; they are here until the `with` ends.

        Raises:
            Refused: 503, by that function.
        """
        mine = 0

        def count(length: int) -> None:
            nonlocal mine
            if self.here + length > self.most_bytes:
                reason = f"uploads of {self.most_bytes / 2**20:g} MB are here already; try again"
                raise Refused(503, reason, {"retry-after": "1"})
            mine += length
            self.here += length

        try:
            yield count
        finally:
            self.here -= mine


async def read_upload(request: Request, most_bytes: int, count: Callable[[int], None] = lambda length: None) -> bytes:
    """The file of a form (multipart/form-data, whatever its field is called), or else the body as it is.

    No more than `most_bytes` are ever read, whatever the headers say, if they say anything. `count` gets the length of
    each piece.

    Raises:
        Refused: 413, 415 or 400.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "the body is compressed; send the image as it is")
    form = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
    counted = _counted(request, most_bytes, most_bytes + (ENVELOPE if form else 0), count)
    data = await _file_of(counted) if form else await counted.body()
    if not data:
        raise Refused(400, "the upload is empty; send an image as the body, or as the file of a form")
    if len(data) > most_bytes:
        raise _too_long(most_bytes)
    return data


def open_upload(data: bytes, most_pixels: float, channels: int) -> Image.Image:
    """An image in RGB or grey, upright; its header says how large it is before anything is unpacked.

    Raises:
        Refused: 413, 415 or 400.
    """
    try:
        with open_image(data) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise Refused(
                    413, f"the image has {width:,} x {height:,} pixels; expected up to {most_pixels / 1e6:g} million"
                )
            return decode(image, channels)
    except Refused:
        raise
    except (MemoryError, Image.DecompressionBombError):
        raise Refused(413, f"the image is far too large; expected up to {most_pixels / 1e6:g} million") from None
    except UnreadableImage as error:
        raise Refused(400, f"the image cannot be read: {error}") from None
    except Exception:  # PIL has many words for what it does not know
        raise Refused(415, f"the upload is not an image that is known here; expected {KINDS}") from None


def _counted(request: Request, most_bytes: int, most_of_body: int, count: Callable[[int], None]) -> Request:
    """The same request; reading beyond the limit raises."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most_of_body:
        raise _too_long(most_bytes)
    came = 0

    async def receive() -> Any:
        nonlocal came
        message = await request.receive()
        came += len(message.get("body", b""))
        if came > most_of_body:
            raise _too_long(most_bytes)
        count(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)


async def _file_of(request: Request) -> bytes:
    try:
        async with request.form(max_files=1, max_fields=8, max_part_size=ENVELOPE) as fields:
            for _, value in fields.multi_items():
                if isinstance(value, UploadFile):
                    return await value.read()
    except (Refused, ClientDisconnect):
        raise
    except HTTPException as error:
        raise Refused(400, f"the form cannot be read: {error.detail}") from None
    except Exception as error:  # without a boundary there is no form
        raise Refused(400, f"the form cannot be read: {type(error).__name__}: {without_paths(str(error))}") from None
    raise Refused(400, "the form has no file; send one, such as by curl --form file=@image.jpg")


def _too_long(most_bytes: int) -> Refused:
    # The connection stays open: uvicorn throws away what is still on its way, and the client lives to read the answer.
    return Refused(413, f"the upload has more than {most_bytes / 2**20:g} MB")
