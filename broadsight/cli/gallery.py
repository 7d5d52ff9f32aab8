"""The command that makes a page of what models look at: gallery."""

import sys
from pathlib import Path

from ..errors import printable
from ..explanation.request import GalleryRequest
from ..visual.terminal import note, progress_bar
from .parser import DONE


def gallery(request: GalleryRequest) -> int:
    """Make the page, and name the images that could not be read."""
    from ..explanation.gallery import gallery as run

    with progress_bar() as progress:
        record = run(request, progress, note)
    models, page = record["models"], Path(request.out)
    for name, reason in {name: why for one in models for name, why in one["failed"].items()}.items():
        print(f"broadsight: {printable(name)} cannot be read: {printable(reason)}", file=sys.stderr)
    sheets = sum(len(one["images"]) for one in models)
    print(f"gallery: {page} ({sheets} sheets of {len(models)} models in {page.with_suffix('')})")
    return DONE
