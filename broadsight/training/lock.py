"""One writer a folder: a lock that the kernel lifts when the process that holds it ends, however it ends."""

# Not filelock's: our file names its holder, and forked workers do not keep the lock of a killed process

import errno
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
PATIENCE = 0.5  # seconds that a process which was killed may take to end

_held: set[int] = set()


class Busy(ValueError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Hold a folder; `Busy` if another process does. One that cannot be written to, or has no locks, is not locked."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    _held.add(handle)
    try:
        _take(handle, folder, "wait for it or stop it")
        _name(handle, f"{os.getpid()} {socket.gethostname()}\n")
        try:
            yield
        finally:
            _name(handle, "")
    finally:
        if handle in _held:  # not in a process that was forked meanwhile
            _held.discard(handle)
            os.close(handle)  # which lifts the lock


def refuse_if_held(folder: Path) -> None:
    """`Busy` if another process holds a folder; nothing is written."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        _take(handle, folder, "choose another --out")
    finally:
        os.close(handle)


def _take(handle: int, folder: Path, advice: str) -> None:
    """Take the lock, waiting a moment for it."""
    end = time.monotonic() + PATIENCE
    while not _free(handle):
        if time.monotonic() >= end:
            os.lseek(handle, 0, os.SEEK_SET)
            number, _, host = os.read(handle, 300).decode("utf-8", "replace").strip().partition(" ")
            elsewhere = f" on {host}" if host != socket.gethostname() else ""
            holder = f"process {number}{elsewhere}" if number.isdecimal() else "another process"
            raise Busy(f"{folder} is being written by {holder}; {advice}, nothing was changed")
        time.sleep(0.05)


def _free(handle: int) -> bool:
    """Whether the lock could be had; where there are no locks, it always can."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # far away, since others cannot read what is locked
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # ty: ignore[missing-attribute]
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK)
    return True


def _name(handle: int, text: str) -> None:
    """Name the holder in the file, if the disk has room for that."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, text.encode())


def _let_go() -> None:
    """In a forked process: a lock belongs to all who have the file open, and workers may outlive us."""
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
