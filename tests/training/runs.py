"""Small runs for the tests of training: images, requests, what a run leaves behind, and ways to kill one."""

import hashlib
import multiprocessing
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from broadsight.training.checkpoints import newest
from broadsight.training.lock import LOCK
from broadsight.training.request import Request
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder

# Three updates an epoch, so that a line of the metrics covers two or one of them.
QUICK = dict(epochs=2, batch_size=8, fit_batch=False, image_size=32, warmup_epochs=1)


def new_processes() -> multiprocessing.context.BaseContext:
    """Starts processes that have torch imported, without forking this one and whatever its threads hold."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["broadsight.models", "broadsight.training.processes"])
    return context


class Killed(BaseException):
    """SIGKILL: no handler may stop it."""


def draw_images(folder: Path, classes: str = "abcd", train: int = 6, val: int = 2) -> Path:
    random = np.random.default_rng(0)
    for part, many in (("train", train), ("val", val)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(many):
                pixels = random.integers(0, 255, (36, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def small(data: Path, out: Path, *, changes: dict[str, Any] | None = None, **fields: Any) -> Request:
    """What the runs of the tests are asked for, but for `fields`."""
    common: dict[str, Any] = dict(data=str(data), out=str(out), model="test_vit", log_every=2)
    common |= dict(workers=0, threads=1, device="cpu", report=False) | fields
    return Request(**common, set=QUICK | (changes or {}))


def again(folder: Path, **fields: Any) -> Request:
    """What is asked for to continue the run in a folder: nothing but that."""
    return Request(**(dict(out=str(folder), workers=0, threads=1, device="cpu", report=False) | fields))


def command(data: Path, out: Path, more: str = "") -> list[str]:
    """What `small` asks for as a user types it, but for the batch."""
    common = "--model test_vit --size 32 --workers 0 --threads 1 --device cpu"
    return ["train", str(data), "--out", str(out), *shlex.split(f"{common} {more}")]


def resuming(folder: Path) -> list[str]:
    return shlex.split(f"train --resume --out '{folder}' --workers 0 --threads 1 --device cpu")


def wait_for(moment: Callable[[], Any], seconds: float = 60.0, ended: Callable[[], Any] = lambda: None) -> Any:
    """Wait until something is true, which it never will be once a process has `ended`, as its text says."""
    until = time.monotonic() + seconds
    while not (found := moment()):
        assert not (said := ended()), said
        assert time.monotonic() < until, f"nothing after {seconds} s"
        time.sleep(0.01)
    return found


def lines_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The metrics of a run, of one kind or all."""
    return [line for line in RunFolder(folder).metrics() if kind in (None, line["kind"])]


def kill(request: Request, left: Path, owner: Any, name: str, call: int = 1, *, after: bool = False, resume=False):
    """Run until the `call`-th call of owner.name, or the moment after it, and put what is on the disk then into `left`.

    Other handlers of the exception may tidy up `request.out`, which SIGKILL would leave them no time for.
    """
    whole, calls = getattr(owner, name), count(1)

    def dying(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == call
        result = None if now and not after else whole(*args, **kwargs)
        if now:
            shutil.copytree(request.out, left)
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            train(replace(request, resume=resume))
    return replace(request, out=str(left))


def left_by(folder: Path) -> dict[str, Any]:
    """All that two runs to the same result must have in common, to the last bit."""
    checkpoint = newest(folder / "last")
    assert checkpoint is not None
    files = [folder / "model.safetensors", folder / "metrics.jsonl"]
    files += [checkpoint / name for name in ("model.safetensors", "ema.safetensors", "progress.json")]
    files = [file for file in files if file.exists()]
    found: dict[str, Any] = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    for name in ("model.safetensors", "ema.safetensors"):
        if (checkpoint / name).exists():
            found[f"tensors of {name}"] = {k: _digest(v) for k, v in load_file(checkpoint / name).items()}
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    return found | {"optimizer": _plain(optimizer)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _digest(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _digest(value: torch.Tensor) -> tuple[Any, ...]:
    data = value.detach().contiguous().flatten().view(torch.uint8) if value.numel() else value
    return (tuple(value.shape), str(value.dtype), hashlib.sha256(data.numpy().tobytes()).hexdigest())


def everything_in(folder: Path) -> dict[str, Any]:
    """Every file and folder with its bytes and the time of its last change, but for the lock."""
    paths = [path for path in [folder, *sorted(folder.rglob("*"))] if path.name != LOCK]
    contents = ((path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in paths)
    return {str(path.relative_to(folder)): content for path, content in zip(paths, contents, strict=True)}


class Moments:
    """Copies of a folder as it was before every change that Python makes to it, the equal ones once."""

    _watching: "Moments | None" = None
    _hooked = False

    def __init__(self, folder: Path, into: Path):
        self.folder, self.into = folder, into
        self.copies: list[Path] = []
        self.causes: list[str] = []
        self._seen: set[Any] = set()

    @contextmanager
    def watch(self) -> Iterator["Moments"]:
        if not Moments._hooked:  # a hook stays for as long as the interpreter
            sys.addaudithook(Moments._notice)
            Moments._hooked = True
        Moments._watching = self
        try:
            yield self
        finally:
            Moments._watching = None

    @staticmethod
    def _notice(event: str, arguments: tuple[Any, ...]) -> None:
        moments = Moments._watching
        if moments is None or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        path = str(arguments[0])
        if not path.startswith(str(moments.folder)) or "/events" in path or not moments.folder.is_dir():
            return
        Moments._watching = None  # copying opens files too
        moments._keep(f"{event} {Path(path).relative_to(moments.folder)}")
        Moments._watching = moments

    def _keep(self, cause: str) -> None:
        files = [path for path in sorted(self.folder.rglob("*")) if "events" not in path.parts]
        state = tuple((str(path), path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns)) for path in files)
        if state not in self._seen:
            self._seen.add(state)
            self.copies.append(self.into / f"{len(self.copies):03d}")
            self.causes.append(cause)
            shutil.copytree(self.folder, self.copies[-1], ignore=shutil.ignore_patterns("events"))
