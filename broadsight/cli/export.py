"""The command that ships a model: export."""

from typing import TYPE_CHECKING

from .. import api
from ..deployment.request import Request
from ..errors import printable
from .parser import DONE

if TYPE_CHECKING:
    from ..deployment.run import Exported


def export(request: Request) -> int:
    """Export, and say how the artefact compares with the model."""
    found = api.export(request, progress=True)
    if request.json != "-":
        for line in _lines(found, request):
            print(printable(line))
    return DONE


def _lines(found: "Exported", request: Request) -> list[str]:
    """What a user wants to know of an export."""
    agreement, image = found.agreement, found.description.image
    batch = "any number of images" if image["any_batch"] else "one image at a time"
    sides = "any size" if image["any_size"] else f"{image['height']} x {image['width']} pixels"
    same = "" if agreement.same_class is None else f"; the same class for {agreement.same_class:.0%}"
    lines = [
        f"{found.path}: {found.bytes / 1e6:.1f} MB, {batch} of {sides}, written in {found.seconds:.0f} s",
        f"max error to torch {agreement.largest:.2e}, {agreement.relative:.2e} of the largest output (limit "
        f"{request.tolerance:g}), on {agreement.images} {found.shown}{same}",
    ]
    if agreement.relative > request.tolerance:
        lines.append(
            f"note: these weights magnify rounding: torch differs from itself by {agreement.rounding:.2e} in single "
            "precision against double, so that no artefact can come closer; training mends that"
        )
    if found.findings is not None:
        lines.append(_decoded(found.description.task, found.findings))
    if found.int8 is not None:
        lines += found.int8["lines"]
    if found.times is not None:
        times, plural = found.times, "s" if request.threads > 1 else ""
        lines.append(
            f"one image: torch {times.torch_ms.median:.1f} ms, {request.format}{' int8' if found.int8 else ''} "
            f"{times.artefact_ms.median:.1f} ms, {times.speedup.median:.2f} times as fast "
            f"(±{times.speedup.spread:.0%}, {request.rounds} rounds, {request.threads} thread{plural})"
        )
    return lines


def _decoded(task: str, findings: dict[str, float]) -> str:
    """How far apart findings are, which are boxes, classes of pixels or keypoints."""
    what = {"segment": "pixels", "keypoints": "keypoints"}.get(task, "objects")
    lead = f"decoded: {findings['differing']:.2%} of the {what} differ"
    return lead if task == "segment" else f"{lead}, the others by at most {findings['pixels']:.2g} pixels"
