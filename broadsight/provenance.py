"""Where a result comes from: the command, versions, the commit, the machine. One header for every record."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def header(command: str = "") -> dict[str, Any]:
    """What every record that we write says of its making: the command if one was typed, versions, commit and time."""
    return {"command": command, "versions": versions(), "commit": commit(), "time": now()}


def now() -> str:
    """The time, to the second, with the zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def machine() -> dict[str, Any]:
    """The computer that something is measured on: system, processor, cores and threads."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "system": platform.platform(),
        "cpu": name or platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": sorted(name for name, there in torch.cpu.get_capabilities().items() if there is True),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }


def versions() -> dict[str, str]:
    """Of Python, the platform and the packages that results depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in ("broadsight", "torch", "torchvision", "timm", "accelerate", "numpy", "pillow"):
        try:  # a loaded module knows more of its build than the package does
            found[package] = getattr(sys.modules.get(package), "__version__", None) or version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def commit() -> str | None:
    """Commit of the checkout this file belongs to, ending in -dirty if changed; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # an environment may lie inside some other project's repository, whose commit says nothing about us
        ours = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(ours, check=True, capture_output=True, timeout=10)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
