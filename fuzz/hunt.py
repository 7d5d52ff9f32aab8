"""One target in a process of its own, bounded in time and memory; the input that breaks it is kept."""

import contextlib
import faulthandler
import hashlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from .mutations import mutated

BATCH = 500  # inputs between two looks at the clock
HANGS = 60  # seconds for one input; the slowest whole ones take about one
MEMORY = 6 << 30  # bytes that a target may take beyond what it has after its imports


def run(name: str, seconds: float, cases: int, number: int, out: Path) -> bool:
    """Hunt in another process, and print how it went; whether every input kept the promise."""
    start, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        current, count = Path(folder, "input"), spawn.Value("q", 0)
        process = spawn.Process(target=_hunt, args=(name, seconds, cases, number, current, count))
        process.start()
        process.join()
        if process.exitcode == 0:
            took = time.monotonic() - start
            print(f"{name}: {count.value:,} inputs, all read or refused as promised, {took:.0f} s", flush=True)
            return True
        data = current.read_bytes() if current.exists() else b""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    kept.write_bytes(data)
    how = f"exit {process.exitcode} after {count.value:,} inputs"
    print(f"{name}: BROKEN ({how}); to see it again: python -m fuzz {name} --input {kept}", flush=True)
    return False


def _hunt(name: str, seconds: float, cases: int, number: int, current: Path, count: Any) -> None:
    """Seeds first, then mutated ones. The process ends with another code than 0 at the first that breaks the target."""
    target = importlib.import_module(f"fuzz.{name}")
    seeds = target.seeds()
    _settle_in()

    def attempt(data: bytes) -> None:
        current.write_bytes(data)  # for the parent, if this process does not live to tell
        faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.stderr)
        try:
            target.one(data)
        finally:
            faulthandler.cancel_dump_traceback_later()
        count.value += 1

    for data in seeds:
        attempt(data)
    end, batch = time.monotonic() + seconds, 0
    while count.value < cases and time.monotonic() < end:

        @seed(number * 1_000_003 + batch)
        @settings(
            max_examples=min(BATCH, cases - count.value),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(mutated(seeds))
        def search(data: bytes) -> None:
            if time.monotonic() < end:
                attempt(data)

        search()
        batch += 1


def _settle_in() -> None:
    """Let no input take the machine's memory, and no library that decodes write its own lines on the terminal.

    Systems without /proc and such limits go without a bound.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY,) * 2)
