"""What a result was made with."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions() -> dict[str, str]:
    """Of Python, the platform and the packages that results depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in ("broadsight", "torch", "torchvision", "timm", "accelerate", "numpy", "pillow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def commit() -> str | None:
    """Commit of the checkout this file belongs to, ending in -dirty if changed; None for an installed package."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        # an environment may lie inside some other project's repository, whose commit says nothing about us
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True, timeout=10)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
