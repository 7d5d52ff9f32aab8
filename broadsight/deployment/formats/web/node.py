"""The model of an exported page outside the browser: under node, with the very files of the folder."""

import hashlib
import json
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from importlib.resources import as_file
from pathlib import Path
from typing import Any

import numpy as np

from ....weights.reading import inside
from . import DAMAGED, DIGESTS, GLUE, MANIFEST, SCRIPT, SOURCE, WASM, manifest, manifest_text, unpacked

OLDEST = 18  # of node: it brings what the page unpacks its files with


@cache
def node() -> str | None:
    """The program, or None where there is none that is new enough."""
    found = shutil.which("node")
    if found is None:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
        return found if int(said.strip().lstrip("v").split(".")[0]) >= OLDEST else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def is_ours(folder: str | Path) -> bool:
    """Whether all that node would execute of a folder is what `broadsight export` puts there, byte by byte."""
    try:
        said = manifest(folder)
        runtime = {SCRIPT: inside(folder, f"runtime/{SCRIPT}").read_bytes()}
        packed = ((GLUE, said["packed"]["glue"]), (WASM, said["packed"]["wasm"]))
        runtime |= {name: unpacked(folder, one["parts"]) for name, one in packed}
        plain = inside(folder, MANIFEST).read_text(encoding="utf-8") == manifest_text(said)
        plain = plain and (Path(folder) / "model.js").read_bytes() == (SOURCE / "model.js").read_bytes()
    except DAMAGED:
        return False
    return plain and all(hashlib.sha256(runtime[name]).hexdigest() == one for name, one in DIGESTS.items())


class NodeModel:
    """A folder's model in a process of node, which lives until this is closed or forgotten."""

    def __init__(self, folder: str | Path):
        program = node()
        if program is None:
            raise ValueError(f"there is no node of version {OLDEST} or later; the page itself needs a browser only")
        manifest(folder)
        self.folder = folder
        scratch = tempfile.TemporaryDirectory(prefix="broadsight-web-")
        self.scratch = Path(scratch.name)
        with as_file(SOURCE / "check.mjs") as script:
            command = [program, str(script), str(Path(folder).absolute()), scratch.name]
            piped: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.process: subprocess.Popen[str] = subprocess.Popen(command, **piped)
            self.close = weakref.finalize(self, _end, self.process, scratch)
            self._answer()

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        """Normalised images (B, C, H, W) -> the outputs in order."""
        np.ascontiguousarray(images, "<f4").tofile(self.scratch / "images")
        shape = dict(zip(("count", "channels", "height", "width"), images.shape, strict=True))
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(shape) + "\n")
        self.process.stdin.flush()
        shapes = self._answer()["shapes"]
        numbers = np.fromfile(self.scratch / "outputs", "<f4")
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(numbers, ends), shapes, strict=True)]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": "node ended without an answer"}
        if "error" in found:
            self.close()
            raise RuntimeError(f"the model in {self.folder} does not run in ONNX Runtime Web: {found['error']}")
        return found


def _end(process: subprocess.Popen[str], scratch: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.communicate()
    scratch.cleanup()
