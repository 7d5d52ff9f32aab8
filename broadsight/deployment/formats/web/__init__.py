"""A folder with one page that classifies images in the browser: no server code, no connection, no build step."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .... import __version__
from ....files import file_digest, whole_folder
from ....weights.reading import inside
from ...session import Description, Session
from .. import Format, register
from ..onnx import INPUT, check_onnx, session_of

SOURCE = files("broadsight.deployment.formats.web")
PAGE = ("index.html", "style.css", "resampling.js", "images.js", "model.js", "page.js")
MANIFEST = "manifest.js"
STEMS = dict(glue="runtime/glue", wasm="runtime/wasm", model="model/part")  # of the names of scripts
OPENING, CLOSING = "Bundle.manifest = ", ";\n"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
PART_NAME = re.compile(r"(runtime/(glue|wasm)|model/part)-\d{3,4}\.js")
PART_SCRIPT = re.compile(r'Bundle\.part\("([\w/.-]+)", "([A-Za-z0-9+/=]*)"\);\n')
PART = 6 * 2**20  # bytes of a file that go into one script, a few so that the page can tell how far it is
DAMAGED = (OSError, ValueError, EOFError, KeyError, TypeError, IndexError, zlib.error)  # by what a folder may hold

# ONNX Runtime Web: from npm, checked and kept, or from a folder
PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
SCRIPT, GLUE, WASM = "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
DIGESTS = {  # sha256 of what VERSION has
    SCRIPT: "faece07e84faa9001f5104bbe4e5c70861d06cb2376a0dea1fa0ad33a67adc81",
    GLUE: "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    WASM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
PATIENCE = 600  # seconds for a download of 33 MB
BY_HAND = f"run `npm install {PACKAGE}@{VERSION}` where there is npm, then give --ort-web node_modules/{PACKAGE}/dist"


@register
class Web(Format):
    name, runtime = "web", "ONNX Runtime Web"
    packages, extra = ("onnx", "onnxscript", "onnxruntime"), "export"
    sizes = False
    int8, int8_batches = "web-int8", True

    def write(self, program: Any, description: Description, path: Path, *, ort_web: str | Path | None = None) -> None:
        """The folder of a page, complete or not at all, of the path of an ONNX file and the folder of ONNX Runtime Web
        (None: from cache or npm). As a page opened by double-click may load nothing but scripts, the model, the
        WebAssembly and the module that starts it are scripts too: gzip in base64, in parts."""
        check_folder(path)
        runtime = require(description, ort_web)
        with whole_folder(path, replace=True) as unfinished:
            (unfinished / "runtime").mkdir()
            (unfinished / "model").mkdir()
            copied: dict[str, Any] = {name: SOURCE / name for name in PAGE}
            copied[f"runtime/{SCRIPT}"] = runtime / SCRIPT
            copied["runtime/LICENSE.txt"] = SOURCE / "LICENSE-onnxruntime.txt"
            for name, source in copied.items():
                (unfinished / name).write_bytes(source.read_bytes())
            parts = dict(glue=runtime / GLUE, wasm=runtime / WASM, model=Path(program))
            packed = {name: _pack(unfinished, STEMS[name], file.read_bytes()) for name, file in parts.items()}
            said: dict[str, Any] = {"made": f"broadsight {__version__}, onnxruntime-web {version(runtime)}"}
            said |= {"description": json.loads(description.to_json()), "packed": packed}
            said["files"] = sorted([*_below(unfinished), MANIFEST])
            (unfinished / MANIFEST).write_text(manifest_text(said), encoding="utf-8")

    def load(self, path: Path, threads: int | None) -> Session:
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
    title, (channels, height, width) = description.title, description.shape
    way, crop, means = said["interpolation"], said["crop"], len(said["mean"])
    known = ", ".join(INTERPOLATIONS)
    for fits, words in (
        (way in INTERPOLATIONS, f"interpolation={way} of {title}; a page can do {known}"),
        (channels in (1, 3), f"{title} takes images of {channels} channels; a page can give 1 (grey) or 3"),
        (height == width == crop, f"{title} takes {height} x {width} pixels, but a crop of {crop} is made"),
        (means == len(said["std"]) == channels, f"{title} has {means} means for {channels} channels"),
        (isinstance(said["resize"], int), f"resize={said['resize']} of {title}; expected pixels of the shorter side"),
    ):
        if not fits:
            raise ValueError(words)
    return find_runtime(ort_web)


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
    parts, level = [], 6 if len(content) < 2**24 else 1  # weights hardly get smaller by more
    for place, start in enumerate(range(0, len(content), PART)):
        name = f"{stem}-{place:03d}.js"  # without a time stamp inside: the same model gives the same file
        text = base64.b64encode(gzip.compress(content[start : start + PART], level, mtime=0)).decode()
        (folder / name).write_text(f'Bundle.part("{name}", "{text}");\n', encoding="ascii")
        parts.append(name)
    return {"parts": parts, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def unpacked(folder: str | Path, parts: Sequence[str]) -> bytes:
    """A file that `_pack` made scripts of; a ValueError if a part is no such script, or larger than parts are."""
    found = []
    for name in parts:
        script = inside(folder, name) if PART_NAME.fullmatch(name) else None
        if script is not None and script.stat().st_size > 2 * PART:
            raise ValueError(f"{name} is larger than a part")
        said = PART_SCRIPT.fullmatch(script.read_text(encoding="ascii")) if script is not None else None
        if said is None or said[1] != name:
            raise ValueError(f"{name[:80]!r} is no part of a page")
        opened = zlib.decompressobj(31)  # gzip; no more than a part has, whatever it was packed from
        found.append(opened.decompress(base64.b64decode(said[2], validate=True), PART + 1))
        if len(found[-1]) > PART or not opened.eof:
            raise ValueError(f"{name} is damaged")
    return b"".join(found)


def find_runtime(given: str | Path | None = None) -> Path:
    """A folder with SCRIPT, GLUE and WASM: the given one, such as node_modules/onnxruntime-web/dist, whatever its
    version; or else those of VERSION from the cache, or from npm."""
    if given is None:
        from ....data.sources import cache_folder

        kept = cache_folder() / f"{PACKAGE}-{VERSION}"
        if not _is_whole(kept):
            _fetch(kept)
        return kept
    for place in (Path(given), Path(given) / "dist"):
        if all((place / name).is_file() for name in DIGESTS):
            if version(place) == "unknown":
                raise ValueError(f"{place / SCRIPT} is not that of {PACKAGE}; give the folder dist of {PACKAGE}")
            return place
    missing = ", ".join(name for name in DIGESTS if not (Path(given) / name).is_file())
    raise ValueError(f"--ort-web {given} has no {missing}; give the folder dist of {PACKAGE}")


def version(folder: Path) -> str:
    """What the script in a folder says that it is."""
    with open(folder / SCRIPT, encoding="utf-8", errors="replace") as file:
        said = re.search(r"ONNX Runtime Web v(\S+)", file.read(400))
    return said[1] if said else "unknown"


def _is_whole(folder: Path) -> bool:
    try:
        return all(file_digest(folder / name) == digest for name, digest in DIGESTS.items())
    except OSError:
        return False


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"the format web needs {PACKAGE}, and there is no npm to fetch it; {BY_HAND}")
    try:
        with whole_folder(folder, replace=True) as unfinished, tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(_packed(npm, Path(scratch))) as archive:  # whose digest we know
                opened: Any = archive.extractfile
                for name in DIGESTS:
                    (unfinished / name).write_bytes(opened(f"package/dist/{name}").read())
            if not _is_whole(unfinished):
                raise ValueError(f"the files of {PACKAGE}@{VERSION} are not those that were checked; {BY_HAND}")
    except OSError as error:
        if not _is_whole(folder):  # or somebody else was faster
            what = error.strerror or type(error).__name__
            raise ValueError(f"{PACKAGE} cannot be kept in {folder}: {what.lower()}; {BY_HAND}") from None


def _packed(npm: str, scratch: Path) -> Path:
    """The archive of the package, as npm sends it. Of a failure npm's code, since its words name the address."""
    command, reason = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--loglevel=error"], ""
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            code = re.search(r"npm (?:error|ERR!) code (\w+)", done.stderr)
            reason = code[1] if code else "it failed"
    except subprocess.TimeoutExpired:
        reason = f"no answer within {PATIENCE} seconds"
    except OSError as error:
        reason = str(error.strerror)
    found = list(scratch.glob("*.tgz"))
    if reason or len(found) != 1:
        raise ValueError(f"npm cannot fetch {PACKAGE}@{VERSION} ({reason or 'no archive came'}); {BY_HAND}")
    if f"sha512-{base64.b64encode(hashlib.sha512(found[0].read_bytes()).digest()).decode()}" != INTEGRITY:
        raise ValueError(f"npm gave another {PACKAGE}@{VERSION} than the one that was checked; {BY_HAND}")
    return found[0]
