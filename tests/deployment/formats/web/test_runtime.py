"""The browser's runtime comes from npm once, checked, or from a folder; or one line says what to do."""

import base64
import hashlib
import io
import os
import tarfile

import pytest

from broadsight.deployment.formats.web import runtime as web_runtime
from broadsight.deployment.formats.web.runtime import DIGESTS, GLUE, SCRIPT, WASM, find, version
from tests.refusals import refused

FILES = {SCRIPT: b"/*! ONNX Runtime Web v9.8.7 */", GLUE: b"export default 1", WASM: b"\0asm"}


@pytest.fixture
def archive(monkeypatch):
    """What a registry would send, and is known to be right."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as opened:
        for name, content in {**FILES, "other.js": b"not wanted"}.items():
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    monkeypatch.setattr(web_runtime, "INTEGRITY", f"sha512-{digest}")
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(web_runtime, "DIGESTS", sums)
    return packed.getvalue()


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Puts a program called npm where it is found: a shell script. Every call of it leaves a line in `calls`."""
    monkeypatch.setenv("BROADSIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def put(body: str):
        program = tmp_path / "bin" / "npm"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n{body}\n')
        program.chmod(0o755)
        return tmp_path / "calls"

    return put


def test_find__fetched_once_checked_and_kept(tmp_path, npm, archive):
    (tmp_path / "sent").write_bytes(archive)
    calls = npm(f"cp {tmp_path / 'sent'} onnxruntime-web-1.30.0.tgz")
    found = find()
    assert found == tmp_path / "cache" / "onnxruntime-web-1.30.0"
    assert {file.name: file.read_bytes() for file in found.iterdir()} == FILES
    assert find() == found
    assert calls.read_text() == "pack onnxruntime-web@1.30.0 --ignore-scripts --loglevel=error\n"
    assert version(found) == "9.8.7"

    (found / WASM).write_bytes(b"cut short")
    assert find() == found and (found / WASM).read_bytes() == FILES[WASM]
    assert len(calls.read_text().splitlines()) == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.name]


def test_find__another_archive_is_refused(tmp_path, npm, archive):
    (tmp_path / "sent").write_bytes(archive + b"\0")
    npm(f"cp {tmp_path / 'sent'} onnxruntime-web-1.30.0.tgz")
    refused("npm gave another onnxruntime-web@1.30.0 than the one that was checked", find)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("npm error code E404\nnpm error 404 GET https://somewhere.example/x - Not found", "E404"),
        ("npm ERR! code ENOTFOUND\nnpm ERR! network request to https://somewhere.example/x failed", "ENOTFOUND"),
        ("something else", "it failed"),
    ],
)
def test_find__npm_fails_without_naming_whom_it_asked(npm, said, reason):
    npm(f"echo '{said}' >&2; exit 1")
    refused(rf"^npm cannot fetch onnxruntime-web@1.30.0 \({reason}\); run `npm install .*--ort-web [^:]*$", find)


def test_find__npm_is_slow(npm, monkeypatch):
    monkeypatch.setattr(web_runtime, "PATIENCE", 0.2)
    npm("exec sleep 20")
    refused(r"npm cannot fetch .* \(no answer within 0.2 seconds\)", find)


def test_find__no_npm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BROADSIGHT_CACHE", str(tmp_path / "cache"))
    refused("there is no npm to fetch it; run `npm install .* then give --ort-web", find)
    assert not (tmp_path / "cache").exists()


def test_find__given_folder_or_the_one_above(tmp_path):
    folder = tmp_path / "package" / "dist"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    assert find(folder) == find(tmp_path / "package") == folder
    (folder / SCRIPT).write_text("/* something else */")
    words = f"dist/{SCRIPT} is not that of onnxruntime-web; give the folder dist"
    refused(words, find, tmp_path / "package")
    (folder / GLUE).unlink()
    refused(f"--ort-web .*dist has no {GLUE}; give the folder dist of", find, folder)


def test_digests__of_all_files():
    assert set(DIGESTS) == {SCRIPT, GLUE, WASM}
    assert all(len(bytes.fromhex(digest)) == 32 for digest in DIGESTS.values())
