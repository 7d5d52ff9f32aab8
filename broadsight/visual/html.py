"""HTML from Jinja templates: the one environment that all pages of the package are rendered with."""

import base64
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from . import words

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def render(template: str, **data: Any) -> str:
    """HTML of a template, "report/page" for `broadsight/report/templates/page.html`; text of the data is escaped."""
    return environment().get_template(template.replace("/", "/templates/") + ".html").render(**data)


@cache
def environment() -> Environment:
    """The environment: it escapes what a template prints, and refuses names that the data lack."""
    options: Any = dict(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made = Environment(loader=FileSystemLoader(Path(__file__).parents[1]), finalize=printable, **options)
    filters = ("number", "percent", "amount", "plural", "sentence", "coordinate", "milliseconds")
    made.filters |= {name: getattr(words, name) for name in filters}
    made.tests["known"] = words.known
    return made


def printable(value: Any) -> Any:
    """Replace the characters of a text that cannot be printed, such as control characters; HTML stays as it is."""
    return value if hasattr(value, "__html__") else _UNPRINTABLE.sub("\ufffd", str(value))


def data_uri(image: Image.Image, form: str, **options: Any) -> str:
    """Encode an image in a format such as "PNG", as text that a browser shows without loading anything."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
