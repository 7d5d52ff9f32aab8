"""The page of a report: header, contents, every section that has something to say, and images inside the file."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from ..visual import html
from ..visual.canvas import CaptionedImage
from . import colours, sections
from . import curves as plotted

KINDS = {"run": "Training run", "evaluation": "Evaluation"}
# In the order in which they are read. The key is the section's id, and says in `absent` why the section is not there.
SECTIONS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("sections.yaml").read_text("utf-8"))
SIDE, LARGE = 224, 960  # pixels of the longer side of an image at most, and of one that shows what was found in it
TINY = 64  # up to here an image is kept exactly, and enlarged with its pixels visible


def render(
    record: Mapping[str, Any],
    *,
    curves: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] = (),
    mistakes: Sequence[CaptionedImage] = (),
    samples: Sequence[CaptionedImage] = (),
    findings: Sequence[CaptionedImage] = (),
) -> str:
    """Write a report as one HTML file that loads nothing from anywhere. The same data give the same text.

    Args:
        record: What is known of the run or the evaluation, as the package's own text lists it; only `title` must be.
        curves: The lines of `metrics.jsonl`; of several runs, by their names.
        mistakes, samples, findings: Images that were taken for another class, as they were seen in training, and with
            what was found in them beside the truth.
    """
    if not record.get("title"):
        raise ValueError("a report needs a title; expected record['title'], e.g. 'resnet18 on photos'")
    given = ("beside", "class_figures", "per_class", "confusion", "skipped", "facts")
    bodies: dict[str, Any] = {section: getattr(sections, section)(record) for section in given}
    bodies |= {name: getattr(plotted, name)(record) for name in ("calibration", "suites")}
    bodies |= {"curves": plotted.curves(curves), "figures": sections.figures(record, SECTIONS)}
    bodies |= {"mistakes": gallery(mistakes), "samples": gallery(samples), "findings": gallery(findings, LARGE)}
    bodies |= {name: record.get(name) for name in ("twins", "runs")}
    absent = record.get("absent") or {}
    there = [key for key in SECTIONS if bodies[key] or key in absent]
    shown = [dict(key=key, title=SECTIONS[key], body=bodies[key], absent=absent.get(key)) for key in there]
    script, look = (Path(__file__).with_name(name).read_text("utf-8") for name in ("sort.js", "style.css"))
    return html.render(
        "report/page",
        record=record,
        kind=KINDS.get(str(record.get("kind")), "Report"),
        version=(record.get("versions") or {}).get("broadsight"),
        sections=shown,
        style=f"{colours.style()}\n{look}",
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def gallery(images: Sequence[CaptionedImage], side: int = SIDE) -> dict[str, Any]:
    """Images of a gallery, encoded; a side beyond the usual makes a wide grid of large ones."""
    shown = []
    for one in images:
        image = shrunk(one.image, side)
        tiny, (width, height) = max(image.size) <= TINY, image.size
        options: dict[str, Any] = dict(form="PNG") if tiny else dict(form="JPEG", quality=82)
        about = dict(tiny=tiny, width=width, height=height, alt=one.alt, caption=one.caption.splitlines() or [""])
        shown.append(dict(src=html.data_uri(image, optimize=True, **options), **about))
    return dict(images=shown, wide=side > SIDE) if shown else {}


def shrunk(image: Image.Image, side: int = SIDE) -> Image.Image:
    """Scale an image to at most `side` pixels wide and high, in RGB; what is transparent becomes white."""
    if image.mode.startswith("I;16") or image.mode in "IF":
        low, high = (float(value) for value in image.getextrema())  # ty: ignore[invalid-argument-type]
        scale = 255 / (high - low) if high > low else 0
        image = image.convert("F").point(lambda value: value * scale - low * scale).convert("L")
    transparent = image.has_transparency_data
    image = image.convert("RGBA" if transparent else "RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    if transparent:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image
