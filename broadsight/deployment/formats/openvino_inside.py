"""What lies inside an OpenVINO .xml file, looked at before OpenVINO sees it."""

import re
from pathlib import Path
from xml.etree import ElementTree

LARGEST = 2**28  # bytes of the .xml file; weights are in the other one
DECLARED = re.compile(rb"<\?xml[^>]*encoding\s*=\s*[\"'](?!utf-8[\"'])", re.IGNORECASE)
OPSETS = re.compile(r"opset\d{1,3}")


def check_openvino(path: Path) -> None:
    """Refuse an .xml file that is no model, refers to others, or needs an extension; its weights lie beside it.

    Raises:
        ValueError: With what it holds.
    """
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"it has {size:,} bytes; expected {LARGEST:,} at most")
    content = path.read_bytes()
    try:
        content.decode("utf-8")
        # Entities may name files, and grow; other encodings could hide them. OpenVINO writes neither.
        if b"<!" in content or DECLARED.search(content):
            raise ValueError("it declares entities or another encoding; expected a plain model")
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no XML ({str(error).splitlines()[0]})") from None
    if root.tag != "net":
        raise ValueError(f"it describes a <{root.tag[:40]}>, not a <net>")
    weights = path.with_suffix(".bin")
    if weights.is_symlink() or not weights.is_file():
        raise ValueError(f"there is no {weights.name} beside it, a plain file of weights")
    stored = weights.stat().st_size
    for layer in root.iter("layer"):
        version = layer.get("version") or ""
        if not OPSETS.fullmatch(version):
            raise ValueError(f"its layer {str(layer.get('name'))[:60]!r} needs {version[:60]!r}; expected an opset")
        data = layer.find("data")
        if layer.get("type") == "Const" and data is not None:
            _check_place(str(layer.get("name")), data, stored)


def _check_place(name: str, data: ElementTree.Element, stored: int) -> None:
    try:
        offset, size = int(data.get("offset", "")), int(data.get("size", ""))
    except ValueError:
        raise ValueError(f"its tensor {name[:60]!r} does not say where it lies") from None
    if not 0 <= offset <= offset + size <= stored:
        raise ValueError(f"its tensor {name[:60]!r} lies beyond the {stored:,} bytes of its weights")
