"""A folder with one page that classifies images in the browser: no server code, no connection, no build step."""

import base64
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .... import __version__
from ....files import whole_folder
from ....weights.reading import inside
from ...session import Description, Session
from .. import Format, register
from ..onnx import INPUT, check_onnx, session_of
from . import runtime as web_runtime

SOURCE = files("broadsight.deployment.formats.web")
PAGE = ("index.html", "style.css", "resampling.js", "images.js", "model.js", "page.js")
MANIFEST = "manifest.js"
OPENING, CLOSING = "Bundle.manifest = ", ";\n"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
PART_NAME = re.compile(r"(runtime/(glue|wasm)|model/part)-\d{3,4}\.js")
PART_SCRIPT = re.compile(r'Bundle\.part\("([\w/.-]+)", "([A-Za-z0-9+/=]*)"\);\n')
PART = 6 * 2**20  # bytes of a file that go into one script, a few so that the page can tell how far it is
DAMAGED = (OSError, ValueError, EOFError, KeyError, TypeError, IndexError, zlib.error)  # by what a folder may hold


@register
class Web(Format):
    name, runtime = "web", "ONNX Runtime Web"
    packages, extra = ("onnx", "onnxscript", "onnxruntime"), "export"
    sizes = False
    int8, int8_batches = "web-int8", True

    def write(self, program: Any, description: Description, path: Path, *, ort_web: str | Path | None = None) -> None:
        """The folder of a page, complete or not at all.

        A page opened by double-click may load nothing but scripts. The model, the runtime's WebAssembly and the module
        that starts it are therefore scripts too: gzip in base64, in parts. All else is as it lies beside this file.
        The program is the path of an ONNX file; ort_web is the folder of ONNX Runtime Web, or None for cache or npm.
        """
        check_folder(path)
        runtime = require(description, ort_web)
        with whole_folder(path, replace=True) as unfinished:
            (unfinished / "runtime").mkdir()
            (unfinished / "model").mkdir()
            copied: dict[str, Any] = {name: SOURCE / name for name in PAGE}
            copied[f"runtime/{web_runtime.SCRIPT}"] = runtime / web_runtime.SCRIPT
            copied["runtime/LICENSE.txt"] = SOURCE / "LICENSE-onnxruntime.txt"
            for name, source in copied.items():
                (unfinished / name).write_bytes(source.read_bytes())
            packed = {
                "glue": _pack(unfinished, "runtime/glue", (runtime / web_runtime.GLUE).read_bytes()),
                "wasm": _pack(unfinished, "runtime/wasm", (runtime / web_runtime.WASM).read_bytes()),
                "model": _pack(unfinished, "model/part", Path(program).read_bytes()),
            }
            said = {
                "made": f"broadsight {__version__}, onnxruntime-web {web_runtime.version(runtime)}",
                "description": json.loads(description.to_json()),
                "packed": packed,
                "files": sorted([*_below(unfinished), MANIFEST]),
            }
            (unfinished / MANIFEST).write_text(manifest_text(said), encoding="utf-8")

    def open(self, path: str | Path, threads: int | None = None) -> Session:
        """Under node in the folder's own runtime, which has one thread, or else in ONNX Runtime.

        Node executes what lies in the folder, so only if those are the very files that `write` puts there.
        """
        from . import node

        description = Description.from_json(json.dumps(manifest(path)["description"]))
        model = model_bytes(path)
        check_onnx(model)
        if node.node() is not None and node.is_ours(path):
            return Session(description, node.NodeModel(path))
        session = session_of(model, threads)
        return Session(description, lambda images: session.run(list(description.outputs), {INPUT: images}))

    def owns(self, path: Path) -> bool:
        return path.is_dir()


def model_bytes(folder: str | Path) -> bytes:
    """The ONNX file inside a folder, as it was given to `write`; a ValueError if a part is missing or damaged."""
    try:
        said = manifest(folder)["packed"]["model"]
        model = unpacked(folder, said["parts"])
    except DAMAGED as error:
        raise ValueError(f"the model in {folder} is damaged ({error}); export it again") from None
    if hashlib.sha256(model).hexdigest() != said["sha256"]:
        raise ValueError(f"the model in {folder} is not the one that was exported; export it again")
    return model


def manifest(folder: str | Path) -> dict[str, Any]:
    """What a folder says of itself: made, description, packed (parts, bytes, sha256), files."""
    try:
        text = (Path(folder) / MANIFEST).read_text(encoding="utf-8")
        found = json.loads(text.removeprefix(OPENING).removesuffix(CLOSING))
        if not found.keys() >= {"description", "packed", "files"}:
            raise ValueError
        return found
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{folder} is not the folder of a page that `broadsight export --format web` wrote") from None


def manifest_text(said: dict[str, Any]) -> str:
    return OPENING + json.dumps(said, indent=1) + CLOSING


def require(description: Description, ort_web: str | Path | None = None) -> Path:
    """The folder of ONNX Runtime Web's files; refuses what the page could not do as Python does it."""
    if description.task != "classify":
        raise ValueError(f"the format web shows classifiers; {description.title} is for --task {description.task}")
    said = description.preprocessing
    if missing := [key for key in ("resize", "crop", "interpolation", "mean", "std") if key not in said]:
        raise ValueError(f"{description.title} does not say how images are prepared: no {', '.join(missing)}")
    if said["interpolation"] not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation={said['interpolation']} of {description.title}; a page can do {', '.join(INTERPOLATIONS)}"
        )
    channels, height, width = description.shape
    if channels not in (1, 3):
        raise ValueError(f"{description.title} takes images of {channels} channels; a page can give 1 (grey) or 3")
    if not height == width == said["crop"]:
        raise ValueError(f"{description.title} takes {height} x {width} pixels, but a crop of {said['crop']} is made")
    if not len(said["mean"]) == len(said["std"]) == channels:
        raise ValueError(f"{description.title} has {len(said['mean'])} means for {channels} channels")
    if not isinstance(said["resize"], int):
        raise ValueError(f"resize={said['resize']} of {description.title}; expected pixels of the shorter side")
    return web_runtime.find(ort_web)


def check_folder(folder: str | Path) -> None:
    """Refuse a place that holds anything that `write` has not made."""
    folder = Path(folder)
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the folder that this runs in, which cannot be replaced; give another")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is there and no folder; give a new one")
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        ours = set(manifest(folder)["files"])
    except ValueError:
        raise ValueError(f"{folder} is not empty and not the folder of such a page; give a new one") from None
    if others := sorted(_below(folder) - ours):
        raise ValueError(f"{folder} also holds {others[0]}, which would be lost; move it or give a new folder")


def _below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _pack(folder: Path, stem: str, content: bytes) -> dict[str, Any]:
    """A file as scripts: what the manifest says of it."""
    parts = []
    for place, start in enumerate(range(0, len(content), PART)):
        name = f"{stem}-{place:03d}.js"
        # level 1: weights hardly get smaller by more; no time stamp, so that the same model gives the same file
        level = 6 if len(content) < 2**24 else 1
        text = base64.b64encode(gzip.compress(content[start : start + PART], level, mtime=0)).decode()
        (folder / name).write_text(f'Bundle.part("{name}", "{text}");\n', encoding="ascii")
        parts.append(name)
    return {"parts": parts, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def unpacked(folder: str | Path, parts: Sequence[str]) -> bytes:
    """A file that `_pack` made scripts of; a ValueError if a part is no such script, or larger than parts are."""
    found = []
    for name in parts:
        if not PART_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no part of a page")
        script = inside(folder, name)
        if script.stat().st_size > 2 * PART:
            raise ValueError(f"{name} is larger than a part")
        said = PART_SCRIPT.fullmatch(script.read_text(encoding="ascii"))
        if said is None or said[1] != name:
            raise ValueError(f"{name} is no part of a page")
        # 31: gzip. No more than a part has, whatever it was packed from
        opened = zlib.decompressobj(31)
        found.append(opened.decompress(base64.b64decode(said[2], validate=True), PART + 1))
        if len(found[-1]) > PART or not opened.eof:
            raise ValueError(f"{name} is damaged")
    return b"".join(found)
