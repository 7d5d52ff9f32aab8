"""Tars, whole and mutated, through all that is done with them: indexed, divided into classes, their images read.

`one` takes bytes and raises only for a violation: an error that is no ValueError of one line, or a file written
anywhere but into the cache. `seeds` are tars to begin from.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tempfile
from pathlib import Path

from PIL import Image

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources.tar import open_tars


def one(data: bytes) -> None:
    """Open a tar and read all of its images.

    Raises:
        AssertionError: A message is not a line, something was left behind, or more is found than can be there.
        Exception: Any that is not a refusal.
    """
    limit = os.environ.get("BROADSIGHT_UNPACK_GB")
    os.environ["BROADSIGHT_UNPACK_GB"] = "0.03"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data", "x.tar")
        path.parent.mkdir()
        path.write_bytes(data)
        try:
            parts = open_tars([path], 3, Path(folder, "cache"))
            for part in parts.values():
                for row in range(len(part.source)):
                    try:
                        part.source.open(row)
                    except UnreadableImage as error:
                        assert "\n" not in str(error)
        except ValueError as error:
            assert str(error) and "\n" not in str(error), f"a reason of one line, not {error!r}"
        finally:
            if limit is None:
                del os.environ["BROADSIGHT_UNPACK_GB"]
            else:
                os.environ["BROADSIGHT_UNPACK_GB"] = limit
        assert [found.name for found in path.parent.iterdir()] == ["x.tar"], "something was written beside the tar"
        kept = [found for found in Path(folder, "cache").rglob("*") if found.is_file()]
        assert not [found for found in kept if found.suffix == ".part"], "a part of a file was left behind"
        assert {found.parent.name for found in kept} <= {"tars", "indices"}, f"written elsewhere: {kept}"


def seeds() -> list[bytes]:
    """Tars of class folders and shards in all forms, and those that once did harm."""
    images = {f"{name}/{number}.png": _image(number) for name in "ab" for number in range(3)}
    shard = {f"{number}.{kind}": data for number in range(3) for kind, data in (("png", _image(9)), ("cls", b"1"))}
    long = {f"a/{'x' * 150}.png": _image(1), "b/ä.png": _image(2)}
    plain = [
        _tar(content, form)
        for content in (images, shard, long)
        for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)
        if not (content is long and form == tarfile.USTAR_FORMAT)
    ]
    odd = [
        _header("a/9.png", -512),
        _header("x", -1024, tarfile.XHDTYPE),
        _header("x", 2**40, tarfile.XHDTYPE),
        _header("a/9.png", 2**63),
        _header("a/9.png", 2**70),
        _header("../../up.png", 0),
        _header("/etc/root.png", 0),
        _header("a/link.png", 0, tarfile.SYMTYPE),
        _header("a/device.png", 0, tarfile.CHRTYPE),
        _header("a/sparse.png", 512, tarfile.GNUTYPE_SPARSE) + bytes(512),
        2000 * (_header("././@LongLink", 2, tarfile.GNUTYPE_LONGNAME) + b"x\0".ljust(512, b"\0")),
    ]
    members = _tar(images, tarfile.GNU_FORMAT).rstrip(b"\0")
    members += bytes(-len(members) % 512)
    harmful = [members + more + bytes(1024) for more in odd]
    bomb = members + _header("a/9.png", 34 << 20) + bytes(34 << 20) + bytes(1024)
    packed = [pack(data) for pack in (gzip.compress, bz2.compress, lzma.compress) for data in (plain[0], bomb)]
    return plain + harmful + packed + [b"", bytes(10_240), b"no tar"]


def _tar(content: dict[str, bytes], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def _image(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 255 - value)).save(file, "PNG")
    return file.getvalue()
