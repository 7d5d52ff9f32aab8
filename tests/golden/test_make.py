"""The files of this folder: small, described, and what the originals give."""

import gzip

import pytest

from tests.golden import HERE, ORIGINALS
from tests.golden.make import LIMIT, make

FILES = sorted(path for path in HERE.iterdir() if path.suffix in (".safetensors", ".gz"))


def test_files_are_small():
    assert len(FILES) >= 13 and max(path.stat().st_size for path in FILES) <= LIMIT
    assert sum(path.stat().st_size for path in FILES) <= 3e6


def test_make__writes_these_files(tmp_path):
    if not (ORIGINALS / "golden").exists():
        pytest.skip("the originals are not beside the repository")
    make(ORIGINALS, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [path.name for path in FILES]
    for path in FILES:
        read = gzip.decompress if path.suffix == ".gz" else bytes  # compressed bytes depend on the version of zlib
        assert read((tmp_path / path.name).read_bytes()) == read(path.read_bytes()), path.name
