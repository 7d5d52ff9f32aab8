"""Templates: text of others stays text, and what is misspelt is an error."""

import base64
import io

import pytest
from jinja2 import UndefinedError
from PIL import Image

from broadsight.visual.html import data_uri, environment


def filled(template, **data):
    return environment().from_string(template).render(**data)


def test_templates__escape_texts_refuse_names_that_the_data_lack_and_show_images():
    assert filled("{{ x }}", x='<b>&"x"\'') == "&lt;b&gt;&amp;&#34;x&#34;&#39;"
    assert filled("{{ x }}", x="tab\tline\r\nend\x00\udcff") == "tab\tline\r\nend\ufffd\ufffd"
    assert filled("{% macro m(x) %}<b>{{ x }}</b>{% endmacro %}{{ m(x) }}", x="<\x1b") == "<b>&lt;\ufffd</b>"
    with pytest.raises(UndefinedError, match="'y' is undefined"):
        filled("{{ y }}", x=1)
    kind, _, data = data_uri(Image.new("RGB", (3, 2), "teal"), "PNG").partition(";base64,")
    assert kind == "data:image/png" and Image.open(io.BytesIO(base64.b64decode(data))).getpixel((1, 1)) == (0, 128, 128)
