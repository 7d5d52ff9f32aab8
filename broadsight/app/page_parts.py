"""Parts that the tabs of the page share: the models, the image, and errors as one line."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from ..errors import first_line
from .candidates import Candidates
from .gate import without_paths
from .uploads import read_upload

LINE = 300  # letters of an error
# Everything that computes waits in one queue.
COMPUTE: dict[str, Any] = dict(concurrency_id="compute", concurrency_limit=1)
# Values come as the browser sent them, and are checked by us: Gradio's own reading of images knows no limits.
RAW: dict[str, Any] = dict(preprocess=False)


@dataclass(frozen=True)
class Page:
    """The page while it is built."""

    candidates: Candidates
    folder: Path  # of uploads
    megabytes: float  # that an upload may have
    image: gr.Image  # the input that all tabs look at
    tab: gr.State  # name of the tab that is open

    def read(self, payload: Any) -> Image.Image:
        """The image that the image input holds."""
        return read_upload(payload, self.folder, self.megabytes)


def in_one_line(function: Any) -> Callable[..., Any]:
    """Decorate a function of the page so that its errors are shown as one line, never as a traceback."""

    @functools.wraps(function)
    def safe(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            line = " ".join(first_line(error).split())
            line = line if len(line) <= LINE else line[: LINE - 3] + "..."
            if isinstance(error, ValueError):
                # Gradio shows it as HTML; our own sentences name no folder, those of libraries may
                title, text = "Not possible", escape(without_paths(line), quote=False)
            else:
                print(f"broadsight app: {function.__name__} failed: {line}", file=sys.stderr)
                title, text = "This failed", f"{type(error).__name__}; the terminal of broadsight app says why"
            raise gr.Error(text, print_exception=False, title=title) from None

    return safe
