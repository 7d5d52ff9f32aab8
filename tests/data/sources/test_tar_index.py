"""Tars that claim or hold more than anybody wants: refused in a line, in no time, with nothing left behind."""

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources import resolve, tar_index
from broadsight.data.sources.tar import open_tars
from tests.refusals import refused

from ..reading import counts, png

pytestmark = pytest.mark.usefixtures("cache")


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def tar_of(content: dict[str, bytes], more: bytes = b"") -> bytes:
    """The bytes of a tar; `more` are put behind its members."""
    blocks = [header(name, len(data)) + data + bytes(-len(data) % 512) for name, data in content.items()]
    return b"".join(blocks) + more + bytes(1024)


GOOD = {f"{name}/{number}.png": png(number) for name in "ab" for number in range(3)}


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("compress, name", [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")])
def test_compressed__beyond_the_limit(tmp_path, cache, monkeypatch, compress, name):
    monkeypatch.setattr(tar_index, "LEAST", 1 << 20)
    path = tmp_path / f"bomb.tar.{name}"
    path.write_bytes(compress(tar_of(GOOD, header("a/9.png", 3 << 20) + bytes(3 << 20))))
    assert path.stat().st_size < 1 << 14
    what = rf"^{path} unpacks to more than 1 MB \(50 times its size, 1 MB at least\); if that is meant, set BROADSIGHT_"
    refused(what, resolve, path)
    assert left_in(cache) == []
    monkeypatch.setenv("BROADSIGHT_UNPACK_GB", "0.1")
    assert sum(counts(resolve(str(path)))) == 7


def test_compressed__as_much_as_the_disk_has_and_by_what_can_be_read(tmp_path, cache, monkeypatch):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(tar_of(GOOD)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=tar_index.LEFT + 1000))
    refused(r"more than .*tars has room for \(0 MB beside the last 1\.0 GB\); set", resolve, path)
    assert left_in(cache) == []
    for given in ("much", "0", "-1", "nan", "1e400"):
        monkeypatch.setenv("BROADSIGHT_UNPACK_GB", given)
        refused(f"BROADSIGHT_UNPACK_GB={given}; expected gigabytes, such as 20$", resolve, path)
    path.write_bytes(tar_index.ZSTANDARD + bytes(2000))
    refused(r"x.tar.gz is compressed by zstd, which is not read here; unpack it, or use", resolve, path)


LINK = header("././@LongLink", 2, tarfile.GNUTYPE_LONGNAME) + b"x\0".ljust(512, b"\0")
PAX = [header("x", size, tarfile.XHDTYPE) for size in (-1024, 2**40)]
LONG = header("x", 2**40, tarfile.GNUTYPE_LONGNAME)
SIZES = [header("a/9.png", size) for size in (-512, -(2**40), 2**63, 2**70)]
NAMES = ["back", "far back", "2^63", "2^70", "pax back", "pax", "long name", "chain"]


@pytest.mark.parametrize("more", [*SIZES, *PAX, LONG, 3000 * LINK], ids=NAMES)
def test_headers__that_claim_anything_are_damage(tmp_path, more):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(GOOD, more))
    refused(r"^\S+x.tar is damaged or no tar: .*; write or fetch it again$", open_tars, [path], 3, tmp_path / "cache")


def test_images__that_are_said_to_be_large_are_not_read(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(GOOD, header("b/9.png", 2**32)))
    with path.open("r+b") as file:
        file.truncate(2**32 + 2**20)  # a hole: takes no room
    source = open_tars([path], 3, tmp_path / "cache")["all"].source
    refused(r"^x.tar:b/9.png: a file of 4.0 GB; up to 2 GB are read$", source.open, 6, error=UnreadableImage)
    with path.open("r+b") as file:
        file.truncate(int(source.offsets[5]) + 10)  # somebody has cut it since
    refused(r"the tar ends after 10 of \d+ bytes$", source.open, 5, error=UnreadableImage)
    assert source.open(4).getpixel((0, 0)) == (1, 1, 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this platform")
@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.csv", "x.json", "x"])
def test_pipes__are_no_data(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(rf"^{tmp_path / name} is a pipe, not a file or folder; give ", resolve, tmp_path / name)
    refused("", open_tars, [tmp_path / name], 3, tmp_path / "cache", error=(ValueError, FileNotFoundError))
