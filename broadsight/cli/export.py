"""The command that ships a model: export."""

from .. import api
from ..deployment.request import Request
from ..errors import printable
from .parser import DONE


def export(request: Request) -> int:
    """Export, and say how the artefact compares with the model."""
    found = api.export(request, progress=True)
    if request.json == "-":
        return DONE
    agreement, image, precision = found.agreement, found.description.image, found.description.precision
    limit = agreement.limit(request.tolerance)
    if found.computes_in != precision:
        precision += f" (this machine's runtime computes in {found.computes_in})"
    batch = "any number of images" if image["any_batch"] else "one image at a time"
    sides = "any size" if image["any_size"] else f"{image['height']} x {image['width']} pixels"
    same = "" if agreement.same_class is None else f"; the same class for {agreement.same_class:.0%}"
    far = f"{agreement.largest:.2e}, {agreement.relative:.2e} of the largest output (limit {limit:.3g})"
    lines = [
        f"{found.path}: {found.bytes / 1e6:.1f} MB, {precision}, {batch} of {sides}, written in {found.seconds:.0f} s",
        f"max error to torch {far}, on {agreement.images} {found.shown}{same}",
    ]
    if agreement.rounding:
        what = f"torch differs from itself by {agreement.rounding:.2e} in {agreement.precision} against double"
        remedy = "so that no artefact can come closer; training mends that"
        lines.append(f"note: these weights magnify rounding: {what}, {remedy}")
    if found.findings is not None:
        task, findings = found.description.task, found.findings
        what = {"segment": "pixels", "keypoints": "keypoints"}.get(task, "objects")
        others = "" if task == "segment" else f", the others by at most {findings['pixels']:.2g} pixels"
        lines.append(f"decoded: {findings['differing']:.2%} of the {what} differ{others}")
    if found.int8 is not None:
        lines += found.int8["lines"]
    if found.times is not None:
        torch, artefact, speedup = found.times.torch_ms, found.times.artefact_ms, found.times.speedup
        runtime = f"{request.format}{' int8' if found.int8 else ''}"
        how = f"±{speedup.spread:.0%}, {request.rounds} rounds, {request.threads} thread{'s' * (request.threads > 1)}"
        both = f"torch {torch.median:.1f} ms, {runtime} {artefact.median:.1f} ms"
        lines.append(f"one image: {both}, {speedup.median:.2f} times as fast ({how})")
    for line in lines:
        print(printable(line))
    return DONE
