"""The machine that something is measured on: what it is, and how fast it can be."""

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..inspection.precision import DTYPES
from ..provenance import header, machine
from .settings import Settings

# Prefixes of the environment variables that change what is measured
VARIABLES = {
    "memory_variables": ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "MIMALLOC_", "TCMALLOC_", "JEMALLOC", "PYTORCH_"),
    "thread_variables": ("OMP_", "KMP_", "GOMP_", "MKL_"),
}


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Describe the machine, its load, and the environment variables that a timing depends on."""
    found = {**header(), **machine(), "device": "cpu", "load_before": load()}
    if settings.device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(settings.device)
    for key, prefixes in VARIABLES.items():
        found[key] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    return found


def gemm_peak(device: str, precision: str, sides: Sequence[int], repeats: int = 4, seconds: float = 3.0) -> float:
    """FLOP per second of the fastest square product; none is begun after `seconds`: an emulated type is slow."""
    best, started = 0.0, time.perf_counter()
    for side in sides:
        a, b = torch.randn(2, side, side).to(device, DTYPES[precision])
        for _ in range(repeats):  # the first one warms up; being slower, it never counts
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b)
            synchronize(device)
            end = time.perf_counter()
            best = max(best, 2 * side**3 / (end - start))
            if end - started > seconds:
                return best
    return best


@contextmanager
def fixed_threads(threads: int) -> Generator[None, None, None]:
    """Set torch's number of threads while the `with` lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def load() -> list[float] | None:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None
