"""What a harness of this folder looks out for while broadsight reads a stranger's bytes."""

import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

CANARY = "broadsight-canary"  # in the name of whatever no file of a stranger may touch
STARTING = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect")
STARTING += ("socket.getaddrinfo", "ctypes.dlopen", "shutil.rmtree")
FOLLOWED = ("open", "os.listdir", "os.scandir", "os.remove", "os.mkdir", "os.rename")
MEMORY = 1.5e9  # bytes that one reading may add to the most that the process ever had
PATIENCE = 60.0  # seconds

_watched: list[str] | None = None
_installed = False


class Violation(AssertionError):
    """Something was executed, read, taken or raised that must not be."""


@contextmanager
def watch() -> Generator[None, None, None]:
    """Nothing is started, connected to or touched by the canary's name within; nothing takes long or much memory."""
    global _watched, _installed
    if not _installed:
        sys.addaudithook(_hear)
        _installed = True
    heard: list[str] = []
    _watched = heard
    before, began = _peak(), time.monotonic()
    try:
        yield
    finally:
        _watched = None
        if heard:
            raise Violation(f"while it was read: {heard[0]}")
    if _peak() - before > MEMORY:
        raise Violation(f"{(_peak() - before) / 1e9:.1f} GB were taken")
    if time.monotonic() - began > PATIENCE:
        raise Violation(f"it took {time.monotonic() - began:.0f} seconds")


def refused(call: Callable[[], Any]) -> str | None:
    """What a call says if it refuses, in one line; None if it does what it should."""
    try:
        with watch():
            call()
    except (ValueError, FileNotFoundError, RuntimeError, FileExistsError) as error:
        said = str(error)
        if not said or "\n" in said or len(said) > 2000:
            raise Violation(f"refused by {type(error).__name__}, but not in one line: {said[:200]!r}") from error
        return said
    except Violation:
        raise
    except BaseException as error:
        raise Violation(f"{type(error).__name__}: {str(error)[:200]}") from error
    return None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event in STARTING or (event in FOLLOWED and arguments and CANARY in str(arguments[0])):
        _watched.append(f"{event} {str(arguments)[:100]}")


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
