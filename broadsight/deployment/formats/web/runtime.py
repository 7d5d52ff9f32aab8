"""The files of ONNX Runtime Web that an exported page needs: from npm, checked and kept, or from a folder."""

import base64
import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ....files import file_digest, whole_folder

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="

SCRIPT, GLUE, WASM = "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
DIGESTS = {  # sha256 of what VERSION has
    SCRIPT: "faece07e84faa9001f5104bbe4e5c70861d06cb2376a0dea1fa0ad33a67adc81",
    GLUE: "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    WASM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
UNKNOWN = "unknown"
PATIENCE = 600  # seconds for a download of 33 MB
BY_HAND = f"run `npm install {PACKAGE}@{VERSION}` where there is npm, then give --ort-web node_modules/{PACKAGE}/dist"


def find(given: str | Path | None = None) -> Path:
    """A folder with SCRIPT, GLUE and WASM: the given one, such as node_modules/onnxruntime-web/dist, whatever its
    version; or else those of VERSION from the cache, or from npm."""
    if given is None:
        from ....data.sources import cache_folder

        kept = cache_folder() / f"{PACKAGE}-{VERSION}"
        if not _is_whole(kept):
            _fetch(kept)
        return kept
    given = Path(given)
    for place in (given, given / "dist"):
        if all((place / name).is_file() for name in DIGESTS):
            if version(place) == UNKNOWN:
                raise ValueError(f"{place / SCRIPT} is not that of {PACKAGE}; give the folder dist of {PACKAGE}")
            return place
    missing = [name for name in DIGESTS if not (given / name).is_file()]
    raise ValueError(f"--ort-web {given} has no {', '.join(missing)}; give the folder dist of {PACKAGE}")


def version(folder: Path) -> str:
    """What the script in a folder says that it is."""
    with open(folder / SCRIPT, encoding="utf-8", errors="replace") as file:
        said = re.search(r"ONNX Runtime Web v(\S+)", file.read(400))
    return said[1] if said else UNKNOWN


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
            with tarfile.open(_packed(npm, Path(scratch))) as archive:
                for name in DIGESTS:
                    member = archive.extractfile(f"package/dist/{name}")
                    assert member is not None  # the archive is the one whose digest we know
                    (unfinished / name).write_bytes(member.read())
            if not _is_whole(unfinished):
                raise ValueError(f"the files of {PACKAGE}@{VERSION} are not those that were checked; {BY_HAND}")
    except OSError as error:
        if not _is_whole(folder):  # or somebody else was faster
            what = error.strerror or type(error).__name__
            raise ValueError(f"{PACKAGE} cannot be kept in {folder}: {what.lower()}; {BY_HAND}") from None


def _packed(npm: str, scratch: Path) -> Path:
    """The archive of the package, as npm sends it. Of a failure npm's code, since its words name the address."""
    command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--loglevel=error"]
    reason = ""
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
    digest = base64.b64encode(hashlib.sha512(found[0].read_bytes()).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY:
        raise ValueError(f"npm gave another {PACKAGE}@{VERSION} than the one that was checked; {BY_HAND}")
    return found[0]
