"""Images in tars of class folders and WebDataset shards: read in place, so nothing is written where a tar says."""

import contextlib
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..contents import of_bytes
from ..decoding import MOST_BYTES, UnreadableImage, decode
from .registry import TARS, Options, register_source
from .sample_table import PARTS, Listed, Part, Parts, by_name, in_order, is_hidden, is_image, noted, part_names, some
from .tar_index import Index, index_of, row_and_label
from .walking import entries, holds_images, is_folder, no_classes, parts_in

MOST_CLASSES = MOST_SHARDS = 1 << 20
OPEN_FILES = 64


class TarSource(Listed):
    """Members of tars: of each sample its tar, and its image's row in that tar's index; labels are as for `Listed`."""

    def __init__(self, indices: Sequence[Index], members: Sequence[tuple[int, int]], *labelled: Any):
        super().__init__([indices[tar].names[row] for tar, row in members], *labelled)
        self.tars, self.shown = tuple(index.tar for index in indices), tuple(index.shown for index in indices)
        self.shards, rows = np.array(members, np.int32).reshape(-1, 2).T
        places = np.cumsum([0, *(len(index.names) for index in indices)])[self.shards] + rows
        self.offsets = np.concatenate([index.offsets for index in indices])[places]
        self.sizes = np.concatenate([index.sizes for index in indices])[places]
        self.files: dict[int, IO[bytes]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"files": {}}

    def name(self, index: int) -> str:
        return f"{self.shown[self.shards[index]]}:{self.names[index]}"

    def image(self, index: int) -> Image.Image:
        size = int(self.sizes[index])
        if size > MOST_BYTES:
            raise UnreadableImage(f"a file of {size / 2**30:,.1f} GB; up to {MOST_BYTES / 2**30:g} GB are read")
        try:
            file = self.opened(int(self.shards[index]))  # held by name: another thread may close all but what is held
            there = os.fstat(file.fileno()).st_size - int(self.offsets[index])  # what a header claims may not be
            # has no position that others could move
            data = os.pread(file.fileno(), max(0, min(size, there)), int(self.offsets[index]))
        except OSError as error:
            raise UnreadableImage((error.strerror or str(error)).lower()) from None
        if len(data) < size:
            raise UnreadableImage(f"the tar ends after {len(data)} of {size} bytes")
        return decode(data, self.channels)

    def vouch(self, index: int, content: bool) -> bytes:
        try:
            file = self.opened(int(self.shards[index])) if content else None
            return of_bytes(int(self.sizes[index]), file, int(self.offsets[index]))
        except OSError:
            return b"unreadable"

    def opened(self, shard: int) -> IO[bytes]:
        file = self.files.get(shard)
        if file is None:
            for oldest in list(self.files)[: 1 - OPEN_FILES]:
                self.files.pop(oldest, None)
            file = self.files[shard] = open(self.tars[shard], "rb", buffering=0)  # noqa: SIM115  it stays open
        return file


class ShardSource(TarSource):
    """WebDataset shards, by index: shuffling, resuming and sharing among processes are exact."""

    kind = "shards"

    def shuffled(self, generator: torch.Generator, shards_at_once: int = 16, rows: np.ndarray | None = None) -> Tensor:
        """All indices (N,), or places among some rows, shuffled within windows of shards in any order."""
        own = self.shards if rows is None else self.shards[rows]
        order = np.argsort(own, kind="stable")
        bounds = np.searchsorted(own[order], np.arange(len(self.tars) + 1))
        shards = torch.randperm(len(self.tars), generator=generator).tolist()
        windows = []
        for start in range(0, len(shards), shards_at_once):
            runs = [order[bounds[shard] : bounds[shard + 1]] for shard in shards[start : start + shards_at_once]]
            window = torch.from_numpy(np.concatenate(runs))
            windows.append(window[torch.randperm(len(window), generator=generator)])
        return torch.cat(windows) if windows else torch.empty(0, dtype=torch.long)


def matching(pattern: str) -> list[Path]:
    """The files that a pattern with braces and wildcards names."""
    paths: list[Path] = []
    for one in expanded(pattern):
        found = in_order(glob.glob(one)) if glob.has_magic(one) else [one] * os.path.exists(one)
        if not found:
            raise FileNotFoundError(f"no such shard: {one}; it was expected from {pattern}")
        paths += [tar for path in map(Path, found) for tar in (tars_in(path) if path.is_dir() else [path])]
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
        if last - first >= MOST_SHARDS:
            raise ValueError(f"{pattern} names {last - first + 1:,} shards; expected up to {MOST_SHARDS:,}")
        choices = [f"{number:0{len(span[1])}}" for number in range(first, last + 1)]
    else:
        choices = braces[1].split(",")
    start, end = pattern[: braces.start()], pattern[braces.end() :]
    return [after for choice in choices for after in expanded(f"{start}{choice}{end}")]


def tars_in(folder: Path) -> list[Path]:
    files = [entry.name for entry in entries(folder) if entry.name.lower().endswith(TARS) and entry.is_file()]
    return [folder / name for name in in_order(files) if not name.startswith(".")]


def tars_of(folder: Path) -> list[Path]:
    """The tars of a folder, or of its train/ and val/; none if folders in it, or these two, hold images."""
    folders, parts = [Path(entry.path) for entry in entries(folder) if is_folder(entry)], parts_in(folder).values()
    for places, others in (([folder], folders), (parts, parts)):
        tars = [tar for place in places for tar in tars_in(place)]
        if tars and not any(map(holds_images, others)):
            return tars
    return []


@register_source("tar", *TARS, claims=tars_of)
def open_tar(data: str, options: Options) -> Parts:
    """A tar, the tars of a folder, or those that a pattern names."""
    path = Path(data)
    paths = tars_of(path) if path.is_dir() else [path] if path.exists() else matching(data)
    return open_tars(paths, options.channels, options.cache)


def open_tars(paths: Sequence[Path], channels: int, cache: Path) -> Parts:
    """Tars as one data set. Their names or folders say which part several are: train-000.tar, val/000.tar."""
    notes: list[str] = []
    parts: Parts = {}
    groups, kinds = by_name(paths), set()
    unused = groups.pop("unused", [])
    for key, tars in groups.items():
        indices = [index_of(path, cache, notes) for path in tars]
        shards = any(index.is_shard for index in indices)
        odd = [index.shown for index in indices if len(index.names) and not index.is_shard]
        if shards and odd:
            raise ValueError(f"{odd[0]} has no labels beside its images as the other shards have; remove or repair it")
        kinds.add(shards)
        if shards:
            parts[key] = part_of_shards(tars, indices, channels)
            continue
        found = parts_of_tars(tars, indices, channels)
        parts |= found if key == "all" else {key: found.get(key) or found.get("all") or next(iter(found.values()))}
    if len(kinds) > 1:
        raise ValueError(f"{paths[0].parent} mixes shards with tars of class folders; give one kind, and val the other")
    first = next(iter(parts.values()))
    first.notes = notes + first.notes + noted("not used, being neither train nor val", [path.name for path in unused])
    return parts


def _place(paths: Sequence[Path], indices: Sequence[Index]) -> tuple[str, list[str]]:
    """The tars in a few words, and a note on what is refused in them."""
    place = some([str(path) for path in paths], 1)
    refused = [name for index in indices for name in index.refused]
    return place, noted(f"{place}: links and names that lead out of the tar are ignored", refused)


def parts_of_tars(paths: Sequence[Path], indices: Sequence[Index], channels: int) -> Parts:
    """Tars of class folders: train/ and val/ in them, below a single top folder or not, or the folders themselves."""
    place, notes = _place(paths, indices)
    every = [(name, tar, row) for tar, index in enumerate(indices) for row, name in enumerate(index.names)]
    seen = [(name.split("/"), tar, row) for name, tar, row in sorted(every)]  # path in the tar, which tar, which member
    seen = [row for row in seen if not any(map(is_hidden, row[0]))]
    rows = [row for row in seen if is_image(row[0][-1])]
    if not rows:
        raise no_classes(place, 0)
    ignored = ["/".join(inner) for inner, _, _ in seen if not is_image(inner[-1])]
    notes += noted(f"{place}: files that are no images are ignored", ignored)
    inside = [inner for inner, _, _ in rows]
    depth, deepest = 0, min(map(len, inside)) - 2
    while depth < deepest and len({inner[depth] for inner in inside}) == 1 and inside[0][depth].lower() not in PARTS:
        depth += 1
    tops = in_order({inner[depth] for inner in inside if len(inner) > depth + 1})
    direct = {inner[depth] for inner in inside if len(inner) == depth + 2}
    called = part_names(tops, lambda train: train not in direct)
    parts: Parts = {}
    for key, top in called.items():
        level = depth + (top is not None)
        chosen = [row for row in rows if top is None or row[0][depth] == top]
        labelled = [row for row in chosen if len(row[0]) > level + 1]
        if not labelled:
            raise no_classes(place, len(chosen))
        loose = ["/".join(inner) for inner, _, _ in chosen if len(inner) <= level + 1]
        notes += noted(f"{place}: images outside class folders are ignored", loose)
        classes = in_order({inner[level] for inner, _, _ in labelled})
        number = {name: label for label, name in enumerate(classes)}
        labels = [number[inner[level]] for inner, _, _ in labelled]
        source = TarSource(indices, [(tar, member) for _, tar, member in labelled], labels, classes, channels)
        parts[key] = Part(source, place if top is None else f"{place}:{top}")
    if None not in called.values():
        notes += noted(f"not used in {place}", [f"{top}/" for top in tops if top not in called.values()])
    next(iter(parts.values())).notes += notes
    return parts


def part_of_shards(paths: Sequence[Path], indices: Sequence[Index], channels: int) -> Part:
    """Shards as WebDataset writes them: KEY.jpg (or another image) beside KEY.cls or KEY.json with a label."""
    members, labels, skipped = [], [], []
    for shard, index in enumerate(indices):
        for name, rows in index.samples():
            row, label = row_and_label(index, rows)
            if row is None or label is None:
                skipped.append(f"{index.shown}:{name} (no {'image' if row is None else 'label'})")
            else:
                members.append((shard, row))
                labels.append(label)
    place, refused = _place(paths, indices)
    if max(labels) >= MOST_CLASSES:
        raise ValueError(f"{place}: label {max(labels)} is no class; expected numbers from 0")
    classes, file = class_names(paths[0].parent)
    if file is not None and max(labels) >= len(classes):
        raise ValueError(f"{file} names {len(classes)} classes, but {place} has label {max(labels)}; add the names")
    classes = classes or [str(label) for label in range(max(labels) + 1)]
    notes = noted("samples skipped", skipped) + refused
    return Part(ShardSource(indices, members, labels, classes, channels), place, notes)


def class_names(folder: Path) -> tuple[list[str], Path | None]:
    """Names from classes.txt (a line each) or _info.json ("classes") beside the shards or one folder up."""
    files = [near / name for near in (folder, folder.parent) for name in ("classes.txt", "_info.json")]
    for file in filter(Path.is_file, files):
        text = file.read_text("utf-8")
        if file.suffix == ".txt":
            return [line.strip() for line in text.splitlines() if line.strip()], file
        with contextlib.suppress(ValueError):
            info = json.loads(text)
            for key in ("classes", "class_names", "names"):
                if isinstance(info, dict) and isinstance(info.get(key), list):
                    return [str(name) for name in info[key]], file
    return [], None
