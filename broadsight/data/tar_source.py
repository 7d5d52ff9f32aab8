"""Pictures in tar files, read by index: tars of class folders, and WebDataset shards.

A tar is indexed once: where each member lies and, in a shard, its label. Members are then read in place, so nothing is
ever written to a path that a tar names. Indices and unpacked copies of compressed tars stay in the cache, keyed by the
tar's path, size and time, and are written whole or not at all.
"""

import bz2
import contextlib
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import secrets
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .decoding import UnreadableImage, decode
from .listing import (
    EXTENSIONS,
    TRAIN,
    VAL,
    Listed,
    Names,
    Part,
    Parts,
    by_name,
    in_order,
    is_hidden,
    is_image,
    part_names,
    some,
)

# By its first bytes, whatever its name.
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
DAMAGES = (EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile)

FORMAT = 1  # of the cached index; another number makes the old ones stale
LABEL_BYTES = 1 << 20  # a label file is small; a larger one is something else
MOST_CLASSES = 1 << 20
OPEN_FILES = 64


class TarSource(Listed):
    """Members of tars, each by its place. Goes to other processes as it is: every process opens the tars for itself.

    Args:
        tars: Paths of the uncompressed files.
        shown: What reports call each of them.
        shards: For each sample, which of the tars it is in.
        offsets, sizes: For each sample, where its picture lies, in bytes.
    """

    rows = ("labels", "shards", "offsets", "sizes")

    def __init__(
        self,
        tars: Sequence[str],
        shown: Sequence[str],
        names: Sequence[str],
        labels: Sequence[int] | np.ndarray,
        classes: Sequence[str],
        shards: Sequence[int] | np.ndarray,
        offsets: Sequence[int] | np.ndarray,
        sizes: Sequence[int] | np.ndarray,
        channels: int,
    ):
        super().__init__(names, labels, classes)
        self.tars, self.shown, self.channels = tuple(tars), tuple(shown), channels
        self.shards = np.asarray(shards, np.int32)
        self.offsets = np.asarray(offsets, np.int64)
        self.sizes = np.asarray(sizes, np.int64)
        self.files: dict[int, IO[bytes]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"files": {}}

    def name(self, index: int) -> str:
        return f"{self.shown[self.shards[index]]}:{self.names[index]}"

    def picture(self, index: int) -> Image.Image:
        size = int(self.sizes[index])
        try:
            file = self.file(int(self.shards[index]))  # held by name: another thread may close all but what is held
            data = os.pread(file.fileno(), size, int(self.offsets[index]))  # has no position that others could move
        except OSError as error:
            raise UnreadableImage((error.strerror or str(error)).lower()) from None
        if len(data) < size:
            raise UnreadableImage(f"the tar ends after {len(data)} of {size} bytes")
        return decode(data, self.channels)

    def file(self, shard: int) -> IO[bytes]:
        file = self.files.get(shard)
        if file is None:
            for oldest in list(self.files)[: 1 - OPEN_FILES]:
                self.files.pop(oldest, None)
            file = self.files[shard] = open(self.tars[shard], "rb", buffering=0)  # noqa: SIM115  it stays open
        return file


class ShardSource(TarSource):
    """WebDataset shards, by index: shuffling, resuming and sharing among processes are exact."""

    def shuffled(self, generator: torch.Generator, shards_at_once: int = 16) -> Tensor:
        """All indices (N,) in a random order that reads large data nearly in sequence.

        The order of shards is random, and samples are shuffled within windows of some shards, not across them.
        """
        order = np.argsort(self.shards, kind="stable")
        bounds = np.searchsorted(self.shards[order], np.arange(len(self.tars) + 1))
        shards = torch.randperm(len(self.tars), generator=generator).tolist()
        windows = []
        for start in range(0, len(shards), shards_at_once):
            rows = [order[bounds[shard] : bounds[shard + 1]] for shard in shards[start : start + shards_at_once]]
            window = torch.from_numpy(np.concatenate(rows))
            windows.append(window[torch.randperm(len(window), generator=generator)])
        return torch.cat(windows) if windows else torch.empty(0, dtype=torch.long)


@dataclass
class Index:
    """What is in a tar: its files by name, place and size, and those files' labels (-1: holds none)."""

    tar: str
    shown: str
    names: Names
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    refused: Names

    def samples(self) -> Iterator[tuple[str, dict[str, int]]]:
        """The members as WebDataset groups them: neighbours that share a name up to its first dot, by extension."""

        def stem(member: tuple[int, str]) -> str:
            folder, slash, name = member[1].rpartition("/")
            return folder + slash + name.partition(".")[0]

        for key, members in groupby(enumerate(self.names), stem):
            yield key, {name[len(key) :].lower(): row for row, name in members}

    @cached_property
    def is_shard(self) -> bool:
        """Whether pictures in it have labels beside them."""
        labelled = len(self.labels) and self.labels.max() >= 0
        return bool(labelled) and any(None not in row_and_label(self, rows) for _, rows in self.samples())


def row_and_label(index: Index, rows: dict[str, int]) -> tuple[int | None, int | None]:
    """Of a sample's members, the row of its picture and its label."""
    picture = next((row for extension, row in rows.items() if extension in EXTENSIONS), None)
    labels = [int(index.labels[rows[extension]]) for extension in (".cls", ".json") if extension in rows]
    return picture, next((label for label in labels if label >= 0), None)


def matching(pattern: str) -> list[Path]:
    """The files that a pattern with braces and wildcards names."""
    paths: list[Path] = []
    for one in expanded(pattern):
        found = in_order(glob.glob(one)) if glob.has_magic(one) else [one] * os.path.exists(one)
        if not found:
            raise FileNotFoundError(f"no such shard: {one}; it was expected from {pattern}")
        paths += [path for name in found for path in (tars_in(Path(name)) if os.path.isdir(name) else [Path(name)])]
    if not paths:
        raise FileNotFoundError(f"no shards match {pattern}; expected .tar files")
    return paths


def expanded(pattern: str) -> list[str]:
    """A pattern without its braces: {000..011} counts, {a,b} lists."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if not braces:
        return [pattern]
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
        first, last = int(span[1]), int(span[2])
        choices = [f"{number:0{len(span[1])}}" for number in range(first, last + 1)]
    else:
        choices = braces[1].split(",")
    return [
        after for choice in choices for after in expanded(pattern[: braces.start()] + choice + pattern[braces.end() :])
    ]


def tars_in(folder: Path) -> list[Path]:
    names = in_order(entry.name for entry in os.scandir(folder) if is_tar(entry.name) and entry.is_file())
    return [folder / name for name in names]


def is_tar(name: str) -> bool:
    return bool(re.search(r"\.(tar(\.(gz|bz2|xz))?|tgz|tbz2|txz)$", name.lower())) and not name.startswith(".")


def open_tars(paths: Sequence[Path], channels: int, cache: Path) -> tuple[str, Parts]:
    """Tars as one data set. Several are told apart by their names or folders: train-000.tar, val/000.tar."""
    notes: list[str] = []
    groups = by_name(paths) if len(paths) > 1 else {"all": list(paths)}
    unused = groups.pop("unused", [])
    parts: Parts = {}
    kinds = set()
    for key, tars in groups.items():
        indices = [index_of(path, cache, notes) for path in tars]
        shards = [index for index in indices if index.is_shard]
        odd = [index.shown for index in indices if len(index.names) and not index.is_shard]
        if shards and odd:
            what = f"{odd[0]} has no labels beside its pictures as the other shards have"
            raise ValueError(f"{what}; remove or repair it")
        kinds.add("shards" if shards else "tar")
        if shards:
            parts[key] = part_of_shards(tars, indices, channels)
        else:
            found = parts_of_tars(tars, indices, channels)
            if key == "all":
                parts = found
            else:
                parts[key] = found.get(key) or found.get("all") or next(iter(found.values()))
    if len(kinds) > 1:
        raise ValueError(f"{paths[0].parent} mixes shards with tars of class folders; give one kind, and val the other")
    for part in list(parts.values())[:1]:
        part.notes[:0] = notes
        if unused:
            part.notes.append(f"not used, being neither train nor val: {some([path.name for path in unused])}")
    return kinds.pop(), parts


def parts_of_tars(paths: Sequence[Path], indices: Sequence[Index], channels: int) -> Parts:
    """Tars of class folders: train/ and val/ in them, below a single top folder or not, or the folders themselves."""
    place = some([str(path) for path in paths], 1)
    rows: list[tuple[str, int, int]] = []  # path in the tar, which tar, which member
    ignored, refused = [], []
    for shard, index in enumerate(indices):
        refused += index.refused
        for row, name in enumerate(index.names):
            if any(map(is_hidden, name.split("/"))):
                continue
            if is_image(name.rpartition("/")[2]):
                rows.append((name, shard, row))
            else:
                ignored.append(name)
    if not rows:
        raise ValueError(f"no images in {place}; expected folders named after classes, with images in them")
    rows.sort()
    paths_in = [name.split("/") for name, _, _ in rows]
    depth = 0
    while len({path[depth] for path in paths_in}) == 1 and min(map(len, paths_in)) > depth + 2:
        if paths_in[0][depth].lower() in (*TRAIN, *VAL):
            break
        depth += 1
    tops = in_order({path[depth] for path in paths_in if len(path) > depth + 1})
    direct = {path[depth] for path in paths_in if len(path) == depth + 2}
    called = part_names(tops, lambda train: train not in direct)
    notes = []
    if refused:
        notes.append(f"{place}: links and names that lead out of the tar are ignored: {some(refused)}")
    if ignored:
        notes.append(f"{place}: files that are no images are ignored: {some(ignored)}")
    parts: Parts = {}
    for key, top in called.items():
        level = depth + (top is not None)
        chosen = [at for at, path in enumerate(paths_in) if top is None or path[depth] == top]
        inside = [at for at in chosen if len(paths_in[at]) > level + 1]
        if not inside:
            what = f"{place} holds {len(chosen):,} images but no class folders"
            raise ValueError(f"{what}; put the images of each class into a folder named after it")
        classes = in_order({paths_in[at][level] for at in inside})
        number = {name: label for label, name in enumerate(classes)}
        tar, member = np.array([rows[at][1:] for at in inside], np.int64).T
        source = TarSource(
            [index.tar for index in indices],
            [index.shown for index in indices],
            [rows[at][0] for at in inside],
            [number[paths_in[at][level]] for at in inside],
            classes,
            tar,
            gathered([index.offsets for index in indices], tar, member),
            gathered([index.sizes for index in indices], tar, member),
            channels,
        )
        if loose := [rows[at][0] for at in chosen if len(paths_in[at]) <= level + 1]:
            notes.append(f"{place}: images outside class folders are ignored: {some(loose)}")
        parts[key] = Part(source, place if top is None else f"{place}:{top}", [])
    if None not in called.values() and (others := [f"{top}/" for top in tops if top not in called.values()]):
        notes.append(f"not used in {place}: {some(others)}")
    next(iter(parts.values())).notes += notes
    return parts


def gathered(arrays: Sequence[np.ndarray], which: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The elements at some places of some of several arrays."""
    starts = np.cumsum([0, *map(len, arrays)])
    return np.concatenate(arrays)[starts[which] + place]


def part_of_shards(paths: Sequence[Path], indices: Sequence[Index], channels: int) -> Part:
    """Shards as WebDataset writes them: KEY.jpg (or another picture) beside KEY.cls or KEY.json with a label."""
    names, labels, shards, offsets, sizes, skipped = [], [], [], [], [], []
    for shard, index in enumerate(indices):
        for name, members in index.samples():
            row, label = row_and_label(index, members)
            if row is None or label is None:
                skipped.append(f"{index.shown}:{name} (no {'image' if row is None else 'label'})")
                continue
            names.append(index.names[row])
            labels.append(label)
            shards.append(shard)
            offsets.append(index.offsets[row])
            sizes.append(index.sizes[row])
    place = some([str(path) for path in paths], 1)
    if max(labels) >= MOST_CLASSES:
        raise ValueError(f"{place}: label {max(labels)} is no class; expected numbers from 0")
    classes, file = class_names(paths[0].parent)
    if file is not None and max(labels) >= len(classes):
        raise ValueError(f"{file} names {len(classes)} classes, but {place} has label {max(labels)}; add the names")
    classes = classes or [str(label) for label in range(max(labels) + 1)]
    notes = []
    if skipped:
        notes.append(f"samples skipped: {some(skipped)}")
    if refused := [name for index in indices for name in index.refused]:
        notes.append(f"{place}: links and names that lead out of the tar are ignored: {some(refused)}")
    tars, shown = [index.tar for index in indices], [index.shown for index in indices]
    source = ShardSource(tars, shown, names, labels, classes, shards, offsets, sizes, channels)
    return Part(source, place, notes)


def class_names(folder: Path) -> tuple[list[str], Path | None]:
    """Names from classes.txt (a line each) or _info.json ("classes") beside the shards or one folder up."""
    for near in (folder, folder.parent):
        file = near / "classes.txt"
        if file.is_file():
            return [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()], file
        file = near / "_info.json"
        if file.is_file():
            with contextlib.suppress(ValueError):
                info = json.loads(file.read_text("utf-8"))
                for key in ("classes", "class_names", "names"):
                    if isinstance(info, dict) and isinstance(info.get(key), list):
                        return [str(name) for name in info[key]], file
    return [], None


def index_of(path: Path, cache: Path, notes: list[str]) -> Index:
    """The index of a tar, from the cache where it was made before."""
    tar = unpacked(path, cache, notes)
    kept = cache / "indices" / f"{key_of(path)}.npz"
    try:
        with np.load(kept, allow_pickle=False) as content:
            index = index_from(dict(content), str(tar), path.name)
        if index.offsets.size and (index.offsets + index.sizes).max() > tar.stat().st_size:
            raise ValueError("another tar")
        return index
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        pass  # not made yet, or damaged: made again
    content = scanned(path, tar)
    with contextlib.suppress(OSError):  # it is a convenience: without a place to keep it, it is made every time
        write_whole(kept, lambda file: np.savez(file, allow_pickle=False, **content))
    return index_from(content, str(tar), path.name)


def index_from(content: dict[str, np.ndarray], tar: str, shown: str) -> Index:
    names = Names.of(content["text"], content["ends"])
    refused = Names.of(content["refused_text"], content["refused_ends"])
    return Index(tar, shown, names, content["offsets"], content["sizes"], content["labels"], refused)


def scanned(path: Path, tar: Path) -> dict[str, np.ndarray]:
    """All regular files in a tar; links, devices and names that lead out of it are refused."""
    names, offsets, sizes, labels, refused = [], [], [], [], []
    try:
        # tarfile reads a header at a time; a buffer saves the system calls where members are small
        with open(tar, "rb", buffering=1 << 16) as file, tarfile.open(fileobj=cast(Any, file), mode="r:") as members:
            for member in members:
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse() or name.startswith("/") or ".." in name.split("/"):
                    refused.append(member.name)
                    continue
                names.append(name)
                offsets.append(member.offset_data)
                sizes.append(member.size)
                labels.append(label_in(name, members, member))
                cast(Any, members).members.clear()  # or tarfile keeps an object for each
            file.seek(members.offset)
            if any(file.read(tarfile.BLOCKSIZE)):  # tarfile takes what it cannot read for the end
                raise tarfile.ReadError(f"no header at byte {members.offset:,}")
    except DAMAGES as error:
        raise ValueError(f"{path} is damaged or no tar: {error}; write or fetch it again") from None
    named, left = Names(names), Names(refused)
    return dict(
        text=named.text,
        ends=named.ends,
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
        labels=np.array(labels, np.int32),
        refused_text=left.text,
        refused_ends=left.ends,
    )


def label_in(name: str, members: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The label that a member holds, or -1."""
    kind = os.path.splitext(name)[1].lower()
    if kind not in (".cls", ".json") or member.size > LABEL_BYTES:
        return -1
    file = members.extractfile(member)
    text = file.read() if file else b""
    try:
        value = json.loads(text)
    except ValueError:
        return -1
    if kind == ".json":
        value = next((value[key] for key in ("label", "cls") if key in value), -1) if isinstance(value, dict) else -1
    return value if type(value) is int and 0 <= value < 2**31 else -1


def unpacked(path: Path, cache: Path, notes: list[str]) -> Path:
    """The tar itself, or a copy of a compressed one in the cache: of a compressed file, only the start can be found."""
    with open(path, "rb") as file:
        start = file.read(6)
    opener = next((opener for magic, opener in COMPRESSED.items() if start.startswith(magic)), None)
    if opener is None:
        return path
    copy = cache / "tars" / f"{key_of(path)}.tar"
    if not copy.is_file():

        def write(file: IO[bytes]) -> None:
            with opener(path, "rb") as packed:
                shutil.copyfileobj(cast(IO[bytes], packed), file, 1 << 20)

        try:
            write_whole(copy, write)
        except DAMAGES as error:
            raise ValueError(f"{path} is damaged: {error}; write or fetch it again") from None
        except OSError as error:
            what = f"{path} cannot be unpacked into {copy.parent}: {error.strerror or error}"
            raise ValueError(f"{what}; set BROADSIGHT_CACHE to a folder with room, or unpack it yourself") from None
    notes.append(f"{path.name} is read from an unpacked copy, {copy} ({copy.stat().st_size / 1e6:,.0f} MB)")
    return copy


def key_of(path: Path) -> str:
    """A file name for what is kept about a file, as it is now."""
    now = path.stat()
    text = json.dumps([FORMAT, os.path.realpath(path), now.st_size, now.st_mtime_ns])
    stem = re.sub(r"[^\w.-]", "_", path.name.partition(".")[0], flags=re.ASCII)[:40]
    return f"{stem}-{hashlib.blake2b(text.encode('utf-8', 'surrogateescape'), digest_size=8).hexdigest()}"


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file so that nobody ever sees a part of it, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            write(file)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
