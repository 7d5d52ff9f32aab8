"""Tars of class folders and WebDataset shards: read by index, cached, shared by processes, and never extracted."""

import io
import multiprocessing
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources import Source, resolve, tar_index
from broadsight.data.sources import tar as tar_source
from broadsight.data.sources.tar import ShardSource, expanded
from broadsight.data.view import View, labels_of
from tests.refusals import refused

from ..reading import counts, everything, fill, grey, greys, png, put, rows, said, shared

pytestmark = pytest.mark.usefixtures("cache")


def write(path: Path, content: dict[str, bytes], mode: str = "w", form: int = tarfile.DEFAULT_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def classes(*names: str, count: int = 4, top: str = "", start: int = 0) -> dict[str, bytes]:
    shades = {
        (name, number): start + 20 * place + number for place, name in enumerate(names) for number in range(count)
    }
    return {f"{top}{name}/{number}.png": png(shade) for (name, number), shade in shades.items()}


@pytest.mark.parametrize(
    ("mode", "suffix"), [("w", "tar"), ("w:gz", "tar.gz"), ("w:gz", "tgz"), ("w:bz2", "tar.bz2"), ("w:xz", "tar.xz")]
)
@pytest.mark.parametrize("top", ["", "./", "set/", "./deep/er/"])
def test_tar__with_parts(tmp_path, mode, suffix, top):
    content = classes("b", "a", top=f"{top}train/") | classes("b", count=2, top=f"{top}val/", start=100)
    splits = resolve(str(write(tmp_path / f"x.{suffix}", content, mode)))
    plain = f"x.{suffix}:{top.removeprefix('./')}"
    assert splits.classes == splits.val.classes == ("a", "b")
    assert rows(splits.train) == {f"{plain}train/{name}/{number}.png": name for name in "ab" for number in range(4)}
    assert greys(splits.train) == [20, 21, 22, 23, 0, 1, 2, 3]
    assert labels_of(splits.val).tolist() == [1, 1] and greys(splits.val) == [100, 101]
    assert said(splits, "is read from an unpacked copy") == (mode != "w") and splits.description["kind"] == "tar"


def test_tar__hold_out_and_single_top_folder_and_a_class_called_train(tmp_path):
    splits = resolve(str(write(tmp_path / "x.tar", classes("a", "b", count=10, top="photos/"))), split=0.3)
    assert splits.classes == ("a", "b") and counts(splits) == (14, 6)
    places = [name[:-4].split("/")[1:] for name in rows(splits.val)]
    assert greys(splits.val) == [20 * "ab".index(name) + int(number) for name, number in places]
    assert resolve(str(write(tmp_path / "y.tar", classes("train", "car")))).classes == ("car", "train")


def test_tar__two_of_them_or_with_a_folder_and_parts_not_used(tmp_path):
    train = write(tmp_path / "train.tar", classes("a", "b", top="train/"))
    val = write(tmp_path / "val.tar.gz", classes("b", count=2, top="val/"), "w:gz")
    for splits in (resolve(str(train), val=str(val)), resolve(str(tmp_path))):
        assert counts(splits) == (8, 2) and labels_of(splits.val).tolist() == [1, 1]
    put(tmp_path / "folder" / "b" / "x.png", 7)
    splits = resolve(str(train), val=str(tmp_path / "folder"))
    assert labels_of(splits.val).tolist() == [1] and greys(splits.val) == [7]
    content = classes("a", "b", top="train/") | classes("a", "b", top="val/") | classes("a", top="test/")
    assert said(resolve(str(write(tmp_path / "y.tar", content))), "not used", "test/")


def test_tar__names_of_all_kinds(tmp_path):
    long = "l" * 180 + "/" + "m" * 180 + ".PNG"
    content = {f"ü ß/{name}": png(1) for name in ("ö.png", "a b.png", "deep/er/x.png", long)}
    content |= {f"b/{name}": png(2) for name in ("1.png", "._1.png", ".DS_Store", "readme.txt")}
    content |= {"__MACOSX/b/._1.png": b"", "b/2.png": png(2), "loose.png": png(3)}
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        splits = resolve(write(tmp_path / f"{form}.tar", content, form=form), split=0.5)
        names = {name.partition(":")[2] for name in everything(splits)}
        assert names == {"ü ß/ö.png", "ü ß/a b.png", "ü ß/deep/er/x.png", f"ü ß/{long}", "b/1.png", "b/2.png"}
        assert said(splits, "files that are no images are ignored: b/readme.txt")
        assert said(splits, "images outside class folders are ignored: loose.png")
        assert {*greys(splits.train)} == {*greys(splits.val)} == {1, 2}


def test_tar__evil_members_are_refused_and_nothing_is_extracted(tmp_path, cache):
    victim = tmp_path / "victim.png"
    path = write(tmp_path / "in" / "x.tar", classes("a", "b"))
    with tarfile.open(path, "a") as tar:
        out = ("../../victim.png", "/etc/evil.png", "a/../../../victim.png", str(victim))
        for kind, name, target in (
            *((tarfile.REGTYPE, name, "") for name in out),
            (tarfile.SYMTYPE, "a/link.png", "/etc/passwd"),
            (tarfile.LNKTYPE, "a/hard.png", "../../victim.png"),
            *((kind, f"a/{number}.png", "") for number, kind in enumerate((tarfile.FIFOTYPE, tarfile.CHRTYPE))),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(png(9)) if name in out else 0
            tar.addfile(member, io.BytesIO(png(9)))
    before = {*tmp_path.rglob("*")}
    splits = resolve(str(path), split=0.5)
    assert sum(counts(splits)) == 8 and len(greys(splits.train)) == 4
    assert said(splits, "links and names that lead out of the tar are ignored: ../../victim.png", "and 3 more")
    new = {*tmp_path.rglob("*")} - before
    assert all(cache in (one, *one.parents) for one in new) and not victim.exists()


def test_tar__errors(tmp_path):
    for content, words in (
        ({"a/readme.txt": b"x"}, r"^no images in .*x\.tar; expected folders named after classes"),
        ({"1.png": png(1), "2.png": png(2)}, "holds 2 images but no class folders; put the images of each class"),
        (classes("a"), "has one class only, 'a'; a classifier needs two$"),
        (classes("a", "b", top="val/"), r"has a part to validate, .*x\.tar:val, but none to train on"),
    ):
        refused(words, resolve, write(tmp_path / "x.tar", content))
    refused(r"did you mean .*x\.tar\?", resolve, tmp_path / "xx.tar", error=FileNotFoundError)
    for data in (b"", b"this is text, not a tar" * 100):
        (tmp_path / "x.tar").write_bytes(data)
        refused(r"x\.tar is damaged or no tar: ", resolve, tmp_path / "x.tar")


@pytest.mark.parametrize("cut", [700, 5000, -10300])
def test_tar__cut_short_or_damaged_in_the_middle(tmp_path, cut):
    path = write(tmp_path / "x.tar", classes("a", "b"))
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:cut])
    refused(r"x\.tar is damaged or no tar: .*; write or fetch it again$", resolve, path)
    data[4 * 1024 : 4 * 1024 + 512] = b"\x07" * 512  # a header; tarfile would take this for the end
    path.write_bytes(data)
    refused(r"damaged or no tar: no header at byte 4,096; write or fetch it again$", resolve, path)


def test_tar__damaged_archive_leaves_nothing_behind(tmp_path, cache):
    path = write(tmp_path / "x.tar.gz", classes("a", "b", count=50), "w:gz")
    path.write_bytes(path.read_bytes()[:-40])
    refused(r"x\.tar\.gz is damaged: .*; write or fetch it again$", resolve, path)
    assert [one for one in cache.rglob("*") if one.is_file()] == []


def test_tar__changed_after_it_was_indexed(tmp_path):
    path = write(tmp_path / "x.tar", classes("a", "b"))
    source = resolve(str(path)).train
    path.write_bytes(path.read_bytes()[:700])
    words = r"^x\.tar:b/3\.png: the tar ends after 0 of \d+ bytes$"
    refused(words, source.open, len(source) - 1, error=UnreadableImage)
    path.unlink()
    copy = pickle.loads(pickle.dumps(source))
    refused(r"^x\.tar:a/\d\.png: no such file or directory$", copy.open, 0, error=UnreadableImage)


def test_cache__index_is_made_once(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "x.tar.gz", classes("a", "b"), "w:gz")
    first = resolve(str(path))
    assert sorted(one.suffix for one in cache.rglob("*") if one.is_file()) == [".npz", ".tar"]
    for name in ("scanned", "whole_file"):  # not called again
        monkeypatch.setattr(tar_index, name, None)
    again = resolve(str(path))
    assert rows(again.train) == rows(first.train) and again.description == first.description
    assert greys(again.train) == greys(first.train)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_cache__goes_stale_with_the_tar(tmp_path, mode):
    path = tmp_path / "x.tar"  # a compressed one is known by its content
    resolve(str(write(path, classes("a", "b"), mode)))
    write(path, classes("c", "d", "e", start=100), mode)
    splits = resolve(str(path))
    assert splits.classes == ("c", "d", "e") and grey(splits.train, 0) >= 100
    time = path.stat().st_mtime_ns
    write(path, classes("f", "g", "h", start=100), mode)  # of the same size, but later
    os.utime(path, ns=(time + 1, time + 1))
    assert resolve(str(path)).classes == ("f", "g", "h")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", None])
def test_cache__damaged_index_is_made_again(tmp_path, cache, content):
    path = write(tmp_path / "x.tar", classes("a", "b"))
    expected = rows(resolve(str(path)).train)
    (index,) = (cache / "indices").iterdir()
    if content is None:  # what numpy would have to unpickle, which could run anything
        np.savez(index, text=np.array([print], object))
    else:
        index.write_bytes(content)
    assert rows(resolve(str(path)).train) == expected


def test_cache__not_writable(tmp_path, cache, monkeypatch):
    cache.write_text("a file where the folder should be")
    assert len(resolve(str(write(tmp_path / "x.tar", classes("a", "b")))).train) == 6  # the index is a convenience
    packed = write(tmp_path / "x.tar.gz", classes("a", "b"), "w:gz")
    refused(r"cannot be unpacked into .*; set BROADSIGHT_CACHE to a folder with room", resolve, packed)
    assert len(resolve(str(packed), cache=tmp_path / "other").train) == 6


def read_often(source: Source, put=list) -> list[int]:
    return put([shade for _ in range(10) for shade in greys(source)])


def test_readers__two_processes_at_once_and_a_pickle_without_files(tmp_path):
    source = resolve(str(write(tmp_path / "x.tar", classes("a", "b", "c", count=20)))).train
    expected = read_often(source)
    context = multiprocessing.get_context("fork")  # which shares the open file; a copy by pickle opens its own
    out, copy = context.Queue(), pickle.loads(pickle.dumps(source))
    assert source.source.files and not copy.source.files and rows(copy) == rows(source)
    workers = [context.Process(target=read_often, args=(one, out.put)) for one in (source, copy)]
    for worker in workers:
        worker.start()
    assert [out.get(timeout=60) for _ in workers] == [expected, expected]
    for worker in workers:
        worker.join()


def test_readers__threads_and_more_tars_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_source, "OPEN_FILES", 2)
    for number in range(6):
        shard(tmp_path / f"{number}.tar", {str(row): row % 2 for row in range(4)}, start=10 * number)
    source = resolve(str(tmp_path), split=0.1).train
    expected = read_often(source)
    assert len(source.source.files) == 2
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read_often, [source] * 4)) == [expected] * 4


def shard(path: Path, labels: dict[str, int], start: int = 0) -> Path:
    content = {}
    for place, (key, label) in enumerate(labels.items()):
        content |= {f"{key}.png": png(start + place), f"{key}.cls": str(label).encode()}
    return write(path, content)


def test_shards__by_file_name(tmp_path):
    shard(tmp_path / "train-000.tar", {"a": 0, "b": 2, "d/c": 1})
    shard(tmp_path / "train-001.tar", {"a": 2}, start=50)
    shard(tmp_path / "val-000.tar", {"z": 2}, start=90)
    for data in (str(tmp_path), f"wds/{tmp_path}", f"{tmp_path}/{{train,val}}-*.tar"):
        splits = resolve(data)
        assert splits.description["kind"] == "shards" and splits.classes == ("0", "1", "2")
        members = {"000.tar:a": "0", "000.tar:b": "2", "000.tar:d/c": "1", "001.tar:a": "2"}
        assert rows(splits.train) == {f"train-{member}.png": label for member, label in members.items()}
        assert (greys(splits.train), splits.val.label(0), greys(splits.val)) == ([0, 1, 2, 50], 2, [90])


def test_shards__by_folder_and_with_names(tmp_path):
    shard(tmp_path / "train" / "0.tar", {"a": 0, "b": 1})
    shard(tmp_path / "validation" / "0.tar", {"c": 1})
    (tmp_path / "classes.txt").write_text("cät\ndog\nemu\n", "utf-8")
    splits = resolve(str(tmp_path))
    assert splits.classes == ("cät", "dog", "emu") and splits.val.label(0) == 1
    assert said(splits, "classes without images to train: emu (of 3 classes)")
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "_info.json").write_text('{"classes": ["x", "y"]}')
    assert resolve(str(tmp_path)).classes == ("x", "y")
    (tmp_path / "_info.json").write_text('{"classes": ["x"]}')
    refused(r"_info\.json names 1 classes, but .* has label 1; add the names$", resolve, tmp_path)


def test_shards__a_single_one_and_hold_out(tmp_path):
    labels = {f"{row:03}": row % 4 for row in range(40)}
    splits = resolve(str(shard(tmp_path / "x.tar", labels)), split=0.3)
    assert counts(splits) == (28, 12)
    for source in (splits.train, splits.val):
        numbers = [int(name[len("x.tar:") : -4]) for name in rows(source)]
        assert greys(source) == numbers and labels_of(source).tolist() == [number % 4 for number in numbers]


def test_shards__json_labels_other_members_and_incomplete_samples(tmp_path):
    content = {"a.jpg": png(1), "a.json": b'{"label": 1, "caption": "x"}', "a.txt": b"caption"}
    content |= {"b.seg.png": png(99), "b.webp": png(2), "b.json": b'{"cls": 0}', "c.jpg": png(3), "d.cls": b"1"}
    content |= {"e.jpg": png(4), "e.cls": b"zebra", "f.jpg": png(5), "f.json": b"{"}
    content |= {"g.JPEG": png(6), "g.CLS": b" 1\n", "h.png": png(7), "h.cls": b"0"}
    splits = resolve(str(write(tmp_path / "x.tar", content)), split=0.5)
    found = everything(splits)
    assert found == {"x.tar:a.jpg": "1", "x.tar:b.webp": "0", "x.tar:g.JPEG": "1", "x.tar:h.png": "0"}
    what = "x.tar:c (no label), x.tar:d (no image), x.tar:e (no label), x.tar:f (no label)"
    assert said(splits, f"samples skipped: {what}")


def test_shards__written_by_webdataset(tmp_path):
    wds = pytest.importorskip("webdataset")
    with wds.ShardWriter(str(tmp_path / "train-%04d.tar"), maxcount=7, verbose=0) as sink:
        for row in range(20):
            image = Image.new("RGB", (4, 3), (row, row, row))
            sink.write({"__key__": f"s{row:04}", "png": image, "cls": row % 3, "json": {"width": 4}})
    splits = resolve(f"{tmp_path}/train-{{0000..0002}}.tar", split=0.2)
    both = [(source, row) for source in (splits.train, splits.val) for row in range(len(source))]
    found = sorted((int(s.name(r)[-8:-4]), s.label(r), grey(s, r)) for s, r in both)
    assert found == [(row, row % 3, row) for row in range(20)]


def test_shards__order_is_random_but_local(tmp_path):
    for number in range(6):
        shard(tmp_path / f"{number}.tar", {f"{row}": row % 2 for row in range(10)})
    source = resolve(str(tmp_path), split=0.2).train
    kept = source.source.shards[source.rows]

    def shuffled(seed: int, at_once: int = 2) -> np.ndarray:
        return source.shuffled(torch.Generator().manual_seed(seed), shards_at_once=at_once).numpy()

    order = shuffled(0)
    assert (type(source.source), order.dtype, sorted(order)) == (ShardSource, np.int64, [*range(48)])
    shards = kept[order].reshape(3, 16)  # windows of two shards of eight
    assert [len(set(window)) for window in shards.tolist()] == [2, 2, 2]
    assert any((np.diff(window) != 0).sum() > 3 for window in shards)  # mixed within
    assert np.array_equal(order, shuffled(0)) and not np.array_equal(order, shuffled(1))
    assert len({tuple(np.unique(kept[shuffled(seed)][:16])) for seed in range(5)}) > 1  # another window comes first
    assert len(set(kept[shuffled(0, 16)][:12].tolist())) > 2
    backwards = View(source.source, source.rows[::-1])  # rows in any order
    assert sorted(backwards.shuffled(torch.Generator(), 1).tolist()) == list(range(48))


def test_shards__or_class_folders_is_told_by_content(tmp_path):
    shard(tmp_path / "x" / "0.tar", {"cat/1": 0, "dog/1": 1, "dog/2": 1})  # folders in keys make no class
    assert resolve(str(tmp_path / "x")).classes == ("0", "1")
    write(tmp_path / "y" / "0.tar", classes("cat", "dog"))
    assert resolve(str(tmp_path / "y")).classes == ("cat", "dog")
    splits = resolve(str(fill(tmp_path / "y", a=2, b=2)))  # tars lying beside class folders
    assert splits.classes == ("a", "b") and said(splits, "files that are no images are ignored: 0.tar")
    write(tmp_path / "x" / "1.tar", classes("cat", "dog"))
    refused(r"^1\.tar has no labels beside its images as the other shards have", resolve, tmp_path / "x")


def test_shards__of_a_pattern(tmp_path):
    """An empty one among them, folders, a root, and those that are not there."""
    shard(tmp_path / "a" / "0.tar", {str(row): row % 2 for row in range(8)})
    write(tmp_path / "b" / "1.tar", {})
    assert sum(counts(resolve(f"{tmp_path}/{{a,b}}"))) == 8
    for data in ("wds/a", "wds/a/*.tar"):
        assert len(resolve(data, root=str(tmp_path), split=0.25).val) == 2
    (tmp_path / "b" / "1.tar").unlink()
    for pattern, words in (
        ("a/{0..2}.tar", r"^no such shard: .*/1\.tar; it was expected from .*/\{0\.\.2\}\.tar$"),
        ("q*.tar", r"^no such shard: .*/q\*\.tar"),
        ("b*", r"^no shards match .*/b\*; expected \.tar files$"),
        ("{5..2}.tar", "^no shards match"),
    ):
        refused(words, resolve, f"{tmp_path}/{pattern}", error=FileNotFoundError)


def test_shards__labels_that_are_no_classes(tmp_path):
    words = r"label 2000000000 is no class; expected numbers from 0$"
    refused(words, resolve, shard(tmp_path / "x.tar", {"a": 0, "b": 2000000000}))
    refused(r"has one class only, '3'; a classifier", resolve, shard(tmp_path / "x.tar", {"a": 3, "b": 3}))


def test_expanded():
    assert expanded("a{00..02}b") == ["a00b", "a01b", "a02b"]
    assert expanded("{x,y}-{8..10}") == ["x-8", "x-9", "x-10", "y-8", "y-9", "y-10"]
    assert expanded("plain") == ["plain"]
    refused(r"names 10,000,000,000 shards; expected up to 1,048,576$", expanded, "x{0..9999999999}.tar")


def test_cifar__from_its_tars():
    train, val = shared("cifar10_train.tar.gz"), shared("cifar10_val.tar.gz")
    splits = resolve(str(train), val=str(val))
    assert counts(splits) == (50000, 5000)
    assert splits.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    assert np.bincount(labels_of(splits.val)).tolist() == [500] * 10
    place = {name.partition(":")[2]: row for row, name in enumerate(rows(splits.val))}
    with tarfile.open(val) as members:
        for number, member in enumerate(members):
            if number % 500 == 250:
                row = place[member.name]
                assert (
                    splits.val.open(row).tobytes() == Image.open(members.extractfile(member)).convert("RGB").tobytes()
                )
                assert splits.classes[splits.val.label(row)] == member.name.split("/")[1]
